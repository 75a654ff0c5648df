//! What it decides: which fault comes next.
//!
//! Flow: every few milliseconds of virtual time one strike: crash, restart, cut, heal, sleep, slow disk, change of
//! members, truncation, leadership transfer, an unwilling host, a link said to be lost.
//!
//! Invariants: a group that keeps its log in memory never loses a majority's memory at once, nor all that may lead:
//! that is beyond what the protocol promises (it then stops for good, which `docs/consensus.md` says).
//!
//! Not here: what the faults do (`world`, `disk`).

use crate::random::Random;
use crate::world::{Next, World};
use dunlin_core::consensus::{Durability, Event, Member, Role};
use dunlin_core::units::ReplicaId;

/// How bad a world is; drawn once, then calm at the end.
#[derive(Clone, Debug)]
pub struct Weather {
    loss_ppm: u64,
    twice_ppm: u64,
    late_ppm: u64,
    late_us: u64,
    delay_us: u64,
    jitter_us: u64,
    crash_ppm: u64,
    strike_us: u64,
    /// The slowest ordinary write.
    pub disk_us: u64,
    /// The longest pause between client operations.
    pub client_us: u64,
    /// Entries in one message.
    pub batch: usize,
    /// Entries under way to a peer.
    pub window: usize,
}

impl Weather {
    /// Some worlds are mild, some wild.
    pub fn draw(random: &mut Random) -> Self {
        let mut of = |choices: &[u64]| random.pick(choices).unwrap_or(0);
        Self {
            loss_ppm: of(&[0, 1_000, 20_000, 100_000]),
            twice_ppm: of(&[0, 5_000, 50_000]),
            late_ppm: of(&[0, 1_000, 20_000, 150_000]),
            late_us: of(&[20_000, 50_000, 300_000]),
            delay_us: of(&[5, 50, 300, 2_000]),
            jitter_us: of(&[0, 50, 1_000, 6_000]),
            crash_ppm: of(&[0, 100, 500, 2_000]),
            strike_us: of(&[2_000, 8_000, 30_000]),
            disk_us: of(&[100, 500, 5_000]),
            client_us: of(&[3_000, 10_000, 30_000]),
            batch: of(&[1, 2, 8]) as usize,
            window: of(&[2, 16]) as usize,
        }
    }
    /// A network that doubles a third of all messages: whatever answers an answer breeds.
    pub fn double_much(&mut self) {
        self.twice_ppm = 333_000;
    }
    /// No more faults.
    pub fn calm(&mut self) {
        *self = Self {
            loss_ppm: 0,
            twice_ppm: 0,
            late_ppm: 0,
            late_us: 0,
            delay_us: 50,
            jitter_us: 100,
            crash_ppm: 0,
            strike_us: u64::MAX,
            disk_us: 300,
            ..*self
        };
    }
    /// Does the host crash in the middle of this step's actions?
    pub fn crash_in_step(&self, random: &mut Random) -> bool {
        self.crash_ppm > 0 && random.chance(self.crash_ppm)
    }
    /// 0: lost.
    pub fn copies(&self, random: &mut Random) -> u32 {
        if random.chance(self.loss_ppm) {
            0
        } else {
            1 + u32::from(random.chance(self.twice_ppm))
        }
    }
    /// Mostly short; now and then very long.
    pub fn delay_us(&self, random: &mut Random) -> u64 {
        let late_us = if random.chance(self.late_ppm) {
            random.below(self.late_us)
        } else {
            0
        };
        self.delay_us + random.below(self.jitter_us + 1) + late_us
    }
}

/// May this host lose what it has not on disk?
pub fn may_crash(world: &World, id: u8) -> bool {
    if world.durability == Durability::Disk {
        return true;
    }
    let well = |member: &&Member| {
        let node = world.hosts[usize::from(member.id.0)].node.as_ref();
        member.id.0 != id && node.is_some_and(|node| node.role() != Role::Recovering)
    };
    // A member that has not heard of its membership yet stands for no election, whoever waits for it.
    let knows = |member: &&Member| {
        let node = world.hosts[usize::from(member.id.0)].node.as_ref();
        node.is_some_and(|node| node.members().iter().any(|known| known.id == member.id))
    };
    let survives = |members: &[Member]| {
        let heirs = members
            .iter()
            .filter(well)
            .filter(|member| member.electable() && knows(member))
            .count();
        members.iter().filter(well).count() > members.len() / 2 && heirs > 0
    };
    // Which list is in force depends on whom one asks.
    let mut nodes = world.hosts.iter().filter_map(|host| host.node.as_ref());
    survives(&world.members) && nodes.all(|node| node.members().is_empty() || survives(node.members()))
}

