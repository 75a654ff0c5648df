//! The ends of epochs: what the VM had said at a cut is marked, and let go when the cut is safe. Several may be outstanding.
//!
//! Invariants: 1. a cut comes when all frames that the VM sent before its stop were taken (`vm_sent`): what the checkpoint does not hold
//!    the VM would believe to be acknowledged after a take-over. 2. marks are let go in the order of their epochs.
//! 3. what went ahead of a cut is told again by nobody, and counts only with its cut.
//! 4. after a release the client knows what the VM safely said of its bytes, also where the shadow socket has nothing to send.
//! Source: VEE'12, 3.1; Remus' output commit. Not here: when to cut, and how a checkpoint gets to the backup.

use super::connection::{Connection, Mark, Phase, Reset, Word, later};
use super::types::Context;
use super::{Action, Speculation, state};
use crate::output::packet::{ACK, before};
use crate::units::Epoch;
use bytes::Bytes;
use std::collections::VecDeque;

/// What goes ahead at once: so many times the least that is worth it.
const AHEAD_AT_ONCE: u32 = 4;

impl Speculation {
    /// The VM stands still at the end of `epoch`, and all that it sent before was taken. What a backup needs to go on from here:
    /// what has changed since the last cut, or all of it (`whole`) for a new backup.
    pub fn cut(&mut self, now_us: u64, epoch: Epoch, whole: bool) -> Bytes {
        if whole {
            // Who knows nothing need not hear what is gone.
            self.dirty.clear();
            self.dirty.extend(self.connections.keys());
            self.dirty.extend(self.handshakes.keys());
        }
        let changed = std::mem::take(&mut self.dirty);
        let mut marked = Vec::new();
        for flow in &changed {
            if let Some(connection) = self.connections.get_mut(flow) {
                // Before it is told: a new primary's clock has to be ahead of what leaves with this epoch.
                connection.follow_clock(now_us);
                if whole {
                    connection.exported = connection.una;
                }
                if connection.mark(epoch) {
                    marked.push(*flow);
                }
                self.unmarked.remove(flow);
            }
            if let Some(handshake) = self.handshakes.get_mut(flow) {
                handshake.exported = true;
            }
        }
        let bytes = state::encode(changed.iter().map(|flow| {
            let connection = self.connections.get(flow);
            (flow, self.handshakes.get(flow), connection)
        }));
        for flow in &changed {
            if let Some(connection) = self.connections.get_mut(flow) {
                connection.exported = connection.nxt;
            }
        }
        self.much_untold.clear();
        self.told_ahead = 0;
        self.marked.push_back((epoch, marked));
        bytes
    }

    /// A part of what the next cut would tell, of one connection of which much waits, for a backup to have it before the cut; none if
    /// nothing is worth it. It counts only with the cut.
    pub fn ahead(&mut self) -> Option<Bytes> {
        while let Some(flow) = self.much_untold.pop_first() {
            let Some(connection) = self.connections.get_mut(&flow) else {
                continue;
            };
            let untold = connection.untold() as u32;
            if untold < self.limits.ahead_bytes {
                continue;
            }
            let part = untold.min(AHEAD_AT_ONCE * self.limits.ahead_bytes);
            // A backup keeps it until the cut, also of a connection that ends before that.
            if self.told_ahead + part as usize > self.limits.total_bytes {
                self.much_untold.clear();
                return None;
            }
            self.told_ahead += part as usize;
            let until = connection.first_untold().wrapping_add(part);
            let bytes = state::encode_ahead(&flow, connection, until);
            connection.exported = until;
            if untold - part >= self.limits.ahead_bytes {
                self.much_untold.insert(flow);
            }
            return Some(bytes);
        }
        None
    }

