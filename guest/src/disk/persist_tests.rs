//! Power losses, returns and comparisons. A power loss is a copy of a host's files, where some of them may be older than the
//! others: what was never made durable may be missing, what was may not.

use super::tests::{Dir, Host, MIB, join, pair, sync};
use super::*;
use std::{fs, path::Path, time::Instant};

const WAIT: Duration = Duration::from_secs(10);

fn copy_state(dir: &Path, from: &str, to: &str) {
    fs::create_dir_all(dir.join(to)).unwrap();
    for entry in fs::read_dir(dir.join(from)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.join(to).join(entry.file_name())).unwrap();
    }
}

/// The host `from` as it would come up after a power loss, under the name `to`; `image`: what its image holds.
fn power_loss(dir: &Path, from: &str, to: &str, image: &[u8]) -> Host {
    copy_state(dir, from, to);
    fs::write(dir.join(format!("{to}.img")), image).unwrap();
    Host::open(dir, to, 8, Storage::Gannet, Limits::default())
}

#[test]
fn a_half_applied_sync_is_completed_after_a_power_loss() {
    let (dir, primary, backup) = pair("complete", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let before = fs::read(&backup.image).unwrap();
    primary.write(0, 1, 4096);
    primary.write(2 * MIB, 2, 4096);
    nbd::Export::zero(&*primary.disk, 5 * MIB, 4096, true, false).unwrap();
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let after = fs::read(&backup.image).unwrap();
    assert_ne!(before, after);
    let mut half = before.clone();
    half[..4096].copy_from_slice(&after[..4096]);
    for (name, image) in [("old", &before), ("half", &half), ("new", &after)] {
        let host = power_loss(&dir.0, "b", name, image);
        assert!(fs::read(&host.image).unwrap() == after, "{name}: sync 2 is whole");
        let status = host.disk.status();
        assert_eq!(
            (
                status.generation.epoch,
                status.generation.primary,
                status.consistent
            ),
            (Epoch(2), false, true)
        );
    }
}

#[test]
fn a_torn_journal_record_is_no_record_and_the_image_stays_at_the_sync_before() {
    let (dir, primary, backup) = pair("torn", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let before = fs::read(&backup.image).unwrap();
    primary.write(0, 1, 65536);
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    copy_state(&dir.0, "b", "cut");
    let journal = dir.0.join("cut").join("disk0.journal");
    let bytes = fs::read(&journal).unwrap();
    for cut in [0, 40, 4096, bytes.len() - 1] {
        fs::write(&journal, &bytes[..cut]).unwrap();
        fs::write(dir.0.join("cut.img"), &before).unwrap();
        let host = Host::open(&dir.0, "cut", 8, Storage::Gannet, Limits::default());
        assert!(fs::read(&host.image).unwrap() == before, "cut at {cut}");
        assert_eq!(host.disk.status().generation.epoch, Epoch(1));
    }
}

#[test]
fn the_lightweight_checkpoint_is_rolled_back_to_the_last_sync_after_a_power_loss() {
    let (dir, primary, backup) = pair("light", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let before = fs::read(&backup.image).unwrap();
    primary.write(0, 1, 64 << 10);
    backup.write(0, 1, 64 << 10);
    primary.write(MIB, 3, 8192);
    backup.write(MIB, 4, 4096);
    backup.write(MIB + 4096, 3, 4096);
    while backup.disk.status().backup.counters.mirrored_bytes < (64 << 10) + 8192 {
        std::thread::yield_now();
    }
    backup.disk.idle();
    while backup.disk.status().backup.counters.settled_bytes < (64 << 10) + 4096 {
        std::thread::yield_now();
    }
    let figures = backup.disk.status().backup;
    assert_eq!(
        figures.counters.settled_bytes,
        (64 << 10) + 4096,
        "only what is equal"
    );
    assert!(
        figures.svm_bytes < 8192 && figures.pvm_bytes < 8192,
        "equal sectors left memory"
    );
    assert_eq!(
        (backup.byte(0), backup.byte(MIB), backup.byte(MIB + 4096)),
        (1, 4, 3)
    );
    let now = fs::read(&backup.image).unwrap();
    assert_eq!(
        (now[0], now[MIB as usize]),
        (1, 0),
        "equal sectors are on the image"
    );
    let host = power_loss(&dir.0, "b", "lost", &now);
    assert!(fs::read(&host.image).unwrap() == before, "back to sync 1");
    // A sync makes them stay.
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let host = power_loss(&dir.0, "b", "kept", &before);
    assert!(
        fs::read(&host.image).unwrap() == fs::read(&primary.image).unwrap(),
        "sync 2 after a power loss"
    );
    // Without one, a backup that is stopped puts its image back, too.
    primary.write(3 * MIB, 5, 4096);
    backup.write(3 * MIB, 5, 4096);
    while backup.disk.status().backup.counters.mirrored_bytes < (76 << 10) {
        std::thread::yield_now();
    }
    backup.disk.idle();
    while backup.disk.status().backup.counters.settled_bytes < (72 << 10) {
        std::thread::yield_now();
    }
    backup.disk.reset();
    assert_eq!(backup.image_byte(3 * MIB), 0);
}

#[test]
fn an_empty_sync_makes_what_was_settled_before_it_stay() {
    let (dir, primary, backup) = pair("light-empty", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    primary.write(0, 1, 4096);
    backup.write(0, 1, 4096);
    while backup.disk.status().backup.counters.mirrored_bytes < 4096 {
        std::thread::yield_now();
    }
    backup.disk.idle();
    while backup.disk.status().backup.counters.settled_bytes < 4096 {
        std::thread::yield_now();
    }
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let host = power_loss(&dir.0, "b", "lost", &fs::read(&backup.image).unwrap());
    assert_eq!(host.image_byte(0), 1);
}

#[test]
fn a_take_over_is_never_undone_or_repeated_over_later_writes() {
    let (dir, primary, backup) = pair("taken", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    backup.write(0, 2, 4096);
    drop(primary);
    backup.disk.take_over(Term(2)).unwrap();
    backup.write(0, 3, 512);
    let image = fs::read(&backup.image).unwrap();
    let host = power_loss(&dir.0, "b", "lost", &image);
    assert!(fs::read(&host.image).unwrap() == image);
    let ours = host.disk.status().generation;
    assert_eq!((ours.term, ours.primary), (Term(2), true));
    let old = power_loss(&dir.0, "a", "a2", &fs::read(dir.0.join("a.img")).unwrap());
    assert!(
        ours > old.disk.status().generation,
        "the newer image is told from the older"
    );
    host.disk.start_alone(Term(3)).unwrap();
}

#[test]
fn a_returned_peer_gets_only_what_either_side_wrote() {
    const MIBS: u64 = 64;
    let dir = Dir::new("return");
    let open = |name: &str| Host::open(&dir.0, name, MIBS, Storage::Gannet, Limits::default());
    let (primary, backup) = (open("a"), open("b"));
    primary.disk.start_alone(Term(1)).unwrap();
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    // The old primary writes what the backup never commits; the backup writes what the old primary never sees.
    primary.write(0, 1, 4096);
    backup.write(20 * MIB, 2, 4096);
    primary.end();
    backup.disk.take_over(Term(2)).unwrap();
    backup.write(40 * MIB, 3, 4096);
    let returned = open("a");
    join(&backup, &returned, AttachOptions::default());
    // A restarted host knows its own writes to 16 MiB, a host that lived on to 1 MiB.
    assert_eq!(backup.disk.status().dirty_bytes, (16 + 1 + 1) * MIB);
    backup.write(60 * MIB, 4, 4096);
    sync(&backup, &returned, 2);
    assert!(returned.disk.wait_settled(WAIT).unwrap());
    assert!(
        fs::read(&backup.image).unwrap() == fs::read(&returned.image).unwrap(),
        "equal after the resync"
    );
    assert_eq!(returned.image_byte(0), 0, "what was never committed is gone");
}

#[test]
fn who_is_elected_again_is_newer_than_a_take_over_that_came_to_nothing() {
    let (_dir, primary, backup) = pair("came-to-nothing", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    backup.write(MIB, 2, 4096);
    // It is elected, brings its copy's writes to its disk, and does not come to serve.
    backup.disk.take_over(Term(2)).unwrap();
    primary.disk.detach_backup().unwrap();
    backup.disk.reset();
    primary.write(0, 1, 4096);
    primary.disk.lead(Term(3)).unwrap();
    let ours = primary.disk.status().generation;
    assert!(ours.primary && ours > backup.disk.status().generation, "{ours:?}");
    primary.disk.lead(Term(1)).unwrap();
    assert_eq!(primary.disk.status().generation, ours, "it never grows older");
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
    assert_eq!(backup.image_byte(MIB), 0, "what nobody was ever told of is gone");
}

#[test]
fn a_lost_dirty_map_means_a_whole_copy() {
    let (dir, primary, backup) = pair("lost-map", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    primary.end();
    backup.end();
    fs::remove_file(dir.0.join("a").join("disk0.dirty")).unwrap();
    let open = |name: &str| Host::open(&dir.0, name, 8, Storage::Gannet, Limits::default());
    let (primary, backup) = (open("a"), open("b"));
    primary.disk.start_alone(Term(2)).unwrap();
    assert_eq!(primary.disk.status().dirty_bytes, 8 * MIB);
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}

#[test]
fn a_copy_that_was_interrupted_is_not_booted_from() {
    let dir = Dir::new("unfinished");
    let primary = Host::open(&dir.0, "a", 8, Storage::Gannet, Limits::default());
    let backup = Host::open(&dir.0, "b", 8, Storage::Gannet, Limits::default());
    primary.disk.start_alone(Term(1)).unwrap();
    primary.write(0, 1, 4096);
    join(&primary, &backup, AttachOptions::default());
    assert!(matches!(
        backup.disk.take_over(Term(2)),
        Err(DiskError::StillCopying)
    ));
    backup.end();
    let backup = Host::open(&dir.0, "b", 8, Storage::Gannet, Limits::default());
    assert!(!backup.disk.status().consistent);
    let error = backup.disk.start_alone(Term(2)).unwrap_err().to_string();
    assert!(error.contains("unfinished copy"), "{error}");
    primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }));
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(backup.disk.status().consistent);
}

#[test]
fn an_older_primary_does_not_overwrite_a_newer_disk() {
    let (dir, primary, backup) = pair("older", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    primary.end();
    backup.disk.take_over(Term(5)).unwrap();
    backup.disk.reset();
    let old = Host::open(&dir.0, "a", 8, Storage::Gannet, Limits::default());
    old.disk.start_alone(Term(2)).unwrap();
    let (left, right) = UnixStream::pair().unwrap();
    backup
        .disk
        .start_backup(MirrorStream::from_unix(right).unwrap())
        .unwrap();
    old.disk
        .attach_backup(MirrorStream::from_unix(left).unwrap(), AttachOptions::default())
        .unwrap();
    let DiskEvent::AttachFailed { reason } =
        old.wait(|event| matches!(event, DiskEvent::AttachFailed { .. }))
    else {
        unreachable!()
    };
    assert!(reason.contains("later than"), "{reason}");
}

const REPAIR: VerifyOptions = VerifyOptions {
    repair: true,
    bytes_per_s: 0,
};

#[test]
fn verification_finds_a_flipped_byte_while_the_guest_writes_and_mends_it() {
    let (_dir, primary, backup) = pair("verify", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert_eq!(
        primary
            .disk
            .verify(VerifyOptions::default(), |_, _| ControlFlow::Continue(()))
            .unwrap()
            .different,
        []
    );
    let file = fs::OpenOptions::new().write(true).open(&backup.image).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xee], 3 * MIB + 77).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut at = 0;
            while !stop.load(Ordering::Acquire) {
                at = (at + 12345) % (2 * MIB);
                primary.write(at, (at % 251) as u8, 700);
            }
        });
        let report = primary.disk.verify(REPAIR, |_, _| ControlFlow::Continue(()));
        stop.store(true, Ordering::Release);
        report.unwrap()
    });
    assert_eq!(
        report
            .different
            .iter()
            .map(|range| range.start)
            .collect::<Vec<_>>(),
        [3 * MIB]
    );
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert_eq!(
        primary
            .disk
            .verify(VerifyOptions::default(), |_, _| ControlFlow::Continue(()))
            .unwrap()
            .different,
        []
    );
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}

