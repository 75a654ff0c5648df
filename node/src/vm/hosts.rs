//! Who has a part in a VM's group: follows the list that is agreed, and lets hosts go that are not in it any more.
//!
//! Flow: an agreed `Hosts`, or a snapshot with one -> [`VmLoop::follow_hosts`]: the configuration, the links, the VM's file on this host -> who
//! leads tells each host that is gone, until that host has heard it -> there: [`VmLoop::was_left`].
//!
//! Invariants:
//! 1. A list is followed once, and no older one after it (`config::hosts`, invariant 2).
//! 2. A host takes its copy away only for a list that is agreed, and newer than its own. One that was given a part anew has a newer number.
//! 3. Until the file is written (`keeper`) a restart of this host begins with the old list, and reads the new one from the group.
//!
//! Not here: how such a list comes about (`primary::replacing`), who votes (consensus' own `Members`).

use super::connect::ask_host;
use super::event::LoopEvent;
use super::group::{self, TOLD};
use super::keeper::Keeper;
use super::state::VmLoop;
use crate::config::{VmConfig, newest};
use dunlin_api::{Answer, EventKind, Request};
use dunlin_core::agreed::HostPart;
use dunlin_core::units::ReplicaId;
use std::sync::Arc;

/// A host that is gone and was not reached is told again after this time.
const TELL_AGAIN_US: u64 = 10_000_000;
/// The code of what another host refuses.
const REFUSED: i32 = 2;

impl VmLoop {
    /// Invariant 1.
    pub(super) fn follow_hosts(&mut self) {
        let Some(hosts) = self.agreement.state().hosts.clone() else {
            return;
        };
        let newest = newest(&hosts);
        if newest <= self.config.newest_number() {
            return;
        }
        let mine = hosts.iter().find(|host| host.id == self.me);
        if mine.is_none_or(|host| host.part.is_none()) {
            // A list that is older than this host's part in it was passed by above.
            let _ = self.was_left(newest);
            return;
        }
        let config = match self.config.with_hosts(&hosts, &self.host.cluster) {
            Ok(config) => Arc::new(config),
            Err(error) => {
                let why = format!("the group's new list of hosts cannot be followed here: {error}");
                return self.event(EventKind::Hosts, why);
            }
        };
        if self.config.group != config.group {
            self.event(EventKind::Hosts, words(&self.config, &config));
        }
        if self.config.standby_host() != config.standby_host() {
            let words = match config.standby_host() {
                Some(host) => format!("host '{host}' is the VM's standby from now on"),
                None => "the VM has no standby any more".to_owned(),
            };
            self.event(EventKind::Standby, words);
        }
        self.keep_file(config.text.clone());
        let before = std::mem::replace(&mut self.config, config.clone());
        *self.shared.config() = Some(config);
        for host in &before.group {
            if self.config.member(&host.name) != Some(host.member) {
                self.group.remove_link(host.member.id);
                self.peers.broke.remove(&host.member.id);
            }
        }
        let (host, config) = (&self.host, &self.config);
        group::connect_new(
            &mut self.peers.connectors,
            host,
            config,
            self.me,
            &self.inbox.to_loop,
        );
        self.peers.gone.next_us = 0;
    }

    fn keep_file(&mut self, text: Arc<str>) {
        let keeper = self.peers.keeper.get_or_insert_with(|| {
            let (host, vm) = (self.host.clone(), self.config.name.clone());
            Keeper::start(host.state.join("vms").join(&vm), move |why| {
                let text = format!("the VM's file with its new hosts cannot be written yet: {why}");
                host.events.push(&vm, EventKind::Hosts, text);
            })
        });
        keeper.write(text);
    }

    /// Who leads tells those who are gone; a dead host hears it when it comes back.
    pub(super) fn tell_who_is_gone(&mut self) {
        let now_us = self.now_us();
        if !self.agreement.leads() || self.peers.gone.under_way || now_us < self.peers.gone.next_us {
            return;
        }
        let Some(hosts) = &self.agreement.state().hosts else {
            return;
        };
        let is_due = |host: &&HostPart| host.part.is_none() && !self.peers.gone.told.contains(&host.id);
        let due: Vec<HostPart> = hosts.iter().filter(is_due).cloned().collect();
        if due.is_empty() {
            return;
        }
        self.peers.gone.next_us = now_us + TELL_AGAIN_US;
        let (host, to_loop) = (self.host.clone(), self.inbox.to_loop.clone());
        let (vm, newest) = (self.config.name.clone(), newest(hosts));
        let work = move || {
            let told = std::thread::scope(|scope| {
                let (host, vm) = (&host, &vm);
                let asked: Vec<_> = due
                    .iter()
                    .map(|gone| (gone.id, scope.spawn(move || hears(host, &gone.name, vm, newest))))
                    .collect();
                let told = asked
                    .into_iter()
                    .filter_map(|(id, asked)| asked.join().unwrap_or(false).then_some(id));
                told.collect()
            });
            to_loop.send(LoopEvent::GoneTold(told));
        };
        match std::thread::Builder::new().name("tell-gone".into()).spawn(work) {
            Ok(_) => self.peers.gone.under_way = true,
            Err(error) => tracing::error!("a thread to tell hosts that they have no part any more: {error}"),
        }
    }

    pub(super) fn gone_told(&mut self, told: Vec<ReplicaId>) {
        self.peers.gone.under_way = false;
        for id in told {
            let host = self.config.host_name(id);
            tracing::info!(vm = self.config.name, "host '{host}' has nothing of it any more");
            self.peers.gone.told.insert(id);
        }
    }

    /// Invariant 2.
    pub(super) fn was_left(&mut self, newest: u8) -> Answer {
        if newest <= self.config.newest_number() {
            return Answer::refused("this host knows of a newer list, in which it has a part");
        }
        self.event(
            EventKind::Left,
            "the VM's group goes on without this host, whose part another one has ('dunlin move', or a standby): the copy here is ended. \
             Its disks are left as they are, and are not the VM's any more",
        );
        self.forget_vm(true);
        Answer::done("it goes")
    }
}

/// Whether that host has nothing of the VM any more, or is about to.
fn hears(host: &super::Host, gone: &str, vm: &str, newest: u8) -> bool {
    if host.cluster.host(gone).is_none() {
        return true; // It was taken out of the cluster's file.
    }
    let vm = vm.to_owned();
    let request = Request::Left { vm, newest };
    match ask_host(host, gone, &request, TOLD, &mut |_| {}) {
        // A host that has another part in it now, or no such VM, refuses.
        Answer::Failed { code, .. } => code == REFUSED,
        _ => true,
    }
}

/// What has changed, for people.
fn words(before: &VmConfig, after: &VmConfig) -> String {
    let new = |one: &VmConfig, other: &VmConfig| -> Vec<String> {
        let new = one
            .group
            .iter()
            .filter(|host| other.member(&host.name) != Some(host.member));
        new.map(|host| {
            let part = if host.member.witness { "witness " } else { "" };
            format!("{part}'{}'", host.name)
        })
        .collect()
    };
    format!(
        "the VM's group has host {} in the place of {}",
        new(after, before).join(" and "),
        new(before, after).join(" and ")
    )
}
