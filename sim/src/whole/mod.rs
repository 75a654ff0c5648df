//! What it decides: whether a VM's hosts keep what a replica promises, as one: the production consensus, leadership and epochs together, in
//! worlds that lie.
//!
//! Three hosts: two that can run the VM and a witness. Each has the production `Consensus` on a disk that loses what was not synchronised,
//! and a loop around core's `replica::leadership` and `replica::epoch`, which takes its turns late. Between the two is a stream on which
//! joins and syncs travel. Hosts die at any step and come back, sleep, and are cut off in one direction; streams break; leaders
//! step down; copies do otherwise than each other. In one world of four all copies may die: then a host boots the VM from its disk, as core's
//! `replica::cold_start` says. In another one of four the VM is a TCP server: its clients, its guests and the production `Output` are in `tcp`. In
//! all others it says words.
//!
//! Checked from outside: whatever a client was told is explained by every VM that speaks later, and is on the disk that a VM boots from; nobody speaks in a term after a later one
//! has spoken; when the faults end the VM serves and is protected, if any copy is left that may lead. Clients' connections outlive all of it.
//!
//! Not here, and so not proven: the work of a sync (the session's machines have worlds of their own, `crate::session`); datagrams,
//! the cards, a disk's own work (it holds what its VM has said, to the last sync on a backup); shutdown, a person's orders; moves to
//! other hosts.

mod backup;
mod cold;
mod faults;
mod host;
mod log;
mod next;
mod orders;
mod primary;
mod tcp;
mod turn;
mod world;

use crate::random::Random;
use crate::worlds::{self, Report};
use dunlin_core::replica::sync::bugs::Bug;
use orders::Person;
use world::World;

/// What a world came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Steps of the consensus, and turns of loops.
    pub steps: u64,
    /// Inputs that clients sent to a host that took them.
    pub inputs: u64,
    /// Words that have left.
    pub released: u64,
    /// Syncs that were acknowledged, joins' last ones among them.
    pub syncs: u64,
    /// Backups that became complete.
    pub joins: u64,
    /// Take-overs.
    pub take_overs: u64,
    /// Primaries that led again.
    pub resumed: u64,
    /// Backups that were dropped.
    pub drops: u64,
    /// Hosts that died.
    pub deaths: u64,
    /// VMs that were booted from a disk.
    pub cold_starts: u64,
    /// VMs that have ended because a person wanted it.
    pub ended: u64,
    /// Hosts that served alone because a person said that the others were dead.
    pub promotions: u64,
    /// Frames that have left because both VMs had said them.
    pub matched: u64,
    /// Acknowledgements of what the backup has got, where the primary has more.
    pub partial_acks: u64,
    /// Frames that nobody had agreed on, and that a host that took over had heard.
    pub overheard: u64,
    /// Conversations that clients have begun.
    pub conversations: u64,
    /// Worlds in which no copy that may lead was left.
    pub lost: u64,
}

impl worlds::Tally for Tally {
    fn add(&mut self, other: &Self) {
        let sums = [
            (&mut self.steps, other.steps),
            (&mut self.inputs, other.inputs),
            (&mut self.released, other.released),
            (&mut self.syncs, other.syncs),
            (&mut self.joins, other.joins),
            (&mut self.take_overs, other.take_overs),
            (&mut self.resumed, other.resumed),
            (&mut self.drops, other.drops),
            (&mut self.deaths, other.deaths),
            (&mut self.cold_starts, other.cold_starts),
            (&mut self.ended, other.ended),
            (&mut self.promotions, other.promotions),
            (&mut self.matched, other.matched),
            (&mut self.partial_acks, other.partial_acks),
            (&mut self.overheard, other.overheard),
            (&mut self.conversations, other.conversations),
            (&mut self.lost, other.lost),
        ];
        for (sum, more) in sums {
            *sum += more;
        }
    }
}

/// Plays so many worlds, or until one fails.
#[must_use]
pub fn run(seeds: u64, start: u64, bug: Option<Bug>) -> Report<Tally> {
    worlds::run(seeds, start, |seed| play(seed, bug, false))
}

/// Plays one world; a panic is a failure.
pub fn play(seed: u64, bug: Option<Bug>, trace: bool) -> Result<Tally, String> {
    worlds::caught(|| {
        let world = World::new(Random::new(seed), bug, is_cold(seed), trace).with_person(person(seed));
        match has_clients(seed) {
            true => world.with_clients().play(),
            false => world.play(),
        }
    })
}

/// Whether clients speak TCP with the VM in this world.
const fn has_clients(seed: u64) -> bool {
    seed % 4 == 0
}

/// What a person wants in this world.
const fn person(seed: u64) -> Person {
    match seed % 16 {
        2 => Person::Ends { fails: true },
        6 | 10 => Person::Ends { fails: false },
        14 => Person::Promotes,
        _ => Person::Absent,
    }
}

/// Whether all copies may die in this world.
const fn is_cold(seed: u64) -> bool {
    seed % 4 == 3
}
