//! Each rule by itself; whole conversations are in `core/tests/conversations.rs`.

use super::*;
use bytes::{BufMut, Bytes, BytesMut};

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// A TCP segment from the VM's port 80 to a client's port.
fn tcp(port: u16, seq: u32, ack: u32, flags: u8, payload: &[u8]) -> Frame {
    let mut tcp = BytesMut::new();
    tcp.put_u16(80);
    tcp.put_u16(port);
    tcp.put_u32(seq);
    tcp.put_u32(ack);
    tcp.put_u8(5 << 4);
    tcp.put_u8(flags);
    tcp.put_slice(&[0; 6]);
    tcp.put_slice(payload);
    ip(6, &tcp)
}

fn udp(payload: &[u8]) -> Frame {
    let mut udp = BytesMut::new();
    udp.put_u16(53);
    udp.put_u16(5353);
    udp.put_u16(8 + payload.len() as u16);
    udp.put_u16(0);
    udp.put_slice(payload);
    ip(17, &udp)
}

fn ip(protocol: u8, content: &[u8]) -> Frame {
    let mut bytes = BytesMut::new();
    bytes.put_slice(&[2; 12]);
    bytes.put_u16(0x0800);
    bytes.put_u8(0x45);
    bytes.put_u8(0);
    bytes.put_u16(20 + content.len() as u16);
    bytes.put_slice(&[0; 4]);
    bytes.put_u8(64);
    bytes.put_u8(protocol);
    bytes.put_u16(0);
    bytes.put_slice(&[10, 0, 0, 2, 10, 0, 0, 9]);
    bytes.put_slice(content);
    Frame {
        nic: 0,
        bytes: bytes.freeze(),
    }
}

fn ethernet(ether_type: u16) -> Frame {
    let mut bytes = BytesMut::new();
    bytes.put_slice(&[2; 12]);
    bytes.put_u16(ether_type);
    bytes.put_slice(&[0; 46]);
    Frame {
        nic: 0,
        bytes: bytes.freeze(),
    }
}

struct Both {
    comparer: Comparer,
    next: u64,
    /// The partial acknowledgements among what left.
    partial: Vec<Frame>,
    /// How many of those told something new.
    news: u64,
}

impl Both {
    fn new() -> Self {
        Self::with(Limits {
            buffer_bytes: 1 << 20,
            flows: 100,
            http_dates: false,
        })
    }

    fn with(limits: Limits) -> Self {
        Self {
            comparer: Comparer::new(limits),
            next: 0,
            partial: vec![],
            news: 0,
        }
    }

    fn primary(&mut self, frame: Frame) -> &mut Self {
        self.comparer.primary_said(FrameId(self.next), &frame);
        self.next += 1;
        self
    }

    fn backup(&mut self, frame: Frame) -> &mut Self {
        self.comparer.backup_said(&frame);
        self
    }

    fn sync(&mut self) -> &mut Self {
        self.comparer.line_drawn();
        self.comparer.sync_acknowledged();
        self.comparer.backup_loaded();
        self
    }

    fn out(&mut self) -> Vec<u64> {
        let mut out = vec![];
        while let Some(next) = self.comparer.next_matched() {
            match next {
                Matched::Frame(id) => out.push(id.0),
                Matched::PartialAck { frame, gets_on } => {
                    self.news += u64::from(gets_on);
                    self.partial.push(frame);
                }
            }
        }
        out
    }

    fn why(&self) -> Option<Difference> {
        match self.comparer.verdict() {
            Verdict::Differs { why } => Some(why),
            Verdict::Agree | Verdict::Waiting { .. } => None,
        }
    }
}

#[test]
fn segmentation_does_not_matter_but_whole_segments_leave() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, ACK, b"hello "))
        .primary(tcp(1, 106, 7, ACK, b"world"));
    both.backup(tcp(1, 100, 7, ACK, b"hel"));
    assert_eq!(both.out(), []);
    both.backup(tcp(1, 103, 7, ACK, b"lo wor"));
    assert_eq!(both.out(), [0]);
    both.backup(tcp(1, 109, 7, ACK, b"ld"));
    assert_eq!(both.out(), [1]);
    assert_eq!(both.comparer.verdict(), Verdict::Agree);
}

