//! Where the first difference is.

use super::*;

#[test]
fn the_first_difference_is_found_by_connection_and_byte_from_the_connections_beginning() {
    let mut both = Both::new();
    both.primary(tcp(1, 99, 7, SYN | ACK, b""))
        .backup(tcp(1, 4_999, 7, SYN | ACK, b""));
    both.primary(tcp(1, 100, 8, ACK, b"+OK\r\n"))
        .backup(tcp(1, 5_000, 8, ACK, b"+OK\r\n"));
    assert_eq!(both.out(), [0, 1]);
    assert_eq!(both.comparer.place(), None);
    both.primary(tcp(1, 105, 9, ACK, b":3790 and what follows it, at length\r\n"))
        .backup(tcp(1, 5_005, 9, ACK, b":37"))
        .backup(tcp(1, 5_008, 9, ACK, b"94\r\n"));
    let place = both.comparer.place().expect("it differs").clone();
    assert_eq!((place.flow.vm_port, place.flow.peer_port), (80, 1));
    assert_eq!((place.at_byte, place.from_beginning), (5 + 4, true));
    assert_eq!(place.why, Difference::Bytes);
    assert_eq!(&*place.primary, b"0 and what follo", "16 bytes at most");
    assert_eq!(&*place.backup, b"4\r\n");
    // Another one does not take its place.
    both.primary(tcp(2, 1, 1, ACK, b"a"))
        .backup(tcp(2, 1, 1, ACK, b"b"));
    assert_eq!(both.comparer.place(), Some(&place));
    both.sync();
    assert_eq!(both.comparer.place(), None, "a sync makes them one");
}

#[test]
fn a_connection_that_was_there_before_is_counted_from_what_was_compared_of_it() {
    let mut both = Both::new();
    both.primary(tcp(1, 700, 7, ACK, b"abc"))
        .backup(tcp(1, 700, 7, ACK, b"abc"));
    both.primary(tcp(1, 703, 7, FIN | ACK, b"de"))
        .backup(tcp(1, 703, 7, ACK, b"de"))
        .backup(tcp(1, 705, 7, ACK, b"f"));
    let place = both.comparer.place().expect("it differs");
    assert_eq!((place.at_byte, place.from_beginning), (5, false));
    assert_eq!(place.why, Difference::Flags, "one ends here, the other goes on");
    assert_eq!((&*place.primary, &*place.backup), (&b""[..], &b"f"[..]));
}

#[test]
fn what_the_client_was_told_twice_counts_once() {
    let mut both = Both::new();
    for _ in 0..3 {
        both.primary(tcp(1, 700, 7, ACK, b"abc"))
            .backup(tcp(1, 700, 7, ACK, b"abc"));
    }
    both.primary(tcp(1, 702, 7, ACK, b"cdX"))
        .backup(tcp(1, 702, 7, ACK, b"cdY"));
    let place = both.comparer.place().expect("it differs");
    assert_eq!((place.at_byte, &*place.primary), (4, &b"X"[..]));
}

#[test]
fn a_datagram_is_counted_by_its_own_bytes() {
    let mut both = Both::new();
    both.primary(udp(b"alike")).backup(udp(b"alike"));
    both.primary(udp(b"time 1")).backup(udp(b"time 2"));
    let place = both.comparer.place().expect("it differs");
    assert_eq!((place.why, place.at_byte), (Difference::Datagram, 5));
    assert_eq!((&*place.primary, &*place.backup), (&b"1"[..], &b"2"[..]));
}

#[test]
fn it_is_known_on_which_flow_the_backups_word_is_waited_for() {
    let mut both = Both::new();
    both.primary(tcp(1, 700, 7, ACK, b""));
    both.primary(tcp(2, 700, 7, ACK, b"abc"));
    let flow = both.comparer.waits_on().expect("it waits");
    assert_eq!(flow.peer_port, 2, "an acknowledgement may wait");
}
