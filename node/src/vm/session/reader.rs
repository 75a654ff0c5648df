//! Who reads a session's stream: the session's reading thread, or, between syncs, the VM loop itself.
//!
//! What a backup says between syncs is for the loop alone, a few hundred bytes at a time, and each of these words lets an answer of
//! the VM out: a thread in between would cost a wake-up of its own for each. What a sync brings is for the session's thread, and may be
//! large. So there is one [`Reader`], and whoever finds in it what is not for him hands it on: the thread lends it to the loop with the first
//! word for that, the loop gives it back with the first message that is none (or that does not fit into the reader's buffer, or where the
//! stream has ended).
//!
//! Invariants:
//! 1. The stream has one reader at a time, and it takes its buffer along: messages keep their order.
//! 2. The loop never waits for the stream, and takes a bounded part of it in one turn.
//! 3. A reader that is dropped by the loop goes back: the thread always comes to the end of its stream. The loop drops it when a sync
//!    begins, and takes none before that has ended: a sync does not wait for the loop to read.
//!
//! Not here: what the words mean (`primary`).

use super::Broken;
use crate::vm::event::{LoopEvent, LoopSender};
use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender};
use dunlin_core::wire::sync::{MOST_BYTES, SyncMessage, decode};
use dunlin_fabric::link::ReadHalf;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};

/// One read takes a small message whole; most of a large one goes straight where it belongs.
const READ_BYTES: usize = 16 << 10;
/// So many reads in one turn of the loop.
const MOST_READS: usize = 4;
const LENGTH_BYTES: usize = 4;

/// The receiving end of a stream.
pub struct Reader {
    half: ReadHalf,
    /// Read and not taken out yet: `bytes[from..to]`.
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
    /// The loop has met this.
    failed: Option<io::Error>,
}

/// What lies in the buffer.
enum Held {
    /// A message, and how much of the buffer it is.
    Message(SyncMessage, usize),
    /// A part of one that fits there.
    Part,
    /// A part of one that does not: so many bytes are announced.
    Large(usize),
}

fn broken(error: impl std::fmt::Display) -> Broken {
    Broken::new("the sync's stream broke", error)
}

impl Reader {
    pub fn new(half: ReadHalf) -> Self {
        Self {
            half,
            bytes: vec![0; READ_BYTES].into(),
            from: 0,
            to: 0,
            failed: None,
        }
    }

    fn held(&self) -> Result<Held, Broken> {
        let Some((length, after)) = self.bytes[self.from..self.to].split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(Held::Part);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MOST_BYTES {
            return Err(Broken(format!(
                "the other host announces a message of {length} bytes, more than {MOST_BYTES}"
            )));
        }
        if length > READ_BYTES - LENGTH_BYTES {
            return Ok(Held::Large(length));
        }
        match after.get(..length) {
            None => Ok(Held::Part),
            Some(bytes) => Ok(Held::Message(
                decoded(Bytes::copy_from_slice(bytes))?,
                LENGTH_BYTES + length,
            )),
        }
    }

    /// Takes out of the buffer.
    fn take(&mut self, bytes: usize) {
        self.from += bytes;
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        }
    }

    /// Room for more, behind what is held. There is some: what is held is a part of a message that fits.
    fn make_room(&mut self) {
        self.bytes.copy_within(self.from..self.to, 0);
        self.to -= self.from;
        self.from = 0;
    }

    /// The next message; waits for it.
    pub fn wait(&mut self) -> Result<SyncMessage, Broken> {
        loop {
            match self.held()? {
                Held::Message(message, bytes) => {
                    self.take(bytes);
                    return Ok(message);
                }
                Held::Large(length) => return self.wait_for_large(length),
                Held::Part => {}
            }
            if let Some(error) = self.failed.take() {
                return Err(broken(error));
            }
            self.make_room();
            match self.half.read(&mut self.bytes[self.to..]) {
                Ok(0) => return Err(broken(io::Error::from(ErrorKind::UnexpectedEof))),
                Ok(n) => self.to += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(broken(error)),
            }
        }
    }

    fn wait_for_large(&mut self, length: usize) -> Result<SyncMessage, Broken> {
        let mut bytes = vec![0; length];
        let held = &self.bytes[self.from + LENGTH_BYTES..self.to];
        let (first, rest) = bytes.split_at_mut(held.len());
        first.copy_from_slice(held);
        self.take(self.to - self.from);
        self.half.read_exact(rest).map_err(broken)?;
        decoded(Bytes::from(bytes))
    }

    /// Reads what is there, without waiting. Whether there may be more.
    fn read_now(&mut self) -> io::Result<bool> {
        self.make_room();
        let room = self.bytes.len() - self.to;
        match self.half.read_now(&mut self.bytes[self.to..]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                self.to += n;
                Ok(n == room || !self.half.is_drained())
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }
}

fn decoded(bytes: Bytes) -> Result<SyncMessage, Broken> {
    decode(bytes).map_err(|error| Broken::new("the other host's sync message", error))
}

