//! What it decides: which parts of the disk a peer may lack.
//!
//! A primary notes every write here. While a backup is there, a note is dropped when the backup has committed the sync
//! that covers it; while no backup is there, notes gather, and a returned peer gets only these extents.
//! Invariant: [`EpochExtents::needed`] is never less than what differs from the last commit that the peer told of
//! (more is allowed: it costs bandwidth, not correctness).
//! Not here: the file that keeps the set over a crash (`guest::disk::dirty_map`).

use crate::units::Epoch;
use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
};

/// One bit per this many bytes of disk.
pub const EXTENT_BYTES: u64 = 1 << 20;

/// A set of extents by number.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExtentSet {
    bits: BTreeSet<u64>,
}

/// The extents that a byte range touches.
#[must_use]
pub fn extents_of(range: &Range<u64>) -> Range<u64> {
    if range.is_empty() {
        return 0..0;
    }
    range.start / EXTENT_BYTES..range.end.div_ceil(EXTENT_BYTES)
}

impl ExtentSet {
    /// Every extent of a disk of `size_bytes`.
    #[must_use]
    pub fn whole(size_bytes: u64) -> Self {
        Self {
            bits: extents_of(&(0..size_bytes)).collect(),
        }
    }

    /// Adds every extent that `range` (bytes) touches.
    pub fn add(&mut self, range: &Range<u64>) {
        self.bits.extend(extents_of(range));
    }

    /// Adds one extent by number.
    pub fn insert(&mut self, extent: u64) {
        self.bits.insert(extent);
    }

    /// Removes one extent; says whether it was there.
    pub fn remove(&mut self, extent: u64) -> bool {
        self.bits.remove(&extent)
    }

    /// Those that are not below `from`, ascending.
    pub fn iter_from(&self, from: u64) -> impl Iterator<Item = u64> + '_ {
        self.bits.range(from..).copied()
    }

    /// Every extent that `range` (bytes) touches is in the set.
    #[must_use]
    pub fn covers(&self, range: &Range<u64>) -> bool {
        extents_of(range).all(|extent| self.bits.contains(&extent))
    }

    /// Adds all of `other`.
    pub fn union(&mut self, other: &Self) {
        self.bits.extend(&other.bits);
    }

    /// The extents that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        Self {
            bits: self.bits.difference(&other.bits).copied().collect(),
        }
    }

    /// Number of extents.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bits.len() as u64
    }

    /// No extents.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bits.is_empty()
    }

    /// Ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.bits.iter().copied()
    }
}

impl FromIterator<u64> for ExtentSet {
    fn from_iter<I: IntoIterator<Item = u64>>(extents: I) -> Self {
        Self {
            bits: extents.into_iter().collect(),
        }
    }
}

/// What the peer may lack, by the sync that will bring it.
#[derive(Clone, Debug, Default)]
pub struct EpochExtents {
    /// Older than any open mark: gathered while alone, or being copied to a joining peer.
    base: ExtentSet,
    closed: VecDeque<(Epoch, ExtentSet)>,
    open: ExtentSet,
    /// A write failed there: no commit, only another copy, makes it equal.
    distrusted: ExtentSet,
}

impl EpochExtents {
    /// Starts with what a persistent map held.
    #[must_use]
    pub fn with_base(base: ExtentSet) -> Self {
        Self {
            base,
            ..Self::default()
        }
    }

    /// A write of `range` bytes happened.
    pub fn note(&mut self, range: &Range<u64>) {
        self.open.add(range);
    }

    /// A write of `range` failed, and nobody knows how much of it is on the image.
    pub fn distrust(&mut self, range: &Range<u64>) {
        self.distrusted.add(range);
    }

    /// Adds to what the peer lacks from before (its own map, or the whole disk).
    pub fn widen_base(&mut self, more: &ExtentSet) {
        self.base.union(more);
    }

    /// The writes noted so far belong to `epoch`.
    pub fn mark(&mut self, epoch: Epoch) {
        let open = std::mem::take(&mut self.open);
        self.closed.push_back((epoch, open));
    }

    /// The peer's image holds everything up to the mark of `epoch`. `base_done`: also what was gathered before.
    pub fn committed(&mut self, epoch: Epoch, base_done: bool) {
        while self.closed.front().is_some_and(|(closed, _)| *closed <= epoch) {
            self.closed.pop_front();
        }
        if base_done {
            self.base = ExtentSet::default();
        }
    }

    /// The peer is gone, or a new copy begins: what it may lack is from now on one set.
    pub fn gather(&mut self) {
        let all = self.needed();
        *self = Self::with_base(all);
    }

    /// Everything that the peer may lack.
    #[must_use]
    pub fn needed(&self) -> ExtentSet {
        let mut all = self.base.clone();
        for (_, closed) in &self.closed {
            all.union(closed);
        }
        all.union(&self.open);
        all.union(&self.distrusted);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_dropped_only_by_the_commit_that_covers_it() {
        let mut extents = EpochExtents::default();
        extents.note(&(0..1));
        extents.mark(Epoch(1));
        extents.note(&(EXTENT_BYTES..EXTENT_BYTES + 1));
        extents.mark(Epoch(2));
        extents.note(&(0..1));
        extents.committed(Epoch(1), true);
        assert_eq!(extents.needed().iter().collect::<Vec<_>>(), [0, 1]);
        extents.committed(Epoch(2), true);
        assert_eq!(extents.needed().iter().collect::<Vec<_>>(), [0]);
        extents.gather();
        extents.committed(Epoch(9), false);
        assert_eq!(extents.needed().len(), 1);
    }

    #[test]
    fn ranges_touch_their_edges() {
        assert_eq!(extents_of(&(EXTENT_BYTES - 1..EXTENT_BYTES + 1)), 0..2);
        assert_eq!(extents_of(&(5..5)), 0..0);
        assert_eq!(ExtentSet::whole(EXTENT_BYTES + 1).len(), 2);
    }
}