#[test]
fn a_backup_that_is_ahead_matches_as_well() {
    let mut both = Both::new();
    both.backup(tcp(1, 100, 7, ACK, b"hello world"));
    both.primary(tcp(1, 100, 7, ACK, b"hello "))
        .primary(tcp(1, 106, 7, ACK, b"world"));
    assert_eq!(both.out(), [0, 1]);
}

#[test]
fn other_bytes_are_a_difference_at_once_and_nothing_new_leaves_until_a_sync() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, ACK, b"12:00:01 and more"));
    both.backup(tcp(1, 100, 7, ACK, b"12:00:02"));
    assert_eq!(both.why(), Some(Difference::Bytes));
    both.backup(tcp(1, 108, 7, ACK, b" and more"));
    both.primary(tcp(1, 117, 7, ACK, b"next"));
    assert_eq!(both.out(), []);
    both.sync();
    assert_eq!(both.comparer.verdict(), Verdict::Agree);
    both.primary(tcp(1, 121, 7, ACK, b"!"))
        .backup(tcp(1, 121, 7, ACK, b"!"));
    assert_eq!(both.out(), [2]);
}

#[test]
fn an_acknowledgement_waits_for_the_backups() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 50, ACK, b""));
    both.backup(tcp(1, 100, 40, ACK, b""));
    assert_eq!(both.out(), []);
    both.backup(tcp(1, 100, 60, ACK, b""));
    assert_eq!(both.out(), [0]);
    // Of its own it says nothing new now: 50 was told.
    both.primary(tcp(1, 100, 50, ACK, b""));
    assert_eq!(both.out(), [1]);
}

#[test]
fn what_was_told_may_be_repeated() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, ACK, b"abc"))
        .backup(tcp(1, 100, 7, ACK, b"abc"));
    both.primary(tcp(1, 100, 7, ACK, b"abc"))
        .primary(tcp(1, 102, 7, ACK, b""));
    assert_eq!(both.out(), [0, 1, 2]);
    // Also what a sync covered.
    both.primary(tcp(1, 103, 7, ACK, b"def")).sync();
    both.primary(tcp(1, 103, 7, ACK, b"def"));
    assert_eq!(both.out(), [4]);
    // A repetition that goes on to something new is as new as that.
    both.primary(tcp(1, 103, 7, ACK, b"defghi"));
    assert_eq!(both.out(), []);
    both.backup(tcp(1, 106, 7, ACK, b"ghi"));
    assert_eq!(both.out(), [5]);
}

/// Its timestamp is newer than that of what waits, which the client would throw away after it (PAWS).
#[test]
fn what_is_repeated_does_not_overtake_what_waits_on_its_connection() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, ACK, b"abc"))
        .primary(tcp(2, 500, 7, ACK, b"xyz"))
        .sync();
    both.primary(tcp(1, 103, 7, ACK, b"def"))
        .primary(tcp(1, 100, 7, ACK, b"abc"))
        .primary(tcp(2, 500, 7, ACK, b"xyz"));
    assert_eq!(both.out(), [4], "another connection's repetition leaves at once");
    both.backup(tcp(1, 103, 7, ACK, b"def"));
    assert_eq!(both.out(), [2, 3], "in the primary's order, without another word");
}

#[test]
fn a_new_connection_has_other_numbers_in_the_backup() {
    for backup_first in [false, true] {
        let mut both = Both::new();
        let (ours, theirs) = (
            tcp(1, 1000, 8, SYN | ACK, b""),
            tcp(1, u32::MAX, 8, SYN | ACK, b""),
        );
        if backup_first {
            both.backup(theirs).primary(ours);
        } else {
            both.primary(ours).backup(theirs);
        }
        assert_eq!(both.out(), [0], "backup first: {backup_first}");
        both.primary(tcp(1, 1001, 20, ACK, b"hello"))
            .backup(tcp(1, 0, 20, ACK, b"hello"));
        assert_eq!(both.out(), [1]);
        both.primary(tcp(1, 1006, 20, FIN | ACK, b""))
            .backup(tcp(1, 5, 20, FIN | ACK, b""));
        assert_eq!(both.out(), [2]);
    }
}

