//! A command that a person runs beside the program, in its namespaces and behind its walls.
//!
//! Decides:    its process id: far beyond the program's, whose next process is to have the same id in every copy; so who is a visitor.
//! Flow:       the daemon's forked child -> the copy's namespaces -> a process in them -> walls -> exec. The child that was forked waits,
//!             and ends with the command's exit code.
//! Invariants: 1. when whoever asked goes, so does the command (PR_SET_PDEATHSIG); with the copy's pid 1 it goes too, by the kernel's
//!             rule; 2. it has no capability, no user and no system call that the program has not.
//! Source:     setns(2), clone3(2) (`set_tid`). Not here: who may do that (`dunlin`).

use super::filter::Filter;
use super::init::behind;
use super::waited::{Waited, wait_for};
use crate::message::Walls;
use crate::proc::text;
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;

/// A program gets the ids near the kernel's greatest one last: visitors have some that are so far below it.
const BELOW_GREATEST: u32 = 1_768;
/// Their first one below the usual greatest id: taken where the kernel does not tell, or where the greatest one leaves no room.
const USUAL_FIRST_ID: u32 = 31_000;
const LEAST_FIRST_ID: u32 = 2_000;
/// More commands than are let in at once.
const IDS: u32 = 256;
/// What a shell says of a command that a signal has ended.
pub(crate) const BY_SIGNAL: i32 = 128;

/// The first id that a visitor may have. It is read once: whoever has got one is known by it, however that setting is changed later.
pub(crate) fn first_id() -> u32 {
    static FIRST_ID: LazyLock<u32> =
        LazyLock::new(|| first_below(&text("/proc/sys/kernel/pid_max").unwrap_or_default()));
    *FIRST_ID
}

fn first_below(greatest: &str) -> u32 {
    let greatest: Option<u32> = greatest.trim().parse().ok();
    let first = greatest.and_then(|greatest| greatest.checked_sub(BELOW_GREATEST));
    first
        .filter(|first| *first >= LEAST_FIRST_ID)
        .unwrap_or(USUAL_FIRST_ID)
}

/// Whether whoever has this id was let in. Those beyond are the program's again: a pid namespace may have greater ids than the one around it.
pub(crate) fn is_visitor(id: u32) -> bool {
    (first_id()..first_id() + IDS).contains(&id)
}

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
    for id in first_id()..first_id() + IDS {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visitors_have_ids_that_a_program_gets_late() {
        assert_eq!(first_below("4194304\n"), 4_192_536);
        assert_eq!(first_below("32768\n"), 31_000);
        for greatest in ["301\n", "1767\n", "", "nonsense"] {
            assert_eq!(first_below(greatest), USUAL_FIRST_ID, "{greatest}");
        }
    }

    #[test]
    fn a_program_that_has_used_up_the_ids_before_a_visitors_is_none() {
        let first = first_id();
        assert!(is_visitor(first) && is_visitor(first + IDS - 1));
        assert!(!is_visitor(first - 1) && !is_visitor(first + IDS));
    }
}
