//! The whole cluster at a glance, made of what its hosts say.
//!
//! **Decides**: who has which part in a VM, whether it is protected, and why not. **Flow**: [`Heard`] of each host -> [`overview`] -> the page and
//! the API. **Invariants**: 1. it says nothing that no host has said: of a host that is silent only its seat is known. 2. a VM that asks for
//! protection and has none has a reason, whatever its hosts say. **Not here**: asking the hosts (`board`), words for events (`meaning`).

use crate::config::Cluster;
use crate::control::{
    AnswerFigures, ComparedStatus, FailoverStatus, HostStatus, Member, Progress, Reasons, SyncFigures,
    VmStatus,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use utoipa::ToSchema;

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

/// All hosts and all VMs, as the host that was asked sees them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct Overview {
    /// The cluster's name.
    pub cluster: String,
    /// The host that was asked.
    pub host: String,
    /// Its hosts, in the order of cluster.toml.
    pub hosts: Vec<HostView>,
    /// Its VMs, by name.
    pub vms: Vec<VmView>,
}

/// One host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct HostView {
    /// Its name.
    pub name: String,
    /// Where it listens for the others.
    pub address: String,
    /// It has answered lately.
    pub reached: bool,
    /// Why it was not reached.
    pub problem: Option<String>,
    /// Its program's version; empty while it is not known.
    pub version: String,
    /// How its links to others are protected.
    pub links: String,
    /// In how many VMs' groups it is, and how many logs'.
    pub vms: usize,
    /// See `vms`.
    pub logs: usize,
    /// VMs that it runs as primary.
    pub serves: Vec<String>,
    /// What is to be said of its certificates.
    pub words: Vec<String>,
}

/// How well a VM is protected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// A second complete copy exists, as agreed.
    Protected,
    /// It was not asked for.
    NotAsked,
    /// A copy is on its way.
    Joining,
    /// It is asked for, and there is none.
    #[default]
    Unprotected,
    /// Nobody runs the VM.
    NotServed,
}

/// One VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct VmView {
    /// Its name.
    pub name: String,
    /// It is a bare program.
    pub program: bool,
    /// How it is replicated.
    pub policy: String,
    /// How well it is protected.
    pub protection: Protection,
    /// Why, in a sentence.
    pub why: String,
    /// What a person can do about it; empty if nothing.
    pub todo: String,
    /// The host that runs it.
    pub primary: Option<String>,
    /// The host with the second copy, or on its way to one.
    pub backup: Option<String>,
    /// The host that only agrees.
    pub witness: Option<String>,
    /// Its state, as its primary says, or who knows most.
    pub state: String,
    /// Its group.
    pub hosts: Vec<VmHost>,
    /// Long work under way.
    pub progress: Option<Progress>,
    /// The last take-over by its primary.
    pub failover: Option<FailoverStatus>,
    /// What its primary counts; nothing while none is heard.
    pub figures: Option<Figures>,
}

/// A host's part in a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct VmHost {
    /// The host.
    pub host: String,
    /// It can run the VM; else it only agrees.
    pub can_run: bool,
    /// `primary`, `backup`, `witness`, `none`, or `unknown` while it is not heard.
    pub role: String,
    /// Its own word for its state.
    pub state: String,
    /// The hosts that have a link with it in this VM's group, as far as they are heard.
    pub linked: Vec<String>,
}

