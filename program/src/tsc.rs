//! Who reads the processor's own clock (RDTSC, RDTSCP): what the tester is told of it, and what it answers.
//!
//! Decides:    whose reads do no harm: the loader's, which only keeps statistics.
//! Flow:       a read, told by the copy's first process (`inside::tsc`) -> [`Reads::told`] -> the report.
//! Not here:   how a read is caught (`inside::tsc`).

use std::collections::BTreeMap;

/// So many places are shown.
const SHOWN: usize = 6;

/// The places at which copies read it, and how often.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    /// By copy and the number of the place there.
    names: BTreeMap<(usize, u32), String>,
    /// By name, all copies together.
    times: BTreeMap<String, u64>,
}

impl Reads {
    pub(crate) fn told(&mut self, copy: usize, place: u32, name: Option<String>) {
        if let Some(name) = name {
            self.names.insert((copy, place), name);
        }
        let name = self.names.get(&(copy, place)).map_or("", String::as_str);
        *self.times.entry(name.to_owned()).or_default() += 1;
    }

    /// How often the program's own code read it.
    #[must_use]
    pub fn by_program(&self) -> u64 {
        self.own().map(|(_, times)| times).sum()
    }

    /// How often the loader did.
    #[must_use]
    pub fn by_loader(&self) -> u64 {
        self.times.values().sum::<u64>() - self.by_program()
    }

    /// Where the program's own code read it, and how often: the most frequent first.
    #[must_use]
    pub fn places(&self) -> Vec<(String, u64)> {
        let mut places: Vec<_> = self.own().map(|(name, times)| (name.clone(), times)).collect();
        places.sort_by(|one, other| other.1.cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        places
    }

    fn own(&self) -> impl Iterator<Item = (&String, u64)> {
        let own = self.times.iter().filter(|(name, _)| !is_loaders(name));
        own.map(|(name, times)| (name, *times))
    }

    /// Lines for people.
    pub(crate) fn lines(&self) -> Vec<String> {
        let loader = match self.by_loader() {
            0 => String::new(),
            times => format!("; {times} times by the loader, for its statistics alone"),
        };
        if self.by_program() == 0 {
            return vec![format!(
                "RDTSC        the program has not read the processor's own clock{loader}"
            )];
        }
        let places = self.places();
        let mut lines = vec![format!(
            "RDTSC        the program has read the processor's own clock {} times, at {} places{loader}",
            self.by_program(),
            places.len()
        )];
        let shown = places.iter().take(SHOWN);
        lines.extend(shown.map(|(name, times)| format!("  {times} times at {name}")));
        if places.len() > SHOWN {
            lines.push(format!("  and at {} places more", places.len() - SHOWN));
        }
        lines.push("  on two hosts each copy reads another one: what it says by that differs".to_owned());
        lines
    }
}

/// `ld-linux-x86-64.so.2` and `ld-musl-x86_64.so.1`.
fn is_loaders(name: &str) -> bool {
    let path = name.rsplit_once('+').map_or(name, |(path, _)| path);
    let file = path.rsplit('/').next().unwrap_or(path);
    file.starts_with("ld-linux") || file.starts_with("ld-musl")
}

/// What the processor's own clock says now.
pub(crate) fn now() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it reads a counter.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_reads_are_told_apart_and_the_most_frequent_place_comes_first() {
        let mut reads = Reads::default();
        let loader = "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2+0x1f0a";
        for copy in 0..2 {
            reads.told(copy, 1, Some(loader.to_owned()));
            reads.told(copy, 2, Some("/usr/bin/a+0x10".to_owned()));
            reads.told(copy, 3, Some("/usr/bin/a+0x20".to_owned()));
            reads.told(copy, 3, None);
        }
        assert_eq!((reads.by_program(), reads.by_loader()), (6, 2));
        let places = reads.places();
        assert_eq!(places[0], ("/usr/bin/a+0x20".to_owned(), 4));
        assert!(reads.lines()[0].contains("6 times, at 2 places; 2 times by the loader"));
        assert!(Reads::default().lines()[0].contains("has not read"));
        assert!(!is_loaders("/srv/ld-linux/server+0x1"));
    }
}
