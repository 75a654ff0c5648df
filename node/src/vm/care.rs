//! When both hosts' disks are compared by themselves, and what the last comparison found.
//!
//! Flow: each turn of the loop -> [`Care::turn`] says whether one is due -> a thread compares (`verification`), asking the [`Gate`]
//! before each piece -> [`Care::ended`]; a file in the VM's folder keeps the result over a restart.
//!
//! Invariants:
//! 1. None begins, and no piece of one is asked for, while no backup follows or a sync is under way: those need the link and the disk.
//! 2. The loop never waits for any of it.
//! 3. A comparison that syncs leave no room for ends, and is tried again later.
//!
//! Not here: which bytes are compared (the guest's `disk::verify`).

use super::verification::Compared;
use dunlin_api::{Progress, Verified, VerifyStatus};
use std::fs::File;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

const FILE: &str = "verified.json";
/// A VM is protected for so long first, or for as long as lies between two comparisons; and so long after one that was not whole.
const CALM_MS: u64 = 600_000;
/// How long a comparison waits for a moment without a sync.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it looks for one.
const LOOK: Duration = Duration::from_millis(1);

/// What the loop sees of its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// No backup follows.
    None,
    /// In this session one follows, and a sync is under way.
    Busy(u64),
    /// In this session one follows.
    Free(u64),
}

/// What a comparison asks before each piece.
pub struct Gate {
    session: u64,
    state: AtomicU8,
    done: AtomicU64,
    total: AtomicU64,
}

const FREE: u8 = 0;
const BUSY: u8 = 1;
const OVER: u8 = 2;

impl Gate {
    fn new(session: u64) -> Self {
        Self {
            session,
            state: AtomicU8::new(FREE),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
        }
    }

    fn set(&self, link: Link) {
        let state = match link {
            Link::Free(session) if session == self.session => FREE,
            Link::Busy(session) if session == self.session => BUSY,
            _ => OVER,
        };
        self.state.store(state, Ordering::Relaxed);
    }

    /// Waits for a moment without a sync (invariant 1), but not for ever (invariant 3).
    pub fn wait(&self, progress: &Progress) -> ControlFlow<()> {
        self.done.store(progress.done, Ordering::Relaxed);
        self.total.store(progress.total, Ordering::Relaxed);
        let began = Instant::now();
        loop {
            match self.state.load(Ordering::Relaxed) {
                FREE => return ControlFlow::Continue(()),
                BUSY if began.elapsed() < PATIENCE => std::thread::sleep(LOOK),
                _ => return ControlFlow::Break(()),
            }
        }
    }
}

/// One VM's schedule on this host.
pub struct Care {
    path: PathBuf,
    every_ms: Option<u64>,
    /// Since when time counts, until something was compared here.
    known_since_ms: u64,
    last: Option<Verified>,
    problem: Option<String>,
    /// Not before this: what follows of how long the VM has been protected, or of a comparison that was not whole.
    calm_at_ms: Option<(u64, u64)>,
    running: Option<Arc<Gate>>,
}

