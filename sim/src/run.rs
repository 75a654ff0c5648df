//! What it decides: a seed's verdict.
//!
//! Flow: world -> faults until `CHAOS_US` -> calm -> everybody up, one leader, everything agreed everywhere, probes
//! answered -> linearizable histories.
//!
//! Invariants: the smallest failing seed is reported, however many threads search.
//!
//! Not here: printing (`main`).

use crate::chaos::{set_willing, truncate};
use crate::linear::linearizable;
use crate::world::{Next, World};
use dunlin_core::consensus::{Bug, Event, Role};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// Faults end then.
pub const CHAOS_US: u64 = 2_500_000;
/// All is agreed so much later: a candidate whose votes were late again and again rests for up to 64 elections (E5), 3.84 s here.
const CALM_US: u64 = 8_000_000;
/// An ordinary world of seven hosts takes ten thousand steps. Each host of a larger one hears as much from its leader, and now
/// and then from everybody.
const STORM_STEPS: u64 = 100_000;
const STORM_HOSTS: u64 = 7;

/// What to play.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many seeds.
    pub seeds: u64,
    /// The first one.
    pub start: u64,
    /// Members of each world's group; without a number the seed says.
    pub size: Option<u8>,
    /// A fault put back on purpose.
    pub bug: Option<Bug>,
    /// Also check each word against the disk (C5). Off for bugs by default: they must be found by their damage.
    pub strict: bool,
    /// How many threads; 0: one per core.
    pub threads: usize,
}

/// A seed that broke a promise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// What broke.
    pub what: String,
}

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Seeds played to their end.
    pub seeds: u64,
    /// The smallest failing seed.
    pub failure: Option<Failure>,
    /// Things that happened.
    pub steps: u64,
    /// Entries agreed.
    pub agreed: u64,
    /// Elections won.
    pub elections: u64,
    /// Client operations answered.
    pub answered: u64,
    /// Frames that owners whose turns take time let out.
    pub released: u64,
}

/// Plays `seeds` worlds from `start`.
#[must_use]
pub fn run(seeds: u64, start: u64, bug: Option<Bug>) -> Report {
    run_with(Options {
        seeds,
        start,
        size: None,
        bug,
        strict: bug.is_none(),
        threads: 0,
    })
}

/// Plays `seeds` worlds from `start`, each with a group of `size`.
#[must_use]
pub fn run_large(seeds: u64, start: u64, size: u8) -> Report {
    run_with(Options {
        seeds,
        start,
        size: Some(size),
        bug: None,
        strict: true,
        threads: 0,
    })
}

/// The same with all settings.
#[must_use]
pub fn run_with(options: Options) -> Report {
    quiet_panics();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if options.threads == 0 {
        cores
    } else {
        options.threads
    };
    let end = options.start.saturating_add(options.seeds);
    let (next, lowest) = (AtomicU64::new(options.start), AtomicU64::new(u64::MAX));
    let report = Mutex::new(Report::default());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || seed > lowest.load(Ordering::Relaxed) {
                        return;
                    }
                    let played = play_caught(seed, options);
                    let mut report = report.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    match played {
                        Ok(world) => report.add(&world),
                        Err(what) => {
                            lowest.fetch_min(seed, Ordering::Relaxed);
                            if report.failure.as_ref().is_none_or(|known| seed < known.seed) {
                                report.failure = Some(Failure { seed, what });
                            }
                        }
                    }
                }
            });
        }
    });
    report
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Plays one seed and prints everything that happens.
pub fn trace(seed: u64, options: Options) -> Result<(), String> {
    let mut world = World::new(seed, options.size, options.bug, options.strict, true);
    play(&mut world)
}

impl Report {
    fn add(&mut self, world: &World) {
        self.seeds += 1;
        self.steps += world.steps;
        self.agreed += world.checker.agreed();
        self.elections += world.elections;
        self.answered += world.clients.answered;
        self.released += world.released;
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// A panic inside a world is a verdict, not a message on the terminal.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                loud(info);
            }
        }));
    });
}

fn play_caught(seed: u64, options: Options) -> Result<World, String> {
    QUIET.set(true);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed, options.size, options.bug, options.strict, false);
        play(&mut world).map(|()| world)
    }));
    QUIET.set(false);
    caught.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
            .unwrap_or_default())
    })
}

