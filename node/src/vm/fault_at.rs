//! For tests: a fault at a chosen line of a sync or a take-over: this daemon dies there, as if its host did (SIGKILL by its
//! own hand), or loses its office.
//!
//! Decides: at which lines. Flow: `dunlin inject VM die-at=LINE` (refused without `DUNLIN_FAULTS=1`) -> a session's thread, or
//! the VM's loop, comes to that line. Not here: what must be left of the VM (the scenarios).

use rustix::process::{Signal, getpid, kill_process};
use std::sync::atomic::{AtomicU8, Ordering};

/// A line, and what happens there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Primary: the VM stands, nothing is saved yet. It dies.
    PrimaryStopped = 1,
    /// Primary: all is captured, the VM still stands. It dies.
    PrimaryCaptured,
    /// The same, of a sync after which the backup's VM begins to run, or no longer does.
    PrimaryChangesOver,
    /// Backup: the sync is acknowledged, and not applied. It dies.
    BackupAcknowledged,
    /// The same, of a sync after which the backup's VM begins to run, or no longer does.
    BackupChangesOver,
    /// Backup: the memory is the next epoch's, the devices are still the last one's. It dies.
    BackupHalfApplied,
    /// Backup, elected: the VM here runs, and nobody has been told. It steps down.
    BackupTookOver,
}

/// What asks for each.
const FAULTS: [(&str, Line); 7] = [
    ("die-at=primary-stopped", Line::PrimaryStopped),
    ("die-at=primary-captured", Line::PrimaryCaptured),
    ("die-at=primary-changes-over", Line::PrimaryChangesOver),
    ("die-at=backup-acknowledged", Line::BackupAcknowledged),
    ("die-at=backup-changes-over", Line::BackupChangesOver),
    ("die-at=backup-half-applied", Line::BackupHalfApplied),
    ("step-down-at=backup-took-over", Line::BackupTookOver),
];

/// The line that was chosen, if any.
#[derive(Debug, Default)]
pub struct FaultAt(AtomicU8);

impl FaultAt {
    /// The line that a fault names; none if it is another kind of fault.
    pub fn line(fault: &str) -> Option<Result<Line, String>> {
        if !fault.starts_with("die-at=") && !fault.starts_with("step-down-at=") {
            return None;
        }
        let known = FAULTS.iter().find(|(known, _)| *known == fault);
        Some(known.map(|(_, line)| *line).ok_or_else(|| {
            let known: Vec<&str> = FAULTS.iter().map(|(known, _)| *known).collect();
            format!("there is no fault '{fault}'; there are {}", known.join(", "))
        }))
    }

    /// The fault happens when somebody comes to this line.
    pub fn choose(&self, line: Line) {
        self.0.store(line as u8, Ordering::Relaxed);
    }

    /// This is a line to die at.
    pub fn pass(&self, line: Line) {
        if self.is_here(line) {
            // It cannot fail: the process is this one.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }

    /// Whether the fault is to happen at this line; once.
    pub fn is_here(&self, line: Line) -> bool {
        let (chosen, none) = (line as u8, 0);
        self.0
            .compare_exchange(chosen, none, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_a_line_or_none() {
        assert_eq!(
            FaultAt::line("die-at=backup-acknowledged"),
            Some(Ok(Line::BackupAcknowledged))
        );
        assert!(FaultAt::line("die-at=noon").is_some_and(|line| line.is_err()));
        assert_eq!(FaultAt::line("write-error=on"), None);
    }

    #[test]
    fn a_fault_happens_at_its_line_and_once() {
        let fault_at = FaultAt::default();
        fault_at.choose(Line::BackupTookOver);
        // Nothing happens at a line that was not chosen.
        fault_at.pass(Line::BackupHalfApplied);
        assert!(fault_at.is_here(Line::BackupTookOver));
        assert!(!fault_at.is_here(Line::BackupTookOver));
    }
}
