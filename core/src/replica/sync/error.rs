//! Why a session is over. Its words are what people read: docs/troubleshooting.md has some of them.

use super::backup;
use super::table::{self, Side};
use crate::sync::staging::StagingError;
use crate::units::Epoch;
use crate::waits::Wait;
use crate::wire::sync::parts::BadPart;
use std::{error::Error, fmt};

/// Why a session is over, or a backup's VM is not taken over.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SessionError {
    /// The other host's words.
    #[error("{0}")]
    Refused(String),
    /// The driver's words: an effect has failed.
    #[error("{0}")]
    Failed(String),
    /// The driver's words: the stream is broken, or at its end.
    #[error("{0}")]
    StreamEnded(String),
    /// The other host, or the loop, has not come in time.
    #[error("{}", .0.said())]
    InVain(Wait),
    /// There is no VM loop any more.
    #[error("the VM loop has gone")]
    LoopGone,
    /// The VM loop has ended it, between two syncs.
    #[error("the session was ended here")]
    EndedHere,
    /// The other host said what is not due.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The other host's sets of pages make no sense.
    #[error(transparent)]
    Part(#[from] BadPart),
    /// What it sent cannot be staged.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// Primary: a sync would take too much memory here.
    #[error(
        "the VM wrote so much that its sync needs {} MiB here, more than {}: raise sync.staging_mib",
        .needed_bytes >> 20,
        .most_bytes >> 20
    )]
    SyncTooLarge {
        /// So much.
        needed_bytes: usize,
        /// What it may take.
        most_bytes: usize,
    },
    /// Primary: a backup has a larger `sync.staging_mib`, or is none.
    #[error(
        "the backup says that it holds more of the VM's memory than sync.staging_mib has room for hashes of"
    )]
    HoldsTooMuch,
    /// Primary: the hashes are not of the pages that were asked for.
    #[error("the backup hashed other pages than the union")]
    OtherPages,
    /// Primary: the loop speaks of a sync that was not ordered.
    #[error("the loop speaks of a sync where there is none")]
    NoSync,
    /// Primary: the loop orders a sync while the VM is handed over.
    #[error("the loop speaks of another sync in a switchover")]
    SyncInSwitchover,
    /// The loop orders a sync, or ends an epoch, while a sync is under way.
    #[error("two syncs at once")]
    TwoSyncs,
    /// Backup: the primary has ended an epoch, and the loop has not.
    #[error("{0:?} where an epoch ends")]
    NotAnEnd(backup::Word),
    /// Backup: the loop is in a later term, of another leader.
    #[error("the primary's term is over")]
    TermOver,
    /// Backup: the two hosts were not set up alike.
    #[error(
        "the hosts disagree on the VM: {pages} pages and active {active}, here {our_pages} and {our_active}"
    )]
    Disagree {
        /// The guest's memory, as the primary has it.
        pages: u32,
        /// Whether the VM runs after the join, as the primary has it.
        active: bool,
        /// As it is here.
        our_pages: u32,
        /// As it is here.
        our_active: bool,
    },
    /// Backup: a page that the guest does not have.
    #[error("the primary names pages outside the guest's memory")]
    PageOutside,
    /// Backup: a sync of an epoch that is over (its invariant 6).
    #[error("a sync of epoch {} begins, and epoch {} has ended here", .begins.0, .ended.0)]
    EpochIsOver {
        /// The sync's.
        begins: Epoch,
        /// The last one that has ended.
        ended: Epoch,
    },
    /// Backup: the hashes of a sync would take too much memory here.
    #[error(
        "the hash tree of a sync needs {} MiB, more than {}: raise sync.staging_mib",
        .needed_bytes >> 20,
        .most_bytes >> 20
    )]
    TreeTooLarge {
        /// So much.
        needed_bytes: usize,
        /// What it may take.
        most_bytes: usize,
    },
    /// Backup: QEMU would not take the state.
    #[error(transparent)]
    Unfit(#[from] UnfitState),
    /// Backup: no sync was applied yet, and the VM is to be taken over.
    #[error("the backup's VM is not whole")]
    NotWhole,
}

/// Why QEMU would not take a state: the driver's words.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct UnfitState(pub String);

/// A message of the other host that a side cannot take in its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Who heard it.
    pub side: Side,
    /// In which state.
    pub state: &'static str,
    /// The message's name.
    pub message: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { side, state, message } = *self;
        write!(out, "the other host said {message} ")?;
        if table::due(side, state).any(|due| due == message) {
            return write!(out, "of another sync, or not as it is due here ({state})");
        }
        let due: Vec<&str> = table::due(side, state).filter(|due| *due != "Refused").collect();
        write!(out, "where {} was due ({state})", due.join(" or "))
    }
}

impl Error for Violation {}
