//! What it decides: when a frame of the VM may leave for the network.
//!
//! Flow: the last station of every outbound frame, on the primary as on the backup.
//!
//! Invariants:
//! 1. (Output commit) A frame of epoch k leaves only after sync k was acknowledged, or when the backup has said the
//!    same (`compare` decides that), or while no other host counts as holding a complete copy.
//! 2. Frames leave in the order in which the VM sent them. One that the backup matched may leave before its turn, but not before those of an
//!    earlier epoch: a client throws away what comes with an older timestamp than it has heard (PAWS).
//! 3. On the backup nothing leaves.
//! 4. A gate that is shut (no majority) lets nothing pass, whatever else holds.
//!
//! Source: Remus (NSDI'08), "output buffering"; PLOVER. Not here: when to sync, comparison of outputs, what a backup
//! keeps for a take-over (`retransmit`).

use super::compare::FrameId;
use crate::agreed::Frame;
use crate::units::Epoch;
use std::collections::VecDeque;

/// What a held frame costs besides its bytes: its place here, and in the comparison.
const OVERHEAD_BYTES: usize = 256;

/// What it takes to hold a frame.
#[must_use]
pub fn cost(frame: &Frame) -> usize {
    frame.bytes.len() + OVERHEAD_BYTES
}

/// Who may speak for the VM, as far as its own host knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Voice {
    /// A primary whose backup is complete: frames wait for their sync.
    Protected,
    /// A primary that alone holds a complete copy, and the group has agreed on that: frames leave at once.
    Alone,
    /// A backup: frames wait in the retransmit buffer, for a take-over.
    Backup,
    /// No majority, or no role yet: frames wait.
    Shut,
}

/// The outbound frames of one VM.
#[derive(Debug)]
pub struct Gate {
    voice: Voice,
    epoch: Epoch,
    acknowledged: Epoch,
    /// In the order of their ids, which have no gaps.
    held: VecDeque<Held>,
    next_id: u64,
    waiting: usize,
    /// Of these, of the running epoch.
    waiting_now: usize,
    held_bytes: usize,
}

#[derive(Debug)]
struct Held {
    epoch: Epoch,
    arrived_us: u64,
    /// None: it has left before its turn.
    frame: Option<Frame>,
}

