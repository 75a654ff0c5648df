//! A standby gets the part of a copy's host that stays away (`standby` in the VM's file), as if a person had said `dunlin move`.
//!
//! And it gets checkpoints of the VM's memory before that, where the file says so (`vm::checkpoint`).
//!
//! Flow: each second, each VM that is served here -> core's `replica::standby` says whose part moves -> [`moving::to`], which asks the standby first ->
//! a copy joins there, as on any host.
//!
//! Not here: when that is, and whom to ask (`replica::standby`), who is the standby afterwards (`config::hosts`), how a part moves (`moving`,
//! `vm::replacing`).

use super::{Daemon, moving};
use crate::config::VmConfig;
use crossbeam_channel::tick;
use dunlin_api::{Answer, EventKind, Role, VmStatus};
use dunlin_core::replica::standby::{Move, Sight, Standby};
use dunlin_guest::probe::memory_available_bytes;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The shortest `standby_after` is as long.
const LOOK: Duration = Duration::from_secs(1);

/// So many parts are on their way at once; the others wait.
const MOST_MOVES: usize = 16;

/// Looks after all VMs, on a thread of its own.
pub fn watch(daemon: &Arc<Daemon>) -> io::Result<()> {
    let daemon = daemon.clone();
    let work = move || {
        let mut watches: BTreeMap<String, Standby> = BTreeMap::new();
        let mut moves = Moves::default();
        let begun = Instant::now();
        for _ in tick(LOOK) {
            daemon.host.held_memory.expire(Instant::now());
            daemon.host.held_memory.give_way(memory_available_bytes);
            daemon
                .vms()
                .values()
                .for_each(|handle| handle.feed_standby(&daemon.host));
            let with_standby: Vec<_> = daemon
                .vms()
                .iter()
                .map(|(vm, handle)| (vm, handle, handle.config()))
                .filter(|(.., config)| config.standby.is_some())
                .map(|(vm, handle, config)| (vm.clone(), config, handle.status()))
                .collect();
            watches.retain(|vm, _| with_standby.iter().any(|(name, ..)| name == vm));
            for (vm, due, answer) in moves.ended() {
                if let Some(standby) = watches.get_mut(&vm) {
                    moved(&daemon, &vm, standby, &due, &answer);
                }
            }
            for (vm, config, status) in with_standby {
                if !moves.has_room_for(&vm) {
                    continue;
                }
                let standby = watches.entry(vm).or_default();
                let now_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
                if let Some(due) = look(standby, now_us, &config, &status) {
                    follow(&daemon, &config.name, due, &mut moves);
                }
            }
        }
    };
    std::thread::Builder::new().name("standby".into()).spawn(work)?;
    Ok(())
}

/// Parts that are on their way, each on a thread: a host that does not answer is waited for by its own VM alone.
#[derive(Default)]
struct Moves {
    under_way: BTreeMap<String, (Move, JoinHandle<Answer>)>,
}

impl Moves {
    fn has_room_for(&self, vm: &str) -> bool {
        self.under_way.len() < MOST_MOVES && !self.under_way.contains_key(vm)
    }

    fn begin(
        &mut self,
        vm: &str,
        due: Move,
        work: impl FnOnce() -> Answer + Send + 'static,
    ) -> io::Result<()> {
        let thread = std::thread::Builder::new()
            .name("standby-moves".into())
            .spawn(work)?;
        self.under_way.insert(vm.to_owned(), (due, thread));
        Ok(())
    }

    /// Those that are over, and what came of them.
    fn ended(&mut self) -> Vec<(String, Move, Answer)> {
        let is_over = |(vm, (_, thread)): (&String, &(Move, JoinHandle<Answer>))| {
            thread.is_finished().then(|| vm.clone())
        };
        let over: Vec<String> = self.under_way.iter().filter_map(is_over).collect();
        let ended = over.into_iter().filter_map(|vm| {
            let (due, thread) = self.under_way.remove(&vm)?;
            // A panic has been printed by its thread already.
            Some((vm, due, thread.join().ok()?))
        });
        ended.collect()
    }
}

fn tell(daemon: &Daemon, vm: &str, words: String) {
    daemon.host.events.push(vm, EventKind::Standby, words);
}

