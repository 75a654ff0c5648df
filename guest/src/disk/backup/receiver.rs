//! What the primary says: its greeting, its first copy, its writes, its marks.
//!
//! Decides: what each frame does to the switch. Flow: the receiver thread: [`Backup::run`], until the stream ends.
//! Invariants: what a peer names outside of the image ends the session, and nothing else.
//! Not here: what the backup's VM writes ([`super`]).

use super::*;

impl Backup {
    pub(super) fn run(&self, link: &Arc<Link>, mut reader: Box<dyn io::Read + Send>) {
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
        Ok(crate::disk::shared::hash(&data))
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
    pub(super) fn press(&self, state: &mut State, link: &Link) -> Result<(), String> {
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
}
