//! What it decides: what time it is for a program, on all of its hosts.
//!
//! Flow: the leader reads its own clocks -> [`Clock::reading`] -> an entry of the log -> [`Clock::agreed`] on every host -> each copy's clock is
//! set to it when the program has done all that came before (`order`).
//!
//! Between two entries the program's clock stands: so whatever it asks then, each copy hears the same.
//!
//! Invariants:
//! 1. Neither clock goes back, whoever leads and whatever its host's clock says.
//! 2. The monotonic clock goes as fast as the leader's; over a change of leaders it loses the time in which nobody led at most.
//! 3. The wall clock follows the leader's: forward at once, and back by going half as fast until it is right.
//!
//! Source: clock_gettime(2); adjtime(3) for 3. Not here: when an entry is due (`pace`), how a copy reads it (`dunlin_program::page`).

use crate::agreed::AgreedTime;

/// One host's knowledge of a program's time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {
    last: AgreedTime,
    /// What this host's monotonic clock said then.
    at_ns: u64,
}

impl Clock {
    /// What is to be agreed now; all in nanoseconds: this host's monotonic clock and its wall clock.
    #[must_use]
    pub fn reading(&mut self, monotonic_ns: u64, wall_ns: u64) -> AgreedTime {
        let since_ns = monotonic_ns.saturating_sub(self.at_ns);
        let now = match self.last == AgreedTime::default() {
            true => AgreedTime {
                monotonic_ns,
                wall_ns,
            },
            false => AgreedTime {
                monotonic_ns: self.last.monotonic_ns.saturating_add(since_ns),
                wall_ns: wall_ns.max(self.last.wall_ns.saturating_add(since_ns / 2)),
            },
        };
        (self.last, self.at_ns) = (now, monotonic_ns);
        now
    }

    /// This was agreed, and is known here at that time of this host's monotonic clock. Whoever said it itself, and has said later ones since,
    /// learns nothing by it.
    pub fn agreed(&mut self, time: AgreedTime, monotonic_ns: u64) {
        if time.monotonic_ns > self.last.monotonic_ns || time.wall_ns > self.last.wall_ns {
            self.last = self.last.or_later(time);
            self.at_ns = monotonic_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn the_first_reading_is_the_hosts_own_and_the_next_ones_go_on() {
        let mut clock = Clock::default();
        let first = clock.reading(5 * SECOND, 900 * SECOND);
        assert_eq!((first.monotonic_ns, first.wall_ns), (5 * SECOND, 900 * SECOND));
        let next = clock.reading(6 * SECOND, 901 * SECOND);
        assert_eq!((next.monotonic_ns, next.wall_ns), (6 * SECOND, 901 * SECOND));
    }

    #[test]
    fn a_host_that_was_up_for_less_and_whose_wall_clock_is_behind_goes_on_from_what_was_agreed() {
        let mut old = Clock::default();
        let mut new = Clock::default();
        let agreed = old.reading(1_000 * SECOND, 5_000 * SECOND);
        new.agreed(agreed, 7 * SECOND);
        let taken_over = new.reading(8 * SECOND, 4_990 * SECOND);
        assert_eq!(taken_over.monotonic_ns, 1_001 * SECOND);
        assert_eq!(taken_over.wall_ns, 5_000 * SECOND + SECOND / 2, "half as fast");
        let right = new.reading(48 * SECOND, 5_030 * SECOND);
        assert_eq!(right.wall_ns, 5_030 * SECOND, "it is right again");
    }

    #[test]
    fn a_wall_clock_that_is_ahead_is_followed_at_once() {
        let mut clock = Clock::default();
        let _ = clock.reading(SECOND, 100 * SECOND);
        assert_eq!(clock.reading(2 * SECOND, 500 * SECOND).wall_ns, 500 * SECOND);
    }

    proptest! {
        /// Two hosts lead in turn, with clocks that have nothing to do with each other, and whose walls are set at will.
        #[test]
        fn no_agreed_clock_goes_back(steps in prop::collection::vec((any::<bool>(), 0..SECOND, any::<u32>()), 1..200)) {
            let mut clocks = [Clock::default(); 2];
            let mut own_ns = [77 * SECOND, 3_000_000 * SECOND];
            let mut last = AgreedTime::default();
            for (leader, passed, wall) in steps {
                own_ns.iter_mut().for_each(|own| *own += passed);
                let leader = usize::from(leader);
                let said = clocks[leader].reading(own_ns[leader], u64::from(wall) * 1_000);
                prop_assert!(said.monotonic_ns >= last.monotonic_ns && said.wall_ns >= last.wall_ns);
                last = said;
                for (clock, own) in clocks.iter_mut().zip(own_ns) {
                    clock.agreed(said, own);
                }
            }
        }
    }
}
