//! Dirty -> union -> hash -> divergent -> device -> resume: the sync that makes two VMs one again.
//!
//! `trigger` says when, `change_over` in which manner to go on, `dirty` which pages may differ, `compare` which blocks
//! do, `staging` keeps what has arrived until all of it has, `cost` what syncs cost the VM's clients. Hashing and copying are the guest crate's work; the order of the steps is the node's.

pub mod change_over;
pub mod compare;
pub mod cost;
pub mod dirty;
pub mod staging;
pub mod trigger;
