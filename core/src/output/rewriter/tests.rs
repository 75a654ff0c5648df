//! Each rule by itself; then any bytes; then whole conversations (`model`).

use super::*;
use crate::output::packet::testing::{Seg, checksum_is_right, segment, sum_of as sum};
use crate::output::packet::{ACK, FIN, RST, SYN, before};

mod any;
mod model;
mod over;

/// The ISNs of the primary's VM, the backup's, and the client.
const P: u32 = 1000;
const B: u32 = 0xffff_fff0;
const C: u32 = 5_000_000;

/// `seg`, on its way into the VM.
fn into(rewriter: &mut SequenceRewriter, seg: &Seg) -> Seg {
    let frame = rewriter.inbound(&seg.frame());
    assert!(checksum_is_right(&frame, Direction::ToVm), "{seg:?}");
    Seg::read(&frame, Direction::ToVm)
}

/// `seg`, on its way to the client.
fn out(rewriter: &mut SequenceRewriter, seg: &Seg) -> Seg {
    let frame = rewriter.outbound(&seg.frame());
    assert!(checksum_is_right(&frame, Direction::FromVm), "{seg:?}");
    Seg::read(&frame, Direction::FromVm)
}

/// A backup whose VM accepted a connection with ISN `B` and clock 100, while the primary said `P` and clock 700.
fn accepted() -> SequenceRewriter {
    let mut rewriter = SequenceRewriter::new();
    into(&mut rewriter, &Seg::to_vm(SYN, C, 0).ticks(9, 0));
    rewriter.overheard(&Seg::from_vm(SYN | ACK, B, C + 1).ticks(100, 9).frame());
    let ack = into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1).ticks(10, 700));
    assert_eq!((ack.ack, ack.ticks), (B.wrapping_add(1), Some((10, 100))));
    rewriter
}

#[test]
fn a_host_that_follows_nothing_changes_nothing_and_copies_nothing() {
    let mut rewriter = SequenceRewriter::new();
    assert!(rewriter.is_empty());
    let frame = Seg::to_vm(ACK, 1, 2).ticks(3, 4).frame();
    assert_eq!(rewriter.inbound(&frame).bytes.as_ptr(), frame.bytes.as_ptr());
    let frame = Seg::from_vm(ACK, 1, 2).ticks(3, 4).frame();
    assert_eq!(rewriter.outbound(&frame).bytes.as_ptr(), frame.bytes.as_ptr());
    assert!(rewriter.table().is_empty());
}

#[test]
fn the_clients_first_acknowledgement_tells_the_primarys_numbers() {
    let mut rewriter = accepted();
    assert!(!rewriter.is_empty());
    rewriter.overheard(&Seg::from_vm(ACK, B.wrapping_add(1), C + 1).with(&[0; 40]).frame());
    // Across the wrap of the VM's own numbers: 0xfffffff0 + 31 is 15.
    let seg = Seg {
        sack: vec![(P + 33, P + 35), (P + 37, P + 39)],
        ..Seg::to_vm(ACK, C + 1, P + 31).ticks(11, 690)
    };
    let seg = into(&mut rewriter, &seg);
    assert_eq!((seg.ack, seg.seq), (15, C + 1));
    assert_eq!(seg.sack, vec![(17, 19), (21, 23)]);
    assert_eq!(seg.ticks, Some((11, 90)));
}

#[test]
fn the_answer_to_the_vms_own_syn_tells_the_primarys_numbers() {
    for flags in [SYN | ACK, RST | ACK] {
        let mut rewriter = SequenceRewriter::new();
        rewriter.overheard(&Seg::from_vm(SYN, B, 0).ticks(100, 0).frame());
        let answer = into(&mut rewriter, &Seg::to_vm(flags, C, P + 1).ticks(9, 700));
        assert_eq!(answer.ack, B.wrapping_add(1));
        assert_eq!(
            answer.ticks,
            Some((9, 100)),
            "between the first SYN and now, or Linux resets"
        );
    }
}

