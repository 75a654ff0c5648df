//! The primary's part of the loop: it takes inputs, holds outputs, brings a backup in and syncs with it.
//!
//! Invariants:
//! 1. (One speaker) Only a leader of the group, as of an entry of its own term, takes inputs and releases outputs.
//! 2. A backup that is lost is dropped from the complete set by an agreed entry before outputs leave without it.
//! 3. One sync at a time; the next one begins when the backup has applied the last.
//! 4. One session's thread at a time: who stopped the VM lets it run on, and not into another session's sync.
//!
//! `joining` finds and loses backups, `syncing` drives the syncs, `commands` does what people ask, `policy` changes how the VM is
//! replicated, `alone` serves by a person's order and takes the other hosts back, `replacing` makes room for a new machine in a dead one's place. Not here: the work of a sync (`session::primary`), when one is due (core's `trigger`).

mod alone;
mod commands;
mod joining;
mod policy;
mod replacing;
mod switched_off;
mod syncing;
mod watched;

use super::Line;
use super::event::{LoopEvent, Started};
use super::machine::Machine;
use super::nics::{MOST_BATCH_BYTES, Nics};
use super::run::{Role, VmLoop};
use super::session::jobs::Jobs;
use super::session::link::Closer;
use super::session::talker::Talker;
use super::session::waiting::Waiting;
use crate::control::{Answer, FailoverStatus, Progress, SyncStatus};
use crossbeam_channel::Sender;
use dunlin_core::agreed::{Agreed, AgreedState, Frame, Life, ReplicaSet};
use dunlin_core::output::Output;
use dunlin_core::output::gate::Voice;
use dunlin_core::policy::Manner;
use dunlin_core::replica::sync::primary::Word;
use dunlin_core::sync::change_over::ChangeOver;
use dunlin_core::sync::cost::SyncCost;
use dunlin_core::units::{Epoch, Index, ReplicaId};
use dunlin_core::wire::sync::{SyncMessage, parts};
use dunlin_guest::Start;
use dunlin_guest::qemu::QemuEvent;
use std::sync::Arc;
use std::time::Duration;

/// How long to wait before a backup is looked for again.
const REJOIN_US: u64 = 500_000;
/// A backup whose host says nothing for this long (it answers heartbeats many times as often) is given up.
const SILENCE_US: u64 = 400_000;
/// How often a socket that QEMU has not emptied yet is looked at: there is no event for "the peer has read".
const DRAIN_LOOK_US: u64 = 100;
/// Entries under way to the group beyond which the network has to wait.
const INPUTS_UNDER_WAY: u64 = 1024;
/// How often QEMU is asked what has happened, at the most.
const ASK_QEMU_US: u64 = 1000;
/// How often it is looked at what the manner in use brings.
const OBSERVE_US: u64 = 50_000;
/// An epoch that lasted at least this long has many dirty pages: they are worked on before the VM stops.
const AHEAD_AFTER_US: u64 = 200_000;
/// How long a guest may take to switch itself off.
const POWERDOWN_US: u64 = 30_000_000;

/// What QEMU printed so shortly before its end says why.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A primary.
pub struct PrimaryRole {
    machine: Option<Arc<Machine>>,
    starting: Option<u64>,
    session: Option<Session>,
    /// A session that was ended, whose thread has not said so yet (invariant 4), since when, and whether that was told.
    lingers: Option<Lingers>,
    sync: Option<Run>,
    /// A sync's beginning was refused by the log; whether it was to be a hand-over.
    sync_refused: Option<bool>,
    /// How the copies are kept in this epoch; where that follows what pays, by this choice.
    manner: Manner,
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
    room: Option<Room>,
    hand_over: Option<Sender<Answer>>,
    /// The VM stands here, and the group was asked to follow the backup.
    handed: bool,
    /// A member that a person wants out of the group: since which entry that is so, and who asked.
    leaving: Option<(Index, Sender<Answer>)>,
    /// Syncs so far.
    pub sync_status: SyncStatus,
    /// The join under way.
    pub progress: Option<Progress>,
}

