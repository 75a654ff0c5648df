//! A comparison by hash trees: what the backup answers.

use super::gathered::staging_of;
use super::trees::Trees;
use super::{Backup, Bug, Effect, Epoch, Next, PageSet, SessionError, State, SyncMessage, parts, refuse};
use crate::replica::sync::PAGES_AT_ONCE;
use crate::sync::compare::tree::bytes_of;
use crate::sync::compare::{BLOCKS_PER_PAGE, Compare};

impl Backup {
    /// A round while the VMs run, over these pages.
    pub(super) fn precopy_compares(
        &mut self,
        epoch: Epoch,
        pages: PageSet,
        effects: &mut Vec<Effect>,
    ) -> Next {
        if self.compare == Compare::List {
            self.send_hashes(epoch, &pages, effects);
            return Ok(State::Idle);
        }
        self.hash(epoch, &pages, effects)?;
        Ok(State::PreCopyHashes { epoch, pages })
    }

    /// The VM stands, and this is the union.
    pub(super) fn compares(&mut self, epoch: Epoch, pages: PageSet, effects: &mut Vec<Effect>) -> Next {
        if self.compare == Compare::List {
            self.send_hashes(epoch, &pages, effects);
            return Ok(self.awaits_state(epoch));
        }
        self.hash(epoch, &pages, effects)?;
        Ok(State::Hashing { epoch, pages })
    }

    /// How much a guest writes is its own choice, and this host's memory is not the guest's.
    fn hash(&mut self, epoch: Epoch, pages: &PageSet, effects: &mut Vec<Effect>) -> Result<(), SessionError> {
        let most_bytes = self.setup.staging_bytes;
        let needed_bytes = bytes_of(pages.len() * BLOCKS_PER_PAGE);
        if !pages.is_empty() && needed_bytes > most_bytes {
            let why = SessionError::TreeTooLarge {
                needed_bytes,
                most_bytes,
            };
            return Err(refuse(why, effects));
        }
        self.look_again(epoch, pages);
        effects.push(Effect::Hash(pages.clone()));
        Ok(())
    }

    /// What differs will come, in place of what came before (invariant 4).
    pub(super) fn look_again(&mut self, epoch: Epoch, pages: &PageSet) {
        if !self.bugs.has(Bug::KeepsStaleDeltas) {
            staging_of(&mut self.staging, &self.setup, epoch).look_again(pages);
        }
    }

    /// A round's pages are hashed: each part of them, as the primary copies them, has its own tree.
    pub(super) fn precopy_hashed(epoch: Epoch, pages: &PageSet, hashes: Vec<u128>) -> State {
        Self::precopy_descends(Trees::over(epoch, pages, PAGES_AT_ONCE, hashes))
    }

    fn precopy_descends(trees: Trees) -> State {
        match trees.walks.is_empty() {
            true => State::Idle,
            false => State::PreCopyDescends(trees),
        }
    }

    pub(super) fn hashed(&mut self, epoch: Epoch, pages: &PageSet, hashes: Vec<u128>) -> State {
        let trees = Trees::over(epoch, pages, u32::MAX, hashes);
        self.descends(trees)
    }

    fn descends(&mut self, trees: Trees) -> State {
        match trees.walks.is_empty() {
            true => self.awaits_state(trees.epoch),
            false => State::Descending(trees),
        }
    }

    pub(super) fn precopy_nodes(
        &mut self,
        mut trees: Trees,
        hashes: Vec<u128>,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.answer_nodes(&mut trees, hashes, effects);
        Self::precopy_descends(trees)
    }

    pub(super) fn nodes(&mut self, mut trees: Trees, hashes: Vec<u128>, effects: &mut Vec<Effect>) -> State {
        self.answer_nodes(&mut trees, hashes, effects);
        self.descends(trees)
    }

    /// As soon as the hashes of all nodes in question are here.
    fn answer_nodes(&self, trees: &mut Trees, hashes: Vec<u128>, effects: &mut Vec<Effect>) {
        trees.theirs.extend(hashes);
        if trees.theirs.len() < trees.in_question() {
            return;
        }
        let walk = trees.walks.front_mut().expect("nodes are in question");
        let mut answer = walk.differing(&std::mem::take(&mut trees.theirs));
        if self.bugs.has(Bug::AnswersWithOneNode) {
            only_the_first(&mut answer);
        }
        walk.descend(&answer);
        if walk.in_question() == 0 {
            trees.walks.pop_front();
        }
        let epoch = trees.epoch;
        let says = |part| Effect::Send(SyncMessage::Differ { epoch, part });
        let (first, last) = parts::bytes(answer.into());
        effects.extend(first.into_iter().chain([last]).map(says));
    }
}

fn only_the_first(answer: &mut [u8]) {
    let mut found = false;
    for byte in answer {
        *byte = if found { 0 } else { *byte & byte.wrapping_neg() };
        found |= *byte != 0;
    }
}
