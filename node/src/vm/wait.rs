//! What a VM's loop waits for: its events, the group's links, the VM's cards, the network, the backup's words, QEMU's end, and the next deadline.
//!
//! The system keeps the list of descriptors ([`Watched`]), since it is nearly always the same: with `poll` it was told all of it at each turn.
//!
//! Not here: what follows from any of it (`run`).

use super::run::{Role, VmLoop};
use super::session::reader::Lent;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// The longest sleep: a bound on what a forgotten deadline could cost.
const LONGEST_SLEEP_US: u64 = 100_000;
/// So many descriptors are told of at once; the others with the next turn.
const MOST_TOLD: usize = 16;

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
enum Source {
    Waker,
    Group,
    Port,
    Tap,
    Words,
    Qemu,
}

/// A descriptor that is watched. Numbers of closed ones are given again, so it goes with the number of what it belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Mark {
    fd: RawFd,
    of: u64,
    source: Source,
}

/// The descriptors that the system watches for the loop. Where they are others than at the last turn, which is seldom, it begins
/// anew: so nothing of what is closed or not wanted now stays behind.
#[derive(Default)]
pub struct Watched {
    epoll: Option<OwnedFd>,
    marks: Vec<Mark>,
    /// Those of this turn; kept for its room.
    wanted: Vec<Mark>,
}

impl Watched {
    /// Whether the system watches what is wanted now.
    fn is_right(&self) -> bool {
        self.epoll.is_some() && self.marks == self.wanted
    }

    fn begin_anew<'a>(&mut self, fds: impl Iterator<Item = (BorrowedFd<'a>, Source)>) -> io::Result<()> {
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
    fn ask(&self, timeout: &Timespec) -> io::Result<Ready> {
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

impl VmLoop {
    /// Waits for what can happen to the loop, until its next deadline at the latest.
    pub(super) fn wait(&mut self) -> Ready {
        // Armed: a peer's write after this rings a doorbell. What is there already must not be slept on.
        let more = self.lent().is_some_and(|(_, lent)| lent.has_more());
        let idle = self.group.arm() && self.events.is_empty() && !more;
        let sleep_us = if idle { self.sleep_us() } else { 0 };
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: (sleep_us * 1000) as i64,
        };
        let asked = self
            .look_again_what_is_watched()
            .and_then(|()| self.ask(&timeout));
        match asked {
            Ok(ready) => Ready {
                words: ready.words | more,
                ..ready
            },
            Err(_) => self.look_at_all(),
        }
    }

    /// The system has no room for another list, for one: all is looked at, a thousand times a second if nothing of the loop's own comes.
    fn look_at_all(&self) -> Ready {
        let mut own = [self.to_loop.waker().as_fd(), self.group.as_fd()]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        // Whatever it says.
        let _ = poll(&mut own, Some(&timeout));
        Ready::ALL
    }

    fn lent(&self) -> Option<(u64, &Lent)> {
        match &self.role {
            Role::Primary(primary) => primary.lent(),
            Role::Backup(_) | Role::None => None,
        }
    }

    fn ask(&self, timeout: &Timespec) -> io::Result<Ready> {
        let Some(speculating) = &self.speculating else {
            return self.watched.ask(timeout);
        };
        // These are others from turn to turn.
        let watched = self.watched.epoll.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut fds = vec![PollFd::from_borrowed_fd(watched.as_fd(), PollFlags::IN)];
        fds.extend(speculating.fds(self.may_speak(self.now_us())));
        poll(&mut fds, Some(timeout))?;
        let shadow = fds[1..].iter().any(|fd| !fd.revents().is_empty());
        let ready = self.watched.ask(&Timespec::default())?;
        Ok(Ready { shadow, ..ready })
    }

    fn look_again_what_is_watched(&mut self) -> io::Result<()> {
        let mut watched = std::mem::take(&mut self.watched);
        watched.wanted.clear();
        watched.wanted.extend(self.fds().map(|(fd, source, of)| Mark {
            fd: fd.as_raw_fd(),
            of,
            source,
        }));
        let right = match watched.is_right() {
            true => Ok(()),
            false => watched.begin_anew(self.fds().map(|(fd, source, _)| (fd, source))),
        };
        self.watched = watched;
        right
    }

    /// What is to be watched now, with the number of what each belongs to.
    fn fds(&self) -> impl Iterator<Item = (BorrowedFd<'_>, Source, u64)> {
        let nics = self.nics.as_ref();
        let ports = nics.filter(|_| !self.output_waits).into_iter();
        let taps = nics.filter(|_| self.takes_inputs()).into_iter();
        let lent = self
            .lent()
            .and_then(|(session, lent)| Some((lent.fd()?, Source::Words, session)));
        let machine = self.machine().into_iter();
        [
            (self.to_loop.waker().as_fd(), Source::Waker, 0),
            (self.group.as_fd(), Source::Group, 0),
        ]
        .into_iter()
        .chain(ports.flat_map(|nics| nics.port_fds().map(|fd| (fd, Source::Port, nics.number()))))
        .chain(taps.flat_map(|nics| nics.tap_fds().map(|fd| (fd, Source::Tap, nics.number()))))
        .chain(lent)
        .chain(machine.map(|machine| (machine.qemu.pidfd(), Source::Qemu, u64::from(machine.qemu.pid()))))
    }

    /// Until the next deadline.
    fn sleep_us(&self) -> u64 {
        let now_us = self.now_us();
        let deadline_us = [
            self.group.next_deadline_us(),
            self.primary_deadline_us(),
            self.backup_deadline_us(),
            self.speculating
                .as_ref()
                .and_then(|speculating| speculating.deadline_us()),
        ]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(u64::MAX);
        deadline_us.saturating_sub(now_us).min(LONGEST_SLEEP_US)
    }

    /// Whether QEMU's process has ended, as far as the last wait has shown.
    pub(super) fn qemu_has_ended(&self) -> bool {
        self.ready.qemu_ended
    }
}
