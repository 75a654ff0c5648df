//! The primary's part of the loop: it takes inputs, holds outputs, brings a backup in and syncs with it.
//!
//! Invariants:
//! 1. (One speaker) Only a leader of the group, as of an entry of its own term, takes inputs and releases outputs.
//! 2. A backup that is lost is dropped from the complete set by an agreed entry before outputs leave without it.
//! 3. One sync at a time; the next one begins when the backup has applied the last.
//!
//! Not here: the work of a sync (`session::primary`), when one is due (core's `trigger`).

use super::connect::open;
use super::event::{Command, LoopEvent, Started, SyncStep};
use super::machine::Machine;
use super::run::{Role, VmLoop};
use super::session::link::{Closer, SyncLink};
use super::session::primary::{Primary, PrimaryJob};
use super::status::RECENT;
use super::{Ended, nics::Nics};
use crate::control::{Answer, FailoverStatus, Progress, SyncFigures, SyncStatus};
use crossbeam_channel::{Sender, unbounded};
use dunlin_core::agreed::{Agreed, Frame, Life, ReplicaSet};
use dunlin_core::output::gate::{Gate, Voice};
use dunlin_core::sync::trigger::{Decision, Reason, Sight, decide};
use dunlin_core::units::{Epoch, Index, ReplicaId};
use dunlin_fabric::link::{Purpose, Stream};
use dunlin_guest::Start;
use dunlin_guest::disk::DiskEvent;
use dunlin_guest::qemu::QemuEvent;
use std::sync::{Arc, PoisonError};

/// How long to wait before a backup is looked for again.
const REJOIN_US: u64 = 500_000;
/// How often a socket that QEMU has not emptied yet is looked at: there is no event for "the peer has read".
const DRAIN_LOOK_US: u64 = 100;
/// Entries under way to the group beyond which the network has to wait.
const INPUTS_UNDER_WAY: u64 = 1024;
/// How long a guest may take to switch itself off.
const POWERDOWN_US: u64 = 30_000_000;

/// A primary.
pub struct PrimaryRole {
    machine: Option<Arc<Machine>>,
    starting: Option<u64>,
    session: Option<Session>,
    sync: Option<Run>,
    last_sync_us: u64,
    next_look_us: u64,
    rejoin_at_us: u64,
    backup_applied: Index,
    disk_asks: bool,
    quit_at_us: Option<u64>,
    hand_over: Option<Sender<Answer>>,
    /// The VM stands here, and the group was asked to follow the backup.
    handed: bool,
    /// Syncs so far.
    pub sync_status: SyncStatus,
    /// The join under way.
    pub progress: Option<Progress>,
}

struct Session {
    id: u64,
    peer: ReplicaId,
    phase: Phase,
    jobs: Option<Sender<PrimaryJob>>,
    closer: Option<Closer>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Connecting,
    Joining,
    LastSync,
    Synced,
}

/// A sync under way.
struct Run {
    epoch: Epoch,
    stage: Stage,
    hand_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// `Sync(epoch)` is proposed.
    Proposed,
    /// It is agreed; the VM has to get what was agreed before it.
    Draining,
    /// The session works on it.
    Running,
    /// The backup has acknowledged, and is loading.
    Acknowledged,
}

impl PrimaryRole {
    fn new(machine: Option<Arc<Machine>>) -> Self {
        Self {
            machine,
            starting: None,
            session: None,
            sync: None,
            last_sync_us: 0,
            next_look_us: 0,
            rejoin_at_us: 0,
            backup_applied: Index(0),
            disk_asks: false,
            quit_at_us: None,
            hand_over: None,
            handed: false,
            sync_status: SyncStatus::default(),
            progress: None,
        }
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
        self.close_backup_session();
        self.role = Role::None;
        self.nics = None;
        self.gate = Gate::new(Voice::Shut, self.agreement.state.epoch.next());
        self.forget_cut();
    }

