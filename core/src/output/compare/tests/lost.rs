//! What the primary's VM loses on its way out, and what was said before anybody looked: neither was told.

use super::*;

/// A segment that the primary's VM lost on its way out was told to nobody, and what came after it is no reason to believe that.
#[test]
fn what_the_primarys_vm_lost_on_its_way_out_does_not_leave_as_told_before() {
    for (backup, why) in [(b"XXXdef", Some(Difference::Bytes)), (b"abcdef", None)] {
        let mut both = Both::new();
        both.primary(tcp(1, 97, 7, ACK, b"abc"))
            .backup(tcp(1, 97, 7, ACK, b"abc"));
        both.backup(tcp(1, 100, 7, ACK, backup));
        both.primary(tcp(1, 103, 7, ACK, b"def"));
        assert_eq!(both.out(), [0, 1]);
        both.primary(tcp(1, 100, 7, ACK, b"abcd"));
        assert_eq!(both.why(), why);
        assert_eq!(both.out().len(), usize::from(why.is_none()));
        // After the sync both hold the same there.
        both.sync();
        both.primary(tcp(1, 100, 7, ACK, b"abc"))
            .primary(tcp(1, 106, 7, ACK, b"ghi"))
            .backup(tcp(1, 106, 7, ACK, b"ghi"));
        assert_eq!((both.out(), both.why()), (vec![3, 4], None));
    }
}

/// What it repeats is compared where nobody was told, and only there.
#[test]
fn of_what_is_repeated_over_a_hole_the_hole_is_compared() {
    for (backup, why) in [(b"XXX", Some(Difference::Bytes)), (b"def", None)] {
        let mut both = Both::new();
        both.primary(tcp(1, 100, 7, ACK, b"abc"))
            .backup(tcp(1, 100, 7, ACK, b"abc"))
            .primary(tcp(1, 106, 7, ACK, b"ghi"))
            .backup(tcp(1, 106, 7, ACK, b"ghi"));
        assert_eq!(both.out(), [0, 1]);
        both.primary(tcp(1, 100, 7, ACK, b"abcdefghi"));
        assert_eq!((both.out(), both.why()), (vec![], None), "it may say it yet");
        both.backup(tcp(1, 103, 7, ACK, backup));
        assert_eq!((both.why(), both.out().len()), (why, usize::from(why.is_none())));
    }
}

#[test]
fn an_acknowledgement_beyond_what_was_lost_tells_no_bytes() {
    for flags in [ACK, FIN | ACK] {
        let mut both = Both::new();
        both.primary(tcp(1, 97, 7, ACK, b"abc"))
            .backup(tcp(1, 97, 7, ACK, b"abc"));
        both.backup(tcp(1, 100, 8, ACK, b"XXX"));
        both.primary(tcp(1, 103, 8, ACK, b""));
        assert_eq!(both.out(), [0, 1]);
        both.primary(tcp(1, 100, 8, flags, b"abc"));
        assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Bytes)));
    }
    // An end is lost as a byte is.
    let mut both = Both::new();
    both.primary(tcp(1, 97, 7, ACK, b"abc"))
        .backup(tcp(1, 97, 7, ACK, b"abc"));
    both.backup(tcp(1, 100, 8, ACK, b"XXX"));
    both.primary(tcp(1, 101, 8, ACK, b""));
    assert_eq!(both.out(), [0, 1]);
    both.primary(tcp(1, 100, 8, FIN | ACK, b""));
    assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Flags)));
}

#[test]
fn where_nothing_was_told_yet_the_first_word_is_where_it_begins() {
    for acknowledged_first in [false, true] {
        let mut both = Both::new();
        both.backup(tcp(1, 100, 7, ACK, b"XXXdef"));
        if acknowledged_first {
            both.primary(tcp(1, 103, 7, ACK, b""));
            assert_eq!(both.out(), [0]);
        }
        both.primary(tcp(1, 103, 7, ACK, b"def"));
        assert_eq!(both.out().len(), 1);
        // Repeated from there on it was told, from before it was not.
        both.primary(tcp(1, 103, 7, ACK, b"def"));
        assert_eq!(both.out().len(), 1);
        both.primary(tcp(1, 100, 7, ACK, b"abc"));
        assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Bytes)));
        both.sync();
        both.primary(tcp(1, 100, 7, ACK, b"abcdef"));
        assert_eq!((both.out().len(), both.why()), (1, None));
    }
}

