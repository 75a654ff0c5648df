//! Hashes of pages and blocks.
//!
//! Decides:    how work is split over threads.
//! Flow:       `Memory::hash_pages` on both hosts -> compare.
//! Invariants: 1. answers stand in the order of the question, whatever the number of threads.
//! Source:     xxh3 (128 bit): 0.3 us a page; PLOVER section 4.3 hashes the united dirty pages on all cores.
//! Not here:   protection against somebody who builds collisions: the peers are authenticated.

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::{BLOCK_BYTES, BLOCKS_PER_PAGE, PAGE_BYTES};

/// Pages that are not worth another thread: waking one costs about as much as hashing these.
const PAGES_PER_THREAD: usize = 256;

/// 128-bit hash of a page.
pub fn page(content: &[u8; PAGE_BYTES]) -> u128 {
    xxh3_128(content)
}

/// 64-bit hashes of its blocks.
pub fn blocks(content: &[u8; PAGE_BYTES]) -> [u64; BLOCKS_PER_PAGE] {
    std::array::from_fn(|i| xxh3_64(&content[i * BLOCK_BYTES..][..BLOCK_BYTES]))
}

/// The blocks in which two pages differ, by their block hashes: lowest bit, first block.
pub fn differing(a: &[u64; BLOCKS_PER_PAGE], b: &[u64; BLOCKS_PER_PAGE]) -> u16 {
    (0..BLOCKS_PER_PAGE)
        .filter(|i| a[*i] != b[*i])
        .fold(0, |mask, i| mask | 1 << i)
}

/// `work` for each item (of about a page each), on up to `threads` threads, in order.
pub(crate) fn on_threads<I: Sync, T: Send + Copy + Default>(
    items: &[I],
    threads: usize,
    work: impl Fn(&I) -> T + Sync,
) -> Vec<T> {
    let mut answers = vec![T::default(); items.len()];
    let share = items.len().div_ceil(threads.max(1)).max(PAGES_PER_THREAD);
    let fill = |(items, answers): (&[I], &mut [T])| {
        items
            .iter()
            .zip(answers)
            .for_each(|(item, answer)| *answer = work(item));
    };
    std::thread::scope(|scope| {
        let mut shares = items.chunks(share).zip(answers.chunks_mut(share));
        let own = shares.next();
        for other in shares {
            scope.spawn(|| fill(other));
        }
        own.into_iter().for_each(fill);
    });
    answers
}