/// What a primary counts of a VM. Rates are differences of two answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct Figures {
    /// The reign, and the running epoch.
    pub term: u64,
    /// See `term`.
    pub epoch: u64,
    /// Syncs, and those that were given up.
    pub syncs: u64,
    /// See `syncs`.
    pub aborted: u64,
    /// How often a protected VM did not get on.
    pub stalls: u64,
    /// Syncs by reason.
    pub reasons: Reasons,
    /// How the copies are kept now: `match`, `active` or `passive`.
    pub manner: String,
    /// Outputs of both copies, compared.
    pub compared: ComparedStatus,
    /// How long clients waited in the last second.
    pub answers: Option<AnswerFigures>,
    /// How long the VM stood still for all syncs, in microseconds.
    pub pause_us: u64,
    /// What all syncs sent.
    pub sent_bytes: u64,
    /// The medians of the last syncs.
    pub median: SyncFigures,
    /// Frames taken and let out, and those that wait.
    pub frames_in: u64,
    /// See `frames_in`.
    pub frames_out: u64,
    /// See `frames_in`.
    pub held_frames: u64,
    /// The fullest of its queues, in percent.
    pub fullest_queue_percent: u64,
    /// Disk writes that a peer may lack.
    pub dirty_disk_bytes: u64,
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
        .filter(|(_, vm)| vm.role == "primary")
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
        .find(|host| host.role == "backup")
        .or_else(|| {
            // One that is not heard, and of which the primary says that it has a copy.
            let other = |host: &&VmHost| host.can_run && host.role == "unknown" && host.host != best_host;
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
        failover: best.failover.clone(),
        figures: (best.role == "primary").then(|| figures(best)),
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
            || own.is_some_and(|vm| vm.role == "witness");
        VmHost {
            host: name.to_owned(),
            can_run: !is_witness,
            role: own.map_or("unknown", |vm| vm.role.as_str()).to_owned(),
            state: own.map(|vm| vm.state.clone()).unwrap_or_default(),
            linked: peers()
                .filter(|(_, peer)| peer.host == name && peer.connected)
                .map(|(host, _)| host.to_owned())
                .collect(),
        }
    };
    names.into_iter().map(of).collect()
}

fn figures(vm: &VmStatus) -> Figures {
    let percent = |queue: &crate::control::QueueFigures| 100 * queue.bytes / queue.limit_bytes.max(1);
    Figures {
        term: vm.term,
        epoch: vm.epoch,
        syncs: vm.sync.count,
        aborted: vm.sync.aborted,
        stalls: vm.stalls,
        reasons: vm.sync.reasons.clone(),
        manner: vm.sync.manner.clone(),
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
    let in_first_word = |word: &str| best.state.split(':').next() == Some(word);
    if view.primary.is_none() {
        let (reached, all) = (
            view.hosts.iter().filter(|host| host.role != "unknown").count(),
            view.hosts.len(),
        );
        return match leader {
            _ if in_first_word("stopped") => says(
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
                    "Bring its hosts back. If they are gone for good and you know that no copy runs there: 'dunlin protect --alone {name}' on the host that is left."
                ),
            ),
        };
    }
    if best.state.starts_with("restarting") {
        let why = sentence(&format!(
            "It has ended, and is begun again: {}",
            after_colon(&best.state)
        ));
        return says(
            Protection::NotServed,
            why,
            "The events below say how it ended, and when it is begun again.",
        );
    }
    if best.state.starts_with("failed") {
        let why = sentence(&format!(
            "It has failed on its primary: {}",
            after_colon(&best.state)
        ));
        return says(
            Protection::NotServed,
            why,
            "The events below say what came before it.",
        );
    }
    if in_first_word("no-majority") {
        return says(
            Protection::Unprotected,
            "Its primary reaches no majority of its hosts: it takes no input and lets nothing out, so that no two copies ever speak.".to_owned(),
            "Bring one of its other hosts back.",
        );
    }
    if !best.wants_protection {
        return match in_first_word("protection-paused") {
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
        return match best.state.strip_prefix("stalled") {
            Some(_) => says(
                Protection::Protected,
                format!(
                    "{why} It does not get on just now ({}).",
                    after_colon(&best.state)
                ),
                "",
            ),
            None => says(Protection::Protected, why, ""),
        };
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
    if best.state == "joining" {
        return says(Protection::Joining, "A second copy is being made.".to_owned(), "");
    }
    if best.state == "starting" {
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

fn after_colon(state: &str) -> &str {
    state.split_once(':').map_or(state, |(_, rest)| rest.trim())
}

fn sentence(text: &str) -> String {
    match text.ends_with(['.', '!', '?']) {
        true => text.to_owned(),
        false => format!("{text}."),
    }
}

#[cfg(test)]
mod tests;
