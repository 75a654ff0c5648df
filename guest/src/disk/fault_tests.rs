//! Bad disks, slow peers and full buffers: the VM goes on, the events say what happened, nothing acknowledged is lost.

use super::tests::{Dir, Host, MIB, attach, join, pair, sync};
use super::*;
use bytes::Bytes;
use dunlin_core::disk::mirror::Frame;
use std::{fs, io, thread, time::Instant};

const WAIT: Duration = Duration::from_secs(60);

/// A disk that hangs until this is dropped: where a test fails, too, its hosts wait for their disks before they end.
struct Hangs<'a>(&'a Faults);

impl<'a> Hangs<'a> {
    fn new(host: &'a Host) -> Self {
        host.disk.faults().hang(true);
        Self(host.disk.faults())
    }
}

impl Drop for Hangs<'_> {
    fn drop(&mut self) {
        self.0.hang(false);
    }
}

#[test]
fn an_io_error_on_the_backups_disk_costs_the_backup_and_not_the_vm() {
    for full in [false, true] {
        let (_dir, primary, backup) = pair(
            &format!("backup-error-{full}"),
            Storage::Gannet,
            Limits::default(),
        );
        sync(&primary, &backup, 1);
        assert!(backup.disk.wait_settled(WAIT).unwrap());
        primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
        primary.write(0, 1, 4096);
        if full {
            backup.disk.faults().full(true);
        } else {
            backup.disk.faults().write_error(true);
        }
        sync(&primary, &backup, 2);
        let DiskEvent::BackupFailed { reason } =
            backup.wait(|event| matches!(event, DiskEvent::BackupFailed { .. }))
        else {
            unreachable!()
        };
        assert!(reason.contains("cannot be written"), "{reason}");
        let DiskEvent::BackupLost { reason } =
            primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }))
        else {
            unreachable!()
        };
        assert!(reason.contains("the backup's disk cannot be written"), "{reason}");
        primary.write(MIB, 2, 512);
        assert_eq!((primary.byte(MIB), primary.disk.status().role), (2, "alone"));
        assert_eq!(
            primary.disk.status().dirty_bytes,
            2 * MIB,
            "what the backup lacks is remembered"
        );
    }
}

