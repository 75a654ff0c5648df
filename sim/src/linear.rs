//! What it decides: whether a history of reads and writes of one register could have happened one after the other.
//!
//! Flow: the clients of a run write down when each operation was called and answered -> `linearizable`.
//!
//! Invariants: exact (no false alarms, no misses) for histories in which every value is written once; quadratic.
//!
//! Source: Gibbons and Korach, *Testing shared memories* (1997), the case of unique values. A search over all orders (Wing
//! and Gong) is the oracle of its tests; as the checker it took minutes on histories with many concurrent writes.
//!
//! Not here: several registers: each is checked alone, for linearizability is local (Herlihy and Wing 1990).

use std::collections::BTreeMap;

/// What a client did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Wrote this value.
    Write(u64),
    /// Read this value.
    Read(u64),
}

/// One operation; times of any clock that all operations share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operation {
    /// When the client asked.
    pub called_us: u64,
    /// When it got the answer; `None`: never, so it may have happened at any later time or not at all.
    pub answered_us: Option<u64>,
    /// What.
    pub kind: Kind,
}

/// A value's life: its write and all its reads, which in any order of the whole stand side by side.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    first_answer_us: i128,
    last_call_us: i128,
    written_at_us: Option<i128>,
    first_read_answer_us: i128,
}

impl Default for Cluster {
    fn default() -> Self {
        let never = i128::MAX;
        Self {
            first_answer_us: never,
            last_call_us: -1,
            written_at_us: None,
            first_read_answer_us: never,
        }
    }
}

impl Cluster {
    fn add(&mut self, called_us: i128, answered_us: i128) {
        self.first_answer_us = self.first_answer_us.min(answered_us);
        self.last_call_us = self.last_call_us.max(called_us);
    }
    /// Some operation here was answered before some operation there was called.
    fn must_begin_before(&self, other: &Self) -> bool {
        self.first_answer_us < other.last_call_us
    }
}