#[test]
fn a_comparison_keeps_to_its_limit_asks_before_each_piece_and_ends_when_it_is_told_to() {
    let (_dir, primary, backup) = pair("verify-gently", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let gently = VerifyOptions {
        repair: false,
        bytes_per_s: 20 * MIB,
    };
    let (mut asked, began) = (Vec::new(), Instant::now());
    let report = primary.disk.verify(gently, |done, total| {
        asked.push((done, total));
        ControlFlow::Continue(())
    });
    let size = report.unwrap().bytes;
    // Once before each piece, and when all is compared.
    let steps: Vec<(u64, u64)> = (0..=size / MIB).map(|piece| (piece * MIB, size)).collect();
    assert_eq!(asked, steps);
    let least = Duration::from_secs_f64(size as f64 / (20 * MIB) as f64);
    assert!(began.elapsed() >= least, "{:?} for {size} bytes", began.elapsed());
    let stopped = primary.disk.verify(gently, |done, _| match done >= 2 * MIB {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    assert!(matches!(stopped, Err(DiskError::Stopped)));
    // A peer that is lost ends it, though by its limit it would take hours.
    let hours = VerifyOptions {
        bytes_per_s: 64,
        ..gently
    };
    let began = Instant::now();
    let lost = std::thread::scope(|scope| {
        let compares = scope.spawn(|| primary.disk.verify(hours, |_, _| ControlFlow::Continue(())));
        std::thread::sleep(Duration::from_millis(50));
        primary.disk.detach_backup().unwrap();
        compares.join().unwrap()
    });
    assert!(matches!(lost, Err(DiskError::NoBackup)), "{lost:?}");
    assert!(began.elapsed() < WAIT);
}

/// There was nothing to copy, and so nothing had said that the image is a mixture when half of the join's first sync was on it.
#[test]
fn a_join_that_copies_nothing_is_marked_as_unfinished_until_its_first_sync_is_whole() {
    let (dir, primary, backup) = pair("copies-nothing", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    assert!(backup.disk.status().consistent);
    let again = || {
        primary.disk.detach_backup().unwrap();
        backup.disk.reset();
        let (left, right) = UnixStream::pair().unwrap();
        let (left, right) = (
            MirrorStream::from_unix(left).unwrap(),
            MirrorStream::from_unix(right).unwrap(),
        );
        backup.disk.start_backup(right).unwrap();
        primary
            .disk
            .attach_backup(left, AttachOptions::default())
            .unwrap();
        let started = primary.wait(|event| matches!(event, DiskEvent::CopyStarted { .. }));
        primary.wait(|event| *event == DiskEvent::Copied);
        backup.wait(|event| *event == DiskEvent::Copied);
        started
    };
    let nothing = DiskEvent::CopyStarted {
        bytes: 0,
        whole: false,
    };
    assert_eq!(again(), nothing);
    assert!(!backup.disk.status().consistent, "before the first sync");
    // The power fails when half of that sync is on the image.
    let mut half = fs::read(&backup.image).unwrap();
    half[0] = 1;
    let torn = power_loss(&dir.0, "b", "half", &half);
    assert!(!torn.disk.status().consistent);
    let refused = torn.disk.start_alone(Term(2));
    assert!(matches!(refused, Err(DiskError::Incomplete(_))), "{refused:?}");
    primary.write(0, 1, 4096);
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(2) });
    let status = backup.disk.status();
    assert_eq!((status.consistent, status.generation.epoch), (true, Epoch(2)));
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
    // Nor is an image whole, or of that sync, that had no room for it.
    assert_eq!(again(), nothing);
    primary.write(0, 2, 4096);
    backup.disk.faults().full(true);
    sync(&primary, &backup, 3);
    backup.wait(|event| matches!(event, DiskEvent::BackupFailed { .. }));
    backup.disk.faults().full(false);
    backup.disk.reset();
    let status = backup.disk.status();
    assert_eq!((status.consistent, status.generation.epoch), (false, Epoch(2)));
}
