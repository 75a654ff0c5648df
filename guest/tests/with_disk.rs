//! A guest that writes to its disks while both VMs are synchronised: QEMU's NBD client on inherited descriptors, our
//! server, the I/O switch. At each sync the images are the same, byte by byte.

mod common;

use std::path::Path;

use common::disk::{HostDisk, WAIT, sync_disks};
use common::*;
use dunlin_core::units::Term;
use dunlin_guest::{DiskSpec, Machine, Start};

const IMAGE_BYTES: u64 = 16 << 20;

fn two_disks_under_load(machine: Machine) {
    let _alone = one_at_a_time();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("with-disk-{machine:?}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let mut spec = linux(machine, 1);
    let names = ["first", "second"];
    let on = |host: &str| names.map(|disk| HostDisk::empty(&dir, &format!("{host}-{disk}"), IMAGE_BYTES));
    let (ours, theirs) = (on("a"), on("b"));
    spec.disks = ours
        .iter()
        .map(|d| DiskSpec {
            path: d.image.clone(),
            format: Default::default(),
        })
        .collect();
    ours.iter().for_each(|d| d.disk.start_alone(Term(1)).unwrap());
    let ports = |disks: &[HostDisk; 2]| disks.iter().map(HostDisk::port).collect();
    let primary = start_with_disks(&spec, Start::Boot, ports(&ours));
    primary.wait_booted("tick 3");

    for (a, b) in ours.iter().zip(&theirs) {
        a.mirror_to(b);
    }
    let backup = start_with_disks(&spec, Start::Incoming, ports(&theirs));
    let mut pair = Pair::join_vms(primary, backup, || {
        ours.iter().zip(&theirs).for_each(|(a, b)| sync_disks(a, b, 1));
    });
    let mut written = 0;
    for epoch in 2..2 + syncs_wanted() as u64 {
        let seen = pair.primary.qemu.console().total_bytes();
        assert!(
            pair.primary.qemu.console().wait_more(seen, WAIT),
            "the primary runs"
        );
        pair.drain_frames();
        let staged = pair.pause_and_stage();
        pair.apply(staged, |primary, backup| {
            ours.iter()
                .zip(&theirs)
                .for_each(|(a, b)| sync_disks(a, b, epoch));
            assert_same_ram(primary, backup);
            for (a, b) in ours.iter().zip(&theirs) {
                assert!(b.disk.wait_settled(WAIT).unwrap());
                let content = std::fs::read(&a.image).unwrap();
                assert!(
                    content == std::fs::read(&b.image).unwrap(),
                    "images differ at sync {epoch}"
                );
                written += u64::from(content[..4096].iter().any(|byte| *byte != 0));
            }
        });
        pair.assert_healthy();
    }
    assert!(written > 0, "the guest writes to its disk");
    let before = last_tick(&pair.primary.qemu);
    pair.primary.qemu.kill().unwrap();
    theirs
        .iter()
        .for_each(|d| assert!(d.disk.take_over(Term(2)).is_ok()));
    pair.colo.failover().unwrap();
    let console = pair.backup.qemu.console();
    assert!(
        console.wait_for(&format!("tick {}\r", before + 10), WAIT),
        "{}",
        console.text()
    );
    assert_eq!(console.oops(), None);
    assert!(!console.text().contains("I/O error"), "{}", console.text());
    drop(pair.backup);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn pc() {
    two_disks_under_load(Machine::Pc);
}

#[test]
fn q35() {
    two_disks_under_load(Machine::Q35);
}

#[test]
fn microvm() {
    two_disks_under_load(Machine::Microvm);
}
