//! Threads that are waited for with a bound: what they wait for may be a disk that does not answer.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// They are looked at so often.
const LOOK: Duration = Duration::from_millis(5);

/// Waits until all of them have ended, `at_most` so long: what a disk keeps ends with the process. How many have not.
pub fn await_all(mut threads: Vec<JoinHandle<()>>, at_most: Duration) -> usize {
    let until = Instant::now() + at_most;
    loop {
        threads.retain(|thread| !thread.is_finished());
        if threads.is_empty() || Instant::now() >= until {
            return threads.len();
        }
        std::thread::sleep(LOOK);
    }
}
