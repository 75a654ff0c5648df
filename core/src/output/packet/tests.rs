use super::*;
use proptest::prelude::*;

fn inside(range: &Range<usize>, frame: &Frame) -> bool {
    range.start <= range.end && range.end <= frame.bytes.len()
}

/// Ethernet and IPv4 headers that are right for `transport`, so that random bytes get past them.
fn ipv4(protocol: u8, fragment: u16, transport: &[u8]) -> Vec<u8> {
    let mut bytes = vec![2; 12];
    bytes.extend([0x08, 0x00, 0x45, 0]);
    bytes.extend((20 + transport.len() as u16).to_be_bytes());
    bytes.extend([0, 1]);
    bytes.extend(fragment.to_be_bytes());
    bytes.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend(transport);
    bytes
}

fn read(bytes: Vec<u8>) -> Parsed {
    let frame = Frame {
        nic: 1,
        bytes: bytes.into(),
    };
    parse(&frame, Direction::FromVm)
}

proptest! {
    /// Invariant 1.
    #[test]
    fn any_bytes_give_ranges_inside_the_frame(
        noise in prop::collection::vec(any::<u8>(), 0..200),
        shape in 0_u8..5,
        protocol in prop::sample::select(vec![TCP, UDP, ICMP, ICMPV6, IGMP, 0, 44, 60]),
    ) {
        let bytes = match shape {
            0 => noise,
            1 => ipv4(protocol, 0, &noise),
            4 => ipv4(protocol, 0x2003, &noise),
            2 => [&[2; 12][..], &[0x81, 0, 0, 7, 0x86, 0xdd, 0x60], &noise].concat(),
            _ => {
                let length = (noise.len() as u16).to_be_bytes();
                [&[2; 12][..], &[0x86, 0xdd, 0x60, 0, 0, 0], &length, &[protocol, 64], &[7; 32], &noise].concat()
            }
        };
        let frame = Frame { nic: 0, bytes: bytes.into() };
        for direction in [Direction::FromVm, Direction::ToVm] {
            match parse(&frame, direction) {
                Parsed::Tcp(segment) => {
                    prop_assert!(inside(&segment.options, &frame));
                    prop_assert!(inside(&segment.payload, &frame));
                    prop_assert!(inside(&segment.sack, &frame));
                    prop_assert_eq!(segment.sack.len() % 8, 0);
                    prop_assert!(segment.timestamps.is_none_or(|found| found.at + 8 <= segment.options.end));
                }
                Parsed::Datagram(datagram) | Parsed::Piece(datagram) => prop_assert!(inside(&datagram.payload, &frame)),
                Parsed::Neighbour | Parsed::Fragment | Parsed::Other => {}
            }
        }
    }
}

/// A TCP header with timestamps and one SACK block, and `payload`.
fn tcp(payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 80, 4, 0];
    bytes.extend(7_u32.to_be_bytes());
    bytes.extend(9_u32.to_be_bytes());
    bytes.extend([0xd0, ACK, 1, 0, 0, 0, 0, 0]);
    bytes.extend([1, 1, 8, 10, 0, 0, 0, 3, 0, 0, 0, 4]);
    bytes.extend([1, 1, 5, 10, 0, 0, 0, 11, 0, 0, 0, 12, 1, 1, 1, 0]);
    bytes[12] = 0xc0;
    bytes.truncate(48);
    bytes.extend(payload);
    bytes
}

#[test]
fn a_segment_is_read_with_its_options_and_without_ethernets_padding() {
    let mut bytes = ipv4(TCP, 0x4000, &tcp(b"abc"));
    bytes.extend([0; 9]);
    let Parsed::Tcp(segment) = read(bytes.clone()) else {
        panic!("not TCP");
    };
    assert_eq!((segment.seq, segment.ack, segment.window), (7, 9, 256));
    assert_eq!(&bytes[segment.payload.clone()], b"abc");
    assert_eq!(
        segment.timestamps.map(|found| (found.value, found.echo)),
        Some((3, 4))
    );
    assert_eq!(u32_at(&bytes, segment.sack.start), Some(11));
    assert_eq!(segment.sack.len(), 8);
    assert_eq!((segment.key.vm_port, segment.key.peer_port), (80, 1024));
    assert_eq!(segment.key.vm, IpAddr::from([10, 0, 0, 1]));
    assert_eq!(segment.seq_end(), 10);
}

