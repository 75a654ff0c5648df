//! Memory that the VMs that run here were promised and have not used yet: the system counts it as available, and it is not.
//!
//! A guest's memory is a file of which only what was written takes room: that of a backup that has just begun is empty.
//!
//! Invariant: it keeps no VM's memory alive.

use dunlin_guest::Memory;
use dunlin_guest::memory::PAGE_BYTES;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// What of it is promised: a VM's memory.
pub trait Promise: Send + Sync {
    /// What it may still take.
    fn unfilled_bytes(&self) -> u64;
}

impl Promise for Memory {
    fn unfilled_bytes(&self) -> u64 {
        let used = self.populated().map_or(0, |pages| pages.count());
        self.pages().saturating_sub(used) * PAGE_BYTES as u64
    }
}

/// That of a machine that is being started.
struct Starting(u64);

impl Promise for Starting {
    fn unfilled_bytes(&self) -> u64 {
        self.0
    }
}

/// What is promised, by whom it was promised to.
#[derive(Default)]
pub struct PromisedMemory {
    to: Mutex<Vec<Weak<dyn Promise>>>,
}

impl std::fmt::Debug for PromisedMemory {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("PromisedMemory")
    }
}

impl PromisedMemory {
    fn add(&self, promise: Weak<dyn Promise>) {
        let mut to = self.to.lock();
        to.retain(|one| one.strong_count() > 0);
        to.push(promise);
    }

    /// To a machine that starts: so much, until what comes back is dropped.
    #[must_use]
    pub fn to_start(&self, bytes: u64) -> Arc<dyn Promise> {
        let starting: Arc<dyn Promise> = Arc::new(Starting(bytes));
        self.add(Arc::downgrade(&starting));
        starting
    }

    /// To a machine that runs, as long as it does.
    pub fn to_run(&self, memory: &Arc<Memory>) {
        let memory: Weak<dyn Promise> = Arc::<Memory>::downgrade(memory);
        self.add(memory);
    }

    /// What of it is still to be taken.
    #[must_use]
    pub fn unfilled_bytes(&self) -> u64 {
        let to: Vec<_> = self.to.lock().iter().filter_map(Weak::upgrade).collect();
        to.iter().map(|promise| promise.unfilled_bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_promised_counts_as_long_as_it_is_somebodys() {
        let promised = PromisedMemory::default();
        let (one, other) = (promised.to_start(5), promised.to_start(7));
        assert_eq!(promised.unfilled_bytes(), 12);
        drop(one);
        assert_eq!(promised.unfilled_bytes(), 7);
        let third = promised.to_start(1);
        assert_eq!(promised.to.lock().len(), 2, "what is over is forgotten");
        drop((other, third));
        assert_eq!(promised.unfilled_bytes(), 0);
    }
}
