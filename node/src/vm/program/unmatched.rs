//! A program whose second copies are dropped again and again, for what they say or for what they do not say in time: that is told, once.
//!
//! Decides:    when it is no chance any more, and what a person can do about it.
//! Flow:       `watch_backup` drops a copy -> [`Drops`] counts -> the event `cannot-be-matched`.
//! Invariants: 1. (memory) the last [`MANY`] drops are kept; 2. it is told after [`MANY`] drops within [`WITHIN_US`], and not again before there
//!             was none for so long; 3. where nobody has said in which order inputs are given, those of several connections are unread together until
//!             a second copy has said something else.
//! Not here:   how long the program is left alone before the next copy (`joining`).

use super::state::ProgramLoop;
use crate::config::ProgramSpec;
use dunlin_api::EventKind;
use dunlin_core::output::compare::Difference;
use dunlin_core::program::order::Order;
use std::collections::VecDeque;

/// One may be the chance of a moment, and the second one too.
const MANY: usize = 3;
/// Ten minutes.
const WITHIN_US: u64 = 600_000_000;

/// Why a copy was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mismatch {
    /// It has said something else.
    Differed,
    /// It has not said in time what the other one has.
    Late,
}

impl Mismatch {
    /// None: it was not compared, which says nothing of the copies.
    pub(super) fn by(difference: Difference) -> Option<Self> {
        match difference {
            Difference::Bytes
            | Difference::Flags
            | Difference::Ends
            | Difference::Datagram
            | Difference::NotUnderstood => Some(Self::Differed),
            Difference::Full => None,
        }
    }
}

/// The last drops of this program's second copies, while this host was the primary.
#[derive(Default)]
pub(super) struct Drops {
    last: VecDeque<(u64, Mismatch)>,
    told_us: Option<u64>,
}

impl Drops {
    /// One more; how many of the last ones differed, if it is to be told that they are many.
    pub(super) fn add(&mut self, now_us: u64, why: Mismatch) -> Option<usize> {
        if self.last.len() == MANY {
            self.last.pop_front();
        }
        let quiet = |since_us: u64| now_us.saturating_sub(since_us) > WITHIN_US;
        if self.last.back().is_some_and(|(last_us, _)| quiet(*last_us)) {
            self.told_us = None;
        }
        self.last.push_back((now_us, why));
        let first_us = self.last.front().map_or(now_us, |(first_us, _)| *first_us);
        if self.last.len() < MANY || quiet(first_us) || self.told_us.is_some() {
            return None;
        }
        self.told_us = Some(now_us);
        let differed = self.last.iter().filter(|(_, why)| *why == Mismatch::Differed);
        Some(differed.count())
    }
}

/// What may help, of what its file does not say yet.
fn advice(program: &ProgramSpec) -> String {
    let mut may_help = Vec::new();
    if program.reading.order != Order::Answer {
        may_help.push("order = \"answer\"");
    }
    if !program.agreed.clock {
        may_help.push("clock = \"agreed\"");
    }
    if !program.agreed.chance {
        may_help.push("chance = \"agreed\"");
    }
    let vm =
        "keep it in a VM, which needs no two copies that say the same (policy = \"remus\" or \"dunlin\")";
    match may_help.is_empty() {
        true => format!("this program cannot be matched as it is: {vm}"),
        false => format!(
            "{} may help ('dunlin down', 'dunlin up'); else {vm}",
            may_help.join(", ")
        ),
    }
}

impl ProgramLoop {
    /// A second copy is dropped for what it said, or did not.
    pub(super) fn second_copy_did_not_match(&mut self, why: Mismatch) {
        // Where the group was not asked it is not dropped.
        if self.backup.dropping != Some(self.group.term()) {
            return;
        }
        if why == Mismatch::Differed {
            self.keep_inputs_apart();
        }
        let now_us = self.now_us();
        if let Some(differed) = self.backup.drops.add(now_us, why) {
            let text = format!(
                "of the last {MANY} second copies within {} minutes {differed} have said something else and {} have not said in time what the \
                 one here has: each further one is brought in later, and the program runs alone meanwhile. {}; 'dunlin program check' shows what \
                 differs",
                WITHIN_US / 60_000_000,
                MANY - differed,
                advice(&self.program)
            );
            self.event(EventKind::CannotBeMatched, text);
        }
    }

    /// Invariant 3.
    fn keep_inputs_apart(&mut self) {
        let Some(running) = &mut self.own.running else {
            return;
        };
        if !self.program.reading.adapts
            || self.own.order != Order::Batch
            || running.gate.counters().together == 0
        {
            return;
        }
        self.own.order = Order::Read;
        running.gate.keep_apart();
        self.event(
            EventKind::NotBatched,
            "the second copy has said something else, and inputs of several connections were unread together: from now on they are given one at \
             a time, as by order = \"read\" (order = \"batch\" keeps them together)"
                .to_owned(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE_US: u64 = 60_000_000;

    #[test]
    fn the_third_drop_within_ten_minutes_is_told_and_no_further_one_until_it_was_quiet_for_so_long() {
        let mut drops = Drops::default();
        assert_eq!(drops.add(0, Mismatch::Differed), None);
        assert_eq!(drops.add(MINUTE_US, Mismatch::Late), None);
        assert_eq!(
            drops.add(2 * MINUTE_US, Mismatch::Differed),
            Some(2),
            "invariant 2"
        );
        for minute in [3, 4, 12, 21] {
            assert_eq!(
                drops.add(minute * MINUTE_US, Mismatch::Late),
                None,
                "told already"
            );
            assert!(drops.last.len() <= MANY, "invariant 1");
        }
        assert_eq!(
            drops.add(40 * MINUTE_US, Mismatch::Late),
            None,
            "the first after a rest"
        );
        assert_eq!(drops.add(41 * MINUTE_US, Mismatch::Late), None);
        assert_eq!(drops.add(42 * MINUTE_US, Mismatch::Late), Some(0));
    }

    #[test]
    fn what_found_no_room_to_be_compared_is_no_mismatch() {
        assert_eq!(Mismatch::by(Difference::Full), None);
        assert_eq!(Mismatch::by(Difference::Bytes), Some(Mismatch::Differed));
    }

    #[test]
    fn seldom_is_not_many() {
        let mut drops = Drops::default();
        for time in 0..20 {
            assert_eq!(drops.add(time * 6 * MINUTE_US, Mismatch::Differed), None);
        }
    }
}
