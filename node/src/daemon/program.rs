//! What a host needs to run a copy of a bare program, and what the copy here has printed.
//!
//! **Decides**: what is missing. **Flow**: `dunlin up` and `dunlin check` ask every host of the group -> here. **Invariants**: nothing is
//! changed. **Not here**: the run itself (`vm::program`).

use super::{Daemon, store};
use crate::config::{ProgramSpec, VmConfig};
use crate::control::Answer;
use crate::vm::PRINTED;
use dunlin_core::sync::compare::hash_block;
use dunlin_program::{options, printed};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Lines of one answer.
const MOST_LINES: usize = 10_000;

/// The executable, as far as two hosts have to have the same: its bytes, by their hash.
pub fn executable(program: &ProgramSpec) -> Result<String, String> {
    let path = Path::new(&program.command[0]);
    let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(format!("{:032x}", hash_block(&bytes)))
}

/// What this host has and lacks: a line each, and how to mend it; nothing to mend where it is there.
pub fn findings(config: &VmConfig, program: &ProgramSpec) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut look = |ok: bool, what: String, mend: &str| {
        let mend = if ok { "" } else { mend };
        found.push((what, mend.to_owned()));
    };
    let path = &program.command[0];
    let is_executable =
        std::fs::metadata(path).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0);
    look(
        is_executable,
        format!("program: {path}"),
        "install it, or correct program.command",
    );
    if let Some(user) = &program.user {
        let known = options::user(user);
        let what = known
            .as_ref()
            .map_or_else(ToString::to_string, |_| format!("user: {user}"));
        look(known.is_ok(), what, "make that user, or correct program.user");
    }
    let cards = dunlin_guest::probe::network(&config.spec).into_iter();
    found.extend(cards.map(|card| (card.what, if card.ok { String::new() } else { card.mend })));
    found
}

/// The last lines that the copy on this host has printed.
pub fn logs(daemon: &Daemon, vm: &str, lines: u32) -> Answer {
    let is_program = daemon
        .vms()
        .get(vm)
        .map(|handle| handle.status().program.is_some());
    match is_program {
        None => Answer::refused(format!(
            "there is no program '{vm}' on this host; 'dunlin status' lists them"
        )),
        Some(false) => Answer::refused(format!(
            "'{vm}' is a VM: 'dunlin events' has its console's last lines"
        )),
        Some(true) => {
            let path = store::folder(&daemon.host.state, vm).join(PRINTED);
            match printed::last_lines(&path, (lines as usize).min(MOST_LINES)) {
                Ok(lines) => Answer::done(lines.join("\n")),
                Err(error) => Answer::failed(format!("{}: {error}", path.display())),
            }
        }
    }
}
