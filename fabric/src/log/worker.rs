//! What it decides: which disk work is done together, and on whose time.
//!
//! **Flow**: `Group` -> [`Writer::submit`] -> (thread) one write and one sync for all that has gathered -> [`Done`] ->
//! eventfd -> `Group`. With [`Mode::Inline`] the caller's own thread does it.
//! **Invariants**: 1. commands keep their order, except that while the disk is full hard states and snapshots (which need no
//! room, or make some) overtake the others, but not their own kind. 2. `Done::Persisted` is said only after the sync. 3. after
//! `Done::Failed` nothing is acknowledged any more. 4. what waits for a slow or full disk is counted ([`Writer::queued_bytes`]):
//! the `Group` takes no inputs while it is more than the log may hold (a leader whose followers are quick enough goes on without
//! its own disk). 5. a full disk is tried again every [`RETRY`], however much comes meanwhile, but for what overtakes (1).
//! **Source**: measured (docs/fabric.md): a blocked thread adds about 10 us to a sync of 100 us, io_uring 20 us, and a sync
//! on the loop's own thread would hold up heartbeats for as long as the disk likes. **Not here**: files.

use super::{Disk, DiskError};
use dunlin_core::consensus::{Entry, HardState, Snapshot};
use dunlin_core::units::{Index, Viewstamp};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A full disk is tried again after this: there is no event for "somebody removed a file".
const RETRY: Duration = Duration::from_millis(100);
/// What is only prepared is tried again after this.
const PREPARE_AGAIN: Duration = Duration::from_secs(1);

/// Whose thread writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// One of its own: a slow disk delays acknowledgements, never heartbeats.
    #[default]
    Thread,
    /// The caller's: about a tenth faster, and a slow disk costs the leadership.
    Inline,
}

/// What shall be done.
#[derive(Clone, Debug)]
pub enum Command {
    /// Append.
    Persist {
        /// Consecutive.
        entries: Vec<Entry>,
        /// Comes back.
        ticket: u64,
    },
    /// Entries at and after this are gone.
    Cut(Index),
    /// Keep this hard state.
    HardState(HardState),
    /// Keep this snapshot, and drop what it stands for.
    Snapshot(Snapshot),
    /// The log on disk counts again: a leader has brought it up to date.
    CountsAgain,
}

/// What was done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Done {
    /// All up to this ticket.
    Persisted(u64),
    /// This hard state.
    HardState(HardState),
    /// The snapshot that ends here.
    Snapshot(Viewstamp),
    /// No space: nothing is acknowledged until `Room`.
    Full(String),
    /// There is space again.
    Room,
    /// The disk cannot be trusted any more; the text says why.
    Failed(String),
}

struct Engine {
    disk: Disk,
    queue: VecDeque<Command>,
    full: bool,
    failed: bool,
    tried: Instant,
    /// There was no room for the next segment, and none was needed yet.
    unprepared: Option<Instant>,
    /// Appended, not synced yet.
    ticket: Option<u64>,
    queued_bytes: Arc<AtomicUsize>,
}

/// What an entry takes in a queue besides its payload.
const ENTRY_COST_BYTES: usize = 96;

impl Command {
    fn cost(&self) -> usize {
        match self {
            Self::Persist { entries, .. } => entries
                .iter()
                .map(|entry| entry.payload.len() + ENTRY_COST_BYTES)
                .sum(),
            // Small, and few: a cut and a hard state for each term, a snapshot for each sync, the last one once.
            Self::Cut(_) | Self::HardState(_) | Self::Snapshot(_) | Self::CountsAgain => 0,
        }
    }

    /// Invariant 1's exception.
    fn overtakes(&self) -> bool {
        matches!(self, Self::HardState(_) | Self::Snapshot(_))
    }
}

/// How long the writer's thread has nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rest {
    No,
    AtMost(Duration),
    UntilWoken,
}

impl Engine {
    /// Whether there is something to do, and it is time.
    fn is_due(&self) -> bool {
        if self.full {
            self.tried.elapsed() > RETRY
        } else {
            !self.queue.is_empty()
        }
    }