#[test]
fn the_answer_to_a_syn_from_before_the_last_sync_echoes_nothing() {
    let answer = into(
        &mut SequenceRewriter::new(),
        &Seg::to_vm(SYN | ACK, C, P + 1).ticks(9, 700),
    );
    assert_eq!(
        (answer.ack, answer.ticks),
        (P + 1, Some((9, 0))),
        "the primary may have repeated it, later by its clock"
    );
}

#[test]
fn equal_numbers_after_all_need_no_translation() {
    let mut rewriter = SequenceRewriter::new();
    rewriter.overheard(&Seg::from_vm(SYN | ACK, B, C + 1).ticks(100, 9).frame());
    into(
        &mut rewriter,
        &Seg::to_vm(ACK, C + 1, B.wrapping_add(1)).ticks(10, 100),
    );
    assert!(rewriter.table().is_empty());
}

#[test]
fn nothing_is_learnt_from_what_does_not_fit_the_handshake() {
    let right = Seg::to_vm(ACK, C + 1, P + 1);
    let cases = [
        (
            "another stream",
            Seg {
                seq: C + 0x2_0000,
                ..right.clone()
            },
        ),
        (
            "before the stream",
            Seg {
                seq: C,
                ..right.clone()
            },
        ),
        (
            "a reset",
            Seg {
                flags: RST | ACK,
                seq: C + 5,
                ..right.clone()
            },
        ),
        (
            "no acknowledgement",
            Seg {
                flags: 0,
                ..right.clone()
            },
        ),
        (
            "another SYN-ACK",
            Seg {
                flags: SYN | ACK,
                seq: C + 7,
                ..right.clone()
            },
        ),
    ];
    for (name, wrong) in cases {
        let mut rewriter = SequenceRewriter::new();
        rewriter.overheard(&Seg::from_vm(SYN | ACK, B, C + 1).frame());
        assert_eq!(into(&mut rewriter, &wrong).ack, wrong.ack, "{name}");
        assert_eq!(
            into(&mut rewriter, &right).ack,
            B.wrapping_add(1),
            "{name}: then the right one"
        );
    }
}

#[test]
fn bytes_with_a_syn_leave_the_numbers_open() {
    let mut rewriter = SequenceRewriter::new();
    rewriter.overheard(&Seg::from_vm(SYN, B, 0).with(b"early").frame());
    let answer = Seg::to_vm(SYN | ACK, C, P + 6);
    assert_eq!(into(&mut rewriter, &answer).ack, P + 6);
}

#[test]
fn a_repeated_syn_ack_is_the_same_connection_and_another_one_is_not() {
    let mut rewriter = accepted();
    rewriter.overheard(&Seg::from_vm(SYN | ACK, B, C + 1).frame());
    assert_eq!(
        into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1)).ack,
        B.wrapping_add(1)
    );
    rewriter.overheard(&Seg::from_vm(SYN | ACK, 77, C + 900).frame());
    assert_eq!(into(&mut rewriter, &Seg::to_vm(ACK, C + 900, 8001)).ack, 78);
}

#[test]
fn a_damaged_segment_stays_damaged_and_teaches_nothing() {
    let damage = |frame: Frame| {
        let mut bytes = frame.bytes.to_vec();
        *bytes.last_mut().unwrap() ^= 0x40;
        Frame {
            bytes: bytes.into(),
            ..frame
        }
    };
    let mut rewriter = SequenceRewriter::new();
    rewriter.overheard(&Seg::from_vm(SYN | ACK, B, C + 1).frame());
    rewriter.inbound(&damage(Seg::to_vm(ACK, C + 1, 4242).with(b"x").frame()));
    let ack = into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1));
    assert_eq!(ack.ack, B.wrapping_add(1));
    // Outwards nothing is learnt, so the damaged one is translated, too: by the difference.
    rewriter.take_over();
    let frame = rewriter.outbound(&damage(
        Seg::from_vm(ACK, B.wrapping_add(1), C + 1).with(b"x").frame(),
    ));
    assert_eq!(segment(&frame, Direction::FromVm).seq, P + 1);
    assert!(!checksum_is_right(&frame, Direction::FromVm));
}

