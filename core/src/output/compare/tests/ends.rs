//! Ends of connections that differ in nothing but their way.

use super::*;

/// Nothing leaves, nothing brings a sync at once, and it is known what waits since when.
fn assert_waits_for_any_sync(mut both: Both, oldest: u64, frames: usize) {
    assert_eq!((both.out(), both.why()), (vec![], None));
    let waits = Verdict::Waiting {
        oldest: FrameId(oldest),
        frames,
        telling: 0,
    };
    assert_eq!(both.comparer.verdict(), waits);
    assert_eq!(both.comparer.oldest_end(), Some(FrameId(oldest)));
    assert_eq!(both.comparer.oldest_telling(), None);
    assert_eq!(
        both.comparer.place().map(|place| place.why),
        Some(Difference::Ends)
    );
    assert_eq!(both.comparer.counters().flags, 1);
    both.sync();
    assert_eq!(both.comparer.verdict(), Verdict::Agree);
    assert_eq!((both.comparer.oldest_end(), both.comparer.place()), (None, None));
}

/// Both have sent the same answer. The client says goodbye before one of the VMs has closed the connection, and behind that for the other.
fn answered() -> Both {
    let mut both = Both::new();
    both.primary(tcp(1, 100, 7, ACK, b"bye"))
        .backup(tcp(1, 100, 7, ACK, b"bye"));
    assert_eq!(both.out(), [0]);
    both
}

#[test]
fn a_fin_beside_a_reset() {
    let mut both = answered();
    both.primary(tcp(1, 103, 7, FIN | ACK, b""));
    both.backup(tcp(1, 103, 40, RST | ACK, b""));
    both.primary(tcp(1, 104, 0, RST, b""));
    assert_waits_for_any_sync(both, 1, 2);
}

#[test]
fn a_reset_beside_a_fin() {
    let mut both = answered();
    both.primary(tcp(1, 103, 40, RST | ACK, b""));
    both.backup(tcp(1, 103, 7, FIN | ACK, b""));
    assert_eq!(both.why(), None, "it may say a reset yet");
    both.backup(tcp(1, 104, 0, RST, b""));
    assert_waits_for_any_sync(both, 1, 1);
}

/// What the backup's VM has thrown away is not acknowledged before a sync.
#[test]
fn a_fin_that_has_heard_of_more() {
    let mut both = answered();
    both.backup(tcp(1, 103, 7, FIN | ACK, b""));
    both.backup(tcp(1, 104, 0, RST, b""));
    both.primary(tcp(1, 103, 40, FIN | ACK, b""));
    both.primary(tcp(1, 104, 41, ACK, b""));
    assert_waits_for_any_sync(both, 1, 2);
}

/// The same in a word of its own, and behind a sync.
#[test]
fn an_acknowledgement_behind_a_fin_that_both_have_said() {
    let mut both = answered();
    both.backup(tcp(1, 103, 7, FIN | ACK, b""));
    both.primary(tcp(1, 103, 7, FIN | ACK, b""));
    assert_eq!(both.out(), [1]);
    both.sync();
    both.backup(tcp(1, 104, 0, RST, b""));
    both.primary(tcp(1, 104, 41, ACK, b""));
    assert_waits_for_any_sync(both, 2, 1);
}

#[test]
fn a_client_that_waits_for_bytes_or_a_connection_that_goes_on_brings_a_sync_at_once() {
    // The backup's has ended, and the primary's goes on.
    let mut goes_on = answered();
    goes_on.backup(tcp(1, 103, 0, RST, b""));
    goes_on.primary(tcp(1, 103, 8, ACK, b""));
    assert_eq!(goes_on.why(), Some(Difference::Flags));
    let mut bytes = answered();
    bytes.backup(tcp(1, 103, 0, RST, b""));
    bytes.primary(tcp(1, 103, 7, FIN | ACK, b"and more"));
    assert_eq!(bytes.why(), Some(Difference::Flags));
    // The next of the same name.
    let mut again = answered();
    again.backup(tcp(1, 103, 0, RST, b""));
    again.primary(tcp(1, 103, 7, FIN | ACK, b""));
    assert_eq!(again.why(), None);
    again.primary(tcp(1, 9000, 70, SYN | ACK, b""));
    assert_eq!(again.why(), Some(Difference::Flags));
    again.sync();
    // Which has not ended.
    again.backup(tcp(1, 9001, 0, RST, b""));
    again.primary(tcp(1, 9001, 71, ACK, b""));
    assert_eq!(again.why(), Some(Difference::Flags));
}

/// Both have said it, and the client has not got it yet.
#[test]
fn an_answer_that_waits_with_its_end_brings_a_sync_at_once() {
    // In the word that ends it; before that; behind a word that tells nothing; and said again where it was lost.
    let mut same = Both::new();
    same.backup(tcp(1, 100, 7, FIN | ACK, b"answer"))
        .backup(tcp(1, 107, 0, RST, b""));
    same.primary(tcp(1, 100, 40, FIN | ACK, b"answer"));
    assert_eq!((same.out(), same.why()), (vec![], Some(Difference::Flags)));
    let mut behind = Both::new();
    behind.primary(tcp(1, 100, 40, ACK, b""));
    behind.primary(tcp(1, 100, 40, ACK, b"answer"));
    behind.primary(tcp(1, 106, 40, FIN | ACK, b""));
    behind.backup(tcp(1, 100, 0, RST, b""));
    assert_eq!((behind.out(), behind.why()), (vec![], Some(Difference::Flags)));
    let mut lost = answered();
    lost.primary(tcp(1, 109, 7, ACK, b"and on"))
        .backup(tcp(1, 109, 7, ACK, b"and on"));
    lost.backup(tcp(1, 115, 0, RST, b""));
    lost.primary(tcp(1, 115, 7, FIN | ACK, b""));
    assert_eq!((lost.out(), lost.why()), (vec![1], None));
    lost.primary(tcp(1, 103, 7, ACK, b"a hole"));
    assert_eq!(lost.why(), Some(Difference::Flags));
}

#[test]
fn it_hides_no_other_difference() {
    let mut both = answered();
    both.backup(tcp(1, 103, 0, RST, b""));
    both.primary(tcp(1, 103, 7, FIN | ACK, b""));
    both.primary(tcp(2, 100, 7, ACK, b"one"));
    assert_eq!(both.comparer.oldest_telling(), Some(FrameId(2)));
    both.backup(tcp(2, 100, 7, ACK, b"two"));
    assert_eq!(both.why(), Some(Difference::Bytes));
    assert_eq!(
        both.comparer.place().map(|place| place.why),
        Some(Difference::Bytes)
    );
}

#[test]
fn what_has_left_was_one_and_a_load_forgets_them() {
    let mut both = answered();
    both.backup(tcp(1, 103, 0, RST, b""));
    both.primary(tcp(1, 103, 7, FIN | ACK, b""));
    both.primary(tcp(1, 104, 0, RST, b""));
    both.comparer.line_drawn();
    both.comparer.sync_acknowledged();
    assert_eq!(both.comparer.oldest_end(), None, "it waits no more");
    let left = [0, 1, 1].map(|id| both.comparer.end_leaves(FrameId(id)));
    assert_eq!(left, [false, true, false]);
    both.comparer.backup_loaded();
    assert!(!both.comparer.end_leaves(FrameId(2)));
}
