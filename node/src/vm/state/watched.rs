//! The descriptors that the system watches for a loop, and what it has said of them.
//!
//! Not here: which they are (`vm::wait`).

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// So many descriptors are told of at once; the others with the next turn.
pub(in crate::vm) const MOST_TOLD: usize = 16;

/// What the system said when the loop last waited: only what is ready is worth a system call of its own.
#[derive(Clone, Copy, Default)]
pub struct Ready {
    pub waker: bool,
    pub group: bool,
    pub ports: bool,
    pub taps: bool,
    pub words: bool,
    pub qemu_ended: bool,
    pub shadow: bool,
}

impl Ready {
    /// The system could not be asked.
    pub const ALL: Self = Self {
        waker: true,
        group: true,
        ports: true,
        taps: true,
        words: true,
        qemu_ended: true,
        shadow: true,
    };
}

/// Whose a descriptor is.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(in crate::vm) enum Source {
    Waker,
    Group,
    Port,
    Tap,
    Words,
    Qemu,
}

/// A descriptor that is watched. Numbers of closed ones are given again, so it goes with the number of what it belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::vm) struct Mark {
    pub(in crate::vm) fd: RawFd,
    pub(in crate::vm) of: u64,
    pub(in crate::vm) source: Source,
}

/// The descriptors that the system watches for the loop. Where they are others than at the last turn, which is seldom, it begins
/// anew: so nothing of what is closed or not wanted now stays behind.
#[derive(Default)]
pub struct Watched {
    pub(in crate::vm) epoll: Option<OwnedFd>,
    pub(in crate::vm) marks: Vec<Mark>,
    /// Those of this turn; kept for its room.
    pub(in crate::vm) wanted: Vec<Mark>,
}

impl Watched {
    /// Whether the system watches what is wanted now.
    pub(in crate::vm) fn is_right(&self) -> bool {
        self.epoll.is_some() && self.marks == self.wanted
    }

    pub(in crate::vm) fn begin_anew<'a>(
        &mut self,
        fds: impl Iterator<Item = (BorrowedFd<'a>, Source)>,
    ) -> io::Result<()> {
        self.epoll = None;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (fd, source) in fds {
            epoll::add(&epoll, fd, EventData::new_u64(source as u64), EventFlags::IN)?;
        }
        self.epoll = Some(epoll);
        self.marks.clone_from(&self.wanted);
        Ok(())
    }

    /// What is ready now, or is within `timeout`.
    pub(in crate::vm) fn ask(&self, timeout: &Timespec) -> io::Result<Ready> {
        let epoll = self.epoll.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut told = [const { MaybeUninit::uninit() }; MOST_TOLD];
        let (told, _) = epoll::wait(epoll, &mut told, Some(timeout))?;
        let mut ready = Ready::default();
        for event in told {
            // An end or an error is to be looked at as well.
            let whose = event.data.u64();
            for (source, flag) in [
                (Source::Waker, &mut ready.waker),
                (Source::Group, &mut ready.group),
                (Source::Port, &mut ready.ports),
                (Source::Tap, &mut ready.taps),
                (Source::Words, &mut ready.words),
                (Source::Qemu, &mut ready.qemu_ended),
            ] {
                *flag |= whose == source as u64;
            }
        }
        Ok(ready)
    }
}
