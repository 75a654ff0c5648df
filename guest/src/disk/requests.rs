//! What each NBD request of the VM means, by the disk's role, and how long it took.
//!
//! Decides: which request goes where; whether the VM hears of an error. Flow: [`super::nbd`] -> here -> `primary` or `backup`.
//! Invariants: **G1** of [`super`]: a request holds the gate shared for as long as it runs; an error of an image is not
//! answered while errors are held.
//! Not here: the protocol ([`super::nbd`]), who holds errors (node).

use super::{Disk, Role, nbd};
use bytes::Bytes;
use dunlin_core::disk::Content;
use parking_lot::{Condvar, Mutex};
use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

/// Requests that failed on the VM's disk, and whose VM is not told yet.
#[derive(Default)]
pub(super) struct Held {
    hold: Mutex<bool>,
    changed: Condvar,
}

impl Held {
    pub(super) fn set(&self, hold: bool) {
        *self.hold.lock() = hold;
        self.changed.notify_all();
    }

    /// An error stays here for as long as errors are held.
    fn pass<T>(&self, result: io::Result<T>) -> io::Result<T> {
        if result.is_err() {
            let mut hold = self.hold.lock();
            self.changed.wait_while(&mut hold, |hold| *hold);
        }
        result
    }
}

/// Requests of the VM so far, and how long they took in all.
#[derive(Debug, Default)]
pub(super) struct Served {
    pub(super) requests: AtomicU64,
    pub(super) ns: AtomicU64,
}

/// A request that is being done.
struct Timed<'a>(&'a Served, std::time::Instant);

impl Served {
    fn one(&self) -> Timed<'_> {
        Timed(self, std::time::Instant::now())
    }
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        self.0.requests.fetch_add(1, Ordering::Relaxed);
        self.0
            .ns
            .fetch_add(self.1.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }
}

fn idle_error() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the disk has no role yet")
}

impl nbd::Export for Disk {
    fn info(&self) -> nbd::ExportInfo {
        nbd::ExportInfo {
            name: self.shared.name.clone(),
            size_bytes: self.shared.image.size_bytes(),
            read_only: self.shared.image.read_only(),
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let _timed = self.served.one();
        let read = match &*self.role() {
            Role::Idle | Role::Primary(_) => self.shared.image.read(offset, out),
            Role::Backup(backup) => backup.read(offset, out),
        };
        self.held
            .pass(read.inspect_err(|error| self.shared.image_failed("read", error)))
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool) -> io::Result<()> {
        let _timed = self.served.one();
        let done = match &*self.role() {
            Role::Idle => Err(idle_error()),
            Role::Primary(primary) => {
                let written = primary.write(offset, data);
                if fua {
                    written.and_then(|()| primary.flush())
                } else {
                    written
                }
            }
            // On a backup a write is as durable as its VM: both live and die in memory until a sync or a take-over.
            Role::Backup(backup) => backup.write(offset, Content::Data(data)),
        };
        self.held.pass(done)
    }

    fn zero(&self, offset: u64, len: u64, unmap: bool, fua: bool) -> io::Result<()> {
        let _timed = self.served.one();
        let done = match &*self.role() {
            Role::Idle => Err(idle_error()),
            Role::Primary(primary) => {
                let zeroed = primary.zero(offset, len, unmap);
                if fua {
                    zeroed.and_then(|()| primary.flush())
                } else {
                    zeroed
                }
            }
            Role::Backup(backup) => backup.write(offset, Content::Zero(len)),
        };
        self.held.pass(done)
    }

    fn flush(&self) -> io::Result<()> {
        let _timed = self.served.one();
        let done = match &*self.role() {
            Role::Idle | Role::Backup(_) => Ok(()),
            Role::Primary(primary) => primary.flush(),
        };
        self.held.pass(done)
    }

    fn status(&self, offset: u64, len: u64) -> io::Result<Vec<(u64, bool)>> {
        match &*self.role() {
            Role::Idle | Role::Primary(_) => self.shared.image.status(offset, len),
            Role::Backup(backup) => backup.status(offset, len),
        }
    }
}
