//! How a program's inputs stand, for the driver: what waits, what is owed, what was seen. It decides nothing.

use super::{Counters, Gate, MOST_WAITING_BYTES};

impl Gate {
    /// What was seen so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.waiting.is_empty() && self.resting.is_none()
    }

    /// What waits to be delivered.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        self.queue_bytes
    }

    /// Whether something waits until what was delivered is read: an input or a time.
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.queue.is_empty() || self.resting.is_some()
    }

    /// How many inputs and times wait.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// What may wait.
    #[must_use]
    pub fn most_waiting_bytes(&self) -> usize {
        MOST_WAITING_BYTES
    }

    /// How many inputs the program may be about to answer: they are not known to be read, and nothing was said on their connections.
    #[must_use]
    pub fn owed(&self) -> usize {
        self.waiting.iter().filter(|waiting| waiting.is_silent).count()
    }
}
