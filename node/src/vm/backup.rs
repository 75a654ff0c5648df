//! The backup's part of the loop: feeds its VM the agreed inputs, keeps its outputs, and takes over when elected.
//!
//! Invariants:
//! 1. The backup's VM gets the inputs after `Sync(k)` only when sync k is applied. One that does not run gets none: what its
//!    primary says of them waits for the next sync, and a client sends again what was lost.
//! 2. A sync is acknowledged only to the leader of this host's current term (core's `tenure`).
//! 3. A new primary speaks after the group has agreed that it alone is complete, and has applied every agreed input.
//!
//! 4. From the first byte that an acknowledged sync changes until it is applied whole, this host does not stand for election;
//!    a copy to which a sync was applied by half is ended.
//!
//! Not here: the work of a sync (`session::backup`).

mod syncing;
mod take_over;
use super::disks::IdleWatch;
use super::event::LoopEvent;
use super::machine::{MachineError, Started};
use super::nics::{Nics, NicsError};
use super::session::backup::Backup;
use super::session::copies::Copies;
use super::session::jobs::Jobs;
use super::session::link::{SyncLink, refuse};
use super::session::talker::Talker;
use super::session::waiting::Waiting;
use super::state::backup::BackupRole;
use super::state::speculating::Speculating;
use super::state::{Role, VmLoop};
use dunlin_api::EventKind;
use dunlin_core::output::gate::Voice;
use dunlin_core::replica::epoch::backup::{BackupEpochs, Phase};
use dunlin_core::replica::leadership::Invited;
use dunlin_core::replica::sync::backup::Word;
use dunlin_core::sync::tenure::Tenure;
use dunlin_core::sync::trigger::{LOOK_US, MATCH_LOOK_US};
use dunlin_core::units::{Epoch, Index, ReplicaId, Term};
use dunlin_core::wire::sync::{HOLDS_SINCE, SyncMessage};
use dunlin_fabric::link::{Hello, Stream};
use dunlin_guest::Start;
use std::io;
use std::sync::Arc;

/// What a host says that cannot follow at this moment, and will.
pub const NOT_READY: &str = "it is not ready to follow yet";

