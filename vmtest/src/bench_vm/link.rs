//! What lies between the clients and the VM's network.
//!
//! * **Decides:** nothing; a link is what its word says. **Flow:** `--link` -> [`super::case::Case`] -> the testbed's shaper ([`Link::shape`]).
//! * **Not here:** how frames are delayed and lost (`testbed/shaper`), what a link without a VM carries ([`super::links`]).

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::testbed::Shape;

/// A client's cable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// The testbed's plain one.
    #[default]
    Lan,
    /// One with a shaper, also where that has nothing to do (`0ms`).
    Shaped {
        /// What it adds to a round trip, half of it each way.
        round_trip_ms: u32,
        /// Of a hundred frames so many are lost, in each direction.
        loss_percent: u32,
        /// How much it carries in a second, in each direction; none: as much as the cores do.
        megabits: Option<NonZeroU32>,
    },
}

impl Link {
    /// What the testbed's shaper is to do; nothing for the plain cable, where none is.
    pub fn shape(self, seed: u64) -> Option<Shape> {
        match self {
            Self::Lan => None,
            Self::Shaped {
                round_trip_ms,
                loss_percent,
                megabits,
            } => Some(Shape {
                delay: Duration::from_millis(round_trip_ms.into()) / 2,
                lost_of_million: loss_percent * 10_000,
                megabits,
                seed,
            }),
        }
    }
}

impl FromStr for Link {
    type Err = anyhow::Error;

    fn from_str(words: &str) -> Result<Self> {
        if words == "lan" {
            return Ok(Self::Lan);
        }
        let (mut round_trip_ms, mut loss_percent, mut megabits) = (0, 0, None);
        for word in words.split('+') {
            let number = |digits: &str| -> Result<u32> {
                let number = digits.parse();
                number.with_context(|| format!("'{word}' has no whole number"))
            };
            if let Some(digits) = word.strip_suffix("ms") {
                round_trip_ms = number(digits)?;
            } else if let Some(digits) = word.strip_suffix('%') {
                loss_percent = number(digits)?;
            } else if let Some(digits) = word.strip_suffix("gbit") {
                megabits = Some(number(digits)?.saturating_mul(1000));
            } else if let Some(digits) = word.strip_suffix("mbit") {
                megabits = Some(number(digits)?);
            } else {
                bail!(
                    "no link '{word}': there are lan, 5ms (added to a round trip), 1% (lost in each direction), 1gbit or 100mbit (in each direction), and 5ms+1%"
                );
            }
        }
        ensure!(
            round_trip_ms <= 1000
                && loss_percent <= 50
                && megabits.is_none_or(|megabits| (1..=100_000).contains(&megabits)),
            "link '{words}': at most 1000ms, 50%, and from 1mbit to 100gbit"
        );
        Ok(Self::Shaped {
            round_trip_ms,
            loss_percent,
            megabits: megabits.and_then(NonZeroU32::new),
        })
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Shaped {
            round_trip_ms,
            loss_percent,
            megabits,
        } = *self
        else {
            return f.write_str("lan");
        };
        let mut words = Vec::new();
        if round_trip_ms > 0 || (loss_percent == 0 && megabits.is_none()) {
            words.push(format!("{round_trip_ms}ms"));
        }
        if loss_percent > 0 {
            words.push(format!("{loss_percent}%"));
        }
        match megabits.map_or(0, NonZeroU32::get) {
            0 => {}
            whole if whole % 1000 == 0 => words.push(format!("{}gbit", whole / 1000)),
            megabits => words.push(format!("{megabits}mbit")),
        }
        f.write_str(&words.join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_links_and_links_words() {
        for word in [
            "lan",
            "0ms",
            "5ms",
            "20ms",
            "1%",
            "5ms+1%",
            "1gbit",
            "100mbit",
            "5ms+1%+1gbit",
        ] {
            assert_eq!(word.parse::<Link>().unwrap().to_string(), word);
        }
        for word in [
            "", "5", "ms", "wan", "5ms+", "1.5%", "1001ms", "51%", "lan+5ms", "0gbit", "101gbit", "1bit",
        ] {
            assert!(word.parse::<Link>().is_err(), "{word}");
        }
    }

    #[test]
    fn half_of_a_round_trip_is_each_way_and_a_plain_cable_has_no_shaper() {
        assert_eq!(Link::Lan.shape(3), None);
        assert!("0ms".parse::<Link>().unwrap().shape(3).is_some());
        let shape = "5ms+1%".parse::<Link>().unwrap().shape(3).unwrap();
        assert_eq!(
            (shape.delay.as_micros(), shape.lost_of_million, shape.seed),
            (2500, 10_000, 3)
        );
        let shape = "1gbit".parse::<Link>().unwrap().shape(3).unwrap();
        assert_eq!(shape.megabits.map(NonZeroU32::get), Some(1000));
    }
}
