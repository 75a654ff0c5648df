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

    /// What happened from `seq` on; waits for the first of it if `wait` is given, at most that long.
    #[must_use]
    pub fn since(&self, seq: u64, wait: Option<Duration>) -> Vec<Event> {
        let mut log = self.log();
        if let Some(wait) = wait {
            let waited = self
                .shared
                .more
                .wait_timeout_while(log, wait, |log| log.next_seq <= seq);
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