/// One fault.
pub fn strike(world: &mut World) -> Result<(), String> {
    let after_us = world
        .random
        .between(world.weather.strike_us / 4, world.weather.strike_us * 2);
    world.plan(after_us, Next::Chaos);
    let hosts = world.hosts.len() as u64;
    let id = world.random.below(hosts) as u8;
    let other = world.random.below(hosts) as u8;
    let at = usize::from(id);
    let leaders = world.leaders();
    let leader = world.random.pick(&leaders);
    match world.random.below(26) {
        0..=3 => {
            let victim = if world.random.chance(500_000) {
                leader.unwrap_or(id)
            } else {
                id
            };
            if world.hosts[usize::from(victim)].node.is_some() && may_crash(world, victim) {
                world.crash(victim);
            }
        }
        4..=8 => {
            if let Some(down) = (0..hosts as u8).find(|id| world.hosts[usize::from(*id)].node.is_none()) {
                world.start(down);
                return set_willing(world, down, true);
            }
        }
        9 => {
            world.say(|| format!("cut {id} -> {other}"));
            world.cut.push((id, other));
        }
        10..=11 => {
            let whom = leader.unwrap_or(id);
            world.say(|| format!("cut {whom} off"));
            if world.random.chance(500_000) {
                // What it appends meanwhile is still on its way to the disk when a newer leader cuts it.
                world.hosts[usize::from(whom)].slow_us = 60_000;
            }
            world
                .cut
                .extend((0..hosts as u8).flat_map(|peer| [(whom, peer), (peer, whom)]));
        }
        12..=14 => {
            world.say(|| "all links heal".into());
            world.cut.clear();
        }
        15 => {
            let whom = if world.random.chance(500_000) {
                leader.unwrap_or(id)
            } else {
                id
            };
            let for_us = world.random.between(1_000, 250_000);
            world.say(|| format!("{whom} sleeps for {for_us} us"));
            world.hosts[usize::from(whom)].asleep_until_us = world.now_us + for_us;
        }
        16..=17 => {
            world.hosts[at].slow_us = [0, 2_000, 20_000, 100_000, 400_000][world.random.below(5) as usize]
        }
        18..=19 => {
            if let Some(leader) = leader {
                return change_members(world, leader);
            }
        }
        20..=22 => {
            let whom = if world.random.chance(500_000) {
                leader.unwrap_or(id)
            } else {
                id
            };
            return truncate(world, whom);
        }
        23 => {
            if let Some(leader) = leader {
                let step_down = world.random.chance(300_000);
                let event = if step_down {
                    Event::StepDown
                } else {
                    Event::TransferTo(ReplicaId(other))
                };
                return world.step(leader, event);
            }
        }
        24 => {
            let willing = world.random.chance(700_000);
            return set_willing(world, id, willing);
        }
        _ if world.random.chance(500_000) => {
            // One lets go of the link, and knows it before the other can see it.
            let lost = |peer, by_peer| Event::LinkLost {
                peer: ReplicaId(peer),
                by_peer,
            };
            world.step(other, lost(id, false))?;
            if world.hosts[usize::from(other)].node.is_some() {
                return world.step(id, lost(other, true));
            }
        }
        _ => {
            let peer = ReplicaId(other);
            return world.step(id, Event::LinkUp { peer });
        }
    }
    Ok(())
}

/// Tells a host whether its VM is whole.
pub fn set_willing(world: &mut World, id: u8, willing: bool) -> Result<(), String> {
    let host = &mut world.hosts[usize::from(id)];
    if host.node.is_some() {
        host.willing = willing;
        return world.step(id, Event::MayLead(willing));
    }
    Ok(())
}

/// Cuts a log's front at what is applied.
pub fn truncate(world: &mut World, id: u8) -> Result<(), String> {
    let host = &world.hosts[usize::from(id)];
    if host.node.is_none() {
        return Ok(());
    }
    let (through, state) = (host.machine.through, host.machine.snapshot());
    world.step(id, Event::Truncate { through, state })
}

/// One member more, less, or changed.
fn change_members(world: &mut World, leader: u8) -> Result<(), String> {
    let spares: Vec<u8> = (0..world.hosts.len() as u8).collect();
    // As in `may_crash`: the list that was last asked for need not be the one in force, which its leader goes by.
    let well = |member: &Member| {
        let node = world.hosts[usize::from(member.id.0)].node.as_ref();
        node.is_some_and(|node| node.role() != Role::Recovering)
    };
    let in_force = world.hosts[usize::from(leader)].node.as_ref();
    let in_force = in_force.map_or(&[][..], |node| node.members());
    let well = world.durability == Durability::Disk || world.members.iter().chain(in_force).all(well);
    let node = world.hosts[usize::from(leader)].node.as_mut();
    let Some(node) = node.filter(|_| well) else {
        return Ok(());
    };
    let mut members = node.members().to_vec();
    let absent: Vec<u8> = spares
        .into_iter()
        .filter(|id| !members.iter().any(|member| member.id.0 == *id))
        .collect();
    let at = world.random.below(members.len() as u64) as usize;
    match world.random.below(4) {
        0 => {
            let Some(id) = world.random.pick(&absent) else {
                return Ok(());
            };
            members.push(if world.random.chance(500_000) {
                Member::full(id)
            } else {
                Member::witness(id)
            });
        }
        1 => {
            members.remove(at);
        }
        // Most of the time they stay who they are.
        _ => return Ok(()),
    }
    // Now and then two at once, which must be refused.
    if world.random.chance(300_000) && members.len() > 2 {
        let second = world.random.below(members.len() as u64) as usize;
        members.remove(second);
    }
    let heirs = members.iter().filter(|member| member.electable()).count();
    if members.len() < 2 || (world.durability == Durability::Memory && heirs < 2) {
        return Ok(());
    }
    if node.change_members(members.clone()).is_ok() {
        world.say(|| format!("{leader} changes the members to {members:?}"));
        world.members = members;
        return world.step(leader, Event::Flush);
    }
    Ok(())
}
