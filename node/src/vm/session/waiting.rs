//! What a session's thread waits for now, where its loop and people see it.
//!
//! Not here: how long anything may be waited for (core's `waits`).

use dunlin_core::waits::Wait;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shared between the thread and the loop.
#[derive(Clone, Default)]
pub struct Waiting(Arc<Mutex<Option<(Wait, Instant)>>>);

impl Waiting {
    /// Does what may take as long as `wait` says.
    pub fn during<T>(&self, wait: Wait, work: impl FnOnce() -> T) -> T {
        self.set(Some((wait, Instant::now())));
        let done = work();
        self.set(None);
        done
    }

    fn set(&self, waits: Option<(Wait, Instant)>) {
        *self.0.lock() = waits;
    }

    /// For what, and since when; none if it does not wait.
    #[must_use]
    pub fn now(&self) -> Option<(Wait, Duration)> {
        let waits = *self.0.lock();
        waits.map(|(wait, since)| (wait, since.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_seen_while_it_lasts() {
        let waiting = Waiting::default();
        let seen = waiting.clone();
        let named = waiting.during(Wait::VmStops, || seen.now().map(|(wait, _)| wait));
        assert_eq!(named, Some(Wait::VmStops));
        assert_eq!(waiting.now(), None);
    }
}
