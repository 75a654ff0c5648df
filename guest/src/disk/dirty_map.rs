//! Decides: which extents a peer may lack, over restarts of this host.
//!
//! Flow: before a write reaches the image, its extents are in this file and durable; they leave it some time after the peer
//! has committed them. One write in many costs an fdatasync: the first one to its 16 MiB.
//! Invariants: **M1** an extent is durable here before the image differs from the last commit that the peer told of;
//! **M2** clearing is lazy: a set bit costs a copy, a missing one costs the pair its equality; **M3** an extent leaves the map
//! only when what was written to it is durable on the image *here*: what a power loss takes from a primary's disk, its
//! backup has and this host lacks when it returns.
//! Not here: the set in memory with its epochs (`EpochExtents`).

use dunlin_core::disk::{ExtentSet, extents::extents_of};
use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

const MAGIC: &[u8; 8] = b"DUNLDRT1";
const HEAD_BYTES: u64 = 4096;

#[derive(Debug)]
struct State {
    words: Vec<u64>,
    /// Bits are noted (a peer exists or existed).
    tracking: bool,
}

/// The dirty map of one disk.
#[derive(Debug)]
pub(super) struct DirtyMap {
    file: File,
    extents: u64,
    state: Mutex<State>,
}

impl DirtyMap {
    /// Opens or makes the file. `paired`: a map must exist; if it does not, everything counts as dirty.
    pub fn open(path: &Path, size_bytes: u64, paired: bool) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let extents = extents_of(&(0..size_bytes)).end as usize;
        let mut bytes = vec![0; extents.div_ceil(64) * 8];
        let mut magic = [0; 8];
        let there = file.read_exact_at(&mut magic, 0).is_ok() && magic == *MAGIC;
        let whole = there && file.read_exact_at(&mut bytes, HEAD_BYTES).is_ok();
        if !whole {
            bytes.fill(if paired { 0xff } else { 0 });
            file.write_all_at(&bytes, HEAD_BYTES)?;
            file.write_all_at(MAGIC, 0)?;
            file.sync_data()?;
        }
        let words = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
            .collect();
        Ok(Self {
            file,
            extents: extents as u64,
            state: Mutex::new(State {
                words,
                tracking: paired,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on writes are noted.
    pub fn track(&self) {
        self.lock().tracking = true;
    }

    /// M1: before a write of `range`.
    pub fn ensure(&self, range: &Range<u64>) -> io::Result<()> {
        let mut state = self.lock();
        if !state.tracking {
            return Ok(());
        }
        let missing = |extent: &u64| state.words[*extent as usize / 64] & bit(*extent) == 0;
        let (Some(first), Some(last)) = (extents_of(range).find(missing), extents_of(range).rfind(missing))
        else {
            return Ok(());
        };
        // The neighbours too: they will be written soon, and this file speaks only after a restart of this host.
        let group = first / GROUP_EXTENTS * GROUP_EXTENTS..(last / GROUP_EXTENTS + 1) * GROUP_EXTENTS;
        let (first, last) = (group.start as usize / 64, (group.end - 1) as usize / 64);
        let mut words = state.words[first..=last].to_vec();
        for extent in group {
            words[extent as usize / 64 - first] |= bit(extent);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.file.write_all_at(&bytes, HEAD_BYTES + first as u64 * 8)?;
        self.file.sync_data()?;
        // Only now: another writer to the same extent must not go ahead on a bit that is not durable.
        state.words[first..=last].copy_from_slice(&words);
        Ok(())
    }

    /// M1 for many extents at once.
    pub fn add(&self, more: &ExtentSet) -> io::Result<()> {
        let mut state = self.lock();
        let mut words = state.words.clone();
        for extent in more.iter() {
            words[extent as usize / 64] |= bit(extent);
        }
        self.keep(&mut state, words)?;
        self.file.sync_data()
    }

    /// Every extent in the map.
    pub fn all(&self) -> ExtentSet {
        let state = self.lock();
        (0..self.extents)
            .filter(|extent| state.words[*extent as usize / 64] & bit(*extent) != 0)
            .collect()
    }

    /// M2: takes `done` out. The caller makes sure of M3, and that no write to any of it is under way.
    pub fn clear(&self, done: &ExtentSet) -> io::Result<()> {
        let mut state = self.lock();
        let mut words = state.words.clone();
        for extent in done.iter() {
            words[extent as usize / 64] &= !bit(extent);
        }
        self.keep(&mut state, words)
    }

    fn keep(&self, state: &mut State, words: Vec<u64>) -> io::Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.file.write_all_at(&bytes, HEAD_BYTES)?;
        state.words = words;
        Ok(())
    }
}

/// Extents that are noted together: one fdatasync for 16 MiB. A power of two that divides 64.
const GROUP_EXTENTS: u64 = 16;

fn bit(extent: u64) -> u64 {
    1 << (extent % 64)
}
