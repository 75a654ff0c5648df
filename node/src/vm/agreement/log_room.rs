//! Room in the log: where it is cut, and what is said when it is full (`agreement`'s invariant 4).

use super::Agreement;
use crate::vm::nics::MOST_BATCH_BYTES;
use crate::vm::run::{Role, VmLoop};
use bytes::Bytes;
use dunlin_api::EventKind;
use dunlin_core::agreed::ReplicaSet;
use dunlin_core::units::Index;
use dunlin_core::wire::agreed;

/// Where no sync cuts the log, each part of its limit does.
const LOG_PARTS: usize = 8;
/// A log that is full and has room in turn is told of once in this time.
const QUIET_US: u64 = 60_000_000;

impl Agreement {
    /// Where the log may be cut now that `set` is complete: whoever joined has all that was agreed before its last sync, which no
    /// `SyncDone` follows. Where nobody joined, a sync that was agreed will never be done, and must not keep the log from
    /// being cut otherwise: a witness's would grow until it is full, and then the group hangs when it is needed.
    pub(super) fn cut_at_join(&mut self, set: ReplicaSet) -> Option<(Index, Bytes)> {
        self.cut.take().filter(|_| set.len() > 1)
    }

    /// An entry of so many bytes was applied, and no backup needs the log. Where it may be cut now, and the state there: not at
    /// the newest entry, which the other members may not have got yet, but where it was an eighth of its limit ago.
    pub(in crate::vm) fn cut_alone(
        &mut self,
        entry_bytes: usize,
        limits: (usize, usize),
    ) -> Option<(Index, Bytes)> {
        self.since_mark_bytes += entry_bytes;
        let from = self.mark.as_ref().map_or(self.cut_at, |(index, _)| *index);
        let entries = self.applied.0.saturating_sub(from.0) as usize;
        if entries < limits.0 / LOG_PARTS && self.since_mark_bytes < limits.1 / LOG_PARTS {
            return None;
        }
        self.since_mark_bytes = 0;
        self.mark
            .replace((self.applied, agreed::encode_state(self.state())))
    }
}

impl VmLoop {
    /// Whether the agreed log is half full: a sync cuts it.
    pub(in crate::vm) fn log_is_half_full(&self) -> bool {
        let (entries, bytes) = self.group.log_size();
        let (most_entries, most_bytes) = self.group.log_limits();
        bytes > most_bytes / 2 || entries > most_entries / 2
    }

    /// A follower whose log is full takes nothing more, and nobody hears of that: its leader takes it for slow. A leader whose
    /// log is full leaves to the network what the network has.
    pub(in crate::vm) fn tell_full_log(&mut self) {
        let leads = self.group.is_leader();
        let full = match leads {
            true => !self.group.has_input_room(MOST_BATCH_BYTES),
            false => self.group.log_is_full(),
        };
        if std::mem::replace(&mut self.agreement.log_is_full, full) == full {
            return;
        }
        let (now_us, told_us) = (self.now_us(), self.agreement.log_full_told_us);
        if !full {
            if std::mem::take(&mut self.agreement.log_full_is_last) {
                self.event(EventKind::LogRoom, "the log here has room again");
            }
            return;
        }
        self.agreement.log_waits += 1;
        if told_us.is_some_and(|told_us| now_us - told_us < QUIET_US) {
            return;
        }
        self.agreement.log_full_told_us = Some(now_us);
        self.agreement.log_full_is_last = true;
        let (entries, bytes) = self.group.log_size();
        let mib = bytes >> 20;
        let text = match leads {
            true => format!(
                "the log is full ({entries} entries, {mib} MiB): the network waits until a sync cuts it, or until its disk has \
                 taken it; 'memory.log_mib' in the VM's file sets its size"
            ),
            false => format!(
                "the log here is full ({entries} entries, {mib} MiB): this host agrees to nothing more until a sync cuts it; if \
                 none does ('log_entries' in 'dunlin status --json'), start this host's daemon again"
            ),
        };
        self.event(EventKind::LogFull, text);
    }

    pub(in crate::vm) fn cut_log(&mut self, index: Index, state: Bytes) {
        if index > self.agreement.cut_at {
            self.agreement.cut_at = index;
            self.group.truncate(index, state);
        }
    }

    /// Where no backup executes the inputs, applied entries are not needed again.
    pub(in crate::vm) fn cut_log_where_nothing_syncs(&mut self, entry_bytes: usize) {
        let nobody_else_needs_it = self.agreement.state().complete.len() < 2 && self.agreement.cut.is_none();
        let limits = self.group.log_limits();
        if nobody_else_needs_it && let Some((index, state)) = self.agreement.cut_alone(entry_bytes, limits) {
            self.cut_log(index, state);
        }
    }

    /// A broken sync will never be done: the log is cut at the next one.
    pub(in crate::vm) fn forget_cut(&mut self) {
        self.agreement.cut = None;
        match &mut self.role {
            Role::Primary(primary) => primary.let_log_go(),
            Role::Backup(backup) => backup.let_log_go(),
            Role::None => {}
        }
    }

    /// Whether a sync holds back the entries after it.
    pub(in crate::vm) fn log_is_held(&self) -> bool {
        match &self.role {
            Role::Primary(primary) => primary.epochs().holds_log(),
            Role::Backup(backup) => backup.epochs().holds_log(),
            Role::None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_core::agreed::AgreedState;
    use dunlin_core::replica::leadership::Leadership;
    use dunlin_core::units::ReplicaId;

    fn fresh() -> Agreement {
        let leadership = Leadership::new(ReplicaId(0), false, ReplicaId(0), AgreedState::default());
        Agreement::at(Index(0), leadership)
    }

    /// What is not cut is never more than two parts of eight, by bytes as by entries, and is cut a part behind what is applied.
    #[test]
    fn a_log_that_no_sync_cuts_is_cut_by_bytes_and_by_entries() {
        const LIMITS: (usize, usize) = (65_536, 64 << 20);
        for (entry_bytes, most_entries) in [(400_000, 45), (60, 16_384)] {
            let mut agreement = fresh();
            let mut cuts = 0;
            for index in 1..100_000 {
                agreement.applied = Index(index);
                if let Some((at, _)) = agreement.cut_alone(entry_bytes, LIMITS) {
                    assert!(
                        at > agreement.cut_at && index - at.0 >= most_entries / 3,
                        "{at:?} at {index}"
                    );
                    agreement.cut_at = at;
                    cuts += 1;
                }
                let uncut = index - agreement.cut_at.0;
                assert!(uncut <= most_entries, "{uncut} entries of {entry_bytes} bytes");
            }
            assert!(cuts > 5, "{cuts} cuts");
        }
    }

    #[test]
    fn a_join_cuts_the_log_where_its_sync_was_agreed_and_a_lost_backup_forgets_a_broken_one() {
        let alone = ReplicaSet::one(ReplicaId(1));
        let agreed_sync = || Agreement {
            cut: Some((Index(7), Bytes::new())),
            ..fresh()
        };
        let mut joined = agreed_sync();
        assert_eq!(
            joined.cut_at_join(alone.with(ReplicaId(2))),
            Some((Index(7), Bytes::new()))
        );
        assert!(joined.cut.is_none());
        // Left in place it would keep `cut_log_where_nothing_syncs` from its work for good.
        let mut lost = agreed_sync();
        assert_eq!(lost.cut_at_join(alone), None);
        assert!(lost.cut.is_none());
    }
}
