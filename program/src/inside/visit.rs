//! A command that a person runs beside the program, in its namespaces and behind its walls.
//!
//! Decides:    its process id: far beyond the program's, whose next process is to have the same id in every copy.
//! Flow:       the daemon's forked child -> the copy's namespaces -> a process in them -> walls -> exec. The child that was forked waits,
//!             and ends with the command's exit code.
//! Invariants: 1. when whoever asked goes, so does the command (PR_SET_PDEATHSIG); with the copy's pid 1 it goes too, by the kernel's
//!             rule; 2. it has no capability, no user and no system call that the program has not.
//! Source:     setns(2), clone3(2) (`set_tid`). Not here: who may do that (`dunlin`).

use super::filter::Filter;
use super::init::behind;
use super::waited::{Waited, wait_for};
use crate::message::Walls;
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use std::io;
use std::os::fd::OwnedFd;

/// Beyond the ids of a program's processes, below the least that a kernel's greatest may be.
pub(crate) const FIRST_ID: u32 = 31_000;
/// More commands than are let in at once.
const IDS: u32 = 256;
/// What a shell says of a command that a signal has ended.
const BY_SIGNAL: i32 = 128;

/// In the daemon's forked child, before exec. Only who is to exec returns.
pub(crate) fn enter(
    namespaces: &[OwnedFd],
    groups: &[OwnedFd],
    walls: &Walls,
    filter: &Filter,
) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    for group in groups {
        // Itself, whatever its number is called there.
        rustix::io::write(group, b"0")?;
    }
    for namespace in namespaces {
        setns(namespace, CloneFlags::empty())?;
    }
    if let Some(command) = fork_far_away()? {
        wait_in_its_place(command);
    }
    nix::unistd::setsid()?;
    behind(walls)?;
    filter.install()?;
    // A change of credentials clears it; whoever waits may have gone meanwhile, and is then seen as another namespace's.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    Ok(())
}

/// The child's id as the parent sees it; none in the child.
pub(super) fn fork_far_away() -> io::Result<Option<Pid>> {
    for id in FIRST_ID..FIRST_ID + IDS {
        let id = id as libc::pid_t;
        // SAFETY: all of the structure's values may be zero, which is "none".
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        arguments.exit_signal = libc::SIGCHLD as u64;
        arguments.set_tid = &raw const id as u64;
        arguments.set_tid_size = 1;
        // SAFETY: as fork(2) in a process with one thread: this one was just forked.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of_val(&arguments)) };
        match pid {
            0 => return Ok(None),
            1.. => return Ok(Some(Pid::from_raw(pid as libc::pid_t))),
            _ if Errno::last() == Errno::EEXIST => {}
            _ => return Err(io::Error::last_os_error()),
        }
    }
    Err(Errno::EAGAIN.into())
}

/// Holds nothing that the daemon waits for, and ends as the command does.
pub(super) fn wait_in_its_place(command: Pid) -> ! {
    // SAFETY: nothing here uses a descriptor any more, and the process ends without a destructor.
    unsafe { libc::close_range(0, libc::c_uint::MAX, 0) };
    let code = loop {
        match wait_for(command) {
            Ok(Waited::Exited(code)) => break code,
            Ok(Waited::Killed(signal)) => break BY_SIGNAL + signal,
            Ok(_) => {}
            Err(_) => break 1,
        }
    };
    // SAFETY: no destructor and no atexit of the daemon's is this process's.
    unsafe { libc::_exit(code) }
}
