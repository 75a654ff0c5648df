//! What the loop wants of a session's thread.
//!
//! Invariant: the loop never waits for the thread. At most seven jobs are under way (a sync, its line, what is worked on ahead, four parts of
//! what connections need), so a queue that is full belongs to a thread that is stuck: it takes no more, as one that has ended.

use crossbeam_channel::{Receiver, Sender, bounded};

/// More than twice what is under way at once.
const MOST: usize = 16;

/// The loop's end.
pub struct Jobs<T>(Sender<T>);

/// The thread has ended, or is stuck.
#[derive(Debug)]
pub struct NotTaken;

impl<T> Jobs<T> {
    /// Both ends.
    pub fn pair() -> (Self, Receiver<T>) {
        let (sender, receiver) = bounded(MOST);
        (Self(sender), receiver)
    }

    /// Hands a job over, without waiting.
    pub fn send(&self, job: T) -> Result<(), NotTaken> {
        self.0.try_send(job).map_err(|_| NotTaken)
    }

    /// How many it has not taken yet.
    pub fn waiting(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_takes_no_jobs_gets_a_bounded_number_and_the_loop_never_waits() {
        let (jobs, thread) = Jobs::pair();
        let taken = (0..10 * MOST).take_while(|job| jobs.send(*job).is_ok()).count();
        assert_eq!(taken, MOST);
        assert!(
            thread.try_recv().is_ok() && jobs.send(0).is_ok(),
            "there is room again"
        );
        drop(thread);
        assert!(jobs.send(0).is_err());
    }
}
