//! What it decides: which blocks of which pages differ, and so travel.
//!
//! Flow: after both sides hashed the union. A page is compared in 256-byte blocks, because a divergent page differs
//! in some 100 bytes of 4096 (measured): the unit that is hashed is the unit that is sent.
//!
//! Invariants:
//! 1. A block that is not sent has the same 128-bit hash on both sides.
//! 2. Hashes come in the order of the pages in the union, block by block: the lists have one length.
//!
//! Source: FALCON-in-KVM 2.3 and GAIA 2.3.2 compare hash trees; STR compares regions below a page. The list is the
//! default here: see `tree` for the other and ARCHITECTURE.md for the measurement between them. Not here: hashing on many cores.

pub mod tree;

use super::dirty::PageSet;
use std::str::FromStr;

/// How the two sides find out what differs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Compare {
    /// The backup sends the hash of every block: one round trip.
    #[default]
    List,
    /// Both descend a hash tree (GAIA's Algorithm 1): fewer bytes, a round trip for each level.
    Tree,
}

/// A way to compare was none of the known ones.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown comparison '{0}': use list or tree")]
pub struct UnknownCompare(String);

impl FromStr for Compare {
    type Err = UnknownCompare;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "list" => Ok(Self::List),
            "tree" => Ok(Self::Tree),
            other => Err(UnknownCompare(other.to_owned())),
        }
    }
}

/// A page of guest memory.
pub const PAGE_BYTES: usize = 4096;
/// The unit that is compared and sent.
pub const BLOCK_BYTES: usize = 256;
/// Blocks in a page: one bit each in a `u16`.
pub const BLOCKS_PER_PAGE: usize = PAGE_BYTES / BLOCK_BYTES;

/// The blocks of one page that have to travel: bit i stands for the i-th 256 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DivergentPage {
    /// Which page.
    pub page: u32,
    /// Which blocks.
    pub blocks: u16,
}

/// The hash of one block.
#[must_use]
pub fn hash_block(block: &[u8]) -> u128 {
    xxhash_rust::xxh3::xxh3_128(block)
}

/// The hash of a page of zeros, where pages are hashed whole.
#[must_use]
pub fn hash_of_zeros() -> u128 {
    xxhash_rust::xxh3::xxh3_128(&[0; PAGE_BYTES])
}

/// Appends the hashes of `page`'s blocks.
pub fn hash_page(page: &[u8], out: &mut Vec<u128>) {
    assert_eq!(page.len(), PAGE_BYTES, "a page is hashed whole");
    out.extend(page.chunks_exact(BLOCK_BYTES).map(hash_block));
}

/// The pages of `union` that differ, from both sides' block hashes. `None` if the lists do not belong to the union:
/// the peer and we disagree on what is compared, so the sync has to be given up.
#[must_use]
pub fn divergent(union: &PageSet, ours: &[u128], theirs: &[u128]) -> Option<Vec<DivergentPage>> {
    if ours.len() != theirs.len() || ours.len() != union.len() * BLOCKS_PER_PAGE {
        return None;
    }
    let pages = union.pages().zip(
        ours.chunks_exact(BLOCKS_PER_PAGE)
            .zip(theirs.chunks_exact(BLOCKS_PER_PAGE)),
    );
    Some(
        pages
            .filter_map(|(page, (ours, theirs))| {
                let blocks = differing_blocks(ours, theirs);
                (blocks != 0).then_some(DivergentPage { page, blocks })
            })
            .collect(),
    )
}

fn differing_blocks(ours: &[u128], theirs: &[u128]) -> u16 {
    ours.iter()
        .zip(theirs)
        .enumerate()
        .fold(0, |mask, (i, (a, b))| if a == b { mask } else { mask | 1 << i })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Sending just the divergent blocks makes the two memories equal, and no equal block is sent.
        #[test]
        fn divergent_blocks_are_exactly_those_that_differ(
            pages in 1_u32..6,
            changes in prop::collection::vec((0_usize..6 * PAGE_BYTES, any::<u8>()), 0..20),
        ) {
            let union = PageSet::from_runs([(7, pages)]);
            let primary = vec![0x5a_u8; pages as usize * PAGE_BYTES];
            let mut backup = primary.clone();
            for (at, byte) in changes {
                let len = backup.len();
                backup[at % len] = byte;
            }
            let hash = |memory: &[u8]| {
                let mut out = Vec::new();
                memory.chunks_exact(PAGE_BYTES).for_each(|page| hash_page(page, &mut out));
                out
            };
            let found = divergent(&union, &hash(&primary), &hash(&backup)).unwrap();
            for page in &found {
                for block in (0..BLOCKS_PER_PAGE).filter(|block| page.blocks & (1 << block) != 0) {
                    let at = (page.page - 7) as usize * PAGE_BYTES + block * BLOCK_BYTES;
                    prop_assert_ne!(&primary[at..at + BLOCK_BYTES], &backup[at..at + BLOCK_BYTES]);
                    backup[at..at + BLOCK_BYTES].copy_from_slice(&primary[at..at + BLOCK_BYTES]);
                }
            }
            prop_assert_eq!(primary, backup);
        }
    }

    #[test]
    fn hash_lists_of_another_union_are_refused() {
        let union = PageSet::from_runs([(0, 1)]);
        let one = vec![0; BLOCKS_PER_PAGE];
        let two = vec![0; 2 * BLOCKS_PER_PAGE];
        assert_eq!(divergent(&union, &one, &two), None);
        assert_eq!(divergent(&union, &two, &two), None);
        assert_eq!(divergent(&union, &one, &one), Some(vec![]));
    }
}