/// Whether the session's thread has no use for it.
fn is_for_loop(message: &SyncMessage) -> bool {
    matches!(
        message,
        SyncMessage::Idle { .. } | SyncMessage::NewTerm { .. } | SyncMessage::Said { .. }
    )
}

/// What the reading thread has.
pub struct Readers {
    /// Whose words they are.
    pub session: u64,
    /// The reader, whenever it is this thread's.
    pub readers: Receiver<Reader>,
    /// Where the loop gives it back, if it is lent at all.
    pub lends: Option<Sender<Reader>>,
    /// For the loop.
    pub to_loop: LoopSender,
    /// For the session's thread.
    pub to_thread: Sender<Result<SyncMessage, Broken>>,
}

/// Until the stream ends, or nobody hears it any more.
pub fn read_for_session(its: Readers) {
    let session = its.session;
    for mut reader in &its.readers {
        let lent = loop {
            match reader.wait() {
                Ok(message) if is_for_loop(&message) => {
                    tell_loop(&its.to_loop, session, message);
                    if its.lends.is_some() {
                        break true;
                    }
                }
                other => {
                    let ended = other.is_err();
                    if its.to_thread.send(other).is_err() || ended {
                        break false;
                    }
                }
            }
        };
        let Some(back) = its.lends.clone().filter(|_| lent) else {
            break;
        };
        its.to_loop.send(LoopEvent::StreamLent {
            session,
            stream: Lent {
                reader: Some(reader),
                back,
                more: true,
            },
        });
    }
    // The thread at the other end of the channel may be waiting for the loop, not for us.
    its.to_loop.send(LoopEvent::SessionStreamEnded { session });
}

fn tell_loop(to_loop: &LoopSender, session: u64, message: SyncMessage) {
    match message {
        SyncMessage::Idle { applied } => to_loop.send(LoopEvent::BackupIdle { session, applied }),
        SyncMessage::NewTerm { term } => to_loop.send(LoopEvent::SessionTerm { session, term }),
        SyncMessage::Said { epoch, frames } => to_loop.send_words(session, epoch, frames),
        _ => unreachable!("it was looked at: {message:?}"),
    }
}

/// The stream, with the loop.
pub struct Lent {
    /// None: it is the thread's again.
    reader: Option<Reader>,
    back: Sender<Reader>,
    /// Something may be there already, of which the system does not tell.
    more: bool,
}

impl Lent {
    /// Readable when there is something to hear; none if it is the thread's again.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.reader.as_ref().map(|reader| reader.half.as_fd())
    }

    /// Whether there may be something to hear already.
    pub fn has_more(&self) -> bool {
        self.more && self.reader.is_some()
    }

    /// Hears what is there, up to the first message that is not for the loop: with that the stream is the thread's again.
    pub fn hear(&mut self, mut each: impl FnMut(SyncMessage)) {
        let Some(reader) = &mut self.reader else { return };
        self.more = true;
        for _ in 0..MOST_READS {
            loop {
                match reader.held() {
                    Ok(Held::Message(message, bytes)) if is_for_loop(&message) => {
                        reader.take(bytes);
                        each(message);
                    }
                    Ok(Held::Part) => break,
                    // An error is met again, by whom it is for.
                    Ok(Held::Message(..) | Held::Large(_)) | Err(_) => return self.give_back(),
                }
            }
            if !self.more {
                return;
            }
            match reader.read_now() {
                Ok(more) => self.more = more,
                Err(error) => {
                    reader.failed = Some(error);
                    return self.give_back();
                }
            }
        }
        // The rest has its turn in the next one.
        self.more = true;
    }

    fn give_back(&mut self) {
        if let Some(reader) = self.reader.take() {
            // A thread that has ended has no use for it.
            let _ = self.back.send(reader);
        }
    }
}

impl Drop for Lent {
    /// Invariant 3.
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::session::link::SyncLink;
    use bytes::BytesMut;
    use dunlin_core::agreed::Frame;
    use dunlin_core::units::{Epoch, Index};
    use dunlin_core::wire::sync::encode;
    use dunlin_fabric::link::Stream;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    const LONG: Duration = Duration::from_secs(10);

    fn said(n: u8) -> SyncMessage {
        let frame = Frame {
            nic: 0,
            bytes: vec![n; 100].into(),
        };
        SyncMessage::Said {
            epoch: Epoch(1),
            frames: vec![frame],
        }
    }

    fn staged(n: u64) -> SyncMessage {
        SyncMessage::Staged { epoch: Epoch(n) }
    }

    fn idle(n: u64) -> SyncMessage {
        SyncMessage::Idle { applied: Index(n) }
    }

    /// Larger than the reader's buffer.
    fn hashes() -> SyncMessage {
        SyncMessage::Hashes {
            epoch: Epoch(1),
            hashes: vec![7; READ_BYTES / 8],
        }
    }

    struct Backup(UnixStream);

    impl Backup {
        fn sends(&mut self, message: &SyncMessage) {
            let mut bytes = BytesMut::new();
            encode(message, &mut bytes).expect("short");
            self.0.write_all(&bytes).expect("sent");
        }
    }