/// Why a machine that was started here does not follow.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    /// It has no port for states.
    #[error("QEMU was not started as a backup")]
    NotABackup,
    /// Its cards.
    #[error(transparent)]
    Nics(#[from] NicsError),
    /// Its session, or the session's thread.
    #[error(transparent)]
    Session(io::Error),
    /// The loop's words to the primary would be sent there.
    #[error("a thread to talk to the primary: {0}")]
    Talker(#[source] io::Error),
}

impl VmLoop {
    /// The leader wants this host as its backup.
    pub(super) fn accept_join(&mut self, primary: ReplicaId, hello: &Hello, stream: Stream) {
        let term = hello.term;
        // A policy that was agreed a moment ago may not have come here yet.
        let knows_policy = hello.extra == self.policy_name().as_bytes();
        let follows = term == self.group.term().0 && self.group.leader() == Some(primary) && knows_policy;
        let orphaned = self
            .backup()
            .is_some_and(|backup| backup.epochs.phase() == Phase::Orphaned);
        let well = self.shown.failure.is_none() && self.ending.ended.is_none();
        let invited = self.agreement.leadership.invited(follows && well, orphaned);
        if invited == Invited::EndsStaleCopy {
            self.event(
                EventKind::Dropped,
                "the primary goes on without this host; its copy of the VM is ended",
            );
            self.drop_machine();
        }
        if invited != Invited::Joins {
            tracing::debug!(
                vm = self.config.name,
                ?invited,
                follows,
                "a join is not taken yet"
            );
            let why = match &self.shown.failure {
                Some(failure) => format!("it has failed: {failure}"),
                None => NOT_READY.to_owned(),
            };
            // The primary tries again.
            return refuse(stream, &why);
        }
        // Whoever is not told what is here counts on nothing being here, also of what a feeder brings right now.
        let held = match stream.spoken().version >= HOLDS_SINCE {
            true => self.host.held_memory.take(&self.config.name),
            false => {
                self.host.held_memory.forget(&self.config.name);
                None
            }
        };
        let session = self.new_session();
        self.agreement.leadership.joins();
        self.shared.reigns(Term(term), false);
        self.role = Role::Backup(BackupRole {
            session,
            tenure: Tenure::new(primary, Term(term)),
            machine: None,
            stream: Some(stream),
            jobs: None,
            closer: None,
            talker: None,
            waiting: Waiting::default(),
            epochs: BackupEpochs::new(self.first_rules()),
            staged: None,
            idle_told: Index(0),
            disks_idle: IdleWatch::default(),
            idle_look_us: 0,
            take_over: None,
            refuses: false,
        });
        self.start_machine(session, Start::Incoming, held);
    }

    /// The primary mirrors a disk to this host. A thread's own: the disk takes a role when no request of the VM is under way, and one
    /// may hang.
    pub(super) fn accept_mirror(&mut self, primary: ReplicaId, disk: &[u8], stream: Stream) {
        let number = disk.first().copied().map_or(usize::MAX, usize::from);
        let follows = self.group.leader() == Some(primary);
        let backup = self.backup().filter(|_| follows);
        let Some((session, machine)) =
            backup.and_then(|backup| Some((backup.session, backup.machine.clone()?)))
        else {
            return;
        };
        let to_loop = self.inbox.to_loop.clone();
        let follow = move || {
            if let Err(why) = machine.disks.follow(number, stream) {
                let why = format!("disk {number} cannot follow: {why}");
                to_loop.send(LoopEvent::CannotFollow { session, why });
            }
        };
        if let Err(error) = std::thread::Builder::new()
            .name("disk-follow".into())
            .spawn(follow)
        {
            self.join_failed(format!("disk {number} cannot follow: a thread: {error}"));
        }
    }

    /// The primary hears of it by its stream, which is closed, and tries again. One of an earlier session explains nothing any more.
    pub(super) fn cannot_follow(&mut self, session: u64, why: String) {
        if self.backup().is_some_and(|backup| backup.session == session) {
            self.join_failed(why);
        }
    }

    fn backup(&mut self) -> Option<&mut BackupRole> {
        match &mut self.role {
            Role::Backup(backup) => Some(backup),
            _ => None,
        }
    }

    pub(super) fn backup_started(&mut self, session: u64, result: Result<Started, MachineError>) {
        let config = self.config.clone();
        let to_loop = self.inbox.to_loop.clone();
        let first = self.first_rules();
        let Some(backup) = self.backup().filter(|backup| backup.session == session) else {
            return;
        };
        let term = backup.tenure.term();
        let Some(stream) = backup.stream.take() else {
            return;
        };
        let says_held = stream.spoken().version >= HOLDS_SINCE;
        let (jobs, receiver) = Jobs::pair();
        let started = match result {
            Ok(started) => started,
            Err(why) => {
                refuse(stream, &format!("it cannot start the VM: {why}"));
                self.join_failed(format!("this host cannot be the backup: {why}"));
                return self.drop_machine();
            }
        };
        let follow = |started: Started| {
            let colo = started.colo.ok_or(FollowError::NotABackup)?;
            let nics = Nics::open(&config, started.ports)?;
            let link = SyncLink::open(stream, session, to_loop.clone(), false);
            let (link, closer) = link.map_err(FollowError::Session)?;
            let talker = Talker::start(link.writer.clone()).map_err(FollowError::Talker)?;
            let machine = started.machine;
            let sockets = started.sockets;
            let waiting = link.waiting.clone();
            let worker = Backup {
                session,
                machine: machine.clone(),
                colo: Some(colo),
                link,
                words: receiver,
                to_loop,
                copies: Copies::default(),
                staging_bytes: config.sync.staging_mib << 20,
                audit: config.sync.audit,
                says_held,
            };
            std::thread::Builder::new()
                .name("sync-backup".into())
                .spawn(move || worker.run(term, first.backup_runs()))
                .map_err(FollowError::Session)?;
            Ok((machine, nics, closer, talker, waiting, sockets))
        };
        let followed: Result<_, FollowError> = follow(started);
        match followed {
            Ok((machine, nics, closer, talker, waiting, sockets)) => {
                backup.waiting = waiting;
                backup.machine = Some(machine);
                backup.jobs = Some(jobs);
                backup.closer = Some(closer);
                backup.talker = Some(talker);
                self.net.nics = Some(nics);
                let limits = self.speculation_limits();
                self.net.speculating = sockets.map(|sockets| Speculating::backup(sockets, limits));
                self.agreement.leadership.keeps_output();
                self.net.output = self.new_output(Voice::Backup, self.agreement.state().epoch.next());
                self.join_begins("this host is being brought in as backup");
            }
            Err(why) => {
                self.join_failed(format!("this host cannot be the backup: {why}"));
                self.drop_machine();
            }
        }
    }

    pub(super) fn close_backup_session(&mut self) {
        if let Some(backup) = self.backup()
            && let Some(closer) = &backup.closer
        {
            closer.close();
        }
    }

    /// `Sync(epoch)` is agreed. Whether it holds back what comes after it, core's `epoch` says (invariant 1).
    pub(super) fn backup_sync_agreed(&mut self, epoch: Epoch) {
        let leads = self.group.is_leader();
        let Some(backup) = self.backup() else { return };
        let deposes = leads || backup.take_over.is_some();
        if backup.epochs.sync_agreed(epoch, deposes) {
            self.begin_backup_drain();
        }
        // A join's last sync may have been here before its entry.
        self.give_leave();
    }

    /// A VM that follows has to get what was agreed before its sync.
    fn begin_backup_drain(&mut self) {
        let now_us = self.now_us();
        let drains = |backup: &BackupRole| matches!(backup.epochs.phase(), Phase::Draining(_));
        if matches!(&self.role, Role::Backup(backup) if drains(backup))
            && let Some(nics) = &mut self.net.nics
        {
            nics.begin_drain(now_us);
        }
    }

    /// The backup's turn.
    pub(super) fn run_backup(&mut self) {
        let applied = self.agreement.applied;
        let (leads, now_us) = (self.agreement.leads(), self.now_us());
        let agreed = self.policy().inputs_are_agreed();
        let Role::Backup(backup) = &mut self.role else {
            return;
        };
        // Looking at sockets costs: only where it can make a difference.
        let nics = &mut self.net.nics;
        let rules = backup.epochs.rules();
        if let (Phase::Synced, true, Some(machine)) =
            (backup.epochs.phase(), rules.backup_runs(), &backup.machine)
        {
            let sleeps = || machine.qemu.threads().idle();
            backup.disks_idle.look(&machine.disks, now_us, sleeps);
        }
        match backup.epochs.phase() {
            Phase::Draining(_) if nics.as_mut().is_none_or(|nics| nics.drain_is_over(now_us)) => {
                let epoch = backup.epochs.drained();
                if let Some(jobs) = &backup.jobs {
                    // A session that has ended reports that itself.
                    let _ = jobs.send(Word::EpochEnds { epoch });
                }
            }
            Phase::Synced
                if agreed
                    && backup.owes_idle(applied)
                    && now_us >= backup.idle_look_us
                    && nics.as_mut().is_none_or(|nics| nics.inbound_is_settled(now_us)) =>
            {
                backup.idle_look_us = now_us + if rules.compares() { MATCH_LOOK_US } else { LOOK_US };
                let idle = backup
                    .machine
                    .as_ref()
                    .is_some_and(|machine| machine.qemu.threads().idle());
                if idle {
                    // What it said before it fell silent goes first.
                    self.read_ports();
                    self.tell_idle(applied);
                }
            }
            _ => {}
        }
        self.give_leave();
        if leads {
            self.go_on_taking_over();
        }
    }

    fn tell_idle(&mut self, applied: Index) {
        if let Some(backup) = self.backup()
            && let Some(talker) = &backup.talker
            && talker.say(SyncMessage::Idle { applied })
        {
            backup.idle_told = applied;
        }
    }

    /// When the backup wants to be woken.
    pub(super) fn backup_deadline_us(&self) -> Option<u64> {
        let Role::Backup(backup) = &self.role else {
            return None;
        };
        let look = match backup.epochs.phase() {
            Phase::Draining(_) => Some(self.now_us() + LOOK_US),
            _ if self.policy().inputs_are_agreed() && backup.owes_idle(self.agreement.applied) => {
                Some(backup.idle_look_us.max(self.now_us() + LOOK_US))
            }
            _ => None,
        };
        // Only while it is looked at (`run_backup`): a deadline that nobody moves on would keep the loop spinning.
        let settles = backup.epochs.rules().backup_runs()
            && self.config.disks.settles_when_idle()
            && !self.config.spec.disks.is_empty();
        let disks = (settles && backup.epochs.phase() == Phase::Synced)
            .then(|| backup.disks_idle.deadline_us().max(self.now_us()));
        [look, disks].into_iter().flatten().min()
    }

    pub(super) fn backup_stream_ended(&mut self, session: u64) {
        if let Some(backup) = self.backup()
            && backup.session == session
        {
            tracing::debug!("the primary's stream has ended");
        }
    }

    pub(super) fn backup_session_ended(&mut self, session: u64, why: &str, torn: bool) {
        let leads = self.group.is_leader();
        let Some(backup) = self.backup().filter(|backup| backup.session == session) else {
            return;
        };
        let whole = backup.is_whole();
        backup.epochs.session_ended();
        backup.talker = None;
        backup.staged = None;
        self.event(
            EventKind::PrimaryLost,
            format!("the sync with the primary ended: {why}"),
        );
        if torn {
            self.event(
                EventKind::LoadFailed,
                "a sync was applied to the copy of the VM here by half: it is ended, and never takes over",
            );
        }
        if !whole || torn {
            self.drop_machine();
            return;
        }
        // Its last sync is dropped whole; what was agreed since the one before goes on.
        self.forget_cut();
        if leads && self.agreement.leads() {
            self.go_on_taking_over();
        }
    }

    /// The group has agreed on who holds a complete copy, and another host leads.
    pub(super) fn backup_set_agreed(&mut self, dropped: bool) {
        if !dropped {
            if let Some(machine) = self.backup().and_then(|backup| backup.machine.clone()) {
                *self.shared.copy.lock() = Arc::downgrade(machine.qemu.memory());
            }
            return self.event(
                EventKind::Protected,
                "this host holds a complete second copy of the VM",
            );
        }
        // One that is being brought in is not complete yet: the entry is of before it.
        if self.backup().is_some_and(|backup| backup.is_whole()) {
            self.event(
                EventKind::Dropped,
                "the primary goes on without this host; its copy of the VM is ended",
            );
            self.drop_machine();
        }
    }
}
