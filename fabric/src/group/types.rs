//! What the owner of a group says to it, and hears from it.

use crate::link::Spoken;
use crate::log::{DiskError, DiskOptions, Mode};
use crate::wait::WaitPolicy;
use dunlin_core::consensus::{Config, Durability, Member, Snapshot};
use dunlin_core::units::{Index, ReplicaId, Term};
use std::path::PathBuf;

/// Settings of one replica of one group.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Where its log lies; for this replica alone.
    pub dir: PathBuf,
    /// Who I am, durability, timings.
    pub core: Config,
    /// The members when the group was founded. A replica that is to be added later starts with none.
    pub members: Vec<Member>,
    /// The size of the log ring per peer, a multiple of 64. Larger entries go through in pieces.
    pub ring_bytes: usize,
    /// The log's files.
    pub disk: DiskOptions,
    /// Whose thread writes them.
    pub disk_mode: Mode,
    /// For [`Group::wait`] only.
    pub wait: WaitPolicy,
}

impl GroupConfig {
    /// The defaults.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, me: ReplicaId, members: Vec<Member>, durability: Durability) -> Self {
        let core = Config::new(me, durability);
        let (disk, disk_mode, wait) = (DiskOptions::default(), Mode::default(), WaitPolicy::default());
        Self {
            dir: dir.into(),
            core,
            members,
            ring_bytes: 2 << 20,
            disk,
            disk_mode,
            wait,
        }
    }
}

/// Why a group could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The log on disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// What the owner must know.
#[derive(Debug)]
pub enum GroupEvent {
    /// Everything up to here is agreed: read it with [`Group::entry`], then report [`Group::applied`].
    Committed {
        /// The newest agreed entry.
        through: Index,
    },
    /// This replica leads; its agreed state is current when `barrier` is committed.
    BecameLeader {
        /// The term.
        term: Term,
        /// Its first entry.
        barrier: Index,
    },
    /// This replica does not lead (any more).
    BecameFollower {
        /// The term.
        term: Term,
        /// The leader, if known.
        leader: Option<ReplicaId>,
    },
    /// Replace the agreed state with this, then report [`Group::applied`].
    SnapshotInstalled(Snapshot),
    /// The link to a peer works in both directions.
    LinkUp {
        /// Which.
        peer: ReplicaId,
    },
    /// The link to a peer ended: connect again and [`Group::add_link`].
    LinkLost {
        /// Which.
        peer: ReplicaId,
        /// Why, for the log.
        why: String,
        /// It broke the link by what it wrote: `ProtocolViolation` tells of that, not every time.
        broken: bool,
    },
    /// See [`Group::read`].
    ReadReady {
        /// From the call.
        id: u64,
        /// Wait for this to be applied.
        index: Index,
    },
    /// See [`Group::read`]: not the leader any more.
    ReadRefused {
        /// From the call.
        id: u64,
    },
    /// The leadership transfer was not taken; this replica leads on.
    TransferFailed {
        /// Who did not take it.
        to: ReplicaId,
    },
    /// The disk is full: this replica acknowledges nothing until `DiskRoom`.
    DiskFull(String),
    /// The disk has room again.
    DiskRoom,
    /// The log cannot be written any more; this replica acknowledges nothing until it is started again.
    DiskFailed(String),
    /// A peer said what the protocol forbids; it was dropped. At most one per peer and minute.
    ProtocolViolation {
        /// The peer.
        peer: ReplicaId,
        /// What.
        what: String,
        /// How many so far.
        count: u64,
    },
}

/// What is known of the link to a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkState {
    /// The member.
    pub peer: ReplicaId,
    /// "shm", "tcp", "tcp+tls"; `None` if there is no link.
    pub fabric: Option<&'static str>,
    /// Messages can go both ways.
    pub connected: bool,
    /// As the leader: it holds everything up to here.
    pub acknowledged: Option<Index>,
    /// When something was last heard from it, by `poll`'s clock.
    pub heard_us: Option<u64>,
    /// In which version of the protocol it is spoken to, and which build it is; `None` if there is no link.
    pub spoken: Option<Spoken>,
}

/// In which way a peer's words are bad.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bad {
    /// A message ends too early.
    Short,
    /// A message has bytes left over.
    Long,
    /// A tag or a count that is unknown or impossible.
    Unknown,
    /// Understood, and forbidden by the protocol.
    Forbidden,
    /// A frame or a record that ended the link: impossible lengths, a checksum that stays wrong.
    Broken,
}

/// Counters, for status and benchmarks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Messages and words understood.
    pub heard: u64,
    /// Records that were not (yet) believed when looked at.
    pub torn: u64,
    /// All that was bad, in whichever way; the next five are its parts.
    pub bad: u64,
    /// [`Bad::Short`].
    pub short: u64,
    /// [`Bad::Long`].
    pub long: u64,
    /// [`Bad::Unknown`].
    pub unknown: u64,
    /// [`Bad::Forbidden`].
    pub forbidden: u64,
    /// [`Bad::Broken`].
    pub broken: u64,
    /// Messages given up because a peer's ring and queue were full.
    pub given_up: u64,
}
