//! The whole cluster at a glance, made of what its hosts say.
//!
//! **Decides**: who has which part in a VM, whether it is protected, and why not. **Flow**: [`Heard`] of each host -> [`overview`] -> the page and
//! the API. **Invariants**: 1. it says nothing that no host has said: of a host that is silent only its seat is known. 2. a VM that asks for
//! protection and has none has a reason, whatever its hosts say. **Not here**: asking the hosts (`board`), words for events (`meaning`).

use crate::config::Cluster;
use dunlin_api::{
    Figures, HostStatus, HostView, Member, Overview, Protection, Role, State, VmHost, VmStatus, VmView,
};
use std::collections::{BTreeMap, BTreeSet};

/// What is known of a host.
#[derive(Debug, Clone, Default)]
pub struct Heard {
    /// What it said last, if that was not long ago.
    pub status: Option<HostStatus>,
    /// The same of the host itself.
    pub member: Option<Member>,
    /// Why it was not reached, when it was asked last.
    pub problem: Option<String>,
}

/// What the hosts of `cluster` have said, seen together from `here`.
pub fn overview(cluster: &Cluster, here: &str, heard: &BTreeMap<String, Heard>) -> Overview {
    let statuses: BTreeMap<&str, &HostStatus> = heard
        .iter()
        .filter_map(|(name, heard)| Some((name.as_str(), heard.status.as_ref()?)))
        .collect();
    let hosts = cluster.hosts.iter();
    let hosts = hosts.map(|host| {
        let heard = heard.get(&host.name).cloned().unwrap_or_default();
        HostView {
            address: host.address.to_string(),
            ..host_view(&host.name, heard)
        }
    });
    let names: BTreeSet<&str> = statuses
        .values()
        .flat_map(|status| status.vms.iter().map(|vm| vm.name.as_str()))
        .collect();
    Overview {
        cluster: cluster.name.clone(),
        host: here.to_owned(),
        hosts: hosts.collect(),
        vms: names.into_iter().map(|name| vm_view(name, &statuses)).collect(),
    }
}

fn host_view(name: &str, heard: Heard) -> HostView {
    let member = heard.member.unwrap_or_default();
    let status = heard.status.as_ref();
    HostView {
        name: name.to_owned(),
        address: String::new(),
        reached: status.is_some(),
        problem: heard.problem,
        version: member.version,
        links: status.map(|status| status.links.clone()).unwrap_or_default(),
        vms: status.map_or(0, |status| status.vms.len()),
        logs: status.map_or(0, |status| status.logs.len()),
        serves: member.serves,
        words: member.words,
    }
}

fn vm_view(name: &str, statuses: &BTreeMap<&str, &HostStatus>) -> VmView {
    let said: BTreeMap<&str, &VmStatus> = statuses
        .iter()
        .filter_map(|(host, status)| Some((*host, status.vms.iter().find(|vm| vm.name == name)?)))
        .collect();
    let primary = said
        .iter()
        .filter(|(_, vm)| vm.role == Role::Primary)
        .max_by_key(|(_, vm)| vm.term);
    // Who runs it knows most; else who has heard of the newest reign.
    let best = primary.or_else(|| said.iter().max_by_key(|(_, vm)| (vm.term, vm.committed)));
    let Some((best_host, best)) = best.map(|(host, vm)| (*host, *vm)) else {
        return VmView::default();
    };
    let hosts = group(&said);
    let primary = primary.map(|(host, _)| (*host).to_owned());
    let backup = hosts
        .iter()
        .find(|host| host.role == Role::Backup)
        .or_else(|| {
            // One that is not heard, and of which the primary says that it has a copy.
            let other = |host: &&VmHost| host.can_run && host.role == Role::Unknown && host.host != best_host;
            hosts.iter().find(other).filter(|_| best.protected)
        })
        .map(|host| host.host.clone());
    let witness = hosts
        .iter()
        .find(|host| !host.can_run)
        .map(|host| host.host.clone());
    let mut view = VmView {
        name: name.to_owned(),
        program: best.program.is_some(),
        policy: best.policy.clone(),
        primary,
        backup,
        witness,
        state: best.state.clone(),
        progress: best.progress.clone(),
        failover: best.failover,
        figures: (best.role == Role::Primary).then(|| figures(best)),
        hosts,
        ..VmView::default()
    };
    let heard_of_leader = best.leader.as_deref();
    (view.protection, view.why, view.todo) = protection(&view, best, heard_of_leader);
    view
}

/// Each host of the group, whether it is heard or only heard of.
fn group(said: &BTreeMap<&str, &VmStatus>) -> Vec<VmHost> {
    let mut names: BTreeSet<&str> = said.keys().copied().collect();
    let peers = || {
        said.iter()
            .flat_map(|(host, vm)| vm.peers.iter().map(move |peer| (*host, peer)))
    };
    names.extend(peers().map(|(_, peer)| peer.host.as_str()));
    let of = |name: &str| {
        let own = said.get(name);
        let is_witness = peers().any(|(_, peer)| peer.host == name && peer.witness)
            || own.is_some_and(|vm| vm.role == Role::Witness);
        VmHost {
            host: name.to_owned(),
            can_run: !is_witness,
            role: own.map_or(Role::Unknown, |vm| vm.role.clone()),
            state: own.map(|vm| vm.state.clone()),
            linked: peers()
                .filter(|(_, peer)| peer.host == name && peer.connected)
                .map(|(host, _)| host.to_owned())
                .collect(),
        }
    };
    names.into_iter().map(of).collect()
}

