//! Frames on real QEMU: the guest answers, its address is learnt, both VMs get the same, nothing stays in flight unseen.

mod common;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use common::*;
use dunlin_guest::frames::{Announcer, FramePort};
use dunlin_guest::{Machine, NicBackend};

/// Waits a second at most until the port has something to read, or its card has changed.
fn wait(port: &FramePort) {
    let mut waited = [rustix::event::PollFd::from_borrowed_fd(
        port.as_fd(),
        rustix::event::PollFlags::IN,
    )];
    let second = rustix::event::Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut waited, Some(&second)).unwrap();
}

/// Sends what is queued and waits for a frame from the guest that `wanted` accepts.
fn receive(port: &mut FramePort, mut wanted: impl FnMut(&[u8]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let (mut found, mut sent) = (false, false);
    while !(found && sent) {
        // A card whose state has just been loaded takes nothing until QEMU has started its rings; buffers may be short too.
        sent = port.flush().unwrap();
        match sent {
            true => wait(port),
            false => std::thread::yield_now(),
        }
        port.read(|frame| found |= wanted(frame)).unwrap();
        assert!(
            found && sent || Instant::now() < deadline,
            "the guest does not answer"
        );
    }
}

fn both_answer(machine: Machine, nic_backend: NicBackend) {
    let _alone = one_at_a_time();
    let mut spec = linux(machine, 1);
    spec.nic_backend = nic_backend;
    let mut pair = Pair::new(&spec, "tick 2");
    let mut announcer = Announcer::new(GUEST);
    for vm in [&mut pair.primary, &mut pair.backup] {
        let port = &mut vm.frames[0];
        port.queue(&who_has_the_guest());
        receive(port, |frame| {
            announcer.learn(frame);
            frame.starts_with(&OURS) && frame[12..14] == [8, 6]
        });
        // A burst, longer than one read of QEMU's.
        let pings: Vec<Vec<u8>> = (0..100).map(|n| ping(n, 1400)).collect();
        pings.iter().for_each(|frame| port.queue(frame));
        let mut answered = 0;
        receive(port, |frame| {
            answered +=
                usize::from(frame.starts_with(&OURS) && frame.len() == pings[0].len() && frame[34] == 0);
            answered >= 50 // the ring may be full: a NIC may drop
        });
        // QEMU may not have read the end of the burst yet.
        let deadline = Instant::now() + Duration::from_secs(30);
        while port.inbound_in_flight().unwrap() > 0 {
            assert!(Instant::now() < deadline, "QEMU does not read to the end");
            port.read(|_| ()).unwrap();
            std::thread::yield_now();
        }
    }
    assert_eq!(
        announcer.addresses().collect::<Vec<_>>(),
        ["10.77.0.2".parse::<IpAddr>().unwrap()]
    );
    pair.sync();
    pair.assert_healthy();
    // After a stop QEMU sends nothing more: what is in flight is all there is.
    pair.primary.qemu.stop_within(OBEYS).unwrap();
    pair.primary.frames[0].read(|_| ()).unwrap();
    pair.primary.frames[0].queue(&who_has_the_guest());
    pair.primary.frames[0].flush().unwrap();
    assert_eq!(pair.primary.frames[0].outbound_in_flight().unwrap(), 0);
}

#[test]
fn pc() {
    both_answer(Machine::Pc, NicBackend::Stream);
}

#[test]
fn microvm() {
    both_answer(Machine::Microvm, NicBackend::Stream);
}

#[test]
fn pc_vhost_user() {
    both_answer(Machine::Pc, NicBackend::VhostUser);
}

#[test]
fn microvm_vhost_user() {
    both_answer(Machine::Microvm, NicBackend::VhostUser);
}
