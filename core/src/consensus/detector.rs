//! What it decides: how long a silence has to be until it is believed that somebody died.
//!
//! Flow: every step looks at the clock (`Detector::look`): time in which this host itself stood still is told apart. Every word
//! that ends a silence teaches how long one may be that means nothing (`learn`). The follower's time-out and its refusal of
//! pre-votes, and the leader's check-quorum, take `patience_us` instead of a constant.
//!
//! Invariants:
//! - D1 patience is never below the configured time-out, and never above `most_patience` times it: a dead host is missed in bounded time;
//! - D2 time that this host overslept is not silence of others: whoever wakes late listens (the follower) or asks (the leader,
//!   whose next beat is the question) before it believes that anybody died. Awake time always passes: at least one look's period
//!   between two late ones, so a host that is always late still finds a dead one;
//! - D3 nothing here is needed for safety: leases (`lease`) and terms count by the clock, not by patience.
//!
//! Source: the phi-accrual failure detector (Hayashibara 2004) adapts to what was seen lately; here its simplest quantile, the
//! longest of the last seconds' harmless silences (of about 1,600 beats), twice. Lifeguard (HashiCorp 2017): a member that is
//! late itself must not accuse others.
//!
//! Not here: links that break, which say at once that a process is gone (`election`).

use super::{Bug, Consensus, Role};

/// Silences are remembered in spans of this length.
const SPAN_US: u64 = 1_000_000;
/// As many of them as count.
const SPANS: usize = 8;

/// What one replica has seen lately.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Detector {
    /// The clock is to be looked at by then.
    look_us: u64,
    /// How long this host overslept, altogether.
    overslept_us: u64,
    /// The longest harmless silence of each span, by its number modulo `SPANS`.
    longest_us: [u64; SPANS],
    span: u64,
}

impl Detector {
    /// A step at `now_us`; the next one within `period_us`. How late it is.
    fn look(&mut self, now_us: u64, period_us: u64) -> u64 {
        let late_us = if self.look_us == 0 {
            0
        } else {
            now_us.saturating_sub(self.look_us)
        };
        // A thread is always a little late.
        let late_us = if late_us > period_us { late_us } else { 0 };
        self.overslept_us += late_us;
        self.look_us = now_us.saturating_add(period_us);
        late_us
    }

    /// A silence of this length meant nothing.
    fn learn(&mut self, now_us: u64, silence_us: u64) {
        let span = now_us / SPAN_US;
        if span >= self.span + SPANS as u64 {
            self.longest_us = [0; SPANS];
        } else {
            (self.span + 1..=span).for_each(|new| self.longest_us[new as usize % SPANS] = 0);
        }
        self.span = self.span.max(span);
        let longest = &mut self.longest_us[self.span as usize % SPANS];
        *longest = silence_us.max(*longest);
    }

    /// How long a silence may be (D1).
    fn patience_us(&self, now_us: u64, floor_us: u64, most: u64) -> u64 {
        let now = now_us / SPAN_US;
        let recent = (0..SPANS as u64)
            .filter_map(|back| self.span.checked_sub(back))
            .filter(|span| span + SPANS as u64 > now)
            .map(|span| self.longest_us[span as usize % SPANS]);
        let longest_us = recent.max().unwrap_or(0);
        longest_us
            .saturating_mul(2)
            .clamp(floor_us, most.max(1) * floor_us)
    }
}

impl Consensus {
    /// Every step begins with it (D2).
    pub(super) fn look_at_clock(&mut self) {
        let late_us = self.detector.look(self.now_us, self.look_period_us());
        if self.bugged(Bug::BelievesWhenLate) {
            self.detector.overslept_us = 0;
            return;
        }
        if matches!(self.role, Role::Follower { .. }) && self.leader.is_some() {
            self.deadline_us = self.deadline_us.saturating_add(late_us);
        }
    }

    /// While nothing happens, the clock is looked at this often.
    pub(super) fn look_period_us(&self) -> u64 {
        2 * self.cfg.heartbeat_us
    }

    /// When the clock must be looked at.
    pub(super) fn look_at_us(&self) -> u64 {
        self.detector.look_us
    }

    /// The clock of the detector: it stands while this host oversleeps.
    pub(super) fn awake_us(&self) -> u64 {
        self.now_us.saturating_sub(self.detector.overslept_us)
    }

    /// Somebody whom `since_us` (by `awake_us`) nobody had heard speaks again.
    pub(super) fn learn_silence(&mut self, since_us: u64) {
        let silence_us = self.awake_us().saturating_sub(since_us);
        self.detector.learn(self.now_us, silence_us);
    }

    /// How long a leader, or a majority of followers, may be silent.
    #[must_use]
    pub fn patience_us(&self) -> u64 {
        if self.bugged(Bug::NeverLearns) {
            return self.cfg.election_min_us;
        }
        self.detector
            .patience_us(self.now_us, self.cfg.election_min_us, self.cfg.most_patience)
    }

    /// How much later than `patience_us` some are, so that they do not stand at once.
    pub(super) fn spread_us(&self) -> u64 {
        self.cfg.election_max_us.saturating_sub(self.cfg.election_min_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOR_US: u64 = 30_000;

    #[test]
    fn patience_follows_what_was_seen_and_forgets_it() {
        let mut detector = Detector::default();
        assert_eq!(detector.patience_us(1, FLOOR_US, 8), FLOOR_US);
        detector.learn(1_000, 10_000);
        assert_eq!(
            detector.patience_us(1_000, FLOOR_US, 8),
            FLOOR_US,
            "never below the floor"
        );
        detector.learn(2_000, 50_000);
        detector.learn(900_000, 20_000);
        assert_eq!(detector.patience_us(900_000, FLOOR_US, 8), 100_000);
        detector.learn(4_500_000, 40_000);
        assert_eq!(detector.patience_us(7_900_000, FLOOR_US, 8), 100_000);
        assert_eq!(
            detector.patience_us(8_100_000, FLOOR_US, 8),
            80_000,
            "the first span is over"
        );
        assert_eq!(detector.patience_us(90_000_000, FLOOR_US, 8), FLOOR_US);
        detector.learn(90_000_000, 9_000_000);
        assert_eq!(
            detector.patience_us(90_000_000, FLOOR_US, 8),
            8 * FLOOR_US,
            "bounded"
        );
        assert_eq!(detector.patience_us(90_000_000, FLOOR_US, 1), FLOOR_US);
    }

    #[test]
    fn time_overslept_is_told_apart() {
        let mut detector = Detector::default();
        for (now_us, late_us) in [
            (1_000, 0),
            (12_000, 0),
            (25_000, 0),
            (235_000, 200_000),
            (240_000, 0),
        ] {
            assert_eq!(detector.look(now_us, 10_000), late_us, "at {now_us}");
        }
        assert_eq!(detector.overslept_us, 200_000);
    }
}
