//! What a process has in memory of its own, read from outside, while it runs or stands still.
//!
//! Decides:    nothing.
//! Invariants: 1. a page that is not read whole is none; 2. what a process shares, or has of a file, is not read here: CRIU takes that.
//! Source:     proc(5) (`maps`, `pagemap`, `mem`), process_vm_readv(2).
//! Not here:   which pages go where (`ahead`).

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;

pub(super) const PAGE_BYTES: u64 = 4096;
/// One entry of `pagemap`: it is in memory, or swapped out.
const ENTRY_BYTES: usize = 8;
const IS_THERE: u64 = 0b11 << 62;

/// One that is looked into.
#[derive(Debug)]
pub(super) struct Process {
    /// As the host calls it, and as it is called inside.
    pub(super) number: u32,
    pub(super) inside: u32,
    memory: File,
}

impl Process {
    /// By its number here; none where it has just gone.
    pub(super) fn of(number: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{number}/status")).ok()?;
        let memory = File::open(format!("/proc/{number}/mem")).ok()?;
        Some(Self {
            number,
            inside: inside(&status)?,
            memory,
        })
    }

    /// Runs of pages that it has, in the order of their addresses: where they begin, and how many.
    pub(super) fn pages(&self) -> io::Result<Vec<(u64, u64)>> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.number))?;
        let list = File::open(format!("/proc/{}/pagemap", self.number))?;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut entries = vec![0; 4096 * ENTRY_BYTES];
        for (from, to) in maps.lines().filter_map(own_area) {
            let mut at = from;
            while at < to {
                let count = ((to - at) / PAGE_BYTES).min(4096) as usize;
                let some = &mut entries[..count * ENTRY_BYTES];
                list.read_exact_at(some, at / PAGE_BYTES * ENTRY_BYTES as u64)?;
                let (some, _) = some.as_chunks::<ENTRY_BYTES>();
                for entry in some {
                    if u64::from_le_bytes(*entry) & IS_THERE != 0 {
                        match runs.last_mut() {
                            Some((begin, count)) if *begin + *count * PAGE_BYTES == at => *count += 1,
                            _ => runs.push((at, 1)),
                        }
                    }
                    at += PAGE_BYTES;
                }
            }
        }
        Ok(runs)
    }

    /// Whole pages from there on; how many bytes it has of them.
    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) -> usize {
        let whole = |read: usize| read - read % PAGE_BYTES as usize;
        let from = [RemoteIoVec {
            base: at as usize,
            len: bytes.len(),
        }];
        let pid = Pid::from_raw(self.number as i32);
        let mut read = process_vm_readv(pid, &mut [IoSliceMut::new(bytes)], &from).map_or(0, whole);
        // What it may not read itself, and a kernel that has no such system call.
        while read < bytes.len() {
            let most = bytes.len().min(read + PAGE_BYTES as usize);
            match self
                .memory
                .read_exact_at(&mut bytes[read..most], at + read as u64)
            {
                Ok(()) => read = most,
                Err(_) => break,
            }
        }
        whole(read)
    }
}

/// Private memory of no file: its stack is CRIU's, and what the kernel has put there.
fn own_area(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_ascii_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let is_private = words.next()?.ends_with('p');
    let is_of_none = words.nth(2)? == "0";
    let is_plain = words
        .next()
        .is_none_or(|name| name == "[heap]" || name.starts_with("[anon:"));
    let number = |text| u64::from_str_radix(text, 16).ok();
    (is_private && is_of_none && is_plain).then_some((number(from)?, number(to)?))
}

/// Its number in the innermost namespace.
fn inside(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_those_of_no_file() {
        for (line, is_own) in [
            ("5555a000-5555c000 rw-p 00000000 00:00 0          [heap]", true),
            ("7f00a000-7f00c000 rw-p 00000000 00:00 0 ", true),
            ("7f00a000-7f00c000 ---p 00000000 00:00 0 ", true),
            (
                "7f00a000-7f00c000 rw-p 00000000 00:00 0     [anon:of a name]",
                true,
            ),
            ("7f00a000-7f00c000 rw-s 00000000 00:00 0 ", false),
            (
                "7f00a000-7f00c000 rw-p 00002000 fe:00 1234   /usr/lib/libc.so",
                false,
            ),
            ("7fffa000-7fffc000 rw-p 00000000 00:00 0      [stack]", false),
            ("7fffa000-7fffc000 r--p 00000000 00:00 0      [vvar]", false),
        ] {
            assert_eq!(own_area(line).is_some(), is_own, "{line}");
        }
        let heap = own_area("5555a000-5555c000 rw-p 00000000 00:00 0  [heap]");
        assert_eq!(heap, Some((0x5555_a000, 0x5555_c000)));
    }

    #[test]
    fn a_process_has_a_number_inside() {
        assert_eq!(inside("Name:\tredis\nNSpid:\t4711\t2\n"), Some(2));
        assert_eq!(inside("Name:\tredis\n"), None);
    }

    #[test]
    fn own_memory_is_read_and_what_is_not_there_is_not() {
        let process = Process::of(std::process::id()).expect("it runs");
        let pages = 64;
        let bytes: Vec<u8> = (0..pages * PAGE_BYTES)
            .map(|at| (at / PAGE_BYTES) as u8)
            .collect();
        let at = (bytes.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let runs = process.pages().expect("its list");
        let is_listed = |page: u64| {
            runs.iter()
                .any(|(from, count)| (*from..from + count * PAGE_BYTES).contains(&page))
        };
        assert!((0..pages - 1).all(|page| is_listed(at + page * PAGE_BYTES)));
        let mut read = vec![0; 5 * PAGE_BYTES as usize];
        assert_eq!(process.read(at, &mut read), read.len());
        let offset = (at - bytes.as_ptr() as u64) as usize;
        assert_eq!(read, bytes[offset..offset + read.len()]);
        assert_eq!(process.read(PAGE_BYTES, &mut read), 0, "nothing is mapped there");
    }
}
