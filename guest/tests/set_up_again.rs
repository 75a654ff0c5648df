//! A load takes the backup back to before its guest set up a device: nothing of what the device was may be left.
//!
//! QEMU's stream leaves out what has its value of a machine just switched on (a queue's indices while it has no address, a
//! device that is not broken), so a load is whole only on such a machine.

mod common;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use common::*;
use dunlin_guest::frames::FramePort;
use dunlin_guest::{Machine, Start};

/// Asks for the guest's address all the time until it has answered `times` times: frames come at every step of its set-up.
fn asks_until_answered(port: &mut FramePort, times: usize) -> bool {
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut answers = 0;
    while answers < times && Instant::now() < deadline {
        port.queue(&who_has_the_guest());
        port.flush().unwrap();
        let mut waited = [rustix::event::PollFd::from_borrowed_fd(
            port.as_fd(),
            rustix::event::PollFlags::IN,
        )];
        let moment = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        rustix::event::poll(&mut waited, Some(&moment)).unwrap();
        let answer = |frame: &[u8]| frame.starts_with(&OURS) && frame[12..14] == [8, 6];
        port.read(|frame| answers += usize::from(answer(frame))).unwrap();
    }
    answers >= times
}

fn a_card_set_up_twice(machine: Machine) {
    let _alone = one_at_a_time();
    let mut spec = linux(machine, 1);
    spec.append = spec.append.map(|line| line + " test.card=late");
    let primary = start(&spec, Start::Boot);
    primary.wait_booted("NO-CARD-YET");
    primary.qemu.stop_within(OBEYS).unwrap();
    let mut pair = Pair::join(&spec, primary);
    pair.primary.qemu.stop_within(OBEYS).unwrap();
    let said = pair.primary.qemu.console().text();
    assert!(!said.contains("CARD-NEXT"), "the primary has no card yet");

    // The backup goes ahead, and uses its card: as many frames as its queues have room for.
    assert!(
        asks_until_answered(&mut pair.backup.frames[0], 300),
        "the backup has a card"
    );
    for round in 0..3 {
        // Back to before the card, then twice to the primary as it is.
        pair.sync();
        for (who, vm) in [("primary", &mut pair.primary), ("backup", &mut pair.backup)] {
            assert!(
                asks_until_answered(&mut vm.frames[0], 3),
                "round {round}: the {who} is deaf; its QEMU said {:?}, its guest:\n{}",
                vm.qemu.stderr().text(),
                vm.qemu.console().text()
            );
        }
    }
    pair.assert_healthy();
}

#[test]
fn microvm() {
    a_card_set_up_twice(Machine::Microvm);
}

#[test]
fn pc() {
    a_card_set_up_twice(Machine::Pc);
}

#[test]
fn q35() {
    a_card_set_up_twice(Machine::Q35);
}
