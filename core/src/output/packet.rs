//! What it decides: which flow an Ethernet frame belongs to, and where in it the parts that matter lie.
//!
//! Flow: read by the comparison of outputs, by the translation of TCP numbers and by what a backup keeps.
//!
//! Invariants:
//! 1. Total: any bytes give an answer, and every range in it lies inside the frame.
//! 2. Nothing is guessed: a length that contradicts another, an extension that moves addresses, a protocol that is
//!    not known make the frame `Other`.
//!
//! Source: RFC 791, 8200, 9293, 7323, 2018, 768, 792, 4443; IEEE 802.1Q. Not here: whether checksums are right.

use crate::agreed::Frame;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

/// IP's number of TCP.
pub const TCP: u8 = 6;
/// IP's number of UDP.
pub const UDP: u8 = 17;
/// IP's number of ICMP.
pub const ICMP: u8 = 1;
/// IP's number of ICMP for IPv6.
pub const ICMPV6: u8 = 58;

/// In a fragment's place: it is not the last one.
const MORE_FRAGMENTS: u16 = 0x2000;
/// In a fragment's place: its offset.
const OFFSET: u16 = 0x1fff;

const IGMP: u8 = 2;
const ETHERNET_BYTES: usize = 14;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// TCP's flag "no more bytes from the sender".
pub const FIN: u8 = 0x01;
/// TCP's flag "synchronise sequence numbers".
pub const SYN: u8 = 0x02;
/// TCP's flag "reset the connection".
pub const RST: u8 = 0x04;
/// TCP's flag "the end of what was written at once".
pub const PSH: u8 = 0x08;
/// TCP's flag "the acknowledgement number is valid".
pub const ACK: u8 = 0x10;

/// What tells one conversation of the VM from another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FlowKey {
    /// Which NIC of the VM.
    pub nic: u8,
    /// The ids of the VLAN tags: the inner in the low half, the outer (if there are two) in the high; 0 is untagged.
    pub vlan: u32,
    /// The VM's address (or the group that it is spoken to by).
    pub vm: IpAddr,
    /// The address of the other end.
    pub peer: IpAddr,
    /// The VM's port; 0 for protocols without ports.
    pub vm_port: u16,
    /// The port of the other end; 0 for protocols without ports.
    pub peer_port: u16,
    /// IP's number of the protocol.
    pub protocol: u8,
}

/// Which way a frame goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// The VM sent it.
    FromVm,
    /// The VM is to get it.
    ToVm,
}

/// TCP's timestamps option (RFC 7323).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timestamps {
    /// Where TSval begins; TSecr follows it.
    pub at: usize,
    /// The sender's clock: TSval.
    pub value: u32,
    /// The last clock that the sender heard: TSecr; means something only with ACK.
    pub echo: u32,
}

/// A whole TCP segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// The connection.
    pub key: FlowKey,
    /// Where the TCP header begins.
    pub tcp: usize,
    /// The sequence number of its first byte (or SYN).
    pub seq: u32,
    /// What it acknowledges, if `ack_flag`.
    pub ack: u32,
    /// The low eight flags.
    pub flags: u8,
    /// The window as it stands there, unscaled.
    pub window: u16,
    /// The header's options.
    pub options: Range<usize>,
    /// The timestamps among them.
    pub timestamps: Option<Timestamps>,
    /// The SACK blocks among them: pairs of edges, four bytes each. Empty if there are none.
    pub sack: Range<usize>,
    /// The bytes of the stream.
    pub payload: Range<usize>,
}

impl Segment {
    /// Whether it opens a connection.
    #[must_use]
    pub fn syn(&self) -> bool {
        self.flags & SYN != 0
    }

    /// Whether it ends its sender's stream.
    #[must_use]
    pub fn fin(&self) -> bool {
        self.flags & FIN != 0
    }

    /// Whether it resets the connection.
    #[must_use]
    pub fn rst(&self) -> bool {
        self.flags & RST != 0
    }

