//! Segments of our own: fabricated acknowledgements, probes and resets, written from nothing.
//!
//! Flow: what the other files of this room decide becomes bytes here.
//! Invariants: 1. a segment has no payload, so that its cost is bounded whoever asks for it. 2. its checksums are right.
//! Source: RFC 791, 8200, 9293, 7323, 2018, 1071. Not here: changes to segments of others (`output::rewriter::rewrite`).

use super::Flow;
use super::carriage::Carriage;
use super::types::Link;
use crate::agreed::Frame;
use crate::output::packet::{ACK, TCP};
use std::net::{IpAddr, SocketAddr};

/// TCP's flag "the sender has heard of congestion" (RFC 3168).
pub(super) const ECE: u8 = 0x40;

/// A segment without payload.
#[derive(Clone, Debug, Default)]
pub(super) struct Bare {
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    /// As it stands in the header.
    pub(super) window: u16,
    /// TSval and TSecr.
    pub(super) stamps: Option<(u32, u32)>,
    /// Pairs of edges, as they stand in the option.
    pub(super) sack: Vec<u8>,
}

impl Bare {
    pub(super) fn acknowledgement(seq: u32, ack: u32, window: u16) -> Self {
        Self {
            seq,
            ack,
            flags: ACK,
            window,
            ..Self::default()
        }
    }

    fn tcp(&self, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
        let mut out = Vec::with_capacity(60);
        out.extend(from.port().to_be_bytes());
        out.extend(to.port().to_be_bytes());
        out.extend(self.seq.to_be_bytes());
        out.extend(self.ack.to_be_bytes());
        out.extend([0, self.flags]);
        out.extend(self.window.to_be_bytes());
        out.extend([0; 4]);
        if let Some((value, echo)) = self.stamps {
            out.extend([1, 1, 8, 10]);
            out.extend(value.to_be_bytes());
            out.extend(echo.to_be_bytes());
        }
        // Three blocks and timestamps fill the 40 bytes that there are.
        let most = if self.stamps.is_some() { 24 } else { 32 };
        let sack = &self.sack[..self.sack.len().min(most) / 8 * 8];
        if !sack.is_empty() {
            out.extend([1, 1, 5, 2 + sack.len() as u8]);
            out.extend(sack);
        }
        out[12] = (out.len() as u8 / 4) << 4;
        let sum = fold(sum_of(from.ip()) + sum_of(to.ip()) + u64::from(TCP) + out.len() as u64 + sum(&out));
        out[16..18].copy_from_slice(&(!sum).to_be_bytes());
        out
    }

    /// The IP packet.
    pub(super) fn packet(&self, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
        let tcp = self.tcp(from, to);
        let mut out = Vec::with_capacity(40 + tcp.len());
        match (from.ip(), to.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                out.extend([0x45, 0]);
                out.extend((20 + tcp.len() as u16).to_be_bytes());
                out.extend([0, 0, 0x40, 0, 64, TCP, 0, 0]);
                out.extend(source.octets());
                out.extend(destination.octets());
                let sum = !fold(sum(&out));
                out[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            (source, destination) => {
                out.extend([0x60, 0, 0, 0]);
                out.extend((tcp.len() as u16).to_be_bytes());
                out.extend([TCP, 64]);
                out.extend(v6(source));
                out.extend(v6(destination));
            }
        }
        out.extend(tcp);
        out
    }

    /// The Ethernet frame that the peer is to get.
    pub(super) fn to_peer(&self, nic: u8, link: &Link, carriage: Carriage, flow: &Flow) -> Frame {
        let mut packet = self.packet(flow.vm, flow.peer);
        carriage.put(&mut packet);
        let bytes = [&link.to_peer[..], &packet].concat();
        Frame {
            nic,
            bytes: bytes.into(),
        }
    }

    /// The Ethernet frame that the VM is to get.
    pub(super) fn to_vm(&self, nic: u8, link: &Link, flow: &Flow) -> Frame {
        let bytes = [&link.to_vm[..], &self.packet(flow.peer, flow.vm)].concat();
        Frame {
            nic,
            bytes: bytes.into(),
        }
    }
}

fn v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn sum_of(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(v4) => sum(&v4.octets()),
        IpAddr::V6(v6) => sum(&v6.octets()),
    }
}

fn sum(bytes: &[u8]) -> u64 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
    bytes.chunks(2).map(word).sum()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

/// Where IP begins in an Ethernet frame, whose tags the parser understood.
pub(super) fn ip_at(bytes: &[u8]) -> usize {
    let mut at = 12;
    while at < 20 && matches!(bytes.get(at..at + 2), Some([0x81, 0] | [0x88, 0xa8] | [0x91, 0])) {
        at += 4;
    }
    (at + 2).min(bytes.len())
}
