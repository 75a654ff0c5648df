//! What it decides: what a replica finds on its disk after a crash.
//!
//! Flow: disk actions queue up in order; the world finishes them one batch at a time after a random delay; a crash keeps
//! a random part of what was under way.
//!
//! Invariants: what was reported as durable is there for ever; what was not may be there whole, torn or not at all,
//! but never out of order. The hard state is a file of its own, replaced whole, on its own queue.
//!
//! Source: ALICE (Pillai 2014) for what a crash may leave; fabric.md for the times.
//!
//! Not here: bit rot. The log on disk has checksums and refuses damage in its middle (the fabric's own tests).

use crate::random::Random;
use dunlin_core::consensus::{Entry, Event, HardState, Restored, Snapshot};
use dunlin_core::units::{Index, Viewstamp};
use std::collections::VecDeque;

/// One replica's disk.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// Durable.
    pub hard_state: HardState,
    /// Durable.
    pub snapshot: Snapshot,
    /// Durable.
    pub log: Vec<Entry>,
    hard_states: VecDeque<HardState>,
    writes: VecDeque<Write>,
    /// Whether the replica took part before, so that an empty memory means a lost one.
    pub used: bool,
}

/// A disk action under way.
#[derive(Clone, Debug)]
pub enum Write {
    /// Entries, with their ticket.
    Append(Vec<Entry>, u64),
    /// Cut from here.
    Truncate(Index),
    /// Save; older entries may go.
    Snapshot(Snapshot),
}

impl Disk {
    /// An empty disk of a member that begins with `snapshot`.
    #[must_use]
    pub fn new(snapshot: Snapshot) -> Self {
        Self {
            snapshot,
            ..Self::default()
        }
    }
    /// Queues a hard state; true if nothing was under way.
    pub fn hard_state(&mut self, hard_state: HardState) -> bool {
        self.hard_states.push_back(hard_state);
        self.hard_states.len() == 1
    }
    /// Queues a write; true if nothing was under way.
    pub fn write(&mut self, write: Write) -> bool {
        self.writes.push_back(write);
        self.writes.len() == 1
    }
    /// A hard state is durable. Returns the report and whether more are queued.
    pub fn finish_hard_state(&mut self) -> Option<(Event, bool)> {
        let hard_state = self.hard_states.pop_front()?;
        self.hard_state = hard_state;
        self.used = true;
        Some((
            Event::HardStatePersisted(hard_state),
            !self.hard_states.is_empty(),
        ))
    }
    /// Up to `most` writes are durable (group commit). Returns the reports and whether more are queued.
    pub fn finish_writes(&mut self, most: usize, drop_old: bool) -> (Vec<Event>, bool) {
        let mut reports = Vec::new();
        for _ in 0..most {
            let Some(write) = self.writes.pop_front() else {
                break;
            };
            match &write {
                Write::Append(_, ticket) => reports.push(Event::Persisted { ticket: *ticket }),
                Write::Truncate(_) => {}
                Write::Snapshot(snapshot) => reports.push(Event::SnapshotPersisted { last: snapshot.last }),
            }
            self.apply(write, drop_old);
        }
        (reports, !self.writes.is_empty())
    }

    fn apply(&mut self, write: Write, drop_old: bool) {
        match write {
            Write::Append(entries, _) => {
                let gap = self.log.last().is_some_and(|last| {
                    entries
                        .first()
                        .is_some_and(|first| first.stamp.index != last.stamp.index.next())
                });
                assert!(!gap, "a write that does not follow what is on the disk");
                self.log.extend(entries);
            }
            Write::Truncate(from) => self.log.retain(|entry| entry.stamp.index < from),
            Write::Snapshot(snapshot) => {
                let last = snapshot.last.index;
                let ends_before = self.log.last().is_some_and(|entry| entry.stamp.index < last);
                if drop_old || ends_before {
                    self.log.retain(|entry| entry.stamp.index > last);
                }
                self.snapshot = snapshot;
            }
        }
    }

    /// The power goes. What was under way is kept up to a random point; the write there may be torn.
    pub fn crash(&mut self, random: &mut Random) {
        for _ in 0..random.below(self.hard_states.len() as u64 + 1) {
            if let Some(hard_state) = self.hard_states.pop_front() {
                self.hard_state = hard_state;
                self.used = true;
            }
        }
        for _ in 0..random.below(self.writes.len() as u64 + 1) {
            if let Some(write) = self.writes.pop_front() {
                self.apply(write, random.chance(500_000));
            }
        }
        if let Some(Write::Append(mut entries, ticket)) = self.writes.pop_front() {
            entries.truncate(random.below(entries.len() as u64 + 1) as usize);
            self.apply(Write::Append(entries, ticket), false);
        }
        self.hard_states.clear();
        self.writes.clear();
    }

    /// What a replica reads at its start.
    #[must_use]
    pub fn restore(&self, memory: bool, first: &Snapshot) -> Restored {
        if memory {
            let (snapshot, log) = (first.clone(), Vec::new());
            return Restored {
                hard_state: self.hard_state,
                snapshot,
                log,
                lost_memory: self.used,
            };
        }
        Restored {
            hard_state: self.hard_state,
            snapshot: self.snapshot.clone(),
            log: self.log.clone(),
            lost_memory: false,
        }
    }

    /// Is the entry at `index` durable, and the one with this stamp, if the replica still knows it?
    #[must_use]
    pub fn holds(&self, index: Index, stamp: Option<Viewstamp>) -> bool {
        index <= self.snapshot.last.index
            || self
                .log
                .iter()
                .rev()
                .find(|entry| entry.stamp.index == index)
                .is_some_and(|entry| stamp.is_none_or(|stamp| entry.stamp == stamp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use dunlin_core::consensus::EntryKind;
    use dunlin_core::units::Term;

    fn entries(from: u64, to: u64) -> Vec<Entry> {
        let stamp = |at| Viewstamp {
            term: Term(1),
            index: Index(at),
        };
        let kind = EntryKind::Data;
        (from..=to)
            .map(|at| Entry {
                stamp: stamp(at),
                kind,
                payload: Bytes::new(),
            })
            .collect()
    }

    #[test]
    fn a_crash_keeps_what_was_reported_and_a_prefix_of_the_rest() {
        let mut lengths = [0; 8];
        for seed in 0..300 {
            let mut disk = Disk::default();
            assert!(disk.write(Write::Append(entries(1, 2), 1)));
            assert!(!disk.write(Write::Append(entries(3, 5), 2)));
            let (reports, more) = disk.finish_writes(1, true);
            assert_eq!((reports, more), (vec![Event::Persisted { ticket: 1 }], true));
            disk.crash(&mut Random::new(seed));
            lengths[disk.log.len()] += 1;
        }
        assert!(lengths[2..=5].iter().all(|&n| n > 10), "{lengths:?}");
        assert_eq!(lengths[..2].iter().sum::<i32>(), 0);
    }
}
