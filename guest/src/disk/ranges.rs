//! Decides: which of two overlapping accesses goes first.
//!
//! The trap: two overlapping writes in flight may hit the image in one order and the mirror in the other, and then the
//! images differ for ever. So a write holds its range while it goes to the image *and* into the mirror's queue.
//! Invariant: two guards that are alive never overlap. Not here: fairness (few requests are in flight).

use parking_lot::{Condvar, Mutex};
use std::ops::Range;

/// Locks on byte ranges of one disk.
#[derive(Debug, Default)]
pub struct RangeLocks {
    held: Mutex<Vec<Range<u64>>>,
    released: Condvar,
}

/// Holds a range until it is dropped.
#[derive(Debug)]
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
}

impl RangeLocks {
    /// Waits until nobody holds a part of `range`, then holds it.
    pub fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        let mut held = self.held.lock();
        while held
            .iter()
            .any(|other| other.start < range.end && range.start < other.end)
        {
            self.released.wait(&mut held);
        }
        held.push(range.clone());
        RangeGuard { locks: self, range }
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.held.lock();
        if let Some(at) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(at);
        }
        drop(held);
        self.locks.released.notify_all();
    }
}
