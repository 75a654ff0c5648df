//! Bytes <-> types. Every decoder is bounded, checks before it allocates, and never panics.

pub mod consensus;
