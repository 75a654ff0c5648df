//! The backup takes the VM over: from its election until it speaks.
//!
//! Flow: elected, so no word of the old primary counts any more -> what was agreed is with the VM -> the copy is made an ordinary VM
//! -> the group agrees that it alone is complete -> it speaks (`backup`'s invariant 3). One that does not get on costs this host its
//! office, and not its copy.
//!
//! Not here: the work on the copy (`session::backup`), what had left already (core's `output`).

use crate::vm::fault_at::Line;
use crate::vm::state::VmLoop;
use crate::vm::state::backup::TakeOver;
use dunlin_api::{EventKind, FailoverStatus};
use dunlin_core::output::announcements::Announcements;
use dunlin_core::replica::leadership::Step;
use dunlin_core::replica::sync::SessionError;
use dunlin_core::replica::sync::backup::Word;

impl VmLoop {
    /// Elected: from here on no word of the old primary counts.
    pub(in crate::vm) fn prepare_take_over(&mut self) {
        let now_us = self.now_us();
        let (heard_us, campaign_us) = (
            self.agreement.election.leader_heard_us,
            self.agreement.election.campaign_us.unwrap_or(now_us),
        );
        let Some(backup) = self.backup() else { return };
        if let Some(closer) = &backup.closer {
            closer.close();
        }
        // The state of a sync may be here whose last disk writes died with the primary.
        if let Some(machine) = &backup.machine {
            machine.disks.forsake_primary();
        }
        if backup.take_over.is_none() {
            let status = FailoverStatus {
                detected_us: campaign_us.saturating_sub(heard_us),
                elected_us: now_us.saturating_sub(campaign_us),
                ..FailoverStatus::default()
            };
            backup.take_over = Some(TakeOver {
                elected_us: now_us,
                status,
                speaks_at_us: 0,
            });
        }
        self.give_leave();
        let Some(backup) = self.backup() else { return };
        // A sync that was not handed to the session yet never will be.
        if backup.epochs.elected() {
            self.forget_cut();
        }
    }

    /// Hands the VM over to the session's thread to be made an ordinary one, once all agreed inputs are with it; and asks the group to agree
    /// when it is one. This host may have been deposed and elected again meanwhile.
    pub(in crate::vm) fn go_on_taking_over(&mut self) {
        let term = self.group.term();
        let all_applied = !self.log_is_held() && self.agreement.applied >= self.group.committed();
        let Some(backup) = self.backup() else { return };
        let settled = all_applied && backup.epochs.is_settled();
        match self.agreement.leadership.take_over_step(settled, term) {
            Step::Nothing => {}
            Step::Begins => {
                self.shared.reigns(term, true);
                let jobs = self.backup().and_then(|backup| backup.jobs.as_ref());
                if jobs.is_none_or(|jobs| jobs.send(Word::TakeOver(term)).is_err()) {
                    self.take_over_failed("the session's thread has gone");
                }
            }
            Step::Claims => {
                if self.say_it_is_alone() {
                    self.agreement.leadership.claimed(term);
                }
            }
        }
    }

    pub(in crate::vm) fn took_over(&mut self, session: u64, result: Result<(), SessionError>) {
        let now_us = self.now_us();
        let Some(backup) = self.backup().filter(|backup| backup.session == session) else {
            return;
        };
        let Some(take_over) = &mut backup.take_over else {
            return;
        };
        match result {
            Ok(()) => {
                take_over.status.applied_us = now_us - take_over.elected_us;
                take_over.speaks_at_us = now_us;
                self.agreement.leadership.took_over();
                if self.shared.fault_at.steps_down(Line::BackupTookOver) {
                    self.event(
                        EventKind::SteppedDown,
                        "a fault was asked for: the take-over is cut short by an election",
                    );
                    self.group.step_down();
                }
                self.go_on_taking_over();
            }
            Err(why) => self.take_over_failed(&why.to_string()),
        }
    }

    /// It does not get on, its disk hangs perhaps. This host gives its office back and does not stand for election as long as that lasts,
    /// so that another one with a complete copy serves: a primary that was only paused. The copy here stays: where nobody else has
    /// one, the take-over goes on when it can.
    pub(in crate::vm) fn leave_take_over(&mut self, why: &str) {
        let held = self
            .machine()
            .map(|machine| machine.disks.held())
            .unwrap_or_default();
        let held: Vec<String> = held.iter().map(|number| format!("disk {number}")).collect();
        let what = if held.is_empty() {
            "it".to_owned()
        } else {
            held.join(" and ")
        };
        self.event(
            EventKind::Stalled,
            format!("the VM is to be taken over here, and {what} does not get on: {why}; another host may lead until then"),
        );
        self.group.step_down();
        self.group.may_lead(false);
    }

    pub(in crate::vm) fn take_over_failed(&mut self, why: &str) {
        self.event(
            EventKind::TakeOverFailed,
            format!("the copy here cannot be taken over: {why}"),
        );
        self.drop_machine();
        self.group.step_down();
        self.group.may_lead(false);
    }

    /// The group has agreed that this host alone is complete: it speaks (invariant 3).
    pub(in crate::vm) fn speak_after_take_over(&mut self) {
        let now_us = self.now_us();
        let Some(backup) = self.backup() else { return };
        let (Some(machine), Some(mut take_over)) = (backup.machine.clone(), backup.take_over.take()) else {
            return;
        };
        take_over.status.announced_us = now_us - take_over.speaks_at_us;
        let (status, ran) = (take_over.status, backup.epochs.rules().backup_runs());
        if let Some(nics) = &mut self.net.nics {
            nics.announce();
        }
        self.net.announcements = Announcements::after_take_over(now_us);
        self.become_primary(machine, status);
        if self.net.speculating.is_none() || self.translates_speculation() {
            self.net.output.take_over(now_us);
        }
        self.speaks_as_it_may();
        self.speculation_takes_over(ran);
        let overheard = self.take_in_overheard(ran) as u64;
        if let Some(failover) = &mut self.shown.failover {
            failover.overheard = overheard;
        }
        self.release();
        let mut text = format!(
            "this host serves the VM now: detected {:.1} ms, elected {:.1} ms, applied {:.1} ms, announced {:.1} ms",
            status.detected_us as f64 / 1000.0,
            status.elected_us as f64 / 1000.0,
            status.applied_us as f64 / 1000.0,
            status.announced_us as f64 / 1000.0,
        );
        if overheard > 0 {
            text += &format!(
                "; it had heard {overheard} frames for the VM that nobody had agreed on: they are not lost"
            );
        }
        self.event(EventKind::TookOver, text);
        self.stands_alone();
    }
}
