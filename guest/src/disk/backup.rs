//! Decides: when the backup's I/O switch is fed, committed and emptied, and by which thread.
//!
//! Flow: the *receiver* thread takes the primary's frames into the switch ("a dedicated thread on the secondary node for
//! caching the forwarded requests", GANNET VI-C); the *flusher* thread brings committed syncs and equal sectors to the
//! image; NBD threads read and write for the backup VM through the switch; the node calls `commit` and `take_over`.
//! Invariants: D1 to D6 of `dunlin_core::disk`, and **B1** only the flusher (and `take_over`, after it ended) writes
//! to the image once the first copy is whole and the storage is GANNET; **B2** commit and take-over never run beside
//! a request of the backup VM (the gate in [`super`]).
//! Not here: which bytes are where (`dunlin_core::disk::Switch`).
//! Longer than 400 lines: its three threads share one state, and what each may do to it shows only beside the others.

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
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
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
        *this.link.lock().unwrap_or_else(PoisonError::into_inner) = Some(link.clone());
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let thread = thread::Builder::new()
                .name(name.into())
                .spawn(run)
                .map_err(DiskError::Thread)?;
            this.threads
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(thread);
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing while somebody else holds the state.
    pub(super) fn figures(&self) -> Option<BackupFigures> {
        let state = self.state.try_lock().ok()?;
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
        let state = self.state.try_lock().ok()?;
        let switch = &state.switch;
        let holds = !state.joining && switch.pvm_bytes() > 0 && switch.svm_bytes() > 0;
        let counters = switch.counters();
        holds.then_some(counters.own_bytes + counters.mirrored_bytes)
    }

    /// Hears the primary no more. What was not marked by now belongs to no sync.
    pub(super) fn forsake(&self, reason: &str) {
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(link) = link {
            link.close(reason);
        }
    }

    // ---- what the primary says ----

    fn run(&self, link: &Arc<Link>, mut reader: Box<dyn io::Read + Send>) {
        let reason = match self.receive_all(link, &mut *reader) {
            Ok(never) => match never {},
            Err(reason) => reason,
        };
        link.finish(&reason);
        let told = {
            let mut state = self.lock();
            state.forsaken = true;
            state.stop
        };
        self.changed.notify_all();
        if !told {
            self.shared.event(DiskEvent::PrimaryLost { reason });
        }
    }

    fn receive_all(
        &self,
        link: &Link,
        reader: &mut dyn io::Read,
    ) -> Result<std::convert::Infallible, String> {
        let mut reader = io::BufReader::with_capacity(256 << 10, reader);
        let mut number = 0;
        let mut unacked_bytes = 0;
        loop {
            let (frame, payload) = match link::receive(&mut reader) {
                Ok(received) => received,
                Err(ReceiveError::Io(error)) => {
                    return Err(format!("the primary's mirror stream ended: {error}"));
                }
                Err(error) => return Err(error.to_string()),
            };
            if frame == Frame::Hello {
                self.greet(link, &payload)?;
                continue;
            }
            number += 1;
            unacked_bytes += payload.len() + 256;
            let at_once = self.take(link, frame, payload).inspect_err(|reason| {
                link.push(Frame::Refuse, Bytes::copy_from_slice(reason.as_bytes()));
                self.lock().failed = Some(reason.clone());
                self.shared.event(DiskEvent::BackupFailed {
                    reason: reason.clone(),
                });
            })?;
            // An acknowledgement for many frames; at once where somebody waits for it.
            if at_once || unacked_bytes >= 256 << 10 || reader.buffer().is_empty() {
                // What the VM here writes beyond its primary is no reason to slow the primary down.
                let held_bytes = {
                    let mut state = self.lock();
                    state.taken = number;
                    state.switch.bytes() - state.switch.svm_bytes()
                };
                link.push(
                    Frame::Ack {
                        through: number,
                        held_bytes,
                    },
                    Bytes::new(),
                );
                unacked_bytes = 0;
            }
        }
    }

    fn greet(&self, link: &Link, payload: &[u8]) -> Result<(), String> {
        let (hello, _) = Hello::decode(payload).map_err(|error| error.to_string())?;
        let ours = self.shared.hello(false).map_err(|error| error.to_string())?;
        let storage = [Storage::Gannet, Storage::Colo, Storage::Sync][usize::from(hello.storage)];
        let refuse = if hello.size_bytes != ours.size_bytes {
            Some(format!(
                "the backup's disk has {} bytes, the primary's {}: make them the same size",
                ours.size_bytes, hello.size_bytes
            ))
        } else if hello.generation.term < ours.generation.term {
            Some(format!(
                "this disk was written in term {}, later than the primary's {}: it must not be overwritten by an older one",
                ours.generation.term.0, hello.generation.term.0
            ))
        } else if storage != self.shared.storage {
            Some(format!(
                "the primary's disk is replicated as {storage:?}, the backup's as {:?}: give both the same `storage`",
                self.shared.storage
            ))
        } else {
            None
        };
        if let Some(text) = refuse {
            link.push(Frame::Refuse, Bytes::copy_from_slice(text.as_bytes()));
            return Err(text);
        }
        let mut welcome = ours.encode();
        for extent in self.shared.dirty.all().iter() {
            welcome.extend(extent.to_le_bytes());
        }
        {
            let mut state = self.lock();
            state.storage = storage;
            state.switch = Switch::new(storage, self.shared.limits, Epoch(0));
            state.term = hello.generation.term;
            state.next_pair = Some(hello.next_pair);
        }
        link.push(Frame::Welcome, Bytes::from(welcome));
        Ok(())
    }

    /// Says whether somebody waits for the acknowledgement.
    fn take(&self, link: &Link, frame: Frame, payload: Bytes) -> Result<bool, String> {
        match frame {
            Frame::Write { offset } => self.mirrored(link, offset, Content::Data(payload), false)?,
            Frame::Zero { offset, len, unmap } => self.mirrored(link, offset, Content::Zero(len), unmap)?,
            Frame::Copy { offset } => self.copied(offset, &Content::Data(payload))?,
            Frame::CopyZero { offset, len } => self.copied(offset, &Content::Zero(len))?,
            Frame::CopyEnd => {
                self.lock().joining = false;
                self.shared.event(DiskEvent::Copied);
            }
            Frame::Mark { epoch } => {
                let marked = self.lock().switch.mark(epoch);
                marked.map_err(|error| error.to_string())?;
                self.changed.notify_all();
                self.shared.event(DiskEvent::Marked { epoch });
                return Ok(true);
            }
            Frame::Flush => {
                self.shared
                    .image
                    .flush()
                    .map_err(|error| failed("flushed", &error))?;
                return Ok(true);
            }
            Frame::AskHash { offset, len } => {
                self.check(offset, len.min(MOST_PAYLOAD_BYTES))?;
                if len > MOST_PAYLOAD_BYTES {
                    return Err("the primary asked for the hash of too much at once".into());
                }
                let hash = self
                    .hash_mirrored(offset, len)
                    .map_err(|error| failed("read", &error))?;
                link.push(Frame::Hash { offset, len }, Bytes::copy_from_slice(&hash));
            }
            other => return Err(format!("the primary sent {other:?}, which only a backup may")),
        }
        Ok(self.lock().storage == Storage::Sync)
    }

    /// The primary's disk as of this point of its stream.
    fn hash_mirrored(&self, offset: u64, len: u64) -> io::Result<[u8; 16]> {
        let mut data = vec![0; len as usize];
        let mut gaps: Vec<_> = std::iter::once(offset..offset + len).collect();
        self.lock().switch.read_mirrored(offset, &mut data, &mut gaps);
        for gap in gaps {
            let at = (gap.start - offset) as usize..(gap.end - offset) as usize;
            self.shared.image.read(gap.start, &mut data[at])?;
        }
        Ok(super::shared::hash(&data))
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), String> {
        match offset.checked_add(len) {
            Some(end) if end <= self.shared.image.size_bytes() => Ok(()),
            _ => Err(format!(
                "the primary wrote {len} bytes at {offset}, beyond this disk"
            )),
        }
    }

    fn copied(&self, offset: u64, content: &Content) -> Result<(), String> {
        self.check(offset, content.len())?;
        if !self.lock().joining {
            return Err("the primary sent a part of the first copy after its end".into());
        }
        self.shared
            .begin_mixing()
            .map_err(|error| failed("marked as incomplete", &error))?;
        self.shared
            .put(offset, content, true)
            .map_err(|error| failed("written", &error))
    }

    fn mirrored(&self, link: &Link, offset: u64, content: Content, unmap: bool) -> Result<(), String> {
        self.check(offset, content.len())?;
        let (joining, storage) = {
            let state = self.lock();
            (state.joining, state.storage)
        };
        if joining {
            self.shared
                .begin_mixing()
                .map_err(|error| failed("marked as incomplete", &error))?;
            return self
                .shared
                .put(offset, &content, unmap)
                .map_err(|error| failed("written", &error));
        }
        if storage == Storage::Gannet {
            let mut state = self.lock();
            state.switch.mirrored_write(offset, content);
            return self.press(&mut state, link);
        }
        self.shared
            .begin_mixing()
            .map_err(|error| failed("marked as incomplete", &error))?;
        // The backup VM must not read between the save and the write, or it sees what it may not (D1).
        let range = offset..offset + content.len();
        let _held = self.shared.ranges.lock(range.clone());
        let gaps = self.lock().switch.to_save(range);
        for gap in gaps {
            let mut old = vec![0; (gap.end - gap.start) as usize];
            self.shared
                .image
                .read(gap.start, &mut old)
                .map_err(|error| failed("read", &error))?;
            self.scratch(gap.start, &old)
                .map_err(|error| failed("written", &error))?;
            self.lock().switch.save(gap.start, Bytes::from(old));
        }
        self.shared
            .put(offset, &content, unmap)
            .map_err(|error| failed("written", &error))?;
        let mut state = self.lock();
        self.press(&mut state, link)
    }

    /// D6: asks for a sync once per epoch; gives up when the host's memory is at stake.
    fn press(&self, state: &mut State, link: &Link) -> Result<(), String> {
        match state.switch.pressure() {
            Pressure::None => {}
            Pressure::Full => {
                return Err(format!(
                    "the backup holds {} MiB of disk writes in memory, its limit: no sync came in time",
                    state.switch.bytes() >> 20
                ));
            }
            _ if !state.asked_for_sync && state.switch.wants_sync() => {
                state.asked_for_sync = true;
                state.asked_syncs += 1;
                link.push(Frame::NeedSync, Bytes::new());
                self.shared.event(DiskEvent::NeedSync);
            }
            _ => {}
        }
        Ok(())
    }

    // ---- what the backup VM does ----

    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + out.len() as u64;
        let direct = self.lock().storage != Storage::Gannet;
        let _held = direct.then(|| self.shared.ranges.lock(range.clone()));
        let mut gaps: Vec<_> = std::iter::once(range).collect();
        self.lock().switch.read(offset, out, &mut gaps);
        for gap in gaps {
            let at = (gap.start - offset) as usize..(gap.end - offset) as usize;
            self.shared.image.read(gap.start, &mut out[at])?;
        }
        Ok(())
    }

    pub(super) fn write(&self, offset: u64, content: Content) -> io::Result<()> {
        if let Content::Data(data) = &content {
            self.scratch(offset, data)?;
        }
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut state = self.lock();
        if state.failed.is_some() {
            return Err(io::Error::other(
                "this backup has failed and waits to be replaced",
            ));
        }
        state.switch.own_write(offset, content);
        if let Some(link) = link
            && let Err(reason) = self.press(&mut state, &link)
        {
            state.failed = Some(reason.clone());
            link.push(Frame::Refuse, Bytes::copy_from_slice(reason.as_bytes()));
            drop(state);
            self.shared.event(DiskEvent::BackupFailed {
                reason: reason.clone(),
            });
            return Err(io::Error::other(reason));
        }
        let until = Instant::now() + Tuning::default().throttle;
        state.delayed_writes += u64::from(state.switch.pressure() >= Pressure::Throttle);
        while state.switch.pressure() >= Pressure::Throttle && !state.expedite && !state.stop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
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
            state = self
                .changed
                .wait_timeout_while(state, timeout, |state| !is_over(state))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
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
        state.complete = true;
        state.asked_for_sync = false;
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until every committed sync is on the image.
    pub(super) fn wait_settled(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| {
                state.switch.next_settled().is_some() && state.failed.is_none()
            })
            .unwrap_or_else(PoisonError::into_inner);
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

    /// Ends the threads and hands out what must be on the image. The caller holds the gate (B2).
    pub(super) fn take_over(&self) -> Result<(Buffer, Term), DiskError> {
        self.stop("this host takes over");
        let mut state = self.lock();
        if !state.complete {
            return Err(DiskError::StillCopying);
        }
        if let Some(reason) = &state.failed {
            // Its VM was refused a write, or its image a sync: it is not what the clients were told.
            return Err(DiskError::Failed(reason.clone()));
        }
        Ok((state.switch.take_over(), state.term))
    }

    /// Ends receiver, answerer and flusher.
    pub(super) fn stop(&self, reason: &str) {
        self.lock().stop = true;
        self.changed.notify_all();
        if let Some(member) = &self.shared.group {
            member.group.wake();
        }
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(link) = link {
            link.close(reason);
        }
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            let _panicked = thread.join();
        }
    }

    // ---- what reaches the image ----

    fn flush_loop(&self, link: &Link) {
        enum Work {
            Settle(Epoch, Arc<Buffer>, Option<[u8; 16]>, Term),
            Light(u64),
        }
        loop {
            let work = {
                let mut state = self.lock();
                loop {
                    if state.stop || state.failed.is_some() {
                        return;
                    }
                    // Disks that move together move sync by sync.
                    if self.shared.group.is_none() {
                        state.switch.join_settled();
                    }
                    if let Some((epoch, buffer)) = state.switch.next_settled() {
                        break Work::Settle(epoch, buffer, state.next_pair, state.term);
                    }
                    if let Some(from) = state.light.take() {
                        break Work::Light(from);
                    }
                    state = self.wait(state);
                }
            };
            let done = match work {
                Work::Settle(epoch, buffer, pair, term) => {
                    let stopped = || self.lock().stop;
                    self.shared
                        .settle(term, epoch, &buffer, pair, &stopped)
                        .map(|()| {
                            let mut state = self.lock();
                            state.switch.settled(epoch);
                            while state.committed_at.front().is_some_and(|(at, _)| *at <= epoch) {
                                let (_, at) = state.committed_at.pop_front().expect("front exists");
                                state.settles += 1;
                                state.settle_ns += at.elapsed().as_nanos() as u64;
                            }
                            state.next_pair = None;
                            drop(state);
                            link.push(Frame::Committed { epoch }, Bytes::new());
                            self.shared.event(DiskEvent::Committed { epoch });
                        })
                }
                Work::Light(from) => {
                    let begun = Instant::now();
                    let done = self.light_pass(from);
                    self.lock().light_ns += begun.elapsed().as_nanos() as u64;
                    done
                }
            };
            if let Err(error) = done {
                if error.kind() == io::ErrorKind::Interrupted && self.lock().stop {
                    return;
                }
                if let Some(member) = &self.shared.group {
                    member.group.fail(&error.to_string());
                }
                let reason = failed("written", &error);
                self.lock().failed = Some(reason.clone());
                link.push(Frame::Refuse, Bytes::copy_from_slice(reason.as_bytes()));
                self.shared.event(DiskEvent::BackupFailed { reason });
            }
            self.changed.notify_all();
        }
    }

    /// One step of algorithm 1, on at most [`HASH_BYTES`]; asks for the next one itself.
    /// "If the sector in the PVM buffer has the same hash value as the same-indexed sector in the SVM buffer, then we can
    /// safely flush this sector into the secondary storage and free the corresponding memory space" (V).
    fn light_pass(&self, from: u64) -> io::Result<()> {
        let (pieces, term, seen_at) = {
            let state = self.lock();
            let pieces = state.switch.in_both(from, HASH_BYTES);
            (pieces, state.term, state.switch.committed())
        };
        let Some(last) = pieces.last() else { return Ok(()) };
        let next = last.offset + last.ours.len();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let verdicts = on_threads(&pieces, cores, Piece::is_equal);
        self.lock()
            .switch
            .compared(pieces.iter().map(|piece| piece.ours.len()).sum());
        // A long trim in both buffers holds no memory, and what it hides on the image would have to go through the journal.
        let equal: Vec<_> = pieces
            .into_iter()
            .zip(verdicts)
            .filter_map(|(piece, equal)| (equal && piece.ours.len() <= LIGHT_BYTES).then_some(piece))
            .collect();
        let batch = first_batch(&equal);
        // Where a batch is cut off, the rest is compared anew, which is nothing beside its way to the disk: what is cut out of a
        // run moves the rest of it, and a sync that comes in between must not make all of it be in vain.
        let next = match batch.last() {
            Some(last) if batch.len() < equal.len() => last.offset + last.ours.len(),
            _ => next,
        };
        let overtaken = |state: &State| state.stop || state.switch.committed() != seen_at;
        if overtaken(&self.lock()) {
            return Ok(());
        }
        if !batch.is_empty() {
            self.shared.settle_equal(term, batch)?;
        }
        let mut state = self.lock();
        state.switch.forget_equal(seen_at, batch);
        if !overtaken(&state) {
            state.light.get_or_insert(next);
        }
        Ok(())
    }
}

/// Bytes that one step of the lightweight checkpoint compares: so many that each core gets a share worth waking it for.
const HASH_BYTES: u64 = 8 << 20;
/// Bytes that it brings to the image at once: a committed sync, and a take-over, wait for no more than this.
const LIGHT_BYTES: u64 = 64 << 10;

/// The first of these pieces, about [`LIGHT_BYTES`].
fn first_batch(pieces: &[Piece]) -> &[Piece] {
    let mut bytes = 0;
    let full = pieces.iter().position(|piece| {
        bytes += piece.ours.len();
        bytes >= LIGHT_BYTES
    });
    &pieces[..full.map_or(pieces.len(), |last| last + 1)]
}

fn failed(what: &str, error: &io::Error) -> String {
    super::words::behind(&format!("the backup's disk cannot be {what}"), error)
}

/// The extents that a buffer touches.
pub(super) fn extents(buffer: &Buffer) -> ExtentSet {
    let mut extents = ExtentSet::default();
    for (offset, content) in buffer.runs() {
        extents.add(&(offset..offset + content.len()));
    }
    extents
}
