//! A long time with clients that come and go: memory of every process must stay what it is.
//!
//! * **Decides:** that no process grows by more than 5 % between the first minutes and the last.
//! * **Flow:** VM up and protected -> connections at a steady rate -> a while to warm up -> memory -> the rest of the time ->
//!   memory again -> the clients' verdict.
//! * **Invariants:** what counts is memory of a process' own (`RssAnon`): the guest's memory is shared, and as large as the guest
//!   was told that it is.

mod places;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use super::World;
use crate::client::{Passers, PassersReport, PassersSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;
use places::Places;

const PATIENCE: Duration = Duration::from_secs(120);
/// Clients that come and go. So many that the rate holds while each of them takes half a second.
const WORKERS: u32 = 96;
/// Connections of all of them together.
const PER_MINUTE: u32 = 10_000;
/// The part of that rate, in percent, that must really have been.
const LEAST_PERCENT: u64 = 95;
/// A process may grow by this much, in percent, and by this much in any case: a thread's stack is no leak.
const GROWTH_PERCENT: u64 = 5;
/// Memory is looked at so often, at least so many times and until so many syncs have ended, and each figure is the least of all: the log
/// and what waits to leave are as large as they are, until the next sync empties them, and a leak is what no sync empties.
const LOOK: Duration = Duration::from_secs(1);
const LOOKS: usize = 30;
const SYNCS: u64 = 3;
/// A VM that needs no sync for so long is looked at without one.
const MOST_LOOKS: usize = 240;

/// One process' memory, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Of its own.
    pub own_kib: u64,
    /// Shared: the guest's, and rings.
    pub shared_kib: u64,
}

/// A process, as "host program", and its memory then and at the end.
pub type Figures = BTreeMap<String, (Memory, Memory)>;

/// The same processes by number, all at one time, and where they have their own memory.
type Look = BTreeMap<String, (i32, Memory, Places)>;
/// How often what was found so far is told, between the first look and the last.
const PARTS: u32 = 4;
/// So often a look is taken anew where the VM was not protected all the while: a machine that is busy may lose a backup.
const LOOKS_AGAIN: usize = 20;

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct SoakOutcome {
    /// What the clients saw.
    pub clients: PassersReport,
    /// Memory of each process.
    pub memory: Figures,
}

/// Plays it for so long.
///
/// # Errors
/// When a process grew, clients were let down or too few; the daemons' logs are kept.
pub fn run(world: &World, lasts: Duration, say: &mut dyn FnMut(&str)) -> Result<SoakOutcome> {
    in_a_testbed("soak", &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        play(cluster, world, lasts, say)
    })
}

fn play(
    cluster: &mut Cluster<'_>,
    world: &World,
    lasts: Duration,
    say: &mut dyn FnMut(&str),
) -> Result<SoakOutcome> {
    cluster.start_hosts()?;
    let plan = VmPlan::redis("dunlin");
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, service(), PATIENCE)?;
    let passers = Passers::start(
        client,
        &PassersSpec {
            target: service(),
            workers: WORKERS as usize,
            most_incrs: 3,
            every: Duration::from_secs(60) * WORKERS / PER_MINUTE,
            stall: PATIENCE,
            give_up: PATIENCE,
        },
    )?;
    cluster.await_protected(&plan.name, PATIENCE)?;
    // The first syncs, connections and buffers are no growth.
    std::thread::sleep(lasts / 5);
    let (begun, connected) = (Instant::now(), passers.connections());
    let first = look(cluster, &plan.name)?;
    let mut last = first.clone();
    for part in 1..=PARTS {
        std::thread::sleep((lasts * 4 / 5 * part / PARTS).saturating_sub(begun.elapsed()));
        last = look(cluster, &plan.name)?;
        let own = last
            .iter()
            .map(|(process, (_, memory, _))| format!("{process} {}", memory.own_kib));
        let own = own.collect::<Vec<_>>().join(", ");
        let (connections, syncs) = (passers.connections(), epoch(cluster, &plan.name));
        say(&format!(
            "soak: part {part} of {PARTS}: {connections} connections, {syncs} syncs, own KiB of {own}"
        ));
    }
    let (minutes, connected) = (
        begun.elapsed().as_secs_f64() / 60.0,
        passers.connections() - connected,
    );
    let clients = passers.finish()?;
    let mut memory = Figures::new();
    let mut places = BTreeMap::new();
    for (process, (pid, then, place)) in first {
        let &(pid_now, now, ref place_now) = last
            .get(&process)
            .with_context(|| format!("{process} is not there any more"))?;
        places.insert(process.clone(), place_now.since(&place));
        // A backup that was lost and taken in anew is another process; a daemon that is one has died.
        ensure!(
            pid_now == pid || !process.ends_with(DAEMON),
            "{process} has not lived through it"
        );
        say(&format!(
            "soak: {process}: own {} -> {} KiB, shared {} -> {} KiB{}",
            then.own_kib,
            now.own_kib,
            then.shared_kib,
            now.shared_kib,
            if pid_now == pid {
                ""
            } else {
                ", started anew meanwhile"
            }
        ));
        memory.insert(process, (then, now));
    }
    cluster.end("a", &plan.name)?;
    ensure!(clients.counted.is_clean(), "clients were let down: {clients:?}");
    let least = (minutes * f64::from(PER_MINUTE)) as u64 * LEAST_PERCENT / 100;
    ensure!(
        connected >= least,
        "{connected} connections in {minutes:.1} minutes: this machine is too slow for {PER_MINUTE} a minute"
    );
    for (process, (then, now)) in &memory {
        ensure!(
            !has_grown(then.own_kib, now.own_kib),
            "{process} grew from {} to {} KiB: {}",
            then.own_kib,
            now.own_kib,
            places[process]
        );
    }
    Ok(SoakOutcome { clients, memory })
}

