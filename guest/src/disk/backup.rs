//! Decides: when the backup's I/O switch is fed, committed and emptied, and by which thread.
//!
//! Flow: the *receiver* thread takes the primary's frames into the switch ("a dedicated thread on the secondary node for
//! caching the forwarded requests", GANNET VI-C); the *flusher* thread brings committed syncs and equal sectors to the
//! image; NBD threads read and write for the backup VM through the switch; the node calls `commit` and `take_over`.
//! Invariants: D1 to D6 of `dunlin_core::disk`, and **B1** only the flusher (and `take_over`, after it ended) writes
//! to the image once the first copy is whole and the storage is GANNET; **B2** commit and take-over never run beside
//! a request of the backup VM (the gate in [`super`]); **B3** a VM that was told of an error of this host's disk, while another
//! host had the primary's, does not go on in the primary's place: nobody else was told.
//! Not here: which bytes are where (`dunlin_core::disk::Switch`).
//! Longer than 400 lines: its three threads share one state, and what each may do to it shows only beside the others.

mod flusher;
mod receiver;

use super::{
    DiskError, DiskEvent, Shared,
    link::{self, Link, MirrorStream, ReceiveError, Tuning},
};
use crate::memory::hash::on_threads;
use bytes::Bytes;
use dunlin_core::{
    disk::{
        Buffer, Content, ExtentSet, Pressure, Storage, Switch,
        buffer::Shared as Piece,
        mirror::{Frame, Hello, MOST_PAYLOAD_BYTES},
    },
    units::{Epoch, Term},
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    io,
    ops::Range,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

struct State {
    switch: Switch,
    storage: Storage,
    /// The first copy is still coming in: writes go to the image.
    joining: bool,
    /// A sync was committed: image and buffers together are a whole disk.
    complete: bool,
    /// The name that the pair gets with the first commit.
    next_pair: Option<[u8; 16]>,
    /// The primary's term, once it has greeted.
    term: Term,
    /// Frames of the primary taken in, as last acknowledged.
    taken: u64,
    /// Nothing more comes from the primary.
    forsaken: bool,
    asked_for_sync: bool,
    expedite: bool,
    light: Option<u64>,
    failed: Option<String>,
    stop: bool,
    /// When each sync that is on its way to the image was committed.
    committed_at: VecDeque<(Epoch, Instant)>,
    settles: u64,
    settle_ns: u64,
    asked_syncs: u64,
    delayed_writes: u64,
    light_ns: u64,
}

/// The role of the host whose VM is the second copy.
pub(super) struct Backup {
    shared: Arc<Shared>,
    state: Mutex<State>,
    changed: Condvar,
    link: Mutex<Option<Arc<Link>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// How full and how far a backup is.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackupFigures {
    /// The first copy is still coming in.
    pub joining: bool,
    /// The last mark that arrived.
    pub marked: Epoch,
    /// The last committed sync.
    pub committed: Epoch,
    /// Memory of the PVM buffer.
    pub pvm_bytes: u64,
    /// Memory of the SVM buffer.
    pub svm_bytes: u64,
    /// Memory of everything, with committed syncs on their way to the image.
    pub held_bytes: u64,
    /// Syncs that reached the image.
    pub settles: u64,
    /// How long these took in all, from their commit.
    pub settle_ns: u64,
    /// Syncs asked for because the buffers filled up.
    pub asked_syncs: u64,
    /// Writes of the VM here that were delayed because the buffers were nearly full.
    pub delayed_writes: u64,
    /// How long the lightweight checkpoint compared and wrote.
    pub light_ns: u64,
    /// Of the lightweight checkpoint and the buffers.
    pub counters: dunlin_core::disk::io_switch::SwitchCounters,
}

impl Backup {
    pub(super) fn start(shared: &Arc<Shared>, stream: MirrorStream) -> Result<Arc<Self>, DiskError> {
        shared.owes(0);
        shared.image.owes_nothing();
        let this = Arc::new(Self {
            shared: shared.clone(),
            state: Mutex::new(State {
                switch: Switch::new(shared.storage, shared.limits, Epoch(0)),
                storage: shared.storage,
                joining: true,
                complete: false,
                next_pair: None,
                term: Term(0),
                taken: 0,
                forsaken: false,
                asked_for_sync: false,
                expedite: false,
                light: None,
                failed: None,
                stop: false,
                committed_at: VecDeque::new(),
                settles: 0,
                settle_ns: 0,
                asked_syncs: 0,
                delayed_writes: 0,
                light_ns: 0,
            }),
            changed: Condvar::new(),
            link: Mutex::new(None),
            threads: Mutex::new(Vec::new()),
        });
        let MirrorStream {
            reader,
            writer,
            shutdown,
        } = stream;
        let link = Link::new(shutdown, Tuning::default());
        *this.link.lock() = Some(link.clone());
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let thread = thread::Builder::new()
                .name(name.into())
                .spawn(run)
                .map_err(DiskError::Thread)?;
            this.threads.lock().push(thread);
            Ok::<_, DiskError>(())
        };
        let (receiver, receiver_link) = (this.clone(), link.clone());
        spawn(
            "disk-receive",
            Box::new(move || receiver.run(&receiver_link, reader)),
        )?;
        let mut writer = writer;
        let sender_link = link.clone();
        spawn(
            "disk-answer",
            Box::new(move || drop(sender_link.send_all(&mut *writer))),
        )?;
        let flusher = this.clone();
        spawn("disk-flush", Box::new(move || flusher.flush_loop(&link)))?;
        Ok(this)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(&mut state);
        state
    }

    /// Nothing while somebody else holds the state.
    pub(super) fn figures(&self) -> Option<BackupFigures> {
        let state = self.state.try_lock()?;
        Some(BackupFigures {
            joining: state.joining,
            marked: state.switch.marked(),
            committed: state.switch.committed(),
            pvm_bytes: state.switch.pvm_bytes(),
            svm_bytes: state.switch.svm_bytes(),
            held_bytes: state.switch.bytes(),
            settles: state.settles,
            settle_ns: state.settle_ns,
            asked_syncs: state.asked_syncs,
            delayed_writes: state.delayed_writes,
            light_ns: state.light_ns,
            counters: state.switch.counters(),
        })
    }

    pub(super) fn could_settle(&self) -> Option<u64> {
        let state = self.state.try_lock()?;
        let switch = &state.switch;
        let holds = !state.joining && switch.pvm_bytes() > 0 && switch.svm_bytes() > 0;
        let counters = switch.counters();
        holds.then_some(counters.own_bytes + counters.mirrored_bytes)
    }

    /// Hears the primary no more. What was not marked by now belongs to no sync.
    pub(super) fn forsake(&self, reason: &str) {
        let link = self.link.lock().clone();
        if let Some(link) = link {
            link.close(reason);
        }
    }

    // ---- what the backup VM does ----

    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + out.len() as u64;
        let failed = {
            let direct = self.lock().storage != Storage::Gannet;
            let _held = direct.then(|| self.shared.ranges.lock(range.clone()));
            let mut gaps: Vec<_> = std::iter::once(range).collect();
            self.lock().switch.read(offset, out, &mut gaps);
            gaps.into_iter().find_map(|gap| {
                let at = (gap.start - offset) as usize..(gap.end - offset) as usize;
                let read = self.shared.image.read(gap.start, &mut out[at]);
                read.err().map(|error| (gap, error))
            })
        };
        match failed {
            None => Ok(()),
            Some((gap, error)) => {
                self.unreadable(&gap, &error);
                Err(error)
            }
        }
    }

    /// B3, before the VM hears of it. Where no primary is left the VM hears of its disk as on any machine; and what runs here before the
    /// first sync cannot take over, and is not what that sync brings.
    fn unreadable(&self, gap: &Range<u64>, error: &io::Error) {
        let matters = |state: &State| state.complete && !state.forsaken && state.failed.is_none();
        if !matters(&self.lock()) {
            return;
        }
        let mut extents = ExtentSet::default();
        extents.add(gap);
        // The next copy brings it anew, and a sector that is written again can be read. Where that cannot be noted, the VM of the
        // next copy meets the error again.
        let _noted_or_met_again = self.shared.dirty.add(&extents);
        let link = self.link.lock().clone();
        let reason = receiver::blamed("read", error);
        {
            let mut state = self.lock();
            if !matters(&state) {
                return;
            }
            state.failed = Some(reason.clone());
        }
        self.changed.notify_all();
        if let Some(link) = link {
            link.push(Frame::Refuse, Bytes::copy_from_slice(reason.as_bytes()));
        }
        self.shared.event(DiskEvent::BackupFailed { reason });
    }

    pub(super) fn write(&self, offset: u64, content: Content) -> io::Result<()> {
        if let Content::Data(data) = &content {
            self.scratch(offset, data)?;
        }
        let link = self.link.lock().clone();
        let mut state = self.lock();
        if state.failed.is_some() {
            return Err(io::Error::other(
                "this backup has failed and waits to be replaced",
            ));
        }
        state.switch.own_write(offset, content);
        if let Some(link) = link
            && let Err(error) = self.press(&mut state, &link)
        {
            let reason = error.to_string();
            state.failed = Some(reason.clone());
            link.push(Frame::Refuse, Bytes::copy_from_slice(reason.as_bytes()));
            drop(state);
            self.shared.event(DiskEvent::BackupFailed { reason });
            return Err(io::Error::other(error));
        }
        let until = Instant::now() + Tuning::default().throttle;
        state.delayed_writes += u64::from(state.switch.pressure() >= Pressure::Throttle);
        while state.switch.pressure() >= Pressure::Throttle && !state.expedite && !state.stop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut state, left);
        }
        Ok(())
    }

    fn scratch(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.shared
            .scratch
            .as_ref()
            .map_or(Ok(()), |scratch| scratch.write(offset, data))
    }

    /// Consecutive stretches: (length, holds data). A hole of the image that a buffer touches counts as data.
    pub(super) fn status(&self, offset: u64, len: u64) -> io::Result<Vec<(u64, bool)>> {
        let mut at = offset;
        let mut out = self.shared.image.status(offset, len)?;
        let state = self.lock();
        for (len, holds_data) in &mut out {
            *holds_data = *holds_data || state.switch.touches(at..at + *len);
            at += *len;
        }
        Ok(out)
    }

    // ---- what the node says ----

    pub(super) fn expedite(&self, on: bool) {
        self.lock().expedite = on;
        self.changed.notify_all();
    }

    pub(super) fn wait_marked(&self, epoch: Epoch, timeout: Duration) -> bool {
        let is_marked = |state: &State| state.switch.marked() >= epoch;
        let is_over =
            |state: &State| is_marked(state) || state.failed.is_some() || state.stop || state.forsaken;
        let mut state = self.lock();
        loop {
            let seen = state.taken;
            self.changed
                .wait_while_for(&mut state, |state| !is_over(state), timeout);
            // Slow is not silent: under `colo` and `sync` each write goes to the image before the mark is reached.
            if is_over(&state) || state.taken == seen {
                return is_marked(&state);
            }
        }
    }

    /// The caller holds the gate: no request of the VM runs (B2).
    pub(super) fn commit(&self, epoch: Epoch) -> Result<(), DiskError> {
        let mut state = self.lock();
        if state.joining {
            return Err(DiskError::StillCopying);
        }
        if let Some(reason) = &state.failed {
            return Err(DiskError::Failed(reason.clone()));
        }
        // An idle pass that is writing is not waited for: what it writes is a part of this sync, the flusher is one thread, and so
        // the sync's own bytes come after it.
        state.light = None;
        state.switch.commit(epoch)?;
        state.committed_at.push_back((epoch, Instant::now()));
        self.shared.owes(state.committed_at.len());
        state.complete = true;
        state.asked_for_sync = false;
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until every committed sync is on the image.
    pub(super) fn wait_settled(&self, timeout: Duration) -> bool {
        let mut state = self.lock();
        let unsettled = |state: &mut State| state.switch.next_settled().is_some() && state.failed.is_none();
        self.changed.wait_while_for(&mut state, unsettled, timeout);
        state.switch.next_settled().is_none()
    }

    pub(super) fn idle(&self) {
        let mut state = self.lock();
        if state.light.is_none() && !state.joining {
            state.light = Some(0);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Ends the threads and hands out what must be on the image, with the sync that it is of. The caller holds the gate (B2).
    pub(super) fn take_over(&self) -> Result<(Buffer, Epoch), DiskError> {
        self.stop("this host takes over");
        let mut state = self.lock();
        if !state.complete {
            return Err(DiskError::StillCopying);
        }
        if let Some(reason) = &state.failed {
            // Its VM was refused a write, or its image a sync: it is not what the clients were told.
            return Err(DiskError::Failed(reason.clone()));
        }
        let committed = state.switch.committed();
        Ok((state.switch.take_over(), committed))
    }

    /// Ends receiver, answerer and flusher.
    pub(super) fn stop(&self, reason: &str) {
        self.lock().stop = true;
        self.changed.notify_all();
        if let Some(member) = &self.shared.group {
            member.group.wake();
        }
        let link = self.link.lock().take();
        if let Some(link) = link {
            link.close(reason);
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _panicked = thread.join();
        }
    }
}

/// The extents that a buffer touches.
pub(super) fn extents(buffer: &Buffer) -> ExtentSet {
    let mut extents = ExtentSet::default();
    for (offset, content) in buffer.runs() {
        extents.add(&(offset..offset + content.len()));
    }
    extents
}
