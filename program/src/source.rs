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
                    // Another host may say that all of it was drawn.
                    device.written = device.written.wrapping_add(written as u64);
                    device.next.drain(..written);
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What CRIU has put back into a brought copy's pipe comes out of its stream once more.
pub(crate) fn emptied(pipe: OwnedFd) -> OwnedFd {
    let mut bytes = [0; PIECE_BYTES];
    loop {
        match rustix::io::read(&pipe, &mut bytes) {
            Ok(1..) | Err(Errno::INTR) => {}
            // It would wait: nothing is left.
            Ok(0) | Err(_) => return pipe,
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

    #[test]
    fn what_was_in_the_pipe_when_a_copy_was_taken_is_not_given_twice() {
        let whole = device(of_number(7), 20_000);
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("urandom");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let mut options = std::fs::File::options();
        options.read(true).write(true);
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
        let pipe: OwnedFd = options.open(&path).expect("opened").into();
        let reads = pipe.try_clone().expect("a descriptor");
        // The first copy has read 100 bytes, and these lay in its pipe.
        rustix::io::write(&pipe, &whole[100..9_000]).expect("room");
        let drawn = Drawn {
            device_bytes: 100,
            ..Drawn::default()
        };
        let source = Source::new(of_number(7), &drawn, emptied(pipe));
        source.fill_device().expect("filled");
        let mut bytes = [0; 12_000];
        let read = rustix::io::read(&reads, &mut bytes).expect("full");
        assert_eq!(bytes[..read], whole[100..100 + read]);
        assert_eq!(source.drawn().expect("told").device_bytes, 100 + read as u64);
    }
}
