//! A peer's life: the greeting, the first copy while the VM writes, what the peer says, the end.
//!
//! Decides: what a peer gets first, and how fast. Flow: [`Primary::attach`] -> a thread -> greeting -> copier beside the listener.
//! Invariants: P1 of [`super`] for the copy.
//! Not here: the VM's writes, the map of what a peer lacks ([`super`]).

use super::*;

impl Primary {
    /// Runs on a thread of its own for as long as the peer is there: greeting, then what the peer says.
    pub(in crate::disk) fn attach(
        self: &Arc<Self>,
        stream: MirrorStream,
        options: AttachOptions,
    ) -> Result<(), DiskError> {
        if self.lock().peer.is_some() {
            return Err(DiskError::HasBackup);
        }
        let this = self.clone();
        thread::Builder::new()
            .name("disk-mirror".into())
            .spawn(move || {
                if let Err(reason) = this.converse(stream, options) {
                    this.shared.event(DiskEvent::AttachFailed { reason });
                }
            })
            .map(|_detached| ())
            .map_err(DiskError::Thread)
    }

    fn converse(self: &Arc<Self>, stream: MirrorStream, options: AttachOptions) -> Result<(), String> {
        let MirrorStream {
            mut reader,
            mut writer,
            shutdown,
        } = stream;
        let hello = self.shared.hello(true).map_err(|error| error.to_string())?;
        self.shared.dirty.track();
        let greeted = (|| {
            link::send_now(&mut *writer, Frame::Hello, &hello.encode())?;
            link::receive(&mut *reader)
        })();
        let welcome = match greeted {
            Ok((Frame::Welcome, payload)) => payload,
            Ok((Frame::Refuse, reason)) => return Err(String::from_utf8_lossy(&reason).into_owned()),
            Ok(_) => return Err("the backup did not greet: is it the same build?".into()),
            Err(error) => return Err(error.to_string()),
        };
        let (theirs, their_extents) = Hello::decode(&welcome).map_err(|error| error.to_string())?;
        if theirs.size_bytes != hello.size_bytes {
            let text = format!(
                "the backup's disk has {} bytes, this one {}: make them the same size",
                theirs.size_bytes, hello.size_bytes
            );
            let _gone = link::send_now(&mut *writer, Frame::Refuse, text.as_bytes());
            return Err(text);
        }
        let same_pair = hello.pair == theirs.pair && hello.pair != [0; 16];
        let lacks = if same_pair && !options.whole {
            their_extents
                .chunks_exact(8)
                .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes")))
                .filter(|extent| *extent < hello.size_bytes.div_ceil(EXTENT_BYTES))
                .collect()
        } else {
            ExtentSet::whole(hello.size_bytes)
        };
        let link = Link::new(shutdown, options.tuning);
        let total = {
            let mut state = self.lock();
            if state.peer.is_some() {
                return Err("another backup was faster".into());
            }
            state.extents.gather();
            state.extents.widen_base(&lacks);
            // The peer's notes are kept on disk here too: should this host restart in the middle, they are not lost.
            let left = state.extents.needed();
            let total = left.len();
            state.peer = Some(Peer {
                link: link.clone(),
                copying: Some(Copying {
                    left,
                    again: 0,
                    strict: false,
                }),
                joined_at: None,
                joined: false,
                next_pair: hello.next_pair,
            });
            total
        };
        self.shared.event(DiskEvent::CopyStarted {
            bytes: total * EXTENT_BYTES,
            whole: !same_pair || options.whole,
        });
        let (keeper, orders) = channel();
        thread::scope(|scope| {
            let sender = link.clone();
            scope.spawn(move || sender.send_all(&mut *writer));
            scope.spawn(|| self.copy(&link, total, options.copy_bytes_per_s));
            let kept_for = &link;
            scope.spawn(move || self.keep_map(kept_for, orders));
            let ended = self.listen(&link, &mut *reader, &keeper);
            drop(keeper);
            self.lost(&link, &ended);
        });
        Ok(())
    }

