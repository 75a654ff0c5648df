//! Dunlin's core: everything that *decides*. Events in, actions out; no I/O, clock, thread or unsafe code.
#![forbid(unsafe_code)]

pub mod consensus;
pub mod disk;
pub mod output;
pub mod sync;
pub mod units;
pub mod wire;
