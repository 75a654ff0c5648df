//! The VM loop: waits for one closed set of things, then applies what happened, synchronously, on one thread.
//!
//! Not here: what it waits for (`wait`), what an agreed entry means (`agreement`), what a primary or a backup does (`primary`, `backup`).

use super::care::Care;
use super::error::StartError;
use super::event::{Command, LoopEvent, LoopSender};
use super::group;
use super::noted::Notebook;
use super::shared::{Host, NEWCOMER, Shared};
use super::state::agreement::Agreement;
use super::state::cold::Cold;
use super::state::ending::Ending;
use super::state::hosts::Peers;
use super::state::{DiskCare, Inbox, Network, Role, Shown, VmLoop};
use crate::config::VmConfig;
use crate::events::now_ms;
use crossbeam_channel::{Receiver, Sender};
use dunlin_api::{Answer, AnswerFigures, BadInput, EventKind, State, VmStatus};
use dunlin_core::agreed::Life;
use dunlin_core::consensus::Durability;
use dunlin_core::units::ReplicaId;
use dunlin_fabric::link::{Hello, Purpose, Stream};
use dunlin_guest::disk::Fault;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The loop's thread goes before the guests' threads.
const LOOP_NICE: i32 = -15;
/// The status is brought up to date at least this often while something happens.
const SHOW_US: u64 = 20_000;
/// A VM that has to wait again and again is told of once in this time.
const QUIET_US: u64 = 60_000_000;

impl VmLoop {
    /// A loop that is ready to run.
    pub fn new(
        host: Arc<Host>,
        config: Arc<VmConfig>,
        shared: Arc<Shared>,
        to_loop: LoopSender,
        events: Receiver<LoopEvent>,
    ) -> Result<Self, StartError> {
        let member = config.member(&host.name).ok_or(StartError::NotInVm)?;
        let newcomer = host.state.join("vms").join(&config.name).join(NEWCOMER).exists();
        let members = match newcomer {
            true => Vec::new(),
            false => config.group.iter().map(|host| host.member).collect(),
        };
        let durability = match config.policy.is_replicated() {
            true => host.cluster.durability,
            // Its few entries are kept, so that its host boots it again: there is no second copy to ask.
            false => Durability::Disk,
        };
        let folder = host.state.join("vms").join(&config.name);
        let compare_every = config.disks.verify_every.filter(|_| config.spec.images() > 0);
        let group = group::open(&host, &config, member.id, members, durability)?;
        let first = config.group[0].member.id;
        let agreement = Agreement::found(&group, &member, first)?;
        let connectors = group::connectors(&host, &config, member.id, &to_loop);
        let mut this = Self {
            me: member.id,
            witness: member.witness,
            group,
            peers: Peers {
                connectors,
                newcomer,
                ..Peers::default()
            },
            agreement,
            cold: Cold::new(Notebook::open(&folder)),
            role: Role::None,
            net: Network::new(config.memory.outbound_bytes()),
            care: DiskCare::new(Care::open(&folder, compare_every, now_ms())),
            ending: Ending::default(),
            inbox: Inbox::new(events, to_loop),
            shown: Shown::default(),
            shared,
            host,
            config,
        };
        this.follow_hosts();
        // Whoever asks before the loop's first turn hears of a VM with a name.
        this.show(SHOW_US);
        Ok(this)
    }

