//! A primary's syncs: when one begins, and what follows from each of its steps.
//!
//! Invariant 1: (3 of `primary`) one sync at a time.
//!
//! Not here: the work of a sync (`session::primary`), when one is due (core's `trigger`).

use super::{AHEAD_AFTER_US, DRAIN_LOOK_US, OBSERVE_US};
use crate::vm::event::SyncStep;
use crate::vm::fault_at::Line;
use crate::vm::session::reader::Lent;
use crate::vm::state::primary::PrimaryRole;
use crate::vm::state::{Role, VmLoop};
use crate::vm::status::remember;
use dunlin_api::{ComparedStatus, EventKind, SyncFigures, SyncStatus};
use dunlin_core::agreed::{Agreed, Frame, ReplicaSet};
use dunlin_core::output::compare::Counters;
use dunlin_core::output::gate::Voice;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::epoch::primary::Loaded;
use dunlin_core::replica::sync::primary::{Order, Word};
use dunlin_core::sync::change_over::ChangeOver;
use dunlin_core::sync::trigger::{Decision, Reason, Sight, decide, period_counts_from_us};
use dunlin_core::units::{Epoch, Index};
use dunlin_core::wire::sync::SyncMessage;

impl VmLoop {
    pub(super) fn begin_sync(&mut self, switchover: bool) {
        let epoch = self.net.output.epoch();
        let next = self.next_rules(switchover);
        let now_us = self.now_us();
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        let from = primary.epochs.rules();
        let asks_log = primary.epochs.begin(now_us, epoch, switchover, next);
        if let Some(session) = &mut primary.session {
            // The thread reads what a sync brings, whatever the loop has to do meanwhile.
            session.lent = None;
        }
        if asks_log && !self.propose(&Agreed::Sync { epoch }) {
            if let Some(primary) = self.primary() {
                primary.epochs.log_refused();
            }
            return;
        }
        if let Role::Primary(primary) = &mut self.role {
            if primary.epochs.is_synced() && from.compares() && next.compares() {
                let waited_us = self.net.output.waited_for_word_us(now_us);
                primary
                    .pace
                    .sync_cost
                    .sync_begins(now_us, self.net.output.tally(), waited_us);
            } else {
                primary.pace.sync_cost.restart(now_us);
            }
        }
    }

    /// The log did not take a sync's beginning: once more. Whoever waits for a switchover, or for a join's last sync, is waiting
    /// for that.
    pub(super) fn begin_refused_sync(&mut self) {
        let leads = self.agreement.leads();
        let Some(primary) = self.primary() else { return };
        if let Some(switchover) = primary.epochs.take_refused(leads) {
            self.begin_sync(switchover);
        }
    }

    fn work_ahead(&mut self) {
        let (epoch, now_us) = (self.net.output.epoch(), self.now_us());
        let Some(primary) = self.primary() else { return };
        let Some(session) = &primary.session else { return };
        primary.epochs.precopy(now_us, epoch);
        if let Some(jobs) = &session.jobs {
            // A session that has ended reports that itself.
            let _ = jobs.send(Word::PreCopy { epoch });
        }
    }

    fn worked_ahead(&mut self) {
        let leads = self.agreement.leads();
        let Some(primary) = self.primary() else { return };
        let waits_for_switchover = primary.switchover.is_some();
        if !primary.epochs.precopied() {
            return;
        }
        if waits_for_switchover {
            self.begin_waiting_switchover();
        } else if leads {
            self.begin_sync(false);
        }
    }

    /// What is to hold after the sync that begins now.
    fn next_rules(&mut self, switchover: bool) -> Rules {
        let (first, speculative) = (self.first_rules(), self.config.speculative);
        let Some(primary) = self.primary() else {
            return first;
        };
        let now = primary.epochs.rules();
        let next = match (&primary.pace.change_over, primary.epochs.is_synced()) {
            // Whoever takes over has to run.
            (Some(_), true) if switchover => Rules::of(Mode::Active, speculative),
            (Some(choice), true) => Rules::of(choice.wish(), speculative),
            _ => first,
        };
        match self.speculation_allows(now, next) {
            true => next,
            // It begins to run when it takes over.
            false => now,
        }
    }

    fn wished_mode(&self) -> Option<Mode> {
        match &self.role {
            Role::Primary(primary) => primary.pace.change_over.as_ref().map(ChangeOver::wish),
            _ => None,
        }
    }

