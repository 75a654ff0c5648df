//! TCP segments in Ethernet frames with windows and options, written, summed and read without the code under test.

use dunlin_core::agreed::Frame;
use std::net::{Ipv4Addr, Ipv6Addr};

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;
pub const URG: u8 = 32;
pub const ECE: u8 = 64;
pub const CWR: u8 = 128;

pub const VM_PORT: u16 = 80;
pub const FIRST_PORT: u16 = 4000;

/// What a SYN offers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Offer {
    pub mss: u16,
    pub scale: Option<u8>,
    pub sack: bool,
    /// An option as it stands there.
    pub extra: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Seg {
    pub from_vm: bool,
    pub client: usize,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub ticks: Option<(u32, u32)>,
    pub offer: Option<Offer>,
    pub sack: Vec<(u32, u32)>,
    pub payload: Vec<u8>,
}

impl Seg {
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub fn len(&self) -> u32 {
        self.payload.len() as u32 + u32::from(self.has(SYN)) + u32::from(self.has(FIN))
    }
}

/// The client with an address that is good on its link only.
pub const LINK_LOCAL: usize = 15_002;

pub fn is_v6(client: usize) -> bool {
    client % 4 == 2
}

fn vlan(client: usize) -> Option<u16> {
    (client % 4 == 1).then_some(7)
}

fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

fn options(seg: &Seg) -> Vec<u8> {
    let mut out = Vec::new();
    if let Some(offer) = &seg.offer {
        out.extend([2, 4]);
        out.extend(offer.mss.to_be_bytes());
        if let Some(scale) = offer.scale {
            out.extend([1, 3, 3, scale]);
        }
        if offer.sack {
            out.extend([4, 2]);
        }
        out.extend(&offer.extra);
    }
    if let Some((value, echo)) = seg.ticks {
        // Not always at the same place: an option may begin at an odd byte.
        let padding: &[u8] = if value % 3 == 0 {
            &[1, 8, 10]
        } else {
            &[1, 1, 8, 10]
        };
        out.extend(padding);
        out.extend(value.to_be_bytes());
        out.extend(echo.to_be_bytes());
    }
    if !seg.sack.is_empty() {
        out.extend([5, 2 + 8 * seg.sack.len() as u8]);
        for (from, to) in &seg.sack {
            out.extend(from.to_be_bytes());
            out.extend(to.to_be_bytes());
        }
    }
    while out.len() % 4 != 0 {
        out.push(0);
    }
    out
}

fn addresses(client: usize) -> (Vec<u8>, Vec<u8>) {
    let n = client as u16;
    if is_v6(client) {
        let net = if client == LINK_LOCAL { 0xfe80 } else { 0xfd00 };
        let of = |n| Ipv6Addr::new(net, 0, 0, 0, 0, 0, 0, n).octets().to_vec();
        (of(0xffff), of(n))
    } else {
        let of = |n: u16| Ipv4Addr::new(10, 0, (n >> 8) as u8, n as u8).octets().to_vec();
        (of(200), of(n + 1000))
    }
}

fn pseudo(from: &[u8], to: &[u8], length: usize) -> u32 {
    sum(from) + sum(to) + 6 + length as u32
}

