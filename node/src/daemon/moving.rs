//! A host in the place of another one, asked of the host that serves the VM: a new machine of the same name, or a host of another name.
//!
//! Flow: the new host says that it can take part -> the group goes on without the old one, and knows the new one (`vm::replacing`) -> the new
//! host is told, as a newcomer -> the VM's loop brings it in, as any host that comes back.
//!
//! A standby is only asked whether it could, and named by the group ([`standby`]).
//!
//! Invariants: 1. nothing is changed before the new host has said that it is there and can take part. 2. said again after it broke off in the middle,
//! it goes on where it was.

use super::{Daemon, peers, program, reservations, store};
use crate::config::VmConfig;
use crate::vm;
use crate::vm::event::Command;
use dunlin_api::{Answer, Request, Ticket};
use dunlin_core::agreed::Part;
use dunlin_core::consensus::Member;

/// A new machine in the place of a dead one of that name.
pub fn replace(daemon: &Daemon, vm: &str, host: &str) -> Answer {
    let changes = daemon.changing.of(vm);
    let _one_at_a_time = changes.lock();
    let config = match config(daemon, vm) {
        Ok(config) => config,
        Err(answer) => return answer,
    };
    let Some(member) = config.member(host) else {
        return Answer::refused(format!(
            "host '{host}' has no part in VM '{vm}'; 'dunlin move' gives it one"
        ));
    };
    bring_in(daemon, host, &config, Command::RemoveMember(member.id))
}

/// A host without a part gets that of the backup's host, or of the witness.
pub fn to(daemon: &Daemon, vm: &str, host: &str, witness: bool, unprotected_meanwhile: bool) -> Answer {
    let changes = daemon.changing.of(vm);
    let _one_at_a_time = changes.lock();
    let config = match config(daemon, vm) {
        Ok(config) => config,
        Err(answer) => return answer,
    };
    let part = if witness { "witness" } else { "backup" };
    if let Some(Member {
        id, witness: is_one, ..
    }) = config.member(host)
    {
        if host == daemon.host.name || is_one != witness {
            return Answer::refused(format!("host '{host}' has another part in VM '{vm}' already"));
        }
        let status = daemon.vms().get(vm).map(vm::VmHandle::status);
        let peers = status.map(|status| status.peers).unwrap_or_default();
        if peers.iter().any(|peer| peer.host == host && peer.connected) {
            return Answer::refused(format!("host '{host}' is the {part} of VM '{vm}' already"));
        }
        // Invariant 2: it was named, and did not take the VM.
        return bring_in(daemon, host, &config, Command::RemoveMember(id));
    }
    let leaves = config
        .group
        .iter()
        .find(|one| one.member.witness == witness && one.name != daemon.host.name);
    let Some(leaves) = leaves else {
        return Answer::refused(format!("VM '{vm}' has no {part}"));
    };
    let moved = config.moved(&leaves.name, host, &daemon.host.cluster);
    let with_hosts = moved.map_err(|error| error.to_string()).and_then(|hosts| {
        let moved = config.with_hosts(&hosts, &daemon.host.cluster);
        Ok((hosts, moved.map_err(|error| error.to_string())?))
    });
    match with_hosts {
        Ok((hosts, moved)) => {
            let order = Command::Move {
                leaves: leaves.member.id,
                hosts,
                unprotected_meanwhile,
            };
            bring_in(daemon, host, &moved, order)
        }
        Err(why) => Answer::refused(why),
    }
}

