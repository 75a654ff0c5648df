//! What a new program finds on its stack: without the vDSO, whose clock nobody could answer, and with agreed chance.
//!
//! Decides:    nothing.
//! Flow:       pid 1 traces the program and everything it starts; at each exec, before its first instruction -> here.
//!             Where it is to be told who reads the processor's own clock, that stops here too (`tsc`).
//! Invariants: 1. only two entries of the auxiliary vector change: AT_SYSINFO_EHDR is ignored (glibc, musl and Go then make
//!             system calls), and the 16 bytes at AT_RANDOM; 2. a signal reaches its process as if nobody traced it.
//! Source:     getauxval(3), ptrace(2); the stack at a program's start: the System V ABI for x86-64, 3.4.1.
//! Not here:   which system calls are answered (`filter`).

use super::tsc::Tsc;
use super::waited::go_on;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::unistd::Pid;
use std::collections::BTreeSet;

const WORD: u64 = 8;
/// More words than that are no stack of a new program (arguments and environment are bounded by a quarter of the stack).
const MOST_WORDS: u64 = 1 << 20;

/// What is changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) hide_clock: bool,
    pub(super) chance: Option<u64>,
}

/// The processes and threads that are traced.
#[derive(Debug)]
pub(super) struct Traced {
    change: Change,
    known: BTreeSet<Pid>,
    execs: u64,
    /// Who answers for the processor's own clock, where that is to be told.
    tsc: Option<Tsc>,
}

impl Traced {
    /// `child` has said that it is traced, and is about to exec.
    pub(super) fn new(change: Change, child: Pid, tsc: Option<Tsc>) -> Self {
        Self {
            change,
            known: BTreeSet::from([child]),
            execs: 0,
            tsc,
        }
    }

    /// It has ended.
    pub(super) fn gone(&mut self, pid: Pid) {
        self.known.remove(&pid);
        self.forget(pid);
    }

    /// A stop by a signal.
    pub(super) fn stopped(&mut self, pid: Pid, signal: i32) -> Result<(), Errno> {
        let first_exec = self.execs == 0 && signal == libc::SIGTRAP;
        if first_exec {
            let follow =
                Options::PTRACE_O_TRACEFORK | Options::PTRACE_O_TRACEVFORK | Options::PTRACE_O_TRACECLONE;
            let options = follow | Options::PTRACE_O_TRACEEXEC | Options::PTRACE_O_EXITKILL;
            ptrace::setoptions(pid, options)?;
            self.patch(pid)?;
        }
        if signal == libc::SIGSEGV
            && let Some(tsc) = &mut self.tsc
        {
            match tsc.answer(pid) {
                Ok(true) => return gone_is_fine(go_on(pid, 0)),
                Ok(false) => {}
                result => return gone_is_fine(result.map(drop)),
            }
        }
        // What is traced from its birth begins with a stop of its own.
        let is_new = self.known.insert(pid) && signal == libc::SIGSTOP;
        let signal = if first_exec || is_new { 0 } else { signal };
        gone_is_fine(go_on(pid, signal))
    }

    /// A stop by an event: an exec, or the birth of something.
    pub(super) fn event(&mut self, pid: Pid, event: i32) -> Result<(), Errno> {
        if event == libc::PTRACE_EVENT_EXEC {
            self.forget(pid);
            gone_is_fine(self.patch(pid))?;
        }
        gone_is_fine(go_on(pid, 0))
    }

    fn forget(&mut self, pid: Pid) {
        if let Some(tsc) = &mut self.tsc {
            tsc.forget(pid);
        }
    }

    fn patch(&mut self, pid: Pid) -> Result<(), Errno> {
        self.execs += 1;
        let word = |at: u64| ptrace::read(pid, at as ptrace::AddressType).map(|word| word as u64);
        let write = |at: u64, word: u64| ptrace::write(pid, at as ptrace::AddressType, word as libc::c_long);
        let stack = ptrace::getregs(pid)?.rsp;
        let after_null = |mut at: u64| {
            for _ in 0..MOST_WORDS {
                at += WORD;
                if word(at - WORD)? == 0 {
                    return Ok(at);
                }
            }
            Err(Errno::E2BIG)
        };
        // argc, the arguments, a null; the environment, a null; then pairs.
        let environment = after_null(stack + WORD)?;
        let mut at = after_null(environment)?;
        for _ in 0..MOST_WORDS {
            match word(at)? {
                libc::AT_NULL => return Ok(()),
                libc::AT_SYSINFO_EHDR if self.change.hide_clock => write(at, libc::AT_IGNORE)?,
                libc::AT_RANDOM => {
                    if let Some(seed) = self.change.chance {
                        let bytes = word(at + WORD)?;
                        let chance = crate::chance::words(crate::chance::of_number(seed), self.execs);
                        write(bytes, chance[0])?;
                        write(bytes + WORD, chance[1])?;
                    }
                }
                _ => {}
            }
            at += 2 * WORD;
        }
        Err(Errno::E2BIG)
    }
}

/// What was killed meanwhile needs nothing more.
fn gone_is_fine(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::ESRCH) => Ok(()),
        result => result,
    }
}
