//! The backup's driver and its VM loop.

use super::hosts::{BackupLoop, Entry, Phase};
use super::vm::{Devices, hashes};
use super::world::World;
use dunlin_core::policy::Manner;
use dunlin_core::replica::sync::backup::{Effect, Report, Word};
use dunlin_core::replica::sync::{Answer, Event};
use dunlin_core::sync::staging::Staged;
use dunlin_core::units::Term;
use dunlin_core::wire::sync::SyncMessage;

impl BackupLoop {
    pub fn new(mode: Manner) -> Self {
        Self {
            phase: Phase::Joining,
            mode,
            next: mode,
            applied: 0,
            waits: false,
            staged: None,
            loading: false,
            elected: false,
            told_to_take_over: false,
            took_over: false,
        }
    }
}

impl World {
    /// One turn of the backup's session.
    pub(super) fn backup_turn(&mut self) {
        let now_us = self.now_us;
        if let Some(Effect::AwaitMirrors(epoch)) = self.b.worker.effects.front()
            && !self.disk.marks.contains_key(epoch)
        {
            if !self.mirrors && self.mirrored.is_empty() {
                self.b
                    .worker
                    .fail(now_us, "the primary's disk writes do not arrive");
            }
            return;
        }
        let Some(effect) = self.b.worker.effects.pop_front() else {
            let words_first = self.random.chance(500_000);
            if let Some(event) = self.b.worker.next_event(words_first) {
                self.note(|| format!("b hears {event:?}"));
                self.b.worker.step(now_us, event);
            }
            return;
        };
        self.note(|| format!("b does {effect:?}"));
        let sure = matches!(effect, Effect::Report(_) | Effect::Pass(_) | Effect::Tell(_));
        if self.fails(sure) {
            return self.b.worker.fail(now_us, "an effect failed");
        }
        if let Some(answer) = self.backup_does(effect) {
            self.b.worker.step(now_us, Event::Answer(answer));
        }
    }

    fn backup_does(&mut self, effect: Effect) -> Option<Answer> {
        match effect {
            Effect::Send(message) | Effect::Tell(message) => self.send_to_primary(message),
            Effect::WritePages(deltas) => self.b.vm.take(&deltas),
            Effect::Stop => self.b.vm.runs = false,
            Effect::Scan => return Some(Answer::Scanned(self.b.vm.scan())),
            Effect::SendHashes { epoch, pages } => {
                let hashes = hashes(&self.b.vm.copy(&pages));
                self.send_to_primary(SyncMessage::Hashes { epoch, hashes });
            }
            Effect::CheckState(_) => return Some(Answer::StateChecked(Ok(()))),
            Effect::Apply { staged, run, .. } => return self.apply(&staged, run),
            Effect::TakeOverDisks(_) => {
                self.disk.taken_over = true;
                if let Some(svm) = self.disk.svm.take() {
                    self.disk.image = svm;
                }
            }
            Effect::LoadKept(state) => self.b.vm.devices = Devices::load(&state),
            Effect::FailOver => {
                self.b.vm.runs = true;
                return Some(Answer::TookOver);
            }
            Effect::Report(report) => self.backup_reports(report),
            Effect::AwaitMirrors(_) | Effect::Pass(_) => {}
        }
        None
    }

    fn apply(&mut self, staged: &Staged, run: bool) -> Option<Answer> {
        let epoch = staged.epoch;
        // What the backup's buffer holds now, where nobody has waited for the mark.
        self.disk.image = self.disk.marks.get(&epoch).copied().unwrap_or(self.disk.pvm);
        self.disk.svm = None;
        if self.random.chance(self.fault_rate * 12) {
            // Half of it.
            let half = staged.deltas.len() / 2;
            self.b.vm.take(&staged.deltas[..half]);
            self.tally.torn += 1;
            // The copy is worth nothing, and just then the other host dies: nobody serves, and nobody lies.
            if self.a.alive && self.random.chance(250_000) {
                self.kill_primary();
            }
            self.b.worker.fail(self.now_us, "applied by half");
            return None;
        }
        self.b.vm.take(&staged.deltas);
        self.b.vm.scan();
        let devices = Devices::load(&staged.device_state);
        let mut after = self.b.vm.clone();
        after.devices = devices;
        if let Err(why) = after.check(self.disk.image) {
            self.verdict(format!("after sync {}: {why}", epoch.0));
        }
        if run {
            after.runs = true;
            self.b.vm = after;
        } else {
            self.b.vm.runs = false;
        }
        Some(Answer::Applied { took_us: 1 })
    }

    fn backup_reports(&mut self, report: Report) {
        match report {
            Report::Staged { epoch, next, .. } => self.bl.staged = Some((epoch, next)),
            Report::Loaded { .. } => {
                self.bl.phase = Phase::Synced;
                self.bl.mode = self.bl.next;
                self.bl.loading = false;
                self.bl.waits = false;
            }
            Report::Ended { torn, .. } => {
                self.close_stream();
                self.bl.staged = None;
                self.bl.loading = false;
                self.bl.waits = false;
                let joined = matches!(self.bl.phase, Phase::Synced);
                self.bl.phase = Phase::Lost;
                if torn || !joined {
                    // Nobody's VM.
                    self.b_is_gone = true;
                }
            }
            Report::TookOver(Ok(())) => self.take_over_done(),
            Report::TookOver(Err(_)) => self.b_is_gone = true,
        }
    }

    /// The loop gives leave, or not: it has been elected meanwhile.
    pub(super) fn give_leave(&mut self) {
        let Some((_, next)) = self.bl.staged.take() else {
            return;
        };
        if self.bl.elected {
            return self.b.worker.words.push_back(Word::Drop);
        }
        self.bl.next = next;
        self.bl.loading = true;
        self.b.worker.words.push_back(Word::Acknowledge);
    }

    /// An entry of the log, on the backup.
    pub(super) fn backup_applies(&mut self) {
        let entry = self.log[self.bl.applied];
        self.bl.applied += 1;
        self.note(|| format!("b applies {entry:?}"));
        let follows = !self.bl.elected && self.bl.phase != Phase::Lost;
        match entry {
            Entry::Input(input) => {
                let whole = matches!(self.bl.phase, Phase::Synced | Phase::Lost);
                if whole && self.bl.mode.backup_runs() {
                    let whim = self.whim();
                    let word = self.b.vm.input(input, whim);
                    if follows && self.bl.mode == Manner::Match {
                        self.said_by_backup(word);
                    }
                }
            }
            Entry::Sync(_) if follows && self.bl.phase == Phase::Joining => self.bl.waits = true,
            Entry::Sync(epoch) if follows => {
                self.bl.waits = true;
                self.b.worker.words.push_back(Word::EpochEnds { epoch });
            }
            Entry::Complete { both: false, .. } if !self.bl.elected => self.b_is_gone = true,
            Entry::Sync(_) | Entry::Complete { .. } => {}
        }
    }

    /// Elected, with all agreed inputs in its VM.
    pub(super) fn order_take_over(&mut self) {
        self.bl.told_to_take_over = true;
        self.b.worker.words.push_back(Word::TakeOver(Term(2)));
    }
}
