//! The primary's driver and its VM loop.

use super::Bug;
use super::hosts::{Entry, Mirrored, Office, PrimaryLoop, Voice};
use super::vm::{delta, hashes};
use super::world::World;
use bytes::Bytes;
use dunlin_core::policy::Mode;
use dunlin_core::replica::epoch::primary::{Loaded, Phase, PrimaryEpochs};
use dunlin_core::replica::epoch::{Inputs, Rules};
use dunlin_core::replica::sync::bugs::Bugs;
use dunlin_core::replica::sync::primary::{Effect, Order, Report, Word};
use dunlin_core::replica::sync::{Answer, Event};
use dunlin_core::sync::compare::DivergentPage;
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::units::Epoch;
use dunlin_core::wire::sync::SyncMessage;

impl PrimaryLoop {
    pub fn new(mode: Mode, bug: Option<Bug>) -> Self {
        let mut epochs = PrimaryEpochs::new(Rules::of(mode, false)).with_bugs(Bugs::with(bug));
        epochs.session_begins();
        epochs.join_begins();
        Self {
            epochs,
            mode,
            voice: Voice::Alone,
            epoch: Epoch(1),
            unread: std::collections::VecDeque::new(),
            held: std::collections::VecDeque::new(),
            matched: std::collections::VecDeque::new(),
            applied: 0,
            office: Office::Leads,
            transfers: false,
        }
    }

    pub fn executes_at_once(&self) -> bool {
        self.epochs.inputs() == Inputs::Direct
    }

    pub fn is_lost(&self) -> bool {
        self.epochs.session().is_none()
    }

    /// What the VM has said is of the running epoch.
    pub fn read(&mut self) {
        let epoch = self.epoch;
        self.held.extend(self.unread.drain(..).map(|word| (epoch, word)));
    }
}

impl World {
    fn send_pages(&mut self, pages: &PageSet, contents: Vec<u64>) {
        let whole = |(page, content)| {
            let at = DivergentPage {
                page,
                blocks: u16::MAX,
            };
            delta(at, content)
        };
        let deltas = pages.pages().zip(contents).map(whole).collect();
        self.send_to_backup(SyncMessage::Pages(deltas));
    }

    /// One turn of the primary's session: an effect, or an event.
    pub(super) fn primary_turn(&mut self) {
        let now_us = self.now_us;
        let Some(effect) = self.a.worker.effects.pop_front() else {
            if let Some(event) = self.a.worker.next_event(true) {
                self.note(|| format!("a hears {event:?}"));
                self.a.worker.step(now_us, event);
            }
            return;
        };
        self.note(|| format!("a does {effect:?}"));
        if self.fails(matches!(
            effect,
            Effect::Report(_) | Effect::Pass(_) | Effect::End { .. }
        )) {
            // A stop that fails may be obeyed yet.
            if matches!(effect, Effect::Stop) && self.random.chance(500_000) {
                self.a.vm.runs = false;
            }
            return self.a.worker.fail(now_us, "an effect failed");
        }
        if let Some(answer) = self.primary_does(effect) {
            self.a.worker.step(now_us, Event::Answer(answer));
        }
    }