/// The first that is seen of a connection may be a repetition: what lies between it and the next new word left before anybody looked, which
/// is not known here. Neither costs a sync, nor does repeating it where both do.
#[test]
fn a_connection_that_is_first_seen_repeating_costs_no_sync() {
    let mut both = Both::new();
    let mut twice = |seq, payload: &[u8]| {
        both.primary(tcp(1, seq, 7, ACK, payload))
            .backup(tcp(1, seq, 7, ACK, payload));
        (both.out().len(), both.why())
    };
    for (seq, payload) in [
        (100, b"abc"),
        (160, b"new"),
        (103, b"def"),
        (94, b"old"),
        (163, b"xyz"),
    ] {
        assert_eq!(twice(seq, payload), (1, None));
    }
}

/// What waits for the backup's word is not lost: it leaves first.
#[test]
fn what_only_waits_is_no_hole() {
    let mut both = Both::new();
    both.primary(tcp(1, 97, 7, ACK, b"abc"))
        .backup(tcp(1, 97, 7, ACK, b"abc"));
    both.primary(tcp(1, 100, 7, ACK, b"abc"))
        .primary(tcp(1, 103, 7, FIN | ACK, b"def"));
    // Asks whether the client is there, with the byte before the next one.
    both.primary(tcp(1, 99, 7, ACK, b""));
    assert_eq!((both.out(), both.why()), (vec![0], None));
    both.backup(tcp(1, 100, 7, FIN | ACK, b"abcdef"));
    assert_eq!((both.out(), both.why()), (vec![1, 2, 3], None));
}

/// Of the backup's words only those are kept that the client was not told, however long the hole stays open.
#[test]
fn an_open_hole_keeps_nothing_of_what_comes_after_it() {
    let mut both = Both::with(Limits {
        buffer_bytes: 1000,
        flows: 100,
        http_dates: false,
    });
    both.backup(tcp(1, 97, 7, ACK, b"abclost"))
        .primary(tcp(1, 97, 7, ACK, b"abc"));
    for n in 0..1000 {
        both.primary(tcp(1, 104 + 10 * n, 7, ACK, &[7; 10]))
            .backup(tcp(1, 104 + 10 * n, 7, ACK, &[7; 10]));
    }
    assert_eq!((both.out().len(), both.why()), (1001, None));
    both.primary(tcp(1, 100, 7, ACK, b"lost"));
    assert_eq!((both.out().len(), both.why()), (1, None));
}

/// A guest may say a byte here and a byte there, in one of its copies alone: the bytes are the least of what that takes.
#[test]
fn words_in_small_pieces_are_bounded_by_what_they_take() {
    let limits = Limits {
        buffer_bytes: 100_000,
        flows: 100,
        http_dates: false,
    };
    let mut both = Both::with(limits);
    for n in 0..2000 {
        both.backup(tcp(1, 100 + 2 * n, 7, ACK, b"x"));
        assert!(both.comparer.kept_bytes() <= limits.buffer_bytes, "{n}");
    }
    assert_eq!(both.why(), Some(Difference::Full));
    both.sync();
    assert_eq!((both.why(), both.comparer.kept_bytes()), (None, 0));
}

/// Nor does each further one take as long as there are others.
#[test]
fn pieces_that_are_too_many_are_forgotten_and_what_is_said_there_waits_for_a_sync() {
    let mut both = Both::with(Limits {
        buffer_bytes: 64 << 20,
        flows: 100,
        http_dates: false,
    });
    let pieces = pieces::MOST_PIECES as u32;
    for n in 0..pieces {
        both.backup(tcp(1, 100 + 2 * n, 7, ACK, b"x"));
    }
    both.primary(tcp(1, 100, 7, ACK, b"x"));
    assert_eq!(both.out(), [0], "all of them are kept still");
    // In place of the one that has left, and one more.
    for n in pieces..pieces + 2 {
        both.backup(tcp(1, 100 + 2 * n, 7, ACK, b"x"));
    }
    both.primary(tcp(1, 102, 7, ACK, b"x"));
    assert_eq!(
        (both.out(), both.why()),
        (vec![], None),
        "it is not known what was said"
    );
    both.sync();
    both.primary(tcp(1, 104, 7, ACK, b"x"))
        .backup(tcp(1, 104, 7, ACK, b"x"));
    assert_eq!((both.out(), both.why()), (vec![2], None));
}
