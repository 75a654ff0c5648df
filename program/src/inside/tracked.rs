//! Which pages of a process were written since: the kernel's own notice, by a userfaultfd in the process.
//!
//! Decides:    nothing.
//! Flow:       a thread of its own stops the process' first thread, which makes one system call more -> its descriptor is taken over, and closed there
//!             -> pages are protected -> whoever writes to one has its protection taken away by the kernel, and goes on: `pagemap` tells of which.
//! Invariants: 1. the program's code is not touched, which other threads are in: the call is made by an instruction that is there already (in the
//!             vDSO); 2. the program's own filters do not see the call; 3. nobody waits for a thread that does not stop (one in vfork): it is left
//!             alone; 4. with the descriptor all of it is gone, with the daemon's death too; 5. a signal that comes meanwhile reaches the program with
//!             all that it carries, each one for itself: it is let through, and not sent again.
//! Source:     userfaultfd(2): UFFD_FEATURE_WP_ASYNC (Linux 6.7); the kernel's Documentation/admin-guide/mm/{userfaultfd,pagemap}.rst; ptrace(2).
//! Not here:   what is unchanged (`guard::ahead`).

use super::waited::{Waited, go_on, wait, wait_for};
use crate::proc::text;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// From it on a page that is moved is not taken for an unwritten one.
pub(crate) const OLDEST_KERNEL: (u32, u32) = (6, 13);
/// A thread stops in microseconds, where it can.
#[cfg(not(test))]
const STOPS_WITHIN: Duration = Duration::from_millis(500);
/// Beside all other tests.
#[cfg(test)]
const STOPS_WITHIN: Duration = Duration::from_secs(60);
/// PTRACE_GETSIGMASK and PTRACE_SETSIGMASK.
const GETSIGMASK: libc::c_uint = 0x420a;
const SETSIGMASK: libc::c_uint = 0x420b;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
const FLAGS: u64 = libc::O_CLOEXEC as u64 | USER_MODE_ONLY;
const USER_MODE_ONLY: u64 = 1;
/// PTRACE_O_SUSPEND_SECCOMP: invariant 2.
pub(super) const SUSPEND_SECCOMP: libc::c_ulong = 1 << 21;

const API: u64 = 0xaa;
const FEATURE_WP: u64 = 1;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const MODE_WP: u64 = 1 << 1;
const PROTECT: u64 = 1;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

/// As long as it is there the kernel takes notice.
#[derive(Debug)]
pub(crate) struct Tracked(OwnedFd);

impl Tracked {
    /// Nothing is protected yet.
    pub(crate) fn of(process: u32) -> io::Result<Self> {
        is_new_enough()?;
        // Invariant 3: whoever is traced by a thread that has ended is not any more.
        let taken = std::thread::Builder::new()
            .name("program-tracked".into())
            .spawn(move || take(process))?;
        Self::begin(taken.join().map_err(|_| io::Error::from(Errno::ECHILD))??)
    }

    /// Of this process, which tries whether it works.
    pub(crate) fn of_this() -> io::Result<Self> {
        is_new_enough()?;
        // SAFETY: it takes no memory, and returns a descriptor of nobody else's.
        match unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) } {
            ..0 => Err(io::Error::last_os_error()),
            // SAFETY: as above.
            opened => Self::begin(unsafe { OwnedFd::from_raw_fd(opened as RawFd) }),
        }
    }

    fn begin(opened: OwnedFd) -> io::Result<Self> {
        let tracked = Self(opened);
        let mut asked = [API, FEATURE_WP | FEATURE_WP_ASYNC, 0];
        tracked.ask(UFFDIO_API, &mut asked)?;
        Ok(tracked)
    }

    /// This area may have pages that are protected.
    pub(crate) fn covers(&self, from: u64, to: u64) -> io::Result<()> {
        self.ask(UFFDIO_REGISTER, &mut [from, to - from, MODE_WP, 0])
    }

    /// These pages are: unwritten until one is written to.
    pub(crate) fn protect(&self, from: u64, to: u64) -> io::Result<()> {
        self.ask(UFFDIO_WRITEPROTECT, &mut [from, to - from, PROTECT])
    }

    fn ask<const WORDS: usize>(&self, request: libc::c_ulong, words: &mut [u64; WORDS]) -> io::Result<()> {
        // SAFETY: each request's structure is so many words, which the kernel reads and writes.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, words.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn is_new_enough() -> io::Result<()> {
    match kernel() < OLDEST_KERNEL {
        true => Err(io::ErrorKind::Unsupported.into()),
        false => Ok(()),
    }
}

