//! An ICMP error that quotes what the VM has said. The quotation is in the client's numbers; Linux ignores an error about
//! a number that it has not in flight, and would never learn of a smaller path MTU.

use super::connection::Connection;
use super::recent::Recent;
use super::rewrite::Rewriter;
use crate::agreed::Frame;
use crate::output::packet::{Datagram, FlowKey, ICMP, TCP, u16_at, u32_at};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// `frame`, with the number that it quotes in the VM's.
pub(super) fn inbound(frame: &Frame, error: &Datagram, connections: &Recent<Connection>) -> Frame {
    let translated = quotation(&frame.bytes[..error.payload.end], error).and_then(|(key, at)| {
        let delta = connections.get(&key)?.delta()?;
        let icmp = error.payload.start - 4;
        let mut out = Rewriter::new(frame, icmp, icmp + 2);
        out.lower(at, delta);
        Some(out.finish())
    });
    translated.unwrap_or_else(|| frame.clone())
}

/// The connection that is quoted, and where its sequence number is.
fn quotation(bytes: &[u8], error: &Datagram) -> Option<(FlowKey, usize)> {
    // Four bytes of the error's own, such as the MTU, come first.
    let ip = error.payload.start + 4;
    let (vm, peer, protocol, tcp) = match (error.key.protocol, error.kind >> 8, bytes.get(ip)? >> 4) {
        (ICMP, 3 | 4 | 11 | 12, 4) => {
            let address = |at| Some(IpAddr::V4(Ipv4Addr::from_bits(u32_at(bytes, at)?)));
            let header = usize::from(bytes[ip] & 0xf) * 4;
            let is_first = u16_at(bytes, ip + 6)? & 0x1fff == 0;
            if header < 20 || !is_first {
                return None;
            }
            (
                address(ip + 12)?,
                address(ip + 16)?,
                *bytes.get(ip + 9)?,
                ip + header,
            )
        }
        (_, 1..=4, 6) => {
            let address =
                |at: usize| Some(IpAddr::V6(Ipv6Addr::from(*bytes.get(at..)?.first_chunk::<16>()?)));
            (address(ip + 8)?, address(ip + 24)?, *bytes.get(ip + 6)?, ip + 40)
        }
        _ => return None,
    };
    u32_at(bytes, tcp + 4)?;
    let key = FlowKey {
        vm,
        peer,
        vm_port: u16_at(bytes, tcp)?,
        peer_port: u16_at(bytes, tcp + 2)?,
        protocol,
        ..error.key
    };
    (protocol == TCP).then_some((key, tcp + 4))
}
