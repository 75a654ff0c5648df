//! A segment of the client: its acknowledgement is for the shadow socket, its data for the VM.
//!
//! Invariants: 1. the VM hears of its own stream only what this room has decided: `ack_for_vm`, `window_for_vm`, no SACK, no ECE.
//! 2. the shadow socket never hears of bytes that it has not sent. 3. what lies outside the VM's window teaches nothing.
//! 4. what acknowledges bytes that were never sent, or that are long past, goes nowhere: for the VM the number is made anew, so that it
//!    cannot look at it itself. What else is out of place, a reset and a SYN too, is the VM's to challenge.
//! Source: VEE'12, 3.2; RFC 5961 for resets and for acknowledgements, 3168 for ECN: CWR answers the VM's own ECE and passes, ECE is of
//! a stream that the shadow socket sends without ECT. Not here: checksums (looked at before).

use super::Action;
use super::connection::{Connection, Dummy, Phase, Reset, later};
use super::types::Context;
use super::write::{Bare, ECE};
use crate::agreed::Frame;
use crate::output::packet::{ACK, Segment, before};
use crate::output::rewriter::rewrite::Rewriter;

impl Connection {
    pub(super) fn client_sent(
        &mut self,
        cx: &mut Context<'_>,
        frame: &Frame,
        segment: &Segment,
        begins: bool,
    ) {
        self.spoke_us = cx.now_us;
        match self.phase {
            // A late acknowledgement would find no socket of the VM, which would reset what is over.
            // Where the backup's VM runs, the translation makes an acknowledgement of that reset.
            Phase::Held { ended: true }
                if segment.is_pure_ack() && segment.seq == self.client_nxt && !cx.holds_all =>
            {
                return;
            }
            Phase::Held { .. } => return self.pass_held(cx, frame, segment),
            Phase::ResetByPeer => return cx.out.push(Action::ToVm(frame.clone())),
            Phase::Probing { .. } | Phase::Speculative | Phase::Gone => {}
        }
        let inside = self.is_inside(segment);
        if segment.rst() {
            return self.client_reset(cx, frame, segment);
        }
        if inside {
            if !segment.ack_flag() || !self.is_acceptable(segment.ack) {
                return;
            }
            self.acknowledged(cx, frame, segment);
        }
        if matches!(self.phase, Phase::Held { .. } | Phase::Gone) {
            return self.pass_held(cx, frame, segment);
        }
        // The VM may have bytes that its client sent while the connection was held: what lies before them is a question, which it answers.
        let unexpected = segment.seq != self.client_place();
        if inside {
            // Of one that comes before what was sent before it nothing is taken: the VM would throw that away as older.
            if let Some(stamps) = segment.timestamps.filter(|_| self.stamps)
                && !before(self.client_nxt, segment.seq)
            {
                self.client_stamp = later(self.client_stamp, stamps.value);
            }
            let end = segment.seq_end();
            if before(self.client_nxt, end) {
                self.client_nxt = end;
                self.dirty = true;
            }
            if segment.fin() {
                self.client_fin = Some(end.wrapping_sub(1));
                self.dirty = true;
            }
        }
        if begins || unexpected || !segment.payload.is_empty() || segment.fin() {
            let frame = self.rewritten(cx, frame, segment);
            cx.out.push(Action::ToVm(frame));
        } else if self.asked {
            // The client is there, and has this connection: that is all the VM wanted to know.
            self.asked = false;
            self.due = true;
        }
    }

    /// Whether it lies where the VM would look at it.
    fn is_inside(&self, segment: &Segment) -> bool {
        let window = u32::from(self.said.window.max(1)) << self.scale.map_or(0, |(vm, _)| vm);
        let right = later(self.said.ack.wrapping_add(window), self.client_nxt);
        // One before what was acknowledged is a client's keep-alive.
        !before(segment.seq_end(), self.told.ack.wrapping_sub(1)) && !before(right, segment.seq)
    }

