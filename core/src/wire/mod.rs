//! Bytes to types and back, for everything that leaves a host. Decoders are total: any bytes give a value or a
//! `WireError`, never a panic, and never an allocation larger than what the bytes themselves justify.

pub mod agreed;
mod reader;
pub mod sync;

pub use reader::{Reader, WireError};