    /// Runs until the VM is shut down or the daemon ends.
    pub fn run(mut self) {
        // A heartbeat that waits for a core behind the guests looks like a dead host. This is the thread's own
        // priority; without the right to it, a busy host is taken for dead sooner.
        if let Err(error) = rustix::process::setpriority_process(None, LOOP_NICE) {
            tracing::debug!(vm = self.config.name, "the loop's priority: {error}");
        }
        while !self.is_over() {
            self.inbox.ready = self.wait();
            if self.inbox.ready.waker {
                self.inbox.to_loop.clear();
            }
            self.group.woke(self.inbox.ready.group);
            while let Ok(event) = self.inbox.events.try_recv() {
                self.handle(event);
            }
            self.step();
            self.shared.turns.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.ends.store(true, Ordering::Relaxed);
        self.drop_machine();
        self.tell_of_remains();
        self.answer_ended();
        if self.agreement.state().life == Life::Down {
            self.inbox.to_loop.vm_is_shut_down();
        }
        // Whoever forgets the VM removes its folder.
        self.cold.notebook.close();
        if let Some(keeper) = self.peers.keeper.take() {
            keeper.close();
        }
        self.show(u64::MAX);
        let (ended, host, shared) = (self.ending.ended.take(), self.host.clone(), self.shared.clone());
        // A daemon that ends leaves the group first: the others need not wait for a disk of this host.
        drop(self);
        if ended.as_ref().is_some_and(|ended| !ended.forget)
            && let Err(why) = shared.remains.await_none()
        {
            tracing::warn!("this host's copy of a VM, as the daemon ends: {why}");
        }
        if let Some(ended) = ended {
            // What may write there still is waited for by no machine of a VM of that name that comes later.
            if !shared.remains.is_none() {
                host.held_memory.forget(&ended.vm);
            }
            // The daemon may be ending as well.
            let _ = host.ended.send(ended);
        }
    }

    /// Everything that is not an event: descriptors and deadlines.
    fn step(&mut self) {
        if self.inbox.ready.words {
            self.hear_backup();
        }
        if self.inbox.ready.ports && !self.net.output_waits {
            self.read_ports();
        }
        if self.inbox.ready.taps {
            self.read_taps();
        }
        self.overhear();
        self.tell_of_gone_taps();
        if self.speculation_is_due() {
            self.turn_speculation();
        }
        self.follow_group();
        self.apply_agreed_entries();
        self.agreement.propose_unsaid(&mut self.group);
        self.look_after_loss();
        self.advise_after_loss();
        self.follow_leaving();
        self.run_primary();
        self.run_backup();
        self.look_after_disks();
        self.watch();
        self.end_by_order();
        self.forget_untold();
        // What the last steps proposed leaves now, not a wake-up later.
        self.follow_group();
        self.apply_agreed_entries();
        self.release();
        self.flush_ports();
        self.look_at_waiting_output();
        let now_us = self.now_us();
        if self.shown.told.take() {
            // Whoever was woken by an event may have looked too early.
            self.shown.at_us = 0;
            self.show(now_us.max(SHOW_US));
            self.host.events.nudge();
        } else {
            self.show(now_us);
        }
    }

    /// The VM's output takes all that it may, and waits for a sync: the VM has to wait too.
    fn look_at_waiting_output(&mut self) {
        let (waits, now_us) = (self.output_has_to_wait(), self.now_us());
        if std::mem::replace(&mut self.net.output_waits, waits) || !waits {
            return;
        }
        self.net.waits += 1;
        let told_us = self.net.waits_told_us;
        if told_us.is_none_or(|told_us| now_us - told_us >= QUIET_US) {
            self.net.waits_told_us = Some(now_us);
            let mib = self.net.output.held().1 >> 20;
            self.event(
                EventKind::OutputFull,
                format!(
                    "{mib} MiB of the VM's output wait for a sync: the VM waits as well ('memory.outbound_mib' in its file)"
                ),
            );
        }
    }

    fn handle(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::Accepted(hello, stream) => self.accept(&hello, stream),
            LoopEvent::LogLink(peer, stream) => self.add_log_link(peer, stream),
            LoopEvent::Command(command, reply) => self.command(command, reply),
            LoopEvent::Shutdown => self.shut_down_host(),
            LoopEvent::MachineStarted { session, result } => {
                self.ending.starts_under_way -= 1;
                self.machine_started(session, result);
            }
            LoopEvent::SessionConnected { session, result } => self.session_connected(session, result),
            LoopEvent::JoinProgress {
                session,
                what,
                done,
                total,
            } => self.join_progress(session, what, done, total),
            LoopEvent::Disk { number, event } => self.disk_event(number, event),
            LoopEvent::JoinNearlyDone { session } => self.join_nearly_done(session),
            LoopEvent::HeldCompared {
                session,
                pages,
                equal,
            } => self.held_compared(session, pages, equal),
            LoopEvent::PrimarySync { session, step } => self.primary_sync_step(session, step),
            LoopEvent::BackupSync { session, step } => self.backup_sync_step(session, step),
            LoopEvent::BackupSaid {
                session,
                epoch,
                frames,
            } => self.backup_said(session, epoch, frames),
            LoopEvent::BackupIdle { session, applied } => self.backup_is_idle(session, applied),
            LoopEvent::SessionEnded { session, why, torn } => self.session_thread_ended(session, &why, torn),
            LoopEvent::VmStands { session, why } => self.vm_stands(session, &why),
            LoopEvent::QemuSilent { session } => self.qemu_is_silent(session),
            LoopEvent::SessionTerm { session, term } => self.session_term_told(session, term),
            LoopEvent::Fault(text) => self.event(EventKind::Fault, text),
            LoopEvent::StreamLent { session, stream } => self.stream_lent(session, stream),
            LoopEvent::CannotFollow { session, why } => self.cannot_follow(session, why),
            // It was waited for; the loop looks in this turn (`is_over`).
            LoopEvent::NothingRemains => {}
            LoopEvent::SessionStreamEnded { session } => self.session_stream_ended(session),
            LoopEvent::Inquest(inquest) => self.inquest_done(inquest),
            LoopEvent::Verified { compared, scheduled } => {
                self.care.comparing.ended(compared, scheduled, now_ms())
            }
            LoopEvent::GoneTold(told) => self.membership().gone_told(told),
            LoopEvent::EndTold(busy) => self.end_told(busy),
            LoopEvent::GuestAsked(asked) => self.guest_was_asked(asked),
            // A program's loop has asked for it.
            LoopEvent::ProgramPrepared(_)
            | LoopEvent::ProgramImages(_)
            | LoopEvent::ProgramJoin { .. }
            | LoopEvent::ProgramBrought { .. }
            | LoopEvent::Visit(..) => {}
            LoopEvent::TookOver { session, result } => self.took_over(session, result),
        }
    }

