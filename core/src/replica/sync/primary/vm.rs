//! What the primary's VM does, as far as a session has a hand in it: invariants 2 to 4, asserted.

use super::Effect;

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
