//! The watchdog of one VM: what should get on and does not is told, and the session that is waited for is ended.
//!
//! Flow: each turn of the loop -> core's `watchdog` -> an event, a figure, a state -> the session's end, as if its backup were
//! lost: the VM goes on without it. Or the end of an office: a take-over that does not get on is left to another host, and so is a VM whose
//! inputs wait for the disk of its primary's log.
//!
//! Not here: how long anything may be waited for (core's `waits`).

use super::state::{Role, VmLoop};
use dunlin_api::{EventKind, WaitStatus};
use dunlin_core::output::gate::Voice;
use dunlin_core::waits::{Wait, seconds};
use dunlin_core::watchdog::{Flow, Sight, Stall};
use std::time::Duration;

impl VmLoop {
    /// At each turn.
    pub(super) fn watch(&mut self) {
        let now_us = self.now_us();
        if let Some(stall) = self.shown.watchdog.look(now_us, self.sight()) {
            self.end_stall(stall);
        }
        self.miss_agreement(now_us);
        self.miss_thread(now_us);
    }

    fn sight(&self) -> Sight {
        let log_is_full = self.agreement.log_is_full && self.group.is_leader();
        let input = Flow::of_inputs(self.agreement.applied, self.group.committed(), log_is_full);
        match &self.role {
            Role::Primary(primary)
                if self.net.output.voice() == Voice::Protected && self.agreement.leads() =>
            {
                Sight {
                    input,
                    sync: primary.sync_flow(),
                    output: self.net.output.flow(),
                    ..Sight::default()
                }
            }
            Role::Backup(backup) if backup.follows() => Sight {
                input,
                sync: backup.sync_flow(),
                disks: backup.disk_flow(),
                ..Sight::default()
            },
            Role::Backup(backup) => Sight {
                take_over: backup.take_over_flow(self.agreement.applied, &self.agreement.leadership),
                ..Sight::default()
            },
            // Without a majority a primary is to stand still.
            Role::Primary(_) | Role::None => Sight::default(),
        }
    }

    fn end_stall(&mut self, stall: Stall) {
        let also = self
            .waiting()
            .map(|(wait, since)| (wait, since.as_micros() as u64));
        let why = stall.said(also);
        if stall.wait == Wait::TakesOver {
            return self.leave_take_over(&why);
        }
        self.event(
            EventKind::Stalled,
            format!("the VM is protected and does not get on: {why}"),
        );
        // Where this host's own disk is what does not get on, it is not the backup that has to go.
        let disk_lags = stall.wait == Wait::InputApplied && self.log_disk_lags();
        if disk_lags && self.leave_office("the log's disk of this host does not get on") {
            return;
        }
        match &self.role {
            Role::Primary(primary) => {
                if let Some(id) = primary.session_id() {
                    self.session_ended(id, &format!("the watchdog has ended the session: {why}"));
                    // The thread that has stopped it may never come to do so.
                    self.resume_vm("after a stall");
                }
            }
            Role::Backup(_) => self.drop_backup_session(),
            Role::None => {}
        }
    }

    /// A sync whose entry the group does not agree on.
    fn miss_agreement(&mut self, now_us: u64) {
        let leads = self.agreement.leads();
        let Some(primary) = self.primary() else { return };
        let late = primary.waits_for_agreement_us(now_us) >= Wait::SyncAgreed.bound_us();
        if let Some(id) = primary.session_id().filter(|_| late && leads) {
            self.session_ended(id, &Wait::SyncAgreed.said());
        }
    }

    /// The thread of a session that was ended, and that does not end: no other session can begin.
    fn miss_thread(&mut self, now_us: u64) {
        let Some(primary) = self.primary() else { return };
        if let Some(since_us) = primary.thread_is_late(now_us) {
            self.event(
                EventKind::Stalled,
                format!(
                    "the last session's thread has not ended for {} ({}): no backup can be brought in until it has",
                    seconds(now_us - since_us),
                    Wait::SessionEnds.name()
                ),
            );
        }
    }

    /// What the session's thread waits for.
    fn waiting(&self) -> Option<(Wait, Duration)> {
        match &self.role {
            Role::Primary(primary) => primary.waiting(),
            Role::Backup(backup) => backup.waiting(),
            Role::None => None,
        }
    }

    /// The same for people.
    pub(super) fn shown_wait(&self) -> Option<WaitStatus> {
        self.waiting().map(|(wait, since)| WaitStatus {
            name: wait.name().to_owned(),
            for_what: wait.terms().for_what.to_owned(),
            us: since.as_micros() as u64,
        })
    }

    /// Whether a take-over here does not get on.
    pub(super) fn take_over_stalls(&self) -> bool {
        self.shown.watchdog.stalled() == Some(Wait::TakesOver)
    }
}
