//! A VM whose connections are ahead of their clients for a part of its time (`speculation`): what leaves beside the gate, and when outputs are
//! compared.
//!
//! Flow: speculation's words to a client pass here, on the clients' side of it: they are translated as what the gate lets out, and counted as having
//! left. `compares_anew` and `compares_no_more` are the two changes of mode.
//! Invariants: 1. while connections are ahead of their clients nothing is compared: the comparison does not see what they say, and would take what comes
//!    after more than half a circle of unseen numbers for told before. It begins anew, as after a join.
//! Not here: whether it may leave (`speculation`, the loop).

use super::packet::FlowKey;
use super::{Ends, Output};
use crate::agreed::Frame;
use crate::offload::Offload;

impl Output {
    /// `frame` leaves now, as the client is to see it. The VM had said its words for at most `held_us`.
    #[must_use]
    pub fn leaves_speculatively(&mut self, frame: Frame, offload: Offload, held_us: u64) -> Frame {
        let frames = offload.frames_of(frame.bytes.len());
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
    pub fn lift(&mut self, key: FlowKey, ticks: u32, ends: Ends) {
        self.rewriter.lift(key, ticks, ends);
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
        let comparer = self.new_comparer().with_counters(counters);
        if let Some(comparison) = &mut self.comparison {
            comparison.comparer = comparer;
        }
    }

    /// The backup's VM runs no more: what is held waits for its sync.
    pub fn compares_no_more(&mut self) {
        self.counted = self.counters().copied();
        self.comparison = None;
        self.blind = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::gate::Voice;
    use crate::output::tests::segment;
    use crate::units::Epoch;

    fn sync(output: &mut Output, epoch: u64) {
        output.draw_line();
        output.acknowledged(Epoch(epoch));
        output.backup_loaded(Epoch(epoch));
    }

    /// Between two times of comparing a shadow socket has said more than half a circle of numbers.
    #[test]
    fn what_was_told_before_speculation_is_not_told_after_it() {
        let mut output = Output::new(Voice::Protected, Epoch(1));
        output.compares_anew();
        sync(&mut output, 1);
        output.said(segment(3_000_000_000, b"abc"), 0);
        output.backup_said(Epoch(2), vec![segment(3_000_000_000, b"abc")]);
        assert!(output.release(0).is_some(), "both have said it");
        sync(&mut output, 2);
        output.compares_no_more();
        output.said(segment(2_000_000_000, b"held"), 0);
        assert!(output.release(0).is_none(), "nothing is compared");
        output.compares_anew();
        sync(&mut output, 3);
        assert!(output.release(0).is_some(), "a sync covers it");
        output.said(segment(2_000_000_004, b"xyz"), 0);
        assert!(output.release(0).is_none(), "the backup has not said it");
        output.backup_said(Epoch(4), vec![segment(2_000_000_004, b"xyz")]);
        assert!(output.release(0).is_some(), "both have said it");
        assert_eq!(
            output.counters().map(|counters| counters.matched),
            Some(2),
            "of all times"
        );
    }

    #[test]
    fn a_large_frame_counts_as_the_vms_own_would() {
        let mut output = Output::new(Voice::Protected, Epoch(1));
        let offload = Offload {
            gso_size: 100,
            ..Offload::default()
        };
        let frame = segment(1, &[7; 950]);
        assert_eq!(output.leaves_speculatively(frame.clone(), offload, 20), frame);
        let tally = output.tally();
        assert_eq!((tally.released, tally.by_sync, tally.held_us), (11, 11, 220));
    }

    /// The device sums up the segment: what is translated in it must not be in the sum already.
    #[test]
    fn a_checksum_that_the_device_completes_stays_as_it_is() {
        let mut output = Output::new(Voice::Protected, Epoch(1));
        let mut bytes = segment(1, b"abc").bytes.to_vec();
        // Timestamps, and a pseudo header's sum.
        bytes[46] = 8 << 4;
        bytes[50..52].copy_from_slice(&[0x12, 0x34]);
        bytes.splice(54..54, [1, 1, 8, 10, 0, 0, 0, 50, 0, 0, 0, 60]);
        bytes[17] += 12;
        let frame = Frame {
            nic: 0,
            bytes: bytes.into(),
        };
        let key = FlowKey {
            nic: 0,
            vlan: 0,
            vm: [10, 0, 0, 2].into(),
            peer: [10, 0, 0, 9].into(),
            vm_port: 80,
            peer_port: 5140,
            protocol: 6,
        };
        output.lift(key, 1000, Ends::default());
        let partial = Offload {
            needs_csum: true,
            ..Offload::default()
        };
        let seen = output.leaves_speculatively(frame.clone(), partial, 0);
        assert_eq!(seen.bytes[58..62], 1050_u32.to_be_bytes());
        assert_eq!(seen.bytes[50..52], [0x12, 0x34]);
        let seen = output.leaves_speculatively(frame, Offload::default(), 0);
        assert_ne!(seen.bytes[50..52], [0x12, 0x34]);
    }
}
