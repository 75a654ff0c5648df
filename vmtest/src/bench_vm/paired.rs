//! Pairs of windows: what a policy costs, told apart from what the machine does meanwhile.
//!
//! * **Decides:** what the figures of paired windows are worth.
//! * **Flow:** windows that lie beside each other ([`super::order`]) -> each policy's figure over (or less) the baseline's *of the window
//!   beside it* -> [`Ratio`]: the median of these, with the interval in which it lies; over several cases [`Ratio::pooled`].
//! * **Invariants:** (1) a ratio compares two windows of one guest, some seconds apart; a machine that slows down slows both;
//!   (2) the interval comes from the ratios themselves, by resampling; nothing is assumed of their shape; (3) of fewer than
//!   [`LEAST_PAIRS`] no interval is told.
//! * **Source:** Efron, "Bootstrap methods" (1979), the percentile interval.
//! * **Not here:** the loads (`clients`), the VM (`windows`).

use serde::{Deserialize, Serialize};

use super::report::{geometric_mean, median_of};

/// Of so many resamples the middle ones are the interval.
const RESAMPLES: usize = 10_000;
/// Of several cases, each of which is resampled.
const POOLED_RESAMPLES: usize = 4_000;
/// An interval that is wider than this, as a share of its middle, does not tell what it should.
const WIDE: f64 = 0.10;
/// The median lies between the least and the greatest of five values in 15 of 16 cases only, of six in 31 of 32: before that no interval
/// can hold 95 %.
pub const LEAST_PAIRS: usize = 6;
/// How often a median may lie outside of what is told as its interval.
pub const OUTSIDE: f64 = 0.05;

/// The median of paired figures, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The median.
    pub median: f64,
    /// The ends of its interval (95 %), unless there are too few pairs.
    pub interval: Option<(f64, f64)>,
    /// Of how many pairs.
    pub pairs: usize,
}

impl Ratio {
    /// Of these ratios; nothing of nothing.
    pub fn of(ratios: &[f64]) -> Option<Self> {
        Self::resampled(&[vec![ratios.to_vec()]], RESAMPLES, OUTSIDE, |groups| {
            groups[0][0]
        })
    }

    /// The geometric mean over groups of the geometric means over their cases of the medians of each case's ratios. Each case is
    /// resampled by itself: its windows were measured at their own time. `outside`: how often it may lie out of the interval.
    pub fn pooled(groups: &[Vec<Vec<f64>>], outside: f64) -> Option<Self> {
        Self::resampled(groups, POOLED_RESAMPLES, outside, |groups| {
            let means: Vec<f64> = groups.iter().filter_map(|cases| geometric_mean(cases)).collect();
            geometric_mean(&means).unwrap_or(f64::NAN)
        })
    }

    fn resampled(
        groups: &[Vec<Vec<f64>>],
        resamples: usize,
        outside: f64,
        statistic: impl Fn(&[Vec<f64>]) -> f64,
    ) -> Option<Self> {
        let pairs = groups.iter().flatten().map(Vec::len).min().unwrap_or(0);
        if pairs == 0 {
            return None;
        }
        let medians = |of: &mut dyn FnMut(&[f64]) -> f64| -> Vec<Vec<f64>> {
            let groups = groups.iter();
            groups
                .map(|cases| cases.iter().map(|ratios| of(ratios)).collect())
                .collect()
        };
        let median = statistic(&medians(&mut |ratios| median_of(ratios.to_vec())));
        let interval = (pairs >= LEAST_PAIRS).then(|| {
            let mut random = Random(0x9e37_79b9_7f4a_7c15);
            let mut all: Vec<f64> = (0..resamples)
                .map(|_| {
                    statistic(&medians(&mut |ratios| {
                        median_of(
                            ratios
                                .iter()
                                .map(|_| ratios[random.below(ratios.len())])
                                .collect(),
                        )
                    }))
                })
                .collect();
            all.sort_by(f64::total_cmp);
            let at = |share: f64| all[((all.len() - 1) as f64 * share).round() as usize];
            (at(outside / 2.0), at(1.0 - outside / 2.0))
        });
        Some(Self {
            median,
            interval,
            pairs,
        })
    }

    /// Whether the interval is too wide to tell a tenth more from a tenth less. Too few pairs have no interval, which is as wide as can be.
    pub fn is_wide(&self) -> bool {
        self.interval
            .is_none_or(|(low, high)| high - low > WIDE * self.median)
    }

    /// `0.86 [0.84, 0.89]`; a wide interval says so.
    pub fn in_words(&self) -> String {
        let wide = if self.is_wide() { " WIDE" } else { "" };
        match self.interval {
            Some((low, high)) => format!("{:.2} [{low:.2}, {high:.2}]{wide}", self.median),
            None => format!("{:.2} (of {}){wide}", self.median, self.pairs),
        }
    }

