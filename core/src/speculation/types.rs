//! What speculative communication is told and tells: flows, limits, sockets and actions. Nothing is decided here.

use crate::agreed::Frame;
use crate::offload::Offload;
use crate::output::{Ends, packet::FlowKey};
use bytes::Bytes;
use std::net::{IpAddr, SocketAddr};

/// A TCP connection of the VM.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Flow {
    /// The VM's end.
    pub vm: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
}

impl Flow {
    pub(super) fn of(key: &FlowKey) -> Self {
        Self {
            vm: SocketAddr::new(key.vm, key.vm_port),
            peer: SocketAddr::new(key.peer, key.peer_port),
        }
    }

    /// Addresses that mean something on one link only: no socket can be bound to them without naming an interface, and the shadow
    /// sockets' has no part in that link.
    pub(super) fn is_link_local(&self) -> bool {
        [self.vm, self.peer].iter().any(|end| match end.ip() {
            IpAddr::V4(_) => false,
            IpAddr::V6(v6) => v6.segments()[0] & 0xffc0 == 0xfe80,
        })
    }
}

/// Where the ends are on the link: the Ethernet headers, with VLAN tags, of both ways.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Link {
    pub(super) to_peer: Bytes,
    pub(super) to_vm: Bytes,
}

/// What may be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// How far the VM may be ahead of a client, in bytes. Best at twice the rate times the time from a byte's word to its
    /// acknowledgement (half an epoch, the sync, the round trip). At least 64 KiB count.
    pub window_bytes: u32,
    /// What is kept of all connections together, in bytes. Windows close before that; beyond it the VM's data is dropped, as on a busy
    /// wire. The last quarter is for connections that keep little, so that clients that take nothing stop nobody else.
    pub total_bytes: usize,
    /// How many connections have a shadow socket; others are held as before.
    pub connections: usize,
    /// How many handshakes in progress are remembered; the oldest are forgotten, and held as before.
    pub handshakes: usize,
    /// A connection that was given back does not come back before that, in microseconds.
    pub again_us: u64,
    /// When so many bytes of a connection wait for the next cut they go to the backup ahead of it.
    pub ahead_bytes: u32,
    /// What leaves from here passes the translation of a new copy's numbers (`output::rewriter`) afterwards, and what comes has passed it: all numbers
    /// here are the VM's, and what a held connection's clock is ahead of the VM's is added there (`Action::Lift`). Without it that is done here.
    pub translated: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            window_bytes: 16 << 20,
            total_bytes: 256 << 20,
            connections: 8192,
            handshakes: 4096,
            again_us: 10_000_000,
            ahead_bytes: 256 << 10,
            translated: false,
        }
    }
}

/// A shadow socket, as it is to be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Socket {
    /// The connection: the socket is bound to `vm` and connected to `peer`.
    pub flow: Flow,
    /// The sequence number of the first byte that will be written. One byte before it is a dummy: the socket begins at
    /// `start - 1`, and the driver writes the dummy first.
    pub start: u32,
    /// The sequence number that the socket is to expect of the client, for all its life.
    pub peer_start: u32,
    /// What the client takes in one segment, and no more than the VM's own frames hold.
    pub mss: u16,
    /// The client's and the VM's window scale.
    pub scale: Option<(u8, u8)>,
    /// Selective acknowledgements.
    pub sack: bool,
    /// The first TSval, with bit 0 clear.
    pub stamp: Option<u32>,
    /// The client's window, in bytes, and the dummy.
    pub window: u32,
}

/// What is to be done, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// The VM gets this frame.
    ToVm(Frame),
    /// This frame leaves now.
    ToClient(Frame, Offload),
    /// The VM said it, and it waits for the running epoch as before.
    Hold(Frame),
    /// This IP packet goes into the TUN of the shadow sockets.
    ToShadow(Bytes),
    /// Build a shadow socket, at once; `failed` if it cannot be.
    Build(Box<Socket>),
    /// `unsent` has bytes for this socket.
    Write(Flow),
    /// The stream to the client ends here (`shutdown(SHUT_WR)`).
    Shutdown(Flow),
    /// The socket goes without a word.
    Destroy(Flow),
    /// So many ticks more are added to this connection's timestamps by the translation, whoever speaks; and which of its ends are closed.
    /// Of those that are over the translation remembers the newest only. Only where `Limits::translated`.
    Lift(FlowKey, u32, Ends),
}

/// What it did, for status and metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Connections that were begun speculatively.
    pub begun: u64,
    /// Connections held as before: older than speculation, odd, or beyond a limit.
    pub held: u64,
    /// Connections that a shadow socket gave up.
    pub failed: u64,
    /// Segments of the VM dropped because a budget was full.
    pub dropped: u64,
}

/// What a connection may use while it takes an event.
pub(super) struct Context<'a> {
    pub(super) now_us: u64,
    pub(super) again_us: u64,
    pub(super) translated: bool,
    /// No connection is to be ahead of its client.
    pub(super) holds_all: bool,
    pub(super) limit: u32,
    /// What may be kept more, of all connections together.
    pub(super) room: usize,
    /// The part of it that is for connections that keep no more than `few`.
    pub(super) reserve: usize,
    pub(super) few: usize,
    /// Clients that take nothing have used up nearly all of it.
    pub(super) scarce: bool,
    pub(super) dropped: u64,
    pub(super) out: &'a mut Vec<Action>,
}
