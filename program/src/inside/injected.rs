//! System calls that a stopped process is made to make.
//!
//! Flow:       the tracer stops it -> its instruction pointer's next bytes become a system call, for one step -> all is as it was.
//! Source:     ptrace(2). Not here: why (`stranger`, `clock`, `guard::whose`).

use super::waited::{Signals, Waited, wait_for};
use nix::errno::Errno;
use nix::sys::ptrace::{self, AddressType};
use nix::unistd::Pid;

/// The machine's instruction for a system call, as the lowest bytes of a word.
const SYSCALL: libc::c_long = 0x050f;

/// As whom a process counts where it asks about another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Whose {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// An id that stays as it is.
const SAME: u64 = u32::MAX as u64;

/// Its real ids become these. What it may do is decided by its effective ones, which stay.
pub(super) fn becomes(process: Pid, whose: Option<Whose>) -> Result<(), Errno> {
    let Some(whose) = whose else { return Ok(()) };
    let call = |number, real: u32| system_call(process, number, [real.into(), SAME, SAME, 0, 0, 0]);
    call(libc::SYS_setresgid, whose.group)?;
    call(libc::SYS_setresuid, whose.user)?;
    Ok(())
}

/// In a process that is stopped, and is then as it was. What the call returns.
pub(super) fn system_call(process: Pid, number: libc::c_long, arguments: [u64; 6]) -> Result<u64, Errno> {
    let before = ptrace::getregs(process)?;
    let here = before.rip as AddressType;
    let code = ptrace::read(process, here)?;
    ptrace::write(process, here, (code & !0xffff) | SYSCALL)?;
    let mut registers = before;
    registers.rax = number as u64;
    // It was in no system call, as far as the kernel's repeating of interrupted ones goes.
    registers.orig_rax = u64::MAX;
    [
        registers.rdi,
        registers.rsi,
        registers.rdx,
        registers.r10,
        registers.r8,
        registers.r9,
    ] = arguments;
    let made = ptrace::setregs(process, registers)
        .and_then(|()| step(process))
        .and_then(|()| ptrace::getregs(process));
    // Whatever became of it: nobody looks at a process that is not as it was.
    ptrace::write(process, here, code)?;
    ptrace::setregs(process, before)?;
    let result = made?.rax as i64;
    match result {
        -4095..0 => Err(Errno::from_raw(result.wrapping_neg() as i32)),
        result => Ok(result as u64),
    }
}

/// One instruction. A process that its tracer has stopped while it stood still already says so twice, the second time in the place of the
/// instruction. A signal that was on its way to it comes first: it gets that when it runs.
pub(super) fn step(process: Pid) -> Result<(), Errno> {
    let mut kept = Signals::default();
    let stepped = loop {
        if let Err(error) = ptrace::step(process, None) {
            break Err(error);
        }
        match wait_for(process) {
            Ok(Waited::Stopped(libc::SIGTRAP)) => break Ok(()),
            Ok(Waited::Event(_)) => {}
            // All in its namespace were told to stand still, whoever is held among them: it does not.
            Ok(Waited::Stopped(libc::SIGSTOP)) => {}
            Ok(Waited::Stopped(signal)) => kept.add(signal),
            Ok(_) => break Err(Errno::ECHILD),
            Err(error) => break Err(error),
        }
    };
    kept.send(process);
    stepped
}

/// Until it is stopped by its tracer.
pub(super) fn stopped(process: Pid) -> Result<(), Errno> {
    match wait_for(process)? {
        Waited::Stopped(libc::SIGTRAP) | Waited::Event(_) => Ok(()),
        // A signal, or its end: nobody has a reason for either.
        _ => Err(Errno::ECHILD),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::ptrace::Options;
    use std::process::Command;

    /// A signal that is on its way comes before the call: the process is as it was afterwards, and gets it.
    #[test]
    fn a_signal_that_is_on_its_way_is_kept_and_nothing_of_the_call_stays() {
        for signal in [libc::SIGUSR1, 34, 64] {
            is_kept(signal);
        }
    }

    fn is_kept(signal: i32) {
        let mut child = Command::new("/bin/sleep").arg("600").spawn().expect("it begins");
        let process = Pid::from_raw(child.id() as i32);
        ptrace::seize(process, Options::empty()).expect("seized");
        ptrace::interrupt(process).expect("told to stop");
        stopped(process).expect("stopped");
        let before = ptrace::getregs(process).expect("registers");
        let code = |at: u64| ptrace::read(process, at as AddressType).expect("code");
        let code_before = code(before.rip);
        // SAFETY: a plain call.
        assert_eq!(unsafe { libc::kill(process.as_raw(), signal) }, 0);
        let number = system_call(process, libc::SYS_getpid, [0; 6]).expect("made");
        assert_eq!(number, u64::from(child.id()));
        assert_eq!(ptrace::getregs(process).expect("registers"), before);
        assert_eq!(code(before.rip), code_before);
        // It is not taken twice.
        system_call(process, libc::SYS_getpid, [0; 6]).expect("made");
        ptrace::detach(process, None).expect("let go");
        let ended = child.wait().expect("it ends");
        let by = std::os::unix::process::ExitStatusExt::signal(&ended);
        assert_eq!(by, Some(signal));
    }
}
