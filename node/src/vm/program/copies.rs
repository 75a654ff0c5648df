//! The copy of a program on this host: how it begins and how it ends.
//!
//! Invariants: 1. the thread that makes a copy outlives it: the copy's processes die with that thread; 2. a copy that has ended is not
//! begun again by this host alone.
//!
//! Not here: its namespaces (`dunlin_program::inside`), what follows from its end for the service (`serving`).

use super::backlog::Backlog;
use super::data::{self, DataError};
use super::restart::End;
use super::{PRINTED, ProgramLoop, RAN, Role, Running, joining, poison};
use crate::config::ProgramSpec;
use crate::vm::event::LoopEvent;
use crossbeam_channel::bounded;
use dunlin_api::EventKind;
use dunlin_core::output::Output;
use dunlin_core::output::gate::Voice;
use dunlin_core::program::order::Gate;
use dunlin_core::units::{Epoch, Index};
use dunlin_core::wire::sync::SyncMessage;
use dunlin_program::answers::Answers;
use dunlin_program::chance::{Seed, words};
use dunlin_program::copy::{Copy, CopyError, Inside, Prints};
use dunlin_program::data::Image;
use dunlin_program::limits::{Group, LimitsError};
use dunlin_program::message::{Card, Heard, Mounted, Spec, Walls};
use dunlin_program::options::{self, CheckError};
use dunlin_program::printed::Printed;
use dunlin_program::sockets;
use dunlin_program::visit::{Order, Rooms};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file or a folder of the program's here cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}", .path.display())]
pub struct FileError {
    path: PathBuf,
    #[source]
    error: io::Error,
}

impl FileError {
    /// Of the one at `path`.
    pub(super) fn of(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self { path, error }
    }
}

