//! What a primary holds: the VM, the session with a backup, and what people have asked of it.
//!
//! Not here: what is done with it (`vm::primary`).

use crate::vm::machine::Machine;
use crate::vm::session::jobs::Jobs;
use crate::vm::session::link::Closer;
use crate::vm::session::reader::Lent;
use crate::vm::session::talker::Talker;
use crate::vm::session::waiting::Waiting;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, Progress, SyncStatus};
use dunlin_core::replica::enospc::EnospcWait;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::epoch::primary::PrimaryEpochs;
use dunlin_core::replica::sync::primary::Word;
use dunlin_core::sync::change_over::ChangeOver;
use dunlin_core::sync::cost::SyncCost;
use dunlin_core::units::{Index, ReplicaId};
use std::sync::Arc;

/// A primary.
pub struct PrimaryRole {
    pub(in crate::vm) machine: Option<Arc<Machine>>,
    pub(in crate::vm) starting: Option<u64>,
    /// Whether it is tried again where it does not start.
    pub(in crate::vm) boots: Boots,
    pub(in crate::vm) session: Option<Session>,
    /// A session that was ended, whose thread has not said so yet (invariant 4), since when, and whether that was told.
    pub(in crate::vm) lingers: Option<Lingers>,
    /// What holds in this epoch, and how far the session and a sync are.
    pub(in crate::vm) epochs: PrimaryEpochs,
    pub(in crate::vm) pace: SyncPace,
    pub(in crate::vm) rejoin_at_us: u64,
    pub(in crate::vm) backup_applied: Index,
    pub(in crate::vm) disk_asks: bool,
    pub(in crate::vm) guest: Guest,
    pub(in crate::vm) switchover: Option<Sender<Answer>>,
    /// Syncs so far.
    pub sync_status: SyncStatus,
    /// The join under way.
    pub progress: Option<Progress>,
}

/// What it is known by when the next sync is due.
pub struct SyncPace {
    /// Where the mode follows what pays, by this choice.
    pub(in crate::vm) change_over: Option<ChangeOver>,
    pub(in crate::vm) sync_cost: SyncCost,
    pub(in crate::vm) observe_at_us: u64,
    /// When the last sync began, and when it ended.
    pub(in crate::vm) sync_begun_us: u64,
    pub(in crate::vm) last_sync_us: u64,
    /// How long an epoch may be until the backup's memory for a sync is a quarter full, by what the last one sent.
    pub(in crate::vm) fills_us: u64,
    pub(in crate::vm) next_look_us: u64,
}

impl Default for SyncPace {
    fn default() -> Self {
        Self {
            change_over: None,
            sync_cost: SyncCost::default(),
            observe_at_us: 0,
            sync_begun_us: 0,
            last_sync_us: 0,
            fills_us: u64::MAX,
            next_look_us: 0,
        }
    }
}

/// What QEMU has told of the guest.
#[derive(Default)]
pub struct Guest {
    /// It has reset its machine since the last sync.
    pub(in crate::vm) was_reset: bool,
    /// When QEMU is asked next what has happened.
    pub(in crate::vm) ask_qemu_us: u64,
    /// The VM stands still while its disk is full.
    pub(in crate::vm) enospc_wait: EnospcWait,
    /// It was left to the backup, since this host does not serve it as it should: until then this one does not stand for election.
    left_until_us: Option<u64>,
}

/// So long a backup has to take a VM over that this host has left to it: more than an election on a busy machine. If it does not, this host
/// may lead again, and serves as far as it can.
const LEFT_US: u64 = 10_000_000;

impl Guest {
    /// The backup is to go on with the VM.
    pub(in crate::vm) fn leave_to_backup(&mut self, now_us: u64) {
        self.left_until_us = Some(now_us + LEFT_US);
    }

    /// Whether it still is.
    pub(in crate::vm) fn is_left(&self, now_us: u64) -> bool {
        self.left_until_us.is_some_and(|until_us| now_us < until_us)
    }
}

pub(in crate::vm) struct Session {
    pub(in crate::vm) id: u64,
    pub(in crate::vm) peer: ReplicaId,
    pub(in crate::vm) jobs: Option<Jobs<Word>>,
    /// Whether the backup's build takes what comes ahead of a sync.
    pub(in crate::vm) takes_ahead: bool,
    pub(in crate::vm) closer: Option<Closer>,
    /// What the loop itself has to say to the backup.
    pub(in crate::vm) talker: Option<Talker>,
    /// The stream, as long as what comes by it is for the loop.
    pub(in crate::vm) lent: Option<Lent>,
    /// What the session's thread waits for.
    pub(in crate::vm) waiting: Waiting,
}

impl Session {
    /// The thread, if it may send ahead of a sync.
    pub(in crate::vm) fn jobs_ahead(&self) -> Option<&Jobs<Word>> {
        self.jobs.as_ref().filter(|_| self.takes_ahead)
    }
}

pub(in crate::vm) struct Lingers {
    pub(in crate::vm) id: u64,
    pub(in crate::vm) since_us: u64,
    pub(in crate::vm) told: bool,
}

