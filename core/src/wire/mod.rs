//! Bytes <-> types, for everything that leaves a host. Every decoder is bounded, checks before it allocates, and never
//! panics.

pub mod agreed;
pub mod consensus;
mod reader;
pub mod sync;

pub use reader::{Reader, WireError};
