//! Many worlds, one after the other: what they came to, and the first that failed.
//!
//! Not here: the log's worlds, which are played on all cores (`run`).

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What one world came to, or several together.
pub trait Tally: Default {
    /// Adds another world's.
    fn add(&mut self, other: &Self);
}

/// What many worlds came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report<T> {
    /// How many.
    pub seeds: u64,
    /// All together.
    pub tally: T,
    /// The first seed that failed, and what broke.
    pub failure: Option<(u64, String)>,
}

/// Plays so many worlds, or until one fails.
pub fn run<T: Tally>(seeds: u64, start: u64, play: impl Fn(u64) -> Result<T, String>) -> Report<T> {
    let mut report = Report {
        seeds: 0,
        tally: T::default(),
        failure: None,
    };
    for seed in start..start + seeds {
        report.seeds += 1;
        match play(seed) {
            Ok(tally) => report.tally.add(&tally),
            Err(what) => {
                report.failure = Some((seed, what));
                break;
            }
        }
    }
    report
}

/// Plays one world; a panic is a failure.
pub fn caught<T>(play: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(play)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}