    /// Whether its acknowledgement number means something.
    #[must_use]
    pub fn ack_flag(&self) -> bool {
        self.flags & ACK != 0
    }

    /// How many sequence numbers it takes: its bytes, its SYN and its FIN.
    #[must_use]
    pub fn seq_len(&self) -> u32 {
        // Below 2^17: an IP packet is at most 64 KiB.
        self.payload.len() as u32 + u32::from(self.syn()) + u32::from(self.fin())
    }

    /// The sequence number after its last.
    #[must_use]
    pub fn seq_end(&self) -> u32 {
        self.seq.wrapping_add(self.seq_len())
    }

    /// Whether it says nothing but an acknowledgement.
    #[must_use]
    pub fn is_pure_ack(&self) -> bool {
        self.payload.is_empty() && self.flags & (SYN | FIN | RST | ACK) == ACK
    }
}

/// A UDP datagram or an ICMP message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Datagram {
    /// The flow; ICMP has no ports.
    pub key: FlowKey,
    /// ICMP's type and code; 0 for UDP.
    pub kind: u16,
    /// UDP: the payload. ICMP: what follows the checksum.
    pub payload: Range<usize>,
}

/// What a frame holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Parsed {
    /// A whole TCP segment.
    Tcp(Segment),
    /// A whole UDP datagram or ICMP message.
    Datagram(Datagram),
    /// ARP, neighbour and router discovery, group membership: about the link, not about a conversation.
    Neighbour,
    /// A part of an IP packet that holds a datagram: it has no ports, its kind is its place in the packet (the offset, in eight bytes, and `MORE_FRAGMENTS`), and its payload
    /// all that it brings. Which packet that is, IP's id says, and that is no statement of the VM's.
    Piece(Datagram),
    /// A part of another IP packet, such as TCP's.
    Fragment,
    /// Anything else, and whatever contradicts itself.
    Other,
}

/// Whether `a` comes before `b` in the circle of sequence numbers (RFC 1982; the same for timestamps).
#[must_use]
pub fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Reads a frame that goes in `direction`.
#[must_use]
pub fn parse(frame: &Frame, direction: Direction) -> Parsed {
    let bytes = &frame.bytes[..];
    parse_ethernet(bytes, frame.nic, direction).unwrap_or(Parsed::Other)
}

/// What the layers below IP's payload say.
struct Below {
    nic: u8,
    vlan: u32,
    direction: Direction,
}

impl Below {
    fn key(&self, src: IpAddr, dst: IpAddr, protocol: u8) -> FlowKey {
        let (vm, peer) = match self.direction {
            Direction::FromVm => (src, dst),
            Direction::ToVm => (dst, src),
        };
        FlowKey {
            nic: self.nic,
            vlan: self.vlan,
            vm,
            peer,
            vm_port: 0,
            peer_port: 0,
            protocol,
        }
    }