pub(crate) fn kernel() -> (u32, u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// In a thread of its own.
fn take(process: u32) -> io::Result<OwnedFd> {
    let number = rustix::process::Pid::from_raw(process as i32).ok_or(Errno::ESRCH)?;
    let handle = pidfd_open(number, PidfdFlags::empty())?;
    let instruction = instruction(process)?;
    let thread = Pid::from_raw(process as i32);
    ptrace::seize(thread, ptrace::Options::empty())?;
    ptrace::interrupt(thread)?;
    stops(thread)?;
    let had = block_signals(thread)?;
    let call = |number: libc::c_long, first: u64| call(thread, instruction, number, first);
    let opened = call(libc::SYS_userfaultfd, FLAGS);
    let taken = opened.and_then(|opened| {
        let ours = pidfd_getfd(&handle, opened as RawFd, PidfdGetfdFlags::empty());
        call(libc::SYS_close, opened)?;
        ours.map_err(|error| Errno::from_raw(error.raw_os_error()))
    });
    let unblocked = mask(thread, SETSIGMASK, had);
    ptrace::detach(thread, None)?;
    unblocked?;
    Ok(taken?)
}

/// Until both calls are made: between them it would run with a descriptor that is not its own. They stay queued, with all that they carry. Returns
/// which were blocked.
fn block_signals(thread: Pid) -> Result<u64, Errno> {
    let had = mask(thread, GETSIGMASK, 0)?;
    mask(thread, SETSIGMASK, u64::MAX)?;
    Ok(had)
}

/// It is stopped.
fn mask(thread: Pid, request: libc::c_uint, mut mask: u64) -> Result<u64, Errno> {
    let at = std::ptr::from_mut(&mut mask);
    // SAFETY: the kernel reads or writes these bytes, and is told how many they are.
    let done = unsafe { libc::ptrace(request, thread.as_raw(), size_of::<u64>(), at) };
    Errno::result(done).map(|_| mask)
}

/// Until it is stopped; no longer than it may take.
fn stops(thread: Pid) -> Result<(), Errno> {
    let until = Instant::now() + STOPS_WITHIN;
    loop {
        match wait(Some(thread), libc::WNOHANG)? {
            Some((_, Waited::Event(_) | Waited::Stopped(libc::SIGTRAP))) => return Ok(()),
            None if Instant::now() < until => std::thread::sleep(Duration::from_micros(20)),
            // A signal for it came first: it has to get it.
            Some((_, Waited::Stopped(signal))) => go_on(thread, signal)?,
            None => return Err(Errno::ETIMEDOUT),
            Some(_) => return Err(Errno::ECHILD),
        }
    }
}

/// By the instruction that is there; then it is as it was. A signal comes before it: the thread gets that as it was, and is stopped anew.
fn call(thread: Pid, instruction: u64, number: libc::c_long, first: u64) -> Result<u64, Errno> {
    let until = Instant::now() + STOPS_WITHIN;
    loop {
        match called(thread, instruction, number, first)? {
            Called::Returned(result @ -4095..0) => {
                return Err(Errno::from_raw(result.wrapping_neg() as i32));
            }
            Called::Returned(result) => return Ok(result as u64),
            Called::Not(signal) => {
                go_on(thread, signal)?;
                // One that gets them faster than it can be stopped is left alone.
                if Instant::now() > until {
                    return Err(Errno::ETIMEDOUT);
                }
                ptrace::interrupt(thread)?;
                stops(thread)?;
            }
        }
    }
}

/// What has become of one try.
enum Called {
    Returned(i64),
    /// That signal is about to reach it.
    Not(i32),
}

fn called(thread: Pid, instruction: u64, number: libc::c_long, first: u64) -> Result<Called, Errno> {
    let before = ptrace::getregs(thread)?;
    // Invariant 2. No longer than it stands: it would run without them.
    set_options(thread, SUSPEND_SECCOMP)?;
    let mut registers = before;
    registers.rip = instruction;
    registers.rax = number as u64;
    registers.rdi = first;
    // It was in no system call, as far as the kernel's repeating of interrupted ones goes.
    registers.orig_rax = u64::MAX;
    ptrace::setregs(thread, registers)?;
    let made = loop {
        if let Err(error) = ptrace::step(thread, None) {
            break Err(error);
        }
        match wait_for(thread) {
            Ok(Waited::Stopped(libc::SIGTRAP)) => {
                break ptrace::getregs(thread).map(|registers| Called::Returned(registers.rax as i64));
            }
            Ok(Waited::Event(_)) => {}
            Ok(Waited::Stopped(signal)) => break Ok(Called::Not(signal)),
            Ok(_) => break Err(Errno::ECHILD),
            Err(error) => break Err(error),
        }
    };
    // Whatever became of it: it runs on.
    let restored = ptrace::setregs(thread, before);
    set_options(thread, 0)?;
    restored?;
    made
}

/// It is stopped.
fn set_options(thread: Pid, options: libc::c_ulong) -> Result<(), Errno> {
    // SAFETY: no memory of this process is given to the kernel.
    let set = unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, thread.as_raw(), 0_usize, options) };
    Errno::result(set).map(drop)
}