/// Why there are no namespaces for a copy.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The program's data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Whom the program is to run as.
    #[error(transparent)]
    User(#[from] CheckError),
    /// This host does not keep it within them.
    #[error("the program's limits: {0}")]
    Limits(#[from] LimitsError),
    /// The file for what it prints.
    #[error(transparent)]
    Printed(#[from] FileError),
    /// The namespaces themselves.
    #[error(transparent)]
    Copy(#[from] CopyError),
}

/// Why nothing can be run beside a copy.
#[derive(Debug, thiserror::Error)]
pub enum VisitError {
    /// There is none here.
    #[error("no copy of program '{name}' runs on host '{host}'{hint}")]
    NoCopy {
        /// Of this program.
        name: String,
        /// This host.
        host: String,
        /// Where there is one, if that is known.
        hint: String,
    },
    /// It may be ending.
    #[error("the namespaces of '{name}': {error}")]
    Rooms {
        /// The program.
        name: String,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// Whom the program runs as.
    #[error(transparent)]
    User(#[from] CheckError),
}

/// What `dunlin exec` needs of a copy.
pub struct Visited {
    /// The copy's namespaces.
    pub rooms: Rooms,
    /// What is to run.
    pub order: Order,
    /// The copy's part.
    pub role: &'static str,
    /// It runs as root, who may read all that its host has.
    pub is_root: bool,
}

/// The epoch of all that a program says. The one before it is what both copies are when they begin: nothing.
const ONLY_EPOCH: Epoch = Epoch(2);

impl ProgramLoop {
    /// The group has agreed that both copies begin.
    pub(super) fn start_copy(&mut self) {
        let is_backed = self.agreement.state().complete.len() > 1;
        self.role = if self.agreement.leads() {
            Role::Primary
        } else {
            Role::Backup
        };
        self.output = match (self.role, is_backed) {
            (Role::Primary, true) => compared(self.config.memory.outbound_bytes()),
            (Role::Primary, false) => Output::new(Voice::Alone, ONLY_EPOCH),
            _ => Output::new(Voice::Backup, ONLY_EPOCH),
        };
        let folder = self.folder();
        if let Err(why) = note_that_it_ran(&folder) {
            return self.fails(&why.to_string());
        }
        self.failure = None;
        self.last_inputs = poison::LastInputs::default();
        let now_us = self.now_us();
        self.restart.begins(now_us);
        let again = self.restart.again;
        let (keeper, kept) = bounded::<()>(0);
        let (program, to_loop, marks, seed) = (
            self.program.clone(),
            self.to_loop.clone(),
            self.marks(),
            self.seed,
        );
        let work = move || {
            let image = marks.map(|marks| data::open(&program, &marks)).transpose();
            let result = image
                .map_err(PrepareError::from)
                .and_then(|image| prepare(&program, seed, printed(&folder.join(PRINTED), again), image));
            to_loop.send(LoopEvent::ProgramPrepared(result.map(Box::new)));
            // Invariant 1: until the loop lets go of its end.
            kept.iter().for_each(drop);
        };
        let name = format!("program-{}", self.config.name);
        match std::thread::Builder::new().name(name).spawn(work) {
            Ok(_) => self.starting = Some(keeper),
            Err(error) => return self.fails(&format!("a thread for the program: {error}")),
        }
        if self.role == Role::Primary && is_backed {
            self.followed_us = self.now_us();
            self.connect_session(&[]);
        }
    }

    /// Its namespaces are there, or not.
    pub(super) fn prepared(&mut self, result: Result<Box<Copy>, PrepareError>) {
        // Its end may have been agreed meanwhile.
        let (Some(keeper), true) = (self.starting.take(), self.role != Role::None) else {
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
        self.running = Some(Running {
            copy,
            _keeper: keeper,
            gate: Gate::new(self.program.order, 1, self.program.patience.as_micros() as u64),
            time,
            answers: None,
            source,
            brought_at: Index(0),
            look_again_us: 0,
            look_at_us: u64::MAX,
            told_unbatched: false,
            ready: false,
            until_us: now_us + self.program.start_within.as_micros() as u64,
        });
    }

    /// What its keeper has to say.
    pub(super) fn hear_copy(&mut self) {
        loop {
            let Some(running) = &mut self.running else { return };
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
        let Some(running) = self.running.as_mut().filter(|running| !running.ready) else {
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
        let ready = self.running.as_ref().is_some_and(|running| running.ready);
        let talker = self.session.as_ref().and_then(|session| session.talker.as_ref());
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
        self.last_inputs.ended();
        self.failure = Some(why.to_owned());
        let talker = self.session.as_ref().and_then(|session| session.talker.as_ref());
        if let Some(talker) = talker {
            talker.say(SyncMessage::Refused { why: why.to_owned() });
        }
        self.ask_whether_both_ended();
        self.drop_copy();
        self.group.may_lead(false);
        if self.group.is_leader() {
            self.group.step_down();
        }
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
        self.door = None;
        self.running = None;
        self.take_over = None;
        self.join = None;
        self.tries = joining::Tries::default();
        self.expected = None;
        self.backlog = Backlog::default();
        self.session = None;
        self.backup_ready = false;
        self.output = Output::new(Voice::Shut, ONLY_EPOCH);
    }
}

/// The output of a primary whose backup begins with it, and so is what it is.
fn compared(budget_bytes: usize) -> Output {
    let before = Epoch(ONLY_EPOCH.0 - 1);
    let mut output = Output::new(Voice::Protected, before).with_budget(budget_bytes);
    output.compare_from(before);
    output.draw_line();
    output.acknowledged(before);
    output.backup_loaded(before);
    output
}

/// So that a daemon that is started again does not begin it again.
pub(super) fn note_that_it_ran(folder: &Path) -> Result<(), FileError> {
    std::fs::write(folder.join(RAN), []).map_err(FileError::of(folder))
}

/// The file for what it prints; what it printed before it was begun again stays.
pub(super) fn printed(path: &Path, again: bool) -> Result<Printed, FileError> {
    let printed = match again {
        true => Printed::go_on(path),
        false => Printed::create(path),
    };
    printed.map_err(FileError::of(path))
}

/// What the program is kept from, and so whoever runs something beside it.
pub(super) fn walls(program: &ProgramSpec) -> Result<Walls, CheckError> {
    let user = program.user.as_deref().map(options::user).transpose();
    Ok(Walls {
        user: user?,
        root: program.root.clone(),
        scratch_mib: program.scratch_mib,
        agreed_chance: None,
        agreed_clock: false,
        data: None,
        clock_page: program.agreed_clock,
        chance: None,
    })
}

/// By its number: a host may have several accounts with root's.
fn is_root(walls: &Walls) -> bool {
    walls.user.is_none_or(|(user, _)| user == 0)
}

/// Its namespaces, with its data's image in them, if it has one.
pub(super) fn prepare(
    program: &ProgramSpec,
    seed: Seed,
    printed: Result<Printed, FileError>,
    image: Option<Image>,
) -> Result<Copy, PrepareError> {
    let attached = image.map(Image::attach).transpose();
    let attached = attached.map_err(DataError::Image)?;
    let mut walls = walls(program)?;
    walls.chance = program.agreed_chance.then(|| words(seed, 1));
    walls.data = program
        .data
        .as_ref()
        .zip(attached.as_ref())
        .map(|(data, attached)| Mounted {
            device: attached.device().to_owned(),
            at: data.at.clone(),
        });
    let group = Group::make(&program.limits)?;
    let spec = Spec {
        command: program.command.clone(),
        directory: program.directory.clone(),
        environment: program.environment.clone(),
        card: Card {
            address: program.address,
            prefix: program.prefix,
            gateway: program.gateway,
            mac: program.mac,
        },
        walls: Some(walls),
    };
    let inside = Inside {
        program: "/proc/self/exe".into(),
        arguments: vec!["program".into(), "inside".into()],
    };
    let copy = Copy::prepare(
        "the program's copy",
        &inside,
        &spec,
        Prints::Kept(Some(printed?)),
        group,
        attached,
    );
    Ok(copy?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_roots_number_is_root_whatever_its_name() {
        let of = |user| Walls {
            user,
            root: "/".into(),
            scratch_mib: 1,
            agreed_chance: None,
            agreed_clock: false,
            data: None,
            clock_page: false,
            chance: None,
        };
        assert!(is_root(&of(None)), "nobody is named");
        assert!(is_root(&of(Some((0, 0)))));
        assert!(is_root(&of(Some((0, 100)))), "'toor', of another group");
        assert!(!is_root(&of(Some((65_534, 0)))));
    }
}