impl Care {
    /// `folder` is the VM's; `every` is none for a VM without disks, too.
    pub fn open(folder: &Path, every: Option<Duration>, now_ms: u64) -> Self {
        let path = folder.join(FILE);
        let last = std::fs::read(&path)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok());
        // The VM's folder is made when it is started for the first time: a host that restarts daily does not begin to count anew.
        let made = std::fs::metadata(folder.join("vm.toml")).and_then(|meta| meta.modified());
        let made_ms = made
            .ok()
            .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
            .map_or(now_ms, |since| since.as_millis() as u64);
        Self {
            path,
            every_ms: every.map(|every| every.as_millis() as u64),
            known_since_ms: made_ms.min(now_ms),
            last,
            problem: None,
            calm_at_ms: None,
            running: None,
        }
    }

    fn due_ms(&self, now_ms: u64) -> Option<u64> {
        let every_ms = self.every_ms?;
        let (_, calm_at_ms) = self.calm_at_ms?;
        // A clock that was put back since does not put the next one off.
        let last_ms = self
            .last
            .as_ref()
            .map_or(self.known_since_ms, |last| last.ended_ms);
        Some((last_ms.min(now_ms) + every_ms).max(calm_at_ms))
    }

    /// The loop has turned: whether a comparison is to begin now.
    pub fn turn(&mut self, link: Link, now_ms: u64) -> bool {
        if let Some(running) = &self.running {
            running.set(link);
        }
        let Some(every_ms) = self.every_ms else {
            return false;
        };
        let session = match link {
            Link::None => {
                self.calm_at_ms = None;
                return false;
            }
            Link::Busy(session) | Link::Free(session) => session,
        };
        if self.calm_at_ms.is_none_or(|(known, _)| known != session) {
            self.calm_at_ms = Some((session, now_ms + every_ms.min(CALM_MS)));
        }
        let due = self.due_ms(now_ms).is_some_and(|due_ms| now_ms >= due_ms);
        due && matches!(link, Link::Free(_)) && self.running.is_none()
    }

    /// A comparison begins in that session.
    pub fn begins(&mut self, session: u64) -> Arc<Gate> {
        let gate = Arc::new(Gate::new(session));
        self.running = Some(gate.clone());
        gate
    }

    /// Whether one of the schedule's is under way.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// One has ended; `scheduled` if it was the schedule's.
    pub fn ended(&mut self, compared: Compared, scheduled: bool, now_ms: u64) {
        if scheduled {
            self.running = None;
            if let (Some(calm), Some(every_ms)) = (&mut self.calm_at_ms, self.every_ms) {
                calm.1 = now_ms + every_ms.min(CALM_MS);
            }
        }
        match compared {
            Compared::Whole(verified) => {
                self.problem = None;
                self.last = Some(verified);
            }
            Compared::Not(why) => self.problem = Some(why),
        }
    }

    /// Where a whole comparison is to be kept ([`keep`]).
    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// For `dunlin status`.
    pub fn status(&self, now_ms: u64) -> VerifyStatus {
        let under_way = self.running.as_ref().map(|gate| Progress {
            what: "comparing disks".into(),
            done: gate.done.load(Ordering::Relaxed),
            total: gate.total.load(Ordering::Relaxed),
        });
        VerifyStatus {
            every_s: self.every_ms.map(|every_ms| every_ms / 1000),
            due_ms: self.due_ms(now_ms),
            under_way,
            last: self.last.clone(),
            problem: self.problem.clone(),
        }
    }
}

