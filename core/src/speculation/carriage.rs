//! What a packet asks of the network: its mark (DSCP) and how far it may go (TTL). A shadow socket's packets have those of the VM's last one.
//!
//! Invariants: 1. ECN's two bits are each sender's own. 2. IPv4's checksum is right afterwards.
//! Source: RFC 791, 2474, 3168, 8200. Not here: a TTL of 255, which says something to the other end (`handshake.rs`).

use crate::output::rewriter::rewrite::{fold, sum};

/// The bits of IPv4's TOS, or of IPv6's traffic class, that are the DSCP.
const DSCP: u8 = 0xfc;

/// A packet that is to go less far only asks how far that is, as some tools do in the midst of a connection.
const LEAST_TTL: u8 = 32;

/// What the VM's packets ask of the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Carriage {
    /// In its place, without ECN.
    dscp: u8,
    /// The TTL or the hop limit.
    ttl: u8,
}

impl Default for Carriage {
    fn default() -> Self {
        Self { dscp: 0, ttl: 64 }
    }
}

impl Carriage {
    /// Of `packet`, in which the parser has found IP.
    pub(super) fn of(packet: &[u8]) -> Self {
        let Some(header) = packet.first_chunk::<20>() else {
            return Self::default();
        };
        let (class, ttl) = match header[0] >> 4 {
            4 => (header[1], header[8]),
            _ => (header[0] << 4 | header[1] >> 4, header[7]),
        };
        Self {
            dscp: class & DSCP,
            ttl: ttl.max(LEAST_TTL),
        }
    }

    /// Whether the other end may take nothing that has come from further away (RFC 5082).
    pub(super) fn is_for_neighbours(self) -> bool {
        self.ttl == u8::MAX
    }

    /// Asks the same for `packet`, which is one of ours.
    pub(super) fn put(self, packet: &mut [u8]) {
        let Some(first) = packet.first().copied() else {
            return;
        };
        let length = usize::from(first & 0xf) * 4;
        match first >> 4 {
            4 if (20..=packet.len()).contains(&length) => {
                let header = &mut packet[..length];
                header[1] = self.dscp | header[1] & !DSCP;
                header[8] = self.ttl;
                header[10..12].fill(0);
                let checksum = !fold(sum(header));
                header[10..12].copy_from_slice(&checksum.to_be_bytes());
            }
            6 if packet.len() >= 40 => {
                let class = self.dscp | (packet[0] << 4 | packet[1] >> 4) & !DSCP;
                packet[0] = 0x60 | class >> 4;
                packet[1] = class << 4 | packet[1] & 0xf;
                packet[7] = self.ttl;
            }
            _ => {}
        }
    }
}
