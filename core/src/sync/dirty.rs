//! What it decides: which pages may differ between the two VMs.
//!
//! Flow: in each round of a sync; the two VMs' sets are united before anything is hashed. A sync that breaks ends its session,
//! and the next one begins with all of memory: so no set outlives its sync.
//!
//! Source: PLOVER, "compute the union of dirty pages". Not here: how dirty pages are found (guest's memory port).

/// A set of guest pages, as sorted, disjoint, non-adjacent ranges: dirty pages come in runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PageSet {
    ranges: Vec<(u32, u32)>,
}

impl PageSet {
    /// The set of the pages in these `(first, count)` runs, which may come in any order and overlap.
    #[must_use]
    pub fn from_runs(runs: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut sorted: Vec<(u32, u32)> = runs
            .into_iter()
            .filter(|&(_, count)| count > 0)
            .map(|(first, count)| (first, first.saturating_add(count)))
            .collect();
        sorted.sort_unstable();
        let mut ranges: Vec<(u32, u32)> = Vec::with_capacity(sorted.len());
        for (start, end) in sorted {
            match ranges.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => ranges.push((start, end)),
            }
        }
        Self { ranges }
    }

    /// Both sets together.
    #[must_use]
    pub fn union(&self, other: &PageSet) -> PageSet {
        Self::from_runs(self.runs().chain(other.runs()))
    }

    /// The pages of this set that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &PageSet) -> PageSet {
        let mut ranges = Vec::with_capacity(self.ranges.len());
        let mut holes = other.ranges.iter().peekable();
        for &(mut start, end) in &self.ranges {
            while holes.next_if(|hole| hole.1 <= start).is_some() {}
            // The last hole may reach into the next range: it is looked at again.
            while let Some(&&(from, to)) = holes.peek()
                && from < end
            {
                if start < from {
                    ranges.push((start, from));
                }
                start = to;
                if to > end {
                    break;
                }
                holes.next();
            }
            if start < end {
                ranges.push((start, end));
            }
        }
        Self { ranges }
    }

    /// The set in pieces of at most `most_runs` runs, in order; an empty set is one piece.
    pub fn cut(&self, most_runs: usize) -> impl Iterator<Item = PageSet> + '_ {
        let empty = self.is_empty().then(PageSet::default);
        let pieces = self.ranges.chunks(most_runs).map(|piece| PageSet {
            ranges: piece.to_vec(),
        });
        empty.into_iter().chain(pieces)
    }

    /// Adds a piece that lies behind all of this set; whether it does, for nothing is added otherwise.
    #[must_use]
    pub fn append(&mut self, piece: PageSet) -> bool {
        let follows = piece
            .ranges
            .first()
            .is_none_or(|&(start, _)| self.is_empty() || start > self.end());
        if follows {
            self.ranges.extend(piece.ranges);
        }
        follows
    }

    /// The set in pieces of at most `most` pages, in order; an empty set has none.
    pub fn parts(&self, most: u32) -> impl Iterator<Item = PageSet> + '_ {
        let mut ranges = self.ranges.iter().copied();
        let mut rest = ranges.next();
        std::iter::from_fn(move || {
            let (mut part, mut room) = (PageSet::default(), most);
            while let Some((start, end)) = rest
                && room > 0
            {
                let cut = end.min(start.saturating_add(room));
                part.ranges.push((start, cut));
                room -= cut - start;
                rest = if cut < end {
                    Some((cut, end))
                } else {
                    ranges.next()
                };
            }
            (!part.is_empty()).then_some(part)
        })
    }

    /// The runs, ascending, as `(first, count)`.
    pub fn runs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.ranges.iter().map(|&(start, end)| (start, end - start))
    }

    /// Every page, ascending.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().flat_map(|&(start, end)| start..end)
    }

    /// How many pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges
            .iter()
            .map(|&(start, end)| (end - start) as usize)
            .sum()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The page after the last one, or 0.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.ranges.last().map_or(0, |&(_, end)| end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn runs() -> impl Strategy<Value = Vec<(u32, u32)>> {
        prop::collection::vec((0_u32..300, 0_u32..20), 0..30)
    }

    fn oracle(runs: &[(u32, u32)]) -> BTreeSet<u32> {
        runs.iter()
            .flat_map(|&(first, count)| first..first + count)
            .collect()
    }

    proptest! {
        #[test]
        fn a_page_set_is_the_set_of_its_pages(a in runs(), b in runs()) {
            let union = PageSet::from_runs(a.clone()).union(&PageSet::from_runs(b.clone()));
            let expected: BTreeSet<u32> = oracle(&a).union(&oracle(&b)).copied().collect();
            prop_assert_eq!(union.len(), expected.len());
            prop_assert_eq!(union.pages().collect::<BTreeSet<_>>(), expected);
            let minus = PageSet::from_runs(a.clone()).minus(&PageSet::from_runs(b.clone()));
            let expected: BTreeSet<u32> = oracle(&a).difference(&oracle(&b)).copied().collect();
            prop_assert_eq!(minus.pages().collect::<BTreeSet<_>>(), expected);
            for most in 1..5 {
                let mut whole = PageSet::default();
                for piece in union.cut(most as usize) {
                    prop_assert!(piece.runs().count() <= most as usize);
                    prop_assert!(whole.append(piece));
                }
                prop_assert_eq!(&whole, &union);
                prop_assert!(union.is_empty() || !whole.append(union.clone()));
                let parts: Vec<_> = union.parts(most).collect();
                prop_assert!(parts.iter().rev().skip(1).all(|part| part.len() == most as usize));
                prop_assert_eq!(parts.iter().flat_map(PageSet::pages).collect::<Vec<_>>(), union.pages().collect::<Vec<_>>());
            }
            let runs: Vec<_> = union.runs().collect();
            prop_assert!(runs.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0), "runs touch: {:?}", runs);
        }
    }
}
