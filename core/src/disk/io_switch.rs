//! What it decides: the backup's I/O switch. Which layer answers a read, where a write goes, and what reaches the image
//! at a sync, in idle time and at fail-over.
//!
//! "The I/O switch redirects the disk requests to different endpoints" (III): PVM buffer, SVM buffer, storage device.
//! Layers that the backup VM sees, first hit wins:
//!
//! ```text
//! gannet:       SVM | settled syncs on their way to the image, newest first | image
//! colo, sync:   SVM | what mirrored writes overwrote, oldest first          | image
//! ```
//!
//! Invariants D1 to D6 of [`super`]. Not here: the image, the journal, the threads that flush (`guest::disk`).

use super::buffer::{Buffer, Content, Shared};
use crate::units::Epoch;
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// How a backup treats mirrored writes: GANNET, and two rivals to compare it with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Storage {
    /// Kept in the PVM buffer until the sync.
    #[default]
    Gannet,
    /// COLO: written to the backup's disk at once; what they overwrite is kept in memory for the backup VM.
    Colo,
    /// As `Colo`, and the primary's write waits until the backup's disk has it (DRBD's protocol C).
    Sync,
}

impl Storage {
    /// All of them, by the name that a VM's file has.
    pub const NAMES: [(&'static str, Self); 3] = [
        ("gannet", Self::Gannet),
        ("colo", Self::Colo),
        ("sync", Self::Sync),
    ];

    /// The name that a VM's file has.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES
            .iter()
            .find(|(_, storage)| *storage == self)
            .map_or("", |(name, _)| name)
    }
}

/// No name of a kind of storage.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is none of gannet, colo, sync")]
pub struct UnknownStorage(pub String);

impl std::str::FromStr for Storage {
    type Err = UnknownStorage;

    fn from_str(text: &str) -> Result<Self, UnknownStorage> {
        Self::NAMES
            .iter()
            .find(|(name, _)| *name == text)
            .map(|(_, storage)| *storage)
            .ok_or_else(|| UnknownStorage(text.to_owned()))
    }
}

/// How full the buffers are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Pressure {
    /// Room.
    None,
    /// "If the size of the buffer exceeds this threshold, GANNET will proactively call the upper active-active
    /// replication module to invoke a checkpoint" (V).
    WantsSync,
    /// Writers are slowed down until a sync frees memory.
    Throttle,
    /// More must not be taken in: the backup gives up rather than exhaust the host's memory.
    Full,
}

/// What the backup may hold in memory for one disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// From here on a sync is asked for.
    pub sync_at_bytes: u64,
    /// From here on writers wait.
    pub throttle_at_bytes: u64,
    /// Never more than this (plus the requests that were already in flight).
    pub most_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sync_at_bytes: 64 << 20,
            throttle_at_bytes: 128 << 20,
            most_bytes: 512 << 20,
        }
    }
}

/// What a caller got wrong, or a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwitchError {
    /// D2.
    #[error(
        "sync {asked:?} cannot be committed: the primary's mark {asked:?} has not arrived (last is {marked:?}); wait for it before the sync is acknowledged"
    )]
    MarkMissing {
        /// The sync that was to be committed.
        asked: Epoch,
        /// The last mark that arrived.
        marked: Epoch,
    },
    /// D5.
    #[error(
        "mark {got:?} does not follow mark {marked:?}: the mirror stream is not this disk's, or an epoch was used twice"
    )]
    MarkBackwards {
        /// What arrived.
        got: Epoch,
        /// What had arrived before.
        marked: Epoch,
    },
}

/// Counters of the lightweight checkpoint and the buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwitchCounters {
    /// Mirrored writes taken in.
    pub mirrored_bytes: u64,
    /// The backup VM's own writes taken in.
    pub own_bytes: u64,
    /// Bytes compared in idle time.
    pub compared_bytes: u64,
    /// Of these, found equal and settled.
    pub settled_bytes: u64,
    /// Bytes handed to the image by commits.
    pub committed_bytes: u64,
    /// The most memory that the buffers ever held.
    pub peak_bytes: u64,
}

