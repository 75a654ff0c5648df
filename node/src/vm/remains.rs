//! What is still there of machines of one VM that have ended on this host: a process that the kernel has not let go, a disk that does
//! not answer. Nobody on the VM's loop waits for it; whoever needs the disks next does, and not for ever.
//!
//! Flow: each part of a machine that has to be gone holds a [`Remain`] as the last thing that it drops -> [`Remains::await_none`].
//! Not here: who ends a machine (`machine`), the lock on an image (the guest's `disk`).

use dunlin_core::waits::Wait;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How many parts there are.
#[derive(Clone, Default)]
pub struct Remains(Arc<Count>);

#[derive(Default)]
struct Count {
    parts: Mutex<usize>,
    changed: Condvar,
}

impl Count {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a machine that is there as long as this is.
pub struct Remain(Remains);

impl Remains {
    /// One part more.
    #[must_use]
    pub fn one(&self) -> Remain {
        *self.0.lock() += 1;
        Remain(self.clone())
    }

    /// Whether nothing is left. Never waits.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self.0.lock() == 0
    }

    /// Waits until nothing is left.
    ///
    /// # Errors
    /// Something still is, and why that matters.
    pub fn await_none(&self) -> Result<(), String> {
        self.await_for(Wait::MachineEnds.bound())
    }

    /// As [`Self::await_none`], for another time.
    ///
    /// # Errors
    /// The same.
    pub fn await_for(&self, bound: Duration) -> Result<(), String> {
        let parts = self.0.lock();
        let waited = self
            .0
            .changed
            .wait_timeout_while(parts, bound, |parts| *parts > 0);
        let (parts, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match *parts {
            0 => Ok(()),
            _ => Err(Wait::MachineEnds.said_of(bound)),
        }
    }
}

impl Drop for Remain {
    fn drop(&mut self) {
        *self.0.0.lock() -= 1;
        self.0.0.changed.notify_all();
    }
}
