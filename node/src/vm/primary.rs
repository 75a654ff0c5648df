//! The primary's part of the loop: it takes inputs, holds outputs, brings a backup in and syncs with it.
//!
//! Invariants:
//! 1. (One speaker) Only a leader of the group, as of an entry of its own term, takes inputs and releases outputs.
//! 2. A backup that is lost is dropped from the complete set by an agreed entry before outputs leave without it.
//! 3. One sync at a time; the next one begins when the backup has applied the last.
//! 4. One session's thread at a time: who stopped the VM lets it run on, and not into another session's sync.
//!
//! `booting` starts the VM, `mishaps` follows what QEMU tells of it, `joining` finds and loses backups, `syncing` drives the syncs, `commands` does what people ask, `policy` changes how the VM is
//! replicated, `alone` serves by a person's order and takes the other hosts back, `replacing` makes room for a new machine in a dead one's place. Not here: the work of a sync (`session::primary`), when one is due (core's `trigger`).

mod alone;
mod booting;
mod commands;
mod joining;
mod mishaps;
mod policy;
mod replacing;
mod switched_off;
mod syncing;
mod watched;

use mishaps::EnospcWait;

use replacing::Leaving;

use super::Line;
use super::machine::Machine;
use super::run::{Role, VmLoop};
use super::session::jobs::Jobs;
use super::session::link::Closer;
use super::session::reader::Lent;
use super::session::talker::Talker;
use super::session::waiting::Waiting;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind, Progress, State, SyncStatus};
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::epoch::primary::{Phase, PrimaryEpochs};
use dunlin_core::replica::leadership::{Lead, Resumes};
use dunlin_core::replica::sync::primary::Word;
use dunlin_core::sync::change_over::ChangeOver;
use dunlin_core::sync::cost::SyncCost;
use dunlin_core::units::{Epoch, Index, ReplicaId};
use std::sync::Arc;

/// How long to wait before a backup is looked for again.
const REJOIN_US: u64 = 500_000;
/// A backup whose host says nothing for this long (it answers heartbeats many times as often) is given up.
const SILENCE_US: u64 = 400_000;
/// How often a socket that QEMU has not emptied yet is looked at: there is no event for "the peer has read".
const DRAIN_LOOK_US: u64 = 100;
/// How often it is looked at what the mode in use brings.
const OBSERVE_US: u64 = 50_000;
/// An epoch that lasted at least this long has many dirty pages: they are worked on before the VM stops.
const AHEAD_AFTER_US: u64 = 200_000;
/// How long a guest may take to switch itself off.
const POWERDOWN_US: u64 = 30_000_000;

/// A primary.
pub struct PrimaryRole {
    machine: Option<Arc<Machine>>,
    starting: Option<u64>,
    session: Option<Session>,
    /// A session that was ended, whose thread has not said so yet (invariant 4), since when, and whether that was told.
    lingers: Option<Lingers>,
    /// What holds in this epoch, how far the session and a sync are; where the mode follows what pays, by this choice.
    epochs: PrimaryEpochs,
    change_over: Option<ChangeOver>,
    sync_cost: SyncCost,
    observe_at_us: u64,
    last_sync_us: u64,
    /// How long an epoch may be until the backup's memory for a sync is a quarter full, by what the last one sent.
    fills_us: u64,
    next_look_us: u64,
    rejoin_at_us: u64,
    backup_applied: Index,
    disk_asks: bool,
    /// The guest has reset its machine since the last sync.
    guest_was_reset: bool,
    quit_at_us: Option<u64>,
    /// When QEMU is asked next what has happened.
    ask_qemu_us: u64,
    /// The guest has switched itself off, and the group was asked to agree that this is the VM's end.
    switched_off: bool,
    /// The VM stands still because its disk is full.
    enospc_wait: Option<EnospcWait>,
    switchover: Option<Sender<Answer>>,
    /// A member that a person wants out of the group.
    leaving: Option<Leaving>,
    /// Syncs so far.
    pub sync_status: SyncStatus,
    /// The join under way.
    pub progress: Option<Progress>,
}

struct Session {
    id: u64,
    peer: ReplicaId,
    jobs: Option<Jobs<Word>>,
    closer: Option<Closer>,
    /// What the loop itself has to say to the backup.
    talker: Option<Talker>,
    /// The stream, as long as what comes by it is for the loop.
    lent: Option<Lent>,
    /// What the session's thread waits for.
    waiting: Waiting,
}

struct Lingers {
    id: u64,
    since_us: u64,
    told: bool,
}

impl PrimaryRole {
    /// `first`: what holds where nobody follows, and after a join.
    fn new(machine: Option<Arc<Machine>>, first: Rules) -> Self {
        Self {
            machine,
            starting: None,
            session: None,
            lingers: None,
            epochs: PrimaryEpochs::new(first),
            change_over: None,
            sync_cost: SyncCost::default(),
            observe_at_us: 0,
            last_sync_us: 0,
            fills_us: u64::MAX,
            next_look_us: 0,
            rejoin_at_us: 0,
            backup_applied: Index(0),
            disk_asks: false,
            guest_was_reset: false,
            quit_at_us: None,
            ask_qemu_us: 0,
            switched_off: false,
            enospc_wait: None,
            switchover: None,
            leaving: None,
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
        self.machine.is_some() || self.starting.is_some()
    }
}

impl VmLoop {
    /// The machine, in whichever role.
    pub(super) fn machine(&self) -> Option<&Arc<Machine>> {
        match &self.role {
            Role::Primary(primary) => primary.machine.as_ref(),
            Role::Backup(backup) => backup.machine(),
            Role::None => None,
        }
    }

