//! What it decides: whether the session's two state machines (core's `replica::sync`) keep what a replica promises, in worlds that lie.
//!
//! Two hosts with model VMs, the production machines on both sides, and between them a stream that is cut at any byte, a mirrored disk,
//! an agreed log, hosts that die at any effect, effects that fail, and waits that are in vain at any time. Everything that can happen
//! next is a possible turn; the seed picks one.
//!
//! Checked from outside: whatever has left is explained by the VM that takes over; a copy's memory, devices and disk belong
//! together; what was agreed is with the VM that takes over, where both ran; a primary's VM never stands for good.
//!
//! Not here, and so not proven: the log and elections are those of an oracle (they agree at random times, and never wrongly: the
//! production consensus has worlds of its own, `crate::world`); the VM loops are models of what `node` does.

mod backup;
mod hosts;
mod primary;
pub mod vm;
mod world;

use crate::random::Random;
use crate::worlds::{self, Report};
pub use dunlin_core::replica::sync::bugs::Bug;
use dunlin_core::sync::compare::Compare;
use world::World;

/// What a world came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Turns.
    pub turns: u64,
    /// Syncs that the backup has acknowledged.
    pub syncs: u64,
    /// Of these, with a round while the VMs ran.
    pub precopied: u64,
    /// Take-overs that have succeeded, and that failed because a sync was applied by half.
    pub take_overs: u64,
    /// Copies that a sync was applied to by half.
    pub torn: u64,
    /// What has left.
    pub released: u64,
    /// Sessions that were broken off.
    pub broken: u64,
    /// What came ahead of its sync.
    pub ahead: u64,
    /// Pages that a join did not send, for the backup held them.
    pub held: u64,
}

impl worlds::Tally for Tally {
    fn add(&mut self, other: &Self) {
        self.turns += other.turns;
        self.syncs += other.syncs;
        self.precopied += other.precopied;
        self.held += other.held;
        self.ahead += other.ahead;
        self.take_overs += other.take_overs;
        self.torn += other.torn;
        self.released += other.released;
        self.broken += other.broken;
    }
}

/// Plays so many worlds, or until one fails.
#[must_use]
pub fn run(seeds: u64, start: u64, bug: Option<Bug>) -> Report<Tally> {
    worlds::run(seeds, start, |seed| play(seed, bug, false))
}

/// Plays one world; a panic is a failure.
pub fn play(seed: u64, bug: Option<Bug>, trace: bool) -> Result<Tally, String> {
    // Beside what is drawn: so the worlds of earlier seeds are what they were.
    let compare = match seed % 2 {
        0 => Compare::List,
        _ => Compare::Tree,
    };
    worlds::caught(|| World::new(Random::new(seed), compare, bug, trace).play())
}
