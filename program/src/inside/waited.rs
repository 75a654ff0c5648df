//! What the kernel says of a child or of who is traced, by numbers.
//!
//! Decides:    nothing.
//! Invariants: 1. whatever the kernel has said is told: `nix::sys::wait::waitpid` takes a status with a real-time signal (34 to 64) for an error,
//!             when the kernel has forgotten it already.
//! Source:     waitpid(2), ptrace(2). Not here: what follows from it.

use nix::errno::Errno;
use nix::unistd::Pid;

/// What has become of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waited {
    /// It has ended, with that exit code.
    Exited(i32),
    /// That signal has ended it.
    Killed(i32),
    /// That signal has stopped it, or is about to reach it.
    Stopped(i32),
    /// At a system call (`PTRACE_O_TRACESYSGOOD`).
    AtSystemCall,
    /// By its tracer, by that event.
    Event(i32),
    /// It goes on.
    Continued,
}

/// PTRACE_O_TRACESYSGOOD.
const AT_SYSTEM_CALL: i32 = libc::SIGTRAP | 0x80;

/// Of this one, or of any: threads as well, and with these flags. None with `WNOHANG` where nothing has become of it. A signal in between is no
/// reason to return.
pub(super) fn wait(of: Option<Pid>, flags: libc::c_int) -> Result<Option<(Pid, Waited)>, Errno> {
    let of = of.map_or(-1, Pid::as_raw);
    loop {
        let mut status = 0;
        // SAFETY: it writes one number, which is there.
        let pid = unsafe { libc::waitpid(of, &raw mut status, flags | libc::__WALL) };
        match pid {
            0 => return Ok(None),
            1.. => return Ok(Some((Pid::from_raw(pid), Waited::of(status)))),
            _ if Errno::last() == Errno::EINTR => {}
            _ => return Err(Errno::last()),
        }
    }
}

/// Until something has become of it.
pub(super) fn wait_for(process: Pid) -> Result<Waited, Errno> {
    let waited = wait(Some(process), 0)?;
    waited.map(|(_, waited)| waited).ok_or(Errno::ECHILD)
}

/// It goes on, with that signal where it is not 0.
pub(super) fn go_on(process: Pid, signal: i32) -> Result<(), Errno> {
    resume(process, libc::PTRACE_CONT, signal)
}

/// As `go_on`, to its next system call or out of it.
pub(super) fn go_on_to_system_call(process: Pid, signal: i32) -> Result<(), Errno> {
    resume(process, libc::PTRACE_SYSCALL, signal)
}

fn resume(process: Pid, how: libc::c_uint, signal: i32) -> Result<(), Errno> {
    // SAFETY: no memory of this process is given to the kernel.
    let resumed = unsafe { libc::ptrace(how, process.as_raw(), 0_usize, signal as usize) };
    Errno::result(resumed).map(drop)
}

impl Waited {
    fn of(status: i32) -> Self {
        if libc::WIFEXITED(status) {
            return Self::Exited(libc::WEXITSTATUS(status));
        }
        if libc::WIFSIGNALED(status) {
            return Self::Killed(libc::WTERMSIG(status));
        }
        if !libc::WIFSTOPPED(status) {
            return Self::Continued;
        }
        match (status >> 16, libc::WSTOPSIG(status)) {
            (0, AT_SYSTEM_CALL) => Self::AtSystemCall,
            (0, signal) => Self::Stopped(signal),
            (event, _) => Self::Event(event),
        }
    }
}

/// Signals, by their numbers: 1 to 64.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Signals(u64);

impl Signals {
    pub(super) fn add(&mut self, signal: i32) {
        self.0 |= Self::bit(signal);
    }

    /// To that thread.
    pub(super) fn send(self, thread: Pid) {
        for signal in (1..=64).filter(|signal| self.0 & Self::bit(*signal) != 0) {
            // SAFETY: a plain call.
            unsafe { libc::syscall(libc::SYS_tkill, thread.as_raw(), signal) };
        }
    }

    fn bit(signal: i32) -> u64 {
        1_u64.checked_shl(signal.wrapping_sub(1) as u32).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const REAL_TIME: i32 = 34;

    #[test]
    fn an_end_by_a_real_time_signal_is_told() {
        let mut child = Command::new("/bin/sleep").arg("600").spawn().expect("it begins");
        let process = Pid::from_raw(child.id() as i32);
        for signal in [REAL_TIME, 64] {
            assert_eq!(Waited::of(signal), Waited::Killed(signal));
        }
        // SAFETY: a plain call.
        unsafe { libc::kill(process.as_raw(), 64) };
        assert_eq!(wait_for(process), Ok(Waited::Killed(64)));
        assert_eq!(wait_for(process), Err(Errno::ECHILD), "it was collected");
        assert!(child.wait().is_err(), "it was collected");
    }

    #[test]
    fn what_a_tracer_hears_is_told_apart() {
        let stopped = |signal: i32| signal << 8 | 0x7f;
        assert_eq!(Waited::of(7 << 8), Waited::Exited(7));
        assert_eq!(Waited::of(stopped(REAL_TIME)), Waited::Stopped(REAL_TIME));
        assert_eq!(Waited::of(stopped(AT_SYSTEM_CALL)), Waited::AtSystemCall);
        let event = libc::PTRACE_EVENT_EXEC;
        assert_eq!(
            Waited::of(event << 16 | stopped(libc::SIGTRAP)),
            Waited::Event(event)
        );
        assert_eq!(Waited::of(0xffff), Waited::Continued);
    }

    #[test]
    fn each_of_the_signals_has_a_place() {
        let mut signals = Signals::default();
        for signal in 1..=64 {
            signals.add(signal);
            assert_eq!(signals.0.count_ones(), signal as u32);
        }
    }
}
