//! Pieces of a byte stream: what the backup has said on a connection and the primary has not been let say yet; what a program's copy has said
//! and is not judged yet.
//!
//! Positions are sequence numbers of one stream (the primary's, where the backup's are compared). There may be gaps: the backup repeats what a client has not got, and its VM,
//! too, may lose something on its way out.
//!
//! Invariants: 1. the pieces are in order, within [`FAR`], and do not overlap; what the backup repeats is what it said before. 2. (memory) what they
//! take is known ([`Pieces::cost`]): a guest may say a byte here and a byte there.

use super::numbers::after;
use super::told::FAR;
use bytes::Bytes;
use std::cmp::Ordering;
use std::collections::VecDeque;

/// What a piece takes besides its bytes: its place here, and the rest of its frame, which is kept with it.
const PIECE_COST_BYTES: usize = 128;
/// More pieces than these are nothing that anybody is about to say, and one that comes between the others moves up to half of them.
pub(super) const MOST_PIECES: usize = 16_384;

/// Pieces of a byte stream.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pieces: VecDeque<Piece>,
    bytes: usize,
}

#[derive(Debug)]
struct Piece {
    from: u32,
    bytes: Bytes,
}

impl Piece {
    fn end(&self) -> u32 {
        self.from.wrapping_add(self.bytes.len() as u32)
    }
}

impl Pieces {
    /// How many bytes are kept.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it takes to keep them (invariant 2).
    pub(super) fn cost(&self) -> usize {
        self.bytes + self.pieces.len() * PIECE_COST_BYTES
    }

    /// Whether they are more than [`MOST_PIECES`].
    pub(super) fn are_too_many(&self) -> bool {
        self.pieces.len() > MOST_PIECES
    }

    /// The position after the last byte that is kept.
    pub(crate) fn end(&self) -> Option<u32> {
        self.pieces.back().map(Piece::end)
    }

    /// The backup said `payload` at `seq`.
    pub(crate) fn add(&mut self, seq: u32, payload: &Bytes) {
        if self.is_far(seq) {
            // Whatever is that far from it is of no use, and has no order with it.
            *self = Self::default();
        }
        let (mut at, mut next) = (0, self.first_behind(seq));
        while at < payload.len() {
            let place = seq.wrapping_add(at as u32);
            let mut until = payload.len();
            if let Some(known) = self.pieces.get(next) {
                if !after(known.from, place) {
                    at = known.end().wrapping_sub(seq) as usize;
                    next += 1;
                    continue;
                }
                until = until.min(known.from.wrapping_sub(seq) as usize);
            }
            let bytes = payload.slice(at..until);
            self.bytes += bytes.len();
            self.pieces.insert(next, Piece { from: place, bytes });
            at = until;
            next += 1;
        }
    }

    /// Forgets what lies between `from` and `to`.
    pub(crate) fn forget(&mut self, from: u32, to: u32) {
        let at = self.first_behind(from);
        while let Some(piece) = self.pieces.get(at)
            && after(to, piece.from)
        {
            let (start, bytes) = (piece.from, piece.bytes.clone());
            self.pieces.remove(at);
            let before = (from.wrapping_sub(start) as usize).min(bytes.len());
            let before = if after(from, start) { before } else { 0 };
            let behind = (to.wrapping_sub(start) as usize).min(bytes.len());
            self.bytes -= behind - before;
            if behind < bytes.len() {
                let from = start.wrapping_add(behind as u32);
                let bytes = bytes.slice(behind..);
                self.pieces.insert(at, Piece { from, bytes });
            }
            if before > 0 {
                let (from, bytes) = (start, bytes.slice(..before));
                self.pieces.insert(at, Piece { from, bytes });
                return self.forget(start.wrapping_add(before as u32), to);
            }
        }
    }

    /// Forgets what is so far before `seq` that nobody asks for it.
    pub(crate) fn forget_far_before(&mut self, seq: u32) {
        let far = seq.wrapping_sub(FAR);
        while let Some(first) = self.pieces.front()
            && after(far, first.end())
        {
            self.bytes -= first.bytes.len();
            self.pieces.pop_front();
        }
    }

    /// The bytes from `seq` on, `most` of them at most: fewer where fewer were said or are still kept.
    pub(crate) fn bytes_from(&self, seq: u32, most: usize) -> Bytes {
        let mut found = Vec::new();
        for part in self.parts(seq) {
            found.extend_from_slice(&part[..part.len().min(most - found.len())]);
            if found.len() == most {
                break;
            }
        }
        found.into()
    }

    /// How `payload` at `seq` stands to what was said: `Equal` where all of it was said, `Less` where it is equal as
    /// far as it was said (so it may yet be), `Greater` where it differs.
    pub(crate) fn compare(&self, seq: u32, payload: &[u8]) -> Ordering {
        let mut rest = payload;
        let mut parts = self.parts(seq);
        while !rest.is_empty() {
            let Some(said) = parts.next() else {
                return Ordering::Less;
            };
            let both = said.len().min(rest.len());
            if said[..both] != rest[..both] {
                return Ordering::Greater;
            }
            rest = &rest[both..];
        }
        Ordering::Equal
    }

