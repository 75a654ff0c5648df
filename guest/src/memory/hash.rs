//! Hashes of pages and blocks.
//!
//! Decides:    how work is split over threads.
//! Flow:       `Memory::hash_pages` on both hosts -> compare.
//! Invariants: 1. answers stand in the order of the question, whatever the number of threads.
//! Source:     xxh3 (128 bit): 0.3 us a page; PLOVER section 4.3 hashes the united dirty pages on all cores.
//! Not here:   protection against somebody who builds collisions: the peers are authenticated.

use parking_lot::Mutex;
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
    {
        let shares = Mutex::new(items.chunks(share).zip(answers.chunks_mut(share)));
        let take_shares = || {
            loop {
                let next = shares.lock().next();
                let Some((items, answers)) = next else { break };
                let pairs = items.iter().zip(answers);
                pairs.for_each(|(item, answer)| *answer = work(item));
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..items.len().div_ceil(share) {
                let named = std::thread::Builder::new().name("hash".into());
                if named.spawn_scoped(scope, take_shares).is_err() {
                    // The system has no thread left: those that are there do all of it.
                    break;
                }
            }
            take_shares();
        });
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invariant_1_answers_stand_in_the_order_of_the_question() {
        let items: Vec<u64> = (0..3 * PAGES_PER_THREAD as u64 + 7).collect();
        let expected: Vec<u64> = items.iter().map(|item| item * 2).collect();
        for threads in [0, 1, 2, 4, 64] {
            assert_eq!(
                on_threads(&items, threads, |item| item * 2),
                expected,
                "{threads} threads"
            );
        }
        assert!(on_threads(&[0_u64; 0], 4, |item| item * 2).is_empty());
    }
}
