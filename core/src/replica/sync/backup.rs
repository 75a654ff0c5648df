//! The backup's side: receives the join, then stages and applies one sync after the other.
//!
//! Invariants, asserted in release builds where they are not by construction:
//! 1. The VM is untouched until a sync is staged whole; a sync that breaks before that is dropped whole.
//! 2. A sync that was acknowledged is applied, whatever happens to the primary afterwards.
//! 3. The dirty marks are cleared before the VM runs on: what it writes from then on is the next sync's (the driver, in `Apply`).
//! 4. What was staged ahead of a page counts only if no later round looks at the page.
//! 5. From the first byte that an acknowledged sync changes until the VM's state is loaded whole the copy is *torn*: if that
//!    fails, it is nobody's VM any more.
//! 6. Epochs ascend: no sync is acknowledged twice.
//!
//! Files: `descent` (a comparison by hash trees), with its `trees`; `staged` (from the union to the sync that is applied), with what is
//! `gathered`; `takeover`. Not here: elections, frames, who may acknowledge (the VM loop).

mod descent;
mod gathered;
mod staged;
mod takeover;
mod trees;
mod types;

use super::bugs::{Bug, Bugs};
use super::machine::{awaits, until_us};
use super::table::{self, Side};
use super::{Answer, Awaits, Event, Machine, Point, SessionError, Source, Violation};
use crate::policy::Mode;
use crate::sync::compare::Compare;
use crate::sync::dirty::PageSet;
use crate::sync::staging::{PageDelta, Staged, Staging};
use crate::units::{Epoch, Term};
use crate::waits::Wait;
use crate::wire::sync::SyncMessage;
use crate::wire::sync::parts::{self, Gathering};
use bytes::Bytes;
use gathered::{Whole, staging_of};
use trees::Trees;
pub use types::{Effect, Report, Setup, Word};

/// The backup's side of a session.
#[derive(Debug)]
pub struct Backup {
    setup: Setup,
    state: State,
    until_us: u64,
    /// Whether the VM runs, in this epoch.
    active: bool,
    /// How the primary wants to compare.
    compare: Compare,
    /// The last epoch that ended with a sync that was applied here; none in a join: the copy is not whole.
    applied: Option<Epoch>,
    /// What the rounds of the sync under way have sent so far.
    staging: Option<Staging>,
    /// For a backup that does not run: the newest state, not loaded yet.
    kept: Option<Bytes>,
    bugs: Bugs,
}

#[derive(Debug)]
enum State {
    AwaitsJoin,
    /// Memory arrives.
    Joining,
    /// Between two syncs.
    Idle,
    PreCopyGathers {
        epoch: Epoch,
        gathering: Gathering,
    },
    PreCopyScans {
        epoch: Epoch,
        theirs: PageSet,
    },
    PreCopyHashes {
        epoch: Epoch,
        pages: PageSet,
    },
    PreCopyDescends(Trees),
    Stopping {
        epoch: Epoch,
    },
    AwaitsUnion {
        epoch: Epoch,
        gathering: Gathering,
    },
    Hashing {
        epoch: Epoch,
        pages: PageSet,
    },
    Descending(Trees),
    /// A VM that does not run: the log has said that the epoch is over, the primary has not.
    AwaitsEnds {
        epoch: Epoch,
    },
    /// The primary has said it, the log has not.
    AwaitsLog {
        epoch: Epoch,
    },
    AwaitsDevices {
        epoch: Epoch,
    },
    AwaitsAudit(Whole),
    Checking(Whole),
    AwaitsLeave(Whole),
    Applying {
        epoch: Epoch,
        next: Mode,
        state: Bytes,
        joining: bool,
    },
    TakingOver,
    /// The session is over, the copy is whole: it may be taken over.
    Orphaned,
    Ended,
}

/// What goes on now, or why the session is over.
type Next = Result<State, SessionError>;

impl Machine for Backup {
    type Word = Word;
    type Effect = Effect;

    fn step(&mut self, now_us: u64, event: Event<Word>, effects: &mut Vec<Effect>) {
        let begun = effects.len();
        let state = std::mem::replace(&mut self.state, State::Ended);
        let torn = matches!(state, State::Applying { .. });
        self.state = self.next(state, event, effects).unwrap_or_else(|why| {
            let told = effects.drain(begun..).find(is_refusal);
            effects.extend(told);
            self.end(why, torn, effects)
        });
        for effect in &effects[begun..] {
            if let Effect::Send(message) | Effect::Tell(message) = effect
                && !self.bugs.has(Bug::AcknowledgesUnasked)
            {
                table::check_sent(Side::Backup, self.state.name(), message);
            }
        }
        self.until_us = until_us(now_us, self.state.listens());
    }

    fn awaits(&self) -> Option<Awaits> {
        awaits(self.state.listens(), self.until_us)
    }

