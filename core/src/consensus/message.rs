//! What it decides: nothing. The words that replicas say to each other, and what they carry.
//!
//! Flow: `wire::consensus` turns these into bytes and back; the fabric moves the bytes; `Consensus::step` reads them.
//!
//! Invariants: none of its own; every number in here is a peer's claim until the state machine has checked it.
//!
//! Source: Viewstamped Replication Revisited (recovery 4.3), Raft (elections, log matching), APUS (GAIA 2.1.2:
//! cumulative words written one-sidedly).
//!
//! Not here: how a message travels (a ring write, a status word): the fabric's affair.

use crate::units::{Index, ReplicaId, Term, Viewstamp};
use bytes::Bytes;

/// The largest group: as many as one byte counts with room for a flag, and more than the 105 replicas that APUS was built for.
pub const MAX_MEMBERS: usize = 127;

/// No term and no index ever comes near: a larger one, from a peer or a disk, is damage, and refused before anything is
/// counted up from it.
pub const MOST: u64 = 1 << 62;

/// What an entry carries. The log does not look inside `payload`, except for `Members`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum EntryKind {
    /// A new leader's first entry: nothing for the client, but it lets earlier terms commit.
    Barrier = 0,
    /// Whatever the group agrees on: frames, sync marks.
    Data = 1,
    /// A change of members; the payload is `wire::consensus::encode_members`.
    Members = 2,
}

/// One position of the log.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Entry {
    /// Who wrote it, and where.
    pub stamp: Viewstamp,
    /// What kind of entry.
    pub kind: EntryKind,
    /// The content, opaque here.
    pub payload: Bytes,
}

/// A member and what it can do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Member {
    /// Its name in this group. A name is never given to another host later on: a host with an empty log must not
    /// inherit the votes of the one before it.
    pub id: ReplicaId,
    /// A witness agrees and logs, but never runs the VM and so never leads.
    pub witness: bool,
}

impl Member {
    /// A member that may lead.
    #[must_use]
    pub fn full(id: u8) -> Self {
        Self {
            id: ReplicaId(id),
            witness: false,
        }
    }
    /// A member that votes and logs only.
    #[must_use]
    pub fn witness(id: u8) -> Self {
        Self {
            id: ReplicaId(id),
            witness: true,
        }
    }
    /// May it win an election at all? Whether it holds a copy of the VM that may lead is for its owner to know (`Event::MayLead`).
    #[must_use]
    pub fn electable(&self) -> bool {
        !self.witness
    }
}

/// What a replica must remember across a crash whatever the durability: it never goes back behind this.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct HardState {
    /// It takes part in no older term.
    pub term: Term,
    /// Whom it voted for in `term`.
    pub voted_for: Option<ReplicaId>,
}

/// What stands for the log up to `last`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Snapshot {
    /// The entry that the state stands for; the default is "before the first entry".
    pub last: Viewstamp,
    /// The members at `last`.
    pub members: Vec<Member>,
    /// The agreed state, opaque to the log.
    pub state: Bytes,
}

/// By what right a candidate asks for a vote.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Stand {
    /// It does not stand yet: would you vote for me? (Pre-vote.)
    Asks = 1,
    /// The leader is silent, or gone.
    Silence = 0,
    /// The leader hands over to it, and is silent itself.
    HandedOver = 2,
}