#[test]
fn after_a_load_the_numbers_are_the_primarys() {
    let mut both = Both::new();
    both.primary(tcp(1, 1000, 8, SYN | ACK, b""))
        .backup(tcp(1, 5, 8, SYN | ACK, b""));
    assert_eq!(both.out(), [0]);
    both.sync();
    // A half-open connection repeats its SYN after the load: the same one.
    both.backup(tcp(1, 1000, 8, SYN | ACK, b""));
    both.primary(tcp(1, 1001, 9, ACK, b"x"))
        .backup(tcp(1, 1001, 9, ACK, b"x"));
    assert_eq!(both.out(), [1]);
}

#[test]
fn the_name_of_a_connection_is_used_again() {
    let mut both = Both::new();
    for isn in [1000, 5000] {
        both.primary(tcp(1, isn, 8, SYN | ACK, b""))
            .backup(tcp(1, isn + 77, 8, SYN | ACK, b""));
        both.primary(tcp(1, isn + 1, 9, ACK, b"x"))
            .backup(tcp(1, isn + 78, 9, ACK, b"x"));
        assert_eq!(both.out().len(), 2, "isn {isn}");
    }
    assert_eq!(both.why(), None);
}

/// A client that has reset a connection may begin another one from the same port at once.
#[test]
fn a_connection_that_begins_anew_while_its_end_waits_asks_for_a_sync() {
    let mut both = Both::new();
    both.backup(tcp(1, 104, 7, ACK, b"no more"));
    both.primary(tcp(1, 100, 7, ACK, b"data"));
    assert_eq!((both.why(), both.comparer.kept_bytes() > 0), (None, true));
    both.primary(tcp(1, 9000, 70, SYN | ACK, b""));
    assert_eq!(both.why(), Some(Difference::Flags));
    assert_eq!(both.comparer.kept_bytes(), 0);
    // It is one difference, whatever else is said.
    both.primary(tcp(1, 19000, 700, SYN | ACK, b""));
    both.backup(tcp(1, 4000, 70, SYN | ACK, b""));
    assert_eq!((both.out(), both.comparer.counters().flags), (vec![], 1));
    both.sync();
    assert_eq!(both.comparer.verdict(), Verdict::Agree);
    both.primary(tcp(1, 19001, 701, ACK, b"on"))
        .backup(tcp(1, 19001, 701, ACK, b"on"));
    assert_eq!(both.out(), [3]);
}

#[test]
fn the_end_of_a_stream_has_its_place() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, FIN | ACK, b"bye"));
    both.backup(tcp(1, 100, 7, ACK, b"bye"));
    assert_eq!(both.out(), []);
    both.backup(tcp(1, 103, 7, FIN | ACK, b""));
    assert_eq!(both.out(), [0]);

    let mut later = Both::new();
    later.primary(tcp(1, 100, 7, FIN | ACK, b"bye"));
    later.backup(tcp(1, 100, 7, ACK, b"bye, and more"));
    assert_eq!(later.why(), Some(Difference::Flags));

    let mut sooner = Both::new();
    sooner.primary(tcp(1, 100, 7, ACK, b"bye, and more"));
    sooner.backup(tcp(1, 100, 7, FIN | ACK, b"bye"));
    assert_eq!(sooner.why(), Some(Difference::Flags));
}

#[test]
fn a_reset_waits_for_a_reset() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, RST | ACK, b""));
    assert_eq!(both.out(), []);
    both.backup(tcp(1, 100, 7, RST | ACK, b""));
    assert_eq!(both.out(), [0]);

    let mut only_the_backup = Both::new();
    only_the_backup.backup(tcp(1, 100, 7, RST, b""));
    only_the_backup.primary(tcp(1, 100, 7, ACK, b"data"));
    assert_eq!(only_the_backup.why(), Some(Difference::Flags));
}

#[test]
fn connections_do_not_wait_for_each_other() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, ACK, b"a"))
        .primary(tcp(2, 100, 7, ACK, b"b"));
    both.backup(tcp(2, 100, 7, ACK, b"b"));
    assert_eq!(both.out(), [1]);
    assert_eq!(
        both.comparer.verdict(),
        Verdict::Waiting {
            oldest: FrameId(0),
            frames: 1,
            telling: 1
        }
    );
}

