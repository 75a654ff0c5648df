//! What it decides: where each sector of the two VMs' disk writes lives until the next sync, and what reaches an image.
//!
//! Flow 3 of the architecture: *disk write -> I/O switch -> mirror*. Its parts, each a file:
//! [`buffer`] holds bytes that are not on an image yet, [`io_switch`] is GANNET's secondary I/O switch,
//! [`extents`] remembers what a peer lacks, [`likeness`] when a peer is asked before a copy, [`mirror`] is the form in which a primary's
//! writes travel.
//!
//! Invariants (the same numbers stand in asserts, tests and in `docs/disk.md`):
//! - **D1** The backup VM reads its own last write, else the state of the last committed sync; never a mirrored write
//!   that is not committed.
//! - **D2** `commit(k)` needs mark k: no commit without everything that the primary wrote before its mark.
//! - **D3** After `commit(k)` the view is the primary's disk at mark k, byte by byte.
//! - **D4** After `take_over` the image is what the backup VM saw, byte by byte.
//! - **D5** `marked >= committed`, and both only grow.
//! - **D6** Memory is bounded: pressure is reported long before the limit, and nothing is dropped silently.
//!
//! Source: *GANNET*, sections III to VI (quoted beside the code). Not here: files, sockets, threads (`guest::disk`).

pub mod buffer;
pub mod extents;
pub mod io_switch;
pub mod likeness;
pub mod mirror;

pub use buffer::{Buffer, Content};
pub use extents::{EpochExtents, ExtentSet};
pub use io_switch::{Pressure, Storage, Switch, SwitchError, UnknownStorage};

use crate::units::{Epoch, Term};

/// Says which of two images of one disk is newer: a later term wins; within a term the primary's (it is written
/// through) is newer than any backup's; between backups the later committed sync.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Generation {
    /// The reign in which the image was last written.
    pub term: Term,
    /// Written as the primary of that term.
    pub primary: bool,
    /// The last sync that the image holds whole (a backup's image).
    pub epoch: Epoch,
}