    /// The same for the thread, which is handed these.
    fn rest(&self, handed: &VecDeque<Command>) -> Rest {
        match (self.full && !self.failed, handed.is_empty()) {
            (false, true) => Rest::UntilWoken,
            (false, false) => Rest::No,
            // Invariant 5.
            (true, _) => match RETRY.saturating_sub(self.tried.elapsed()) {
                left if left.is_zero() || handed.iter().any(Command::overtakes) => Rest::No,
                left => Rest::AtMost(left),
            },
        }
    }

    /// Makes a part of the next segment; false when there is no more to prepare, or no room.
    fn prepare(&mut self) -> bool {
        if self
            .unprepared
            .is_some_and(|since| since.elapsed() < PREPARE_AGAIN)
        {
            return false;
        }
        let prepared = self.disk.prepare();
        self.unprepared = prepared.is_err().then(Instant::now);
        prepared.unwrap_or(false)
    }

    /// Does everything that can be done now.
    fn run(&mut self, done: &mut Vec<Done>) {
        if self.failed {
            return self.forget();
        }
        self.tried = Instant::now();
        if self.full {
            self.overtake(done);
        }
        let worked = self.work_off(done);
        // What was taken before the disk filled up may still be synced.
        let synced = self.disk.sync();
        if synced.is_ok()
            && let Some(ticket) = self.ticket.take()
        {
            done.push(Done::Persisted(ticket));
        }
        match worked.and(synced) {
            Ok(()) if std::mem::take(&mut self.full) => done.push(Done::Room),
            Ok(()) => {}
            Err(e @ DiskError::Full { .. }) => {
                if !std::mem::replace(&mut self.full, true) {
                    done.push(Done::Full(e.to_string()));
                }
            }
            Err(e) => self.fail(e.to_string(), done),
        }
    }

    fn work_off(&mut self, done: &mut Vec<Done>) -> Result<(), DiskError> {
        while let Some(command) = self.queue.front_mut() {
            let cost = command.cost();
            match command {
                Command::Persist { entries, ticket: its } => {
                    // Entry by entry, so that a full disk half-way repeats none of them.
                    let mut taken = 0;
                    let outcome = entries.iter().try_for_each(|entry| {
                        self.disk.append(std::slice::from_ref(entry))?;
                        taken += 1;
                        Ok(())
                    });
                    if outcome.is_err() {
                        entries.drain(..taken);
                        self.queued_bytes
                            .fetch_sub(cost - command.cost(), Ordering::Relaxed);
                        return outcome;
                    }
                    self.ticket = Some(*its);
                }
                Command::Cut(from) => self.disk.cut(*from)?,
                Command::HardState(hard_state) => {
                    self.disk.hard_state(*hard_state)?;
                    done.push(Done::HardState(*hard_state));
                }
                Command::Snapshot(snapshot) => {
                    self.disk.snapshot(snapshot)?;
                    done.push(Done::Snapshot(snapshot.last));
                }
                Command::CountsAgain => self.disk.counts_again()?,
            }
            self.queue.pop_front();
            self.queued_bytes.fetch_sub(cost, Ordering::Relaxed);
        }
        Ok(())
    }

    /// What will never be written.
    fn forget(&mut self) {
        let cost = self.queue.drain(..).map(|command| command.cost()).sum();
        self.queued_bytes.fetch_sub(cost, Ordering::Relaxed);
    }

    /// Invariant 1's exception. Where one has found no room, later ones of its kind do not pass it: an older snapshot after a newer one would take back
    /// what that stands for, and an older hard state a vote. Nor does a snapshot pass a hard state: a log that was overruled goes after it.
    fn overtake(&mut self, done: &mut Vec<Done>) {
        let (mut hard_states_pass, mut snapshots_pass) = (true, true);
        for command in std::mem::take(&mut self.queue) {
            match &command {
                Command::HardState(hard_state) if hard_states_pass => {
                    hard_states_pass = self.disk.hard_state(*hard_state).is_ok();
                    if hard_states_pass {
                        done.push(Done::HardState(*hard_state));
                        continue;
                    }
                }
                Command::Snapshot(snapshot) if snapshots_pass && hard_states_pass => {
                    if self.disk.is_overruled_by(snapshot) {
                        self.forget_entries();
                    }
                    snapshots_pass = self.disk.snapshot(snapshot).is_ok();
                    if snapshots_pass {
                        done.push(Done::Snapshot(snapshot.last));
                        continue;
                    }
                }
                _ => {}
            }
            self.queue.push_back(command);
        }
    }

