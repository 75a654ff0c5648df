//! Decides: how frames get from here to the peer's disk port and back, and when the peer counts as lost.
//!
//! Flow: guest writes and the copier push frames into a queue; a thread writes them to the stream in order.
//! Invariants: **L1** frames leave in the order of [`Link::push`]; **L2** a full queue makes writers wait only while the
//! peer makes progress, and at most [`Tuning::stall`] without any, a first copy [`Tuning::copy_stall`]; **L3** after
//! [`Link::close`] nobody waits here.
//! Not here: what the frames mean (`primary`, `backup`).

use bytes::Bytes;
use dunlin_core::{
    disk::mirror::{Frame, HEADER_BYTES, MirrorError},
    waits::Wait,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::Arc,
    time::{Duration, Instant},
};

/// The two ends of a byte stream to the peer, and a way to break both: any TCP, TLS or Unix stream.
pub struct MirrorStream {
    /// What the peer says. Blocking.
    pub reader: Box<dyn Read + Send>,
    /// To the peer. Blocking.
    pub writer: Box<dyn Write + Send>,
    /// Makes both ends fail at once, from any thread (`shutdown(2)` on the socket).
    pub shutdown: Box<dyn Fn() + Send + Sync>,
}

impl MirrorStream {
    /// A Unix socket as mirror stream.
    ///
    /// # Errors
    /// No descriptor could be had.
    pub fn from_unix(stream: UnixStream) -> io::Result<Self> {
        let writer = stream.try_clone()?;
        let control = stream.try_clone()?;
        Ok(Self {
            reader: Box::new(stream),
            writer: Box::new(writer),
            shutdown: Box::new(move || {
                let _already_closed = control.shutdown(std::net::Shutdown::Both);
            }),
        })
    }
}

impl std::fmt::Debug for MirrorStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MirrorStream")
    }
}

/// Sizes and times of a link.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Bytes that may wait to be sent before writers wait.
    pub queue_bytes: u64,
    /// A peer that takes nothing for this long while writers wait is lost.
    pub stall: Duration,
    /// The same while a first copy waits, which keeps no write of the guest.
    pub copy_stall: Duration,
    /// The longest that one write is delayed to slow a guest down whose backup's buffers are nearly full.
    pub throttle: Duration,
    /// A primary's dirty map is cleared no more often: an extent that is written all the time then stays in it, and costs no
    /// fdatasync.
    pub clear_every: Duration,
    /// A peer that has not greeted within this is none.
    pub greeting: Duration,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            queue_bytes: 32 << 20,
            stall: Duration::from_secs(1),
            copy_stall: Wait::DiskCopies.bound(),
            throttle: Duration::from_millis(200),
            clear_every: Duration::from_secs(5),
            greeting: Wait::MirrorGreets.bound(),
        }
    }
}

/// Why no more can be sent.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Closed(pub String);

struct Queue {
    frames: VecDeque<(Frame, Bytes)>,
    bytes: u64,
    pushed: u64,
    acked: u64,
    held_bytes: u64,
    moved: Instant,
    /// Nothing more is taken in; what is queued is still sent.
    ending: Option<String>,
    closed: Option<String>,
    expedite: bool,
}

/// The sending half of a mirror stream.
pub struct Link {
    queue: Mutex<Queue>,
    work: Condvar,
    changed: Condvar,
    shutdown: Box<dyn Fn() + Send + Sync>,
    tuning: Tuning,
}