    fn accept(&mut self, hello: &Hello, stream: Stream) {
        let Some(peer) = self.config.member(&hello.from) else {
            return self.membership().refuse_stranger(&hello.from);
        };
        match hello.purpose {
            Purpose::Log => self.add_log_link(peer.id, stream),
            Purpose::Sync => self.accept_join(peer.id, hello, stream),
            Purpose::Mirror => self.accept_mirror(peer.id, &hello.extra, stream),
            Purpose::Control | Purpose::Checkpoint => {}
        }
    }

    fn bad_input(&self) -> BadInput {
        let counters = self.group.counters();
        BadInput {
            too_short: counters.short,
            too_long: counters.long,
            unknown: counters.unknown,
            forbidden: counters.forbidden,
            links_broken: counters.broken,
            unknown_members: self.peers.strangers,
            torn: counters.torn,
        }
    }

    fn add_log_link(&mut self, peer: ReplicaId, stream: Stream) {
        if let Err(error) = self.group.add_link(peer, stream) {
            self.event(
                EventKind::LinkRefused,
                format!("host '{}': {error}", self.config.host_name(peer)),
            );
            self.log_link_lost(peer);
        }
    }

    pub(super) fn is_connected(&self, peer: ReplicaId) -> bool {
        group::is_connected(&self.group, peer)
    }

    pub(super) fn log_link_lost(&mut self, peer: ReplicaId) {
        self.peers.link_lost(peer);
    }

    fn command(&mut self, command: Command, reply: Sender<Answer>) {
        let answer = match command {
            Command::Remove => {
                // Whoever says so knows that it is agreed; this host's own log may not have come to that entry.
                self.agreement.leadership.is_told_of_the_end();
                self.forget_vm(false);
                Some(Answer::done("removed"))
            }
            Command::ProtectAlone {
                from_disk,
                force_stale,
            } => self.protect_alone(from_disk, force_stale, &reply),
            Command::Standing => Some(Answer::Standing(self.standing())),
            Command::Inject { disk, fault } => {
                // A disk is as bad for the next copy of the VM on this host.
                self.care.injected.push((disk, fault));
                Some(self.inject(disk, fault))
            }
            Command::Down { now } => {
                self.order_down(now, &reply);
                None
            }
            Command::ForceDown => Some(self.force_down()),
            Command::RemoveMember(member) => self.remove_member(member, &reply),
            Command::Move {
                leaves,
                hosts,
                unprotected_meanwhile,
            } => self.move_part(leaves, hosts, unprotected_meanwhile, &reply),
            Command::Standby(hosts) => self.name_standby(hosts, &reply),
            Command::Left { newest } => Some(self.was_left(newest)),
            Command::Failover | Command::Policy(_) | Command::Protect | Command::VerifyDisk { .. } => {
                self.primary_command(command, &reply)
            }
        };
        if let Some(answer) = answer {
            // Whoever asked may have gone.
            let _ = reply.send(answer);
        }
    }

