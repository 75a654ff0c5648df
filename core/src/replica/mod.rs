//! What makes a replica of a host that follows the log: events in, effects out (docs/replica.md).
//!
//! Here so far: `sync`, the protocol between a primary and its backup, from the join on. Not here yet: roles, take-over,
//! membership and modes (the VM loop of `node`).

pub mod sync;
