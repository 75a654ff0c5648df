//! A sync, from its order to the backup's word that it goes on from it.

use super::descent::Descent;
use super::differing::{compare, whole};
use super::{Bug, Counts, Effect, Next, Order, PageSet, Point, Primary, Report, State, SyncMessage};
use crate::sync::compare::tree;
use crate::sync::compare::{BLOCKS_PER_PAGE, DivergentPage, PAGE_BYTES};
use crate::wire::sync::parts::{self, Gathering};
use bytes::Bytes;

/// What is compared is copied aside, and is more than what differs and is staged: so many times as much may be copied.
const COPY_FACTOR: usize = 4;

/// What was captured while the VM stood.
#[derive(Debug)]
pub(super) struct Capture {
    pub(super) order: Order,
    ours: PageSet,
    theirs: PageSet,
    pub(super) union: PageSet,
    /// The backup's VM runs, and has pages of its own to compare.
    compared: bool,
    connections: Bytes,
    pub(super) our_hashes: Vec<u128>,
    pub(super) their_hashes: Vec<u128>,
    differing: Vec<DivergentPage>,
    pub(super) counts: Counts,
}

impl Capture {
    fn hashes_due(&self) -> usize {
        self.union.len() * BLOCKS_PER_PAGE
    }

    /// Whether so many more hashes may come.
    pub(super) fn takes(&self, hashes: &[u128]) -> bool {
        !hashes.is_empty() && self.their_hashes.len() + hashes.len() <= self.hashes_due()
    }
}

impl Primary {
    fn compares(&self) -> bool {
        self.active && !self.joining
    }

    pub(super) fn begin_sync(&mut self, order: Order, effects: &mut Vec<Effect>) -> State {
        let Order { epoch, agreed, .. } = order;
        if self.compares() {
            // The log tells the backup to stop its VM (invariant 3).
            let gathering = Gathering::new(u64::from(self.setup.pages));
            return State::BackupStops { order, gathering };
        }
        effects.push(Effect::Send(match self.joining {
            true => SyncMessage::JoinLast { epoch },
            false => SyncMessage::Ends { epoch, agreed },
        }));
        self.stop(order, None, effects)
    }

    /// `theirs` is what the backup's VM has written until it stood; none where it does not run in this epoch.
    pub(super) fn stop(&mut self, order: Order, theirs: Option<PageSet>, effects: &mut Vec<Effect>) -> State {
        self.vm.stop(theirs.is_some() || !self.compares());
        let theirs = theirs.unwrap_or_default();
        if order.switchover {
            effects.push(Effect::Pass(Point::SwitchoverBegins));
        }
        effects.extend([
            Effect::Stop,
            Effect::Report(Report::Stopped),
            Effect::Save {
                firmware: self.joining,
            },
            Effect::Scan,
        ]);
        State::Capturing { order, theirs }
    }

    /// The VM stands, and these pages are the last of the epoch.
    pub(super) fn captured(
        &mut self,
        order: Order,
        ours: PageSet,
        theirs: PageSet,
        effects: &mut Vec<Effect>,
    ) -> Next {
        let union = match self.bugs.has(Bug::ForgetsTheirPages) {
            true => ours.clone(),
            false => ours.union(&theirs),
        };
        let compared = self.compares();
        let most_bytes = self.setup.staging_bytes * if compared { COPY_FACTOR } else { 1 };
        Self::check_memory(union.len() * PAGE_BYTES, most_bytes)?;
        effects.push(Effect::MarkDisks(order.epoch));
        effects.push(Effect::Copy(union.clone()));
        if self.setup.audit {
            effects.push(Effect::Audit);
        }
        if self.bugs.has(Bug::ResumesBeforeLine) && !order.switchover {
            effects.push(Effect::RunOn);
        }
        Ok(State::AwaitsLine(Capture {
            order,
            ours,
            theirs,
            union,
            compared,
            connections: Bytes::new(),
            our_hashes: Vec::new(),
            their_hashes: Vec::new(),
            differing: Vec::new(),
            counts: Counts::default(),
        }))
    }

