//! What people ask of a daemon, and other daemons in their name.

use super::error::by_control_alone;
use super::telling::{last_events, status};
use super::{Daemon, examine, members, moving, peers, program, renewal, reservations, store};
use crate::config::{ProgramSpec, VmConfig};
use crate::control::server::AnswerTo;
use crate::vm;
use crate::vm::disks;
use crate::vm::event::Command;
use dunlin_api::{Answer, Request, Ticket};
use dunlin_core::agreed::Part;
use dunlin_guest::FirmwareKind;
use dunlin_guest::disk::DiskFormat;
use dunlin_guest::probe;
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
        Request::Up { text, origin } => up(daemon, &text, &origin),
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
            prepare(daemon, &text, &origin, asked, ticket)
        }
        Request::Install {
            text,
            newcomer,
            ticket,
        } => install(daemon, &text, newcomer, ticket),
        Request::Undo { vm, ticket } => undo(daemon, &vm, ticket),
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

/// Starts a VM on its group: all hosts are asked first, and nothing is started if one refuses.
///
/// Each host that is asked keeps the name for this call. They are asked in the order of their names, so that of two calls at
/// once, wherever they are made, one gets all of them.
pub fn up(daemon: &Daemon, text: &str, origin: &str) -> Answer {
    let config = VmConfig::parse(text, origin, &daemon.host.cluster);
    let config = match config.and_then(|config| config.with_whole_paths(origin)) {
        Ok(config) => config,
        Err(error) => return Answer::refused(error.to_string()),
    };
    let changes = daemon.changing.of(&config.name);
    let _one_at_a_time = changes.lock();
    let qemu_version = match program::runs_by(&config) {
        Ok(version) => version,
        Err(why) => return Answer::refused(format!("{origin}: {why}")),
    };
    let ticket = match reservations::draw() {
        Ok(ticket) => ticket,
        Err(why) => return Answer::failed(why.to_string()),
    };
    let hosts: Vec<&str> = config.group.iter().map(|host| host.name.as_str()).collect();
    let mut by_name: Vec<&str> = hosts.iter().copied().chain(config.standby_host()).collect();
    by_name.sort_unstable();
    let on = |host: &str, request: Request| {
        if host == daemon.host.name {
            from_peer(daemon, request, &mut |_| {})
        } else {
            peers::ask(daemon, host, &request)
        }
    };
    let undo_all = || {
        for host in &by_name {
            let vm = config.name.clone();
            // What cannot be reached now has nothing to run either, since it needs a majority; and the name is free again
            // after a while.
            let _ = on(host, Request::Undo { vm, ticket });
        }
    };
    for host in &by_name {
        let request = Request::Prepare {
            text: text.into(),
            origin: origin.into(),
            qemu_version: qemu_version.clone(),
            // A running program is copied to it.
            newcomer: config.program.is_some() && config.standby_host() == Some(host),
            ticket,
        };
        if let Answer::Failed { why, .. } = on(host, request) {
            undo_all();
            return Answer::refused(why);
        }
    }
    for host in &hosts {
        let request = Request::Install {
            text: text.into(),
            newcomer: false,
            ticket,
        };
        if let Answer::Failed { why, code } = on(host, request) {
            undo_all();
            return Answer::Failed {
                why: format!("nothing was started: {why}"),
                code,
            };
        }
    }
    if let Some(standby) = config.standby_host() {
        // It was asked whether it could; nothing is kept there until it has to.
        let vm = config.name.clone();
        let _ = on(standby, Request::Undo { vm, ticket });
    }
    Answer::done(format!(
        "{} '{}' is being started on host '{}'",
        if config.program.is_some() { "program" } else { "VM" },
        config.name,
        hosts[0]
    ))
}

/// What a host is asked for besides the VM's file.
#[derive(Clone, Copy)]
struct Asked<'a> {
    /// What both hosts have to have the same of.
    runs_by: &'a str,
    /// Of a program that runs already: its copy is to come here while it does.
    newcomer: bool,
}

/// Whether this host could take part; then the name is kept for whoever asked.
fn prepare(daemon: &Daemon, text: &str, origin: &str, asked: Asked<'_>, ticket: Ticket) -> Answer {
    let config = match VmConfig::parse(text, origin, &daemon.host.cluster) {
        Ok(config) => config,
        Err(error) => return Answer::refused(error.to_string()),
    };
    let vm = &config.name;
    if !daemon.reservations().reserve(vm, ticket, Instant::now()) {
        return Answer::refused(format!(
            "another 'dunlin up' is starting VM '{vm}' just now; 'dunlin status' shows what becomes of it"
        ));
    }
    let answer = could_take_part(daemon, &config, asked);
    if matches!(answer, Answer::Failed { .. }) {
        daemon.reservations().give_back(vm, ticket);
    }
    answer
}

