//! The first copy to a joining peer, while the VM writes.
//!
//! Decides: what of the extents that a peer may lack is sent, and how fast. Flow: an extent is read -> the peer is asked for the hash of its
//! own -> equal: it has it; else, also if the peer cannot read it, it is sent as it was read, or, if the VM wrote to it meanwhile, as it
//! is then.
//! Invariants: P1 and P7 of [`super`]; at most [`WINDOW`] extents are asked about at once, which is what is held in memory.
//! Not here: who is asked at all (`dunlin_core::disk::likeness`), the peer's answers' way here (`joining`).

use super::*;
use crate::disk::shared::hash;
use dunlin_core::disk::likeness::Likeness;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

/// Extents that the peer was asked about and has not answered: 8 MiB.
const WINDOW: usize = 8;
/// Answers that may wait: a peer that says more than it was asked is no peer.
pub(super) const MOST_ANSWERS: usize = WINDOW;
/// How often a copier that waits for an answer looks whether the peer is still there.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A copy that gets on, or waits because it is to take so long, says so as often: whoever waits for it knows by that alone that it is not stuck.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Where, and the hash of what the peer has there.
pub(super) type Answer = (u64, Bytes);

/// Why the copy does not go on.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    /// The link was closed during the copy.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// What is to be copied.
    #[error("this host's disk cannot be read for the copy: {0}")]
    Unread(io::Error),
}

/// An extent as it was read to ask about it.
struct Asked {
    hash: [u8; 16],
    data: Bytes,
}

/// What to do next.
enum Step {
    Extent(u64),
    Await,
    Whole,
    /// There is no such copy any more.
    Over,
}

/// The copier of one join.
pub(super) struct Copier<'a> {
    primary: &'a Primary,
    link: &'a Arc<Link>,
    answers: Receiver<Answer>,
    total: u64,
    pace: Pace,
    from: u64,
    asked: BTreeMap<u64, Asked>,
    likeness: Likeness,
    alike_bytes: u64,
    /// When it was last said how far it is.
    told: Instant,
}

impl<'a> Copier<'a> {
    pub(super) fn new(
        primary: &'a Primary,
        link: &'a Arc<Link>,
        answers: Receiver<Answer>,
        total: u64,
        bytes_per_s: u64,
    ) -> Self {
        let pace = Pace {
            started: Instant::now(),
            sent: 0,
            bytes_per_s,
        };
        Self {
            primary,
            link,
            answers,
            total,
            pace,
            from: 0,
            asked: BTreeMap::new(),
            likeness: Likeness::default(),
            alike_bytes: 0,
            told: Instant::now(),
        }
    }

    /// Until the peer has everything, or is lost.
    pub(super) fn run(mut self) {
        loop {
            let done = match self.next() {
                Step::Over => return,
                Step::Whole => {
                    let bytes = self.alike_bytes;
                    if bytes > 0 {
                        self.primary.shared.event(DiskEvent::Alike { bytes });
                    }
                    return self.primary.shared.event(DiskEvent::Copied);
                }
                Step::Extent(extent) => self.begin(extent),
                Step::Await => self.take_answer(),
            };
            match done {
                Ok(read) if self.wait_after(read) => return,
                Ok(_) => {}
                Err(error) => return self.primary.lost(self.link, &error.to_string()),
            }
        }
    }

    fn next(&mut self) -> Step {
        let mut state = self.primary.lock();
        let this = |peer: &&mut Peer| Arc::ptr_eq(&peer.link, self.link);
        let Some(peer) = state.peer.as_mut().filter(this) else {
            return Step::Over;
        };
        let Some(copying) = &mut peer.copying else {
            return Step::Over;
        };
        // What was put back more often than the disk has extents will not end by itself.
        copying.strict |= copying.again > self.total.max(64) * 2;
        if self.asked.len() == WINDOW {
            return Step::Await;
        }
        let open = |from| {
            let mut extents = copying.left.iter_from(from);
            extents.find(|extent| !self.asked.contains_key(extent))
        };
        let Some(extent) = open(self.from).or_else(|| open(0)) else {
            if !self.asked.is_empty() {
                return Step::Await;
            }
            let pair = Bytes::copy_from_slice(&peer.next_pair);
            self.link.push(Frame::CopyEnd, pair);
            peer.copying = None;
            return Step::Whole;
        };
        let left = copying.left.len();
        drop(state);
        if left.is_multiple_of(16) || self.told.elapsed() >= TELL_EVERY {
            self.tell(left);
        }
        self.from = extent + 1;
        Step::Extent(extent)
    }

    fn tell(&mut self, left: u64) {
        self.told = Instant::now();
        self.primary.shared.event(DiskEvent::CopyProgress {
            done_bytes: self.total.saturating_sub(left) * EXTENT_BYTES,
            total_bytes: self.total * EXTENT_BYTES,
        });
    }

    /// Waits as long as the limit asks; says whether the link was closed meanwhile. One extent may take a minute (1 MiB/s for 64 disks).
    fn wait_after(&mut self, read: u64) -> bool {
        self.pace.sent += read;
        loop {
            let due = self.pace.due();
            if self.link.wait_closed(due.min(TELL_EVERY)) {
                return true;
            }
            if due <= TELL_EVERY {
                return false;
            }
            let left = {
                let state = self.primary.lock();
                let copying = state.peer.as_ref().and_then(|peer| peer.copying.as_ref());
                copying.map(|copying| copying.left.len())
            };
            let Some(left) = left else { return false };
            self.tell(left);
        }
    }

