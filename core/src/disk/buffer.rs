//! What it decides: which bytes of a disk are held in memory, and which must be read from below.
//!
//! GANNET keeps "two arrays, SectorPVM and SectorSVM" and "two bitmaps" (V). Here one ordered map of runs does both:
//! a run is there, or it is not. Runs are of any length, so a trim of a whole disk is one entry and a write that is
//! smaller than a sector needs no read of the rest.
//! Invariants: runs never overlap, are never empty, and [`Buffer::bytes`] counts what they pin.
//! Not here: which buffer is asked first (`io_switch`).

use bytes::Bytes;
use std::{collections::BTreeMap, ops::Range};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// What one run holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// Written bytes.
    Data(Bytes),
    /// This many zero bytes (a trim, or write-zeroes): no memory however long.
    Zero(u64),
}

impl Content {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Data(data) => data.len() as u64,
            Self::Zero(len) => *len,
        }
    }

    /// No bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn slice(&self, from: u64, to: u64) -> Self {
        match self {
            Self::Data(data) => Self::Data(data.slice(from as usize..to as usize)),
            Self::Zero(_) => Self::Zero(to - from),
        }
    }

    /// Writes bytes `from..from + out.len()` of this content into `out`.
    pub fn copy_to(&self, from: u64, out: &mut [u8]) {
        match self {
            Self::Data(data) => out.copy_from_slice(&data[from as usize..from as usize + out.len()]),
            Self::Zero(_) => out.fill(0),
        }
    }

    /// 128-bit hash of the bytes, whatever the form.
    #[must_use]
    pub fn hash(&self) -> u128 {
        match self {
            Self::Data(data) => xxh3_128(data),
            Self::Zero(len) => {
                let mut hash = Xxh3::new();
                let mut left = *len;
                while left > 0 {
                    let now = left.min(ZEROES.len() as u64);
                    hash.update(&ZEROES[..now as usize]);
                    left -= now;
                }
                hash.digest128()
            }
        }
    }

    /// The very same memory: nothing was written here since a snapshot was taken.
    fn is_same_memory(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Data(a), Self::Data(b)) => a.as_ptr() == b.as_ptr() && a.len() == b.len(),
            (Self::Zero(a), Self::Zero(b)) => a == b,
            _ => false,
        }
    }
}

static ZEROES: [u8; 4096] = [0; 4096];

#[derive(Clone, Debug)]
struct Run {
    content: Content,
    /// Bytes of the allocation that this run keeps alive; `content` may be a small slice of it.
    pinned: u64,
}

/// What a map entry costs beside its data, roughly.
const RUN_COST_BYTES: u64 = 96;

/// Bytes of a disk, by offset.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    runs: BTreeMap<u64, Run>,
    pinned: u64,
}

