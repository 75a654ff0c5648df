//! How the hosts of a cluster are: `dunlin cluster status`.
//!
//! **Flow**: a person asks one daemon ([`all`]) -> it asks every host of cluster.toml ([`this`]). **Invariants**: 1. a host that does not
//! answer is told with the reason, and costs one bounded wait. **Not here**: how a VM is (`status`).

use super::telling::status;
use super::{Daemon, peers};
use crate::certificates;
use crate::events::now_ms;
use dunlin_api::{Answer, Member, Request, Role};

/// Asks every host, and gives what it says to `each`.
pub fn all(daemon: &Daemon, each: &mut dyn FnMut(Answer)) -> Answer {
    for host in &daemon.host.cluster.hosts {
        let mut member = match host.name == daemon.host.name {
            true => this(daemon),
            false => other(daemon, &host.name),
        };
        (member.host, member.address) = (host.name.clone(), host.address.to_string());
        each(Answer::Member(Box::new(member)));
    }
    Answer::done("")
}

/// What another host says of itself, or why it does not.
fn other(daemon: &Daemon, host: &str) -> Member {
    let mut said = None;
    let last = peers::converse(daemon, host, &Request::Member, &mut |answer| {
        if let Answer::Member(member) = answer {
            said = Some(*member.clone());
        }
    });
    let mut member = said.unwrap_or_default();
    if let Answer::Failed { why, .. } = last {
        member.problem = Some(why);
    }
    member
}

/// What this host says of itself.
pub fn this(daemon: &Daemon) -> Member {
    let status = status(daemon);
    let served = status.vms.iter().filter(|vm| vm.role == Role::Primary);
    Member {
        host: status.host.clone(),
        version: status.version,
        protocol: Some(status.protocol),
        vms: status.vms.len(),
        serves: served.map(|vm| vm.name.clone()).collect(),
        words: status
            .certificates
            .iter()
            .filter_map(|certificate| certificates::word(certificate, now_ms() / 1000))
            .map(|(words, _)| words)
            .collect(),
        ..Member::default()
    }
}
