//! What makes a replica of a host that follows the log: events in, effects out (docs/replica.md).
//!
//! Here so far: `sync`, the protocol between a primary and its backup, from the join on; `epoch`, what holds from one sync to the next
//! and how epochs follow each other, as each side's VM loop sees it; `leadership`, who may lead, who is dropped and who speaks; `cold_start`,
//! who boots a VM of which no copy is alive; `log_cut`, where the log is cut. Not here yet: the drain of the cards, the VM's end (the VM loop
//! of `node`).

pub mod cold_start;
pub mod epoch;
pub mod leadership;
pub mod log_cut;
pub mod sync;
