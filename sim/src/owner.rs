//! What it decides: when the owners of a world's replicas are busy, and when they let a frame out.
//!
//! Flow: in such a world each owner takes turns: it reads its clock, is kept from its core for a while, drives its replica, works for a
//! while, and lets a frame out if its lease allows it. From the reading of the clock on to the end of the turn the keeper drives
//! the replica, as fabric's `group::kept` does, by the same `Standby`.
//!
//! Invariants: no frame leaves a host in a term that is over, that is after a newer leader's first moment (X1, at the release); and
//! nobody may be about to let one out (`World::check_speakers`, after every step).
//!
//! Source: a VM's loop, which does milliseconds of other work between two looks at its group.
//!
//! Not here: the clock's rule (`consensus::keeper`), the lease (`consensus::lease`).

use crate::random::Random;
use crate::world::{Next, World};
use dunlin_core::consensus::{Bug, Event, Role, Standby};

/// A heartbeat of the core's in this simulator.
pub const PERIOD_US: u64 = 2_500;
/// Longer than any turn here, as a loop that is not hung.
const PATIENCE_US: u64 = 1_000_000;
/// The longest that an owner stands still between its clock and its replica.
const STALL_US: u64 = 40_000;
/// The longest that it works in one turn.
const WORK_US: u64 = 60_000;
/// The longest between two turns, in which it drives its replica at once.
const PAUSE_US: u64 = 20_000;

/// One replica's owner.
#[derive(Clone, Debug)]
pub struct Owner {
    standby: Standby,
    /// Its turn lasts until then.
    busy_until_us: u64,
}

impl Owner {
    /// One that is not busy.
    pub fn new(bug: Option<Bug>) -> Self {
        let mut standby = Standby::new(PERIOD_US, PATIENCE_US);
        standby.put_back(bug);
        Self {
            standby,
            busy_until_us: 0,
        }
    }

    /// It is not busy any more.
    pub fn rest(&mut self) {
        self.busy_until_us = 0;
    }

    /// Not busy: it reads its clock and drives its replica.
    pub fn drives(&mut self, clock_us: u64) -> u64 {
        self.standby.owner_drives(clock_us, clock_us)
    }
}

/// Who drives a host's replica now, and by what time.
pub enum Driver {
    /// The owner, or there are no owners in this world.
    Owner,
    /// The keeper.
    Keeper(u64),
    /// Nobody before so long.
    Nobody(u64),
}

/// Looks at a host's owner.
pub fn driver(world: &World, id: u8) -> Driver {
    let Some(owner) = &world.hosts[usize::from(id)].owner else {
        return Driver::Owner;
    };
    if owner.busy_until_us <= world.now_us {
        return Driver::Owner;
    }
    match owner.standby.stands_in(world.clock_us(id)) {
        Some(time_us) => Driver::Keeper(time_us),
        None => Driver::Nobody(PERIOD_US.min(owner.busy_until_us - world.now_us)),
    }
}

/// The keeper wakes so often, and not when a deadline has come.
pub fn wakes_after_us(world: &World, id: u8) -> u64 {
    match driver(world, id) {
        Driver::Owner => 0,
        Driver::Keeper(_) | Driver::Nobody(_) => PERIOD_US,
    }
}

/// The owners of a world begin to work.
pub fn begin(world: &mut World) {
    for id in 0..world.hosts.len() as u8 {
        if world.hosts[usize::from(id)].owner.is_some() {
            pause(world, id);
        }
    }
}

fn pause(world: &mut World, id: u8) {
    let after_us = world.random.between(500, PAUSE_US);
    world.plan(after_us, Next::Turn(id));
}

/// Mostly not at all.
fn now_and_then(random: &mut Random, most_us: u64) -> u64 {
    match random.chance(400_000) {
        true => random.below(most_us),
        false => 0,
    }
}

/// An owner reads its clock, and stands still for a while.
pub fn turn(world: &mut World, id: u8) {
    let read_us = world.clock_us(id);
    let stall_us = now_and_then(&mut world.random, STALL_US);
    if stall_us > 0 {
        deafen_another(world, id);
    }
    busy_for(world, id, stall_us);
    world.plan(stall_us, Next::Drive(id, read_us));
}

/// Now and then another replica does not hear the leader meanwhile: it will ask this one for its vote, again and again.
fn deafen_another(world: &mut World, id: u8) {
    let leaders = world.leaders();
    let other = world.random.below(world.members.len() as u64) as u8;
    let deaf = world.random.chance(400_000) && world.now_us < crate::run::CHAOS_US;
    if let Some(leader) = world
        .random
        .pick(&leaders)
        .filter(|leader| deaf && other != id && other != *leader)
    {
        world.say(|| format!("{other} does not hear {leader} while {id} is busy"));
        world.cut.push((leader, other));
    }
}

/// It drives its replica by what it has read, and works.
pub fn drive(world: &mut World, id: u8, read_us: u64) -> Result<(), String> {
    let asleep_us = world.hosts[usize::from(id)]
        .asleep_until_us
        .saturating_sub(world.now_us);
    if asleep_us > 0 {
        busy_for(world, id, asleep_us);
        world.plan(asleep_us, Next::Drive(id, read_us));
        return Ok(());
    }
    let clock_us = world.clock_us(id);
    let Some(owner) = &mut world.hosts[usize::from(id)].owner else {
        return Ok(());
    };
    let time_us = owner.standby.owner_drives(clock_us, read_us);
    let work_us = now_and_then(&mut world.random, WORK_US);
    world.step_at(id, time_us, Event::Tick)?;
    busy_for(world, id, work_us);
    world.plan(work_us, Next::Release(id, read_us));
    Ok(())
}

/// At the end of its turn it lets a frame out, if it may.
pub fn release(world: &mut World, id: u8, read_us: u64) -> Result<(), String> {
    let asleep_us = world.hosts[usize::from(id)]
        .asleep_until_us
        .saturating_sub(world.now_us);
    if asleep_us > 0 {
        world.plan(asleep_us, Next::Release(id, read_us));
        return Ok(());
    }
    let looks_at_us = match world.bug == Some(Bug::ReleasesByOldTime) {
        true => read_us,
        false => world.clock_us(id),
    };
    if let Some(node) = world.hosts[usize::from(id)].node.as_ref()
        && node.role() == Role::Leader
        && node
            .speaks_until_us()
            .is_some_and(|until_us| looks_at_us < until_us)
    {
        world.released += 1;
        let newest = world.checker.newest_leader();
        if newest.is_some_and(|(term, _)| term > node.term()) {
            return Err(format!(
                "X1 one speaker: replica {id} let a frame of term {} out after {newest:?} led",
                node.term().0
            ));
        }
    }
    pause(world, id);
    Ok(())
}

fn busy_for(world: &mut World, id: u8, for_us: u64) {
    let until_us = world.now_us + for_us;
    if let Some(owner) = &mut world.hosts[usize::from(id)].owner {
        owner.busy_until_us = until_us;
    }
}