    fn state(&self) -> &'static str {
        self.state.name()
    }
}

fn is_refusal(effect: &Effect) -> bool {
    matches!(effect, Effect::Tell(SyncMessage::Refused { .. }))
}

impl State {
    fn name(&self) -> &'static str {
        match self {
            Self::AwaitsJoin => "awaits-join",
            Self::Joining => "joining",
            Self::Idle => "idle",
            Self::PreCopyGathers { .. } => "precopy-gathers",
            Self::PreCopyScans { .. } => "precopy-scans",
            Self::PreCopyHashes { .. } => "precopy-hashes",
            Self::PreCopyDescends(_) => "precopy-descends",
            Self::Stopping { .. } => "stopping",
            Self::AwaitsUnion { .. } => "awaits-union",
            Self::Hashing { .. } => "hashing",
            Self::Descending(_) => "descending",
            Self::AwaitsEnds { .. } => "awaits-ends",
            Self::AwaitsLog { .. } => "awaits-log",
            Self::AwaitsDevices { .. } => "awaits-state",
            Self::AwaitsAudit(_) => "awaits-audit",
            Self::Checking(_) => "checking",
            Self::AwaitsLeave(_) => "awaits-leave",
            Self::Applying { .. } => "applying",
            Self::TakingOver => "taking-over",
            Self::Orphaned => "orphaned",
            Self::Ended => "ended",
        }
    }

    /// Whom it listens to, and for how long.
    fn listens(&self) -> Option<(Source, Option<Wait>)> {
        let (from, wait) = match self {
            Self::AwaitsJoin | Self::Joining => (Source::Messages, Wait::JoinArrives),
            Self::Idle => return Some((Source::Either, None)),
            Self::PreCopyGathers { .. }
            | Self::PreCopyDescends(_)
            | Self::AwaitsUnion { .. }
            | Self::Descending(_)
            | Self::AwaitsEnds { .. }
            | Self::AwaitsDevices { .. }
            | Self::AwaitsAudit(_) => (Source::Messages, Wait::SyncArrives),
            Self::AwaitsLog { .. } => (Source::Words, Wait::EndAgreed),
            Self::AwaitsLeave(_) => (Source::Words, Wait::LeaveGiven),
            Self::Orphaned => return Some((Source::Words, None)),
            _ => return None,
        };
        Some((from, Some(wait)))
    }
}

