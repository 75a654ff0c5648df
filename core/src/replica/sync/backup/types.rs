//! What a backup hears from its loop, what its driver does, and what the loop is told.

use super::{Point, SessionError};
use crate::policy::Mode;
use crate::sync::dirty::PageSet;
use crate::sync::staging::{PageDelta, Staged};
use crate::units::{Epoch, Term};
use crate::wire::sync::SyncMessage;
use bytes::Bytes;

/// What the VM loop says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    /// The log says that this epoch ends, and all inputs before that are with the VM.
    EpochEnds {
        /// The epoch.
        epoch: Epoch,
    },
    /// The sync that is here whole may be acknowledged: the loop has taken the VM's last frames of the epoch.
    Acknowledge,
    /// The sync that is here whole is not to be acknowledged: its primary's term is over. It is dropped whole.
    Drop,
    /// This host leads in this term: make the VM a primary's.
    TakeOver(Term),
}

/// What a driver does.
#[derive(Debug)]
pub enum Effect {
    /// Sends a message.
    Send(SyncMessage),
    /// Sends a message to a primary that may be dead, which changes nothing.
    Tell(SyncMessage),
    /// Says what the memory holds, of so many pages at most, in parts of `PAGES_AT_ONCE`.
    SendHeld {
        /// As many hashes as the primary takes.
        most_pages: usize,
    },
    /// Writes pages into the memory of a VM that does not run yet.
    WritePages(Vec<PageDelta>),
    /// Stops the VM.
    Stop,
    /// Asks which pages were written since the last scan: `Scanned`.
    Scan,
    /// Hashes these pages and sends the hashes.
    SendHashes {
        /// The epoch.
        epoch: Epoch,
        /// The pages.
        pages: PageSet,
    },
    /// Hashes these pages: `Hashed`.
    Hash(PageSet),
    /// Asks whether QEMU will take this state: `StateChecked`. Nothing has changed yet, and the primary can still be told.
    CheckState(Bytes),
    /// Waits for the disks' writes up to the epoch's mark.
    AwaitMirrors(Epoch),
    /// Applies a sync, disks, memory and devices: `Applied`.
    Apply {
        /// The sync.
        staged: Staged,
        /// The VM runs on from it; otherwise it is kept.
        run: bool,
        /// The hash of all memory that the primary has after this sync, where it is asked for.
        audit: Option<u128>,
    },
    /// Makes the disks a primary's.
    TakeOverDisks(Term),
    /// Loads the state that belongs to the memory.
    LoadKept(Bytes),
    /// Makes the VM an ordinary, running one: `TookOver`.
    FailOver,
    /// Tells the loop.
    Report(Report),
    /// Tests may let a fault happen here.
    Pass(Point),
}

/// What the loop is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Report {
    /// A sync is here, whole: may it be acknowledged?
    Staged {
        /// The epoch that it ends.
        epoch: Epoch,
        /// The mode of the next one.
        next: Mode,
        /// The connections that do not speak the VM's own numbers.
        connections: Bytes,
    },
    /// A part of what the connections need has come ahead of the sync that ends this epoch.
    ConnectionsAhead {
        /// The epoch.
        epoch: Epoch,
        /// Opaque.
        part: Bytes,
    },
    /// It is applied; the VM runs on, or could.
    Loaded {
        /// The epoch that it ends.
        epoch: Epoch,
        /// It was the last sync of a join.
        joining: bool,
    },
    /// The VM is an ordinary one now, or is lost.
    TookOver(Result<(), SessionError>),
    /// The session is over.
    Ended {
        /// For a person.
        why: SessionError,
        /// A sync was applied by half (invariant 5).
        torn: bool,
    },
}

/// What a session is set up with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setup {
    /// The term in which the primary asked.
    pub term: Term,
    /// The guest's memory in pages.
    pub pages: u32,
    /// Whether the VM runs after the join.
    pub active: bool,
    /// Whether the primary sends audits.
    pub audit: bool,
    /// Whether the primary's build takes `Holds`.
    pub says_held: bool,
    /// Memory for staging.
    pub staging_bytes: usize,
}
