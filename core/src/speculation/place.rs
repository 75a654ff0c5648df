//! Where both ends of a connection are: the VM's card, and the addresses on the link. Neither is for ever.
//!
//! Flow: a segment of either end -> the place that is known, another one of the same connection, or another connection.
//! Invariants: 1. what the VM itself sends is believed. 2. a client's word moves a connection to another card only where it says exactly
//!    what is expected of it: whoever could guess that would get what is kept for the client.
//! 3. a VLAN is another network: nothing moves from one to another.
//! Source: Linux's bonding, RFC 826. Not here: what the segment says (`*_sent.rs`).

use super::carriage::Carriage;
use super::connection::{Connection, Phase, later};
use super::handshake::{Handshake, link_header};
use super::{Flow, Speculation};
use crate::agreed::Frame;
use crate::output::packet::{Segment, before};
use bytes::Bytes;

impl Speculation {
    /// Whether the connection is known where `segment` comes by, or goes on there: a bond has several cards.
    pub(super) fn is_here(&mut self, flow: &Flow, frame: &Frame, segment: &Segment, from_vm: bool) -> bool {
        let Some(known) = self.connections.get_mut(flow) else {
            return false;
        };
        if known.vlan != segment.key.vlan {
            return false;
        }
        if known.nic == segment.key.nic {
            return true;
        }
        let goes_on = match from_vm {
            true => known.is_of_vm(segment),
            false => known.is_of_client(segment),
        };
        if goes_on {
            known.nic = segment.key.nic;
            known.dirty = true;
            if !from_vm {
                known.face(frame);
            }
        }
        goes_on
    }

    /// Whether another connection between the same two ends lives elsewhere, and may not be ended by a new one here.
    pub(super) fn lives_elsewhere(&self, flow: &Flow, new: &Handshake) -> bool {
        self.connections
            .get(flow)
            .is_some_and(|known| (known.nic, known.vlan) != (new.nic, new.vlan) && !known.is_over())
    }
}

impl Connection {
    /// The VM knows where both ends are on the link now: its next hop may have moved to another address, and so may its own card.
    pub(super) fn follow(&mut self, frame: &Frame) {
        let header = link_header(frame);
        if header == &self.link.to_peer[..] {
            return;
        }
        // Behind the VM's own address, which is the second one here.
        if let (Some(own), Some(rest)) = (header.get(6..12), self.link.to_vm.get(6..)) {
            self.link.to_vm = [own, rest].concat().into();
        }
        self.link.to_peer = Bytes::copy_from_slice(header);
    }

    /// What the VM's segments ask of the network now.
    pub(super) fn carries(&mut self, frame: &Frame) {
        self.carriage = Carriage::of(&frame.bytes[link_header(frame).len()..]);
    }

    /// The way back is the one that `frame` of the client came, until the VM says another.
    fn face(&mut self, frame: &Frame) {
        let header = link_header(frame);
        if let (Some(to), Some(from), Some(rest)) = (header.get(..6), header.get(6..12), header.get(12..)) {
            self.link.to_peer = [from, to, rest].concat().into();
            self.link.to_vm = Bytes::copy_from_slice(header);
        }
    }

    /// Whether the VM is told of its client by this room.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Probing { .. } | Phase::Speculative)
    }

    /// Whether the VM can say it of these two streams.
    fn is_of_vm(&self, segment: &Segment) -> bool {
        let end = self.nxt.wrapping_add(u32::from(self.fin));
        let window = u32::from(self.said.window) << self.scale.map_or(0, |(vm, _)| vm);
        let most = later(self.said.ack.wrapping_add(window), self.client_nxt);
        self.is_open()
            && segment.ack_flag()
            && !before(segment.seq, self.una.wrapping_sub(1))
            && !before(end, segment.seq)
            && !before(segment.ack, self.told.ack)
            && !before(most, segment.ack)
    }

    /// Whether it is the client's next word.
    fn is_of_client(&self, segment: &Segment) -> bool {
        self.is_open()
            && segment.ack_flag()
            && segment.seq == self.client_nxt
            // Not one that came by another card already: a bridge may flood it to both.
            && (before(self.una, segment.ack) || (segment.ack == self.una && segment.seq_len() > 0))
            && self.is_acceptable(segment.ack)
    }
}
