//! CRIU is let begin while the program runs, and held before it looks at it: what it finds out about the kernel takes longer than the dump.
//!
//! Decides:    nothing.
//! Flow:       `stranger` -> mounts that are neither the host's nor the copy's, with a /proc of the copy's processes -> it waits at its gate, is
//!             traced, and goes on up to `HOLDS` -> told so, when the program stands still: it enters the copy's mounts, and goes on untraced.
//! Invariants: 1. while the program runs nothing that it can write to is seen from here: CRIU makes folders in /tmp and mounts over them, and a
//!             program as root could put others in their place meanwhile; 2. where CRIU looks at a process before it was held it is killed;
//!             3. its working folder is that of the images, as if it had begun in the copy's mounts; 4. it ends with who traces it.
//! Source:     CRIU's `cr_dump_tasks`, which begins by lifting its limit of descriptors; ptrace(2): PTRACE_O_TRACESYSGOOD. Not here: what is told to
//!             whom (`stranger`).

use super::injected::{Whose, becomes, stopped, system_call};
use super::waited::{Waited, go_on_to_system_call, wait_for};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::ptrace::{self, Options};
use nix::unistd::Pid;
use std::os::fd::RawFd;

/// Where CRIU keeps what it has found out about the kernel.
const KEEPS: &str = "/run";
/// Where its images are: its standard input.
const IMAGES: u64 = 0;

/// In who is to exec: mounts of its own, as the host has them.
pub(super) fn see_own_processes() -> Result<(), Errno> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, none)?;
    // It would keep what it finds out there, for who begins it next.
    match mount(Some(KEEPS), KEEPS, none, MsFlags::MS_BIND | MsFlags::MS_REC, none) {
        Err(Errno::ENOENT) => return Ok(()),
        bound => bound?,
    }
    let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(none, KEEPS, none, read_only | flags, none)
}

/// Stops it, and lets it go on from system call to system call when that is continued.
pub(super) fn trace(stranger: Pid) -> Result<(), Errno> {
    ptrace::seize(
        stranger,
        Options::PTRACE_O_EXITKILL | Options::PTRACE_O_TRACESYSGOOD,
    )?;
    ptrace::interrupt(stranger)?;
    stopped(stranger)
}

/// Until it is about to look at the program: it stands behind a system call then.
pub(super) fn hold(stranger: Pid) -> Result<(), Errno> {
    let mut signal = 0;
    let mut is_at_limit = false;
    loop {
        go_on_to_system_call(stranger, std::mem::take(&mut signal))?;
        match wait_for(stranger)? {
            Waited::AtSystemCall if is_at_limit => return Ok(()),
            Waited::AtSystemCall => {
                let registers = ptrace::getregs(stranger)?;
                is_at_limit = match registers.orig_rax as libc::c_long {
                    libc::SYS_prlimit64 => lifts_descriptors(registers.rsi, registers.rdx),
                    // Invariant 2.
                    libc::SYS_ptrace if registers.rdi == u64::from(libc::PTRACE_SEIZE) => {
                        return Err(Errno::EPERM);
                    }
                    _ => false,
                };
            }
            // What its own children tell it.
            Waited::Stopped(libc::SIGSTOP) | Waited::Event(_) => {}
            Waited::Stopped(its) => signal = its,
            _ => return Err(Errno::ECHILD),
        }
    }
}

/// It enters the copy's mounts, and is let go.
pub(super) fn let_in(stranger: Pid, mounts: RawFd, whose: Option<Whose>) -> Result<(), Errno> {
    let mounts = mounts as u64;
    let call = |number, first, second| system_call(stranger, number, [first, second, 0, 0, 0, 0]);
    call(libc::SYS_setns, mounts, libc::CLONE_NEWNS as u64)?;
    call(libc::SYS_fchdir, IMAGES, 0)?;
    call(libc::SYS_close, mounts, 0)?;
    becomes(stranger, whose)?;
    ptrace::detach(stranger, None)
}

fn lifts_descriptors(which: u64, new: u64) -> bool {
    which == u64::from(libc::RLIMIT_NOFILE) && new != 0
}
