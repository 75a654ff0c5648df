//! What the primary's VM does, as far as a session has a hand in it: invariants 2 to 4, asserted; and how long it stands (invariant 5).

use super::{Effect, Wait};

/// How long the VM may stand, and has stood.
#[derive(Debug)]
pub(super) struct Clock {
    bound_us: u64,
    until_us: Option<u64>,
    late: bool,
}

impl Clock {
    /// Whoever asks for audits has all of memory hashed while the VM stands: only each wait has a bound then.
    pub(super) fn new(audit: bool) -> Self {
        Self {
            bound_us: if audit {
                u64::MAX
            } else {
                Wait::VmStands.bound_us()
            },
            until_us: None,
            late: false,
        }
    }

    /// Before each event and after it.
    pub(super) fn looks(&mut self, now_us: u64, vm: Vm) {
        self.until_us = match self.until_us {
            _ if !vm.stands() => None,
            None => Some(now_us.saturating_add(self.bound_us)),
            known => known,
        };
        self.late = self.until_us.is_some_and(|until_us| now_us >= until_us);
    }

    /// When it is to run on at the latest.
    pub(super) fn until_us(&self) -> u64 {
        self.until_us.unwrap_or(u64::MAX)
    }

    /// Whether it should run by now.
    pub(super) fn is_late(&self) -> bool {
        self.late
    }
}

/// The VM of this host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Vm {
    #[default]
    Runs,
    /// Stopped by this session, and the line is not drawn.
    Stands,
    /// It stands, and its last frames of the epoch are taken.
    Drawn,
    /// The backup's by now.
    HandedOver,
}

impl Vm {
    /// It is stopped; `backup_stands`, or does not run in this epoch (invariant 3).
    pub(super) fn stop(&mut self, backup_stands: bool) {
        assert!(backup_stands, "the VM is stopped while the backup's runs");
        assert_eq!(*self, Self::Runs, "a VM that stands is stopped");
        *self = Self::Stands;
    }

    /// The loop has its last frames of the epoch.
    pub(super) fn line_drawn(&mut self) {
        assert_eq!(*self, Self::Stands, "a line is drawn where no VM stands");
        *self = Self::Drawn;
    }

    /// Invariant 2.
    pub(super) fn resume(&mut self) {
        assert_eq!(*self, Self::Drawn, "the VM resumes before the line is drawn");
        *self = Self::Runs;
    }

    /// The group was asked to follow the backup.
    pub(super) fn handed_over(&mut self) {
        assert_eq!(*self, Self::Drawn, "a VM that runs is handed over");
        *self = Self::HandedOver;
    }

    /// Whether the session owes it to let it run on (invariant 4).
    pub(super) fn stands(self) -> bool {
        matches!(self, Self::Stands | Self::Drawn)
    }

    /// The sync is broken off.
    pub(super) fn run_on(&mut self) {
        *self = Self::Runs;
    }

    /// Nothing that is done contradicts the VM's state, as it is afterwards.
    pub(super) fn check(self, effect: &Effect) {
        match effect {
            Effect::Stop | Effect::Save { .. } => {
                assert_eq!(self, Self::Stands, "{effect:?} of a VM that runs");
            }
            Effect::End { .. } => assert!(!self.stands(), "a session ends and leaves the VM standing"),
            _ => {}
        }
    }
}
