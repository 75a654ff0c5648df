//! The copy of a program on this host: how it begins and how it ends.
//!
//! Invariants: 1. the thread that makes a copy outlives it: the copy's processes die with that thread; 2. a copy that has ended is not
//! begun again by this host alone.
//!
//! Not here: its namespaces (`dunlin_program::inside`), what follows from its end for the service (`serving`).

use super::backlog::Backlog;
use super::data;
use super::restart::End;
use super::state::{ProgramLoop, Role, Running};
use super::{PRINTED, poison};
use crate::vm::event::LoopEvent;
use crate::vm::program::error::{PrepareError, VisitError};
use crate::vm::program::preparing::{is_root, note_that_it_ran, prepare, printed, walls};
use crate::vm::program::state::Tries;
use crate::vm::program::told::Visited;
use crossbeam_channel::bounded;
use dunlin_api::EventKind;
use dunlin_core::output::Output;
use dunlin_core::output::gate::Voice;
use dunlin_core::program::order::Gate;
use dunlin_core::units::{Epoch, Index};
use dunlin_core::wire::sync::SyncMessage;
use dunlin_program::answers::Answers;
use dunlin_program::copy::Copy;
use dunlin_program::message::Heard;
use dunlin_program::sockets;
use dunlin_program::visit::{Order, Rooms};
use std::sync::Arc;

/// What both copies are when they begin: nothing.
const BEFORE: Epoch = Epoch(1);
/// The epoch of all that a program says.
const ONLY_EPOCH: Epoch = Epoch(BEFORE.0 + 1);

impl ProgramLoop {
    /// The group has agreed that both copies begin.
    pub(super) fn start_copy(&mut self) {
        let is_backed = self.agreement.state().complete.len() > 1;
        self.role = if self.agreement.leads() {
            Role::Primary
        } else {
            Role::Backup
        };
        self.net.output = match (self.role, is_backed) {
            (Role::Primary, true) => compared(self.new_output(Voice::Protected, BEFORE)),
            (Role::Primary, false) => self.new_output(Voice::Alone, ONLY_EPOCH),
            _ => self.new_output(Voice::Backup, ONLY_EPOCH),
        };
        let folder = self.folder();
        if let Err(why) = note_that_it_ran(&folder) {
            return self.fails(&why.to_string());
        }
        self.shown.failure = None;
        self.own.last_inputs = poison::LastInputs::default();
        let now_us = self.now_us();
        self.own.restart.begins(now_us);
        let again = self.own.restart.again;
        self.draw_seed_alone();
        // What everybody knows is no chance.
        let Some(seed) = self.first_seed() else {
            return self.fails("nobody has said what it draws its chance from");
        };
        let (keeper, kept) = bounded::<()>(0);
        let (program, to_loop, marks) = (self.program.clone(), self.inbox.to_loop.clone(), self.marks());
        let work = move || {
            let image = marks
                .map(|marks| data::open(&program, &marks, !again))
                .transpose();
            let result = image
                .map_err(PrepareError::from)
                .and_then(|image| prepare(&program, seed, printed(&folder.join(PRINTED), again), image));
            to_loop.send(LoopEvent::ProgramPrepared(result.map(Box::new)));
            // Invariant 1: until the loop lets go of its end.
            kept.iter().for_each(drop);
        };
        let name = format!("program-{}", self.config.name);
        match std::thread::Builder::new().name(name).spawn(work) {
            Ok(_) => self.own.starting = Some(keeper),
            Err(error) => return self.fails(&format!("a thread for the program: {error}")),
        }
        if self.role == Role::Primary && is_backed {
            self.backup.followed_us = self.now_us();
            self.connect_session(&[]);
        }
    }

