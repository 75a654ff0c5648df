//! The backup's epochs: which inputs its VM gets, and how far the sync under way is as its loop sees it.
//!
//! Invariants, asserted in release builds too:
//! 1. The VM gets the inputs after `Sync(k)` only when sync k is applied; one that does not run gets none.
//! 2. The log is held back only by a sync that is under way, and by none once this host is elected and the sync is not being applied.
//! 3. From the first byte that an acknowledged sync changes until it is applied whole, this host does not stand for election.
//! 4. A sync that is agreed while the one before is still being applied is the next, and is not lost.
//! 5. A join's last sync that the log knows of is not acknowledged before the log has passed it here: its entry would be taken for that of
//!    another sync, and the inputs before it would go to a VM that has them already.
//!
//! Not here: whether a sync may be acknowledged (`sync::tenure`), the work of a sync (`replica::sync`), QEMU (node).

use super::{Inputs, Rules};
use crate::replica::sync::bugs::{Bug, Bugs};
use crate::units::Epoch;

/// How far a backup is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// QEMU starts, memory arrives.
    Joining,
    /// As `Joining`, and the log has passed the join's last sync: inputs wait for its end.
    LastSync,
    /// It follows.
    Synced,
    /// `Sync(epoch)` is agreed; the VM has to get what was agreed before it.
    Draining(Epoch),
    /// The session works on a sync.
    Syncing,
    /// The session has ended; the copy is as it was.
    Orphaned,
}

/// The backup's epochs.
#[derive(Clone, Debug)]
pub struct BackupEpochs {
    /// What holds in this epoch, and in the one that begins when the sync under way is applied.
    rules: Rules,
    next: Rules,
    phase: Phase,
    /// An acknowledged sync is being applied (invariant 3).
    loading: bool,
    /// What was agreed after a sync waits.
    held: bool,
    /// Agreed before the loop has heard that the last one is applied (invariant 4).
    early: Option<Epoch>,
    bugs: Bugs,
}

impl BackupEpochs {
    /// A host that is brought in.
    #[must_use]
    pub fn new(first: Rules) -> Self {
        Self {
            rules: first,
            next: first,
            phase: Phase::Joining,
            loading: false,
            held: false,
            early: None,
            bugs: Bugs::default(),
        }
    }

    /// With a fault put back on purpose.
    #[must_use]
    pub fn with_bugs(mut self, bugs: Bugs) -> Self {
        self.bugs = bugs;
        self
    }

    /// What holds in this epoch.
    #[must_use]
    pub fn rules(&self) -> Rules {
        self.rules
    }