impl Buffer {
    /// Nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Memory that the buffer keeps, in bytes, book-keeping included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pinned + self.runs.len() as u64 * RUN_COST_BYTES
    }

    /// Number of runs.
    #[must_use]
    pub fn runs_len(&self) -> usize {
        self.runs.len()
    }

    /// Every run in ascending order: (offset, content).
    pub fn runs(&self) -> impl Iterator<Item = (u64, &Content)> {
        self.runs.iter().map(|(offset, run)| (*offset, &run.content))
    }

    /// Puts `content` at `offset` over whatever was there.
    pub fn put(&mut self, offset: u64, content: Content) {
        if content.is_empty() {
            return;
        }
        self.carve(offset..offset + content.len());
        let pinned = match &content {
            Content::Data(data) => data.len() as u64,
            Content::Zero(_) => 0,
        };
        self.pinned += pinned;
        self.runs.insert(offset, Run { content, pinned });
    }

    /// Forgets `range`; what sticks out on either side stays.
    pub fn carve(&mut self, range: Range<u64>) {
        while let Some((start, run)) = self
            .first_overlap(&range)
            .map(|(start, run)| (start, run.clone()))
        {
            self.runs.remove(&start);
            self.pinned -= run.pinned;
            let end = start + run.content.len();
            if start < range.start {
                self.keep_slice(start, &run, 0, range.start - start);
            }
            if end > range.end {
                self.keep_slice(range.end, &run, range.end - start, end - start);
            }
        }
    }

    /// Keeps a part of a run. The trap: a slice pins its whole allocation, so that one surviving sector could hold a
    /// megabyte. A slice of at most half is copied out, so memory is at most twice what is counted as data.
    fn keep_slice(&mut self, offset: u64, run: &Run, from: u64, to: u64) {
        let (content, pinned) = match run.content.slice(from, to) {
            Content::Data(data) if (data.len() as u64) * 2 <= run.pinned => {
                let pinned = data.len() as u64;
                (Content::Data(Bytes::copy_from_slice(&data)), pinned)
            }
            Content::Data(data) => (Content::Data(data), run.pinned),
            zero @ Content::Zero(_) => (zero, 0),
        };
        self.pinned += pinned;
        self.runs.insert(offset, Run { content, pinned });
    }

    fn first_overlap(&self, range: &Range<u64>) -> Option<(u64, &Run)> {
        if range.is_empty() {
            return None;
        }
        let before = self.runs.range(..=range.start).next_back();
        if let Some((start, run)) = before
            && start + run.content.len() > range.start
        {
            return Some((*start, run));
        }
        self.runs
            .range(range.start..range.end)
            .next()
            .map(|(start, run)| (*start, run))
    }

    /// The held parts of `range` in ascending order, cut to it.
    pub fn overlaps(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Content)> + '_ {
        let first = self.first_overlap(&range).map_or(range.end, |(start, _)| start);
        self.runs
            .range(first..range.end.max(first))
            .map(move |(start, run)| {
                let from = range.start.max(*start);
                let to = range.end.min(start + run.content.len());
                (from, run.content.slice(from - start, to - start))
            })
    }

    /// Fills from this buffer what `gaps` still lacks. `out` stands for the disk from `base` on; `gaps` are ascending
    /// disk ranges inside it, and keeps only what is not held here.
    pub fn overlay(&self, base: u64, out: &mut [u8], gaps: &mut Vec<Range<u64>>) {
        if self.runs.is_empty() {
            return;
        }
        let mut left = Vec::with_capacity(gaps.len());
        for gap in gaps.drain(..) {
            let mut at = gap.start;
            for (offset, content) in self.overlaps(gap.clone()) {
                if offset > at {
                    left.push(at..offset);
                }
                let to = (offset - base) as usize;
                content.copy_to(0, &mut out[to..to + content.len() as usize]);
                at = offset + content.len();
            }
            if at < gap.end {
                left.push(at..gap.end);
            }
        }
        *gaps = left;
    }

    /// The parts of `range` that are not held.
    #[must_use]
    pub fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut left = Vec::new();
        let mut at = range.start;
        for (offset, content) in self.overlaps(range.clone()) {
            if offset > at {
                left.push(at..offset);
            }
            at = offset + content.len();
        }
        if at < range.end {
            left.push(at..range.end);
        }
        left
    }

    /// Puts everything of `newer` over this one.
    pub fn merge(&mut self, newer: Self) {
        if self.runs.is_empty() {
            *self = newer;
            return;
        }
        for (offset, run) in newer.runs {
            self.carve(offset..offset + run.content.len());
            self.pinned += run.pinned;
            self.runs.insert(offset, run);
        }
    }

    /// Pieces that both buffers hold: (offset, ours, theirs), cut at multiples of `unit_bytes`, at most `max_bytes` of
    /// data in all, starting from offset `from`. "`DBitmap_inter = DBitmap_PVM & DBitmap_SVM`" (algorithm 1).
    #[must_use]
    pub fn intersection(&self, other: &Self, from: u64, unit_bytes: u64, max_bytes: u64) -> Vec<Shared> {
        let mut pieces = Vec::new();
        let mut total = 0;
        for (start, run) in self.runs.range(self.first_at_or_over(from)..) {
            let range = (*start).max(from)..start + run.content.len();
            if range.is_empty() {
                continue;
            }
            for (offset, theirs) in other.overlaps(range) {
                let both_zero = matches!((&run.content, &theirs), (Content::Zero(_), Content::Zero(_)));
                let mut at = offset;
                let end = offset + theirs.len();
                while at < end {
                    let cut = if both_zero {
                        end
                    } else {
                        ((at / unit_bytes + 1) * unit_bytes).min(end)
                    };
                    pieces.push(Shared {
                        offset: at,
                        ours: run.content.slice(at - start, cut - start),
                        theirs: theirs.slice(at - offset, cut - offset),
                    });
                    if !both_zero {
                        total += cut - at;
                    }
                    at = cut;
                    if total >= max_bytes {
                        return pieces;
                    }
                }
            }
        }
        pieces
    }

    fn first_at_or_over(&self, from: u64) -> u64 {
        self.first_overlap(&(from..u64::MAX))
            .map_or(from, |(start, _)| start)
    }

    /// Whether the piece is still the very memory that was seen before: nothing was written there since.
    #[must_use]
    pub fn holds_unchanged(&self, offset: u64, seen: &Content) -> bool {
        let range = offset..offset + seen.len();
        self.first_overlap(&range)
            .filter(|(start, run)| *start <= range.start && start + run.content.len() >= range.end)
            .is_some_and(|(start, run)| {
                run.content
                    .slice(offset - start, offset - start + seen.len())
                    .is_same_memory(seen)
            })
    }
}

