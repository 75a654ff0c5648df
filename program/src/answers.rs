//! The system calls of a copy that yield chance or the time, answered here: the same in every copy.
//!
//! Decides:    nothing: chance is a seeded stream (`chance`), the time is what the driver last set.
//! Flow:       a call of the program -> the seccomp listener -> this thread -> the program's memory, and it goes on.
//! Invariants: 1. what is written is written to the process that asked: its number is looked at again before (it may have died,
//!             and another have its number); 2. the time never goes back; 3. clocks that count a process's own work stay its own.
//! Source:     seccomp_unotify(2). Not here: which calls come here (`inside::filter`).

use crate::chance::{Chance, of_number};
use crate::source::Source;
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;

/// What one call may ask for of chance at once; more is answered in part, as the kernel may.
const MOST_CHANCE_BYTES: usize = 1 << 20;
const SECOND_NS: i64 = 1_000_000_000;
/// So often it is looked whether all of it is to end.
const LOOK_NS: i64 = 100_000_000;
/// CLOCK_TAI is not in every libc's list.
const CLOCK_TAI: u64 = 11;

/// The time that all copies are told.
#[derive(Debug)]
pub struct Clock {
    /// What CLOCK_MONOTONIC said when the copies began, and what CLOCK_REALTIME did.
    began_ns: i64,
    real_ns: i64,
    now_ns: AtomicI64,
}

impl Clock {
    /// From now on.
    #[must_use]
    pub fn starting_now() -> Self {
        let ns = |id| {
            let now = rustix::time::clock_gettime(id);
            now.tv_sec * SECOND_NS + now.tv_nsec
        };
        let began_ns = ns(rustix::time::ClockId::Monotonic);
        Self {
            began_ns,
            real_ns: ns(rustix::time::ClockId::Realtime),
            now_ns: AtomicI64::new(began_ns),
        }
    }

    /// Sets it to the host's own: with each input, and while nothing comes.
    pub fn set(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        self.now_ns
            .fetch_max(now.tv_sec * SECOND_NS + now.tv_nsec, Ordering::SeqCst);
    }

    /// What CLOCK_MONOTONIC says.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::SeqCst).unsigned_abs()
    }

    /// What it says of a clock; none for those of a process.
    fn read(&self, clock: u64) -> Option<i64> {
        let now = self.now_ns.load(Ordering::SeqCst);
        match clock as libc::clockid_t {
            libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => Some(now - self.began_ns + self.real_ns),
            libc::CLOCK_MONOTONIC
            | libc::CLOCK_MONOTONIC_RAW
            | libc::CLOCK_MONOTONIC_COARSE
            | libc::CLOCK_BOOTTIME => Some(now),
            _ if clock == CLOCK_TAI => Some(now - self.began_ns + self.real_ns),
            _ => None,
        }
    }
}

/// The thread that answers one copy. It ends when this is dropped; a tester's when the copy has, too.
pub struct Answers {
    stop: Arc<AtomicBool>,
    /// Wakes it when it is closed.
    wakes: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Answers {
    /// Answers what comes from `listener`.
    ///
    /// # Errors
    /// Where no thread can be made.
    pub fn start(listener: OwnedFd, seed: u64, clock: Arc<Clock>) -> io::Result<Self> {
        let chance = Drawer::Tester(Mutex::new(Chance::new(of_number(seed))));
        Self::run(vec![listener], chance, Some(clock))
    }

    /// Answers what comes from `listeners`, one of them for each thread of a copy that was brought here, and keeps its devices full.
    ///
    /// # Errors
    /// Where no thread can be made.
    pub fn of_a_service(listeners: Vec<OwnedFd>, source: Arc<Source>) -> io::Result<Self> {
        Self::run(listeners, Drawer::Service(source), None)
    }

    fn run(listeners: Vec<OwnedFd>, chance: Drawer, clock: Option<Arc<Clock>>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (woken, wakes) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut answering = Answering {
            listeners,
            chance,
            clock,
            woken,
        };
        let run = move || {
            while !stopped.load(Ordering::SeqCst) && answering.next() {}
        };
        let thread = std::thread::Builder::new()
            .name("answers".to_owned())
            .spawn(run)?;
        Ok(Self {
            stop,
            wakes: Some(wakes),
            thread: Some(thread),
        })
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // It hangs up on who waits.
        self.wakes = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been told by its own words.
            let _ = thread.join();
        }
    }
}

struct Answering {
    listeners: Vec<OwnedFd>,
    chance: Drawer,
    clock: Option<Arc<Clock>>,
    /// It is to stop.
    woken: OwnedFd,
}

enum Drawer {
    Tester(Mutex<Chance>),
    Service(Arc<Source>),
}

impl Drawer {
    fn fill(&self, thread: u32, bytes: &mut [u8]) {
        match self {
            Self::Tester(chance) => {
                let mut chance = chance.lock();
                chance.fill(thread, bytes);
            }
            Self::Service(source) => source.fill(thread, bytes),
        }
    }
}

/// What a call is answered with.
enum Answer {
    Value(i64),
    Error(i32),
    /// The kernel is to do it.
    Itself,
}

