//! A backup's disk of which something cannot be read: no VM that was told so takes over, and neither a join nor a comparison ends with it.

use super::{
    alike_tests::{equal, seeded},
    nbd::Export,
    tests::{MIB, attach, join, pair, sync},
    *,
};
use std::fs;

const WAIT: Duration = Duration::from_secs(20);

fn read(host: &super::tests::Host, offset: u64) -> std::io::Result<()> {
    host.disk.read(offset, &mut [0; 512])
}

#[test]
fn a_backup_whose_vm_was_told_of_a_read_error_is_replaced_and_does_not_take_over() {
    for storage in [Storage::Gannet, Storage::Sync] {
        let name = format!("told-unreadable-{storage:?}");
        let (_dir, primary, backup) = pair(&name, storage, Limits::default());
        sync(&primary, &backup, 1);
        assert!(backup.disk.wait_settled(WAIT).unwrap());
        primary.wait(|event| *event == DiskEvent::Committed { epoch: Epoch(1) });
        backup.disk.faults().read_error(true);
        assert!(read(&backup, 3 * MIB).is_err());
        let DiskEvent::BackupFailed { reason } =
            backup.wait(|event| matches!(event, DiskEvent::BackupFailed { .. }))
        else {
            unreachable!()
        };
        assert!(reason.contains("the backup's disk cannot be read"), "{reason}");
        primary.wait(|event| {
            *event
                == DiskEvent::BackupLost {
                    reason: reason.clone(),
                }
        });
        let refused = backup.disk.take_over(Term(2));
        assert!(matches!(refused, Err(DiskError::Failed(_))), "{refused:?}");
        // The next copy is asked for what could not be read, though nobody wrote there.
        backup.disk.faults().read_error(false);
        backup.disk.reset();
        attach(&primary, &backup, AttachOptions::default());
        let started = primary.wait(|event| matches!(event, DiskEvent::CopyStarted { .. }));
        let (bytes, whole) = (MIB, false);
        assert_eq!(started, DiskEvent::CopyStarted { bytes, whole });
        primary.wait(|event| *event == DiskEvent::Copied);
        backup.wait(|event| *event == DiskEvent::Copied);
        sync(&primary, &backup, 2);
        assert!(backup.disk.wait_settled(WAIT).unwrap());
        assert!(fs::read(&primary.image).unwrap() == fs::read(&backup.image).unwrap());
        read(&backup, 3 * MIB).unwrap();
    }
}

#[test]
fn a_backup_without_a_primary_takes_over_though_its_vm_was_told_of_a_read_error() {
    let (_dir, primary, backup) = pair("alone-unreadable", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    backup.write(0, 7, 4096);
    drop(primary);
    backup.wait(|event| matches!(event, DiskEvent::PrimaryLost { .. }));
    backup.disk.faults().read_error(true);
    assert!(read(&backup, 3 * MIB).is_err());
    backup.disk.faults().read_error(false);
    backup.disk.take_over(Term(2)).unwrap();
    let failed = |event: &DiskEvent| matches!(event, DiskEvent::BackupFailed { .. });
    assert!(!backup.events.lock().try_iter().any(|event| failed(&event)));
    assert_eq!(backup.image_byte(0), 7);
}

#[test]
fn a_join_writes_anew_what_the_joining_host_cannot_read() {
    let (_dir, primary, peer) = seeded("joins-unreadable");
    peer.disk.faults().read_error(true);
    join(&primary, &peer, AttachOptions::default());
    peer.disk.faults().read_error(false);
    equal(&primary, &peer);
}

#[test]
fn a_comparison_calls_different_what_the_backup_cannot_read_and_ends_no_protection() {
    let (_dir, primary, backup) = pair("compares-unreadable", Storage::Gannet, Limits::default());
    sync(&primary, &backup, 1);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    let compare = |repair| {
        let options = VerifyOptions {
            repair,
            ..VerifyOptions::default()
        };
        let report = primary.disk.verify(options, |_, _| ControlFlow::Continue(()));
        report.unwrap().different.len()
    };
    backup.disk.faults().read_error(true);
    assert_eq!(compare(true), 8, "all of its MiB");
    backup.disk.faults().read_error(false);
    assert_eq!(primary.disk.status().role, "primary");
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(WAIT).unwrap());
    assert_eq!(compare(false), 0);
}
