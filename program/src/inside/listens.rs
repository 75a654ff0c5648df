//! The filter that hands a brought process' `getrandom` to its host.
//!
//! CRIU brings the filter that a process had, and nobody listens to it: so each thread is made to take one more, whose answers come before the
//! older one's. Its statements lie in the page that the process has mapped.
//!
//! Decides:    nothing.
//! Flow:       a thread of the daemon stops each thread of the process -> seccomp(2) -> its listener is taken over -> it stands still as before.
//! Source:     seccomp(2), pidfd_getfd(2), ptrace(2). Not here: the answers (`crate::answers`).

use super::filter::LISTENS;
use super::injected::{stopped, system_call};
use super::tracked::SUSPEND_SECCOMP;
use crate::page::{AT, FILTER};
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::io;
use std::os::fd::{OwnedFd, RawFd};

/// Of all threads of a process that stands still.
pub(crate) fn to(process: u32) -> io::Result<Vec<OwnedFd>> {
    let number = rustix::process::Pid::from_raw(process as i32).ok_or(Errno::ESRCH)?;
    let handle = pidfd_open(number, PidfdFlags::empty())?;
    let mut listeners = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let name = thread?.file_name();
        let thread = name.to_str().and_then(|name| name.parse().ok());
        let thread = Pid::from_raw(thread.ok_or(Errno::ESRCH)?);
        seize(thread)?;
        let taken = take(thread, &handle);
        // One that has gone is not traced any more.
        let detached = ptrace::detach(thread, None);
        listeners.push(taken?);
        detached?;
    }
    Ok(listeners)
}

/// Without its own filters, which need not let it take one more: a list of what it may call has no seccomp(2) in it.
fn seize(thread: Pid) -> Result<(), Errno> {
    // SAFETY: no memory of this process is given to the kernel.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread.as_raw(), 0_usize, SUSPEND_SECCOMP) };
    match Errno::result(seized) {
        // Only root of the host may ask for that, behind no filter itself.
        Err(Errno::EPERM) => ptrace::seize(thread, Options::empty()),
        seized => seized.map(drop),
    }
}

fn take(thread: Pid, process: &OwnedFd) -> io::Result<OwnedFd> {
    ptrace::interrupt(thread)?;
    stopped(thread)?;
    let install = |flags: libc::c_ulong| {
        let mode = u64::from(libc::SECCOMP_SET_MODE_FILTER);
        system_call(thread, libc::SYS_seccomp, [mode, flags, AT + FILTER, 0, 0, 0])
    };
    let listener = install(LISTENS).or_else(|_| install(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER))?;
    let ours = pidfd_getfd(process, listener as RawFd, PidfdGetfdFlags::empty());
    system_call(thread, libc::SYS_close, [listener, 0, 0, 0, 0, 0])?;
    Ok(ours?)
}
