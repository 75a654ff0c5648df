//! Decides: when a sync of a VM with several disks counts, though the power may fail between two of them.
//!
//! Flow: each disk makes its part durable in its own journal -> [`DiskGroup::agree`] waits for the others -> the last one writes the
//! group's mark, durable -> all go on to their images.
//! Invariants: **A1** no image gets a byte of a sync or a take-over before every disk's record of it is durable, and the mark says so;
//! **A2** at opening, a record that is newer than the mark counts on no disk.
//! Source: two-phase commit; the mark is the coordinator's record. Not here: the records ([`super::journal`]). A VM with one disk has
//! no group: its record is the mark.

use super::words;
use dunlin_core::{
    disk::Generation,
    units::{Epoch, Term},
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"DUNLGRP1";
const SLOT_BYTES: usize = 4096;
const USED_BYTES: usize = 48;

/// The disks of one VM on one host, as far as they move together.
#[derive(Debug)]
pub struct DiskGroup {
    disks: usize,
    path: PathBuf,
    file: File,
    state: Mutex<State>,
    changed: Condvar,
}

/// A disk's place in its group.
#[derive(Clone, Debug)]
pub struct Member {
    /// The group.
    pub group: Arc<DiskGroup>,
    /// Which of its disks.
    pub number: usize,
}

#[derive(Debug)]
struct State {
    sequence: u64,
    /// Durable.
    mark: Generation,
    /// What all disks have agreed on, marks that changed nothing included.
    agreed: Generation,
    parts: BTreeMap<Generation, Part>,
    failed: Option<String>,
}

#[derive(Debug, Default)]
struct Part {
    /// A bit for each disk.
    there: u64,
    wrote: bool,
}

impl DiskGroup {
    /// Opens or makes the group's mark. `disks`: how many there are, at most 64.
    ///
    /// # Errors
    /// What the file system said.
    pub fn open(path: &Path, disks: usize) -> io::Result<Arc<Self>> {
        assert!((1..=64).contains(&disks), "a VM has 1 to 64 disks");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let mut newest = (0, Generation::default());
        for slot in 0..2 {
            let mut bytes = [0; USED_BYTES];
            if file.read_exact_at(&mut bytes, (slot * SLOT_BYTES) as u64).is_ok()
                && let Some(found) = decode(&bytes)
            {
                newest = newest.max(found);
            }
        }
        let (sequence, mark) = newest;
        Ok(Arc::new(Self {
            disks,
            path: path.to_owned(),
            file,
            state: Mutex::new(State {
                sequence,
                mark,
                agreed: mark,
                parts: BTreeMap::new(),
                failed: None,
            }),
            changed: Condvar::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A2: what counts.
    pub(super) fn mark(&self) -> Generation {
        self.lock().mark
    }

    /// A1: `number`'s record of `to` is durable (or it had nothing to write); waits until all disks say so and the mark is durable.
    /// `stopped` ends the wait: the caller's role is over.
    pub(super) fn agree(
        &self,
        number: usize,
        to: Generation,
        wrote: bool,
        stopped: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let mut state = self.lock();
        let part = state.parts.entry(to).or_default();
        part.there |= 1 << number;
        part.wrote |= wrote;
        if part.there.count_ones() as usize == self.disks {
            if part.wrote
                && let Err(error) = self.save(&mut state, to)
            {
                let error = words::of_state_folder(&self.path, error);
                state.failed = Some(error.to_string());
            } else {
                state.agreed = state.agreed.max(to);
            }
            // What is older and not complete never will be: its epoch is over.
            state.parts.retain(|generation, _| *generation > to);
            self.changed.notify_all();
        }
        loop {
            if state.agreed >= to {
                return Ok(());
            }
            if let Some(why) = &state.failed {
                return Err(words::sentence(io::ErrorKind::Other, why.clone()));
            }
            if stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            self.changed.wait(&mut state);
        }
    }

    /// Whoever waits looks whether it is to stop.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// A disk cannot go on: the others must not wait for it, nor move without it.
    pub(super) fn fail(&self, why: &str) {
        self.lock()
            .failed
            .get_or_insert_with(|| format!("another disk of this VM failed: {why}"));
        self.changed.notify_all();
    }

    fn save(&self, state: &mut State, mark: Generation) -> io::Result<()> {
        let sequence = state.sequence + 1;
        let mut slot = [0; USED_BYTES];
        slot[0..8].copy_from_slice(MAGIC);
        let words = [sequence, mark.term.0, u64::from(mark.primary), mark.epoch.0];
        for (at, word) in words.iter().enumerate() {
            slot[8 + at * 8..16 + at * 8].copy_from_slice(&word.to_le_bytes());
        }
        let check = xxh3_64(&slot[..40]);
        slot[40..].copy_from_slice(&check.to_le_bytes());
        super::power::point();
        self.file
            .write_all_at(&slot, (sequence % 2) * SLOT_BYTES as u64)?;
        self.file.sync_data()?;
        super::power::point();
        (state.sequence, state.mark) = (sequence, mark);
        Ok(())
    }
}

fn decode(slot: &[u8; USED_BYTES]) -> Option<(u64, Generation)> {
    let word = |at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().expect("8 bytes"));
    let good = slot[0..8] == *MAGIC && xxh3_64(&slot[..40]) == word(40);
    good.then(|| {
        let mark = Generation {
            term: Term(word(16)),
            primary: word(24) != 0,
            epoch: Epoch(word(32)),
        };
        (word(8), mark)
    })
}