    fn mode_may_follow(&self, wish: Mode) -> bool {
        match &self.role {
            Role::Primary(primary) => {
                self.speculation_allows(primary.epochs.rules(), Rules::of(wish, self.config.speculative))
            }
            _ => false,
        }
    }

    /// Looks at what the mode in use brings.
    pub(super) fn observe_output(&mut self) {
        let now_us = self.now_us();
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        if let Some(choice) = &mut primary.pace.change_over
            && now_us >= primary.pace.observe_at_us
        {
            primary.pace.observe_at_us = now_us + OBSERVE_US;
            let (tally, waited_us) = (
                self.net.output.tally(),
                self.net.output.waited_for_word_us(now_us),
            );
            if primary.epochs.is_synced() {
                primary.pace.sync_cost.observe(now_us, tally, waited_us);
                choice.observe(now_us, tally, primary.pace.sync_cost.us());
            } else {
                // What leaves without a backup tells nothing of any mode.
                primary.pace.sync_cost.restart(now_us);
                choice.lost(now_us);
            }
        }
    }

    pub(super) fn start_due_sync(&mut self) {
        let now_us = self.now_us();
        let policy = self.policy();
        let by_period = policy.period_ms(self.config.sync.period_ms).is_some() && !policy.compares_output();
        let differs = self.net.output.differs();
        let matches = self
            .primary()
            .is_some_and(|primary| primary.epochs.rules().compares());
        let word_since_us = self.net.output.waits_for_word_since_us();
        let ends_waited_us = self.net.output.ends_waited_us(now_us);
        let output_waits = if matches {
            word_since_us.is_some() || ends_waited_us > 0
        } else {
            let speculates = self.net.speculating.as_ref();
            self.net.output.waits() || speculates.is_some_and(|speculating| speculating.waits())
        };
        let acks_since_us = self.net.output.acks_wait_since_us();
        let stall_us = self.net.output.stall_us();
        let overtaken_us = if matches {
            self.net.output.overtaken_us()
        } else {
            0
        };
        // COLO's period is its own, whatever a sync costs.
        let put_off = policy.changes_over();
        let silent_us = now_us.saturating_sub(self.net.output.matched_us());
        let (log_fills_up, output_fills_up) = (self.log_is_half_full(), self.net.output.is_half_full());
        let applied = self.agreement.applied;
        if self.net.output.voice() != Voice::Protected || !self.agreement.leads() {
            return;
        }
        let config = self.config.clone();
        let wish = self.wished_mode();
        let may_change = wish.is_none_or(|wish| self.mode_may_follow(wish));
        let Role::Primary(primary) = &mut self.role else {
            return;
        };
        let Some(machine) = &primary.machine else { return };
        if !primary.epochs.is_synced() || !primary.epochs.may_begin() {
            return;
        }
        let mode = primary.epochs.rules().mode();
        let limits = config.sync.limits(policy, mode);
        let backup_idle = !mode.backup_runs() || primary.backup_applied >= applied;
        // Looking at sockets and threads costs: only where it can make a difference.
        let idleness_counts = !by_period
            && backup_idle
            && (output_waits || now_us.saturating_sub(primary.pace.last_sync_us) >= limits.quiet_us)
            && self
                .net
                .nics
                .as_mut()
                .is_none_or(|nics| nics.inbound_is_settled(now_us));
        let pace = &primary.pace;
        let sight = Sight {
            now_us,
            last_sync_us: match !matches && policy.period_ms(config.sync.period_ms).is_some() {
                true => period_counts_from_us(pace.sync_begun_us, pace.last_sync_us, limits.longest_us),
                false => pace.last_sync_us,
            },
            mode,
            output_waits,
            differs,
            primary_idle: idleness_counts && machine.qemu.threads().idle(),
            backup_idle,
            disk_asks: primary.disk_asks || primary.guest.was_reset,
            change_over: wish.is_some_and(|wish| wish != mode) && may_change,
            waited_us: word_since_us.map_or(0, |since_us| now_us.saturating_sub(since_us)),
            acks_waited_us: acks_since_us.map_or(0, |since_us| now_us.saturating_sub(since_us)),
            ends_waited_us,
            silent_us,
            overtaken_us,
            stall_us,
            cost_us: if put_off {
                primary.pace.sync_cost.us().unwrap_or(0).max(stall_us)
            } else {
                0
            },
            fills_us: primary.pace.fills_us,
            // A passive epoch's inputs are not in the log, nor are its syncs.
            memory_asks: output_fills_up || (log_fills_up && mode.backup_runs()),
        };
        let decision = decide(&limits, &sight);
        let late_us = Some(sight.waited_us).filter(|waited_us| *waited_us > 0);
        let forced = match decision {
            Decision::Sync(Reason::Differs | Reason::Idle) if matches => Some(None),
            Decision::Sync(Reason::Limit) if matches => late_us.map(Some),
            _ => None,
        };
        match decision {
            Decision::LookAgain { at_us } => primary.pace.next_look_us = at_us,
            Decision::Sync(reason) => {
                let reasons = &mut primary.sync_status.reasons;
                let counter = match reason {
                    Reason::Idle => &mut reasons.idle,
                    Reason::Limit => &mut reasons.limit,
                    Reason::Quiet => &mut reasons.quiet,
                    Reason::Disk => &mut reasons.disk,
                    Reason::Differs => &mut reasons.differs,
                    Reason::ChangeOver => &mut reasons.change_over,
                    Reason::Memory => &mut reasons.memory,
                };
                *counter += 1;
                // Where output waits for the sync, its beginning does not.
                let waits = matches!(reason, Reason::Idle | Reason::Differs) && !by_period;
                let long = now_us.saturating_sub(primary.pace.last_sync_us) >= AHEAD_AFTER_US;
                (primary.pace.sync_begun_us, primary.pace.last_sync_us) = (now_us, now_us);
                primary.disk_asks = false;
                primary.guest.was_reset = false;
                if policy.works_ahead() && !waits && (long || by_period) {
                    self.work_ahead();
                } else {
                    self.begin_sync(false);
                }
            }
        }
        if let Some(late_us) = forced {
            self.net.output.sync_is_forced(late_us);
        }
    }