fn ip(seg: &Seg) -> Vec<u8> {
    let (vm, peer) = addresses(seg.client);
    let port = FIRST_PORT + seg.client as u16;
    let (from, to, ports) = match seg.from_vm {
        true => (vm, peer, [VM_PORT, port]),
        false => (peer, vm, [port, VM_PORT]),
    };
    let options = options(seg);
    let mut tcp = Vec::new();
    tcp.extend(ports[0].to_be_bytes());
    tcp.extend(ports[1].to_be_bytes());
    tcp.extend(seg.seq.to_be_bytes());
    tcp.extend(seg.ack.to_be_bytes());
    tcp.extend([((20 + options.len()) as u8 / 4) << 4, seg.flags]);
    tcp.extend(seg.window.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend(&options);
    tcp.extend(&seg.payload);
    let checksum = !fold(pseudo(&from, &to, tcp.len()) + sum(&tcp));
    tcp[16..18].copy_from_slice(&checksum.to_be_bytes());
    let mut out = Vec::new();
    if is_v6(seg.client) {
        out.extend([0x60, 0, 0, 0]);
        out.extend((tcp.len() as u16).to_be_bytes());
        out.extend([6, 64]);
        out.extend(from);
        out.extend(to);
    } else {
        out.extend([0x45, 0]);
        out.extend((20 + tcp.len() as u16).to_be_bytes());
        out.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        out.extend(from);
        out.extend(to);
        let checksum = !fold(sum(&out));
        out[10..12].copy_from_slice(&checksum.to_be_bytes());
    }
    out.extend(tcp);
    out
}

fn ether_type(client: usize) -> [u8; 2] {
    if is_v6(client) { [0x86, 0xdd] } else { [8, 0] }
}

/// The frame of `seg`.
pub fn write(seg: &Seg) -> Frame {
    let mut out = vec![if seg.from_vm { 2 } else { 4 }; 12];
    if let Some(id) = vlan(seg.client) {
        out.extend([0x81, 0]);
        out.extend(id.to_be_bytes());
    }
    out.extend(ether_type(seg.client));
    out.extend(ip(seg));
    Frame {
        nic: 0,
        bytes: out.into(),
    }
}

/// As a TUN gives it: behind an empty header.
pub fn write_tun(seg: &Seg) -> Frame {
    let mut out = vec![0; 12];
    out.extend(ether_type(seg.client));
    out.extend(ip(seg));
    Frame {
        nic: 0,
        bytes: out.into(),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads a frame; none if its checksum is wrong.
pub fn read(frame: &Frame) -> Option<Seg> {
    let bytes = &frame.bytes[..];
    let tagged = if u16_at(bytes, 12) == 0x8100 { 4 } else { 0 };
    read_ip(&bytes[14 + tagged..])
}

/// Reads an IP packet.
pub fn read_ip(bytes: &[u8]) -> Option<Seg> {
    let v6 = bytes[0] >> 4 == 6;
    let (tcp, addresses) = match v6 {
        true => (40, &bytes[8..40]),
        false => (20, &bytes[12..20]),
    };
    let (from, to) = addresses.split_at(addresses.len() / 2);
    let segment = &bytes[tcp..];
    if fold(pseudo(from, to, segment.len()) + sum(segment)) != 0xffff {
        return None;
    }
    let from_vm = u16_at(segment, 0) == VM_PORT;
    let port = u16_at(segment, if from_vm { 2 } else { 0 });
    let header = usize::from(segment[12] >> 4) * 4;
    let mut seg = Seg {
        from_vm,
        client: usize::from(port - FIRST_PORT),
        seq: u32_at(segment, 4),
        ack: u32_at(segment, 8),
        flags: segment[13],
        window: u16_at(segment, 14),
        payload: segment[header..].to_vec(),
        ..Seg::default()
    };
    let mut offer = Offer::default();
    let mut at = 20;
    while at < header && segment[at] != 0 {
        match segment[at] {
            1 => {
                at += 1;
                continue;
            }
            2 => offer.mss = u16_at(segment, at + 2),
            3 => offer.scale = Some(segment[at + 2]),
            4 => offer.sack = true,
            5 => {
                let blocks = usize::from(segment[at + 1]) / 8;
                let edge = |n| u32_at(segment, at + 2 + 4 * n);
                seg.sack = (0..blocks).map(|n| (edge(2 * n), edge(2 * n + 1))).collect();
            }
            8 => seg.ticks = Some((u32_at(segment, at + 2), u32_at(segment, at + 6))),
            _ => {}
        }
        at += usize::from(segment[at + 1]);
    }
    seg.offer = seg.has(SYN).then_some(offer);
    Some(seg)
}
