//! "N syncs in a row under load leave both VMs' RAM identical", then a fail-over; on every machine type.
//! DUNLIN_SYNCS=200 runs the full count, DUNLIN_TEST_QEMU another QEMU.

mod common;

use std::time::Duration;

use common::*;
use dunlin_guest::Machine;

fn syncs_in_a_row(machine: Machine, vcpus: u32) {
    let _alone = one_at_a_time();
    let spec = linux(machine, vcpus);
    let mut pair = Pair::new(&spec, "GUEST-READY");
    let mut all = vec![];
    for _ in 0..syncs_wanted() {
        // The guests run a while between two syncs: until the primary has said something more.
        let seen = pair.primary.qemu.console().total_bytes();
        pair.primary
            .qemu
            .console()
            .wait_more(seen, Duration::from_secs(10));
        pair.drain_frames();
        all.push(pair.sync());
        pair.assert_healthy();
    }
    report(
        &format!("{machine:?} x{vcpus} on QEMU {}", pair.primary.qemu.version()),
        &all,
    );
    let divergent: u64 = all.iter().map(|s| s.divergent).sum();
    assert!(divergent > 0, "a load that never diverges tests nothing");

    let told = pair.backup.qemu.qmp().poll_events().unwrap();
    assert!(
        told.len() <= 3,
        "a backup's events pile up: {} after {} syncs",
        told.len(),
        all.len()
    );

    let before = last_tick(&pair.primary.qemu);
    pair.primary.qemu.kill().unwrap();
    pair.colo.failover().unwrap();
    let (console, next) = (pair.backup.qemu.console(), format!("tick {}\r", before + 5));
    assert!(
        console.wait_for(&next, Duration::from_secs(60)),
        "the backup goes on counting:\n{}",
        console.text()
    );
    assert_eq!(console.oops(), None);
}

fn report(what: &str, all: &[SyncStats]) {
    let median = |field: fn(&SyncStats) -> u64| {
        let mut values: Vec<u64> = all.iter().map(field).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    println!(
        "{what}: {} syncs, RAM identical after each. Medians, us: request {} stop {} save {} scan {} hash {} copy {} load {} \
         cont {}; pages: dirty {}/{} united {} divergent {}; bytes: blocks {} state {}",
        all.len(),
        median(|s| s.request),
        median(|s| s.stop),
        median(|s| s.save),
        median(|s| s.scan),
        median(|s| s.hash),
        median(|s| s.copy),
        median(|s| s.load),
        median(|s| s.cont),
        median(|s| s.dirty_primary),
        median(|s| s.dirty_backup),
        median(|s| s.united),
        median(|s| s.divergent),
        median(|s| s.bytes),
        median(|s| s.state_bytes),
    );
}

#[test]
fn pc_1() {
    syncs_in_a_row(Machine::Pc, 1);
}

#[test]
fn pc_2() {
    syncs_in_a_row(Machine::Pc, 2);
}

#[test]
fn q35_1() {
    syncs_in_a_row(Machine::Q35, 1);
}

#[test]
fn q35_2() {
    syncs_in_a_row(Machine::Q35, 2);
}

#[test]
fn microvm_1() {
    syncs_in_a_row(Machine::Microvm, 1);
}

#[test]
fn microvm_2() {
    syncs_in_a_row(Machine::Microvm, 2);
}
