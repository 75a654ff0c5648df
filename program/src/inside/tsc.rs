//! The processor's own clock, where somebody wants to know who reads it: RDTSC and RDTSCP are faults then, and answered here.
//!
//! Decides:    nothing: what the clock says is the tester's word.
//! Flow:       a process that may not read it (PR_SET_TSC) does -> SIGSEGV, which stops it because it is traced -> the tester is told where,
//!             and answers -> the registers that the instruction would have set; it goes on behind it, and no signal was there.
//! Invariants: 1. only a fault that the kernel found at one of the two instructions is answered; any other signal is the program's.
//!             2. the kernel lets go of a handler of SIGSEGV where the signal is blocked or ignored, before anybody is asked: such a program
//!             is without it from then on.
//! Source:     PR_SET_TSC(2const), ptrace(2); RDTSC and RDTSCP in Intel's manual, volume 2B.
//! Not here:   what is said of it (`crate::report`).

use crate::message::{Go, Heard, receive, send};
use crate::proc::text;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const RDTSC: &[u8] = &[0x0f, 0x31];
const RDTSCP: &[u8] = &[0x0f, 0x01, 0xf9];
/// The kernel itself has raised the signal, and for no address (`siginfo.h`).
const SI_KERNEL: i32 = 0x80;
const WORD: u64 = 8;

/// From now on this process and all that it starts may not read it, over execs too.
pub(super) fn is_a_fault() -> io::Result<()> {
    // SAFETY: a plain system call.
    match unsafe { libc::prctl(libc::PR_SET_TSC, libc::PR_TSC_SIGSEGV, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Answers for all that is traced.
#[derive(Debug)]
pub(super) struct Tsc {
    tester: OwnedFd,
    /// By thread and address: a place is named to the tester once, then it has a number.
    places: BTreeMap<(Pid, u64), u32>,
    named: u32,
}

impl Tsc {
    pub(super) fn new(tester: OwnedFd) -> Self {
        Self {
            tester,
            places: BTreeMap::new(),
            named: 0,
        }
    }

    /// It has ended, or is another program now.
    pub(super) fn forget(&mut self, pid: Pid) {
        self.places.retain(|(of, _), _| *of != pid);
    }

    /// Whether the SIGSEGV that has stopped it was one of those, and is answered.
    pub(super) fn answer(&mut self, pid: Pid) -> Result<bool, Errno> {
        if ptrace::getsiginfo(pid)?.si_code != SI_KERNEL {
            return Ok(false);
        }
        let mut registers = ptrace::getregs(pid)?;
        let Some(bytes) = reads(&instruction(pid, registers.rip)) else {
            return Ok(false);
        };
        let says = self.ask(pid, registers.rip)?;
        (registers.rax, registers.rdx) = (says & u64::from(u32::MAX), says >> 32);
        if bytes == RDTSCP.len() {
            // On which processor: the first.
            registers.rcx = 0;
        }
        registers.rip += bytes as u64;
        ptrace::setregs(pid, registers)?;
        Ok(true)
    }

    fn ask(&mut self, pid: Pid, at: u64) -> Result<u64, Errno> {
        let known = self.places.get(&(pid, at)).copied();
        let told = match known {
            Some(place) => Heard::ReadTsc { place, name: None },
            None => {
                self.named += 1;
                self.places.insert((pid, at), self.named);
                let maps = text(format!("/proc/{pid}/maps")).unwrap_or_default();
                let name = Some(name(&maps, at));
                let place = self.named;
                Heard::ReadTsc { place, name }
            }
        };
        let gone = |_| Errno::EPIPE;
        send(self.tester.as_fd(), &told, &[]).map_err(gone)?;
        match receive::<Go>(self.tester.as_fd()).map_err(gone)? {
            Some((Go::Tsc(says), _)) => Ok(says),
            _ => Err(Errno::EPIPE),
        }
    }
}

/// The bytes there; fewer, where the memory ends.
fn instruction(pid: Pid, at: u64) -> Vec<u8> {
    let first = at & !(WORD - 1);
    let mut bytes = Vec::new();
    for word in [first, first + WORD] {
        let Ok(word) = ptrace::read(pid, word as ptrace::AddressType) else {
            break;
        };
        bytes.extend(word.to_ne_bytes());
    }
    bytes.split_off(((at - first) as usize).min(bytes.len()))
}

/// How long the instruction is, if it is one of the two.
fn reads(bytes: &[u8]) -> Option<usize> {
    let both = [RDTSC, RDTSCP];
    both.iter()
        .find(|known| bytes.starts_with(known))
        .map(|known| known.len())
}

/// The file that is mapped there, and where in it that is.
fn name(maps: &str, at: u64) -> String {
    let found = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (from, to) = (hex(from)?, hex(to)?);
        if !(from..to).contains(&at) {
            return None;
        }
        let mut fields = rest.splitn(5, ' ');
        let offset = hex(fields.nth(1)?)?;
        // Device, inode, and spaces up to the name.
        let path = fields.nth(2)?.trim_start();
        (!path.is_empty()).then(|| format!("{path}+{:#x}", at - from + offset))
    });
    found.unwrap_or_else(|| "memory of no file".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_named_by_its_file_and_where_it_lies_in_it() {
        let maps = "00400000-00401000 r--p 00000000 fd:00 12     /usr/bin/a server\n\
                    00401000-00403000 r-xp 00001000 fd:00 12     /usr/bin/a server\n\
                    7f0000000000-7f0000001000 rwxp 00000000 00:00 0 \n";
        assert_eq!(name(maps, 0x0040_1234), "/usr/bin/a server+0x1234");
        assert_eq!(name(maps, 0x7f00_0000_0010), "memory of no file");
        assert_eq!(name("nonsense\n1-2", 1), "memory of no file");
    }

    #[test]
    fn only_the_two_instructions_are_answered() {
        assert_eq!(reads(&[0x0f, 0x31, 0x90]), Some(2));
        assert_eq!(reads(&[0x0f, 0x01, 0xf9]), Some(3));
        for other in [&[0x0f][..], &[], &[0x0f, 0x01], &[0xf4, 0x0f, 0x31]] {
            assert_eq!(reads(other), None);
        }
    }
}
