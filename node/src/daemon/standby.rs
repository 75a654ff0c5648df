//! A standby gets the part of a copy's host that stays away (`standby` in the VM's file), as if a person had said `dunlin move`.
//!
//! Decides: when that host has been away for long enough, and whom to ask.
//! Flow: each second, each VM that is served here -> [`Watch::due`] -> [`moving::to`], which asks the standby first -> a copy joins there, as on any host.
//!
//! Invariants: 1. only the host that serves a VM moves its parts, and only while the VM is not protected and should be. 2. a host that stands still for
//! less than the file says keeps its part. 3. a host that was named and did not take the VM is asked again, in turn with the new standby.
//! 4. people read each reason once.
//!
//! Not here: who is the standby afterwards (`config::hosts`), how a part moves (`moving`, `vm::primary::replacing`).

use super::{Daemon, moving};
use crate::config::VmConfig;
use crate::vm::VmHandle;
use crossbeam_channel::tick;
use dunlin_api::{Answer, EventKind, Role, VmStatus};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest `standby_after` is as long.
const LOOK: Duration = Duration::from_secs(1);

/// Looks after all VMs, on a thread of its own.
pub fn watch(daemon: &Arc<Daemon>) -> io::Result<()> {
    let daemon = daemon.clone();
    let work = move || {
        let mut watches: BTreeMap<String, Watch> = BTreeMap::new();
        for _ in tick(LOOK) {
            let with_standby: Vec<_> = daemon
                .vms()
                .iter()
                .map(|(vm, handle)| (vm, handle, handle.config()))
                .filter(|(.., config)| config.standby.is_some())
                .map(|(vm, handle, config)| (vm.clone(), config, handle.status()))
                .collect();
            watches.retain(|vm, _| with_standby.iter().any(|(name, ..)| name == vm));
            for (vm, config, status) in with_standby {
                let watch = watches.entry(vm).or_default();
                if let Some(due) = watch.due(&config, &status, Instant::now()) {
                    watch.follow(&daemon, &config.name, &due);
                }
            }
        }
    };
    std::thread::Builder::new().name("standby".into()).spawn(work)?;
    Ok(())
}

/// One VM, as this thread knows it.
#[derive(Default)]
struct Watch {
    /// The copy's host that is away, and since when, or since the last try.
    away: Option<(String, Instant)>,
    /// A host that has a part by the group's list, and did not take the VM.
    named: Option<String>,
    /// Invariant 3: its turn comes next.
    is_its_turn: bool,
    /// People were told that the standby takes a part.
    announced: bool,
    /// The last reason why it could not.
    told: String,
}

/// A part is to move.
#[derive(Debug, PartialEq, Eq)]
struct Due {
    leaves: String,
    comes: String,
}

impl Watch {
    /// Invariants 1 to 3.
    fn due(&mut self, config: &VmConfig, status: &VmStatus, now: Instant) -> Option<Due> {
        let standby = config.standby.as_ref()?;
        let Some(away) = away(status) else {
            // What was told, and who was named, belongs to a time that is over.
            *self = Self::default();
            return None;
        };
        let since = match &self.away {
            Some((host, since)) if host == away => *since,
            _ => now,
        };
        self.away = Some((away.to_owned(), since));
        if now.saturating_duration_since(since) < standby.after {
            return None;
        }
        self.away = Some((away.to_owned(), now));
        let asks_again = self.is_its_turn && self.named.as_deref() == Some(away);
        self.is_its_turn = !asks_again;
        Some(Due {
            leaves: away.to_owned(),
            comes: if asks_again { away } else { &standby.host }.to_owned(),
        })
    }

    fn follow(&mut self, daemon: &Daemon, vm: &str, due: &Due) {
        let Due { leaves, comes } = due;
        let tell = |words: String| daemon.host.events.push(vm, EventKind::Standby, words);
        // Invariant 4, here and below.
        if !std::mem::replace(&mut self.announced, true) {
            tell(format!(
                "host '{leaves}' stays away: standby '{comes}' takes its part"
            ));
        }
        let Answer::Failed { why, .. } = moving::to(daemon, vm, comes, false, false) else {
            return;
        };
        let config = daemon.vms().get(vm).map(VmHandle::config);
        if config.is_some_and(|config| config.member(comes).is_some()) {
            self.named = Some(comes.clone());
        }
        if self.told != why {
            tell(format!(
                "host '{comes}' cannot take the part of host '{leaves}' yet: {why}"
            ));
            self.told = why;
        }
    }
}