    /// Ends the copy of the VM here, and every session around it. Waits for neither: what the machine's end has to wait for is a
    /// thread's own (`machine`), and whoever starts the next one waits for that.
    pub(super) fn drop_machine(&mut self) {
        if let Role::Primary(PrimaryRole {
            session: Some(session),
            ..
        }) = &self.role
            && let Some(closer) = &session.closer
        {
            closer.close();
        }
        if let Some(machine) = self.machine()
            && let Err(error) = machine.qemu.end()
        {
            tracing::warn!(vm = self.config.name, "ending QEMU: {error}");
        }
        if let Some(machine) = self.machine() {
            // Nobody is left to be told.
            machine.disks.hold_errors(false);
        }
        self.close_backup_session();
        self.role = Role::None;
        self.agreement.leadership.ends();
        self.speculating = None;
        self.nics = None;
        self.output = self.new_output(Voice::Shut, self.agreement.state().epoch.next());
        self.forget_cut();
    }

    pub(super) fn primary_state(&self, primary: &PrimaryRole) -> State {
        match (&primary.machine, primary.epochs.session(), self.output.voice()) {
            (None, _, _) => State::Starting,
            (_, _, Voice::Shut) => State::QuorumLost,
            _ if primary.enospc_wait.is_some() => State::DiskFull,
            (_, Some(Phase::Synced), _) => State::Running,
            (_, Some(_), _) => State::Joining,
            (_, None, _) if self.policy().is_replicated() => State::Alone,
            (_, None, _) if self.config.policy.is_replicated() => State::ProtectionPaused,
            (_, None, _) => State::Running,
        }
    }

    /// This host has just been elected.
    pub(super) fn elected(&mut self) {
        match &mut self.role {
            Role::Backup(_) => self.prepare_take_over(),
            // A switchover that ends so: the entry that makes this host lead must not be held back.
            Role::Primary(primary) => primary.epochs.elected(),
            Role::None => {}
        }
    }

    /// This host leads, and has applied everything that was agreed before.
    pub(super) fn leads(&mut self) {
        let candidacy = self.candidacy();
        match self.agreement.leadership.leads_now(candidacy) {
            // The order is carried out in this step.
            Lead::Ends => {}
            Lead::Boots => {
                self.say_it_is_alone();
            }
            Lead::TakesOver => self.go_on_taking_over(),
            Lead::GoesOn => self.speak_again(),
            Lead::StepsDown => {
                self.event(
                    EventKind::CannotLead,
                    "this host was elected without a complete copy of the VM; it steps down",
                );
                self.drop_machine();
                self.cold.end_mandate();
                self.group.step_down();
            }
        }
    }

    fn speak_again(&mut self) {
        // A switchover that ended with this host's own election.
        self.transfer_failed();
        self.event(EventKind::QuorumRegained, "a majority of the group answers again");
        let session = self.session_survives();
        if let Some((id, false)) = session {
            self.session_ended(
                id,
                "the group has begun a new term, and the session cannot go on in it",
            );
        }
        let survives = session.is_some_and(|(_, survives)| survives);
        match self.agreement.leadership.resumes(survives) {
            Resumes::Alone => self.is_alone(),
            Resumes::Protected => {}
            Resumes::DropsBackup => self.drop_backup(),
        }
        self.speaks_as_it_may();
    }

    /// The group has agreed that nobody else is complete.
    pub(super) fn is_alone(&mut self) {
        if let Some(machine) = self.machine() {
            machine.disks.hold_errors(false);
        }
        self.speaks_as_it_may();
        self.stands_alone();
        self.policy_settled();
        if self.policy().is_replicated() {
            self.event(
                EventKind::Unprotected,
                "the VM runs without a backup: if this host dies now, it is lost",
            );
        }
    }

    /// The group has agreed that the backup is complete since `epoch`.
    pub(super) fn is_protected(&mut self, epoch: Epoch) {
        self.speaks_as_it_may();
        if self.output.epoch() > epoch {
            self.output.acknowledged(epoch);
        }
        let now_us = self.now_us();
        if let Some(primary) = self.primary() {
            primary.progress = None;
            primary.last_sync_us = now_us;
            primary.epochs.backup_is_complete();
            if let Some(machine) = &primary.machine {
                machine.disks.hold_errors(true);
            }
        }
        self.event(EventKind::Protected, "a complete second copy of the VM follows");
    }

    /// The guest was asked to switch itself off; it has only so long.
    pub(super) fn await_powerdown(&mut self) {
        let quit_at_us = self.now_us() + POWERDOWN_US;
        if let Some(primary) = self.primary() {
            primary.quit_at_us = Some(quit_at_us);
        }
    }

    /// The primary's turn: QEMU's own events, the backup, the sync.
    pub(super) fn run_primary(&mut self) {
        if !matches!(self.role, Role::Primary(_)) {
            return;
        }
        if self.shared.fault_at.steps_down(Line::PrimaryLeads) {
            self.group.step_down();
        }
        self.follow_qemu();
        self.follow_leaving();
        self.tell_who_is_gone();
        self.readmit_hosts();
        self.miss_silent_backup();
        self.observe_output();
        self.look_for_backup();
        self.begin_last_sync();
        self.begin_refused_sync();
        self.start_due_sync();
        self.start_drained_sync();
    }
}

/// "Ask again at once": not an exit code, the command line never sees it.
pub const AGAIN: i32 = -1;
