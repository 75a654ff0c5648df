//! What it decides: what of the log is on this host's disk, and what of it can be believed after a crash.
//!
//! **Flow**: `Group` -> [`Writer`] (its own thread, group commit) -> [`Disk`] -> segment files, hard state, snapshot
//! file. At start [`Disk::open`] reads them back.
//!
//! **Invariants**
//! 1. Append-only: nothing that was synced is overwritten; a cut suffix is a marker, old segments go whole.
//! 2. What was synced is found again, or opening fails with the file and offset; never silently less.
//! 3. A torn tail (the batch that was being written when the machine died) is cut, and reported.
//! 4. The hard state is on disk, whole, before `Done::HardState` is said, whatever the durability.
//! 5. A full disk stops acknowledgements, not the process; a disk that lost data (an error of fdatasync) is not asked
//!    again, since the kernel may already have dropped the bytes.
//! 6. A log that was left for one in memory is never taken for what was acknowledged since, however often the durability is changed.
//!
//! **Source**: the figures in docs/fabric.md; "fsyncgate" (PostgreSQL, 2018) for 5. **Not here**: what an entry means.

mod disk;
mod hard_state;
mod record;
mod segment;
mod worker;

pub use disk::{Cut, Disk, DiskOptions, Found};
pub use worker::{Command, Done, Mode, Writer};

use std::path::PathBuf;

/// Why the log could not be opened or written.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Data that was synced is not there any more.
    #[error(
        "{file}: damaged at byte {offset} ({what}): this copy of the log must not vote any more; take this member out of \
         the group and add it again under a new member id, with an empty directory"
    )]
    Corrupt {
        /// The file.
        file: PathBuf,
        /// Where.
        offset: u64,
        /// What was found.
        what: &'static str,
    },
    /// No space (or quota, or file size limit).
    #[error("{file}: no space left: free some; acknowledgements go on when there is room")]
    Full {
        /// The file that could not grow.
        file: PathBuf,
    },
    /// Another process has this directory open.
    #[error("{dir}: another process uses this log: is a second daemon running?")]
    Busy {
        /// The directory.
        dir: PathBuf,
    },
    /// Any other error of the system.
    #[error("{file}: {what}: {source}")]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl DiskError {
    pub(crate) fn io(file: &std::path::Path, what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Self::Full {
                file: file.to_owned(),
            },
            _ => Self::Io {
                file: file.to_owned(),
                what,
                source,
            },
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