    /// `Sync(epoch)` is agreed. Whether it holds back what comes after it, core's `epoch` says.
    pub(in crate::vm) fn sync_agreed(&mut self, epoch: Epoch) {
        if let Role::Backup(_) = &self.role {
            return self.backup_sync_agreed(epoch);
        }
        // Of an earlier term of this host's, too: the session may survive it (`speak_again`).
        let held = self
            .primary()
            .is_some_and(|primary| primary.epochs.sync_agreed(epoch));
        let now_us = self.now_us();
        if held && let Some(nics) = &mut self.net.nics {
            nics.begin_drain(now_us);
        }
    }

    pub(super) fn start_drained_sync(&mut self) {
        let now_us = self.now_us();
        let Some(primary) = self.primary() else { return };
        let draining = primary.epochs.is_draining();
        let agreed = primary.epochs.run().is_some_and(|run| run.agreed);
        if !draining {
            return;
        }
        let nics = self.net.nics.as_mut().filter(|_| agreed);
        if nics.is_some_and(|nics| !nics.drain_is_over(now_us)) {
            return;
        }
        let Some(primary) = self.primary() else { return };
        let run = primary.epochs.drained();
        // What a VM that had to wait has left in its socket, before it is stopped (`is_stopping`).
        self.read_ports();
        let Some(session) = self.primary().and_then(|primary| primary.session.as_ref()) else {
            return;
        };
        let order = Word::Sync(Order {
            epoch: run.epoch,
            switchover: run.switchover,
            agreed: run.agreed,
            next: run.next.mode(),
        });
        if session.jobs.as_ref().is_none_or(|jobs| jobs.send(order).is_err()) {
            let id = session.id;
            self.session_ended(id, "the session's thread has ended");
        }
    }

    pub(in crate::vm) fn primary_sync_step(&mut self, id: u64, step: SyncStep) {
        if let SyncStep::Resumed { stood_us } | SyncStep::RanOn { stood_us } = step
            && let Some(primary) = self.primary()
        {
            let longest = &mut primary.sync_status.longest_pause_us;
            *longest = stood_us.max(*longest);
        }
        if !self.is_session(id) {
            return;
        }
        match step {
            SyncStep::RanOn { .. } => {}
            SyncStep::WorkedAhead => self.worked_ahead(),
            SyncStep::Stopped => self.draw_line(),
            SyncStep::Resumed { .. } => {
                if let Some(primary) = self.primary() {
                    primary.epochs.resumed();
                }
            }
            SyncStep::Acknowledged {
                epoch,
                joining,
                figures,
            } => {
                self.sync_acknowledged(epoch, joining, figures);
                if self.shared.fault_at.is_deadly(Line::PrimaryReleased) {
                    self.release();
                    self.shared.fault_at.pass(Line::PrimaryReleased);
                }
            }
            SyncStep::Loaded { epoch, load_us } => self.sync_loaded(epoch, load_us),
        }
    }

