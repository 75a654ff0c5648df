//! What it decides: the order of a join and of a sync, on both sides.
//!
//! Flow: [`primary::Primary`] and [`backup::Backup`] are state machines. A driver gives them an [`Event`], carries out the effects
//! in their order, and gives back the [`Answer`] of the last one if it has one. The first effect that fails drops the rest, and is
//! answered with [`Event::Failed`]. Where no effect is under way, [`Machine::awaits`] says whom to listen to, and until when: what
//! else arrives meanwhile stays where it is.
//!
//! Invariants, asserted in release builds too (each side names its own):
//! 1. Every wait has a bound of core's `waits`, but for those where nothing is owed.
//! 2. A message is taken, and sent, only where `table` says so; all else is a protocol violation, which ends the session.
//!
//! The states and the messages for people: docs/replica.md; a test compares the two. Not here: hashing, copying, QEMU, disks (the
//! drivers in `node`); when to sync, what leaves when, who may acknowledge (the VM loop, with `sync` and `output`).

pub mod backup;
pub mod bugs;
mod error;
mod machine;
mod point;
pub mod primary;
pub mod rounds;
pub mod table;
#[cfg(test)]
mod tests;

pub use error::{SessionError, UnfitState, Violation};
pub use machine::{Answer, Awaits, Event, Machine};
pub use point::Point;
pub use table::Source;

/// Pages that are copied aside, and hashed, at once where the VM runs meanwhile: 16 MiB. A guest that boots writes hundreds.
pub const PAGES_AT_ONCE: u32 = 4096;
/// Pages in one message: 1 MiB.
const PAGES_PER_MESSAGE: u32 = 256;
