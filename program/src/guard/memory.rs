//! What a process has in memory of its own, read from outside, while it runs or stands still.
//!
//! Decides:    nothing.
//! Invariants: 1. a page that is not read whole is none; 2. what a process shares, or has of a file, is not read here: CRIU takes that; 3. nothing
//!             of it is held open: a program of many processes leaves the daemon's descriptors to others, and what is read is always of the
//!             memory that the process has then, whatever it has executed meanwhile.
//! Source:     proc(5) (`maps`, `pagemap`, `mem`), process_vm_readv(2).
//! Not here:   which pages go where (`ahead`).

use crate::proc::{has_gone, text};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;

pub(super) const PAGE_BYTES: u64 = 4096;
/// One entry of `pagemap`: it is in memory, or swapped out.
const ENTRY_BYTES: usize = 8;
const IS_THERE: u64 = 0b11 << 62;
/// And nobody has written to it since it was protected.
const IS_PROTECTED: u64 = 1 << 57;
/// In how many entries are read at once.
const ENTRIES: usize = 4096;
/// From there on it is faster to take all of it.
const MAPPED_OF_RESIDENT: u64 = 64;
/// open(2), of x86-64.
const O_DIRECT: u32 = 0o40000;
/// The state of a thread that cannot be asked: none of the kernel's, so that nobody takes it for one that stands still.
const UNKNOWN: char = '?';

/// One that is looked into.
#[derive(Debug)]
pub(super) struct Process {
    /// As the host calls it, and as it is called inside.
    pub(super) number: u32,
    pub(super) inside: u32,
}

