//! A new program's clock: the page that its host sets is mapped, and the vDSO leads to it, before its first instruction.
//!
//! Decides:    nothing.
//! Flow:       the program's own process asks to be traced -> exec, it stops -> here, pid 1 -> it runs on, and nobody traces it any more: whoever
//!             is to copy it could not.
//! Invariants: 1. a program that begins here has the page, or does not begin. What it executes later has not.
//! Source:     ptrace(2), vdso(7); the stack at a program's start: the System V ABI for x86-64, 3.4.1. Not here: the page (`crate::page`).

use super::injected::{stopped, system_call};
use crate::page::{self, AT, BYTES, FILE, Leads};
use nix::errno::Errno;
use nix::sys::ptrace::{self, AddressType};
use nix::unistd::Pid;
use std::io;

const WORD: u64 = 8;
/// More words than that are no stack of a new program (arguments and environment are bounded by a quarter of the stack).
const MOST_WORDS: u64 = 1 << 20;
/// Below what a new program's stack holds; the kernel has mapped more than that.
const BELOW: u64 = 1024;

/// `child` has asked to be traced, and executes the program.
pub(super) fn give(child: Pid, leads: Leads, chance: Option<[u64; 2]>) -> io::Result<()> {
    let jumps = page::jumps(leads).map_err(io::Error::other)?;
    stopped(child)?;
    map(child)?;
    if let (Some(words), Some(at)) = (chance, vector(child, libc::AT_RANDOM)?) {
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        poke(child, at, &bytes)?;
    }
    let vdso = vector(child, libc::AT_SYSINFO_EHDR)?;
    let vdso = vdso.ok_or_else(|| io::Error::other("the program has no vDSO"))?;
    for (at, code) in jumps {
        poke(child, vdso + at, &code)?;
    }
    ptrace::detach(child, None)?;
    Ok(())
}

fn map(child: Pid) -> Result<(), Errno> {
    let path = (ptrace::getregs(child)?.rsp - BELOW) & !(WORD - 1);
    poke(child, path, format!("{FILE}\0").as_bytes())?;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
    let file = system_call(child, libc::SYS_open, [path, flags, 0, 0, 0, 0])?;
    let protection = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    let flags = (libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE) as u64;
    let mapped = system_call(
        child,
        libc::SYS_mmap,
        [AT, BYTES as u64, protection, flags, file, 0],
    )?;
    system_call(child, libc::SYS_close, [file, 0, 0, 0, 0, 0])?;
    match mapped == AT {
        true => Ok(()),
        false => Err(Errno::EEXIST),
    }
}

/// What its auxiliary vector says of that.
fn vector(child: Pid, of: u64) -> Result<Option<u64>, Errno> {
    let word = |at: u64| ptrace::read(child, at as AddressType).map(|word| word as u64);
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
    let environment = after_null(ptrace::getregs(child)?.rsp + WORD)?;
    let mut at = after_null(environment)?;
    for _ in 0..MOST_WORDS {
        match word(at)? {
            libc::AT_NULL => return Ok(None),
            kind if kind == of => return word(at + WORD).map(Some),
            _ => at += 2 * WORD,
        }
    }
    Err(Errno::E2BIG)
}

/// Whole words are written; what lies behind the bytes stays.
fn poke(child: Pid, at: u64, bytes: &[u8]) -> Result<(), Errno> {
    for (n, piece) in bytes.chunks(WORD as usize).enumerate() {
        let place = (at + n as u64 * WORD) as AddressType;
        let mut word = ptrace::read(child, place)?.to_ne_bytes();
        word[..piece.len()].copy_from_slice(piece);
        ptrace::write(child, place, libc::c_long::from_ne_bytes(word))?;
    }
    Ok(())
}
