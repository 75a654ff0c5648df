//! Decides: which extents a peer may lack, over restarts of this host.
//!
//! Flow: before a write reaches the image, its extents are in this file and durable; they leave it some time after the peer
//! has committed them. One write in many costs an fdatasync: the first one to its 16 MiB.
//! Invariants: **M1** an extent is durable here before the image differs from the last commit that the peer told of;
//! **M2** clearing is lazy: a set bit costs a copy, a missing one costs the pair its equality; **M3** an extent leaves the map
//! only when what was written to it is durable on the image *here*: what a power loss takes from a primary's disk, its
//! backup has and this host lacks when it returns (a flush after one that failed says nothing of that); **M4** what is in memory
//! is in the file, durable, and nobody who only looks at it or clears it waits for the disk: the file is written by one at a time,
//! and memory follows it when bits are set, and goes before it when they are cleared.
//! Not here: the set in memory with its epochs (`EpochExtents`).

use super::faults::Faults;
use dunlin_core::disk::{ExtentSet, extents::extents_of};
use parking_lot::{Mutex, MutexGuard};
use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
};

const MAGIC: &[u8; 8] = b"DUNLDRT1";
const HEAD_BYTES: u64 = 4096;

#[derive(Debug)]
struct State {
    /// Durable in the file (M4).
    words: Vec<u64>,
    /// Bits are noted (a peer exists or existed).
    tracking: bool,
}

/// The dirty map of one disk.
#[derive(Debug)]
pub(super) struct DirtyMap {
    /// Held over every access to the file, which may take as long as the disk likes. Never waited for with `state` held.
    file: Mutex<File>,
    extents: u64,
    /// Never held over an access to the file.
    state: Mutex<State>,
    faults: Arc<Faults>,
}

impl DirtyMap {
    /// Opens or makes the file. `paired`: a map must exist; if it does not, everything counts as dirty.
    pub fn open(path: &Path, size_bytes: u64, paired: bool, faults: Arc<Faults>) -> io::Result<Self> {
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
            file: Mutex::new(file),
            extents: extents as u64,
            state: Mutex::new(State {
                words,
                tracking: paired,
            }),
            faults,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// From here on writes are noted.
    pub fn track(&self) {
        self.lock().tracking = true;
    }

    fn file(&self) -> MutexGuard<'_, File> {
        self.file.lock()
    }

    /// M1: before a write of `range`. Waits for the disk only where an extent is missing.
    pub fn ensure(&self, range: &Range<u64>) -> io::Result<()> {
        if self.missing(range).is_none() {
            return Ok(());
        }
        let file = self.file();
        // Whoever had the file before may have noted the same extents.
        let Some((from, words)) = self.missing(range) else {
            return Ok(());
        };
        self.write_durably(&file, from, &words)
    }

    /// The words of the file that `range` needs changed, as they have to be; nothing where it is noted, or need not be.
    fn missing(&self, range: &Range<u64>) -> Option<(usize, Vec<u64>)> {
        let state = self.lock();
        if !state.tracking {
            return None;
        }
        let missing = |extent: &u64| state.words[*extent as usize / 64] & bit(*extent) == 0;
        let first = extents_of(range).find(missing)?;
        let last = extents_of(range).rfind(missing)?;
        // The neighbours too: they will be written soon, and this file speaks only after a restart of this host.
        let group = first / GROUP_EXTENTS * GROUP_EXTENTS..(last / GROUP_EXTENTS + 1) * GROUP_EXTENTS;
        let (first, last) = (group.start as usize / 64, (group.end - 1) as usize / 64);
        let mut words = state.words[first..=last].to_vec();
        for extent in group {
            words[extent as usize / 64 - first] |= bit(extent);
        }
        Some((first, words))
    }

    /// M1 for many extents at once.
    pub fn add(&self, more: &ExtentSet) -> io::Result<()> {
        let file = self.file();
        let mut words = self.lock().words.clone();
        for (word, more) in words.iter_mut().zip(more.words()) {
            *word |= more;
        }
        self.write_durably(&file, 0, &words)
    }

    /// Bits are set in the file first and in memory then: another writer to the same extent must not go ahead on a bit that is
    /// not durable. What was cleared meanwhile is set again, which is no harm (M2).
    fn write_durably(&self, file: &File, from: usize, words: &[u64]) -> io::Result<()> {
        write_words(file, from, words)?;
        self.faults.before_state_flush();
        file.sync_data()?;
        let mut state = self.lock();
        for (word, durable) in state.words[from..].iter_mut().zip(words) {
            *word |= durable;
        }
        Ok(())
    }

    /// Whether any of the range's extents is in the map.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        let state = self.lock();
        extents_of(range).any(|extent| state.words[extent as usize / 64] & bit(extent) != 0)
    }

    /// Every extent in the map.
    pub fn all(&self) -> ExtentSet {
        let mut words = self.lock().words.clone();
        // The last word may have bits that are none of the disk's.
        if let Some(last) = words.last_mut().filter(|_| self.extents % 64 != 0) {
            *last &= bit(self.extents) - 1;
        }
        ExtentSet::from_words(words)
    }

    /// M2: takes `done` out, in memory; the file has more until [`Self::save`]. Never waits for the disk. The caller makes sure of
    /// M3, and that no write to any of it is under way.
    pub fn clear(&self, done: &ExtentSet) {
        let mut state = self.lock();
        for (word, done) in state.words.iter_mut().zip(done.words()) {
            *word &= !done;
        }
    }

    /// What was cleared leaves the file, some time.
    pub fn save(&self) -> io::Result<()> {
        let file = self.file();
        // Only now: whoever had the file may have set bits, and they are in memory too.
        let words = self.lock().words.clone();
        write_words(&file, 0, &words)
    }
}

fn write_words(file: &File, from: usize, words: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&bytes, HEAD_BYTES + from as u64 * 8)
}

/// Extents that are noted together: one fdatasync for 16 MiB. A power of two that divides 64.
const GROUP_EXTENTS: u64 = 16;

fn bit(extent: u64) -> u64 {
    1 << (extent % 64)
}