fn figures(vm: &VmStatus) -> Figures {
    let percent = |queue: &dunlin_api::QueueFigures| 100 * queue.bytes / queue.limit_bytes.max(1);
    Figures {
        term: vm.term,
        epoch: vm.epoch,
        syncs: vm.sync.count,
        aborted: vm.sync.aborted,
        stalls: vm.stalls,
        reasons: vm.sync.reasons.clone(),
        mode: vm.sync.mode.clone(),
        compared: vm.sync.compared,
        answers: vm.answers,
        pause_us: vm.sync.sum.pause_us,
        sent_bytes: vm.sync.sum.bytes + vm.sync.sum.device_bytes,
        median: vm.sync.median.clone(),
        frames_in: vm.frames_in,
        frames_out: vm.frames_out,
        held_frames: vm.held_frames as u64,
        fullest_queue_percent: vm.queues.iter().map(percent).max().unwrap_or(0),
        dirty_disk_bytes: vm.disks.iter().map(|disk| disk.dirty_bytes).sum(),
    }
}

/// How well it is protected, why, and what to do.
fn protection(view: &VmView, best: &VmStatus, leader: Option<&str>) -> (Protection, String, String) {
    let name = &view.name;
    let says = |level, why: String, todo: &str| (level, why, todo.to_owned());
    if view.primary.is_none() {
        let (reached, all) = (
            view.hosts
                .iter()
                .filter(|host| host.role != Role::Unknown)
                .count(),
            view.hosts.len(),
        );
        return match leader {
            _ if best.state == State::Stopped => says(
                Protection::NotServed,
                "It is shut down.".to_owned(),
                &format!("'dunlin up' starts it again; 'dunlin down {name}' ends what is left of it."),
            ),
            // It has not heard that the leader is gone, or the leader is out of this host's sight only.
            Some(host) => says(
                Protection::NotServed,
                format!("Host {host} leads its group, and does not say how the VM is."),
                "It takes over within a second where a majority of its hosts is there.",
            ),
            None => says(
                Protection::NotServed,
                format!(
                    "Nobody leads its group: {reached} of its {all} hosts answer, and it takes more than half of them."
                ),
                &format!(
                    "Bring its hosts back. If they are gone for good and you know that no copy runs there: 'dunlin promote --force {name}' on the host that is left."
                ),
            ),
        };
    }
    if best.state == State::Restarting {
        let why = sentence(&format!("It has ended, and is begun again: {}", best.why));
        return says(
            Protection::NotServed,
            why,
            "The events below say how it ended, and when it is begun again.",
        );
    }
    if best.state == State::Failed {
        let why = sentence(&format!("It has failed on its primary: {}", best.why));
        return says(
            Protection::NotServed,
            why,
            "The events below say what came before it.",
        );
    }
    if best.state == State::QuorumLost {
        return says(
            Protection::Unprotected,
            "Its primary reaches no majority of its hosts: it takes no input and lets nothing out, so that no two copies ever speak.".to_owned(),
            "Bring one of its other hosts back.",
        );
    }
    if !best.wants_protection {
        return match best.state == State::ProtectionPaused {
            true => says(
                Protection::NotAsked,
                "Protection is paused: it was asked to run alone.".to_owned(),
                "'dunlin policy' with another one than 'none' brings a backup in again.",
            ),
            false => says(
                Protection::NotAsked,
                "Its policy asks for no second copy.".to_owned(),
                "",
            ),
        };
    }
    if best.protected {
        let backup = view.backup.as_deref().unwrap_or("another host");
        let why = format!("Host {backup} holds a complete second copy, as its hosts have agreed.");
        let why = match best.state {
            State::Stalled => format!("{why} It does not get on just now ({}).", best.why),
            _ => why,
        };
        return says(Protection::Protected, why, "");
    }
    unprotected(view, best)
}

fn unprotected(view: &VmView, best: &VmStatus) -> (Protection, String, String) {
    let says = |level, why: String, todo: &str| (level, why, todo.to_owned());
    if let Some(progress) = &best.progress {
        let percent = 100 * progress.done.min(progress.total) / progress.total.max(1);
        let why = format!("A second copy is being made: {}, {percent} %.", progress.what);
        return says(Protection::Joining, why, "");
    }
    if let Some(problem) = &best.join_problem {
        let todo = match problem.passes {
            true => "It is tried again by itself.",
            false => "Mend that; it is tried again by itself, and at once by 'protect'.",
        };
        let why = format!("No backup joins: {}", sentence(&problem.why));
        return says(Protection::Unprotected, why, todo);
    }
    if best.state == State::Joining {
        return says(Protection::Joining, "A second copy is being made.".to_owned(), "");
    }
    if best.state == State::Starting {
        return says(Protection::Joining, "It is being started.".to_owned(), "");
    }
    let others = view.hosts.iter();
    let mut others = others.filter(|host| host.can_run && Some(&host.host) != view.primary.as_ref());
    match others.next() {
        Some(other) => {
            let is_linked = best
                .peers
                .iter()
                .any(|peer| peer.host == other.host && peer.connected);
            match is_linked {
                true => says(
                    Protection::Unprotected,
                    format!(
                        "Host {} is there, and has no copy yet; one is looked for.",
                        other.host
                    ),
                    "",
                ),
                false => says(
                    Protection::Unprotected,
                    format!("Host {} is not reached by its primary.", other.host),
                    &format!("Bring host {} back; a copy is made there by itself.", other.host),
                ),
            }
        }
        None => says(
            Protection::Unprotected,
            "No other host can run it.".to_owned(),
            "Name a second host in its file.",
        ),
    }
}

fn sentence(text: &str) -> String {
    match text.ends_with(['.', '!', '?']) {
        true => text.to_owned(),
        false => format!("{text}."),
    }
}

#[cfg(test)]
mod tests;
