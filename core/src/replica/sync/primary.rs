//! The primary's side: the join in rounds, then one sync after the other.
//!
//! The VM stands still from `Stop` to `Resume`: what can be done ahead is done before, what can be done on a copy is done after it.
//!
//! Invariants, asserted in release builds (`vm`):
//! 1. What a scan cleared is in a round of the same sync, and a sync that is not acknowledged ends the session.
//! 2. The VM resumes only after the loop has drawn the line between the epochs' frames.
//! 3. It is stopped only when the backup's VM stands, where that runs.
//! 4. Whoever stopped it lets it run on: the session does not end before, unless the VM is the backup's by then.
//! 5. From the stop until it is told to go on it stands for `vm-stands` at most, however many steps that takes; in a switchover, until
//!    the line is drawn.
//!
//! Files: `join` (the copy while the VM runs), `held` (what need not be copied), `precopy` (a round before the stop), `capture` (from the stop to the
//! acknowledgement), `descent` (a comparison by hash trees), `differing` (by lists). Not here: when to sync, what leaves when (the VM loop, with `trigger` and `gate`).

mod capture;
mod descent;
mod differing;
mod held;
mod join;
mod precopy;
mod types;
mod vm;

use super::bugs::{Bug, Bugs};
use super::machine::{awaits, until_us};
use super::rounds::Rounds;
use super::table::{self, Side};
use super::{Answer, Awaits, Event, Machine, Point, SessionError, Source, Violation};
use crate::sync::compare::Compare;
use crate::sync::dirty::PageSet;
use crate::units::Epoch;
use crate::waits::Wait;
use crate::wire::sync::SyncMessage;
use crate::wire::sync::parts::Gathering;
use capture::Capture;
use descent::Descent;
use held::{Held, Likening};
use precopy::PreCopy;
pub use types::{Counts, Effect, Order, Report, Setup, Word};
use vm::{Clock, Vm};

/// The primary's side of a session.
#[derive(Debug)]
pub struct Primary {
    setup: Setup,
    state: State,
    until_us: u64,
    /// Whether the backup's VM runs, in this epoch.
    active: bool,
    /// The first sync is not acknowledged yet.
    joining: bool,
    vm: Vm,
    clock: Clock,
    rounds: Rounds,
    bugs: Bugs,
}

#[derive(Debug)]
enum State {
    /// Nothing is sent yet.
    New,
    /// The backup's QEMU starts.
    Greeting(Held),
    CopyingDisks(Held),
    /// The marks are cleared before the copy begins: what is written from now on is in a later round.
    Clearing(Held),
    Mapping(Held),
    ComparingHeld(Likening),
    Copying(join::Round),
    /// Between two syncs.
    Idle,
    PreCopyScans {
        epoch: Epoch,
    },
    PreCopyAsks {
        epoch: Epoch,
        ours: PageSet,
        gathering: Gathering,
    },
    /// All of the backup's hashes are awaited before the first page is sent: neither side must wait for the other to read.
    PreCopyAwaitsHashes(PreCopy),
    PreCopyHashes(PreCopy),
    PreCopyDescends(PreCopy, Descent),
    PreCopySends(PreCopy),
    BackupStops {
        order: Order,
        gathering: Gathering,
    },
    Capturing {
        order: Order,
        theirs: PageSet,
    },
    AwaitsLine(Capture),
    Resuming(Capture),
    Hashing(Capture),
    AwaitsHashes(Capture),
    Descending(Capture, Descent),
    Sending(Capture),
    SendingDevices(Order, Counts),
    AwaitsStaged {
        order: Order,
        counts: Counts,
        mirrored: u64,
    },
    AwaitsLoaded(Order),
    SwitchesOver(Order),
    /// The VM is let run on.
    Aborting {
        why: SessionError,
    },
    Ended,
}

/// What goes on now, or why the session is over.
type Next = Result<State, SessionError>;

impl Machine for Primary {
    type Word = Word;
    type Effect = Effect;

    fn step(&mut self, now_us: u64, event: Event<Word>, effects: &mut Vec<Effect>) {
        let begun = effects.len();
        self.clock.looks(now_us, self.vm);
        let state = std::mem::replace(&mut self.state, State::Ended);
        self.state = self.next(state, event, effects).unwrap_or_else(|why| {
            effects.truncate(begun);
            self.abort(why, effects)
        });
        self.clock.looks(now_us, self.vm);
        for effect in &effects[begun..] {
            if !self.bugs.has(Bug::LeavesVmStanding) && !self.bugs.has(Bug::ResumesBeforeLine) {
                self.vm.check(effect);
            }
            if let Effect::Send(message) = effect {
                table::check_sent(Side::Primary, self.state.name(), message);
            }
        }
        self.until_us = until_us(now_us, self.state.listens());
        if matches!(self.state, State::AwaitsLine(_)) {
            self.until_us = self.until_us.min(self.clock.until_us());
        }
    }