    /// What waited to become a part of a log that does not count any more: it would not follow what is left of that, nor what comes.
    fn forget_entries(&mut self) {
        let mut cost = 0;
        self.queue.retain(|command| {
            let of_the_log = matches!(command, Command::Persist { .. } | Command::Cut(_));
            cost += if of_the_log { command.cost() } else { 0 };
            !of_the_log
        });
        self.queued_bytes.fetch_sub(cost, Ordering::Relaxed);
    }

    fn fail(&mut self, why: String, done: &mut Vec<Done>) {
        self.failed = true;
        self.forget();
        done.push(Done::Failed(why));
    }
}

struct Shared {
    queue: Mutex<(VecDeque<Command>, bool)>,
    wake: Condvar,
    done: Mutex<Vec<Done>>,
    any_done: AtomicBool,
    event: OwnedFd,
}

enum How {
    Inline(Box<Engine>),
    Thread {
        shared: Arc<Shared>,
        thread: Option<JoinHandle<()>>,
    },
}

/// Where `Group` hands its disk work to.
pub struct Writer {
    how: How,
    ready: Vec<Done>,
    queued_bytes: Arc<AtomicUsize>,
}

impl Writer {
    /// Takes the disk over.
    pub fn new(disk: Disk, mode: Mode) -> std::io::Result<Self> {
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        let mut engine = Engine {
            queued_bytes: queued_bytes.clone(),
            disk,
            queue: VecDeque::new(),
            full: false,
            failed: false,
            tried: Instant::now(),
            unprepared: None,
            ticket: None,
        };
        if mode == Mode::Inline {
            return Ok(Self {
                how: How::Inline(Box::new(engine)),
                ready: Vec::new(),
                queued_bytes,
            });
        }
        // SAFETY: a plain call; the result is checked and owned by nobody else.
        let event = unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let (queue, wake) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared {
            queue,
            wake,
            done: Mutex::default(),
            any_done: AtomicBool::new(false),
            event,
        });
        let on_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("dunlin-log".into())
            .spawn(move || on_thread.work(&mut engine))?;
        Ok(Self {
            how: How::Thread {
                shared,
                thread: Some(thread),
            },
            ready: Vec::new(),
            queued_bytes,
        })
    }

    /// What entries that wait for the disk take.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes.load(Ordering::Relaxed)
    }

    /// Hands work over.
    pub fn submit(&mut self, command: Command) {
        self.queued_bytes.fetch_add(command.cost(), Ordering::Relaxed);
        match &mut self.how {
            How::Inline(engine) => engine.queue.push_back(command),
            How::Thread { shared, .. } => {
                let overtakes = command.overtakes();
                let mut queue = shared.queue.lock().expect("no panic under this lock");
                queue.0.push_back(command);
                // A thread whose disk is full leaves what it was handed before where it is.
                if queue.0.len() == 1 || overtakes {
                    shared.wake.notify_one();
                }
            }
        }
    }

    /// What was done since the last call. Inline, this is where it is done.
    pub fn done(&mut self) -> std::vec::Drain<'_, Done> {
        match &mut self.how {
            How::Inline(engine) => {
                if engine.is_due() {
                    engine.run(&mut self.ready);
                }
            }
            How::Thread { shared, .. } => {
                if shared.any_done.swap(false, Ordering::Acquire) {
                    let mut count = [0u8; 8];
                    // SAFETY: reads 8 bytes into our own memory.
                    unsafe { libc::read(shared.event.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
                    self.ready
                        .append(&mut shared.done.lock().expect("no panic under this lock"));
                }
            }
        }
        self.ready.drain(..)
    }

    /// Whether `done` has something to say, or (inline) to do. One load.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match &self.how {
            How::Inline(engine) => {
                !engine.queue.is_empty() && (!engine.full || engine.tried.elapsed() > RETRY)
            }
            How::Thread { shared, .. } => shared.any_done.load(Ordering::Acquire),
        }
    }

    /// Readable when `done` has something to say.
    #[must_use]
    pub fn fd(&self) -> Option<RawFd> {
        match &self.how {
            How::Inline(_) => None,
            How::Thread { shared, .. } => Some(shared.event.as_raw_fd()),
        }
    }
}