    fn lending() -> (Backup, SyncLink, Receiver<LoopEvent>) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (to_loop, events) = LoopSender::channel().expect("a channel");
        let (link, _) = SyncLink::open(Stream::local(ours, "b"), 1, to_loop, true).expect("a thread");
        (Backup(theirs), link, events)
    }

    fn lent(events: &Receiver<LoopEvent>) -> Lent {
        loop {
            match events.recv_timeout(LONG).expect("it is lent") {
                LoopEvent::StreamLent { stream, .. } => return stream,
                LoopEvent::BackupIdle { .. } | LoopEvent::BackupSaid { .. } => {}
                _ => panic!("something else was told"),
            }
        }
    }

    /// What the loop hears until it has `count` messages, or has given the stream back.
    fn heard(stream: &mut Lent, count: usize) -> Vec<SyncMessage> {
        let (mut heard, begun) = (Vec::new(), Instant::now());
        while heard.len() < count && stream.fd().is_some() {
            stream.hear(|message| heard.push(message));
            assert!(begun.elapsed() < LONG, "{} of {count} were heard", heard.len());
            std::thread::yield_now();
        }
        heard
    }

    #[test]
    fn words_between_syncs_are_the_loops_and_all_else_is_the_threads_in_the_order_of_sending() {
        let (mut backup, link, events) = lending();
        let incoming = || {
            link.incoming()
                .recv_timeout(LONG)
                .expect("in time")
                .expect("a message")
        };
        backup.sends(&staged(1));
        assert_eq!(incoming(), staged(1));
        for round in 0..3 {
            backup.sends(&idle(round));
            let mut stream = lent(&events);
            for n in 0..100 {
                backup.sends(&said(n));
            }
            assert_eq!(heard(&mut stream, 100), (0..100).map(said).collect::<Vec<_>>());
            // Not even the thread reads on before the loop has seen what was before.
            backup.sends(&said(100));
            backup.sends(&staged(round));
            backup.sends(&hashes());
            assert_eq!(heard(&mut stream, 2), [said(100)], "the loop gives it back");
            assert_eq!(incoming(), staged(round));
            assert_eq!(incoming(), hashes());
        }
    }

    #[test]
    fn one_turn_of_the_loop_takes_a_bounded_part_and_the_rest_has_its_turn_in_the_next_one() {
        let (mut backup, _link, events) = lending();
        backup.sends(&idle(1));
        let mut stream = lent(&events);
        let (mut word, mut all) = (BytesMut::new(), Vec::new());
        encode(&said(1), &mut word).expect("short");
        let words = MOST_READS * READ_BYTES * 3 / 2 / word.len();
        (0..words).for_each(|_| all.extend_from_slice(&word));
        // Without asking the system: it has all of it already.
        backup.0.write_all(&all).expect("a socket takes it");
        let (mut heard, mut turns) = (0, 0);
        while heard < words {
            let before = heard;
            stream.hear(|_| heard += 1);
            assert!((heard - before) * word.len() <= MOST_READS * READ_BYTES + READ_BYTES);
            assert!(stream.has_more() || heard == words, "{heard} of {words}");
            turns += 1;
        }
        assert!(turns > 1, "all of it in one turn");
    }

    #[test]
    fn a_message_that_comes_in_pieces_is_heard_whole() {
        let (mut backup, link, events) = lending();
        backup.sends(&idle(1));
        let mut stream = lent(&events);
        let mut bytes = BytesMut::new();
        encode(&said(7), &mut bytes).expect("short");
        for piece in bytes.chunks(3) {
            stream.hear(|message| panic!("{message:?} is not whole"));
            backup.0.write_all(piece).expect("sent");
        }
        assert_eq!(heard(&mut stream, 1), [said(7)]);
        // A large one is the thread's, whoever has read its beginning.
        bytes.clear();
        encode(&hashes(), &mut bytes).expect("short");
        let (first, rest) = bytes.split_at(1000);
        backup.0.write_all(first).expect("sent");
        assert_eq!(heard(&mut stream, 1), []);
        std::thread::scope(|scope| {
            scope.spawn(|| backup.0.write_all(rest).expect("sent"));
            let message = link.incoming().recv_timeout(LONG).expect("in time");
            assert_eq!(message.expect("a message"), hashes());
        });
    }

    #[test]
    fn a_stream_that_ends_or_is_dropped_while_the_loop_has_it_is_ended_by_the_thread() {
        for ends in [true, false] {
            let (mut backup, link, events) = lending();
            backup.sends(&idle(1));
            let mut stream = lent(&events);
            if ends {
                drop(backup);
                assert_eq!(heard(&mut stream, 1), []);
            } else {
                drop(stream);
                drop(backup);
            }
            let end = link.incoming().recv_timeout(LONG).expect("in time");
            assert!(end.is_err(), "{end:?} came instead of the end");
            let told = events.recv_timeout(LONG).expect("in time");
            assert!(matches!(told, LoopEvent::SessionStreamEnded { session: 1 }));
        }
    }
}
