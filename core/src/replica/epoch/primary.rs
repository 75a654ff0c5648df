//! The primary's epochs: its session with a backup, the sync under way, and what a switchover leaves.
//!
//! | stage of a sync | what happens | ends with |
//! |---|---|---|
//! | `PreCopy` | a round while the VMs run | `precopied` |
//! | `Proposed` | the log is asked to end the epoch | `sync_agreed`, or `log_refused` |
//! | `Draining` | the VM gets what was agreed before | `drained` |
//! | `Running` | the session stops the VM, copies, lets it run on | `line_drawn`, `resumed`, `acknowledged` |
//! | `Acknowledged` | the backup loads it | `loaded` |
//!
//! Invariants, asserted in release builds too:
//! 1. A sync has a session, and there is one at a time; none while a switchover waits for the group.
//! 2. A sync that begins when a join's copy is done is the join's last, however often the log has refused it: only then is output
//!    held from its line on.
//! 3. While a sync that the log knows of is under way, inputs are agreed: whoever runs after it knows which of them are in it.
//! 4. The log is held back only by a sync between its entry and the VM's `cont`, or by a switchover; and never on a host that was
//!    elected: the entry that makes it lead stands behind.
//! 5. What is acknowledged is the sync under way, after its line was drawn.
//!
//! Not here: streams, threads, QEMU (node), whom the group follows (`consensus`).

use super::{Inputs, Rules};
use crate::replica::sync::bugs::{Bug, Bugs};
use crate::units::Epoch;

/// How far the session with a backup is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Its stream is being opened.
    Connecting,
    /// Memory and disks are copied.
    Joining,
    /// The copy is done: the last sync is to begin.
    Copied,
    /// The join's last sync, until the group has agreed that the backup is complete.
    LastSync,
    /// The backup is complete.
    Synced,
}

/// How far a sync is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// The session does what can be done while the VM runs.
    PreCopy,
    /// `Sync(epoch)` is proposed.
    Proposed,
    /// The VM has to get what was agreed before it.
    Draining,
    /// The session works on it.
    Running,
    /// The backup has acknowledged, and is loading.
    Acknowledged,
}

/// A sync under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The epoch that it ends.
    pub epoch: Epoch,
    /// How far it is.
    pub stage: Stage,
    /// The VM stays stopped afterwards: the backup takes over.
    pub switchover: bool,
    /// It is a join's last (invariant 2).
    pub joins: bool,
    /// Whether the log says where the epoch ends.
    pub agreed: bool,
    /// The VM stands, or stood, and what it had said is in the epoch that ends.
    pub drawn: bool,
    /// The VM runs on, or is left to the backup.
    resumed: bool,
    /// What holds in the next epoch.
    pub next: Rules,
    /// When it began.
    pub began_us: u64,
}

/// What a session left when it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// How far it was.
    pub phase: Phase,
    /// A sync was under way.
    pub broken: bool,
    /// The VM stands here for the backup to take it over: the group says the rest.
    pub handed: bool,
}

/// What follows when the backup goes on from a sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loaded {
    /// The next epoch goes on, under these rules; those of before.
    NextEpoch {
        /// What held until now.
        was: Rules,
        /// What holds from now on.
        now: Rules,
        /// It was a join's last sync: the backup speaks for the first time.
        joined: bool,
    },
    /// The VM stands here: the group is to follow the backup.
    Switchover,
    /// No sync was under way.
    Nothing,
}

/// The primary's epochs.
#[derive(Clone, Debug)]
pub struct PrimaryEpochs {
    /// What holds in this epoch.
    rules: Rules,
    /// What holds after a join, and where nobody follows.
    first: Rules,
    session: Option<Phase>,
    run: Option<Run>,
    /// A sync's beginning was refused by the log; whether it was to be a switchover.
    refused: Option<bool>,
    /// The VM stands here, and the group was asked to follow the backup.
    handed: bool,
    /// What was agreed after a sync waits.
    held: bool,
    bugs: Bugs,
}

impl PrimaryEpochs {
    /// A primary that nobody follows.
    #[must_use]
    pub fn new(first: Rules) -> Self {
        Self {
            rules: first,
            first,
            session: None,
            run: None,
            refused: None,
            handed: false,
            held: false,
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

    /// How inputs reach the VM now (invariant 3).
    #[must_use]
    pub fn inputs(&self) -> Inputs {
        match self.run {
            Some(run) if run.agreed => Inputs::Agreed,
            _ => self.rules.inputs(),
        }
    }

    /// How far the session is, if there is one.
    #[must_use]
    pub fn session(&self) -> Option<Phase> {
        self.session
    }

    /// Whether a complete backup follows.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.session == Some(Phase::Synced)
    }

    /// The sync under way.
    #[must_use]
    pub fn run(&self) -> Option<&Run> {
        self.run.as_ref()
    }

    /// Whether a sync is under way, or would be if the log had taken its beginning.
    #[must_use]
    pub fn is_syncing(&self) -> bool {
        self.run.is_some() || self.refused.is_some()
    }

    /// Whether a sync is proposed, and not agreed yet.
    #[must_use]
    pub fn is_proposed(&self) -> bool {
        self.is_at(Stage::Proposed)
    }

    /// Whether the VM is being given what was agreed before the sync.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_at(Stage::Draining)
    }

