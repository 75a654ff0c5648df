//! Guests of real sizes: much memory, and many virtual CPUs, cards and disks.
//!
//! * **Decides:** that such a VM starts, is protected, is synced, fails over and is protected again, and what that costs.
//! * **Flow:** up -> every disk's redis is counted on -> protected -> the primary's host killed -> every redis goes on where it
//!   was -> the host returns -> protected.
//! * **Not here:** a guest that writes to all of its memory: two such copies do not fit into a machine for tests.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::World;
use super::soak::memory_of;
use crate::client::{Broadcasts, Counter, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;

/// Nothing here may take longer than this: a guest of 64 GiB with eight emulated CPUs boots slowly.
const PATIENCE: Duration = Duration::from_secs(240);

/// Name, and what is asked of the VM.
pub struct Size {
    /// Of the scenario.
    pub name: &'static str,
    vcpus: u32,
    memory_mib: u32,
    cards: u8,
    disks: u8,
}

/// All of them.
pub const SIZES: [Size; 3] = [
    Size {
        name: "size-two-cards",
        vcpus: 2,
        memory_mib: 512,
        cards: 2,
        disks: 2,
    },
    Size {
        name: "size-eight-vcpus",
        vcpus: 8,
        memory_mib: 2048,
        cards: 4,
        disks: 4,
    },
    Size {
        name: "size-64-gib",
        vcpus: 2,
        memory_mib: 64 << 10,
        cards: 1,
        disks: 1,
    },
];

/// Plays it; what it cost, in words.
///
/// # Errors
/// When anything was lost, or a step took longer than any machine needs; the daemons' logs are kept.
pub fn run(world: &World, size: &Size) -> Result<String> {
    in_a_testbed(size.name, &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        play(cluster, world, size)
    })
}

fn play(cluster: &mut Cluster<'_>, world: &World, size: &Size) -> Result<String> {
    cluster.start_hosts()?;
    let plan = VmPlan {
        vcpus: size.vcpus,
        memory_mib: size.memory_mib,
        disk_mib: Some(32),
        more_disks: size.disks - 1,
        idle_cards: size.cards - 1,
        memory_overcommit: true,
        ..VmPlan::redis("dunlin")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    let begun = Instant::now();
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let (primary, backup) = cluster.await_protected(&plan.name, PATIENCE)?;
    let joined = begun.elapsed();

    let testbed = cluster.testbed();
    let client = testbed.node("client");
    let broadcasts = Broadcasts::start(client)?;
    let mut counters = Vec::new();
    for disk in 0..u16::from(size.disks) {
        let mut target = plan.service();
        target.set_port(target.port() + disk);
        await_service(client, target, PATIENCE)?;
        let spec = CounterSpec {
            target,
            connections: 2,
            together: false,
            give_up: PATIENCE,
        };
        counters.push(Counter::start(client, &spec)?);
    }
    let get_on = |answers: u64| {
        counters
            .iter()
            .try_for_each(|one| one.await_more(answers, PATIENCE))
    };
    get_on(100)?;
    cluster.await_protected(&plan.name, PATIENCE)?;
    let status = cluster.status(&primary)?;
    let sync = status
        .vm(&plan.name)
        .context("the primary has the VM")?
        .sync
        .clone();
    ensure!(sync.count > 0, "it was never synced");
    let own = |host: &str, program: &str| {
        let pids = cluster.testbed().node(host).pids().into_iter();
        let found = pids
            .filter_map(memory_of)
            .find(|(name, _)| name.starts_with(program));
        found.map_or(0, |(_, memory)| memory.own_kib >> 10)
    };
    let own = [
        own(&primary, "dunlin"),
        own(&backup, "dunlin"),
        own(&backup, "qemu"),
    ];
    cluster.kill_host(&primary)?;
    let (_, serves) = cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
    get_on(50)?;
    cluster.start_host(&primary)?;
    let begun = Instant::now();
    cluster.await_protected(&plan.name, PATIENCE)?;
    let joined_again = begun.elapsed();
    get_on(50)?;
    let (mut acknowledged, mut longest_gap_us) = (0, 0);
    for counter in counters {
        let (clients, _) = counter.finish()?;
        ensure!(clients.is_clean(), "clients were let down: {clients:?}");
        acknowledged += clients.acknowledged;
        longest_gap_us = longest_gap_us.max(clients.longest_gap_us);
    }
    broadcasts.finish()?;
    super::run::no_oops(cluster.testbed())?;
    cluster.end("c", &plan.name)?;
    let failover = serves.failover.unwrap_or_default();
    let failover_us: u64 = failover.steps().iter().map(|(_, step_us)| step_us).sum();
    Ok(format!(
        "{} vCPUs, {} MiB, {} cards, {} disks: protected after {:.1} s and again after {:.1} s; {} syncs, median pause {} us, \
         {} pages, scan {} us, stop {} us, save {} us, load {} us; take-over {} ms, longest wait for an answer {} ms; own memory of \
         the daemons {} and {} MiB, of the backup's QEMU {} MiB; {acknowledged} acknowledged, 0 lost",
        size.vcpus,
        size.memory_mib,
        size.cards,
        size.disks,
        joined.as_secs_f64(),
        joined_again.as_secs_f64(),
        sync.count,
        sync.median.pause_us,
        sync.median.united,
        sync.median.scan_us,
        sync.median.stop_us,
        sync.median.save_us,
        sync.median.load_us,
        failover_us / 1000,
        longest_gap_us / 1000,
        own[0],
        own[1],
        own[2],
    ))
}
