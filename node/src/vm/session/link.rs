//! The stream between a primary and its backup, as messages.
//!
//! Not here: who reads it (`reader`).

use super::Broken;
use super::reader::{Reader, Readers, read_for_session};
use super::waiting::Waiting;
use crate::vm::event::LoopSender;
use bytes::BytesMut;
use crossbeam_channel::{Receiver, bounded};
use dunlin_core::waits::Wait;
use dunlin_core::wire::sync::{SyncMessage, encode};
use dunlin_fabric::link::{Stream, WriteHalf};
use parking_lot::{Mutex, MutexGuard};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// So much is always taken by a socket whose peer has read what came before: writing it does not wait.
const AT_ONCE_BYTES: usize = 16 << 10;

/// Messages that wait for the session's thread; beyond them the stream is not read.
const MOST_WAITING: usize = 64;

/// How long to wait for a reason on a stream that is broken already.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Tells the primary why this host does not follow, and closes the stream.
pub fn refuse(stream: Stream, why: &str) {
    let mut buffer = BytesMut::new();
    let told = encode(&SyncMessage::Refused { why: why.to_owned() }, &mut buffer);
    let (_, mut half) = stream.split();
    // A few bytes into an empty socket do not block; a primary that has gone needs no reason.
    let _ = told
        .map_err(io::Error::other)
        .and_then(|()| half.write_all(&buffer))
        .and_then(|()| half.flush());
}

/// The sending end; cheap to clone.
#[derive(Clone)]
pub struct SyncWriter {
    half: Arc<Mutex<Outgoing>>,
}

struct Outgoing {
    half: WriteHalf,
    buffer: BytesMut,
}

impl SyncWriter {
    fn lock(&self) -> MutexGuard<'_, Outgoing> {
        self.half.lock()
    }

    /// Sends a message; blocks while the peer does not read.
    pub fn send(&self, message: &SyncMessage) -> Result<(), Broken> {
        self.lock()
            .send(message)
            .map_err(|error| Broken::new("the other host does not take the sync", error))
    }
}

impl SyncWriter {
    /// Sends if nobody has to wait for that; whether it was done.
    pub fn send_at_once(&self, message: &SyncMessage) -> Result<bool, Broken> {
        // None: a sync is being sent.
        let Some(mut outgoing) = self.half.try_lock() else {
            return Ok(false);
        };
        outgoing
            .send_at_once(message)
            .map_err(|error| Broken::new("the other host does not take the sync", error))
    }
}

impl Outgoing {
    fn send_at_once(&mut self, message: &SyncMessage) -> io::Result<bool> {
        self.buffer.clear();
        encode(message, &mut self.buffer).map_err(io::Error::other)?;
        if self.half.in_flight()? + self.buffer.len() > AT_ONCE_BYTES {
            return Ok(false);
        }
        self.half.write_all(&self.buffer)?;
        self.half.flush()?;
        Ok(true)
    }

    fn send(&mut self, message: &SyncMessage) -> io::Result<()> {
        self.buffer.clear();
        encode(message, &mut self.buffer).map_err(io::Error::other)?;
        self.half.write_all(&self.buffer)?;
        self.half.flush()
    }
}

/// Closes the stream from anywhere, also from under a writer that waits: both sides' threads wake with an end.
#[derive(Clone)]
pub struct Closer(Arc<OwnedFd>);

impl Closer {
    /// Closes.
    pub fn close(&self) {
        // Closed already is as good.
        let _ = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both);
    }
}

/// Both ends of a session's stream, for another thread.
pub struct Ends {
    /// The sending end.
    pub writer: SyncWriter,
    /// What arrives.
    pub incoming: Receiver<Result<SyncMessage, Broken>>,
}

/// A session's stream.
pub struct SyncLink {
    /// The sending end.
    pub writer: SyncWriter,
    /// What the session's thread waits for.
    pub waiting: Waiting,
    incoming: Receiver<Result<SyncMessage, Broken>>,
}

impl SyncLink {
    /// Takes a stream over. Messages that are for the VM loop (`Idle`, `Said`, `NewTerm`) go there, stamped with `session`; a loop
    /// that is `lent` the stream between syncs reads them itself.
    pub fn open(stream: Stream, session: u64, to_loop: LoopSender, lent: bool) -> io::Result<(Self, Closer)> {
        stream.set_write_timeout(Some(Wait::StreamTakes.bound()))?;
        let closer = Closer(Arc::new(stream.as_fd().try_clone_to_owned()?));
        let (read, half) = stream.split();
        let (sender, incoming) = bounded(MOST_WAITING);
        let (back, readers) = bounded(1);
        // There is one reader, so there is room, here and whenever it comes back.
        let _ = back.send(Reader::new(read));
        let readers = Readers {
            session,
            readers,
            lends: lent.then_some(back),
            to_loop,
            to_thread: sender,
        };
        std::thread::Builder::new()
            .name("sync-read".into())
            .spawn(move || read_for_session(readers))?;
        let outgoing = Outgoing {
            half,
            buffer: BytesMut::new(),
        };
        let writer = SyncWriter {
            half: Arc::new(Mutex::new(outgoing)),
        };
        Ok((
            Self {
                writer,
                waiting: Waiting::default(),
                incoming,
            },
            closer,
        ))
    }

