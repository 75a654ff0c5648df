//! What it decides: which entries this replica holds, and which members they put in force.
//!
//! Flow: `propose` pushes (leader), `follow` merges (follower), a sync truncates the front, a newer leader the back.
//!
//! Invariants:
//! - L1 entries are consecutive from `base.index + 1`, and their terms never fall;
//! - L2 the members in force are those of the last `Members` entry held, agreed or not, else the snapshot's.
//!
//! Source: Raft 5.3 (log matching), 7 (snapshots) and Ongaro's dissertation 4.1 (a change of members is in force
//! when appended).
//!
//! Not here: disk (the shell keeps a copy there), what is agreed (`quorum`).

use super::{Entry, EntryKind, Member, Snapshot};
use crate::units::{Index, Term, Viewstamp};
use crate::wire::consensus::decode_members;
use bytes::Bytes;
use std::collections::VecDeque;

/// The entries held, in a ring; indices go on for ever while the ring wraps.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Log {
    base: Viewstamp,
    state: Bytes,
    ring: VecDeque<Entry>,
    payload_bytes: usize,
    /// Members by the index that put them in force; the first is the snapshot's, the last is in force.
    members: Vec<(Index, Vec<Member>)>,
}

/// An entry of kind `Members` whose payload is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BadMembers;

impl Log {
    pub(super) fn new(snapshot: Snapshot) -> Self {
        Self {
            base: snapshot.last,
            state: snapshot.state,
            ring: VecDeque::new(),
            payload_bytes: 0,
            members: vec![(snapshot.last.index, snapshot.members)],
        }
    }

