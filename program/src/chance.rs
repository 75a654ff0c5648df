//! Chance that is the same in every copy: a seeded stream for each thread, by the number that it has inside.
//!
//! Threads of different copies that have the same number do the same, if anything does; so a thread that asks sooner in one
//! copy than in the other takes nothing away from the others.
//! Invariants: 1. the same seed, thread and number of bytes asked for before give the same bytes; 2. no byte of a stream is given twice,
//! also not by a copy that goes on from another one's places.
//! Not here: who asks.

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Streams of threads begin here; those below are the vectors' and the devices'.
const FIRST_THREAD: u64 = 1 << 32;
/// Streams that there can be: the kernel's own limit of ids (PID_MAX_LIMIT). An id comes again, and its stream must not.
const MOST_THREADS: usize = 1 << 22;
/// A stream counts in these.
const WORD_BYTES: usize = 4;

/// What all copies have.
pub type Seed = [u8; 32];

/// A seed of a number that a person can type.
#[must_use]
pub fn of_number(number: u64) -> Seed {
    ChaCha20Rng::seed_from_u64(number).get_seed()
}

/// The chance of one copy.
#[derive(Debug)]
pub struct Chance {
    seed: Seed,
    /// How far each was drawn, in words.
    threads: BTreeMap<u32, u64>,
}

/// How far it was drawn: a copy goes on from there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drawn {
    /// Of each thread by its number, in words of four bytes.
    pub threads: Vec<(u32, u64)>,
    /// Of the devices, in bytes.
    pub device_bytes: u64,
}

impl Chance {
    /// From a seed that all copies have.
    #[must_use]
    pub fn new(seed: Seed) -> Self {
        let threads = BTreeMap::new();
        Self { seed, threads }
    }

    /// That goes on where another one stood.
    #[must_use]
    pub fn drawn(seed: Seed, drawn: &Drawn) -> Self {
        let threads = drawn.threads.iter().copied().take(MOST_THREADS).collect();
        Self { seed, threads }
    }

    /// The next bytes for a thread.
    pub fn fill(&mut self, thread: u32, bytes: &mut [u8]) {
        let words = self.threads.entry(thread).or_default();
        let mut stream = stream(self.seed, FIRST_THREAD + u64::from(thread));
        stream.set_word_pos(u128::from(*words));
        stream.fill_bytes(bytes);
        // Nobody draws so many that it goes round; another host may say that somebody has.
        *words = words.wrapping_add(bytes.len().div_ceil(WORD_BYTES) as u64);
    }

    /// How far each thread has drawn.
    #[must_use]
    pub fn threads(&self) -> Vec<(u32, u64)> {
        self.threads
            .iter()
            .map(|(thread, words)| (*thread, *words))
            .collect()
    }
}

fn stream(seed: Seed, number: u64) -> ChaCha20Rng {
    let mut stream = ChaCha20Rng::from_seed(seed);
    stream.set_stream(number);
    stream
}

/// The 16 bytes that the `n`th program finds at its start.
#[must_use]
pub fn words(seed: Seed, n: u64) -> [u64; 2] {
    let mut stream = stream(seed, n);
    [stream.next_u64(), stream.next_u64()]
}

/// What a tester's /dev/urandom holds.
#[must_use]
pub fn device(seed: Seed, length_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; length_bytes];
    stream(seed, 0).fill_bytes(&mut bytes);
    bytes
}

/// What comes out of a service's /dev/urandom, from so many bytes on.
#[derive(Debug)]
pub(crate) struct Device {
    stream: ChaCha20Rng,
    /// Bytes of the first word that were drawn before.
    begun: usize,
}

impl Device {
    pub(crate) fn from(seed: Seed, bytes: u64) -> Self {
        let mut stream = stream(seed, 0);
        stream.set_word_pos(u128::from(bytes / WORD_BYTES as u64));
        let begun = bytes as usize % WORD_BYTES;
        Self { stream, begun }
    }

    /// The next ones, `most` at most, which is a multiple of four.
    pub(crate) fn next(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        self.stream.fill_bytes(&mut bytes);
        bytes.split_off(std::mem::take(&mut self.begun))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed(number: u64) -> Seed {
        of_number(number)
    }

    fn ask(chance: &mut Chance, thread: u32, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        chance.fill(thread, &mut bytes);
        bytes
    }

    #[test]
    fn copies_that_ask_in_another_order_get_the_same() {
        let (mut a, mut b) = (Chance::new(seed(7)), Chance::new(seed(7)));
        let of_a = [ask(&mut a, 2, 5), ask(&mut a, 3, 8), ask(&mut a, 2, 16)];
        let of_3 = ask(&mut b, 3, 8);
        let of_b = [ask(&mut b, 2, 5), of_3, ask(&mut b, 2, 16)];
        assert_eq!(of_a, of_b);
        assert_ne!(of_a[1][..5], of_a[0][..]);
        let other = ask(&mut Chance::new(seed(8)), 2, 16);
        assert_ne!(other, ask(&mut Chance::new(seed(7)), 2, 16));
        assert_ne!(words(seed(7), 1), words(seed(7), 2));
        assert_ne!(device(seed(7), 16), device(seed(8), 16));
    }

    #[test]
    fn invariant_2_a_copy_goes_on_where_the_other_one_stood_and_gives_nothing_twice() {
        for length in [1, 4, 5, 63, 64, 257] {
            let mut old = Chance::new(seed(7));
            let before = ask(&mut old, 2, length);
            let drawn = Drawn {
                threads: old.threads(),
                device_bytes: 0,
            };
            let mut new = Chance::drawn(seed(7), &drawn);
            let next = ask(&mut old, 2, 64);
            assert_eq!(ask(&mut new, 2, 64), next, "after {length}");
            assert_ne!(before[..], next[..length.min(64)]);
            assert_eq!(
                ask(&mut new, 3, 9),
                ask(&mut old, 3, 9),
                "one that had asked for nothing"
            );
        }
    }

    #[test]
    fn a_device_goes_on_at_any_byte() {
        let whole = device(seed(7), 64);
        for from in 0..20 {
            let mut device = Device::from(seed(7), from as u64);
            let mut bytes = device.next(16);
            bytes.extend(device.next(16));
            assert_eq!(bytes, whole[from..from - from % 4 + 32], "from {from}");
        }
    }
}
