//! For tests: a fault at a chosen line of a sync or a take-over. This daemon dies there, as if its host did (SIGKILL by its
//! own hand), stands still there until it is told to go on, fails there, or loses its office.
//!
//! Decides: at which lines. Flow: `dunlin inject VM die-at=LINE` (refused without `DUNLIN_FAULTS=1`) -> a session's thread, or
//! the VM's loop, comes to that line. Not here: what must be left of the VM (the scenarios).

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::process::{Signal, getpid, kill_process};
use std::sync::OnceLock;
use std::time::Duration;

/// A line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Primary: a turn of its loop.
    PrimaryLeads,
    /// Primary: the VM is to be stopped for a switchover, and is not yet.
    PrimarySwitchesOver,
    /// Primary: the VM stands, nothing is saved yet.
    PrimaryStopped,
    /// Primary: all is captured, the VM still stands.
    PrimaryCaptured,
    /// The same, of a sync after which the backup's VM begins to run, or no longer does.
    PrimaryChangesOver,
    /// Primary: the loop has let out what the backup's acknowledgement covers, and the session says nothing more before.
    PrimaryReleased,
    /// Backup: it would stand for election. It does not, until it is told to go on.
    BackupCampaigns,
    /// Backup: its VM is to be stopped, and is not yet.
    BackupStops,
    /// Backup: the sync is acknowledged, and not applied.
    BackupAcknowledged,
    /// The same, of a sync after which the backup's VM begins to run, or no longer does.
    BackupChangesOver,
    /// Backup: the memory is the next epoch's, the devices are still the last one's.
    BackupHalfApplied,
    /// Backup, elected: the VM here runs, and nobody has been told.
    BackupTookOver,
}

/// What happens there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Dies,
    Hangs,
    Fails,
    StepsDown,
}

/// A fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AtLine {
    line: Line,
    what: What,
}

/// What asks for each.
const FAULTS: [(&str, Line, What); 15] = [
    ("die-at=primary-stopped", Line::PrimaryStopped, What::Dies),
    ("die-at=primary-captured", Line::PrimaryCaptured, What::Dies),
    (
        "die-at=primary-changes-over",
        Line::PrimaryChangesOver,
        What::Dies,
    ),
    ("die-at=primary-released", Line::PrimaryReleased, What::Dies),
    ("die-at=backup-acknowledged", Line::BackupAcknowledged, What::Dies),
    ("die-at=backup-changes-over", Line::BackupChangesOver, What::Dies),
    ("die-at=backup-half-applied", Line::BackupHalfApplied, What::Dies),
    (
        "hang-at=primary-switches-over",
        Line::PrimarySwitchesOver,
        What::Hangs,
    ),
    ("hang-at=primary-captured", Line::PrimaryCaptured, What::Hangs),
    ("hang-at=backup-stops", Line::BackupStops, What::Hangs),
    (
        "hang-at=backup-acknowledged",
        Line::BackupAcknowledged,
        What::Hangs,
    ),
    (
        "fail-at=backup-half-applied",
        Line::BackupHalfApplied,
        What::Fails,
    ),
    ("fail-at=backup-campaigns", Line::BackupCampaigns, What::Fails),
    ("step-down-at=primary-leads", Line::PrimaryLeads, What::StepsDown),
    (
        "step-down-at=backup-took-over",
        Line::BackupTookOver,
        What::StepsDown,
    ),
];
/// Ends what hangs.
const GO_ON: &str = "go-on";
/// A test that forgets to say so has its answer by then.
const LONGEST_HANG: Duration = Duration::from_secs(60);

/// What a test asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asked {
    /// A fault at a line.
    At(AtLine),
    /// What hangs goes on.
    GoOn,
}

/// Tells the loop what hangs.
type Tell = Box<dyn Fn(String) + Send + Sync>;

/// What was asked for, if anything.
#[derive(Default)]
pub struct FaultAt {
    chosen: Mutex<Vec<AtLine>>,
    hung: Mutex<bool>,
    goes_on: Condvar,
    tells: OnceLock<Tell>,
}

/// Nothing fails like that.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no fault '{fault}'; there are {} and {}", known(), GO_ON)]
pub struct NoSuchFault {
    fault: String,
}

fn known() -> String {
    let known: Vec<&str> = FAULTS.iter().map(|(known, ..)| *known).collect();
    known.join(", ")
}

impl FaultAt {
    /// What these words ask for; none if they are of another kind of fault.
    pub fn asked(fault: &str) -> Option<Result<Asked, NoSuchFault>> {
        if fault == GO_ON {
            return Some(Ok(Asked::GoOn));
        }
        let (kind, _) = fault.split_once("-at=")?;
        let mut kinds = FAULTS.iter().filter_map(|(known, ..)| known.split_once("-at="));
        kinds.find(|(known, _)| *known == kind)?;
        let known = FAULTS.iter().find(|(known, ..)| *known == fault);
        let at = |&(_, line, what): &(&str, Line, What)| Asked::At(AtLine { line, what });
        Some(known.map(at).ok_or_else(|| NoSuchFault {
            fault: fault.to_owned(),
        }))
    }

