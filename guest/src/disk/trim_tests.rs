//! A guest trims as much as it likes at once: neither the backup's memory nor what its image has set aside pays for it.

use super::{
    nbd::Export,
    tests::{Dir, Host, MIB, join, sync},
    *,
};
use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
};

const WAIT: Duration = Duration::from_secs(20);

/// Two hosts, of which the backup has the primary's first sync.
fn pair(name: &str, mib: u64, storage: Storage, limits: Limits, data: &[u64]) -> (Dir, Host, Host) {
    let dir = Dir::new(name);
    let [primary, backup] = ["a", "b"].map(|name| Host::open(&dir.0, name, mib, storage, limits));
    primary.disk.start_alone(Term(1)).unwrap();
    data.iter().for_each(|mib| primary.write(mib * MIB, 9, 4096));
    let mut options = AttachOptions::default();
    options.tuning.stall = WAIT;
    join(&primary, &backup, options);
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    (dir, primary, backup)
}

fn image_byte(host: &Host, at: u64) -> u8 {
    let mut byte = [0];
    let file = fs::File::open(&host.image).unwrap();
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0]
}

#[test]
fn a_trim_of_gigabytes_takes_memory_on_the_backup_for_what_holds_data() {
    let limits = Limits {
        sync_at_bytes: 16 * MIB,
        throttle_at_bytes: 32 * MIB,
        most_bytes: 64 * MIB,
    };
    for storage in [Storage::Colo, Storage::Sync] {
        let name = format!("trim-{storage:?}");
        let data = [5, 3000];
        let (_dir, primary, backup) = pair(&name, 4096, storage, limits, &data);
        primary.disk.zero(0, 3500 * MIB, true, false).unwrap();
        primary.disk.mark(Epoch(2)).unwrap();
        assert!(backup.disk.wait_marked(Epoch(2), WAIT).unwrap());
        let at = data.map(|mib| mib * MIB + 50);
        assert_eq!(at.map(|at| backup.byte(at)), [9, 9], "{storage:?}: own view");
        assert_eq!(at.map(|at| image_byte(&backup, at)), [0, 0], "{storage:?}");
        let peak_bytes = backup.disk.status().backup.counters.peak_bytes;
        assert!(peak_bytes < 8 * MIB, "{storage:?}: {peak_bytes}");
        backup.disk.commit(Epoch(2)).unwrap();
        assert_eq!(at.map(|at| backup.byte(at)), [0, 0], "{storage:?}: at mark 2");
        assert_eq!(primary.disk.status().role, "primary");
    }
}

#[test]
fn a_trim_of_more_data_than_the_backup_may_hold_costs_the_backup_and_not_the_hosts_memory() {
    let limits = Limits {
        sync_at_bytes: MIB,
        throttle_at_bytes: 2 * MIB,
        most_bytes: 4 * MIB,
    };
    let data: Vec<u64> = (0..32).collect();
    let (_dir, primary, backup) = pair("trim-full", 32, Storage::Sync, limits, &data);
    primary.disk.zero(0, 32 * MIB, true, false).unwrap();
    let DiskEvent::BackupLost { reason } =
        primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }))
    else {
        unreachable!()
    };
    assert!(reason.contains("its limit"), "{reason}");
    let peak_bytes = backup.disk.status().backup.counters.peak_bytes;
    assert!(peak_bytes < 6 * MIB, "{peak_bytes}");
}

#[test]
fn what_is_set_aside_for_the_backups_image_stays_so_in_a_join() {
    let dir = Dir::new("set-aside");
    let (image, bytes) = (dir.0.join("b.img"), 16 * MIB);
    let file = fs::File::create(&image).unwrap();
    if let Err(Errno::OPNOTSUPP) = fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        return println!("not tried: this file system sets nothing aside");
    }
    let allocated = || file.metadata().unwrap().blocks() * 512;
    assert!(allocated() >= bytes);
    let [primary, backup] =
        ["a", "b"].map(|name| Host::open(&dir.0, name, 16, Storage::Gannet, Limits::default()));
    primary.disk.start_alone(Term(1)).unwrap();
    primary.write(3 * MIB, 7, 4096);
    join(&primary, &backup, AttachOptions::default());
    assert!(allocated() >= bytes, "{} of {bytes}", allocated());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}
