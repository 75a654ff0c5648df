//! What a group waits for: its links, its disk, and the core's next deadline.
//!
//! Not here: what follows from any of it (`poll`).

use super::{Group, OTHER};
use crate::wait::Idle;
use dunlin_core::units::ReplicaId;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

impl Group {
    /// Before sleeping: false means that there is something to do already, so call `poll` instead.
    pub fn arm(&mut self) -> bool {
        self.flush(true);
        let mut idle = self.events.is_empty() && !self.proposed && !self.more && !self.writer.is_ready();
        self.armed = true;
        (self.asked, self.told) = (false, false);
        for at in 0..self.peers.len() {
            idle &= self.peers[at].transport.arm().is_ok() && !self.peers[at].has_something();
            if let Some(fd) = self.peers[at].transport.fds()[0] {
                let wants = self.peers[at].transport.wants_write();
                if wants != self.peers[at].watched_for_write {
                    self.peers[at].watched_for_write = wants;
                    let events = if wants {
                        libc::EPOLLIN | libc::EPOLLOUT
                    } else {
                        libc::EPOLLIN
                    };
                    idle &= self.watch(fd, events, u64::from(self.peers[at].id.0)).is_ok();
                }
            }
        }
        idle
    }

    /// For an owner that has waited for the group's descriptor itself, after [`Group::arm`]: whether it was readable. If not, `poll`
    /// need not ask the system which links are.
    pub fn woke(&mut self, readable: bool) {
        (self.asked, self.told) = (!readable, true);
    }

    /// For an owner without its own epoll: waits by the configured policy until there may be something to do, at the
    /// latest until `until_us` or the next deadline. `now_us` is the caller's clock, as for `poll`.
    pub fn wait(&mut self, now_us: u64, until_us: u64) {
        let until_us = self
            .core
            .next_deadline_us()
            .map_or(until_us, |at| at.min(until_us));
        match self.cfg.wait.after(self.idle_rounds) {
            Idle::Spin => std::hint::spin_loop(),
            Idle::Yield => std::thread::yield_now(),
            Idle::Block => {
                if self.arm() && until_us > now_us {
                    self.ask(until_us - now_us);
                }
            }
        }
        self.idle_rounds = self.idle_rounds.saturating_add(1);
    }

    /// Asks the system which links are readable, waiting for one at most so long.
    pub(super) fn ask(&mut self, for_us: u64) {
        let timeout = libc::timespec {
            tv_sec: (for_us / 1_000_000) as i64,
            tv_nsec: (for_us % 1_000_000 * 1000) as i64,
        };
        const MOST: usize = 16;
        let mut events = [libc::epoll_event {
            events: 0,
            u64: OTHER,
        }; MOST];
        let most = MOST as i32;
        // SAFETY: the events and the timeout live across the call. Being woken early for any reason is fine.
        let n = unsafe {
            let epoll = self.epoll.as_raw_fd();
            let n = libc::epoll_pwait2(
                epoll,
                events.as_mut_ptr(),
                most,
                &raw const timeout,
                std::ptr::null(),
            );
            if n < 0 && *libc::__errno_location() == libc::ENOSYS {
                libc::epoll_wait(
                    epoll,
                    events.as_mut_ptr(),
                    most,
                    for_us.div_ceil(1000).min(1000) as i32,
                )
            } else {
                n
            }
        };
        self.asked = n >= 0;
        for event in &events[..n.max(0) as usize] {
            let whose = event.u64;
            let peer = u8::try_from(whose)
                .ok()
                .and_then(|id| self.peer_mut(ReplicaId(id)));
            if let Some(peer) = peer {
                peer.readable = true;
            }
        }
    }

    /// Readable means: call `poll`. One descriptor, the same for the group's life.
    #[must_use]
    pub fn fds(&self) -> Vec<RawFd> {
        vec![self.epoll.as_raw_fd()]
    }

    /// `poll` must be called at this time at the latest.
    #[must_use]
    pub fn next_deadline_us(&self) -> Option<u64> {
        self.core.next_deadline_us()
    }
}

impl AsFd for Group {
    /// Readable means: call `poll`. The same descriptor for the group's life.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