    /// Who is told when something hangs.
    pub fn tell(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        // Once for each VM.
        let _ = self.tells.set(Box::new(tell));
    }

    fn chosen(&self) -> MutexGuard<'_, Vec<AtLine>> {
        self.chosen.lock()
    }

    fn hung(&self) -> MutexGuard<'_, bool> {
        self.hung.lock()
    }

    /// It is so when somebody comes to that line.
    pub fn choose(&self, asked: Asked) {
        match asked {
            Asked::At(fault) => self.chosen().push(fault),
            Asked::GoOn => {
                self.chosen().retain(|fault| fault.line != Line::BackupCampaigns);
                *self.hung() = false;
                self.goes_on.notify_all();
            }
        }
    }

    /// This is a line to die or to hang at.
    pub fn pass(&self, line: Line) {
        if self.happens(line, What::Dies) {
            // It cannot fail: the process is this one.
            let _ = kill_process(getpid(), Signal::KILL);
        }
        if self.happens(line, What::Hangs) {
            self.hang(line);
        }
    }

    fn hang(&self, line: Line) {
        let mut hung = self.hung();
        *hung = true;
        if let Some(tell) = self.tells.get() {
            tell(format!("it hangs: {line:?}"));
        }
        // Nothing more is done with the lock than to wait for it.
        self.goes_on.wait_while_for(&mut hung, |hung| *hung, LONGEST_HANG);
    }

    /// Whether what is done at this line is to fail; once.
    pub fn fails(&self, line: Line) -> bool {
        self.happens(line, What::Fails)
    }

    /// Whether this host is to lose its office at this line; once.
    pub fn steps_down(&self, line: Line) -> bool {
        self.happens(line, What::StepsDown)
    }

    /// Whether what is done at this line is to fail whenever somebody comes there.
    pub fn always_fails(&self, line: Line) -> bool {
        let what = What::Fails;
        self.chosen().contains(&AtLine { line, what })
    }

    /// Whether somebody is to die at this line: whoever is there before does nothing more.
    pub fn is_deadly(&self, line: Line) -> bool {
        let fault = AtLine {
            line,
            what: What::Dies,
        };
        self.chosen().contains(&fault)
    }

    fn happens(&self, line: Line, what: What) -> bool {
        let mut chosen = self.chosen();
        let at = chosen.iter().position(|fault| *fault == AtLine { line, what });
        at.map(|at| chosen.remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_a_line_or_none() {
        let expected = AtLine {
            line: Line::BackupAcknowledged,
            what: What::Dies,
        };
        assert_eq!(
            FaultAt::asked("die-at=backup-acknowledged"),
            Some(Ok(Asked::At(expected)))
        );
        assert_eq!(FaultAt::asked("go-on"), Some(Ok(Asked::GoOn)));
        assert!(FaultAt::asked("die-at=noon").is_some_and(|asked| asked.is_err()));
        assert_eq!(FaultAt::asked("write-error=on"), None);
        assert_eq!(FaultAt::asked("bytes-per-s=16777216"), None);
    }

    #[test]
    fn faults_happen_at_their_lines_and_once() {
        let fault_at = FaultAt::default();
        for fault in ["step-down-at=backup-took-over", "fail-at=backup-half-applied"] {
            fault_at.choose(
                FaultAt::asked(fault)
                    .expect("a fault at a line")
                    .expect("a known one"),
            );
        }
        // Nothing happens at a line that was not chosen, nor anything else at one that was.
        fault_at.pass(Line::BackupAcknowledged);
        fault_at.pass(Line::BackupHalfApplied);
        assert!(fault_at.steps_down(Line::BackupTookOver));
        assert!(!fault_at.steps_down(Line::BackupTookOver));
        assert!(fault_at.fails(Line::BackupHalfApplied));
    }

    #[test]
    fn what_hangs_goes_on_when_it_is_told_to() {
        let fault_at = std::sync::Arc::new(FaultAt::default());
        fault_at.choose(FaultAt::asked("hang-at=backup-stops").unwrap().unwrap());
        let (told, hears) = std::sync::mpsc::channel();
        fault_at.tell(move |text| told.send(text).expect("the test listens"));
        let hangs = fault_at.clone();
        let thread = std::thread::spawn(move || hangs.pass(Line::BackupStops));
        let heard = hears.recv_timeout(LONGEST_HANG);
        assert!(heard.is_ok_and(|heard| heard.contains("BackupStops")));
        fault_at.choose(Asked::GoOn);
        thread.join().unwrap();
    }
}