fn could_take_part(daemon: &Daemon, config: &VmConfig, asked: Asked<'_>) -> Answer {
    let name = &daemon.host.name;
    let wanted = config.wanted_of(name);
    if wanted == Part::Gone {
        return Answer::refused(format!("host '{name}' has no part in VM '{}'", config.name));
    }
    if daemon.vms().contains_key(&config.name) {
        return Answer::refused(format!(
            "VM '{}' is on host '{name}' already; 'dunlin down' ends it",
            config.name
        ));
    }
    // Not running, and not forgotten: what it holds is not this call's to write over, nor to remove.
    if store::text(&daemon.host.state, &config.name).is_ok() {
        return Answer::refused(format!(
            "host '{name}' keeps a VM '{}' that it does not run ('dunlin events' there says why): mend that and start its daemon \
             again, or remove {}",
            config.name,
            store::folder(&daemon.host.state, &config.name).display()
        ));
    }
    if wanted == Part::Witness {
        return Answer::done("ready");
    }
    if let Some(spec) = &config.program {
        return could_run_program(name, config, spec, asked);
    }
    match probe::qemu_version(&config.spec) {
        Ok(version) if version == asked.runs_by => {}
        Ok(version) => {
            return Answer::refused(format!(
                "host '{name}' has QEMU {version}, another one has {}: install the same on all hosts",
                asked.runs_by
            ));
        }
        Err(why) => return Answer::refused(format!("host '{name}': {why}")),
    }
    for disk in &config.spec.disks {
        if let Err(why) = dunlin_guest::disk::check(&disk.path, disk.format) {
            return Answer::refused(format!("host '{name}': {why}"));
        }
    }
    let variables = disks::variables(&daemon.host.state, &config.name);
    if config.spec.firmware == FirmwareKind::Uefi
        && variables.exists()
        && let Err(why) = dunlin_guest::disk::check(&variables, DiskFormat::Raw)
    {
        return Answer::refused(format!("host '{name}': the UEFI's variables: {why}"));
    }
    let held = &daemon.host.held_memory;
    for finding in probe::host(&config.spec, held.bytes()) {
        if !finding.ok {
            return Answer::refused(format!("host '{name}': {}: {}", finding.what, finding.mend));
        }
    }
    let needed_bytes = probe::memory_needed_bytes(&config.spec);
    held.make_room(&config.name, needed_bytes, probe::memory_available_bytes);
    Answer::done("ready")
}

fn could_run_program(name: &str, config: &VmConfig, spec: &ProgramSpec, asked: Asked<'_>) -> Answer {
    for (what, mend) in program::findings(config, spec, false) {
        if !mend.is_empty() {
            return Answer::refused(format!("host '{name}': {what}: {mend}"));
        }
    }
    if asked.newcomer
        && let Err(why) = program::can_be_copied()
    {
        return Answer::refused(format!("host '{name}': {why}"));
    }
    match program::executable(spec) {
        Ok(here) if here == asked.runs_by => Answer::done("ready"),
        Ok(_) => Answer::refused(format!(
            "host '{name}' has another {} than the host that was asked: install the same on all hosts",
            spec.command[0]
        )),
        Err(why) => Answer::refused(format!("host '{name}': {why}")),
    }
}

fn install(daemon: &Daemon, text: &str, newcomer: bool, ticket: Ticket) -> Answer {
    let config = match VmConfig::parse(text, "the VM's file", &daemon.host.cluster) {
        Ok(config) => config,
        Err(error) => return Answer::refused(error.to_string()),
    };
    let (name, host) = (config.name.clone(), &daemon.host.name);
    if !daemon.reservations().renew(&name, ticket, Instant::now()) {
        return Answer::refused(format!(
            "host '{host}' does not keep the name '{name}' for this call any more: it took too long; say it again"
        ));
    }
    let kept = store::keep(&daemon.host.state, &name, text, newcomer);
    let begun = kept
        .map_err(|error| format!("its state folder: {error}"))
        .and_then(|()| daemon.start_vm(config).map_err(|why| why.to_string()));
    match begun {
        Ok(()) if daemon.reservations().started(&name, ticket) => Answer::done("started"),
        // That call has given up on this host, which took long, or the VM has ended meanwhile: nobody wants it here.
        Ok(()) => {
            if let Some(to_loop) = daemon.sender(&name) {
                vm::command(&to_loop, Command::Remove);
            }
            Answer::failed(format!(
                "host '{host}': '{name}' was taken back while it was started"
            ))
        }
        Err(why) => {
            // Not kept either, as far as the disk lets us. The folder is this call's: the name was reserved, and free.
            let _ = store::forget(&daemon.host.state, &name);
            daemon.reservations().give_back(&name, ticket);
            Answer::failed(format!("host '{host}': {why}"))
        }
    }
}

/// A start came to nothing elsewhere: what that call made here is taken back, and nothing else.
fn undo(daemon: &Daemon, vm: &str, ticket: Ticket) -> Answer {
    let was_started = daemon.reservations().give_back(vm, ticket);
    match daemon.sender(vm).filter(|_| was_started) {
        Some(to_loop) => vm::command(&to_loop, Command::Remove),
        None => Answer::done("nothing to undo"),
    }
}