    fn primary_does(&mut self, effect: Effect) -> Option<Answer> {
        match effect {
            Effect::Send(message) => self.send_to_backup(message),
            Effect::CopyDisks => {
                self.disk.image = self.a.vm.devices.disk;
                self.disk.pvm = self.disk.image;
                self.mirrors = true;
                return Some(Answer::DisksCopied);
            }
            Effect::MapMemory => return Some(Answer::Mapped(self.a.vm.populated())),
            Effect::HashPages(pages) => return Some(Answer::PagesHashed(self.a.vm.page_hashes(&pages))),
            Effect::Scan => return Some(Answer::Scanned(self.a.vm.scan())),
            Effect::SendPages(pages) => {
                let contents = self.a.vm.copy(&pages);
                self.send_pages(&pages, contents);
            }
            Effect::SendZeros(pages) => self.send_pages(&pages, vec![0; pages.len()]),
            Effect::Stop => self.a.vm.runs = false,
            Effect::Save { .. } => self.a.saved = self.a.vm.devices.save(),
            Effect::MarkDisks(epoch) => self.mirror(Mirrored::Mark(epoch)),
            Effect::Copy(pages) => self.a.copy = self.a.vm.copy(&pages),
            Effect::Resume => {
                self.a.vm.runs = true;
                return Some(Answer::Resumed);
            }
            Effect::RunOn => self.a.vm.runs = true,
            Effect::Hash => return Some(Answer::Hashed(hashes(&self.a.copy))),
            Effect::SendDeltas {
                epoch,
                pages,
                differing,
            } => {
                let contents: Vec<(u32, u64)> = pages.pages().zip(self.a.copy.drain(..)).collect();
                let of = |page| {
                    contents
                        .iter()
                        .find(|(known, _)| *known == page)
                        .expect("it was copied")
                        .1
                };
                for at in differing {
                    let deltas = vec![delta(at, of(at.page))];
                    self.send_to_backup(SyncMessage::Delta { epoch, deltas });
                }
                return Some(Answer::DeltasSent { bytes: 0 });
            }
            Effect::SendState {
                epoch,
                next,
                connections,
            } => {
                let mut state = std::mem::take(&mut self.a.saved);
                let part = state.split_to(8);
                self.send_to_backup(SyncMessage::DeviceState { epoch, part });
                self.send_to_backup(SyncMessage::State {
                    epoch,
                    next,
                    connections,
                    device_state: state,
                });
                return Some(Answer::StateSent { mirrored: 0 });
            }
            Effect::Report(report) => self.primary_reports(report),
            Effect::End { .. } => self.session_lost(),
            Effect::Progress { .. } | Effect::Audit | Effect::Pass(_) => {}
        }
        None
    }

    fn primary_reports(&mut self, report: Report) {
        // A session that the loop has ended tells it nothing more, but that its VM stands.
        if self.pl.is_lost() && !matches!(report, Report::VmStands { .. }) {
            return;
        }
        match report {
            Report::Held { equal, .. } => self.tally.held += equal as u64,
            Report::Copied => self.pl.epochs.join_copied(),
            Report::PreCopied => {
                self.tally.precopied += 1;
                if self.pl.epochs.precopied() && self.pl.office == Office::Leads {
                    self.begin_sync(false);
                }
            }
            // The line is drawn at another turn.
            Report::Stopped => self.line_due = true,
            Report::Resumed => self.pl.epochs.resumed(),
            Report::Acknowledged { epoch, joining, .. } => {
                self.tally.syncs += 1;
                self.pl.epochs.acknowledged(epoch);
                if joining {
                    self.propose(Entry::Complete { both: true, epoch });
                } else {
                    self.release_through(epoch);
                }
            }
            Report::Loaded { .. } => self.primary_loaded(),
            Report::VmStands { .. } => {
                // The VM's process is broken: its copy ends.
                self.kill_primary();
            }
        }
    }

    fn primary_loaded(&mut self) {
        match self.pl.epochs.loaded() {
            Loaded::Switchover => {
                self.pl.transfers = self.pl.office != Office::Lost;
                self.a.worker.words.push_back(Word::HandedOver);
            }
            Loaded::NextEpoch { .. } => self.pl.matched.clear(),
            Loaded::Nothing => {}
        }
    }

    /// The loop reads what the VM said until it stood.
    pub(super) fn draw_line(&mut self) {
        self.line_due = false;
        self.pl.read();
        self.pl.epoch = self.pl.epoch.next();
        if self.pl.epochs.line_drawn() && self.pl.voice == Voice::Alone {
            self.pl.voice = Voice::Protected;
        }
        let connections = Bytes::new();
        self.a.worker.words.push_back(Word::LineDrawn { connections });
    }

    /// A sync begins, if the log takes it.
    pub(super) fn begin_sync(&mut self, switchover: bool) {
        let epochs = &mut self.pl.epochs;
        let mut next = match self.random.below(4) {
            0 => Mode::Match,
            1 => Mode::Active,
            2 => Mode::Passive,
            _ => epochs.rules().mode(),
        };
        if epochs.session() == Some(Phase::Copied) {
            next = self.pl.mode;
        }
        if switchover {
            next = Mode::Active;
        }
        let epoch = self.pl.epoch;
        if !epochs.begin(self.now_us, epoch, switchover, Rules::of(next, false)) {
            return self.order_sync();
        }
        if self.random.chance(50_000) {
            // A full log; nothing is left out of it here but a sync's beginning.
            self.pl.epochs.log_refused();
        } else {
            self.propose(Entry::Sync(epoch));
        }
    }

