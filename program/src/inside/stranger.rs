//! A program of the host's that works in a copy, with the host's rights: CRIU. It must run nothing that the copy has written.
//!
//! Decides:    nothing.
//! Flow:       the daemon's forked child -> all namespaces of the copy but its mounts -> a process in them -> exec, loader and libraries, from
//!             the *host's* files -> it waits for its first input -> told so, the forked child has it enter the copy's mounts -> it goes on.
//! Invariants: 1. when it comes into the copy's mounts, all of its code is loaded; 2. of what it would read there and believe, nothing is
//!             left (`BELIEVED`); 3. whoever waits for it can end it: it dies with the forked child, and that one with the daemon's thread;
//!             4. it takes no process id that the program would have had next.
//! Source:     setns(2) and ptrace(2): only a process itself can change its mounts, so it is made to. Not here: what it is told (`guard`).

use super::held;
use super::injected::{Whose, stopped, system_call};
use super::visit::{fork_far_away, wait_in_its_place};
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, UnlinkatFlags, unlinkat};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{PidfdFlags, pidfd_open};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// What CRIU keeps of what it found out about the kernel: it takes the file for its own.
const BELIEVED: &CStr = c"/run/criu.kdat";
/// How the forked child ends where it could not bring it in.
const NOT_LET_IN: i32 = 125;
const WORD: u8 = 1;

/// The way into a copy.
pub(crate) struct Door {
    /// All that it enters before exec, its processes' among them.
    pub(crate) namespaces: Vec<OwnedFd>,
    /// What it enters at last.
    pub(crate) mounts: OwnedFd,
    /// The control groups that it is in.
    pub(crate) groups: Vec<OwnedFd>,
    /// Who waits outside says a byte when it may enter its mounts, and hears one when it has. Where it is held, it hears one when it is
    /// traced, one when it is held, and says a second byte then.
    pub(crate) knock: OwnedFd,
    /// It begins while the program runs, and is held (`held`).
    pub(crate) held: bool,
    /// Whose one that was held counts as from then on, if not root's.
    pub(crate) whose: Option<Whose>,
    /// What it gets beside its standard streams.
    pub(crate) given: Vec<OwnedFd>,
}

impl Door {
    /// In the daemon's forked child, before exec. Only who is to exec returns.
    pub(crate) fn enter(&self) -> io::Result<()> {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        for group in &self.groups {
            // Itself, whatever its number is called there.
            rustix::io::write(group, b"0")?;
        }
        for namespace in &self.namespaces {
            setns(namespace, CloneFlags::empty())?;
        }
        if let Some(stranger) = fork_far_away()? {
            self.keep(stranger);
        }
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        if self.held {
            held::see_own_processes()?;
        }
        // Only until it is in.
        fcntl_setfd(&self.mounts, FdFlags::empty())?;
        for given in &self.given {
            fcntl_setfd(given, FdFlags::empty())?;
        }
        Ok(())
    }

    /// The one who stays outside: brings it in when told so, and ends as it does.
    fn keep(&self, stranger: Pid) -> ! {
        let (knock, mounts) = (self.knock.as_raw_fd(), self.mounts.as_raw_fd());
        close_all_but([knock, mounts]);
        match is_told(self.knock.as_fd(), stranger) {
            Ok(true) => {}
            // It could not exec: whoever started it hears of that in another way.
            Ok(false) => wait_in_its_place(stranger),
            // SAFETY: no destructor and no atexit of the daemon's is this process's.
            Err(_) => unsafe { libc::_exit(NOT_LET_IN) },
        }
        let is_held = match self.held {
            true => self.hold(stranger),
            false => Ok(()),
        };
        let let_in = is_held
            .and_then(|()| forget_what_is_believed(self.mounts.as_fd()))
            .and_then(|()| match self.held {
                true => held::let_in(stranger, mounts, self.whose),
                false => move_in(stranger, mounts),
            })
            .and_then(|()| self.says());
        if let_in.is_err() {
            // It dies with this process (invariant 3).
            // SAFETY: no destructor and no atexit of the daemon's is this process's.
            unsafe { libc::_exit(NOT_LET_IN) }
        }
        wait_in_its_place(stranger)
    }

    /// Until the program stands still.
    fn hold(&self, stranger: Pid) -> Result<(), Errno> {
        held::trace(stranger)?;
        self.says()?;
        held::hold(stranger)?;
        self.says()?;
        match is_told(self.knock.as_fd(), stranger)? {
            true => Ok(()),
            false => Err(Errno::ECHILD),
        }
    }

    fn says(&self) -> Result<(), Errno> {
        let said = rustix::io::write(&self.knock, &[WORD]);
        said.map(drop).map_err(|_| Errno::EPIPE)
    }
}

/// Nothing of the daemon's is held: whoever waits for its end would wait for this process.
fn close_all_but(mut kept: [RawFd; 2]) {
    kept.sort_unstable();
    let mut from = 0;
    for fd in kept.map(|fd| fd as libc::c_uint) {
        if fd > from {
            // SAFETY: nothing here uses these any more, and the process ends without a destructor.
            unsafe { libc::close_range(from, fd - 1, 0) };
        }
        from = fd + 1;
    }
    // SAFETY: as above.
    unsafe { libc::close_range(from, libc::c_uint::MAX, 0) };
}

/// Whether it is to come in; not where it has ended before.
fn is_told(knock: BorrowedFd<'_>, stranger: Pid) -> Result<bool, Errno> {
    let stranger = rustix::process::Pid::from_raw(stranger.as_raw()).ok_or(Errno::ESRCH)?;
    let failed = |error: rustix::io::Errno| Errno::from_raw(error.raw_os_error());
    let ended = pidfd_open(stranger, PidfdFlags::empty()).map_err(failed)?;
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(knock, PollFlags::IN),
            PollFd::new(&ended, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(failed(error)),
        }
        if fds[0].revents().is_empty() {
            return Ok(false);
        }
        return match rustix::io::read(knock, &mut [0]) {
            Ok(1) => Ok(true),
            // Nobody waits for it any more.
            _ => Err(Errno::EPIPE),
        };
    }
}

/// Invariant 2: in the copy's own view, which this process enters for that, and runs nothing of.
fn forget_what_is_believed(mounts: BorrowedFd<'_>) -> Result<(), Errno> {
    setns(mounts, CloneFlags::CLONE_NEWNS)?;
    match unlinkat(rustix::fs::CWD, BELIEVED, UnlinkatFlags::NoRemoveDir) {
        Err(error) if error != Errno::ENOENT => Err(error),
        _ => Ok(()),
    }
}

/// Has it make two system calls: it enters the mounts, and lets go of what led there.
fn move_in(stranger: Pid, mounts: RawFd) -> Result<(), Errno> {
    ptrace::seize(stranger, Options::PTRACE_O_EXITKILL)?;
    ptrace::interrupt(stranger)?;
    stopped(stranger)?;
    let mounts = mounts as u64;
    let enters = [mounts, libc::CLONE_NEWNS as u64, 0, 0, 0, 0];
    system_call(stranger, libc::SYS_setns, enters)?;
    system_call(stranger, libc::SYS_close, [mounts, 0, 0, 0, 0, 0])?;
    ptrace::detach(stranger, None)
}