    /// `+310 [290, 330]`, of differences: how wide is wide depends on what they are added to, so nothing is said of it.
    pub fn as_difference(&self) -> String {
        match self.interval {
            Some((low, high)) => format!("{:+.0} [{low:.0}, {high:.0}]", self.median),
            None => format!("{:+.0} (of {})", self.median, self.pairs),
        }
    }
}

/// Steele, Lea and Flood's SplitMix64: the same figures give the same interval again.
pub(super) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
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

    fn noisy(random: &mut Random, pairs: usize, middle: f64) -> Vec<f64> {
        (0..pairs)
            .map(|_| middle * (0.8 + random.below(1000) as f64 / 2500.0))
            .collect()
    }

    #[test]
    fn the_interval_holds_the_median_and_narrows_with_more_pairs() {
        let of = |pairs| Ratio::of(&noisy(&mut Random(7), pairs, 1.0)).unwrap();
        let width = |ratio: Ratio| {
            let (low, high) = ratio.interval.unwrap();
            assert!(low <= ratio.median && ratio.median <= high, "{ratio:?}");
            high - low
        };
        assert!(width(of(400)) < width(of(10)) / 2.0);
        // Uniform from 0.8 to 1.2.
        let (low, high) = of(400).interval.unwrap();
        assert!(low < 1.05 && high > 0.95, "{low} {high}");
    }

    #[test]
    fn the_interval_is_that_of_the_order_statistics() {
        // Of 1 to 10 the median's interval of 95 % is from the second to the ninth value, by the binomial distribution.
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        let ratio = Ratio::of(&values).unwrap();
        let (low, high) = ratio.interval.unwrap();
        assert!((ratio.median - 5.5).abs() < 1e-9);
        assert!(
            (1.5..=3.5).contains(&low) && (7.5..=9.5).contains(&high),
            "{ratio:?}"
        );
    }

    #[test]
    fn five_pairs_have_no_interval_however_equal_they_are() {
        let same = Ratio::of(&[0.9; 6]).unwrap();
        assert_eq!((same.interval, same.is_wide()), (Some((0.9, 0.9)), false));
        let few = Ratio::of(&[0.9; 5]).unwrap();
        assert_eq!((few.interval, few.is_wide()), (None, true));
        assert_eq!(few.in_words(), "0.90 (of 5) WIDE");
        assert!(Ratio::of(&[]).is_none());
        let apart = Ratio::of(&[0.5, 0.5, 1.0, 1.0, 1.5, 2.0]).unwrap();
        assert!(apart.in_words().ends_with("] WIDE"), "{}", apart.in_words());
    }

    #[test]
    fn an_interval_of_equals_misses_one_about_as_often_as_it_says_and_one_of_unequals_nearly_always() {
        let mut random = Random(3);
        let mut holds_one = |middle: f64| {
            let held = (0..200).filter(|_| {
                let ratio = Ratio::of(&noisy(&mut random, 20, middle)).unwrap();
                ratio
                    .interval
                    .is_some_and(|(low, high)| low <= 1.0 && 1.0 <= high)
            });
            held.count()
        };
        let (equal, unequal) = (holds_one(1.0), holds_one(0.8));
        // 95 % of 200 are 190; three standard deviations are 9, and the bootstrap of so few is a little off.
        assert!((178..=199).contains(&equal), "{equal} of 200");
        assert!(unequal < 20, "{unequal} of 200");
    }

    #[test]
    fn a_pool_is_a_geometric_mean_and_narrower_than_its_cases() {
        let mut random = Random(11);
        let cases: Vec<Vec<f64>> = (0..16).map(|_| noisy(&mut random, 10, 1.0)).collect();
        let width = |ratio: Ratio| ratio.interval.map(|(low, high)| high - low).unwrap();
        let pool = Ratio::pooled(
            &cases.iter().map(|case| vec![case.clone()]).collect::<Vec<_>>(),
            0.05,
        );
        assert!(width(pool.unwrap()) < width(Ratio::of(&cases[0]).unwrap()) / 2.0);
        let sure = Ratio::pooled(std::slice::from_ref(&cases), 0.005).unwrap();
        assert!(width(sure) > width(Ratio::pooled(&[cases], 0.05).unwrap()));
        // A group counts once, however many cases it has.
        let groups = vec![vec![vec![4.0; 6], vec![1.0; 6]], vec![vec![0.5; 6]]];
        let pool = Ratio::pooled(&groups, 0.05).unwrap();
        assert!((pool.median - 1.0).abs() < 1e-9 && pool.pairs == 6, "{pool:?}");
        assert!(Ratio::pooled(&[vec![vec![]]], 0.05).is_none());
    }
}
