//! What it decides: the same as the flat list of block hashes, by descending a hash tree.
//!
//! Flow: the alternative to `divergent`, where `sync.compare` is `tree`. Both sides have a tree over the blocks of the same pages, and
//! each its [`Walk`]. The primary sends the hashes of the nodes in question, the root first; the backup says which of them it has
//! otherwise, one bit for each; both go on to the children of these. So no node has to be named. Equal memories cost one hash;
//! each level costs a round trip.
//!
//! Invariants:
//! 1. The leaves that a walk finds are those whose hashes differ.
//! 2. Two walks over as many leaves, which were told the same answers, have the same nodes in question.
//!
//! Source: FALCON-in-KVM 2.3; GAIA 2.3.2, Algorithm 1. A node has sixteen children here and not two: a page is the parent of its
//! blocks, and a descent has a quarter of the round trips. Not here: the choice between the two (ARCHITECTURE.md has the figures);
//! messages and their parts (`replica::sync`).

use super::{BLOCKS_PER_PAGE, DivergentPage, hash_block};
use crate::sync::dirty::PageSet;

/// Children of a node: the blocks of a page, and so on.
const FANOUT: usize = BLOCKS_PER_PAGE;

/// What a tree over so many leaves takes, at most.
#[must_use]
pub fn bytes_of(leaves: usize) -> usize {
    // All inner nodes together are at most a fifteenth of the leaves, and one more on each level.
    (leaves + leaves / (FANOUT - 1) + 16) * size_of::<u128>()
}

/// The hashes of the leaves, of their parents, and so on up to the root; no level if there are no leaves.
#[derive(Debug, Clone)]
struct HashTree {
    levels: Vec<Vec<u128>>,
}

impl HashTree {
    fn build(leaves: Vec<u128>) -> Self {
        let mut levels = Vec::new();
        let mut level = leaves;
        while level.len() > 1 {
            let parents = level.chunks(FANOUT).map(hash_node).collect();
            levels.push(std::mem::replace(&mut level, parents));
        }
        levels.extend((!level.is_empty()).then_some(level));
        Self { levels }
    }
}

fn hash_node(children: &[u128]) -> u128 {
    let mut bytes = [0; FANOUT * size_of::<u128>()];
    let used = size_of_val(children);
    for (hash, to) in children.iter().zip(bytes.chunks_exact_mut(size_of::<u128>())) {
        to.copy_from_slice(&hash.to_be_bytes());
    }
    hash_block(&bytes[..used])
}

/// One side's way down its tree, in step with the other side's.
#[derive(Debug, Clone)]
pub struct Walk {
    tree: HashTree,
    /// Where the nodes in question are; the leaves are at 0.
    level: usize,
    /// Which of that level, ascending.
    nodes: Vec<u32>,
    found: Vec<u32>,
    hashes: u64,
    rounds: u64,
}

impl Walk {
    /// At the root of the tree over these; at its end if there are none.
    #[must_use]
    pub fn over(leaves: Vec<u128>) -> Self {
        let tree = HashTree::build(leaves);
        let height = tree.levels.len();
        Self {
            level: height.saturating_sub(1),
            nodes: if height == 0 { Vec::new() } else { vec![0] },
            tree,
            found: Vec::new(),
            hashes: 0,
            rounds: 0,
        }
    }

    /// How many nodes are in question; none at the walk's end.
    #[must_use]
    pub fn in_question(&self) -> usize {
        self.nodes.len()
    }

    /// Bytes of the answer to these.
    #[must_use]
    pub fn answer_bytes(&self) -> usize {
        self.nodes.len().div_ceil(8)
    }

    /// This side's hashes of the nodes in question, in their order.
    #[must_use]
    pub fn hashes(&self) -> Vec<u128> {
        self.ours().collect()
    }