/// So that it outlives the daemon. Called on the comparison's own thread (invariant 2).
pub fn keep(path: &Path, verified: &Verified) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(verified)?)?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    fn whole(ended_ms: u64, differing: u64) -> Compared {
        Compared::Whole(Verified {
            ended_ms,
            differing,
            scheduled: true,
            ..Verified::default()
        })
    }

    fn daily(folder: &Path, now_ms: u64) -> Care {
        Care::open(folder, Some(Duration::from_secs(86_400)), now_ms)
    }

    #[test]
    fn one_is_due_a_day_after_the_last_when_the_vm_has_been_protected_for_a_while_and_no_sync_is_under_way() {
        let folder = tempfile::tempdir().expect("a folder");
        let start = 1_000_000 * HOUR_MS;
        let mut care = daily(folder.path(), start);
        assert!(
            !care.turn(Link::Free(7), start),
            "a VM that has just been started"
        );
        assert_eq!(care.status(start).due_ms, Some(start + 24 * HOUR_MS));
        let day = start + 24 * HOUR_MS;
        assert!(!care.turn(Link::Free(7), day - 1));
        assert!(!care.turn(Link::Busy(7), day), "a sync is under way");
        assert!(!care.turn(Link::None, day), "not protected");
        assert_eq!(care.status(day).due_ms, None);
        // Protected again, in another session: not at once.
        assert!(!care.turn(Link::Free(8), day + 1));
        assert!(!care.turn(Link::Free(8), day + CALM_MS));
        assert!(care.turn(Link::Free(8), day + 1 + CALM_MS));
        let _gate = care.begins(8);
        assert!(!care.turn(Link::Free(8), day + 2 + CALM_MS), "one at a time");
        let ended = day + HOUR_MS;
        care.ended(whole(ended, 2), true, ended);
        assert_eq!(care.status(ended).last.map(|last| last.differing), Some(2));
        assert!(!care.turn(Link::Free(8), ended + 23 * HOUR_MS));
        assert!(care.turn(Link::Free(8), ended + 24 * HOUR_MS));
        // One that was not whole is tried again soon, and not at once; what was found before stays.
        let _gate = care.begins(8);
        let broken = ended + 25 * HOUR_MS;
        care.ended(Compared::Not("the backup is gone".into()), true, broken);
        assert!(!care.turn(Link::Free(8), broken + 1));
        assert!(care.turn(Link::Free(8), broken + CALM_MS));
        let status = care.status(broken);
        assert_eq!(status.problem.as_deref(), Some("the backup is gone"));
        assert_eq!(status.last.map(|last| last.differing), Some(2));
        // A person's counts as well.
        care.ended(whole(broken + CALM_MS, 0), false, broken + CALM_MS);
        assert!(!care.turn(Link::Free(8), broken + 2 * CALM_MS));
    }

    #[test]
    fn what_was_found_outlives_the_daemon_and_never_means_never() {
        let folder = tempfile::tempdir().expect("a folder");
        let start = 1_000_000 * HOUR_MS;
        let care = daily(folder.path(), start);
        let Compared::Whole(verified) = whole(start, 3) else {
            unreachable!()
        };
        keep(&care.path(), &verified).expect("it is kept");
        let mut again = daily(folder.path(), start + 23 * HOUR_MS);
        assert_eq!(again.status(start).last, Some(verified));
        assert!(!again.turn(Link::Free(1), start + 23 * HOUR_MS));
        assert!(again.turn(Link::Free(1), start + 24 * HOUR_MS));
        // A clock that was put back by years is believed.
        let mut back = daily(folder.path(), start / 2);
        assert!(!back.turn(Link::Free(1), start / 2));
        assert_eq!(back.due_ms(start / 2), Some(start / 2 + 24 * HOUR_MS));
        let mut never = Care::open(folder.path(), None, start);
        assert!(!never.turn(Link::Free(1), start));
        assert!(!never.turn(Link::Free(1), u64::MAX / 2));
        assert_eq!(never.status(start).due_ms, None);
    }

    #[test]
    fn a_comparison_waits_while_a_sync_is_under_way_and_ends_with_its_session() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut care = daily(folder.path(), 0);
        let gate = care.begins(4);
        let progress = Progress {
            what: "comparing disks".into(),
            done: 3,
            total: 9,
        };
        assert!(gate.wait(&progress).is_continue());
        assert_eq!(care.status(0).under_way, Some(progress.clone()));
        care.turn(Link::Busy(4), 1);
        let waits = std::thread::spawn({
            let (gate, progress) = (gate.clone(), progress.clone());
            move || gate.wait(&progress)
        });
        std::thread::sleep(Duration::from_millis(30));
        assert!(!waits.is_finished(), "a sync is under way");
        care.turn(Link::Free(4), 2);
        assert!(waits.join().expect("it waited").is_continue());
        // Another session is not the one that is compared in.
        care.turn(Link::Free(5), 3);
        assert!(gate.wait(&progress).is_break());
        care.turn(Link::Free(4), 4);
        care.turn(Link::None, 5);
        assert!(gate.wait(&progress).is_break());
    }
}
