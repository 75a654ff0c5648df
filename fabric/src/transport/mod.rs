//! What it decides: nothing. It moves bytes one-sidedly into a peer's registered memory.
//!
//! **Flow**: `register` memory -> the peer sees the grant -> the peer `write`s, `flush`es -> we poll our own memory.
//! What the bytes mean, and whether they are believed, is decided above: `ring` and `word` check every one.
//!
//! **Invariants** (the conformance suite breaks every backend against them)
//! 1. Local memory is read by atomic loads and copied out; there is never a `&[u8]` over what a peer may write.
//! 2. Writes of one link land in the order in which they were made. Inside one write *no* order is promised.
//! 3. A returned `write` or `flush` says that the source may be reused, nothing about arrival: never a vote.
//! 4. After `revoke` (or `register` under a new epoch) returned, nothing of the former epoch lands in what
//!    [`Transport::region`] shows.
//! 5. A dead peer is noticed: [`TransportError::Closed`], at the latest by `progress` after the system knows.
//! 6. A sleeper that got `true` from `arm` is woken through one of its descriptors by any later write.
//!
//! **Source**: docs/fabric.md (measurements); DARE, Mu and APUS for the shape. **Not here**: safety. It rests on terms,
//! checksums and persisted promises above; revocation is hygiene.

pub mod conformance;
mod memory;
pub mod ring;
mod shm;
mod tcp;
#[cfg(feature = "verbs")]
mod verbs;
pub mod word;

pub use memory::Memory;
pub use shm::Shm;
pub use tcp::Tcp;
#[cfg(feature = "verbs")]
pub use verbs::Verbs;

use crate::link::Stream;
use std::os::fd::RawFd;

/// Which of a link's inbound memories. A link has at most [`REGIONS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegionId(pub u8);

/// Regions per link and direction.
pub const REGIONS: usize = 4;
/// The largest region.
pub const REGION_MAX_BYTES: usize = 1 << 28;

/// A peer's permission to write into its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Under which epoch. Writes under another are refused here or discarded there.
    pub epoch: u64,
    /// The size of the memory.
    pub bytes: usize,
    /// A random number that only both ends of this link know; it goes into every checksum, so that no payload can
    /// pose as an entry of a later lap.
    pub key: u64,
}

/// Why a transport could not do it.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The peer's end of the connection is closed: its process has ended, or let go of it. Make a new one and `reconnect`.
    #[error("the peer is gone ({0})")]
    Closed(String),
    /// This host or its system gave the connection up, which says nothing about the peer's process.
    #[error("the link to the peer was given up ({0})")]
    GivenUp(String),
    /// The memory is not, or no longer, granted under this epoch.
    #[error("region {region} is not granted under epoch {epoch}")]
    Stale {
        /// The region.
        region: u8,
        /// The writer's epoch.
        epoch: u64,
    },
    /// Too much is waiting to be sent: push back and try later.
    #[error("too many bytes wait for the peer")]
    Full,
    /// The peer broke the protocol; the link is not usable any more.
    #[error("the peer broke the protocol: {0}")]
    ProtocolViolation(&'static str),
    /// This host cannot do it.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// This build or this machine lacks what the backend needs.
    #[error("{0}")]
    Unavailable(String),
}

/// A connection's end was found. It is a word about the peer only if this host has not made it.
fn end_of(stream: &Stream) -> TransportError {
    if stream.was_ended_here() {
        TransportError::GivenUp("this host ended it".into())
    } else {
        TransportError::Closed("it ended the connection".into())
    }
}

/// A connection failed. Only what the peer's system has sent (an end, a reset) is a word about the peer.
fn ended(stream: &Stream, error: &std::io::Error) -> TransportError {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    if stream.was_ended_here() {
        return end_of(stream);
    }
    match error.kind() {
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof => {
            TransportError::Closed(error.to_string())
        }
        _ => TransportError::GivenUp(error.to_string()),
    }
}

pub(crate) fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> TransportError {
    move |source| TransportError::Io { what, source }
}

/// What `progress` found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Progress {
    /// Something landed, or may have: look at the memory. (A backend whose NIC writes by itself always says so.)
    pub landed: bool,
    /// A grant of the peer appeared or went away.
    pub grants: bool,
    /// It stopped for its budget: call it again before waiting.
    pub more: bool,
}

