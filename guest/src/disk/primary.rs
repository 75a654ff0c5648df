//! Decides: what a primary's disk writes cost its backup: when they are mirrored, when only noted, when they wait.
//!
//! Flow: a guest's write holds its range -> image -> noted and pushed under one lock -> answered. A joining peer gets the
//! extents that it lacks from the copier while the VM runs.
//! Invariants: **P1** for overlapping writes, the order on the image is the order in the mirror; **P2** a write that
//! was answered before [`Primary::mark`] is before the mark in the stream; **P3** what the peer may lack is always
//! in `extents`; **P4** a lost peer turns the role to *alone* and no write waits longer than the link's stall time; **P5** the
//! map loses an extent, and the disk gets the name of its pair, only after a flush that began when the peer had committed
//! all that was written there (M3), and nobody waits for that flush; **P6** a peer that greets is taken only by the join that asked it,
//! if nobody has given that up; **P7** an extent that the peer has already is not sent, if nobody wrote to it since this host read it
//! to ask.
//! Source: *GANNET* IV-A: "Write requests from the primary VM are treated as write-through: they are immediately applied
//! to the primary disk, and asynchronously mirrored to PVM buffer on the secondary."
//! Not here: the greeting (`joining`), the first copy (`copying`), who clears the map and when (`keeper`), the file that keeps the extents over a crash (`dirty_map`), the stream itself
//! (`link`).

mod copying;
mod joining;
mod keeper;

use super::{
    DiskError, DiskEvent, DiskStatus, Shared,
    link::{self, Closed, Link, MirrorStream, Tuning},
};
use bytes::Bytes;
use dunlin_core::{
    disk::{
        EpochExtents, ExtentSet, Storage,
        extents::{EXTENT_BYTES, extents_of},
        mirror::{Frame, Hello},
    },
    units::Epoch,
};
use keeper::{Keep, Orders};
use parking_lot::{Mutex, MutexGuard};
use std::{
    io,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// How a new backup is brought in.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachOptions {
    /// Copy at most this many bytes per second; 0: as fast as it goes.
    pub copy_bytes_per_s: u64,
    /// Copy the whole disk even if the dirty extents would do.
    pub whole: bool,
    /// Queue and stall limits.
    pub tuning: Tuning,
}

/// The first copy to a joining peer.
struct Copying {
    left: ExtentSet,
    /// Extents that were put back because the queue was full when the guest wrote.
    again: u64,
    /// The queue is no longer skipped: writes wait for room, so the copy ends.
    strict: bool,
    /// Extents that the peer was asked about, and that nobody wrote since they were read for that (P7).
    unwritten: ExtentSet,
}

impl Copying {
    /// Somebody wrote there, or tried to: what the peer says of it is out of date.
    fn written(&mut self, range: &Range<u64>) {
        for extent in extents_of(range) {
            self.unwritten.remove(extent);
        }
    }
}

struct Peer {
    link: Arc<Link>,
    copying: Option<Copying>,
    /// The mark that closes the join; its commit makes the peer's image a whole one.
    joined_at: Option<Epoch>,
    joined: bool,
    next_pair: [u8; 16],
}

/// A join whose peer has not greeted yet.
struct Greeting {
    join: u64,
    /// Breaks its stream.
    shutdown: Arc<dyn Fn() + Send + Sync>,
}

struct State {
    extents: EpochExtents,
    peer: Option<Peer>,
    /// How many joins have begun: a number for each.
    joins: u64,
    /// P6.
    greeting: Option<Greeting>,
    marked: Epoch,
    cleared: Instant,
    /// What was written since the map's clearing began, while it is under way.
    written_since: Option<ExtentSet>,
    /// Flushes of the image that had failed when the map was last looked at to be cleared.
    failed_flushes: u64,
    /// What was in the map when one failed: it may be lost, and no later flush says so. It stays there for as long as this host is
    /// a primary (M3).
    doubtful: ExtentSet,
}

impl State {
    /// Before the map is cleared: has a flush failed since?
    fn doubt(&mut self, shared: &Shared) {
        let failed_flushes = shared.image.failed_flushes();
        if self.failed_flushes != failed_flushes {
            self.failed_flushes = failed_flushes;
            self.doubtful.union(&shared.dirty.all());
        }
    }

    fn note(&mut self, range: &Range<u64>) {
        self.extents.note(range);
        if let Some(written) = &mut self.written_since {
            written.add(range);
        }
    }
}

/// The role of the host whose VM speaks: alone, or with a backup.
pub(super) struct Primary {
    pub(super) shared: Arc<Shared>,
    state: Mutex<State>,
    /// One clearing of the map at a time.
    clearing: Mutex<()>,
}

