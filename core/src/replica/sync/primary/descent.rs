//! A comparison by hash trees: what the primary asks, level by level, and what the answers say.
//!
//! One side speaks at a time: a level's answer is here whole before the next level is asked for. So neither waits for the other to read.

use super::{Effect, SyncMessage};
use crate::sync::compare::tree::Walk;
use crate::units::Epoch;
use crate::wire::sync::parts;

/// A walk down a tree, and the answer to the nodes in question, as far as it is here.
#[derive(Debug)]
pub(super) struct Descent {
    pub(super) walk: Walk,
    answer: Vec<u8>,
}

impl Descent {
    pub(super) fn over(hashes: Vec<u128>) -> Self {
        Self {
            walk: Walk::over(hashes),
            answer: Vec::new(),
        }
    }

    /// Whether so much more of an answer may come.
    pub(super) fn takes(&self, part: &[u8]) -> bool {
        !part.is_empty() && self.answer.len() + part.len() <= self.walk.answer_bytes()
    }

    /// Takes it; whether that was all of the answer.
    pub(super) fn answered(&mut self, part: &[u8]) -> bool {
        self.answer.extend_from_slice(part);
        if self.answer.len() < self.walk.answer_bytes() {
            return false;
        }
        self.walk.descend(&std::mem::take(&mut self.answer));
        true
    }

    /// Whether there is anything left to ask.
    pub(super) fn asks(&self, epoch: Epoch, effects: &mut Vec<Effect>) -> bool {
        let hashes = self.walk.hashes();
        let asks = |hashes| Effect::Send(SyncMessage::Nodes { epoch, hashes });
        effects.extend(parts::hashes(&hashes).map(asks));
        !hashes.is_empty()
    }
}