#[test]
fn an_acknowledgement_that_waits_is_told_apart_from_what_a_client_waits_for() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 50, ACK, b""));
    assert!(matches!(
        both.comparer.verdict(),
        Verdict::Waiting {
            frames: 1,
            telling: 0,
            ..
        }
    ));
    both.primary(tcp(1, 100, 50, ACK, b"x"));
    assert!(matches!(
        both.comparer.verdict(),
        Verdict::Waiting {
            frames: 2,
            telling: 1,
            ..
        }
    ));
    both.backup(tcp(1, 100, 50, ACK, b"x"));
    assert_eq!(both.comparer.verdict(), Verdict::Agree);
}

#[test]
fn invariant_2_old_words_of_the_backup_do_not_count_for_the_next_epoch() {
    let mut both = Both::new();
    both.comparer.line_drawn();
    both.primary(tcp(1, 100, 7, ACK, b"after the line"));
    both.backup(tcp(1, 100, 7, ACK, b"after the line"));
    both.comparer.sync_acknowledged();
    assert_eq!(both.out(), []);
    both.comparer.backup_loaded();
    assert_eq!(both.out(), []);
    both.backup(tcp(1, 100, 7, ACK, b"after the line"));
    assert_eq!(both.out(), [0]);
}

#[test]
fn the_nth_datagram_is_compared_with_the_nth() {
    let mut both = Both::new();
    both.primary(udp(b"one")).primary(udp(b"two")).backup(udp(b"one"));
    assert_eq!(both.out(), [0]);
    both.backup(udp(b"three"));
    assert_eq!(both.why(), Some(Difference::Datagram));
    both.sync();
    both.primary(udp(b"four")).backup(udp(b"four"));
    assert_eq!(both.out(), [2]);
}

/// A few bytes that are kept keep the whole frame that they came in.
#[test]
fn a_sync_leaves_nothing_of_the_frames_that_it_has_covered() {
    for by_the_backup in [false, true] {
        for frame in [udp(b"one"), tcp(1, 100, 7, ACK, b"one")] {
            let bytes = frame.bytes.clone();
            let mut both = Both::new();
            match by_the_backup {
                true => both.backup(frame),
                false => both.primary(frame),
            };
            both.sync();
            assert!(bytes.try_into_mut().is_ok(), "by the backup: {by_the_backup}");
        }
    }
}

#[test]
fn what_says_nothing_of_the_vm_needs_no_match_and_what_is_not_understood_waits() {
    let mut both = Both::new();
    both.primary(ethernet(0x0806));
    assert_eq!(both.out(), [0]);
    assert_eq!(both.why(), None);
    both.primary(ethernet(0x88cc));
    assert_eq!(both.out(), []);
    assert_eq!(both.why(), Some(Difference::NotUnderstood));
    both.sync();
    assert_eq!(both.why(), None);
}

#[test]
fn invariant_4_over_the_limits_frames_wait_for_a_sync() {
    let mut both = Both::with(Limits {
        buffer_bytes: 300,
        flows: 2,
        http_dates: false,
    });
    both.backup(tcp(1, 100, 7, ACK, &[7; 300]));
    assert_eq!(both.why(), Some(Difference::Full));
    both.primary(tcp(1, 100, 7, ACK, &[7; 300]));
    assert_eq!(both.out(), []);
    both.sync();
    for port in 1..=3 {
        both.primary(tcp(port, 100, 7, ACK, b"x"))
            .backup(tcp(port, 100, 7, ACK, b"x"));
    }
    assert_eq!(both.out().len(), 2);
    assert_eq!(both.why(), Some(Difference::Full));
    both.sync();
    both.primary(tcp(3, 101, 7, ACK, b"y"))
        .backup(tcp(3, 101, 7, ACK, b"y"));
    assert_eq!(both.out().len(), 1);
}