/// A piece that two buffers hold at the same place.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Where on the disk.
    pub offset: u64,
    /// What the asked buffer holds there.
    pub ours: Content,
    /// What the other one holds there.
    pub theirs: Content,
}

impl Shared {
    /// "If the sector in the PVM buffer has the same hash value as the same-indexed sector in the SVM buffer" (V).
    #[must_use]
    pub fn is_equal(&self) -> bool {
        match (&self.ours, &self.theirs) {
            // Two trims may be as long as the disk: nothing is hashed for them.
            (Content::Zero(ours), Content::Zero(theirs)) => ours == theirs,
            (ours, theirs) => ours.len() == theirs.len() && ours.hash() == theirs.hash(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(len: usize, byte: u8) -> Content {
        Content::Data(Bytes::from(vec![byte; len]))
    }

    fn read(buffer: &Buffer, range: Range<u64>) -> Vec<u8> {
        let mut out = vec![b'.'; (range.end - range.start) as usize];
        let mut gaps = vec![range.clone()];
        buffer.overlay(range.start, &mut out, &mut gaps);
        out
    }

    #[test]
    fn a_later_write_splits_an_earlier_one() {
        let mut buffer = Buffer::default();
        buffer.put(2, data(6, b'a'));
        buffer.put(4, data(2, b'b'));
        assert_eq!(read(&buffer, 0..10), b"..aabbaa..");
        buffer.put(0, Content::Zero(3));
        assert_eq!(read(&buffer, 0..10), b"\0\0\0abbaa..");
        buffer.carve(3..7);
        assert_eq!(read(&buffer, 0..10), b"\0\0\0....a..");
        assert_eq!(buffer.missing(0..10), vec![3..7, 8..10]);
    }

    #[test]
    fn a_small_rest_does_not_pin_a_large_write() {
        let mut buffer = Buffer::default();
        buffer.put(0, data(1 << 20, 1));
        buffer.carve(512..1 << 20);
        assert!(buffer.bytes() < 1024, "{} bytes pinned", buffer.bytes());
        buffer.carve(0..512);
        assert_eq!(buffer.bytes(), 0);
    }

    #[test]
    fn a_trim_of_a_large_disk_costs_one_entry() {
        let mut buffer = Buffer::default();
        buffer.put(0, Content::Zero(1 << 44));
        buffer.put(1 << 30, data(4096, 7));
        assert_eq!(buffer.runs_len(), 3);
        assert!(buffer.bytes() < 8192);
    }

    #[test]
    fn pieces_are_equal_by_their_bytes_whatever_the_form() {
        let pair = |ours: Content, theirs: Content| {
            let piece = Shared {
                offset: 0,
                ours,
                theirs,
            };
            piece.is_equal()
        };
        assert!(pair(data(4096, 1), data(4096, 1)));
        assert!(pair(data(5000, 0), Content::Zero(5000)));
        assert!(pair(Content::Zero(1 << 60), Content::Zero(1 << 60)));
        assert!(!pair(data(4096, 0), Content::Zero(4095)));
        assert!(!pair(Content::Zero(512), data(512, 1)));
        let mut last = vec![1; 4096];
        last[4095] = 2;
        assert!(!pair(data(4096, 1), Content::Data(Bytes::from(last))));
    }

    #[test]
    fn a_piece_that_was_rewritten_is_told_from_an_old_one() {
        let mut buffer = Buffer::default();
        buffer.put(0, data(12288, 1));
        let pieces = buffer.intersection(&buffer.clone(), 0, 4096, u64::MAX);
        assert_eq!(pieces.len(), 3);
        buffer.put(8192, data(4096, 1));
        assert!(buffer.holds_unchanged(0, &pieces[0].ours));
        assert!(!buffer.holds_unchanged(8192, &pieces[2].ours));
    }
}
