//! Frame out -> commit rule -> client: what one host does with the frames of its VM, and with those for it.
//!
//! `gate` holds a primary's frames by epoch, `compare` says which of them the backup has said too, `rewriter` translates
//! for connections whose numbers differ from the VM's own, `retransmit` is what a backup may have to send after a take-over, `answers` is
//! how long clients wait.
//! This file only routes between them, by role.
//!
//! Invariants: those of the four; and
//! 1. what the backup says is compared only with what the primary said in the same epoch;
//! 2. (memory) while nobody may speak, what would be held beyond the budget is dropped and nobody hears of it: not the
//!    client, not `rewriter`, not the comparison. To the VM that is a network that loses frames: its TCP sends again, a
//!    datagram may always be lost. Where the copies are compared nothing more is matched until a sync: a gap in what the
//!    comparison has seen could otherwise be repeated later as "told before" without ever having been compared;
//! 3. (memory) nothing that was promised to be held for a sync is ever dropped: while a backup is followed, the budget
//!    asks for a sync (`is_half_full`), and then the VM has to wait (`is_full`).
//!
//! Source: docs/output.md. Not here: when to sync (`sync::trigger`), who may speak (`agreed`, the node).

pub mod announcements;
pub mod answers;
pub mod compare;
pub mod gate;
mod list;
pub mod multipath;
pub mod packet;
pub mod retransmit;
pub mod rewriter;
mod speculative;
mod syncs;
mod waiting;

use crate::agreed::Frame;
use crate::sync::change_over::Tally;
use crate::units::Epoch;
use answers::{Answers, Percentiles};
use compare::{Comparer, Counters, Difference, Limits, Matched, Place, Verdict};
use gate::{Gate, Leaving, Voice, cost};
use packet::FlowKey;
use retransmit::RetransmitBuffer;
use rewriter::SequenceRewriter;
pub use rewriter::{Ends, MOST_OVER_TOLD};

/// What a comparer may keep: beyond it output waits for a sync, and nothing else happens.
const COMPARED: Limits = Limits {
    buffer_bytes: 64 << 20,
    flows: 65_536,
    http_dates: false,
};

/// What outbound frames of a VM may take, unless its file says otherwise.
pub const HELD_BYTES: usize = 64 << 20;
/// What the backup may have said before the primary has heard that it has loaded.
const EARLY_BYTES: usize = 8 << 20;

/// What a sync is believed to cost a client at most: a backup may also have nothing to say.
const LONGEST_STALL_US: u64 = 500_000;

/// The output of one VM on one host.
pub struct Output {
    gate: Gate,
    rewriter: SequenceRewriter,
    retransmit: RetransmitBuffer,
    comparison: Option<Comparison>,
    tally: Tally,
    /// Partial acknowledgements that told a client something new.
    told_in_part: u64,
    answers: Answers,
    /// How long the first words after a load were held, lately: what a sync costs a client.
    stall_us: u64,
    /// When the backup last said what the primary had said.
    matched_us: u64,
    /// Since when it is known that the ends of connections differ.
    ends_since_us: Option<u64>,
    /// When the primary said the newest of what the backup has said, too.
    said_to_us: u64,
    budget_bytes: usize,
    http_dates: bool,
    /// Frames that the budget cost.
    dropped: u64,
    /// Words of the backup that found no room here.
    unheard: u64,
    /// Something was dropped that the comparison should have seen: it begins anew with the next line.
    blind: bool,
    /// What was counted before nothing was compared any more.
    counted: Option<Counters>,
}

struct Comparison {
    comparer: Comparer,
    /// The epoch in which the backup's VM runs.
    backup_epoch: Epoch,
    /// Said by the backup in the epoch after that one, of whose beginning the primary has not heard yet.
    early: Vec<Frame>,
    early_bytes: usize,
    /// Some of that found no room.
    early_lost: bool,
    /// A line is drawn, and its sync not acknowledged yet.
    line: bool,
    /// The backup has loaded a sync, and has not said anything yet that the primary has said since.
    catching_up: bool,
}

/// What leaves next.
enum Next {
    BySync(Leaving),
    Matched(Leaving),
    PartialAck(Frame, bool),
}