    /// Whether a sync is about to stop the VM, or has, and the line is not drawn yet.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.is_at(Stage::Running) && self.run.is_some_and(|run| !run.drawn)
    }

    fn is_at(&self, stage: Stage) -> bool {
        self.run.is_some_and(|run| run.stage == stage)
    }

    /// Whether what was agreed after a sync waits.
    #[must_use]
    pub fn holds_log(&self) -> bool {
        self.held
    }

    /// Whether the VM stands here, and the group was asked to follow the backup.
    #[must_use]
    pub fn is_handed(&self) -> bool {
        self.handed
    }

    /// Whether a sync may begin.
    #[must_use]
    pub fn may_begin(&self) -> bool {
        let whole = matches!(self.session, Some(Phase::Copied | Phase::Synced));
        whole && self.run.is_none() && !self.handed
    }

    /// The log says that the VM is replicated in another way. Whoever follows under the old one is dropped by the caller.
    pub fn policy_changed(&mut self, first: Rules) {
        self.first = first;
        if self.session.is_none() {
            self.rules = first;
        }
    }

    /// A backup is looked for.
    pub fn session_begins(&mut self) {
        assert!(self.session.is_none(), "invariant 1: two sessions at once");
        self.session = Some(Phase::Connecting);
        self.rules = self.first;
        self.check();
    }

    /// Its stream is open: the join begins.
    pub fn join_begins(&mut self) {
        assert_eq!(
            self.session,
            Some(Phase::Connecting),
            "a join begins with its stream"
        );
        self.session = Some(Phase::Joining);
    }

    /// The copy is done.
    pub fn join_copied(&mut self) {
        assert_eq!(self.session, Some(Phase::Joining), "a copy is done once");
        self.session = Some(Phase::Copied);
    }

    /// A sync begins. True: the log is to be asked (and if it refuses, `log_refused`); false: the VM is drained at once.
    pub fn begin(&mut self, now_us: u64, epoch: Epoch, switchover: bool, next: Rules) -> bool {
        assert!(self.may_begin(), "invariant 1: a sync cannot begin now: {self:?}");
        // Whoever runs from this sync on has to know which inputs are in it.
        let agreed = self.inputs() == Inputs::Agreed || next.inputs() == Inputs::Agreed;
        let retried = self.refused.take().is_some();
        let ordinary = retried && self.bugs.has(Bug::RetriesLastSyncAsAnother);
        let joins = self.session == Some(Phase::Copied) && !ordinary;
        self.run = Some(Run {
            epoch,
            stage: if agreed { Stage::Proposed } else { Stage::Draining },
            switchover,
            joins,
            agreed,
            drawn: false,
            resumed: false,
            next,
            began_us: now_us,
        });
        if joins {
            self.session = Some(Phase::LastSync);
        }
        self.check();
        agreed
    }

    /// The log does not take the sync's beginning now.
    pub fn log_refused(&mut self) {
        let run = self.run.take_if(|run| run.stage == Stage::Proposed);
        let run = run.expect("what the log refuses was proposed");
        self.refused = Some(run.switchover);
        if self.session == Some(Phase::LastSync) {
            self.session = Some(Phase::Copied);
        }
        self.check();
    }

    /// Whether a sync that the log has refused is to be tried once more, and whether it is a switchover. Asked for at each turn: where
    /// it may not begin now, it was for nothing.
    pub fn take_refused(&mut self, leads: bool) -> Option<bool> {
        let may = leads && self.may_begin();
        // `begin` forgets it.
        match may {
            true => self.refused,
            false => {
                self.refused = None;
                None
            }
        }
    }

    /// A round begins while the VMs run.
    pub fn precopy(&mut self, now_us: u64, epoch: Epoch) {
        assert!(
            self.may_begin() && self.is_synced(),
            "invariant 1: no pre-copy now: {self:?}"
        );
        self.run = Some(Run {
            epoch,
            stage: Stage::PreCopy,
            switchover: false,
            joins: false,
            agreed: false,
            drawn: false,
            resumed: false,
            next: self.rules,
            began_us: now_us,
        });
    }

    /// That round is done: the sync itself may begin. False: there was none.
    pub fn precopied(&mut self) -> bool {
        self.run.take_if(|run| run.stage == Stage::PreCopy).is_some()
    }

    /// `Sync(epoch)` is agreed. Whether it is this host's, and holds back what comes after it.
    pub fn sync_agreed(&mut self, epoch: Epoch) -> bool {
        let due = |run: &&mut Run| run.epoch == epoch && run.stage == Stage::Proposed;
        let Some(run) = self.run.as_mut().filter(due) else {
            return false;
        };
        run.stage = Stage::Draining;
        self.held = true;
        self.check();
        true
    }

    /// The VM has what was agreed before the sync: it is the session's turn.
    pub fn drained(&mut self) -> Run {
        let run = self.run.as_mut().filter(|run| run.stage == Stage::Draining);
        let run = run.expect("only what drains is drained");
        run.stage = Stage::Running;
        *run
    }

    /// The VM stands, and its frames so far are in the epoch that ends. Whether that is a join's last one: from here on output waits for
    /// the group's word.
    pub fn line_drawn(&mut self) -> bool {
        let run = self.run.as_mut().filter(|run| run.stage == Stage::Running);
        let run = run.expect("invariant 5: a line is drawn in a sync");
        run.drawn = true;
        run.joins
    }

    /// The VM runs on, or, after a switchover's stop, stands and takes no more inputs: they are the backup's.
    pub fn resumed(&mut self) {
        let run = self.run.as_mut().filter(|run| run.drawn);
        let run = run.expect("the VM runs on after its line");
        run.resumed = true;
        self.held = run.switchover;
        self.check();
    }

    /// The backup holds the sync. Whether the log is to hear of it.
    pub fn acknowledged(&mut self, epoch: Epoch) -> bool {
        let due = |run: &&mut Run| run.epoch == epoch && run.stage == Stage::Running && run.drawn;
        let run = self.run.as_mut().filter(due);
        let run = run.expect("invariant 5: what is acknowledged is the sync under way");
        run.stage = Stage::Acknowledged;
        run.agreed
    }

    /// The backup goes on from the sync.
    pub fn loaded(&mut self) -> Loaded {
        let Some(run) = self.run.take() else {
            return Loaded::Nothing;
        };
        assert_eq!(
            run.stage,
            Stage::Acknowledged,
            "invariant 5: loaded before it is acknowledged"
        );
        if run.switchover {
            self.handed = true;
            self.check();
            return Loaded::Switchover;
        }
        let was = std::mem::replace(&mut self.rules, run.next);
        self.check();
        Loaded::NextEpoch {
            was,
            now: run.next,
            joined: run.joins,
        }
    }

    /// The group has agreed that the backup is complete.
    pub fn backup_is_complete(&mut self) {
        if self.session == Some(Phase::LastSync) {
            self.session = Some(Phase::Synced);
        }
    }

    /// The session is over; none if there was none.
    pub fn session_ended(&mut self) -> Option<Ended> {
        let phase = self.session.take()?;
        let broken = self.run.take().is_some();
        self.refused = None;
        self.rules = self.first;
        // A switchover's inputs are the backup's until the group says otherwise.
        self.held &= self.handed;
        self.check();
        Some(Ended {
            phase,
            broken,
            handed: self.handed,
        })
    }

    /// Another host leads, or (`leader` is false) nobody: then the session, with its sync, may go on when this host leads again.
    /// Whether the sync under way counts no more.
    pub fn deposed(&mut self, leader: bool) -> bool {
        let over = leader || self.session.is_none();
        self.held &= !over;
        over
    }

    /// This host was elected (invariant 4): a switchover that ended so holds nothing back.
    pub fn elected(&mut self) {
        if self.handed && !self.bugs.has(Bug::HoldsLogWhenElected) {
            self.held = false;
        }
    }

    /// The group does not follow the backup: the VM is to go on here. Whether it stood.
    pub fn switchover_failed(&mut self) -> bool {
        let handed = std::mem::take(&mut self.handed);
        if handed {
            self.held = false;
        }
        self.check();
        handed
    }

    /// What was agreed after the sync is not held back any more: the VM is at its end.
    pub fn let_log_go(&mut self) {
        self.held = false;
    }

    fn check(&self) {
        assert!(
            self.run.is_none() || self.session.is_some() && !self.handed,
            "invariant 1: a sync without a session, or after a switchover: {self:?}"
        );
        let by_sync =
            |run: &Run| run.agreed && !run.resumed && run.stage >= Stage::Draining || run.switchover;
        assert!(
            !self.held || self.handed || self.run.as_ref().is_some_and(by_sync),
            "invariant 4: nothing is there that will let the log go on: {self:?}"
        );
        let whole = matches!(self.session, Some(Phase::LastSync | Phase::Synced));
        assert!(
            self.run.is_none() || whole || self.bugs.has(Bug::RetriesLastSyncAsAnother),
            "invariant 2: a sync of a join whose copy is under way: {self:?}"
        );
    }
}
