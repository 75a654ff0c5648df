//! The backup's driver and its VM loop.

use super::Bug;
use super::hosts::{BackupLoop, Entry};
use super::vm::{Devices, hashes};
use super::world::World;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::epoch::backup::{BackupEpochs, Phase};
use dunlin_core::replica::sync::backup::{Effect, Report, Word};
use dunlin_core::replica::sync::bugs::Bugs;
use dunlin_core::replica::sync::{Answer, Event};
use dunlin_core::sync::staging::Staged;
use dunlin_core::units::Term;
use dunlin_core::wire::sync::SyncMessage;

impl BackupLoop {
    pub fn new(mode: Mode, bug: Option<Bug>) -> Self {
        Self {
            epochs: BackupEpochs::new(Rules::of(mode, false)).with_bugs(Bugs::with(bug)),
            applied: 0,
            staged: None,
            ended: None,
            loaded: false,
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
            Effect::SendHeld { most_pages } => {
                for pages in self.b.vm.populated().parts(2).take(most_pages / 2) {
                    let hashes = self.b.vm.page_hashes(&pages);
                    self.send_to_primary(SyncMessage::Holds { pages, hashes });
                }
            }
            Effect::WritePages(deltas) => self.b.vm.take(&deltas),
            Effect::Stop => self.b.vm.runs = false,
            Effect::Scan => return Some(Answer::Scanned(self.b.vm.scan())),
            Effect::SendHashes { epoch, pages } => {
                let hashes = hashes(&self.b.vm.copy(&pages));
                self.send_to_primary(SyncMessage::Hashes { epoch, hashes });
            }
            Effect::Hash(pages) => return Some(Answer::Hashed(hashes(&self.b.vm.copy(&pages)))),
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
        self.bl.ended = Some(epoch);
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
            Report::ConnectionsAhead { epoch, part } => {
                let is_over = self.bl.ended.is_some_and(|ended| epoch <= ended);
                if is_over || part[..] != epoch.0.to_be_bytes() {
                    self.verdict(format!("what came ahead is not of epoch {}: {part:?}", epoch.0));
                }
                self.tally.ahead += 1;
            }
            // The loop hears it at another turn.
            Report::Loaded { .. } => self.bl.loaded = true,
            Report::Ended { torn, why } => {
                if self.fault_rate == 0 && self.nothing_is_broken() {
                    self.verdict(format!("the session ends, and nothing is broken: {why}"));
                }
                self.hear_loaded();
                self.close_stream();
                self.bl.staged = None;
                let whole = self.bl.epochs.session_ended();
                if torn || !whole {
                    // Nobody's VM.
                    self.b_is_gone = true;
                }
            }
            Report::TookOver(Ok(())) => self.take_over_done(),
            Report::TookOver(Err(_)) => self.b_is_gone = true,
        }
    }

    /// Whether the loop can say now whether the sync that lies here may be acknowledged.
    pub(super) fn is_asked_for_leave(&self) -> bool {
        let staged = self.bl.staged.as_ref();
        staged.is_some_and(|(_, next)| !self.bl.epochs.awaits_entry(Rules::of(*next, false)))
    }

    /// The loop gives leave, or not: it has been elected meanwhile.
    pub(super) fn give_leave(&mut self) {
        // Reports are heard in their order.
        self.hear_loaded();
        let Some((_, next)) = self.bl.staged.take() else {
            return;
        };
        if self.bl.elected {
            return self.b.worker.words.push_back(Word::Drop);
        }
        self.bl.epochs.acknowledges(Rules::of(next, false));
        self.b.worker.words.push_back(Word::Acknowledge);
    }

    /// The primary's word that it has kept the session in a new term does not come.
    pub(super) fn refuse_leave(&mut self) {
        self.hear_loaded();
        self.bl.staged = None;
        self.close_stream();
        self.b.worker.words.push_back(Word::Drop);
    }

    /// The loop hears that the sync is applied.
    pub(super) fn hear_loaded(&mut self) {
        if std::mem::take(&mut self.bl.loaded) && self.bl.epochs.loaded().is_some() {
            self.end_epoch();
        }
    }

    /// The VM has what was agreed before the sync: a model VM has taken it at once.
    fn end_epoch(&mut self) {
        let epoch = self.bl.epochs.drained();
        self.b.worker.words.push_back(Word::EpochEnds { epoch });
    }

    /// An entry of the log, on the backup.
    pub(super) fn backup_applies(&mut self) {
        let entry = self.log[self.bl.applied];
        self.bl.applied += 1;
        self.note(|| format!("b applies {entry:?}"));
        match entry {
            Entry::Input(input) => {
                if self.bl.epochs.executes_inputs() {
                    let whim = self.whim();
                    let word = self.b.vm.input(input, whim);
                    if !self.bl.elected && self.bl.epochs.tells_output() {
                        self.said_by_backup(word);
                    }
                }
            }
            Entry::Sync(epoch) => {
                self.bl.epochs.sync_agreed(epoch, self.bl.elected);
                if matches!(self.bl.epochs.phase(), Phase::Draining(_)) {
                    self.end_epoch();
                }
            }
            Entry::Complete { both: false, .. } if !self.bl.elected => self.b_is_gone = true,
            Entry::Complete { .. } => {}
        }
    }

    /// Elected, with all agreed inputs in its VM.
    pub(super) fn order_take_over(&mut self) {
        self.bl.told_to_take_over = true;
        self.b.worker.words.push_back(Word::TakeOver(Term(2)));
    }
}
