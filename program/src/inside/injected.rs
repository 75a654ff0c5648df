//! System calls that a stopped process is made to make.
//!
//! Flow:       the tracer stops it -> its instruction pointer's next bytes become a system call, for one step -> all is as it was.
//! Source:     ptrace(2). Not here: why (`stranger`, `clock`, `guard::whose`).

use nix::errno::Errno;
use nix::sys::ptrace::{self, AddressType};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
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
    ptrace::setregs(process, registers)?;
    step(process)?;
    let result = ptrace::getregs(process)?.rax as i64;
    ptrace::write(process, here, code)?;
    ptrace::setregs(process, before)?;
    match result {
        -4095..0 => Err(Errno::from_raw(result.wrapping_neg() as i32)),
        result => Ok(result as u64),
    }
}

/// One instruction. A process that its tracer has stopped while it stood still already says so twice, the second time in the place of the
/// instruction.
fn step(process: Pid) -> Result<(), Errno> {
    loop {
        ptrace::step(process, None)?;
        match wait(process)? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => return Ok(()),
            WaitStatus::PtraceEvent(..) => {}
            // All in its namespace were told to stand still, whoever is held among them: it does not.
            WaitStatus::Stopped(_, Signal::SIGSTOP) => {}
            _ => return Err(Errno::ECHILD),
        }
    }
}

/// Until it is stopped by its tracer.
pub(super) fn stopped(process: Pid) -> Result<(), Errno> {
    match wait(process)? {
        WaitStatus::Stopped(_, Signal::SIGTRAP) | WaitStatus::PtraceEvent(..) => Ok(()),
        // A signal, or its end: nobody has a reason for either.
        _ => Err(Errno::ECHILD),
    }
}

fn wait(process: Pid) -> Result<WaitStatus, Errno> {
    loop {
        match waitpid(process, Some(WaitPidFlag::__WALL)) {
            Err(Errno::EINTR) => {}
            status => return status,
        }
    }
}
