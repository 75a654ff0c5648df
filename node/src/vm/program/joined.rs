//! The host that gets a copy of a running program: the loop's side.
//!
//! * **Flow:** a stream for a join -> from here on agreed inputs are kept -> the copy is there (`carrying`) -> those behind its own last
//!   one go to it, in order, and it speaks as a backup -> the group agrees that it is complete.
//! * **Invariants:** 1. a copy that was brought here gets every input behind the last one that it has read, once; 2. (memory) what is
//!   kept for it is bounded, and beyond that there is no join; 3. a copy that the group never took in ends; 4. what was agreed before the
//!   copy was taken, and is applied here later, means the one before it: it ends nothing.
//! * **Not here:** the primary (`joining`).

use super::backlog::Input;
use super::carrying::Fetcher;
use super::joining::NOT_YET;
use super::state::{Past, ProgramLoop, Role, Running};
use crate::vm::program::error::{CarryError, FileError};
use crate::vm::program::preparing::note_that_it_ran;
use crate::vm::program::state::{Expected, Tries};
use crate::vm::program::told::Brought;
use crate::vm::session::link::refuse;
use crate::vm::session::talker::Talker;
use crossbeam_channel::bounded;
use dunlin_api::EventKind;
use dunlin_core::agreed::{AgreedTime, Frame, Life};
use dunlin_core::output::gate::Voice;
use dunlin_core::output::rewriter::TableError;
use dunlin_core::program::order::{Gate, Order};
use dunlin_core::units::{Index, ReplicaId};
use dunlin_core::wire::WireError;
use dunlin_core::wire::sync::SyncMessage;
use dunlin_fabric::link::Stream;
use std::collections::VecDeque;
use std::sync::Arc;

/// In the program's: what is carried here.
pub(super) const FOLDER: &str = "joined";

/// What may be agreed while a copy is on its way.
const KEPT_BYTES: usize = 64 << 20;
/// A copy whose primary has gone before the group took it in is kept so long: the entry that takes it in may be on its way.
const UNTAKEN_US: u64 = 3_000_000;

