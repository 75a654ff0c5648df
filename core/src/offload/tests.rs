//! A large frame is cut as a wire would have it; what is merged is cut into the same bytes again; and nothing that is not alike is merged.

use super::merge::Run;
use super::segment::segments;
use super::{MOST_CUT, MOST_HEADERS_BYTES, MOST_SEGMENTS, Offload, TCP_V4, TCP_V6};
use crate::output::packet::testing::{Seg, checksum_is_right, sum_of};
use crate::output::packet::{ACK, Direction, FIN, PSH, SYN};
use proptest::prelude::*;

const URG: u8 = 0x20;
const CWR: u8 = 0x80;

/// A segment of the VM's as a host would send it: its IPv4 header has a number and is summed.
fn frame(seg: &Seg, id: u16) -> Vec<u8> {
    let mut bytes = seg.frame().bytes.to_vec();
    if !seg.v6 {
        bytes[18..20].copy_from_slice(&id.to_be_bytes());
        let sum = sum_of(&bytes[14..34]);
        bytes[24..26].copy_from_slice(&(!sum).to_be_bytes());
    }
    bytes
}

/// Mends the checksums of a frame whose TCP header is at `tcp`, so that a wrong one is not what tells it from others.
fn sum_again(frame: &mut [u8], tcp: usize) {
    if tcp == 34 {
        frame[24..26].fill(0);
        let sum = sum_of(&frame[14..34]);
        frame[24..26].copy_from_slice(&(!sum).to_be_bytes());
    }
    let addresses = if tcp == 34 { 26..34 } else { 22..54 };
    let tcp_bytes = (frame.len() - tcp) as u16;
    frame[tcp + 16..tcp + 18].fill(0);
    let sum = sum_of(
        &[
            &frame[addresses],
            &[0, 6],
            &tcp_bytes.to_be_bytes(),
            &frame[tcp..],
        ]
        .concat(),
    );
    frame[tcp + 16..tcp + 18].copy_from_slice(&(!sum).to_be_bytes());
}

fn payload(from: usize, bytes: usize) -> Vec<u8> {
    (from..from + bytes).map(|at| (at * 7 + at / 251) as u8).collect()
}

/// What a TCP sends in one go: segments of `most` bytes, the last one with PSH.
fn burst(v6: bool, most: usize, bytes: usize, id: u16) -> Vec<Vec<u8>> {
    let count = bytes.div_ceil(most);
    let one = |number: usize| {
        let from = number * most;
        let flags = if number + 1 == count { ACK | PSH } else { ACK };
        let seg = Seg {
            v6,
            ..Seg::from_vm(flags, 0xffff_f000_u32.wrapping_add(from as u32), 77).ticks(5, 6)
        };
        frame(
            &seg.with(&payload(from, most.min(bytes - from))),
            id.wrapping_add(number as u16),
        )
    };
    (0..count).map(one).collect()
}

/// The large frame of a run, as a TAP or a card gets it.
fn joined(run: &Run, frames: &[Vec<u8>]) -> Vec<u8> {
    let payloads = frames[..run.frames].iter().map(|frame| &frame[run.payload_at..]);
    run.head
        .iter()
        .copied()
        .chain(payloads.flatten().copied())
        .collect()
}

fn cut(header: &Offload, frame: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut out = Vec::new();
    let mut frame = frame.to_vec();
    segments(header, &mut frame, &mut Vec::new(), |segment| {
        out.push(segment.to_vec());
    })
    .then_some(out)
}

