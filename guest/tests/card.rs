//! A card under stop, save and load with traffic: RAM is identical after each sync, each frame is answered once.
//! DUNLIN_SYNCS=2000 runs the full count, DUNLIN_TEST_QEMU another QEMU.

mod common;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use common::*;
use dunlin_guest::frames::FramePort;
use dunlin_guest::{Machine, NicBackend};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Frames of one round: a ring has room for all of them.
const BURST: u16 = 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// An ARP reply to the guest: a request of ours would not tell it that we hear it.
fn here_we_are() -> Vec<u8> {
    let mut frame = [&GUEST[..], &OURS, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2]].concat();
    frame.extend([&OURS[..], &[10, 77, 0, 1], &GUEST, &[10, 77, 0, 2]].concat());
    frame
}

/// How often the guest has answered each number.
#[derive(Default)]
struct Answers(BTreeMap<u16, u32>);

impl Answers {
    fn read(&mut self, port: &mut FramePort) {
        let mut is_asked = false;
        let each = |frame: &[u8]| {
            // It wants to know whether we are still there, or it drops what it would say.
            is_asked |= frame.len() > 21 && frame[12..14] == [8, 6] && frame[21] == 1;
            // An echo reply: its type, and behind the identifier its number.
            if frame.len() > 42 && frame[12..14] == [8, 0] && frame[23] == 1 && frame[34] == 0 {
                *self
                    .0
                    .entry(u16::from_be_bytes([frame[40], frame[41]]))
                    .or_default() += 1;
            }
        };
        port.read(each).unwrap();
        if is_asked {
            port.queue(&here_we_are());
            port.flush().unwrap();
        }
    }

    fn await_all(&mut self, port: &mut FramePort, asked: u16) {
        let until = Instant::now() + PATIENCE;
        while self.0.len() < usize::from(asked) {
            assert!(
                Instant::now() < until,
                "{} of {asked} were answered",
                self.0.len()
            );
            let second = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            let ready = poll(
                &mut [PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)],
                Some(&second),
            )
            .unwrap();
            if ready == 0 {
                // It may have asked for us while this test had no turn, and given up.
                port.queue(&here_we_are());
            }
            self.read(port);
            port.flush().unwrap();
        }
    }
}

fn each_frame_is_answered_once(machine: Machine) {
    let _alone = one_at_a_time();
    let mut spec = linux(machine, 1);
    spec.nic_backend = NicBackend::VhostUser;
    let mut pair = Pair::new(&spec, "tick 2");
    let mut answers = Answers::default();
    let mut asked = 0;
    for _ in 0..syncs_or(20) {
        // A guest that has not heard of us for a while asks where we are, and drops what it would say.
        for vm in [&mut pair.primary, &mut pair.backup] {
            vm.frames[0].queue(&who_has_the_guest());
        }
        for number in asked..asked + BURST {
            // Each copy gets the same, and the sync begins while they are answered.
            for vm in [&mut pair.primary, &mut pair.backup] {
                vm.frames[0].queue(&ping(number, 200 + usize::from(number) % 1200));
            }
        }
        for vm in [&mut pair.primary, &mut pair.backup] {
            vm.frames[0].flush().unwrap();
        }
        // A guest that has had no time yet may have no room for more answers than a socket's buffer holds: those of the round before come first.
        answers.await_all(&mut pair.primary.frames[0], asked);
        asked += BURST;
        pair.sync();
        pair.assert_healthy();
        answers.read(&mut pair.primary.frames[0]);
        pair.backup.frames[0].read(|_| ()).unwrap();
    }
    answers.await_all(&mut pair.primary.frames[0], asked);
    let twice: Vec<_> = answers.0.iter().filter(|(_, times)| **times != 1).collect();
    assert!(twice.is_empty(), "answered more than once: {twice:?}");

    pair.primary.qemu.kill().unwrap();
    pair.colo.failover().unwrap();
    let port = &mut pair.backup.frames[0];
    port.queue(&who_has_the_guest());
    port.queue(&ping(asked, 60));
    port.flush().unwrap();
    // What the backup had to answer of the last round is among what it says now.
    let mut answers = Answers((0..asked).map(|number| (number, 1)).collect());
    answers.await_all(port, asked + 1);
}

#[test]
fn pc_vhost_user() {
    each_frame_is_answered_once(Machine::Pc);
}

#[test]
fn q35_vhost_user() {
    each_frame_is_answered_once(Machine::Q35);
}

#[test]
fn microvm_vhost_user() {
    each_frame_is_answered_once(Machine::Microvm);
}