/// What one replica says to another.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Message {
    /// Leader to follower: entries that follow `prev`.
    Append {
        /// The leader's term.
        term: Term,
        /// The stamp of the entry before the first one here.
        prev: Viewstamp,
        /// Consecutive entries; may be empty (a probe).
        entries: Vec<Entry>,
    },
    /// Leader to follower, a cumulative word: "I lead `term`, and `commit` is agreed". Also the heartbeat.
    Lead {
        /// The leader's term.
        term: Term,
        /// Agreed up to here.
        commit: Index,
        /// Counts up; a heartbeat that does not count up is an old one.
        beat: u64,
    },
    /// Follower to leader, a cumulative word: "under `term` I hold everything up to `durable`".
    Ack {
        /// The follower's current term.
        term: Term,
        /// Everything up to here equals the leader's log and is held as durably as the group asks.
        durable: Index,
        /// The newest `beat` of this term that it has seen: tells the leader that it is still heard.
        beat: u64,
    },
    /// Follower to leader: "my log does not match at `prev`; try from `hint`".
    Reject {
        /// The follower's current term.
        term: Term,
        /// The latest index at which the logs may still agree.
        hint: Index,
    },
    /// Candidate to all. `pre` asks without raising the term.
    RequestVote {
        /// The term that is asked for.
        term: Term,
        /// The candidate's last entry.
        last: Viewstamp,
        /// By what right it stands.
        why: Stand,
    },
    /// The answer to `RequestVote`.
    Vote {
        /// The term that was asked for if granted, else the voter's own.
        term: Term,
        /// Whether the vote is given.
        granted: bool,
        /// As asked.
        pre: bool,
        /// The voter's last entry: a candidate that is behind it pulls the difference (see `Pull`).
        last: Viewstamp,
    },
    /// Leader to a follower whose next entry was truncated away: start from here. Also the answer to a `Pull` that
    /// reaches back behind the log's first entry (then not from a leader).
    Snapshot {
        /// The sender's term.
        term: Term,
        /// What replaces everything up to `snapshot.last`.
        snapshot: Snapshot,
        /// The sender leads `term`; else it answers a `Pull`.
        leads: bool,
    },
    /// A would-be candidate to a voter that holds more: "what do you hold after `at`?" Without it, entries that only
    /// the dead leader and a witness hold would keep every candidate from winning, for the witness may not lead.
    Pull {
        /// The asker's term.
        term: Term,
        /// The asker's last entry, or the end of what it pulled before.
        at: Viewstamp,
        /// The asker's committed index: both logs agree up to here.
        committed: Index,
    },
    /// The answer: entries of the voter's log after `prev`.
    Pulled {
        /// The voter's term.
        term: Term,
        /// The entry before the first one here.
        prev: Viewstamp,
        /// Consecutive entries.
        entries: Vec<Entry>,
        /// The voter's last entry when it answered.
        last: Viewstamp,
    },
    /// A replica that lost its log (kept in memory only) to everyone, then to the leader: "bring me up to date". It
    /// neither votes nor acknowledges before that.
    Recover {
        /// Its current term (that one is on disk).
        term: Term,
        /// A random number of this incarnation.
        nonce: u64,
        /// What it holds so far of the leader's log.
        held: Index,
    },
    /// Leader to a recovering replica: when you hold `last`, you hold everything that you ever acknowledged.
    Recovery {
        /// The leader's term.
        term: Term,
        /// As asked: proves that `last` was read after the restart.
        nonce: u64,
        /// The leader's last index now.
        last: Index,
    },
    /// Leader to the member it hands over to: you hold everything, campaign now.
    Campaign {
        /// The leader's term.
        term: Term,
        /// The leader's newest beat. Whoever has heard a later one lets this pass: the leader may speak again since.
        beat: u64,
    },
}

impl Message {
    /// Terms and indices that a replica can have reached. (Entries' terms are compared with the message's.)
    pub(super) fn is_possible(&self) -> bool {
        let stamp = |at: &Viewstamp| at.term.0.max(at.index.0);
        let most = match self {
            Self::Append { term, prev, .. } => term.0.max(stamp(prev)),
            Self::Lead {
                term, commit: index, ..
            }
            | Self::Ack {
                term, durable: index, ..
            }
            | Self::Reject { term, hint: index }
            | Self::Recover {
                term, held: index, ..
            }
            | Self::Recovery {
                term, last: index, ..
            } => term.0.max(index.0),
            Self::RequestVote { term, last, .. } | Self::Vote { term, last, .. } => term.0.max(stamp(last)),
            Self::Snapshot { term, snapshot, .. } => term.0.max(stamp(&snapshot.last)),
            Self::Pull { term, at, committed } => term.0.max(stamp(at)).max(committed.0),
            Self::Pulled { term, prev, last, .. } => term.0.max(stamp(prev)).max(stamp(last)),
            Self::Campaign { term, beat } => term.0.max(*beat),
        };
        most < MOST
    }
}
