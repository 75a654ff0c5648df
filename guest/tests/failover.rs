//! The backup takes over: at any moment, also in the middle of a sync that the primary did not live to finish.

mod common;

use std::time::Duration;

use common::*;
use dunlin_guest::Machine;
use dunlin_guest::qemu::QemuEvent;

/// The primary dies between REPLY and SEND: the backup is paused, its state its own. It must go on from there.
fn dies_mid_sync(machine: Machine) {
    let _alone = one_at_a_time();
    let spec = linux(machine, 1);
    let mut pair = Pair::new(&spec, "GUEST-READY");
    for _ in 0..2 {
        pair.sync();
    }
    let seen = pair.backup.qemu.console().total_bytes();
    assert!(
        pair.backup
            .qemu
            .console()
            .wait_more(seen, Duration::from_secs(20)),
        "the backup runs"
    );
    let staged = pair.pause_and_stage();
    pair.primary.qemu.kill().unwrap();
    drop(staged); // never applied
    let before = last_tick(&pair.backup.qemu);
    let own = pair.backup.qemu.memory().hash_all(2);
    pair.backup.qemu.qmp().poll_events().unwrap();
    pair.colo.failover().unwrap();
    let console = pair.backup.qemu.console();
    let next = format!("tick {}\r", before + 5);
    assert!(
        console.wait_for(&next, Duration::from_secs(60)),
        "{machine:?} goes on:\n{}",
        console.text()
    );
    assert_eq!(console.oops(), None);
    assert_ne!(own, pair.backup.qemu.memory().hash_all(2));
    let events = pair.backup.qemu.qmp().poll_events().unwrap();
    assert!(events.contains(&QemuEvent::Resume), "{events:?}");
    assert!(
        !events.iter().any(|e| matches!(e, QemuEvent::Reset { .. })),
        "it was not reset: {events:?}"
    );
    // An ordinary VM from here on: it can be stopped, saved and protected anew by a fresh backup.
    let backup = pair.backup;
    let mut again = Pair::join(&spec, backup);
    again.sync();
    again.assert_healthy();
}

#[test]
fn pc_goes_on_from_its_own_state() {
    dies_mid_sync(Machine::Pc);
}

#[test]
fn q35_goes_on_from_its_own_state() {
    dies_mid_sync(Machine::Q35);
}

#[test]
fn microvm_goes_on_from_its_own_state() {
    dies_mid_sync(Machine::Microvm);
}

/// A passive backup (`remus`) is loaded for the first time when it has to speak: load, and at once fail over.
#[test]
fn a_first_load_may_be_followed_by_the_failover_at_once() {
    let _alone = one_at_a_time();
    for machine in [Machine::Pc, Machine::Q35] {
        let pair = Pair::new(&linux(machine, 1), "GUEST-READY");
        pair.primary.qemu.kill().unwrap();
        pair.colo.failover().unwrap();
        let console = pair.backup.qemu.console();
        assert!(
            console.wait_for("tick 10\r", Duration::from_secs(60)),
            "{machine:?}:\n{}",
            console.text()
        );
        assert_eq!(console.oops(), None);
    }
}

/// The reset that q35 needs before a load writes to no page of RAM, so the divergent pages are all that must be written.
#[test]
fn the_reset_before_a_load_leaves_ram_alone() {
    let _alone = one_at_a_time();
    let mut pair = Pair::new(&linux(Machine::Q35, 1), "GUEST-READY");
    pair.sync();
    drop(pair.pause_and_stage());
    let backup = &pair.backup.qemu;
    assert!(backup.memory().scan_dirty().unwrap().is_empty(), "it is paused");
    let before = backup.memory().populated().unwrap();
    backup
        .qmp()
        .execute("system_reset", serde_json::Value::Null)
        .unwrap();
    assert_eq!(
        backup.memory().scan_dirty().unwrap().iter().collect::<Vec<_>>(),
        Vec::<u64>::new()
    );
    assert_eq!(backup.memory().populated().unwrap(), before);
}

/// A sync that was given up carries its dirty pages into the next one.
#[test]
fn an_aborted_sync_loses_no_dirty_page() {
    let _alone = one_at_a_time();
    let spec = linux(Machine::Pc, 1);
    let mut pair = Pair::new(&spec, "GUEST-READY");
    pair.sync();
    let staged = pair.pause_and_stage();
    assert!(staged.stats.united > 0);
    drop(staged);
    // The primary runs on; the backup stays paused until the next attempt, as after a broken connection.
    pair.primary.qemu.cont_within(OBEYS).unwrap();
    let seen = pair.primary.qemu.console().total_bytes();
    assert!(
        pair.primary
            .qemu
            .console()
            .wait_more(seen, Duration::from_secs(20))
    );
    let staged = pair.stage_again();
    pair.apply(staged, assert_same_ram);
    pair.sync();
    pair.assert_healthy();
}
