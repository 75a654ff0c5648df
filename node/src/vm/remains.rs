//! What is still there of machines of one VM that have ended on this host: a process that the kernel has not let go, a disk that does
//! not answer. Nobody on the VM's loop waits for it; whoever needs the disks next does, and not for ever.
//!
//! Flow: each part of a machine that has to be gone holds a [`Remain`] as the last thing that it drops -> the last one wakes whoever waits
//! and tells the loop -> the next machine [begins](Remains::begin).
//! Invariants: 1. one machine is there at a time: whoever begins the next one has waited for all of the last.
//! Not here: who ends a machine (`machine`), the lock on an image (the guest's `disk`).

use dunlin_core::waits::Wait;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A part of the last machine is still there after that time.
#[derive(Debug, thiserror::Error)]
#[error("{}", Wait::MachineEnds.said_of(*.0))]
pub struct StillThere(Duration);

/// Tells the loop that nothing is left.
type Tell = Box<dyn Fn() + Send + Sync>;

/// How many parts there are.
#[derive(Clone, Default)]
pub struct Remains(Arc<Count>);

#[derive(Default)]
struct Count {
    parts: Mutex<usize>,
    changed: Condvar,
    /// It does not wait, and looks again.
    tells: OnceLock<Tell>,
}

impl Count {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.parts.lock()
    }
}

/// A part of a machine that is there as long as this is.
pub struct Remain(Remains);

impl Remains {
    /// Who is told when nothing is left.
    pub fn tell(&self, tell: impl Fn() + Send + Sync + 'static) {
        // Once for each VM.
        let _ = self.0.tells.set(Box::new(tell));
    }

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

    /// Waits until nothing is left. The first part of the next machine (invariant 1).
    ///
    /// # Errors
    /// Something still is, and why that matters.
    pub fn begin(&self) -> Result<Remain, StillThere> {
        let mut parts = self.wait(Wait::MachineEnds.bound())?;
        *parts += 1;
        Ok(Remain(self.clone()))
    }

    /// Waits until nothing is left.
    ///
    /// # Errors
    /// Something still is, and why that matters.
    pub fn await_none(&self) -> Result<(), StillThere> {
        self.wait(Wait::MachineEnds.bound()).map(drop)
    }

    fn wait(&self, bound: Duration) -> Result<MutexGuard<'_, usize>, StillThere> {
        let mut parts = self.0.lock();
        self.0
            .changed
            .wait_while_for(&mut parts, |parts| *parts > 0, bound);
        match *parts {
            0 => Ok(parts),
            _ => Err(StillThere(bound)),
        }
    }
}

impl Drop for Remain {
    fn drop(&mut self) {
        let count = &self.0.0;
        let left = {
            let mut parts = count.lock();
            *parts -= 1;
            *parts
        };
        if left > 0 {
            return;
        }
        count.changed.notify_all();
        if let Some(tell) = count.tells.get() {
            tell();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invariant_1_the_next_machine_begins_when_the_last_part_of_the_last_one_is_gone_and_the_loop_is_told() {
        let (tell, events) = std::sync::mpsc::channel();
        let remains = Remains::default();
        remains.tell(move || tell.send(()).expect("the test listens"));
        let [machine, disk] = [remains.begin().expect("nothing was there"), remains.one()];
        drop(machine);
        assert!(!remains.is_none() && events.try_recv().is_err());
        let why = remains.wait(Duration::from_millis(1)).map(drop);
        assert!(
            why.is_err_and(|why| why.to_string().contains("machine-ends")),
            "a disk remains"
        );
        std::thread::scope(|scope| {
            // Both want to be the next one, and only one is there at a time.
            let next = || drop(remains.begin().expect("in time"));
            scope.spawn(next);
            scope.spawn(next);
            drop(disk);
        });
        assert!(remains.is_none());
        assert_eq!(events.try_iter().count(), 3);
    }
}