    /// What the backup says, until the stream ends; returns why it did.
    fn listen(&self, link: &Arc<Link>, reader: &mut (dyn io::Read + Send), keeper: &Sender<Keep>) -> String {
        loop {
            match link::receive(reader) {
                Ok((Frame::Ack { through, held_bytes }, _)) => link.acked(through, held_bytes),
                Ok((Frame::Committed { epoch }, _)) => self.committed(link, epoch, keeper),
                Ok((Frame::NeedSync, _)) => self.shared.event(DiskEvent::NeedSync),
                Ok((Frame::Refuse, reason)) => return String::from_utf8_lossy(&reason).into_owned(),
                Ok((Frame::Hash { offset, len }, hash)) => self.shared.hash_arrived(offset, len, &hash),
                Ok((other, _)) => return format!("the backup sent {other:?}, which only a primary may"),
                Err(error) => return error.to_string(),
            }
        }
    }

    /// The first copy. Each extent is read and pushed while its range is held, so that a guest's write to it is either in
    /// the copy or behind it (P1).
    fn copy(&self, link: &Arc<Link>, total: u64, bytes_per_s: u64) {
        let mut pace = Pace {
            started: Instant::now(),
            sent: 0,
            bytes_per_s,
        };
        let mut from = 0;
        loop {
            let step = {
                let mut state = self.lock();
                let Some(peer) = state.peer.as_mut().filter(|peer| Arc::ptr_eq(&peer.link, link)) else {
                    return;
                };
                let Some(copying) = &mut peer.copying else { return };
                // What was put back more often than the disk has extents will not end by itself.
                copying.strict |= copying.again > total.max(64) * 2;
                match copying.left.next_from(from).or_else(|| copying.left.next_from(0)) {
                    Some(extent) => Some((extent, copying.left.len())),
                    None => {
                        link.push(Frame::CopyEnd, Bytes::copy_from_slice(&peer.next_pair));
                        peer.copying = None;
                        None
                    }
                }
            };
            let Some((extent, left)) = step else {
                self.shared.event(DiskEvent::Copied);
                return;
            };
            if left % 16 == 0 {
                let done = total.saturating_sub(left) * EXTENT_BYTES;
                self.shared.event(DiskEvent::CopyProgress {
                    done_bytes: done,
                    total_bytes: total * EXTENT_BYTES,
                });
            }
            from = extent + 1;
            let sent = match self.copy_extent(link, extent) {
                Ok(sent) => sent,
                Err(reason) => return self.lost(link, &reason),
            };
            if pace.after(sent, link) {
                return;
            }
        }
    }

    fn copy_extent(&self, link: &Arc<Link>, extent: u64) -> Result<u64, String> {
        link.wait_room(EXTENT_BYTES).map_err(|Closed(reason)| reason)?;
        let start = extent * EXTENT_BYTES;
        let end = (start + EXTENT_BYTES).min(self.shared.image.size_bytes());
        let _held = self.shared.ranges.lock(start..end);
        {
            let mut state = self.lock();
            let Some(copying) = state.peer.as_mut().and_then(|peer| peer.copying.as_mut()) else {
                return Ok(0);
            };
            copying.left.remove(extent);
        }
        let holds_data = self
            .shared
            .image
            .status(start, end - start)
            .map_or(true, |status| status.iter().any(|(_, holds_data)| *holds_data));
        if !holds_data {
            link.push(
                Frame::CopyZero {
                    offset: start,
                    len: end - start,
                },
                Bytes::new(),
            );
            return Ok(0);
        }
        let mut data = vec![0; (end - start) as usize];
        self.shared
            .image
            .read(start, &mut data)
            .map_err(|error| format!("this host's disk cannot be read for the copy: {error}"))?;
        if data.iter().all(|byte| *byte == 0) {
            link.push(
                Frame::CopyZero {
                    offset: start,
                    len: end - start,
                },
                Bytes::new(),
            );
            return Ok(end - start);
        }
        link.push(Frame::Copy { offset: start }, Bytes::from(data));
        Ok(end - start)
    }
}

/// The bandwidth limit of a copy.
struct Pace {
    started: Instant,
    sent: u64,
    bytes_per_s: u64,
}

impl Pace {
    /// Waits as long as the limit asks; says whether the link was closed meanwhile.
    fn after(&mut self, bytes: u64, link: &Link) -> bool {
        self.sent += bytes;
        if self.bytes_per_s == 0 {
            return link.closed().is_some();
        }
        let due = Duration::from_secs_f64(self.sent as f64 / self.bytes_per_s as f64);
        link.wait_closed(due.saturating_sub(self.started.elapsed()))
    }
}
