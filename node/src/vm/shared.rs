//! What all VMs of a host share, and what a VM's loop shows to others.
//!
//! Not here: the loop's own state (`state`), the handle by which the daemon holds it (`vm`).

use super::fault_at::FaultAt;
use super::held_memory::HeldMemory;
use super::program::difference::Differences;
use super::remains::Remains;
use crate::config::{Cluster, VmConfig};
use crate::events::Events;
use crossbeam_channel::Sender;
use dunlin_api::{DiskStanding, SyncFigures, VmStatus};
use dunlin_core::units::Term;
use dunlin_fabric::link::Identity;
use dunlin_guest::Memory;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// A file in the VM's folder: this host is to become a member of a group that runs. It founds none, and believes nobody's
/// list of members but the group's.
pub const NEWCOMER: &str = "newcomer";

/// In a VM's folder: its file, with the hosts that it has now.
pub const FILE: &str = "vm.toml";

/// What all VMs of a host share.
pub struct Host {
    /// Its name.
    pub name: String,
    /// The cluster.
    pub cluster: Cluster,
    /// How it shows itself to others.
    pub identity: Identity,
    /// What happened here.
    pub events: Events,
    /// Where VMs are kept.
    pub state: PathBuf,
    /// Memory of VMs that it does not run.
    pub held_memory: HeldMemory,
    /// Told when a VM's loop has ended for good, with whether the VM is to be forgotten.
    pub ended: Sender<Ended>,
}

/// A loop has ended.
pub struct Ended {
    /// Which VM.
    pub vm: String,
    /// The VM was shut down: forget it.
    pub forget: bool,
}

/// What a loop shows to others.
#[derive(Default)]
pub(crate) struct Shared {
    pub(in crate::vm) status: Mutex<VmStatus>,
    /// Since the VM's hosts have moved.
    config: Mutex<Option<Arc<VmConfig>>>,
    pub(in crate::vm) recent_syncs: Mutex<VecDeque<SyncFigures>>,
    /// Where the copies of a bare program differed, and what they said there.
    pub(in crate::vm) differences: Mutex<Differences>,
    /// Held while the disks are opened: by a start of the VM, or to see how new they are.
    pub(in crate::vm) opening_disks: Mutex<()>,
    /// Of machines that have ended here.
    pub(in crate::vm) remains: Remains,
    pub(in crate::vm) fault_at: Arc<FaultAt>,
    /// The memory of the copy that a backup runs here, once it is whole.
    pub(in crate::vm) copy: Mutex<Weak<Memory>>,
    /// How new the disks can be at most.
    reign: Mutex<Option<DiskStanding>>,
    /// The VM has ended for good.
    pub(in crate::vm) over: AtomicBool,
    /// How often the loop has turned.
    pub(in crate::vm) turns: AtomicU64,
    /// It turns no more: it is over, and puts away what is left of it, which may wait for a disk.
    pub(in crate::vm) ends: AtomicBool,
}

impl Shared {
    pub(in crate::vm) fn config(&self) -> MutexGuard<'_, Option<Arc<VmConfig>>> {
        self.config.lock()
    }

    /// From now on the disks are those of a copy in that term: told before they are.
    pub(in crate::vm) fn reigns(&self, term: Term, primary: bool) {
        *self.reign.lock() = Some(DiskStanding {
            consistent: true,
            term: term.0,
            primary,
            epoch: u64::MAX,
        });
    }

    /// None of the disks here is newer than that; none, where no copy has had them since this daemon was started.
    pub(in crate::vm) fn disks_at_most(&self) -> Option<DiskStanding> {
        *self.reign.lock()
    }

    /// How often the loop has turned, as long as it is to turn.
    pub(in crate::vm) fn turned(&self) -> Option<u64> {
        let turns = self.turns.load(Ordering::Relaxed);
        (!self.ends.load(Ordering::Relaxed)).then_some(turns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_is_over_is_not_expected_to_turn() {
        let shared = Shared::default();
        shared.turns.store(7, Ordering::Relaxed);
        assert_eq!(shared.turned(), Some(7));
        shared.ends.store(true, Ordering::Relaxed);
        assert_eq!(shared.turned(), None);
    }
}
