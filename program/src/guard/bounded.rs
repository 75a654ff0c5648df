//! What the host's own tools do here: each with a bound, beyond which it is killed with all that it has started.
//!
//! Not here: which tools (`guard`, `guard::criu`).

use super::{GuardError, failed};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What is dropped is killed and collected.
pub(super) struct Collected(pub(super) Child);

impl Drop for Collected {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that runs, in a process group of its own.
pub(super) struct Bounded {
    child: Collected,
    pid: Pid,
    ended: OwnedFd,
    within: Duration,
    until: Instant,
    what: String,
}

impl Bounded {
    pub(super) fn begin(command: &mut Command, within: Duration, what: &str) -> Result<Self, GuardError> {
        let child = Collected(command.process_group(0).spawn().map_err(failed(what))?);
        let pid = Pid::from_child(&child.0);
        let ended = pidfd_open(pid, PidfdFlags::empty()).map_err(failed(what))?;
        let until = Instant::now() + within;
        Ok(Self {
            child,
            pid,
            ended,
            within,
            until,
            what: what.to_owned(),
        })
    }

    /// Until there is something to read, or it has ended: then not.
    pub(super) fn until_readable(&self, other: BorrowedFd<'_>) -> Result<bool, GuardError> {
        let mut fds = [
            PollFd::from_borrowed_fd(other, PollFlags::IN),
            PollFd::new(&self.ended, PollFlags::IN),
        ];
        self.poll(&mut fds)?;
        Ok(!fds[0].revents().is_empty())
    }

    /// It has as long again from now on: it has waited so far.
    pub(super) fn renew(&mut self) {
        self.until = Instant::now() + self.within;
    }

    pub(super) fn end(mut self) -> Result<ExitStatus, GuardError> {
        let ended = self.ended.try_clone().map_err(failed(&self.what))?;
        self.poll(&mut [PollFd::new(&ended, PollFlags::IN)])?;
        self.child.0.wait().map_err(failed(&self.what))
    }

    fn poll(&self, fds: &mut [PollFd<'_>]) -> Result<(), GuardError> {
        let failed = failed(&self.what);
        loop {
            let left =
                Timespec::try_from(self.until.saturating_duration_since(Instant::now())).unwrap_or_default();
            match poll(fds, Some(&left)) {
                Ok(0) => break,
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        // Its own end follows with it; what it has started would go on.
        let _ = kill_process_group(self.pid, Signal::KILL);
        let (what, within) = (&self.what, self.within.as_secs());
        Err(GuardError(format!("{what}: not within {within} s")))
    }
}

/// Runs it, and returns what little it prints.
pub(super) fn run(
    command: &mut Command,
    within: Duration,
    what: &str,
) -> Result<(ExitStatus, String), GuardError> {
    let (mut reader, writer) = io::pipe().map_err(failed(what))?;
    command.stdout(writer).stderr(Stdio::null());
    let status = Bounded::begin(command, within, what).and_then(Bounded::end);
    // Our copy of the writing end goes with it.
    command.stdout(Stdio::null());
    let status = status?;
    let mut said = String::new();
    reader.read_to_string(&mut said).map_err(failed(what))?;
    Ok((status, said))
}

pub(super) fn ended_well(status: ExitStatus, what: &str) -> Result<(), GuardError> {
    match status.success() {
        true => Ok(()),
        false => Err(GuardError(format!("{what}: {status}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_too_long_is_killed_with_all_that_it_started() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!; wait"]);
        let begun = Instant::now();
        let why = run(&mut command, Duration::from_millis(200), "a step").unwrap_err();
        assert_eq!(why.to_string(), "a step: not within 0 s");
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_bound_that_is_over_counts_no_more_when_it_is_renewed() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 0.2"]);
        let within = Duration::from_secs(20);
        let mut bounded = Bounded::begin(&mut command, within, "a step").expect("it begins");
        bounded.until = Instant::now();
        bounded.renew();
        assert!(bounded.end().expect("it ends").success());
    }
}
