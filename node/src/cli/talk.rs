//! Commands that ask the daemon for something and wait for it.

use super::teller::Teller;
use crate::control::client::ClientError;
use crate::control::http::Conversation;
use crate::vm::AGAIN;
use anyhow::{Result, bail};
use dunlin_api::{Answer, Event, HostStatus, Request, Role, State, VmStatus};
use std::cell::RefCell;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A VM asks for protection and has none.
pub const UNPROTECTED: u8 = 3;

/// Asks, prints the answer, and turns it into an exit code.
pub fn simple(socket: &Path, request: &Request) -> Result<ExitCode> {
    Ok(print(&ask(socket, request)?))
}

fn ask(socket: &Path, request: &Request) -> Result<Answer, ClientError> {
    Conversation::connect(socket)?.talk(request, |_| {})
}

fn print(answer: &Answer) -> ExitCode {
    match answer {
        Answer::Failed { why, code } => {
            eprintln!("dunlin: {why}");
            ExitCode::from(u8::try_from(*code).unwrap_or(1))
        }
        Answer::Done { text } if !text.is_empty() => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        _ => ExitCode::SUCCESS,
    }
}

/// What a program has printed, and what it prints until somebody has seen enough.
pub fn logs(socket: &Path, request: &Request) -> Result<ExitCode> {
    let print_on = |answer: &Answer| {
        if let Answer::Printed { text } = answer {
            print!("{text}");
        }
    };
    Ok(print(&Conversation::connect(socket)?.talk(request, print_on)?))
}

/// The name in a VM's file.
pub fn vm_name(text: &str) -> Option<String> {
    Some(
        toml::from_str::<toml::Table>(text)
            .ok()?
            .get("name")?
            .as_str()?
            .to_owned(),
    )
}

/// How this host is.
pub fn status(socket: &Path) -> Result<HostStatus> {
    let mut status = None;
    let last = Conversation::connect(socket)?.talk(&Request::Status, |answer| {
        if let Answer::Status(now) = answer {
            status = Some(*now.clone());
        }
    })?;
    match (status, last) {
        (Some(status), _) => Ok(status),
        (None, Answer::Failed { why, .. }) => bail!("{why}"),
        (None, _) => bail!("the daemon did not say how it is"),
    }
}

/// Calls `each` whenever something has changed, and once at first, until it says that it has seen enough.
pub fn watch(socket: &Path, mut each: impl FnMut() -> Result<bool>) -> Result<()> {
    let news = Request::Events {
        follow: true,
        from_now: true,
        since_ms: None,
    };
    follow(socket, &news, |_| each())
}

/// Calls `each` with every event that `Request::Events` asks for, until it says that it has seen enough.
pub fn follow(
    socket: &Path,
    asked: &Request,
    mut each: impl FnMut(Option<&Event>) -> Result<bool>,
) -> Result<()> {
    let mut client = Conversation::connect(socket)?;
    client.ask(asked)?;
    loop {
        match client.next()? {
            Answer::Event(event) => {
                if each(Some(&event))? {
                    return Ok(());
                }
            }
            Answer::Failed { why, .. } => bail!("{why}"),
            _ => {
                if each(None)? {
                    return Ok(());
                }
            }
        }
    }
}

/// A VM that no host could back up for so long is not waited for: such a host is dead, or cut off.
const NOBODY: Duration = Duration::from_secs(30);

/// How a start ended.
enum Outcome {
    Protected,
    Unprotected,
    Failed(String),
    /// It runs, and this keeps the backup from joining.
    Alone(String),
}

