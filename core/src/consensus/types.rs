//! What it decides: nothing. Every event, action and setting of the consensus core on one page.
//!
//! Flow: `Event` in, `Action`s out, through `Consensus::step`.
//!
//! Invariants: see `super`.
//!
//! Source: etcd-io/raft's habit of a core that only decides.
//!
//! Not here: the words between replicas (`message`).

use super::message::{Entry, HardState, Member, Message, Snapshot};
use crate::units::{Index, ReplicaId, Term, Viewstamp};
use bytes::Bytes;

/// What an acknowledgement promises.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Durability {
    /// The entry is in the replica's memory. Promises are on disk all the same. `Persist`, `TruncateSuffix` and
    /// `SaveSnapshot` are never asked for.
    Memory,
    /// The entry is on the replica's disk.
    Disk,
}

/// The settings of one replica. Times in microseconds.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Who I am.
    pub me: ReplicaId,
    /// What an acknowledgement promises.
    pub durability: Durability,
    /// The leader says `Lead` this often.
    pub heartbeat_us: u64,
    /// A follower that heard nothing for `election_min_us..=election_max_us` campaigns; a leader that no majority
    /// answered for `election_max_us` steps down. Both are longer where hosts have been late lately (`detector`).
    pub election_min_us: u64,
    /// See `election_min_us`.
    pub election_max_us: u64,
    /// At most this many `election_min_us` of silence are harmless, whatever was seen lately; 1: patience does not adapt.
    pub most_patience: u64,
    /// `propose` refuses (`RingFull`) when this many entries wait for truncation.
    pub ring_entries: usize,
    /// ... or this many payload bytes.
    pub ring_bytes: usize,
    /// Room beyond `ring_entries` for what only [`super::Consensus::propose_control`] may append: the entry that a full ring
    /// waits for must find room in it.
    pub reserve_entries: usize,
    /// The same beyond `ring_bytes`.
    pub reserve_bytes: usize,
    /// At most this many entries in one `Append`.
    pub batch_entries: usize,
    /// At most this many payload bytes in one `Append` (a single larger entry still goes).
    pub batch_bytes: usize,
    /// At most this many entries under way to one peer without an acknowledgement.
    pub window_entries: usize,
    /// Witnesses get inputs with the next heartbeat, while the full members are a majority that keeps up.
    pub witness_waits: bool,
}

impl Config {
    /// The defaults: heartbeat 5 ms, election time-out 30 to 60 ms.
    #[must_use]
    pub fn new(me: ReplicaId, durability: Durability) -> Self {
        Self {
            me,
            durability,
            heartbeat_us: 5_000,
            election_min_us: 30_000,
            election_max_us: 60_000,
            most_patience: 8,
            ring_entries: 1 << 16,
            ring_bytes: 64 << 20,
            reserve_entries: 1024,
            reserve_bytes: 64 << 10,
            batch_entries: 512,
            batch_bytes: 1 << 20,
            window_entries: 4096,
            witness_waits: false,
        }
    }
}

/// What a replica remembers when it starts.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Restored {
    /// The last hard state on disk.
    pub hard_state: HardState,
    /// The last snapshot on disk; before the first one, its `members` are the group's first members (for a member
    /// that is to be added to a running group: empty).
    pub snapshot: Snapshot,
    /// The log on disk, consecutive; entries at or before `snapshot.last` may still be there.
    pub log: Vec<Entry>,
    /// Set it when a hard state was found on disk, and the log that went with it was in memory alone (as it is with
    /// `Durability::Memory`, and for the first start after a change to `Durability::Disk`): this replica took part before and has
    /// lost its log. It starts as `Role::Recovering`.
    pub lost_memory: bool,
}

impl Restored {
    /// The first start ever of a member of a new group (or, with no members, of one that is to be added to a group).
    #[must_use]
    pub fn fresh(members: Vec<Member>) -> Self {
        Self {
            snapshot: Snapshot {
                members,
                ..Snapshot::default()
            },
            ..Self::default()
        }
    }
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Time passed: call it when `next_deadline_us` is reached (earlier does no harm).
    Tick,
    /// Everything that `propose` appended since the last call is sent and persisted now.
    Flush,
    /// A peer said something.
    Received {
        /// Authenticated by the fabric.
        from: ReplicaId,
        /// What it said.
        message: Message,
    },
    /// All `Persist` actions up to this ticket, and all disk actions before them, are durable.
    Persisted {
        /// From the newest finished `Action::Persist`.
        ticket: u64,
    },
    /// `PersistHardState` with this very hard state is durable.
    HardStatePersisted(HardState),
    /// `SaveSnapshot` of this snapshot is durable.
    SnapshotPersisted {
        /// Its `last`.
        last: Viewstamp,
    },
    /// The replica's state contains everything up to here (for C4 and for `Truncate`).
    Applied {
        /// At most `committed`.
        through: Index,
    },
    /// Outputs that rest on entries up to here have left (for C4).
    Released {
        /// At most `applied`.
        through: Index,
    },
    /// The owner's next words are of the state of an `InstallSnapshot`, one for each. Until then its `Applied`, `Released` and `Truncate`
    /// are of a log that is gone, and not heard: it may run beside this replica, and know of the snapshot later.
    SnapshotTaken,
    /// Entries up to here are not needed again (an acknowledged sync); `state` stands for them.
    Truncate {
        /// At most `applied`.
        through: Index,
        /// Opaque; a follower or restarted replica gets it with `InstallSnapshot`.
        state: Bytes,
    },
    /// The link to a peer stands (again); what was under way on an older one may be lost.
    LinkUp {
        /// Which.
        peer: ReplicaId,
    },
    /// The link to a peer ended. Said before this host closes its own end, also when it puts another link in its place: what
    /// came through it counts no more (X2 in `lease`). If it was the leader's, and closed by it, campaign (pre-vote) at once.
    LinkLost {
        /// Which.
        peer: ReplicaId,
        /// The peer's system says that its end is closed (end of stream, reset): that process is gone, or has let go of the
        /// link. Otherwise this host gave the link up, which says nothing about the peer.
        by_peer: bool,
    },
    /// Whether this replica is ready to lead (its VM is whole). Starts as true. Also needed: `Member::complete`. A leader that is not
    /// ready leaves its office at once: where an heir may have all that it needs, `StepDown` comes first.
    MayLead(bool),
    /// Leader: hand over to this member.
    TransferTo(ReplicaId),
    /// Leader: hand over to the best member; step down at the latest after an election time-out.
    StepDown,
    /// A person says that all other members are dead: lead a group of one, if this replica may lead (see `alone`).
    StandAlone,
    /// Leader: answer `ReadReady` when it is certain that no newer leader had committed anything before this call.
    Read {
        /// Any number; comes back.
        id: u64,
    },
}

