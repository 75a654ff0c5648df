//! What it decides: which entries are agreed, in which order, and who leads.
//!
//! This page is the whole interface of the consensus core: messages, events, actions. The state machine behind it
//! is split by flow: `log`, `propose`, `follow`, `election`, `quorum`.

use crate::units::{Index, ReplicaId, Term, Viewstamp};
use bytes::Bytes;

/// What an entry carries. The log does not look inside `payload`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum EntryKind {
    /// A new leader's first entry: nothing for the client, but it lets earlier terms commit.
    Barrier = 0,
    /// Whatever the group agrees on: frames, sync marks, membership of the complete set.
    Data = 1,
    /// A change of members, one at a time; payload is `Members` encoded.
    Members = 2,
}

/// One position of the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Who wrote it, and where.
    pub stamp: Viewstamp,
    /// What kind of entry.
    pub kind: EntryKind,
    /// The content, opaque here.
    pub payload: Bytes,
}

/// A member and what it can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its name in this group.
    pub id: ReplicaId,
    /// A witness agrees and logs, but never runs the VM and so never leads with one.
    pub witness: bool,
}

/// What one replica says to another. How a message travels (a ring write, a status word) is the fabric's affair.
#[derive(Clone, PartialEq, Eq, Debug)]
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
        /// The term that the follower has promised.
        term: Term,
        /// Everything up to here equals the leader's log and is held as durably as the group asks.
        durable: Index,
        /// The newest `beat` that it has seen: tells the leader that it is still heard.
        beat: u64,
    },
    /// Follower to leader: "my log does not match at `prev`; try from `hint`".
    Reject {
        /// The follower's promised term.
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
        /// Pre-vote: would you vote for me?
        pre: bool,
    },
    /// The answer to `RequestVote`.
    Vote {
        /// The term that was asked for if granted, else the voter's own.
        term: Term,
        /// Whether the vote is given.
        granted: bool,
        /// As asked.
        pre: bool,
    },
    /// Leader to a follower whose next entry was truncated away: start from here. The agreed state at `last`
    /// (opaque to the log) replaces everything before.
    Snapshot {
        /// The leader's term.
        term: Term,
        /// The entry that the state stands for.
        last: Viewstamp,
        /// The members at `last`.
        members: Vec<Member>,
        /// The agreed state, opaque to the log.
        state: Bytes,
    },
}
