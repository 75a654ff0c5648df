//! What it decides: how a VM waits for room on its disk, and when it is let run again.
//!
//! Flow: QEMU stops the VM at a request that found no room, and keeps the request -> the VM stands -> every [`RETRY_US`] it is let run, and QEMU tries
//! the request anew -> it stops again, or nothing has failed until the next look: there is room.
//!
//! Invariants:
//! 1. A VM that a sync has stopped, or that is the backup's by now, is not let run: who stopped it does that. It counts as tried only when it
//!    was let run from here: a sync that breaks before it has stopped the VM lets nothing run.
//! 2. That it waits, and that it has room again, is told once each.
//!
//! Source: QEMU's `werror=enospc`. Not here: a disk that fails (the backup goes on, if there is one).

/// How long a VM whose disk is full stands until it tries again.
pub const RETRY_US: u64 = 1_000_000;

/// What follows from a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// Nothing now.
    Nothing,
    /// The VM is let run, and tries again.
    Retries,
    /// Nothing has failed since it did.
    HasRoom,
}

/// A VM whose disk may be full.
#[derive(Clone, Copy, Debug, Default)]
pub struct EnospcWait {
    look_at_us: Option<u64>,
    /// It was let run; if nothing fails until the next look, there is room.
    tried: bool,
}

impl EnospcWait {
    /// QEMU has stopped the VM for want of room. Whether that is news.
    pub fn stopped(&mut self, now_us: u64) -> bool {
        let known = self.look_at_us.replace(now_us + RETRY_US);
        self.tried = false;
        known.is_none()
    }

    /// Whether the VM waits.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.look_at_us.is_some()
    }

    /// When to look.
    #[must_use]
    pub fn look_at_us(&self) -> Option<u64> {
        self.look_at_us
    }

    /// Looks; `may_run`: nobody else has stopped the VM (invariant 1).
    pub fn look(&mut self, now_us: u64, may_run: bool) -> Look {
        if self.look_at_us.is_none_or(|at_us| at_us > now_us) {
            return Look::Nothing;
        }
        if may_run && self.tried {
            *self = Self::default();
            return Look::HasRoom;
        }
        self.look_at_us = Some(now_us + RETRY_US);
        if !may_run {
            return Look::Nothing;
        }
        self.tried = true;
        Look::Retries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_tries_once_a_second_until_there_is_room_and_each_end_is_told_once() {
        let mut wait = EnospcWait::default();
        assert_eq!(wait.look(0, true), Look::Nothing);
        assert!(wait.stopped(0), "news");
        for second in 1..=3 {
            let now_us = second * RETRY_US;
            assert_eq!(wait.look(now_us - 1, true), Look::Nothing);
            assert_eq!(wait.look(now_us, true), Look::Retries);
            assert!(!wait.stopped(now_us), "known");
            assert!(wait.waits());
        }
        assert_eq!(wait.look(4 * RETRY_US, true), Look::Retries);
        assert_eq!(wait.look(5 * RETRY_US, true), Look::HasRoom);
        assert!(!wait.waits() && wait.look_at_us().is_none());
        assert!(wait.stopped(6 * RETRY_US), "news again");
    }

    #[test]
    fn a_vm_that_a_sync_has_stopped_is_let_run_by_the_sync() {
        let mut wait = EnospcWait::default();
        assert!(wait.stopped(0));
        assert_eq!(wait.look(RETRY_US, false), Look::Nothing);
        // The sync has let it run, and it failed again.
        assert!(!wait.stopped(RETRY_US + 1));
        assert_eq!(wait.look(2 * RETRY_US + 1, true), Look::Retries);
    }

    #[test]
    fn a_vm_that_nobody_let_run_has_no_room_yet() {
        let mut wait = EnospcWait::default();
        assert!(wait.stopped(0));
        // A sync is under way, and breaks before it has stopped the VM.
        assert_eq!(wait.look(RETRY_US, false), Look::Nothing);
        assert!(wait.waits());
        assert_eq!(wait.look(2 * RETRY_US, true), Look::Retries);
        // The next one has stopped it since: whether there is room is seen when it runs.
        assert_eq!(wait.look(3 * RETRY_US, false), Look::Nothing);
        assert_eq!(wait.look(4 * RETRY_US, true), Look::HasRoom);
    }
}
