//! A primary and its backup, from the join to the end: one thread on each side, and the stream between them.
//!
//! The threads do what takes long (stop, save, hash, copy, load), in the order that core's `replica::sync` decides; the VM loop says
//! when, and speaks to the network.

pub mod backup;
pub mod copies;
mod drive;
pub mod jobs;
pub mod link;
pub mod primary;
pub mod reader;
pub mod talker;
pub mod waiting;

use dunlin_core::sync::compare;
use dunlin_core::sync::dirty::PageSet;
use dunlin_guest::memory::{Bitmap, Memory};

/// A broken session, for a person.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

impl Broken {
    /// `what` failed, because of `why`.
    pub fn new(what: &str, why: impl std::fmt::Display) -> Self {
        Self(format!("{what}: {why}"))
    }
}

/// A tracker's bitmap as a set of runs.
fn page_set(bitmap: &Bitmap) -> PageSet {
    PageSet::from_runs(bitmap.iter().map(|page| (page as u32, 1)))
}

/// What is hashed is hashed on all cores.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The block hashes of a copy, on all cores.
fn hash_copy(copy: &[u8]) -> Vec<u128> {
    let threads = threads();
    // A thread costs some 50 us to start: below 256 pages for each it costs more than it brings.
    let share = (copy.len() / compare::PAGE_BYTES).div_ceil(threads).max(256) * compare::PAGE_BYTES;
    let hash_share = |share: &[u8]| {
        let mut hashes = Vec::with_capacity(share.len() / compare::BLOCK_BYTES);
        share
            .chunks_exact(compare::PAGE_BYTES)
            .for_each(|page| compare::hash_page(page, &mut hashes));
        hashes
    };
    if copy.len() <= share {
        return hash_share(copy);
    }
    std::thread::scope(|scope| {
        let parts: Vec<_> = copy
            .chunks(share)
            .map(|part| {
                let named = std::thread::Builder::new().name("hash".into());
                (part, named.spawn_scoped(scope, move || hash_share(part)))
            })
            .collect();
        parts
            .into_iter()
            .flat_map(|(part, thread)| match thread {
                Ok(thread) => thread.join().expect("hashing does not panic"),
                // The system has no thread left.
                Err(_) => hash_share(part),
            })
            .collect()
    })
}

/// One hash over all of the guest's memory: an audit.
fn hash_all(memory: &Memory) -> u128 {
    let bytes: Vec<u8> = memory
        .hash_all(threads())
        .into_iter()
        .flat_map(u128::to_be_bytes)
        .collect();
    compare::hash_block(&bytes)
}
