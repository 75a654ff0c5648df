//! Frames: between QEMU's NIC, the host's TAP, and the announcements at a take-over.
//!
//! Decides:    nothing. Flow: TAP <-> node <-> [`FramePort`] <-> QEMU.
//! Invariants: see each file.
//! Source:     architecture.md, flows 1 and 2.
//! Not here:   order, holding, release (core).

pub mod announce;
mod gso_tap;
mod port;
mod rx_filter;
mod stream;
mod tap;
pub mod vhost_user;

pub use announce::Announcer;
pub use gso_tap::GsoTap;
pub use port::{FrameError, FramePort};
pub use rx_filter::RxFilter;
pub use stream::{FRAME_BYTES_MAX, StreamPort};
pub use tap::{Tap, TapError};
pub use vhost_user::VhostUserPort;