    /// Whether a client can say this of the VM's stream: no more than was sent, and no less than the widest window that it can have
    /// opened before (RFC 5961, 5.2). Whoever only guesses numbers has to guess this one, too.
    pub(super) fn is_acceptable(&self, ack: u32) -> bool {
        let most = later(self.shadow_nxt, self.sent_before);
        let least = self.una.wrapping_sub(self.widest(u32::MAX));
        !before(most, ack) && !before(ack, least)
    }

    fn client_reset(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) {
        // A client that knows no connection takes its number from what it was told; one that ends it, from its own stream.
        let exact = [self.told.ack, self.said.ack, self.client_nxt];
        if exact.contains(&segment.seq) {
            self.reset_vm(cx, self.said.ack);
            self.close_socket(cx);
            self.lapse(cx, Phase::ResetByPeer);
        } else {
            let frame = self.rewritten(cx, frame, segment);
            cx.out.push(Action::ToVm(frame));
        }
    }

    /// The client's word about the VM's stream, which is acceptable.
    fn acknowledged(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) {
        let ack = segment.ack;
        let believed = !before(ack, self.una);
        if believed && self.una != ack && !self.fin_acked {
            // Its end counts as one after the last byte.
            let fin = self.fin && ack == self.nxt.wrapping_add(1);
            self.fin_acked |= fin;
            self.due |= fin;
            self.una = if fin { self.nxt } else { ack };
            self.sent_before = later(self.sent_before, self.una);
            if self
                .socket_start
                .is_some_and(|start| self.una.wrapping_sub(start) > 1 << 20)
            {
                self.socket_start = None;
            }
            self.dirty = true;
            self.drop_acknowledged();
            let edge = self.una.wrapping_add(cx.limit);
            let (open, widest) = (self.said_edge.wrapping_sub(self.nxt), self.widest(cx.limit));
            let nearly_closed = !before(self.nxt, self.said_edge) || open < widest / 2;
            let could_be = self.nxt.wrapping_add(widest);
            let could_be = if before(edge, could_be) { edge } else { could_be };
            // After its end the VM says no more, and perhaps has given it up and knows the connection no more.
            if nearly_closed && !self.fin && before(self.said_edge.wrapping_add(widest / 8), could_be) {
                self.due = true;
            }
        }
        match self.phase {
            Phase::Probing { asked_us, .. } if believed => {
                self.client_window = segment.window;
                self.rtt_us = cx.now_us.saturating_sub(asked_us).max(1);
                self.learned(cx);
            }
            Phase::Speculative if self.has_socket() => self.tell_shadow(cx, frame, segment),
            _ => {}
        }
    }

    /// The shadow socket gets the acknowledgement, without the data beside it.
    fn tell_shadow(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) {
        // One that was built before it was known how far the client is has not sent yet what that has.
        let ack = match before(self.shadow_nxt, segment.ack) {
            true => self.shadow_nxt,
            false => segment.ack,
        };
        let advances = before(self.shadow_acked, ack);
        if self.dummy != Dummy::Over && !advances {
            // It would acknowledge the dummy, and give a round-trip time that is too short.
            self.client_window = segment.window;
            return;
        }
        let mut sack = Vec::new();
        for (n, block) in frame.bytes[segment.sack.clone()].chunks_exact(8).enumerate() {
            let edge =
                |at: usize| u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
            let (from, to) = (edge(0), edge(4));
            let is_ahead = !before(self.shadow_nxt, to) && !before(from, self.base);
            // What came twice (RFC 2883). A socket that is not told takes a probe that was not needed for one that mended a loss, and halves its rate.
            let oldest = self.una.wrapping_sub(self.widest(u32::MAX));
            let oldest = self.socket_start.map_or(oldest, |start| later(oldest, start));
            let is_twice = n == 0 && !before(ack, to) && !before(from, oldest);
            if before(from, to) && (is_ahead || is_twice) {
                sack.extend(block);
            }
        }
        // Without its payload it would count as a repeated acknowledgement.
        let carried = !segment.payload.is_empty() || segment.fin();
        if carried && !advances && sack.is_empty() && segment.window == self.client_window {
            return;
        }
        self.client_window = segment.window;
        self.shadow_acked = later(self.shadow_acked, ack);
        if advances {
            self.dummy = Dummy::Over;
        }
        let stamps = segment.timestamps.filter(|_| self.stamps);
        // An echo of what the VM itself said before the socket was there would be a round trip of days.
        let stamps = stamps.map(|stamps| (stamps.value, later(self.first_stamp, stamps.echo)));
        let bare = Bare {
            stamps,
            sack,
            ..Bare::acknowledgement(self.peer_start, ack, segment.window)
        };
        cx.out
            .push(Action::ToShadow(bare.packet(self.flow.peer, self.flow.vm).into()));
    }