    fn range(&self, extent: u64) -> Range<u64> {
        let start = extent * EXTENT_BYTES;
        start..(start + EXTENT_BYTES).min(self.primary.shared.image.size_bytes())
    }

    /// Asks about an extent, or sends it. Says how much of this host's disk was read.
    fn begin(&mut self, extent: u64) -> Result<u64, CopyError> {
        if self.likeness.asks() {
            self.ask(extent)
        } else {
            self.send(extent)
        }
    }

    fn ask(&mut self, extent: u64) -> Result<u64, CopyError> {
        self.link.wait_copy_room(EXTENT_BYTES)?;
        let range = self.range(extent);
        let _held = self.primary.shared.ranges.lock(range.clone());
        let (data, read) = self.read(&range)?;
        let Some(data) = data else {
            // Zeroes are sent sooner than asked about.
            self.push(extent, None);
            return Ok(read);
        };
        {
            let mut state = self.primary.lock();
            let Some(copying) = state.peer.as_mut().and_then(|peer| peer.copying.as_mut()) else {
                return Ok(0);
            };
            copying.unwritten.insert(extent);
        }
        let (offset, len) = (range.start, range.end - range.start);
        let hash = hash(&data);
        self.asked.insert(extent, Asked { hash, data });
        self.link.push(Frame::AskHash { offset, len }, Bytes::new());
        Ok(read)
    }

    /// What the peer has of an extent that it was asked about.
    fn take_answer(&mut self) -> Result<u64, CopyError> {
        let (offset, theirs) = match self.answers.recv_timeout(LOOK_EVERY) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                return match self.link.closed() {
                    Some(reason) => Err(Closed(reason).into()),
                    // As long as it takes: whoever waits for the copy to get on gives the join up.
                    None => Ok(0),
                };
            }
            Err(RecvTimeoutError::Disconnected) => return Err(Closed("the peer is gone".into()).into()),
        };
        let extent = offset / EXTENT_BYTES;
        let Some(asked) = self.asked.remove(&extent) else {
            return Ok(0);
        };
        let alike = asked.hash[..] == theirs[..];
        self.likeness.answered(alike);
        if !alike {
            self.link.wait_copy_room(EXTENT_BYTES)?;
        }
        let range = self.range(extent);
        {
            let _held = self.primary.shared.ranges.lock(range.clone());
            let unwritten = {
                let mut state = self.primary.lock();
                let copying = state.peer.as_mut().and_then(|peer| peer.copying.as_mut());
                let Some(copying) = copying else { return Ok(0) };
                let unwritten = copying.unwritten.remove(extent);
                if unwritten && alike {
                    copying.left.remove(extent);
                }
                unwritten
            };
            match (unwritten, alike) {
                (true, true) => {
                    self.alike_bytes += range.end - range.start;
                    return Ok(0);
                }
                (true, false) => {
                    self.push(extent, Some(asked.data));
                    return Ok(0);
                }
                (false, _) => {}
            }
        }
        self.send(extent)
    }

    /// An extent as it is now. It is read and pushed while its range is held, so that a guest's write to it is either in the copy or
    /// behind it (P1).
    fn send(&self, extent: u64) -> Result<u64, CopyError> {
        self.link.wait_copy_room(EXTENT_BYTES)?;
        let range = self.range(extent);
        let _held = self.primary.shared.ranges.lock(range.clone());
        let (data, read) = self.read(&range)?;
        self.push(extent, data);
        Ok(read)
    }

    /// What the image holds there, nothing where that is zeroes, and how much had to be read for it. The caller holds the range.
    fn read(&self, range: &Range<u64>) -> Result<(Option<Bytes>, u64), CopyError> {
        let image = &self.primary.shared.image;
        let len = range.end - range.start;
        let status = image.status(range.start, len);
        if status.is_ok_and(|status| status.iter().all(|(_, holds_data)| !holds_data)) {
            return Ok((None, 0));
        }
        let mut data = vec![0; len as usize];
        image.read(range.start, &mut data).map_err(CopyError::Unread)?;
        let zeroes = data.iter().all(|byte| *byte == 0);
        Ok(((!zeroes).then(|| data.into()), len))
    }

    /// Sends what an extent holds, for a range that the caller holds.
    fn push(&self, extent: u64, data: Option<Bytes>) {
        {
            let mut state = self.primary.lock();
            let Some(copying) = state.peer.as_mut().and_then(|peer| peer.copying.as_mut()) else {
                return;
            };
            copying.left.remove(extent);
        }
        let range = self.range(extent);
        let (offset, len) = (range.start, range.end - range.start);
        let (frame, payload) = match data {
            Some(data) => (Frame::Copy { offset }, data),
            None => (Frame::CopyZero { offset, len }, Bytes::new()),
        };
        self.link.push(frame, payload);
    }
}

/// The bandwidth limit of a copy.
struct Pace {
    started: Instant,
    sent: u64,
    bytes_per_s: u64,
}

impl Pace {
    /// How long from now on nothing more is to be sent.
    fn due(&self) -> Duration {
        if self.bytes_per_s == 0 {
            return Duration::ZERO;
        }
        let due = Duration::from_secs_f64(self.sent as f64 / self.bytes_per_s as f64);
        due.saturating_sub(self.started.elapsed())
    }
}