impl Shared {
    fn work(&self, engine: &mut Engine) {
        loop {
            {
                let mut queue = self.queue.lock().expect("no panic under this lock");
                while !queue.1 {
                    queue = match engine.rest(&queue.0) {
                        Rest::No => break,
                        Rest::UntilWoken => self.wake.wait(queue).expect("no panic under this lock"),
                        Rest::AtMost(left) => {
                            let woken = self.wake.wait_timeout(queue, left);
                            woken.expect("no panic under this lock").0
                        }
                    };
                }
                if queue.1 && queue.0.is_empty() {
                    return;
                }
                engine.queue.append(&mut queue.0);
            }
            let mut done = Vec::new();
            engine.run(&mut done);
            if !done.is_empty() {
                self.done
                    .lock()
                    .expect("no panic under this lock")
                    .append(&mut done);
                self.any_done.store(true, Ordering::Release);
                let one = 1u64.to_ne_bytes();
                // SAFETY: writes 8 bytes of our own to an owned descriptor.
                unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), 8) };
            }
            // In small steps and only while nothing waits. If there is no room for it now, the log says so when it needs it.
            while !engine.full && !engine.failed && self.is_idle() && engine.prepare() {}
        }
    }

    fn is_idle(&self) -> bool {
        let queue = self.queue.lock().expect("no panic under this lock");
        queue.0.is_empty() && !queue.1
    }
}

impl Drop for Writer {
    /// What was submitted is still done (unless the disk is full).
    fn drop(&mut self) {
        if let How::Thread { shared, thread } = &mut self.how {
            shared.queue.lock().expect("no panic under this lock").1 = true;
            shared.wake.notify_one();
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::DiskOptions;
    use crate::log::tests::Scratch;

    #[test]
    fn a_full_disk_is_not_tried_again_for_each_batch() {
        let dir = Scratch::new("rest");
        let (disk, _) = Disk::open(dir.path(), DiskOptions::default()).unwrap();
        let mut engine = Engine {
            disk,
            queue: VecDeque::new(),
            full: false,
            failed: false,
            tried: Instant::now(),
            unprepared: None,
            ticket: None,
            queued_bytes: Arc::default(),
        };
        let persist = || Command::Persist {
            entries: Vec::new(),
            ticket: 1,
        };
        let (none, batch) = (
            VecDeque::new(),
            VecDeque::from([persist(), Command::Cut(Index(1))]),
        );
        let vote = VecDeque::from([persist(), Command::HardState(HardState::default())]);
        assert_eq!(engine.rest(&none), Rest::UntilWoken);
        assert_eq!(engine.rest(&batch), Rest::No);
        engine.full = true;
        // An hour from now: however slow this machine is, the time is not over.
        engine.tried = Instant::now() + Duration::from_secs(3600);
        assert_eq!(engine.rest(&none), Rest::AtMost(RETRY));
        assert_eq!(engine.rest(&batch), Rest::AtMost(RETRY));
        assert_eq!(engine.rest(&vote), Rest::No, "it needs no room");
        engine.tried = Instant::now() - RETRY;
        assert_eq!(engine.rest(&none), Rest::No);
        assert_eq!(engine.rest(&batch), Rest::No);
        engine.failed = true;
        assert_eq!(
            engine.rest(&none),
            Rest::UntilWoken,
            "nothing will ever have room"
        );
    }
}
