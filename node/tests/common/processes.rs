//! Processes of this machine, and whether they end.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Processes whose command line has these words.
pub fn processes_with(words: &str) -> Vec<OwnedFd> {
    let numbers = fs::read_dir("/proc").expect("/proc").filter_map(|entry| {
        let number: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let line = fs::read(format!("/proc/{number}/cmdline")).ok()?;
        let has = line.windows(words.len()).any(|part| part == words.as_bytes());
        has.then_some(number)
            .filter(|number| *number != std::process::id() as i32)
    });
    numbers
        .filter_map(|number| pidfd_open(Pid::from_raw(number)?, PidfdFlags::empty()).ok())
        .collect()
}

/// Whether it does so in time.
pub fn ends(process: &OwnedFd, within: Duration) -> bool {
    let bound = Timespec::try_from(within).expect("a time");
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    poll(&mut polled, Some(&bound)).is_ok_and(|ready| ready > 0)
}
