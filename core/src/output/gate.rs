//! What it decides: when a frame of the VM may leave for the network.
//!
//! Flow: the last station of every outbound frame, on the primary as on the backup.
//!
//! Invariants:
//! 1. (Output commit) A frame of epoch k leaves only after sync k was acknowledged, or while no other host counts
//!    as holding a complete copy.
//! 2. Frames leave in the order in which the VM sent them.
//! 3. On the backup nothing leaves; what sync k covers is dropped when sync k is applied, and the rest is sent if
//!    the backup becomes the primary.
//! 4. A gate that is shut (no majority) lets nothing pass, whatever else holds.
//!
//! Source: Remus (NSDI'08), "output buffering"; PLOVER. Not here: when to sync, comparison of outputs.

use crate::agreed::Frame;
use crate::units::Epoch;
use std::collections::VecDeque;

/// Who may speak for the VM, as far as its own host knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Voice {
    /// A primary whose backup is complete: frames wait for their sync.
    Protected,
    /// A primary that alone holds a complete copy, and the group has agreed on that: frames leave at once.
    Alone,
    /// A backup: frames are kept for fail-over.
    Kept,
    /// No majority, or no role yet: frames wait.
    Shut,
}

/// The outbound frames of one VM.
#[derive(Debug)]
pub struct Gate {
    voice: Voice,
    epoch: Epoch,
    acknowledged: Epoch,
    held: VecDeque<(Epoch, Frame)>,
    held_bytes: usize,
}

impl Gate {
    /// A gate whose first frames belong to `epoch`.
    #[must_use]
    pub fn new(voice: Voice, epoch: Epoch) -> Self {
        Self {
            voice,
            epoch,
            acknowledged: Epoch(0),
            held: VecDeque::new(),
            held_bytes: 0,
        }
    }

    /// Who speaks now.
    #[must_use]
    pub fn voice(&self) -> Voice {
        self.voice
    }

    /// The epoch that frames are stamped with.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Changes who speaks. Call `release` afterwards.
    pub fn set_voice(&mut self, voice: Voice) {
        self.voice = voice;
    }

    /// The VM sent a frame.
    pub fn arrived(&mut self, frame: Frame) {
        self.held_bytes += frame.bytes.len();
        self.held.push_back((self.epoch, frame));
    }

    /// The VM stands still at the end of its epoch: frames from now on belong to the next.
    pub fn end_epoch(&mut self) -> Epoch {
        let ended = self.epoch;
        self.epoch = ended.next();
        ended
    }

    /// Starts at `epoch`: what is held belongs to it.
    pub fn restart_at(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        for (stamp, _) in &mut self.held {
            *stamp = epoch;
        }
    }

    /// Sync `epoch` was acknowledged by the backup (on the primary).
    pub fn acknowledged(&mut self, epoch: Epoch) {
        assert!(
            epoch < self.epoch,
            "invariant 1: an epoch is acknowledged after it has ended"
        );
        self.acknowledged = self.acknowledged.max(epoch);
    }

    /// Sync `epoch` was applied (on the backup): the primary has said, or will say, all of it.
    pub fn applied(&mut self, epoch: Epoch) {
        assert_eq!(self.voice, Voice::Kept, "only a backup drops what it kept");
        self.held.clear();
        self.held_bytes = 0;
        self.epoch = epoch.next();
    }

    /// Takes the next frame that may leave now.
    pub fn release(&mut self) -> Option<Frame> {
        let may_leave = match self.voice {
            Voice::Kept | Voice::Shut => false,
            Voice::Alone => true,
            Voice::Protected => self
                .held
                .front()
                .is_some_and(|(epoch, _)| *epoch <= self.acknowledged),
        };
        if !may_leave {
            return None;
        }
        let (_, frame) = self.held.pop_front()?;
        self.held_bytes -= frame.bytes.len();
        Some(frame)
    }

    /// How many frames wait.
    #[must_use]
    pub fn held_frames(&self) -> usize {
        self.held.len()
    }

    /// How many bytes wait.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Whether output of the running epoch waits for a sync that has not begun.
    #[must_use]
    pub fn waits_for_sync(&self) -> bool {
        self.held.back().is_some_and(|(epoch, _)| *epoch == self.epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(n: u32) -> Frame {
        Frame {
            nic: 0,
            bytes: n.to_be_bytes().to_vec().into(),
        }
    }

    fn drain(gate: &mut Gate) -> Vec<Frame> {
        std::iter::from_fn(|| gate.release()).collect()
    }

    #[test]
    fn a_frame_waits_for_its_own_epochs_sync() {
        let mut gate = Gate::new(Voice::Protected, Epoch(1));
        gate.arrived(frame(1));
        assert_eq!(gate.end_epoch(), Epoch(1));
        gate.arrived(frame(2));
        assert_eq!(drain(&mut gate), vec![]);
        gate.acknowledged(Epoch(1));
        assert_eq!(drain(&mut gate), vec![frame(1)]);
        assert!(gate.waits_for_sync());
    }

    #[test]
    fn a_new_primary_sends_what_it_kept_since_the_last_sync() {
        let mut gate = Gate::new(Voice::Kept, Epoch(1));
        gate.arrived(frame(1));
        gate.applied(Epoch(1));
        gate.arrived(frame(2));
        assert_eq!(drain(&mut gate), vec![]);
        gate.set_voice(Voice::Alone);
        assert_eq!(drain(&mut gate), vec![frame(2)]);
    }

    #[test]
    fn a_primary_without_a_majority_says_nothing() {
        let mut gate = Gate::new(Voice::Alone, Epoch(1));
        gate.set_voice(Voice::Shut);
        gate.arrived(frame(1));
        assert_eq!(drain(&mut gate), vec![]);
    }

    proptest! {
        /// Whatever happens in whatever order: nothing leaves early, nothing overtakes, nothing is lost.
        #[test]
        fn output_commit_holds_under_random_use(steps in prop::collection::vec(0_u8..4, 0..200)) {
            let mut gate = Gate::new(Voice::Protected, Epoch(1));
            let (mut sent, mut left, mut acked) = (Vec::new(), 0, Epoch(0));
            for (n, step) in steps.into_iter().enumerate() {
                match step {
                    0 | 1 => {
                        sent.push((gate.epoch(), frame(n as u32)));
                        gate.arrived(frame(n as u32));
                    }
                    2 => {
                        gate.end_epoch();
                    }
                    _ => {
                        if acked.next() < gate.epoch() {
                            acked = acked.next();
                            gate.acknowledged(acked);
                        }
                    }
                }
                while let Some(frame) = gate.release() {
                    let (epoch, expected) = &sent[left];
                    prop_assert_eq!(expected, &frame);
                    prop_assert!(*epoch <= acked, "left before its sync");
                    left += 1;
                }
                prop_assert!(sent.get(left).is_none_or(|(epoch, _)| *epoch > acked), "kept back without need");
            }
        }
    }
}
