//! What of a VM's output waits, for what and for how long.
//!
//! Not here: what follows from it (`sync::trigger`, the node's watchdog).

use super::Output;
use super::compare::{Comparer, Verdict};
use super::gate::Voice;
use crate::watchdog::Flow;

impl Output {
    /// Who speaks alone waits for nobody's word. So while a copy is on its way, for which words are compared, what has left is kept no more: that
    /// may take hours, and is as much as the VM says.
    pub(super) fn keep_nothing_that_left(&mut self) {
        if self.gate.voice() == Voice::Alone
            && self.gate.held_frames() == 0
            && let Some(comparison) = self.comparison.as_mut().filter(|comparison| !comparison.line)
        {
            comparison.comparer.all_has_left();
        }
    }

    /// Whether output waits for a sync.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.gate.waits_for_sync()
    }

    /// The same for the watchdog. A partial acknowledgement that tells a client something new is progress, too: while the client mends what the
    /// backup has lost, nothing else of its connection leaves.
    #[must_use]
    pub fn flow(&self) -> Flow {
        Flow {
            waits: self.waits(),
            progress: self.tally.released + self.told_in_part,
        }
    }

    /// Since when something that a client may be waiting for waits for the backup's word.
    #[must_use]
    pub fn waits_for_word_since_us(&self) -> Option<u64> {
        match self.comparison.as_ref()?.comparer.verdict() {
            Verdict::Agree | Verdict::Waiting { telling: 0, .. } => None,
            Verdict::Waiting { .. } | Verdict::Differs { .. } => self.gate.oldest_us(),
        }
    }

    /// How long that has waited.
    #[must_use]
    pub fn waited_for_word_us(&self, now_us: u64) -> u64 {
        self.waits_for_word_since_us()
            .map_or(0, |since_us| now_us.saturating_sub(since_us))
    }

    /// How much later than what waits longest for the backup's word the primary said something that the backup has said since:
    /// words that are overtaken by that much were lost on the way, or the two VMs have gone different ways.
    #[must_use]
    pub fn overtaken_us(&self) -> u64 {
        let comparer = self.comparison.as_ref().map(|comparison| &comparison.comparer);
        let waits = comparer.and_then(Comparer::oldest_telling);
        let since_us = waits.and_then(|id| self.gate.sent_us(id));
        since_us.map_or(0, |since_us| self.said_to_us.saturating_sub(since_us))
    }

    /// How long it has been known that the end of a connection waits which the two copies ended in different ways behind the same bytes; 0 where
    /// none waits. What was said while the backup loaded is no older than that load's end.
    pub fn ends_waited_us(&mut self, now_us: u64) -> u64 {
        let comparer = self.comparison.as_ref().map(|comparison| &comparison.comparer);
        let waits = comparer.and_then(Comparer::oldest_end).is_some();
        self.ends_since_us = waits.then(|| self.ends_since_us.unwrap_or(now_us));
        let since_us = self.ends_since_us;
        since_us.map_or(0, |since_us| now_us.saturating_sub(since_us).max(1))
    }

    /// Since when acknowledgements alone wait for the backup's: it has lost something of what a client sent, and the client has not mended it yet.
    #[must_use]
    pub fn acks_wait_since_us(&self) -> Option<u64> {
        match self.comparison.as_ref()?.comparer.verdict() {
            Verdict::Waiting { telling: 0, .. } => self.gate.oldest_us(),
            Verdict::Agree | Verdict::Waiting { .. } | Verdict::Differs { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::packet::testing::Seg;
    use crate::output::packet::{ACK, FIN, RST};
    use crate::units::Epoch;
    use crate::waits::Wait;
    use crate::watchdog::{Sight, Watchdog};

    /// A slow link that loses frames: the backup lacks something of each burst, and the client mends that piece by piece.
    #[test]
    fn a_client_that_mends_what_the_backup_has_lost_is_no_stall_and_one_that_does_not_is() {
        let (mut output, mut watchdog) = (Output::new(Voice::Protected, Epoch(1)), Watchdog::default());
        output.compare_from(Epoch(1));
        let ack = |ack, sack: &[(u32, u32)]| Seg {
            sack: sack.to_vec(),
            ..Seg::from_vm(ACK, 500, ack)
        };
        let mut hears = |backup: Seg, now_us| {
            output.said(ack(9000, &[]).frame(), now_us);
            output.backup_said(Epoch(1), vec![backup.frame()]);
            let told = std::iter::from_fn(|| output.release(now_us)).count();
            assert_eq!((told, output.tally().released), (1, 0), "a partial one");
            let output = output.flow();
            watchdog.look(
                now_us,
                Sight {
                    output,
                    ..Sight::default()
                },
            )
        };
        let step_us = Wait::OutputLeaves.bound_us() - 1;
        let news = [
            ack(1000, &[]),
            ack(2000, &[]),
            ack(2000, &[(3000, 4000)]),
            ack(2000, &[(3000, 5000)]),
            ack(3000, &[(4000, 5000)]),
        ];
        for (step, backup) in news.iter().enumerate() {
            assert_eq!(hears(backup.clone(), step as u64 * step_us), None, "it gets on");
        }
        // It only repeats itself.
        let since_us = (news.len() - 1) as u64 * step_us;
        assert_eq!(hears(ack(3000, &[(4000, 5000)]), since_us + step_us), None);
        let stall = hears(ack(3000, &[(4000, 4500)]), since_us + step_us + 1);
        assert_eq!(stall.map(|stall| stall.wait), Some(Wait::OutputLeaves));
    }

    /// What was said while the backup loaded, long ago, has waited since it was compared; and it is nobody's time.
    #[test]
    fn an_end_that_differs_waits_since_that_is_known() {
        let mut output = Output::new(Voice::Protected, Epoch(1));
        output.compare_from(Epoch(1));
        output.said(Seg::from_vm(ACK, 500, 9000).with(b"bye").frame(), 0);
        output.backup_said(Epoch(1), vec![Seg::from_vm(ACK, 500, 9000).with(b"bye").frame()]);
        assert!(output.release(0).is_some());
        output.said(Seg::from_vm(ACK | FIN, 503, 9000).frame(), 1000);
        assert_eq!(output.ends_waited_us(300_000), 0);
        output.backup_said(Epoch(1), vec![Seg::from_vm(ACK | RST, 503, 9040).frame()]);
        assert!(!output.differs() && output.waits());
        assert_eq!(output.ends_waited_us(300_000), 1);
        assert_eq!(output.ends_waited_us(310_000), 10_000);
        output.draw_line();
        output.acknowledged(Epoch(1));
        assert!(output.release(320_000).is_some());
        assert_eq!((output.ends_waited_us(320_000), output.tally().held_us), (0, 0));
        output.backup_loaded(Epoch(1));
        assert_eq!(output.ends_waited_us(330_000), 0);
    }

    #[test]
    fn what_has_left_while_a_copy_is_on_its_way_is_kept_nowhere_and_is_known_as_told() {
        let mut output = Output::new(Voice::Alone, Epoch(1));
        output.compare_from(Epoch(1));
        let answer = |n: u32| Seg::from_vm(ACK, 500 + 6 * n, 9000).with(b"answer").frame();
        let kept = |output: &Output| {
            let comparer = &output.comparison.as_ref().expect("it compares").comparer;
            (comparer.verdict(), comparer.peek_matched().is_none())
        };
        for n in 0..1000 {
            output.said(answer(n), 0);
            // A repetition is free, and kept no longer.
            output.said(answer(n / 2), 0);
            assert_eq!(std::iter::from_fn(|| output.release(0)).count(), 2);
            assert_eq!(kept(&output), (Verdict::Agree, true), "after {n}");
        }
        output.draw_line();
        output.set_voice(Voice::Protected);
        output.said(answer(999), 0);
        output.said(answer(1000), 0);
        output.line_is_covered();
        output.backup_loaded(Epoch(1));
        assert!(output.release(0).is_some(), "it was told before the line");
        assert!(output.release(0).is_none(), "that is new");
        output.backup_said(Epoch(2), vec![answer(1000)]);
        assert!(output.release(0).is_some(), "both have said it");
    }

    #[test]
    fn an_acknowledgement_that_waits_is_no_word_and_is_known_to_wait() {
        let mut output = Output::new(Voice::Protected, Epoch(1));
        output.compare_from(Epoch(1));
        assert_eq!(output.acks_wait_since_us(), None);
        output.said(Seg::from_vm(ACK, 500, 9000).frame(), 70);
        assert!(output.waits());
        assert_eq!(
            (output.waits_for_word_since_us(), output.acks_wait_since_us()),
            (None, Some(70))
        );
        assert_eq!(output.waited_for_word_us(100), 0);
        // What a client may be waiting for takes its place.
        output.said(Seg::from_vm(ACK, 500, 9000).with(b"answer").frame(), 80);
        assert_eq!(
            (output.waits_for_word_since_us(), output.acks_wait_since_us()),
            (Some(70), None)
        );
        output.draw_line();
        output.acknowledged(Epoch(1));
        while output.release(90).is_some() {}
        assert_eq!(output.acks_wait_since_us(), None);
    }
}
