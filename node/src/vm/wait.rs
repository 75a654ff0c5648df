//! What a VM's loop waits for: its events, the group's links, the VM's cards, the network, the backup's words, QEMU's end, and the next deadline.
//!
//! The system keeps the list of descriptors ([`Watched`]), since it is nearly always the same: with `poll` it was told all of it at each turn.
//!
//! Not here: what follows from any of it (`run`).

use super::session::reader::Lent;
use super::state::watched::{Mark, Ready, Source};
use super::state::{Role, VmLoop};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The longest sleep: a bound on what a forgotten deadline could cost.
const LONGEST_SLEEP_US: u64 = 100_000;

impl VmLoop {
    /// Waits for what can happen to the loop, until its next deadline at the latest.
    pub(super) fn wait(&mut self) -> Ready {
        // Armed: a peer's write after this rings a doorbell. What is there already must not be slept on.
        let more = self.lent().is_some_and(|(_, lent)| lent.has_more());
        let idle = self.group.arm() && self.inbox.events.is_empty() && !more;
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
        let mut own = [self.inbox.to_loop.waker().as_fd(), self.group.as_fd()]
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
        let Some(speculating) = &self.net.speculating else {
            return self.inbox.watched.ask(timeout);
        };
        // These are others from turn to turn.
        let watched = self.inbox.watched.epoll.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut fds = vec![PollFd::from_borrowed_fd(watched.as_fd(), PollFlags::IN)];
        fds.extend(speculating.fds(self.may_speak(self.now_us())));
        poll(&mut fds, Some(timeout))?;
        let shadow = fds[1..].iter().any(|fd| !fd.revents().is_empty());
        let ready = self.inbox.watched.ask(&Timespec::default())?;
        Ok(Ready { shadow, ..ready })
    }

    fn look_again_what_is_watched(&mut self) -> io::Result<()> {
        let mut watched = std::mem::take(&mut self.inbox.watched);
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
        self.inbox.watched = watched;
        right
    }

    /// What is to be watched now, with the number of what each belongs to.
    fn fds(&self) -> impl Iterator<Item = (BorrowedFd<'_>, Source, u64)> {
        let nics = self.net.nics.as_ref();
        let ports = nics.filter(|_| !self.net.output_waits).into_iter();
        let taps = nics.filter(|_| self.takes_inputs()).into_iter();
        let lent = self
            .lent()
            .and_then(|(session, lent)| Some((lent.fd()?, Source::Words, session)));
        let machine = self.machine().into_iter();
        [
            (self.inbox.to_loop.waker().as_fd(), Source::Waker, 0),
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
            self.net
                .speculating
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
        self.inbox.ready.qemu_ended
    }
}