impl Backup {
    /// Before the first message.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        Self {
            setup,
            state: State::AwaitsJoin,
            until_us: u64::MAX,
            active: setup.active,
            compare: Compare::default(),
            applied: None,
            staging: None,
            kept: None,
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
            Event::Begins => Ok(state),
            Event::Word(word) => self.word(state, word, effects),
            Event::Message(message) => self.message(state, message, effects),
            Event::Answer(answer) => self.answer(state, answer, effects),
            Event::TimedOut { .. } => {
                let wait = state.listens().and_then(|(_, wait)| wait);
                let wait = wait.unwrap_or_else(|| panic!("nothing is awaited in '{}'", state.name()));
                Err(SessionError::InVain(wait))
            }
            Event::Failed { why } => match state {
                State::TakingOver => Ok(Self::took_over(Err(SessionError::Failed(why)), effects)),
                _ => Err(SessionError::Failed(why)),
            },
            Event::StreamEnded { why } => Err(SessionError::StreamEnded(why)),
            Event::LoopEnded => match state {
                State::Orphaned => Ok(State::Ended),
                _ => Err(SessionError::LoopGone),
            },
        }
    }

    /// The session is over. The VM is as of the last sync: the loop may still take it over, unless it is torn (invariant 5).
    fn end(&mut self, why: SessionError, torn: bool, effects: &mut Vec<Effect>) -> State {
        self.staging = None;
        let torn = torn && !self.bugs.has(Bug::TornIsWhole);
        effects.push(Effect::Report(Report::Ended { why, torn }));
        if torn { State::Ended } else { State::Orphaned }
    }

    fn word(&mut self, state: State, word: Word, effects: &mut Vec<Effect>) -> Next {
        match (state, word) {
            (State::Idle, Word::EpochEnds { epoch }) => {
                self.check_epoch(epoch)?;
                if !self.active {
                    return Ok(State::AwaitsEnds { epoch });
                }
                effects.extend([Effect::Pass(Point::BackupStops), Effect::Stop, Effect::Scan]);
                Ok(State::Stopping { epoch })
            }
            (State::Idle, Word::Acknowledge | Word::Drop) => Ok(State::Idle),
            // Elected before the acknowledgement left: the sync under way is dropped whole (invariant 1).
            (State::Idle | State::AwaitsLog { .. } | State::AwaitsLeave(_), Word::TakeOver(term))
            | (State::Orphaned, Word::TakeOver(term)) => Ok(self.take_over(term, effects)),
            (State::Orphaned, _) => Ok(State::Orphaned),
            (State::AwaitsLog { epoch }, Word::EpochEnds { epoch: got }) if got == epoch => {
                Ok(self.awaits_state(epoch))
            }
            (State::AwaitsLog { .. }, other) => Err(SessionError::NotAnEnd(other)),
            (State::AwaitsLeave(whole), Word::Acknowledge) => Ok(self.acknowledge(whole, effects)),
            (State::AwaitsLeave(_), Word::Drop) => Err(SessionError::TermOver),
            (State::AwaitsLeave(_), Word::EpochEnds { .. }) => Err(SessionError::TwoSyncs),
            (state, word) => panic!("{word:?} is not listened to in '{}'", state.name()),
        }
    }

    fn message(&mut self, state: State, message: SyncMessage, effects: &mut Vec<Effect>) -> Next {
        if let SyncMessage::Refused { why } = message {
            return Err(SessionError::Refused(why));
        }
        let violation = Violation {
            side: Side::Backup,
            state: state.name(),
            message: message.name(),
        };
        if !table::is_due(Side::Backup, state.name(), &message) {
            return Err(violation.into());
        }
        match (state, message) {
            (
                State::AwaitsJoin,
                SyncMessage::Join {
                    term,
                    pages,
                    active,
                    compare,
                },
            ) => {
                self.compare = compare;
                self.agree_on_join(term, pages, active, effects)
            }
            (State::Joining, SyncMessage::Pages(deltas)) => {
                self.check_pages(&deltas)?;
                effects.push(Effect::WritePages(deltas));
                Ok(State::Joining)
            }
            (State::Joining, SyncMessage::JoinLast { epoch }) => Ok(self.awaits_state(epoch)),
            (State::Idle, SyncMessage::Ends { epoch, agreed }) if !self.active => {
                self.check_epoch(epoch)?;
                match agreed {
                    // What the log says about the epoch's end may still be on its way.
                    true => Ok(State::AwaitsLog { epoch }),
                    false => Ok(self.awaits_state(epoch)),
                }
            }
            (State::Idle, SyncMessage::PreCopy { epoch, pages, more }) if self.active => {
                self.check_epoch(epoch)?;
                let gathering = Gathering::new(u64::from(self.setup.pages));
                self.precopy_gathers(epoch, gathering, pages, more, effects)
            }
            (
                State::PreCopyGathers { epoch, gathering },
                SyncMessage::PreCopy {
                    epoch: got,
                    pages,
                    more,
                },
            ) if got == epoch => self.precopy_gathers(epoch, gathering, pages, more, effects),
            (
                state @ (State::Idle
                | State::PreCopyDescends(_)
                | State::AwaitsUnion { .. }
                | State::AwaitsEnds { .. }
                | State::AwaitsDevices { .. }),
                SyncMessage::Delta { epoch, deltas },
            ) => {
                self.check_epoch(epoch)?;
                let staged = self.staging(epoch).add(epoch, deltas);
                staged.map_err(|error| refuse(error, effects))?;
                Ok(state)
            }
            (
                state @ (State::Idle | State::AwaitsEnds { .. }),
                SyncMessage::ConnectionsAhead { epoch, part },
            ) if !self.active => {
                self.check_epoch(epoch)?;
                effects.push(Effect::Report(Report::ConnectionsAhead { epoch, part }));
                Ok(state)
            }
            (
                State::AwaitsUnion { epoch, mut gathering },
                SyncMessage::Union {
                    epoch: got,
                    pages,
                    more,
                },
            ) if got == epoch => match gathering.add(pages, more)? {
                Some(union) => self.compares(epoch, union, effects),
                None => Ok(State::AwaitsUnion { epoch, gathering }),
            },
            (State::PreCopyDescends(trees), SyncMessage::Nodes { epoch, hashes })
                if epoch == trees.epoch && trees.takes(&hashes) =>
            {
                Ok(self.precopy_nodes(trees, hashes, effects))
            }
            (State::Descending(trees), SyncMessage::Nodes { epoch, hashes })
                if epoch == trees.epoch && trees.takes(&hashes) =>
            {
                Ok(self.nodes(trees, hashes, effects))
            }
            (
                State::AwaitsEnds { epoch },
                SyncMessage::Ends {
                    epoch: got,
                    agreed: true,
                },
            ) if got == epoch => Ok(self.awaits_state(epoch)),
            (State::AwaitsDevices { epoch }, SyncMessage::DeviceState { epoch: got, part }) => {
                let staged = self.staging(epoch).add_device_state(got, part);
                staged.map_err(|error| refuse(error, effects))?;
                Ok(State::AwaitsDevices { epoch })
            }
            (State::AwaitsDevices { epoch }, SyncMessage::Connections { epoch: got, part }) => {
                let staged = self.staging(epoch).add_connections(got, part);
                staged.map_err(|error| refuse(error, effects))?;
                Ok(State::AwaitsDevices { epoch })
            }
            (
                State::AwaitsDevices { epoch },
                SyncMessage::State {
                    epoch: got,
                    next,
                    connections,
                    device_state,
                },
            ) if got == epoch => self.state_arrived(epoch, next, connections, device_state, effects),
            (State::AwaitsAudit(mut whole), SyncMessage::Audit { epoch, hash })
                if epoch == whole.staged.epoch =>
            {
                whole.audit = Some(hash);
                Ok(Self::check_state(whole, effects))
            }
            _ => Err(violation.into()),
        }
    }

    fn answer(&mut self, state: State, answer: Answer, effects: &mut Vec<Effect>) -> Next {
        match (state, answer) {
            (State::PreCopyScans { epoch, theirs }, Answer::Scanned(ours)) => {
                Self::send_dirty(epoch, &ours, effects);
                self.precopy_compares(epoch, theirs.union(&ours), effects)
            }
            (State::PreCopyHashes { epoch, pages }, Answer::Hashed(hashes)) => {
                Ok(Self::precopy_hashed(epoch, &pages, hashes))
            }
            (State::Hashing { epoch, pages }, Answer::Hashed(hashes)) => {
                Ok(self.hashed(epoch, &pages, hashes))
            }
            (State::Stopping { epoch }, Answer::Scanned(ours)) => {
                Self::send_dirty(epoch, &ours, effects);
                let gathering = Gathering::new(u64::from(self.setup.pages));
                Ok(State::AwaitsUnion { epoch, gathering })
            }
            (State::Checking(whole), Answer::StateChecked(fits)) => {
                fits.map_err(|why| refuse(why, effects))?;
                Ok(self.may_it_be_acknowledged(whole, effects))
            }
            (
                State::Applying {
                    epoch,
                    next,
                    state,
                    joining,
                },
                Answer::Applied { took_us },
            ) => Ok(self.sync_applied(epoch, next, state, joining, took_us, effects)),
            (State::TakingOver, Answer::TookOver) => Ok(Self::took_over(Ok(()), effects)),
            (state, answer) => panic!("{answer:?} answers nothing in '{}'", state.name()),
        }
    }

    /// Both sides have to speak of the same VM in the same term.
    fn agree_on_join(&self, term: Term, pages: u32, active: bool, effects: &mut Vec<Effect>) -> Next {
        let ours = &self.setup;
        if term != ours.term || pages != ours.pages || active != ours.active {
            let why = SessionError::Disagree {
                pages,
                active,
                our_pages: ours.pages,
                our_active: ours.active,
            };
            return Err(refuse(why, effects));
        }
        if ours.says_held {
            let most_pages = ours.staging_bytes / size_of::<u128>();
            effects.push(Effect::SendHeld { most_pages });
        }
        effects.push(Effect::Send(SyncMessage::JoinReady));
        Ok(State::Joining)
    }

    fn check_pages(&self, deltas: &[PageDelta]) -> Result<(), SessionError> {
        match deltas.iter().any(|delta| delta.at.page >= self.setup.pages) {
            true => Err(SessionError::PageOutside),
            false => Ok(()),
        }
    }

    /// Invariant 6.
    fn check_epoch(&self, epoch: Epoch) -> Result<(), SessionError> {
        match self.applied {
            Some(applied) if epoch <= applied => Err(SessionError::EpochIsOver {
                begins: epoch,
                ended: applied,
            }),
            _ => Ok(()),
        }
    }

    /// A round while both VMs run: what is written after the scan is in the next one.
    fn precopy_gathers(
        &mut self,
        epoch: Epoch,
        mut gathering: Gathering,
        pages: PageSet,
        more: bool,
        effects: &mut Vec<Effect>,
    ) -> Next {
        match gathering.add(pages, more)? {
            Some(theirs) => {
                effects.push(Effect::Scan);
                Ok(State::PreCopyScans { epoch, theirs })
            }
            None => Ok(State::PreCopyGathers { epoch, gathering }),
        }
    }

    fn send_dirty(epoch: Epoch, pages: &PageSet, effects: &mut Vec<Effect>) {
        let says = |(pages, more)| Effect::Send(SyncMessage::Dirty { epoch, pages, more });
        effects.extend(parts::pages(pages).map(says));
    }

    fn staging(&mut self, epoch: Epoch) -> &mut Staging {
        staging_of(&mut self.staging, &self.setup, epoch)
    }
}

/// Best effort: the primary hears why, or sees the stream end.
fn refuse(why: impl Into<SessionError>, effects: &mut Vec<Effect>) -> SessionError {
    let why = why.into();
    effects.push(Effect::Tell(SyncMessage::Refused { why: why.to_string() }));
    why
}