    /// The loop has the epoch's last frames: the VM may run on.
    pub(super) fn line_drawn(
        &mut self,
        mut capture: Capture,
        connections: Bytes,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Order { switchover, next, .. } = capture.order;
        capture.connections = connections;
        self.vm.line_drawn();
        effects.push(Effect::Pass(Point::Captured));
        if !self.joining && self.active != next.backup_runs() {
            effects.push(Effect::Pass(Point::ModeChanges));
        }
        if switchover {
            return self.resumed(capture, effects);
        }
        effects.push(Effect::Resume);
        State::Resuming(capture)
    }

    /// The VM runs on, or is left to the backup: what was captured is worked on.
    pub(super) fn resumed(&mut self, capture: Capture, effects: &mut Vec<Effect>) -> State {
        let Order {
            epoch, switchover, ..
        } = capture.order;
        if !switchover {
            self.vm.resume();
        }
        effects.push(Effect::Report(Report::Resumed));
        if !capture.compared {
            let differing = whole(&capture.union);
            return Self::send_deltas(capture, differing, effects);
        }
        let asks = |(pages, more)| Effect::Send(SyncMessage::Union { epoch, pages, more });
        effects.extend(parts::pages(&capture.union).map(asks));
        effects.push(Effect::Hash);
        State::Hashing(capture)
    }

    /// As soon as all of the backup's hashes are here.
    pub(super) fn compare_capture(&mut self, mut capture: Capture, effects: &mut Vec<Effect>) -> Next {
        if capture.their_hashes.len() < capture.hashes_due() {
            return Ok(State::AwaitsHashes(capture));
        }
        let ours = std::mem::take(&mut capture.our_hashes);
        let theirs = std::mem::take(&mut capture.their_hashes);
        let differing = compare(&capture.union, &ours, &theirs)?;
        capture.counts.list_hashes = ours.len() as u64;
        if self.setup.audit && !ours.is_empty() {
            capture.counts.tree = tree::would_have_taken(&ours, &theirs);
        }
        Ok(Self::send_deltas(capture, differing, effects))
    }

    /// After the stop: the union's tree.
    pub(super) fn descend(mut capture: Capture, descent: Descent, effects: &mut Vec<Effect>) -> State {
        if descent.asks(capture.order.epoch, effects) {
            return State::Descending(capture, descent);
        }
        let differing = descent.walk.found(&capture.union);
        capture.counts.tree = descent.walk.travelled();
        Self::send_deltas(capture, differing, effects)
    }

    pub(super) fn send_deltas(
        mut capture: Capture,
        differing: Vec<DivergentPage>,
        effects: &mut Vec<Effect>,
    ) -> State {
        effects.push(Effect::SendDeltas {
            epoch: capture.order.epoch,
            pages: capture.union.clone(),
            differing: differing.clone(),
        });
        capture.differing = differing;
        State::Sending(capture)
    }

    pub(super) fn deltas_sent(&mut self, capture: Capture, bytes: u64, effects: &mut Vec<Effect>) -> State {
        let Capture {
            order,
            ours,
            theirs,
            connections,
            differing,
            mut counts,
            ..
        } = capture;
        let mut rounds = std::mem::take(&mut self.rounds);
        counts.pre_copied = rounds.pages()[2];
        rounds.add(&ours, &theirs, &differing, bytes);
        counts.pages = rounds.pages();
        counts.bytes = rounds.bytes();
        effects.push(Effect::SendState {
            epoch: order.epoch,
            next: order.next,
            connections,
        });
        State::SendingDevices(order, counts)
    }

    /// The backup holds all of it, whatever becomes of this host.
    pub(super) fn staged(&mut self, order: Order, counts: Counts, effects: &mut Vec<Effect>) -> State {
        effects.push(Effect::Report(Report::Acknowledged {
            epoch: order.epoch,
            joining: self.joining,
            counts,
        }));
        effects.push(Effect::Pass(Point::Released));
        State::AwaitsLoaded(order)
    }

    /// The backup goes on from the sync, or takes the VM over.
    pub(super) fn loaded(&mut self, order: Order, load_us: u64, effects: &mut Vec<Effect>) -> State {
        let epoch = order.epoch;
        effects.push(Effect::Report(Report::Loaded { epoch, load_us }));
        if order.switchover {
            return State::SwitchesOver(order);
        }
        self.synced(&order)
    }

    /// The next epoch goes on.
    pub(super) fn synced(&mut self, order: &Order) -> State {
        self.active = order.next.backup_runs();
        self.joining = false;
        State::Idle
    }
}
