//! What it decides: whether a cumulative word (a heartbeat, an acknowledgement, a cursor) was read whole and is newer.
//!
//! **Flow**: [`WordWriter::put`] overwrites one 64-byte slot of the peer's memory; [`WordReader::get`] polls it here.
//! **Invariants**: 1. values are believed only with a fitting checksum and a version above the last one believed.
//! 2. a lost or torn update is made good by the next one: values are cumulative.
//! **Source**: docs/fabric.md (acknowledge with a cumulative *(term, durable index)* word). **Not here**: the meaning.
//!
//! A slot: `version a b c check`, five words. `check` is xxh3 over the four and the grant's key.

use super::{Memory, RegionId, Transport, TransportError};
use xxhash_rust::xxh3::xxh3_64;

/// The distance between slots: a cache line each.
pub const SLOT_BYTES: usize = 64;
const USED: usize = 40;

fn sealed(words: [u64; 4], key: u64) -> [u8; USED] {
    let mut bytes = [0u8; USED];
    for (i, w) in words.into_iter().chain([key]).enumerate() {
        bytes[i * 8..i * 8 + 8].copy_from_slice(&w.to_le_bytes());
    }
    let check = xxh3_64(&bytes);
    bytes[32..].copy_from_slice(&check.to_le_bytes());
    bytes
}

/// The writing end.
#[derive(Clone, Copy, Debug)]
pub struct WordWriter {
    region: RegionId,
    offset: usize,
    epoch: u64,
    key: u64,
    version: u64,
}

impl WordWriter {
    /// For slot number `slot` of a region that was just granted.
    #[must_use]
    pub fn new(region: RegionId, slot: usize, epoch: u64, key: u64) -> Self {
        Self {
            region,
            offset: slot * SLOT_BYTES,
            epoch,
            key,
            version: 0,
        }
    }

    /// Overwrites the slot.
    pub fn put(&mut self, to: &mut dyn Transport, values: [u64; 3]) -> Result<(), TransportError> {
        let bytes = sealed([self.version + 1, values[0], values[1], values[2]], self.key);
        to.write(self.region, self.epoch, self.offset, &bytes)?;
        self.version += 1;
        Ok(())
    }
}

/// The reading end.
#[derive(Clone, Copy, Debug)]
pub struct WordReader {
    offset: usize,
    key: u64,
    version: u64,
}

impl WordReader {
    /// For slot number `slot` of a region that was just registered.
    #[must_use]
    pub fn new(slot: usize, key: u64) -> Self {
        Self {
            offset: slot * SLOT_BYTES,
            key,
            version: 0,
        }
    }

    /// Whether something newer may be there: one load.
    #[inline]
    #[must_use]
    pub fn peek(&self, memory: &Memory) -> bool {
        memory.load(self.offset) > self.version
    }

    /// The newest values, if they are newer than the last ones and whole.
    #[inline]
    pub fn get(&mut self, memory: &Memory) -> Option<[u64; 3]> {
        if !self.peek(memory) {
            return None;
        }
        let mut bytes = [0u8; USED];
        memory.copy_out(self.offset, &mut bytes);
        let word = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("8 bytes"));
        let words = [word(0), word(1), word(2), word(3)];
        if words[0] <= self.version || sealed(words, self.key) != bytes {
            return None;
        }
        self.version = words[0];
        Some([words[1], words[2], words[3]])
    }
}