    /// Tests only.
    fn inject(&mut self, disk: usize, fault: Fault) -> Answer {
        for (_, faults) in self.care.faulty.iter().filter(|(of, _)| *of == disk) {
            faults.inject(fault);
        }
        if fault == Fault::None {
            self.care.faulty.retain(|(of, _)| *of != disk);
        }
        let Some(machine) = self.machine().cloned() else {
            return Answer::done("");
        };
        let Some(faults) = machine.disks.all().get(disk).map(|disk| disk.faults().clone()) else {
            return Answer::refused(format!("there is no disk {disk}"));
        };
        faults.inject(fault);
        self.care.faulty.push((disk, faults));
        Answer::done("")
    }

    /// Brings what others see up to date, not too often.
    fn show(&mut self, now_us: u64) {
        if now_us.saturating_sub(self.shown.at_us) < SHOW_US {
            return;
        }
        self.shown.at_us = now_us;
        let (role, state, wants_primary) = self.describe();
        let does_not_start = wants_primary.and_then(|primary| primary.boots.why());
        let failure = self.shown.failure.as_deref().or(does_not_start);
        let (state, why) = match (failure, self.shown.watchdog.stalled()) {
            (Some(why), _) => (State::Failed, why.to_owned()),
            (None, Some(wait)) => (State::Stalled, wait.name().to_owned()),
            (None, None) => (state, String::new()),
        };
        let status = VmStatus {
            name: self.config.name.clone(),
            role,
            state,
            why,
            protected: self.agreement.state().complete.len() > 1
                && !self.agreement.another_policy
                && self.group.leader().is_some(),
            wants_protection: self.policy().is_replicated(),
            policy: self.policy_name().to_owned(),
            leader: self.group.leader().map(|id| self.config.host_name(id).to_owned()),
            term: self.group.term().0,
            epoch: self.net.output.epoch().0,
            committed: self.group.committed().0,
            applied: self.agreement.applied.0,
            held_frames: self.net.output.held_frames(),
            log_entries: self.group.appended().index.0 - self.group.snapshot().last.index.0,
            frames_in: self.net.frames_in,
            frames_out: self.net.frames_out,
            answers: wants_primary
                .and_then(|_| self.net.output.answers(now_us))
                .map(|found| AnswerFigures {
                    samples: found.samples,
                    p50_us: found.p50_us,
                    p99_us: found.p99_us,
                }),
            peers: group::peers(&self.group, &self.config, self.me),
            standby: self.config.standby_host().map(str::to_owned),
            // Its handle knows.
            checkpoint: None,
            protocol: self.group.protocol(),
            sync: wants_primary
                .map(|primary| self.sync_status(primary))
                .unwrap_or_default(),
            failover: self.shown.failover,
            join_problem: wants_primary.and(self.shown.join_complaint.clone()),
            progress: wants_primary.and_then(|primary| primary.progress.clone()),
            qemu_pid: self.machine().map(|machine| machine.qemu.pid()),
            nic_backend: self
                .machine()
                .map(|_| self.config.spec.nic_backend.name().to_owned()),
            disks: self
                .machine()
                .map(|machine| machine.disks.figures(now_us))
                .unwrap_or_default(),
            verify: self.care.comparing.status(now_ms()),
            bad_input: self.bad_input(),
            stalls: self.shown.watchdog.stalls(),
            waits: self.shown_wait(),
            queues: self.queues(),
            full: self.net.waits + self.agreement.log_waits,
            unsaid: self.agreement.refused,
            program: None,
            speculation: self
                .net
                .speculating
                .as_ref()
                .map(|speculating| speculating.figures()),
        };
        *self.shared.status.lock() = status;
    }
}
