//! What it decides: whether a VM that should get on does not.
//!
//! Flow: a look at every turn of the VM's loop, on the primary as on the backup -> [`Watchdog::look`] -> an event, a figure, a
//! state, and the end of the session that is waited for.
//!
//! Invariants:
//! 1. Nothing is said while nothing waits, and nothing is said twice of the same stall.
//! 2. What waits for longer than its bound in core's `waits`, without any of its kind getting on, is named.
//!
//! It knows nothing of why: each wait on the way has a shorter bound of its own. This is for the one that was forgotten.
//!
//! Not here: how a session is ended; a VM without a majority, which is to stand still.

use crate::units::Index;
use crate::waits::{Wait, seconds};

/// What is seen of one thing that may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flow {
    /// Something waits.
    pub waits: bool,
    /// How far it has come: any change is progress.
    pub progress: u64,
}

impl Flow {
    /// Inputs: those that are agreed and not yet with the VM, and those that a full log leaves in the network.
    #[must_use]
    pub fn of_inputs(applied: Index, committed: Index, log_is_full: bool) -> Self {
        Self {
            waits: applied < committed || log_is_full,
            progress: applied.0,
        }
    }
}

/// What is seen of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sight {
    /// Inputs, and how many have reached the VM here.
    pub input: Flow,
    /// The sync under way, and how many have ended.
    pub sync: Flow,
    /// Output of the VM, and how much has left. Nothing waits on a backup.
    pub output: Flow,
    /// Syncs on their way to a backup's disks, and how far they are. Nothing waits on a primary.
    pub disks: Flow,
    /// A copy that is being taken over, and how far that is. Nothing else is looked at meanwhile.
    pub take_over: Flow,
}

/// A stall.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stall {
    /// What does not get on.
    pub wait: Wait,
    /// For how long.
    pub for_us: u64,
}

impl Stall {
    /// For a person. `also`: what the session's thread waits for, and for how long.
    #[must_use]
    pub fn said(self, also: Option<(Wait, u64)>) -> String {
        let waits = format!(
            "for {} it has waited for {} ({})",
            seconds(self.for_us),
            self.wait.terms().for_what,
            self.wait.name()
        );
        match also {
            Some((wait, us)) => format!(
                "{waits}; the session waits for {} ({}) since {}",
                wait.terms().for_what,
                wait.name(),
                seconds(us)
            ),
            None => waits,
        }
    }
}

/// Of one VM.
#[derive(Clone, Debug, Default)]
pub struct Watchdog {
    input: Watched,
    sync: Watched,
    output: Watched,
    disks: Watched,
    take_over: Watched,
    stalls: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    progress: u64,
    still_since_us: Option<u64>,
    said: bool,
}

impl Watched {
    fn look(&mut self, now_us: u64, flow: Flow) -> u64 {
        let begins = flow.waits && self.still_since_us.is_none();
        if !flow.waits || begins || flow.progress != self.progress {
            *self = Self {
                progress: flow.progress,
                still_since_us: flow.waits.then_some(now_us),
                said: false,
            };
        }
        self.still_since_us
            .map_or(0, |since_us| now_us.saturating_sub(since_us))
    }
}

impl Watchdog {
    /// What stands still for too long since now (invariant 1).
    pub fn look(&mut self, now_us: u64, sight: Sight) -> Option<Stall> {
        let mut stall = None;
        for (watched, flow, wait) in [
            (&mut self.output, sight.output, Wait::OutputLeaves),
            (&mut self.input, sight.input, Wait::InputApplied),
            (&mut self.sync, sight.sync, Wait::SyncEnds),
            (&mut self.disks, sight.disks, Wait::DiskSettles),
            (&mut self.take_over, sight.take_over, Wait::TakesOver),
        ] {
            let for_us = watched.look(now_us, flow);
            if for_us >= wait.bound_us() && !watched.said {
                watched.said = true;
                stall = stall.or(Some(Stall { wait, for_us }));
            }
        }
        self.stalls += u64::from(stall.is_some());
        stall
    }

    /// The wait that is too long now, for `status`.
    #[must_use]
    pub fn stalled(&self) -> Option<Wait> {
        let all = [
            (&self.output, Wait::OutputLeaves),
            (&self.input, Wait::InputApplied),
            (&self.sync, Wait::SyncEnds),
            (&self.disks, Wait::DiskSettles),
            (&self.take_over, Wait::TakesOver),
        ];
        all.into_iter()
            .find_map(|(watched, wait)| watched.said.then_some(wait))
    }

    /// How many there were.
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_that_a_full_log_leaves_in_the_network_wait() {
        assert!(!Flow::of_inputs(Index(7), Index(7), false).waits);
        assert!(Flow::of_inputs(Index(7), Index(8), false).waits);
        let mut watchdog = Watchdog::default();
        let deaf = Sight {
            input: Flow::of_inputs(Index(7), Index(7), true),
            ..Sight::default()
        };
        assert_eq!(watchdog.look(0, deaf), None);
        let stall = watchdog.look(Wait::InputApplied.bound_us(), deaf);
        assert_eq!(stall.map(|stall| stall.wait), Some(Wait::InputApplied));
    }