#[test]
fn a_take_over_whose_flush_hangs_is_seen_to_stand_still_and_nobody_else_waits_for_it() {
    let (_dir, primary, backup) = pair("flush-hang", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    backup.write(0, 7, 4096);
    backup.disk.faults().flush_hang(true);
    let earlier = backup.disk.steps();
    thread::scope(|scope| {
        let take_over = scope.spawn(|| backup.disk.take_over(Term(2)));
        // The record is one piece; then comes the flush.
        while backup.disk.steps() == earlier || backup.disk.status_now().is_some() {
            assert!(!take_over.is_finished(), "it does not hang: mend the test");
            thread::yield_now();
        }
        let before = backup.disk.steps();
        let began = Instant::now();
        let looks = Duration::from_millis(50);
        assert!(backup.disk.status_within(looks).is_none());
        assert!(began.elapsed() >= looks && began.elapsed() < WAIT / 4);
        assert_eq!(backup.disk.steps(), before, "nothing gets on");
        backup.disk.faults().flush_hang(false);
        take_over.join().unwrap().unwrap();
        assert_ne!(backup.disk.steps(), before, "it has got on");
    });
    assert_eq!(backup.image_byte(0), 7);
    assert!(backup.disk.status_within(WAIT).is_some());
}

#[test]
fn a_sync_that_hangs_on_its_way_to_the_backup_s_disk_is_seen_to_be_owed() {
    let (_dir, primary, backup) = pair("owed", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert_eq!(backup.disk.owed(), 0);
    let before = backup.disk.steps();
    backup.disk.faults().hang(true);
    primary.write(0, 7, 4096);
    backup.write(0, 7, 4096);
    sync(&primary, &backup, 2);
    while backup.disk.faults().held() == 0 {
        thread::yield_now();
    }
    assert_eq!(
        (backup.disk.owed(), backup.disk.steps()),
        (1, before),
        "nothing gets on"
    );
    backup.disk.faults().hang(false);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert_eq!(backup.disk.owed(), 0);
    assert_ne!(backup.disk.steps(), before, "it has got on");
}

#[test]
fn what_the_journal_takes_of_a_sync_counts_as_getting_on_too() {
    const PIECES: u64 = 4;
    let (_dir, primary, backup) = pair("journal-steps", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    for piece in 0..PIECES {
        for host in [&primary, &backup] {
            host.write(piece << 20, 7, 1 << 20);
        }
    }
    let before = backup.disk.steps();
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    // A slow disk takes as long for the journal, before the image gets anything, as for the image.
    let steps = backup.disk.steps() - before;
    assert!(steps > 2 * PIECES, "{steps} steps");
}

#[test]
fn a_full_state_folder_is_not_called_a_bad_disk() {
    let dir = Dir::new("full-state-folder");
    fs::create_dir_all(dir.0.join("b")).unwrap();
    // Whatever is written there finds no room; the image has enough.
    std::os::unix::fs::symlink("/dev/full", dir.0.join("b/disk0.journal")).unwrap();
    let [primary, backup] =
        ["a", "b"].map(|name| Host::open(&dir.0, name, 8, Storage::Gannet, Limits::default()));
    primary.disk.start_alone(Term(1)).unwrap();
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    primary.write(0, 1, 4096);
    sync(&primary, &backup, 2);
    for (host, lost) in [(&backup, false), (&primary, true)] {
        let event = host.wait(|event| match event {
            DiskEvent::BackupFailed { .. } => !lost,
            DiskEvent::BackupLost { .. } => lost,
            _ => false,
        });
        let (DiskEvent::BackupFailed { reason } | DiskEvent::BackupLost { reason }) = event else {
            unreachable!()
        };
        assert!(
            reason.contains("state folder")
                && reason.contains("disk0.journal")
                && !reason.contains("the backup's disk"),
            "{reason}"
        );
    }
}

#[test]
fn an_io_error_on_the_primarys_disk_is_told_to_the_guest_and_to_the_node() {
    let (_dir, primary, backup) = pair("primary-error", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    backup.write(0, 8, 512);
    primary.disk.faults().write_error(true);
    assert!(nbd::Export::write(&*primary.disk, 0, Bytes::from_static(&[1; 512]), false).is_err());
    primary.wait(|event| matches!(event, DiskEvent::ImageFailed { full: false, .. }));
    primary.disk.faults().write_error(false);
    sync(&primary, &backup, 2);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(2) });
    assert_eq!(
        primary.disk.status().dirty_bytes,
        MIB,
        "how much of the failed write is on the image, nobody knows"
    );
    backup.write(0, 8, 512);
    primary.disk.faults().full(true);
    let error = nbd::Export::write(&*primary.disk, 0, Bytes::from_static(&[1; 512]), false).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    primary.wait(|event| matches!(event, DiskEvent::ImageFailed { full: true, .. }));
    primary.disk.faults().flush_error(true);
    assert!(nbd::Export::flush(&*primary.disk).is_err());
    // The node's way out: the backup takes over with its own disk.
    drop(primary);
    backup.disk.take_over(Term(2)).unwrap();
    assert_eq!(backup.image_byte(0), 8);
}

#[test]
fn an_error_that_a_backup_never_saw_is_kept_from_the_guest_until_its_copy_is_ended() {
    let (_dir, primary, backup) = pair("held", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    primary.disk.hold_errors(true);
    primary.disk.faults().full(true);
    thread::scope(|scope| {
        let writes = || nbd::Export::write(&*primary.disk, 0, Bytes::from_static(&[1; 512]), false);
        let told = scope.spawn(writes);
        primary.wait(|event| matches!(event, DiskEvent::ImageFailed { full: true, .. }));
        assert!(!told.is_finished(), "the guest was told");
        // A copy that ends lets go of its disk: nothing may wait for the held request.
        primary.disk.reset();
        assert_eq!(
            told.join().unwrap().unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
    });
    assert_eq!(primary.disk.status().role, "idle");
}

#[test]
fn a_trim_of_the_whole_disk_in_both_buffers_goes_through_no_journal() {
    let (_dir, primary, backup) = pair("trims", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    for host in [&primary, &backup] {
        nbd::Export::zero(&*host.disk, 0, 8 * MIB, true, false).unwrap();
        host.write(4 * MIB, 7, 4096);
    }
    while backup.disk.status().backup.counters.mirrored_bytes < 8 * MIB + 4096 {
        thread::yield_now();
    }
    backup.disk.idle();
    while backup.disk.status().backup.counters.settled_bytes < 4096 {
        thread::yield_now();
    }
    // The pass goes on behind the write; a sync ends it.
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let counters = backup.disk.status().backup.counters;
    assert_eq!(counters.settled_bytes, 4096, "the trims stay for the sync");
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}

#[test]
fn the_lightweight_checkpoint_of_many_sectors_finds_each_that_differs() {
    let (_dir, primary, backup) = pair("many", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    // Enough for every core to get a share of them.
    primary.write(0, 1, 8 * MIB as usize);
    backup.write(0, 1, 8 * MIB as usize);
    let differ = [0u64, 777, 1024, 2047];
    for sector in differ {
        backup.write(sector * 4096, 2, 4096);
    }
    while backup.disk.status().backup.counters.mirrored_bytes < 8 * MIB {
        thread::yield_now();
    }
    backup.disk.idle();
    let equal = 8 * MIB - 4 * 4096;
    while backup.disk.status().backup.counters.settled_bytes < equal {
        thread::yield_now();
    }
    for sector in differ {
        assert_eq!(backup.byte(sector * 4096), 2);
        assert_eq!(
            backup.image_byte(sector * 4096),
            0,
            "sector {sector} differs and stays in memory"
        );
    }
    assert_eq!(backup.image_byte(4096), 1);
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}

#[test]
fn a_backup_whose_disk_stands_still_slows_nothing_until_its_buffers_fill() {
    const SLOWED: Duration = Duration::from_secs(60);
    let limits = Limits {
        sync_at_bytes: 2 * MIB,
        throttle_at_bytes: 32 * MIB,
        most_bytes: 64 * MIB,
    };
    let dir = Dir::new("slow");
    let [primary, backup] = ["a", "b"].map(|name| Host::open(&dir.0, name, 8, Storage::Gannet, limits));
    primary.disk.start_alone(Term(1)).unwrap();
    let mut options = AttachOptions::default();
    // One write that is slowed down takes longer than all of them otherwise.
    options.tuning.throttle = SLOWED;
    join(&primary, &backup, options);
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let hangs = Hangs::new(&backup);
    let started = Instant::now();
    for round in 0..4u64 {
        for at in 0..16 {
            primary.write((at * 256) << 10, (round + 1) as u8, 256 << 10);
            assert!(started.elapsed() < SLOWED, "a write was slowed down");
        }
        sync(&primary, &backup, round + 2);
    }
    assert_eq!(backup.disk.owed(), 4, "its disk has none of these syncs");
    drop(hangs);
    primary.wait(|event| *event == DiskEvent::NeedSync);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert_eq!(primary.disk.status().role, "primary");
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}

#[test]
fn buffers_that_no_sync_frees_cost_the_backup_and_not_the_hosts_memory() {
    let limits = Limits {
        sync_at_bytes: MIB,
        throttle_at_bytes: 2 * MIB,
        most_bytes: 4 * MIB,
    };
    let (_dir, primary, backup) = pair("full", Storage::Gannet, limits);
    sync(&primary, &backup, 1);
    let mut at = 0;
    while primary.disk.status().role == "primary" {
        primary.write(at % (8 * MIB), 1, 128 << 10);
        at += 128 << 10;
        assert!(at < 64 * MIB, "the backup never gave up");
    }
    primary.wait(|event| *event == DiskEvent::NeedSync);
    let DiskEvent::BackupLost { reason } =
        primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }))
    else {
        unreachable!()
    };
    assert!(reason.contains("its limit"), "{reason}");
    assert!(backup.disk.status().backup.counters.peak_bytes < 5 * MIB);
}

#[test]
fn a_peer_that_hangs_delays_a_write_by_the_stall_time_and_no_more() {
    let (_dir, primary, backup) = pair("hang", Storage::Gannet, Limits::default());
    drop(backup);
    primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }));
    // A peer that greets, takes the copy, and then takes nothing more.
    let (left, mut right) = UnixStream::pair().unwrap();
    let tuning = Tuning {
        queue_bytes: MIB,
        stall: Duration::from_millis(300),
        ..Tuning::default()
    };
    let options = AttachOptions {
        tuning,
        ..AttachOptions::default()
    };
    let hang = thread::spawn(move || {
        let (_, hello) = link::receive(&mut right).unwrap();
        link::send_now(&mut right, Frame::Welcome, &hello).unwrap();
        loop {
            match link::receive(&mut right).unwrap().0 {
                Frame::CopyEnd => return right,
                Frame::AskHash { offset, len } => {
                    link::send_now(&mut right, Frame::Hash { offset, len }, &[0; 16]).unwrap();
                }
                _ => {}
            }
        }
    });
    primary
        .disk
        .attach_backup(MirrorStream::from_unix(left).unwrap(), options)
        .unwrap();
    let _kept_open = hang.join().unwrap();
    let mut worst = Duration::ZERO;
    for at in 0..64 {
        let started = Instant::now();
        primary.write((at * 64) << 10, 1, 64 << 10);
        worst = worst.max(started.elapsed());
    }
    assert!(worst < WAIT / 4, "a write took {worst:?}");
    let DiskEvent::BackupLost { reason } =
        primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }))
    else {
        unreachable!()
    };
    assert!(reason.contains("took nothing for 300 ms"), "{reason}");
}

