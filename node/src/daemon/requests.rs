//! What people ask of a daemon, and other daemons in their name.

use super::error::by_control_alone;
use super::starting::{self, Asked};
use super::telling::{last_events, status};
use super::{Daemon, examine, members, moving, peers, program, renewal};
use crate::control::server::AnswerTo;
use crate::vm;
use crate::vm::event::Command;
use dunlin_api::{Answer, Request};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a VM may take to leave this host after its end was agreed. Less than whoever tells it waits for the answer.
const FORGOTTEN: Duration = Duration::from_secs(4);

/// Answers what a person asks, line by line.
///
/// The control socket and the API end here, so that both say the same. `Exec` and a log's writer take more than lines: these have the control
/// socket to themselves.
pub fn converse(daemon: &Arc<Daemon>, request: Request, to: &mut dyn Write) {
    let answer = match request {
        Request::Status => {
            // Whoever asked may have gone: here and below.
            let _ = to.answer(&Answer::Status(Box::new(status(daemon))));
            Answer::done("")
        }
        Request::Events {
            follow,
            from_now,
            since_ms,
        } => {
            let next = if from_now {
                daemon.host.events.next_seq()
            } else {
                0
            };
            return events(daemon, follow, next, since_ms.unwrap_or(0), to);
        }
        Request::Cluster => members::all(daemon, &mut |answer| {
            let _ = to.answer(&answer);
        }),
        Request::Keys { host, ask } if host != daemon.host.name => {
            peers::ask(daemon, &host.clone(), &Request::Keys { host, ask })
        }
        request @ Request::Keys { .. } => from_peer(daemon, request, &mut |_| {}),
        Request::Logs {
            vm,
            differences: true,
            ..
        } => program::differences(daemon, &vm),
        Request::Logs {
            vm, lines, follow, ..
        } => program::logs(daemon, &vm, lines, follow, to),
        Request::Log(ask) => return super::logs::converse(daemon, ask, to),
        Request::Up { text, origin, from } => starting::up(daemon, &text, &origin, from.as_deref()),
        Request::Check { text, origin } => examine::check(daemon, &text, &origin, &mut |found| {
            let _ = to.answer(&Answer::Found(found));
        }),
        Request::Exec { .. } => by_control_alone(),
        request => from_person(daemon, request, &mut |answer| {
            let _ = to.answer(answer);
        }),
    };
    let _ = to.answer(&answer);
}

fn events(daemon: &Daemon, follow: bool, mut next: u64, since_ms: u64, to: &mut dyn Write) {
    let (mut nudges, mut waits) = (0, false);
    loop {
        let wait = waits.then_some(Duration::from_secs(5));
        let seen = std::mem::replace(&mut nudges, daemon.host.events.nudges());
        for event in daemon.host.events.since(next, wait, seen) {
            next = event.seq + 1;
            if event.time_ms < since_ms {
                continue;
            }
            if to.answer(&Answer::Event(event)).is_err() {
                return;
            }
        }
        if !follow {
            let _ = to.answer(&Answer::done(""));
            return;
        }
        // A reader who has gone is noticed although nothing happens.
        waits = true;
        if to.answer(&Answer::Alive).is_err() {
            return;
        }
    }
}

/// What another daemon asks. It is never passed on: the asker knows whom to ask.
pub fn from_peer(daemon: &Daemon, request: Request, each: &mut dyn FnMut(&Answer)) -> Answer {
    match request {
        Request::Prepare {
            text,
            origin,
            qemu_version,
            newcomer,
            ticket,
        } => {
            let asked = Asked {
                runs_by: &qemu_version,
                newcomer,
            };
            starting::prepare(daemon, &text, &origin, asked, ticket)
        }
        Request::Install {
            text,
            newcomer,
            life,
            ticket,
        } => starting::install(daemon, &text, life, newcomer, ticket),
        Request::LastLife { text } => starting::last_life(daemon, &text),
        Request::Undo { vm, ticket } => starting::undo(daemon, &vm, ticket),
        Request::Member => {
            each(&Answer::Member(Box::new(members::this(daemon))));
            Answer::done("")
        }
        Request::Look { since } => look(daemon, since, each),
        Request::Examine { text } => examine::answer(daemon, &text),
        Request::Replace { vm, host } => moving::replace(daemon, &vm, &host),
        Request::Move {
            vm,
            backup,
            witness,
            standby,
            no_standby,
            unprotected_meanwhile,
        } => match (backup, witness, standby, no_standby) {
            (Some(host), None, None, false) => moving::to(daemon, &vm, &host, false, unprotected_meanwhile),
            (None, Some(host), None, false) => moving::to(daemon, &vm, &host, true, unprotected_meanwhile),
            (None, None, Some(host), false) => moving::standby(daemon, &vm, Some(&host)),
            (None, None, None, true) => moving::standby(daemon, &vm, None),
            _ => {
                Answer::refused("one host is named: the new backup's, the new witness's, or the new standby")
            }
        },
        Request::Left { vm, newest } => match daemon.sender(&vm) {
            Some(to_loop) => vm::command(&to_loop, Command::Left { newest }),
            None => Answer::refused(format!("there is no VM '{vm}' on host '{}'", daemon.host.name)),
        },
        Request::Keys { host, ask } if host == daemon.host.name => renewal::step(daemon, ask),
        Request::Remove { vm } => remove(daemon, &vm),
        Request::Log(ask) => super::logs::from_peer(daemon, ask),
        Request::Standing { vm } => {
            // Not under the lock: it opens the VM's disks.
            let holding = daemon.vms().get(&vm).map(vm::VmHandle::holding);
            match holding {
                Some(holding) => holding.standing(),
                None => Answer::refused(format!("there is no VM '{vm}' on this host")),
            }
        }
        other => here(daemon, &other, each),
    }
}

