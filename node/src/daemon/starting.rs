//! Starts a VM, or a bare program, on the hosts of its group.
//!
//! * **Decides:** whether all of them can take part; on which one it begins (`last_life`). Nothing is started if one cannot.
//! * **Flow:** `dunlin up` asks one daemon ([`up`]) -> all hosts are asked ([`prepare`]), and what they remember of its disks ([`last_life`]) ->
//!   each is given the file ([`install`]); what came to nothing is taken back ([`undo`]).
//! * **Not here:** a host that comes to a group which runs already (`moving`); who keeps a name for which call (`reservations`).

use super::last_life::{self, Begin};
use super::requests::from_peer;
use super::{Daemon, peers, program, reservations, store};
use crate::config::{ProgramSpec, VmConfig};
use crate::control::server::NOT_UNDERSTOOD;
use crate::vm;
use crate::vm::disks;
use crate::vm::event::Command;
use dunlin_api::{Answer, LastLife, Request, Ticket};
use dunlin_core::agreed::Part;
use dunlin_guest::FirmwareKind;
use dunlin_guest::disk::DiskFormat;
use dunlin_guest::probe;
use std::path::PathBuf;
use std::time::Instant;

/// Starts a VM on its group: all hosts are asked first, and nothing is started if one refuses.
///
/// Each host that is asked keeps the name for this call. They are asked in the order of their names, so that of two calls at
/// once, wherever they are made, one gets all of them.
///
/// It boots where its disks are the newest, or on `from`, whatever others have.
pub fn up(daemon: &Daemon, text: &str, origin: &str, from: Option<&str>) -> Answer {
    let config = VmConfig::parse(text, origin, &daemon.host.cluster);
    let config = match config.and_then(|config| config.with_whole_paths(origin)) {
        Ok(config) => config,
        Err(error) => return Answer::refused(error.to_string()),
    };
    if let Some(from) = from
        && !config.members().any(|host| host == from)
    {
        let hosts: Vec<&str> = config.members().collect();
        return Answer::refused(format!(
            "--from {from}: the hosts that can have the disks of {} '{}' are {}",
            config.noun(),
            config.name,
            hosts.join(", ")
        ));
    }
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
    let mut members: Vec<(&str, LastLife)> = Vec::new();
    let mut knows_lives: Vec<&str> = Vec::new();
    for host in config.members() {
        match on(host, Request::LastLife { text: text.into() }) {
            Answer::LastLife(last) => {
                knows_lives.push(host);
                members.push((host, last));
            }
            Answer::Failed { why, .. } if why.contains(NOT_UNDERSTOOD) => {
                members.push((host, LastLife::default()));
            }
            // What it remembers may be the newest.
            Answer::Failed { why, code } => {
                undo_all();
                return Answer::Failed { why, code };
            }
            _ => members.push((host, LastLife::default())),
        }
    }
    let begin = match (from, last_life::judge(&members)) {
        (Some(from), _) => Begin::On(from),
        (None, begin) => begin,
    };
    let (text, first) = match begin {
        Begin::AsListed => (text.to_owned(), hosts[0]),
        Begin::On(host) => match config.begun_on(host) {
            Ok(text) => (text, host),
            Err(error) => {
                undo_all();
                return Answer::refused(error.to_string());
            }
        },
        Begin::Unclear { first, newest, why } => {
            undo_all();
            let (vm, origin, first) = (config.name.clone(), origin.to_owned(), first.to_owned());
            let unclear = match first == newest {
                true => UnclearDisks::Torn {
                    vm,
                    origin,
                    first,
                    why,
                },
                false => UnclearDisks::Newer {
                    vm,
                    origin,
                    first,
                    newest: newest.to_owned(),
                    why,
                },
            };
            return Answer::refused(unclear.to_string());
        }
    };
    let life = members
        .iter()
        .filter_map(|(_, last)| last.number)
        .max()
        .map_or(1, |number| number.saturating_add(1));
    for host in &hosts {
        let request = Request::Install {
            text: text.clone(),
            newcomer: false,
            life: if knows_lives.contains(host) { life } else { 0 },
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
    let newer = match first == hosts[0] || from.is_some() {
        true => "",
        false => ", whose disks are the newest",
    };
    Answer::done(format!(
        "{} '{}' is being started on host '{first}'{newer}",
        config.noun(),
        config.name,
    ))
}

/// Whose disks count a person has to say.
#[derive(Debug, thiserror::Error)]
enum UnclearDisks {
    /// The first host's may be half a copy.
    #[error(
        "it is not clear whether the disks of VM '{vm}' on host '{first}' are whole: {why}; say whose count: 'dunlin up {origin} --from {first}', or \
         '--from' another host'"
    )]
    Torn {
        vm: String,
        origin: String,
        first: String,
        why: &'static str,
    },
    /// Another host's may be newer.
    #[error(
        "host '{newest}' may have newer disks of VM '{vm}' than host '{first}', which would begin; whose count is not clear: {why}; say whose: 'dunlin \
         up {origin} --from {newest}', or '--from {first}'"
    )]
    Newer {
        vm: String,
        origin: String,
        first: String,
        newest: String,
        why: &'static str,
    },
}

/// What a VM has left on the images that this file names, when it ended here.
pub fn last_life(daemon: &Daemon, text: &str) -> Answer {
    match VmConfig::parse(text, "the VM's file", &daemon.host.cluster) {
        Ok(config) if config.program.is_none() => {
            let images: Vec<PathBuf> = config.spec.disks.iter().map(|disk| disk.path.clone()).collect();
            Answer::LastLife(last_life::of(&daemon.host.state, &images))
        }
        Ok(_) => Answer::LastLife(LastLife::default()),
        Err(error) => Answer::refused(error.to_string()),
    }
}

/// What a host is asked for besides the VM's file.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// What both hosts have to have the same of.
    pub runs_by: &'a str,
    /// Of a program that runs already: its copy is to come here while it does.
    pub newcomer: bool,
}

/// Whether this host could take part; then the name is kept for whoever asked.
pub fn prepare(daemon: &Daemon, text: &str, origin: &str, asked: Asked<'_>, ticket: Ticket) -> Answer {
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

pub fn install(daemon: &Daemon, text: &str, life: u64, newcomer: bool, ticket: Ticket) -> Answer {
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
    let kept = store::keep(&daemon.host.state, &name, text, life, newcomer);
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
pub fn undo(daemon: &Daemon, vm: &str, ticket: Ticket) -> Answer {
    let was_started = daemon.reservations().give_back(vm, ticket);
    match daemon.sender(vm).filter(|_| was_started) {
        Some(to_loop) => vm::command(&to_loop, Command::Remove),
        None => Answer::done("nothing to undo"),
    }
}