#[test]
fn a_copy_while_the_guest_writes_ends_and_is_right() {
    for storage in [Storage::Gannet, Storage::Colo] {
        let dir = Dir::new(&format!("busy-{storage:?}"));
        let primary = Host::open(&dir.0, "a", 32, storage, Limits::default());
        let backup = Host::open(&dir.0, "b", 32, storage, Limits::default());
        primary.disk.start_alone(Term(1)).unwrap();
        for at in 0..32 {
            primary.write(at * MIB, at as u8 + 1, MIB as usize);
        }
        let stop = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            for seed in 1..3u64 {
                let (primary, stop) = (&primary, &stop);
                scope.spawn(move || {
                    let mut word = seed;
                    while !stop.load(Ordering::Acquire) {
                        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let len = (word >> 20) % 9000 + 1;
                        primary.write((word >> 33) % (32 * MIB - len), word as u8, len as usize);
                    }
                });
            }
            let tuning = Tuning {
                queue_bytes: 2 * MIB,
                ..Tuning::default()
            };
            join(
                &primary,
                &backup,
                AttachOptions {
                    tuning,
                    copy_bytes_per_s: 200 * MIB,
                    whole: false,
                },
            );
            stop.store(true, Ordering::Release);
        });
        sync(&primary, &backup, 1);
        assert!(backup.disk.wait_settled(WAIT).unwrap());
        assert!(
            fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap(),
            "{storage:?}"
        );
    }
}

/// Whoever waits for the copy gives it up when it hears nothing for 20 s, and `copy_mib_per_s = 1` of many disks is less than that for one extent.
#[test]
fn a_copy_that_is_to_take_long_says_that_it_gets_on() {
    let dir = Dir::new("paced");
    let open = |name| Host::open(&dir.0, name, 2, Storage::Gannet, Limits::default());
    let (primary, backup) = (open("a"), open("b"));
    primary.disk.start_alone(Term(1)).unwrap();
    (0..2).for_each(|extent| primary.write(extent * MIB, 7, 4096));
    let paced = AttachOptions {
        copy_bytes_per_s: MIB / 2,
        ..AttachOptions::default()
    };
    attach(&primary, &backup, paced);
    let told = std::cell::Cell::new(0);
    primary.wait(|event| {
        told.set(told.get() + u32::from(matches!(event, DiskEvent::CopyProgress { .. })));
        *event == DiskEvent::Copied
    });
    // Two seconds for each extent.
    assert!(told.get() >= 2, "{}", told.get());
}
