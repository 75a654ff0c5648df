//! What waits for the clock, which is an argument.
//!
//! Invariants: 1. `deadline` is the earliest of all that waits. 2. nothing waits for ever: a probe is asked three times, a reset waits for the
//!    client's acknowledgement ten seconds at most (one after the VM's end as long as the shadow socket does), what is over is forgotten after two minutes,
//!    and what may never end, or has nothing to say, after a long silence.
//! Not here: the shadow socket's own timers, which are the kernel's.

use super::connection::{Connection, Dummy, LINGER_US, Phase, Reset};
use super::replica::Known;
use super::types::Context;
use super::{Action, Limits, Replica, Speculation};
use crate::output::packet::{ACK, before};

/// After a take-over the client is asked again after this time.
const PROBE_US: u64 = 100_000;
/// How often it is asked before the replicated state has to do.
const PROBES: u8 = 3;
/// How far ahead of its last safe checkpoint the dead primary's clock may have been in what it told clients, in ticks of a millisecond: a VM's file may
/// ask for a minute from one sync to the next, the next one may not have been safe yet, and both take their time.
const RAISE_TICKS: u32 = 200_000;
/// How long a safe reset waits for the client to take what was said before it.
const RESET_US: u64 = 10_000_000;
/// So many shadow sockets are built in one turn: each costs the kernel's time, and after a take-over all clients that do not answer are
/// due at once.
const MOST_BUILDS: usize = 64;

impl Speculation {
    /// When `poll` is to be called next, on the clock of all calls' `now_us`.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Does what is due, or a part of it: then `deadline` is still in the past.
    pub fn poll(&mut self, now_us: u64, out: &mut Vec<Action>) {
        let mut builds = 0;
        while builds < MOST_BUILDS
            && let Some((_, flow)) = self.timers.first().copied().filter(|(at, _)| *at <= now_us)
        {
            let from = out.len();
            self.with(now_us, flow, out, Connection::fire);
            let is_build = |action: &&Action| matches!(action, Action::Build(_));
            builds += out[from..].iter().filter(is_build).count();
        }
    }

    /// This host goes on from what the primary's last safe checkpoint said. Each client is asked how far it is; the shadow sockets
    /// are built when it has answered.
    #[must_use]
    pub fn take_over(limits: Limits, replica: Replica, now_us: u64, out: &mut Vec<Action>) -> Self {
        let mut all = Self::new(limits);
        for (
            flow,
            Known {
                handshake,
                connection,
            },
        ) in replica.into_known()
        {
            if let Some(handshake) = handshake {
                all.remember(flow, handshake);
            }
            if let Some(connection) = connection {
                all.kept_bytes += connection.kept();
                all.keeping += usize::from(connection.kept() > 0);
                all.open += usize::from(connection.is_open());
                all.connections.insert(flow, connection);
                all.dirty.insert(flow);
                all.with(now_us, flow, out, Connection::take_over);
            }
        }
        all
    }
}

impl Connection {
    /// When it has something to do.
    pub(super) fn timer(&self) -> Option<u64> {
        let probe = match self.phase {
            Phase::Probing { asked_us, .. } => Some(asked_us + PROBE_US),
            _ => None,
        };
        let dummy = match self.dummy {
            Dummy::Sent { at_us, .. } => Some(at_us),
            _ => None,
        };
        let reset = match self.reset {
            // After its end it says a reset because it has given that up: the client gets all that was said before.
            Reset::Released(since) if !self.fin => Some(since + RESET_US),
            _ => None,
        };
        let silence = self.patience_us().map(|patience| self.spoke_us + patience);
        [probe, dummy, reset, silence, self.forget_at]
            .into_iter()
            .flatten()
            .min()
    }

    fn fire(&mut self, cx: &mut Context<'_>) {
        let due = |at: u64| at <= cx.now_us;
        if let Phase::Probing { tries, asked_us } = self.phase
            && due(asked_us + PROBE_US)
        {
            match tries < PROBES {
                true => self.probe(cx, tries + 1),
                false => self.learned(cx),
            }
        } else if let Dummy::Sent { at_us, stamp } = self.dummy
            && due(at_us)
        {
            self.acknowledge_dummy(cx, stamp);
        } else if let Reset::Released(since) = self.reset
            && !self.fin
            && due(since + RESET_US)
        {
            self.reset_client(cx);
        } else if self.forget_at.is_some_and(due)
            || self
                .patience_us()
                .is_some_and(|patience| due(self.spoke_us + patience))
        {
            match self.speaks() && !self.fin_acked && !self.may_speak_itself(cx.now_us) {
                // Held as before its timestamps are lifted still, and it is looked at again after as long a silence.
                true => {
                    self.spoke_us = cx.now_us;
                    self.go_on_held(cx);
                }
                false => self.forget(cx),
            }
        }
    }

    fn take_over(&mut self, cx: &mut Context<'_>) {
        self.spoke_us = cx.now_us;
        self.last_stamp = self.last_stamp.wrapping_add(RAISE_TICKS);
        // A safe checkpoint: all that it holds may leave, and may have left.
        self.released = self.nxt;
        self.fin_released = self.fin;
        self.sent_before = self.nxt.wrapping_add(u32::from(self.fin));
        self.shadow_nxt = self.una;
        (self.told, self.exported) = (self.said, self.una);
        if self.reset == Reset::Said {
            self.reset = Reset::Released(cx.now_us);
        }
        match self.phase {
            Phase::Probing { .. } | Phase::Speculative => self.probe(cx, 1),
            // It goes on, with timestamps that do not go back.
            Phase::Held { ended: false } => {}
            _ => self.forget_at = Some(cx.now_us + LINGER_US),
        }
    }

    /// Asks the client how far it is, with a byte's number that it has acknowledged before.
    fn probe(&mut self, cx: &mut Context<'_>, tries: u8) {
        self.phase = Phase::Probing {
            tries,
            asked_us: cx.now_us,
        };
        let frame = self.for_client(self.una.wrapping_sub(1), self.told, ACK, &[]);
        cx.out.push(frame);
        debug_assert!(!before(self.nxt, self.una));
    }
}