fn play(world: &mut World) -> Result<(), String> {
    world.plan(0, Next::Client);
    if world.busy.is_some() {
        crate::busy::begin(world);
    } else {
        world.plan(5_000, Next::Chaos);
        crate::owner::begin(world);
    }
    advance(world, CHAOS_US)?;
    be_calm(world)?;
    settle(world)?;
    for (register, history) in world.clients.history.iter().enumerate() {
        if !linearizable(history, 0) {
            return Err(format!("register {register} is not linearizable: {history:?}"));
        }
    }
    Ok(())
}

fn advance(world: &mut World, until_us: u64) -> Result<(), String> {
    let hosts = (world.hosts.len() as u64).max(STORM_HOSTS);
    let storm_steps = STORM_STEPS * hosts.pow(2) / STORM_HOSTS.pow(2);
    while let Some(next) = world.take_next(until_us) {
        let is_fault = matches!(
            next,
            Next::Chaos | Next::Nap(_) | Next::Turn(_) | Next::Drive(..) | Next::Release(..)
        );
        if is_fault && world.now_us >= CHAOS_US {
            continue;
        }
        world.happen(next)?;
        if world.steps > storm_steps {
            return Err(format!(
                "storm: {} steps in {} us; replicas answer each other without end",
                world.steps, world.now_us
            ));
        }
    }
    world.now_us = world.now_us.max(until_us);
    Ok(())
}

/// The faults end: everybody is up, awake, willing and connected.
fn be_calm(world: &mut World) -> Result<(), String> {
    world.say(|| "calm".into());
    world.weather.calm();
    world.cut.clear();
    for id in 0..world.hosts.len() as u8 {
        let host = &mut world.hosts[usize::from(id)];
        host.asleep_until_us = host.asleep_until_us.min(world.now_us);
        host.slow_us = 0;
        if let Some(owner) = &mut host.owner {
            owner.rest();
        }
        if host.node.is_none() {
            world.start(id);
        }
        set_willing(world, id, true)?;
    }
    Ok(())
}

/// Liveness: a leader, and everything agreed is everywhere, new entries too.
fn settle(world: &mut World) -> Result<(), String> {
    let deadline_us = world.now_us + CALM_US;
    let mut probe = None;
    while world.now_us < deadline_us {
        let until_us = world.now_us + 5_000;
        advance(world, until_us)?;
        for id in world.ids(|node| node.appended().index.0 > node.first().0 + 40) {
            truncate(world, id)?;
        }
        let leaders = world.leaders();
        let newest = leaders.iter().max_by_key(|id| {
            world.hosts[usize::from(**id)]
                .node
                .as_ref()
                .map(dunlin_core::consensus::Consensus::term)
        });
        let Some(&leader) = newest else { continue };
        let Some(node) = world.hosts[usize::from(leader)].node.as_mut() else {
            continue;
        };
        let (appended, committed) = (node.appended().index, node.committed());
        match probe {
            None => {
                if let Ok(index) = node.propose(bytes::Bytes::from_static(b"probe")) {
                    probe = Some(index);
                    world.step(leader, Event::Flush)?;
                }
            }
            Some(index) if committed >= index && everywhere(world, leader, index.0) => return Ok(()),
            Some(index) if appended < index => probe = None,
            Some(_) => {}
        }
    }
    let states: Vec<_> = world
        .hosts
        .iter()
        .enumerate()
        .filter_map(|(id, host)| {
            host.node
                .as_ref()
                .map(|n| (id, n.role(), n.term().0, n.appended(), n.committed().0))
        })
        .collect();
    Err(format!(
        "liveness: no common state {CALM_US} us after the last fault: {states:?}"
    ))
}

fn everywhere(world: &World, leader: u8, index: u64) -> bool {
    let Some(node) = &world.hosts[usize::from(leader)].node else {
        return false;
    };
    node.members().iter().all(|member| {
        let host = &world.hosts[usize::from(member.id.0)];
        host.machine.through.0 >= index
            && host
                .node
                .as_ref()
                .is_some_and(|node| !matches!(node.role(), Role::Recovering | Role::Candidate { .. }))
    })
}
