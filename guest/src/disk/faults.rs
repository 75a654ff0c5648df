//! Decides: whether an image misbehaves now. Faults are put in here because device-mapper is not everywhere; the bandwidth
//! limit also makes two hosts on one machine have two disks.
//!
//! Flow: [`super::image`] asks before every access. With no fault set it costs one atomic load.
//! Invariant: a fault never changes what is on the image, it only refuses or delays.
//! Not here: when to inject what (tests, `bench disk`).

use parking_lot::{Condvar, Mutex};
use std::{
    io,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// So long flushes hang, also those of a disk that nobody can be told of any more: its VM's copy has ended.
pub const LONGEST_HANG: Duration = Duration::from_secs(60);

/// What holds accesses back for as long as it is shut: a disk that does not answer, and gives no error either.
#[derive(Debug, Default)]
struct Barrier {
    /// Shut, and how many accesses wait.
    state: Mutex<(bool, u64)>,
    opened: Condvar,
}

impl Barrier {
    fn shut(&self, shut: bool) {
        self.state.lock().0 = shut;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut state = self.state.lock();
        state.1 += 1;
        self.opened.wait_while(&mut state, |(shut, _)| *shut);
        state.1 -= 1;
    }

    fn held(&self) -> u64 {
        let state = self.state.lock();
        if state.0 { state.1 } else { 0 }
    }
}

/// Faults of one image; all off at first, and each may change at any time.
#[derive(Debug, Default)]
pub struct Faults {
    any: AtomicBool,
    read_error: AtomicBool,
    write_error: AtomicBool,
    flush_error: AtomicBool,
    full: AtomicBool,
    flushes_hang: Mutex<bool>,
    flushes_go_on: Condvar,
    hang: Barrier,
    state_hang: Barrier,
    bytes_per_s: AtomicU64,
    free_at: Mutex<Option<Instant>>,
}

/// One fault, for whoever injects it by name: `write-error=on`, `bytes-per-s=1048576`, `none`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Reads fail, or do not any more.
    ReadError(bool),
    /// Writes fail.
    WriteError(bool),
    /// Flushes fail.
    FlushError(bool),
    /// Flushes come to no end until they may, or for [`LONGEST_HANG`].
    FlushHang(bool),
    /// The disk is full.
    Full(bool),
    /// Reads, writes and flushes do not come back, or do again.
    Hang(bool),
    /// The dirty map's folder hangs when it is flushed.
    StateHang(bool),
    /// A slow disk; 0: as fast as it is.
    BytesPerS(u64),
    /// All of them off.
    None,
}

/// No name of a fault.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "'{0}' is no fault: read-error=on, write-error=on, flush-error=on, flush-hang=on, full=on, hang=on, state-hang=on (or off), \
     bytes-per-s=N, none"
)]
pub struct UnknownFault(pub String);

impl std::str::FromStr for Fault {
    type Err = UnknownFault;

    fn from_str(text: &str) -> Result<Self, UnknownFault> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let on = match value {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        };
        match (name, on, value.parse()) {
            ("read-error", Some(on), _) => Ok(Self::ReadError(on)),
            ("write-error", Some(on), _) => Ok(Self::WriteError(on)),
            ("flush-error", Some(on), _) => Ok(Self::FlushError(on)),
            ("flush-hang", Some(on), _) => Ok(Self::FlushHang(on)),
            ("full", Some(on), _) => Ok(Self::Full(on)),
            ("hang", Some(on), _) => Ok(Self::Hang(on)),
            ("state-hang", Some(on), _) => Ok(Self::StateHang(on)),
            ("bytes-per-s", _, Ok(limit)) => Ok(Self::BytesPerS(limit)),
            ("none", ..) => Ok(Self::None),
            _ => Err(UnknownFault(text.to_owned())),
        }
    }
}