impl Primary {
    pub(super) fn new(shared: Arc<Shared>, base: ExtentSet) -> Arc<Self> {
        let state = State {
            extents: EpochExtents::with_base(base),
            peer: None,
            joins: 0,
            greeting: None,
            marked: Epoch(0),
            cleared: Instant::now(),
            written_since: None,
            failed_flushes: 0,
            doubtful: ExtentSet::default(),
        };
        shared.image.owes_nothing();
        Arc::new(Self {
            shared,
            state: Mutex::new(state),
            clearing: Mutex::new(()),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// (has a peer, whose copy is whole)
    pub(super) fn peer(&self) -> (bool, bool) {
        let state = self.lock();
        (
            state.peer.is_some(),
            state.peer.as_ref().is_some_and(|peer| peer.copying.is_none()),
        )
    }

    fn link(&self) -> Option<Arc<Link>> {
        self.lock().peer.as_ref().map(|peer| peer.link.clone())
    }

    pub(super) fn expedite(&self, on: bool) {
        if let Some(link) = self.link() {
            link.expedite(on);
        }
    }

    /// Lets the backup go, on purpose, or whoever was to become it.
    pub(super) fn detach(&self, reason: &str) {
        self.give_up_greeting(reason);
        if let Some(link) = self.link() {
            self.lost(&link, reason);
        }
    }

    /// Nothing while somebody else holds the state: whoever asks may not be able to wait.
    pub(super) fn describe(&self, status: &mut DiskStatus) -> Option<()> {
        let state = self.state.try_lock()?;
        status.dirty_bytes = state.extents.needed_len() * EXTENT_BYTES;
        if let Some(peer) = &state.peer {
            let left = peer.copying.as_ref().map_or(0, |copying| copying.left.len());
            status.role = "primary";
            status.copied = peer.copying.is_none();
            status.copy_left_bytes = left * EXTENT_BYTES;
            status.queued_bytes = peer.link.queued_bytes();
            status.peer_held_bytes = peer.link.held_bytes();
            status.peer_acknowledged = peer.link.acknowledged();
        }
        Some(())
    }

    /// Before a write: waits for room in the queue, if this write has to be mirrored. `None`: nothing to wait for, or
    /// the peer was just lost.
    fn before(&self, range: &Range<u64>) {
        let waits = {
            let state = self.lock();
            state.peer.as_ref().and_then(|peer| match &peer.copying {
                Some(copying) if !copying.strict || copying.left.covers(range) => None,
                _ => Some(peer.link.clone()),
            })
        };
        let Some(link) = waits else { return };
        let waited = link.wait_room(range.end - range.start);
        match waited {
            Ok(()) => link.throttle(self.shared.limits.throttle_at_bytes),
            Err(Closed(reason)) => self.lost(&link, &reason),
        }
    }

    /// After a write, while its range is still held: notes it and mirrors it (P1, P2, P3). Returns the frame's number
    /// where the write must wait for the peer (storage `sync`).
    fn after(&self, range: &Range<u64>, frame: Frame, payload: Bytes) -> Option<(Arc<Link>, u64)> {
        let mut state = self.lock();
        state.note(range);
        let peer = state.peer.as_mut()?;
        if let Some(copying) = &mut peer.copying {
            copying.written(range);
            if copying.left.covers(range) {
                return None; // The copier brings it.
            }
            if !copying.strict && !peer.link.has_room(payload.len() as u64) {
                for extent in extents_of(range) {
                    copying.left.insert(extent);
                    copying.again += 1;
                }
                return None;
            }
        }
        let number = peer.link.push(frame, payload);
        let waits = self.shared.storage == Storage::Sync && peer.copying.is_none();
        waits.then(|| (peer.link.clone(), number))
    }

    /// Before a write reaches the map or the image: so that clearing the map cannot miss it (M2). Noted again afterwards,
    /// because a mark may lie in between.
    fn note(&self, range: &Range<u64>) {
        self.lock().note(range);
    }

    fn wait_for_peer(&self, pushed: Option<(Arc<Link>, u64)>) {
        if let Some((link, number)) = pushed
            && let Err(Closed(reason)) = link.wait_acked(number)
        {
            self.lost(&link, &reason);
        }
    }

    pub(super) fn write(&self, offset: u64, data: Bytes) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        self.before(&range);
        self.change(&range, Frame::Write { offset }, data)
    }

    pub(super) fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.before(&(offset..offset + 1));
        self.change(
            &(offset..offset + len),
            Frame::Zero { offset, len, unmap },
            Bytes::new(),
        )
    }

    /// Note, image, mirror, in this order, with the range held (P1, M1).
    fn change(&self, range: &Range<u64>, frame: Frame, payload: Bytes) -> io::Result<()> {
        self.note(range);
        let pushed = {
            let _held = self.shared.ranges.lock(range.clone());
            let done = self.shared.dirty.ensure(range).and_then(|()| match frame {
                Frame::Zero { offset, len, unmap } => self.shared.image.zero(offset, len, unmap),
                _ => self.shared.image.write(range.start, &payload),
            });
            if done.is_err() {
                self.distrust(range);
            }
            self.shared.written(done, range)?;
            self.after(range, frame, payload)
        };
        self.wait_for_peer(pushed);
        Ok(())
    }

    /// A write failed, and nobody knows how much of it is on the image: the peer's is different until the next copy.
    fn distrust(&self, range: &Range<u64>) {
        let mut suspect = ExtentSet::default();
        suspect.add(range);
        let mut state = self.lock();
        state.extents.distrust(range);
        if let Some(copying) = state.peer.as_mut().and_then(|peer| peer.copying.as_mut()) {
            copying.written(range);
            copying.left.union(&suspect);
        }
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        let pushed = if self.shared.storage == Storage::Sync {
            let state = self.lock();
            state
                .peer
                .as_ref()
                .filter(|peer| peer.copying.is_none())
                .map(|peer| (peer.link.clone(), peer.link.push(Frame::Flush, Bytes::new())))
        } else {
            None
        };
        self.shared
            .image
            .flush()
            .inspect_err(|error| self.shared.image_failed("flush", error))?;
        self.wait_for_peer(pushed);
        Ok(())
    }

    /// The link to a backup whose first copy is whole.
    pub(super) fn whole_peer(&self) -> Result<Arc<Link>, DiskError> {
        match &self.lock().peer {
            None => Err(DiskError::NoBackup),
            Some(peer) if peer.copying.is_some() => Err(DiskError::StillCopying),
            Some(peer) => Ok(peer.link.clone()),
        }
    }

    /// Sends what the image holds, for a range that the caller holds.
    pub(super) fn mirror_again(&self, range: &Range<u64>, data: Bytes) {
        self.after(range, Frame::Write { offset: range.start }, data);
    }

    /// P2: closes the epoch in the stream.
    pub(super) fn mark(&self, epoch: Epoch) -> Result<(), DiskError> {
        let mut state = self.lock();
        let state = &mut *state;
        let Some(peer) = &mut state.peer else {
            return Err(DiskError::NoBackup);
        };
        if peer.copying.is_some() {
            return Err(DiskError::StillCopying);
        }
        if epoch <= state.marked {
            return Err(DiskError::EpochUsed {
                asked: epoch,
                last: state.marked,
            });
        }
        state.marked = epoch;
        state.extents.mark(epoch);
        peer.joined_at.get_or_insert(epoch);
        peer.link.push(Frame::Mark { epoch }, Bytes::new());
        Ok(())
    }

    /// P4. Safe to call twice, and for a link that is no longer the current one.
    pub(super) fn lost(&self, link: &Arc<Link>, reason: &str) {
        link.close(reason);
        let gone = {
            let mut state = self.lock();
            let current = state
                .peer
                .as_ref()
                .is_some_and(|peer| Arc::ptr_eq(&peer.link, link));
            if current {
                state.peer = None;
                state.extents.gather();
            }
            current
        };
        if gone {
            let reason = link.closed().unwrap_or_else(|| reason.into());
            self.shared.event(DiskEvent::BackupLost { reason });
        }
    }

    fn committed(&self, link: &Arc<Link>, epoch: Epoch, orders: &Orders) {
        let keep = {
            let mut state = self.lock();
            let state = &mut *state;
            let Some(peer) = state.peer.as_mut().filter(|peer| Arc::ptr_eq(&peer.link, link)) else {
                return;
            };
            let joined = !peer.joined && peer.joined_at.is_some_and(|joined_at| joined_at <= epoch);
            peer.joined |= joined;
            state.extents.committed(epoch, joined);
            let due = joined || state.cleared.elapsed() >= link.clear_every();
            if due {
                state.cleared = Instant::now();
            }
            match joined {
                true => Some(Keep::Pair(epoch, peer.next_pair)),
                false => due.then_some(Keep::Clear),
            }
        };
        let tells = !matches!(keep, Some(Keep::Pair(..)));
        if let Some(keep) = keep {
            orders.give(keep);
        }
        if tells {
            self.shared.event(DiskEvent::Committed { epoch });
        }
    }
}
