//! The hash trees of a comparison, as far as they are here. What the backup answers with them: `descent`.

use super::{Epoch, PageSet};
use crate::sync::compare::BLOCKS_PER_PAGE;
use crate::sync::compare::tree::Walk;
use std::collections::VecDeque;

/// The trees over what was asked for, and the hashes of the nodes in question, as far as they are here.
#[derive(Debug)]
pub(super) struct Trees {
    pub(super) epoch: Epoch,
    /// The first is under way; none is at its end.
    pub(super) walks: VecDeque<Walk>,
    pub(super) theirs: Vec<u128>,
}

impl Trees {
    /// One for each so many pages, of which these are the block hashes.
    pub(super) fn over(epoch: Epoch, pages: &PageSet, most_pages: u32, mut hashes: Vec<u128>) -> Self {
        let mut walks = VecDeque::new();
        for part in pages.parts(most_pages) {
            let rest = hashes.split_off(part.len() * BLOCKS_PER_PAGE);
            walks.push_back(Walk::over(std::mem::replace(&mut hashes, rest)));
        }
        assert!(hashes.is_empty(), "other pages were hashed than were asked for");
        Self {
            epoch,
            walks,
            theirs: Vec::new(),
        }
    }

    pub(super) fn in_question(&self) -> usize {
        self.walks.front().map_or(0, Walk::in_question)
    }

    /// Whether so many more hashes may come.
    pub(super) fn takes(&self, hashes: &[u128]) -> bool {
        !hashes.is_empty() && self.theirs.len() + hashes.len() <= self.in_question()
    }
}
