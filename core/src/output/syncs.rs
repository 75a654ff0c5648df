//! What a sync means for output: a line through what the VM says, and what may be said of it once the backup holds, has loaded, or takes over.
//!
//! Flow: the primary draws a line -> the backup acknowledges the sync -> it loads it and speaks as the primary does -> perhaps it takes over.
//! Invariants: those of `output`. Not here: frames on their way (`output`), the sync itself (`sync`).

use super::compare::{Comparer, Limits};
use super::{COMPARED, Comparison, Output, rewriter};
use crate::units::Epoch;
use bytes::Bytes;

impl Output {
    /// From the line that is drawn next on, the backup's words count. For a primary, before the last sync of a join; a program's, before
    /// its memory and its data go ahead.
    pub fn compare_from(&mut self, epoch: Epoch) {
        self.comparison = Some(Comparison {
            comparer: self.new_comparer(),
            backup_epoch: epoch,
            early: Vec::new(),
            early_bytes: 0,
            early_lost: false,
            line: false,
            catching_up: false,
        });
    }

    pub(super) fn new_comparer(&self) -> Comparer {
        Comparer::new(Limits {
            http_dates: self.http_dates,
            ..COMPARED
        })
    }

    /// The VM here (a primary's) stands still at the end of its epoch. The table of `rewriter` at this moment.
    pub fn draw_line(&mut self) -> Bytes {
        if std::mem::take(&mut self.blind) {
            self.compare_from(self.gate.epoch());
        }
        self.gate.end_epoch();
        if let Some(comparison) = &mut self.comparison {
            comparison.line = true;
            comparison.comparer.line_drawn();
        }
        self.rewriter.table()
    }

    /// Sync `epoch` was acknowledged by the backup (on the primary).
    pub fn acknowledged(&mut self, epoch: Epoch) {
        self.gate.acknowledged(epoch);
        self.line_is_covered();
    }

    /// The newest epoch whose sync the backup has acknowledged.
    #[must_use]
    pub fn newest_acknowledged(&self) -> Epoch {
        self.gate.newest_acknowledged()
    }

    /// The backup holds all that the primary was up to the line. At a join the group's word comes after that.
    pub fn line_is_covered(&mut self) {
        if let Some(comparison) = &mut self.comparison
            && std::mem::take(&mut comparison.line)
        {
            comparison.comparer.sync_acknowledged();
            self.ends_since_us = None;
        }
    }

    /// The backup has loaded sync `epoch` (on the primary).
    pub fn backup_loaded(&mut self, epoch: Epoch) {
        let Some(comparison) = &mut self.comparison else {
            return;
        };
        comparison.comparer.backup_loaded();
        self.ends_since_us = None;
        comparison.catching_up = true;
        comparison.backup_epoch = epoch.next();
        comparison.early_bytes = 0;
        for frame in std::mem::take(&mut comparison.early) {
            comparison.comparer.backup_said(&frame);
        }
        if std::mem::take(&mut comparison.early_lost) {
            comparison.comparer.backup_was_not_heard();
        }
    }

    /// Sync `epoch` is whole (on the backup): its VM is the primary's from now on, and speaks as that one does.
    pub fn applied(&mut self, epoch: Epoch, rewriter: &Bytes) -> Result<(), rewriter::TableError> {
        self.gate.applied(epoch);
        self.retransmit.applied();
        self.rewriter.load(rewriter)
    }

    /// The backup here becomes the primary: what its clients may not have heard waits in the gate afterwards.
    pub fn take_over(&mut self, now_us: u64) {
        self.rewriter.take_over();
        for frame in self.retransmit.take() {
            self.gate.arrived(frame, now_us);
        }
    }
}
