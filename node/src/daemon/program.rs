//! What a host needs to run a copy of a bare program, and what the copy here has printed.
//!
//! **Decides**: what is missing. **Flow**: `dunlin up` and `dunlin check` ask every host of the group -> here. **Invariants**: nothing is
//! changed. **Not here**: the run itself (`vm::program`).

use super::{Daemon, store};
use crate::config::{ProgramSpec, VmConfig};
use crate::control::server::AnswerTo;
use crate::vm::PRINTED;
use dunlin_api::Answer;
use dunlin_core::sync::compare::hash_block;
use dunlin_guest::probe::NoQemu;
use dunlin_program::guard::{Criu, GuardError};
use dunlin_program::limits::Group;
use dunlin_program::page::{self, Leads};
use dunlin_program::printed::Follower;
use dunlin_program::{options, printed};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Lines of one answer.
const MOST_LINES: usize = 10_000;
/// How often a follower looks for more, and how often it says that it is there.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const ALIVE_EVERY: Duration = Duration::from_secs(5);

/// Why a program's executable cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ExecutableError {
    /// Of one that sees the host's own files.
    #[error("{}: {error}", .path.display())]
    File {
        /// It.
        path: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// Of one that has its own root.
    #[error("{} in {}: {error}", .path.display(), .root.display())]
    InRoot {
        /// It, as the program sees it.
        path: PathBuf,
        /// The root.
        root: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
}

/// The executable, as far as two hosts have to have the same: its bytes, by their hash.
pub fn executable(program: &ProgramSpec) -> Result<String, ExecutableError> {
    let path = Path::new(&program.command[0]);
    let (mut file, mut bytes) = (find(program)?, Vec::new());
    file.read_to_end(&mut bytes)
        .map_err(|error| ExecutableError::File {
            path: path.to_owned(),
            error,
        })?;
    Ok(format!("{:032x}", hash_block(&bytes)))
}

/// Why this host has nothing that the other ones could have the same of.
#[derive(Debug, thiserror::Error)]
pub enum RunsByError {
    /// No executable of the program's.
    #[error(transparent)]
    Executable(#[from] ExecutableError),
    /// No QEMU that starts.
    #[error(transparent)]
    Qemu(#[from] NoQemu),
}

/// What both hosts have to have the same of: QEMU's version, or a program's executable.
pub fn runs_by(config: &VmConfig) -> Result<String, RunsByError> {
    Ok(match &config.program {
        Some(spec) => executable(spec)?,
        None => dunlin_guest::probe::qemu_version(&config.spec)?,
    })
}

/// No copy of a running program is made here, nor brought here.
#[derive(Debug, thiserror::Error)]
#[error("{0}: a program that runs is copied to its new host with it")]
pub struct NotCopied(#[source] GuardError);

/// Whether it could be.
pub fn can_be_copied() -> Result<(), NotCopied> {
    Criu::find().map(drop).map_err(NotCopied)
}

/// The executable, where a copy would find it.
fn find(program: &ProgramSpec) -> Result<File, ExecutableError> {
    let path = PathBuf::from(&program.command[0]);
    options::open_in(&program.root, &path).map_err(|error| match program.has_own_root() {
        true => ExecutableError::InRoot {
            path,
            root: program.root.clone(),
            error,
        },
        false => ExecutableError::File { path, error },
    })
}

/// What this host has and lacks: a line each, and how to mend it; nothing to mend where it is there.
/// `runs`: it is on this host already.
pub fn findings(config: &VmConfig, program: &ProgramSpec, runs: bool) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut look = |ok: bool, what: String, mend: &str| {
        let mend = if ok { "" } else { mend };
        found.push((what, mend.to_owned()));
    };
    let path = &program.command[0];
    let is_executable = |file: &File| {
        let about = file.metadata();
        about.is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    };
    if program.has_own_root() {
        let root = &program.root;
        look(
            root.is_dir(),
            format!("root: {}", root.display()),
            "there is no such directory: unpack the program's root there, on both hosts, or correct program.root",
        );
    }
    look(
        find(program).is_ok_and(|file| is_executable(&file)),
        match program.has_own_root() {
            true => format!("program: {path} in {}", program.root.display()),
            false => format!("program: {path}"),
        },
        "install it, or correct program.command",
    );
    if let Some(user) = &program.user {
        let known = options::user(user);
        let what = known
            .as_ref()
            .map_or_else(ToString::to_string, |_| format!("user: {user}"));
        look(known.is_ok(), what, "make that user, or correct program.user");
    }
    if let Some(data) = &program.data {
        let lacks = data.lacks(&program.root, runs);
        if lacks.is_empty() {
            look(true, format!("data: {}", data.image.display()), "");
        }
        if let Err(error) = Criu::find() {
            let mend = "with data the second copy always comes by CRIU: do that, or take data out of the program's file";
            look(false, error.to_string(), mend);
        }
        for (what, mend) in lacks {
            look(false, what, mend);
        }
    }
    if !program.limits.is_none() {
        let group = Group::make(&program.limits);
        let what = group.as_ref().err().map_or_else(
            || "limits: a control group can be made".to_owned(),
            |why| format!("limits: {why}"),
        );
        look(
            group.is_ok(),
            what,
            "mend that, or take memory_mib, cpus and tasks out of program's file: then nothing limits it",
        );
    }
    if program.agreed.clock || program.agreed.chance {
        let leads = Leads {
            clock: program.agreed.clock,
            chance: program.agreed.chance,
        };
        let can = page::can(leads);
        let what = can.as_ref().err().map_or_else(
            || "clock, chance: they can be agreed".to_owned(),
            |why| format!("clock, chance: {why}"),
        );
        look(
            can.is_ok(),
            what,
            "clock = \"own\" and chance = \"own\" in program's file: answers that tell them then cost the second copy",
        );
    }
    let cards = dunlin_guest::probe::network(&config.spec).into_iter();
    found.extend(cards.map(|card| (card.what, if card.ok { String::new() } else { card.mend })));
    found
}

/// Whether this is a bare program of this host's; else why not.
fn is_one(daemon: &Daemon, vm: &str) -> Result<(), Answer> {
    let is_program = daemon
        .vms()
        .get(vm)
        .map(|handle| handle.status().program.is_some());
    match is_program {
        Some(true) => Ok(()),
        None => Err(Answer::refused(format!(
            "there is no program '{vm}' on this host; 'dunlin status' lists them"
        ))),
        Some(false) => Err(Answer::refused(format!(
            "'{vm}' is a VM: with 'serial_log' in its file, each host keeps what its guest prints"
        ))),
    }
}

/// Where its copies have said something else while this host had the right one, and what they said there.
pub fn differences(daemon: &Daemon, vm: &str) -> Answer {
    if let Err(refused) = is_one(daemon, vm) {
        return refused;
    }
    let text = daemon.vms().get(vm).map(|handle| handle.differences());
    match text.filter(|text| !text.is_empty()) {
        Some(text) => Answer::done(text.trim_end()),
        None => Answer::done(
            "no copies have differed while this host was the primary, since its daemon began; 'dunlin events' tells on which host they did",
        ),
    }
}

/// The last lines that the copy on this host has printed, and with `follow` what it prints from then on, until the asker or the program goes.
pub fn logs(daemon: &Daemon, vm: &str, lines: u32, follow: bool, to: &mut dyn Write) -> Answer {
    if let Err(refused) = is_one(daemon, vm) {
        return refused;
    }
    let path = store::folder(&daemon.host.state, vm).join(PRINTED);
    let failed = |error: std::io::Error| Answer::failed(format!("{}: {error}", path.display()));
    let lines = (lines as usize).min(MOST_LINES);
    if !follow {
        return match printed::last_lines(&path, lines) {
            Ok(lines) => Answer::done(lines.join("\n")),
            Err(error) => failed(error),
        };
    }
    let (mut follower, first) = match Follower::begin(&path, lines) {
        Ok(begun) => begun,
        Err(error) => return failed(error),
    };
    let mut text = first;
    let mut said = Instant::now();
    loop {
        let answer = match text.is_empty() {
            false => Some(Answer::Printed { text }),
            // An asker who has gone is noticed although nothing is printed.
            true => (said.elapsed() >= ALIVE_EVERY).then_some(Answer::Alive),
        };
        if let Some(answer) = answer {
            said = Instant::now();
            if to.answer(&answer).is_err() {
                return Answer::done("");
            }
        }
        text = match follower.more() {
            Ok(text) => text,
            Err(error) => return failed(error),
        };
        if text.is_empty() {
            if !daemon.vms().contains_key(vm) {
                return Answer::done(format!("program '{vm}' is not on this host any more"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
