//! What a session's thread waits for now, where its loop and people see it.
//!
//! Not here: how long anything may be waited for (core's `waits`).

use super::Broken;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use dunlin_core::waits::Wait;
use std::sync::{Arc, Mutex, PoisonError};
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
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = waits;
    }

    /// For what, and since when; none if it does not wait.
    #[must_use]
    pub fn now(&self) -> Option<(Wait, Duration)> {
        let waits = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waits.map(|(wait, since)| (wait, since.elapsed()))
    }

    /// The loop's next word to a session.
    pub fn for_word<T>(&self, words: &Receiver<T>, wait: Wait) -> Result<T, Broken> {
        self.during(wait, || words.recv_timeout(wait.bound()))
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => Broken(wait.said()),
                RecvTimeoutError::Disconnected => Broken("the VM loop has gone".into()),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::unbounded;

    #[test]
    fn a_wait_is_seen_while_it_lasts() {
        let waiting = Waiting::default();
        let seen = waiting.clone();
        let named = waiting.during(Wait::VmStops, || seen.now().map(|(wait, _)| wait));
        assert_eq!(named, Some(Wait::VmStops));
        assert_eq!(waiting.now(), None);
    }

    #[test]
    fn a_word_that_does_not_come_is_not_waited_for_for_ever() {
        let waiting = Waiting::default();
        let (sender, words) = unbounded::<()>();
        let Broken(why) = waiting.for_word(&words, Wait::LineDrawn).unwrap_err();
        assert_eq!(why, Wait::LineDrawn.said());
        drop(sender);
        let Broken(why) = waiting.for_word(&words, Wait::LineDrawn).unwrap_err();
        assert_eq!(why, "the VM loop has gone");
    }
}