/// Why a copy that was brought here is of no use.
#[derive(Debug, thiserror::Error)]
enum AdoptError {
    /// Where its inputs stand.
    #[error(transparent)]
    Order(#[from] WireError),
    /// Its connections that do not speak its own numbers.
    #[error(transparent)]
    Connections(#[from] TableError),
    /// Nothing could be noted of it.
    #[error(transparent)]
    Noted(#[from] FileError),
}

impl ProgramLoop {
    /// The primary wants to bring a copy of the running program here.
    pub(super) fn accept_join(&mut self, primary: ReplicaId, stream: Stream) {
        let is_complete = self.agreement.leadership.appended_complete().contains(self.me);
        let why = if self.is_witness() || Some(primary) != self.other() || self.role == Role::Primary {
            Some("it is no backup for that host")
        } else if is_complete && self.role != Role::None {
            Some("its copy still counts")
        } else if self.own.starting.is_some() || self.is_carrying() {
            Some("it is busy with an earlier copy")
        } else if self.agreement.state().life != Life::Running || self.ending.ended.is_some() {
            Some(NOT_YET)
        } else {
            None
        };
        if let Some(why) = why {
            return refuse(stream, why);
        }
        if self.role != Role::None {
            self.end_here("a new copy of the program comes to this host; the one here is ended");
        }
        self.inbox.next_session += 1;
        let session = self.inbox.next_session;
        let begun = self.opened(session, stream, false).and_then(|(link, closer)| {
            let talker = Talker::start(link.writer.clone())?;
            let (keeper, kept) = bounded::<()>(0);
            let marks = self.marks();
            if let Some(marks) = &marks {
                marks.another_image();
            }
            let fetcher = Fetcher {
                session,
                link: link.ends(),
                to_loop: self.inbox.to_loop.clone(),
                folder: self.folder().join(FOLDER),
                program: self.program.clone(),
                printed: self.folder().join(super::PRINTED),
                marks,
                kept,
                busy: Arc::clone(&self.backup.busy),
            };
            std::thread::Builder::new()
                .name("program-joined".into())
                .spawn(move || fetcher.run())?;
            let session = super::state::Session {
                id: session,
                link,
                closer,
                talker: Some(talker),
                lent: None,
            };
            Ok((session, keeper))
        });
        match begun {
            Ok((session, keeper)) => {
                self.backup.expected = Some(Expected {
                    session: session.id,
                    from: self.agreement.applied,
                    inputs: VecDeque::new(),
                    bytes: 0,
                    keeper,
                });
                self.backup.session = Some(session);
            }
            Err(why) => tracing::warn!(program = self.config.name, "a join: {why}"),
        }
    }

    /// Agreed inputs: for the copy that runs here, or for one that is on its way.
    pub(super) fn inputs(&mut self, index: Index, time: Option<AgreedTime>, frames: Vec<Frame>) {
        let frames = frames.into_iter().map(Input::Frame);
        let inputs = time.map(Input::Time).into_iter().chain(frames);
        let Some(expected) = &mut self.backup.expected else {
            // Invariant 1.
            if !self.is_in_copy(index) {
                inputs.for_each(|input| self.input(input));
            }
            return;
        };
        let inputs: Vec<Input> = inputs.collect();
        expected.bytes += inputs.iter().map(Input::weight).sum::<usize>();
        expected.inputs.push_back((index, inputs));
        if expected.bytes > KEPT_BYTES {
            self.expects_no_more("more was agreed meanwhile than is kept here (64 MiB)");
        }
    }

    /// Whether the copy that runs here was taken behind this entry, on a host that had applied it.
    pub(super) fn is_in_copy(&self, index: Index) -> bool {
        self.own
            .running
            .as_ref()
            .is_some_and(|running| index <= running.brought_at)
    }

    /// It will not come, or cannot be used.
    pub(super) fn expects_no_more(&mut self, why: &str) {
        if self.backup.expected.take().is_none() {
            return;
        }
        // Once for each reason: the primary tries again and again.
        if self.backup.tries.is_news(why) {
            self.event(
                EventKind::JoinFailed,
                format!("no copy of the running program is on this host: {why}"),
            );
        }
        let talker = self
            .backup
            .session
            .as_ref()
            .and_then(|session| session.talker.as_ref());
        if let Some(talker) = talker {
            talker.say(SyncMessage::Refused { why: why.to_owned() });
        }
        self.backup.session = None;
    }

    /// The copy is here and runs, or will not come.
    pub(super) fn brought(&mut self, session: u64, result: Result<Box<Brought>, CarryError>) {
        // Dropped otherwise, and with that ended.
        let Some(expected) = self
            .backup
            .expected
            .take_if(|expected| expected.session == session)
        else {
            return;
        };
        let brought = match result {
            Ok(brought) if brought.applied >= expected.from => *brought,
            Ok(_) => {
                self.backup.expected = Some(expected);
                return self.expects_no_more("it is older than the inputs that this host has kept");
            }
            Err(why) => {
                self.backup.expected = Some(expected);
                return self.expects_no_more(&why.to_string());
            }
        };
        if brought.one_at_a_time && self.program.reading.adapts {
            self.own.order = Order::Read;
        }
        let mut gate = Gate::new(
            self.own.order,
            1,
            self.program.reading.patience.as_micros() as u64,
        );
        let mut output = self.new_output(Voice::Backup, brought.epoch);
        let adopt = || -> Result<(), AdoptError> {
            gate.load(brought.order)?;
            output.applied(brought.epoch, &brought.connections)?;
            Ok(note_that_it_ran(&self.folder())?)
        };
        if let Err(why) = adopt() {
            self.backup.expected = Some(expected);
            return self.expects_no_more(&why.to_string());
        }
        let (answers, source) = brought.answers.unzip();
        self.shown.failure = None;
        let now_us = self.now_us();
        self.own.restart.begins(now_us);
        self.backup.tries = Tries::default();
        self.own.past = Past::RanHere;
        self.role = Role::Backup;
        self.net.output = output;
        self.own.running = Some(Running {
            copy: brought.copy,
            _keeper: expected.keeper,
            gate,
            time: brought.time,
            answers,
            source,
            brought_at: brought.applied,
            look_again_us: 0,
            look_at_us: u64::MAX,
            card_at_us: 0,
            told_unbatched: false,
            told_unseen: false,
            ready: true,
            until_us: self.inbox.born.now_us(),
        });
        // Invariant 1.
        let inputs = expected.inputs.into_iter();
        self.own.backlog = inputs
            .filter(|(index, _)| *index > brought.applied)
            .flat_map(|(_, inputs)| inputs)
            .collect();
        let took_us = brought.took.as_micros() as u64;
        let text = format!(
            "a copy of the running program was brought here, and was restored in {:.0} ms; {} inputs behind it",
            took_us as f64 / 1e3,
            self.own.backlog.len()
        );
        self.event(EventKind::Joined, text);
        let talker = self
            .backup
            .session
            .as_ref()
            .and_then(|session| session.talker.as_ref());
        if let Some(talker) = talker {
            talker.say(SyncMessage::Loaded {
                epoch: brought.epoch,
                took_us,
            });
        }
    }

    /// Invariant 3.
    pub(super) fn end_untaken_copy(&mut self) {
        let now_us = self.now_us();
        let is_taken = self.agreement.state().complete.contains(self.me)
            || self.agreement.leadership.appended_complete().contains(self.me);
        if self.role != Role::Backup || self.backup.session.is_some() || is_taken {
            self.own.untaken_at_us = None;
            return;
        }
        let at_us = *self.own.untaken_at_us.get_or_insert(now_us + UNTAKEN_US);
        if now_us > at_us {
            self.end_here("the group did not take in the copy here; it is ended");
        }
    }
}
