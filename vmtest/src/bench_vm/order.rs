//! In which order windows follow each other.
//!
//! * **Decides:** each window's place and its partner: the window whose figure its own is compared with.
//! * **Flow:** [`Order::of`] a case -> [`Order::round`], one after the other.
//! * **Invariants:** (1) partners are neighbours; (2) over two rounds each of two partners is first once (`ABBA`), so that what grows or
//!   wears off with time meets both alike; (3) which one begins, and the order of several pairs, differ by run, case and round.
//! * **Not here:** what the pairs are worth ([`super::paired`]).

use super::paired::Random;

/// A window: of which policy, and its partner's, by their places; without a baseline among three and more there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The policy's place.
    pub policy: usize,
    /// The place of the policy beside which it is measured.
    pub beside: Option<usize>,
}

/// The order of one case's windows.
pub struct Order {
    policies: usize,
    base: Option<usize>,
    seed: u64,
}

impl Order {
    /// Of so many policies, with the baseline at `base`; `run` is this run's number, `case` the case's name.
    pub fn of(policies: usize, base: Option<usize>, run: u64, case: &str) -> Self {
        // FNV-1a.
        let seed = case.bytes().fold(0xcbf2_9ce4_8422_2325 ^ run, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self { policies, base, seed }
    }

    fn pairs(&self) -> Option<Vec<(usize, usize)>> {
        match (self.policies, self.base) {
            (2, _) => Some(vec![(0, 1)]),
            (0 | 1, _) | (_, None) => None,
            (count, Some(base)) => Some((0..count).filter(|&at| at != base).map(|at| (base, at)).collect()),
        }
    }

    /// The windows of a round, from 1.
    pub fn round(&self, round: u32) -> Vec<Window> {
        let mut random = Random(self.seed ^ u64::from(round).wrapping_mul(0xff51_afd7_ed55_8ccd));
        let mut shuffled = |mut places: Vec<usize>| {
            for at in (1..places.len()).rev() {
                places.swap(at, random.below(at + 1));
            }
            places
        };
        let Some(pairs) = self.pairs() else {
            let single = |policy| Window { policy, beside: None };
            return shuffled((0..self.policies).collect())
                .into_iter()
                .map(single)
                .collect();
        };
        let mut windows = Vec::new();
        for at in shuffled((0..pairs.len()).collect()) {
            // Who begins the first round is this case's own; from then on they take turns.
            let begins = Random(self.seed ^ (at as u64 + 1)).below(2);
            let (one, other) = pairs[at];
            let mut pair = [(one, other), (other, one)];
            pair.rotate_left((begins + round as usize) % 2);
            windows.extend(pair.map(|(policy, beside)| Window {
                policy,
                beside: Some(beside),
            }));
        }
        windows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policies(order: &Order, rounds: std::ops::RangeInclusive<u32>) -> Vec<usize> {
        rounds
            .flat_map(|round| order.round(round))
            .map(|window| window.policy)
            .collect()
    }

    #[test]
    fn two_policies_go_there_and_back() {
        let order = Order::of(2, Some(0), 1, "nginx static 16");
        let eight = policies(&order, 1..=4);
        assert!(
            eight == [0, 1, 1, 0, 0, 1, 1, 0] || eight == [1, 0, 0, 1, 1, 0, 0, 1],
            "{eight:?}"
        );
    }

    #[test]
    fn who_begins_differs_between_cases_and_between_runs() {
        let first = |run, case: &str| policies(&Order::of(2, Some(0), run, case), 1..=1)[0];
        let begun: Vec<usize> = (0..40).map(|run| first(run, "redis set 1")).collect();
        assert!((8..=32).contains(&begun.iter().sum::<usize>()), "{begun:?}");
        let begun: Vec<usize> = (0..40).map(|case| first(5, &format!("case {case}"))).collect();
        assert!((8..=32).contains(&begun.iter().sum::<usize>()), "{begun:?}");
    }

    #[test]
    fn each_policy_has_a_window_of_the_baseline_beside_its_own() {
        let order = Order::of(6, Some(2), 9, "php page 1");
        let mut firsts = [0; 6];
        for round in 1..=10 {
            let windows = order.round(round);
            assert_eq!(windows.len(), 10);
            for pair in windows.chunks(2) {
                let [one, other] = pair else { panic!("{pair:?}") };
                assert_eq!(
                    (one.beside, other.beside),
                    (Some(other.policy), Some(one.policy)),
                    "{pair:?}"
                );
                assert!((one.policy == 2) != (other.policy == 2), "{pair:?}");
                firsts[one.policy] += 1;
            }
        }
        // Half of the 50 pairs begin with the baseline; each other policy begins half of its ten.
        assert_eq!(firsts, [5, 5, 25, 5, 5, 5]);
        let orders: Vec<_> = (1..=10).map(|round| policies(&order, round..=round)).collect();
        assert!(
            orders
                .iter()
                .any(|other| *other != orders[0] && *other != orders[1])
        );
    }

    #[test]
    fn without_a_baseline_each_policy_has_its_window_in_each_round() {
        let order = Order::of(3, None, 1, "x");
        for round in 1..=5 {
            let mut all = policies(&order, round..=round);
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2]);
        }
        assert_eq!(policies(&Order::of(1, Some(0), 1, "x"), 1..=2), [0, 0]);
    }
}
