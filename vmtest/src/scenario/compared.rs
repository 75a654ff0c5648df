//! Disks that are compared by the schedule of the VM's file.
//!
//! * **Decides:** that a difference is found by itself and told, that a repaired one is seen to be gone, and that nothing is compared
//!   while no backup follows.
//! * **Flow:** VM up and protected, counters at work -> both images equal -> a byte of the backup's is flipped -> `disks-differ` ->
//!   `verify-disk --repair` -> equal -> the backup's host dies, silence -> it returns -> equal.
//! * **Not here:** what a comparison reads, and its pace (the guest crate's tests).

use dunlin_api::{EventKind, Role, VerifyStatus};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dunlin_api::files::VmFile;
use nix::sys::signal::Signal;

use super::World;
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(120);
const DISK_MIB: u64 = 64;
/// The shortest interval that a file may ask for.
const EVERY: Duration = Duration::from_secs(10);
/// Near the end of the disk: the guest has written nothing there.
const FLIPPED: u64 = (DISK_MIB << 20) - (1 << 20) - 77;

/// Plays it; returns how many comparisons there were.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World) -> Result<usize> {
    in_a_testbed(
        "compared",
        &TestbedSpec::three_hosts(),
        &world.dunlin,
        |cluster| play(cluster, world),
    )
}

fn play(cluster: &mut Cluster<'_>, world: &World) -> Result<usize> {
    cluster.start_hosts()?;
    let plan = VmPlan {
        disk_mib: Some(DISK_MIB),
        file: VmFile {
            verify_disks: format!("{}s", EVERY.as_secs()),
            verify_mib_per_s: 32,
            ..VmPlan::file()
        },
        ..VmPlan::redis("dunlin")
    };
    let vm = plan.name.as_str();
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
    cluster.await_protected(vm, PATIENCE)?;
    let first = compared(cluster, vm, "both images equal", 0, 0)?;
    let (primary, backup) = cluster.await_protected(vm, PATIENCE)?;
    let image = cluster.testbed().node(&backup).home().join(format!("{vm}.img"));
    let image = OpenOptions::new().read(true).write(true).open(image)?;
    let mut byte = [0];
    image.read_exact_at(&mut byte, FLIPPED)?;
    image.write_all_at(&[!byte[0]], FLIPPED)?;
    let second = compared(cluster, vm, "a difference", first, 1)?;
    let told = cluster.events(&primary)?;
    ensure!(
        told.iter().any(|event| event.kind == EventKind::DisksDiffer
            && event.text.contains(&format!("{} MiB", FLIPPED >> 20))),
        "no event tells of the difference: {told:?}"
    );
    let words = cluster.dunlin(&primary, &["status"])?;
    ensure!(
        words.contains("DIFFERENT; 64 pieces of 1 MiB, 1 differed"),
        "status: {words}"
    );
    repair(cluster, &primary, vm)?;
    let third = compared(cluster, vm, "equal again", second, 0)?;
    // Nothing is compared with nobody.
    cluster.kill_host(&backup)?;
    cluster.await_status("unprotected", PATIENCE, |hosts| {
        let vm = hosts.iter().find_map(|host| host.vm(vm))?;
        (!vm.protected).then_some(())
    })?;
    let (before, _) = last(cluster, vm).context("nothing was compared")?;
    std::thread::sleep(2 * EVERY + Duration::from_secs(2));
    let (after, _) = last(cluster, vm).context("what was compared is forgotten")?;
    ensure!(before == after, "disks were compared without a backup");
    cluster.start_host(&backup)?;
    cluster.await_protected(vm, PATIENCE)?;
    compared(
        cluster,
        vm,
        "equal after the backup's return",
        third.max(after),
        0,
    )?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster.dunlin("a", &["down", "--now", vm])?;
    for host in cluster.running() {
        cluster.stop_host(&host, Signal::SIGTERM)?;
    }
    Ok(4)
}

/// When the last comparison by the primary ended, and the pieces that differed; only one by the schedule, of the whole disk.
fn last(cluster: &Cluster<'_>, vm: &str) -> Option<(u64, u64)> {
    let hosts = cluster.statuses();
    let primary = hosts
        .iter()
        .filter_map(|host| host.vm(vm))
        .find(|vm| vm.role == Role::Primary)?;
    of(&primary.verify)
}

fn of(verify: &VerifyStatus) -> Option<(u64, u64)> {
    let last = verify.last.as_ref()?;
    let whole = last.scheduled && last.extents == DISK_MIB;
    whole.then_some((last.ended_ms, last.differing))
}

/// Waits for a comparison by the schedule that ended after `than` and found so many pieces that differ; returns when it ended.
fn compared(cluster: &Cluster<'_>, vm: &str, what: &str, than: u64, differing: u64) -> Result<u64> {
    cluster.await_status(what, PATIENCE, |hosts| {
        let mut primaries = hosts
            .iter()
            .filter_map(|host| host.vm(vm))
            .filter(|vm| vm.role == Role::Primary);
        let (ended, found) = of(&primaries.next()?.verify)?;
        (ended > than && found == differing).then_some(ended)
    })
}

/// One by the schedule may be under way just then: it is asked again.
fn repair(cluster: &Cluster<'_>, primary: &str, vm: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = cluster.output(primary, &["verify-disk", "--repair", vm])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.code() == Some(4) {
            ensure!(said.contains("was sent again"), "verify-disk --repair: {said}");
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "verify-disk --repair: {said}");
        std::thread::sleep(Duration::from_millis(500));
    }
}
