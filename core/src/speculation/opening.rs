//! The handshakes of all connections: who opens what, and when speculation begins.
//!
//! Invariants: 1. a flood of SYNs takes `Limits::handshakes` places and no more, and pushes out the oldest. 2. a connection between the same ends as
//!    an older one takes its place when its own handshake has ended, and not before: anybody can send a SYN. One that is over goes when
//!    the VM itself begins with another number.
//! 3. the shadow socket's clock begins behind everything that the VM has said before (`ticks`).
//! Not here: what one SYN says (`handshake.rs`).

use super::connection::{self, Connection};
use super::handshake::{Handshake, link_header, offer};
use super::types::Link;
use super::{Action, Flow, Speculation};
use crate::agreed::Frame;
use crate::output::packet::Segment;
use bytes::Bytes;

impl Speculation {
    /// A VM that begins with another number has forgotten what was between the same ends. What was over goes: whatever comes of the new
    /// connection, its words are none of the old one's. Of one that lives the client is the judge: one that has it answers the VM's SYN with an
    /// acknowledgement of it (RFC 5961), by which the VM knows that it has to reset that first.
    pub(super) fn opens_anew(&mut self, now_us: u64, flow: Flow, segment: &Segment, out: &mut Vec<Action>) {
        if !self.is_known(&flow, &segment.key) {
            return;
        }
        let start = segment.seq.wrapping_add(1);
        let old = self.connections.get_mut(&flow);
        let Some(old) = old.filter(|known| known.vm_start != start) else {
            return;
        };
        if old.is_over() {
            self.end(now_us, flow, out);
        } else if !segment.ack_flag() {
            // Not where it answers a SYN: a stranger may have sent that.
            old.asked = true;
        }
    }

    /// A SYN, or the answer to one.
    pub(super) fn heard_syn(&mut self, flow: Flow, frame: &Frame, segment: &Segment, from_vm: bool) {
        let Some(offer) = offer(frame, segment, from_vm).filter(|_| !flow.is_link_local()) else {
            self.forget_handshake(&flow);
            self.counts.held += 1;
            return;
        };
        // A late copy of what has opened the connection that there is.
        let start = offer.isn.wrapping_add(1);
        if let Some(known) = self.connections.get_mut(&flow)
            && start
                == match from_vm {
                    true => known.vm_start,
                    false => known.peer_start,
                }
        {
            // A VM that repeats its answer has lost the acknowledgement that ended the handshake: the client's next one would stay here.
            if from_vm && segment.ack_flag() && known.speaks() {
                known.due = true;
                self.due.insert(flow);
            }
            return;
        }
        let header = Bytes::copy_from_slice(link_header(frame));
        let fits = |known: &&mut Handshake| {
            known.by_vm != from_vm
                && segment.ack_flag()
                && segment.ack == known.opener.isn.wrapping_add(1)
                && (known.nic, known.vlan) == (segment.key.nic, segment.key.vlan)
        };
        if let Some(known) = self.handshakes.get_mut(&flow).filter(fits) {
            // Repeated with other numbers: it has begun anew.
            if known.answer.is_none_or(|answer| answer.isn != offer.isn) {
                known.answer = Some(offer);
                match from_vm {
                    true => known.link.to_peer = header,
                    false => known.link.to_vm = header,
                }
                self.dirty.insert(flow);
            } else if from_vm {
                self.ticks(&flow, segment);
            }
            return;
        }
        if segment.ack_flag() {
            return;
        }
        let known = self.handshakes.get(&flow);
        if known.is_some_and(|known| known.by_vm == from_vm && known.opener.isn == offer.isn) {
            if from_vm {
                // Its peer may have got this one alone: what comes with an older clock it throws away.
                self.ticks(&flow, segment);
            }
            return;
        }
        self.forget_handshake(&flow);
        let mut link = Link::default();
        match from_vm {
            true => link.to_peer = header,
            false => link.to_vm = header,
        }
        self.remember(
            flow,
            Handshake {
                nic: segment.key.nic,
                vlan: segment.key.vlan,
                link,
                by_vm: from_vm,
                opener: offer,
                answer: None,
                left_us: None,
                rtt_us: None,
                stamp: 0,
                exported: false,
            },
        );
    }