/// That host, which has no part, is the VM's standby from now on, or none is.
pub fn standby(daemon: &Daemon, vm: &str, host: Option<&str>) -> Answer {
    let changes = daemon.changing.of(vm);
    let _one_at_a_time = changes.lock();
    let config = match config(daemon, vm) {
        Ok(config) => config,
        Err(answer) => return answer,
    };
    if config.standby_host() == host {
        return Answer::done(match host {
            Some(host) => format!("host '{host}' is the standby of VM '{vm}' already"),
            None => format!("VM '{vm}' has no standby"),
        });
    }
    let named = config.with_standby(host, &daemon.host.cluster);
    let named = named.map_err(|error| error.to_string()).and_then(|hosts| {
        let named = config.with_hosts(&hosts, &daemon.host.cluster);
        Ok((hosts, named.map_err(|error| error.to_string())?))
    });
    let (hosts, named) = match named {
        Ok(named) => named,
        Err(why) => return Answer::refused(why),
    };
    let Some(to_loop) = daemon.sender(vm) else {
        return Answer::refused(format!("there is no VM '{vm}' here any more"));
    };
    // Invariant 1.
    if let Some(host) = host {
        let ticket = match could_take_part(daemon, host, &named) {
            Ok(ticket) => ticket,
            Err(answer) => return answer,
        };
        // Nothing is kept there until it has to.
        let vm = vm.to_owned();
        let _ = peers::ask(daemon, host, &Request::Undo { vm, ticket });
    }
    match vm::command(&to_loop, Command::Standby(hosts)) {
        Answer::Failed { why, code } => Answer::Failed { why, code },
        _ => Answer::done(match host {
            Some(host) => format!("host '{host}' is the standby of VM '{vm}'"),
            None => format!("VM '{vm}' has no standby any more"),
        }),
    }
}

/// The VM as its loop here has it.
fn config(daemon: &Daemon, vm: &str) -> Result<VmConfig, Answer> {
    let config = daemon.vms().get(vm).map(vm::VmHandle::config);
    let config = config
        .ok_or_else(|| Answer::refused(format!("there is no VM '{vm}' on host '{}'", daemon.host.name)))?;
    Ok(VmConfig::clone(&config))
}

/// `config` is the VM's once `order` is carried out.
fn bring_in(daemon: &Daemon, host: &str, config: &VmConfig, order: Command) -> Answer {
    let Some(to_loop) = daemon.sender(&config.name) else {
        return Answer::refused(format!("there is no VM '{}' here any more", config.name));
    };
    // Invariant 1.
    let ticket = match could_take_part(daemon, host, config) {
        Ok(ticket) => ticket,
        Err(answer) => return answer,
    };
    if let Answer::Failed { why, code } = vm::command(&to_loop, order) {
        let vm = config.name.clone();
        // One that does not hear of it gives the name free after a while.
        let _ = peers::ask(daemon, host, &Request::Undo { vm, ticket });
        return Answer::Failed { why, code };
    }
    let knows_lives = matches!(
        peers::ask(
            daemon,
            host,
            &Request::LastLife {
                text: config.text.to_string()
            }
        ),
        Answer::LastLife(_)
    );
    let request = Request::Install {
        text: config.text.to_string(),
        newcomer: true,
        life: if knows_lives {
            store::life(&daemon.host.state, &config.name)
        } else {
            0
        },
        ticket,
    };
    match peers::ask(daemon, host, &request) {
        Answer::Failed { why, code } => Answer::Failed {
            why: format!(
                "the group goes on without host '{host}', which did not take the VM; say it again: {why}"
            ),
            code,
        },
        _ => Answer::done(format!("host '{host}' is brought in")),
    }
}

/// Asks a host; it keeps the VM's name free for whoever has this ticket.
fn could_take_part(daemon: &Daemon, host: &str, config: &VmConfig) -> Result<Ticket, Answer> {
    let runs_by = program::runs_by(config);
    let qemu_version = runs_by.map_err(|why| Answer::failed(why.to_string()))?;
    if config.program.is_some() && config.wanted_of(host) != Part::Witness {
        // Here it is copied from.
        let can = program::can_be_copied();
        can.map_err(|why| Answer::refused(format!("host '{}': {why}", daemon.host.name)))?;
    }
    let ticket = reservations::draw().map_err(|why| Answer::failed(why.to_string()))?;
    let request = Request::Prepare {
        text: config.text.to_string(),
        origin: format!("{} '{}'", config.noun(), config.name),
        qemu_version,
        newcomer: config.program.is_some(),
        ticket,
    };
    match peers::ask(daemon, host, &request) {
        Answer::Failed { why, code } => Err(Answer::Failed { why, code }),
        _ => Ok(ticket),
    }
}