struct Session {
    id: u64,
    peer: ReplicaId,
    phase: Phase,
    jobs: Option<Jobs<Word>>,
    closer: Option<Closer>,
    /// What the loop itself has to say to the backup.
    talker: Option<Talker>,
    /// What the session's thread waits for.
    waiting: Waiting,
}

struct Lingers {
    id: u64,
    since_us: u64,
    told: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Connecting,
    Joining,
    /// The copy is done: the last sync is to begin.
    Copied,
    LastSync,
    Synced,
}

/// A sync under way.
struct Run {
    epoch: Epoch,
    stage: Stage,
    hand_over: bool,
    /// Whether the log says where the epoch ends.
    agreed: bool,
    /// The VM stands, or stood, and what it had said is in the epoch that ends.
    drawn: bool,
    next: Manner,
    began_us: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The session does what can be done while the VM runs.
    Ahead,
    /// `Sync(epoch)` is proposed.
    Proposed,
    /// It is agreed; the VM has to get what was agreed before it.
    Draining,
    /// The session works on it.
    Running,
    /// The backup has acknowledged, and is loading.
    Acknowledged,
}

/// How long a VM whose disk is full waits until it tries again.
const ROOM_US: u64 = 1_000_000;

/// A VM whose disk is full.
#[derive(Clone, Copy)]
struct Room {
    retry_at_us: u64,
    /// It was told to go on; if nothing fails until `retry_at_us`, there is room.
    tried: bool,
}

impl PrimaryRole {
    fn new(machine: Option<Arc<Machine>>) -> Self {
        Self {
            machine,
            starting: None,
            session: None,
            lingers: None,
            sync: None,
            sync_refused: None,
            manner: Manner::Active,
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
            room: None,
            hand_over: None,
            handed: false,
            leaving: None,
            sync_status: SyncStatus::default(),
            progress: None,
        }
    }

    /// Whether what the network sends may go to the VM before the group has agreed on it: a backup that does not run, and will
    /// not after the next sync, executes nothing; what leaves waits for a sync that has its inputs' effects in it; and a
    /// client sends again what was lost with the primary.
    fn executes_at_once(&self) -> bool {
        let follows = self
            .session
            .as_ref()
            .is_some_and(|session| session.phase == Phase::Synced);
        follows && self.manner == Manner::Passive && self.sync.as_ref().is_none_or(|run| !run.agreed)
    }

    /// Whether a backup follows, or is being brought in.
    pub fn has_session(&self) -> bool {
        self.session.is_some()
    }

    /// A sync is about to stop the VM: all that it says belongs to the epoch that ends, so none of it may stay in QEMU. (QEMU
    /// throws away what it could not write when it stops the VM, and may have written a part of it.)
    fn is_stopping(&self) -> bool {
        let stops = |run: &Run| run.stage == Stage::Running && !run.drawn;
        self.sync.as_ref().is_some_and(stops)
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

    /// Ends the copy of the VM here, and every session around it.
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
            && let Err(error) = machine.qemu.kill()
        {
            tracing::warn!(vm = self.config.name, "ending QEMU: {error}");
        }
        if let Some(machine) = self.machine() {
            // Nobody is left to be told.
            machine.disks.hold_errors(false);
        }
        self.close_backup_session();
        self.role = Role::None;
        self.nics = None;
        self.output = self.new_output(Voice::Shut, self.agreement.state.epoch.next());
        self.forget_cut();
    }