    /// Its namespaces are there, or not.
    pub(super) fn prepared(&mut self, result: Result<Box<Copy>, PrepareError>) {
        // Its end may have been agreed meanwhile.
        let (Some(keeper), true) = (self.own.starting.take(), self.role != Role::None) else {
            return;
        };
        let mut copy = match result {
            Ok(copy) => *copy,
            Err(why) => return self.fails(&why.to_string()),
        };
        let time = self.agreement.state().time;
        let timed = copy.clock().map_or(Ok(()), |page| page.set(time));
        if let Err(error) = timed {
            return self.fails(&format!("the program's clock: {error}"));
        }
        if let Err(error) = copy.go() {
            return self.fails(&error.to_string());
        }
        let now_us = self.now_us();
        let source = self.draw(&mut copy);
        self.own.running = Some(Running {
            copy,
            _keeper: keeper,
            gate: Gate::new(
                self.own.order,
                1,
                self.program.reading.patience.as_micros() as u64,
            ),
            time,
            answers: None,
            source,
            brought_at: Index(0),
            look_again_us: 0,
            look_at_us: u64::MAX,
            card_at_us: 0,
            told_unbatched: false,
            told_unseen: false,
            ready: false,
            until_us: now_us + self.program.start_within.as_micros() as u64,
        });
    }

    /// What its keeper has to say.
    pub(super) fn hear_copy(&mut self) {
        // One that has ended is not watched any more, and may have left processes that end later.
        let has_ended = |running: &Running| running.copy.ended().is_some();
        if !self.inbox.ready.keeper && !self.own.running.as_ref().is_some_and(has_ended) {
            return;
        }
        loop {
            let Some(running) = &mut self.own.running else {
                return;
            };
            let heard = match running.copy.heard() {
                Ok(Some((Heard::Listener, listeners))) => match &running.source {
                    Some(source) => {
                        match Answers::of_a_service(listeners, Arc::clone(source)) {
                            Ok(answers) => running.answers = Some(answers),
                            Err(error) => return self.fails(&format!("a thread for its chance: {error}")),
                        }
                        continue;
                    }
                    None => continue,
                },
                Ok(Some((heard, _))) => heard,
                Ok(None) => return,
                Err(error) => return self.fails(&error.to_string()),
            };
            let Some(how) = heard.end() else { continue };
            let words = running.copy.last_words(1).pop();
            let words = words.map_or_else(String::new, |words| format!("; its last words: {words}"));
            let hint = match (&heard, self.program.limits.memory_mib) {
                (Heard::Ended { others: true, .. }, _) => {
                    " (a program has to stay in the foreground)".to_owned()
                }
                (_, Some(mib)) if running.copy.met_its_memory() => {
                    format!(" (it had taken all of its memory: memory_mib = {mib} in its file)")
                }
                _ => String::new(),
            };
            let end = match &heard {
                Heard::Ended { code: Some(0), .. } => End::Well,
                Heard::Ended { .. } => End::Badly,
                _ => End::OfDunlin,
            };
            return self.fails_by(end, &format!("the program {how}{hint}{words}"));
        }
    }

    /// Where a person's command is to run, and how.
    pub(super) fn visited(&self, command: Vec<String>) -> Result<Visited, VisitError> {
        let name = &self.config.name;
        let running = self
            .own
            .running
            .as_ref()
            .filter(|running| running.copy.ended().is_none());
        let (Some(running), true) = (running, self.role != Role::None) else {
            let others = self.config.group.iter().map(|host| &host.member.id);
            let elsewhere = self
                .group
                .leader()
                .filter(|leader| *leader != self.me && others.clone().any(|id| id == leader));
            let hint = elsewhere.map_or_else(String::new, |leader| {
                format!(
                    "; host '{}' serves it: say it there",
                    self.config.host_name(leader)
                )
            });
            return Err(VisitError::NoCopy {
                name: name.clone(),
                host: self.host.name.clone(),
                hint,
            });
        };
        let rooms = Rooms::of(&running.copy).map_err(|error| VisitError::Rooms {
            name: name.clone(),
            error,
        })?;
        let role = match self.role {
            Role::Primary => "primary",
            _ => "backup",
        };
        let order = Order {
            command,
            directory: self.program.directory.clone(),
            environment: self.program.environment.clone(),
            walls: walls(&self.program)?,
        };
        Ok(Visited {
            rooms,
            role,
            is_root: is_root(&order.walls),
            order,
        })
    }

