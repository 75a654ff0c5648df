//! The bytes that a copy of a program has said on a connection and that were not judged yet (`program::outputs`), and the order of
//! sequence numbers. Of VMs see `pieces`.
//!
//! Invariant 1: the bytes are one piece, without gaps; positions are sequence numbers.

use bytes::Bytes;
use std::cmp::Ordering;
use std::collections::VecDeque;

/// Whether sequence number `a` is after `b`.
#[must_use]
pub fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// The later of two sequence numbers.
#[must_use]
pub fn later(a: u32, b: u32) -> u32 {
    if after(a, b) { a } else { b }
}

/// A piece of a byte stream.
#[derive(Debug, Default)]
pub struct Said {
    from: u32,
    chunks: VecDeque<Bytes>,
    bytes: usize,
    begun: bool,
}

impl Said {
    /// The position after the last byte; none before the first word.
    #[must_use]
    pub fn end(&self) -> Option<u32> {
        self.begun.then(|| self.from.wrapping_add(self.bytes as u32))
    }

    /// How many bytes are kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The copy said `payload` at `seq`. What it repeats is what it said before.
    pub fn add(&mut self, seq: u32, payload: &Bytes) {
        let end = seq.wrapping_add(payload.len() as u32);
        let Some(said_to) = self.end() else {
            return self.start(seq, payload);
        };
        if after(seq, said_to) {
            // Words in between never came here. Only one piece can be kept: the newest.
            return self.start(seq, payload);
        }
        if after(self.from, seq) && !after(self.from, end) {
            // An older part, up to what is there.
            let older = self.from.wrapping_sub(seq) as usize;
            self.chunks.push_front(payload.slice(..older));
            self.bytes += older;
            self.from = seq;
        }
        if after(end, said_to) {
            let known = said_to.wrapping_sub(seq) as usize;
            self.chunks.push_back(payload.slice(known..));
            self.bytes += payload.len() - known;
        }
    }

    fn start(&mut self, seq: u32, payload: &Bytes) {
        self.from = seq;
        self.begun = true;
        self.chunks.clear();
        self.chunks.push_back(payload.clone());
        self.bytes = payload.len();
    }

    /// Forgets what lies before `seq`.
    pub fn forget_before(&mut self, seq: u32) {
        while self.begun && after(seq, self.from) {
            let Some(first) = self.chunks.front_mut() else {
                // All of it was said: the next word continues there.
                self.from = seq;
                return;
            };
            let old = (seq.wrapping_sub(self.from) as usize).min(first.len());
            self.bytes -= old;
            self.from = self.from.wrapping_add(old as u32);
            if old == first.len() {
                self.chunks.pop_front();
            } else {
                *first = first.slice(old..);
            }
        }
    }

    /// The bytes from `seq` on, `most` of them at most: fewer where fewer were said or are still kept.
    #[must_use]
    pub fn bytes_from(&self, seq: u32, most: usize) -> Bytes {
        if !self.begun || after(self.from, seq) {
            return Bytes::new();
        }
        let mut skip = seq.wrapping_sub(self.from) as usize;
        let mut found = Vec::new();
        for chunk in &self.chunks {
            let part = &chunk[skip.min(chunk.len())..];
            skip = skip.saturating_sub(chunk.len());
            found.extend_from_slice(&part[..part.len().min(most - found.len())]);
        }
        found.into()
    }

    /// How `payload` at `seq` stands to what was said: `Equal` where all of it was said, `Less` where it is equal as
    /// far as it was said (so it may yet be), `Greater` where it differs.
    #[must_use]
    pub fn compare(&self, seq: u32, payload: &[u8]) -> Ordering {
        if payload.is_empty() {
            return Ordering::Equal;
        }
        if !self.begun || after(self.from, seq) {
            return Ordering::Less;
        }
        let mut skip = seq.wrapping_sub(self.from) as usize;
        let mut rest = payload;
        for chunk in &self.chunks {
            if skip >= chunk.len() {
                skip -= chunk.len();
                continue;
            }
            let said = &chunk[skip..];
            skip = 0;
            let both = said.len().min(rest.len());
            if said[..both] != rest[..both] {
                return Ordering::Greater;
            }
            rest = &rest[both..];
            if rest.is_empty() {
                return Ordering::Equal;
            }
        }
        Ordering::Less
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn said(parts: &[(u32, &'static [u8])]) -> Said {
        let mut said = Said::default();
        for (seq, bytes) in parts {
            said.add(*seq, &Bytes::from_static(bytes));
        }
        said
    }

    #[test]
    fn repeated_and_overlapping_words_make_one_piece() {
        let said = said(&[(10, b"abc"), (11, b"bcd"), (10, b"ab"), (8, b"yzab")]);
        assert_eq!(said.end(), Some(14));
        assert_eq!(said.compare(8, b"yzabcd"), Ordering::Equal);
        assert_eq!(said.compare(12, b"cde"), Ordering::Less);
        assert_eq!(said.compare(12, b"cxe"), Ordering::Greater);
        assert_eq!(said.compare(7, b"x"), Ordering::Less);
    }

    #[test]
    fn a_gap_leaves_the_newest_piece() {
        let said = said(&[(10, b"abc"), (20, b"x")]);
        assert_eq!(said.compare(10, b"abc"), Ordering::Less);
        assert_eq!(said.compare(20, b"x"), Ordering::Equal);
    }

    proptest! {
        /// Any segmentation of the same stream, from any number on, is the same stream.
        #[test]
        fn segmentation_does_not_matter(
            isn in any::<u32>(),
            cuts in prop::collection::vec((0_usize..200, 1_usize..60), 1..30),
            forget in 0_usize..100,
        ) {
            let stream: Bytes = (0..300_u32).map(|n| (n * 7 % 251) as u8).collect::<Vec<_>>().into();
            let mut said = Said::default();
            let mut to = 0;
            for (back, len) in cuts {
                let from = to - back.min(to);
                let end = (from + len).min(stream.len());
                said.add(isn.wrapping_add(from as u32), &stream.slice(from..end));
                to = to.max(end);
            }
            prop_assert_eq!(said.end(), Some(isn.wrapping_add(to as u32)));
            let forget = forget.min(to);
            said.forget_before(isn.wrapping_add(forget as u32));
            prop_assert_eq!(said.compare(isn.wrapping_add(forget as u32), &stream[forget..to]), Ordering::Equal);
            prop_assert_eq!(said.bytes_from(isn.wrapping_add(forget as u32), 40), &stream[forget..to.min(forget + 40)]);
            prop_assert_eq!(said.bytes(), to - forget);
            if to < stream.len() {
                prop_assert_eq!(said.compare(isn.wrapping_add(forget as u32), &stream[forget..]), Ordering::Less);
            }
        }
    }
}
