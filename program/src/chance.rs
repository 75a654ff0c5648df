//! Chance that is the same in every copy: a seeded stream for each thread, by the number that it has inside.
//!
//! Threads of different copies that have the same number do the same, if anything does; so a thread that asks sooner in one
//! copy than in the other takes nothing away from the others.
//! Invariants: 1. the same seed, thread and number of bytes asked for before give the same bytes.
//! Not here: who asks.

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::collections::BTreeMap;

/// Streams of threads begin here; those below are the vectors' and the devices'.
const FIRST_THREAD: u64 = 1 << 32;

/// The chance of one copy.
#[derive(Debug)]
pub struct Chance {
    seed: u64,
    threads: BTreeMap<u32, ChaCha20Rng>,
}

impl Chance {
    /// From a seed that all copies have.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let threads = BTreeMap::new();
        Self { seed, threads }
    }

    /// The next bytes for a thread.
    pub fn fill(&mut self, thread: u32, bytes: &mut [u8]) {
        let seed = self.seed;
        let stream = self
            .threads
            .entry(thread)
            .or_insert_with(|| stream(seed, FIRST_THREAD + u64::from(thread)));
        stream.fill_bytes(bytes);
    }
}

fn stream(seed: u64, number: u64) -> ChaCha20Rng {
    let mut stream = ChaCha20Rng::seed_from_u64(seed);
    stream.set_stream(number);
    stream
}

/// The 16 bytes that the `n`th program finds at its start.
#[must_use]
pub fn words(seed: u64, n: u64) -> [u64; 2] {
    let mut stream = stream(seed, n);
    [stream.next_u64(), stream.next_u64()]
}

/// What /dev/urandom holds.
#[must_use]
pub fn device(seed: u64, length_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; length_bytes];
    stream(seed, 0).fill_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_ask_in_another_order_get_the_same() {
        let (mut a, mut b) = (Chance::new(7), Chance::new(7));
        let ask = |chance: &mut Chance, thread, length| {
            let mut bytes = vec![0; length];
            chance.fill(thread, &mut bytes);
            bytes
        };
        let of_a = [ask(&mut a, 2, 5), ask(&mut a, 3, 8), ask(&mut a, 2, 16)];
        let of_3 = ask(&mut b, 3, 8);
        let of_b = [ask(&mut b, 2, 5), of_3, ask(&mut b, 2, 16)];
        assert_eq!(of_a, of_b);
        assert_ne!(of_a[1][..5], of_a[0][..]);
        assert_ne!(ask(&mut Chance::new(8), 2, 16), ask(&mut Chance::new(7), 2, 16));
        assert_ne!(words(7, 1), words(7, 2));
        assert_ne!(device(7, 16), device(8, 16));
    }
}
