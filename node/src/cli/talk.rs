//! Commands that ask the daemon for something and wait for it.

use super::show::UNPROTECTED;
use crate::control::client::{Client, ClientError};
use crate::control::{Answer, Event, HostStatus, Progress, Request, VmStatus};
use crate::vm::AGAIN;
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::Path;
use std::process::ExitCode;

/// Asks, prints the answer, and turns it into an exit code.
pub fn simple(socket: &Path, request: &Request) -> Result<ExitCode> {
    Ok(print(&ask(socket, request)?))
}

fn ask(socket: &Path, request: &Request) -> Result<Answer, ClientError> {
    Client::connect(socket)?.talk(request, |_| {})
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
    Ok(print(&Client::connect(socket)?.talk(request, print_on)?))
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
    let last = Client::connect(socket)?.talk(&Request::Status, |answer| {
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
    let mut client = Client::connect(socket)?;
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

/// Says how far long work is: a bar on a terminal; in a file or a pipe a line for each step and each tenth of it.
struct Teller {
    bar: ProgressBar,
    said: String,
}

impl Teller {
    fn new() -> Result<Self> {
        let bar = ProgressBar::new(0);
        bar.set_style(
            ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}")?
                .progress_chars("=> "),
        );
        Ok(Self {
            bar,
            said: String::new(),
        })
    }

    fn step(&mut self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.say(what.to_owned());
    }

    fn progress(&mut self, progress: &Progress) {
        let Progress { what, done, total } = progress;
        self.bar.set_message(what.clone());
        self.bar.set_length(*total);
        self.bar.set_position(*done);
        if progress.tenth() > 0 {
            let percent = progress.tenth() * 10;
            self.say(format!("{what}: {percent} % of {} MiB", total >> 20));
        }
    }

    fn say(&mut self, line: String) {
        if self.bar.is_hidden() && line != self.said {
            println!("{line}");
            self.said = line;
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A join that failed so often in a row for the same reason fails for good.
const FAILS_FOR_GOOD: u32 = 3;

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
    watch(socket, || {
        let host = status(socket)?;
        is_program |= host.vms.iter().any(|vm| vm.name == name && vm.program.is_some());
        let vm = host.vms.iter().find(|vm| vm.name == name);
        // A host that has not heard of the new policy yet speaks of the old backup.
        let counts = |vm: &&VmStatus| policy.is_none_or(|policy| vm.policy == policy);
        outcome = vm.filter(counts).and_then(outcome_of);
        match vm {
            Some(VmStatus {
                progress: Some(progress),
                ..
            }) => teller.progress(progress),
            Some(vm) if vm.role == "primary" && vm.qemu_pid.is_some() && !vm.protected => {
                teller.step(&format!("QEMU runs on host '{}'", host.host));
            }
            Some(vm) if vm.state == "joining" => teller.step("the backup joins"),
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
    if let Some(why) = vm.state.strip_prefix("failed: ") {
        return Some(Outcome::Failed(why.to_owned()));
    }
    if !vm.wants_protection {
        return (vm.role == "primary" && vm.state == "running").then_some(Outcome::Unprotected);
    }
    if vm.protected {
        return Some(Outcome::Protected);
    }
    let problem = vm.join_problem.as_ref()?;
    let for_good = problem.times >= FAILS_FOR_GOOD && !problem.passes;
    for_good.then(|| Outcome::Alone(problem.why.clone()))
}

/// Compares a VM's disks, and says how far it is.
pub fn verify_disk(socket: &Path, vm: String, repair: bool) -> Result<ExitCode> {
    let mut teller = Teller::new()?;
    let answer = Client::connect(socket)?.talk(&Request::VerifyDisk { vm, repair }, |answer| {
        if let Answer::Progress(progress) = answer {
            teller.progress(progress);
        }
    })?;
    drop(teller);
    Ok(print(&answer))
}

/// Shuts a VM down and waits until this host has forgotten it. A host that takes over meanwhile is asked again.
pub fn down(socket: &Path, vm: &str, now: bool, force: bool) -> Result<ExitCode> {
    let request = Request::Down {
        vm: vm.to_owned(),
        now,
        force,
    };
    let serves = || -> Result<bool> {
        let status = status(socket)?;
        let here = status.vms.iter().find(|here| here.name == vm);
        Ok(here.is_some_and(|here| here.state != "stopped"))
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
    if force || (failed && (!was_there || serves()?)) {
        return Ok(print(&answer));
    }
    // Another term may have another leader, who has to hear of it; a VM that fails instead of switching itself off, too.
    let term = || -> Result<Option<(u64, bool)>> {
        let status = status(socket)?;
        let here = status.vms.iter().find(|here| here.name == vm);
        Ok(here.map(|here| (here.term, here.state.starts_with("failed"))))
    };
    let (mut asked_in, mut failed) = (None, None);
    watch(socket, || {
        let Some(now) = term()? else { return Ok(true) };
        if asked_in.replace(now).is_some_and(|before| before != now) {
            match ask(socket, &request)? {
                // The next look asks again.
                Answer::Failed { code, .. } if code == AGAIN => asked_in = Some((u64::MAX, false)),
                // Or it has ended since that look, which this host may still be clearing away.
                answer @ Answer::Failed { .. } => failed = serves()?.then_some(answer),
                _ => return Ok(term()?.is_none()),
            }
        }
        Ok(failed.is_some())
    })?;
    if let Some(answer) = failed {
        return Ok(print(&answer));
    }
    println!("VM '{vm}' is down");
    Ok(ExitCode::SUCCESS)
}