    const BOUND_US: u64 = Wait::OutputLeaves.bound_us();

    fn output(progress: u64) -> Sight {
        Sight {
            output: Flow {
                waits: true,
                progress,
            },
            ..Sight::default()
        }
    }

    #[test]
    fn invariant_1_nothing_is_said_while_nothing_waits() {
        let mut watchdog = Watchdog::default();
        for now_us in [0, BOUND_US, 100 * BOUND_US] {
            assert_eq!(watchdog.look(now_us, Sight::default()), None);
        }
        // What begins to wait after a long silence has waited for no time.
        assert_eq!(watchdog.look(101 * BOUND_US, output(0)), None);
    }

    #[test]
    fn invariant_2_what_stands_still_is_named_once_and_again_when_it_stalls_again() {
        let mut watchdog = Watchdog::default();
        assert_eq!(watchdog.look(0, output(7)), None);
        assert_eq!(watchdog.look(BOUND_US - 1, output(7)), None);
        let stall = Stall {
            wait: Wait::OutputLeaves,
            for_us: BOUND_US,
        };
        assert_eq!(watchdog.look(BOUND_US, output(7)), Some(stall));
        assert_eq!(watchdog.stalled(), Some(Wait::OutputLeaves));
        assert_eq!(watchdog.look(2 * BOUND_US, output(7)), None);
        assert_eq!(watchdog.look(2 * BOUND_US, output(8)), None, "it gets on");
        assert_eq!(watchdog.stalled(), None);
        assert!(watchdog.look(3 * BOUND_US, output(8)).is_some());
        assert_eq!(watchdog.stalls(), 2);
    }

    #[test]
    fn what_gets_on_slowly_is_no_stall() {
        let mut watchdog = Watchdog::default();
        for step in 0..100 {
            assert_eq!(watchdog.look(step * (BOUND_US - 1), output(step)), None);
        }
    }

    #[test]
    fn each_kind_is_watched_by_itself() {
        let mut watchdog = Watchdog::default();
        let mut sight = Sight {
            sync: Flow {
                waits: true,
                progress: 1,
            },
            ..Sight::default()
        };
        let mut seen = Vec::new();
        for second in 0..=20 {
            // Output leaves all the time, and the sync does not end.
            sight.output = Flow {
                waits: true,
                progress: second,
            };
            seen.extend(watchdog.look(second * 1_000_000, sight));
        }
        let stall = Stall {
            wait: Wait::SyncEnds,
            for_us: Wait::SyncEnds.bound_us(),
        };
        assert_eq!(seen, [stall]);
    }

    #[test]
    fn a_take_over_that_gets_on_takes_as_long_as_it_takes_and_one_that_does_not_is_named() {
        let mut watchdog = Watchdog::default();
        let at = |progress| Sight {
            take_over: Flow {
                waits: true,
                progress,
            },
            ..Sight::default()
        };
        let bound_us = Wait::TakesOver.bound_us();
        for step in 0..10 {
            assert_eq!(
                watchdog.look(step * (bound_us - 1), at(step)),
                None,
                "a slow disk"
            );
        }
        let stall = watchdog.look(11 * bound_us, at(9));
        assert_eq!(stall.map(|stall| stall.wait), Some(Wait::TakesOver));
        assert_eq!(watchdog.stalled(), Some(Wait::TakesOver));
        assert_eq!(watchdog.look(12 * bound_us, at(10)), None, "it gets on again");
        assert_eq!(watchdog.stalled(), None);
    }

    #[test]
    fn a_backup_s_disk_may_be_slow_and_not_deaf() {
        let mut watchdog = Watchdog::default();
        let at = |waits, progress| Sight {
            disks: Flow { waits, progress },
            ..Sight::default()
        };
        let bound_us = Wait::DiskSettles.bound_us();
        assert_eq!(watchdog.look(0, at(true, 0)), None);
        assert_eq!(watchdog.look(bound_us - 1, at(true, 1)), None, "a slow disk");
        assert_eq!(watchdog.look(bound_us, at(false, 2)), None, "nothing is owed");
        assert_eq!(watchdog.look(2 * bound_us, at(true, 2)), None);
        let stall = watchdog.look(3 * bound_us, at(true, 2));
        assert_eq!(stall.map(|stall| stall.wait), Some(Wait::DiskSettles));
        assert_eq!(watchdog.stalled(), Some(Wait::DiskSettles));
    }

    #[test]
    fn a_stall_says_what_waits_for_what() {
        let stall = Stall {
            wait: Wait::OutputLeaves,
            for_us: 10_100_000,
        };
        assert_eq!(
            stall.said(Some((Wait::BackupHolds, 9_000_000))),
            "for 10.1 s it has waited for any output to leave, while some waits (output-leaves); the session waits for the \
             backup to hold the sync, its disk writes getting on (backup-holds) since 9.0 s"
        );
        assert!(!stall.said(None).contains("session"));
    }
}