impl Output {
    /// Output whose first frames belong to `epoch`.
    #[must_use]
    pub fn new(voice: Voice, epoch: Epoch) -> Self {
        Self {
            gate: Gate::new(voice, epoch),
            rewriter: SequenceRewriter::new(),
            retransmit: RetransmitBuffer::new(),
            comparison: None,
            tally: Tally::default(),
            told_in_part: 0,
            answers: Answers::default(),
            stall_us: 0,
            matched_us: 0,
            ends_since_us: None,
            said_to_us: 0,
            budget_bytes: HELD_BYTES,
            http_dates: false,
            dropped: 0,
            unheard: 0,
            blind: false,
            counted: None,
        }
    }

    /// The same, where dates of HTTP answers that are near each other are no difference.
    #[must_use]
    pub fn with_http_dates(mut self, near: bool) -> Self {
        self.http_dates = near;
        self
    }

    /// The same with another budget for what is held.
    #[must_use]
    pub fn with_budget(mut self, bytes: usize) -> Self {
        self.budget_bytes = bytes;
        self
    }

    /// Who speaks now.
    #[must_use]
    pub fn voice(&self) -> Voice {
        self.gate.voice()
    }

    /// Changes who speaks. Call `release` afterwards.
    pub fn set_voice(&mut self, voice: Voice) {
        if voice == Voice::Alone {
            self.comparison = None;
            self.blind = false;
        }
        self.gate.set_voice(voice);
    }