/// Waits until a VM is protected (or runs, if its policy protects nothing), under that policy if one is given, and says how far
/// it is; or until it is clear why not.
pub fn wait_until_up(socket: &Path, name: &str, policy: Option<&str>) -> Result<ExitCode> {
    let mut teller = Teller::new()?;
    let (mut outcome, mut is_program) = (None, false);
    let mut nobody_since: Option<Instant> = None;
    watch(socket, || {
        let host = status(socket)?;
        is_program |= host.vms.iter().any(|vm| vm.name == name && vm.program.is_some());
        let vm = host.vms.iter().find(|vm| vm.name == name);
        // A host that has not heard of the new policy yet speaks of the old backup.
        let counts = |vm: &&VmStatus| policy.is_none_or(|policy| vm.policy == policy);
        outcome = vm.filter(counts).and_then(outcome_of);
        let missing = vm.and_then(missing_backup);
        nobody_since = missing
            .as_ref()
            .map(|_| nobody_since.unwrap_or_else(Instant::now));
        let too_long = nobody_since.is_some_and(|since| since.elapsed() >= NOBODY);
        outcome = outcome
            .take()
            .or_else(|| missing.clone().filter(|_| too_long).map(Outcome::Alone));
        match vm {
            Some(VmStatus {
                progress: Some(progress),
                ..
            }) => teller.progress(progress),
            Some(vm) if vm.role == Role::Primary && vm.qemu_pid.is_some() && !vm.protected => {
                let missing = missing.map(|missing| format!("; {missing}"));
                teller.step(&format!(
                    "QEMU runs on host '{}'{}",
                    host.host,
                    missing.unwrap_or_default()
                ));
            }
            Some(vm) if vm.state == State::Joining => teller.step("the backup joins"),
            _ => teller.step("starting"),
        }
        Ok(outcome.is_some())
    })?;
    drop(teller);
    let kind = if is_program { "program" } else { "VM" };
    Ok(match outcome {
        Some(Outcome::Failed(why)) => {
            eprintln!("dunlin: {kind} '{name}' did not start: {why}; end it with 'dunlin down {name}'");
            ExitCode::FAILURE
        }
        Some(Outcome::Alone(why)) if is_program => {
            eprintln!("dunlin: program '{name}' runs and is NOT protected: {why}");
            ExitCode::from(UNPROTECTED)
        }
        Some(Outcome::Alone(why)) => {
            eprintln!(
                "dunlin: VM '{name}' runs and is NOT protected: {why}; once that is mended it is protected by itself, and \
                 'dunlin status' says so"
            );
            ExitCode::from(UNPROTECTED)
        }
        Some(Outcome::Unprotected) => {
            println!("{kind} '{name}' is up");
            ExitCode::SUCCESS
        }
        Some(Outcome::Protected) | None => {
            println!("{kind} '{name}' is up and protected");
            ExitCode::SUCCESS
        }
    })
}

/// What became of it, if that is clear yet.
fn outcome_of(vm: &VmStatus) -> Option<Outcome> {
    if matches!(vm.state, State::Failed | State::Restarting) {
        return Some(Outcome::Failed(vm.why.clone()));
    }
    if !vm.wants_protection {
        return (vm.role == Role::Primary && vm.state == State::Running).then_some(Outcome::Unprotected);
    }
    if vm.protected {
        return Some(Outcome::Protected);
    }
    let problem = vm.join_problem.as_ref()?;
    problem.is_for_good().then(|| Outcome::Alone(problem.why.clone()))
}

/// Why nobody could become the backup of a VM that runs here unprotected, if nobody could.
fn missing_backup(vm: &VmStatus) -> Option<String> {
    let mut could = vm.peers.iter().filter(|peer| !peer.witness).peekable();
    let named = could.peek().map(|peer| peer.host.clone())?;
    let lacks = vm.role == Role::Primary && vm.wants_protection && !vm.protected;
    (lacks && could.all(|peer| !peer.connected)).then(|| format!("host '{named}' is not reached: start it"))
}

/// Compares a VM's disks, and says how far it is.
pub fn verify_disk(socket: &Path, vm: String, repair: bool) -> Result<ExitCode> {
    let mut teller = Teller::new()?;
    let answer = Conversation::connect(socket)?.talk(&Request::VerifyDisk { vm, repair }, |answer| {
        if let Answer::Progress(progress) = answer {
            teller.progress(progress);
        }
    })?;
    drop(teller);
    Ok(print(&answer))
}

