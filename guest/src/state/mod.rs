//! Is the guest idle? Read from the state letters of QEMU's threads.
//!
//! Decides:    idle or not, at this moment.
//! Flow:       `Qemu::threads` -> the node's loop, between syncs.
//! Invariants: 1. a runnable thread that waits for a core counts as busy.
//! Source:     vm-loop.md "Idle detection": CPU clocks mislead under contention; the state letter of the vCPU threads
//!             and the main thread does not. proc(5).
//! Not here:   frames and disk requests in flight (`frames`, `disk`), how long idle must last (core).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The threads of one QEMU that run guest code or device code.
pub struct ThreadStates {
    stats: Vec<File>,
}

impl ThreadStates {
    /// Opens the main thread (`pid`) and the vCPU threads.
    pub fn new(pid: u32, vcpus: Vec<u32>) -> io::Result<ThreadStates> {
        let open = |tid: u32| File::open(format!("/proc/{pid}/task/{tid}/stat"));
        let stats = std::iter::once(pid)
            .chain(vcpus)
            .map(open)
            .collect::<io::Result<_>>()?;
        Ok(ThreadStates { stats })
    }

    /// All threads sleep. About 2 us a thread. A QEMU that has ended is not idle.
    pub fn idle(&self) -> bool {
        self.letters().all(|letter| letter == Some(b'S'))
    }

    /// The state letter of each thread, the main thread first: `S` sleeps, `R` runs or waits for a core, `D` waits for a
    /// disk; `None` when it has ended.
    pub fn letters(&self) -> impl Iterator<Item = Option<u8>> {
        self.stats.iter().map(|stat| {
            let mut text = [0u8; 128];
            let length = stat.read_at(&mut text, 0).ok()?;
            // "PID (NAME) S ...": the name may hold blanks and brackets, so look for the last bracket.
            let bracket = text[..length].iter().rposition(|b| *b == b')')?;
            text[..length].get(bracket + 2).copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_thread_is_busy_and_a_sleeping_one_is_not() {
        let pid = std::process::id();
        // SAFETY: no arguments.
        let me = unsafe { libc::gettid() } as u32;
        let here = ThreadStates {
            stats: vec![File::open(format!("/proc/{pid}/task/{me}/stat")).unwrap()],
        };
        assert!(!here.idle(), "the thread that asks runs");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let asleep = ThreadStates::new(child.id(), vec![]).unwrap();
        while !asleep.idle() {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!asleep.idle(), "a process that has ended is not idle");
    }
}