    /// The epoch of what the VM says now.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.gate.epoch()
    }

    /// Starts at `epoch`: what is held belongs to it.
    pub fn restart_at(&mut self, epoch: Epoch) {
        self.gate.restart_at(epoch);
    }

    /// The VM here sent a frame.
    pub fn said(&mut self, frame: Frame, now_us: u64) {
        if self.gate.voice() == Voice::Backup {
            self.rewriter.overheard(&frame);
            self.retransmit.said(&frame);
            return;
        }
        if self.gate.voice() == Voice::Shut && self.gate.held_bytes() + cost(&frame) > self.budget_bytes {
            // Invariant 2.
            self.dropped += 1;
            self.blind |= self.comparison.take().is_some();
            return;
        }
        self.rewriter.will_leave(&frame);
        match &mut self.comparison {
            Some(comparison) => {
                let id = self.gate.arrived(frame.clone(), now_us);
                comparison.comparer.primary_said(id, &frame);
            }
            None => {
                self.gate.arrived(frame, now_us);
            }
        }
    }

    /// A frame for the VM has come in from the network, and is on its way: agreed on first, or not.
    pub fn asked(&mut self, frame: &Frame, now_us: u64) {
        self.answers.asked(frame, now_us);
    }

    /// An input on its way to the VM here, in the VM's own numbers.
    #[must_use]
    pub fn heard(&mut self, frame: &Frame) -> Frame {
        if self.gate.voice() == Voice::Backup {
            let frame = self.rewriter.inbound_to_backup(frame);
            self.retransmit.heard(&frame);
            frame
        } else if self.rewriter.is_empty() {
            frame.clone()
        } else {
            self.rewriter.inbound(frame)
        }
    }

    /// The backup's VM sent these, in `epoch`.
    pub fn backup_said(&mut self, epoch: Epoch, frames: Vec<Frame>) {
        let Some(comparison) = &mut self.comparison else {
            return;
        };
        if epoch == comparison.backup_epoch {
            for frame in &frames {
                comparison.comparer.backup_said(frame);
            }
        } else if epoch == comparison.backup_epoch.next() {
            for frame in frames {
                if comparison.early_bytes + cost(&frame) > EARLY_BYTES {
                    comparison.early_lost = true;
                    self.unheard += 1;
                } else {
                    comparison.early_bytes += cost(&frame);
                    comparison.early.push(frame);
                }
            }
        }
    }

    /// Words of the backup were dropped before they came here: what waits for them is not waited for.
    pub fn backup_was_not_heard(&mut self, frames: u64) {
        self.unheard += frames;
        if let Some(comparison) = &mut self.comparison {
            comparison.comparer.backup_was_not_heard();
        }
    }

    /// The next frame that may leave now, as the client is to see it.
    pub fn release(&mut self, now_us: u64) -> Option<Frame> {
        let (leaving, matched) = match self.next_leaving()? {
            Next::BySync(leaving) => (leaving, false),
            Next::Matched(leaving) => (leaving, true),
            // No frame of the VM's: it counts as nothing that has left.
            Next::PartialAck(frame, gets_on) => {
                self.told_in_part += u64::from(gets_on);
                return Some(self.as_clients_see(frame));
            }
        };
        self.answers.left(&leaving, now_us);
        self.tally.released += 1;
        self.tally.by_sync += u64::from(!matched);
        let held_us = now_us.saturating_sub(leaving.arrived_us);
        let comparison = self.comparison.as_mut();
        let ends = comparison.is_some_and(|comparison| comparison.comparer.end_leaves(leaving.id));
        // Nobody waits for it: it costs clients no time.
        self.tally.held_us += if ends { 0 } else { held_us };
        self.tally.bytes += leaving.frame.bytes.len() as u64;
        if let Some(comparison) = self.comparison.as_mut().filter(|_| matched) {
            self.matched_us = now_us;
            if std::mem::take(&mut comparison.catching_up) {
                self.stall_us = (3 * self.stall_us + held_us) / 4;
            }
        }
        Some(self.as_clients_see(leaving.frame))
    }

    fn as_clients_see(&mut self, frame: Frame) -> Frame {
        match self.rewriter.is_empty() {
            true => frame,
            false => self.rewriter.outbound(&frame),
        }
    }

    fn next_leaving(&mut self) -> Option<Next> {
        if let Some(leaving) = self.gate.release() {
            return Some(Next::BySync(leaving));
        }
        if self.gate.voice() != Voice::Protected {
            self.keep_nothing_that_left();
            return None;
        }
        let comparer = &mut self.comparison.as_mut()?.comparer;
        while let Some(matched) = comparer.peek_matched() {
            // The end of a join: its line is drawn, and that its backup is complete is not agreed yet. (Gate, invariant 2.)
            let id = match matched {
                Matched::Frame(id) => Some(*id),
                Matched::PartialAck { .. } => None,
            };
            if self.gate.waits_for_older(id) {
                return None;
            }
            let matched = comparer.next_matched()?;
            let id = match matched {
                Matched::Frame(id) => id,
                Matched::PartialAck { frame, gets_on } => return Some(Next::PartialAck(frame, gets_on)),
            };
            let by_the_backup = comparer.newest_said() >= Some(id);
            if let Some(leaving) = self.gate.release_matched(id) {
                if by_the_backup {
                    self.said_to_us = self.said_to_us.max(leaving.arrived_us);
                }
                return Some(Next::Matched(leaving));
            }
        }
        None
    }

    /// When something last left because the backup had said the same.
    #[must_use]
    pub fn matched_us(&self) -> u64 {
        self.matched_us
    }

    /// Whether the backup said something else, or cannot be compared any more.
    #[must_use]
    pub fn differs(&self) -> bool {
        self.difference().is_some()
    }

    /// Which of these it is.
    #[must_use]
    pub fn difference(&self) -> Option<Difference> {
        let comparison = self.comparison.as_ref();
        match comparison.map(|comparison| comparison.comparer.verdict()) {
            Some(Verdict::Differs { why }) => Some(why),
            _ => self.blind.then_some(Difference::Full),
        }
    }

    /// Where the first difference is, if it is in what was said on some flow.
    #[must_use]
    pub fn differs_at(&self) -> Option<&Place> {
        self.comparison.as_ref()?.comparer.place()
    }

    /// The flow of what waits longest for the backup's word.
    #[must_use]
    pub fn waits_on(&self) -> Option<FlowKey> {
        self.comparison.as_ref()?.comparer.waits_on()
    }

    /// What the comparison has counted.
    #[must_use]
    pub fn counters(&self) -> Option<&Counters> {
        let comparison = self.comparison.as_ref();
        let counters = comparison.map(|comparison| comparison.comparer.counters());
        counters.or(self.counted.as_ref())
    }

    /// How long a client waits because of a sync while outputs are compared, as a running mean: the backup's VM has
    /// to load, to work off its inputs and, under TCG, to translate anew.
    #[must_use]
    pub fn stall_us(&self) -> u64 {
        self.stall_us
    }

    /// A sync begins because the backup said something else, or did not say what was waited for, for `late_us`.
    ///
    /// A backup that has not said anything since its load takes longer than that. One that is never given the time, because the
    /// next sync makes it begin anew, would never say anything again; so that is learnt first, and held against it only then.
    pub fn sync_is_forced(&mut self, late_us: Option<u64>) {
        let loading = self
            .comparison
            .as_ref()
            .is_some_and(|comparison| comparison.catching_up);
        match late_us {
            Some(late_us) if loading && self.stall_us < LONGEST_STALL_US => {
                self.stall_us = self.stall_us.max(late_us.min(LONGEST_STALL_US));
            }
            late => {
                self.tally.forced += 1;
                self.tally.late += u64::from(late.is_some());
            }
        }
    }

    /// What has left so far.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// How long clients waited for the VM in the last second, by a sample.
    #[must_use]
    pub fn answers(&self, now_us: u64) -> Option<Percentiles> {
        self.answers.last_second(now_us)
    }

    /// How many frames wait.
    #[must_use]
    pub fn held_frames(&self) -> usize {
        self.gate.held_frames()
    }

    /// How much memory outbound frames take, and may take, and how many it has cost.
    #[must_use]
    pub fn held(&self) -> (usize, usize, u64) {
        (self.gate.held_bytes(), self.budget_bytes, self.dropped)
    }

    /// The same of what a backup keeps for a take-over.
    #[must_use]
    pub fn retransmit(&self) -> (usize, usize, u64) {
        (
            self.retransmit.bytes(),
            retransmit::MOST_BYTES,
            self.retransmit.dropped(),
        )
    }

    /// The same of the backup's words that the primary has not said yet.
    #[must_use]
    pub fn compared(&self) -> (usize, usize, u64) {
        let bytes = |comparison: &Comparison| comparison.comparer.kept_bytes() + comparison.early_bytes;
        let most = COMPARED.buffer_bytes + EARLY_BYTES;
        (self.comparison.as_ref().map_or(0, bytes), most, self.unheard)
    }

    /// So much is held that a sync should let it go.
    #[must_use]
    pub fn is_half_full(&self) -> bool {
        self.gate.voice() == Voice::Protected && self.gate.held_bytes() > self.budget_bytes / 2
    }

    /// So much is held for syncs that the VM has to wait before it says more (invariant 3).
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.gate.voice() == Voice::Protected && self.gate.held_bytes() >= self.budget_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(n: u8) -> Frame {
        Frame {
            nic: 0,
            bytes: vec![n; 1000].into(),
        }
    }

    fn let_out(output: &mut Output) -> Vec<u8> {
        std::iter::from_fn(|| output.release(0).map(|frame| frame.bytes[0])).collect()
    }

    #[test]
    fn without_a_majority_what_is_beyond_the_budget_is_dropped_and_the_rest_leaves_later() {
        let mut output = Output::new(Voice::Shut, Epoch(1)).with_budget(10 * cost(&said(0)));
        for n in 0..100 {
            output.said(said(n), 0);
            assert!(output.held().0 <= output.held().1, "beyond its budget");
        }
        assert_eq!(output.held(), (10 * cost(&said(0)), 10 * cost(&said(0)), 90));
        assert!(!output.is_full(), "there is no sync to wait for: the VM goes on");
        output.set_voice(Voice::Alone);
        assert_eq!(let_out(&mut output), (0..10).collect::<Vec<_>>());
        output.said(said(100), 0);
        assert_eq!(let_out(&mut output), [100], "what the VM sends again leaves");
    }

    #[test]
    fn what_waits_for_a_sync_is_never_dropped_but_asks_for_one_and_then_makes_the_vm_wait() {
        let mut output = Output::new(Voice::Protected, Epoch(1)).with_budget(10 * cost(&said(0)));
        for n in 0..5 {
            output.said(said(n), 0);
        }
        assert!(!output.is_half_full() && !output.is_full());
        output.said(said(5), 0);
        assert!(output.is_half_full() && !output.is_full());
        for n in 6..14 {
            output.said(said(n), 0);
        }
        assert!(output.is_full());
        output.draw_line();
        output.acknowledged(Epoch(1));
        assert_eq!(let_out(&mut output), (0..14).collect::<Vec<_>>());
        assert_eq!((output.held().0, output.held().2), (0, 0));
        assert!(!output.is_half_full() && !output.is_full());
    }

    /// A segment from the VM's port 80, its header as long as it has to be and no checksum, which nobody looks at here.
    pub(in crate::output) fn segment(seq: u32, payload: &[u8]) -> Frame {
        let mut bytes = vec![2; 12];
        bytes.extend([8, 0, 0x45, 0]);
        bytes.extend((40 + payload.len() as u16).to_be_bytes());
        bytes.extend([0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 2, 10, 0, 0, 9, 0, 80, 20, 20]);
        bytes.extend(seq.to_be_bytes());
        bytes.extend([0, 0, 0, 0, 5 << 4, 8, 0, 0, 0, 0, 0, 0]);
        bytes.extend(payload);
        Frame {
            nic: 0,
            bytes: bytes.into(),
        }
    }

    fn joined() -> Output {
        let mut output = Output::new(Voice::Protected, Epoch(1)).with_budget(3 * cost(&segment(0, b"abc")));
        output.compare_from(Epoch(1));
        output.draw_line();
        output.acknowledged(Epoch(1));
        output.backup_loaded(Epoch(1));
        output
    }

    #[test]
    fn a_gap_in_what_was_compared_is_closed_by_a_sync_and_never_taken_for_told() {
        let mut output = joined();
        output.backup_said(Epoch(2), vec![segment(100, b"abc")]);
        output.said(segment(100, b"abc"), 0);
        assert!(output.release(0).is_some(), "both have said it");
        output.set_voice(Voice::Shut);
        for n in 0..5 {
            // The third to fifth are dropped; the backup says other bytes there.
            output.said(segment(103 + 3 * n, b"xyz"), 0);
            output.backup_said(Epoch(2), vec![segment(103 + 3 * n, b"uvw")]);
        }
        assert_eq!(output.held().2, 2);
        // The same leader again, and the backup still follows.
        output.set_voice(Voice::Protected);
        assert_eq!(output.difference(), Some(Difference::Full), "it has to be synced");
        for n in 0..5 {
            output.said(segment(103 + 3 * n, b"xyz"), 0);
            output.backup_said(Epoch(2), vec![segment(103 + 3 * n, b"uvw")]);
        }
        assert_eq!(output.release(0), None, "the backup has said something else");
        output.draw_line();
        output.acknowledged(Epoch(2));
        assert_eq!(
            std::iter::from_fn(|| output.release(0)).count(),
            8,
            "a sync covers it"
        );
        output.backup_loaded(Epoch(2));
        assert!(!output.differs());
        output.said(segment(118, b"def"), 0);
        output.backup_said(Epoch(3), vec![segment(118, b"def")]);
        assert!(
            output.release(0).is_some(),
            "and from there on they are compared again"
        );
    }

    #[test]
    fn what_a_backup_says_too_early_is_bounded_and_its_loss_brings_a_sync() {
        let mut output = joined();
        let word = || vec![segment(100, &[7; 1000])];
        let room = EARLY_BYTES / cost(&word()[0]);
        output.draw_line();
        for _ in 0..room + 10 {
            output.backup_said(Epoch(3), word());
            assert!(output.compared().0 <= output.compared().1, "beyond its budget");
        }
        assert_eq!(output.compared().2, 10);
        output.acknowledged(Epoch(2));
        assert!(!output.differs());
        output.backup_loaded(Epoch(2));
        let lost = "what it said then is not known";
        assert_eq!(output.difference(), Some(Difference::Full), "{lost}");
        assert!(output.compared().0 < EARLY_BYTES, "it is kept twice");
    }

    #[test]
    fn a_backup_that_was_never_given_the_time_to_speak_is_given_more() {
        let mut output = Output::new(Voice::Protected, Epoch(1));
        output.compare_from(Epoch(1));
        // It has not just loaded: that it says nothing has another reason.
        output.sync_is_forced(Some(250_000));
        assert_eq!((output.stall_us(), output.tally().forced), (0, 1));
        output.draw_line();
        output.acknowledged(Epoch(1));
        output.backup_loaded(Epoch(1));
        output.sync_is_forced(Some(250_000));
        assert_eq!((output.stall_us(), output.tally().forced), (250_000, 1));
        output.sync_is_forced(Some(60_000_000));
        assert_eq!((output.stall_us(), output.tally().forced), (LONGEST_STALL_US, 1));
        // It has had its time; and what differs, differs.
        output.sync_is_forced(Some(60_000_000));
        output.sync_is_forced(None);
        assert_eq!((output.stall_us(), output.tally().forced), (LONGEST_STALL_US, 3));
        assert_eq!(output.tally().late, 2);
    }
}
