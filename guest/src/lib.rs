//! One stock-QEMU VM and its four ports: control, memory, frames, disk.
//!
//! Decides:    nothing about replication. It starts a QEMU as the distribution ships it, and gives the node handles.
//! Flow:       node -> [`Qemu`] (QMP, device state), [`Memory`] (RAM file, dirty pages, hashes), [`Colo`] (load
//!             state again and again into a live backup), [`frames`] (NIC, TAP), `disk` (NBD).
//! Invariants: 1. everything handed to QEMU is an inherited descriptor: a SIGKILL of the daemon leaves no file behind;
//!             2. QEMU dies with the daemon; 3. unsafe code of the project's device side lives only here.
//! Source:     docs/guest.md (command line, versions, pitfalls met).
//! Not here:   when to sync, what to send, who speaks: `core` and `node`.

pub mod colo;
pub mod disk;
pub mod firmware;
pub mod frames;
pub mod memory;
pub mod probe;
pub mod qemu;
pub mod spec;
pub mod state;
mod sys;
pub mod uefi;

#[cfg(test)]
#[path = "../tests/common/skipped.rs"]
mod skipped;

pub use colo::Colo;
pub use firmware::Firmware;
pub use memory::{Bitmap, Memory, PAGE_BYTES};
pub use probe::Finding;
pub use qemu::{Ports, Qemu, Start};
pub use spec::{Accel, DiskSpec, FirmwareKind, Machine, NicBackend, NicSpec, VmSpec};
pub use state::ThreadStates;
pub use sys::map_large_buffers;