    /// Syncs and outputs, for people.
    pub(in crate::vm) fn sync_status(&self, primary: &PrimaryRole) -> SyncStatus {
        let (tally, counters) = (self.net.output.tally(), self.net.output.counters());
        SyncStatus {
            mode: match self.net.output.voice() {
                Voice::Protected => primary.epochs.rules().mode().name().into(),
                _ => dunlin_api::Mode::None,
            },
            change_overs: primary.pace.change_over.as_ref().map_or(0, ChangeOver::changes),
            compared: ComparedStatus {
                matched: counters.map_or(0, |counters| counters.matched),
                free: counters.map_or(0, |counters| counters.free),
                by_sync: tally.by_sync,
                differences: counters.map_or(0, Counters::differences),
                released: tally.released,
                held_us: tally.held_us,
            },
            ..primary.sync_status.clone()
        }
    }

    fn sync_loaded(&mut self, epoch: Epoch, load_us: u64) {
        let now_us = self.now_us();
        let changes_over = self.policy().changes_over();
        self.net.output.backup_loaded(epoch);
        let tally = *self.net.output.tally();
        let shared = std::sync::Arc::clone(&self.shared);
        let Some(primary) = self.primary() else { return };
        // Told after the rest: a join's last sync is not among the recent ones.
        let status = &mut primary.sync_status;
        if let Some(newest) = shared
            .recent_syncs
            .lock()
            .back_mut()
            .filter(|newest| **newest == status.last)
        {
            newest.load_us = load_us;
        }
        status.last.load_us = load_us;
        status.sum.load_us += load_us;
        let (was, now, joined) = match primary.epochs.loaded() {
            Loaded::NextEpoch { was, now, joined } => (was, now, joined),
            Loaded::Switchover => return self.switch_vm_over(),
            Loaded::Nothing => return,
        };
        if was != now || joined {
            primary.pace.sync_cost.restart(now_us);
            let (from, to) = (was.mode().name(), now.mode().name());
            tracing::debug!(from, to, ?tally, "another mode");
        }
        let mode = now.mode();
        match &mut primary.pace.change_over {
            Some(choice) if joined => choice.joined(mode, now_us),
            Some(choice) => choice.entered(mode, now_us),
            None if changes_over => primary.pace.change_over = Some(ChangeOver::new(mode, now_us)),
            None => {}
        }
        self.speculation_sees_mode(now);
        self.begin_waiting_switchover();
    }

    /// The VM stands: its frames so far belong to the epoch that ends.
    pub(super) fn draw_line(&mut self) {
        self.read_ports();
        let Some(primary) = self.primary() else { return };
        let last_of_join = primary.epochs.line_drawn();
        let next = primary.epochs.run().map(|run| run.next);
        if last_of_join && self.first_rules().compares() {
            self.net.output.compare_from(self.net.output.epoch());
        }
        if let Some(next) = next {
            self.speculation_sees_line(next);
        }
        let ended = self.net.output.epoch();
        let table = self.net.output.draw_line();
        let known = self.speculation_cut(ended, last_of_join);
        let connections = self.connections_told(table, known);
        let Some(session) = self.primary().and_then(|primary| primary.session.as_ref()) else {
            return;
        };
        if let Some(jobs) = &session.jobs {
            // A session that has ended reports that itself.
            let _ = jobs.send(Word::LineDrawn { connections });
        }
        if last_of_join {
            // From here on outputs belong to the first protected epoch; they wait for the group's word.
            self.agreement.leadership.join_line_drawn();
            self.speaks_as_it_may();
        }
    }

