//! What it decides: which hard state is the last one that was written.
//!
//! Two slots of 4096 bytes, written in turn, each `count:u64 term:u64 voted_for:u64 check:u64`; the higher count with a
//! fitting checksum wins. **Invariants**: 1. the slot of the last whole hard state is never written, so a crash leaves it or the
//! new one. 2. if no slot fits but the file has content, opening fails: a forgotten vote could elect two leaders.
//! **Not here**: what is in it.

use super::DiskError;
use dunlin_core::consensus::{HardState, MOST};
use dunlin_core::units::{ReplicaId, Term};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const SLOT: u64 = 4096;
const NOBODY: u64 = u64::MAX;

pub(super) struct HardStateFile {
    path: PathBuf,
    file: File,
    count: u64,
}

fn encode(count: u64, hard_state: HardState) -> [u8; 32] {
    let mut bytes = [0u8; 32];
    let voted_for = hard_state.voted_for.map_or(NOBODY, |r| u64::from(r.0));
    for (i, word) in [count, hard_state.term.0, voted_for].into_iter().enumerate() {
        bytes[i * 8..i * 8 + 8].copy_from_slice(&word.to_le_bytes());
    }
    let check = xxh3_64(&bytes[..24]);
    bytes[24..].copy_from_slice(&check.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<(u64, HardState)> {
    let bytes = bytes.first_chunk::<32>()?;
    let word = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("8 bytes"));
    let voted_for = match word(2) {
        NOBODY => None,
        id => Some(ReplicaId(u8::try_from(id).ok()?)),
    };
    let possible = word(0) > 0 && word(0) < u64::MAX && word(1) < MOST;
    (word(3) == xxh3_64(&bytes[..24]) && possible).then_some((
        word(0),
        HardState {
            term: Term(word(1)),
            voted_for,
        },
    ))
}

impl HardStateFile {
    /// Opens or creates it; what was found, if any was ever written.
    pub(super) fn open(dir: &Path) -> Result<(Self, Option<HardState>), DiskError> {
        let path = dir.join("promise");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = file.map_err(DiskError::io(&path, "opening"))?;
        let mut data = Vec::new();
        std::io::Read::read_to_end(&mut &file, &mut data).map_err(DiskError::io(&path, "reading"))?;
        let slots = [0, 1].map(|i| data.get((i * SLOT) as usize..).and_then(decode));
        let best = slots.into_iter().flatten().max_by_key(|(count, _)| *count);
        if best.is_none() && data.iter().any(|b| *b != 0) {
            return Err(DiskError::Corrupt {
                file: path,
                offset: 0,
                what: "neither slot holds a whole hard state",
            });
        }
        if data.len() < 2 * SLOT as usize {
            file.write_all_at(&vec![0; 2 * SLOT as usize - data.len()], data.len() as u64)
                .and_then(|()| file.sync_all())
                .map_err(DiskError::io(&path, "creating"))?;
        }
        let count = best.map_or(0, |(count, _)| count);
        Ok((Self { path, file, count }, best.map(|(_, hard_state)| hard_state)))
    }

    /// Makes it durable.
    pub(super) fn save(&mut self, hard_state: HardState) -> Result<(), DiskError> {
        let count = self.count + 1;
        self.file
            .write_all_at(&encode(count, hard_state), (count % 2) * SLOT)
            .map_err(DiskError::io(&self.path, "writing"))?;
        self.file
            .sync_data()
            .map_err(DiskError::io(&self.path, "syncing"))?;
        self.count = count;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hard_state_survives_damage_to_the_slot_that_was_being_written() {
        let dir = crate::log::tests::Scratch::new("promise");
        let mut kept = None;
        for term in 1..20u64 {
            let hard_state = HardState {
                term: Term(term),
                voted_for: (term % 3 > 0).then_some(ReplicaId((term % 3) as u8)),
            };
            let (mut file, found) = HardStateFile::open(dir.path()).unwrap();
            assert_eq!(found, kept);
            file.save(hard_state).unwrap();
            let count = file.count;
            drop(file);
            // The next save dies half-way: its slot holds rubbish.
            let raw = OpenOptions::new()
                .write(true)
                .open(dir.path().join("promise"))
                .unwrap();
            raw.write_all_at(&[0xaa; 20], ((count + 1) % 2) * SLOT).unwrap();
            kept = Some(hard_state);
        }
        let raw = OpenOptions::new()
            .write(true)
            .open(dir.path().join("promise"))
            .unwrap();
        raw.write_all_at(&[0xaa; 8192], 0).unwrap();
        assert!(matches!(
            HardStateFile::open(dir.path()),
            Err(DiskError::Corrupt { .. })
        ));
    }
}
