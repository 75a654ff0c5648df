//! Who has a part in the group of a VM or a bare program: follows the list that is agreed, lets hosts go that are not in it any more, and makes those
//! members that are new in it.
//!
//! Flow: an agreed `Hosts`, or a snapshot with one -> [`Membership::follow_hosts`]: the configuration, the links, the VM's file on this host -> who
//! leads tells each host that is gone, until that host has heard it -> there: [`Membership::was_left`]. A host of the list that is linked, and is no
//! member, is made one by who leads.
//!
//! Invariants:
//! 1. A list is followed once, and no older one after it (`config::hosts`, invariant 2).
//! 2. A host takes its copy away only for a list that is agreed, and newer than its own. One that was given a part anew has a newer number.
//! 3. Until the file is written (`keeper`) a restart of this host begins with the old list, and reads the new one from the group.
//!
//! Not here: how such a list comes about (`replacing`), who votes (consensus' own `Members`).

use super::NEWCOMER;
use super::connect::ask_host;
use super::event::{LoopEvent, LoopSender};
use super::group::{self, TOLD};
use super::keeper::Keeper;
use super::shared::{Host, Shared};
use super::state::VmLoop;
use super::state::agreement::Agreement;
use super::state::hosts::Peers;
use crate::config::{VmConfig, newest};
use dunlin_api::{Answer, EventKind, Request};
use dunlin_core::agreed::HostPart;
use dunlin_core::replica::promotion;
use dunlin_core::units::ReplicaId;
use dunlin_fabric::group::KeptGroup;
use std::cell::Cell;
use std::sync::Arc;

/// A host that is gone and was not reached is told again after this time.
const TELL_AGAIN_US: u64 = 10_000_000;
/// A host that is no part of the group and knocks again and again is told of once in this time.
const QUIET_US: u64 = 60_000_000;
/// The code of what another host refuses.
const REFUSED: i32 = 2;

/// What a loop has that is about its group's hosts, be it a VM's or a bare program's.
pub(in crate::vm) struct Membership<'a> {
    pub(in crate::vm) host: &'a Arc<Host>,
    pub(in crate::vm) config: &'a mut Arc<VmConfig>,
    pub(in crate::vm) me: ReplicaId,
    pub(in crate::vm) group: &'a mut KeptGroup,
    pub(in crate::vm) agreement: &'a mut Agreement,
    pub(in crate::vm) peers: &'a mut Peers,
    pub(in crate::vm) shared: &'a Shared,
    pub(in crate::vm) to_loop: &'a LoopSender,
    pub(in crate::vm) now_us: u64,
    /// An event was told in this step.
    pub(in crate::vm) told: &'a Cell<bool>,
}