#[test]
fn an_acknowledgement_is_never_of_more_than_the_vm_has_sent() {
    let mut rewriter = accepted();
    assert_eq!(
        into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 500)).ack,
        B.wrapping_add(1)
    );
    rewriter.overheard(&Seg::from_vm(ACK, B.wrapping_add(1), C + 1).with(&[0; 20]).frame());
    assert_eq!(
        into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 500)).ack,
        B.wrapping_add(21)
    );
    assert_eq!(
        into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 11)).ack,
        B.wrapping_add(11)
    );
}

#[test]
fn after_a_sync_it_is_not_known_at_once_how_far_the_vm_has_sent() {
    let mut rewriter = SequenceRewriter::new();
    let ack = |rewriter: &mut SequenceRewriter, ack| into(rewriter, &Seg::to_vm(ACK, C, ack)).ack;
    // Perhaps a retransmission: the VM may have sent more before the sync.
    rewriter.overheard(&Seg::from_vm(ACK, 5000, C).with(&[0; 10]).frame());
    assert_eq!(ack(&mut rewriter, 5100), 5100);
    // A keep-alive steps back by one.
    rewriter.overheard(&Seg::from_vm(ACK, 5099, C).frame());
    assert_eq!(ack(&mut rewriter, 5100), 5100);
    // Its next number, at last.
    rewriter.overheard(&Seg::from_vm(ACK, 5100, C).frame());
    assert_eq!(ack(&mut rewriter, 5200), 5100);
    rewriter.overheard(&Seg::from_vm(ACK, 5100, C).with(&[0; 50]).frame());
    assert_eq!(ack(&mut rewriter, 5200), 5150);
}

#[test]
fn an_echo_is_never_of_a_time_that_the_vm_has_not_said() {
    let mut rewriter = accepted();
    // The primary's clock runs ahead: it said 950, which would be 350 here.
    assert_eq!(
        into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1).ticks(20, 950)).ticks,
        Some((20, 100))
    );
    rewriter.overheard(&Seg::from_vm(ACK, B.wrapping_add(1), C + 1).ticks(400, 20).frame());
    assert_eq!(
        into(&mut rewriter, &Seg::to_vm(ACK, C + 1, P + 1).ticks(20, 950)).ticks,
        Some((20, 350))
    );
}

/// What the client heard of the first host, whose clock is far ahead of the second's, and the second's first word.
const FIRST: u32 = 5_000_000;
const SECOND: u32 = FIRST + MARGIN_TICKS;

/// A third host: the second one took over in the handshake, and its first word, said before the sync with this one, left after it, raised above what
/// the client had heard.
fn behind_a_word_that_left_late() -> SequenceRewriter {
    let mut second = SequenceRewriter::new();
    second.overheard(&Seg::from_vm(SYN | ACK, B, C + 1).ticks(100, 9).frame());
    second.take_over();
    into(&mut second, &Seg::to_vm(ACK, C + 1, P + 1).ticks(11, FIRST));
    let mut third = SequenceRewriter::new();
    third.load(&second.table()).unwrap();
    let word = Seg::from_vm(ACK, B.wrapping_add(1), C + 1).ticks(130, 11);
    assert_eq!(out(&mut second, &word).ticks, Some((SECOND, 11)));
    third
}

