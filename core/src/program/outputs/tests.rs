//! Outputs of two copies, told apart.

use super::*;
use crate::output::packet::testing::Seg;
use crate::output::packet::{ACK, FIN, RST};
use proptest::prelude::*;

/// One client and two copies; each copy has its own initial number.
struct Played {
    outputs: Outputs,
    isn: [u32; 2],
    said: [u32; 2],
    heard: u32,
}

impl Played {
    fn new(isn: [u32; 2]) -> Self {
        let mut played = Self {
            outputs: Outputs::new(2),
            isn,
            said: [0; 2],
            heard: 0,
        };
        played.outputs.heard(&Seg::to_vm(SYN, 999, 0).frame());
        for (copy, isn) in isn.into_iter().enumerate() {
            played
                .outputs
                .said(copy, &Seg::from_vm(SYN | ACK, isn, 1000).frame());
        }
        played
    }

    fn client(&mut self, words: &[u8]) {
        let seq = 1000 + self.heard;
        self.heard += words.len() as u32;
        self.outputs.heard(&Seg::to_vm(ACK, seq, 1).with(words).frame());
    }

    fn copy(&mut self, copy: usize, words: &[u8]) {
        self.says(copy, 0, words);
    }

    fn says(&mut self, copy: usize, flags: u8, words: &[u8]) {
        let seq = self.isn[copy].wrapping_add(1).wrapping_add(self.said[copy]);
        self.said[copy] += words.len() as u32;
        self.outputs
            .said(copy, &Seg::from_vm(ACK | flags, seq, 1).with(words).frame());
    }

    fn counts(&self) -> (u64, u64) {
        let tally = self.outputs.tally();
        (tally.equal, tally.differing)
    }
}

#[test]
fn the_same_bytes_are_the_same_however_they_are_cut_and_numbered() {
    let mut played = Played::new([77, u32::MAX - 2]);
    played.client(b"GET a");
    played.copy(0, b"one");
    played.copy(0, b"two");
    played.client(b"GET b");
    assert_eq!(played.counts(), (0, 0), "the other copy has not spoken yet");
    assert!(!played.outputs.is_settled());
    played.copy(1, b"onet");
    played.copy(1, b"wo");
    assert_eq!(played.counts(), (1, 0));
    played.copy(1, b"x");
    played.copy(0, b"x");
    played.outputs.finish();
    assert_eq!(played.counts(), (2, 0));
    assert!(played.outputs.tally().is_equal());
}

#[test]
fn a_difference_is_counted_once_shown_and_gone_on_from() {
    let mut played = Played::new([1, 2]);
    for (n, other) in [&b":1\r\n"[..], b":9\r\n", b":3\r\n"].into_iter().enumerate() {
        played.client(b"INCR k");
        played.copy(0, format!(":{}\r\n", n + 1).as_bytes());
        played.copy(1, other);
    }
    played.outputs.finish();
    assert_eq!(played.counts(), (2, 1));
    let first = played.outputs.first_difference().expect("one");
    assert_eq!((first.number, first.copy, first.at), (2, 1, 1));
    assert_eq!(
        (&first.first[..], &first.other[..]),
        (&b":2\r\n"[..], &b":9\r\n"[..])
    );
    assert_eq!(&first.input[..], b"INCR k");
}

#[test]
fn an_answer_of_another_length_costs_one_output() {
    let mut played = Played::new([1, 2]);
    for (first, other) in [("9", "10"), ("a", "a"), ("200", "7"), ("b", "b"), ("c", "c")] {
        played.client(b"?");
        played.copy(0, first.as_bytes());
        played.copy(1, other.as_bytes());
    }
    played.outputs.finish();
    assert_eq!(played.counts(), (3, 2));
}

#[test]
fn a_copy_that_is_late_may_cost_one_more_and_is_found_again() {
    let mut played = Played::new([1, 2]);
    played.client(b"?");
    played.copy(0, b"9");
    played.client(b"?");
    played.copy(1, b"10"); // after the next input: nobody knows where this one ends
    played.copy(0, b"a");
    played.copy(1, b"a");
    for _ in 0..5 {
        played.client(b"?");
        played.copy(0, b"x");
        played.copy(1, b"x");
    }
    played.outputs.finish();
    let (equal, differing) = played.counts();
    assert_eq!(equal + differing, 7);
    assert!((1..=2).contains(&differing), "{differing}");
}

#[test]
fn what_only_one_copy_says_differs() {
    let mut silent = Played::new([1, 2]);
    silent.client(b"?");
    silent.copy(0, b"yes");
    silent.outputs.finish();
    assert_eq!(silent.counts(), (0, 1));
    let mut talkative = Played::new([1, 2]);
    talkative.client(b"?");
    talkative.copy(1, b"yes");
    talkative.outputs.finish();
    assert_eq!(talkative.counts(), (0, 1));
}

#[test]
fn an_end_is_compared_as_well() {
    let mut both = Played::new([1, 2]);
    both.client(b"?");
    for copy in 0..2 {
        both.copy(copy, b"bye");
        both.says(copy, FIN, b"");
    }
    assert_eq!(both.counts(), (1, 0));
    assert_eq!(both.outputs.tally().ends_equal, 1);
    let mut one = Played::new([1, 2]);
    one.says(1, FIN, b"");
    one.outputs.finish();
    assert_eq!(one.outputs.tally().ends_differing, 1);
    assert!(!one.outputs.tally().is_equal());
}

