//! What this host says of itself: its VMs and logs, and what happened here.
//!
//! **Not here**: the same in a few words, for `dunlin cluster status` (`members`).

use super::Daemon;
use crate::build;
use crate::logs::LogHandle;
use crate::notify::Notify;
use crate::vm;
use dunlin_api::{Event, HostStatus};
use dunlin_fabric::link::{OLDEST_PROTOCOL, PROTOCOL_VERSION};
use dunlin_guest::probe;

/// Events that are told at once to a host that asks how this one is.
const MOST_EVENTS: u64 = 200;

/// This host, and its VMs.
pub fn status(daemon: &Daemon) -> HostStatus {
    HostStatus {
        host: daemon.host.name.clone(),
        links: daemon.host.identity.protection().to_owned(),
        version: build::name(),
        protocol: PROTOCOL_VERSION,
        oldest_protocol: OLDEST_PROTOCOL,
        kvm: probe::has_kvm(),
        vms: daemon.vms().values().map(vm::VmHandle::status).collect(),
        logs: daemon.logs().values().map(LogHandle::status).collect(),
        refused: daemon.refused(),
        notify: daemon.notify.as_ref().map(Notify::status),
        certificates: daemon.keys.certificates(),
    }
}

/// What happened from that event on, and no more than the last few hundred of it.
pub fn last_events(daemon: &Daemon, since: u64) -> Vec<Event> {
    let next = daemon.host.events.next_seq();
    // One that asks for what is still to come knows another list: this host has lost its own.
    let since = if since > next { 0 } else { since };
    daemon
        .host
        .events
        .since(since.max(next.saturating_sub(MOST_EVENTS)), None, 0)
}
