//! What every loop does with its group, be it a VM's or a bare program's: opens it, says what it has to say, and tells people of it.
//!
//! Decides: nothing. Flow: a loop opens its group here -> entries that the log refuses wait in order and are said again -> what the group
//! tells of links and disks becomes an event. Invariants: 1. an entry of control goes after those that were refused before it.
//! Not here: what an entry means, and what follows from an election (each loop's own `agreement`).

use super::connect::{Connector, ask_host};
use super::event::{LoopEvent, LoopSender};
use super::shared::Host;
use super::state::agreement::{Agreement, Election};
use crate::config::VmConfig;
use dunlin_api::{Answer, EventKind, PeerStatus, Request};
use dunlin_core::agreed::Agreed;
use dunlin_core::consensus::{Durability, Member, Refusal, Role as ConsensusRole};
use dunlin_core::replica::shutdown::TOLD_US;
use dunlin_core::units::ReplicaId;
use dunlin_core::wire::agreed;
use dunlin_fabric::group::{GroupConfig, GroupError, GroupEvent, KeptGroup};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A loop that does not turn for so long is taken for hung, and its host for dead. Up to then heartbeats and votes do not wait for it.
const HUNG: Duration = Duration::from_secs(1);
/// How long another host may take to hear of the end and to end its copy.
pub const TOLD: Duration = Duration::from_micros(TOLD_US);

/// No exit code, but between hosts: the end was heard of, and something of the VM remains there, as the words say.
pub const BUSY: i32 = -2;
/// "Ask again at once": not an exit code, the command line never sees it.
pub const AGAIN: i32 = -1;

/// Opens the group of what `config` says, with its log in the state folder.
pub fn open(
    host: &Host,
    config: &VmConfig,
    me: ReplicaId,
    members: Vec<Member>,
    durability: Durability,
) -> Result<KeptGroup, GroupError> {
    let folder = host.state.join("vms").join(&config.name);
    let mut group_config = GroupConfig::new(folder.join("log"), me, members, durability);
    // As cluster.toml says: believed so long at the shortest, and up to twice as long.
    let shortest_us = u64::from(host.cluster.election_ms) * 1000;
    group_config.core.election_min_us = shortest_us;
    group_config.core.election_max_us = 2 * shortest_us;
    group_config.core.heartbeat_us = shortest_us / 12;
    group_config.core.ring_bytes = config.memory.log_mib << 20;
    // Of three disks the slowest is not waited for; of two that are asked it would be.
    group_config.core.witness_waits = durability == dunlin_core::consensus::Durability::Memory;
    KeptGroup::open(group_config, HUNG)
}

/// Who keeps the links to the members that come after this one.
pub fn connectors(
    host: &Arc<Host>,
    config: &VmConfig,
    me: ReplicaId,
    to_loop: &LoopSender,
) -> Vec<(ReplicaId, Connector)> {
    let mut connectors = Vec::new();
    connect_new(&mut connectors, host, config, me, to_loop);
    connectors
}

/// The same after hosts have come or gone. Links to those that stay are left alone.
pub fn connect_new(
    connectors: &mut Vec<(ReplicaId, Connector)>,
    host: &Arc<Host>,
    config: &VmConfig,
    me: ReplicaId,
    to_loop: &LoopSender,
) {
    connectors.retain(|(id, _)| config.group.iter().any(|peer| peer.member.id == *id));
    for peer in config.group.iter().filter(|peer| peer.member.id > me) {
        let id = peer.member.id;
        if connectors.iter().any(|(known, _)| *known == id) {
            continue;
        }
        let to_loop = to_loop.clone();
        let deliver = move |stream| to_loop.send(LoopEvent::LogLink(id, stream));
        let connector = Connector::start(host.clone(), config.name.clone(), peer.name.clone(), deliver);
        connectors.push((id, connector));
    }
}

/// Whether the link to a member stands.
pub fn is_connected(group: &KeptGroup, peer: ReplicaId) -> bool {
    let links = group.links();
    links.iter().any(|link| link.peer == peer && link.connected)
}

/// The other members, for people.
pub fn peers(group: &KeptGroup, config: &VmConfig, me: ReplicaId) -> Vec<PeerStatus> {
    let others = config.group.iter().filter(|peer| peer.member.id != me);
    let links = group.links();
    others
        .map(|peer| {
            let link = links.iter().find(|link| link.peer == peer.member.id);
            let spoken = link.and_then(|link| link.spoken.clone());
            PeerStatus {
                host: peer.name.clone(),
                connected: link.is_some_and(|link| link.connected),
                witness: peer.member.witness,
                protocol: spoken.as_ref().map(|spoken| spoken.version),
                version: spoken.and_then(|spoken| spoken.build),
            }
        })
        .collect()
}