/// Shuts a VM or program down and waits until this host has forgotten it.
pub fn down(socket: &Path, vm: &str, now: bool, force: bool) -> Result<ExitCode> {
    let status = status(socket)?;
    let here = status.vms.iter().find(|here| here.name == vm);
    let is_program = here.is_some_and(|here| here.program.is_some());
    let has_disks =
        here.is_some_and(|here| !is_program && (!here.disks.is_empty() || here.role == Role::Witness));
    let served = RefCell::new(here.and_then(serves));
    let what = format!("{} '{vm}'", if is_program { "program" } else { "VM" });
    let teller = Teller::new()?;
    teller.waits(&match (now, force) {
        (_, true) => format!("{what} is taken away from this host"),
        (true, false) => format!("{what} is being ended on its hosts"),
        (false, false) if is_program => format!("{what} is asked to end"),
        (false, false) => format!("{what} is asked to switch itself off"),
    });
    let answer = end(socket, vm, &what, now, force, &teller, &served)?;
    drop(teller);
    match answer {
        Some(answer) => Ok(print(&answer)),
        None => {
            // Whoever copies an image, or starts the VM without Dunlin, has to know whose: the other host has what the last sync brought.
            match served.into_inner().filter(|_| has_disks) {
                Some(host) => {
                    println!("{what} is down; host '{host}' served it last, so its disks are the newest")
                }
                None => println!("{what} is down"),
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The host that serves a VM, where it is served at all: whoever leads after a cold start may only be about to learn that another host has the newer disks.
fn serves(here: &VmStatus) -> Option<String> {
    use State::{Alone, DiskFull, Joining, ProtectionPaused, Running};
    matches!(
        here.state,
        Running | Joining | Alone | ProtectionPaused | DiskFull
    )
    .then(|| here.leader.clone())
    .flatten()
}

/// Has it ended; the daemon's answer where that says more than that it is down. A host that takes over meanwhile is asked again, and noted in `served`.
fn end(
    socket: &Path,
    vm: &str,
    what: &str,
    now: bool,
    force: bool,
    teller: &Teller,
    served: &RefCell<Option<String>>,
) -> Result<Option<Answer>> {
    let request = Request::Down {
        vm: vm.to_owned(),
        now,
        force,
    };
    let is_there = || -> Result<bool> {
        let status = status(socket)?;
        let here = status.vms.iter().find(|here| here.name == vm);
        Ok(here.is_some_and(|here| here.state != State::Stopped))
    };
    let mut was_there = false;
    let answer = loop {
        match ask(socket, &request)? {
            // Another host leads since: it is asked.
            Answer::Failed { code, .. } if code == AGAIN => {
                was_there = true;
                std::thread::yield_now();
            }
            answer => break answer,
        }
    };
    let failed = matches!(answer, Answer::Failed { .. });
    // One that was there a moment ago, and is not now, has been ended by somebody else's order.
    if force || (failed && (!was_there || is_there()?)) {
        return Ok(Some(answer));
    }
    // Another term may have another leader, who has to hear of it; a VM that fails instead of switching itself off, too.
    let term = || -> Result<Option<(u64, bool)>> {
        let status = status(socket)?;
        let here = status.vms.iter().find(|here| here.name == vm);
        if let Some(here) = here {
            let host = &status.host;
            if let Some(host) = serves(here) {
                served.replace(Some(host));
            }
            teller.waits(&match here.state {
                State::Stopped => format!("host '{host}' puts away what is left of {what}"),
                _ => format!("{what} ends; on host '{host}' it is {}", here.state_in_words()),
            });
        }
        Ok(here.map(|here| (here.term, here.state == State::Failed)))
    };
    let (mut asked_in, mut failed) = (None, None);
    watch(socket, || {
        let Some(now) = term()? else { return Ok(true) };
        if asked_in.replace(now).is_some_and(|before| before != now) {
            match ask(socket, &request)? {
                // The next look asks again.
                Answer::Failed { code, .. } if code == AGAIN => asked_in = Some((u64::MAX, false)),
                // Or it has ended since that look, which this host may still be clearing away.
                answer @ Answer::Failed { .. } => failed = is_there()?.then_some(answer),
                _ => return Ok(term()?.is_none()),
            }
        }
        Ok(failed.is_some())
    })?;
    Ok(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_api::{JoinProblem, PeerStatus};

    fn unprotected() -> VmStatus {
        VmStatus {
            role: "primary".into(),
            state: "alone".into(),
            wants_protection: true,
            peers: ["b", "c"]
                .map(|host| PeerStatus {
                    host: host.into(),
                    witness: host == "c",
                    connected: host == "c",
                    ..PeerStatus::default()
                })
                .into(),
            ..VmStatus::default()
        }
    }

    #[test]
    fn a_backup_is_missing_only_where_none_could_come() {
        let mut vm = unprotected();
        let why = missing_backup(&vm).expect("b is dead, and c is a witness");
        assert!(why.contains("host 'b' is not reached"), "{why}");
        vm.role = "backup".into();
        assert_eq!(missing_backup(&vm), None, "its primary knows better");
        vm = unprotected();
        vm.peers[0].connected = true;
        assert_eq!(missing_backup(&vm), None);
        vm = unprotected();
        vm.wants_protection = false;
        assert_eq!(missing_backup(&vm), None);
        vm.peers.clear();
        assert_eq!(missing_backup(&vm), None);
    }

    #[test]
    fn a_wait_is_over_when_it_is_protected_or_clear_that_it_will_not_be() {
        let mut vm = unprotected();
        assert!(outcome_of(&vm).is_none());
        let problem = |times, passes| JoinProblem {
            why: "no room".into(),
            times,
            passes,
        };
        for (problem, over) in [
            (problem(JoinProblem::FOR_GOOD - 1, false), false),
            (problem(JoinProblem::FOR_GOOD, true), false),
            (problem(JoinProblem::FOR_GOOD, false), true),
        ] {
            vm.join_problem = Some(problem);
            assert_eq!(matches!(outcome_of(&vm), Some(Outcome::Alone(_))), over);
        }
        vm.protected = true;
        assert!(matches!(outcome_of(&vm), Some(Outcome::Protected)));
    }

    #[test]
    fn nobody_is_said_to_have_served_a_vm_that_only_has_a_leader() {
        let led = |state: State| VmStatus {
            leader: Some("b".into()),
            state,
            ..VmStatus::default()
        };
        for state in [State::Running, State::Alone, State::Joining] {
            assert_eq!(serves(&led(state)).as_deref(), Some("b"));
        }
        for state in [State::Waiting, State::Starting, State::Failed, State::Stopped] {
            assert_eq!(serves(&led(state)), None);
        }
        assert_eq!(
            serves(&VmStatus {
                leader: None,
                ..led(State::Running)
            }),
            None
        );
    }
}