impl Process {
    /// By its number here; none where it has just gone.
    pub(super) fn of(number: u32) -> io::Result<Option<Self>> {
        match text(format!("/proc/{number}/status")) {
            Ok(status) => Ok(inside(&status).map(|inside| Self { number, inside })),
            Err(error) if has_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Areas of memory of its own.
    pub(super) fn areas(&self) -> io::Result<Vec<(u64, u64)>> {
        let maps = text(format!("/proc/{}/maps", self.number))?;
        Ok(maps.lines().filter_map(own_area).collect())
    }

    /// Runs of pages that it has there, in the order of their addresses: where they begin, and how many.
    pub(super) fn pages(&self, areas: &[(u64, u64)]) -> io::Result<Runs> {
        let mut runs = Runs::default();
        let list = self.list()?;
        for (from, to) in areas {
            push_listed(&list, *from, *to, IS_THERE, &mut runs)?;
        }
        Ok(runs)
    }

    /// Those of these runs that are protected still.
    pub(super) fn protected(&self, runs: &Runs) -> io::Result<Runs> {
        let mut protected = Runs::default();
        let list = self.list()?;
        for (from, count) in &runs.0 {
            push_listed(
                &list,
                *from,
                from + count * PAGE_BYTES,
                IS_PROTECTED,
                &mut protected,
            )?;
        }
        Ok(protected)
    }

    /// Of the memory that it has when this is opened, and of no later one.
    fn list(&self) -> io::Result<File> {
        File::open(format!("/proc/{}/pagemap", self.number))
    }

    /// Whether a device may write into its memory, which no page's protection tells of: a file that it reads past the page cache.
    pub(super) fn reads_directly(&self) -> io::Result<bool> {
        for entry in fs::read_dir(format!("/proc/{}/fdinfo", self.number))? {
            match fs::read_to_string(entry?.path()) {
                Ok(about) if flags(&about) & O_DIRECT != 0 => return Ok(true),
                // One that is closed meanwhile is none.
                Err(error) if !has_gone(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(false)
    }

    /// Whether it has asked the kernel to read for it, and goes on meanwhile.
    pub(super) fn reads_behind(&self) -> io::Result<bool> {
        let maps = text(format!("/proc/{}/maps", self.number))?;
        Ok(maps.lines().any(|line| line.ends_with("/[aio]")))
    }

    /// All that it has mapped, where that is far more than it has in memory. Where memory stays in a process CRIU fills a list with an entry for
    /// each page, there or not: some 10 ms a GiB, while the program stands still. To take what is there takes 1 ms a MiB. A database may keep
    /// terabytes free for its buffers.
    pub(super) fn keeps_free(&self) -> Option<u64> {
        let about = text(format!("/proc/{}/status", self.number)).ok()?;
        let mapped = in_kib("VmSize:", &about)?;
        (mapped > in_kib("VmRSS:", &about)? * MAPPED_OF_RESIDENT).then_some(mapped)
    }

    /// Whether all of its threads stand still, or have ended.
    pub(super) fn stands_still(&self) -> bool {
        let stands = |state: &char| matches!(state, 'T' | 't' | 'Z' | 'X');
        self.states().iter().all(stands)
    }

    /// Whether all of its threads were told to stand still, by whomever, and it has not ended.
    pub(super) fn is_stopped(&self) -> bool {
        let states = self.states();
        !states.is_empty() && states.iter().all(|state| *state == 'T')
    }

    /// Whether one of its threads waits for what no signal ends: a disk, or its child after vfork.
    pub(super) fn cannot_stop(&self) -> bool {
        self.states().contains(&'D')
    }

    /// Of its threads; of none where it has gone.
    fn states(&self) -> Vec<char> {
        let unless_gone = |error: io::Error| (!has_gone(&error)).then_some(UNKNOWN);
        let threads = match fs::read_dir(format!("/proc/{}/task", self.number)) {
            Ok(threads) => threads,
            Err(error) => return unless_gone(error).into_iter().collect(),
        };
        let of = |thread: io::Result<fs::DirEntry>| {
            let about = thread.and_then(|thread| text(thread.path().join("stat")));
            about.map_or_else(unless_gone, |about| Some(state(&about)))
        };
        threads.filter_map(of).collect()
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
        if read == bytes.len() {
            return read;
        }
        // What it may not read itself, and a kernel that has no such system call.
        let Ok(memory) = File::open(format!("/proc/{}/mem", self.number)) else {
            return read;
        };
        while read < bytes.len() {
            let most = bytes.len().min(read + PAGE_BYTES as usize);
            match memory.read_exact_at(&mut bytes[read..most], at + read as u64) {
                Ok(()) => read = most,
                Err(_) => break,
            }
        }
        whole(read)
    }
}

fn push_listed(list: &File, from: u64, to: u64, wanted: u64, runs: &mut Runs) -> io::Result<()> {
    let mut entries = [0; ENTRIES * ENTRY_BYTES];
    let mut at = from;
    while at < to {
        let count = ((to - at) / PAGE_BYTES).min(ENTRIES as u64) as usize;
        let some = &mut entries[..count * ENTRY_BYTES];
        list.read_exact_at(some, at / PAGE_BYTES * ENTRY_BYTES as u64)?;
        let (some, _) = some.as_chunks::<ENTRY_BYTES>();
        for entry in some {
            if u64::from_le_bytes(*entry) & wanted != 0 {
                runs.push(at, 1);
            }
            at += PAGE_BYTES;
        }
    }
    Ok(())
}

/// The letter behind its name, which may have any characters in it.
fn state(about: &str) -> char {
    let rest = about.rsplit_once(") ").map(|(_, rest)| rest);
    rest.and_then(|rest| rest.chars().next()).unwrap_or(UNKNOWN)
}

/// Runs of pages, in the order of their addresses: where they begin, and how many.
#[derive(Clone, Default, Debug)]
pub(super) struct Runs(pub(super) Vec<(u64, u64)>);

impl Runs {
    pub(super) fn push(&mut self, at: u64, pages: u64) {
        match self.0.last_mut() {
            Some((from, count)) if *from + *count * PAGE_BYTES == at => *count += pages,
            _ if pages > 0 => self.0.push((at, pages)),
            _ => {}
        }
    }
}

/// A line of proc(5) that has a number of KiB; in bytes.
fn in_kib(name: &str, about: &str) -> Option<u64> {
    let line = about.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(number << 10)
}

/// Of an open file.
fn flags(about: &str) -> u32 {
    let line = about.lines().find_map(|line| line.strip_prefix("flags:"));
    line.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok())
        .unwrap_or(0)
}

/// Private memory of no file: its stack is CRIU's, and what the kernel has put there. Not what nobody may look into, which may be terabytes that
/// are kept free: what is in there after all is taken while the program stands still.
fn own_area(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_ascii_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let access = words.next()?;
    let is_private = access.ends_with('p') && !access.starts_with("---");
    let is_of_none = words.nth(2)? == "0";
    let is_plain = words
        .next()
        .is_none_or(|name| name == "[heap]" || name.starts_with("[anon:"));
    let number = |text| u64::from_str_radix(text, 16).ok();
    (is_private && is_of_none && is_plain).then_some((number(from)?, number(to)?))
}

/// Its number in the innermost namespace.
pub(super) fn inside(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal, kill};
    use std::os::unix::process::CommandExt;
    use std::process::Command;
    use std::time::{Duration, Instant};

    /// A name of nine letters of two bytes each: the kernel keeps fifteen bytes of it, which end inside the eighth.
    #[test]
    fn who_has_a_name_that_is_cut_inside_a_letter_is_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("программа");
        std::os::unix::fs::symlink("/bin/sleep", &program).expect("a link");
        let mut child = Command::new(&program)
            .arg0("sleep")
            .arg("60")
            .spawn()
            .expect("begun");
        // It is begun a moment before it has its name.
        let until = Instant::now() + Duration::from_secs(10);
        let name = || fs::read(format!("/proc/{}/comm", child.id())).expect("its name");
        while std::str::from_utf8(&name()).is_ok() {
            assert!(Instant::now() < until, "{:?}", name());
            std::thread::sleep(Duration::from_millis(1));
        }
        let process = Process::of(child.id()).expect("asked").expect("it runs");
        assert_eq!(process.states().len(), 1);
        assert!(!process.stands_still(), "it sleeps, and is not stopped");
        let pid = Pid::from_raw(child.id() as i32);
        kill(pid, Signal::SIGSTOP).expect("told");
        let until = Instant::now() + Duration::from_secs(10);
        while !process.is_stopped() {
            assert!(Instant::now() < until, "{:?}", process.states());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(process.stands_still());
        child.kill().expect("killed");
        child.wait().expect("collected");
        assert!(process.states().is_empty(), "it has gone");
        assert!(Process::of(child.id()).expect("asked").is_none());
        assert!(!process.is_stopped());
    }

    /// What a process has had before it executes something is not its memory any more.
    #[test]
    fn invariant_3_what_is_read_is_of_what_it_executes_now() {
        let mut child = Command::new("/bin/sh")
            .args(["-c", "read line; exec /bin/sleep 600"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("begun");
        let process = Process::of(child.id()).expect("asked").expect("it runs");
        drop(child.stdin.take());
        let until = Instant::now() + Duration::from_secs(60);
        let name = || fs::read(format!("/proc/{}/comm", child.id())).expect("its name");
        while name() != b"sleep\n" {
            assert!(Instant::now() < until, "{:?}", name());
            std::thread::sleep(Duration::from_millis(1));
        }
        // It has a heap when its libraries are loaded.
        let pages = || process.areas().and_then(|areas| process.pages(&areas));
        while pages().expect("its list").0.is_empty() {
            assert!(Instant::now() < until, "nothing is there");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("killed");
        child.wait().expect("collected");
    }

    #[test]
    fn a_thread_of_which_nothing_is_known_has_no_state_of_the_kernels() {
        assert_eq!(state("7 (redis) T 1 7"), 'T');
        assert_eq!(state("7 (a) T (b) R 1 7"), 'R', "its name is odd");
        assert_eq!(state(""), UNKNOWN);
    }

    #[test]
    fn areas_are_those_of_no_file() {
        for (line, is_own) in [
            ("5555a000-5555c000 rw-p 00000000 00:00 0          [heap]", true),
            ("7f00a000-7f00c000 rw-p 00000000 00:00 0 ", true),
            ("7f00a000-7f00c000 ---p 00000000 00:00 0 ", false),
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
    fn a_file_that_is_read_past_the_cache_has_a_flag() {
        assert_eq!(
            flags("pos:\t0\nflags:\t0140002\nmnt_id:\t9\n") & O_DIRECT,
            O_DIRECT
        );
        assert_eq!(flags("pos:\t0\nflags:\t0100002\n") & O_DIRECT, 0);
    }

    #[test]
    fn a_number_of_kib_is_read() {
        let status = "VmPeak:\t 9 kB\nVmSize:\t 8589934592 kB\n";
        assert_eq!(in_kib("VmSize:", status), Some(8 << 40));
        assert_eq!(in_kib("VmSize:", "Name:\tkthreadd\n"), None);
    }

    #[test]
    fn a_process_has_a_number_inside() {
        assert_eq!(inside("Name:\tredis\nNSpid:\t4711\t2\n"), Some(2));
        assert_eq!(inside("Name:\tredis\n"), None);
    }

    #[test]
    fn own_memory_is_read_and_what_is_not_there_is_not() {
        let process = Process::of(std::process::id()).expect("asked").expect("it runs");
        let pages = 64;
        let bytes: Vec<u8> = (0..pages * PAGE_BYTES)
            .map(|at| (at / PAGE_BYTES) as u8)
            .collect();
        let at = (bytes.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let areas = process.areas().expect("its areas");
        let runs = process.pages(&areas).expect("its list");
        let is_listed = |page: u64| {
            runs.0
                .iter()
                .any(|(from, count)| (*from..from + count * PAGE_BYTES).contains(&page))
        };
        assert!((0..pages - 1).all(|page| is_listed(at + page * PAGE_BYTES)));
        let mut read = vec![0; 5 * PAGE_BYTES as usize];
        assert_eq!(process.read(at, &mut read), read.len());
        let offset = (at - bytes.as_ptr() as u64) as usize;
        assert_eq!(read, bytes[offset..offset + read.len()]);
        assert_eq!(process.read(PAGE_BYTES, &mut read), 0, "nothing is mapped there");
        assert!(process.protected(&runs).expect("its list").0.is_empty());
        assert!(!process.stands_still());
    }
}