    pub(super) fn sync_acknowledged(&mut self, epoch: Epoch, joining: bool, figures: SyncFigures) {
        let now_us = self.now_us();
        {
            let mut recent = self.shared.recent_syncs.lock();
            if !joining {
                remember(&mut recent, figures.clone());
            }
        }
        let me = self.me;
        let quarter_bytes = (self.config.sync.staging_mib as u64) << 18;
        let Some(primary) = self.primary() else { return };
        let agreed = primary.epochs.acknowledged(epoch);
        // The first sync sends what a join left, which says nothing of an epoch.
        let fills_us = quarter_bytes
            .saturating_mul(figures.interval_us)
            .checked_div(figures.bytes)
            .filter(|_| !joining);
        primary.pace.fills_us = fills_us.unwrap_or(u64::MAX);
        primary.sync_status.count += 1;
        primary.sync_status.sum.add(&figures);
        if !joining {
            primary.sync_status.pauses.add(figures.pause_us);
        }
        primary.sync_status.last = figures;
        primary.pace.last_sync_us = now_us;
        let Some(peer) = primary.session.as_ref().map(|session| session.peer) else {
            return;
        };
        if joining {
            self.net.output.line_is_covered();
            self.propose(&Agreed::Complete {
                set: ReplicaSet::one(me).with(peer),
                epoch,
            });
            return;
        }
        // A deposed primary's gate is shut, whatever is acknowledged.
        self.net.output.acknowledged(epoch);
        if agreed {
            self.propose(&Agreed::SyncDone { epoch });
        }
    }

    /// The backup has loaded the VM that stands here: from now on the group decides who goes on.
    fn switch_vm_over(&mut self) {
        let Some(peer) = self.session_peer() else { return };
        self.event(
            EventKind::HandingOver,
            format!("the VM goes to host '{}'", self.config.host_name(peer)),
        );
        self.release();
        if let Some(primary) = self.primary()
            && let Some(jobs) = primary.session.as_ref().and_then(|session| session.jobs.as_ref())
        {
            // A session that has ended reports that itself.
            let _ = jobs.send(Word::HandedOver);
        }
        self.group.transfer_to(peer);
    }

    pub(in crate::vm) fn backup_said(&mut self, id: u64, epoch: Epoch, frames: Vec<Frame>) {
        let lost = self.inbox.to_loop.words_taken(&frames);
        if self.is_session(id) {
            if lost > 0 {
                self.net.output.backup_was_not_heard(lost);
            }
            self.net.output.backup_said(epoch, frames);
        }
    }

    /// The stream from the backup is the loop's. One of an earlier session goes back at once, and so does one that comes during a sync.
    pub(in crate::vm) fn stream_lent(&mut self, id: u64, stream: Lent) {
        let Some(primary) = self.primary() else { return };
        let syncs = primary.epochs.run().is_some();
        let session = primary.session.as_mut().filter(|session| session.id == id);
        if let Some(session) = session.filter(|_| !syncs) {
            session.lent = Some(stream);
            self.hear_backup();
        }
    }

    /// What the backup says between syncs.
    pub(in crate::vm) fn hear_backup(&mut self) {
        let Some(session) = self.primary().and_then(|primary| primary.session.as_mut()) else {
            return;
        };
        let (id, Some(lent)) = (session.id, &mut session.lent) else {
            return;
        };
        let mut heard = Vec::new();
        lent.hear(|message| heard.push(message));
        if lent.fd().is_none() {
            session.lent = None;
        }
        for message in heard {
            match message {
                SyncMessage::Said { epoch, frames } => self.net.output.backup_said(epoch, frames),
                SyncMessage::Idle { applied } => self.backup_is_idle(id, applied),
                SyncMessage::NewTerm { term } => self.session_term_told(id, term),
                // All others are the session's thread's.
                _ => {}
            }
        }
    }

    pub(in crate::vm) fn backup_is_idle(&mut self, id: u64, applied: Index) {
        if self.is_session(id)
            && let Some(primary) = self.primary()
        {
            primary.backup_applied = primary.backup_applied.max(applied);
        }
    }

    /// When the primary wants to be woken.
    pub(in crate::vm) fn primary_deadline_us(&self) -> Option<u64> {
        let Role::Primary(primary) = &self.role else {
            return None;
        };
        primary.machine.as_ref()?;
        let now_us = self.now_us();
        let drain = primary.epochs.is_draining().then_some(now_us + DRAIN_LOOK_US);
        let observe = primary
            .pace
            .change_over
            .as_ref()
            .map(|_| primary.pace.observe_at_us);
        let look = (self.net.output.voice() == Voice::Protected && primary.epochs.run().is_none())
            .then_some(primary.pace.next_look_us);
        let room = primary.guest.enospc_wait.look_at_us();
        let announce = self.net.announcements.due_us().filter(|_| self.may_speak(now_us));
        // Where nobody leads an election wakes the loop: a deadline that nobody moves on would keep it spinning.
        let quit = self
            .ending
            .shutdown
            .quit_at_us()
            .filter(|_| self.agreement.leads());
        [drain, look, observe, quit, room, announce]
            .into_iter()
            .flatten()
            .min()
    }
}