#[test]
fn an_echo_of_a_word_that_a_dead_host_may_have_raised_is_none() {
    let mut third = behind_a_word_that_left_late();
    third.take_over();
    let echoed = |third: &mut SequenceRewriter, echo| {
        into(third, &Seg::to_vm(ACK, C + 1, P + 1).ticks(12, echo)).ticks
    };
    assert_eq!(echoed(&mut third, FIRST), Some((12, 100)), "of the first host");
    assert_eq!(echoed(&mut third, SECOND), Some((12, 0)), "of the second");
    // What the VM here has said is an upper bound, once it has said anything.
    third.overheard(&Seg::from_vm(ACK, B.wrapping_add(1), C + 1).ticks(140, 12).frame());
    assert_eq!(echoed(&mut third, SECOND), Some((12, 140)));
}

/// Found by a fresh seed of `model`: the client then dropped (PAWS) all that the third host said.
#[test]
fn a_word_that_left_behind_a_sync_is_not_gone_below_by_the_next_host() {
    let mut third = behind_a_word_that_left_late();
    // The VM of the third host never says that word again: only the client tells of it.
    let echo = Seg::to_vm(ACK, C + 1, P + 1).ticks(12, SECOND).frame();
    third.inbound_to_backup(&echo);
    third.take_over();
    third.inbound(&echo);
    let next = Seg::from_vm(ACK, B.wrapping_add(1), C + 1).ticks(140, 12);
    let told = out(&mut third, &next).ticks.map(|(value, _)| value);
    assert!(told.is_some_and(|value| !before(value, SECOND)), "{told:?}");
}

#[test]
fn fragments_and_other_protocols_pass_as_they_are() {
    let mut rewriter = accepted();
    rewriter.take_over();
    let mut bytes = Seg::to_vm(ACK, C + 1, P + 1).ticks(1, 700).frame().bytes.to_vec();
    bytes[20] = 0x20;
    let frame = Frame {
        nic: 0,
        bytes: bytes.into(),
    };
    assert_eq!(rewriter.inbound(&frame), frame);
    assert_eq!(rewriter.outbound(&frame), frame);
}

#[test]
fn an_icmp_error_is_about_the_vms_own_number() {
    for v6 in [false, true] {
        let mut rewriter = SequenceRewriter::new();
        let said = Seg {
            v6,
            ..Seg::from_vm(SYN | ACK, B, C + 1)
        };
        rewriter.overheard(&said.frame());
        into(
            &mut rewriter,
            &Seg {
                v6,
                ..Seg::to_vm(ACK, C + 1, P + 1)
            },
        );
        // "Too big", from a router, about what the primary has said.
        let quoted = Seg { seq: P + 9, ..said }.frame().bytes.slice(14..);
        let kind: [u8; 4] = if v6 {
            [2, 0, 0x12, 0x34]
        } else {
            [3, 4, 0x12, 0x34]
        };
        let icmp = [&kind[..], &[0, 0, 5, 0], &quoted].concat();
        let length = icmp.len() as u16;
        let mut bytes = vec![2; 12];
        if v6 {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            bytes.extend(length.to_be_bytes());
            bytes.extend([58, 64]);
            bytes.extend([[0xfb; 16], [0xfd; 16]].concat());
        } else {
            bytes.extend([8, 0, 0x45, 0]);
            bytes.extend((length + 20).to_be_bytes());
            bytes.extend([0, 1, 0, 0, 64, 1, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1]);
        }
        bytes.extend(&icmp);
        let frame = Frame {
            nic: 0,
            bytes: bytes.into(),
        };
        let after = rewriter.inbound(&frame);
        let (at, icmp) = (frame.bytes.len() - length as usize, |frame: &Frame, at: usize| {
            sum(&frame.bytes[at..])
        });
        let number = at + 8 + if v6 { 40 } else { 20 } + 4;
        assert_eq!(after.bytes[number..number + 4], B.wrapping_add(9).to_be_bytes());
        assert_ne!(after.bytes[at + 2..at + 4], [0x12, 0x34]);
        assert_eq!(
            icmp(&after, at),
            icmp(&frame, at),
            "what was wrong by so much still is"
        );
    }
}
