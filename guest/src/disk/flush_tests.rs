//! A flush that failed: the kernel tells each error once, and keeps what it could not write as if it were written. So whoever was told
//! passes it on, and no later flush is believed about what was written before.

use super::{
    nbd::Export,
    tests::{Dir, Host, MIB, attach, join, pair, sync},
    *,
};
use std::{fs, os::unix::fs::FileExt, thread};

const WAIT: Duration = Duration::from_secs(20);

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        thread::yield_now();
    }
}

#[test]
fn an_error_that_our_own_flush_met_is_told_to_the_guests_next_one_and_only_to_that() {
    let dir = Dir::new("flush-owed");
    let open = || Host::open(&dir.0, "a", 8, Storage::Gannet, Limits::default());
    let primary = open();
    primary.disk.start_alone(Term(1)).unwrap();
    primary.write(0, 1, 4096);
    primary.disk.faults().flush_error(true);
    let refused = primary.disk.lead(Term(3));
    assert!(matches!(refused, Err(DiskError::Io(_))), "{refused:?}");
    assert_eq!(
        primary.disk.status().generation.term,
        Term(1),
        "no term is told that is not durable"
    );
    primary.disk.faults().flush_error(false);
    let error = primary.disk.flush().unwrap_err().to_string();
    assert!(error.contains("an earlier flush failed"), "{error}");
    primary.wait(|event| matches!(event, DiskEvent::ImageFailed { full: false, .. }));
    primary.disk.flush().unwrap();
    primary.disk.lead(Term(3)).unwrap();
    drop(primary);
    assert_eq!(open().disk.status().generation.term, Term(3));
}

#[test]
fn what_a_failed_flush_may_have_lost_is_put_on_the_image_again_before_the_journal_is_history() {
    let (_dir, primary, backup) = pair("flush-doubtful", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    primary.write(2 * MIB, 7, 4096);
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(2) });
    backup.disk.faults().flush_error(true);
    backup.disk.reset();
    backup.wait(|event| matches!(event, DiskEvent::ImageFailed { .. }));
    backup.disk.faults().flush_error(false);
    primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }));
    // What that flush was to bring to the disk, and did not.
    let file = fs::OpenOptions::new().write(true).open(&backup.image).unwrap();
    file.write_all_at(&[0; 4096], 2 * MIB).unwrap();
    // The primary knows that the backup has all of sync 2.
    attach(&primary, &backup, AttachOptions::default());
    let nothing = DiskEvent::CopyStarted {
        bytes: 0,
        whole: false,
    };
    let started = primary.wait(|event| matches!(event, DiskEvent::CopyStarted { .. }));
    assert_eq!(started, nothing);
    let DiskEvent::BackupFailed { reason } =
        backup.wait(|event| matches!(event, DiskEvent::BackupFailed { .. }))
    else {
        unreachable!()
    };
    assert!(reason.contains("a flush of it failed before"), "{reason}");
    primary.wait(|event| matches!(event, DiskEvent::BackupLost { .. }));
    backup.disk.reset();
    assert_eq!(backup.image_byte(2 * MIB), 7);
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 3);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
}

#[test]
fn what_was_in_the_map_when_a_flush_failed_stays_there() {
    let dir = Dir::new("flush-map");
    let [primary, backup] =
        ["a", "b"].map(|name| Host::open(&dir.0, name, 64, Storage::Gannet, Limits::default()));
    primary.disk.start_alone(Term(1)).unwrap();
    let mut options = AttachOptions::default();
    options.tuning.clear_every = Duration::ZERO;
    join(&primary, &backup, options);
    sync(&primary, &backup, 1);
    primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
    let noted = |extent: u64| {
        primary
            .disk
            .shared
            .dirty
            .all()
            .iter()
            .any(|noted| noted == extent)
    };
    assert!(!noted(0));
    primary.write(0, 1, 4096);
    primary.disk.faults().flush_error(true);
    sync(&primary, &backup, 2);
    primary.wait(|event| matches!(event, DiskEvent::ImageFailed { .. }));
    primary.disk.faults().flush_error(false);
    assert!(primary.disk.flush().is_err(), "the guest hears of it");
    primary.write(32 * MIB, 2, 4096);
    assert!(noted(32));
    sync(&primary, &backup, 3);
    until("what was written later leaves the map", || !noted(32));
    assert!(noted(0), "this host's disk may lack it");
}