/// One link to one peer.
pub trait Transport: Send {
    /// "shm", "tcp", "verbs".
    fn fabric(&self) -> &'static str;

    /// Opens fresh zeroed memory (replacing and revoking a former one) and grants it to the peer. `bytes` is a
    /// multiple of 64 and at most [`REGION_MAX_BYTES`]; `epoch` must rise from one registration to the next.
    fn register(&mut self, region: RegionId, epoch: u64, bytes: usize) -> Result<(), TransportError>;

    /// Our memory for this region, if it is open.
    fn region(&self, region: RegionId) -> Option<&Memory>;

    /// What we granted for this region, if it is open.
    fn opened(&self, region: RegionId) -> Option<Grant>;

    /// What the peer grants us, as far as `progress` has seen.
    fn granted(&self, region: RegionId) -> Option<Grant>;

    /// One-sided write. `offset` and the length are multiples of 8. It may stay here until `flush`.
    fn write(
        &mut self,
        region: RegionId,
        epoch: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), TransportError>;

    /// Sends what is held back, and rings the peer's bell if it sleeps.
    fn flush(&mut self) -> Result<(), TransportError>;

    /// A write that wakes the peer.
    fn write_notify(
        &mut self,
        region: RegionId,
        epoch: u64,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), TransportError> {
        self.write(region, epoch, offset, bytes)?;
        self.flush()
    }

    /// Lets things happen: every poller must call it, since some fabrics land writes only here. Handles at most about
    /// `budget` bytes.
    fn progress(&mut self, budget: usize) -> Result<Progress, TransportError>;

    /// Whether the peer's writes land without `progress`: then looking at the memory is enough between two calls, and cheap.
    /// Else `progress` costs a system call, and is worth it only when the first descriptor is readable.
    fn lands_by_itself(&self) -> bool {
        true
    }

    /// The owner has asked the system whether the first descriptor is readable: the next `progress` need not.
    fn hint(&mut self, _readable: bool) {}

    /// Announces that we are about to sleep on `fds`. Look at the memory once more after it, then sleep.
    fn arm(&mut self) -> Result<(), TransportError>;

    /// Awake again.
    fn disarm(&mut self);

    /// Closes our memory to the peer, synchronously.
    fn revoke(&mut self, region: RegionId);

    /// Continues over a new connection to the same peer: all regions and grants of the old one are gone.
    fn reconnect(&mut self, stream: Stream) -> Result<(), TransportError>;

    /// Readable descriptors wake a sleeper.
    fn fds(&self) -> [Option<RawFd>; 2];

    /// Whether it waits for the first descriptor to be writable.
    fn wants_write(&self) -> bool;
}

/// A transport over `stream`: `shm` if it is a Unix socket of this machine, else `tcp`.
pub fn over(stream: Stream) -> Result<Box<dyn Transport>, TransportError> {
    if stream.is_local() {
        Ok(Box::new(Shm::new(stream)?))
    } else {
        Ok(Box::new(Tcp::new(stream)?))
    }
}

/// What a region id or a size from a caller must be.
pub(crate) fn check_region(region: RegionId, bytes: usize) {
    assert!(
        usize::from(region.0) < REGIONS,
        "region {} of {REGIONS}",
        region.0
    );
    assert!(
        bytes > 0 && bytes <= REGION_MAX_BYTES && bytes % 64 == 0,
        "a region of {bytes} bytes"
    );
}

/// Whether a write fits a grant; a programmer's error is an assert.
pub(crate) fn check_write(
    grant: Option<Grant>,
    region: RegionId,
    epoch: u64,
    offset: usize,
    len: usize,
) -> Result<(), TransportError> {
    match grant {
        Some(g) if g.epoch == epoch => {
            assert!(
                offset % 8 == 0 && len % 8 == 0,
                "write of {len} bytes at {offset}: not in words"
            );
            assert!(
                offset <= g.bytes && len <= g.bytes - offset,
                "write of {len} bytes at {offset} into {}",
                g.bytes
            );
            Ok(())
        }
        _ => Err(TransportError::Stale {
            region: region.0,
            epoch,
        }),
    }
}
