//! What the node says to a disk and hears of it: its configuration, what happens to it, what can go wrong, how it is.
//!
//! Decides: nothing. Flow: [`DiskConfig`] in; [`DiskEvent`], [`DiskError`] and [`DiskStatus`] out.
//! Invariants: **G2** of [`super`]: events are told without a lock held.
//! Not here: what a disk does ([`super::Disk`]).

use super::{BackupFigures, Generation, ImageError, Limits, Member, Storage};
use crate::spec::DiskFormat;
use dunlin_core::{disk::SwitchError, units::Epoch};
use std::{io, path::PathBuf, sync::Arc, time::Duration};

/// One disk of a VM on this host.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// The export's name.
    pub name: String,
    /// An image file or block device.
    pub image: PathBuf,
    /// What is in it.
    pub format: DiskFormat,
    /// Where superblock, journal and dirty map live (the VM's state directory).
    pub state_dir: PathBuf,
    /// The guest may not write.
    pub read_only: bool,
    /// How a backup treats mirrored writes.
    pub storage: Storage,
    /// What a backup may hold in memory.
    pub limits: Limits,
    /// The other disks that move together with this one; none for a VM with one disk.
    pub group: Option<Member>,
}

/// What happened to a disk. Told from threads of the disk port: the receiver must only pass it on, and never call the
/// [`Disk`] from within.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DiskEvent {
    /// Primary: the first copy to a backup begins.
    CopyStarted {
        /// How much is to be copied.
        bytes: u64,
        /// Everything, not only what changed.
        whole: bool,
    },
    /// Primary: the first copy goes on.
    CopyProgress {
        /// Copied.
        done_bytes: u64,
        /// Of this many.
        total_bytes: u64,
    },
    /// Primary: the peer had this much of what was to be copied, and it was not sent.
    Alike {
        /// How much.
        bytes: u64,
    },
    /// Either: the first copy is whole; the sync that protects the VM may be taken.
    Copied,
    /// Primary: no backup could be attached. The role is unchanged.
    AttachFailed {
        /// Why, as a sentence.
        reason: String,
    },
    /// Primary: the backup is gone; writes go on, and what it lacks is remembered.
    BackupLost {
        /// Why, as a sentence.
        reason: String,
    },
    /// Backup: everything that the primary wrote before its mark is here.
    Marked {
        /// The sync.
        epoch: Epoch,
    },
    /// Either: this sync is on the backup's image.
    Committed {
        /// The sync.
        epoch: Epoch,
    },
    /// Either: the backup's buffers fill up; take a sync soon.
    NeedSync,
    /// Backup: the primary's stream ended.
    PrimaryLost {
        /// Why, as a sentence.
        reason: String,
    },
    /// Backup: this backup cannot go on and must be replaced; the primary was told.
    BackupFailed {
        /// Why, as a sentence.
        reason: String,
    },
    /// Any: this host's image failed a request of the VM (which was told so too).
    ImageFailed {
        /// Why, as a sentence.
        reason: String,
        /// No space was left.
        full: bool,
    },
    /// The VM's NBD connection ended.
    Disconnected {
        /// Why; none: in good order.
        reason: Option<String>,
    },
}

/// What can go wrong in a call.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// D2, D5.
    #[error(transparent)]
    Switch(#[from] SwitchError),
    /// The image could not be written at a take-over or commit.
    #[error("the disk cannot be written: {0}")]
    Io(#[from] io::Error),
    /// Superblock, journal or dirty map.
    #[error("the disk's state in {0} cannot be used: {1}")]
    State(PathBuf, io::Error),
    /// The image is half a copy.
    #[error(
        "disk {0} holds an unfinished copy: start the VM on the host whose disk is whole, or let this one be its backup"
    )]
    Incomplete(String),
    /// A call that does not fit the role.
    #[error("disk {disk} is {role} and cannot {what}")]
    Role {
        /// Which disk.
        disk: String,
        /// What it is.
        role: &'static str,
        /// What was asked.
        what: &'static str,
    },
    /// A mark without a backup.
    #[error("there is no backup to mark a sync for")]
    NoBackup,
    /// A second backup.
    #[error("this disk has a backup already")]
    HasBackup,
    /// Too early.
    #[error("the first copy of the disk is not whole yet")]
    StillCopying,
    /// An epoch was used twice.
    #[error("epoch {asked:?} was marked before (last {last:?}): a broken sync's number is not used again")]
    EpochUsed {
        /// What was asked.
        asked: Epoch,
        /// The last one.
        last: Epoch,
    },
    /// Two at once would take each other's answers.
    #[error("this disk is being compared already")]
    Verifying,
    /// Who asked for a comparison wants no more of it.
    #[error("the comparison was ended before it was whole")]
    Stopped,
    /// The backup has failed.
    #[error("{0}")]
    Failed(String),
    /// No thread.
    #[error("no thread could be started for the disk: {0}")]
    Thread(io::Error),
}

/// What a disk is doing, for `status` and metrics.
#[derive(Clone, Debug)]
pub struct DiskStatus {
    /// `idle`, `alone`, `primary` or `backup`.
    pub role: &'static str,
    /// Primary: the peer's first copy is whole.
    pub copied: bool,
    /// Extents that a peer may lack.
    pub dirty_bytes: u64,
    /// Primary: still to be copied.
    pub copy_left_bytes: u64,
    /// Primary: waiting to be sent.
    pub queued_bytes: u64,
    /// Primary: memory that the backup's buffers hold.
    pub peer_held_bytes: u64,
    /// Primary: frames that the backup has acknowledged: as long as this grows, it is slow and not stuck.
    pub peer_acknowledged: u64,
    /// Requests of the VM since the disk was opened: reads, writes, zeroes, flushes.
    pub requests: u64,
    /// How long they took in all, from the port's first sight of them to its answer.
    pub request_ns: u64,
    /// Backup: its buffers.
    pub backup: BackupFigures,
    /// How new the image is.
    pub generation: Generation,
    /// The image is the state of one moment.
    pub consistent: bool,
}

/// Told of every [`DiskEvent`].
pub type EventSink = Arc<dyn Fn(DiskEvent) + Send + Sync>;

/// What a take-over did.
#[derive(Clone, Copy, Debug)]
pub struct TakeOver {
    /// Written from memory to the image.
    pub flushed_bytes: u64,
    /// How long it took.
    pub took: Duration,
}
