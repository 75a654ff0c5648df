//! A partial acknowledgement: what the backup has got of a client's bytes, told in the primary's name.
//!
//! Inputs get lost inside a VM, and not in both alike. When the backup has lost one, its acknowledgements stay behind, the primary's wait for
//! them, and the client hears nothing: it sends again when its own timer has run out, and then the first segment that nobody
//! acknowledged, which is seldom the one that the backup lacks. With the backup's acknowledgements, and the blocks that it has selectively
//! acknowledged, the client's TCP mends that as any loss on its way.
//!
//! Invariants:
//! 1. What it acknowledges, selectively or not, both VMs have received. So the backup's blocks end where the primary's acknowledgement does: behind it the
//!    primary may lack something as well, which the network has lost. An acknowledgement that is not told for that reason leaves the client to its timer,
//!    which doubles each time.
//! 2. Its numbers are those of the primary, its timestamp is no newer than what follows it on the connection, its window no larger than the
//!    primary's.
//!
//! Source: RFC 9293, 3.8.6; RFC 2018. Not here: when there is one (`connection`).

use super::numbers::{after, later};
use crate::agreed::Frame;
use crate::output::packet::{Segment, u32_at};
use crate::output::rewriter::rewrite::Rewriter;

/// TCP's option of selective acknowledgements, and four that say nothing.
const SACK: u8 = 5;
const NOTHING: u32 = 0x0101_0101;
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
    /// The backup's acknowledgement with it, and the furthest byte that it tells of. None: one of the two has no timestamps.
    #[must_use]
    pub fn of(self, backup: &Segment, frame: &Frame) -> Option<(Frame, u32)> {
        let mut partial = Rewriter::of(frame, backup);
        partial.set(backup.tcp + 4, self.seq);
        partial.set_low(backup.tcp + WINDOW_AT, self.window.min(backup.window));
        match (backup.timestamps, self.ticks) {
            (Some(found), Some(ticks)) => partial.set(found.at, ticks),
            (None, None) => {}
            _ => return None,
        }
        let edge = self.cut_blocks(backup, frame, &mut partial)?;
        Some((partial.finish(), edge))
    }

    /// Invariant 1, for what is acknowledged selectively. The furthest byte of that, or of what is acknowledged.
    fn cut_blocks(self, backup: &Segment, frame: &Frame, partial: &mut Rewriter<'_>) -> Option<u32> {
        let mut to = backup.sack.clone();
        let mut edge = backup.ack;
        if to.is_empty() {
            return Some(edge);
        }
        for at in backup.sack.clone().step_by(8) {
            let (left, right) = (u32_at(&frame.bytes, at)?, u32_at(&frame.bytes, at + 4)?);
            if after(self.primary_ack, left) {
                let most = if after(right, self.primary_ack) {
                    self.primary_ack
                } else {
                    right
                };
                partial.set(to.start, left);
                partial.set(to.start + 4, most);
                edge = later(edge, most);
                to.start += 8;
            }
        }
        let length = (to.start - backup.sack.start) as u16;
        // Kind and length stand before the first block.
        let head = match length {
            0 => NOTHING as u16,
            some => u16::from(SACK) << 8 | (some + 2),
        };
        partial.set_low(backup.sack.start - 4, head);
        to.step_by(4).for_each(|at| partial.set(at, NOTHING));
        Some(edge)
    }
}
