//! What it decides: the one order of a replica's life, `released <= applied <= committed <= appended` (C4).
//!
//! Flow: every place that moves one of the four marks goes through here; nothing else may.
//!
//! Invariants: C4, asserted in release builds too: a violation is a programmer's error and must not reach a client.
//!
//! Source: Raft (lastApplied <= commitIndex); output commit (Remus, PLOVER).
//!
//! Not here: *when* a mark may move.

use crate::units::Index;

/// The marks; `appended` belongs to the log and is handed in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Order {
    released: Index,
    applied: Index,
    committed: Index,
}

impl Order {
    /// All at the state that a snapshot stands for.
    #[must_use]
    pub fn at(index: Index) -> Self {
        Self {
            released: index,
            applied: index,
            committed: index,
        }
    }
    /// Outputs that rest on entries up to here have left.
    #[must_use]
    pub fn released(&self) -> Index {
        self.released
    }
    /// The state contains everything up to here.
    #[must_use]
    pub fn applied(&self) -> Index {
        self.applied
    }
    /// Agreed up to here.
    #[must_use]
    pub fn committed(&self) -> Index {
        self.committed
    }

    /// Moves `released`; panics if that would overtake `applied`.
    pub fn release(&mut self, through: Index, appended: Index) {
        self.released = self.released.max(through);
        self.check(appended);
    }
    /// Moves `applied`; panics if that would overtake `committed`.
    pub fn apply(&mut self, through: Index, appended: Index) {
        self.applied = self.applied.max(through);
        self.check(appended);
    }
    /// Moves `committed`; panics if that would overtake the log.
    pub fn commit(&mut self, through: Index, appended: Index) {
        self.committed = self.committed.max(through);
        self.check(appended);
    }

    /// C4, where every mark moves and at the end of every step.
    #[inline]
    pub fn check(&self, appended: Index) {
        assert!(
            self.released <= self.applied && self.applied <= self.committed && self.committed <= appended,
            "C4 broken: released {} <= applied {} <= committed {} <= appended {}",
            self.released.0,
            self.applied.0,
            self.committed.0,
            appended.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_move_in_order_and_never_back() {
        let mut order = Order::default();
        order.commit(Index(3), Index(5));
        order.apply(Index(2), Index(5));
        order.release(Index(2), Index(5));
        order.commit(Index(1), Index(5));
        assert_eq!(
            (order.released(), order.applied(), order.committed()),
            (Index(2), Index(2), Index(3))
        );
    }

    #[test]
    #[should_panic(expected = "C4 broken")]
    fn nothing_is_applied_before_it_is_agreed() {
        let mut order = Order::default();
        order.apply(Index(1), Index(5));
    }

    #[test]
    #[should_panic(expected = "C4 broken")]
    fn nothing_is_agreed_before_it_is_appended() {
        let mut order = Order::default();
        order.commit(Index(6), Index(5));
    }
}