impl PrimaryRole {
    /// `first`: what holds where nobody follows, and after a join.
    pub(in crate::vm) fn new(machine: Option<Arc<Machine>>, first: Rules) -> Self {
        Self {
            machine,
            starting: None,
            boots: Boots::default(),
            session: None,
            lingers: None,
            epochs: PrimaryEpochs::new(first),
            pace: SyncPace::default(),
            rejoin_at_us: 0,
            backup_applied: Index(0),
            disk_asks: false,
            guest: Guest::default(),
            switchover: None,
            sync_status: SyncStatus::default(),
            progress: None,
        }
    }

    /// What holds in this epoch, and how far the session and a sync are.
    pub fn epochs(&self) -> &PrimaryEpochs {
        &self.epochs
    }

    /// What was agreed after a sync is not held back any more.
    pub fn let_log_go(&mut self) {
        self.epochs.let_log_go();
    }

    /// Another host leads, or nobody. Whether the sync under way counts no more.
    pub fn deposed(&mut self, leader: bool) -> bool {
        self.epochs.deposed(leader)
    }

    /// A sync is about to stop the VM: all that it says belongs to the epoch that ends, so none of it may stay in QEMU. (QEMU
    /// throws away what it could not write when it stops the VM, and may have written a part of it.)
    pub fn is_stopping(&self) -> bool {
        self.epochs.is_stopping()
    }

    /// The stream from the backup, as long as the loop has it, and its session.
    pub fn lent(&self) -> Option<(u64, &Lent)> {
        let session = self.session.as_ref()?;
        session.lent.as_ref().map(|lent| (session.id, lent))
    }

    /// Whether there is a VM here.
    pub fn has_machine(&self) -> bool {
        self.machine.is_some()
    }

    /// Whether there is a VM to serve, or will be.
    pub fn is_whole(&self) -> bool {
        self.machine.is_some() || self.starting.is_some() || self.boots.waits()
    }
}

/// The rest before a VM that did not start is tried again, and the longest one.
const REST_US: (u64, u64) = (1_000_000, 60_000_000);

/// How often a VM that boots from its disk did not start. What keeps one from it that has lived may pass, as a bridge that is not there yet
/// after a power cut; and its host alone may boot it. One that never ran fails for good: its file is wrong, as a rule.
#[derive(Default)]
pub(in crate::vm) struct Boots {
    has_lived: bool,
    failed: u32,
    again_at_us: Option<u64>,
    why: Option<String>,
}

impl Boots {
    /// Of a VM that has lived, or never ran.
    pub(in crate::vm) fn of(has_lived: bool) -> Self {
        Self {
            has_lived,
            ..Self::default()
        }
    }

    /// It does not start, because of `why`. Whether that is news; none where it is not tried again.
    pub(in crate::vm) fn failed(&mut self, now_us: u64, why: &str) -> Option<bool> {
        if !self.has_lived {
            return None;
        }
        let rest_us = (REST_US.0 << self.failed.min(8)).min(REST_US.1);
        self.failed = self.failed.saturating_add(1);
        self.again_at_us = Some(now_us + rest_us);
        let before = self.why.replace(why.to_owned());
        Some(before.as_deref() != Some(why))
    }

    /// Whether it is to be tried now; asked once.
    pub(in crate::vm) fn is_due(&mut self, now_us: u64) -> bool {
        self.again_at_us.take_if(|at_us| *at_us <= now_us).is_some()
    }

    /// Whether it will be.
    pub(in crate::vm) fn waits(&self) -> bool {
        self.again_at_us.is_some()
    }

    /// It runs.
    pub(in crate::vm) fn started(&mut self) {
        *self = Self::of(self.has_lived);
    }

    /// Why it does not.
    pub(in crate::vm) fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_has_lived_is_tried_again_and_one_that_never_ran_is_not() {
        let mut boots = Boots::of(false);
        assert_eq!(boots.failed(0, "no bridge"), None);
        assert!(!boots.waits() && !boots.is_due(u64::MAX));

        let mut boots = Boots::of(true);
        let mut now_us = 0;
        for rest_s in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(boots.failed(now_us, "no bridge"), Some(now_us == 0), "told once");
            assert!(boots.waits());
            now_us += rest_s * 1_000_000;
            assert!(!boots.is_due(now_us - 1), "{rest_s} s");
            assert!(boots.is_due(now_us) && !boots.is_due(now_us), "once");
        }
        assert_eq!(boots.failed(now_us, "no disk"), Some(true), "another reason");
        assert_eq!(boots.why(), Some("no disk"));
        boots.started();
        assert!(!boots.waits() && boots.why().is_none());
    }

    #[test]
    fn a_host_that_has_left_its_vm_to_the_backup_may_lead_again_when_that_one_had_its_time() {
        let mut guest = Guest::default();
        assert!(!guest.is_left(0));
        guest.leave_to_backup(7);
        assert!(guest.is_left(7) && guest.is_left(6 + LEFT_US));
        assert!(!guest.is_left(7 + LEFT_US));
    }
}
