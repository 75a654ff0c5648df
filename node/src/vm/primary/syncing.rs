//! A primary's syncs: when one begins, and what follows from each of its steps.
//!
//! Invariant 1: (3 of `primary`) one sync at a time.
//!
//! Not here: the work of a sync (`session::primary`), when one is due (core's `trigger`).

use super::{DRAIN_LOOK_US, Phase, Run, Stage};
use crate::control::SyncFigures;
use crate::vm::event::SyncStep;
use crate::vm::nics::Nics;
use crate::vm::run::{Role, VmLoop};
use crate::vm::session::primary::PrimaryJob;
use crate::vm::status::RECENT;
use dunlin_core::agreed::{Agreed, ReplicaSet};
use dunlin_core::output::gate::Voice;
use dunlin_core::sync::trigger::{Decision, Reason, Sight, decide};
use dunlin_core::units::{Epoch, Index};
use std::sync::PoisonError;

impl VmLoop {
    pub(super) fn begin_sync(&mut self, hand_over: bool) {
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

    pub(super) fn start_due_sync(&mut self) {
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
    pub(in crate::vm) fn sync_agreed(&mut self, epoch: Epoch) -> bool {
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

    pub(super) fn start_drained_sync(&mut self) {
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

    pub(in crate::vm) fn primary_sync_step(&mut self, id: u64, step: SyncStep) {
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
    pub(super) fn draw_line(&mut self) {
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

    pub(super) fn sync_acknowledged(
        &mut self,
        epoch: Epoch,
        joining: bool,
        hand_over: bool,
        figures: SyncFigures,
    ) {
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
        primary.sync_status.sum.add(&figures);
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
        let drain = primary
            .sync
            .as_ref()
            .filter(|run| run.stage == Stage::Draining)
            .map(|_| now_us + DRAIN_LOOK_US);
        let look =
            (self.gate.voice() == Voice::Protected && primary.sync.is_none()).then_some(primary.next_look_us);
        [drain, look, primary.quit_at_us].into_iter().flatten().min()
    }
}
