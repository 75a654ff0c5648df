//! Connections that were given back (held as before), and how they come back.
//!
//! Flow: urgent data, scarce memory, a socket that could not be built, a long silence, or that all are held (`hold.rs`) -> `go_on_held` -> the VM and its client speak with each other, and
//! where both are is followed -> the client has acknowledged all that the VM has said -> a shadow socket again.
//! Invariants: 1. a connection comes back only where nothing of the VM's stream is on its way, which the client's own word says. A word counts only where
//!    the VM takes it, too: whoever guesses has to guess both numbers. 2. not before `Limits::again_us`, as what gave it back may be so still.
//! 3. never behind an end or a reset of either side, nor after a take-over: nobody has followed it here.
//! Not here: what is held (the gate's).

use super::Action;
use super::connection::{Connection, LINGER_US, Pair, Phase, Reset, later};
use super::types::Context;
use crate::output::packet::{ACK, Segment, before};

/// What is given back again and again comes back later each time, up to so many doublings.
const MOST_DOUBLINGS: u32 = 8;

/// Where the VM's stream is while the VM speaks itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Track {
    /// It does not come back before that.
    from_us: u64,
    /// How far the VM has said.
    nxt: u32,
    /// How far the client has it.
    una: u32,
    /// The VM, and the client, have said their end.
    ends: (bool, bool),
}

impl Track {
    /// Of one whose client has all that the VM has said.
    pub(super) fn of(connection: &Connection, from_us: u64) -> Self {
        Self {
            from_us,
            nxt: connection.nxt,
            una: connection.nxt,
            ends: (connection.fin, connection.client_fin.is_some()),
        }
    }
}

impl Connection {
    /// Nothing is kept: from now on the VM speaks with the client itself, and its window is the client's.
    pub(super) fn go_on_held(&mut self, cx: &mut Context<'_>) {
        self.close_socket(cx);
        self.lapse(cx, Phase::Held { ended: false });
        self.forget_at = None;
        if cx.holds_all && !self.draining {
            // Nothing is wrong with it: it may come back at once.
            self.track = Some(Track::of(self, cx.now_us));
            self.hold_last_word(cx);
        } else {
            let from_us = cx.now_us + (cx.again_us << self.times_given_back.min(MOST_DOUBLINGS));
            self.track = self.client_fin.is_none().then(|| Track::of(self, from_us));
            self.times_given_back += 1;
        }
        let frame = self.for_vm(self.client_place(), self.ack_for_vm(), ACK, self.client_window);
        cx.out.push(Action::ToVm(frame));
        self.is_ended(cx);
    }

    /// The VM has said it, and it is held.
    pub(super) fn track_vm(&mut self, cx: &Context<'_>, segment: &Segment) {
        if let Some(track) = &mut self.track {
            track.nxt = later(track.nxt, segment.seq_end());
            track.ends.0 |= segment.fin() || segment.rst();
        }
        self.is_ended(cx);
    }

    /// Nobody says more: it need not be known for long.
    fn is_ended(&mut self, cx: &Context<'_>) {
        if self.track.is_some_and(|track| track.ends == (true, true)) {
            self.track = None;
            self.forget_at = Some(cx.now_us + LINGER_US);
        }
    }

    /// A held word of the VM has left: the client knows it.
    pub(super) fn left(&mut self, segment: &Segment) {
        let is_word = segment.ack_flag() && !segment.rst() && !before(segment.ack, self.told.ack);
        if is_word && self.phase == (Phase::Held { ended: false }) {
            self.told = Pair::of(segment, self.told.echo);
            // What leaves is in the client's clock, which the VM may not have reached.
            self.told_stamp = self.vm_stamp;
        }
    }

    /// The client has said it, and the VM has got it. The connection comes back if the client has all.
    pub(super) fn track_client(&mut self, cx: &mut Context<'_>, segment: &Segment) {
        let window = u32::from(self.said.window) << self.scale.map_or(0, |(vm, _)| vm);
        let right = self.said.ack.wrapping_add(window);
        let Some(track) = &mut self.track else { return };
        let is_taken = segment.ack_flag()
            && !before(segment.seq, self.said.ack)
            && !before(right, segment.seq)
            && !before(segment.ack, track.una)
            && !before(track.nxt, segment.ack);
        if !is_taken {
            return;
        }
        track.una = segment.ack;
        track.ends.1 |= segment.fin() || segment.rst();
        self.client_window = segment.window;
        if let Some(stamps) = segment.timestamps.filter(|_| self.stamps) {
            self.client_stamp = later(self.client_stamp, stamps.value);
        }
        if track.ends == (false, false)
            && track.una == track.nxt
            && track.from_us <= cx.now_us
            && !cx.scarce
            && !cx.holds_all
        {
            let nxt = track.nxt;
            self.client_nxt = later(self.said.ack, segment.seq_end());
            return self.come_back(cx, nxt);
        }
        self.is_ended(cx);
    }

    /// The client has all of the stream up to `nxt`, and the VM has said no more.
    fn come_back(&mut self, cx: &mut Context<'_>, nxt: u32) {
        (self.una, self.released, self.nxt) = (nxt, nxt, nxt);
        (self.sent_before, self.exported) = (nxt, nxt);
        // What the client's own words have opened the VM may use.
        let window = u32::from(self.client_window) << self.scale.map_or(0, |(_, peer)| peer);
        self.edge = nxt.wrapping_add(window);
        self.said_edge = self.edge;
        self.heard = (self.told.ack, self.told.window);
        // Words that are held still leave as they are.
        self.unmarked = self.said != self.told;
        (self.draining, self.asked, self.reset) = (false, false, Reset::No);
        self.track = None;
        self.dirty = true;
        self.build(cx);
    }
}