impl Answering {
    /// Waits for calls and answers one of each listener. False when no more can come.
    fn next(&mut self) -> bool {
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK_NS,
        };
        let polled = self
            .listeners
            .iter()
            .map(|listener| PollFd::new(listener, PollFlags::IN));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        if let Drawer::Service(source) = &self.chance {
            polled.push(PollFd::from_borrowed_fd(source.pipe(), PollFlags::OUT));
        }
        // Its end is told unasked.
        polled.push(PollFd::new(&self.woken, PollFlags::empty()));
        match poll(&mut polled, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
        let told: Vec<PollFlags> = polled.iter().map(PollFd::revents).collect();
        let is_full = match &self.chance {
            Drawer::Service(source) if !told[self.listeners.len()].is_empty() => source.fill_device(),
            _ => Ok(()),
        };
        for number in (0..self.listeners.len()).rev() {
            if told[number].contains(PollFlags::IN) {
                self.answer_one(number);
            } else if !told[number].is_empty() {
                // All that it was for has ended.
                self.listeners.remove(number);
            }
        }
        // A service's devices are filled also for who asks no listener.
        let is_asked = !self.listeners.is_empty() || matches!(self.chance, Drawer::Service(_));
        is_full.is_ok() && is_asked
    }

    fn answer_one(&mut self, number: usize) {
        let listener = self.listeners[number].as_raw_fd();
        // SAFETY: an all-zero notification is valid, and the kernel asks for one.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        if !ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) {
            return; // the process that asked has gone meanwhile
        }
        let answer = self.answer(listener, &call);
        let mut response = libc::seccomp_notif_resp {
            id: call.id,
            val: 0,
            error: 0,
            flags: 0,
        };
        match answer {
            Answer::Value(value) => response.val = value,
            Answer::Error(errno) => response.error = -errno,
            Answer::Itself => response.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32,
        }
        // One that has gone needs no answer.
        ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response);
    }

    fn answer(&mut self, listener: RawFd, call: &libc::seccomp_notif) -> Answer {
        let arguments = call.data.args;
        let read = |clock| self.clock.as_ref().and_then(|known| known.read(clock));
        match libc::c_long::from(call.data.nr) {
            libc::SYS_getrandom => {
                let mut bytes = vec![0; (arguments[1] as usize).min(MOST_CHANCE_BYTES)];
                let thread = inside(call.pid);
                self.chance.fill(thread, &mut bytes);
                write(listener, call, arguments[0], &bytes, bytes.len() as i64)
            }
            libc::SYS_clock_gettime => match read(arguments[0]) {
                Some(now) => write(
                    listener,
                    call,
                    arguments[1],
                    &pair(now / SECOND_NS, now % SECOND_NS),
                    0,
                ),
                None => Answer::Itself,
            },
            libc::SYS_gettimeofday => {
                let now = read(libc::CLOCK_REALTIME as u64).unwrap_or(0);
                match arguments[0] {
                    0 => Answer::Itself,
                    at => write(
                        listener,
                        call,
                        at,
                        &pair(now / SECOND_NS, now % SECOND_NS / 1000),
                        0,
                    ),
                }
            }
            libc::SYS_time => {
                let now = read(libc::CLOCK_REALTIME as u64).unwrap_or(0) / SECOND_NS;
                match arguments[0] {
                    0 => Answer::Value(now),
                    at => write(listener, call, at, &now.to_ne_bytes(), now),
                }
            }
            _ => Answer::Itself,
        }
    }
}

fn ioctl<T>(listener: RawFd, number: libc::Ioctl, argument: *mut T) -> bool {
    // SAFETY: each number is used with the structure that seccomp_unotify(2) names for it.
    unsafe { libc::ioctl(listener, number, argument) == 0 }
}

/// The thread's number in its own pid namespace; its number here where the kernel does not tell.
fn inside(thread: u32) -> u32 {
    let status = crate::proc::text(format!("/proc/{thread}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let last = line.and_then(|numbers| numbers.split_whitespace().last()?.parse().ok());
    last.unwrap_or(thread)
}

fn write(listener: RawFd, call: &libc::seccomp_notif, at: u64, bytes: &[u8], value: i64) -> Answer {
    let mut id = call.id;
    if !ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw mut id) {
        return Answer::Error(libc::EINTR);
    }
    let remote = [RemoteIoVec {
        base: at as usize,
        len: bytes.len(),
    }];
    match process_vm_writev(Pid::from_raw(call.pid as i32), &[IoSlice::new(bytes)], &remote) {
        Ok(written) if written == bytes.len() => Answer::Value(value),
        _ => Answer::Error(libc::EFAULT),
    }
}

fn pair(first: i64, second: i64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first.to_ne_bytes());
    bytes[8..].copy_from_slice(&second.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::{Drawn, device};
    use std::time::Duration;

    #[test]
    fn a_services_device_does_not_dry_up_where_nobody_asks_a_listener() {
        const MORE_THAN_A_PIPE: usize = 400_000;
        let (output, input) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).expect("a pipe");
        let source = Arc::new(Source::new(of_number(7), &Drawn::default(), input));
        let answers = Answers::of_a_service(Vec::new(), source).expect("a thread");
        let within = Timespec::try_from(Duration::from_secs(60)).expect("a time");
        let mut read = Vec::new();
        while read.len() < MORE_THAN_A_PIPE {
            let mut polled = [PollFd::new(&output, PollFlags::IN)];
            assert_eq!(
                poll(&mut polled, Some(&within)),
                Ok(1),
                "after {} bytes",
                read.len()
            );
            let mut piece = [0; 4096];
            let length = rustix::io::read(&output, &mut piece).expect("there are some");
            read.extend_from_slice(&piece[..length]);
        }
        drop(answers);
        assert_eq!(read, device(of_number(7), read.len()));
    }
}