/// Much more than any kernel's.
const MOST_VDSO_BYTES: u64 = 1 << 20;

/// Where a system call is made in its vDSO.
fn instruction(process: u32) -> io::Result<u64> {
    let maps = text(format!("/proc/{process}/maps"))?;
    // Its whole name: a file may be called so, in a folder.
    let line = maps
        .lines()
        .find(|line| line.split_ascii_whitespace().nth(5) == Some("[vdso]"));
    let range = line.and_then(|line| line.split_ascii_whitespace().next()?.split_once('-'));
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = range.and_then(|(from, to)| Some((number(from)?, number(to)?)));
    let (from, to) = range.ok_or(Errno::ENOEXEC)?;
    let bytes = to.checked_sub(from).filter(|bytes| *bytes <= MOST_VDSO_BYTES);
    let mut code = vec![0; bytes.ok_or(Errno::ENOEXEC)? as usize];
    File::open(format!("/proc/{process}/mem"))?.read_exact_at(&mut code, from)?;
    let at = code.windows(SYSCALL.len()).position(|bytes| bytes == SYSCALL);
    Ok(from + at.ok_or(Errno::ENOEXEC)? as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It would be read whole, and may be said to be longer than there is memory.
    #[test]
    fn a_file_of_that_name_is_no_vdso() {
        use std::os::fd::AsRawFd;

        let folder = tempfile::tempdir().expect("a folder");
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.path().join("[vdso]"))
            .expect("a file");
        // Below all else, so that it comes first.
        let (at, length) = (0x1000_0000 as *mut libc::c_void, 1 << 30);
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
        // SAFETY: nothing lies there, and nobody reads it.
        let mapped = unsafe { libc::mmap(at, length, libc::PROT_NONE, flags, file.as_raw_fd(), 0) };
        assert_eq!(mapped, at, "{}", io::Error::last_os_error());
        let found = instruction(std::process::id());
        // SAFETY: it was mapped here.
        unsafe { libc::munmap(at, length) };
        assert!(found.expect("its own") > at as u64 + length as u64);
    }

    /// Ends by itself where a signal is missing: one byte is written for each that comes.
    const COUNTS: &str = "
import os, signal
told, tells = os.pipe()
os.set_blocking(tells, False)
signal.signal(34, lambda *_: None)
signal.set_wakeup_fd(tells)
signal.alarm(60)
print('here', flush=True)
count = 0
while count < 3:
    count += len(os.read(told, 64))
print(count)
";

    /// Real-time signals are queued, each for itself.
    #[test]
    fn invariant_5_signals_that_come_meanwhile_all_reach_the_program() {
        use std::io::Read;
        use std::process::{Command, Stdio};

        let mut program = Command::new("python3")
            .args(["-c", COUNTS])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 (cargo xtask setup)");
        let mut told = program.stdout.take().expect("a pipe");
        let mut here = [0; 5];
        told.read_exact(&mut here).expect("it prints");
        let thread = Pid::from_raw(program.id() as i32);
        let instruction = instruction(program.id()).expect("in its vDSO");
        ptrace::seize(thread, ptrace::Options::empty()).expect("seized");
        ptrace::interrupt(thread).expect("told to stop");
        stops(thread).expect("stopped");
        for _ in 0..3 {
            // SAFETY: a plain call.
            assert_eq!(unsafe { libc::kill(thread.as_raw(), 34) }, 0);
        }
        let number = call(thread, instruction, libc::SYS_getpid, 0);
        ptrace::detach(thread, None).expect("let go");
        if matches!(number, Err(Errno::EPERM | Errno::EINVAL)) {
            // Only root of the host may have it pass its filters by, behind none itself; and not every kernel can.
            program.kill().expect("killed");
            program.wait().expect("collected");
            return;
        }
        assert_eq!(number, Ok(u64::from(program.id())));
        let mut count = String::new();
        told.read_to_string(&mut count).expect("it prints");
        assert_eq!(count.trim(), "3");
        program.wait().expect("it ends");
    }

    #[test]
    fn a_vdso_makes_system_calls() {
        let at = instruction(std::process::id()).expect("in this one") as *const [u8; 2];
        // SAFETY: it is in this process' own vDSO.
        assert_eq!(unsafe { at.read_unaligned() }, SYSCALL);
    }
}