    /// It may take inputs as soon as it listens.
    pub(super) fn look_whether_it_listens(&mut self) {
        let now_us = self.now_us();
        let port = self.program.port;
        let Some(running) = self.own.running.as_mut().filter(|running| !running.ready) else {
            return;
        };
        let ports = match sockets::listeners(running.copy.queues()) {
            Ok(ports) => ports,
            Err(error) => return self.fails(&format!("sock_diag: {error}")),
        };
        running.ready = port.map_or(!ports.is_empty(), |port| ports.contains(&port));
        if running.ready {
            self.event(EventKind::Listens, "the program's copy on this host listens");
            self.tell_listening();
        } else if now_us > running.until_us {
            let where_at = port.map_or("any TCP port".to_owned(), |port| format!("TCP port {port}"));
            self.fails(&format!(
                "the program does not listen at {where_at} (beyond loopback) after {} s ('port', 'start_within_s' in its file)",
                self.program.start_within.as_secs()
            ));
        }
    }

    /// A backup tells its primary.
    pub(super) fn tell_listening(&self) {
        let ready = self.own.running.as_ref().is_some_and(|running| running.ready);
        let talker = self
            .backup
            .session
            .as_ref()
            .and_then(|session| session.talker.as_ref());
        if let (Some(talker), true) = (talker, ready && self.role == Role::Backup) {
            talker.say(SyncMessage::Idle {
                applied: self.agreement.applied,
            });
        }
    }

    /// The copy here cannot go on. Another host's may.
    pub(super) fn fails(&mut self, why: &str) {
        self.fails_by(End::OfDunlin, why);
    }

    fn fails_by(&mut self, end: End, why: &str) {
        let plan = self.plan_restart(end);
        self.event(EventKind::ProgramEnded, format!("{why}{plan}"));
        let now_us = self.now_us();
        self.own.last_inputs.ended(now_us);
        self.shown.failure = Some(why.to_owned());
        let talker = self
            .backup
            .session
            .as_ref()
            .and_then(|session| session.talker.as_ref());
        if let Some(talker) = talker {
            talker.say(SyncMessage::Refused { why: why.to_owned() });
        }
        self.ask_whether_both_ended();
        self.drop_copy();
        // Before it may lead no more, which ends the office at once: then there is none to hand over.
        if self.group.is_leader() {
            self.group.step_down();
        }
        self.group.may_lead(false);
    }

    /// Another host's copy is the program now.
    pub(super) fn end_here(&mut self, why: &str) {
        self.answer_switchover(&dunlin_api::Answer::done("another host serves the program now"));
        self.event(EventKind::EndedHere, why);
        self.drop_copy();
    }

    /// Ends the copy here, and all around it.
    pub(super) fn drop_copy(&mut self) {
        self.answer_switchover(&dunlin_api::Answer::failed("the copy on this host has ended"));
        self.role = Role::None;
        self.net.door = None;
        self.own.running = None;
        self.backup.take_over = None;
        self.backup.join = None;
        self.backup.tries = Tries::default();
        self.backup.expected = None;
        self.own.backlog = Backlog::default();
        self.backup.session = None;
        self.backup.ended = None;
        self.backup.ready = false;
        self.net.output = self.new_output(Voice::Shut, ONLY_EPOCH);
    }

    /// What a copy here says from now on.
    pub(super) fn new_output(&self, voice: Voice, epoch: Epoch) -> Output {
        Output::new(voice, epoch).with_budget(self.config.memory.outbound_bytes())
    }
}

/// The output of a primary whose backup begins with it, and so is what it is.
fn compared(mut output: Output) -> Output {
    output.compare_from(BEFORE);
    output.draw_line();
    output.acknowledged(BEFORE);
    output.backup_loaded(BEFORE);
    output
}