    /// How far it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether there is a copy that could be taken over.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !matches!(self.phase, Phase::Joining | Phase::LastSync)
    }

    /// Whether an acknowledged sync is being applied.
    #[must_use]
    pub fn is_loading(&self) -> bool {
        self.loading
    }

    /// Whether it may be taken over now (invariant 3).
    #[must_use]
    pub fn may_lead(&self) -> bool {
        self.is_whole() && !self.loading
    }

    /// Whether all that was agreed can be with the VM: no sync is under way.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Synced | Phase::Orphaned)
    }

    /// Whether agreed inputs go to the VM.
    #[must_use]
    pub fn executes_inputs(&self) -> bool {
        self.is_whole() && self.rules.backup_runs()
    }

    /// Whether the primary compares what the VM says.
    #[must_use]
    pub fn tells_output(&self) -> bool {
        let follows = matches!(self.phase, Phase::Synced | Phase::Draining(_) | Phase::Syncing);
        follows && self.rules.compares()
    }

    /// Whether what was agreed after a sync waits.
    #[must_use]
    pub fn holds_log(&self) -> bool {
        self.held
    }

    /// `Sync(epoch)` is agreed. Whether it holds back what comes after it. `deposes`: this host is elected, or leads: then the sync will
    /// never be, and the inputs after it are agreed all the same.
    pub fn sync_agreed(&mut self, epoch: Epoch, deposes: bool) -> bool {
        if deposes {
            return false;
        }
        match self.phase {
            // Invariant 4. The log knows nothing of the sync that is being applied: one that it knows of would hold it back.
            _ if self.loading && !self.held && !self.bugs.has(Bug::LosesEarlySync) => {
                self.early = Some(epoch)
            }
            Phase::Joining => self.phase = Phase::LastSync,
            Phase::Synced => self.phase = Phase::Draining(epoch),
            // Agreed, but its primary is gone: whoever leads next says what holds.
            Phase::LastSync | Phase::Draining(_) | Phase::Syncing | Phase::Orphaned => return false,
        }
        self.held = true;
        self.check();
        true
    }

    /// The VM has what was agreed before the sync: it is the session's turn.
    pub fn drained(&mut self) -> Epoch {
        let Phase::Draining(epoch) = self.phase else {
            panic!("only what drains is drained: {self:?}");
        };
        self.phase = Phase::Syncing;
        epoch
    }

    /// Whether the sync that lies here whole, after which `next` holds, has to wait for its own entry of the log (invariant 5). The session
    /// itself waits for that of any later one.
    #[must_use]
    pub fn awaits_entry(&self, next: Rules) -> bool {
        let knows = [self.rules, next]
            .iter()
            .any(|rules| rules.inputs() == Inputs::Agreed);
        self.phase == Phase::Joining && knows && !self.bugs.has(Bug::JoinsBeforeItsEntry)
    }

    /// The sync that lies here whole is acknowledged, and is being applied.
    pub fn acknowledges(&mut self, next: Rules) {
        assert!(
            !self.loading,
            "invariant 3: two syncs are applied at once: {self:?}"
        );
        assert!(
            !self.awaits_entry(next),
            "invariant 5: the log has not passed the join's last sync: {self:?}"
        );
        if self.is_whole() {
            self.phase = Phase::Syncing;
        }
        self.next = next;
        self.loading = true;
        self.check();
    }

    /// It is applied: the next epoch begins. The sync that was agreed meanwhile, if one was: the VM is to be drained for it.
    pub fn loaded(&mut self) -> Option<Epoch> {
        assert!(self.loading, "applied before it was acknowledged: {self:?}");
        self.loading = false;
        self.rules = self.next;
        let early = self.early.take();
        self.phase = early.map_or(Phase::Synced, Phase::Draining);
        self.held = early.is_some();
        self.check();
        early
    }

    /// This host was elected. Whether a sync that the session has not begun is given up, and the log goes on.
    pub fn elected(&mut self) -> bool {
        self.early = None;
        match self.phase {
            Phase::Draining(_) => self.phase = Phase::Synced,
            Phase::Orphaned => {}
            Phase::Joining | Phase::LastSync | Phase::Synced | Phase::Syncing => return false,
        }
        self.held = false;
        self.check();
        true
    }

    /// The session is over. Its last sync is dropped whole; what was agreed since the one before goes on. Whether there is a copy that
    /// can be taken over.
    pub fn session_ended(&mut self) -> bool {
        let whole = self.is_whole();
        self.phase = Phase::Orphaned;
        self.loading = false;
        self.held = false;
        self.early = None;
        whole
    }

    /// What was agreed after the sync is not held back any more: the VM is at its end.
    pub fn let_log_go(&mut self) {
        self.held = false;
        self.early = None;
    }

    fn check(&self) {
        let under_way = matches!(self.phase, Phase::LastSync | Phase::Draining(_) | Phase::Syncing);
        assert!(
            !self.held || under_way || self.early.is_some(),
            "invariant 2: nothing is there that will let the log go on: {self:?}"
        );
        assert!(
            !self.loading || matches!(self.phase, Phase::Joining | Phase::LastSync | Phase::Syncing),
            "invariant 3: applied outside of a sync: {self:?}"
        );
        assert!(
            self.early.is_none() || self.loading && self.held,
            "invariant 4: a sync waits for nothing: {self:?}"
        );
    }
}