    /// What the shadow socket is told of its dummy byte.
    pub(super) fn acknowledge_dummy(&mut self, cx: &mut Context<'_>, stamp: Option<u32>) {
        self.dummy = Dummy::Over;
        if self.has_socket() {
            let bare = Bare {
                stamps: stamp.map(|stamp| (self.client_stamp, stamp)),
                ..Bare::acknowledgement(self.peer_start, self.shadow_acked, self.client_window)
            };
            cx.out
                .push(Action::ToShadow(bare.packet(self.flow.peer, self.flow.vm).into()));
        }
    }

    /// The client's segment in the VM's words.
    fn rewritten(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) -> Frame {
        let window = self.window_for_vm(cx.limit);
        let mut rewriter = Rewriter::of(frame, segment);
        if segment.flags & ACK != 0 {
            rewriter.set(segment.tcp + 8, self.ack_for_vm());
        }
        let offset = u32::from(frame.bytes[segment.tcp + 12]) << 24;
        let flags = u32::from(segment.flags & !ECE) << 16;
        rewriter.set(segment.tcp + 12, offset | flags | u32::from(window));
        if let Some(stamps) = segment.timestamps.filter(|_| self.stamps) {
            // The client's bytes answer what it was told, an epoch ago: the VM sizes its window by what comes in that time. All of a flight has one echo.
            // One that acknowledges something new echoes the newest: an older echo would tell a VM that has repeated itself that it need not have.
            let echo = match segment.payload.is_empty() || self.due {
                true => self.vm_stamp,
                false => self.told_stamp,
            };
            rewriter.set(stamps.at + 4, echo);
        }
        if !segment.sack.is_empty() {
            // The option's head of two bytes, too; words may overlap.
            let (start, end) = (segment.sack.start - 2, segment.sack.end);
            (start..end - 4)
                .step_by(4)
                .chain([end - 4])
                .for_each(|at| rewriter.set(at, 0x0101_0101));
        }
        rewriter.finish()
    }

    /// Held as before: only an echo of what the VM never said is kept from it.
    fn pass_held(&mut self, cx: &mut Context<'_>, frame: &Frame, segment: &Segment) {
        let mut frame = frame.clone();
        if let Some(stamps) = segment.timestamps.filter(|_| self.stamps)
            && before(self.vm_stamp, stamps.echo)
            && (!self.is_lifted(cx) || self.is_ahead())
        {
            let mut rewriter = Rewriter::of(&frame, segment);
            rewriter.set(stamps.at + 4, self.vm_stamp);
            frame = rewriter.finish();
        }
        cx.out.push(Action::ToVm(frame));
        self.track_client(cx, segment);
    }

    /// How far the client is was learnt, or will not be.
    pub(super) fn learned(&mut self, cx: &mut Context<'_>) {
        self.build(cx);
        if self.reset == Reset::No {
            self.tell(cx);
        }
    }
}