#[test]
fn a_flow_has_one_key_in_both_directions() {
    let mut back = ipv4(TCP, 0, &tcp(b""));
    back.swap(29, 33);
    back[34..38].copy_from_slice(&[4, 0, 0, 80]);
    let frame = |bytes: Vec<u8>| Frame {
        nic: 0,
        bytes: bytes.into(),
    };
    let there = parse(&frame(ipv4(TCP, 0, &tcp(b""))), Direction::FromVm);
    let back = parse(&frame(back), Direction::ToVm);
    let (Parsed::Tcp(there), Parsed::Tcp(back)) = (there, back) else {
        panic!("not TCP");
    };
    assert_eq!(there.key, back.key);
}

#[test]
fn what_is_not_whole_or_not_known_is_never_a_segment() {
    assert_eq!(read(ipv4(TCP, 0x2000, &tcp(b""))), Parsed::Fragment);
    assert_eq!(read(ipv4(TCP, 0x0001, &tcp(b""))), Parsed::Fragment);
    assert_eq!(read(ipv4(47, 0, &tcp(b""))), Parsed::Other);
    assert_eq!(read(ipv4(TCP, 0, &tcp(b"")[..40])), Parsed::Other);
    let mut longer = ipv4(TCP, 0, &tcp(b""));
    longer[17] += 1;
    assert_eq!(read(longer), Parsed::Other);
    assert_eq!(read(ipv4(UDP, 0, &[0, 1, 0, 2, 0, 9, 0, 0])), Parsed::Other);
    assert_eq!(read(ipv4(47, 0x2000, &[0; 16])), Parsed::Fragment);
}

#[test]
fn a_part_of_a_datagram_has_its_place_and_all_its_bytes() {
    let piece = |bytes| match read(bytes) {
        Parsed::Piece(piece) => (
            piece.key.vm_port,
            piece.key.protocol,
            piece.kind,
            piece.payload.len(),
        ),
        other => panic!("no piece: {other:?}"),
    };
    // Don't-fragment is no place.
    assert_eq!(piece(ipv4(UDP, 0x6000, &[1; 16])), (0, UDP, 0x2000, 16));
    assert_eq!(piece(ipv4(ICMP, 0x0002, &[1; 5])), (0, ICMP, 2, 5));
    let v6 = |next, place: u16, header: usize| {
        let length = (header + 9) as u16;
        let mut bytes = vec![2; 12];
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend(length.to_be_bytes());
        bytes.extend([44, 64]);
        bytes.extend([7; 32]);
        bytes.extend([next, 0]);
        bytes.extend(place.to_be_bytes());
        bytes.extend([0, 0, 0, 9]);
        bytes.extend([1; 9]);
        bytes
    };
    assert_eq!(piece(v6(ICMPV6, 1, 8)), (0, ICMPV6, 0x2000, 9));
    assert_eq!(piece(v6(UDP, 3 << 3, 8)), (0, UDP, 3, 9));
    assert_eq!(read(v6(TCP, 1, 8)), Parsed::Fragment);
    assert_eq!(
        read(v6(60, 1, 8)),
        Parsed::Fragment,
        "what lies behind that is not known"
    );
    assert_eq!(read(v6(UDP, 1, 9)), Parsed::Other, "longer than its frame");
}

#[test]
fn vlan_tags_are_part_of_the_key() {
    let plain = ipv4(TCP, 0, &tcp(b""));
    let tagged = |tags: &[u8]| [&plain[..12], tags, &plain[12..]].concat();
    let vlan = |bytes| match read(bytes) {
        Parsed::Tcp(segment) => segment.key.vlan,
        other => panic!("{other:?}"),
    };
    assert_eq!(vlan(plain.clone()), 0);
    assert_eq!(vlan(tagged(&[0x81, 0, 0x60, 5])), 5);
    assert_eq!(vlan(tagged(&[0x88, 0xa8, 0, 3, 0x81, 0, 0, 5])), 3 << 16 | 5);
    assert_eq!(
        vlan(tagged(&[0x81, 0, 0xe0, 0])),
        0,
        "a priority alone is no VLAN"
    );
}

#[test]
fn the_links_own_talk_is_told_from_conversations() {
    let arp = [&[2; 12][..], &[8, 6], &[0; 28]].concat();
    assert_eq!(read(arp), Parsed::Neighbour);
    assert_eq!(read(ipv4(IGMP, 0, &[0x16, 0, 0, 0])), Parsed::Neighbour);
    let Parsed::Datagram(echo) = read(ipv4(ICMP, 0, &[8, 0, 1, 2, 0, 1, 0, 2, 9])) else {
        panic!("not ICMP");
    };
    assert_eq!((echo.kind, echo.payload), (0x0800, 38..43));
}
