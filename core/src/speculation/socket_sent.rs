//! A packet of a shadow socket: the client gets it with what the VM was last safe in saying.
//!
//! Invariants: 1. nothing beyond `released` leaves. 2. no reset and no bare acknowledgement of the socket's own leaves: it knows nothing
//!    of the client's stream. Its probes do. 3. the dummy byte never leaves.
//! Source: VEE'12, 3.2. Not here: the socket.

use super::Action;
use super::connection::{Connection, Dummy, later};
use super::types::Context;
use super::write::{ECE, ip_at};
use crate::agreed::Frame;
use crate::offload::Offload;
use crate::output::packet::{Segment, before};
use crate::output::rewriter::rewrite::Rewriter;
use bytes::{Bytes, BytesMut};

/// A round trip longer than this is not waited for: the socket would send the dummy again.
const LONGEST_US: u64 = 1_000_000;

/// No echo is older than that, in ticks.
const STAMPS_BACK: u32 = 1 << 28;

impl Connection {
    pub(super) fn socket_sent(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        segment: &Segment,
        offload: Offload,
    ) {
        if !self.has_socket() || segment.rst() || segment.syn() {
            return;
        }
        if self.is_dummy(segment) {
            let stamp = segment.timestamps.map(|stamps| stamps.value);
            match self.dummy {
                Dummy::Unsent => {
                    let at_us = cx.now_us + self.rtt_us.min(LONGEST_US);
                    self.dummy = Dummy::Sent { at_us, stamp };
                }
                // Again, perhaps with more behind it: it is acknowledged, and what is behind it comes by itself.
                Dummy::Sent { .. } => self.acknowledge_dummy(cx, stamp),
                Dummy::Over => {}
            }
            return;
        }
        let empty = segment.payload.is_empty() && !segment.fin();
        if empty && !before(segment.seq, self.shadow_nxt) {
            return;
        }
        let end = segment.seq_end();
        let safe = self.released.wrapping_add(u32::from(self.fin_released));
        if before(safe, end) {
            return;
        }
        self.shadow_nxt = later(self.shadow_nxt, end);
        self.heard = (self.told.ack, self.told.window);
        let bytes = self.told_in(cx.now_us, frame, segment, offload);
        cx.out.push(Action::ToClient(bytes, self.shifted(offload)));
    }

    /// Begins with the byte before the first.
    fn is_dummy(&self, segment: &Segment) -> bool {
        let asks = segment.payload.is_empty() && self.dummy == Dummy::Over;
        let begins = |start: u32| segment.seq == start.wrapping_sub(1);
        !asks && self.socket_start.is_some_and(begins)
    }

    fn told_in(&mut self, now_us: u64, frame: &Frame, segment: &Segment, offload: Offload) -> Frame {
        let ece = if self.told.ece { ECE } else { 0 };
        let offset = u32::from(frame.bytes[segment.tcp + 12]) << 24;
        let flags = u32::from(segment.flags | ece) << 16;
        let mut changes = vec![
            (segment.tcp + 8, self.told.ack),
            (segment.tcp + 12, offset | flags | u32::from(self.told.window)),
        ];
        if let Some(stamps) = segment.timestamps {
            if !before(stamps.value, self.last_stamp) {
                (self.last_stamp, self.clock_us) = (stamps.value, now_us);
            }
            // A new primary's clock has to be ahead of it.
            self.dirty = true;
            // Clocks come round, too.
            if stamps.value.wrapping_sub(self.first_stamp) > STAMPS_BACK {
                self.first_stamp = stamps.value.wrapping_sub(STAMPS_BACK);
            }
            // The client measures with it how long its own bytes took, which wait for an epoch.
            if self.client_nxt != self.told.ack {
                changes.push((stamps.at + 4, self.told.echo));
            }
        }
        let header = self.link.to_peer.clone();
        if offload.needs_csum {
            let mut bytes = BytesMut::from(&frame.bytes[..]);
            for (at, number) in changes {
                bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
            }
            return self.on_link(&header, bytes.freeze());
        }
        let mut rewriter = Rewriter::of(frame, segment);
        changes
            .into_iter()
            .for_each(|(at, number)| rewriter.set(at, number));
        self.on_link(&header, rewriter.finish().bytes)
    }

    fn on_link(&self, header: &Bytes, frame: Bytes) -> Frame {
        let ip = &frame[ip_at(&frame)..];
        let mut bytes = BytesMut::with_capacity(header.len() + ip.len());
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(ip);
        self.carriage.put(&mut bytes[header.len()..]);
        Frame {
            nic: self.nic,
            bytes: bytes.freeze(),
        }
    }

    /// The offsets count from the frame's begin: VLAN tags move them.
    fn shifted(&self, offload: Offload) -> Offload {
        let more = (self.link.to_peer.len() as u16).saturating_sub(14);
        let moved = |at: u16| if at == 0 { 0 } else { at.saturating_add(more) };
        Offload {
            hdr_len: moved(offload.hdr_len),
            csum_start: moved(offload.csum_start),
            ..offload
        }
    }
}
