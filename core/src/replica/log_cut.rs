//! What it decides: where a member cuts its log, and the state that stands for what is cut.
//!
//! Flow: what is agreed of syncs and of who is complete, and each applied entry, go in; a [`Cut`] comes out where there is one.
//!
//! Invariants:
//! 1. What a sync that is under way may still need is in the log: it is cut where the sync was agreed, and not before it is done.
//! 2. Where nobody else needs the log, it never holds more than two parts of [`LOG_PARTS`], and is cut a part behind what is applied: the other
//!    members may not have got the newest entries yet.
//! 3. A cut goes only forwards; a snapshot begins anew, backwards too. What was remembered of another history would stand for entries that it does
//!    not know.
//!
//! Source: docs/replica.md. Not here: what a full log means (`node`), the cut itself (`consensus`).

use crate::agreed::{AgreedState, ReplicaSet};
use crate::replica::sync::bugs::{Bug, Bugs};
use crate::units::Index;
use crate::wire::agreed;
use bytes::Bytes;

/// Where no sync cuts the log, each part of its limit does.
pub const LOG_PARTS: usize = 8;

/// The entries up to there go, and the state stands for them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The last one that goes.
    pub through: Index,
    /// What the log says of the VM up to there (`wire::agreed`).
    pub state: Bytes,
}

impl Cut {
    fn at(through: Index, state: &AgreedState) -> Self {
        Self {
            through,
            state: agreed::encode_state(state),
        }
    }
}

/// Where the log of one member may be cut.
#[derive(Clone, Debug)]
pub struct LogCut {
    /// Up to where it was cut.
    cut_at: Index,
    /// The sync under way was agreed there.
    at_sync: Option<Cut>,
    /// Where it is cut next, if nobody else needs it.
    behind: Option<Cut>,
    /// Bytes that were applied since.
    bytes_since: usize,
    bugs: Bugs,
}

impl LogCut {
    /// Of a log that begins behind this entry.
    #[must_use]
    pub fn new(base: Index) -> Self {
        Self {
            cut_at: base,
            at_sync: None,
            behind: None,
            bytes_since: 0,
            bugs: Bugs::default(),
        }
    }

    /// With a fault put back on purpose.
    #[must_use]
    pub fn with_bugs(self, bugs: Bugs) -> Self {
        Self { bugs, ..self }
    }

    /// `Sync` is agreed at `index`, where the log says this of the VM.
    pub fn sync_agreed(&mut self, index: Index, state: &AgreedState) {
        self.at_sync = Some(Cut::at(index, state));
    }

    /// `SyncDone` is agreed.
    #[must_use]
    pub fn sync_done(&mut self) -> Option<Cut> {
        let cut = self.at_sync.take();
        self.forwards(cut)
    }

    /// The group has agreed that `set` is complete. Whoever joined has all that was agreed before its last sync, which no `SyncDone` follows. Where
    /// nobody joined, a sync that was agreed will never be done, and must not keep the log from being cut otherwise: a witness's would
    /// grow until it is full, and then the group hangs when it is needed.
    #[must_use]
    pub fn complete_agreed(&mut self, set: ReplicaSet) -> Option<Cut> {
        if set.len() < 2 && self.bugs.has(Bug::KeepsBrokenCut) {
            return None;
        }
        let cut = self.at_sync.take().filter(|_| set.len() > 1);
        self.forwards(cut)
    }

    /// The sync that was agreed last will never be done: the log is cut at the next one.
    pub fn sync_lost(&mut self) {
        if !self.bugs.has(Bug::KeepsBrokenCut) {
            self.at_sync = None;
        }
    }

    /// An entry of so many bytes was applied, after which the log says this of the VM. `limits`: the entries and bytes that the log may hold.
    #[must_use]
    pub fn applied(
        &mut self,
        index: Index,
        entry_bytes: usize,
        limits: (usize, usize),
        state: &AgreedState,
    ) -> Option<Cut> {
        // A backup needs the log, or a sync under way does (invariant 1).
        if state.complete.len() > 1 || self.at_sync.is_some() {
            return None;
        }
        self.applied_alone(index, entry_bytes, limits, state)
    }

