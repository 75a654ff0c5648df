//! What it measures: how much of its clients' time a sync costs a VM whose outputs are compared.
//!
//! The pause is the least of it: the backup loads, works off what has piled up and, under TCG, translates its code anew, and
//! until it has caught up everybody waits for its word. The first answer after a load shows only a part of that (measured:
//! 50 to 190 ms, where half a second's answers were lost). So it is taken by what leaves: at the rate of the time before the
//! sync, when the last one was over, as much should have left in the second from its beginning on, or until the next one;
//! what did not is time lost.
//!
//! Flow: the primary shows it what has left, some times a second, and the beginning of each sync; `trigger` and `change_over`
//! ask what a sync costs.
//!
//! Invariants:
//! 1. Only time in which something was held counts: that clients have nothing to ask is no sync's doing.
//! 2. What another sync disturbs too soon, and a time in which hardly anything leaves, tell nothing.
//!
//! Source: ours. Not here: what follows from it.

use super::change_over::Tally;
use std::collections::VecDeque;

/// So long from its beginning on a sync is looked at; what leaves after half of that is what usually leaves.
const SPAN_US: u64 = 1_000_000;
const STALL_US: u64 = SPAN_US / 2;
/// What usually leaves is known after so long, and so many frames.
const USUAL_US: u64 = 400_000;
const USUAL_FRAMES: u64 = 8;

/// The cost of a sync to clients, as a running mean.
#[derive(Debug, Default)]
pub struct SyncCost {
    /// What had left, and when, in the last second that no sync stalled.
    marks: VecDeque<(u64, u64)>,
    last_sync_us: Option<u64>,
    open: Option<Sample>,
    mean_us: Option<u64>,
}

/// A sync whose second is not over.
#[derive(Debug)]
struct Sample {
    at_us: u64,
    from: Tally,
    /// Frames that left in a microsecond before it.
    usual: f64,
}

impl SyncCost {
    /// What a sync costs, in microseconds; `None` as long as that is not known.
    #[must_use]
    pub fn us(&self) -> Option<u64> {
        self.mean_us
    }

    /// Looks at what has left until now; `waited_us` is how long clients have waited for what is still held.
    pub fn observe(&mut self, now_us: u64, tally: &Tally, waited_us: u64) {
        if let Some(sample) = self.open.take_if(|sample| now_us >= sample.at_us + SPAN_US) {
            self.learn(sample.lost_us(now_us, tally, waited_us));
        }
        if self.last_sync_us.is_some_and(|at_us| now_us < at_us + STALL_US) {
            return;
        }
        self.marks.push_back((now_us, tally.released));
        while self
            .marks
            .get(1)
            .is_some_and(|(at_us, _)| at_us + SPAN_US <= now_us)
        {
            self.marks.pop_front();
        }
    }

    /// A sync begins.
    pub fn sync_begins(&mut self, now_us: u64, tally: &Tally, waited_us: u64) {
        if let Some(sample) = self.open.take_if(|sample| now_us >= sample.at_us + STALL_US) {
            self.learn(sample.lost_us(now_us, tally, waited_us));
        }
        let known = self.marks.front().filter(|(at_us, _)| at_us + USUAL_US <= now_us);
        self.open = known
            .map(|(at_us, released)| (now_us - at_us, tally.released - released))
            .filter(|(_, frames)| *frames >= USUAL_FRAMES)
            .map(|(span_us, frames)| Sample {
                at_us: now_us,
                from: *tally,
                usual: frames as f64 / span_us as f64,
            });
        self.marks.clear();
        self.last_sync_us = Some(now_us);
    }

    /// The mode is another one: what left before does not compare with what leaves now.
    pub fn restart(&mut self, now_us: u64) {
        self.marks.clear();
        self.open = None;
        self.last_sync_us = Some(now_us);
    }

    fn learn(&mut self, lost_us: u64) {
        self.mean_us = Some(
            self.mean_us
                .map_or(lost_us, |mean_us| (3 * mean_us + lost_us) / 4),
        );
    }
}

impl Sample {
    fn lost_us(&self, now_us: u64, tally: &Tally, waited_us: u64) -> u64 {
        let frames = (tally.released - self.from.released) as f64;
        let took_us = (now_us - self.at_us) as f64;
        let missing_us = took_us - frames / self.usual;
        // Invariant 1. What was held at the beginning belongs to it: it leaves later because of the sync.
        let held_us = tally.held_us - self.from.held_us + waited_us;
        (missing_us.max(0.0) as u64).min(held_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM that answers at a rate, each answer held for a while.
    struct Vm {
        cost: SyncCost,
        now_us: u64,
        tally: Tally,
    }

    impl Vm {
        fn new() -> Self {
            Self {
                cost: SyncCost::default(),
                now_us: 0,
                tally: Tally::default(),
            }
        }

        fn run(&mut self, ms: u64, frames_per_ms: u64, held_us: u64) {
            for _ in 0..ms {
                self.now_us += 1000;
                self.tally.released += frames_per_ms;
                self.tally.held_us += frames_per_ms * held_us;
                if self.now_us.is_multiple_of(50_000) {
                    let waited_us = if frames_per_ms == 0 { held_us } else { 0 };
                    self.cost.observe(self.now_us, &self.tally, waited_us);
                }
            }
        }

        fn sync(&mut self) {
            self.cost.sync_begins(self.now_us, &self.tally, 0);
        }
    }

    #[test]
    fn what_did_not_leave_after_a_sync_is_time_lost() {
        let mut vm = Vm::new();
        vm.run(1_500, 2, 300);
        vm.sync();
        assert_eq!(vm.cost.us(), None);
        vm.run(400, 0, 400_000);
        // Those that waited leave at once.
        vm.tally.held_us += 400_000;
        vm.run(700, 2, 300);
        let first = vm.cost.us().expect("a second has passed");
        assert!((350_000..=450_000).contains(&first), "{first}");
        // Syncs that cost nothing make it less, one by one.
        for _ in 0..20 {
            vm.run(1_500, 2, 300);
            vm.sync();
            vm.run(1_100, 2, 300);
        }
        assert!(vm.cost.us().is_some_and(|us| us < 5_000), "{:?}", vm.cost.us());
    }

    #[test]
    fn a_difference_each_second_leaves_time_enough_to_tell_what_it_costs() {
        let mut vm = Vm::new();
        for _ in 0..20 {
            vm.sync();
            vm.run(300, 0, 300_000);
            vm.tally.held_us += 300_000;
            vm.run(700, 2, 300);
        }
        let cost = vm.cost.us().expect("many were looked at");
        assert!((250_000..=350_000).contains(&cost), "{cost}");
    }

    #[test]
    fn invariant_1_clients_that_ask_nothing_any_more_are_no_cost() {
        let mut vm = Vm::new();
        vm.run(1_500, 2, 300);
        vm.sync();
        vm.run(1_200, 0, 0);
        assert_eq!(vm.cost.us(), Some(0));
    }

    #[test]
    fn invariant_2_a_disturbed_second_and_an_idle_one_tell_nothing() {
        let mut vm = Vm::new();
        vm.run(1_500, 2, 300);
        for _ in 0..10 {
            vm.sync();
            vm.run(400, 2, 400_000);
        }
        vm.run(3_000, 0, 0);
        vm.sync();
        vm.run(3_000, 0, 1_000_000);
        assert_eq!(vm.cost.us(), None);
        vm.run(1_500, 2, 300);
        vm.sync();
        vm.cost.restart(vm.now_us);
        vm.run(1_500, 0, 1_000_000);
        assert_eq!(vm.cost.us(), None);
    }
}
