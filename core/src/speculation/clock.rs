//! The clock that a client hears (TSval): the VM's, the shadow socket's, and that of the words which come from here.
//!
//! Invariants: 1. it never goes back, whoever speaks. 2. it never stands still for long while anybody speaks.
//! Source: RFC 7323, 5 (PAWS). Not here: how far it is raised at a take-over (`timers.rs`).

use super::connection::Connection;
use crate::output::packet::before;

/// Nearer than this the words that come from here do not follow the shadow socket's clock, which began a moment later than it was built.
const BEHIND_TICKS: u64 = 5_000;

impl Connection {
    /// Whether the VM's own clock is past what its client has heard: it stands while the VM does, and the shadow socket's does not. Half of the silence
    /// is what that of a VM with many pauses has got on.
    pub(super) fn may_speak_itself(&self, now_us: u64) -> bool {
        let ticks = (now_us.saturating_sub(self.spoke_us) / 2000).min(1 << 30) as u32;
        !self.stamps || before(self.last_stamp, self.vm_stamp.wrapping_add(ticks))
    }

    /// Words for a client that hears nothing of the shadow socket follow that one's clock from behind: one that stood still for 24.9 days would be
    /// half of its numbers away, where what is new counts as old (RFC 7323, 5.3).
    pub(super) fn follow_clock(&mut self, now_us: u64) {
        let ticks = now_us.saturating_sub(self.clock_us) / 1000;
        if self.has_socket() && self.stamps && ticks > 2 * BEHIND_TICKS {
            let ticks = ticks - BEHIND_TICKS;
            self.last_stamp = self.last_stamp.wrapping_add(ticks as u32);
            self.clock_us += ticks * 1000;
        }
    }
}
