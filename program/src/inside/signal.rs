//! A signal to all processes of a copy, from outside.
//!
//! Decides:    nothing.
//! Flow:       a thread of the daemon -> its forked child -> the copy's pid namespace -> a process there: the newest id, the signal.
//! Invariants: 1. of the copy's files nothing is run or read: it may have written there what it likes, and who sends the signal is root of
//!             the host; 2. it takes no process id that the program would have had next.
//! Source:     kill(2), pid_namespaces(7), `/proc/sys/kernel/ns_last_pid`. Not here: what a signal is for (`guard`).

use super::visit::{fork_far_away, wait_in_its_place};
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// More digits than a process id has.
const DIGITS: usize = 16;

/// Sends it to all but the first process; returns the newest process id, as it was before.
pub(crate) fn to_all(namespace: BorrowedFd<'_>, signal: Signal, within: Duration) -> io::Result<u32> {
    // The kernel tells each reader of its own namespace, wherever the file was opened.
    let newest = File::open("/proc/sys/kernel/ns_last_pid")?;
    let (mut said, says) = io::pipe()?;
    // SAFETY: the child makes system calls alone, and ends without a destructor.
    let child = match unsafe { fork() }? {
        ForkResult::Child => {
            let sent = send(namespace, newest.as_fd(), says.as_fd(), signal);
            // SAFETY: no destructor and no atexit of the daemon's is this process's.
            unsafe { libc::_exit(i32::from(sent.is_err())) }
        }
        ForkResult::Parent { child } => Sender(child),
    };
    drop(says);
    let until = Instant::now() + within;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap_or_default();
        match poll(&mut [PollFd::new(&said, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut text = [0; DIGITS];
    let length = said.read(&mut text)?;
    drop(child);
    // It says nothing where there is nobody to send it to, or no namespace any more.
    let newest = std::str::from_utf8(&text[..length])
        .ok()
        .and_then(|text| text.trim().parse().ok());
    newest.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no process of the program is there"))
}

/// In the forked child. Who is outside does not return where somebody is inside.
fn send(
    namespace: BorrowedFd<'_>,
    newest: BorrowedFd<'_>,
    says: BorrowedFd<'_>,
    signal: Signal,
) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    setns(namespace, CloneFlags::CLONE_NEWPID)?;
    if let Some(inside) = fork_far_away()? {
        wait_in_its_place(inside);
    }
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    let mut text = [0; DIGITS];
    let length = rustix::io::read(newest, &mut text)?;
    kill(Pid::from_raw(-1), signal)?;
    rustix::io::write(says, &text[..length])?;
    Ok(())
}

/// What is dropped is killed and collected, with whom it sent inside.
struct Sender(Pid);

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, None);
    }
}
