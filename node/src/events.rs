//! What happened on this host, kept for `dunlin events`: the last ten thousand, over a daemon's restart too, and a way to wait for
//! more.
//!
//! The file is written by a thread of its own: whoever pushes never waits for the disk. A line that a crash tore, or that the disk
//! had no room for, is missing; the others count.

use crate::web::meaning::{self, Tone};
use crossbeam_channel::{Receiver, Sender, bounded};
use dunlin_api::{Event, EventKind};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const KEPT: usize = 10_000;
/// Lines in the file beyond which it is written anew with the last [`KEPT`].
const MOST_LINES: usize = 2 * KEPT;
/// Events that wait for a slow disk; what comes beyond is not kept over a restart.
const WAITING: usize = 4096;
const FILE: &str = "events.jsonl";

/// Milliseconds since 1970, by this host's clock.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// A time for a person, as `2026-01-31 23:59:59 UTC`.
pub fn utc(time_ms: u64) -> String {
    let seconds = time_ms / 1000;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days are counted from the 1st of March of the year 0, so that a leap day ends its year.
    let days = days + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// The host's events. Cheap to clone.
#[derive(Clone)]
pub struct Events {
    shared: Arc<Shared>,
}

struct Shared {
    host: String,
    log: Mutex<Log>,
    more: Condvar,
    to_disk: Option<Sender<Event>>,
}

#[derive(Default)]
struct Log {
    next_seq: u64,
    /// How often whoever follows was told to look at the status again.
    nudges: u64,
    kept: VecDeque<Event>,
}

impl Events {
    /// Those that are kept in the state folder, and what happens from now on.
    #[must_use]
    pub fn open(host: &str, state: &Path) -> Self {
        let path = state.join(FILE);
        let kept = read(&path);
        let log = Log {
            next_seq: kept.back().map_or(0, |event| event.seq + 1),
            nudges: 0,
            kept,
        };
        let (to_disk, events) = bounded(WAITING);
        let lines = log.kept.clone();
        let writer = std::thread::Builder::new()
            .name("events".into())
            .spawn(move || write_all(&path, lines, &events));
        let shared = Shared {
            host: host.to_owned(),
            log: Mutex::new(log),
            more: Condvar::new(),
            // Without the thread nothing is kept over a restart.
            to_disk: writer.ok().map(|_detached| to_disk),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // A panic elsewhere leaves the list whole: pushes are the last thing done under the lock.
        self.shared.log.lock()
    }

    /// Something happened to `vm`; it is also logged, as seriously as the kind is to be taken.
    pub fn push(&self, vm: &str, kind: EventKind, text: impl Into<String>) {
        let text = text.into();
        // Whoever builds a daemon for tests hears of a kind that docs/troubleshooting.md does not explain.
        debug_assert!(cfg!(test) || meaning::is_known(&kind), "no meaning for {kind}");
        match meaning::of(&kind).0 {
            Tone::Bad => tracing::error!(vm, kind = kind.as_str(), "{text}"),
            Tone::Warning => tracing::warn!(vm, kind = kind.as_str(), "{text}"),
            Tone::Good | Tone::Plain => tracing::info!(vm, kind = kind.as_str(), "{text}"),
        }
        let time_ms = now_ms();
        let mut log = self.log();
        let seq = log.next_seq;
        log.next_seq += 1;
        let event = Event {
            seq,
            time_ms,
            host: self.shared.host.clone(),
            vm: vm.to_owned(),
            kind,
            text,
        };
        if let Some(to_disk) = &self.shared.to_disk {
            // Full: see WAITING.
            let _ = to_disk.try_send(event.clone());
        }
        log.kept.push_back(event);
        if log.kept.len() > KEPT {
            log.kept.pop_front();
        }
        self.shared.more.notify_all();
    }

    /// The status shows by now what the last events told: whoever waits for events wakes, though there is none.
    pub fn nudge(&self) {
        self.log().nudges += 1;
        self.shared.more.notify_all();
    }

    /// The number of the next event.
    #[must_use]
    pub fn next_seq(&self) -> u64 {
        self.log().next_seq
    }

    /// How often it was nudged; give it to [`Self::since`].
    #[must_use]
    pub fn nudges(&self) -> u64 {
        self.log().nudges
    }

    /// What happened from `seq` on; waits for the first of it, or for another nudge than `nudges`, if `wait` is given,
    /// at most that long.
    #[must_use]
    pub fn since(&self, seq: u64, wait: Option<Duration>, nudges: u64) -> Vec<Event> {
        let mut log = self.log();
        if let Some(wait) = wait {
            let nothing = |log: &mut Log| log.next_seq <= seq && log.nudges == nudges;
            self.shared.more.wait_while_for(&mut log, nothing, wait);
        }
        log.kept
            .iter()
            .filter(|event| event.seq >= seq)
            .cloned()
            .collect()
    }
}

/// What can be read of the file, as far as it is kept.
fn read(path: &Path) -> VecDeque<Event> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let lines = bytes.split(|byte| *byte == b'\n');
    let mut kept: VecDeque<Event> = lines
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect();
    let surplus = kept.len().saturating_sub(KEPT);
    kept.drain(..surplus);
    kept
}

/// Begins with a whole file; then a line for each event, until there are too many.
#[expect(clippy::disallowed_methods, reason = "nothing is owed between two events")]
fn write_all(path: &Path, mut lines: VecDeque<Event>, events: &Receiver<Event>) {
    let mut file = None;
    let mut written = 0;
    let mut complaint = String::new();
    while let Ok(event) = events.recv() {
        lines.push_back(event);
        if lines.len() > KEPT {
            lines.pop_front();
        }
        let done = match &mut file {
            Some(file) if written < MOST_LINES => lines.back().map_or(Ok(()), |event| append(file, event)),
            _ => begin(path, &lines).map(|begun| {
                written = lines.len();
                file = Some(begun);
            }),
        };
        written += 1;
        if let Err(error) = done {
            // The next one begins anew, when there is room.
            file = None;
            let words = format!("{}: events are not kept over a restart: {error}", path.display());
            if words != complaint {
                tracing::warn!("{words}");
                complaint = words;
            }
        }
    }
}

fn append(mut file: &File, event: &Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    file.write_all(&line)
}

/// The file, whole or as it was.
fn begin(path: &Path, lines: &VecDeque<Event>) -> io::Result<File> {
    let new: PathBuf = path.with_extension("new");
    let mut text = Vec::new();
    for event in lines {
        serde_json::to_writer(&mut text, event)?;
        text.push(b'\n');
    }
    std::fs::write(&new, text)?;
    std::fs::rename(&new, path)?;
    OpenOptions::new().append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_by_the_calendar() {
        for (seconds, shown) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (1_767_225_599, "2025-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds * 1000), shown);
        }
    }

    #[test]
    fn the_newest_events_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let events = Events::open("a", folder.path());
        for number in 0..3 * KEPT {
            events.push("shop", EventKind::Started, number.to_string());
        }
        let kept = events.since(0, None, 0);
        let seqs: Vec<u64> = kept.iter().map(|event| event.seq).collect();
        assert_eq!(seqs, (2 * KEPT as u64..3 * KEPT as u64).collect::<Vec<_>>());
    }

    #[test]
    fn a_nudge_that_came_before_the_wait_ends_it_and_brings_no_event() {
        let folder = tempfile::tempdir().expect("a folder");
        let events = Events::open("a", folder.path());
        events.push("shop", EventKind::Started, "it runs");
        let before = events.nudges();
        assert_eq!(events.since(0, None, before).len(), 1);
        events.nudge();
        // Without the nudge this would wait for an hour.
        let hour = Some(Duration::from_secs(3600));
        assert!(events.since(1, hour, before).is_empty());
        events.push("shop", EventKind::Down, "it is shut down");
        let told = events.since(1, hour, events.nudges());
        assert_eq!(told.iter().map(|event| event.seq).collect::<Vec<_>>(), [1]);
    }

    fn numbered(seq: u64) -> Event {
        Event {
            seq,
            time_ms: seq,
            host: "a".into(),
            vm: "shop".into(),
            kind: EventKind::Started,
            text: format!("number {seq}"),
        }
    }

    /// What is on disk when the writer has come to its end.
    fn written(path: &Path, kept: VecDeque<Event>, more: impl Iterator<Item = u64>) -> VecDeque<Event> {
        let (sender, events) = crossbeam_channel::unbounded();
        more.for_each(|seq| sender.send(numbered(seq)).expect("it is received below"));
        drop(sender);
        write_all(path, kept, &events);
        read(path)
    }

    #[test]
    fn the_last_ten_thousand_outlive_the_daemon_in_a_file_that_does_not_grow() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        let first = written(&path, read(&path), 0..5);
        assert_eq!(
            first.iter().map(|event| event.seq).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4]
        );
        // A crash tore the last line.
        let whole = std::fs::read(&path).expect("the file");
        std::fs::write(&path, &whole[..whole.len() - 9]).expect("torn");
        let kept = read(&path);
        assert_eq!(kept.back().map(|event| event.seq), Some(3));
        let all = written(&path, kept, 4..35_000);
        assert_eq!(
            (all.len(), all.back().map(|event| event.seq)),
            (KEPT, Some(34_999))
        );
        assert!(
            all.iter()
                .zip(all.iter().skip(1))
                .all(|(one, next)| one.seq + 1 == next.seq)
        );
        let lines = std::fs::read_to_string(&path).expect("the file").lines().count();
        assert!((KEPT..=MOST_LINES + 1).contains(&lines), "{lines} lines");
    }

    #[test]
    fn a_new_daemon_goes_on_counting() {
        let folder = tempfile::tempdir().expect("a folder");
        written(&folder.path().join(FILE), VecDeque::new(), 0..3);
        let events = Events::open("a", folder.path());
        events.push("shop", EventKind::Started, "it runs");
        let seqs: Vec<u64> = events.since(0, None, 0).iter().map(|event| event.seq).collect();
        assert_eq!(seqs, [0, 1, 2, 3]);
    }
}
