//! What a loop knows of its VM's end beside core's `replica::shutdown`.
//!
//! Not here: what follows from it (`vm::ending`).

use crate::vm::shared::Ended;
use crossbeam_channel::Sender;
use dunlin_api::Answer;
use dunlin_core::replica::shutdown::Shutdown;
use dunlin_guest::qemu::QmpError;
use std::io;

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
    /// Who ordered it, and what follows.
    pub(in crate::vm) shutdown: Shutdown<Sender<Answer>>,
    /// Why its guest was not asked to switch itself off.
    pub(in crate::vm) why_unasked: String,
    /// The loop is to end.
    pub(in crate::vm) ended: Option<Ended>,
    /// What remains of the VM's last machine here is waited for until then, at the end.
    pub(in crate::vm) lets_go_by_us: Option<u64>,
    /// Other hosts where something of it remains, in their words.
    pub(in crate::vm) busy_elsewhere: Vec<String>,
    /// Threads that start a QEMU.
    pub(in crate::vm) starts_under_way: u32,
}

/// Answers those who ordered it.
pub(in crate::vm) fn answer_all(orders: Vec<Sender<Answer>>, answer: &Answer) {
    for reply in orders {
        // Whoever asked may have gone.
        let _ = reply.send(answer.clone());
    }
}
