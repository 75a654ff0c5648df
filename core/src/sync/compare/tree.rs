//! What it decides: the same as the flat list of block hashes, by descending a hash tree.
//!
//! Flow: the alternative to `divergent`. One side sends the tree's nodes level by level, only below nodes that
//! differ. It wins bytes where almost every page is equal, and costs a round trip per level.
//!
//! Invariant 1: the leaves that `descend` finds are those whose hashes differ.
//!
//! Source: FALCON-in-KVM 2.3, GAIA 2.3.2. Not here: the choice between the two (ARCHITECTURE.md has the figures).

/// A binary tree over hashes; node 1 is the root, node i has the children 2i and 2i + 1.
#[derive(Debug, Clone)]
pub struct HashTree {
    nodes: Vec<u128>,
    leaves: usize,
}

impl HashTree {
    /// The tree over `leaves`, padded to a power of two.
    #[must_use]
    pub fn build(leaves: &[u128]) -> Self {
        let width = leaves.len().next_power_of_two();
        let mut nodes = vec![0; 2 * width];
        nodes[width..width + leaves.len()].copy_from_slice(leaves);
        for node in (1..width).rev() {
            let mut pair = [0; 32];
            pair[..16].copy_from_slice(&nodes[2 * node].to_be_bytes());
            pair[16..].copy_from_slice(&nodes[2 * node + 1].to_be_bytes());
            nodes[node] = super::hash_block(&pair);
        }
        Self {
            nodes,
            leaves: leaves.len(),
        }
    }

    /// The leaves in which two trees of the same size differ, and the number of hashes that travelled to find them.
    #[must_use]
    pub fn descend(&self, other: &HashTree) -> (Vec<usize>, usize) {
        assert_eq!(self.leaves, other.leaves, "trees over one union have one size");
        let width = self.nodes.len() / 2;
        let (mut level, mut sent) = (vec![1], 1);
        while !level.is_empty() {
            level.retain(|&node| self.nodes[node] != other.nodes[node]);
            if level.first().is_none_or(|&node| node >= width) {
                break;
            }
            level = level.iter().flat_map(|node| [2 * node, 2 * node + 1]).collect();
            sent += level.len();
        }
        (level.into_iter().map(|node| node - width).collect(), sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_descent_finds_the_leaves_that_a_flat_comparison_finds(
            leaves in prop::collection::vec(any::<u128>(), 1..70),
            changed in prop::collection::btree_set(0_usize..70, 0..10),
        ) {
            let mut other = leaves.clone();
            let changed: Vec<usize> = changed.into_iter().filter(|&leaf| leaf < leaves.len()).collect();
            for &leaf in &changed {
                other[leaf] ^= 1;
            }
            let (found, sent) = HashTree::build(&leaves).descend(&HashTree::build(&other));
            prop_assert_eq!(found, changed.clone());
            prop_assert!(!changed.is_empty() || sent == 1, "equal trees need only the root");
        }
    }
}
