//! What bounds a case: the first that is at its end, from measured waits and not by a guess.
//!
//! * **Decides:** the order in which they are asked: a host, or a machine, without CPU makes all else wait, a VM that stands answers nobody, output that
//!   is held is late.
//! * **Source:** the figures of [`super::report::Medians`]. **Not here:** what the CPU goes to ([`super::cost`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A host that used so much of its share had no more to give: shares are dealt out in slices of 10 ms.
const USED_UP: f64 = 0.95;
/// A VM that stood for so much of the time.
const PAUSED: f64 = 0.20;
/// So much of a median answer's time was spent in the output's hold.
const HELD: f64 = 0.50;

/// What bounds a case, and what that was judged by.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bound {
    /// In a word or two.
    pub by: String,
    /// CPU used by the primary's host, as a share of what it may use.
    pub host_a: f64,
    /// The same of the backup's.
    pub host_b: f64,
    /// CPU of the whole machine that anybody used.
    pub machine: f64,
    /// Sum of the syncs' pauses, as a share of the window.
    pub paused: f64,
    /// How long a frame was held on average, as a share of the median latency.
    pub held: f64,
}

impl Bound {
    /// Of these figures.
    pub fn of(host_a: f64, host_b: f64, machine: f64, paused: f64, held: f64) -> Self {
        let by = if host_a >= USED_UP {
            "CPU of host a"
        } else if host_b >= USED_UP {
            "CPU of host b"
        } else if machine >= USED_UP {
            // No host came to the end of its share, for want of cores.
            "CPU of the machine"
        } else if paused >= PAUSED {
            "syncs"
        } else if held >= HELD {
            // Of what is held, waiting for the group and waiting for the other copy's answer are not told apart.
            "agreement or comparison"
        } else {
            "client"
        };
        Self {
            by: by.to_owned(),
            host_a,
            host_b,
            machine,
            paused,
            held,
        }
    }
}

/// The value below which half of the pauses lie, in ms; within the 1/16 with which lengths are kept, at its middle.
pub fn median_pause_ms(pauses: &BTreeMap<u64, u64>) -> f64 {
    let in_all: u64 = pauses.values().sum();
    let mut so_far = 0;
    for (&length, &many) in pauses {
        so_far += many;
        if so_far * 2 >= in_all && in_all > 0 {
            let digits = u64::BITS - length.leading_zeros();
            let step = 1_u64 << digits.saturating_sub(5);
            return (length as f64 + (step - 1) as f64 / 2.0) / 1e3;
        }
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_is_at_its_end_bounds() {
        assert_eq!(Bound::of(0.97, 1.0, 0.9, 0.5, 0.9).by, "CPU of host a");
        assert_eq!(Bound::of(0.80, 1.0, 0.9, 0.5, 0.9).by, "CPU of host b");
        assert_eq!(Bound::of(0.80, 0.5, 0.99, 0.5, 0.9).by, "CPU of the machine");
        assert_eq!(Bound::of(0.80, 0.5, 0.9, 0.5, 0.9).by, "syncs");
        assert_eq!(Bound::of(0.80, 0.5, 0.9, 0.1, 0.9).by, "agreement or comparison");
        assert_eq!(Bound::of(0.80, 0.5, 0.9, 0.1, 0.1).by, "client");
    }

    #[test]
    fn the_median_pause_is_of_what_was_counted() {
        assert_eq!(median_pause_ms(&BTreeMap::new()), 0.0);
        let near = |pauses: &[(u64, u64)], expected: f64| {
            let found = median_pause_ms(&pauses.iter().copied().collect());
            assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
        };
        near(&[(20, 1)], 0.020);
        near(&[(1024, 3), (4096, 2)], (1024.0 + 31.5) / 1e3);
        near(&[(1024, 2), (4096, 3)], (4096.0 + 127.5) / 1e3);
    }
}