/// What is said when no majority answers any more: who was heard when, as that is what to look into.
pub fn no_majority(group: &KeptGroup, config: &VmConfig, now_us: u64) -> String {
    let heard = group.links().into_iter().map(|link| {
        let host = config.host_name(link.peer);
        let ago_us = link.heard_us.map(|heard_us| now_us.saturating_sub(heard_us));
        match ago_us.filter(|_| link.connected) {
            Some(ago_us) => format!("host '{host}' was heard {} ms ago", ago_us / 1000),
            None => format!("there is no link to host '{host}'"),
        }
    });
    let heard: Vec<String> = heard.collect();
    format!(
        "no majority of the group answers: nothing is served until one does ({})",
        heard.join(", ")
    )
}

impl Agreement {
    /// Proposes an entry of control, behind those that were refused before.
    ///
    /// # Errors
    /// Why not now.
    pub(super) fn propose(&self, group: &mut KeptGroup, entry: &Agreed) -> Result<(), Refusal> {
        match self.unsaid.is_empty() {
            true => group.propose_control(agreed::encode(entry)).map(drop),
            false => Err(Refusal::RingFull),
        }
    }

    /// Says again what was refused.
    pub(super) fn propose_unsaid(&mut self, group: &mut KeptGroup) {
        while let Some(entry) = self.unsaid.next() {
            match group.propose_control(agreed::encode(entry)) {
                Ok(_) => self.unsaid.said(),
                Err(Refusal::NotLeader { .. }) => self.unsaid.clear(),
                Err(_) => return,
            }
        }
    }
}

impl Election {
    /// Notes when the leader was last heard and when this host began to campaign: what a take-over is made of.
    pub(super) fn watch(&mut self, group: &KeptGroup, now_us: u64) {
        match (group.role(), group.leader()) {
            (ConsensusRole::Candidate { .. }, _) => {
                self.campaign_us.get_or_insert(now_us);
            }
            (ConsensusRole::Follower { .. }, Some(leader)) => {
                self.campaign_us = None;
                if let Some(link) = group.links().into_iter().find(|link| link.peer == leader) {
                    self.leader_heard_us = link.heard_us.unwrap_or(self.leader_heard_us);
                }
            }
            _ => {}
        }
    }
}

/// The event, as kind and text, of what a group tells of its links and its disk, where that is all that follows from it.
pub fn words(event: GroupEvent, config: &VmConfig) -> Option<(EventKind, String)> {
    Some(match event {
        GroupEvent::LinkUp { peer } => {
            let host = config.host_name(peer);
            (
                EventKind::LinkUp,
                format!("the log's link to host '{host}' stands"),
            )
        }
        GroupEvent::DiskFull(why) => (EventKind::LogDiskFull, why),
        GroupEvent::DiskRoom => (EventKind::LogDiskRoom, "the log's disk has room again".to_owned()),
        GroupEvent::DiskFailed(why) => (EventKind::LogDiskFailed, why),
        GroupEvent::ProtocolViolation { peer, what, count } => {
            let host = config.host_name(peer);
            let text = format!("host '{host}' said what is not believed ({count} times so far): {what}");
            (EventKind::ProtocolViolation, text)
        }
        _ => return None,
    })
}

/// Tells the other hosts that the end is agreed, on a thread of its own; the loop hears when that is done.
///
/// # Errors
/// There is no thread.
pub fn tell_the_end(
    host: &Arc<Host>,
    config: &VmConfig,
    me: ReplicaId,
    to_loop: &LoopSender,
) -> io::Result<()> {
    let others = config.group.iter().filter(|other| other.member.id != me);
    let others: Vec<String> = others.map(|other| other.name.clone()).collect();
    let (host, to_loop, vm) = (host.clone(), to_loop.clone(), config.name.clone());
    let work = move || {
        let request = Request::Remove { vm };
        let ask = |other: &str| ask_host(&host, other, &request, TOLD, &mut |_| {});
        let busy = std::thread::scope(|scope| {
            let mut asked = Vec::new();
            for other in &others {
                let named = std::thread::Builder::new().name("tell-end".into());
                asked.push((other, named.spawn_scoped(scope, move || ask(other))));
            }
            let answers = asked.into_iter().map(|(other, asked)| match asked {
                Ok(asked) => asked.join().ok(),
                // The system has no thread left.
                Err(_) => Some(ask(other)),
            });
            // One that cannot be reached keeps its part: there a person says 'down --force'.
            let busy = answers.filter_map(|answer| match answer {
                Some(Answer::Failed { why, code: BUSY }) => Some(why),
                _ => None,
            });
            busy.collect()
        });
        to_loop.send(LoopEvent::EndTold(busy));
    };
    let thread = std::thread::Builder::new().name("tell-end".into());
    thread.spawn(work).map(drop)
}
