//! What it decides: which parts of the disk a peer may lack.
//!
//! A primary notes every write here. While a backup is there, a note is dropped when the backup has committed the sync
//! that covers it; while no backup is there, notes gather, and a returned peer gets only these extents.
//! Invariant: [`EpochExtents::needed`] is never less than what differs from the last commit that the peer told of
//! (more is allowed: it costs bandwidth, not correctness). A set takes an eighth of a byte for each MiB of disk up to its last extent.
//! Not here: the file that keeps the set over a crash (`guest::disk::dirty_map`).

use crate::units::Epoch;
use std::{collections::VecDeque, ops::Range};

/// One bit per this many bytes of disk.
pub const EXTENT_BYTES: u64 = 1 << 20;

/// A set of extents by number: a bit for each up to the last one. The sets of a disk are joined and counted while its writes wait: for 16
/// TiB that takes milliseconds. Whoever adds an extent knows that the disk is so long.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExtentSet {
    /// The last one is never zero: equal sets are equal here.
    words: Vec<u64>,
    len: u64,
}

/// The extents that a byte range touches.
#[must_use]
pub fn extents_of(range: &Range<u64>) -> Range<u64> {
    if range.is_empty() {
        return 0..0;
    }
    range.start / EXTENT_BYTES..range.end.div_ceil(EXTENT_BYTES)
}

/// The word of an extent, and its bit there.
fn place(extent: u64) -> (usize, u64) {
    ((extent / 64) as usize, 1 << (extent % 64))
}

impl ExtentSet {
    /// Every extent of a disk of `size_bytes`.
    #[must_use]
    pub fn whole(size_bytes: u64) -> Self {
        let mut all = Self::default();
        all.add(&(0..size_bytes));
        all
    }

    /// Those whose bits are set: extent 0 is the lowest bit of the first word.
    #[must_use]
    pub fn from_words(words: Vec<u64>) -> Self {
        let len = words.iter().map(|word| u64::from(word.count_ones())).sum();
        let mut set = Self { words, len };
        set.trim();
        set
    }

    /// As [`Self::from_words`] takes them; what follows the last one is zero.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }

    /// Sets these bits of a word.
    fn set(&mut self, word: usize, bits: u64) {
        if bits == 0 {
            return;
        }
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.len += u64::from((bits & !self.words[word]).count_ones());
        self.words[word] |= bits;
    }

    /// Adds every extent that `range` (bytes) touches.
    pub fn add(&mut self, range: &Range<u64>) {
        let extents = extents_of(range);
        let Some(last) = extents.clone().next_back() else {
            return;
        };
        let ((first_word, first_bit), (last_word, last_bit)) = (place(extents.start), place(last));
        for word in first_word..=last_word {
            let from = if word == first_word { first_bit } else { 1 };
            let to = if word == last_word { last_bit } else { 1 << 63 };
            // From the one bit to the other, both of them too.
            self.set(word, (to - from) | to);
        }
    }

    /// Adds one extent by number.
    pub fn insert(&mut self, extent: u64) {
        let (word, bit) = place(extent);
        self.set(word, bit);
    }

    /// Removes one extent; says whether it was there.
    pub fn remove(&mut self, extent: u64) -> bool {
        let was_there = self.contains(extent);
        if was_there {
            let (word, bit) = place(extent);
            self.words[word] &= !bit;
            self.len -= 1;
            self.trim();
        }
        was_there
    }

    fn contains(&self, extent: u64) -> bool {
        let (word, bit) = place(extent);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Those that are not below `from`, ascending.
    pub fn iter_from(&self, from: u64) -> impl Iterator<Item = u64> + '_ {
        let (first, bit) = place(from);
        let words = self.words.iter().enumerate().skip(first);
        words.flat_map(move |(at, word)| {
            let mut left = if at == first { word & !(bit - 1) } else { *word };
            std::iter::from_fn(move || {
                let lowest = (left != 0).then(|| u64::from(left.trailing_zeros()))?;
                left &= left - 1;
                Some(at as u64 * 64 + lowest)
            })
        })
    }

    /// Every extent that `range` (bytes) touches is in the set.
    #[must_use]
    pub fn covers(&self, range: &Range<u64>) -> bool {
        extents_of(range).all(|extent| self.contains(extent))
    }

    /// Adds all of `other`.
    pub fn union(&mut self, other: &Self) {
        let longest = self.words.len().max(other.words.len());
        self.words.resize(longest, 0);
        for (word, bits) in other.words.iter().enumerate() {
            self.set(word, *bits);
        }
    }

