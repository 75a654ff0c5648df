//! Changes of mode: times in which the backup's VM runs, too, and says the same.
//!
//! The copy is the VM itself, as both get the same inputs: a frame that is held leaves at once, and a death costs no state. What comes from and
//! goes to clients passes the translation, whose table the backup has from each checkpoint, and adds to while its copy runs.

use super::plan::Broken;
use super::{Event, Snapshot, TAKE_OVER_US, Vm, World, limits};
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::output::rewriter::SequenceRewriter;
use dunlin_core::output::{Ends, packet::FlowKey};
use dunlin_core::speculation::{Replica, Speculation};
use dunlin_core::sync::way_out::{Way, WayOut};
use dunlin_core::units::Epoch;
use std::collections::VecDeque;

#[derive(Default)]
pub(super) struct Modes {
    /// The backup's VM runs.
    pub(super) runs: bool,
    pub(super) wished: bool,
    /// The epoch after which that is to be otherwise.
    change: Option<Epoch>,
    way: WayOut,
    free: bool,
    translation: SequenceRewriter,
    backups: SequenceRewriter,
    /// Of the checkpoints that are not safe yet.
    tables: VecDeque<(Epoch, Bytes)>,
}

impl World {
    /// What a backup would go on from.
    pub(super) fn safe_vm(&self) -> &Vm {
        match self.modes.runs {
            true => &self.vm,
            false => &self.snapshots.front().expect("a safe state").vm,
        }
    }

    pub(super) fn is_held(&mut self, frame: Frame) {
        // What an earlier epoch has said leaves first; and what comes after the line of a change to a passive epoch no copy will say.
        if self.modes.runs && self.modes.change.is_none() && self.held.is_empty() {
            self.core.leaves(self.now, &frame);
            return self.leaves(frame);
        }
        self.held.push_back((self.epoch, frame));
    }

    pub(super) fn lift(&mut self, key: FlowKey, ticks: u32, ends: Ends) {
        if self.plan.broken != Some(Broken::LiftsNothing) {
            self.modes.translation.lift(key, ticks, ends);
        }
    }

    pub(super) fn as_clients_see(&mut self, frame: Frame) -> Frame {
        if !self.plan.translated() {
            return frame;
        }
        self.modes.translation.will_leave(&frame);
        self.modes.translation.tell(&frame, false)
    }

    pub(super) fn heard(&mut self, frame: Frame) -> Frame {
        if !self.plan.translated() {
            return frame;
        }
        if self.modes.runs {
            self.modes.backups.inbound_to_backup(&frame);
        }
        self.modes.translation.inbound(&frame)
    }

    /// The backup's copy says it, too.
    pub(super) fn overheard(&mut self, frame: &Frame) {
        if self.modes.runs {
            self.modes.backups.overheard(frame);
        }
    }

    pub(super) fn line_drawn(&mut self) {
        if !self.plan.translated() {
            return;
        }
        let modes = &mut self.modes;
        modes.tables.push_back((self.epoch, modes.translation.table()));
        if modes.change.is_none() && (modes.runs && !modes.wished || !modes.runs && modes.free) {
            modes.change = Some(self.epoch);
            let sound = modes.runs || self.core.all_are_held() || self.plan.broken.is_some();
            assert!(
                sound,
                "the backup's VM is to run, and connections are ahead of their clients"
            );
        }
    }

    pub(super) fn mode_is_safe(&mut self, epoch: Epoch) {
        let modes = &mut self.modes;
        while modes.tables.front().is_some_and(|(of, _)| *of <= epoch) {
            let (_, table) = modes.tables.pop_front().expect("the first");
            modes.backups.load(&table).expect("what a primary says");
        }
        if modes.change.is_some_and(|change| change <= epoch) {
            modes.change = None;
            modes.free = false;
            modes.runs = !modes.runs;
            self.seen.runs += u64::from(modes.runs);
            modes.way.changed();
        }
        if modes.runs {
            // It has what was said since the line, too.
            let table = modes.translation.table();
            modes.backups.load(&table).expect("what a primary says");
        } else {
            self.look_at_modes();
        }
    }

    /// What the primary does at each turn.
    pub(super) fn look_at_modes(&mut self) {
        if !self.plan.translated() || self.dead {
            return;
        }
        if self.modes.runs && !self.sockets.is_empty() && self.plan.broken.is_none() {
            self.fails(|| "C: a shadow socket beside a backup that runs".into());
        }
        let modes = &mut self.modes;
        if modes.runs || modes.change.is_some() && modes.free {
            return;
        }
        let held = self.core.all_are_held() || self.plan.broken == Some(Broken::RunsTooSoon);
        let way = modes.way.look(self.now, modes.wished, held);
        modes.free = way == Way::Free;
        match way {
            Way::Holds | Way::Free if self.plan.broken != Some(Broken::RunsTooSoon) => {
                let mut out = vec![];
                self.core.hold_all(self.now, &mut out);
                self.act(out);
            }
            _ => self.core.speculate_again(),
        }
    }

    /// The backup's translation is the one that counts.
    pub(super) fn translation_takes_over(&mut self) {
        if !self.plan.translated() {
            return;
        }
        let modes = &mut self.modes;
        modes.translation = std::mem::take(&mut modes.backups);
        modes.translation.take_over();
        modes.tables.clear();
        (modes.change, modes.free, modes.way) = (None, false, WayOut::default());
    }

    /// The copy goes on as it is. Of connections nothing is known here.
    pub(super) fn take_over_running(&mut self) {
        self.seen.take_overs_of_running += 1;
        self.seen.begun += self.core.counts().begun;
        self.modes.runs = false;
        self.snapshots.clear();
        self.snapshots.push_back(Snapshot {
            epoch: self.epoch,
            at: self.now,
            vm: self.vm.clone(),
        });
        self.epoch = Epoch(self.epoch.0 + 10);
        let limits = limits(&self.plan);
        self.core = Speculation::new(limits);
        self.replica = Replica::new(limits);
        self.whole = true;
        self.after(self.plan.epoch_us, Event::Cut);
        self.wake(0, self.now + TAKE_OVER_US, Event::Vm);
    }
}
