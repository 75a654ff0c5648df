//! The filter that hands a brought process' `getrandom` to its host.
//!
//! CRIU brings the filter that a process had, and nobody listens to it: so each thread is made to take one more, whose answers come before the
//! older one's. Its statements lie for a moment on the thread's own stack: whatever a process has executed since it began, it has one.
//!
//! Decides:    nothing.
//! Flow:       a thread of the daemon stops each thread of the process -> seccomp(2) -> its listener is taken over -> it stands still as before.
//! Source:     seccomp(2), pidfd_getfd(2), ptrace(2). Not here: the answers (`crate::answers`).

use super::filter::{Filter, LISTENS};
use super::injected::{stopped, system_call};
use super::tracked::SUSPEND_SECCOMP;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::File;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

const PAGE_BYTES: u64 = 4096;
/// `struct sock_fprog`: how many statements, and where they are.
const HEAD_BYTES: usize = 16;
const STATEMENT_BYTES: usize = 8;

/// Of all threads of a process that stands still.
pub(crate) fn to(process: u32) -> io::Result<Vec<OwnedFd>> {
    let number = rustix::process::Pid::from_raw(process as i32).ok_or(Errno::ESRCH)?;
    let handle = pidfd_open(number, PidfdFlags::empty())?;
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{process}/mem"))?;
    let mut listeners = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let name = thread?.file_name();
        let thread = name.to_str().and_then(|name| name.parse().ok());
        let thread = Pid::from_raw(thread.ok_or(Errno::ESRCH)?);
        seize(thread)?;
        let taken = take(thread, &handle, &memory);
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

fn take(thread: Pid, process: &OwnedFd, memory: &File) -> io::Result<OwnedFd> {
    ptrace::interrupt(thread)?;
    stopped(thread)?;
    // What it has pushed last lies there: so it is mapped, and no other page need be.
    let at = ptrace::getregs(thread)?.rsp.wrapping_sub(1) & !(PAGE_BYTES - 1);
    let filter = filter_at(at);
    let mut before = vec![0; filter.len()];
    memory.read_exact_at(&mut before, at)?;
    memory.write_all_at(&filter, at)?;
    let install = |flags: libc::c_ulong| {
        let mode = u64::from(libc::SECCOMP_SET_MODE_FILTER);
        system_call(thread, libc::SYS_seccomp, [mode, flags, at, 0, 0, 0])
    };
    let listener = install(LISTENS).or_else(|_| install(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER));
    // Whatever became of it: nobody looks at a process that is not as it was.
    memory.write_all_at(&before, at)?;
    let listener = listener?;
    let ours = pidfd_getfd(process, listener as RawFd, PidfdGetfdFlags::empty());
    system_call(thread, libc::SYS_close, [listener, 0, 0, 0, 0, 0])?;
    Ok(ours?)
}

/// As the kernel takes it, where it lies at that address.
fn filter_at(at: u64) -> Vec<u8> {
    let statements = Filter::new(true, false).statements();
    let mut bytes = vec![0; HEAD_BYTES];
    bytes[..2].copy_from_slice(&((statements.len() / STATEMENT_BYTES) as u16).to_ne_bytes());
    bytes[8..].copy_from_slice(&(at + HEAD_BYTES as u64).to_ne_bytes());
    bytes.extend(statements);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::{Answers, Clock};
    use crate::chance::{Chance, of_number};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::sync::Arc;

    const SEED: u64 = 7;
    /// Ends by itself where nobody answers.
    const DRAWS: &str = "
import os, signal, sys
signal.alarm(60)
print('here', flush=True)
sys.stdin.readline()
print(os.getrandom(8).hex(), flush=True)
";

    #[test]
    fn a_filter_is_no_longer_than_a_page() {
        assert!(filter_at(0).len() as u64 <= PAGE_BYTES);
    }

    /// It has executed another program behind its filter: it has no page of its host's, and nobody listens any more.
    #[test]
    fn what_was_executed_later_draws_from_its_host_too() {
        let mut command = Command::new("python3");
        command
            .args(["-c", DRAWS])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let filter = Filter::new(true, false);
        let behind = move || {
            nix::sys::prctl::set_no_new_privs()?;
            filter.install().map(drop)
        };
        // SAFETY: between fork and exec it makes system calls alone.
        unsafe { command.pre_exec(behind) };
        let mut program = command.spawn().expect("python3 (cargo xtask setup)");
        let mut told = BufReader::new(program.stdout.take().expect("a pipe"));
        let mut line = String::new();
        told.read_line(&mut line).expect("it prints");
        assert_eq!(line, "here\n");
        let mut listeners = to(program.id()).expect("it is made to");
        assert_eq!(listeners.len(), 1, "of its one thread");
        let listener = listeners.pop().expect("one");
        let answers = Answers::start(listener, SEED, Arc::new(Clock::starting_now())).expect("a thread");
        let mut asks = program.stdin.take().expect("a pipe");
        asks.write_all(b"\n").expect("it reads");
        line.clear();
        told.read_line(&mut line).expect("it prints");
        let mut expected = [0; 8];
        Chance::new(of_number(SEED)).fill(program.id(), &mut expected);
        let expected: String = expected.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(line.trim(), expected);
        program.wait().expect("it ends");
        drop(answers);
    }
}
