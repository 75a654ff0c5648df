//! What a loop knows of its VM's end: who ordered it, and how far it is.
//!
//! Not here: what follows from it (`vm::ending`).

use crate::vm::shared::Ended;
use crossbeam_channel::Sender;
use dunlin_api::Answer;
use dunlin_core::units::Term;
use dunlin_guest::qemu::QmpError;
use std::io;

/// A person's order to end the VM everywhere.
pub struct Order {
    pub(in crate::vm) now: bool,
    pub(in crate::vm) until_us: u64,
    pub(in crate::vm) reply: Sender<Answer>,
}

/// Whether the guest of a VM that is to be ended was asked to switch itself off.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GuestAsked {
    /// A thread asks QEMU.
    UnderWay,
    /// Yes.
    Done,
    /// No, in words.
    NotAsked(String),
}

/// Why a guest was not asked to switch itself off.
#[derive(Debug, thiserror::Error)]
pub enum AskGuestError {
    /// QEMU does not take the wish.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// It would be asked there.
    #[error("a thread to ask it: {0}")]
    Thread(#[source] io::Error),
}

/// How far a VM's end is on this host.
#[derive(Default)]
pub struct Ending {
    /// The loop is to end.
    pub(in crate::vm) ended: Option<Ended>,
    /// Who ordered the VM's end, until that can be carried out.
    pub(in crate::vm) orders: Vec<Order>,
    /// Whether its guest was asked first.
    pub(in crate::vm) guest_asked: Option<GuestAsked>,
    /// The end was proposed, in that term.
    pub(in crate::vm) down_proposed: Option<Term>,
    /// A thread tells the other hosts of the VM's end.
    pub(in crate::vm) tells_end: bool,
    /// The end is agreed, and is to be believed at this time even if nobody says so.
    pub(in crate::vm) forgets_at_us: Option<u64>,
    /// What remains of the VM's last machine here is waited for until then, at the end.
    pub(in crate::vm) lets_go_by_us: Option<u64>,
    /// Other hosts where something of it remains, in their words.
    pub(in crate::vm) busy_elsewhere: Vec<String>,
    /// Threads that start a QEMU.
    pub(in crate::vm) starts_under_way: u32,
}
