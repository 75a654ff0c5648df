//! Segmentation offload: TCP segments that a card or a TAP hands over as one large frame, with a header that says how to cut it.
//!
//! Decides:    how a large frame is cut ([`segment`]), and which frames one large frame may stand for ([`merge`]).
//! Flow:       the VM's card or the TAP -> [`segment::segments`] -> agreement, comparison, release -> [`merge::Run`] -> the TAP or the VM's card.
//! Invariants: 1. what is agreed on, compared and held are segments as they are on a wire: nothing in between knows of large frames, so that hosts need not
//!             cut alike; 2. what was merged is cut into the same bytes again; 3. a segment whose checksum is wrong is never merged: it would become right.
//! Source:     virtio 1.1, 5.1.6.2 and 5.1.6.4 (the header, by a TAP too: linux/virtio_net.h); Linux Documentation/networking/segmentation-offloads.rst,
//!             net/ipv4/tcp_offload.c (what may be merged).
//! Not here:   who offers what to a guest or to the kernel (`guest/src/frames`).

pub mod merge;
pub mod segment;

use std::ops::Range;

use crate::output::packet::{self, Parsed};
use crate::output::rewriter::rewrite::{fold, sum};

/// The header's flag "the checksum is only that of the pseudo header".
const NEEDS_CSUM: u8 = 1;
/// `gso_type`: TCP over IPv4, over IPv6; and that the congestion window was reduced, so that only the first segment says so.
const TCP_V4: u8 = 1;
const TCP_V6: u8 = 4;
const ECN: u8 = 0x80;

/// Where TCP's checksum lies in its header.
const TCP_CHECKSUM: usize = 16;
/// So many segments are put together into one frame, and kept for that: 64 KiB at the smallest segment size that most hosts use (512 bytes).
pub const MOST_SEGMENTS: usize = 128;
/// More segments than this are cut from no frame: 64 KiB at the smallest segment size that Linux uses (48 bytes).
pub const MOST_CUT: usize = 1366;
/// Ethernet with two VLAN tags, IP and TCP with all options. IPv6 may have more before TCP; nobody sends it so in large frames, and a frame that repeated it
/// in each segment would make more of itself than a batch has room for.
pub const MOST_HEADERS_BYTES: usize = 22 + 60 + 60;
/// IP counts its bytes by 16 bits.
const MOST_IP_BYTES: usize = 65_535;

/// What a frame leaves to the device: the first ten bytes of a virtio-net header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload {
    /// The checksum is only that of the pseudo header.
    pub needs_csum: bool,
    /// virtio's `gso_type`, as it came; 0 where nothing is to be cut.
    pub gso_type: u8,
    /// All headers' length: a hint.
    pub hdr_len: u16,
    /// The payload of each segment but the last.
    pub gso_size: u16,
    /// Where the checksum begins to count.
    pub csum_start: u16,
    /// Where it stands, from there.
    pub csum_offset: u16,
}

impl Offload {
    /// How long the header before a frame is.
    pub const BYTES: usize = 10;

    /// How many frames a VM's own would have been that a device makes of one of so many bytes, about.
    #[must_use]
    pub fn frames_of(self, frame_bytes: usize) -> u64 {
        match self.gso_size {
            0 => 1,
            size => (frame_bytes as u64).div_ceil(u64::from(size)).max(1),
        }
    }

    /// Reads a header, as x86 orders its bytes.
    #[must_use]
    pub fn read(header: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        Self {
            needs_csum: header[0] & NEEDS_CSUM != 0,
            gso_type: header[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// The header as a device takes it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = if self.needs_csum { NEEDS_CSUM } else { 0 };
        bytes[1] = self.gso_type;
        let words = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset];
        for (place, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// Where the headers of a frame with a TCP segment lie. Nothing follows the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Headers {
    is_v4: bool,
    ip: usize,
    tcp: usize,
    payload: usize,
}

impl Headers {
    fn of(frame: &[u8]) -> Option<Self> {
        let Parsed::Tcp(segment) = packet::parse_bytes(frame) else {
            return None;
        };
        let (ip, is_v4) = packet::ip_at(frame)?;
        // Ethernet's padding is none of the segment's.
        (segment.payload.end == frame.len()).then_some(Self {
            is_v4,
            ip,
            tcp: segment.tcp,
            payload: segment.payload.start,
        })
    }

    /// The addresses, which the checksum counts.
    fn addresses(&self) -> Range<usize> {
        match self.is_v4 {
            true => self.ip + 12..self.ip + 20,
            false => self.ip + 8..self.ip + 40,
        }
    }

    /// The sum of what TCP's checksum counts before the segment itself: addresses, protocol, and how long the segment is.
    fn pseudo_sum(&self, frame: &[u8], segment_bytes: usize) -> u64 {
        sum(&frame[self.addresses()]) + u64::from(packet::TCP) + segment_bytes as u64
    }

    /// Says in IP's header how many bytes follow `self.tcp`, and sums that header.
    fn set_length(&self, frame: &mut [u8], segment_bytes: usize) {
        if self.is_v4 {
            let header_bytes = self.tcp - self.ip;
            set(frame, self.ip + 2, (header_bytes + segment_bytes) as u16);
            set(frame, self.ip + 10, 0);
            let sum = sum(&frame[self.ip..self.tcp]);
            set(frame, self.ip + 10, !fold(sum));
        } else {
            // What lies between IP's header and TCP's counts.
            set(
                frame,
                self.ip + 4,
                (self.tcp - self.ip - 40 + segment_bytes) as u16,
            );
        }
    }
}

fn set(bytes: &mut [u8], at: usize, word: u16) {
    bytes[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

#[cfg(test)]
mod tests;
