//! Where in the protocol tests let a fault happen. Nothing is decided here.

/// A place in the protocol that tests know by name: a driver may let a fault happen there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Point {
    /// Primary: the VM is to be stopped for a switchover, and is not yet.
    SwitchoverBegins,
    /// Primary: all is captured, the VM still stands.
    Captured,
    /// The same, or the acknowledgement, of a sync after which the backup's VM begins to run, or no longer does.
    ModeChanges,
    /// Primary: the backup's acknowledgement is told to the loop.
    Released,
    /// Backup: its VM is to be stopped, and is not yet.
    BackupStops,
    /// Backup: the sync is acknowledged, and not applied.
    Acknowledged,
}