    /// Sends a message.
    pub fn send(&self, message: &SyncMessage) -> Result<(), Broken> {
        self.waiting
            .during(Wait::StreamTakes, || self.writer.send(message))
    }

    /// Why the other host ended the session, if it said so before it closed: more than "broken pipe".
    #[must_use]
    pub fn last_words(&self) -> Option<String> {
        loop {
            match self.incoming.recv_timeout(LAST_WORDS) {
                Ok(Ok(SyncMessage::Refused { why })) => return Some(why),
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return None,
            }
        }
    }

    /// What a thread needs that speaks and listens on it beside the one that owns it.
    #[must_use]
    pub fn ends(&self) -> Ends {
        Ends {
            writer: self.writer.clone(),
            incoming: self.incoming.clone(),
        }
    }

    /// Where messages arrive, to wait for them and for the loop's commands at once.
    #[must_use]
    pub fn incoming(&self) -> &Receiver<Result<SyncMessage, Broken>> {
        &self.incoming
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_core::sync::dirty::PageSet;
    use dunlin_core::units::Epoch;
    use dunlin_core::wire::sync::MOST_BYTES;
    use dunlin_core::wire::sync::parts::{self, Gathering};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::os::unix::net::UnixStream;

    /// Whether there is room for more, now or in a moment.
    fn takes_more(stream: &UnixStream) -> bool {
        let moment = Timespec {
            tv_sec: 0,
            tv_nsec: 200_000_000,
        };
        let mut room = [PollFd::new(stream, PollFlags::OUT)];
        poll(&mut room, Some(&moment)).expect("it can be asked") > 0
    }

    #[test]
    fn a_session_that_takes_no_messages_makes_the_other_host_wait() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (to_loop, _events) = LoopSender::channel().expect("a channel");
        let (link, _closer) = SyncLink::open(Stream::local(ours, "b"), 1, to_loop, false).expect("a link");
        let mut bytes = BytesMut::new();
        encode(
            &SyncMessage::Refused {
                why: "x".repeat(60_000),
            },
            &mut bytes,
        )
        .expect("short");
        theirs.set_nonblocking(true).expect("a setting");
        let (mut sent, begun) = (0, std::time::Instant::now());
        loop {
            match (&theirs).write(&bytes[sent % bytes.len()..]) {
                Ok(count) => sent += count,
                Err(_) if link.incoming().len() == MOST_WAITING && !takes_more(&theirs) => break,
                Err(_) => std::thread::yield_now(),
            }
            assert!(
                begun.elapsed() < Wait::StreamTakes.bound(),
                "{sent} bytes were taken"
            );
            assert!(sent < 1000 * bytes.len(), "it takes whatever it is given");
        }
        let sent = sent / bytes.len();
        // The sockets' own buffers, and what the reader has in its hand.
        assert!(
            sent > MOST_WAITING && sent < MOST_WAITING + 50,
            "{sent} messages were taken"
        );
    }

    /// Two ends of one stream.
    fn links() -> (SyncLink, SyncLink) {
        let (ours, theirs) = Stream::pair().expect("a pair of sockets");
        let open = |stream| {
            let (to_loop, _events) = LoopSender::channel().expect("a channel");
            SyncLink::open(stream, 1, to_loop, false).expect("a thread").0
        };
        (open(ours), open(theirs))
    }

    /// Every other page of a guest of 64 GiB, written at once: it once ended the daemon on both hosts.
    #[test]
    fn more_dirty_pages_than_one_message_holds_arrive() {
        const GUEST_PAGES: u32 = 16 << 20;
        let dirty = PageSet::from_runs((0..GUEST_PAGES / 2).map(|run| (2 * run, 1)));
        let (backup, primary) = links();
        let epoch = Epoch(3);
        let message = |pages, more| SyncMessage::Dirty { epoch, pages, more };
        let heard = std::thread::scope(|scope| {
            scope.spawn(|| {
                for (pages, more) in parts::pages(&dirty) {
                    backup.send(&message(pages, more)).expect("sent");
                }
            });
            let mut gathering = Gathering::new(u64::from(GUEST_PAGES));
            loop {
                let heard = primary.incoming().recv_timeout(Wait::BackupScans.bound());
                let Ok(Ok(SyncMessage::Dirty { pages, more, .. })) = heard else {
                    panic!("{heard:?} came instead of a part");
                };
                if let Some(whole) = gathering.add(pages, more).expect("a part that fits") {
                    break whole;
                }
            }
        });
        assert!(heard == dirty);
    }

    /// What nobody has cut breaks the session and not the daemon.
    #[test]
    fn a_message_that_is_too_long_is_an_error() {
        let (ours, _theirs) = links();
        let why = "x".repeat(MOST_BYTES);
        let Broken(told) = ours.send(&SyncMessage::Refused { why }).unwrap_err();
        assert!(told.contains("Refused"), "{told}");
        assert!(
            ours.send(&SyncMessage::JoinReady).is_ok(),
            "nothing of it was sent"
        );
    }
}