/// Is there an order of the operations that respects their times and in which each read sees the last write (or
/// `initial`)? Every value is written at most once, and `initial` never. Unanswered reads do not matter.
///
/// Since values are unique, all operations on one value stand together in such an order; it exists exactly if no read is
/// answered before its write is called and no two values must each begin before the other.
#[must_use]
pub fn linearizable(history: &[Operation], initial: u64) -> bool {
    let mut clusters: BTreeMap<u64, Cluster> = BTreeMap::new();
    let before_all = clusters.entry(initial).or_default();
    before_all.written_at_us = Some(-1);
    before_all.add(-1, -1);
    for op in history {
        let (called_us, answered_us) = (i128::from(op.called_us), op.answered_us.map(i128::from));
        match (op.kind, answered_us) {
            (Kind::Write(value), _) => {
                let cluster = clusters.entry(value).or_default();
                assert!(
                    cluster.written_at_us.is_none(),
                    "{value} is written twice: this checker wants unique values"
                );
                cluster.written_at_us = Some(called_us);
                cluster.add(called_us, answered_us.unwrap_or(i128::MAX));
            }
            (Kind::Read(value), Some(answered_us)) => {
                let cluster = clusters.entry(value).or_default();
                cluster.add(called_us, answered_us);
                cluster.first_read_answer_us = cluster.first_read_answer_us.min(answered_us);
            }
            (Kind::Read(_), None) => {}
        }
    }
    let born = |cluster: &Cluster| {
        cluster
            .written_at_us
            .is_some_and(|written_at_us| cluster.first_read_answer_us >= written_at_us)
    };
    let clusters: Vec<Cluster> = clusters.into_values().collect();
    clusters.iter().all(born)
        && clusters.iter().enumerate().all(|(at, one)| {
            let mut later = clusters[at + 1..].iter();
            !later.any(|other| one.must_begin_before(other) && other.must_begin_before(one))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn write(called: u64, answered: u64, value: u64) -> Operation {
        Operation {
            called_us: called,
            answered_us: Some(answered),
            kind: Kind::Write(value),
        }
    }
    fn read(called: u64, answered: u64, value: u64) -> Operation {
        Operation {
            called_us: called,
            answered_us: Some(answered),
            kind: Kind::Read(value),
        }
    }
    fn lost(called: u64, value: u64) -> Operation {
        Operation {
            called_us: called,
            answered_us: None,
            kind: Kind::Write(value),
        }
    }

    #[test]
    fn histories_that_could_have_happened() {
        assert!(linearizable(&[], 0));
        assert!(linearizable(&[read(1, 2, 0), write(3, 4, 7), read(5, 6, 7)], 0));
        assert!(
            linearizable(&[write(1, 10, 7), read(2, 3, 0), read(4, 5, 7)], 0),
            "overlapping"
        );
        assert!(linearizable(
            &[write(1, 10, 7), write(1, 10, 8), read(11, 12, 7), read(13, 14, 7)],
            0
        ));
        assert!(
            linearizable(&[lost(1, 7), read(2, 3, 0), read(50, 51, 7)], 0),
            "a lost write lands late"
        );
        assert!(linearizable(&[lost(1, 7), read(2, 3, 0)], 0), "or never");
    }

    #[test]
    fn histories_that_could_not() {
        assert!(!linearizable(&[write(1, 2, 7), read(3, 4, 0)], 0), "a stale read");
        assert!(
            !linearizable(&[write(1, 10, 7), read(2, 3, 7), read(4, 5, 0)], 0),
            "back in time"
        );
        assert!(!linearizable(&[read(1, 2, 9)], 0), "out of thin air");
        assert!(
            !linearizable(&[read(1, 2, 7), lost(3, 7)], 0),
            "before it was asked for"
        );
        assert!(
            !linearizable(&[write(1, 2, 7), write(3, 4, 8), read(5, 6, 7)], 0),
            "a lost update"
        );
        let flip = [write(1, 10, 7), write(1, 10, 8), read(11, 12, 7), read(13, 14, 8)];
        assert!(!linearizable(&flip, 0), "two orders at once");
    }

    /// Histories made from a true register always pass; the same with one read bent to a stale value mostly fail, and
    /// whatever the quick search says equals trying all orders.
    #[test]
    fn agrees_with_trying_all_orders() {
        let mut random = Random::new(11);
        let mut refused = 0;
        for _ in 0..3000 {
            let mut history = Vec::new();
            let mut value = 0;
            let mut at = 0;
            for nth in 0..6 {
                at += random.between(1, 10);
                let (called, answered) = (at - random.below(at.min(15)), at + random.below(15));
                if random.chance(500_000) {
                    value = nth + 1;
                    let answered_us = (!random.chance(200_000)).then_some(answered);
                    let kind = Kind::Write(value);
                    history.push(Operation {
                        called_us: called,
                        answered_us,
                        kind,
                    });
                } else {
                    history.push(read(called, answered, value));
                }
            }
            assert!(linearizable(&history, 0), "{history:?}");
            let at = random.below(6) as usize;
            history[at].kind = Kind::Read(random.below(4));
            let quick = linearizable(&history, 0);
            assert_eq!(quick, slow(&history, 0), "{history:?}");
            refused += u32::from(!quick);
        }
        assert!(refused > 500, "only {refused} bent histories were refused");
    }

    /// All orders, all subsets of the unanswered.
    fn slow(left: &[Operation], value: u64) -> bool {
        if left.iter().all(|op| op.answered_us.is_none()) {
            return true;
        }
        (0..left.len()).any(|at| {
            let op = left[at];
            if left
                .iter()
                .any(|other| other.answered_us.is_some_and(|answered| answered < op.called_us))
            {
                return false;
            }
            let rest: Vec<_> = left
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != at)
                .map(|(_, op)| *op)
                .collect();
            match op.kind {
                Kind::Write(written) => slow(&rest, written),
                Kind::Read(_) if op.answered_us.is_none() => slow(&rest, value),
                Kind::Read(read) => read == value && slow(&rest, value),
            }
        })
    }
}
