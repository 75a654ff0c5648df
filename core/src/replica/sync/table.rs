//! The messages and the states of a session, each in one place.
//!
//! The two sides ask it which message is due; docs/replica.md shows it to people, and a test compares the two.

mod states;

pub use states::STATES;

use crate::waits::Wait;
use crate::wire::sync::SyncMessage;

/// Of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The host that runs the VM.
    Primary,
    /// The host with the second copy.
    Backup,
}

/// Whom a machine listens to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The other host.
    Messages,
    /// The VM loop.
    Words,
    /// Both.
    Either,
}

/// Where a message is sent, or taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    /// In these states; a sender is in the state that it has come to.
    States(&'static [&'static str]),
    /// In every state that listens to messages.
    Any,
    /// Between the two VM loops, in any state: no machine sees it.
    Loop,
}

impl At {
    /// Whether that is one of them.
    #[must_use]
    pub fn is(self, state: &str) -> bool {
        match self {
            Self::States(states) => states.contains(&state),
            Self::Any => true,
            Self::Loop => false,
        }
    }
}

/// A message.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its name.
    pub message: &'static str,
    /// Who sends it.
    pub from: Side,
    /// In which states.
    pub sent: At,
    /// In which states of the other side it is taken.
    pub due: At,
    /// What it says.
    pub says: &'static str,
}

/// A state.
#[derive(Clone, Copy, Debug)]
pub struct StateRow {
    /// Whose.
    pub side: Side,
    /// Its name.
    pub name: &'static str,
    /// Whom it listens to; none where an effect answers.
    pub from: Option<Source>,
    /// For how long; none where nothing is owed. A switchover's wait comes second.
    pub waits: &'static [Wait],
    /// What happens there.
    pub what: &'static str,
}

const fn row(message: &'static str, from: Side, sent: At, due: At, says: &'static str) -> Row {
    Row {
        message,
        from,
        sent,
        due,
        says,
    }
}

/// Which message may be sent where, and where it is due.
pub const MESSAGES: [Row; 24] = [
    row(
        "Join",
        Side::Primary,
        At::States(&["greeting"]),
        At::States(&["awaits-join"]),
        "which VM, in which term, and whether the backup's is to run",
    ),
    row(
        "Holds",
        Side::Backup,
        At::States(&["joining"]),
        At::States(&["greeting"]),
        "pages that the backup's memory holds of an earlier copy, with their hashes",
    ),
    row(
        "JoinReady",
        Side::Backup,
        At::States(&["joining"]),
        At::States(&["greeting"]),
        "QEMU is up; send",
    ),
    row(
        "Refused",
        Side::Backup,
        At::States(&["orphaned"]),
        At::Any,
        "it cannot be done, and why; the session ends",
    ),
    row(
        "Pages",
        Side::Primary,
        At::States(&["copying-disks", "comparing-held", "copying", "idle"]),
        At::States(&["joining"]),
        "pages into the memory of a VM that does not run yet; none: disks are still copied",
    ),
    row(
        "JoinLast",
        Side::Primary,
        At::States(&["capturing"]),
        At::States(&["joining"]),
        "the last sync of the join follows",
    ),
    row(
        "PreCopy",
        Side::Primary,
        At::States(&["precopy-asks"]),
        At::States(&["idle", "precopy-gathers"]),
        "pages that the primary has written so far: say yours, and hash all of them",
    ),
    row(
        "Ends",
        Side::Primary,
        At::States(&["capturing"]),
        At::States(&["idle", "awaits-ends"]),
        "the epoch of a backup that does not run is over",
    ),
    row(
        "Dirty",
        Side::Backup,
        At::States(&["idle", "precopy-hashes", "awaits-union"]),
        At::States(&["precopy-asks", "backup-stops"]),
        "pages that the backup has written; at the end of an epoch its VM stands",
    ),
    row(
        "Union",
        Side::Primary,
        At::States(&["hashing"]),
        At::States(&["awaits-union"]),
        "the pages that either has written: hash them",
    ),
    row(
        "Hashes",
        Side::Backup,
        At::States(&["idle", "awaits-state"]),
        At::States(&["precopy-awaits-hashes", "awaits-hashes"]),
        "the block hashes of what was asked for, in order",
    ),
    row(
        "Nodes",
        Side::Primary,
        At::States(&["precopy-descends", "descending"]),
        At::States(&["precopy-descends", "descending"]),
        "where trees are compared: the hashes of the nodes in question, from the root on",
    ),
    row(
        "Differ",
        Side::Backup,
        At::States(&["precopy-descends", "idle", "descending", "awaits-state"]),
        At::States(&["precopy-descends", "descending"]),
        "which of these nodes the backup has otherwise: their children are in question next",
    ),
    row(
        "Delta",
        Side::Primary,
        At::States(&["precopy-sends", "sending"]),
        At::States(&[
            "idle",
            "precopy-descends",
            "awaits-union",
            "awaits-ends",
            "awaits-state",
        ]),
        "blocks that differ: they are staged",
    ),
    row(
        "ConnectionsAhead",
        Side::Primary,
        At::States(&["idle"]),
        At::States(&["idle", "awaits-ends"]),
        "where the backup's VM does not run: a part of what the connections will need at the end of the epoch",
    ),
    row(
        "DeviceState",
        Side::Primary,
        At::States(&["sending-state"]),
        At::States(&["awaits-state"]),
        "a part of the devices' state",
    ),
    row(
        "Connections",
        Side::Primary,
        At::States(&["sending-state"]),
        At::States(&["awaits-state"]),
        "a part of what the connections need",
    ),
    row(
        "State",
        Side::Primary,
        At::States(&["sending-state"]),
        At::States(&["awaits-state"]),
        "its last part: the sync is whole",
    ),
    row(
        "Audit",
        Side::Primary,
        At::States(&["sending-state"]),
        At::States(&["awaits-audit"]),
        "a hash of all memory after the sync",
    ),
    row(
        "Staged",
        Side::Backup,
        At::States(&["applying"]),
        At::States(&["awaits-staged"]),
        "the backup holds the sync: the acknowledgement that releases output",
    ),
    row(
        "Loaded",
        Side::Backup,
        At::States(&["idle"]),
        At::States(&["awaits-loaded"]),
        "the sync is applied, the VM runs on, or could",
    ),
    row(
        "Said",
        Side::Backup,
        At::Loop,
        At::Loop,
        "frames of the backup's VM, for comparison",
    ),
    row(
        "Idle",
        Side::Backup,
        At::Loop,
        At::Loop,
        "the backup's VM has nothing left to do",
    ),
    row(
        "NewTerm",
        Side::Primary,
        At::Loop,
        At::Loop,
        "the session goes on in a new term",
    ),
];

/// Whether a side may take this message in this state.
#[must_use]
pub fn is_due(side: Side, state: &str, message: &SyncMessage) -> bool {
    due(side, state).any(|name| name == message.name())
}

pub(super) fn due(side: Side, state: &str) -> impl Iterator<Item = &'static str> {
    let taken = move |row: &&Row| row.from != side && row.due.is(state);
    MESSAGES.iter().filter(taken).map(|row| row.message)
}

/// A side says nothing that the other does not know what to do with.
///
/// # Panics
/// If it does: a programmer's error, which must not reach the other host.
pub fn check_sent(side: Side, state: &str, message: &SyncMessage) {
    let known = |row: &Row| row.from == side && row.message == message.name() && row.sent.is(state);
    assert!(
        MESSAGES.iter().any(known),
        "{side:?} sends {} in '{state}'",
        message.name()
    );
}