    /// What the log has refused is tried again.
    pub(super) fn begin_refused(&mut self) {
        if let Some(switchover) = self.pl.epochs.take_refused(true) {
            self.begin_sync(switchover);
        }
    }

    /// A round while the VMs run.
    pub(super) fn precopy(&mut self) {
        let epoch = self.pl.epoch;
        if !self.pl.epochs.rules().backup_runs() {
            let part = Bytes::copy_from_slice(&epoch.0.to_be_bytes());
            self.a
                .worker
                .words
                .push_back(Word::ConnectionsAhead { epoch, part });
        }
        self.pl.epochs.precopy(self.now_us, epoch);
        self.a.worker.words.push_back(Word::PreCopy { epoch });
    }

    /// The VM has its inputs: the session may sync.
    pub(super) fn order_sync(&mut self) {
        let run = self.pl.epochs.drained();
        self.a.worker.words.push_back(Word::Sync(Order {
            epoch: run.epoch,
            switchover: run.switchover,
            agreed: run.agreed,
            next: run.next.mode(),
        }));
    }

    /// An entry of the log, on the primary.
    pub(super) fn primary_applies(&mut self) {
        let entry = self.log[self.pl.applied];
        self.pl.applied += 1;
        self.note(|| format!("a applies {entry:?}"));
        match entry {
            Entry::Input(input) => self.primary_input(input),
            Entry::Sync(epoch) => {
                if self.pl.epochs.sync_agreed(epoch) {
                    self.order_sync();
                }
            }
            Entry::Complete { both: true, epoch } => {
                self.pl.epochs.backup_is_complete();
                self.release_through(epoch);
            }
            Entry::Complete { both: false, .. } => {
                if self.pl.office == Office::Leads {
                    self.pl.voice = Voice::Alone;
                }
            }
        }
    }

    /// The VM takes an input; a model VM that stands takes it when it goes on, as a card's queue does.
    pub(super) fn primary_input(&mut self, input: u64) {
        let whim = self.whim();
        let word = self.a.vm.input(input, whim);
        self.pl.unread.push_back(word);
    }

    /// The session is over.
    fn session_lost(&mut self) {
        self.close_stream();
        self.mirrors = false;
        self.line_due = false;
        let Some(ended) = self.pl.epochs.session_ended() else {
            return;
        };
        if ended.handed {
            return;
        }
        self.tally.broken += 1;
        if self.is_complete() || ended.phase == Phase::LastSync {
            let epoch = self.pl.epoch;
            self.propose(Entry::Complete { both: false, epoch });
        }
    }

    /// No majority answers, or the backup asks for votes: this host follows nobody.
    pub(super) fn lose_office(&mut self) {
        self.note(|| "a leads no more".to_owned());
        self.pl.office = Office::Lost;
        self.pl.transfers = false;
        self.pl.voice = Voice::Shut;
        self.pl.epochs.deposed(false);
    }

    /// It is elected again. What makes it lead is an entry behind all that was agreed.
    pub(super) fn elected_again(&mut self) {
        self.note(|| "a is elected again".to_owned());
        self.pl.office = Office::Elected;
        self.pl.epochs.elected();
    }

    /// It leads: the VM goes on here.
    pub(super) fn leads_again(&mut self) {
        self.note(|| "a leads again".to_owned());
        self.pl.office = Office::Leads;
        if self.pl.epochs.switchover_failed() {
            self.a.vm.runs = true;
            self.session_lost();
        }
        let complete = self.is_complete();
        let survives = match self.pl.epochs.session() {
            Some(Phase::Synced) => complete,
            Some(Phase::Connecting | Phase::Joining | Phase::Copied) => !complete,
            Some(Phase::LastSync) | None => false,
        };
        if !survives {
            self.session_lost();
        }
        match (complete, survives) {
            (false, _) => self.pl.voice = Voice::Alone,
            (true, true) => self.pl.voice = Voice::Protected,
            (true, false) => {
                let epoch = self.pl.epoch;
                self.propose(Entry::Complete { both: false, epoch });
            }
        }
    }
}