fn has_grown(then_kib: u64, now_kib: u64) -> bool {
    now_kib > then_kib + then_kib * GROWTH_PERCENT / 100
}

/// As in `/proc/PID/status`.
pub(super) const DAEMON: &str = "dunlin";

/// The least of some looks at every process of every host: three daemons and two copies of the VM.
fn look(cluster: &Cluster<'_>, vm: &str) -> Result<Look> {
    let mut found = Look::new();
    for _ in 0..LOOKS_AGAIN {
        cluster.await_protected(vm, PATIENCE)?;
        found = look_once(cluster, vm);
        if found.len() == 5 {
            return Ok(found);
        }
    }
    bail!("not five processes: {:?}", found.keys().collect::<Vec<_>>())
}

fn look_once(cluster: &Cluster<'_>, vm: &str) -> Look {
    let mut looks: BTreeMap<(String, i32), Vec<Memory>> = BTreeMap::new();
    let (begun, mut taken) = (epoch(cluster, vm), 0);
    while taken < LOOKS || (taken < MOST_LOOKS && epoch(cluster, vm) < begun + SYNCS) {
        taken += 1;
        for host in cluster.hosts() {
            for pid in cluster.testbed().node(host).pids() {
                if let Some((program, memory)) = memory_of(pid) {
                    let process = (format!("{host} {program}"), pid);
                    looks.entry(process).or_default().push(memory);
                }
            }
        }
        std::thread::sleep(LOOK);
    }
    let least = |looks: &[Memory], of: fn(&Memory) -> u64| looks.iter().map(of).min().unwrap_or_default();
    // What is not there every time is a command, not a part of the VM.
    let staying = looks.into_iter().filter(|(_, looks)| looks.len() == taken);
    staying
        .map(|((process, pid), looks)| {
            let own_kib = least(&looks, |look| look.own_kib);
            let shared_kib = least(&looks, |look| look.shared_kib);
            (process, (pid, Memory { own_kib, shared_kib }, Places::of(pid)))
        })
        .collect()
}

/// Syncs of the VM so far, as the host knows it that knows of most.
fn epoch(cluster: &Cluster<'_>, vm: &str) -> u64 {
    let statuses = cluster.statuses();
    let of_the_vm = statuses.iter().flat_map(|status| &status.vms);
    let epochs = of_the_vm
        .filter(|status| status.name == vm)
        .map(|status| status.epoch);
    epochs.max().unwrap_or_default()
}

pub(super) fn memory_of(pid: i32) -> Option<(String, Memory)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next().map(str::to_owned)
    };
    let kib = |name: &str| field(name)?.parse().ok();
    let memory = Memory {
        own_kib: kib("RssAnon:")?,
        shared_kib: kib("RssShmem:")?,
    };
    Some((field("Name:")?, memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_is_read_and_growth_beyond_the_limits_is_growth() {
        let (name, memory) = memory_of(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(!name.is_empty() && memory.own_kib > 0);
        assert!(has_grown(100_000, 105_001) && !has_grown(100_000, 105_000));
        assert!(has_grown(8000, 8401) && !has_grown(8000, 8400));
        assert!(!has_grown(1000, 10));
    }
}