impl Faults {
    /// Sets one fault.
    pub fn inject(&self, fault: Fault) {
        match fault {
            Fault::ReadError(on) => self.read_error(on),
            Fault::WriteError(on) => self.write_error(on),
            Fault::FlushError(on) => self.flush_error(on),
            Fault::FlushHang(on) => self.flush_hang(on),
            Fault::Full(on) => self.full(on),
            Fault::Hang(on) => self.hang(on),
            Fault::StateHang(on) => self.state_hang(on),
            Fault::BytesPerS(limit) => self.bytes_per_s(limit),
            Fault::None => {
                for what in [&self.read_error, &self.write_error, &self.flush_error, &self.full] {
                    what.store(false, Ordering::Release);
                }
                self.flush_hang(false);
                self.hang.shut(false);
                self.state_hang.shut(false);
                self.bytes_per_s(0);
            }
        }
    }

    fn set(&self, what: &AtomicBool, on: bool) {
        what.store(on, Ordering::Release);
        self.any.store(true, Ordering::Release);
    }

    /// Reads fail with EIO.
    pub fn read_error(&self, on: bool) {
        self.set(&self.read_error, on);
    }

    /// Writes fail with EIO.
    pub fn write_error(&self, on: bool) {
        self.set(&self.write_error, on);
    }

    /// Flushes fail with EIO.
    pub fn flush_error(&self, on: bool) {
        self.set(&self.flush_error, on);
    }

    /// Flushes come to no end, until they do again.
    pub fn flush_hang(&self, on: bool) {
        *self.flushes_hang.lock() = on;
        self.flushes_go_on.notify_all();
        self.any.store(true, Ordering::Release);
    }

    /// Writes fail with ENOSPC.
    pub fn full(&self, on: bool) {
        self.set(&self.full, on);
    }

    /// Reads, writes and flushes of the image and of its journal wait until this is off again.
    pub fn hang(&self, on: bool) {
        self.hang.shut(on);
        self.any.store(true, Ordering::Release);
    }

    /// The same for what makes the dirty map durable.
    pub fn state_hang(&self, on: bool) {
        self.state_hang.shut(on);
        self.any.store(true, Ordering::Release);
    }

    /// Accesses that hang.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.hang.held() + self.state_hang.held()
    }

    /// Reads and writes share this many bytes per second; 0: no limit.
    pub fn bytes_per_s(&self, limit: u64) {
        self.bytes_per_s.store(limit, Ordering::Release);
        self.any.store(true, Ordering::Release);
    }

    pub(super) fn before_read(&self, bytes: u64) -> io::Result<()> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        self.hang.pass();
        if self.read_error.load(Ordering::Acquire) {
            return Err(injected("read"));
        }
        self.pace(bytes);
        Ok(())
    }

    pub(super) fn before_write(&self, bytes: u64) -> io::Result<()> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        self.hang.pass();
        if self.write_error.load(Ordering::Acquire) {
            return Err(injected("write"));
        }
        if self.full.load(Ordering::Acquire) {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                "injected: no space left",
            ));
        }
        self.pace(bytes);
        Ok(())
    }

    pub(super) fn before_flush(&self) -> io::Result<()> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(());
        }
        self.hang.pass();
        if self.flush_error.load(Ordering::Acquire) {
            return Err(injected("flush"));
        }
        let mut hangs = self.flushes_hang.lock();
        self.flushes_go_on
            .wait_while_for(&mut hangs, |hangs| *hangs, LONGEST_HANG);
        // Whoever has hung so long was only slow.
        *hangs = false;
        Ok(())
    }

    pub(super) fn before_state_flush(&self) {
        if self.any.load(Ordering::Acquire) {
            self.state_hang.pass();
        }
    }

    /// A slow disk: accesses queue up behind one another. (This is the one place that sleeps: the delay is the point.)
    fn pace(&self, bytes: u64) {
        let limit = self.bytes_per_s.load(Ordering::Acquire);
        if limit == 0 {
            return;
        }
        let now = Instant::now();
        let until = {
            let mut free_at = self.free_at.lock();
            let start = free_at.map_or(now, |at| at.max(now));
            let until = start + Duration::from_secs_f64(bytes as f64 / limit as f64);
            *free_at = Some(until);
            until
        };
        std::thread::sleep(until - now);
    }
}

fn injected(what: &str) -> io::Error {
    io::Error::other(format!("injected: {what} error"))
}
