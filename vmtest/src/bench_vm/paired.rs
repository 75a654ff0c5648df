//! Pairs of windows: what a policy costs, told apart from what the machine does meanwhile.
//!
//! * **Decides:** in which order the policies' windows follow each other, and what their ratios are worth.
//! * **Flow:** [`order`] -> one window of each policy in one guest, round after round -> each policy's figure over the baseline's
//!   *of the same round* -> [`Ratio`]: the median of these, with the interval in which it lies.
//! * **Invariants:** (1) a ratio compares two windows of one guest, some seconds apart; a machine that slows down slows both;
//!   (2) the interval comes from the ratios themselves, by resampling; nothing is assumed of their shape.
//! * **Source:** Efron, "Bootstrap methods" (1979), the percentile interval.
//! * **Not here:** the loads (`clients`), the VM (`standing`).

use serde::{Deserialize, Serialize};

use super::report::median_of;

/// Of so many resamples the middle 95 in 100 are the interval.
const RESAMPLES: usize = 10_000;
/// An interval that is wider than this, as a share of its middle, does not tell what it should.
const WIDE: f64 = 0.10;

/// The median of paired ratios, and where it lies with 95 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The median.
    pub median: f64,
    /// The interval's ends.
    pub low: f64,
    /// See `low`.
    pub high: f64,
    /// Of how many pairs.
    pub pairs: usize,
}

impl Ratio {
    /// Of these ratios; nothing of nothing.
    pub fn of(ratios: &[f64]) -> Option<Self> {
        if ratios.is_empty() {
            return None;
        }
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let again = ratios.iter().map(|_| ratios[random.below(ratios.len())]);
                median_of(again.collect())
            })
            .collect();
        medians.sort_by(f64::total_cmp);
        let at = |share: f64| medians[((medians.len() - 1) as f64 * share).round() as usize];
        Some(Self {
            median: median_of(ratios.to_vec()),
            low: at(0.025),
            high: at(0.975),
            pairs: ratios.len(),
        })
    }

    /// Whether the interval is too wide to tell a tenth more from a tenth less. One pair has no interval at all.
    pub fn is_wide(&self) -> bool {
        self.pairs < 2 || self.high - self.low > WIDE * self.median
    }

    /// `0.86 [0.84, 0.89]`; a wide interval says so.
    pub fn in_words(&self) -> String {
        let wide = if self.is_wide() { " WIDE" } else { "" };
        format!("{:.2} [{:.2}, {:.2}]{wide}", self.median, self.low, self.high)
    }
}

/// The order of `count` windows in a round: another one each time, so that no policy always follows the same other.
pub fn order(count: usize, round: u32) -> Vec<usize> {
    let mut random = Random(0x2545_f491_4f6c_dd1d ^ u64::from(round).wrapping_mul(0xff51_afd7_ed55_8ccd));
    let mut order: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        order.swap(at, random.below(at + 1));
    }
    order
}

/// Steele, Lea and Flood's SplitMix64: the same figures give the same interval again.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        (mixed % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_holds_the_median_and_narrows_with_more_pairs() {
        let noisy = |pairs: usize| -> Vec<f64> {
            let mut random = Random(7);
            (0..pairs)
                .map(|_| 0.8 + random.below(1000) as f64 / 2500.0)
                .collect()
        };
        let few = Ratio::of(&noisy(10)).unwrap();
        let many = Ratio::of(&noisy(400)).unwrap();
        for ratio in [few, many] {
            assert!(
                ratio.low <= ratio.median && ratio.median <= ratio.high,
                "{ratio:?}"
            );
        }
        assert!(many.high - many.low < few.high - few.low);
        // Uniform from 0.8 to 1.2.
        assert!(many.low < 1.0 + 0.05 && many.high > 1.0 - 0.05, "{many:?}");
    }

    #[test]
    fn equal_ratios_leave_no_doubt_and_one_pair_leaves_all() {
        let same = Ratio::of(&[0.9; 12]).unwrap();
        assert_eq!((same.low, same.high, same.is_wide()), (0.9, 0.9, false));
        assert!(Ratio::of(&[0.9]).unwrap().is_wide());
        assert!(Ratio::of(&[]).is_none());
        assert!(
            Ratio::of(&[0.5, 1.0, 1.5, 2.0])
                .unwrap()
                .in_words()
                .ends_with("WIDE")
        );
    }

    #[test]
    fn of_twenty_equal_loads_the_interval_holds_one_in_most() {
        // An A/A comparison: both windows of a pair have the same noise.
        let mut random = Random(3);
        let mut holds = 0;
        for _ in 0..100 {
            let mut noise = || 100.0 + random.below(60) as f64;
            let ratios: Vec<f64> = (0..20).map(|_| noise() / noise()).collect();
            let ratio = Ratio::of(&ratios).unwrap();
            holds += usize::from(ratio.low <= 1.0 && 1.0 <= ratio.high);
        }
        assert!((88..=100).contains(&holds), "{holds} of 100");
    }

    #[test]
    fn every_round_has_each_window_once_and_orders_differ() {
        let orders: Vec<_> = (1..=20).map(|round| order(4, round)).collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3]);
        }
        for first in 0..4 {
            assert!(
                orders.iter().any(|order| order[0] == first),
                "{first} is never first"
            );
        }
    }
}