/// All runs of a queue, cut again.
fn through(frames: &[Vec<u8>]) -> (Vec<usize>, Vec<Vec<u8>>) {
    let (mut counts, mut out, mut rest) = (Vec::new(), Vec::new(), frames);
    while !rest.is_empty() {
        let run = Run::at_front(rest.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
        out.extend(cut(&run.offload, &joined(&run, rest)).expect("what was merged is cut"));
        counts.push(run.frames);
        rest = &rest[run.frames..];
    }
    (counts, out)
}

fn merged(frames: &[Vec<u8>]) -> Vec<usize> {
    let (counts, out) = through(frames);
    assert_eq!(out, frames);
    counts
}

#[test]
fn a_burst_is_one_large_frame_and_is_cut_into_the_same_bytes() {
    for v6 in [false, true] {
        let frames = burst(v6, 1448, 60_000, 0xfffe);
        assert_eq!(merged(&frames), [frames.len()]);
        let run = Run::at_front(frames.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
        assert_eq!(run.offload.gso_type, if v6 { TCP_V6 } else { TCP_V4 });
        assert_eq!((run.offload.needs_csum, run.offload.gso_size), (true, 1448));
        for frame in frames {
            let frame = crate::agreed::Frame {
                nic: 0,
                bytes: frame.into(),
            };
            assert!(checksum_is_right(&frame, Direction::FromVm));
        }
    }
}

#[test]
fn no_large_frame_is_longer_than_ip_can_say_or_than_asked_for() {
    let frames = burst(false, 1448, 100_000, 1);
    let counts = merged(&frames);
    assert_eq!(counts.iter().sum::<usize>(), frames.len());
    assert_eq!(counts[0], 45, "45 of 1,448 bytes are below 64 KiB, 46 are not");
    let run = Run::at_front(frames.iter().map(|frame| &frame[..]), 16);
    assert_eq!(run.frames, 16);
    let small = burst(false, 100, 30_000, 1);
    assert_eq!(merged(&small)[0], MOST_SEGMENTS);
}

#[test]
fn what_is_not_alike_is_not_merged() {
    type Change = fn(&mut Seg, &mut u16);
    let changes: [(&str, Change); 11] = [
        ("another connection", |seg, _| seg.port += 1),
        ("a hole", |seg, _| seg.seq += 1),
        ("another acknowledgement", |seg, _| seg.ack += 1),
        ("another clock", |seg, _| seg.ticks = Some((5, 7))),
        ("no clock", |seg, _| seg.ticks = None),
        ("SACK", |seg, _| seg.sack = vec![(1, 2)]),
        ("FIN", |seg, _| seg.flags |= FIN),
        ("SYN", |seg, _| seg.flags |= SYN),
        ("URG", |seg, _| seg.flags |= URG),
        ("CWR", |seg, _| seg.flags |= CWR),
        ("a number that does not follow", |_, id| *id += 1),
    ];
    let first = Seg::from_vm(ACK, 1000, 77).ticks(5, 6).with(&[1; 100]);
    let second = Seg {
        seq: 1100,
        ..first.clone()
    };
    assert_eq!(merged(&[frame(&first, 8), frame(&second, 9)]), [2]);
    for (what, change) in changes {
        let (mut other, mut id) = (second.clone(), 9);
        change(&mut other, &mut id);
        assert_eq!(merged(&[frame(&first, 8), frame(&other, id)]), [1, 1], "{what}");
    }
    // Nor the other way round: the first one's flags are one segment's alone.
    for flags in [ACK | PSH, ACK | FIN, ACK | SYN, ACK | URG, ACK | CWR, PSH] {
        let first = Seg {
            flags,
            ..first.clone()
        };
        assert_eq!(
            merged(&[frame(&first, 8), frame(&second, 9)]),
            [1, 1],
            "{flags:#x}"
        );
    }
    let longer = second.clone().with(&[2; 101]);
    assert_eq!(merged(&[frame(&first, 8), frame(&longer, 9)]), [1, 1]);
    // A shorter one is the last one.
    let shorter = second.with(&[2; 99]);
    let third = Seg {
        seq: 1199,
        ..first.clone()
    };
    let frames = [frame(&first, 8), frame(&shorter, 9), frame(&third, 10)];
    assert_eq!(merged(&frames), [2, 1]);
}

#[test]
fn nothing_else_of_a_header_may_differ() {
    // Address, priority and VLAN, time to live, type of service, "do not fragment", reserved bits, window, urgent pointer.
    for v6 in [false, true] {
        let frames = burst(v6, 100, 200, 3);
        let tcp = if v6 { 54 } else { 34 };
        let own = match v6 {
            true => vec![18..20, tcp + 4..tcp + 8, tcp + 13..tcp + 14, tcp + 16..tcp + 18],
            false => vec![
                16..20,
                24..26,
                tcp + 4..tcp + 8,
                tcp + 13..tcp + 14,
                tcp + 16..tcp + 18,
            ],
        };
        let head_bytes = frames[0].len() - 100;
        for at in (0..head_bytes).filter(|at| !own.iter().any(|own| own.contains(at))) {
            let mut frames = frames.clone();
            frames[1][at] ^= 4;
            sum_again(&mut frames[1], tcp);
            let run = Run::at_front(frames.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
            assert_eq!(run.frames, 1, "byte {at}, v6 {v6}");
        }
    }
}

#[test]
fn a_wrong_checksum_stays_wrong() {
    for v6 in [false, true] {
        let frames = burst(v6, 100, 300, 3);
        for (number, which) in [(0, "the first"), (1, "the second")] {
            let mut damaged = frames.clone();
            *damaged[number].last_mut().unwrap() ^= 1;
            let counts = merged(&damaged);
            assert!(counts[0] == 1, "{which}: {counts:?}");
        }
    }
    let mut damaged = burst(false, 100, 300, 3);
    damaged[1][24] ^= 1;
    assert_eq!(merged(&damaged)[0], 1, "IPv4's own");
}

#[test]
fn the_last_bits_of_a_large_frame_are_where_they_belong() {
    let frames = burst(false, 100, 250, 3);
    let run = Run::at_front(frames.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
    let mut large = joined(&run, &frames);
    let flags = 34 + 13;
    large[flags] |= CWR | FIN;
    let cut = cut(&run.offload, &large).unwrap();
    let flags: Vec<u8> = cut.iter().map(|frame| frame[flags]).collect();
    assert_eq!(flags, [ACK | CWR, ACK, ACK | PSH | FIN]);
}

/// A client with a segment size below 512 bytes: more segments than are put together again.
#[test]
fn a_large_frame_of_small_segments_is_cut_whole() {
    let frames = burst(false, 1000, 20_000, 3);
    let run = Run::at_front(frames.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
    let small = Offload {
        gso_size: 100,
        ..run.offload
    };
    let out = cut(&small, &joined(&run, &frames)).expect("no more than 64 KiB make");
    assert_eq!(out.len(), 200);
    assert_eq!(out, burst(false, 100, 20_000, 3));
}

#[test]
fn a_header_that_contradicts_its_frame_loses_it() {
    let frames = burst(false, 1000, 20_000, 3);
    let run = Run::at_front(frames.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
    let large = joined(&run, &frames);
    let good = run.offload;
    assert!(cut(&good, &large).is_some());
    let bad = [
        ("no size", Offload { gso_size: 0, ..good }),
        (
            "too many segments",
            Offload {
                gso_size: 20_000 / (MOST_CUT as u16 + 1),
                ..good
            },
        ),
        ("UDP", Offload { gso_type: 3, ..good }),
    ];
    for (what, header) in bad {
        assert_eq!(cut(&header, &large), None, "{what}");
    }
    let checksum = |csum_start, csum_offset| Offload {
        needs_csum: true,
        csum_start,
        csum_offset,
        ..Offload::default()
    };
    let bytes = large.len() as u16;
    for (from, at) in [(bytes + 1, 0), (bytes - 1, 0), (34, bytes), (u16::MAX, u16::MAX)] {
        assert_eq!(cut(&checksum(from, at), &large), None, "{from} {at}");
    }
    assert_eq!(cut(&good, b"no TCP"), None);
}

/// Invariant 1 of `segment`: headers that each segment would repeat have a bound, or a frame would make 128 of its own length.
#[test]
fn a_large_frame_makes_no_more_of_itself_than_a_batch_has_room_for() {
    let plain = frame(
        &Seg {
            v6: true,
            ..Seg::from_vm(ACK, 1, 2).with(&payload(0, 100))
        },
        1,
    );
    // Destination options before TCP, which the parser passes over.
    let with_options = |bytes: usize| {
        let mut frame = plain.clone();
        let mut options = vec![0; bytes];
        (options[0], options[1]) = (6, (bytes / 8 - 1) as u8);
        frame[20] = 60;
        let length = u16::from_be_bytes([frame[18], frame[19]]) + bytes as u16;
        frame[18..20].copy_from_slice(&length.to_be_bytes());
        frame.splice(54..54, options);
        frame
    };
    let offload = Offload {
        needs_csum: true,
        gso_type: TCP_V6,
        gso_size: 1,
        ..Offload::default()
    };
    let headers_bytes = plain.len() - 100;
    let most = (MOST_HEADERS_BYTES - headers_bytes) / 8 * 8;
    let cut_short = cut(&offload, &with_options(most)).expect("as long as headers may be");
    assert_eq!(cut_short.len(), 100);
    assert_eq!(cut(&offload, &with_options(most + 8)), None);
}

#[test]
fn an_unfinished_checksum_is_finished() {
    let whole = frame(&Seg::from_vm(ACK, 1, 2).with(b"odd"), 1);
    let mut unfinished = whole.clone();
    let tcp_bytes = (whole.len() - 34) as u16;
    let pseudo = sum_of(&[&whole[26..34], &[0, 6], &tcp_bytes.to_be_bytes()].concat());
    unfinished[50..52].copy_from_slice(&pseudo.to_be_bytes());
    let header = Offload {
        needs_csum: true,
        csum_start: 34,
        csum_offset: 16,
        ..Offload::default()
    };
    assert_eq!(cut(&header, &unfinished), Some(vec![whole]));
}

#[test]
fn a_header_is_read_as_it_is_written() {
    let header = Offload {
        needs_csum: true,
        gso_type: 4,
        hdr_len: 0x102,
        gso_size: 0x304,
        csum_start: 0x506,
        csum_offset: 0x708,
    };
    let bytes = header.to_bytes();
    assert_eq!(bytes, [1, 4, 2, 1, 4, 3, 6, 5, 8, 7]);
    assert_eq!(Offload::read(&bytes), header);
}

prop_compose! {
    fn any_segment()(
        v6: bool, port in 0..2_u16, seq in prop_oneof![Just(0_u32), 0..400_u32], ack in 0..2_u32,
        flags in prop_oneof![8 => Just(ACK), 2 => Just(ACK | PSH), 1 => any::<u8>()],
        ticks in prop_oneof![4 => Just(Some((1, 1))), 1 => Just(None)],
        bytes in prop_oneof![6 => Just(100_usize), 1 => 0..200_usize], damage in prop_oneof![9 => Just(false), 1 => Just(true)],
        follows in prop_oneof![6 => Just(true), 1 => Just(false)], id in 0..3_u16,
    ) -> (Seg, bool, bool, u16) {
        let seg = Seg { v6, port, ticks, ..Seg::from_vm(flags, seq, ack).with(&payload(seq as usize, bytes)) };
        (seg, follows, damage, id)
    }
}

proptest! {
    /// Whatever the frames are, what comes out is what went in, in the same order.
    #[test]
    fn frames_come_through_as_they_are(segs in proptest::collection::vec(any_segment(), 0..40)) {
        let mut frames: Vec<Vec<u8>> = Vec::new();
        let (mut last, mut next_id): (Option<Seg>, u16) = (None, 0);
        for (seg, follows, damage, id) in segs {
            let seg = match &last {
                Some(last) if follows => Seg { seq: last.seq_after(), payload: seg.payload, flags: seg.flags, ..last.clone() },
                _ => seg,
            };
            next_id = if follows { next_id.wrapping_add(1) } else { id };
            let mut bytes = frame(&seg, next_id);
            if damage {
                let at = usize::from(id) * bytes.len() / 3;
                bytes[at] ^= 1;
            }
            frames.push(bytes);
            last = Some(seg);
        }
        let (counts, out) = through(&frames);
        prop_assert_eq!(&out, &frames);
        prop_assert_eq!(counts.iter().sum::<usize>(), frames.len());
    }

    /// Any bytes with any header: bounded, and no panic.
    #[test]
    fn any_bytes_are_survived(
        header: [u8; Offload::BYTES], kind in 0..5_u8, bytes in proptest::collection::vec(any::<u8>(), 0..300),
        at in 0..60_usize, with in any_segment(),
    ) {
        let mut header = Offload::read(&header);
        if kind > 0 {
            header.gso_type = [TCP_V4, TCP_V6, 0, TCP_V4][usize::from(kind) - 1];
        }
        let mut like = frame(&with.0, 1);
        for (place, byte) in like.iter_mut().skip(at).zip(&bytes).take(4) {
            *place = *byte;
        }
        for frame in [bytes, like] {
            if let Some(out) = cut(&header, &frame) {
                prop_assert!(out.len() <= MOST_CUT && out.iter().all(|segment| segment.len() <= frame.len()));
            }
            let twice = [frame.clone(), frame];
            let (_, out) = through(&twice);
            prop_assert_eq!(&out[..], &twice[..]);
        }
    }
}
