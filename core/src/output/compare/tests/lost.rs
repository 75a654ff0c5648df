//! What the primary's VM has lost on its way out.

use super::*;

/// A segment that the primary's VM lost on its way out was told to nobody, and what came after it is no reason to believe that.
#[test]
fn what_the_primarys_vm_lost_on_its_way_out_does_not_leave_as_told_before() {
    let mut both = Both::new();
    both.primary(tcp(1, 97, 7, ACK, b"abc"))
        .backup(tcp(1, 97, 7, ACK, b"abc"));
    assert_eq!(both.out(), [0]);
    both.backup(tcp(1, 100, 7, ACK, b"XXXdef"));
    both.primary(tcp(1, 103, 7, ACK, b"def"));
    assert_eq!(both.out(), []);
    both.primary(tcp(1, 100, 7, ACK, b"abc"));
    assert_eq!(both.out(), []);
    assert!(both.why().is_some());
    // After the sync both hold the same there.
    both.sync();
    both.primary(tcp(1, 100, 7, ACK, b"abc"))
        .primary(tcp(1, 106, 7, ACK, b"ghi"))
        .backup(tcp(1, 106, 7, ACK, b"ghi"));
    assert_eq!((both.out(), both.why()), (vec![3, 4], None));
}

#[test]
fn an_acknowledgement_beyond_what_was_lost_tells_no_bytes() {
    let mut both = Both::new();
    both.primary(tcp(1, 97, 7, ACK, b"abc"))
        .backup(tcp(1, 97, 7, ACK, b"abc"));
    both.backup(tcp(1, 100, 8, ACK, b"XXX"));
    both.primary(tcp(1, 103, 8, ACK, b""));
    assert_eq!(both.out(), [0, 1]);
    both.primary(tcp(1, 100, 8, ACK, b"abc"));
    assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Bytes)));
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
