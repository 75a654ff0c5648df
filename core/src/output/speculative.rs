//! A VM whose connections are ahead of their clients for a part of its time (`speculation`): what leaves beside the gate, and when outputs are
//! compared.
//!
//! Flow: speculation's words to a client pass here, on the clients' side of it: they are translated as what the gate lets out, and counted as having
//! left. `compares_anew` and `compares_no_more` are the two changes of mode.
//! Invariants: 1. while connections are ahead of their clients nothing is compared: the comparison does not see what they say, and would take what comes
//!    after more than half a circle of unseen numbers for told before. It begins anew, as after a join.
//! Not here: whether it may leave (`speculation`, the loop).

use super::compare::Comparer;
use super::packet::FlowKey;
use super::{COMPARED, Output};
use crate::agreed::Frame;
use crate::offload::Offload;

impl Output {
    /// `frame` leaves now, as the client is to see it. The VM had said its words for at most `held_us`.
    #[must_use]
    pub fn leaves_speculatively(&mut self, frame: Frame, offload: Offload, held_us: u64) -> Frame {
        // What one frame of the VM would have been.
        let frames = match offload.gso_size {
            0 => 1,
            size => (frame.bytes.len() as u64).div_ceil(u64::from(size)).max(1),
        };
        self.tally.released += frames;
        self.tally.by_sync += frames;
        self.tally.held_us += held_us * frames;
        self.tally.bytes += frame.bytes.len() as u64;
        if self.rewriter.is_empty() {
            return frame;
        }
        self.rewriter.will_leave(&frame);
        self.rewriter.tell(&frame, offload.needs_csum)
    }

    /// Speculation has let a client hear a clock that was ahead of the VM's.
    pub fn lift(&mut self, key: FlowKey, ticks: u32) {
        self.rewriter.lift(key, ticks);
    }

    /// Whether what the backup says is compared.
    #[must_use]
    pub fn compares(&self) -> bool {
        self.comparison.is_some()
    }

    /// From the line that is drawn next on the backup's words count, and nothing is known of what was said before.
    pub fn compares_anew(&mut self) {
        let counters = self.counters().copied().unwrap_or_default();
        self.compare_from(self.epoch());
        if let Some(comparison) = &mut self.comparison {
            comparison.comparer = Comparer::new(COMPARED).with_counters(counters);
        }
    }

    /// The backup's VM runs no more: what is held waits for its sync.
    pub fn compares_no_more(&mut self) {
        self.counted = self.counters().copied();
        self.comparison = None;
        self.blind = false;
    }
}
