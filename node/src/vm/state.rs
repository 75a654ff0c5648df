//! What one VM's loop holds, by what it is about; what the loop does with it is `run`'s, and that of the files beside it.
//!
//! Not here: what other threads see of it (`shared`).

pub mod agreement;
pub mod backup;
pub mod cold;
pub mod ending;
pub mod hosts;
pub mod primary;
pub mod speculating;
pub mod watched;

use super::care::Care;
use super::event::{LoopEvent, LoopSender};
use super::nics::Nics;
use super::shared::{Host, Shared};
use crate::config::VmConfig;
use agreement::Agreement;
use backup::BackupRole;
use cold::Cold;
use crossbeam_channel::Receiver;
use dunlin_api::{EventKind, FailoverStatus, JoinProblem};
use dunlin_core::output::Output;
use dunlin_core::output::announcements::Announcements;
use dunlin_core::output::gate::Voice;
use dunlin_core::units::{Epoch, ReplicaId};
use dunlin_core::watchdog::Watchdog;
use dunlin_fabric::clock::HostClock;
use dunlin_fabric::group::KeptGroup;
use dunlin_guest::disk::{Fault, Faults};
use ending::Ending;
use hosts::Peers;
use primary::PrimaryRole;
use speculating::{Modes, Speculating};
use std::cell::Cell;
use std::sync::Arc;
use watched::{Ready, Watched};

/// This host's part in running the VM. There is one of it for each VM, and it is not moved about.
#[allow(clippy::large_enum_variant)]
pub enum Role {
    /// None: a witness, or a host that waits to be brought in.
    None,
    /// It runs the VM and speaks for it.
    Primary(PrimaryRole),
    /// It holds, or is getting, the second copy.
    Backup(BackupRole),
}

/// One VM's loop.
pub struct VmLoop {
    pub(super) host: Arc<Host>,
    pub(super) config: Arc<VmConfig>,
    pub(super) me: ReplicaId,
    pub(super) witness: bool,
    pub(super) group: KeptGroup,
    pub(super) peers: Peers,
    pub(super) agreement: Agreement,
    pub(super) cold: Cold,
    pub(super) role: Role,
    pub(super) net: Network,
    pub(super) care: DiskCare,
    pub(super) ending: Ending,
    pub(super) inbox: Inbox,
    pub(super) shown: Shown,
    pub(super) shared: Arc<Shared>,
}

/// The VM's network: what comes from it and goes to it.
pub struct Network {
    pub(super) nics: Option<Nics>,
    pub(super) output: Output,
    /// Only of a VM whose file asks for it, and that is here.
    pub(super) speculating: Option<Box<Speculating>>,
    pub(super) modes: Modes,
    pub(super) announcements: Announcements,
    /// The VM has to wait until its output has left; how often it had to, and when that was told.
    pub(super) output_waits: bool,
    pub(super) waits: u64,
    pub(super) waits_told_us: Option<u64>,
    pub(super) frames_in: u64,
    pub(super) frames_out: u64,
}

/// The VM's disks, beside what a role does with them.
pub struct DiskCare {
    /// When both hosts' are compared.
    pub(super) comparing: Care,
    /// Tests only: what was injected into which disk.
    pub(super) injected: Vec<(usize, Fault)>,
    /// ... and whose faults those are: a machine that has ended may hang in its disk until that is taken back.
    pub(super) faulty: Vec<(usize, Arc<Faults>)>,
}

/// What the loop waits for.
pub struct Inbox {
    pub(super) events: Receiver<LoopEvent>,
    /// Where others send them.
    pub(super) to_loop: LoopSender,
    pub(super) next_session: u64,
    pub(super) born: HostClock,
    pub(super) ready: Ready,
    pub(super) watched: Watched,
}

/// What people are told.
#[derive(Default)]
pub struct Shown {
    pub(super) at_us: u64,
    /// An event was told in this step.
    pub(super) told: Cell<bool>,
    pub(super) failure: Option<String>,
    pub(super) failover: Option<FailoverStatus>,
    /// Why the last join failed, here or on the other host; nothing since one went well.
    pub(super) join_complaint: Option<JoinProblem>,
    /// Whether what should get on does.
    pub(super) watchdog: Watchdog,
}

impl Network {
    /// Of a VM that is not here yet; its output may take so many bytes.
    pub(super) fn new(outbound_bytes: usize) -> Self {
        Self {
            nics: None,
            output: Output::new(Voice::Shut, Epoch(1)).with_budget(outbound_bytes),
            speculating: None,
            modes: Modes::default(),
            announcements: Announcements::default(),
            output_waits: false,
            waits: 0,
            waits_told_us: None,
            frames_in: 0,
            frames_out: 0,
        }
    }
}

impl DiskCare {
    pub(super) fn new(comparing: Care) -> Self {
        Self {
            comparing,
            injected: Vec::new(),
            faulty: Vec::new(),
        }
    }
}

impl Inbox {
    pub(super) fn new(events: Receiver<LoopEvent>, to_loop: LoopSender) -> Self {
        Self {
            events,
            to_loop,
            next_session: 1,
            born: HostClock::begin(),
            ready: Ready::ALL,
            watched: Watched::default(),
        }
    }
}

impl VmLoop {
    /// Microseconds since the loop began; its host may have slept meanwhile.
    pub(super) fn now_us(&self) -> u64 {
        self.inbox.born.now_us()
    }

    pub(super) fn event(&self, kind: EventKind, text: impl Into<String>) {
        self.shown.told.set(true);
        self.host.events.push(&self.config.name, kind, text);
    }

    /// No event, but whoever follows is to look at the status.
    pub(super) fn wake_followers(&self) {
        self.shown.told.set(true);
    }

    pub(super) fn new_session(&mut self) -> u64 {
        self.inbox.next_session += 1;
        self.inbox.next_session
    }
}