/// What the shell must do, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Say this to a peer. Losing it is allowed.
    Send {
        /// The peer.
        to: ReplicaId,
        /// What to say.
        message: Message,
    },
    /// Write the entries after `prev` up to `through` to a peer, straight from the log (`Consensus::entry`) and before the
    /// next `step`: no copy on the hot path. `Consensus::append_message` makes a `Message::Append` of it.
    SendEntries {
        /// The peer.
        to: ReplicaId,
        /// The leader's term.
        term: Term,
        /// The stamp of the entry before the first one.
        prev: Viewstamp,
        /// The last one; equal to `prev.index` for a probe without entries.
        through: Index,
    },
    /// Append entries `from..=through` (`Consensus::entry`, to be read before the next `step`) to the log on disk, then
    /// report `Persisted`. Several may be united into one write (group commit).
    Persist {
        /// The first entry.
        from: Index,
        /// The last one.
        through: Index,
        /// Counts up.
        ticket: u64,
    },
    /// Remove entries at and after `from` from the log on disk. In order with `Persist`.
    TruncateSuffix {
        /// The first entry to go.
        from: Index,
    },
    /// Make this durable, then report `HardStatePersisted`.
    PersistHardState(HardState),
    /// Make this durable, then report `SnapshotPersisted`; after that (not before) log entries up to `last` may go.
    /// If the log on disk ends before `last`, it goes on at the index after `last`.
    SaveSnapshot(Snapshot),
    /// For the state above: replace what you have with this; report `SnapshotTaken` before you do, and `Applied` afterwards.
    InstallSnapshot(Snapshot),
    /// Everything up to here is agreed.
    Committed {
        /// The newest agreed entry.
        through: Index,
    },
    /// This replica leads now. Its agreed state is current when `barrier` is committed.
    BecameLeader {
        /// The term.
        term: Term,
        /// Its first entry.
        barrier: Index,
    },
    /// This replica follows (or stopped leading, or changed the leader it follows).
    BecameFollower {
        /// The term.
        term: Term,
        /// The leader, if known.
        leader: Option<ReplicaId>,
    },
    /// A `Read` may be answered from a state that has applied `index`.
    ReadReady {
        /// From the event.
        id: u64,
        /// Wait for this to be applied.
        index: Index,
    },
    /// A `Read` cannot be answered here.
    ReadRefused {
        /// From the event.
        id: u64,
    },
    /// The leadership transfer was not taken in time; this replica leads on, if that member is heard again or leaves the group: an heir
    /// that says nothing costs the term (X3 in `lease`).
    TransferFailed {
        /// Who did not take it.
        to: ReplicaId,
    },
    /// A peer said what agreement forbids; it was dropped. Shout: its disk or its program is broken, or ours.
    ProtocolViolation {
        /// The peer.
        from: ReplicaId,
        /// What was wrong.
        what: &'static str,
    },
}

/// What this replica is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Follows, or waits for a leader.
    Follower {
        /// The leader that it hears.
        leader: Option<ReplicaId>,
    },
    /// Campaigns.
    Candidate {
        /// Still asking without having raised the term.
        pre: bool,
    },
    /// Leads.
    Leader,
    /// Lost its memory; neither votes nor acknowledges yet.
    Recovering,
}

/// Why the leader's side refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// Not the leader.
    #[error("this replica does not lead; ask {leader:?}")]
    NotLeader {
        /// Who does, if known.
        leader: Option<ReplicaId>,
    },
    /// Too many entries wait for truncation.
    #[error("the log's ring is full; wait for a sync to truncate it")]
    RingFull,
    /// A leadership transfer is under way.
    #[error("a leadership transfer is under way; wait for the new leader")]
    Transferring,
    /// An earlier change of members, or the term's barrier, is not committed yet.
    #[error("an earlier change is not agreed yet; try again when it is committed")]
    ChangePending,
    /// More than one member differs, the list is empty, too long, or names one twice.
    #[error("not a change of one member within 1 to 127; change them one at a time")]
    BadChange,
    /// Too many of the members that would remain do not answer.
    #[error(
        "a majority of the members after this change does not answer; remove a dead one, or bring one back first"
    )]
    WouldLoseMajority,
    /// It would remove the leader or its right to lead.
    #[error("a leader cannot remove itself; hand over first")]
    WouldRemoveLeader,
}

/// What the leader knows of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerState {
    /// It holds everything up to here.
    pub acknowledged: Index,
    /// The newest heartbeat that it has answered was sent at this time.
    pub heard_us: u64,
    /// It lost its memory and is being brought up to date.
    pub recovering: bool,
}
