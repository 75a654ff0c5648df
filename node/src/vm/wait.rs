//! What a VM's loop waits for: its events, the group's links, the VM's cards, the network, QEMU's end, and the next deadline.
//!
//! Not here: what follows from any of it (`run`).

use super::run::VmLoop;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd};

/// The longest sleep: a bound on what a forgotten deadline could cost.
const LONGEST_SLEEP_US: u64 = 100_000;

/// What the system said when the loop last waited: only what is ready is worth a system call of its own.
#[derive(Clone, Copy)]
pub struct Ready {
    pub bell: bool,
    pub group: bool,
    pub ports: bool,
    pub taps: bool,
    pub qemu_ended: bool,
    pub shadow: bool,
}

impl Ready {
    /// The system could not be asked.
    pub const ALL: Self = Self {
        bell: true,
        group: true,
        ports: true,
        taps: true,
        qemu_ended: true,
        shadow: true,
    };
}

impl VmLoop {
    /// Waits for what can happen to the loop, until its next deadline at the latest.
    pub(super) fn wait(&mut self) -> Ready {
        // Armed: a peer's write after this rings a doorbell. What is there already must not be slept on.
        let idle = self.group.arm() && self.events.is_empty();
        let sleep_us = if idle { self.sleep_us() } else { 0 };
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: (sleep_us * 1000) as i64,
        };
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(8);
        fds.push(PollFd::new(self.to_loop.bell(), PollFlags::IN));
        fds.push(watch(self.group.as_fd()));
        if let Some(nics) = self.nics.as_ref().filter(|_| !self.output_waits) {
            fds.extend(nics.port_fds().map(watch));
        }
        let taps = fds.len();
        if let Some(nics) = self.nics.as_ref().filter(|_| self.takes_inputs()) {
            fds.extend(nics.tap_fds().map(watch));
        }
        let qemu = fds.len();
        if let Some(machine) = self.machine() {
            fds.push(watch(machine.qemu.pidfd()));
        }
        let shadow = fds.len();
        if let Some(speculating) = &self.speculating {
            fds.extend(speculating.fds(self.may_speak(self.now_us())));
        }
        if poll(&mut fds, Some(&timeout)).is_err() {
            return Ready::ALL;
        }
        // An end or an error is to be looked at as well.
        let any = |fds: &[PollFd<'_>]| fds.iter().any(|fd| !fd.revents().is_empty());
        Ready {
            bell: any(&fds[..1]),
            group: any(&fds[1..2]),
            ports: any(&fds[2..taps]),
            taps: any(&fds[taps..qemu]),
            qemu_ended: any(&fds[qemu..shadow]),
            shadow: any(&fds[shadow..]),
        }
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

fn watch(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}
