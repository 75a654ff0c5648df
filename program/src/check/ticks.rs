//! When the tester sets the agreed time without an input.
//!
//! Decides:    that.
//! Flow:       each turn of the tester -> `is_due` -> the clock is set -> `was_set`, as with each input.
//! Invariants: 1. while an answer is owed no time comes before all copies are at rest, or before the patience with them is over: one that is still at
//!             its last input must not see a later time than one that has answered, but it may also spin until a time comes; 2. for this the copies
//!             are looked at once in each [`TICK`] at most: a look costs system calls for each of their threads.
//! Not here:   the clock itself (`answers`), whether a copy is at rest (`rest`).

use std::time::{Duration, Instant};

/// While nothing comes, the agreed clock is set so often.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// And so often where an answer is owed and all copies sleep: they may wait for a time to come before they answer.
const LATEST_TICK: Duration = Duration::from_secs(1);

/// What that goes by.
pub(super) struct Ticks {
    /// So long a copy that is not at rest is waited for.
    patience: Duration,
    /// When the time was last set.
    set: Instant,
    /// When the copies were last looked at, for whether they are at rest.
    asked: Instant,
}

impl Ticks {
    /// The time was set just now.
    pub(super) fn starting(now: Instant, patience: Duration) -> Self {
        Self {
            patience,
            set: now,
            asked: now,
        }
    }

    /// The time was set, be it for an input.
    pub(super) fn was_set(&mut self, now: Instant) {
        self.set = now;
    }

    /// The copies are looked at for another reason.
    pub(super) fn were_asked(&mut self, now: Instant) {
        self.asked = now;
    }

    /// Whether it was set so long ago that it may be set though an answer is owed.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        now.duration_since(self.set) >= LATEST_TICK
    }

    /// Whether it is to be set now. `idle`: nothing is under way, and no answer is owed.
    pub(super) fn is_due<E>(
        &mut self,
        now: Instant,
        idle: bool,
        are_at_rest: impl FnOnce() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let since = now.duration_since(self.set);
        // A copy that is at work beyond all patience may spin until a time comes.
        if since >= TICK && idle || since >= LATEST_TICK + self.patience {
            return Ok(true);
        }
        // Invariant 2.
        if !self.is_late(now) || now.duration_since(self.asked) < TICK {
            return Ok(false);
        }
        self.asked = now;
        are_at_rest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const PATIENCE: Duration = Duration::from_millis(200);
    const TURN: Duration = Duration::from_millis(1);

    /// While an answer is owed, with copies that are at rest from `rest` on: when they are looked at, and when a time comes.
    fn played(rest: Duration) -> (Vec<Duration>, Duration) {
        let began = Instant::now();
        let mut ticks = Ticks::starting(began, PATIENCE);
        let mut looks = Vec::new();
        let mut after = Duration::ZERO;
        loop {
            let look = || -> Result<bool, Infallible> {
                looks.push(after);
                Ok(after >= rest)
            };
            let due = ticks.is_due(began + after, false, look);
            if due.expect("it can be looked") {
                return (looks, after);
            }
            after += TURN;
            assert!(after < LATEST_TICK * 2, "a time comes at last");
        }
    }

    #[test]
    fn a_time_that_is_due_waits_while_a_copy_is_not_at_rest_and_comes_when_it_is() {
        assert_eq!(played(Duration::ZERO), (vec![LATEST_TICK], LATEST_TICK));
        // Seen at the next look.
        let (_, came) = played(LATEST_TICK + TICK * 4 + TURN);
        assert_eq!(came, LATEST_TICK + TICK * 5);
    }

    #[test]
    fn a_time_comes_after_the_patience_though_a_copy_is_never_at_rest() {
        let (_, came) = played(Duration::MAX);
        assert_eq!(came, LATEST_TICK + PATIENCE);
    }

    #[test]
    fn invariant_2_copies_that_are_at_work_are_looked_at_once_in_each_tick() {
        let (looks, came) = played(Duration::MAX);
        assert_eq!(looks.first(), Some(&LATEST_TICK));
        assert!(looks.windows(2).all(|pair| pair[1] - pair[0] == TICK));
        assert!(looks.last().is_some_and(|last| *last + TICK == came));
    }

    #[test]
    fn a_look_for_the_next_input_is_the_one_of_its_tick_as_well() {
        let began = Instant::now();
        let mut ticks = Ticks::starting(began, PATIENCE);
        let looked = began + LATEST_TICK;
        ticks.were_asked(looked);
        let mut looks = 0;
        for now in [looked, looked + TICK - TURN, looked + TICK] {
            let look = || -> Result<bool, Infallible> {
                looks += 1;
                Ok(false)
            };
            assert_eq!(ticks.is_due(now, false, look), Ok(false));
        }
        assert_eq!(looks, 1, "a tick later");
    }

    fn unasked() -> Result<bool, Infallible> {
        panic!("nobody needs to know")
    }

    #[test]
    fn where_no_answer_is_owed_a_time_comes_with_each_tick_and_no_copy_is_looked_at() {
        let began = Instant::now();
        let mut ticks = Ticks::starting(began, PATIENCE);
        for after in [TICK, TICK * 2, TICK * 3] {
            assert_eq!(ticks.is_due(began + after - TURN, true, unasked), Ok(false));
            assert_eq!(ticks.is_due(began + after, true, unasked), Ok(true));
            ticks.was_set(began + after);
        }
    }
}
