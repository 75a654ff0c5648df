//! Datagrams that are longer than a frame: anybody can ask for them (`ping -s 3000`).

use super::*;

const UDP: u8 = 17;
const TCP: u8 = 6;
const ICMP: u8 = 1;
/// More follow.
const MORE: u16 = 0x2000;

/// A part of a packet with that id, at that place.
fn part(protocol: u8, id: u16, place: u16, content: &[u8]) -> Frame {
    let whole = ip(protocol, content);
    let mut bytes = whole.bytes.to_vec();
    bytes[18..20].copy_from_slice(&id.to_be_bytes());
    bytes[20..22].copy_from_slice(&place.to_be_bytes());
    Frame {
        nic: 0,
        bytes: bytes.into(),
    }
}

#[test]
fn parts_of_datagrams_are_compared_one_by_one_whatever_their_ids() {
    let mut both = Both::new();
    both.primary(part(UDP, 7, MORE, b"the first part, "))
        .primary(part(UDP, 7, 2, b"and the last one"));
    assert_eq!((both.out(), both.why()), (vec![], None));
    both.backup(part(UDP, 9000, MORE, b"the first part, "))
        .backup(part(UDP, 9000, 2, b"and the last one"));
    assert_eq!((both.out(), both.why()), (vec![0, 1], None));
}

#[test]
fn other_bytes_or_another_place_are_a_difference() {
    for (place, content) in [(MORE, b"12:00:02"), (MORE | 1, b"12:00:01")] {
        let mut both = Both::new();
        both.primary(part(UDP, 1, MORE, b"12:00:01"))
            .backup(part(UDP, 2, place, content));
        assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Datagram)));
    }
    // A whole message whose type and code are the same number as a part's place.
    let whole = [&MORE.to_be_bytes()[..], &[0, 0], b"12:00:01"].concat();
    let mut both = Both::new();
    both.primary(part(ICMP, 1, MORE, b"12:00:01"))
        .backup(ip(ICMP, &whole));
    assert_eq!((both.out(), both.why()), (vec![], Some(Difference::Datagram)));
}

#[test]
fn parts_of_tcp_wait_for_a_sync() {
    let mut both = Both::new();
    both.primary(part(TCP, 7, MORE, &[0; 24]))
        .backup(part(TCP, 7, MORE, &[0; 24]));
    assert_eq!(
        (both.out(), both.why()),
        (vec![], Some(Difference::NotUnderstood))
    );
}
