//! A segment of the VM: its data is kept and acknowledged, its words about the client's data wait for their epoch.
//!
//! Invariants: 1. bytes are taken in order only. After a gap nothing new is acknowledged, so that the VM says them again; what came
//!    after the gap is not kept. 2. a keep-alive is never answered here: it asks for the client.
//! Source: VEE'12, 3.2; RFC 9293, 3.8.4 and 3.8.6. Not here: when the words leave (`epochs.rs`).

use super::Action;
use super::connection::{Connection, Pair, Phase, Reset, Word, later};
use super::types::Context;
use super::write::ECE;
use crate::agreed::Frame;
use crate::output::packet::{ACK, Segment, before};
use crate::output::rewriter::rewrite::Rewriter;
use bytes::Bytes;

/// Words without data that one connection may have waiting in one epoch. More are repeated acknowledgements; 3 do.
const MOST_WORDS: usize = 64;
/// TCP's flag "urgent".
const URG: u8 = 0x20;

impl Pair {
    /// What `segment` says; `echo` where it says none.
    pub(super) fn of(segment: &Segment, echo: u32) -> Self {
        Self {
            ack: segment.ack,
            window: segment.window,
            echo: segment.timestamps.map_or(echo, |stamps| stamps.echo),
            ece: segment.flags & ECE != 0,
        }
    }
}

impl Connection {
    pub(super) fn vm_sent(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) {
        self.spoke_us = cx.now_us;
        match self.phase {
            // Where the backup's VM runs its client's word comes to both copies, or to none.
            Phase::Held { ended: true } if segment.fin() && !cx.holds_all => {
                // It has not heard that its end arrived, and the client may be gone for good.
                let ack = self.for_vm(self.client_place(), self.ack_for_vm(), ACK, self.client_window);
                cx.out.push(Action::ToVm(ack));
                return;
            }
            Phase::Held { .. } => return self.hold(cx, frame, segment),
            Phase::ResetByPeer if cx.holds_all => return self.hold(cx, frame, segment),
            Phase::ResetByPeer => {
                if segment.rst() {
                    // It answers a client that goes on speaking: the socket was given up, and the client knows nothing of that.
                    self.hold(cx, frame, segment);
                } else if segment.ack_flag() {
                    self.reset_vm(cx, segment.ack);
                }
                return;
            }
            Phase::Probing { .. } | Phase::Speculative | Phase::Gone => {}
        }
        self.dirty = true;
        self.unmarked = true;
        self.follow(frame);
        if segment.rst() {
            if self.reset == Reset::No {
                self.reset = Reset::Said;
            }
            return;
        }
        if !segment.ack_flag() {
            return;
        }
        self.carries(frame);
        if let Some(stamps) = segment.timestamps.filter(|_| self.stamps) {
            self.vm_stamp = later(self.vm_stamp, stamps.value);
        }
        if !before(segment.ack, self.said.ack) {
            self.said = Pair::of(segment, self.said.echo);
        }
        let old_byte = segment.payload.len() == 1 && segment.seq == self.nxt.wrapping_sub(1);
        if segment.payload.is_empty() && !segment.fin() || old_byte {
            return self.word(frame, segment, cx.limit);
        }
        self.data(cx, frame, segment);
    }

    /// A segment that tells nothing new of the VM's own stream.
    fn word(&mut self, frame: &Frame, segment: &Segment, limit: u32) {
        if before(segment.seq, self.ack_for_vm()) {
            // Linux asks in the same way whether a closed window is open, and whether a client that is silent is there; behind its end with the end's own number.
            let open = self.said_edge.wrapping_sub(self.nxt);
            if before(self.nxt, self.said_edge) && open >= self.widest(limit) / 8 {
                if !self.words.contains(&Word::KeepAlive) {
                    self.words.push(Word::KeepAlive);
                }
            } else {
                self.due = true;
            }
            return;
        }
        let pair = Pair::of(segment, 0);
        // Its own bytes: a frame may be padded to any size.
        let sack = Bytes::copy_from_slice(&frame.bytes[segment.sack.clone()]);
        // One that acknowledges more makes the one before it needless; repeated ones are counted by the client.
        if let Some(Word::Acknowledgement {
            pair: last,
            sack: old,
        }) = self.words.last_mut()
            && before(last.ack, pair.ack)
            && old.is_empty()
        {
            (*last, *old) = (pair, sack);
        } else if self.words.len() < MOST_WORDS {
            self.words.push(Word::Acknowledgement { pair, sack });
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) {
        if before(self.nxt, segment.seq) {
            // One for each: three of them make the VM repeat at once what was lost.
            return self.acknowledge(cx);
        }
        let urgent = segment.flags & URG != 0;
        self.draining |= urgent;
        let payload = &frame.bytes[segment.payload.clone()];
        let known = self.nxt.wrapping_sub(segment.seq) as usize;
        let new = payload.get(known..).unwrap_or(&[]);
        let after = segment.seq.wrapping_add(payload.len() as u32);
        if !new.is_empty() && !self.fin && self.reset == Reset::No {
            if self.draining || cx.holds_all {
                // What is not acknowledged the VM says again, when it is held as before.
                return;
            }
            if cx.scarce && self.speaks() && self.is_idle() {
                self.go_on_held(cx);
                return self.hold(cx, frame, segment);
            }
            let open = match before(self.nxt, self.edge) {
                true => self.edge.wrapping_sub(self.nxt) as usize,
                false => 0,
            };
            let new = &new[..new.len().min(open)];
            let room = match self.kept() + new.len() <= cx.few {
                true => cx.room,
                false => cx.room.saturating_sub(cx.reserve),
            };
            if new.len() > room {
                cx.dropped += 1;
                self.draining |= cx.scarce;
                return;
            }
            self.bytes.extend(new);
            self.nxt = self.nxt.wrapping_add(new.len() as u32);
        }
        if segment.fin() && self.nxt == after && !self.draining && !cx.holds_all {
            self.fin = true;
        }
        self.due = true;
    }

    /// Held as before, with a timestamp that does not go back.
    fn hold(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) {
        let mut frame = frame.clone();
        if self.has_ended() && self.is_ahead() {
            // What waits here is translated when it leaves, whatever is lifted until then.
            self.lift(cx);
        }
        if let Some(stamps) = segment.timestamps.filter(|_| self.stamps) {
            self.vm_stamp = later(self.vm_stamp, stamps.value);
            self.last_stamp = later(self.last_stamp, stamps.value);
            if !self.is_lifted(cx) {
                let mut rewriter = Rewriter::of(&frame, segment);
                rewriter.set(stamps.at, self.last_stamp);
                frame = rewriter.finish();
            }
        }
        if segment.ack_flag() && !before(segment.ack, self.said.ack) {
            self.said = Pair::of(segment, self.said.echo);
        }
        self.track_vm(cx, segment);
        cx.out.push(Action::Hold(frame));
    }
}
