use super::*;
use crate::output::packet::TCP;
use bytes::Bytes;

const BUDGET: usize = 64 << 10;

fn frame(byte: u8) -> Frame {
    Frame {
        nic: 0,
        bytes: Bytes::from(vec![byte; 60]),
    }
}

fn segment(nic: u8, number: u8) -> Frame {
    let mut bytes = vec![0; 54];
    bytes[12] = 0x08;
    bytes[14] = 0x45;
    bytes[17] = 40;
    bytes[23] = TCP;
    bytes[41] = number;
    bytes[46] = 0x50;
    Frame {
        nic,
        bytes: Bytes::from(bytes),
    }
}

fn given(overheard: &mut Overheard, now_us: u64) -> Vec<u8> {
    let left = overheard.take(true, now_us);
    left.iter().map(|frame| frame.bytes[0]).collect()
}

#[test]
fn invariant_1_what_was_agreed_is_not_given_again_whichever_came_first() {
    let mut overheard = Overheard::new(BUDGET);
    overheard.heard(frame(1), 10);
    overheard.agreed(&frame(1), 20);
    overheard.agreed(&frame(2), 30);
    overheard.heard(frame(2), 40);
    overheard.heard(frame(3), 50);
    overheard.heard(frame(4), 60);
    assert_eq!(given(&mut overheard, 70), [3, 4]);
    assert_eq!(given(&mut overheard, 70), [0; 0], "and given once");
}

#[test]
fn equal_frames_are_counted_one_by_one() {
    let mut overheard = Overheard::new(BUDGET);
    overheard.heard(frame(1), 0);
    overheard.heard(frame(1), 1);
    overheard.heard(frame(1), 2);
    overheard.agreed(&frame(1), 3);
    assert_eq!(given(&mut overheard, 4), [1, 1]);
    // The same bytes on another card are another frame.
    overheard.heard(segment(0, 7), 5);
    overheard.agreed(&segment(1, 7), 6);
    assert_eq!(overheard.take(true, 7), [segment(0, 7)]);
}

#[test]
fn invariant_2_what_is_old_is_forgotten_and_its_agreement_does_not_count_for_a_later_one() {
    let mut overheard = Overheard::new(BUDGET);
    overheard.heard(frame(1), 0);
    overheard.agreed(&frame(2), 0);
    overheard.heard(frame(2), SPAN_US);
    overheard.heard(frame(3), SPAN_US);
    assert_eq!(given(&mut overheard, SPAN_US + 1), [2, 3]);

    overheard.heard(frame(1), 0);
    overheard.agreed(&frame(1), 1);
    overheard.heard(frame(1), SPAN_US / 2);
    // The first one, which was agreed, is gone; the second was not.
    assert_eq!(given(&mut overheard, SPAN_US + 2), [1]);
}

#[test]
fn invariant_2_a_flood_costs_no_more_than_the_budget() {
    let mut overheard = Overheard::new(BUDGET);
    for round in 0..100_000_u32 {
        let bytes = Bytes::copy_from_slice(&round.to_be_bytes());
        let frame = Frame { nic: 0, bytes };
        if round % 3 == 0 {
            overheard.agreed(&frame, u64::from(round));
        } else {
            overheard.heard(frame, u64::from(round));
        }
        assert!(overheard.held().0 <= BUDGET);
        let most = 2 * BUDGET / FRAME_COST;
        assert!(
            overheard.balance.len() <= most,
            "{} kinds",
            overheard.balance.len()
        );
        assert!(overheard.agreed.len() <= most);
    }
    let left = overheard.take(true, 100_000);
    let newest = left.last().map(|frame| frame.bytes.clone());
    assert_eq!(
        newest.as_deref(),
        Some(&99_998_u32.to_be_bytes()[..]),
        "the newest are kept"
    );
    // A frame that is larger than all of it is not kept, and breaks nothing.
    let mut small = Overheard::new(100);
    small.heard(frame(1), 0);
    small.agreed(&frame(1), 0);
    assert_eq!((small.held(), given(&mut small, 1)), ((0, 100, 1), vec![]));
}

#[test]
fn invariant_3_where_inputs_are_not_agreed_only_tcp_is_given() {
    let mut overheard = Overheard::new(BUDGET);
    overheard.heard(frame(9), 0);
    overheard.heard(segment(0, 1), 1);
    assert_eq!(overheard.take(false, 2), [segment(0, 1)]);
}
