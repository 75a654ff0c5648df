//! What a loop shows of itself.

use super::state::primary::PrimaryRole;
use super::state::{Role, VmLoop};
use dunlin_api::{State, SyncFigures};
use dunlin_core::agreed::Life;
use std::collections::VecDeque;

/// How many syncs the medians are over.
const RECENT: usize = 1000;

/// One more sync; the oldest goes.
pub fn remember(recent: &mut VecDeque<SyncFigures>, figures: SyncFigures) {
    recent.push_back(figures);
    if recent.len() > RECENT {
        recent.pop_front();
    }
}

/// The median of each figure by itself.
#[must_use]
pub fn median(recent: &VecDeque<SyncFigures>) -> SyncFigures {
    let of = |figure: fn(&SyncFigures) -> u64| {
        let mut all: Vec<u64> = recent.iter().map(figure).collect();
        if all.is_empty() {
            return 0;
        }
        let middle = all.len() / 2;
        *all.select_nth_unstable(middle).1
    };
    SyncFigures {
        pause_us: of(|f| f.pause_us),
        stop_us: of(|f| f.stop_us),
        save_us: of(|f| f.save_us),
        scan_us: of(|f| f.scan_us),
        wait_us: of(|f| f.wait_us),
        copy_us: of(|f| f.copy_us),
        cont_us: of(|f| f.cont_us),
        hash_us: of(|f| f.hash_us),
        total_us: of(|f| f.total_us),
        interval_us: of(|f| f.interval_us),
        load_us: of(|f| f.load_us),
        dirty_primary: of(|f| f.dirty_primary),
        dirty_backup: of(|f| f.dirty_backup),
        united: of(|f| f.united),
        divergent: of(|f| f.divergent),
        pre_copied: of(|f| f.pre_copied),
        bytes: of(|f| f.bytes),
        device_bytes: of(|f| f.device_bytes),
        list_hashes: of(|f| f.list_hashes),
        tree_hashes: of(|f| f.tree_hashes),
        tree_rounds: of(|f| f.tree_rounds),
    }
}

impl VmLoop {
    /// This host's part, how the VM is here, and what a primary has.
    pub(super) fn describe(&self) -> (dunlin_api::Role, State, Option<&PrimaryRole>) {
        match &self.role {
            Role::Primary(primary) => (
                dunlin_api::Role::Primary,
                self.primary_state(primary),
                Some(primary),
            ),
            Role::Backup(backup) => (dunlin_api::Role::Backup, backup.state(), None),
            Role::None if self.agreement.state().life == Life::Down => {
                (dunlin_api::Role::None, State::Stopped, None)
            }
            Role::None if self.witness => (dunlin_api::Role::Witness, State::Waiting, None),
            Role::None => (dunlin_api::Role::None, State::Waiting, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_the_newest_syncs() {
        let mut recent = VecDeque::new();
        for pause_us in 0..3 * RECENT as u64 {
            let figures = SyncFigures {
                pause_us,
                ..SyncFigures::default()
            };
            remember(&mut recent, figures);
            assert!(recent.len() <= RECENT);
        }
        assert_eq!(median(&recent).pause_us, 5 * RECENT as u64 / 2);
    }
}