/// Words of connections that the primary has not begun, and datagrams without content: their number counts too.
#[test]
fn words_on_connections_that_never_begin_here_are_bounded() {
    let limits = Limits {
        buffer_bytes: 100_000,
        flows: 100,
        http_dates: false,
    };
    type Word = (&'static str, fn(u32) -> Frame);
    let words: [Word; 3] = [
        ("bytes", |n| tcp(1, 101 + n, 7, ACK, &[1; 1000])),
        ("empty segments", |n| tcp(1, 101 + n, 7, ACK, b"")),
        ("empty datagrams", |_| udp(b"")),
    ];
    for (what, word) in words {
        let mut both = Both::with(limits);
        both.backup(tcp(1, 100, 0, SYN, b""));
        for n in 0..10_000 {
            both.backup(word(n));
            assert!(both.comparer.kept_bytes() <= limits.buffer_bytes, "{what}: {n}");
        }
        assert_eq!(both.why(), Some(Difference::Full), "{what}");
        both.sync();
        assert_eq!((both.why(), both.comparer.kept_bytes()), (None, 0), "{what}");
    }
}

#[test]
fn every_frame_is_parsed_without_a_copy() {
    let frame = tcp(1, 100, 7, ACK, b"payload");
    let Parsed::Tcp(segment) = parse(&frame, Direction::FromVm) else {
        panic!("a segment")
    };
    let payload: Bytes = frame.bytes.slice(segment.payload);
    assert_eq!(&payload[..], b"payload");
    assert_eq!(payload.as_ptr(), frame.bytes[frame.bytes.len() - 7..].as_ptr());
}

#[test]
fn each_stray_segment_is_answered_by_a_reset_at_its_own_place() {
    let reset = |seq| tcp(1, seq, 0, RST, b"");
    let mut both = Both::new();
    // The backup is ahead.
    both.backup(reset(5)).backup(reset(9));
    both.primary(reset(5)).primary(reset(9));
    assert_eq!((both.out(), both.why()), (vec![0, 1], None));
    // The primary is.
    both.primary(reset(3)).primary(reset(8)).backup(reset(3));
    assert_eq!((both.out(), both.why()), (vec![2], None));
    both.backup(reset(8));
    assert_eq!((both.out(), both.why()), (vec![3], None));
    both.backup(reset(20)).primary(reset(21));
    assert_eq!(
        (both.out(), both.comparer.oldest_end()),
        (vec![], Some(FrameId(4)))
    );
}

#[test]
fn a_new_connections_numbers_may_lie_before_those_of_a_former_one_that_a_sync_let_out() {
    let mut both = Both::new();
    both.primary(tcp(1, 5000, 7, ACK, b"the old one's last"));
    both.primary(tcp(1, 100, 51, SYN | ACK, b""));
    both.sync();
    both.primary(tcp(1, 101, 51, ACK, b"12:00"));
    both.backup(tcp(1, 101, 51, ACK, b"12:01"));
    assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Bytes)));
}

#[test]
fn what_is_overtaken_is_told_from_what_is_late() {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, ACK, b"committed"))
        .primary(tcp(2, 500, 7, ACK, b"one"))
        // It may wait: it says nothing but that something was received.
        .primary(tcp(3, 900, 7, ACK, b""));
    assert_eq!(both.comparer.oldest_telling(), Some(FrameId(0)));
    assert_eq!(both.comparer.newest_said(), None);
    both.backup(tcp(2, 500, 7, ACK, b"one"));
    assert_eq!(both.comparer.newest_said(), Some(FrameId(1)));
    assert_eq!(both.comparer.oldest_telling(), Some(FrameId(0)));
    both.backup(tcp(1, 100, 7, ACK, b"committed"));
    assert_eq!(
        both.comparer.newest_said(),
        Some(FrameId(1)),
        "the newest, not the last"
    );
    assert_eq!(both.comparer.oldest_telling(), None);
}

/// A VM resets what is left of a former connection while the next one of that name begins: the reset has the former one's
/// numbers. All that lies before them once counted as told, and left though the backup had said something else.
#[test]
fn the_numbers_of_a_reset_that_answers_a_stray_segment_are_no_place_in_the_stream() {
    for by_sync in [false, true] {
        let mut both = Both::new();
        let syn = || tcp(1, 1000, 51, SYN | ACK, b"");
        both.primary(syn()).backup(syn());
        assert_eq!(both.out(), [0]);
        let reset = || tcp(1, 900_000, 700_000, RST | ACK, b"");
        both.primary(reset());
        if by_sync {
            both.sync();
            assert_eq!(both.out(), []);
        } else {
            both.backup(reset());
            assert_eq!(both.out(), [1]);
        }
        both.primary(tcp(1, 1001, 61, ACK, b"one clock"));
        assert_eq!(both.out(), [], "the backup has not said a byte of it");
        both.backup(tcp(1, 1001, 61, ACK, b"two clock"));
        assert_eq!((both.out(), both.why().is_some()), (vec![], true));
    }
}

mod ends;
mod fragments;
mod http_date;
mod lost;
mod partial_ack;
mod place;
mod settled;