/// This host and its VMs, and what happened here.
fn look(daemon: &Daemon, since: u64, each: &mut dyn FnMut(&Answer)) -> Answer {
    each(&Answer::Member(Box::new(members::this(daemon))));
    each(&Answer::Status(Box::new(status(daemon))));
    for event in last_events(daemon, since) {
        each(&Answer::Event(event));
    }
    Answer::done("")
}

/// What a person asks about one VM: done here if this host serves it, else by the host that does.
pub fn from_person(daemon: &Daemon, request: Request, each: &mut dyn FnMut(&Answer)) -> Answer {
    let Some(vm) = request.vm().map(str::to_owned) else {
        return Answer::refused("this is for other hosts to ask");
    };
    if matches!(request, Request::Down { .. }) {
        // An `up` that is under way here comes first: a host that it has not reached yet would keep its part for ever.
        drop(daemon.changing.of(&vm).lock());
    }
    let Some(status) = daemon.vms().get(&vm).map(vm::VmHandle::status) else {
        return Answer::refused(format!(
            "there is no VM '{vm}' on this host; 'dunlin status' lists those that are, 'dunlin cluster status' what other hosts serve"
        ));
    };
    let is_about_this_host = matches!(
        request,
        Request::Protect { alone: true, .. } | Request::Inject { .. } | Request::Down { force: true, .. }
    );
    match status.leader {
        Some(leader) if leader != daemon.host.name && !is_about_this_host => {
            peers::converse(daemon, &leader, &request, each)
        }
        _ => from_peer(daemon, request, each),
    }
}

/// The VM's end was agreed. Answered when nothing of it is left here, or after [`FORGOTTEN`].
fn remove(daemon: &Daemon, vm: &str) -> Answer {
    // A part of it that is on its way here is not to come any more.
    daemon.reservations().cancel(vm);
    let Some(to_loop) = daemon.sender(vm) else {
        return Answer::done("not here");
    };
    let events = &daemon.host.events;
    let mut seen = (events.next_seq(), events.nudges());
    let answer = vm::command(&to_loop, Command::Remove);
    let until = Instant::now() + FORGOTTEN;
    while daemon.vms().contains_key(vm) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let why = vm::lets_not_go(&daemon.host.name);
            return Answer::Failed { why, code: vm::BUSY };
        }
        let _ = events.since(seen.0, Some(left), seen.1);
        seen = (events.next_seq(), events.nudges());
    }
    answer
}

/// Tests only.
fn fault_at(daemon: &Daemon, vm: &str, asked: Result<vm::Asked, vm::NoSuchFault>) -> Answer {
    match (asked, daemon.vms().get(vm)) {
        (Ok(asked), Some(handle)) => {
            handle.fault_at(asked);
            Answer::done("the fault happens there")
        }
        (Err(why), _) => Answer::refused(why.to_string()),
        (_, None) => Answer::refused(format!("there is no VM '{vm}' on this host")),
    }
}

fn here(daemon: &Daemon, request: &Request, each: &mut dyn FnMut(&Answer)) -> Answer {
    let (vm, command) = match request {
        Request::Down { vm, force: true, .. } => (vm, Command::ForceDown),
        Request::Down { vm, now, .. } => (vm, Command::Down { now: *now }),
        Request::Failover { vm } => (vm, Command::Failover),
        Request::Policy { vm, policy } => match policy.parse() {
            Ok(policy) => (vm, Command::Policy(policy)),
            Err(error) => return Answer::refused(format!("{error}")),
        },
        Request::Protect {
            vm,
            alone: true,
            from_disk,
            force_stale,
        } => (
            vm,
            Command::ProtectAlone {
                from_disk: *from_disk,
                force_stale: *force_stale,
            },
        ),
        Request::Protect { vm, .. } => (vm, Command::Protect),
        Request::VerifyDisk { vm, repair } => (vm, Command::VerifyDisk { repair: *repair }),
        Request::Inject { .. } if std::env::var_os("DUNLIN_FAULTS").is_none() => {
            return Answer::refused("this daemon takes no faults: it was started without DUNLIN_FAULTS=1");
        }
        Request::Inject { vm, disk, fault } => match (vm::FaultAt::asked(fault), fault.parse()) {
            (Some(asked), _) => return fault_at(daemon, vm, asked),
            (None, Ok(fault)) => (vm, Command::Inject { disk: *disk, fault }),
            (None, Err(why)) => return Answer::refused(why.to_string()),
        },
        _ => return Answer::refused("this host does not know that request"),
    };
    match daemon.sender(vm) {
        Some(to_loop) => vm::converse(&to_loop, command, each),
        None => Answer::refused(format!("there is no VM '{vm}' on host '{}'", daemon.host.name)),
    }
}