    /// The same where no member needs the log of another (programs: who misses inputs gets a snapshot).
    #[must_use]
    pub fn applied_alone(
        &mut self,
        index: Index,
        entry_bytes: usize,
        limits: (usize, usize),
        state: &AgreedState,
    ) -> Option<Cut> {
        self.bytes_since += entry_bytes;
        let from = self.behind.as_ref().map_or(self.cut_at, |cut| cut.through);
        let entries = index.0.saturating_sub(from.0) as usize;
        if entries < limits.0 / LOG_PARTS && self.bytes_since < limits.1 / LOG_PARTS {
            return None;
        }
        self.bytes_since = 0;
        let cut = self.behind.replace(Cut::at(index, state));
        self.forwards(cut)
    }

    /// A snapshot stands for all entries up to `index` (invariant 3).
    pub fn installed(&mut self, index: Index) {
        *self = Self::new(index).with_bugs(self.bugs);
    }

    /// Invariant 3.
    fn forwards(&mut self, cut: Option<Cut>) -> Option<Cut> {
        let cut = cut.filter(|cut| cut.through > self.cut_at)?;
        self.cut_at = cut.through;
        Some(cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::ReplicaId;

    const LIMITS: (usize, usize) = (65_536, 64 << 20);

    fn alone() -> AgreedState {
        AgreedState {
            complete: ReplicaSet::one(ReplicaId(0)),
            ..AgreedState::default()
        }
    }

    fn protected() -> AgreedState {
        AgreedState {
            complete: alone().complete.with(ReplicaId(1)),
            ..AgreedState::default()
        }
    }

    /// What is not cut is never more than two parts of eight, by bytes as by entries, and is cut a part behind what is applied.
    #[test]
    fn a_log_that_no_sync_cuts_is_cut_by_bytes_and_by_entries() {
        for (entry_bytes, most_entries) in [(400_000, 45), (60, 16_384)] {
            let mut log = LogCut::new(Index(0));
            let (mut cuts, mut cut_at) = (0, 0);
            for index in 1..100_000 {
                if let Some(cut) = log.applied(Index(index), entry_bytes, LIMITS, &alone()) {
                    assert!(cut.through.0 > cut_at && index - cut.through.0 >= most_entries / 3);
                    cut_at = cut.through.0;
                    cuts += 1;
                }
                let uncut = index - cut_at;
                assert!(uncut <= most_entries, "{uncut} entries of {entry_bytes} bytes");
            }
            assert!(cuts > 5, "{cuts} cuts");
        }
    }

    #[test]
    fn a_sync_cuts_the_log_where_it_was_agreed_and_only_when_it_is_done() {
        let mut log = LogCut::new(Index(3));
        log.sync_agreed(Index(7), &protected());
        for index in 8..200 {
            assert_eq!(log.applied(Index(index), 1 << 20, LIMITS, &protected()), None);
        }
        assert_eq!(log.sync_done(), Some(Cut::at(Index(7), &protected())));
        assert_eq!(log.sync_done(), None, "once");
    }

    #[test]
    fn a_join_cuts_it_there_too_and_a_lost_backup_forgets_a_broken_sync() {
        let mut log = LogCut::new(Index(0));
        log.sync_agreed(Index(7), &alone());
        let joined = log.complete_agreed(protected().complete);
        assert_eq!(joined, Some(Cut::at(Index(7), &alone())));
        // Left in place a broken one would keep the log from being cut for good.
        for lose in [(|log: &mut LogCut| log.sync_lost()) as fn(&mut LogCut), |log| {
            assert_eq!(log.complete_agreed(alone().complete), None)
        }] {
            log.sync_agreed(Index(9), &protected());
            lose(&mut log);
            let cuts = (10..300).filter_map(|index| log.applied(Index(index), 1 << 20, LIMITS, &alone()));
            assert!(cuts.count() > 5);
            log.installed(Index(7));
        }
    }

    /// A host that was declared dead gets a snapshot of before what it had applied, of another history.
    #[test]
    fn nothing_of_another_history_is_left_when_a_snapshot_comes() {
        let mut log = LogCut::new(Index(0));
        for index in 1..100 {
            let _cut = log.applied(Index(index), 1 << 20, LIMITS, &alone());
        }
        log.sync_agreed(Index(100), &protected());
        log.installed(Index(50));
        assert_eq!(log.sync_done(), None);
        let other = AgreedState {
            complete: ReplicaSet::one(ReplicaId(1)),
            ..AgreedState::default()
        };
        let cut = (51..100).find_map(|index| log.applied(Index(index), 1 << 20, LIMITS, &other));
        let cut = cut.expect("a cut, behind where the last history was cut");
        assert_eq!(cut, Cut::at(cut.through, &other));
        assert!(cut.through > Index(50) && cut.through < Index(70), "{cut:?}");
    }
}
