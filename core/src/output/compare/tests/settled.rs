//! SYNs that settle other things.

use super::*;

/// A SYN-ACK with these options, whose bytes are a multiple of four.
fn syn_ack(seq: u32, options: &[u8]) -> Frame {
    let plain = tcp(1, seq, 8, SYN | ACK, options);
    let mut bytes = plain.bytes.to_vec();
    // Behind Ethernet, IP and twelve bytes of TCP: how long its header is.
    bytes[14 + 20 + 12] = ((20 + options.len()) as u8) << 2;
    Frame {
        nic: 0,
        bytes: bytes.into(),
    }
}

const MSS: [u8; 4] = [2, 4, 5, 180];
const SCALE_7: [u8; 4] = [1, 3, 3, 7];
const SACK: [u8; 4] = [4, 2, 1, 1];
const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];

#[test]
fn syns_that_settle_other_things_are_a_difference_whoever_is_first() {
    let full = [&MSS[..], &SACK, &TIMESTAMPS, &SCALE_7].concat();
    for other in [
        MSS.to_vec(),
        [&MSS[..], &SACK, &TIMESTAMPS].concat(),
        [&MSS[..], &TIMESTAMPS, &SCALE_7].concat(),
        [&MSS[..], &SACK, &SCALE_7].concat(),
        [&MSS[..], &SACK, &TIMESTAMPS, &[1, 3, 3, 8]].concat(),
        // Behind the end, or cut short.
        [&[0; 4][..], &full].concat(),
        [&MSS[..], &SACK, &TIMESTAMPS, &[1, 1, 1, 3]].concat(),
        [&MSS[..], &SACK, &TIMESTAMPS, &[3, 0, 3, 7]].concat(),
    ] {
        for backup_first in [false, true] {
            let mut both = Both::new();
            let (ours, theirs) = (syn_ack(1000, &other), syn_ack(77, &full));
            match backup_first {
                true => both.backup(theirs).primary(ours),
                false => both.primary(ours).backup(theirs),
            };
            assert_eq!(
                (both.out(), both.why()),
                (vec![], Some(Difference::Flags)),
                "{other:?}"
            );
            both.sync();
            // The client has heard the primary's, and the copy has them now.
            both.primary(syn_ack(1000, &other));
            assert_eq!((both.out(), both.why()), (vec![1], None), "a repetition");
        }
    }
}

#[test]
fn what_each_says_by_itself_in_a_syn_is_no_difference() {
    let mut both = Both::new();
    both.primary(syn_ack(1000, &[&MSS[..], &SACK, &TIMESTAMPS, &SCALE_7].concat()));
    let clock = [1, 1, 8, 10, 9, 9, 9, 9, 0, 0, 0, 2];
    let other = [&SCALE_7[..], &[2, 4, 2, 24], &clock, &SACK].concat();
    both.backup(syn_ack(77, &other));
    assert_eq!((both.out(), both.why()), (vec![0], None));
}
