//! The primary's driver and its VM loop.

use super::hosts::{Entry, Mirrored, Phase, PrimaryLoop, Run, Stage, Voice};
use super::vm::{PAGES, delta, hashes};
use super::world::World;
use bytes::Bytes;
use dunlin_core::policy::Manner;
use dunlin_core::replica::sync::primary::{Effect, Order, Report, Word};
use dunlin_core::replica::sync::{Answer, Event};
use dunlin_core::sync::compare::DivergentPage;
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::units::Epoch;
use dunlin_core::wire::sync::SyncMessage;

impl PrimaryLoop {
    pub fn new(mode: Manner) -> Self {
        Self {
            phase: Phase::Joining,
            run: None,
            mode,
            voice: Voice::Alone,
            epoch: Epoch(1),
            unread: std::collections::VecDeque::new(),
            held: std::collections::VecDeque::new(),
            matched: std::collections::VecDeque::new(),
            applied: 0,
            waits: false,
            handed: false,
        }
    }

    /// A backup that does not run, and will not after the sync under way, executes nothing: inputs need no agreement.
    pub fn executes_at_once(&self) -> bool {
        self.phase == Phase::Synced && self.mode == Manner::Passive && self.run.is_none_or(|run| !run.agreed)
    }

    /// What the VM has said is of the running epoch.
    pub fn read(&mut self) {
        let epoch = self.epoch;
        self.held.extend(self.unread.drain(..).map(|word| (epoch, word)));
    }
}

impl World {
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
            Effect::MapMemory => return Some(Answer::Mapped(PageSet::from_runs([(0, PAGES)]))),
            Effect::Scan => return Some(Answer::Scanned(self.a.vm.scan())),
            Effect::SendPages(pages) => {
                let whole = |(page, content)| {
                    let at = DivergentPage {
                        page,
                        blocks: u16::MAX,
                    };
                    delta(at, content)
                };
                let contents = self.a.vm.copy(&pages);
                let deltas = pages.pages().zip(contents).map(whole).collect();
                self.send_to_backup(SyncMessage::Pages(deltas));
            }
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
            Effect::SendState { epoch, next, shadow } => {
                let mut state = std::mem::take(&mut self.a.saved);
                let part = state.split_to(8);
                self.send_to_backup(SyncMessage::DeviceState { epoch, part });
                self.send_to_backup(SyncMessage::State {
                    epoch,
                    next,
                    shadow,
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
        match report {
            Report::Copied => self.pl.phase = Phase::Copied,
            Report::PreCopied => {
                self.tally.precopied += 1;
                self.begin_sync(false);
            }
            // The line is drawn at another turn.
            Report::Stopped => self.line_due = true,
            Report::Resumed => {
                // After a switchover's stop the VM here takes no more inputs: they are the backup's.
                self.pl.waits = self.pl.run.is_some_and(|run| run.switchover);
            }
            Report::Acknowledged { epoch, joining, .. } => {
                self.tally.syncs += 1;
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
        let Some(run) = self.pl.run.take() else { return };
        if run.switchover {
            self.pl.handed = true;
            return self.a.worker.words.push_back(Word::HandedOver);
        }
        self.pl.mode = run.next;
        self.pl.matched.clear();
    }

    /// The loop reads what the VM said until it stood.
    pub(super) fn draw_line(&mut self) {
        self.line_due = false;
        self.pl.read();
        self.pl.epoch = self.pl.epoch.next();
        if self.pl.phase == Phase::LastSync && self.pl.voice == Voice::Alone {
            self.pl.voice = Voice::Protected;
        }
        let shadow = Bytes::new();
        self.a.worker.words.push_back(Word::LineDrawn { shadow });
    }

    /// A sync begins, if there is none.
    pub(super) fn begin_sync(&mut self, switchover: bool) {
        let last = self.pl.phase == Phase::Copied;
        let mut next = match self.random.below(4) {
            0 => Manner::Match,
            1 => Manner::Active,
            2 => Manner::Passive,
            _ => self.pl.mode,
        };
        if last {
            next = self.pl.mode;
        }
        if switchover {
            next = Manner::Active;
        }
        let agreed = !self.pl.executes_at_once() || next.backup_runs();
        let epoch = self.pl.epoch;
        let run = Run {
            epoch,
            switchover,
            agreed,
            next,
            stage: Stage::Proposed,
        };
        self.pl.run = Some(run);
        if last {
            self.pl.phase = Phase::LastSync;
        }
        match agreed {
            true => self.propose(Entry::Sync(epoch)),
            false => self.order_sync(),
        }
    }

    /// A round while the VMs run.
    pub(super) fn precopy(&mut self) {
        let epoch = self.pl.epoch;
        self.pl.run = Some(Run {
            epoch,
            switchover: false,
            agreed: false,
            next: self.pl.mode,
            stage: Stage::PreCopy,
        });
        self.a.worker.words.push_back(Word::PreCopy { epoch });
    }

    /// The VM has its inputs: the session may sync.
    pub(super) fn order_sync(&mut self) {
        let Some(run) = &mut self.pl.run else { return };
        run.stage = Stage::Running;
        self.a.worker.words.push_back(Word::Sync(Order {
            epoch: run.epoch,
            switchover: run.switchover,
            agreed: run.agreed,
            next: run.next,
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
                let due = |run: &Run| run.epoch == epoch && run.stage == Stage::Proposed;
                if self.pl.run.as_ref().is_some_and(due) {
                    self.pl.waits = true;
                    self.order_sync();
                }
            }
            Entry::Complete { both: true, epoch } => {
                if self.pl.phase == Phase::LastSync {
                    self.pl.phase = Phase::Synced;
                }
                self.release_through(epoch);
            }
            Entry::Complete { both: false, .. } => {
                if self.pl.voice == Voice::Protected {
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
        self.pl.run = None;
        self.pl.waits = false;
        self.line_due = false;
        let was = std::mem::replace(&mut self.pl.phase, Phase::Lost);
        if self.pl.handed {
            return;
        }
        self.tally.broken += 1;
        if self.is_complete() || was == Phase::LastSync {
            let epoch = self.pl.epoch;
            self.propose(Entry::Complete { both: false, epoch });
        }
    }
}
