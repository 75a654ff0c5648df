//! Changes numbers inside a TCP segment (or an ICMP message) and mends its checksum.
//!
//! The checksum is mended by the difference (RFC 1624, equation 3), never computed anew: a segment that was damaged on
//! its way stays one that its receiver throws away.

use crate::agreed::Frame;
use crate::output::packet::{Segment, u16_at, u32_at};
use bytes::BytesMut;
use std::net::IpAddr;

/// A frame of which some numbers change. It is copied when the first one does.
pub(crate) struct Rewriter<'a> {
    frame: &'a Frame,
    /// Where what the checksum counts begins.
    start: usize,
    checksum: usize,
    copy: Option<BytesMut>,
    difference: u32,
    /// The device that sends it sums up the segment: its checksum is of the pseudo header only, which does not change.
    partial: bool,
}

impl<'a> Rewriter<'a> {
    /// The parser found a header to begin at `start`, and its checksum to be at `checksum`.
    pub(crate) fn new(frame: &'a Frame, start: usize, checksum: usize) -> Self {
        Self {
            frame,
            start,
            checksum,
            copy: None,
            difference: 0,
            partial: false,
        }
    }

    /// Of a frame whose checksum the device completes, if `partial`.
    pub(crate) fn partial(self, partial: bool) -> Self {
        Self { partial, ..self }
    }

    pub(crate) fn of(frame: &'a Frame, segment: &Segment) -> Self {
        Self::new(frame, segment.tcp, segment.tcp + 16)
    }

    /// Sets the number at `at`, which the parser found to be inside.
    pub(crate) fn set(&mut self, at: usize, number: u32) {
        let new = number.to_be_bytes();
        let old = self.number_at(at).to_be_bytes();
        if old == new {
            return;
        }
        for (n, (old, new)) in old.into_iter().zip(new).enumerate() {
            // An option may begin at an odd byte; the sum is over words that begin where the header does.
            let shift = if (at + n - self.start) % 2 == 0 { 8 } else { 0 };
            self.difference += (u32::from(new) << shift) + (0xffff - (u32::from(old) << shift));
        }
        let copy = self
            .copy
            .get_or_insert_with(|| BytesMut::from(&self.frame.bytes[..]));
        copy[at..at + 4].copy_from_slice(&new);
    }

    /// Sets the flags of the TCP header whose word with them is at `at`; the rest of that word stays.
    pub(crate) fn set_flags(&mut self, at: usize, flags: u8) {
        self.set(at, self.number_at(at) & 0xff00_ffff | u32::from(flags) << 16);
    }

    /// Sets one byte behind the third of the header.
    pub(crate) fn set_byte(&mut self, at: usize, byte: u8) {
        let at = at - 3;
        self.set(at, self.number_at(at) & 0xffff_ff00 | u32::from(byte));
    }

    /// Sets the low half of the number at `at`.
    pub(crate) fn set_low(&mut self, at: usize, number: u16) {
        self.set(at, self.number_at(at) & 0xffff_0000 | u32::from(number));
    }

    /// Takes `delta` from the number at `at`.
    pub(crate) fn lower(&mut self, at: usize, delta: u32) {
        self.set(at, self.number_at(at).wrapping_sub(delta));
    }

    fn number_at(&self, at: usize) -> u32 {
        let bytes = self.copy.as_deref().unwrap_or(&self.frame.bytes);
        u32_at(bytes, at).expect("the parser found it inside")
    }

    /// The frame with all that was set.
    pub(crate) fn finish(self) -> Frame {
        let Some(mut copy) = self.copy else {
            return self.frame.clone();
        };
        if !self.partial {
            let at = self.checksum;
            let old = u16_at(&copy, at).expect("a parsed header is whole");
            let new = !fold(u64::from(!old) + u64::from(self.difference));
            copy[at..at + 2].copy_from_slice(&new.to_be_bytes());
        }
        Frame {
            nic: self.frame.nic,
            bytes: copy.freeze(),
        }
    }
}

/// Whether the segment's checksum is right, so that the VM will believe what stands in it.
pub(crate) fn intact(frame: &Frame, segment: &Segment) -> bool {
    let bytes = &frame.bytes[segment.tcp..segment.payload.end];
    let address = |address: &IpAddr| match address {
        IpAddr::V4(v4) => sum(&v4.octets()),
        IpAddr::V6(v6) => sum(&v6.octets()),
    };
    let pseudo = address(&segment.key.vm) + address(&segment.key.peer) + u64::from(segment.key.protocol);
    fold(pseudo + bytes.len() as u64 + sum(bytes)) == 0xffff
}

/// The sum of the 16-bit words (RFC 1071), not yet folded. A last odd byte counts as the high half of a word.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    // Words of 32 bits give the same folded sum, in half the additions.
    let mut words = bytes.chunks_exact(4);
    let mut sum: u64 = words
        .by_ref()
        .map(|word| u64::from(u32::from_be_bytes(word.try_into().expect("four bytes"))))
        .sum();
    let mut rest = [0; 4];
    rest[..words.remainder().len()].copy_from_slice(words.remainder());
    sum += u64::from(u32::from_be_bytes(rest));
    sum
}

/// The sum in 16 bits.
pub(crate) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}
