//! What the primary says: its greeting, its first copy, its writes, its marks.
//!
//! Decides: what each frame does to the switch. Flow: the receiver thread: [`Backup::run`], until the stream ends.
//! Invariants: what a peer names outside of the image ends the session, and nothing else.
//! Not here: what the backup's VM writes ([`super`]).

use super::*;
use crate::disk::words;
use dunlin_core::disk::{SwitchError, mirror::MirrorError};

/// So much of what a mirrored write overwrites is read and kept at once.
const KEPT_AT_ONCE_BYTES: u64 = 1 << 20;

/// Why a backup does not follow its primary any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    /// The primary, or what lies between, is gone.
    #[error("the primary's mirror stream ended: {0}")]
    StreamEnded(io::Error),
    /// The stream carries no frames of ours.
    #[error(transparent)]
    Mirror(#[from] MirrorError),
    /// This host's greeting cannot be made.
    #[error(transparent)]
    OwnGreeting(io::Error),
    /// The two images cannot be a pair.
    #[error("the backup's disk has {ours} bytes, the primary's {theirs}: make them the same size")]
    OtherSize {
        /// This host's.
        ours: u64,
        /// The primary's.
        theirs: u64,
    },
    /// What is here is newer than what would be copied over it.
    #[error(
        "this disk was written in term {}, later than the primary's {}: it must not be overwritten by an older one",
        .ours.0,
        .theirs.0
    )]
    OlderTerm {
        /// In which this image was written last.
        ours: Term,
        /// In which the primary's was.
        theirs: Term,
    },
    /// The two hosts were not set up alike.
    #[error(
        "the primary's disk is replicated as {theirs:?}, the backup's as {ours:?}: give both the same `storage`"
    )]
    OtherStorage {
        /// The primary's.
        theirs: Storage,
        /// This host's.
        ours: Storage,
    },
    /// The primary's mark is not the next one.
    #[error(transparent)]
    Mark(#[from] SwitchError),
    /// The image, or what is kept about it, could not be treated so.
    #[error("{}", blamed(.what, .error))]
    Disk {
        /// What could not be done.
        what: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// More than a frame may carry.
    #[error("the primary asked for the hash of too much at once")]
    TooMuch,
    /// Only a backup says that.
    #[error("the primary sent {0:?}, which only a backup may")]
    Forbidden(Frame),
    /// It names what this disk does not have.
    #[error("the primary wrote {len} bytes at {offset}, beyond this disk")]
    Beyond {
        /// Where.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// The first copy was over.
    #[error("the primary sent a part of the first copy after its end")]
    CopyIsOver,
    /// This host's memory is at stake (D6).
    #[error("the backup holds {} MiB of disk writes in memory, its limit: no sync came in time", .0 >> 20)]
    Full(u64),
}

pub(super) fn blamed(what: &str, error: &io::Error) -> String {
    words::behind(&format!("the backup's disk cannot be {what}"), error)
}

/// That the image, or what is kept about it, cannot be `what`.
pub(super) fn cannot_be(what: &'static str) -> impl FnOnce(io::Error) -> FollowError {
    move |error| FollowError::Disk { what, error }
}

/// What this host says of itself. More extents than one frame of `most_bytes` may name are said by no pair at all: the primary then goes
/// through the whole disk, and sends what differs.
fn welcome(mut ours: Hello, extents: &ExtentSet, most_bytes: u64) -> Vec<u8> {
    let bytes = Hello::BYTES as u64 + extents.len() * 8;
    if bytes > most_bytes {
        ours.pair = [0; 16];
        return ours.encode();
    }
    let mut welcome = ours.encode();
    extents
        .iter()
        .for_each(|extent| welcome.extend(extent.to_le_bytes()));
    welcome
}

impl Backup {
    pub(super) fn run(&self, link: &Arc<Link>, mut reader: Box<dyn io::Read + Send>) {
        let reason = match self.receive_all(link, &mut *reader) {
            Ok(never) => match never {},
            Err(error) => error.to_string(),
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
    ) -> Result<std::convert::Infallible, FollowError> {
        let mut reader = io::BufReader::with_capacity(256 << 10, reader);
        let mut number = 0;
        let mut unacked_bytes = 0;
        loop {
            let (frame, payload) = match link::receive(&mut reader) {
                Ok(received) => received,
                Err(ReceiveError::Io(error)) => return Err(FollowError::StreamEnded(error)),
                Err(ReceiveError::Mirror(error)) => return Err(error.into()),
            };
            if frame == Frame::Hello {
                self.greet(link, &payload)?;
                continue;
            }
            number += 1;
            unacked_bytes += payload.len() + 256;
            let at_once = self.take(link, frame, payload).inspect_err(|error| {
                let reason = error.to_string();
                link.push(Frame::Refuse, Bytes::copy_from_slice(reason.as_bytes()));
                self.lock().failed = Some(reason.clone());
                self.shared.event(DiskEvent::BackupFailed { reason });
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

    fn greet(&self, link: &Link, payload: &[u8]) -> Result<(), FollowError> {
        let (hello, _) = Hello::decode(payload)?;
        let ours = self.shared.hello(false).map_err(FollowError::OwnGreeting)?;
        let storage = [Storage::Gannet, Storage::Colo, Storage::Sync][usize::from(hello.storage)];
        let refuse = if hello.size_bytes != ours.size_bytes {
            Some(FollowError::OtherSize {
                ours: ours.size_bytes,
                theirs: hello.size_bytes,
            })
        } else if hello.generation.term < ours.generation.term {
            Some(FollowError::OlderTerm {
                ours: ours.generation.term,
                theirs: hello.generation.term,
            })
        } else if storage != self.shared.storage {
            Some(FollowError::OtherStorage {
                theirs: storage,
                ours: self.shared.storage,
            })
        } else {
            None
        };
        if let Some(error) = refuse {
            link.push(Frame::Refuse, error.to_string().into());
            return Err(error);
        }
        let welcome = welcome(ours, &self.shared.dirty.all(), MOST_PAYLOAD_BYTES);
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
    fn take(&self, link: &Link, frame: Frame, payload: Bytes) -> Result<bool, FollowError> {
        match frame {
            Frame::Write { offset } => self.mirrored(link, offset, Content::Data(payload), false)?,
            Frame::Zero { offset, len, unmap } => self.mirrored(link, offset, Content::Zero(len), unmap)?,
            Frame::Copy { offset } => self.copied(offset, &Content::Data(payload))?,
            Frame::CopyZero { offset, len } => self.copied(offset, &Content::Zero(len))?,
            Frame::CopyEnd => {
                if !self.lock().joining {
                    return Err(FollowError::CopyIsOver);
                }
                // Though nothing may have been copied: the first sync is put on the image without a journal, and of several disks
                // all are marked before the first of them gets any of it.
                self.shared
                    .begin_mixing()
                    .map_err(cannot_be("marked as incomplete"))?;
                self.lock().joining = false;
                self.shared.event(DiskEvent::Copied);
            }
            Frame::Mark { epoch } => {
                let marked = self.lock().switch.mark(epoch);
                marked?;
                self.changed.notify_all();
                self.shared.event(DiskEvent::Marked { epoch });
                return Ok(true);
            }
            Frame::Flush => {
                self.shared.image.flush().map_err(cannot_be("flushed"))?;
                return Ok(true);
            }
            Frame::AskHash { offset, len } => {
                self.check(offset, len.min(MOST_PAYLOAD_BYTES))?;
                if len > MOST_PAYLOAD_BYTES {
                    return Err(FollowError::TooMuch);
                }
                link.push(Frame::Hash { offset, len }, self.answer(offset, len));
            }
            other => return Err(FollowError::Forbidden(other)),
        }
        Ok(self.lock().storage == Storage::Sync)
    }

    /// What is said of a range to whoever compares. One that cannot be read is unlike any other: a join sends it, and so writes it
    /// anew, and a comparison tells of it. A comparison waits for as many bytes as a hash has.
    fn answer(&self, offset: u64, len: u64) -> Bytes {
        // What this host wrote and nobody committed may be in its cache alone, if a flush of it failed: to be alike it has to be on the disk.
        if self.lock().joining && self.shared.dirty.touches(&(offset..offset + len)) {
            // Best effort: what the cache still has is what it had before.
            let _ = self.shared.image.forget_cached(offset, len);
        }
        match self.hash_mirrored(offset, len) {
            Ok(hash) => Bytes::copy_from_slice(&hash),
            Err(_) if self.lock().joining => Bytes::new(),
            Err(_) => Bytes::from_static(&[0; 16]),
        }
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
        Ok(crate::disk::shared::hash(&data))
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), FollowError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.shared.image.size_bytes() => Ok(()),
            _ => Err(FollowError::Beyond { offset, len }),
        }
    }

    fn copied(&self, offset: u64, content: &Content) -> Result<(), FollowError> {
        self.check(offset, content.len())?;
        if !self.lock().joining {
            return Err(FollowError::CopyIsOver);
        }
        self.shared
            .begin_mixing()
            .map_err(cannot_be("marked as incomplete"))?;
        if let Content::Zero(len) = content
            && self.shared.image.is_hole(offset, *len)
        {
            // It may be space that a person has set aside for this image, and punched it would be given back.
            return Ok(());
        }
        self.shared
            .put(offset, content, true)
            .map_err(cannot_be("written"))
    }

    fn mirrored(&self, link: &Link, offset: u64, content: Content, unmap: bool) -> Result<(), FollowError> {
        self.check(offset, content.len())?;
        let (joining, storage) = {
            let state = self.lock();
            (state.joining, state.storage)
        };
        if joining {
            self.shared
                .begin_mixing()
                .map_err(cannot_be("marked as incomplete"))?;
            return self
                .shared
                .put(offset, &content, unmap)
                .map_err(cannot_be("written"));
        }
        if storage == Storage::Gannet {
            let mut state = self.lock();
            state.switch.mirrored_write(offset, content);
            return self.press(&mut state, link);
        }
        self.shared
            .begin_mixing()
            .map_err(cannot_be("marked as incomplete"))?;
        // The backup VM must not read between the save and the write, or it sees what it may not (D1).
        let range = offset..offset + content.len();
        let _held = self.shared.ranges.lock(range.clone());
        let gaps = self.lock().switch.to_save(range);
        for gap in gaps {
            self.keep(link, gap)?;
        }
        self.shared
            .put(offset, &content, unmap)
            .map_err(cannot_be("written"))?;
        let mut state = self.lock();
        self.press(&mut state, link)
    }

    /// Keeps what a mirrored write is about to overwrite. A guest trims gigabytes at once: of these only what holds data takes memory, and
    /// that this host has no room for it (D6) is seen piece by piece.
    fn keep(&self, link: &Link, gap: Range<u64>) -> Result<(), FollowError> {
        let image = &self.shared.image;
        let mut at = gap.start;
        while at < gap.end {
            let left = gap.end - at;
            let stretches = match left <= KEPT_AT_ONCE_BYTES {
                true => vec![(left, true)],
                false => image.status(at, left).map_err(cannot_be("read"))?,
            };
            for (len, holds_data) in stretches {
                let end = at + len;
                if !holds_data {
                    self.lock().switch.save(at, Content::Zero(len));
                    at = end;
                }
                while at < end {
                    let mut old = vec![0; (end - at).min(KEPT_AT_ONCE_BYTES) as usize];
                    image.read(at, &mut old).map_err(cannot_be("read"))?;
                    self.scratch(at, &old).map_err(cannot_be("written"))?;
                    let from = at;
                    at += old.len() as u64;
                    let mut state = self.lock();
                    state.switch.save(from, Content::Data(old.into()));
                    self.press(&mut state, link)?;
                }
            }
        }
        Ok(())
    }

    /// D6: asks for a sync once per epoch; gives up when the host's memory is at stake.
    pub(super) fn press(&self, state: &mut State, link: &Link) -> Result<(), FollowError> {
        match state.switch.pressure() {
            Pressure::None => {}
            Pressure::Full => {
                return Err(FollowError::Full(state.switch.bytes()));
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
}

#[cfg(test)]
mod tests;
