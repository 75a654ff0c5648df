//! What makes a replica of a host that follows the log: events in, effects out (docs/replica.md).
//!
//! Here so far: `sync`, the protocol between a primary and its backup, from the join on; `epoch`, what holds from one sync to the next
//! and how epochs follow each other, as each side's VM loop sees it; `leadership`, who may lead, who is dropped and who speaks; `cold_start`,
//! who boots a VM of which no copy is alive; `promotion`, who serves alone by a person's order; `standby`, when the part of a host that stays
//! away goes to another one; `shutdown`, how a VM ends; `enospc`, how it waits for room on its disk; `log_cut`, where the log is cut. Beside it
//! is `sync::drain`, which waits for the cards before a sync.

pub mod cold_start;
pub mod enospc;
pub mod epoch;
pub mod leadership;
pub mod log_cut;
pub mod promotion;
pub mod shutdown;
pub mod standby;
pub mod sync;
