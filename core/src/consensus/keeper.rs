//! What it decides: when a second thread, the *keeper*, stands in for a replica's owner, and by which clock either drives it.
//!
//! Flow: the owner comes by ([`Standby::owner_drives`]) with the time that it read when its turn began -> the replica's time.
//! The keeper wakes once a heartbeat ([`Standby::stands_in`]): the replica's time, or nothing to do.
//!
//! Invariants:
//! - K1 the replica's time is never behind the moment in which it is driven. An owner may have been kept from its core since it
//!   read its clock; a follower that took that for the time would count its silence (`lease`, X1) from too early, and vote while
//!   the leader that counts on it still speaks;
//! - K2 the keeper stands in after a period without the owner, and no longer than the patience: a lively thread must not speak
//!   for a dead one.
//!
//! Source: both clocks are monotonic ones of one host, so their difference is one number. A reading of the owner's that is late
//! says less than that number, never more: the largest ever seen is the nearest.
//!
//! Not here: the thread and what it drives (fabric's `group`), what a lease is (`lease`).

use super::Bug;

/// What is known of a replica's owner.
#[derive(Clone, Debug)]
pub struct Standby {
    period_us: u64,
    patience_us: u64,
    /// When the owner was last here, by the keeper's clock.
    turn_us: u64,
    /// The owner's clock less the keeper's.
    ahead_us: Option<i64>,
    #[cfg(feature = "bugs")]
    bug: Option<Bug>,
}

impl Standby {
    /// For a replica whose owner has not been here yet.
    #[must_use]
    pub fn new(period_us: u64, patience_us: u64) -> Self {
        Self {
            period_us,
            patience_us,
            turn_us: 0,
            ahead_us: None,
            #[cfg(feature = "bugs")]
            bug: None,
        }
    }

    /// The owner drives the replica at `now_us` by the keeper's clock; its own said `read_us` a while ago. The replica's time (K1).
    pub fn owner_drives(&mut self, now_us: u64, read_us: u64) -> u64 {
        self.owner_is_here(now_us);
        let seen_us = read_us.cast_signed() - now_us.cast_signed();
        let known_us = self.ahead_us.filter(|_| !self.bugged(Bug::DrivenByOldTime));
        self.ahead_us = Some(known_us.map_or(seen_us, |known_us| known_us.max(seen_us)));
        self.time_us(now_us)
    }

    /// The owner looked at the replica.
    pub fn owner_is_here(&mut self, now_us: u64) {
        self.turn_us = now_us;
    }

    /// Whether the keeper drives the replica now, and then the replica's time (K1, K2).
    #[must_use]
    pub fn stands_in(&self, now_us: u64) -> Option<u64> {
        let away_us = now_us.saturating_sub(self.turn_us);
        let its_turn = (self.period_us..=self.patience_us).contains(&away_us);
        (its_turn && self.ahead_us.is_some()).then(|| self.time_us(now_us))
    }

    fn time_us(&self, now_us: u64) -> u64 {
        now_us.saturating_add_signed(self.ahead_us.unwrap_or(0))
    }

    /// Puts a fault back (simulator only).
    #[cfg(feature = "bugs")]
    pub fn put_back(&mut self, bug: Option<Bug>) {
        self.bug = bug;
    }

    #[cfg(feature = "bugs")]
    fn bugged(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    #[cfg(not(feature = "bugs"))]
    #[expect(clippy::unused_self, reason = "the simulator's build looks at it")]
    const fn bugged(&self, _: Bug) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_was_kept_from_its_core_does_not_turn_the_clock_back() {
        let mut standby = Standby::new(2_500, 1_000_000);
        assert_eq!(standby.stands_in(5_000), None, "the owner was never here");
        // Its clock began 70 ms before the keeper's.
        assert_eq!(standby.owner_drives(10_000, 80_000), 80_000);
        // It read its clock, stood still for 40 ms, and works on.
        assert_eq!(standby.owner_drives(60_000, 90_000), 130_000);
        assert_eq!(standby.stands_in(62_000), None, "it was here just now");
        assert_eq!(standby.stands_in(70_000), Some(140_000));
        assert_eq!(standby.stands_in(1_060_000), Some(1_130_000));
        assert_eq!(standby.stands_in(1_060_001), None, "it is taken for hung");
    }
}
