//! Commands that ask the daemon for something and wait for it.

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

/// Asks until the moment fits: a hand-over waits for the end of a sync that is under way.
pub fn until_taken(socket: &Path, request: &Request) -> Result<ExitCode> {
    loop {
        match ask(socket, request)? {
            Answer::Failed { code, .. } if code == AGAIN => std::thread::yield_now(),
            answer => return Ok(print(&answer)),
        }
    }
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
            status = Some(now.clone());
        }
    })?;
    match (status, last) {
        (Some(status), _) => Ok(status),
        (None, Answer::Failed { why, .. }) => bail!("{why}"),
        (None, _) => bail!("the daemon did not say how it is"),
    }
}

/// Calls `each` with every event from now on, and what has been, until it says that it has seen enough.
pub fn follow(socket: &Path, mut each: impl FnMut(Option<&Event>) -> Result<bool>) -> Result<()> {
    let mut client = Client::connect(socket)?;
    client.ask(&Request::Events { follow: true })?;
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

/// Waits until a VM is protected (or runs, if its policy protects nothing), with a bar for the copy.
pub fn wait_until_up(socket: &Path, name: &str) -> Result<ExitCode> {
    let bar = ProgressBar::new(0);
    bar.set_style(
        ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}")?
            .progress_chars("=> "),
    );
    bar.set_message("starting");
    let mut outcome = None;
    follow(socket, |_| {
        let host = status(socket)?;
        let vm = host.vms.iter().find(|vm| vm.name == name);
        outcome = vm.and_then(outcome_of);
        match vm.and_then(|vm| vm.progress.as_ref()) {
            Some(Progress { what, done, total }) => {
                bar.set_message(what.clone());
                bar.set_length(*total);
                bar.set_position(*done);
            }
            None => bar.set_message(vm.map_or("starting".into(), |vm| vm.state.clone())),
        }
        Ok(outcome.is_some())
    })?;
    bar.finish_and_clear();
    Ok(match outcome {
        Some(Err(why)) => {
            eprintln!("dunlin: VM '{name}' did not start: {why}; end it with 'dunlin down {name}'");
            ExitCode::FAILURE
        }
        _ => {
            println!(
                "VM '{name}' is up{}",
                if matches!(outcome, Some(Ok(true))) {
                    " and protected"
                } else {
                    ""
                }
            );
            ExitCode::SUCCESS
        }
    })
}

/// Up and protected, up without asking for protection, failed, or not known yet.
fn outcome_of(vm: &VmStatus) -> Option<Result<bool, String>> {
    if let Some(why) = vm.state.strip_prefix("failed: ") {
        return Some(Err(why.to_owned()));
    }
    if vm.wants_protection {
        return vm.protected.then_some(Ok(true));
    }
    (vm.role == "primary" && vm.state == "running").then_some(Ok(false))
}

/// Compares a VM's disks; says how far it is, as a bar or, in a file or a pipe, as a line for each tenth.
pub fn verify_disk(socket: &Path, vm: String, repair: bool) -> Result<ExitCode> {
    let bar = ProgressBar::new(0);
    bar.set_style(
        ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}")?
            .progress_chars("=> "),
    );
    let mut told = 0;
    let answer = Client::connect(socket)?.talk(&Request::VerifyDisk { vm, repair }, |answer| {
        let Answer::Progress(Progress { what, done, total }) = answer else {
            return;
        };
        bar.set_message(what.clone());
        bar.set_length(*total);
        bar.set_position(*done);
        let tenth = done * 10 / total.max(&1);
        if bar.is_hidden() && tenth > told {
            told = tenth;
            println!("{what}: {} % of {} MiB", tenth * 10, total >> 20);
        }
    })?;
    bar.finish_and_clear();
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
    follow(socket, |_| {
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