#[test]
fn what_a_client_did_not_wait_for_is_no_difference() {
    let mut played = Played::new([1, 2]);
    played.client(b"?");
    played.copy(0, b"a long answer");
    played.copy(1, b"a lo");
    played.outputs.heard(&Seg::to_vm(RST, 1001, 0).frame());
    played.outputs.finish();
    assert!(played.outputs.tally().is_equal());
}

#[test]
fn a_gap_is_lost_sight_of_and_not_guessed() {
    let mut played = Played::new([1, 2]);
    played.client(b"?");
    played.copy(0, b"abcdef");
    played.said[1] += 3;
    played.copy(1, b"def");
    played.outputs.finish();
    assert_eq!(played.outputs.tally().lost_sight, 1);
    assert!(!played.outputs.tally().is_equal());
}

#[test]
fn a_port_that_is_used_again_is_another_conversation() {
    let mut played = Played::new([1, 2]);
    played.client(b"?");
    played.copy(0, b"one");
    played.copy(1, b"one");
    played.outputs.heard(&Seg::to_vm(SYN, 55_555, 0).frame());
    for (copy, isn) in [500, 600].into_iter().enumerate() {
        played
            .outputs
            .said(copy, &Seg::from_vm(SYN | ACK, isn, 1).frame());
        played
            .outputs
            .said(copy, &Seg::from_vm(ACK, isn + 1, 1).with(b"two").frame());
    }
    played.outputs.finish();
    assert_eq!(played.counts(), (2, 0));
}

#[test]
fn a_stream_without_inputs_is_cut() {
    let mut played = Played::new([1, 2]);
    let block = vec![7; 16 << 10];
    for _ in 0..9 {
        played.copy(0, &block);
        played.copy(1, &block);
    }
    assert_eq!(played.counts(), (2, 0));
    played.outputs.finish();
    assert_eq!(played.counts(), (3, 0));
    assert_eq!(played.outputs.tally().bytes, 9 * (16 << 10));
}

proptest! {
    /// Any segmentation, delay and repetition of the same answers is equal; one byte changed is one output that differs.
    #[test]
    fn only_bytes_matter(
        answers in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 1..30),
        isn in any::<[u32; 2]>(),
        cut in 1_usize..10,
        late in any::<bool>(),
        changed in any::<Option<prop::sample::Index>>(),
    ) {
        let mut played = Played::new(isn);
        let changed = changed.map(|changed| changed.index(answers.len()));
        let mut waiting = Vec::new();
        for (n, answer) in answers.iter().enumerate() {
            played.client(b"?");
            played.copy(0, answer);
            let mut other = answer.clone();
            if changed == Some(n) {
                other[0] ^= 1;
            }
            waiting.push(other);
            if !late || n % 3 == 2 {
                for other in waiting.drain(..) {
                    other.chunks(cut).for_each(|part| played.copy(1, part));
                    played.said[1] -= other.len() as u32;
                    played.copy(1, &other); // and again
                }
            }
        }
        for other in waiting {
            played.copy(1, &other);
        }
        prop_assert!(played.outputs.is_settled() || changed.is_some() || played.counts().0 < answers.len() as u64);
        played.outputs.finish();
        let differing = u64::from(changed.is_some());
        prop_assert_eq!(played.counts(), (answers.len() as u64 - differing, differing));
    }
}

#[test]
fn a_silent_copy_costs_bounded_memory() {
    let mut played = Played::new([1, 2]);
    let block = vec![7; 48 << 10];
    for _ in 0..MOST_KEPT_BYTES / block.len() + 2 {
        played.copy(0, &block);
    }
    assert_eq!(played.outputs.tally().lost_sight, 1);
    assert!(played.outputs.is_settled(), "nothing of it is kept");
}

#[test]
fn datagrams_are_compared_one_by_one_and_wait_in_bounded_number() {
    let datagram = |payload: &[u8]| {
        let mut bytes = vec![2; 12];
        bytes.extend([0x08, 0x00, 0x45, 0]);
        bytes.extend((28 + payload.len() as u16).to_be_bytes());
        bytes.extend([
            0, 1, 0x40, 0, 64, UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 53, 16, 0,
        ]);
        bytes.extend((8 + payload.len() as u16).to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(payload);
        Frame {
            nic: 0,
            bytes: bytes.into(),
        }
    };
    let mut outputs = Outputs::new(2);
    for (first, other) in [(b"a", b"a"), (b"b", b"x"), (b"c", b"c")] {
        outputs.said(0, &datagram(first));
        outputs.said(1, &datagram(other));
    }
    assert_eq!((outputs.tally().equal, outputs.tally().differing), (2, 1));
    for _ in 0..=MOST_DATAGRAMS {
        outputs.said(0, &datagram(b"alone"));
    }
    assert_eq!(outputs.tally().lost_sight, 1);
    assert!(outputs.is_settled(), "nothing of it is kept");
}