fn follow(daemon: &Arc<Daemon>, vm: &str, due: Move, moves: &mut Moves) {
    if due.announces {
        let Move { leaves, comes, .. } = &due;
        tell(
            daemon,
            vm,
            format!("host '{leaves}' stays away: standby '{comes}' takes its part"),
        );
    }
    let (of, name, comes) = (daemon.clone(), vm.to_owned(), due.comes.clone());
    let work = move || moving::to(&of, &name, &comes, false, false);
    if let Err(error) = moves.begin(vm, due, work) {
        tracing::error!(vm, "a thread for a standby's part: {error}");
    }
}

fn moved(daemon: &Daemon, vm: &str, standby: &mut Standby, due: &Move, answer: &Answer) {
    let Move { leaves, comes, .. } = due;
    let Answer::Failed { why, .. } = answer else {
        return;
    };
    if standby.could_not(comes, why) {
        let words = match comes == leaves {
            true => format!("host '{leaves}', which stays away, cannot be brought in anew yet: {why}"),
            false => format!("host '{comes}' cannot take the part of host '{leaves}' yet: {why}"),
        };
        tell(daemon, vm, words);
    }
}

fn look(standby: &mut Standby, now_us: u64, config: &VmConfig, status: &VmStatus) -> Option<Move> {
    let ours = config.standby.as_ref()?;
    standby.look(
        now_us,
        &Sight {
            serves: status.role == Role::Primary,
            lacks_a_copy: status.wants_protection && !status.protected,
            away: away(status),
            standby: &ours.host,
            after_us: u64::try_from(ours.after.as_micros()).unwrap_or(u64::MAX),
        },
    )
}

/// The host of the VM's other copy, if nothing is heard of it.
fn away(status: &VmStatus) -> Option<&str> {
    let copy = status.peers.iter().find(|peer| !peer.witness)?;
    (!copy.connected).then_some(copy.host.as_str())
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

    /// One that takes long is waited for by its own VM, and there are so many of them.
    #[test]
    fn a_part_that_is_on_its_way_keeps_no_other() {
        let due = || Move {
            leaves: "b".into(),
            comes: "d".into(),
            announces: true,
        };
        let mut moves = Moves::default();
        let (goes_on, waits) = std::sync::mpsc::channel::<()>();
        let slow = move || {
            let _ = waits.recv();
            Answer::done("slow")
        };
        moves.begin("slow", due(), slow).expect("a thread");
        moves.begin("v", due(), || Answer::done("v")).expect("a thread");
        assert!(!moves.has_room_for("slow") && moves.has_room_for("w"));
        let mut await_one = || {
            let until = Instant::now() + Duration::from_secs(30);
            loop {
                let ended = moves.ended();
                if let [(vm, ..)] = &ended[..] {
                    return (vm.clone(), moves.has_room_for(vm));
                }
                assert!(Instant::now() < until, "none has ended");
                std::thread::yield_now();
            }
        };
        assert_eq!(await_one(), ("v".to_owned(), true));
        drop(goes_on);
        assert_eq!(await_one(), ("slow".to_owned(), true));
        for vm in 0..MOST_MOVES {
            assert!(moves.has_room_for("v"));
            let begun = moves.begin(&vm.to_string(), due(), || Answer::done(""));
            begun.expect("a thread");
        }
        assert!(!moves.has_room_for("v"), "there are so many and no more");
    }

    #[test]
    fn the_status_says_whose_part_is_due() {
        const SECOND_US: u64 = 1_000_000;
        let config = config();
        let mut standby = Standby::default();
        let mut at = |s: u64, status: &VmStatus| look(&mut standby, s * SECOND_US, &config, status);
        assert_eq!(at(0, &status("b", false)), None);
        // A witness that is away is nobody's part.
        assert_eq!(at(30, &status("b", true)), None);
        assert_eq!(at(31, &status("b", false)), None);
        assert_eq!(at(60, &status("b", false)), None);
        let due = at(61, &status("b", false)).expect("a move");
        assert_eq!((&due.leaves[..], &due.comes[..]), ("b", "d"));
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
            assert_eq!(at(1000, &status), None, "{what}");
            assert_eq!(at(2000, &status), None, "{what}");
        }
    }
}
