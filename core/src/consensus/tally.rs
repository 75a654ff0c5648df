//! What it decides: what a majority is, and what one has reached.
//!
//! Flow: each member has a mark that mostly rises (what it holds, which beat it has echoed). [`counted`] looks at all marks;
//! a [`Tally`] is told of the moves of single ones.
//!
//! Invariants:
//! - Q2 majorities are of the members in force, which change by one, so any two consecutive ones overlap;
//! - Q3 what is counted while marks move ([`Tally`]) is what counting them all gives. Asserted in debug builds.
//!
//! Not here: whose marks they are, and what follows from them (`quorum`).

use super::MAX_MEMBERS;

/// How many of `members` are a majority.
#[must_use]
pub(super) fn majority(members: usize) -> usize {
    members / 2 + 1
}

/// The largest mark that a majority has reached; `marks` in any order, not empty.
#[must_use]
pub(super) fn reached_by_majority(marks: &mut [u64]) -> u64 {
    let middle = majority(marks.len()) - 1;
    if marks.len() <= FEW {
        marks.sort_unstable_by(|a, b| b.cmp(a));
        return marks[middle];
    }
    *marks.select_nth_unstable_by(middle, |a, b| b.cmp(a)).1
}

/// Most groups are small. To clear room for the largest, or to keep a [`Tally`], costs more than to count so many members.
pub(super) const FEW: usize = 7;

/// The same of one member and all others, at most [`MAX_MEMBERS`] together: the plain count, linear in their number.
#[must_use]
pub(super) fn counted(mine: u64, others: impl ExactSizeIterator<Item = u64>) -> u64 {
    fn within<const MOST: usize>(mine: u64, others: impl ExactSizeIterator<Item = u64>) -> u64 {
        let mut marks = [0; MOST];
        let members = others.len() + 1;
        marks[0] = mine;
        for (mark, other) in marks[1..].iter_mut().zip(others) {
            *mark = other;
        }
        reached_by_majority(&mut marks[..members])
    }
    if others.len() < FEW {
        within::<FEW>(mine, others)
    } else {
        within::<MAX_MEMBERS>(mine, others)
    }
}

/// The newest mark that a majority has reached, kept while single marks move: all are looked at once for each mark that a
/// majority reaches, not once for each member that reaches it. So an entry costs its leader time linear in the group's size.
///
/// While fewer than a majority are beyond the mark, and nobody of those at it or beyond has fallen below it, it stands (Q3).
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    mark: u64,
    /// How many members are beyond it.
    beyond: usize,
    /// The leader's own mark, as it was counted last.
    mine: u64,
    /// Somebody fell below the mark, or the members are others: count all.
    stale: bool,
}

impl Tally {
    /// The members are others.
    pub(super) fn forget(&mut self) {
        self.stale = true;
    }

    /// The mark of a member went from `was` to `is`.
    #[inline]
    pub(super) fn moved(&mut self, was: u64, is: u64) {
        if self.stale {
            return;
        }
        self.beyond = self.beyond + usize::from(is > self.mark) - usize::from(was > self.mark);
        self.stale = is < self.mark && self.mark <= was;
    }

    /// What a majority of the leader and `others` has reached; every move of theirs was told ([`Self::moved`]).
    #[inline]
    pub(super) fn reached(&mut self, mine: u64, others: impl ExactSizeIterator<Item = u64> + Clone) -> u64 {
        if others.len() < FEW {
            self.stale = true;
            return counted(mine, others);
        }
        if mine != self.mine {
            self.moved(self.mine, mine);
            self.mine = mine;
        }
        if self.stale || self.beyond >= majority(others.len() + 1) {
            self.mark = counted(mine, others.clone());
            let all = std::iter::once(mine).chain(others.clone());
            self.beyond = all.filter(|mark| *mark > self.mark).count();
            self.stale = false;
        }
        debug_assert_eq!(self.mark, counted(mine, others), "Q3 broken: {self:?}");
        self.mark
    }
}

/// It knows nothing that the marks do not say: two states that differ in it alone are one (the exhaustive model compares).
impl PartialEq for Tally {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for Tally {}
impl std::hash::Hash for Tally {
    fn hash<H: std::hash::Hasher>(&self, _: &mut H) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    #[test]
    fn majorities_of_one_to_seven() {
        assert_eq!((1..=7).map(majority).collect::<Vec<_>>(), [1, 2, 2, 3, 3, 4, 4]);
        assert_eq!(reached_by_majority(&mut [5]), 5);
        assert_eq!(reached_by_majority(&mut [5, 9]), 5);
        assert_eq!(reached_by_majority(&mut [1, 9, 5]), 5);
        assert_eq!(reached_by_majority(&mut [1, 9, 5, 7]), 5);
        assert_eq!(reached_by_majority(&mut [7, 6, 5, 4, 3, 2, 1]), 4);
    }

    #[test]
    fn the_largest_group_is_counted() {
        let others = 1..MAX_MEMBERS as u64;
        assert_eq!(others.clone().count() + 1, MAX_MEMBERS);
        // 0 to 126: 64 of 127 have reached 63.
        assert_eq!(counted(0, others.collect::<Vec<_>>().into_iter()), 63);
    }

    /// Q3 over random histories: marks that rise by one, by many, fall to nothing (a replica that lost its memory), come
    /// and go with members, and start anew with a term.
    #[test]
    fn what_is_counted_while_marks_move_is_what_counting_all_gives() {
        let mut runner = TestRunner::default();
        let histories = (
            1..=MAX_MEMBERS,
            prop::collection::vec(any::<(u8, u8, u8)>(), 0..600),
        );
        let counts = |(members, history): (usize, Vec<(u8, u8, u8)>)| {
            let (mut mine, mut others) = (0, vec![0u64; members - 1]);
            let mut tally = Tally::default();
            tally.forget();
            for (what, whom, by) in history {
                let at = usize::from(whom) % others.len().max(1);
                match what {
                    0 => others = vec![0; others.len()],
                    1 if others.len() + 1 < MAX_MEMBERS => others.insert(at.min(others.len()), u64::from(by)),
                    2 if others.len() > at => drop(others.remove(at)),
                    3..=150 if others.len() > at => {
                        let (was, is) = (others[at], others[at] + 1);
                        others[at] = is;
                        tally.moved(was, is);
                    }
                    151..=200 if others.len() > at => {
                        let is = others[at] + u64::from(by % 16);
                        tally.moved(std::mem::replace(&mut others[at], is), is);
                    }
                    201..=210 if others.len() > at => {
                        let is = others[at].min(u64::from(by));
                        tally.moved(std::mem::replace(&mut others[at], is), is);
                    }
                    211..=250 => mine += u64::from(by % 8),
                    251..=253 => mine = u64::from(by),
                    _ => {}
                }
                if what < 3 {
                    tally.forget();
                }
                // Not always asked at once: several marks may have moved in between.
                if by % 3 != 0 {
                    let plain = counted(mine, others.iter().copied());
                    prop_assert_eq!(tally.reached(mine, others.iter().copied()), plain);
                }
            }
            prop_assert_eq!(
                tally.reached(mine, others.iter().copied()),
                counted(mine, others.iter().copied())
            );
            Ok(())
        };
        runner.run(&histories, counts).unwrap();
    }
}