impl Link {
    /// A link whose stream is broken by `shutdown`.
    #[must_use]
    pub fn new(shutdown: Box<dyn Fn() + Send + Sync>, tuning: Tuning) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::new(Queue {
                frames: VecDeque::new(),
                bytes: 0,
                pushed: 0,
                acked: 0,
                held_bytes: 0,
                moved: Instant::now(),
                ending: None,
                closed: None,
                expedite: false,
            }),
            work: Condvar::new(),
            changed: Condvar::new(),
            shutdown,
            tuning,
        })
    }

    /// How often a primary's dirty map is cleared at most.
    #[must_use]
    pub fn clear_every(&self) -> Duration {
        self.tuning.clear_every
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Appends a frame; returns its number. Never waits (see [`Self::wait_room`]); lost when the link is closed.
    pub fn push(&self, frame: Frame, payload: Bytes) -> u64 {
        let mut queue = self.lock();
        if queue.closed.is_some() || queue.ending.is_some() {
            return queue.pushed;
        }
        if queue.frames.is_empty() {
            queue.moved = Instant::now();
        }
        queue.bytes += payload.len() as u64 + HEADER_BYTES as u64;
        queue.pushed += 1;
        queue.frames.push_back((frame, payload));
        let number = queue.pushed;
        drop(queue);
        self.work.notify_one();
        number
    }

    /// There is room for `bytes` more.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        let queue = self.lock();
        queue.bytes == 0 || queue.bytes + bytes <= self.tuning.queue_bytes
    }

    /// Waits until `bytes` more fit (L2).
    ///
    /// # Errors
    /// The link is closed, or was closed here because the peer stalled.
    pub fn wait_room(&self, bytes: u64) -> Result<(), Closed> {
        self.wait_room_within(bytes, self.tuning.stall)
    }

    /// As [`Self::wait_room`], for a first copy: a disk that stalls for a moment must not cost what was copied so far.
    ///
    /// # Errors
    /// As [`Self::wait_room`].
    pub fn wait_copy_room(&self, bytes: u64) -> Result<(), Closed> {
        self.wait_room_within(bytes, self.tuning.copy_stall)
    }

    fn wait_room_within(&self, bytes: u64, stall: Duration) -> Result<(), Closed> {
        let has_room = |queue: &Queue| {
            queue.expedite || queue.bytes == 0 || queue.bytes + bytes <= self.tuning.queue_bytes
        };
        self.wait(has_room, stall)
    }

    /// Waits until the peer acknowledged frame `number` (L2).
    ///
    /// # Errors
    /// As [`Self::wait_room`].
    pub fn wait_acked(&self, number: u64) -> Result<(), Closed> {
        self.wait(|queue| queue.acked >= number, self.tuning.stall)
    }

    fn wait(&self, done: impl Fn(&Queue) -> bool, stall: Duration) -> Result<(), Closed> {
        let mut queue = self.lock();
        loop {
            if let Some(reason) = &queue.closed {
                return Err(Closed(reason.clone()));
            }
            if done(&queue) {
                return Ok(());
            }
            let left = stall.saturating_sub(queue.moved.elapsed());
            if left.is_zero() {
                drop(queue);
                self.close(&format!("the peer took nothing for {} ms", stall.as_millis()));
                queue = self.lock();
                continue;
            }
            self.changed.wait_for(&mut queue, left);
        }
    }

    /// Delays a writer while the peer holds more than `most_bytes` in memory; gives up after [`Tuning::throttle`], so that
    /// a write is slowed down and never stuck: a stuck one would keep the VM from stopping for the sync that frees memory.
    pub fn throttle(&self, most_bytes: u64) {
        let until = Instant::now() + self.tuning.throttle;
        let mut queue = self.lock();
        while queue.held_bytes >= most_bytes && !queue.expedite && queue.closed.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.changed.wait_for(&mut queue, left);
        }
    }

    /// Lets every waiting write through while the VM is being stopped.
    pub fn expedite(&self, on: bool) {
        self.lock().expedite = on;
        self.changed.notify_all();
    }

    /// The peer said how far it is.
    pub fn acked(&self, through: u64, held_bytes: u64) {
        let mut queue = self.lock();
        queue.acked = queue.acked.max(through);
        queue.held_bytes = held_bytes;
        queue.moved = Instant::now();
        drop(queue);
        self.changed.notify_all();
    }

    /// Memory that the peer's buffers hold, as last told.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.lock().held_bytes
    }

    /// Frames that the peer has acknowledged.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.lock().acked
    }

    /// Bytes that wait to be sent.
    #[must_use]
    pub fn queued_bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Breaks the stream; the first reason stays (L3).
    pub fn close(&self, reason: &str) {
        let mut queue = self.lock();
        if queue.closed.is_none() {
            queue.closed = Some(reason.into());
        }
        queue.frames.clear();
        queue.bytes = 0;
        drop(queue);
        (self.shutdown)();
        self.work.notify_all();
        self.changed.notify_all();
    }

    /// Closes the link once everything that is queued was sent (a last word to the peer).
    pub fn finish(&self, reason: &str) {
        self.lock().ending.get_or_insert_with(|| reason.into());
        self.work.notify_all();
    }

    /// Why it was closed.
    #[must_use]
    pub fn closed(&self) -> Option<String> {
        self.lock().closed.clone()
    }

    /// Waits up to `timeout` or until the link is closed; says whether it is.
    pub fn wait_closed(&self, timeout: Duration) -> bool {
        let mut queue = self.lock();
        self.changed
            .wait_while_for(&mut queue, |queue| queue.closed.is_none(), timeout);
        queue.closed.is_some()
    }

    /// Sends what is pushed until the link is closed. One thread runs this. Frames are written before they count as
    /// sent, so `queue_bytes` bounds what is in memory.
    pub fn send_all(&self, writer: &mut (impl Write + ?Sized)) -> Result<(), Closed> {
        let mut head = Vec::with_capacity(BATCH_BYTES + HEADER_BYTES);
        loop {
            let next = self.next(head.is_empty())?;
            // Small frames gather; a large payload goes straight from where it lies.
            let mut large = Bytes::new();
            let mut took = 0;
            let queue_is_empty = next.is_none();
            if let Some((frame, payload)) = next {
                took = (payload.len() + HEADER_BYTES) as u64;
                head.extend(frame.header(&payload));
                if payload.len() < BATCH_BYTES {
                    head.extend(&payload);
                } else {
                    large = payload;
                }
            }
            if queue_is_empty || !large.is_empty() || head.len() >= BATCH_BYTES {
                let written = writer
                    .write_all(&head)
                    .and_then(|()| writer.write_all(&large))
                    .and_then(|()| writer.flush());
                if let Err(error) = written {
                    // Not closed here: the peer's last word, which says why, may still lie in the socket for whoever reads.
                    let reason = format!("the peer cannot be written to: {error}");
                    self.finish(&reason);
                    return Err(Closed(reason));
                }
                head.clear();
            }
            let mut queue = self.lock();
            queue.bytes = queue.bytes.saturating_sub(took);
            queue.moved = Instant::now();
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// The next frame; `None` when there is none and the caller has something to send meanwhile.
    fn next(&self, may_wait: bool) -> Result<Option<(Frame, Bytes)>, Closed> {
        let mut queue = self.lock();
        loop {
            if let Some(reason) = &queue.closed {
                return Err(Closed(reason.clone()));
            }
            match queue.frames.pop_front() {
                None if may_wait && queue.ending.is_some() => {
                    let reason = queue.ending.clone().unwrap_or_default();
                    drop(queue);
                    self.close(&reason);
                    queue = self.lock();
                }
                None if may_wait => self.work.wait(&mut queue),
                next => return Ok(next),
            }
        }
    }
}

/// Frames are gathered up to this many bytes before they are written.
const BATCH_BYTES: usize = 64 << 10;

/// Why nothing more can be received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The stream ended or broke.
    #[error("the peer's stream ended: {0}")]
    Io(#[from] io::Error),
    /// The peer sent nonsense.
    #[error(transparent)]
    Mirror(#[from] MirrorError),
}

/// Reads one frame.
///
/// # Errors
/// The stream ended, or does not carry frames.
pub fn receive(reader: &mut (impl Read + ?Sized)) -> Result<(Frame, Bytes), ReceiveError> {
    let mut header = [0; HEADER_BYTES];
    reader.read_exact(&mut header)?;
    let (frame, len) = Frame::decode(&header)?;
    let mut payload = vec![0; len as usize];
    reader.read_exact(&mut payload)?;
    Frame::check(&header, &payload)?;
    Ok((frame, Bytes::from(payload)))
}

/// Writes one frame at once (greetings, before a link's thread runs).
///
/// # Errors
/// The stream broke.
pub fn send_now(writer: &mut (impl Write + ?Sized), frame: Frame, payload: &[u8]) -> io::Result<()> {
    writer.write_all(&frame.header(payload))?;
    writer.write_all(payload)?;
    writer.flush()
}