    /// No other host holds a copy that could go on: all that the VM has said so far is safe, with no cut for it.
    pub fn all_is_safe(&mut self, now_us: u64, out: &mut Vec<Action>) {
        // No cut takes what has changed. What is gone piles up, and is nobody's business (a joining backup gets all that there is).
        if self.dirty.len() > 2 * (self.limits.connections + self.limits.handshakes) {
            let (connections, handshakes) = (&self.connections, &self.handshakes);
            self.dirty
                .retain(|flow| connections.contains_key(flow) || handshakes.contains_key(flow));
        }
        let mut flows = std::mem::take(&mut self.unmarked);
        let marked = std::mem::take(&mut self.marked);
        flows.extend(marked.into_iter().flat_map(|(_, flows)| flows));
        for flow in flows {
            self.with(now_us, flow, out, |connection, cx| {
                connection.follow_clock(cx.now_us);
                connection.mark(Epoch(u64::MAX));
                connection.release(cx, Epoch(u64::MAX));
            });
        }
    }

    /// Whatever ended with `epoch` or before it is safe.
    pub fn released(&mut self, now_us: u64, epoch: Epoch, out: &mut Vec<Action>) {
        while let Some((_, flows)) = next_until(&mut self.marked, |(ended, _)| *ended <= epoch) {
            for flow in flows {
                self.with(now_us, flow, out, |connection, cx| connection.release(cx, epoch));
            }
        }
    }
}

/// The first, if it is so.
pub(super) fn next_until<T>(queue: &mut VecDeque<T>, so: impl Fn(&T) -> bool) -> Option<T> {
    queue.front().is_some_and(so).then(|| queue.pop_front()).flatten()
}

impl Connection {
    /// The first number of its stream that no checkpoint has told.
    pub(super) fn first_untold(&self) -> u32 {
        later(self.exported, self.una)
    }

    /// How many bytes are kept that no checkpoint has told.
    pub(super) fn untold(&self) -> usize {
        let told = self.first_untold().wrapping_sub(self.base) as usize;
        self.kept().saturating_sub(told)
    }

    /// Marks the end of `epoch`; false if nothing of it waits.
    fn mark(&mut self, epoch: Epoch) -> bool {
        self.unmarked = false;
        if !matches!(self.phase, Phase::Probing { .. } | Phase::Speculative) {
            return false;
        }
        self.marks.push_back(Mark {
            epoch,
            nxt: self.nxt,
            fin: self.fin,
            reset: self.reset != Reset::No,
            pair: self.said,
            stamp: self.vm_stamp,
            words: std::mem::take(&mut self.words),
        });
        true
    }

    fn release(&mut self, cx: &mut Context<'_>, epoch: Epoch) {
        while let Some(mark) = next_until(&mut self.marks, |mark| mark.epoch <= epoch) {
            self.released = mark.nxt;
            self.fin_released |= mark.fin;
            if mark.reset && self.reset == Reset::Said {
                self.reset = Reset::Released(cx.now_us);
            }
            if !before(mark.pair.ack, self.told.ack) {
                (self.told, self.told_stamp) = (mark.pair, mark.stamp);
            }
            if self.speaks() {
                mark.words.into_iter().for_each(|word| self.say(cx, word));
            }
        }
        self.write(cx);
        self.tell(cx);
    }

    /// A word of the VM leaves.
    fn say(&mut self, cx: &mut Context<'_>, word: Word) {
        match word {
            Word::Acknowledgement { pair, sack } => {
                if before(pair.ack, self.heard.0) {
                    return;
                }
                self.heard = (pair.ack, pair.window);
                let frame = self.for_client(self.shadow_nxt, pair, ACK, &sack);
                cx.out.push(frame);
            }
            Word::KeepAlive if self.arrived() == self.shadow_nxt => {
                self.asked = true;
                let frame = self.for_client(self.arrived().wrapping_sub(1), self.told, ACK, &[]);
                cx.out.push(frame);
            }
            // The shadow socket asks for itself while its bytes are not acknowledged.
            Word::KeepAlive => self.asked = true,
        }
    }

    /// Tells the client what it was not told yet.
    pub(super) fn tell(&mut self, cx: &mut Context<'_>) {
        let now = (self.told.ack, self.told.window);
        if self.speaks() && now != self.heard {
            self.heard = now;
            let frame = self.for_client(self.shadow_nxt, self.told, ACK, &[]);
            cx.out.push(frame);
        }
    }
}
