//! What a program has of its host's favour: no more than any other program, whatever the daemon's unit has.
//!
//! Decides:    nothing.
//! Flow:       the program's own process, or a visitor's, before it gives up its rights -> here. pid 1 of a copy that was brought -> `judge`.
//! Invariants: 1. it makes system calls alone: a visitor's process is the forked child of a daemon with threads; 2. nothing is given that it had
//!             not.
//! Source:     getrlimit(2); proc(5), oom_score_adj. Not here: control groups (`crate::limits`).

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::CStr;
use std::io;

/// The kernel's own default for memory that is not swapped out.
const LOCKED_BYTES: u64 = 8 << 20;

/// Of this process.
pub(super) fn take() -> io::Result<()> {
    // Real time and a priority above others' would take processors from the daemon.
    for (resource, most) in [
        (Resource::Rtprio, 0),
        (Resource::Nice, 0),
        (Resource::Memlock, LOCKED_BYTES),
    ] {
        let has = getrlimit(resource);
        let less = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
        let limit = Rlimit {
            current: less(has.current),
            maximum: less(has.maximum),
        };
        setrlimit(resource, limit)?;
    }
    judge(c"/proc/self/oom_score_adj")
}

/// Where memory is short it is no later than others to go. Of a process by that file of its own.
pub(super) fn judge(file: &CStr) -> io::Result<()> {
    let file = open(file, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = [0; 16];
    rustix::io::read(&file, &mut text)?;
    if text[0] == b'-' {
        rustix::io::write(&file, b"0")?;
    }
    Ok(())
}