    /// What the VM says before speculation begins: the shadow socket's clock must not be behind it.
    pub(super) fn ticks(&mut self, flow: &Flow, segment: &Segment) {
        if let Some(known) = self.handshakes.get_mut(flow)
            && let Some(stamps) = segment.timestamps
        {
            let vm = if known.by_vm {
                Some(&mut known.opener)
            } else {
                known.answer.as_mut()
            };
            if let Some(stamp) = vm.and_then(|offer| offer.stamp.as_mut()) {
                *stamp = connection::later(*stamp, stamps.value);
                self.dirty.insert(*flow);
            }
        }
    }

    pub(super) fn remember(&mut self, flow: Flow, mut handshake: Handshake) {
        self.next_stamp += 1;
        handshake.stamp = self.next_stamp;
        self.ages.push_back((self.next_stamp, flow));
        // The backup may have to hear that what was there before is gone.
        handshake.exported = !self.dirty.insert(flow);
        self.handshakes.insert(flow, handshake);
        while self.handshakes.len() > self.limits.handshakes || self.ages.len() > 2 * self.limits.handshakes {
            let Some((stamp, oldest)) = self.ages.pop_front() else {
                break;
            };
            if self
                .handshakes
                .get(&oldest)
                .is_some_and(|known| known.stamp == stamp)
            {
                self.forget_handshake(&oldest);
            }
        }
    }

    pub(super) fn forget_handshake(&mut self, flow: &Flow) {
        if let Some(known) = self.handshakes.remove(flow) {
            // A flood that no checkpoint has seen leaves nothing to say.
            if known.exported || self.connections.contains_key(flow) {
                self.dirty.insert(*flow);
            } else {
                self.dirty.remove(flow);
            }
        }
    }

    /// The peer's answer to a SYN of the VM: the round trip is known.
    pub(super) fn round_trip(&mut self, now_us: u64, flow: &Flow) {
        if let Some(known) = self.handshakes.get_mut(flow).filter(|known| known.by_vm) {
            // An answer that is repeated would make it look long.
            if known.rtt_us.is_none() {
                known.rtt_us = known.left_us.map(|left| now_us.saturating_sub(left));
            }
        }
    }

    /// Whether `segment` ends a handshake: the opener's acknowledgement, or what comes after one that was lost.
    pub(super) fn begins(&self, flow: Flow, segment: &Segment, from_vm: bool) -> bool {
        let Some(known) = self.handshakes.get(&flow) else {
            return false;
        };
        let Some((vm, peer)) = known.offers() else {
            return false;
        };
        let (said, heard) = if from_vm { (vm, peer) } else { (peer, vm) };
        known.by_vm == from_vm
            && segment.ack_flag()
            && !segment.rst()
            && segment.seq.wrapping_sub(said.isn.wrapping_add(1)) <= u32::from(heard.window)
            && segment.ack == heard.isn.wrapping_add(1)
            && (known.nic, known.vlan) == (segment.key.nic, segment.key.vlan)
    }

    /// The handshake of `flow` is over.
    pub(super) fn begin(
        &mut self,
        now_us: u64,
        flow: Flow,
        client: Option<(&Frame, &Segment)>,
        out: &mut Vec<Action>,
    ) {
        let Some(handshake) = self.handshakes.remove(&flow) else {
            return;
        };
        if self.lives_elsewhere(&flow, &handshake) {
            // Another network's, with the same addresses. There is one socket between two ends.
            self.counts.held += 1;
            self.dirty.insert(flow);
            return;
        }
        // What was there before is over for the VM, which has opened a new one between the same ends.
        self.end(now_us, flow, out);
        let is_full = self.connections.len() >= self.limits.connections;
        if self.is_scarce() || (is_full && !self.forget_an_ended_one(now_us, out)) {
            self.counts.held += 1;
            self.dirty.insert(flow);
            return;
        }
        let rtt_us = match handshake.by_vm {
            true => handshake.rtt_us,
            false => handshake.left_us.map(|left| now_us.saturating_sub(left)),
        };
        let header = client.map(|(frame, _)| Bytes::copy_from_slice(link_header(frame)));
        let window = client.map(|(_, segment)| segment.window);
        if let Some(connection) = Connection::begin(flow, &handshake, header, window, rtt_us.unwrap_or(1000))
        {
            self.connections.insert(flow, connection);
            self.open += 1;
            self.dirty.insert(flow);
            if self.holds_all {
                self.counts.held += 1;
                return self.with(now_us, flow, out, Connection::begin_held);
            }
            self.counts.begun += 1;
            self.with(now_us, flow, out, Connection::build);
        }
    }
}
