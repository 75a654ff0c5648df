//! What clients and guests put on the network, and the table of connections that another host sends.

use crate::script::Script;
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::output::packet::{Direction, Parsed, Segment, parse};
use dunlin_core::output::retransmit::{MOST_BYTES, RetransmitBuffer};
use dunlin_core::output::rewriter::SequenceRewriter;
use std::net::IpAddr;

/// A table, then frames of both sides at any moment: a value for each, and a table that can be read again.
pub fn packet(bytes: &[u8]) {
    let mut script = Script(bytes);
    let (mut rewriter, mut kept) = (SequenceRewriter::new(), RetransmitBuffer::new());
    let n = usize::from(script.byte());
    if rewriter.load(&Bytes::copy_from_slice(script.bytes(n))).is_ok() {
        read_again(&rewriter);
    }
    while !script.is_over() {
        let (way, n) = (script.byte(), usize::from(script.byte()));
        let bytes = script.bytes(n).to_vec();
        let direction = match way % 4 {
            0 => Direction::ToVm,
            _ => Direction::FromVm,
        };
        let frame = summed(bytes, direction);
        match way % 4 {
            0 => {
                let inside = rewriter.inbound(&frame);
                assert_eq!(inside.bytes.len(), frame.bytes.len());
                kept.heard(&inside);
            }
            1 => {
                rewriter.overheard(&frame);
                kept.said(&frame);
            }
            2 => assert_eq!(rewriter.outbound(&frame).bytes.len(), frame.bytes.len()),
            _ => rewriter.take_over(),
        }
    }
    assert!(kept.bytes() <= MOST_BYTES && kept.take().len() <= bytes.len());
    read_again(&rewriter);
}

fn read_again(rewriter: &SequenceRewriter) {
    let (table, mut other) = (rewriter.table(), SequenceRewriter::new());
    assert_eq!(other.load(&table), Ok(()));
    assert_eq!(other.table(), table);
}

/// The frame, with the right checksum if it is TCP: of others, nothing is learnt.
fn summed(mut bytes: Vec<u8>, direction: Direction) -> Frame {
    let nic = 0;
    let frame = Frame {
        nic,
        bytes: Bytes::copy_from_slice(&bytes),
    };
    let Parsed::Tcp(segment) = parse(&frame, direction) else {
        return frame;
    };
    let at = segment.tcp + 16;
    bytes[at..at + 2].fill(0);
    let sum = checksum(&segment, &bytes[segment.tcp..segment.payload.end]);
    bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    let bytes = bytes.into();
    Frame { nic, bytes }
}

fn checksum(segment: &Segment, tcp: &[u8]) -> u16 {
    let octets = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let length = (tcp.len() as u32).to_be_bytes();
    let counted = [
        &octets(segment.key.vm)[..],
        &octets(segment.key.peer),
        &length,
        &[0, 6],
        tcp,
    ]
    .concat();
    let sum = counted.chunks(2).fold(0_u32, |sum, word| {
        let sum = sum + (u32::from(word[0]) << 8) + u32::from(*word.get(1).unwrap_or(&0));
        (sum & 0xffff) + (sum >> 16)
    });
    !(sum as u16)
}