    fn ours(&self) -> impl Iterator<Item = u128> + '_ {
        let level = self.tree.levels.get(self.level);
        self.nodes
            .iter()
            .map(move |&node| level.expect("nodes in question are on a level")[node as usize])
    }

    /// Which of the nodes in question this side has otherwise, given the other side's hashes: bit i % 8 of byte i / 8 is the i-th.
    ///
    /// # Panics
    /// If there are not as many hashes as nodes: whoever gathers them sees to it.
    #[must_use]
    pub fn differing(&self, theirs: &[u128]) -> Vec<u8> {
        assert_eq!(theirs.len(), self.nodes.len(), "a hash for each node in question");
        let mut answer = vec![0; self.answer_bytes()];
        for (i, (ours, theirs)) in self.ours().zip(theirs).enumerate() {
            answer[i / 8] |= u8::from(ours != *theirs) << (i % 8);
        }
        answer
    }

    /// Both sides know the answer: the children of what differs are in question now, or the walk is at its end.
    ///
    /// # Panics
    /// If the answer has another length: whoever gathers it sees to it.
    pub fn descend(&mut self, answer: &[u8]) {
        assert_eq!(
            answer.len(),
            self.answer_bytes(),
            "a bit for each node in question"
        );
        let nodes = std::mem::take(&mut self.nodes);
        self.hashes += nodes.len() as u64;
        self.rounds += 1;
        let differs = |i: usize| answer[i / 8] & (1 << (i % 8)) != 0;
        let differing = nodes.into_iter().enumerate();
        let differing = differing.filter_map(|(i, node)| differs(i).then_some(node));
        if self.level == 0 {
            self.found = differing.collect();
            return;
        }
        self.level -= 1;
        let most = self.tree.levels[self.level].len();
        let children = |node: u32| {
            let first = node as usize * FANOUT;
            (first..most.min(first + FANOUT)).map(|child| child as u32)
        };
        self.nodes = differing.flat_map(children).collect();
    }

    /// How many hashes have travelled, in how many round trips.
    #[must_use]
    pub fn travelled(&self) -> (u64, u64) {
        (self.hashes, self.rounds)
    }

    /// Which blocks of which pages differ, at the walk's end; the tree is over the blocks of `pages`.
    #[must_use]
    pub fn found(&self, pages: &PageSet) -> Vec<DivergentPage> {
        let mut leaves = self.found.iter().map(|leaf| *leaf as usize).peekable();
        let mut differing = Vec::new();
        for (position, page) in pages.pages().enumerate() {
            let mut blocks = 0;
            while let Some(leaf) = leaves.next_if(|leaf| leaf / BLOCKS_PER_PAGE == position) {
                blocks |= 1 << (leaf % BLOCKS_PER_PAGE);
            }
            if blocks != 0 {
                differing.push(DivergentPage { page, blocks });
            }
        }
        differing
    }
}

/// How many hashes would have travelled, in how many round trips, where both lists are known.
#[must_use]
pub fn would_have_taken(ours: &[u128], theirs: &[u128]) -> (u64, u64) {
    let (mut ours, mut theirs) = (Walk::over(ours.to_vec()), Walk::over(theirs.to_vec()));
    while ours.in_question() > 0 {
        let answer = theirs.differing(&ours.hashes());
        ours.descend(&answer);
        theirs.descend(&answer);
    }
    ours.travelled()
}

#[cfg(test)]
mod tests {
    use super::super::divergent;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_descent_finds_what_a_flat_comparison_finds(
            runs in prop::collection::vec((0_u32..400, 1_u32..40), 0..6),
            changed in prop::collection::btree_set(0_usize..3000, 0..10),
            seed in any::<u128>(),
        ) {
            let pages = PageSet::from_runs(runs);
            let leaves: Vec<u128> = (0..pages.len() * BLOCKS_PER_PAGE).map(|leaf| seed ^ leaf as u128).collect();
            let mut other = leaves.clone();
            let mut differs = 0;
            for leaf in changed.into_iter().filter(|&leaf| leaf < leaves.len()) {
                other[leaf] ^= 1;
                differs += 1;
            }
            let (mut ours, mut theirs) = (Walk::over(leaves.clone()), Walk::over(other.clone()));
            while ours.in_question() > 0 {
                prop_assert_eq!(&ours.nodes, &theirs.nodes);
                let answer = theirs.differing(&ours.hashes());
                ours.descend(&answer);
                theirs.descend(&answer);
            }
            prop_assert_eq!(Some(ours.found(&pages)), divergent(&pages, &leaves, &other));
            let (hashes, rounds) = would_have_taken(&leaves, &other);
            prop_assert_eq!((hashes, rounds), ours.travelled());
            prop_assert!(differs > 0 || hashes <= 1, "equal trees need only the root");
            prop_assert!(hashes as usize <= 1 + differs * FANOUT * 4);
            let nodes: usize = ours.tree.levels.iter().map(Vec::len).sum();
            prop_assert!(nodes * size_of::<u128>() <= bytes_of(leaves.len()));
        }
    }

    /// 16 MiB of memory: five round trips, whatever differs.
    #[test]
    fn a_part_of_a_pre_copy_is_five_levels_high() {
        let leaves: Vec<u128> = (0..4096 * BLOCKS_PER_PAGE as u128).collect();
        let mut other = leaves.clone();
        other[7000] = 0;
        assert_eq!(would_have_taken(&leaves, &other), (1 + 4 * 16, 5));
        assert_eq!(would_have_taken(&leaves, &leaves), (1, 1));
        assert_eq!(would_have_taken(&[], &[]), (0, 0));
    }
}