    fn awaits(&self) -> Option<Awaits> {
        awaits(self.state.listens(), self.until_us)
    }

    fn state(&self) -> &'static str {
        self.state.name()
    }
}

impl State {
    fn name(&self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Greeting(_) => "greeting",
            Self::CopyingDisks(_) => "copying-disks",
            Self::Clearing(_) => "clearing",
            Self::Mapping(_) => "mapping",
            Self::ComparingHeld(_) => "comparing-held",
            Self::Copying(_) => "copying",
            Self::Idle => "idle",
            Self::PreCopyScans { .. } => "precopy-scans",
            Self::PreCopyAsks { .. } => "precopy-asks",
            Self::PreCopyAwaitsHashes(_) => "precopy-awaits-hashes",
            Self::PreCopyHashes(_) => "precopy-hashes",
            Self::PreCopyDescends(..) => "precopy-descends",
            Self::PreCopySends(_) => "precopy-sends",
            Self::BackupStops { .. } => "backup-stops",
            Self::Capturing { .. } => "capturing",
            Self::AwaitsLine(_) => "awaits-line",
            Self::Resuming(_) => "resuming",
            Self::Hashing(_) => "hashing",
            Self::AwaitsHashes(_) => "awaits-hashes",
            Self::Descending(..) => "descending",
            Self::Sending(_) => "sending",
            Self::SendingDevices(..) => "sending-state",
            Self::AwaitsStaged { .. } => "awaits-staged",
            Self::AwaitsLoaded(_) => "awaits-loaded",
            Self::SwitchesOver(_) => "switches-over",
            Self::Aborting { .. } => "aborting",
            Self::Ended => "ended",
        }
    }

    /// Whom it listens to, and for how long.
    fn listens(&self) -> Option<(Source, Option<Wait>)> {
        let waits = |order: &Order, wait| if order.switchover { Wait::Switchover } else { wait };
        let (from, wait) = match self {
            Self::Greeting(_) => (Source::Messages, Wait::BackupStarts),
            Self::Idle => return Some((Source::Words, None)),
            Self::PreCopyAsks { .. } => (Source::Messages, Wait::BackupScans),
            Self::PreCopyAwaitsHashes(_)
            | Self::PreCopyDescends(..)
            | Self::AwaitsHashes(_)
            | Self::Descending(..) => (Source::Messages, Wait::BackupHashes),
            Self::BackupStops { .. } => (Source::Messages, Wait::BackupStands),
            Self::AwaitsLine(_) => (Source::Words, Wait::LineDrawn),
            Self::AwaitsStaged { order, .. } => (Source::Messages, waits(order, Wait::BackupHolds)),
            Self::AwaitsLoaded(order) => (Source::Messages, waits(order, Wait::BackupLoads)),
            Self::SwitchesOver(_) => (Source::Words, Wait::HandedOver),
            _ => return None,
        };
        Some((from, Some(wait)))
    }
}