/// The host of the VM's other copy, if nothing is heard of it and a copy is wanted there.
fn away(status: &VmStatus) -> Option<&str> {
    let is_served_here = status.role == Role::Primary;
    let lacks_a_copy = status.wants_protection && !status.protected;
    let copy = status.peers.iter().find(|peer| !peer.witness)?;
    (is_served_here && lacks_a_copy && !copy.connected).then_some(copy.host.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cluster;
    use dunlin_api::PeerStatus;
    use dunlin_api::files::ClusterHost;
    use dunlin_core::consensus::Durability;

    const FILE: &str = "name = 'v'\nmembers = ['a', 'b']\nwitness = 'c'\nstandby = 'd'\nstandby_after = '30s'\n[vm]\nmemory_mib = 64\nkernel = '/k'\n";

    fn config() -> VmConfig {
        let host = |(number, name): (usize, &&str)| ClusterHost {
            name: (*name).to_owned(),
            address: ([10, 0, 0, number as u8], 7700).into(),
        };
        let hosts = ["a", "b", "c", "d"].iter().enumerate().map(host).collect();
        let cluster = Cluster {
            name: "t".into(),
            id: [7; 16],
            durability: Durability::Memory,
            election_ms: 150,
            hosts,
        };
        VmConfig::parse(FILE, "v", &cluster).expect("a good file")
    }

    fn status(copy: &str, connected: bool) -> VmStatus {
        let peer = |host: &str, connected: bool, witness: bool| PeerStatus {
            host: host.into(),
            connected,
            witness,
            ..PeerStatus::default()
        };
        VmStatus {
            role: Role::Primary,
            wants_protection: true,
            peers: vec![peer("c", false, true), peer(copy, connected, false)],
            ..VmStatus::default()
        }
    }

    #[test]
    fn a_copy_s_host_that_stays_away_is_due_and_nobody_else_is() {
        let (config, begin) = (config(), Instant::now());
        let at = |s: u64| begin + Duration::from_secs(s);
        let due = |leaves: &str, comes: &str| {
            Some(Due {
                leaves: leaves.into(),
                comes: comes.into(),
            })
        };
        let mut watch = Watch::default();
        assert_eq!(watch.due(&config, &status("b", false), at(0)), None);
        assert_eq!(watch.due(&config, &status("b", false), at(29)), None);
        // It is back for a moment: the time begins anew.
        assert_eq!(watch.due(&config, &status("b", true), at(30)), None);
        assert_eq!(watch.due(&config, &status("b", false), at(31)), None);
        assert_eq!(watch.due(&config, &status("b", false), at(60)), None);
        assert_eq!(watch.due(&config, &status("b", false), at(61)), due("b", "d"));
        // One try in so long a time.
        assert_eq!(watch.due(&config, &status("b", false), at(62)), None);
        assert_eq!(watch.due(&config, &status("b", false), at(91)), due("b", "d"));
        for (what, change) in [
            (
                "a backup",
                (|status| status.role = Role::Backup) as fn(&mut VmStatus),
            ),
            ("protected", |status| status.protected = true),
            ("not to be protected", |status| status.wants_protection = false),
        ] {
            let mut status = status("b", false);
            change(&mut status);
            let mut watch = Watch::default();
            assert_eq!(watch.due(&config, &status, at(0)), None, "{what}");
            assert_eq!(watch.due(&config, &status, at(1000)), None, "{what}");
        }
    }

    #[test]
    fn a_host_that_did_not_take_it_is_asked_again_in_turn_with_the_new_standby() {
        let (config, begin) = (config(), Instant::now());
        let mut watch = Watch::default();
        let asked = |watch: &mut Watch, away: &str, s: u64| {
            let due = watch.due(&config, &status(away, false), begin + Duration::from_secs(s));
            due.map(|due| due.comes)
        };
        assert_eq!(asked(&mut watch, "e", 0), None);
        watch.named = Some("e".into());
        let turns: Vec<_> = (1..5)
            .filter_map(|turn| asked(&mut watch, "e", 30 * turn))
            .collect();
        assert_eq!(turns, ["d", "e", "d", "e"]);
    }
}
