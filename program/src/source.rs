//! Where a service's program draws its chance: the system call's answers, and what comes out of its devices.
//!
//! Decides:    nothing.
//! Flow:       `getrandom` -> the seccomp listener -> `crate::answers` -> here. `/dev/urandom` of the copy is a named pipe, which is kept full from
//!             here. A copy of the copy goes on from `drawn`.
//! Invariants: 1. what was read from the device is what was written to it, less what is still in the pipe.
//! Source:     fifo(7); FIONREAD in ioctl_tty(2). Not here: the streams themselves (`crate::chance`).

use crate::chance::{Chance, Device, Drawn, Seed};
use parking_lot::Mutex;
use rustix::io::{Errno, ioctl_fionread};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Written at once, or not at all (PIPE_BUF); a multiple of a stream's word.
const PIECE_BYTES: usize = 4096;

/// The chance of a service's copy.
#[derive(Debug)]
pub struct Source {
    seed: Seed,
    chance: Mutex<Chance>,
    device: Mutex<Filled>,
    pipe: OwnedFd,
}

#[derive(Debug)]
struct Filled {
    stream: Device,
    written: u64,
    /// Had no room yet.
    next: Vec<u8>,
}

impl Source {
    /// From the pipe that is the copy's device, and how far another copy has drawn.
    #[must_use]
    pub fn new(seed: Seed, drawn: &Drawn, pipe: OwnedFd) -> Self {
        Self {
            seed,
            chance: Mutex::new(Chance::drawn(seed, drawn)),
            device: Mutex::new(Filled {
                stream: Device::from(seed, drawn.device_bytes),
                written: drawn.device_bytes,
                next: Vec::new(),
            }),
            pipe,
        }
    }

    /// What all copies have.
    #[must_use]
    pub fn seed(&self) -> Seed {
        self.seed
    }

    /// How far it was drawn. True of a program that stands still.
    ///
    /// # Errors
    /// Where the kernel does not say what is in the pipe.
    pub fn drawn(&self) -> io::Result<Drawn> {
        let threads = self.chance.lock().threads();
        let device = self.device.lock();
        let device_bytes = device.written.saturating_sub(ioctl_fionread(&self.pipe)?);
        Ok(Drawn {
            threads,
            device_bytes,
        })
    }

    pub(crate) fn fill(&self, thread: u32, bytes: &mut [u8]) {
        let mut chance = self.chance.lock();
        chance.fill(thread, bytes);
    }

    /// Writable when the device wants more.
    pub(crate) fn pipe(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    /// As much as goes in.
    pub(crate) fn fill_device(&self) -> io::Result<()> {
        let mut device = self.device.lock();
        loop {
            if device.next.is_empty() {
                device.next = device.stream.next(PIECE_BYTES);
            }
            match rustix::io::write(&self.pipe, &device.next) {
                Ok(written) => {
                    device.written += written as u64;
                    device.next.drain(..written);
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::{device, of_number};
    use rustix::pipe::{PipeFlags, pipe_with};

    #[test]
    fn what_a_copy_of_a_copy_reads_goes_on_at_the_byte_where_the_first_one_stood() {
        let whole = device(of_number(7), 20_000);
        let (mut drawn, mut read) = (Drawn::default(), Vec::new());
        for length in [1, 6, 4096, 9_001] {
            let (output, input) = pipe_with(PipeFlags::NONBLOCK).expect("a pipe");
            let source = Source::new(of_number(7), &drawn, input);
            source.fill_device().expect("filled");
            let mut bytes = vec![0; length];
            let got = rustix::io::read(&output, &mut bytes).expect("full");
            read.extend_from_slice(&bytes[..got]);
            drawn = source.drawn().expect("told");
            assert_eq!(drawn.device_bytes, read.len() as u64);
        }
        assert_eq!(read.len(), 1 + 6 + 4096 + 9_001);
        assert_eq!(read, whole[..read.len()]);
    }
}