    pub(super) fn primary_state(&self, primary: &PrimaryRole) -> &'static str {
        match (&primary.machine, &primary.session, self.gate.voice()) {
            (None, _, _) => "starting",
            (_, _, Voice::Shut) => "no-majority",
            (
                _,
                Some(Session {
                    phase: Phase::Synced, ..
                }),
                _,
            ) => "running",
            (_, Some(_), _) => "joining",
            (_, None, _) if self.config.policy.is_replicated() => "alone",
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
                self.group.step_down();
            }
        }
    }

    fn speak_again(&mut self) {
        // A hand-over that ended with this host's own election.
        self.transfer_failed();
        let synced = self.primary().is_some_and(|primary| {
            primary
                .session
                .as_ref()
                .is_some_and(|session| session.phase == Phase::Synced)
        });
        let others = self.agreement.state.complete != ReplicaSet::one(self.me);
        self.event("majority", "a majority of the group answers again");
        match (others, synced) {
            (true, true) => self.gate.set_voice(Voice::Protected),
            // The other copy is no longer followed: it has to be dropped first (invariant 2).
            (true, false) => {
                self.propose(&Agreed::Complete {
                    set: ReplicaSet::one(self.me),
                    epoch: self.agreement.state.epoch,
                });
            }
            (false, _) => self.gate.set_voice(Voice::Alone),
        }
        // A sync whose entry was lost with the old term never comes.
        if let Some(primary) = self.primary()
            && primary
                .sync
                .as_ref()
                .is_some_and(|run| run.stage == Stage::Proposed)
        {
            primary.sync = None;
        }
    }

    /// The group has agreed on who holds a complete copy; this host leads.
    pub(super) fn primary_set_agreed(&mut self, set: ReplicaSet, epoch: Epoch) {
        let alone = set == ReplicaSet::one(self.me);
        match &self.role {
            Role::None if alone => self.boot(),
            Role::Backup(_) if alone => self.speak_after_take_over(),
            Role::Primary(_) if alone => {
                self.gate.set_voice(Voice::Alone);
                if self.config.policy.is_replicated() {
                    self.event(
                        "unprotected",
                        "the VM runs without a backup: if this host dies now, it is lost",
                    );
                }
            }
            Role::Primary(_) => {
                self.gate.set_voice(Voice::Protected);
                if self.gate.epoch() > epoch {
                    self.gate.acknowledged(epoch);
                }
                let now_us = self.now_us();
                if let Some(primary) = self.primary() {
                    primary.progress = None;
                    primary.last_sync_us = now_us;
                    if let Some(session) = &mut primary.session {
                        session.phase = Phase::Synced;
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
        let state = self.host.state.join("vms").join(&config.name);
        let work = move || {
            let result = Machine::start(&config, start, term, &state, &to_loop);
            to_loop.send(LoopEvent::MachineStarted { session, result });
        };
        if let Err(error) = std::thread::Builder::new().name("start-qemu".into()).spawn(work) {
            self.machine_started(session, Err(format!("a thread to start QEMU: {error}")));
        }
    }

    pub(super) fn machine_started(&mut self, session: u64, result: Result<Started, String>) {
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
                self.gate = Gate::new(Voice::Alone, Epoch(1));
                if !self.agreement.leads {
                    self.gate.set_voice(Voice::Shut);
                }
            }
            Err(why) => {
                self.event("failed", format!("the VM does not start: {why}"));
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
            && self.gate.voice() != Voice::Shut
            && self.group.core().appended().index.0 - self.group.committed().0 < INPUTS_UNDER_WAY
    }

    /// Whether frames of the log go to the VM here.
    pub(super) fn executes_inputs(&self) -> bool {
        match &self.role {
            Role::Primary(primary) => primary.machine.is_some(),
            Role::Backup(backup) => backup.executes_inputs(),
            Role::None => false,
        }
    }

    pub(super) fn queue_input(&mut self, frame: &Frame) {
        if let Some(nics) = &mut self.nics {
            nics.queue(frame);
            self.frames_in += 1;
        }
    }

    pub(super) fn read_taps(&mut self) {
        if !self.takes_inputs() {
            return;
        }
        let Some(nics) = &mut self.nics else { return };
        let frames = nics.read_taps();
        if frames.is_empty() {
            return;
        }
        if self.config.policy.inputs_are_agreed() {
            self.propose(&Agreed::Frames(frames));
        } else {
            frames.iter().for_each(|frame| self.queue_input(frame));
        }
    }

    pub(super) fn read_ports(&mut self) {
        let Some(nics) = &mut self.nics else { return };
        let gate = &mut self.gate;
        if let Err(error) = nics.read_ports(|frame| gate.arrived(frame)) {
            self.machine_died(&error.to_string());
        }
    }

    pub(super) fn flush_ports(&mut self) {
        let Some(nics) = &mut self.nics else { return };
        if let Err(error) = nics.flush() {
            self.machine_died(&error.to_string());
        }
    }

    /// Lets out what may leave.
    pub(super) fn release(&mut self) {
        // A gate is open only while this host leads (invariant 1).
        if !(self.group.is_leader() && self.agreement.leads) {
            return;
        }
        while let Some(frame) = self.gate.release() {
            self.frames_out += 1;
            if let Some(nics) = &self.nics {
                nics.send(&frame);
            }
        }
    }

    /// The primary's turn: QEMU's own events, the backup, the sync.
    pub(super) fn run_primary(&mut self) {
        if !matches!(self.role, Role::Primary(_)) {
            return;
        }
        self.follow_qemu();
        self.look_for_backup();
        self.start_due_sync();
        self.start_drained_sync();
    }

    fn follow_qemu(&mut self) {
        let Some(machine) = self.machine().cloned() else {
            return;
        };
        let events = match machine.qemu.qmp().poll_events() {
            Ok(events) => events,
            Err(error) => return self.machine_died(&error.to_string()),
        };
        for event in events {
            match event {
                QemuEvent::Shutdown { guest: true, .. } => {
                    self.event("guest-shutdown", "the guest switched itself off");
                    self.propose(&Agreed::Down);
                }
                QemuEvent::GuestPanicked => self.event("guest-panicked", "the guest's kernel panicked"),
                QemuEvent::BlockIoError { reason } => self.event("disk-error", reason),
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
    }

    /// The VM's process has ended, or cannot be talked to: the backup, if there is one, goes on.
    pub(super) fn machine_died(&mut self, why: &str) {
        let own_words = self
            .machine()
            .map(|machine| machine.qemu.stderr().text())
            .unwrap_or_default();
        let own_words = own_words.lines().last().unwrap_or_default();
        self.event("qemu-died", format!("QEMU: {why}; {own_words}"));
        let was_primary = matches!(self.role, Role::Primary(_));
        let protected = self.agreement.state.complete.0.count_ones() > 1;
        self.drop_machine();
        if was_primary {
            self.group.may_lead(false);
            if protected {
                self.group.step_down();
            } else {
                self.failure = Some(format!("QEMU ended without a backup: {why} {own_words}"));
            }
        }
    }

    fn look_for_backup(&mut self) {
        let now_us = self.now_us();
        let lone = self.primary().is_some_and(|primary| {
            primary.session.is_none() && !primary.handed && now_us >= primary.rejoin_at_us
        });
        if lone && self.agreement.leads && self.gate.voice() == Voice::Protected {
            // The entry that drops the lost backup was refused when it was proposed (invariant 2): once more.
            if let Some(primary) = self.primary() {
                primary.rejoin_at_us = now_us + REJOIN_US;
            }
            self.drop_backup();
            return;
        }
        if !self.config.policy.is_replicated() || !self.agreement.leads || self.gate.voice() != Voice::Alone {
            return;
        }
        let candidate = self
            .config
            .group
            .iter()
            .map(|host| host.member)
            .find(|member| member.id != self.me && !member.witness && self.is_connected(member.id));
        let Some(peer) = candidate else { return };
        let session_id = self.next_session + 1;
        let Some(primary) = self.primary() else { return };
        if primary.session.is_some() || primary.machine.is_none() || now_us < primary.rejoin_at_us {
            return;
        }
        primary.session = Some(Session {
            id: session_id,
            peer: peer.id,
            phase: Phase::Connecting,
            jobs: None,
            closer: None,
        });
        primary.rejoin_at_us = now_us + REJOIN_US;
        let id = self.new_session();
        let (host, config, to_loop) = (self.host.clone(), self.config.clone(), self.to_loop.clone());
        let term = self.group.term();
        let work = move || {
            let result = open(
                &host,
                &config.name,
                config.host_name(peer.id),
                Purpose::Sync,
                term,
                Vec::new(),
            );
            to_loop.send(LoopEvent::SessionConnected { session: id, result });
        };
        if let Err(error) = std::thread::Builder::new()
            .name("sync-connect".into())
            .spawn(work)
        {
            self.session_ended(id, &format!("a thread to reach the backup: {error}"));
        }
    }

    pub(super) fn session_connected(&mut self, id: u64, result: Result<Stream, String>) {
        let term = self.group.term();
        let to_loop = self.to_loop.clone();
        let (active, audit) = (self.config.policy.backup_is_active(), self.config.sync.audit);
        let Some(peer) = self.session_peer() else { return };
        let connect_mirror = {
            let (host, config, peer) = (self.host.clone(), self.config.clone(), peer);
            Box::new(move |disk: usize| {
                open(
                    &host,
                    &config.name,
                    config.host_name(peer),
                    Purpose::Mirror,
                    term,
                    vec![disk as u8],
                )
            })
        };
        let Some(primary) = self.primary() else { return };
        let (Some(machine), Some(session)) = (primary.machine.clone(), &mut primary.session) else {
            return;
        };
        if session.id != id {
            return;
        }
        let (jobs, receiver) = unbounded();
        let started = result.and_then(|stream| {
            let (link, closer) =
                SyncLink::open(stream, id, to_loop.clone()).map_err(|error| error.to_string())?;
            let worker = Primary {
                session: id,
                machine,
                link,
                jobs: receiver,
                to_loop,
                connect_mirror,
                active,
                audit,
            };
            std::thread::Builder::new()
                .name("sync-primary".into())
                .spawn(move || worker.run(term))
                .map_err(|error| error.to_string())?;
            Ok(closer)
        });
        match started {
            Ok(closer) => {
                session.phase = Phase::Joining;
                session.jobs = Some(jobs);
                session.closer = Some(closer);
                let host = self.session_host();
                self.event("joining", format!("host '{host}' is being brought in as backup"));
            }
            Err(why) => self.session_ended(id, &why),
        }
    }

    fn session_peer(&mut self) -> Option<ReplicaId> {
        self.primary()?.session.as_ref().map(|session| session.peer)
    }

    fn session_host(&mut self) -> String {
        let peer = self.session_peer();
        peer.map_or(String::new(), |peer| self.config.host_name(peer).to_owned())
    }

    fn is_session(&mut self, id: u64) -> bool {
        self.primary()
            .is_some_and(|primary| primary.session.as_ref().is_some_and(|session| session.id == id))
    }

    pub(super) fn join_progress(&mut self, id: u64, what: &str, done: u64, total: u64) {
        if self.is_session(id)
            && let Some(primary) = self.primary()
        {
            primary.progress = Some(Progress {
                what: what.into(),
                done,
                total,
            });
        }
    }

    pub(super) fn join_nearly_done(&mut self, id: u64) {
        if !self.is_session(id) {
            return;
        }
        if let Some(primary) = self.primary()
            && let Some(session) = &mut primary.session
        {
            session.phase = Phase::LastSync;
        }
        self.begin_sync(false);
    }

    fn begin_sync(&mut self, hand_over: bool) {
        let epoch = self.gate.epoch();
        let agreed = self.config.policy.inputs_are_agreed();
        if agreed && !self.propose(&Agreed::Sync { epoch }) {
            return;
        }
        let stage = if agreed { Stage::Proposed } else { Stage::Draining };
        if let Some(primary) = self.primary() {
            primary.sync = Some(Run {
                epoch,
                stage,
                hand_over,
            });
        }
    }

    fn start_due_sync(&mut self) {
        let now_us = self.now_us();
        let limits = self.config.sync.limits();
        let active = self.config.policy.backup_is_active();
        let fixed_period = self.config.sync.period_ms.is_some();
        let output_waits = self.gate.waits_for_sync();
        let applied = self.agreement.applied;
        let drained = self.nics.as_ref().is_none_or(Nics::inbound_is_drained);
        if self.gate.voice() != Voice::Protected || !self.agreement.leads {
            return;
        }
        let Some(primary) = self.primary() else { return };
        let (Some(machine), Some(session)) = (&primary.machine, &primary.session) else {
            return;
        };
        if session.phase != Phase::Synced || primary.sync.is_some() {
            return;
        }
        let sight = Sight {
            now_us,
            last_sync_us: primary.last_sync_us,
            output_waits,
            primary_idle: !fixed_period && output_waits && drained && machine.qemu.threads().idle(),
            backup_idle: !active || primary.backup_applied >= applied,
            disk_asks: primary.disk_asks,
        };
        match decide(&limits, &sight) {
            Decision::LookAgain { at_us } => primary.next_look_us = at_us,
            Decision::Sync(reason) => {
                let reasons = &mut primary.sync_status.reasons;
                let counter = match reason {
                    Reason::Idle => &mut reasons.idle,
                    Reason::Limit => &mut reasons.limit,
                    Reason::Quiet => &mut reasons.quiet,
                    Reason::Disk => &mut reasons.disk,
                };
                *counter += 1;
                primary.last_sync_us = now_us;
                primary.disk_asks = false;
                self.begin_sync(false);
            }
        }
    }

    /// `Sync(epoch)` is agreed. Whether it holds back what comes after it.
    pub(super) fn sync_agreed(&mut self, epoch: Epoch) -> bool {
        if let Role::Backup(_) = &self.role {
            return self.backup_sync_agreed(epoch);
        }
        let leads = self.agreement.leads;
        let Some(run) = self.primary().and_then(|primary| primary.sync.as_mut()) else {
            return false;
        };
        if !leads || run.epoch != epoch || run.stage != Stage::Proposed {
            return false;
        }
        run.stage = Stage::Draining;
        true
    }

    fn start_drained_sync(&mut self) {
        let agreed = self.config.policy.inputs_are_agreed();
        if agreed && !self.nics.as_ref().is_none_or(Nics::inbound_is_drained) {
            return;
        }
        let Some(primary) = self.primary() else { return };
        let (Some(run), Some(session)) = (&mut primary.sync, &primary.session) else {
            return;
        };
        if run.stage != Stage::Draining {
            return;
        }
        run.stage = Stage::Running;
        let job = PrimaryJob::Sync {
            epoch: run.epoch,
            hand_over: run.hand_over,
        };
        if session.jobs.as_ref().is_none_or(|jobs| jobs.send(job).is_err()) {
            let id = session.id;
            self.session_ended(id, "the session's thread has ended");
        }
    }

    pub(super) fn primary_sync_step(&mut self, id: u64, step: SyncStep) {
        if !self.is_session(id) {
            return;
        }
        match step {
            SyncStep::Stopped => self.draw_line(),
            SyncStep::Resumed => {
                let hand_over = self
                    .primary()
                    .is_some_and(|primary| primary.sync.as_ref().is_some_and(|run| run.hand_over));
                // After a hand-over's stop the VM here takes no more inputs: they are the backup's.
                self.agreement.held = hand_over;
            }
            SyncStep::Acknowledged {
                epoch,
                joining,
                hand_over,
                figures,
            } => {
                self.sync_acknowledged(epoch, joining, hand_over, figures);
            }
            SyncStep::Loaded { load_us } => {
                if let Some(primary) = self.primary() {
                    primary.sync_status.last.load_us = load_us;
                    primary.sync = None;
                }
            }
        }
    }

    /// The VM stands: its frames so far belong to the epoch that ends.
    fn draw_line(&mut self) {
        self.read_ports();
        self.gate.end_epoch();
        let Some(primary) = self.primary() else { return };
        let Some(session) = &primary.session else { return };
        let last_of_join = session.phase == Phase::LastSync;
        if let Some(jobs) = &session.jobs {
            // A session that has ended reports that itself.
            let _ = jobs.send(PrimaryJob::LineDrawn);
        }
        if last_of_join {
            // From here on outputs belong to the first protected epoch; they wait for the group's word.
            self.gate.set_voice(Voice::Protected);
        }
    }

    fn sync_acknowledged(&mut self, epoch: Epoch, joining: bool, hand_over: bool, figures: SyncFigures) {
        let now_us = self.now_us();
        {
            let mut recent = self
                .shared
                .recent_syncs
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if !joining {
                recent.push_back(figures.clone());
            }
            if recent.len() > RECENT {
                recent.pop_front();
            }
        }
        let me = self.me;
        let Some(primary) = self.primary() else { return };
        primary.sync_status.count += 1;
        primary.sync_status.last = figures;
        primary.last_sync_us = now_us;
        if let Some(run) = &mut primary.sync {
            run.stage = Stage::Acknowledged;
        }
        let Some(peer) = primary.session.as_ref().map(|session| session.peer) else {
            return;
        };
        if joining {
            self.propose(&Agreed::Complete {
                set: ReplicaSet::one(me).with(peer),
                epoch,
            });
            return;
        }
        // A deposed primary's gate is shut, whatever is acknowledged.
        self.gate.acknowledged(epoch);
        if self.config.policy.inputs_are_agreed() {
            self.propose(&Agreed::SyncDone { epoch });
        }
        if hand_over {
            self.event(
                "handing-over",
                format!("the VM goes to host '{}'", self.config.host_name(peer)),
            );
            self.release();
            if let Some(primary) = self.primary() {
                primary.handed = true;
            }
            self.group.transfer_to(peer);
        }
    }

    pub(super) fn backup_is_idle(&mut self, id: u64, applied: Index) {
        if self.is_session(id)
            && let Some(primary) = self.primary()
        {
            primary.backup_applied = primary.backup_applied.max(applied);
        }
    }

    /// A disk has something to say.
    pub(super) fn disk_event(&mut self, number: usize, event: DiskEvent) {
        match event {
            DiskEvent::NeedSync => {
                if let Some(primary) = self.primary() {
                    primary.disk_asks = true;
                }
            }
            DiskEvent::BackupLost { reason } => {
                // The sync cannot cover this disk any more: the session is over.
                if let Some(primary) = self.primary()
                    && let Some(closer) = primary
                        .session
                        .as_ref()
                        .and_then(|session| session.closer.as_ref())
                {
                    closer.close();
                    self.event("mirror-lost", format!("disk {number}: {reason}"));
                }
            }
            DiskEvent::BackupFailed { reason } => {
                self.event("mirror-failed", format!("disk {number} on this backup: {reason}"));
                self.close_backup_session();
            }
            DiskEvent::ImageFailed { reason, full } => {
                let kind = if full { "disk-full" } else { "disk-error" };
                self.event(kind, format!("disk {number}: {reason}"));
            }
            DiskEvent::CopyStarted { .. }
            | DiskEvent::CopyProgress { .. }
            | DiskEvent::Copied
            | DiskEvent::AttachFailed { .. }
            | DiskEvent::Marked { .. }
            | DiskEvent::Committed { .. }
            | DiskEvent::PrimaryLost { .. }
            | DiskEvent::Disconnected { .. } => {}
        }
    }

    /// The log's link to a host broke: if it is the backup's, so will the session.
    pub(super) fn peer_link_lost(&mut self, peer: ReplicaId) {
        if let Some(primary) = self.primary()
            && let Some(session) = &primary.session
            && session.peer == peer
            && let Some(closer) = &session.closer
        {
            closer.close();
        }
    }

    pub(super) fn session_stream_ended(&mut self, id: u64) {
        // The session's own thread reports with its reason; an idle one has to be woken.
        if let Some(primary) = self.primary()
            && let Some(session) = &mut primary.session
            && session.id == id
        {
            session.jobs = None;
            if session.phase == Phase::Synced && primary.sync.is_none() {
                self.session_ended(id, "the backup closed the stream");
            }
        } else {
            self.backup_stream_ended(id);
        }
    }

    pub(super) fn session_ended(&mut self, id: u64, why: &str) {
        if !self.is_session(id) {
            self.backup_session_ended(id, why);
            return;
        }
        let host = self.session_host();
        let complete = self.agreement.state.complete;
        let rejoin_at_us = self.now_us() + REJOIN_US;
        let Some(primary) = self.primary() else { return };
        let Some(session) = primary.session.take() else {
            return;
        };
        if let Some(closer) = &session.closer {
            closer.close();
        }
        if let Some(machine) = &primary.machine {
            machine.disks.detach();
        }
        primary.progress = None;
        primary.rejoin_at_us = rejoin_at_us;
        let broken_sync = primary.sync.take();
        if primary.handed {
            // As it should be: the backup has closed the stream because it was elected. The group says the rest.
            return;
        }
        primary.sync_status.aborted += u64::from(broken_sync.is_some());
        if let Some(reply) = primary.hand_over.take() {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::failed(format!(
                "not handed over: the backup was lost ({why})"
            )));
        }
        if broken_sync.is_some()
            && let Some(machine) = &primary.machine
            && let Err(error) = machine.qemu.cont()
        {
            return self.machine_died(&format!("it does not resume after a broken sync: {error}"));
        }
        self.forget_cut();
        if session.phase == Phase::Connecting {
            tracing::debug!(vm = self.config.name, "host '{host}' cannot be brought in: {why}");
        } else {
            self.event("backup-lost", format!("host '{host}': {why}"));
        }
        if complete.contains(session.peer) || session.phase == Phase::LastSync {
            self.drop_backup();
        }
    }

    /// When the primary wants to be woken.
    pub(super) fn primary_deadline_us(&self) -> Option<u64> {
        let Role::Primary(primary) = &self.role else {
            return None;
        };
        primary.machine.as_ref()?;
        let now_us = self.now_us();
        let drain = primary
            .sync
            .as_ref()
            .filter(|run| run.stage == Stage::Draining)
            .map(|_| now_us + DRAIN_LOOK_US);
        let look =
            (self.gate.voice() == Voice::Protected && primary.sync.is_none()).then_some(primary.next_look_us);
        [drain, look, primary.quit_at_us].into_iter().flatten().min()
    }

    /// `failover`, `protect`, `down`: the primary's business.
    pub(super) fn primary_command(&mut self, command: Command, reply: &Sender<Answer>) -> Option<Answer> {
        if !self.agreement.leads || !matches!(self.role, Role::Primary(_)) {
            return Some(Answer::failed(
                "this host does not serve the VM; ask the one that does ('dunlin status')",
            ));
        }
        match command {
            Command::Down { now } => Some(self.begin_down(now)),
            Command::Failover => self.begin_hand_over(reply),
            Command::Protect => {
                if let Some(primary) = self.primary() {
                    primary.rejoin_at_us = 0;
                }
                Some(Answer::done("a backup is looked for"))
            }
            Command::ProtectAlone | Command::Remove => None,
        }
    }

    fn begin_down(&mut self, now: bool) -> Answer {
        let quit_at_us = self.now_us() + POWERDOWN_US;
        let powerdown = self
            .machine()
            .map(|machine| machine.qemu.qmp().execute("system_powerdown", ().into()));
        match (now, powerdown) {
            (false, Some(Ok(_))) => {
                if let Some(primary) = self.primary() {
                    primary.quit_at_us = Some(quit_at_us);
                }
                Answer::done("the guest was asked to switch itself off")
            }
            _ => {
                self.propose(&Agreed::Down);
                Answer::done("the VM is being ended")
            }
        }
    }

    fn begin_hand_over(&mut self, reply: &Sender<Answer>) -> Option<Answer> {
        let voice = self.gate.voice();
        let primary = self.primary()?;
        if voice != Voice::Protected || primary.hand_over.is_some() {
            return Some(Answer::failed(
                "there is no complete backup to hand over to; wait for 'protected' in status",
            ));
        }
        if primary.sync.is_some() {
            return Some(Answer::Failed {
                why: "a sync is under way".into(),
                code: AGAIN,
            });
        }
        primary.hand_over = Some(reply.clone());
        self.begin_sync(true);
        None
    }

    pub(super) fn hand_over_done(&mut self) {
        if let Some(reply) = self.primary().and_then(|primary| primary.hand_over.take()) {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::done("handed over"));
        }
    }

    /// The backup did not become the leader: the VM goes on here.
    pub(super) fn transfer_failed(&mut self) {
        let Some(primary) = self.primary() else { return };
        if !std::mem::take(&mut primary.handed) {
            return;
        }
        let machine = primary.machine.clone();
        if let Some(reply) = primary.hand_over.take() {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::failed(
                "not handed over: the backup did not take the VM over",
            ));
        }
        if let Some(Err(error)) = machine.map(|machine| machine.qemu.cont()) {
            return self.machine_died(&format!("it does not resume after a hand-over: {error}"));
        }
        self.forget_cut();
        match self
            .primary()
            .and_then(|primary| primary.session.as_ref().map(|session| session.id))
        {
            Some(id) => self.session_ended(id, "the backup did not take the VM over"),
            None => self.drop_backup(),
        }
    }

    /// Invariant 2: outputs wait until this is agreed.
    fn drop_backup(&mut self) {
        let epoch = self.agreement.state.epoch;
        self.propose(&Agreed::Complete {
            set: ReplicaSet::one(self.me),
            epoch,
        });
    }

    /// A person says that the others are dead.
    pub(super) fn protect_alone(&mut self) -> Answer {
        let complete = self.agreement.state.complete.contains(self.me) && self.machine().is_some();
        if !complete {
            return Answer::refused(
                "this host holds no complete copy of the VM: there is nothing to serve from here",
            );
        }
        if self.group.is_leader() && self.agreement.leads {
            return Answer::refused(
                "a majority of the group answers: there is no need, and it would not be safe",
            );
        }
        Answer::failed("serving alone by order is not built yet")
    }

    /// The daemon ends: whoever is left goes on.
    pub(super) fn shut_down_host(&mut self) {
        self.ending = Some(Ended {
            vm: self.config.name.clone(),
            forget: false,
        });
    }

    /// A backup has become the primary.
    pub(super) fn become_primary(&mut self, machine: Arc<Machine>, failover: FailoverStatus) {
        self.role = Role::Primary(PrimaryRole::new(Some(machine)));
        self.failover = Some(failover);
    }
}

/// "Ask again at once": not an exit code, the command line never sees it.
pub const AGAIN: i32 = -1;
