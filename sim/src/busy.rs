//! What it decides: how late the hosts of a busy world are, and when an election there has a reason.
//!
//! Flow: no host dies, no link is cut, no word is lost; but every scheduler gives its host no time now and then, for longer and
//! longer. Now and then all get none, as where a site of virtual machines is stopped and goes on. Each of these naps is short measured by the ones before, as the core has to learn it. So nobody but the first leader
//! is ever elected: `excuse` looks at the naps alone, from outside.
//!
//! Invariants: a nap is at most `growth` times the longest that every host has had by now, so that whoever leads has had one
//! like it; and at most half the longest patience. A host that wakes has time for its work before the next nap.
//!
//! Source: hosts with eight busy loops on two cores, where leaders came and went without a death.
//!
//! Not here: how the core learns (`consensus::detector`).

use crate::random::Random;
use crate::world::{Next, World};
use std::collections::VecDeque;

/// The core's time-outs in this simulator.
const ELECTION_US: u64 = 30_000;
/// What a beat, its way and the waker's own pace may add to a nap.
const SLACK_US: u64 = 10_000;
/// Between two naps of a host: it gets to work.
const AWAKE_US: u64 = 4_000;
/// The longest nap: half the longest patience, less what else there is.
const MOST_US: u64 = 90_000;
/// The longest that all hosts stand still together: nobody has heard anybody, and nobody is to blame.
const LONGEST_US: u64 = 400_000;
/// The first naps come when somebody leads.
const BEGIN_US: u64 = 300_000;

/// A busy world.
#[derive(Clone, Debug)]
pub struct Busy {
    /// Per host: the longest nap by now.
    longest_us: Vec<u64>,
    /// By how much, in a thousand, naps grow at most.
    growth: u64,
    /// The longest pause between two naps.
    pause_us: u64,
    /// The last naps: host, from, until.
    naps: VecDeque<(u8, u64, u64)>,
}

impl Busy {
    /// Some hosts are busy, some very busy.
    pub fn draw(random: &mut Random, members: usize) -> Self {
        Self {
            longest_us: vec![0; members],
            growth: random.between(1_050, 1_300),
            pause_us: random.between(2 * AWAKE_US, 60_000),
            naps: VecDeque::new(),
        }
    }

    /// An election in a busy world, after the first one: there is none without a reason, and here is none.
    pub fn excuse(&self, who: u8, now_us: u64) -> Result<(), String> {
        if now_us < BEGIN_US {
            return Ok(());
        }
        let lately: Vec<_> = self.naps.iter().rev().take(12).collect();
        Err(format!(
            "busy: replica {who} was elected though nobody died and no nap (host, from, until) was longer than expected: {lately:?}"
        ))
    }
}

/// A busy world begins.
pub fn begin(world: &mut World) {
    let hosts = world.busy.as_ref().map_or(0, |busy| busy.longest_us.len());
    for id in 0..hosts as u8 {
        let after_us = BEGIN_US + world.random.below(20_000);
        world.plan(after_us, Next::Nap(id));
    }
}

/// One host gets no time for a while.
pub fn nap(world: &mut World, id: u8) -> Result<(), String> {
    let now_us = world.now_us;
    let awake_us = world.hosts[usize::from(id)].asleep_until_us + AWAKE_US;
    if awake_us > now_us {
        let after_us = awake_us - now_us + world.random.below(AWAKE_US);
        world.plan(after_us, Next::Nap(id));
        return Ok(());
    }
    let all = world
        .random
        .chance(30_000)
        .then(|| world.random.between(MOST_US, LONGEST_US));
    let Some(busy) = &mut world.busy else {
        return Ok(());
    };
    if let Some(for_us) = all {
        world.say(|| format!("nobody gets any time for {for_us} us"));
        for host in &mut world.hosts {
            host.asleep_until_us = now_us + for_us;
        }
        world.plan(for_us + AWAKE_US, Next::Nap(id));
        return Ok(());
    }
    // What everybody has seen of the least busy host bounds the next nap of any: who leads is not known here.
    let seen_us = busy.longest_us.iter().copied().min().unwrap_or(0);
    let most_us = (seen_us * busy.growth / 1000).clamp(ELECTION_US - 2 * SLACK_US, MOST_US);
    // Mostly short; but the longest comes soon enough to be learnt.
    let for_us = if world.random.chance(300_000) {
        most_us
    } else {
        world.random.between(500, most_us)
    };
    busy.longest_us[usize::from(id)] = busy.longest_us[usize::from(id)].max(for_us);
    busy.naps.push_back((id, now_us, now_us + for_us));
    if busy.naps.len() > 64 {
        busy.naps.pop_front();
    }
    let after_us = for_us + world.random.between(AWAKE_US, busy.pause_us);
    world.hosts[usize::from(id)].asleep_until_us = now_us + for_us;
    world.say(|| format!("{id} gets no time for {for_us} us"));
    world.plan(after_us, Next::Nap(id));
    Ok(())
}