    /// What was said from `seq` on, up to the first gap.
    fn parts(&self, seq: u32) -> impl Iterator<Item = &[u8]> {
        let mut at = seq;
        let pieces = self.pieces.range(self.first_behind(seq)..);
        pieces.map_while(move |piece| {
            let known = at.wrapping_sub(piece.from) as usize;
            at = piece.end();
            piece.bytes.get(known..)
        })
    }

    /// Whether it is so far from some piece that it has no order with all of them.
    fn is_far(&self, seq: u32) -> bool {
        let is_far = |piece: &Piece| {
            let away = seq.wrapping_sub(piece.from);
            away > FAR && away.wrapping_neg() > FAR
        };
        self.pieces.front().is_some_and(is_far) || self.pieces.back().is_some_and(is_far)
    }

    /// The first piece that ends behind `seq`.
    fn first_behind(&self, seq: u32) -> usize {
        if self.is_far(seq) {
            return self.pieces.len();
        }
        self.pieces.partition_point(|piece| !after(piece.end(), seq))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn said(parts: &[(u32, &'static [u8])]) -> Pieces {
        let mut said = Pieces::default();
        for (seq, bytes) in parts {
            said.add(*seq, &Bytes::from_static(bytes));
        }
        said
    }

    #[test]
    fn repeated_and_overlapping_words_make_one_piece() {
        let said = said(&[(10, b"abc"), (11, b"bcd"), (10, b"ab"), (8, b"yzab")]);
        assert_eq!((said.end(), said.bytes()), (Some(14), 6));
        assert_eq!(said.compare(8, b"yzabcd"), Ordering::Equal);
        assert_eq!(said.compare(12, b"cde"), Ordering::Less);
        assert_eq!(said.compare(12, b"cxe"), Ordering::Greater);
        assert_eq!(said.compare(7, b"x"), Ordering::Less);
    }

    #[test]
    fn what_lies_in_a_gap_was_not_said() {
        let mut said = said(&[(20, b"xyz"), (10, b"abc")]);
        assert_eq!(said.compare(10, b"abc"), Ordering::Equal);
        assert_eq!(said.compare(10, b"abcd"), Ordering::Less);
        assert_eq!(said.compare(13, b"x"), Ordering::Less);
        assert_eq!(said.compare(20, b"xyz"), Ordering::Equal);
        said.forget(11, 22);
        assert_eq!(said.bytes_from(10, 5), "a");
        assert_eq!(said.bytes_from(22, 5), "z");
        assert_eq!((said.end(), said.bytes()), (Some(23), 2));
    }

    #[test]
    fn what_is_half_a_circle_away_is_forgotten() {
        let mut said = said(&[(10, b"abc"), (1 << 31, b"x")]);
        assert_eq!((said.end(), said.bytes()), (Some((1 << 31) + 1), 1));
        said.add(FAR * 3, &Bytes::from_static(b"yz"));
        assert_eq!(said.bytes(), 3);
        said.forget_far_before((1 << 31) + 100 + FAR);
        assert_eq!((said.end(), said.bytes()), (Some(FAR * 3 + 2), 2));
    }

    proptest! {
        /// A VM may say anything: no numbers make it fall, or lose count.
        #[test]
        fn any_numbers_are_survived(steps in prop::collection::vec((any::<bool>(), any::<u32>(), 1_usize..60), 1..60)) {
            let mut said = Pieces::default();
            for (adds, from, length) in steps {
                if adds {
                    said.add(from, &vec![1; length].into());
                    prop_assert_eq!(said.compare(from, &vec![1; length]), Ordering::Equal);
                } else {
                    said.forget(from, from.wrapping_add(length as u32));
                    said.forget_far_before(from);
                }
                let kept: usize = said.pieces.iter().map(|piece| piece.bytes.len()).sum();
                prop_assert_eq!(said.bytes(), kept);
            }
        }

        /// Any segmentation of the same stream, from any number on, is the same stream but for what is not there.
        #[test]
        fn segmentation_does_not_matter(
            isn in any::<u32>(),
            steps in prop::collection::vec((any::<bool>(), 0_usize..250, 1_usize..60), 1..40),
        ) {
            let stream: Bytes = (0..310_u32).map(|n| (n * 7 % 251) as u8).collect::<Vec<_>>().into();
            let mut said = Pieces::default();
            let mut there = [false; 310];
            for (adds, from, length) in steps {
                let at = isn.wrapping_add(from as u32);
                if adds {
                    said.add(at, &stream.slice(from..from + length));
                } else {
                    said.forget(at, at.wrapping_add(length as u32));
                }
                there[from..from + length].fill(adds);
                prop_assert_eq!(said.bytes(), there.iter().filter(|byte| **byte).count());
                for from in 0..there.len() {
                    let at = isn.wrapping_add(from as u32);
                    let length = there[from..].iter().take_while(|byte| **byte).count();
                    let to = from + length;
                    prop_assert_eq!(said.bytes_from(at, 400), &stream[from..to]);
                    prop_assert_eq!(said.compare(at, &stream[from..to]), Ordering::Equal);
                    if to < stream.len() {
                        prop_assert_eq!(said.compare(at, &stream[from..=to]), Ordering::Less);
                    }
                }
            }
        }
    }
}
