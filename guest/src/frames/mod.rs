//! Frames: between QEMU's NIC, the host's TAP, and the announcements at a take-over.
//!
//! Decides:    nothing. Flow: TAP <-> node <-> [`FramePort`] <-> QEMU.
//! Invariants: see each file.
//! Source:     architecture.md, flows 1 and 2.
//! Not here:   order, holding, release (core).

pub mod announce;
mod codec;
mod rx_filter;
mod tap;

pub use announce::Announcer;
pub use codec::{FRAME_BYTES_MAX, FrameError, FramePort};
pub use rx_filter::RxFilter;
pub use tap::{Tap, TapError};
