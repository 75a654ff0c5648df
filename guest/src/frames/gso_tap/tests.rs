//! The kernel's own words about large frames, on a bridge in a network namespace.

use super::*;
use crate::frames::tap::tests::{ip, own_namespace};
use etherparse::PacketBuilder;
use std::time::{Duration, Instant};

const HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const THERE: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// What a TCP sends in one go.
fn burst(v6: bool, segment_bytes: usize, bytes: usize) -> Vec<Bytes> {
    let content: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
    let count = bytes.div_ceil(segment_bytes);
    let one = |(number, piece): (usize, &[u8])| {
        let link = PacketBuilder::ethernet2(HERE, THERE);
        let network = match v6 {
            true => link.ipv6([0xfd; 16], [0xfc; 16], 64),
            false => link.ip(etherparse::IpHeaders::Ipv4(
                etherparse::Ipv4Header {
                    identification: number as u16,
                    ..etherparse::Ipv4Header::new(
                        0,
                        64,
                        etherparse::IpNumber::TCP,
                        [10, 0, 0, 1],
                        [10, 0, 0, 2],
                    )
                    .expect("it fits")
                },
                etherparse::Ipv4Extensions::default(),
            )),
        };
        let mut transport = network
            .tcp(80, 4000, (number * segment_bytes) as u32, 500)
            .ack(77);
        if number + 1 == count {
            transport = transport.psh();
        }
        let mut frame = Vec::new();
        transport.write(&mut frame, piece).expect("it fits");
        Bytes::from(frame)
    };
    content.chunks(segment_bytes).enumerate().map(one).collect()
}

fn is_ours(frame: &[u8]) -> bool {
    frame[6..12] == HERE
}

/// Waits until the bridge lets frames of `from` through to what `read` reads.
fn await_forwarding(from: &GsoTap, mut read: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        from.write(&burst(false, 10, 10)[0], Offload::default())
            .expect("it is up");
        if read() {
            return;
        }
        std::thread::yield_now();
    }
    panic!("no frame crossed the bridge");
}

#[test]
fn a_burst_goes_through_the_kernel_as_one_frame_and_comes_out_as_it_went_in() {
    let Some(()) = own_namespace() else { return };
    ip("link add br0 type bridge");
    ip("link set br0 up");
    let mut from = GsoTap::open("from", Some("br0")).unwrap();
    let mut to = GsoTap::open("to", Some("br0")).unwrap();
    let plain = Tap::open("plain", Some("br0")).unwrap();
    let mut buffer = vec![0; 2048];
    // Frames to an address that nobody has are flooded to both.
    await_forwarding(&from, || {
        let mut seen = false;
        to.read(|frame| seen |= is_ours(frame)).unwrap();
        seen
    });
    await_forwarding(
        &from,
        || matches!(plain.read(&mut buffer).unwrap(), Some(n) if is_ours(&buffer[..n])),
    );
    // What is still on its way of those.
    while to.read(|_| {}).unwrap() {}
    while plain.read(&mut buffer).unwrap().is_some() {}

    for v6 in [false, true] {
        let frames = burst(v6, 1400, 60_000);
        frames.iter().for_each(|frame| from.queue(frame.clone()));
        assert!(from.send_next().unwrap());
        assert!(!from.has_queued(), "one write");
        let mut large = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        while large.is_empty() && Instant::now() < deadline {
            to.read(|frame| {
                if is_ours(frame) {
                    large.push(Bytes::copy_from_slice(frame));
                }
            })
            .unwrap();
        }
        assert!(large == frames, "one read, v6 {v6}: {} frames", large.len());
        // Who does not take large frames gets them cut by the kernel, as we cut them.
        let mut cut = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        while cut.len() < frames.len() && Instant::now() < deadline {
            if let Some(n) = plain.read(&mut buffer).unwrap()
                && is_ours(&buffer[..n])
            {
                cut.push(Bytes::copy_from_slice(&buffer[..n]));
            }
        }
        assert!(cut == frames, "cut by the kernel, v6 {v6}: {} frames", cut.len());
    }
}

#[test]
fn what_may_not_be_sent_is_lost() {
    let Some(()) = own_namespace() else { return };
    let mut tap = GsoTap::open("alone", None).unwrap();
    tap.queue(burst(false, 10, 10)[0].clone());
    assert!(tap.has_queued());
    tap.lose_queued();
    assert!(!tap.has_queued());
}

#[test]
fn more_than_can_leave_as_one_is_not_kept() {
    let Some(()) = own_namespace() else { return };
    let mut tap = GsoTap::open("alone", None).unwrap();
    let frame = burst(false, 10, 10)[0].clone();
    (0..2 * MOST_SEGMENTS).for_each(|_| tap.queue(frame.clone()));
    let mut sent = 0;
    while tap.has_queued() {
        assert!(tap.send_next().unwrap());
        sent += 1;
    }
    assert_eq!(sent, MOST_SEGMENTS);
}

#[test]
fn a_device_that_was_removed_is_told_from_one_that_is_switched_off() {
    let Some(()) = own_namespace() else { return };
    let mut tap = GsoTap::open("tap-a", None).unwrap();
    ip("link set tap-a down");
    while let Ok(true) = tap.read(|_| {}) {}
    assert!(!tap.is_gone(), "it may be switched on again");
    ip("link del tap-a");
    let mut seen = 0;
    while let Ok(true) = tap.read(|_| seen += 1) {}
    assert!(tap.is_gone() && tap.read(|_| {}).is_err(), "after {seen} frames");
}
