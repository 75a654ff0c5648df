//! A backup that is lost and taken in anew, again and again: what a join needed must be given back.
//!
//! * **Decides:** that no join leaves more than [`LEFT_KIB`] in a daemon, in the mean of many.
//! * **Flow:** VM up and protected, counters at work -> SIGKILL to the backup's QEMU -> protected again, and so on -> memory of the
//!   daemons after some joins, and after many more.
//! * **Not here:** growth with time and with clients' connections (`soak`).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::World;
use super::soak::{DAEMON, Memory, memory_of};
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(120);
/// Joins before the first look: an allocator's pools are as large as they get.
const WARM_UP: usize = 24;
/// Joins between the two looks.
const JOINS: usize = 48;
/// A look is the least after so many joins, one after the other: what a session holds while it lasts is not what a join leaves.
const LOOKS: usize = 8;
/// What a join may leave behind: some events, and an allocator's pools that settle slowly. Buffers of its copies are a hundred times that.
const LEFT_KIB: u64 = 32;

/// By name, each daemon's memory of its own, in KiB: after [`WARM_UP`] joins, and after [`JOINS`] more.
pub type Grown = Vec<(String, u64, u64)>;

/// Plays it.
///
/// # Errors
/// When a daemon grew, or clients were let down; the daemons' logs are kept.
pub fn run(world: &World) -> Result<Grown> {
    in_a_testbed("rejoins", &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        play(cluster, world)
    })
}

fn play(cluster: &mut Cluster<'_>, world: &World) -> Result<Grown> {
    cluster.start_hosts()?;
    let plan = VmPlan::redis("dunlin");
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, service(), PATIENCE)?;
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: service(),
            connections: 2,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    let mut looks = Vec::new();
    for join in 1..=WARM_UP + JOINS {
        rejoin(cluster, &plan.name).with_context(|| format!("join {join}"))?;
        looks.push(daemons(cluster)?);
    }
    let first = least(&looks[WARM_UP - LOOKS..WARM_UP]);
    let last = least(&looks[looks.len() - LOOKS..]);
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    let both = first.into_iter().zip(last);
    let grown: Grown = both.map(|((host, then), (_, now))| (host, then, now)).collect();
    ensure!(
        grown
            .iter()
            .all(|(_, then, now)| *now <= then + JOINS as u64 * LEFT_KIB),
        "a daemon grew in {JOINS} joins (then and now, KiB): {grown:?}"
    );
    cluster.dunlin("a", &["down", "--now", &plan.name])?;
    for host in cluster.running() {
        cluster.stop_host(&host, Signal::SIGTERM)?;
    }
    Ok(grown)
}

/// The backup's QEMU dies; another one is brought in.
fn rejoin(cluster: &Cluster<'_>, vm: &str) -> Result<()> {
    let (_, backup) = cluster.await_protected(vm, PATIENCE)?;
    let told = |kind: &str| -> Result<usize> {
        let logged = cluster.logged()?;
        Ok(logged.iter().filter(|event| event.kind.as_str() == kind).count())
    };
    let before = told("joined")?;
    let qemu = processes(cluster, &backup).find(|(_, name, _)| name.starts_with("qemu"));
    let (pid, ..) = qemu.with_context(|| format!("no QEMU on host {backup}"))?;
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    cluster.await_status("another backup", PATIENCE, |_| {
        (told("joined").ok()? > before).then_some(())
    })?;
    cluster.await_protected(vm, PATIENCE).map(drop)
}

fn daemons(cluster: &Cluster<'_>) -> Result<Vec<(String, u64)>> {
    let of = |host: &String| -> Result<(String, u64)> {
        let daemon = processes(cluster, host).find(|(_, name, _)| name == DAEMON);
        let (_, _, memory) = daemon.with_context(|| format!("no daemon on host {host}"))?;
        Ok((host.clone(), memory.own_kib))
    };
    cluster.hosts().iter().map(of).collect()
}

/// Of each daemon the least.
fn least(looks: &[Vec<(String, u64)>]) -> Vec<(String, u64)> {
    let mut least = looks[0].clone();
    for look in &looks[1..] {
        for ((_, least), (_, now)) in least.iter_mut().zip(look) {
            *least = (*least).min(*now);
        }
    }
    least
}

fn processes(cluster: &Cluster<'_>, host: &str) -> impl Iterator<Item = (i32, String, Memory)> {
    let pids = cluster.testbed().node(host).pids().into_iter();
    pids.filter_map(|pid| memory_of(pid).map(|(name, memory)| (pid, name, memory)))
}