#[derive(Debug, Default)]
struct Segment {
    /// The sync whose mark closed it; none while it is open.
    mark: Option<Epoch>,
    /// Gannet: what the primary wrote. Colo: what its writes overwrote.
    buffer: Buffer,
}

/// The backup's I/O switch for one disk.
#[derive(Debug)]
pub struct Switch {
    storage: Storage,
    limits: Limits,
    svm: Buffer,
    /// Ascending; the last one is open.
    segments: VecDeque<Segment>,
    /// Committed, and on the way to the image. Ascending.
    settled: VecDeque<(Epoch, Arc<Buffer>)>,
    marked: Epoch,
    committed: Epoch,
    counters: SwitchCounters,
}

impl Switch {
    /// A switch over an image that holds exactly the sync `committed`.
    /// "At startup, the I/O switch creates two in-memory buffers, namely the PVM buffer and the SVM buffer" (III).
    #[must_use]
    pub fn new(storage: Storage, limits: Limits, committed: Epoch) -> Self {
        Self {
            storage,
            limits,
            svm: Buffer::default(),
            segments: VecDeque::from([Segment::default()]),
            settled: VecDeque::new(),
            marked: committed,
            committed,
            counters: SwitchCounters::default(),
        }
    }

    /// The last mark that arrived.
    #[must_use]
    pub fn marked(&self) -> Epoch {
        self.marked
    }

    /// The last sync that the view holds.
    #[must_use]
    pub fn committed(&self) -> Epoch {
        self.committed
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> SwitchCounters {
        self.counters
    }

    /// Memory of both buffers and of what is on the way to the image.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pvm_bytes()
            + self.svm.bytes()
            + self.settled.iter().map(|(_, buffer)| buffer.bytes()).sum::<u64>()
    }

