//! Dirty -> union -> hash -> divergent -> device -> resume: the sync that makes two VMs one again.
//!
//! `trigger` says when, `change_over` in which mode to go on, `drain` whether the VM has its inputs, `dirty` which pages may differ, `compare` which blocks
//! do, `staging` keeps what has arrived until all of it has, `cost` what syncs cost the VM's clients, `tenure` whether a session goes on under a new term, `way_out` when a VM whose connections are ahead of their clients may change to a mode in which its backup runs. Hashing and copying are the guest crate's work; the order of the steps is the node's.

pub mod change_over;
pub mod compare;
pub mod cost;
pub mod dirty;
pub mod drain;
pub mod staging;
pub mod tenure;
pub mod trigger;
pub mod way_out;
