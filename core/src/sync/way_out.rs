//! What it decides: when a VM whose connections are ahead of their clients (`speculation`) may change to a mode in which its backup's VM runs.
//!
//! A running copy would lack what its clients were not yet sent and its VM was told has arrived. So before such a change all connections are held,
//! which takes until each client has what was kept for it, and is waited for only so long: one client that reads nothing must not stop the others'
//! speculation for good.
//!
//! Flow: the primary asks at each turn -> `Way::Holds` -> connections are held -> `Way::Free`: the next sync may change the mode; or `Way::Closed`, and once
//! more later.
//! Invariants: 1. `Free` only while every connection is held. 2. of the time in which a change is wished for and some client does not get on, no more
//!    than a part is spent waiting, which halves with each attempt.
//! Not here: which mode is wished for (`change_over`), what holding a connection means (`speculation`).

/// So long it is waited until all clients have what was kept for them: some epochs, round trips and a repaired loss.
const PATIENCE_US: u64 = 1_500_000;
/// Then it is tried again after this, and after twice the time whenever it was for nothing.
const SHORTEST_US: u64 = 4_000_000;
const LONGEST_US: u64 = 240_000_000;

/// What is to be done with connections now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// They may be ahead of their clients.
    Speculates,
    /// They are to be held, and some are not yet.
    Holds,
    /// All are held: the mode may change.
    Free,
    /// It was waited for long enough, for now: they may be ahead of their clients again. Said once.
    Closed,
}

/// The way from speculation to a backup whose VM runs.
#[derive(Clone, Debug, Default)]
pub struct WayOut {
    since_us: Option<u64>,
    again_at_us: u64,
    backoff_us: u64,
}

impl WayOut {
    /// Whether a mode in which the backup's VM runs is wished for, and whether all connections are held.
    pub fn look(&mut self, now_us: u64, wished: bool, all_are_held: bool) -> Way {
        if !wished {
            self.since_us = None;
            return Way::Speculates;
        }
        if now_us < self.again_at_us {
            return Way::Speculates;
        }
        let since_us = *self.since_us.get_or_insert(now_us);
        if all_are_held {
            return Way::Free;
        }
        if now_us - since_us < PATIENCE_US {
            return Way::Holds;
        }
        self.since_us = None;
        self.backoff_us = (self.backoff_us * 2).clamp(SHORTEST_US, LONGEST_US);
        self.again_at_us = now_us + self.backoff_us;
        Way::Closed
    }

    /// The mode has changed: what stood in its way is gone.
    pub fn changed(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_changes_when_all_are_held_and_not_before() {
        let mut way = WayOut::default();
        assert_eq!(way.look(0, false, false), Way::Speculates);
        assert_eq!(way.look(1, true, false), Way::Holds);
        assert_eq!(way.look(PATIENCE_US, true, false), Way::Holds);
        assert_eq!(way.look(PATIENCE_US, true, true), Way::Free);
        // Until its sync begins.
        assert_eq!(way.look(10 * PATIENCE_US, true, true), Way::Free);
        way.changed();
        assert_eq!(way.look(11 * PATIENCE_US, true, false), Way::Holds);
    }

    #[test]
    fn a_wish_that_is_taken_back_is_waited_for_anew() {
        let mut way = WayOut::default();
        assert_eq!(way.look(0, true, false), Way::Holds);
        assert_eq!(way.look(PATIENCE_US - 1, false, false), Way::Speculates);
        assert_eq!(way.look(PATIENCE_US + 1, true, false), Way::Holds);
    }

    #[test]
    fn a_client_that_takes_nothing_costs_the_others_less_and_less() {
        let mut way = WayOut::default();
        let (mut held_us, mut closed) = (0, 0);
        for ms in 0..600_000 {
            match way.look(ms * 1000, true, false) {
                Way::Holds => held_us += 1000,
                Way::Closed => closed += 1,
                Way::Speculates => {}
                Way::Free => panic!("nobody is held"),
            }
        }
        assert!((6..9).contains(&closed), "{closed}");
        assert!(held_us <= closed * PATIENCE_US, "{held_us}");
    }
}