    /// Memory of the PVM buffer (colo: of what is kept to undo).
    #[must_use]
    pub fn pvm_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.buffer.bytes()).sum()
    }

    /// Memory of the SVM buffer.
    #[must_use]
    pub fn svm_bytes(&self) -> u64 {
        self.svm.bytes()
    }

    /// D6: what the memory in use asks for.
    #[must_use]
    pub fn pressure(&self) -> Pressure {
        match self.bytes() {
            bytes if bytes >= self.limits.most_bytes => Pressure::Full,
            bytes if bytes >= self.limits.throttle_at_bytes => Pressure::Throttle,
            _ if self.wants_sync() => Pressure::WantsSync,
            _ => Pressure::None,
        }
    }

    /// Whether a sync would free what makes the buffers full. What is committed already waits for the image, and another
    /// sync would not bring it there sooner.
    #[must_use]
    pub fn wants_sync(&self) -> bool {
        self.pvm_bytes() + self.svm.bytes() >= self.limits.sync_at_bytes
    }

    /// The backup VM writes. "The secondary I/O switch buffers the write requests from the secondary VM as well because
    /// the modified disk contents need to be cleaned in the checkpoint" (III).
    pub fn own_write(&mut self, offset: u64, content: Content) {
        self.counters.own_bytes += content.len();
        self.svm.put(offset, content);
        self.note_peak();
    }

    /// D1: fills what the layers hold and leaves in `gaps` what must be read from the image. `gaps` are ascending disk
    /// ranges within `out`, which stands for the disk from `base` on.
    /// "In order to avoid returning stale data, the disk manager will try to read the requested data from SVM buffer.
    /// If the requested data does not exist in SVM buffer, disk manager will then read the data from the secondary
    /// storage" (IV-A).
    pub fn read(&self, base: u64, out: &mut [u8], gaps: &mut Vec<Range<u64>>) {
        self.svm.overlay(base, out, gaps);
        for (_, buffer) in self.settled.iter().rev() {
            buffer.overlay(base, out, gaps);
        }
        if self.storage != Storage::Gannet {
            for segment in &self.segments {
                segment.buffer.overlay(base, out, gaps);
            }
        }
    }

    /// As [`Self::read`], but the primary's disk as of the last frame that was taken in: for verification.
    pub fn read_mirrored(&self, base: u64, out: &mut [u8], gaps: &mut Vec<Range<u64>>) {
        if self.storage != Storage::Gannet {
            return;
        }
        for segment in self.segments.iter().rev() {
            segment.buffer.overlay(base, out, gaps);
        }
        for (_, buffer) in self.settled.iter().rev() {
            buffer.overlay(base, out, gaps);
        }
    }

    /// A layer holds something within `range`.
    #[must_use]
    pub fn touches(&self, range: Range<u64>) -> bool {
        let undo = self
            .segments
            .iter()
            .filter(|_| self.storage != Storage::Gannet)
            .map(|segment| &segment.buffer);
        let settled = self.settled.iter().map(|(_, buffer)| &**buffer);
        std::iter::once(&self.svm)
            .chain(settled)
            .chain(undo)
            .any(|layer| layer.overlaps(range.clone()).next().is_some())
    }

    /// A mirrored write arrives (gannet). "Upon receiving the mirrored disk write requests, the secondary I/O switch
    /// stores it in the PVM buffer" (III).
    ///
    /// # Panics
    /// When the storage is not GANNET: there the write goes to the image, after [`Self::to_save`].
    pub fn mirrored_write(&mut self, offset: u64, content: Content) {
        assert_eq!(
            self.storage,
            Storage::Gannet,
            "colo and sync write to the image, see to_save"
        );
        self.counters.mirrored_bytes += content.len();
        self.open().put(offset, content);
        self.note_peak();
    }

    /// Colo and sync: a mirrored write of `range` is about to hit the image. What must be read from the image and given
    /// to [`Self::save`] first, so that the backup VM goes on seeing it.
    #[must_use]
    pub fn to_save(&self, range: Range<u64>) -> Vec<Range<u64>> {
        self.segments
            .back()
            .map_or_else(Vec::new, |open| open.buffer.missing(range))
    }

    /// Colo and sync: keeps what a mirrored write overwrites. What was a hole takes no memory.
    pub fn save(&mut self, offset: u64, old: Content) {
        self.counters.mirrored_bytes += old.len();
        self.open().put(offset, old);
        self.note_peak();
    }

    fn open(&mut self) -> &mut Buffer {
        if self.segments.back().is_none_or(|last| last.mark.is_some()) {
            self.segments.push_back(Segment::default());
        }
        &mut self.segments.back_mut().expect("pushed above").buffer
    }

    /// The primary's mark arrives: "a commit message at the end to indicate it has finished forwarding all the primary
    /// write requests since the last checkpoint" (III).
    ///
    /// # Errors
    /// A mark that does not grow.
    pub fn mark(&mut self, epoch: Epoch) -> Result<(), SwitchError> {
        if epoch <= self.marked {
            return Err(SwitchError::MarkBackwards {
                got: epoch,
                marked: self.marked,
            });
        }
        self.open();
        self.segments.back_mut().expect("open() made one").mark = Some(epoch);
        self.segments.push_back(Segment::default());
        self.marked = epoch;
        Ok(())
    }

    /// The sync is whole: "it cleans the SVM buffer and flushes the PVM buffer into the secondary storage" (IV-A). The
    /// view is the primary's disk at the mark at once (D3); what must reach the image is in [`Self::next_settled`].
    ///
    /// # Errors
    /// D2: the mark has not arrived.
    pub fn commit(&mut self, epoch: Epoch) -> Result<(), SwitchError> {
        if epoch > self.marked {
            return Err(SwitchError::MarkMissing {
                asked: epoch,
                marked: self.marked,
            });
        }
        let mut all = Buffer::default();
        while self
            .segments
            .front()
            .and_then(|segment| segment.mark)
            .is_some_and(|mark| mark <= epoch)
        {
            let segment = self.segments.pop_front().expect("front exists");
            all.merge(segment.buffer);
        }
        self.svm = Buffer::default();
        if self.storage != Storage::Gannet {
            all = Buffer::default(); // The image has it already; what was overwritten is of no more use.
        }
        self.counters.committed_bytes += all.runs().map(|(_, content)| content.len()).sum::<u64>();
        self.settled.push_back((epoch, Arc::new(all)));
        self.committed = self.committed.max(epoch);
        assert!(self.committed <= self.marked, "D5");
        Ok(())
    }

    /// The oldest committed sync whose bytes are not on the image yet.
    #[must_use]
    pub fn next_settled(&self) -> Option<(Epoch, Arc<Buffer>)> {
        self.settled.front().cloned()
    }

    /// All committed syncs whose bytes are not on the image yet become one: what a later one overwrites is not written at all.
    /// A disk that is slower than its primary's catches up by this.
    pub fn join_settled(&mut self) {
        let Some((epoch, _)) = self.settled.back().filter(|_| self.settled.len() > 1) else {
            return;
        };
        let epoch = *epoch;
        let mut all = Buffer::default();
        for (_, buffer) in self.settled.drain(..) {
            all.merge(Buffer::clone(&buffer));
        }
        self.settled.push_back((epoch, Arc::new(all)));
    }

    /// Its bytes are on the image.
    pub fn settled(&mut self, epoch: Epoch) {
        while self.settled.front().is_some_and(|(front, _)| *front <= epoch) {
            self.settled.pop_front();
        }
    }

    /// Fail-over: what must be on the image before the VM speaks; everything else is dropped (D4).
    /// "The secondary I/O switch flushes the SVM buffer into the secondary storage [...] this flush action in the
    /// failover case should not return until the whole SVM buffer has been applied" (IV-A).
    #[must_use]
    pub fn take_over(&mut self) -> Buffer {
        let mut all = Buffer::default();
        for (_, buffer) in self.settled.drain(..) {
            all.merge(Buffer::clone(&buffer));
        }
        if self.storage != Storage::Gannet {
            // The oldest saved bytes are what the VM saw: they go on top.
            for segment in self.segments.drain(..).rev() {
                all.merge(segment.buffer);
            }
        }
        all.merge(std::mem::take(&mut self.svm));
        self.segments = VecDeque::from([Segment::default()]);
        all
    }

    /// Idle time, first half: pieces that both buffers hold, from `from` on, at most about `max_bytes`. Nothing while a
    /// sync is on its way (a mark without its commit, or bytes not yet on the image): a piece from beyond the mark would
    /// reach the image too early.
    /// "Upon receiving this notification, the I/O switch performs a bitwise AND operation" (V).
    #[must_use]
    pub fn in_both(&self, from: u64, max_bytes: u64) -> Vec<Shared> {
        if self.storage != Storage::Gannet || self.segments.len() != 1 || !self.settled.is_empty() {
            return Vec::new();
        }
        self.segments[0]
            .buffer
            .intersection(&self.svm, from, COMPARE_BYTES, max_bytes)
    }

    /// Idle time, second half: these equal pieces are on the image and leave memory, unless they changed meanwhile, or
    /// another sync than `seen_at` was committed since [`Self::in_both`] found them: then they are on the image's way anyhow, as
    /// a part of that sync, and perhaps newer.
    /// "We can safely flush this sector into the secondary storage and free the corresponding memory space" (V).
    pub fn forget_equal(&mut self, seen_at: Epoch, equal: &[Shared]) {
        if self.committed != seen_at {
            return;
        }
        let Some(segment) = self.segments.front_mut() else {
            return;
        };
        // All are looked at before any is cut out: cutting may move the rest of a run to a smaller allocation.
        let unchanged: Vec<_> = equal
            .iter()
            .filter(|piece| {
                segment.buffer.holds_unchanged(piece.offset, &piece.ours)
                    && self.svm.holds_unchanged(piece.offset, &piece.theirs)
            })
            .collect();
        for piece in unchanged {
            let range = piece.offset..piece.offset + piece.ours.len();
            segment.buffer.carve(range.clone());
            self.svm.carve(range);
            self.counters.settled_bytes += piece.ours.len();
        }
    }

    /// So many bytes were compared in idle time.
    pub fn compared(&mut self, bytes: u64) {
        self.counters.compared_bytes += bytes;
    }

    fn note_peak(&mut self) {
        self.counters.peak_bytes = self.counters.peak_bytes.max(self.bytes());
    }
}

/// Pieces are compared in units of this size: a file system's block.
pub const COMPARE_BYTES: u64 = 4096;
