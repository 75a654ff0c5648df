//! A card whose rings the daemon serves itself: QEMU's `-netdev vhost-user`.
//!
//! Decides:    nothing.
//! Flow:       the guest's kick -> epoll -> [`VhostUserPort::read`] -> gate; agreed input -> [`VhostUserPort::queue`] -> [`VhostUserPort::flush`] -> the
//!             guest's ring and its interrupt. QEMU's messages come to a thread of the card's own ([`messages`]).
//! Invariants: 1. never blocks, but for the lock that a message holds for some microseconds; 2. a frame leaves the guest's ring and is given out under
//!             one lock: where QEMU has stopped the rings it is either out or still the guest's; 3. what the rings do not take is kept, in order, and counted
//!             ([`VhostUserPort::queued_bytes`]); the owner bounds it; 4. one call takes [`MOST_READ`] frames, [`MOST_READ_BYTES`]
//!             or [`MOST_LOOKED_AT`] descriptors at most, and what is left of the last one, however much the guest sends; as many descriptors are filled at most.
//! Source:     QEMU docs/interop/vhost-user.rst; virtio 1.1, 5.1 (network device).
//! Not here:   QEMU's side of the card (its PCI registers, control queue and state, which it saves and loads itself).

mod card;
mod guest_ram;
mod messages;
pub mod ring;

use std::collections::VecDeque;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::epoll;
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{Mode, OFlags};

use super::{FRAME_BYTES_MAX, FrameError};
use crate::memory::RamWriter;
use card::{Buffers, Card};
pub use guest_ram::Ram;

/// Frames of one call; what is left makes the port readable again.
const MOST_READ: usize = 1024;
/// Bytes of these: what may wait of a VM's output is looked at between two calls.
const MOST_READ_BYTES: usize = 2 << 20;
/// Descriptors of one call, which a guest may make of a byte each: several times what a driver has for as many frames.
const MOST_LOOKED_AT: usize = 32 * 1024;
/// More events than a card has descriptors.
const EVENTS: usize = 4;

/// What the card's thread and the loop share to wake each other.
struct Signals {
    /// Readable when the guest has kicked or QEMU has said something: what the node waits for.
    epoll: OwnedFd,
    /// The card's thread: the rings run, or QEMU has ended.
    changed: OwnedFd,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let signals = Signals { epoll, changed };
        signals.watch(signals.changed.as_fd())?;
        Ok(signals)
    }

    /// By its edges, so that no counter has to be read. A watched descriptor that is closed everywhere is watched no more.
    fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), flags)?)
    }

    fn unwatch(&self, fd: BorrowedFd<'_>) {
        // It may be closed on the other side; then there is nothing to take out.
        let _ = epoll::delete(&self.epoll, fd);
    }

    fn tell_changed(&self) {
        // Its counter is never read, and does not reach its end.
        let _ = rustix::io::write(&self.changed, &1u64.to_ne_bytes());
    }

    /// Takes what has been signalled.
    fn take(&self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENTS);
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut events),
            Some(&now),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Our end of one NIC's rings.
pub struct VhostUserPort {
    card: Arc<Card>,
    outbox: VecDeque<Box<[u8]>>,
    queued_bytes: usize,
    buffers: Buffers,
}

impl VhostUserPort {
    /// A port and the other end, for QEMU's chardev. The card's thread answers QEMU from here on: QEMU asks while it starts.
    pub fn pair() -> io::Result<(VhostUserPort, OwnedFd)> {
        let (listener, theirs) = unnamed_listener()?;
        let card = Arc::new(Card::new(Signals::new()?));
        messages::answer(listener, card.clone())?;
        let port = VhostUserPort {
            card,
            outbox: VecDeque::new(),
            queued_bytes: 0,
            buffers: Buffers::default(),
        };
        Ok((port, theirs))
    }

    /// The card's writes to the guest's RAM.
    pub fn ram_writer(&self) -> RamWriter {
        self.card.clone()
    }

    /// Gives every frame that the guest has sent to `frame`, without waiting. Call when readable.
    pub fn read(&mut self, frame: impl FnMut(&[u8])) -> Result<usize, FrameError> {
        self.card.signals.take()?;
        self.card.take_frames(&mut self.buffers, frame)
    }

    /// Appends a frame for the guest.
    pub fn queue(&mut self, frame: &[u8]) {
        if frame.len() > FRAME_BYTES_MAX {
            return;
        }
        self.queued_bytes += frame.len();
        self.outbox.push_back(frame.into());
    }

    /// What is queued and not in the guest's ring yet.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Puts into the guest's ring what it has room for. False: some is left, and the port becomes readable when there is room.
    pub fn flush(&mut self) -> Result<bool, FrameError> {
        if self.outbox.is_empty() {
            return Ok(true);
        }
        let put = self.card.put_frames(&self.outbox)?;
        for frame in self.outbox.drain(..put) {
            self.queued_bytes -= frame.len();
        }
        if self.outbox.is_empty() {
            // Room for a flood is not kept for ever.
            self.outbox.shrink_to(MOST_READ);
        }
        Ok(self.outbox.is_empty())
    }
}

impl AsFd for VhostUserPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.card.signals.epoll.as_fd()
    }
}

impl Drop for VhostUserPort {
    fn drop(&mut self) {
        // Its thread ends by itself where QEMU has gone first.
        self.card.hang_up();
    }
}

/// A listening socket and what to connect to, as `/proc/self/fd/N`: QEMU passes descriptors only on a socket that it has connected itself, by a path. The
/// path is gone before anybody is told of it, so nobody else can connect, and none is left behind.
fn unnamed_listener() -> io::Result<(UnixListener, OwnedFd)> {
    let folder = loop {
        let name = format!("dunlin-card-{}-{}", std::process::id(), next_number());
        let folder = std::env::temp_dir().join(name);
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            // A daemon of the same number was killed just here.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => break made.map(|()| folder)?,
        }
    };
    let path = folder.join("card");
    let made = UnixListener::bind(&path).and_then(|listener| {
        // QEMU connects as its own user.
        std::fs::set_permissions(&path, Permissions::from_mode(0o666))?;
        let theirs = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        Ok((listener, theirs))
    });
    let _ = std::fs::remove_file(&path);
    std::fs::remove_dir(&folder)?;
    made
}

fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
