//! What it decides: what holds from one sync to the next, and how one epoch follows another, on both sides.
//!
//! Flow: [`Rules`] say how inputs go in, whether the backup's VM runs, and what lets output leave. [`primary::PrimaryEpochs`] and
//! [`backup::BackupEpochs`] say which rules hold now: the loop tells them what was agreed, what the session has reported and how
//! elections went, and does what they return. A sync ends an epoch, and with it its rules.
//!
//! Invariants, asserted in release builds too (each side names its own):
//! 1. A backup whose VM runs gets agreed inputs: two VMs that run on other inputs are two VMs.
//! 2. Output leaves because the backup has said the same only where the backup's VM runs.
//! 3. Connections are acknowledged before their output may leave only where the backup's VM does not run.
//!
//! Source: Remus (NSDI'08), COLO (SoCC'13), PLOVER (NSDI'18), VEE'12 for each of the three ways out. Not here: who may speak at all
//! (`output::gate`, the group), the work of a sync (`replica::sync`), when one is due (`sync::trigger`), which mode pays
//! (`sync::change_over`).

pub mod backup;
pub mod primary;
#[cfg(test)]
mod tests;

use crate::policy::{Mode, Policy};

/// How what the network sends reaches the VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Inputs {
    /// Through the agreed log: both VMs get the same, in the same order.
    Agreed,
    /// At once. The backup executes nothing; what leaves waits for a sync that has its inputs' effects in it; and a client sends
    /// again what was lost with the primary.
    Direct,
}

/// What the backup's VM does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum BackupVm {
    /// It runs on the agreed inputs.
    Runs,
    /// It holds the last sync's state.
    Holds,
}

/// What lets output leave while a backup is followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Release {
    /// The backup's VM has said the same; what it has not said waits for the sync.
    Match,
    /// The sync of its epoch is acknowledged.
    Sync,
    /// As `Sync`, and the VM's connections are acknowledged before that by this host's shadow sockets.
    Speculative,
}

/// What holds in one epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Rules {
    inputs: Inputs,
    backup: BackupVm,
    release: Release,
}

impl Rules {
    /// What a policy's mode means; `speculative` as the VM's file says.
    #[must_use]
    pub fn of(mode: Mode, speculative: bool) -> Self {
        let (inputs, backup) = match mode.backup_runs() {
            true => (Inputs::Agreed, BackupVm::Runs),
            false => (Inputs::Direct, BackupVm::Holds),
        };
        let release = match mode {
            Mode::Match => Release::Match,
            Mode::Passive if speculative => Release::Speculative,
            Mode::Active | Mode::Passive => Release::Sync,
        };
        Self::new(inputs, backup, release)
    }

    /// In the epoch after a join; and, for inputs, where nobody follows.
    #[must_use]
    pub fn first(policy: Policy, speculative: bool) -> Self {
        // Connections that are ahead of their clients live on from a time without a backup.
        let mode = if speculative {
            Mode::Passive
        } else {
            policy.first_mode()
        };
        Self::of(mode, speculative)
    }

    /// Whether, at the sync after which `next` holds, no connection may be ahead of its client.
    #[must_use]
    pub fn needs_all_held(self, next: Self) -> bool {
        self.release == Release::Speculative && next.backup_runs()
    }

    fn new(inputs: Inputs, backup: BackupVm, release: Release) -> Self {
        let runs = backup == BackupVm::Runs;
        assert!(
            !runs || inputs == Inputs::Agreed,
            "invariant 1: a VM that runs gets agreed inputs"
        );
        assert!(
            runs || release != Release::Match,
            "invariant 2: a VM that does not run says nothing"
        );
        assert!(
            !runs || release != Release::Speculative,
            "invariant 3: speculation and a VM that runs"
        );
        Self {
            inputs,
            backup,
            release,
        }
    }

    /// How inputs reach the VM.
    #[must_use]
    pub fn inputs(self) -> Inputs {
        self.inputs
    }

    /// Whether the backup's VM runs.
    #[must_use]
    pub fn backup_runs(self) -> bool {
        self.backup == BackupVm::Runs
    }

    /// What lets output leave.
    #[must_use]
    pub fn release(self) -> Release {
        self.release
    }

    /// Whether the two VMs' outputs are compared.
    #[must_use]
    pub fn compares(self) -> bool {
        self.release == Release::Match
    }

    /// The mode's number on the wire, and its name for people.
    #[must_use]
    pub fn mode(self) -> Mode {
        match (self.backup, self.release) {
            (BackupVm::Runs, Release::Match) => Mode::Match,
            (BackupVm::Runs, _) => Mode::Active,
            (BackupVm::Holds, _) => Mode::Passive,
        }
    }
}
