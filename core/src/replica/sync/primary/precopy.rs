//! A round of a sync while the VMs run: what nobody writes afterwards needs no look at the stop.

use super::descent::Descent;
use super::differing::{compare, whole};
use super::{Effect, Next, PageSet, Primary, Report, State};
use crate::replica::sync::PAGES_AT_ONCE;
use crate::sync::compare::tree;
use crate::sync::compare::{BLOCKS_PER_PAGE, Compare, DivergentPage};
use crate::units::Epoch;
use crate::wire::sync::SyncMessage;
use crate::wire::sync::parts::{self as wire_parts, Gathering};

/// The round: its pages are copied aside, hashed, compared and sent part by part.
#[derive(Debug)]
pub(super) struct PreCopy {
    pub(super) epoch: Epoch,
    ours: PageSet,
    theirs: PageSet,
    /// Not looked at yet, the next one last: that is what was copied aside.
    pub(super) parts: Vec<PageSet>,
    /// Of all parts, in order.
    pub(super) their_hashes: Vec<u128>,
    hashes_due: usize,
    /// How many of them are compared.
    compared: usize,
    differing: Vec<DivergentPage>,
    bytes: u64,
}

impl PreCopy {
    /// Whether so many more hashes may come.
    pub(super) fn takes(&self, hashes: &[u128]) -> bool {
        !hashes.is_empty() && self.their_hashes.len() + hashes.len() <= self.hashes_due
    }
}

impl Primary {
    pub(super) fn precopy_scanned(&mut self, epoch: Epoch, ours: PageSet, effects: &mut Vec<Effect>) -> Next {
        if !self.active {
            return self.precopy_united(epoch, ours, PageSet::default(), effects);
        }
        let asks = |(pages, more)| Effect::Send(SyncMessage::PreCopy { epoch, pages, more });
        effects.extend(wire_parts::pages(&ours).map(asks));
        Ok(State::PreCopyAsks {
            epoch,
            ours,
            gathering: Gathering::new(u64::from(self.setup.pages)),
        })
    }

    /// Both sides' pages are known.
    pub(super) fn precopy_united(
        &mut self,
        epoch: Epoch,
        ours: PageSet,
        theirs: PageSet,
        effects: &mut Vec<Effect>,
    ) -> Next {
        let union = ours.union(&theirs);
        let hashes = union.len() * BLOCKS_PER_PAGE;
        let compares = self.active && self.setup.compare == Compare::List;
        let needed_bytes = match self.setup.compare {
            Compare::List => hashes * size_of::<u128>(),
            Compare::Tree => tree::bytes_of(hashes),
        };
        Self::check_memory(needed_bytes, self.setup.staging_bytes)?;
        let mut parts: Vec<PageSet> = union.parts(PAGES_AT_ONCE).collect();
        parts.reverse();
        let round = PreCopy {
            epoch,
            ours,
            theirs,
            parts,
            their_hashes: Vec::new(),
            hashes_due: if compares { hashes } else { 0 },
            compared: 0,
            differing: Vec::new(),
            bytes: 0,
        };
        Ok(self.precopy_hashes(round, effects))
    }

    /// The first part may begin as soon as all of the backup's hashes are here.
    pub(super) fn precopy_hashes(&mut self, round: PreCopy, effects: &mut Vec<Effect>) -> State {
        if round.their_hashes.len() < round.hashes_due {
            return State::PreCopyAwaitsHashes(round);
        }
        self.precopy_part(round, effects)
    }

    fn precopy_part(&mut self, round: PreCopy, effects: &mut Vec<Effect>) -> State {
        let Some(part) = round.parts.last().cloned() else {
            self.rounds
                .add(&round.ours, &round.theirs, &round.differing, round.bytes);
            effects.push(Effect::Report(Report::PreCopied));
            return State::Idle;
        };
        effects.push(Effect::Copy(part.clone()));
        if self.active {
            effects.push(Effect::Hash);
            return State::PreCopyHashes(round);
        }
        let differing = whole(&part);
        Self::precopy_sends(round, part, differing, effects)
    }

    pub(super) fn precopy_compares(
        &mut self,
        mut round: PreCopy,
        ours: &[u128],
        effects: &mut Vec<Effect>,
    ) -> Next {
        let part = round.parts.last().cloned().expect("a part was hashed");
        let to = round.compared + part.len() * BLOCKS_PER_PAGE;
        let differing = compare(&part, ours, &round.their_hashes[round.compared..to])?;
        round.compared = to;
        Ok(Self::precopy_sends(round, part, differing, effects))
    }

    /// While the VMs run: the tree of the part that was copied aside.
    pub(super) fn precopy_descend(round: PreCopy, descent: Descent, effects: &mut Vec<Effect>) -> State {
        if descent.asks(round.epoch, effects) {
            return State::PreCopyDescends(round, descent);
        }
        let part = round.parts.last().cloned().expect("a part was hashed");
        let differing = descent.walk.found(&part);
        Self::precopy_sends(round, part, differing, effects)
    }

    pub(super) fn precopy_sends(
        mut round: PreCopy,
        part: PageSet,
        differing: Vec<DivergentPage>,
        effects: &mut Vec<Effect>,
    ) -> State {
        round.differing.extend(&differing);
        effects.push(Effect::SendDeltas {
            epoch: round.epoch,
            pages: part,
            differing,
        });
        State::PreCopySends(round)
    }

    pub(super) fn precopy_sent(
        &mut self,
        mut round: PreCopy,
        bytes: u64,
        effects: &mut Vec<Effect>,
    ) -> State {
        round.bytes += bytes;
        round.parts.pop();
        self.precopy_part(round, effects)
    }
}
