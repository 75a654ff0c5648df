//! What it decides: when a host that has taken a VM over tells the network again that the VM is here now.
//!
//! Flow: take-over -> announced at once -> again a few times, and whenever the network brings a frame that the VM is said to
//! have sent: another host's, which teaches switches the old way.
//!
//! Invariants: bounded: a bridge that reflects our own announcements does not keep us busy for ever.
//!
//! Source: RFC 5227 (an address is announced more than once, and defended when another claims it).
//!
//! Not here: what is sent (`guest`), whether this host may speak at all (`gate`, and the consensus core's lease).

/// After a take-over: what an old primary had on its way has arrived by then.
const AGAIN_US: [u64; 4] = [50_000, 250_000, 1_000_000, 4_000_000];
/// Between two answers to a frame from the old place.
const GAP_US: u64 = 20_000;
/// As many answers after one take-over.
const MOST_ANSWERS: u32 = 32;

/// The announcements after one take-over. None are due before the first.
#[derive(Clone, Debug, Default)]
pub struct Announcements {
    began_us: u64,
    /// How many of `AGAIN_US` were made.
    made: usize,
    last_us: u64,
    answers_left: u32,
    answer: bool,
}

impl Announcements {
    /// The VM was taken over and announced at `now_us`.
    #[must_use]
    pub fn after_take_over(now_us: u64) -> Self {
        Self {
            began_us: now_us,
            last_us: now_us,
            answers_left: MOST_ANSWERS,
            ..Self::default()
        }
    }

    /// The network brought a frame that the VM is said to have sent.
    pub fn old_source_seen(&mut self) {
        self.answer |= self.answers_left > 0;
    }

    /// When the next one is due.
    #[must_use]
    pub fn due_us(&self) -> Option<u64> {
        if self.last_us == 0 {
            return None;
        }
        let again = AGAIN_US.get(self.made).map(|after_us| self.began_us + after_us);
        let answer = self.answer.then_some(self.last_us + GAP_US);
        again.into_iter().chain(answer).min()
    }

    /// Whether to announce now; then it counts as done.
    pub fn take_due(&mut self, now_us: u64) -> bool {
        if self.due_us().is_none_or(|due_us| now_us < due_us) {
            return false;
        }
        while AGAIN_US
            .get(self.made)
            .is_some_and(|after_us| self.began_us + after_us <= now_us)
        {
            self.made += 1;
        }
        self.answers_left -= u32::from(std::mem::take(&mut self.answer));
        self.last_us = now_us;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When they are made, looked at every millisecond, while the old source is seen at these times.
    fn made(seen_ms: impl Fn(u64) -> bool, for_ms: u64) -> Vec<u64> {
        let mut announcements = Announcements::after_take_over(1_000_000);
        let mut made = Vec::new();
        for ms in 0..for_ms {
            if seen_ms(ms) {
                announcements.old_source_seen();
            }
            if announcements.take_due(1_000_000 + ms * 1000) {
                made.push(ms);
            }
        }
        made
    }

    #[test]
    fn a_take_over_is_announced_again() {
        assert_eq!(made(|_| false, 60_000), [50, 250, 1_000, 4_000]);
        assert_eq!(Announcements::default().due_us(), None);
    }

    #[test]
    fn the_old_source_is_answered_soon_and_not_without_end() {
        assert_eq!(made(|ms| ms == 70 || ms == 71, 240), [50, 70, 90]);
        assert_eq!(made(|ms| ms == 55 || ms == 65, 240), [50, 70]);
        let storm = made(|_| true, 600_000);
        assert!((32..=36).contains(&storm.len()), "{storm:?}");
        assert!(storm.windows(2).all(|two| two[1] - two[0] >= 10));
    }
}