    fn with_ports(&self, key: FlowKey, src: u16, dst: u16) -> FlowKey {
        let (vm_port, peer_port) = match self.direction {
            Direction::FromVm => (src, dst),
            Direction::ToVm => (dst, src),
        };
        FlowKey {
            vm_port,
            peer_port,
            ..key
        }
    }
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The same of bytes alone, as if the VM's first card had sent them.
#[must_use]
pub(crate) fn parse_bytes(bytes: &[u8]) -> Parsed {
    parse_ethernet(bytes, 0, Direction::FromVm).unwrap_or(Parsed::Other)
}

/// Where IP's header begins, and whether it is IPv4's.
#[must_use]
pub(crate) fn ip_at(bytes: &[u8]) -> Option<(usize, bool)> {
    match network_layer(bytes)? {
        (at, _, IPV4) => Some((at, true)),
        (at, _, IPV6) => Some((at, false)),
        _ => None,
    }
}

/// Where what Ethernet carries begins, the VLANs, and which protocol it is.
fn network_layer(bytes: &[u8]) -> Option<(usize, u32, u16)> {
    let (mut at, mut vlan) = (ETHERNET_BYTES, 0);
    let mut ether_type = u16_at(bytes, 12)?;
    for _tag in 0..2 {
        if !matches!(ether_type, 0x8100 | 0x88a8 | 0x9100) {
            break;
        }
        // Id 0 carries a priority only: the frame counts as untagged.
        vlan = vlan << 16 | u32::from(u16_at(bytes, at)? & 0xfff);
        ether_type = u16_at(bytes, at + 2)?;
        at += 4;
    }
    Some((at, vlan, ether_type))
}

fn parse_ethernet(bytes: &[u8], nic: u8, direction: Direction) -> Option<Parsed> {
    let (at, vlan, ether_type) = network_layer(bytes)?;
    let below = Below { nic, vlan, direction };
    match ether_type {
        IPV4 => parse_ipv4(bytes, at, &below),
        IPV6 => parse_ipv6(bytes, at, &below),
        0x0806 => Some(Parsed::Neighbour),
        _ => None,
    }
}

fn parse_ipv4(bytes: &[u8], at: usize, below: &Below) -> Option<Parsed> {
    let first = *bytes.get(at)?;
    let header = usize::from(first & 0xf) * 4;
    let total = usize::from(u16_at(bytes, at + 2)?);
    if first >> 4 != 4 || header < 20 || total < header || at + total > bytes.len() {
        return None;
    }
    let address = |at| Some(IpAddr::V4(Ipv4Addr::from_bits(u32_at(bytes, at)?)));
    let protocol = *bytes.get(at + 9)?;
    let key = below.key(address(at + 12)?, address(at + 16)?, protocol);
    let place = u16_at(bytes, at + 6)? & (MORE_FRAGMENTS | OFFSET);
    if place != 0 {
        return Some(fragment(key, place, at + header..at + total));
    }
    // A source route hides the address that the checksum counts.
    let mut option = at + 20;
    while option < at + header {
        match bytes[option] {
            0 => break,
            1 => option += 1,
            131 | 137 => return None,
            _ => option += usize::from(*bytes.get(option + 1)?).max(2),
        }
    }
    parse_transport(bytes, at + header..at + total, key, below)
}

/// What lies at that place of a packet. Pieces of TCP stay apart: a stream is not compared by packets.
fn fragment(key: FlowKey, place: u16, payload: Range<usize>) -> Parsed {
    match (key.protocol, key.vm) {
        (UDP, _) | (ICMP, IpAddr::V4(_)) | (ICMPV6, IpAddr::V6(_)) => Parsed::Piece(Datagram {
            key,
            kind: place,
            payload,
        }),
        _ => Parsed::Fragment,
    }
}

fn parse_ipv6(bytes: &[u8], at: usize, below: &Below) -> Option<Parsed> {
    let length = usize::from(u16_at(bytes, at + 4)?);
    let mut start = at + 40;
    let end = start + length;
    if bytes[at] >> 4 != 6 || end > bytes.len() {
        return None;
    }
    let mut next = *bytes.get(at + 6)?;
    // Hop-by-hop and destination options change nothing that matters here; a routing header moves the address that
    // the checksum counts, and is left alone. Every round goes on by eight bytes at least.
    while matches!(next, 0 | 60) {
        if start + 8 > end {
            return None;
        }
        next = bytes[start];
        start += (usize::from(bytes[start + 1]) + 1) * 8;
    }
    if start > end {
        return None;
    }
    let address = |at: usize| {
        let octets: [u8; 16] = *bytes.get(at..)?.first_chunk()?;
        Some(IpAddr::V6(Ipv6Addr::from(octets)))
    };
    let key = |protocol| Some(below.key(address(at + 8)?, address(at + 24)?, protocol));
    if next == 44 {
        if start + 8 > end {
            return None;
        }
        let place = u16_at(bytes, start + 2)?;
        let more = if place & 1 != 0 { MORE_FRAGMENTS } else { 0 };
        return Some(fragment(key(bytes[start])?, place >> 3 | more, start + 8..end));
    }
    let key = key(next)?;
    parse_transport(bytes, start..end, key, below)
}

/// `within` lies inside `bytes`.
fn parse_transport(bytes: &[u8], within: Range<usize>, key: FlowKey, below: &Below) -> Option<Parsed> {
    // Nothing behind IP's payload (Ethernet's padding) can be read by mistake.
    let bytes = &bytes[..within.end];
    match (key.protocol, key.vm) {
        (TCP, _) => parse_tcp(bytes, within.start, key, below),
        (UDP, _) => {
            let length = usize::from(u16_at(bytes, within.start + 4)?);
            let (src, dst) = (u16_at(bytes, within.start)?, u16_at(bytes, within.start + 2)?);
            if length < 8 || length != within.len() {
                return None;
            }
            Some(Parsed::Datagram(Datagram {
                key: below.with_ports(key, src, dst),
                kind: 0,
                payload: within.start + 8..within.end,
            }))
        }
        (ICMP, IpAddr::V4(_)) | (ICMPV6, IpAddr::V6(_)) => {
            let kind = u16_at(bytes, within.start)?;
            if within.len() < 4 {
                return None;
            }
            // MLD, router and neighbour discovery, redirects, MLDv2.
            if key.protocol == ICMPV6 && matches!(kind >> 8, 130..=137 | 143) {
                return Some(Parsed::Neighbour);
            }
            Some(Parsed::Datagram(Datagram {
                key,
                kind,
                payload: within.start + 4..within.end,
            }))
        }
        (IGMP, IpAddr::V4(_)) => Some(Parsed::Neighbour),
        _ => None,
    }
}

/// `bytes` ends where the segment does.
fn parse_tcp(bytes: &[u8], tcp: usize, key: FlowKey, below: &Below) -> Option<Parsed> {
    let header = usize::from(bytes.get(tcp + 12)? >> 4) * 4;
    if header < 20 || tcp + header > bytes.len() {
        return None;
    }
    let options = tcp + 20..tcp + header;
    let (timestamps, sack) = parse_options(bytes, options.clone());
    Some(Parsed::Tcp(Segment {
        key: below.with_ports(key, u16_at(bytes, tcp)?, u16_at(bytes, tcp + 2)?),
        tcp,
        seq: u32_at(bytes, tcp + 4)?,
        ack: u32_at(bytes, tcp + 8)?,
        flags: bytes[tcp + 13],
        window: u16_at(bytes, tcp + 14)?,
        timestamps,
        sack,
        payload: options.end..bytes.len(),
        options,
    }))
}

/// The timestamps and the SACK blocks. An option that is cut short ends the list, as it does for Linux.
fn parse_options(bytes: &[u8], options: Range<usize>) -> (Option<Timestamps>, Range<usize>) {
    let (mut timestamps, mut sack) = (None, options.start..options.start);
    let mut at = options.start;
    while at < options.end {
        let kind = bytes[at];
        if kind == 0 {
            break;
        }
        if kind == 1 {
            at += 1;
            continue;
        }
        let length = match bytes.get(at + 1) {
            Some(length) if at + 1 < options.end => usize::from(*length),
            _ => break,
        };
        if length < 2 || at + length > options.end {
            break;
        }
        match (kind, length) {
            (8, 10) => {
                if let (Some(value), Some(echo)) = (u32_at(bytes, at + 2), u32_at(bytes, at + 6)) {
                    let at = at + 2;
                    timestamps = Some(Timestamps { at, value, echo });
                }
            }
            (5, 10 | 18 | 26 | 34) => sack = at + 2..at + length,
            _ => {}
        }
        at += length;
    }
    (timestamps, sack)
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