    /// The extents that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let others = other.words.iter().chain(std::iter::repeat(&0));
        let words = self.words.iter().zip(others);
        Self::from_words(words.map(|(word, other)| word & !other).collect())
    }

    /// Number of extents.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// No extents.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.iter_from(0)
    }
}

impl FromIterator<u64> for ExtentSet {
    fn from_iter<I: IntoIterator<Item = u64>>(extents: I) -> Self {
        let mut set = Self::default();
        extents.into_iter().for_each(|extent| set.insert(extent));
        set
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

    /// How many these are. Nothing is copied for it: it is asked for several times a second.
    #[must_use]
    pub fn needed_len(&self) -> u64 {
        let closed = self.closed.iter().map(|(_, closed)| closed);
        let sets = [&self.base, &self.open, &self.distrusted];
        let sets: Vec<&[u64]> = sets.into_iter().chain(closed).map(ExtentSet::words).collect();
        let longest = sets.iter().map(|words| words.len()).max().unwrap_or(0);
        let words = (0..longest).map(|at| {
            let bits = sets.iter().filter_map(|words| words.get(at));
            bits.fold(0_u64, |all, word| all | word)
        });
        words.map(|word| u64::from(word.count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

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
        assert_eq!(extents.needed_len(), 2, "extent 0 is in two of the sets");
        extents.committed(Epoch(2), true);
        assert_eq!(extents.needed().iter().collect::<Vec<_>>(), [0]);
        extents.gather();
        extents.committed(Epoch(9), false);
        assert_eq!((extents.needed().len(), extents.needed_len()), (1, 1));
        extents.distrust(&(70 * EXTENT_BYTES..71 * EXTENT_BYTES));
        assert_eq!((extents.needed().len(), extents.needed_len()), (2, 2));
    }

    #[test]
    fn ranges_touch_their_edges() {
        assert_eq!(extents_of(&(EXTENT_BYTES - 1..EXTENT_BYTES + 1)), 0..2);
        assert_eq!(extents_of(&(5..5)), 0..0);
        assert_eq!(ExtentSet::whole(EXTENT_BYTES + 1).len(), 2);
    }

    #[test]
    fn a_disk_of_many_tib_is_a_set_of_two_mib() {
        const EXTENTS: u64 = 16 << 20;
        let all = ExtentSet::whole(16 << 40);
        assert_eq!((all.len(), all.words().len() * 8), (EXTENTS, 2 << 20));
        let last: Vec<u64> = all.iter_from(EXTENTS - 2).collect();
        assert_eq!(last, [EXTENTS - 2, EXTENTS - 1]);
        assert!(all.minus(&all).words().is_empty());
    }

    proptest! {
        /// The bits say what a set of numbers says.
        #[test]
        fn a_set_of_extents_is_a_set_of_numbers(
            steps in prop::collection::vec((0_u8..5, 0_u64..300, 0_u64..200), 0..40),
        ) {
            let (mut ours, mut model) = (ExtentSet::default(), BTreeSet::new());
            for (what, at, many) in steps {
                let numbers = at..at + many;
                let bytes = numbers.start * EXTENT_BYTES..numbers.end * EXTENT_BYTES;
                let other: ExtentSet = numbers.clone().collect();
                match what {
                    0 => {
                        ours.insert(at);
                        model.insert(at);
                    }
                    1 => {
                        prop_assert_eq!(ours.remove(at), model.remove(&at));
                    }
                    2 => {
                        ours = ours.minus(&other);
                        model.retain(|extent| !numbers.contains(extent));
                    }
                    3 => {
                        ours.union(&other);
                        model.extend(numbers.clone());
                    }
                    _ => {
                        ours.add(&bytes);
                        model.extend(numbers.clone());
                    }
                }
                prop_assert_eq!(ours.len(), model.len() as u64);
                prop_assert_eq!(ours.is_empty(), model.is_empty());
                prop_assert!(ours.iter().eq(model.iter().copied()));
                prop_assert!(ours.iter_from(at).eq(model.range(at..).copied()));
                let covers = numbers.clone().all(|extent| model.contains(&extent));
                prop_assert_eq!(ours.covers(&bytes), covers);
                let again: ExtentSet = model.iter().copied().collect();
                prop_assert_eq!(&ours, &again);
                prop_assert_eq!(&ours, &ExtentSet::from_words(ours.words().to_vec()));
            }
        }
    }
}