impl Membership<'_> {
    pub(super) fn event(&self, kind: EventKind, text: impl Into<String>) {
        self.told.set(true);
        self.host.events.push(&self.config.name, kind, text);
    }

    /// Invariant 1. The newest number of a list in which this host has no part, if that is the one.
    #[must_use]
    pub(in crate::vm) fn follow_hosts(&mut self) -> Option<u8> {
        let hosts = self.agreement.state().hosts.clone()?;
        let newest = newest(&hosts);
        if newest <= self.config.newest_number() {
            return None;
        }
        let mine = hosts.iter().find(|host| host.id == self.me);
        if mine.is_none_or(|host| host.part.is_none()) {
            // A list that is older than this host's part in it was passed by above.
            return Some(newest);
        }
        let config = match self.config.with_hosts(&hosts, &self.host.cluster) {
            Ok(config) => Arc::new(config),
            Err(error) => {
                let why = format!("the group's new list of hosts cannot be followed here: {error}");
                self.event(EventKind::Hosts, why);
                return None;
            }
        };
        if self.config.group != config.group {
            self.event(EventKind::Hosts, words(self.config, &config));
        }
        if self.config.standby_host() != config.standby_host() {
            let noun = config.noun();
            let words = match config.standby_host() {
                Some(host) => format!("host '{host}' is the {noun}'s standby from now on"),
                None => format!("the {noun} has no standby any more"),
            };
            self.event(EventKind::Standby, words);
        }
        self.keep_file(config.text.clone());
        let before = std::mem::replace(self.config, config.clone());
        *self.shared.config() = Some(config);
        for host in &before.group {
            if self.config.member(&host.name) != Some(host.member) {
                self.group.remove_link(host.member.id);
                self.peers.broke.remove(&host.member.id);
            }
        }
        let (host, config) = (self.host, &**self.config);
        group::connect_new(&mut self.peers.connectors, host, config, self.me, self.to_loop);
        self.peers.gone.next_us = 0;
        None
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
    pub(in crate::vm) fn tell_who_is_gone(&mut self) {
        if !self.agreement.leads() || self.peers.gone.under_way || self.now_us < self.peers.gone.next_us {
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
        self.peers.gone.next_us = self.now_us + TELL_AGAIN_US;
        let (host, to_loop) = (self.host.clone(), self.to_loop.clone());
        let (vm, newest) = (self.config.name.clone(), newest(hosts));
        let work = move || {
            let told = std::thread::scope(|scope| {
                let (host, vm) = (&host, &vm);
                let asked: Vec<_> = due
                    .iter()
                    .map(|gone| {
                        let named = std::thread::Builder::new().name("tell-gone".into());
                        let ask = move || hears(host, &gone.name, vm, newest);
                        (gone, named.spawn_scoped(scope, ask))
                    })
                    .collect();
                let told = asked.into_iter().filter_map(|(gone, asked)| {
                    let hears = match asked {
                        Ok(asked) => asked.join().unwrap_or(false),
                        // The system has no thread left.
                        Err(_) => hears(host, &gone.name, vm, newest),
                    };
                    hears.then_some(gone.id)
                });
                told.collect()
            });
            to_loop.send(LoopEvent::GoneTold(told));
        };
        match std::thread::Builder::new().name("tell-gone".into()).spawn(work) {
            Ok(_) => self.peers.gone.under_way = true,
            Err(error) => tracing::error!("a thread to tell hosts that they have no part any more: {error}"),
        }
    }

    pub(in crate::vm) fn gone_told(&mut self, told: Vec<ReplicaId>) {
        self.peers.gone.under_way = false;
        for id in told {
            let host = self.config.host_name(id);
            tracing::info!(vm = self.config.name, "host '{host}' has nothing of it any more");
            self.peers.gone.told.insert(id);
        }
    }

    /// Invariant 2. Afterwards the loop forgets what it has.
    pub(in crate::vm) fn was_left(&mut self, newest: u8) -> Result<(), Answer> {
        if newest <= self.config.newest_number() {
            return Err(Answer::refused(
                "this host knows of a newer list, in which it has a part",
            ));
        }
        let rest = match self.config.program {
            Some(_) => {
                "The image of its data, if it has one, is left as it is, and is not the program's any more"
            }
            None => "Its disks are left as they are, and are not the VM's any more",
        };
        let noun = self.config.noun();
        self.event(
            EventKind::Left,
            format!(
                "the {noun}'s group goes on without this host, whose part another one has ('dunlin move', or a standby): the copy here is \
                 ended. {rest}"
            ),
        );
        Ok(())
    }

    /// Takes hosts of the VM's configuration into the group, for the first time or again (core's `replica::promotion`, invariant 3).
    pub(in crate::vm) fn readmit_hosts(&mut self) {
        let members = self.group.members();
        if self.peers.leaving.is_some() || !self.agreement.leads() || members.len() == self.config.group.len()
        {
            return;
        }
        let hosts = self.config.group.iter().map(|host| host.member);
        let is_connected = |id| group::is_connected(self.group, id);
        let Some((back, members)) = promotion::readmits(hosts, &members, is_connected) else {
            return;
        };
        match self.group.change_members(members) {
            Ok(index) => {
                self.peers.readmitted = Some((back.id, index));
                let host = self.config.host_name(back.id).to_owned();
                self.event(
                    EventKind::Readmitted,
                    format!("host '{host}' takes part in the group again"),
                );
            }
            // The last change is not agreed yet, or this host leads no more.
            Err(refusal) => tracing::debug!(vm = self.config.name, "not readmitted yet: {refusal}"),
        }
    }

    /// The group has made this host a member: from now on it is one like the others, over restarts as well.
    pub(in crate::vm) fn settle_in(&mut self) {
        let is_member = || self.group.members().iter().any(|member| member.id == self.me);
        if self.peers.newcomer && is_member() {
            let file = self.host.state.join("vms").join(&self.config.name).join(NEWCOMER);
            match std::fs::remove_file(file) {
                Ok(()) => self.peers.newcomer = false,
                Err(error) => tracing::debug!(vm = self.config.name, "still a newcomer: {error}"),
            }
        }
    }

    /// A host of the cluster that is not in this VM's group: counted, and told once a minute.
    pub(in crate::vm) fn refuse_stranger(&mut self, host: &str) {
        self.peers.strangers += 1;
        let told_us = self.peers.strangers_told_us.get(host);
        if told_us.is_some_and(|told_us| self.now_us - told_us < QUIET_US) {
            return;
        }
        self.peers.strangers_told_us.insert(host.to_owned(), self.now_us);
        let noun = self.config.noun();
        self.event(
            EventKind::LinkRefused,
            format!("host '{host}' is not in this {noun}'s group"),
        );
    }
}

impl VmLoop {
    pub(super) fn membership(&mut self) -> Membership<'_> {
        Membership {
            now_us: self.now_us(),
            host: &self.host,
            config: &mut self.config,
            me: self.me,
            group: &mut self.group,
            agreement: &mut self.agreement,
            peers: &mut self.peers,
            shared: &self.shared,
            to_loop: &self.inbox.to_loop,
            told: &self.shown.told,
        }
    }

    pub(super) fn follow_hosts(&mut self) {
        if let Some(newest) = self.membership().follow_hosts() {
            let _ = self.was_left(newest);
        }
    }

    pub(super) fn was_left(&mut self, newest: u8) -> Answer {
        if let Err(refused) = self.membership().was_left(newest) {
            return refused;
        }
        self.forget_vm(true);
        Answer::done("it goes")
    }
}

/// Whether that host has nothing of the VM any more, or is about to.
fn hears(host: &Host, gone: &str, vm: &str, newest: u8) -> bool {
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
        "the {}'s group has host {} in the place of {}",
        after.noun(),
        new(after, before).join(" and "),
        new(before, after).join(" and ")
    )
}
