//! All connections held as before: what a VM asks for before its backup's copy of it runs.
//!
//! Flow: `hold_all` -> no connection begins or comes back, and nothing more is acknowledged ahead of a client -> each one is held as soon as its
//! client has all that was kept (`settle`) -> `all_are_held`: the backup's VM may run from the next sync on. `speculate_again` takes it back: what
//! was not held yet goes on, and what was comes back by the rule of `given_back.rs`, without its waiting time.
//! Invariants: 1. while all are held no shadow socket is built for a connection that has none. 2. of one that is held nothing is kept, the VM's
//!    own TCP has all that its client lacks, and its frames pass as they are. 3. what of its clock is ahead of the VM's is lifted by the
//!    translation behind this room (`Limits::translated`), whose table every backup has: whichever copy speaks, a client's timestamps do not go back.
//! Not here: which mode is to come (`sync::change_over`), how long it is waited for (`sync::way_out`).

use super::connection::{Connection, Phase};
use super::given_back::Track;
use super::types::Context;
use super::{Action, Flow, Speculation};
use crate::output::packet::{ACK, FlowKey, TCP, before};
use crate::output::{Ends, MOST_OVER_TOLD};

impl Speculation {
    /// No connection is to be ahead of its client: those whose client has everything are held at once, the others when it has.
    pub fn hold_all(&mut self, now_us: u64, out: &mut Vec<Action>) {
        if std::mem::replace(&mut self.holds_all, true) {
            return;
        }
        let open = self.connections.iter().filter(|(_, known)| known.is_open());
        for flow in open.map(|(flow, _)| *flow).collect::<Vec<Flow>>() {
            // `settle` does it.
            self.with(now_us, flow, out, |_, _| {});
        }
        self.lift_ended(now_us, out);
    }

    /// The VM may still repeat the last acknowledgement of those that are over: its client would take it for an old one. The newest come last, and
    /// are remembered longest.
    fn lift_ended(&mut self, now_us: u64, out: &mut Vec<Action>) {
        let ended = self.connections.iter().filter(|(_, known)| known.has_ended());
        let mut ended: Vec<_> = ended.map(|(flow, known)| (known.forget_at, *flow)).collect();
        ended.sort_unstable();
        let oldest = ended.len().saturating_sub(MOST_OVER_TOLD);
        for (_, flow) in ended.split_off(oldest) {
            self.with(now_us, flow, out, Connection::lift);
        }
    }

    /// Connections may be ahead of their clients again.
    pub fn speculate_again(&mut self) {
        self.holds_all = false;
    }

    /// Whether all connections are held, or are to be.
    #[must_use]
    pub fn holds_all(&self) -> bool {
        self.holds_all
    }

    /// Whether no connection has anything here that its VM believes to be with the client, and none will until `speculate_again`.
    #[must_use]
    pub fn all_are_held(&self) -> bool {
        self.holds_all && self.open == 0
    }
}

impl Connection {
    /// Whether it is held now, because all are to be.
    pub(super) fn may_be_held(&self, cx: &Context<'_>) -> bool {
        // One that probes has not learnt yet how far its client is.
        cx.holds_all && self.speaks()
    }

    /// A handshake has ended while all are held: it is known, so that it can come back.
    pub(super) fn begin_held(&mut self, cx: &mut Context<'_>) {
        self.spoke_us = cx.now_us;
        self.lapse(cx, Phase::Held { ended: false });
        self.forget_at = None;
        self.track = Some(Track::of(self, cx.now_us));
    }

    /// What the VM has said of its client's bytes, and the client was not told yet, leaves with the epoch that runs, as a word of the VM.
    pub(super) fn hold_last_word(&self, cx: &mut Context<'_>) {
        if self.said != self.told
            && let Action::ToClient(frame, _) = self.for_client(self.ack_for_vm(), self.said, ACK, &[])
        {
            cx.out.push(Action::Hold(frame));
        }
    }

    /// Whether the translation adds what its clock is ahead of the VM's. One that is over has few words left: it needs no room there before it says
    /// one of them, or the backup's VM may.
    pub(super) fn is_lifted(&self, cx: &Context<'_>) -> bool {
        match self.phase {
            Phase::Held { ended } => cx.translated && (!ended || cx.holds_all),
            _ => false,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.phase == Phase::Held { ended: true }
    }

    /// The client may have heard a clock that is ahead of the VM's, and the ends of one that is held may have been heard here only.
    pub(super) fn lift(&mut self, cx: &mut Context<'_>) {
        let is_held = matches!(self.phase, Phase::Held { .. });
        if !cx.translated || !is_held {
            return;
        }
        let is_ahead = self.is_ahead();
        let ticks = match is_ahead {
            true => self.last_stamp.wrapping_sub(self.vm_stamp),
            false => 0,
        };
        let ends = self.ends();
        if ticks == 0 && !ends.is_over() {
            return;
        }
        if is_ahead {
            self.last_stamp = self.vm_stamp;
            self.dirty = true;
        }
        cx.out.push(Action::Lift(self.key(), ticks, ends));
    }

    /// Its client has heard a clock that is ahead of the VM's.
    pub(super) fn is_ahead(&self) -> bool {
        self.stamps && before(self.vm_stamp, self.last_stamp)
    }

    fn ends(&self) -> Ends {
        let peer = self.client_fin.map(|fin| fin.wrapping_add(1));
        Ends {
            vm: self.fin_acked.then(|| self.nxt.wrapping_add(1)),
            peer: peer.filter(|end| !before(self.told.ack, *end)),
        }
    }

    fn key(&self) -> FlowKey {
        FlowKey {
            nic: self.nic,
            vlan: self.vlan,
            vm: self.flow.vm.ip(),
            peer: self.flow.peer.ip(),
            vm_port: self.flow.vm.port(),
            peer_port: self.flow.peer.port(),
            protocol: TCP,
        }
    }
}
