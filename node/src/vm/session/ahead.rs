//! Pages that were copied and hashed while the VM still ran: at the stop only what was written since is left.
//!
//! Lu and Chiueh's speculative transfer (CCGrid'12) with one difference: nothing is *sent* ahead. Here the VM runs on
//! before anything is sent, so sending costs the backup's memory and no pause; copying is what the VM stands for.

use super::{copy_out, hash_copy};
use dunlin_core::sync::compare::{BLOCKS_PER_PAGE, PAGE_BYTES};
use dunlin_core::sync::dirty::PageSet;
use dunlin_guest::memory::Memory;

/// Pages, what was in them, and the hashes of their blocks.
#[derive(Default)]
pub struct Copied {
    pages: PageSet,
    bytes: Vec<u8>,
    hashes: Vec<u128>,
}

impl Copied {
    /// Copies and hashes. What the VM writes meanwhile is dirty again.
    pub fn ahead(memory: &Memory, pages: PageSet) -> Self {
        let bytes = copy_out(memory, &pages);
        let hashes = hash_copy(&bytes);
        Self { pages, bytes, hashes }
    }

    /// What of `all` still has to be copied, if `again` was written since.
    pub fn missing(&self, all: &PageSet, again: &PageSet) -> PageSet {
        all.minus(&self.pages.minus(again))
    }

    /// The content and, if wanted, the block hashes of `all`: of `missing` from `rest`, of the others from here.
    pub fn complete(
        self,
        all: &PageSet,
        missing: &PageSet,
        rest: Vec<u8>,
        hashed: bool,
    ) -> (Vec<u8>, Vec<u128>) {
        let rest_hashes = if hashed { hash_copy(&rest) } else { Vec::new() };
        if self.pages.is_empty() {
            return (rest, rest_hashes);
        }
        let mut bytes = Vec::with_capacity(all.len() * PAGE_BYTES);
        let mut hashes = Vec::with_capacity(if hashed { all.len() * BLOCKS_PER_PAGE } else { 0 });
        let mut fresh = missing.pages().enumerate().peekable();
        let mut older = self.pages.pages().enumerate();
        for page in all.pages() {
            let (at, from, from_hashes) = match fresh.next_if(|(_, fresh)| *fresh == page) {
                Some((at, _)) => (at, &rest, &rest_hashes),
                None => {
                    let (at, _) = older
                        .find(|(_, older)| *older == page)
                        .expect("what is not missing was copied ahead");
                    (at, &self.bytes, &self.hashes)
                }
            };
            bytes.extend_from_slice(&from[at * PAGE_BYTES..(at + 1) * PAGE_BYTES]);
            if hashed {
                hashes.extend_from_slice(&from_hashes[at * BLOCKS_PER_PAGE..(at + 1) * BLOCKS_PER_PAGE]);
            }
        }
        (bytes, hashes)
    }
}
