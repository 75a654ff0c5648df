//! Handshakes in progress: what both ends offer, so that speculation can begin at the acknowledgement that ends one.
//!
//! Flow: a SYN of either end -> `Handshake` -> the answer -> the opener's acknowledgement -> `Connection::begin`.
//! Invariants: 1. what is odd is forgotten, and an end of it that nobody knows is held as before: a SYN with data (TFO), an
//!    option that is not known here (TFO, MD5, AO, MPTCP, AccECN), a SYN of AccECN, a TTL of 255 of the VM's.
//! 2. a handshake in progress travels with a checkpoint: its SYN-ACK may have left, and what ends it comes to the new primary.
//!    A prototype forgot that, and one download of thirty hung after a take-over.
//! Source: RFC 9293, 7323, 2018, 7413 (TFO), 5082 (TTL). Not here: how many there may be (`mod.rs`).

use super::carriage::Carriage;
use super::types::Link;
use super::write;
use crate::agreed::Frame;
use crate::output::packet::Segment;

/// TCP's smallest default (RFC 9293, 3.7.1).
const DEFAULT_MSS: u16 = 536;

/// What one end's SYN says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Offer {
    pub(super) isn: u32,
    /// Not scaled, in a SYN.
    pub(super) window: u16,
    pub(super) mss: u16,
    pub(super) scale: Option<u8>,
    pub(super) sack: bool,
    pub(super) stamp: Option<u32>,
}

/// A connection that is being opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Handshake {
    pub(super) nic: u8,
    pub(super) vlan: u32,
    pub(super) link: Link,
    /// The VM opens it.
    pub(super) by_vm: bool,
    pub(super) opener: Offer,
    pub(super) answer: Option<Offer>,
    /// When the VM's part of it left, for the first round-trip time. Does not travel.
    pub(super) left_us: Option<u64>,
    /// The round-trip time, where the VM opens. Does not travel.
    pub(super) rtt_us: Option<u64>,
    /// The order in which they came; the oldest are forgotten first. Does not travel.
    pub(super) stamp: u64,
    /// The backup knows it.
    pub(super) exported: bool,
}

impl Handshake {
    /// The VM's and the peer's offer, once both are there.
    pub(super) fn offers(&self) -> Option<(Offer, Offer)> {
        let answer = self.answer?;
        Some(match self.by_vm {
            true => (self.opener, answer),
            false => (answer, self.opener),
        })
    }
}

/// What the SYN in `frame` offers; none if it is odd.
pub(super) fn offer(frame: &Frame, segment: &Segment, from_vm: bool) -> Option<Offer> {
    let bytes = &frame.bytes[..];
    // AccECN asks with a flag beside the data offset.
    if !segment.payload.is_empty() || segment.fin() || bytes[segment.tcp + 12] & 1 != 0 {
        return None;
    }
    if !is_plain(bytes, from_vm) {
        return None;
    }
    let mut offer = Offer {
        isn: segment.seq,
        window: segment.window,
        mss: DEFAULT_MSS,
        scale: None,
        sack: false,
        stamp: segment.timestamps.map(|stamps| stamps.value),
    };
    let mut rest = &bytes[segment.options.clone()];
    while let [kind, tail @ ..] = rest {
        match kind {
            0 => break,
            1 => {
                rest = tail;
                continue;
            }
            _ => {}
        }
        let length = usize::from(*tail.first()?);
        let option = rest.get(..length).filter(|_| length >= 2)?;
        match option {
            [2, 4, high, low] => offer.mss = u16::from_be_bytes([*high, *low]).max(64),
            [3, 3, scale] => offer.scale = Some((*scale).min(14)),
            [4, 2] => offer.sack = true,
            [8, 10, ..] => {}
            _ => return None,
        }
        rest = &rest[length..];
    }
    Some(offer)
}

/// Whether a shadow socket can say it after a take-over, too, when it knows nothing of the VM's packets for a moment: a VM that sends with the
/// largest TTL may take nothing with a smaller one, and so may its client (RFC 5082; both ends do). A client alone says nothing by that TTL: it
/// is the usual one of some load balancers and routers.
fn is_plain(bytes: &[u8], from_vm: bool) -> bool {
    !from_vm || !Carriage::of(&bytes[write::ip_at(bytes)..]).is_for_neighbours()
}

/// The Ethernet header of `frame`, with its tags.
pub(super) fn link_header(frame: &Frame) -> &[u8] {
    &frame.bytes[..write::ip_at(&frame.bytes)]
}
