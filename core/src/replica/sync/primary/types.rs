//! What a primary hears from its loop, what its driver does, and what the loop is told.

use super::{Point, SessionError};
use crate::policy::Mode;
use crate::sync::compare::{Compare, DivergentPage};
use crate::sync::dirty::PageSet;
use crate::units::{Epoch, Term};
use crate::wire::sync::SyncMessage;
use bytes::Bytes;

/// What the VM loop says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Word {
    /// The sync that ends this epoch is about to be agreed: a round while the VMs run.
    PreCopy {
        /// The epoch that is about to end.
        epoch: Epoch,
    },
    /// A part of what the connections will need at the end of this epoch, in which the backup's VM does not run.
    ConnectionsAhead {
        /// The running epoch.
        epoch: Epoch,
        /// Opaque.
        part: Bytes,
    },
    /// Sync. Inputs are drained.
    Sync(Order),
    /// The line is drawn between this epoch's frames and the next one's.
    LineDrawn {
        /// The connections that do not speak the VM's own numbers.
        connections: Bytes,
    },
    /// The group is asked to follow the backup: the loop answers for the VM that stands here.
    HandedOver,
}

/// Which sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// The epoch that it ends.
    pub epoch: Epoch,
    /// The VM stays stopped afterwards: the backup takes over.
    pub switchover: bool,
    /// Whether the log says so, too.
    pub agreed: bool,
    /// The mode of the next epoch.
    pub next: Mode,
}

/// What a driver does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Sends a message.
    Send(SyncMessage),
    /// Copies the disks to the backup, and mirrors their writes from then on: `DisksCopied`.
    CopyDisks,
    /// Asks which pages the guest has ever used: `Mapped`.
    MapMemory,
    /// Asks which pages were written since the last scan: `Scanned`.
    Scan,
    /// Hashes these pages as they are, a hash for each: `PagesHashed`.
    HashPages(PageSet),
    /// Sends these pages as they are, for a VM that does not run yet.
    SendPages(PageSet),
    /// Sends these pages as zeros, without looking at them: the guest had never used them after the marks were cleared.
    SendZeros(PageSet),
    /// So many of so many pages of a join are sent, or were there already.
    Progress {
        /// So far.
        sent: usize,
        /// In all, as it is known now.
        total: usize,
    },
    /// Stops the VM.
    Stop,
    /// Saves the devices' state, in a join with all of the firmware.
    Save {
        /// With the firmware.
        firmware: bool,
    },
    /// Marks the end of the epoch in the disks' streams.
    MarkDisks(Epoch),
    /// Copies these pages aside.
    Copy(PageSet),
    /// Hashes all of memory, for the audit that goes with the state.
    Audit,
    /// Lets the VM run on: `Resumed`.
    Resume,
    /// Lets the VM run on though the sync is broken off. A QEMU that is slow to answer has been told, and obeys when it can.
    RunOn,
    /// Hashes what was copied aside: `Hashed`.
    Hash,
    /// Sends what differs, out of the copy of `pages`: `DeltasSent`.
    SendDeltas {
        /// The epoch.
        epoch: Epoch,
        /// What was copied aside.
        pages: PageSet,
        /// Which blocks of it, in its order.
        differing: Vec<DivergentPage>,
    },
    /// Sends the devices' state, and with its last part the sync is whole: `StateSent`.
    SendState {
        /// The epoch.
        epoch: Epoch,
        /// The mode of the next one.
        next: Mode,
        /// The connections that do not speak the VM's own numbers.
        connections: Bytes,
    },
    /// Tells the loop.
    Report(Report),
    /// Tests may let a fault happen here.
    Pass(Point),
    /// The session is over. The driver does nothing more.
    End {
        /// For a person.
        why: SessionError,
        /// It was not ended by its loop: the other host may have said more before it closed the stream.
        broken: bool,
    },
}

/// What the loop is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Report {
    /// A join: of the pages that the backup's memory held already, so many are this VM's, and are not sent.
    Held {
        /// Pages that it held.
        pages: usize,
        /// Those of them that are equal here.
        equal: usize,
    },
    /// The copy of a join is done, but for a last sync.
    Copied,
    /// The round while the VMs run is done: the sync may be agreed.
    PreCopied,
    /// The VM stands: draw the line.
    Stopped,
    /// The VM runs on, or is left to the backup.
    Resumed,
    /// The backup holds all of the sync.
    Acknowledged {
        /// The epoch that it ends.
        epoch: Epoch,
        /// It was the last sync of a join.
        joining: bool,
        /// What it took.
        counts: Counts,
    },
    /// The backup has applied it.
    Loaded {
        /// The epoch.
        epoch: Epoch,
        /// How long that took.
        load_us: u64,
    },
    /// The VM was stopped, and does not resume.
    VmStands {
        /// For a person.
        why: String,
    },
}

/// What a sync has looked at and sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Pages that were looked at before the stop.
    pub pre_copied: u64,
    /// Pages that the primary has written, the backup, either, and how many of them differ.
    pub pages: [u64; 4],
    /// Bytes of pages that were sent.
    pub bytes: u64,
    /// Hashes of blocks that were compared after the stop, as a list.
    pub list_hashes: u64,
    /// How many of a hash tree's nodes were, in how many rounds; of a list, how many would have been (only with audits).
    pub tree: (u64, u64),
}

/// What a session is set up with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setup {
    /// The primary's term.
    pub term: Term,
    /// The guest's memory in pages.
    pub pages: u32,
    /// Whether the backup's VM runs after the join.
    pub active: bool,
    /// How the session compares.
    pub compare: Compare,
    /// Whether every sync is followed by a hash of all memory on both sides.
    pub audit: bool,
    /// Memory of the backup for staging, which is the measure for what a sync may take here.
    pub staging_bytes: usize,
}
