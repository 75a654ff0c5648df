//! Shadow sockets of speculative communication: real sockets of this host's kernel, put into an established connection with the VM's
//! address and numbers by TCP_REPAIR, in a private network namespace whose only way out is a TUN that this process reads.
//!
//! Decides:    nothing; `dunlin_core::speculation` does. `Driver` carries its actions out, in order.
//! Flow:       a frame of the VM or a client -> `Driver` -> core -> actions -> `Sockets` (build, write, end) and `Ports` (VM, client, gate);
//!             a socket's packet -> TUN -> core -> client.
//! Invariants: 1. the namespace, the TUN and all sockets go with this process: they are descriptors and one thread.
//!             2. a socket that goes says nothing: it is put into repair before it is closed.
//! Source:     VEE'12; tcp(7), Documentation/networking/tuntap.rst, CRIU's page on TCP_REPAIR.
//! Not here:   epochs, checkpoints on their way, the VM.

mod congestion;
mod driver;
mod namespace;
mod repair;
mod sockets;
mod tun;

pub use driver::{Driver, Ports};
pub use sockets::{Happened, Sockets, SocketsError};
pub use tun::Tun;
