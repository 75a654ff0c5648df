//! A UEFI guest: what it wrote into its variables is there after a take-over, and after a reboot there; what only the backup's
//! guest wrote is not.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::disk::{HostDisk, sync_disks};
use common::*;
use dunlin_core::units::Term;
use dunlin_guest::{FirmwareKind, Machine, Start, uefi};

/// OVMF alone takes ten seconds and more where it is translated.
const BOOT: Duration = Duration::from_secs(180);

/// Asks the guest for its address from 10.77.0.`number` until it says `answer`.
fn ask(vm: &mut Vm, number: u8, answer: &str) {
    let deadline = Instant::now() + BOOT;
    while !vm.qemu.console().wait_for(answer, Duration::from_millis(200)) {
        let text = vm.qemu.console().text();
        assert!(Instant::now() < deadline, "no {answer:?}:\n{text}");
        vm.frames[0].queue(&who_has_the_guest_tell(number));
        vm.frames[0].flush().unwrap();
        vm.frames[0].read(|_| ()).unwrap();
    }
}

/// One sync of memory, devices, firmware and variables.
fn sync(pair: &mut Pair, ours: &HostDisk, theirs: &HostDisk, epoch: u64) {
    pair.drain_frames();
    let staged = pair.pause_and_stage();
    pair.apply(staged, |primary, backup| {
        sync_disks(ours, theirs, epoch);
        assert_same_ram(primary, backup);
    });
}

fn variables_are_the_guests(machine: Machine) {
    let _alone = one_at_a_time();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("uefi-{machine:?}"));
    let _ = std::fs::remove_dir_all(&dir);
    let on = |host: &str| {
        let image = dir.join(format!("{host}.fd"));
        uefi::make_variables(&image).unwrap();
        HostDisk::open(&dir, host, image)
    };
    let (ours, theirs) = (on("a"), on("b"));
    let mut spec = linux(machine, 1);
    spec.firmware = FirmwareKind::Uefi;
    spec.memory_mib = 256;
    spec.append = spec.append.map(|line| line + " test.resets");
    ours.disk.start_alone(Term(1)).unwrap();
    let primary = start_with_disks(&spec, Start::Boot, vec![ours.port()]);
    assert!(
        primary.qemu.console().wait_for("GUEST-READY", BOOT),
        "{}",
        primary.qemu.console().text()
    );
    assert!(primary.qemu.console().text().contains("VARIABLES: Test* ."));

    ours.mirror_to(&theirs);
    let backup = start_with_disks(&spec, Start::Incoming, vec![theirs.port()]);
    let mut pair = Pair::join_vms(primary, backup, || sync_disks(&ours, &theirs, 1));
    sync(&mut pair, &ours, &theirs, 2);
    ask(&mut pair.backup, 96, "REMEMBERED TestStray");
    ask(&mut pair.primary, 97, "REMEMBERED TestKept");
    for epoch in 3..=4 {
        sync(&mut pair, &ours, &theirs, epoch);
    }
    pair.primary.qemu.kill().unwrap();
    theirs.disk.take_over(Term(2)).unwrap();
    pair.colo.failover().unwrap();
    assert!(
        std::fs::read(&ours.image).unwrap() == std::fs::read(&theirs.image).unwrap(),
        "{machine:?}: the two hosts' images of the variables differ"
    );
    // The guest's panic is a reset: it boots from what is in the flash.
    ask(&mut pair.backup, 98, "RESETTING");
    let console = pair.backup.qemu.console();
    assert!(
        console.wait_for("VARIABLES: ", BOOT),
        "{machine:?}: it does not boot again:\n{}",
        console.text()
    );
    console.wait_for("GUEST-READY", BOOT);
    let text = console.text();
    let said = text
        .split("VARIABLES:")
        .nth(1)
        .and_then(|rest| rest.lines().next());
    let names: Vec<&str> = said.unwrap_or_default().split_whitespace().collect();
    assert!(
        names.len() == 2 && names[0].starts_with("TestKept-") && names[1] == ".",
        "{machine:?}: after a reboot on the new host it has the variables {names:?}"
    );
    // Another QEMU on that host, later, from the image alone.
    drop(pair.backup);
    theirs.close();
    let image = dir.join("b.fd");
    let again = HostDisk::open(&dir, "b", image);
    again.disk.start_alone(Term(3)).unwrap();
    let anew = start_with_disks(&spec, Start::Boot, vec![again.port()]);
    let console = anew.qemu.console();
    assert!(
        console.wait_for("VARIABLES: TestKept-", BOOT),
        "{machine:?}: started anew:\n{}",
        console.text()
    );
    drop(anew);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn pc() {
    variables_are_the_guests(Machine::Pc);
}

#[test]
#[ignore = "a minute: by hand, --ignored; the scenario from a disk is on q35"]
fn q35() {
    variables_are_the_guests(Machine::Q35);
}
