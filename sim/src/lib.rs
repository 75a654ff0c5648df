//! What it decides: whether the production consensus core keeps its promises in worlds that lie.
//!
//! Flow: `run(seeds, start, bug)` plays one world per seed on all cores: first faults and load (safety), then calm
//! (liveness), then the clients' histories. The first violation, or panic, is the seed's verdict.
//!
//! Invariants: a seed's verdict depends on nothing but the seed and the code.
//!
//! Not here: the exhaustive model (`tests/model.rs`).
#![forbid(unsafe_code)]

pub mod busy;
pub mod chaos;
pub mod check;
pub mod client;
pub mod disk;
pub mod linear;
pub mod machine;
mod owner;
pub mod random;
mod run;
pub mod session;
pub mod tcp;
pub mod whole;
pub mod world;
pub mod worlds;

pub use dunlin_core::consensus::Bug;
pub use run::{Failure, Options, Report, run, run_large, run_with, trace};