    pub(super) fn primary_state(&self, primary: &PrimaryRole) -> &'static str {
        match (&primary.machine, &primary.session, self.output.voice()) {
            (None, _, _) => "starting",
            (_, _, Voice::Shut) => "no-majority",
            _ if primary.room.is_some() => "disk-full",
            (
                _,
                Some(Session {
                    phase: Phase::Synced, ..
                }),
                _,
            ) => "running",
            (_, Some(_), _) => "joining",
            (_, None, _) if self.policy().is_replicated() => "alone",
            (_, None, _) if self.config.policy.is_replicated() => "protection-paused",
            (_, None, _) => "running",
        }
    }

    /// This host has just been elected.
    pub(super) fn elected(&mut self) {
        if let Role::Backup(_) = &self.role {
            self.prepare_take_over();
        }
    }

    /// This host leads, and has applied everything that was agreed before.
    pub(super) fn leads(&mut self) {
        let state = self.agreement.state;
        match &self.role {
            // All that it was elected for; the order is carried out in this step.
            Role::None if self.leads_to_end() => {}
            Role::None if self.may_boot_cold() => self.boot_cold(),
            Role::None if state.life == Life::Fresh => {
                self.propose(&Agreed::Complete {
                    set: ReplicaSet::one(self.me),
                    epoch: Epoch(0),
                });
            }
            Role::Backup(_) if state.complete.contains(self.me) => self.begin_take_over(),
            Role::Primary(_) if state.complete.contains(self.me) => self.speak_again(),
            Role::Primary(_) | Role::Backup(_) | Role::None => {
                self.event(
                    "cannot-lead",
                    "this host was elected without a complete copy of the VM; it steps down",
                );
                self.drop_machine();
                self.cold.end_mandate();
                self.group.step_down();
            }
        }
    }

    fn speak_again(&mut self) {
        // A hand-over that ended with this host's own election.
        self.transfer_failed();
        self.event("majority", "a majority of the group answers again");
        let session = self.session_survives();
        if let Some((id, false)) = session {
            self.session_ended(
                id,
                "the group has begun a new term, and the session cannot go on in it",
            );
        }
        let survived = session.is_some_and(|(_, survives)| survives);
        if let Some(primary) = self.primary()
            && !survived
        {
            // A sync whose entry was lost with the old term never comes.
            primary.sync = None;
        }
        let AgreedState { complete, epoch, .. } = self.agreement.state;
        if complete == ReplicaSet::one(self.me) {
            // The entry may have been agreed between two terms, when nobody led who could have acted on it.
            self.primary_set_agreed(complete, epoch);
        } else if survived {
            self.output.set_voice(Voice::Protected);
        } else {
            // The other copy is no longer followed: it has to be dropped first (invariant 2).
            self.drop_backup();
        }
    }

    /// The group has agreed on who holds a complete copy; this host leads.
    pub(super) fn primary_set_agreed(&mut self, set: ReplicaSet, epoch: Epoch) {
        let alone = set == ReplicaSet::one(self.me);
        match &self.role {
            Role::None if alone => self.boot(),
            Role::Backup(_) if alone => self.speak_after_take_over(),
            Role::Primary(primary) if alone => {
                if let Some(machine) = &primary.machine {
                    machine.disks.hold_errors(false);
                }
                self.output.set_voice(Voice::Alone);
                self.stands_alone();
                self.policy_settled();
                if self.policy().is_replicated() {
                    self.event(
                        "unprotected",
                        "the VM runs without a backup: if this host dies now, it is lost",
                    );
                }
            }
            Role::Primary(_) => {
                self.output.set_voice(Voice::Protected);
                if self.output.epoch() > epoch {
                    self.output.acknowledged(epoch);
                }
                let now_us = self.now_us();
                if let Some(primary) = self.primary() {
                    primary.progress = None;
                    primary.last_sync_us = now_us;
                    if let Some(session) = &mut primary.session {
                        session.phase = Phase::Synced;
                    }
                    if let Some(machine) = &primary.machine {
                        machine.disks.hold_errors(true);
                    }
                }
                self.event("protected", "a complete second copy of the VM follows");
            }
            Role::None | Role::Backup(_) => {}
        }
    }

    fn boot(&mut self) {
        let session = self.new_session();
        let mut primary = PrimaryRole::new(None);
        primary.starting = Some(session);
        self.role = Role::Primary(primary);
        self.start_machine(session, Start::Boot);
    }

    /// Starts QEMU on a thread that lives as long as the process it starts: a parent's death signal is tied to it.
    pub(super) fn start_machine(&mut self, session: u64, start: Start) {
        let (config, to_loop, term) = (self.config.clone(), self.to_loop.clone(), self.group.term());
        let state = self.host.state.clone();
        let shared = self.shared.clone();
        self.starts_under_way += 1;
        let work = move || {
            let result = Machine::start(&config, start, term, &state, &shared, &to_loop);
            to_loop.send(LoopEvent::MachineStarted { session, result });
        };
        if let Err(error) = std::thread::Builder::new().name("start-qemu".into()).spawn(work) {
            self.starts_under_way -= 1;
            self.machine_started(session, Err(format!("a thread to start QEMU: {error}")));
        }
    }

    pub(super) fn machine_started(&mut self, session: u64, result: Result<Started, String>) {
        if let Ok(started) = &result {
            // A disk that misbehaves does so for every copy of the VM on this host.
            for (disk, fault) in &self.injected {
                started.machine.disks.inject(*disk, *fault);
            }
        }
        if matches!(&self.role, Role::Backup(_)) {
            return self.backup_started(session, result);
        }
        let Some(primary) = self.primary() else { return };
        if primary.starting != Some(session) {
            return;
        }
        primary.starting = None;
        let opened = result
            .and_then(|started| Nics::open(&self.config, started.ports).map(|nics| (started.machine, nics)));
        match opened {
            Ok((machine, nics)) => {
                let (accel, why) = machine.qemu.accel();
                let how = why.map_or(String::new(), |why| format!(" ({why})"));
                self.event(
                    "started",
                    format!("QEMU {} runs, {accel:?}{how}", machine.qemu.version()),
                );
                self.nics = Some(nics);
                if let Some(primary) = self.primary() {
                    primary.machine = Some(machine);
                }
                self.output = self.new_output(Voice::Alone, self.agreement.state.epoch.next());
                if self.agreement.leads {
                    self.stands_alone();
                } else {
                    self.output.set_voice(Voice::Shut);
                }
            }
            Err(why) => {
                self.event("failed", format!("the VM does not start: {why}"));
                self.order_failed(&format!("the VM does not start: {why}"));
                self.failure = Some(why);
                self.drop_machine();
            }
        }
    }

    /// Whether frames from the network are taken (invariant 1).
    pub(super) fn takes_inputs(&self) -> bool {
        matches!(&self.role, Role::Primary(primary) if primary.machine.is_some())
            && self.agreement.leads
            && self.group.is_leader()
            && self.output.voice() != Voice::Shut
            && self.group.appended().index.0 - self.group.committed().0 < INPUTS_UNDER_WAY
            && (!self.inputs_are_agreed() || self.group.has_input_room(MOST_BATCH_BYTES))
    }

    /// Whether the VM has to wait before it says more: its output waits for a sync, and takes all that it may. QEMU's socket
    /// fills up then, and its card's queue, as on a slow wire.
    pub(super) fn output_has_to_wait(&self) -> bool {
        let stopping = matches!(&self.role, Role::Primary(primary) if primary.is_stopping());
        self.output.is_full() && !stopping
    }

    /// What the VM says here from now on.
    pub(super) fn new_output(&self, voice: Voice, epoch: Epoch) -> Output {
        Output::new(voice, epoch).with_budget(self.config.memory.outbound_bytes())
    }

    /// Whether frames of the log go to the VM here.
    pub(super) fn executes_inputs(&self) -> bool {
        match &self.role {
            Role::Primary(primary) => primary.machine.is_some(),
            Role::Backup(backup) => backup.executes_inputs(),
            Role::None => false,
        }
    }

    /// Whether inputs pass the log before the VM sees them.
    fn inputs_are_agreed(&self) -> bool {
        let at_once = matches!(&self.role, Role::Primary(primary) if primary.executes_at_once());
        self.policy().inputs_are_agreed() && !at_once
    }

    pub(super) fn queue_input(&mut self, frame: &Frame) {
        if let Some(nics) = &mut self.nics {
            nics.queue(&self.output.heard(frame));
            self.frames_in += 1;
        }
    }

    pub(super) fn read_taps(&mut self) {
        if !self.takes_inputs() {
            return;
        }
        let agreed = self.inputs_are_agreed();
        let Some(nics) = &mut self.nics else { return };
        let frames = nics.read_taps();
        if nics.old_source_was_seen() {
            self.announcements.old_source_seen();
        }
        if frames.is_empty() {
            return;
        }
        if agreed {
            let count = frames.len();
            if !self.propose(&Agreed::Frames(frames))
                && let Some(nics) = &mut self.nics
            {
                nics.lost(count);
            }
        } else {
            frames.iter().for_each(|frame| self.queue_input(frame));
        }
    }

    /// What the VM here has sent: held on a primary, kept on a backup, which tells the primary too.
    pub(super) fn read_ports(&mut self) {
        let now_us = self.now_us();
        let Some(nics) = &mut self.nics else { return };
        let talker = match &self.role {
            Role::Backup(backup) => backup.told_to(),
            Role::Primary(_) | Role::None => None,
        };
        let mut told = Vec::new();
        let output = &mut self.output;
        let read = nics.read_ports(|frame| {
            if talker.is_some() {
                told.push(frame.clone());
            }
            output.said(frame, now_us);
        });
        if let Some(talker) = talker
            && !told.is_empty()
        {
            let epoch = output.epoch();
            for frames in parts::frames(told) {
                // Dropped where the primary does not read: it releases less then.
                talker.say(SyncMessage::Said { epoch, frames });
            }
        }
        if let Err(error) = read {
            self.machine_died(&error.to_string());
        }
    }

    pub(super) fn flush_ports(&mut self) {
        let Some(nics) = &mut self.nics else { return };
        if let Err(error) = nics.flush() {
            self.machine_died(&error.to_string());
        }
    }

    /// Whether the network may hear this host now (invariant 1). While another complete copy exists that could be elected, only
    /// for as long as a majority has promised to elect nobody: this is looked at before each single frame.
    fn may_speak(&self, now_us: u64) -> bool {
        let leads = self.group.is_leader() && self.agreement.leads;
        leads
            && match self.output.voice() {
                Voice::Alone => true,
                Voice::Protected => self.group.may_speak(now_us),
                Voice::Kept | Voice::Shut => false,
            }
    }

    /// Lets out what may leave.
    pub(super) fn release(&mut self) {
        loop {
            let now_us = self.now_us();
            if !self.may_speak(now_us) {
                return;
            }
            if self.announcements.take_due(now_us)
                && let Some(nics) = &self.nics
            {
                nics.announce();
            }
            let Some(frame) = self.output.release(now_us) else {
                return;
            };
            self.frames_out += 1;
            if let Some(nics) = &self.nics {
                nics.send(&frame);
            }
        }
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
        self.say_who_left();
        self.readmit_hosts();
        self.miss_silent_backup();
        self.observe_output();
        self.look_for_backup();
        self.begin_last_sync();
        self.begin_refused_sync();
        self.start_due_sync();
        self.start_drained_sync();
    }

    fn follow_qemu(&mut self) {
        let Some(machine) = self.machine().cloned() else {
            return;
        };
        let events = match self.qemu_is_to_be_asked() {
            true => machine.qemu.qmp().poll_events(),
            false => Ok(Vec::new()),
        };
        let events = match events {
            Ok(events) => events,
            Err(error) => return self.machine_died(&error.to_string()),
        };
        for event in events {
            match event {
                QemuEvent::Shutdown { guest: true, .. } => self.guest_switched_off(),
                QemuEvent::Reset { guest: true } => self.guest_reset(),
                QemuEvent::GuestPanicked => self.event("guest-panicked", "the guest's kernel panicked"),
                QemuEvent::BlockIoError { reason, stopped } => self.guest_disk_failed(&reason, stopped),
                _ => {}
            }
        }
        let now_us = self.now_us();
        if let Some(primary) = self.primary()
            && primary.quit_at_us.is_some_and(|at_us| at_us <= now_us)
        {
            primary.quit_at_us = None;
            self.event(
                "powerdown-ignored",
                "the guest did not switch itself off in time; it is ended",
            );
            self.propose(&Agreed::Down);
        }
        self.look_for_room();
    }

    /// Not for each frame: that is a system call, and events are rare.
    fn qemu_is_to_be_asked(&mut self) -> bool {
        let (ended, now_us) = (self.qemu_has_ended(), self.now_us());
        let due = |primary: &&mut PrimaryRole| ended || now_us >= primary.ask_qemu_us;
        let Some(primary) = self.primary().filter(due) else {
            return false;
        };
        primary.ask_qemu_us = now_us + ASK_QEMU_US;
        true
    }

    /// The guest boots anew. Both copies got the same input, but a boot is made of clocks: they are made one again at once.
    fn guest_reset(&mut self) {
        self.event("guest-reset", "the guest has reset its machine and boots anew");
        if let Some(primary) = self.primary() {
            primary.guest_was_reset = true;
        }
    }

    /// QEMU's answer to a request that failed. Where there is no room left it stops the VM, and tries the request again when the
    /// VM goes on.
    fn guest_disk_failed(&mut self, reason: &str, stopped: bool) {
        let retry_at_us = self.now_us() + ROOM_US;
        let Some(primary) = self.primary().filter(|_| stopped) else {
            return self.event("disk-error", reason);
        };
        let known = primary.room.replace(Room {
            retry_at_us,
            tried: false,
        });
        if known.is_none() {
            self.event(
                "waits-for-room",
                format!("the VM stands still until there is room on its disk ({reason}); nothing is lost"),
            );
        }
    }

    fn look_for_room(&mut self) {
        let now_us = self.now_us();
        let Some(primary) = self.primary() else { return };
        let Some(room) = primary.room.filter(|room| room.retry_at_us <= now_us) else {
            return;
        };
        if room.tried {
            primary.room = None;
            return self.event("has-room", "the VM goes on: there is room on its disk again");
        }
        primary.room = Some(Room {
            retry_at_us: now_us + ROOM_US,
            tried: true,
        });
        if primary.sync.is_none() && !primary.handed {
            self.resume_vm("after its disk was full");
        }
    }

    /// This host's disk cannot serve the VM. A complete backup can: it has never seen the request that failed, and the VM here is
    /// not told of it either.
    pub(super) fn leave_to_the_backup(&mut self, why: &str) {
        let follows = |session: &Session| session.phase == Phase::Synced;
        let protected = self.agreement.state.complete.0.count_ones() > 1;
        let primary = self.primary();
        if protected && primary.is_some_and(|primary| primary.session.as_ref().is_some_and(follows)) {
            self.event("left-to-backup", format!("{why}: the backup goes on with the VM"));
            self.end_copy(why);
        }
    }

    /// The VM's process has ended, or cannot be talked to: the backup, if there is one, goes on.
    pub(super) fn machine_died(&mut self, why: &str) {
        if self.has_switched_off() {
            return;
        }
        let last_words = self
            .machine()
            .and_then(|machine| machine.qemu.stderr().last_words(LAST_WORDS));
        let why = match last_words {
            Some(words) => format!("{why}; it said: {words}"),
            None => why.to_owned(),
        };
        self.event("qemu-died", format!("QEMU: {why}"));
        self.end_copy(&why);
    }

    fn end_copy(&mut self, why: &str) {
        let was_primary = matches!(self.role, Role::Primary(_));
        let protected = self.agreement.state.complete.0.count_ones() > 1;
        self.drop_machine();
        if was_primary {
            self.group.may_lead(false);
            if protected {
                self.group.step_down();
            } else {
                self.failure = Some(format!("QEMU ended without a backup: {why}"));
            }
        }
    }

    /// A backup has become the primary.
    pub(super) fn become_primary(&mut self, machine: Arc<Machine>, failover: FailoverStatus) {
        // What QEMU says of the end of the session is about that, and explains no later end of its own.
        machine.qemu.stderr().turn_page();
        self.role = Role::Primary(PrimaryRole::new(Some(machine)));
        self.failover = Some(failover);
    }
}

/// "Ask again at once": not an exit code, the command line never sees it.
pub const AGAIN: i32 = -1;