impl Primary {
    /// Before the first message.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        Self {
            setup,
            state: State::New,
            until_us: u64::MAX,
            active: setup.active,
            joining: true,
            vm: Vm::default(),
            clock: Clock::new(setup.audit),
            rounds: Rounds::default(),
            bugs: Bugs::default(),
        }
    }

    /// With faults put back on purpose.
    #[cfg(feature = "bugs")]
    #[must_use]
    pub fn with_bugs(mut self, bugs: Bugs) -> Self {
        self.bugs = bugs;
        self
    }

    fn next(&mut self, state: State, event: Event<Word>, effects: &mut Vec<Effect>) -> Next {
        match event {
            Event::Begins => Ok(self.greet(effects)),
            Event::Word(word) => self.word(state, word, effects),
            Event::Message(message) => self.message(state, message, effects),
            Event::Answer(answer) => self.answer(state, answer, effects),
            Event::TimedOut { mirrored } => self.timed_out(state, mirrored),
            Event::Failed { why } => match state {
                State::Aborting { why: first } => {
                    effects.push(Effect::Report(Report::VmStands { why }));
                    effects.push(Effect::End {
                        why: first,
                        broken: true,
                    });
                    Ok(State::Ended)
                }
                _ => Err(SessionError::Failed(why)),
            },
            Event::StreamEnded { why } => Err(SessionError::StreamEnded(why)),
            Event::LoopEnded => match state {
                State::Idle => {
                    effects.push(Effect::End {
                        why: SessionError::EndedHere,
                        broken: false,
                    });
                    Ok(State::Ended)
                }
                _ => Err(SessionError::LoopGone),
            },
        }
    }

    /// The session is over: the VM runs on (invariant 4).
    fn abort(&mut self, why: SessionError, effects: &mut Vec<Effect>) -> State {
        let stands = self.vm.stands() && !self.bugs.has(Bug::LeavesVmStanding);
        if stands {
            self.vm.run_on();
            effects.push(Effect::RunOn);
        }
        effects.push(Effect::End {
            why: why.clone(),
            broken: true,
        });
        if stands {
            State::Aborting { why }
        } else {
            State::Ended
        }
    }

    fn timed_out(&self, state: State, mirrored: u64) -> Next {
        let wait = state.listens().and_then(|(_, wait)| wait);
        match state {
            // The backup waits for this epoch's disk writes, which may be many and its disk slow.
            State::AwaitsStaged {
                order,
                counts,
                mirrored: before,
            } if !order.switchover && mirrored > before => Ok(State::AwaitsStaged {
                order,
                counts,
                mirrored,
            }),
            State::AwaitsLine(_) if self.clock.is_late() => Err(SessionError::InVain(Wait::VmStands)),
            state => {
                let wait = wait.unwrap_or_else(|| panic!("nothing is awaited in '{}'", state.name()));
                Err(SessionError::InVain(wait))
            }
        }
    }

    fn word(&mut self, state: State, word: Word, effects: &mut Vec<Effect>) -> Next {
        match (state, word) {
            (State::Idle, Word::PreCopy { epoch }) => {
                effects.push(Effect::Scan);
                Ok(State::PreCopyScans { epoch })
            }
            (State::Idle, Word::ConnectionsAhead { epoch, part }) if !self.active => {
                effects.push(Effect::Send(SyncMessage::ConnectionsAhead { epoch, part }));
                Ok(State::Idle)
            }
            (State::Idle, Word::Sync(order)) => Ok(self.begin_sync(order, effects)),
            (State::AwaitsLine(capture), Word::LineDrawn { connections }) => {
                Ok(self.line_drawn(capture, connections, effects))
            }
            (State::SwitchesOver(order), Word::HandedOver) => {
                self.vm.handed_over();
                Ok(self.synced(&order))
            }
            (State::Idle, _) => Err(SessionError::NoSync),
            (State::SwitchesOver(_), _) => Err(SessionError::SyncInSwitchover),
            _ => Err(SessionError::TwoSyncs),
        }
    }

    fn message(&mut self, state: State, message: SyncMessage, effects: &mut Vec<Effect>) -> Next {
        if let SyncMessage::Refused { why } = message {
            return Err(SessionError::Refused(why));
        }
        let violation = Violation {
            side: Side::Primary,
            state: state.name(),
            message: message.name(),
        };
        if !table::is_due(Side::Primary, state.name(), &message) {
            return Err(violation.into());
        }
        match (state, message) {
            (State::Greeting(mut held), SyncMessage::Holds { pages, hashes }) => {
                held.add(pages, hashes, &self.setup)?;
                Ok(State::Greeting(held))
            }
            (State::Greeting(held), SyncMessage::JoinReady) => {
                effects.push(Effect::CopyDisks);
                Ok(State::CopyingDisks(held))
            }
            (
                State::PreCopyAsks {
                    epoch,
                    ours,
                    mut gathering,
                },
                SyncMessage::Dirty {
                    epoch: got,
                    pages,
                    more,
                },
            ) if got == epoch => match gathering.add(pages, more)? {
                Some(theirs) => self.precopy_united(epoch, ours, theirs, effects),
                None => Ok(State::PreCopyAsks {
                    epoch,
                    ours,
                    gathering,
                }),
            },
            (State::PreCopyAwaitsHashes(mut round), SyncMessage::Hashes { epoch, hashes })
                if epoch == round.epoch && round.takes(&hashes) =>
            {
                round.their_hashes.extend(hashes);
                Ok(self.precopy_hashes(round, effects))
            }
            (State::BackupStops { order, mut gathering }, SyncMessage::Dirty { epoch, pages, more })
                if epoch == order.epoch =>
            {
                match gathering.add(pages, more)? {
                    Some(theirs) => Ok(self.stop(order, Some(theirs), effects)),
                    None => Ok(State::BackupStops { order, gathering }),
                }
            }
            (State::AwaitsHashes(mut capture), SyncMessage::Hashes { epoch, hashes })
                if epoch == capture.order.epoch && capture.takes(&hashes) =>
            {
                capture.their_hashes.extend(hashes);
                self.compare_capture(capture, effects)
            }
            (State::PreCopyDescends(round, mut descent), SyncMessage::Differ { epoch, part })
                if epoch == round.epoch && descent.takes(&part) =>
            {
                Ok(match descent.answered(&part) {
                    true => Self::precopy_descend(round, descent, effects),
                    false => State::PreCopyDescends(round, descent),
                })
            }
            (State::Descending(capture, mut descent), SyncMessage::Differ { epoch, part })
                if epoch == capture.order.epoch && descent.takes(&part) =>
            {
                Ok(match descent.answered(&part) {
                    true => Self::descend(capture, descent, effects),
                    false => State::Descending(capture, descent),
                })
            }
            (State::AwaitsStaged { order, counts, .. }, SyncMessage::Staged { epoch })
                if epoch == order.epoch =>
            {
                Ok(self.staged(order, counts, effects))
            }
            (State::AwaitsLoaded(order), SyncMessage::Loaded { epoch, took_us }) if epoch == order.epoch => {
                Ok(self.loaded(order, took_us, effects))
            }
            _ => Err(violation.into()),
        }
    }

    fn answer(&mut self, state: State, answer: Answer, effects: &mut Vec<Effect>) -> Next {
        match (state, answer) {
            (State::CopyingDisks(held), Answer::DisksCopied) => {
                effects.push(Effect::Scan);
                Ok(State::Clearing(held))
            }
            (State::Clearing(held), Answer::Scanned(_)) => {
                effects.push(Effect::MapMemory);
                Ok(State::Mapping(held))
            }
            (State::Mapping(held), Answer::Mapped(pages)) => {
                Ok(Self::compare_held(Likening::new(held, pages), effects))
            }
            (State::ComparingHeld(likening), Answer::PagesHashed(ours)) => {
                self.held_hashed(likening, &ours, effects)
            }
            (State::Copying(round), Answer::Scanned(pages)) => Ok(self.copied(round, &pages, effects)),
            (State::PreCopyScans { epoch }, Answer::Scanned(ours)) => {
                self.precopy_scanned(epoch, ours, effects)
            }
            (State::PreCopyHashes(round), Answer::Hashed(hashes)) => match self.setup.compare {
                Compare::List => self.precopy_compares(round, &hashes, effects),
                Compare::Tree => Ok(Self::precopy_descend(round, Descent::over(hashes), effects)),
            },
            (State::PreCopySends(round), Answer::DeltasSent { bytes }) => {
                Ok(self.precopy_sent(round, bytes, effects))
            }
            (State::Capturing { .. }, Answer::Scanned(_)) if self.clock.is_late() => {
                Err(SessionError::InVain(Wait::VmStands))
            }
            (State::Capturing { order, theirs }, Answer::Scanned(ours)) => {
                self.captured(order, ours, theirs, effects)
            }
            (State::Resuming(capture), Answer::Resumed) => Ok(self.resumed(capture, effects)),
            (State::Hashing(mut capture), Answer::Hashed(hashes)) => match self.setup.compare {
                Compare::List => {
                    capture.our_hashes = hashes;
                    self.compare_capture(capture, effects)
                }
                Compare::Tree => Ok(Self::descend(capture, Descent::over(hashes), effects)),
            },
            (State::Sending(capture), Answer::DeltasSent { bytes }) => {
                Ok(self.deltas_sent(capture, bytes, effects))
            }
            (State::SendingDevices(order, counts), Answer::StateSent { mirrored }) => {
                Ok(State::AwaitsStaged {
                    order,
                    counts,
                    mirrored,
                })
            }
            (state, answer) => panic!("{answer:?} answers nothing in '{}'", state.name()),
        }
    }

    /// How much a guest writes is its own choice, and this host's memory is not the guest's: the VM goes on, and what would
    /// not fit ends the session.
    fn check_memory(needed_bytes: usize, most_bytes: usize) -> Result<(), SessionError> {
        if needed_bytes <= most_bytes {
            return Ok(());
        }
        Err(SessionError::SyncTooLarge {
            needed_bytes,
            most_bytes,
        })
    }
}
