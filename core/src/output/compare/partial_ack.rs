//! A partial acknowledgement: what the backup has got of a client's bytes, told in the primary's name.
//!
//! Inputs get lost inside a VM, and not in both alike. When the backup has lost one, its acknowledgements stay behind, the primary's wait for
//! them, and the client hears nothing: it sends again when its own timer has run out, and then the first segment that nobody
//! acknowledged, which is seldom the one that the backup lacks. With the backup's acknowledgements, and the blocks that it has selectively
//! acknowledged, the client's TCP mends that as any loss on its way.
//!
//! Invariants:
//! 1. What it acknowledges, selectively or not, both VMs have received.
//! 2. Its numbers are those of the primary, its timestamp is no newer than what follows it on the connection, its window no larger than the
//!    primary's.
//!
//! Source: RFC 9293, 3.8.6; RFC 2018. Not here: when there is one (`connection`).

use super::said::after;
use crate::agreed::Frame;
use crate::output::packet::{Segment, u32_at};
use crate::output::rewriter::rewrite::Rewriter;

/// Where the window stands in a TCP header, behind two bytes that stay.
const WINDOW_AT: usize = 12;

/// What of it is the primary's.
#[derive(Clone, Copy, Debug)]
pub struct PartialAck {
    /// The place in the primary's stream.
    pub seq: u32,
    /// The timestamp, where the connection has them.
    pub ticks: Option<u32>,
    /// The window, which the backup's may be smaller than.
    pub window: u16,
    /// What the primary has acknowledged, told or not.
    pub primary_ack: u32,
}

impl PartialAck {
    /// The backup's acknowledgement with it. None: it selectively acknowledges what the primary may lack, or one of the two has no timestamps.
    #[must_use]
    pub fn of(self, backup: &Segment, frame: &Frame) -> Option<Frame> {
        let mut edges = backup.sack.clone().step_by(4);
        if edges.any(|at| u32_at(&frame.bytes, at).is_none_or(|edge| after(edge, self.primary_ack))) {
            return None;
        }
        let mut partial = Rewriter::of(frame, backup);
        partial.set(backup.tcp + 4, self.seq);
        partial.set_low(backup.tcp + WINDOW_AT, self.window.min(backup.window));
        match (backup.timestamps, self.ticks) {
            (Some(found), Some(ticks)) => partial.set(found.at, ticks),
            (None, None) => {}
            _ => return None,
        }
        Some(partial.finish())
    }
}
