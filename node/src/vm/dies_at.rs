//! For tests: a daemon that dies at a chosen line of a sync, as if its host did: SIGKILL by its own hand.
//!
//! Decides: at which lines. Flow: `dunlin inject VM die-at=LINE` (refused without `DUNLIN_FAULTS=1`) -> a session's thread
//! comes to that line. Not here: what must be left of the VM (the scenarios).

use rustix::process::{Signal, getpid, kill_process};
use std::sync::atomic::{AtomicU8, Ordering};

/// A line of a sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Primary: the VM stands, nothing is saved yet.
    PrimaryStopped = 1,
    /// Primary: all is captured, the VM still stands.
    PrimaryCaptured,
    /// Backup: the sync is acknowledged, and not applied.
    BackupAcknowledged,
    /// Backup: the memory is the next epoch's, the devices are still the last one's.
    BackupHalfApplied,
}

/// What follows `die-at=`, and which line it is.
const LINES: [(&str, Line); 4] = [
    ("primary-stopped", Line::PrimaryStopped),
    ("primary-captured", Line::PrimaryCaptured),
    ("backup-acknowledged", Line::BackupAcknowledged),
    ("backup-half-applied", Line::BackupHalfApplied),
];

/// The line that was chosen, if any.
#[derive(Debug, Default)]
pub struct DiesAt(AtomicU8);

impl DiesAt {
    /// The line that a fault names; none if it is another kind of fault.
    pub fn line(fault: &str) -> Option<Result<Line, String>> {
        let name = fault.strip_prefix("die-at=")?;
        let known = LINES.iter().find(|(known, _)| *known == name);
        Some(known.map(|(_, line)| *line).ok_or_else(|| {
            let names: Vec<&str> = LINES.iter().map(|(name, _)| *name).collect();
            format!("'{name}' is no line to die at; there are {}", names.join(", "))
        }))
    }

    /// Whoever comes to this line next dies there.
    pub fn choose(&self, line: Line) {
        self.0.store(line as u8, Ordering::Relaxed);
    }

    /// This is the line.
    pub fn pass(&self, line: Line) {
        if self.0.load(Ordering::Relaxed) == line as u8 {
            // It cannot fail: the process is this one.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_a_line_or_none() {
        assert_eq!(
            DiesAt::line("die-at=backup-acknowledged"),
            Some(Ok(Line::BackupAcknowledged))
        );
        assert!(DiesAt::line("die-at=noon").is_some_and(|line| line.is_err()));
        assert_eq!(DiesAt::line("write-error=on"), None);
        // Nothing happens at a line that was not chosen.
        let dies_at = DiesAt::default();
        dies_at.choose(Line::PrimaryStopped);
        dies_at.pass(Line::BackupHalfApplied);
    }
}
