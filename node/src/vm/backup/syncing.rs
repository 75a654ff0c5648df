//! A backup's syncs: whether one that lies here whole may be acknowledged, and what follows.
//!
//! Invariants: 2 and 4 of `backup`.
//!
//! Not here: the work of a sync (`session::backup`), the rule itself (core's `tenure`).

use crate::vm::event::BackupStep;
use crate::vm::state::VmLoop;
use crate::vm::state::backup::StagedSync;
use dunlin_api::EventKind;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::sync::backup::Word;
use dunlin_core::sync::tenure::Leave;
use dunlin_core::units::Term;

impl VmLoop {
    pub(in crate::vm) fn backup_sync_step(&mut self, session: u64, step: BackupStep) {
        let Some(backup) = self.backup().filter(|backup| backup.session == session) else {
            return;
        };
        match step {
            BackupStep::Staged {
                epoch,
                next,
                connections,
            } => {
                backup.staged = Some(StagedSync {
                    epoch,
                    next,
                    connections,
                });
                // What the VM sent up to its stop belongs to the epoch that ends.
                self.read_ports();
                self.give_leave();
            }
            // The session's thread goes on when `taken` is dropped.
            BackupStep::ConnectionsAhead { epoch, part, taken } => {
                if let Some(Err(error)) = self.speculation_stages(epoch, part) {
                    // The copy is whole as of the last sync, and may be taken over; no later sync may be acknowledged.
                    if let Some(backup) = self.backup() {
                        (backup.refuses, backup.staged) = (true, None);
                    }
                    self.join_failed(format!("the primary's connections, ahead of a sync: {error}"));
                    self.drop_backup_session();
                }
                drop(taken);
            }
            BackupStep::Loaded { epoch, joining } => {
                if backup.epochs.loaded().is_some() {
                    self.begin_backup_drain();
                }
                if joining {
                    self.event(
                        EventKind::Joined,
                        format!("this host follows the VM from epoch {}", epoch.0 + 1),
                    );
                }
            }
        }
    }

    /// Invariant 2: may the sync that lies here whole be acknowledged?
    pub(super) fn give_leave(&mut self) {
        let (term, leader, now_us) = (self.group.term(), self.group.leader(), self.now_us());
        let speculative = self.config.speculative;
        let Some(backup) = self.backup() else { return };
        let Some(staged) = &backup.staged else { return };
        if backup.epochs.awaits_entry(Rules::of(staged.next, speculative)) {
            // `backup_sync_agreed` asks again.
            return;
        }
        let leave = match backup.take_over {
            Some(_) => Leave::Refused,
            None if backup.refuses => Leave::Refused,
            None => backup.tenure.leave(now_us, term, leader),
        };
        match leave {
            Leave::Given => self.acknowledge(),
            Leave::Waits => {}
            Leave::Refused => {
                backup.staged = None;
                self.drop_backup_session();
            }
        }
    }

    /// Ends the session, whatever its thread waits for.
    pub(in crate::vm) fn drop_backup_session(&mut self) {
        self.close_backup_session();
        if let Some(jobs) = self.backup().and_then(|backup| backup.jobs.as_ref()) {
            // The thread may wait for a word, not for the stream. One that has ended reports that itself.
            let _ = jobs.send(Word::Drop);
        }
    }

    /// The sync that lies here whole is acknowledged, and applied.
    fn acknowledge(&mut self) {
        let speculative = self.config.speculative;
        let Some(backup) = self.backup() else { return };
        let Some(StagedSync {
            epoch,
            next,
            connections,
        }) = backup.staged.take()
        else {
            return;
        };
        let next = Rules::of(next, speculative);
        let (table, known) = self.connections_heard(connections);
        if let Some(Err(error)) = self.speculation_applies(epoch, &known) {
            // Not acknowledged: the session ends, and with it this copy.
            self.join_failed(format!("the primary's connections: {error}"));
            return self.drop_machine();
        }
        if let Err(error) = self.net.output.applied(epoch, &table) {
            // Not acknowledged: the session ends, and with it this copy.
            self.join_failed(format!("the primary's connections: {error}"));
            return self.drop_machine();
        }
        let Some(backup) = self.backup() else { return };
        // Invariant 4.
        backup.epochs.acknowledges(next);
        if let Some(jobs) = &backup.jobs {
            // A session that has ended reports that itself.
            let _ = jobs.send(Word::Acknowledge);
        }
    }

    /// The primary has kept the session in a term that it leads; whether it leads in it the group says.
    pub(in crate::vm) fn session_term_told(&mut self, session: u64, term: Term) {
        if let Some(backup) = self.backup().filter(|backup| backup.session == session) {
            backup.tenure.told(term);
            self.give_leave();
        }
    }
}
