//! What happened on this host, kept for `dunlin events`: the last few thousand, and a way to wait for more.

use crate::control::Event;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const KEPT: usize = 4096;

/// The host's events. Cheap to clone.
#[derive(Clone)]
pub struct Events {
    shared: Arc<Shared>,
}

struct Shared {
    host: String,
    log: Mutex<Log>,
    more: Condvar,
}

#[derive(Default)]
struct Log {
    next_seq: u64,
    /// How often whoever follows was told to look at the status again.
    nudges: u64,
    kept: VecDeque<Event>,
}

impl Events {
    /// No events yet.
    #[must_use]
    pub fn new(host: &str) -> Self {
        let shared = Shared {
            host: host.to_owned(),
            log: Mutex::default(),
            more: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // A panic elsewhere leaves the list whole: pushes are the last thing done under the lock.
        self.shared.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something happened to `vm`; it is also logged.
    pub fn push(&self, vm: &str, kind: &str, text: impl Into<String>) {
        let text = text.into();
        tracing::info!(vm, kind, "{text}");
        let time_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64);
        let mut log = self.log();
        let seq = log.next_seq;
        log.next_seq += 1;
        log.kept.push_back(Event {
            seq,
            time_ms,
            host: self.shared.host.clone(),
            vm: vm.to_owned(),
            kind: kind.to_owned(),
            text,
        });
        if log.kept.len() > KEPT {
            log.kept.pop_front();
        }
        self.shared.more.notify_all();
    }

    /// The status shows by now what the last events told: whoever waits for events wakes, though there is none.
    pub fn nudge(&self) {
        self.log().nudges += 1;
        self.shared.more.notify_all();
    }

    /// How often it was nudged; give it to [`Self::since`].
    #[must_use]
    pub fn nudges(&self) -> u64 {
        self.log().nudges
    }

    /// What happened from `seq` on; waits for the first of it, or for another nudge than `nudges`, if `wait` is given,
    /// at most that long.
    #[must_use]
    pub fn since(&self, seq: u64, wait: Option<Duration>, nudges: u64) -> Vec<Event> {
        let mut log = self.log();
        if let Some(wait) = wait {
            let waited = self
                .shared
                .more
                .wait_timeout_while(log, wait, |log| log.next_seq <= seq && log.nudges == nudges);
            log = waited
                .map(|(log, _)| log)
                .unwrap_or_else(|poisoned| poisoned.into_inner().0);
        }
        log.kept
            .iter()
            .filter(|event| event.seq >= seq)
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nudge_that_came_before_the_wait_ends_it_and_brings_no_event() {
        let events = Events::new("a");
        events.push("shop", "started", "it runs");
        let before = events.nudges();
        assert_eq!(events.since(0, None, before).len(), 1);
        events.nudge();
        // Without the nudge this would wait for an hour.
        let hour = Some(Duration::from_secs(3600));
        assert!(events.since(1, hour, before).is_empty());
        events.push("shop", "down", "it is shut down");
        let told = events.since(1, hour, events.nudges());
        assert_eq!(told.iter().map(|event| event.seq).collect::<Vec<_>>(), [1]);
    }
}