    /// What stands for everything before the first entry.
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot {
            last: self.base,
            members: self.members[0].1.clone(),
            state: self.state.clone(),
        }
    }
    pub(super) fn base(&self) -> Viewstamp {
        self.base
    }
    #[inline]
    pub(super) fn last(&self) -> Viewstamp {
        self.ring.back().map_or(self.base, |entry| entry.stamp)
    }
    pub(super) fn len(&self) -> usize {
        self.ring.len()
    }
    pub(super) fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    #[inline]
    pub(super) fn get(&self, index: Index) -> Option<&Entry> {
        let offset = index.0.checked_sub(self.base.index.0 + 1)?;
        self.ring.get(usize::try_from(offset).ok()?)
    }

    /// The stamp at `index`, if the log still knows it.
    #[inline]
    pub(super) fn stamp(&self, index: Index) -> Option<Viewstamp> {
        if index == self.base.index {
            Some(self.base)
        } else {
            self.get(index).map(|entry| entry.stamp)
        }
    }

    /// The members in force (L2).
    #[inline]
    pub(super) fn members(&self) -> &[Member] {
        self.members.last().map_or(&[], |(_, members)| members)
    }
    /// The entry that put them in force.
    pub(super) fn members_index(&self) -> Index {
        self.members.last().map_or(Index(0), |&(index, _)| index)
    }

    /// Appends; panics if it does not follow (L1).
    pub(super) fn push(&mut self, entry: Entry) -> Result<(), BadMembers> {
        let last = self.last();
        assert!(
            entry.stamp.index == last.index.next() && entry.stamp.term >= last.term,
            "L1 broken: {:?} pushed after {last:?}",
            entry.stamp
        );
        if entry.kind == EntryKind::Members {
            let members = decode_members(&entry.payload).map_err(|_| BadMembers)?;
            self.members.push((entry.stamp.index, members));
        }
        self.payload_bytes += entry.payload.len();
        self.ring.push_back(entry);
        Ok(())
    }

    /// Removes entries at and after `from`.
    pub(super) fn truncate_suffix(&mut self, from: Index) {
        while self.ring.back().is_some_and(|entry| entry.stamp.index >= from) {
            if let Some(entry) = self.ring.pop_back() {
                self.payload_bytes -= entry.payload.len();
            }
        }
        while self.members.len() > 1 && self.members_index() >= from {
            self.members.pop();
        }
    }

    /// Removes entries up to `through`; `state` stands for them.
    pub(super) fn truncate_prefix(&mut self, through: Index, state: Bytes) {
        let Some(stamp) = self.stamp(through) else { return };
        while self
            .ring
            .front()
            .is_some_and(|entry| entry.stamp.index <= through)
        {
            if let Some(entry) = self.ring.pop_front() {
                self.payload_bytes -= entry.payload.len();
            }
        }
        while self.members.len() > 1 && self.members[1].0 <= through {
            self.members.remove(0);
        }
        self.base = stamp;
        self.state = state;
    }

    /// The last entry of a batch that starts at `from`: at most `entries` and `payload_bytes`, at least one if held.
    pub(super) fn batch_end(&self, from: Index, entries: usize, payload_bytes: usize) -> Index {
        let last = self.last().index;
        let mut end = from;
        let mut bytes = self.get(from).map_or(0, |entry| entry.payload.len());
        while end < last && ((end.0 - from.0) as usize) + 1 < entries {
            bytes += self.get(end.next()).map_or(0, |entry| entry.payload.len());
            if bytes > payload_bytes {
                break;
            }
            end = end.next();
        }
        end
    }

    pub(super) fn copy(&self, from: Index, through: Index) -> Vec<Entry> {
        (from.0..=through.0)
            .filter_map(|index| self.get(Index(index)).cloned())
            .collect()
    }

    /// The first index whose term is that of `index`, not before `floor`: where a conflict may begin.
    pub(super) fn first_of_term(&self, index: Index, floor: Index) -> Index {
        let Some(Viewstamp { term, .. }) = self.stamp(index) else {
            return floor;
        };
        let mut at = index;
        while at > floor
            && self
                .stamp(Index(at.0 - 1))
                .is_some_and(|stamp| stamp.term == term)
        {
            at = Index(at.0 - 1);
        }
        at
    }

    pub(super) fn last_term(&self) -> Term {
        self.last().term
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::ReplicaId;
    use crate::wire::consensus::encode_members;

    fn entry(term: u64, index: u64) -> Entry {
        Entry {
            stamp: Viewstamp {
                term: Term(term),
                index: Index(index),
            },
            kind: EntryKind::Data,
            payload: Bytes::from(vec![0; index as usize]),
        }
    }
    fn log() -> Log {
        let mut log = Log::new(Snapshot {
            members: vec![Member::full(0)],
            ..Snapshot::default()
        });
        for (term, index) in [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)] {
            log.push(entry(term, index)).unwrap();
        }
        log
    }

    #[test]
    fn front_and_back_are_cut_and_indices_go_on() {
        let mut log = log();
        log.truncate_prefix(Index(2), Bytes::from_static(b"s"));
        assert_eq!(
            (log.base().index, log.last().index, log.len()),
            (Index(2), Index(5), 3)
        );
        assert_eq!(log.stamp(Index(2)).unwrap().term, Term(1));
        assert_eq!(log.stamp(Index(1)), None);
        log.truncate_suffix(Index(4));
        assert_eq!((log.last().index, log.payload_bytes()), (Index(3), 3));
        log.push(entry(3, 4)).unwrap();
        assert_eq!(log.first_of_term(Index(4), Index(0)), Index(4));
        assert_eq!(&log.snapshot().state[..], b"s");
    }

    #[test]
    fn members_follow_the_log_forwards_and_backwards() {
        let mut log = log();
        let two = vec![Member::full(0), Member::witness(9)];
        log.push(Entry {
            kind: EntryKind::Members,
            payload: encode_members(&two),
            stamp: Viewstamp {
                term: Term(2),
                index: Index(6),
            },
        })
        .unwrap();
        assert_eq!(log.members(), &two[..]);
        log.push(entry(2, 7)).unwrap();
        log.truncate_suffix(Index(6));
        assert_eq!(log.members(), &[Member::full(0)]);
        assert_eq!(log.members()[0].id, ReplicaId(0));
    }

    #[test]
    fn a_batch_is_bounded_and_never_empty() {
        let log = log();
        assert_eq!(log.batch_end(Index(1), 10, 1 << 20), Index(5));
        assert_eq!(log.batch_end(Index(1), 2, 1 << 20), Index(2));
        assert_eq!(log.batch_end(Index(4), 10, 1), Index(4));
    }

    #[test]
    #[should_panic(expected = "L1 broken")]
    fn a_gap_is_refused() {
        let mut log = log();
        let _ = log.push(entry(2, 7));
    }
}