/// A frame that may leave, and how long it was held.
#[derive(Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Its name.
    pub id: FrameId,
    /// The frame.
    pub frame: Frame,
    /// When the VM sent it.
    pub arrived_us: u64,
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
            next_id: 0,
            waiting: 0,
            waiting_now: 0,
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

    /// The VM sent a frame. Its name from now on.
    pub fn arrived(&mut self, frame: Frame, now_us: u64) -> FrameId {
        self.held_bytes += cost(&frame);
        self.waiting += 1;
        self.waiting_now += 1;
        self.held.push_back(Held {
            epoch: self.epoch,
            arrived_us: now_us,
            frame: Some(frame),
        });
        self.next_id += 1;
        FrameId(self.next_id - 1)
    }

    /// The VM stands still at the end of its epoch: frames from now on belong to the next.
    pub fn end_epoch(&mut self) -> Epoch {
        let ended = self.epoch;
        self.epoch = ended.next();
        self.waiting_now = 0;
        ended
    }

    /// Starts at `epoch`: what is held belongs to it.
    pub fn restart_at(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.waiting_now = self.waiting;
        for held in &mut self.held {
            held.epoch = epoch;
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

    /// The newest epoch whose sync the backup has acknowledged.
    #[must_use]
    pub fn newest_acknowledged(&self) -> Epoch {
        self.acknowledged
    }

    /// Sync `epoch` was applied (on the backup): what its VM says from now on is of the next one.
    pub fn applied(&mut self, epoch: Epoch) {
        assert_eq!(self.voice, Voice::Backup, "only a backup applies");
        self.epoch = epoch.next();
    }

    /// Takes the next frame that may leave now.
    pub fn release(&mut self) -> Option<Leaving> {
        loop {
            let may_leave = match self.voice {
                Voice::Backup | Voice::Shut => false,
                Voice::Alone => true,
                Voice::Protected => self
                    .held
                    .front()
                    .is_some_and(|held| held.frame.is_none() || held.epoch <= self.acknowledged),
            };
            if !may_leave {
                return None;
            }
            let id = FrameId(self.next_id - self.held.len() as u64);
            let held = self.held.pop_front()?;
            if let Some(frame) = held.frame {
                return Some(self.leaving(id, frame, held.epoch, held.arrived_us));
            }
        }
    }

    /// Takes a frame that the backup has said too, out of its turn; none if it has left, or nobody may speak.
    pub fn release_matched(&mut self, id: FrameId) -> Option<Leaving> {
        if self.voice != Voice::Protected {
            return None;
        }
        let first = self.next_id - self.held.len() as u64;
        let place = id.0.checked_sub(first)?;
        let held = self.held.get_mut(usize::try_from(place).ok()?)?;
        let (frame, epoch, arrived_us) = (held.frame.take()?, held.epoch, held.arrived_us);
        Some(self.leaving(id, frame, epoch, arrived_us))
    }

    /// Whether a frame of an earlier epoch than this one's still waits. Without an id: than the epoch that runs now. Asked when nothing
    /// leaves by a sync.
    #[must_use]
    pub fn waits_for_older(&self, id: Option<FrameId>) -> bool {
        let first = self.next_id - self.held.len() as u64;
        let place = id.and_then(|id| id.0.checked_sub(first)?.try_into().ok());
        let epoch = match id {
            Some(_) => place
                .and_then(|place: usize| self.held.get(place))
                .map(|held| held.epoch),
            None => Some(self.epoch),
        };
        let oldest = self.held.front().map(|held| held.epoch);
        oldest.zip(epoch).is_some_and(|(oldest, epoch)| oldest < epoch)
    }

    fn leaving(&mut self, id: FrameId, frame: Frame, epoch: Epoch, arrived_us: u64) -> Leaving {
        self.held_bytes -= cost(&frame);
        self.waiting -= 1;
        self.waiting_now -= usize::from(epoch == self.epoch);
        Leaving {
            id,
            frame,
            arrived_us,
        }
    }

    /// When a frame that waits was sent.
    #[must_use]
    pub fn sent_us(&self, id: FrameId) -> Option<u64> {
        let first = self.next_id - self.held.len() as u64;
        let place = id.0.checked_sub(first)?;
        let held = self.held.get(usize::try_from(place).ok()?)?;
        held.frame.is_some().then_some(held.arrived_us)
    }

    /// When the frame that has waited longest was sent.
    #[must_use]
    pub fn oldest_us(&self) -> Option<u64> {
        self.held
            .iter()
            .find(|held| held.frame.is_some())
            .map(|held| held.arrived_us)
    }

    /// How many frames wait.
    #[must_use]
    pub fn held_frames(&self) -> usize {
        self.waiting
    }

    /// What it takes to hold what waits.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Whether output of the running epoch waits for a sync that has not begun.
    #[must_use]
    pub fn waits_for_sync(&self) -> bool {
        self.waiting_now > 0
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
        std::iter::from_fn(|| gate.release().map(|leaving| leaving.frame)).collect()
    }

    #[test]
    fn a_frame_waits_for_its_own_epochs_sync() {
        let mut gate = Gate::new(Voice::Protected, Epoch(1));
        gate.arrived(frame(1), 0);
        assert_eq!(gate.end_epoch(), Epoch(1));
        gate.arrived(frame(2), 0);
        assert_eq!(drain(&mut gate), vec![]);
        gate.acknowledged(Epoch(1));
        assert_eq!(drain(&mut gate), vec![frame(1)]);
        assert!(gate.waits_for_sync());
    }

    #[test]
    fn a_matched_frame_leaves_before_its_turn_and_once() {
        let mut gate = Gate::new(Voice::Protected, Epoch(1));
        let first = gate.arrived(frame(1), 0);
        let second = gate.arrived(frame(2), 7);
        let left = gate.release_matched(second);
        assert_eq!(
            left,
            Some(Leaving {
                id: second,
                frame: frame(2),
                arrived_us: 7
            })
        );
        assert_eq!(gate.release_matched(second), None);
        assert!(gate.waits_for_sync());
        assert_eq!(
            gate.release_matched(first).map(|leaving| leaving.frame),
            Some(frame(1))
        );
        assert!(!gate.waits_for_sync());
        assert_eq!(drain(&mut gate), vec![]);
        gate.arrived(frame(3), 0);
        gate.end_epoch();
        gate.acknowledged(Epoch(1));
        assert_eq!(drain(&mut gate), vec![frame(3)]);
    }

    #[test]
    fn a_matched_frame_waits_for_what_an_earlier_epoch_said() {
        let mut gate = Gate::new(Voice::Protected, Epoch(1));
        let older = gate.arrived(frame(1), 0);
        let of_its_own = gate.arrived(frame(2), 0);
        assert!(!gate.waits_for_older(Some(of_its_own)) && !gate.waits_for_older(None));
        gate.end_epoch();
        let newer = gate.arrived(frame(3), 0);
        assert!(!gate.waits_for_older(Some(older)));
        assert!(gate.waits_for_older(Some(newer)) && gate.waits_for_older(None));
        gate.acknowledged(Epoch(1));
        assert_eq!(drain(&mut gate), vec![frame(1), frame(2)]);
        assert!(!gate.waits_for_older(Some(newer)) && !gate.waits_for_older(None));
        // What has left waits for nothing.
        assert!(!gate.waits_for_older(Some(older)));
    }

    #[test]
    fn a_match_is_nothing_where_nobody_may_speak() {
        for voice in [Voice::Shut, Voice::Backup] {
            let mut gate = Gate::new(Voice::Protected, Epoch(1));
            let id = gate.arrived(frame(1), 0);
            gate.set_voice(voice);
            assert_eq!(gate.release_matched(id), None);
        }
    }

    #[test]
    fn a_primary_without_a_majority_says_nothing() {
        let mut gate = Gate::new(Voice::Alone, Epoch(1));
        gate.set_voice(Voice::Shut);
        gate.arrived(frame(1), 0);
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
                        gate.arrived(frame(n as u32), 0);
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
                while let Some(Leaving { frame, .. }) = gate.release() {
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
