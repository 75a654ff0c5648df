//! What a backup holds: its copy of the VM, its session, the sync that lies here, and the take-over under way.
//!
//! Not here: what is done with it (`vm::backup`).

use crate::vm::disks::IdleWatch;
use crate::vm::machine::Machine;
use crate::vm::session::jobs::Jobs;
use crate::vm::session::link::Closer;
use crate::vm::session::talker::Talker;
use crate::vm::session::waiting::Waiting;
use bytes::Bytes;
use dunlin_api::{FailoverStatus, State};
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::backup::{BackupEpochs, Phase};
use dunlin_core::replica::leadership::Leadership;
use dunlin_core::replica::sync::backup::Word;
use dunlin_core::sync::tenure::Tenure;
use dunlin_core::units::{Epoch, Index};
use dunlin_core::waits::Wait;
use dunlin_core::watchdog::Flow;
use dunlin_fabric::link::Stream;
use std::sync::Arc;
use std::time::Duration;

/// A backup.
pub struct BackupRole {
    pub(in crate::vm) session: u64,
    pub(in crate::vm) tenure: Tenure,
    pub(in crate::vm) machine: Option<Arc<Machine>>,
    pub(in crate::vm) stream: Option<Stream>,
    pub(in crate::vm) jobs: Option<Jobs<Word>>,
    pub(in crate::vm) closer: Option<Closer>,
    pub(in crate::vm) talker: Option<Talker>,
    pub(in crate::vm) waiting: Waiting,
    /// What holds in this epoch, and how far a sync is.
    pub(in crate::vm) epochs: BackupEpochs,
    /// A sync that lies here whole, and that may not be acknowledged yet.
    pub(in crate::vm) staged: Option<StagedSync>,
    pub(in crate::vm) idle_told: Index,
    pub(in crate::vm) disks_idle: IdleWatch,
    /// When to look at the VM's threads again.
    pub(in crate::vm) idle_look_us: u64,
    pub(in crate::vm) take_over: Option<TakeOver>,
    /// Something that its primary has sent ahead of a sync was refused: none is acknowledged any more, and the session ends.
    pub(in crate::vm) refuses: bool,
}

/// A sync that lies with the session's thread, whole.
pub(in crate::vm) struct StagedSync {
    pub(in crate::vm) epoch: Epoch,
    pub(in crate::vm) next: Mode,
    pub(in crate::vm) connections: Bytes,
}

/// The times of a take-over's steps. How far it is, core's `leadership` knows.
pub(in crate::vm) struct TakeOver {
    pub(in crate::vm) elected_us: u64,
    pub(in crate::vm) status: FailoverStatus,
    pub(in crate::vm) speaks_at_us: u64,
}

impl BackupRole {
    pub fn machine(&self) -> Option<&Arc<Machine>> {
        self.machine.as_ref()
    }

    /// What holds in this epoch, and how far a sync is.
    pub fn epochs(&self) -> &BackupEpochs {
        &self.epochs
    }

    /// What was agreed after a sync is not held back any more.
    pub fn let_log_go(&mut self) {
        self.epochs.let_log_go();
    }

    /// Whether there is a VM that could be taken over.
    pub fn is_whole(&self) -> bool {
        self.machine.is_some() && self.epochs.is_whole()
    }

    /// Whether it may be taken over now (invariant 4).
    pub fn may_lead(&self) -> bool {
        self.machine.is_some() && self.epochs.may_lead()
    }

    /// Whether agreed inputs go to the VM.
    pub fn executes_inputs(&self) -> bool {
        self.machine.is_some() && self.epochs.executes_inputs()
    }

    /// Whether the primary waits to hear that the VM here has nothing left to do.
    pub(in crate::vm) fn owes_idle(&self, applied: Index) -> bool {
        self.epochs.phase() == Phase::Synced && self.epochs.rules().backup_runs() && self.idle_told < applied
    }

    /// What the session's thread waits for.
    pub fn waiting(&self) -> Option<(Wait, Duration)> {
        self.waiting.now()
    }

    /// Whether a primary is followed that is not being taken over from.
    pub fn follows(&self) -> bool {
        self.take_over.is_none() && !matches!(self.epochs.phase(), Phase::Joining | Phase::Orphaned)
    }

    /// The sync under way, for the watchdog.
    pub fn sync_flow(&self) -> Flow {
        let (waits, progress) = match self.epochs.phase() {
            Phase::LastSync => (true, 1),
            Phase::Draining(epoch) => (true, epoch.0 << 2),
            Phase::Syncing => (true, 2 | u64::from(self.epochs.is_loading())),
            Phase::Joining | Phase::Synced | Phase::Orphaned => (false, 0),
        };
        Flow { waits, progress }
    }

    /// What syncs have to bring to the disks, for the watchdog.
    pub fn disk_flow(&self) -> Flow {
        let machine = self.machine.as_ref();
        machine.map_or_else(Flow::default, |machine| machine.disks.flow())
    }

    /// The take-over under way, for the watchdog: inputs that reach the VM, then the work of the session's thread, and what of
    /// the disks is done. Where the VM is an ordinary one only the group's word is missing.
    pub fn take_over_flow(&self, applied: Index, leadership: &Leadership) -> Flow {
        let (begun, over) = leadership.take_over_is();
        if !leadership.takes_over() || over {
            return Flow::default();
        }
        let steps = self.machine.as_ref().map_or(0, |machine| machine.disks.steps());
        Flow {
            waits: true,
            progress: applied.0.wrapping_add(steps) ^ (u64::from(begun) << 63),
        }
    }

    /// Where words for the primary wait.
    pub fn talker(&self) -> Option<&Talker> {
        self.talker.as_ref()
    }

    /// Where the VM's frames are to be told to the primary.
    pub fn told_to(&self) -> Option<&Talker> {
        self.talker.as_ref().filter(|_| self.epochs.tells_output())
    }

    pub fn state(&self) -> State {
        match self.epochs.phase() {
            Phase::Joining | Phase::LastSync => State::Joining,
            Phase::Orphaned => State::Waiting,
            _ => State::Running,
        }
    }
}
