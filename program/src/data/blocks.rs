//! An image in blocks: which of two hosts' differ, and an image at one moment.
//!
//! Decides:    which blocks travel.
//! Flow:       backup: `hashes_from` its image -> primary: `Source::differing`, while the program runs, until little is left -> it stands still,
//!             `Source::at_rest` -> backup: `Target::write`, then `Target::end`.
//! Invariants: 1. what `at_rest` yields, over what was sent before, is the image at one moment: nothing was written to the device between its
//!             first and its last look, or it looks again; 2. (memory) one block at a time, and 16 bytes for each block of the image; 3. (time) the
//!             program stands still for `at_rest` no longer than that is told, and for one block and one syncfs(2) more.
//! Source:     lseek(2), SEEK_DATA; Documentation/block/stat.rst; ext4's EXT4_IOC_CHECKPOINT. Not here: the way there (`node`).

use super::device::Figures;
use super::{Image, punch};
use crate::guard::GuardError;
use dunlin_core::sync::compare::hash_block;
use rustix::fs::{SeekFrom, seek, syncfs};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// What is compared and sent as one.
pub const BLOCK_BYTES: usize = 64 << 10;
/// A program that stands still writes nothing; the kernel may, for it.
const LOOKS: usize = 8;
/// Of a block that holds nothing, written or not.
const NOTHING: u128 = 0;
/// `_IOW('f', 43, __u32)`: the journal is worked off.
const EXT4_IOC_CHECKPOINT: libc::c_ulong = 0x4004_662b;

/// Where a piece of an image goes that was read.
pub type Each<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<(), GuardError>;

fn failed(error: impl Into<io::Error>) -> GuardError {
    GuardError::new(format!("the image: {}", error.into()))
}

/// How many blocks are looked at before the other host hears of it: 256 MiB, which a slow disk reads in seconds.
pub const PART_BLOCKS: usize = 4096;

/// The hash of each block, in order: 16 bytes for 64 KiB.
///
/// # Errors
/// Those of the file.
pub fn hashes(image: &Image) -> Result<Vec<u128>, GuardError> {
    let mut known = Vec::new();
    loop {
        let part = hashes_from(image, known.len())?;
        if part.is_empty() {
            return Ok(known);
        }
        known.extend(part);
    }
}

/// Those of `PART_BLOCKS` from this one on, or of as many as there are; of none at the end.
///
/// # Errors
/// Those of the file.
pub fn hashes_from(image: &Image, first: usize) -> Result<Vec<u128>, GuardError> {
    let left = count(&image.file)?.saturating_sub(first);
    let mut known = vec![NOTHING; PART_BLOCKS.min(left)];
    walk(&image.file, first, &mut known, None, &mut |_, _| Ok(()))?;
    Ok(known)
}

/// An image that a running program writes to.
#[derive(Debug)]
pub struct Source {
    file: File,
    figures: Figures,
    mounted: OwnedFd,
}

impl Source {
    pub(super) fn new(file: File, figures: Figures, mounted: OwnedFd) -> Self {
        Self {
            file,
            figures,
            mounted,
        }
    }

    /// How many blocks it has.
    ///
    /// # Errors
    /// Those of the file.
    pub fn blocks(&self) -> Result<usize, GuardError> {
        count(&self.file)
    }

    /// What was written is in the image now, as far as it is not written meanwhile.
    ///
    /// # Errors
    /// Those of syncfs(2): an image that its host's disk has no room for.
    pub fn sync(&self) -> Result<(), GuardError> {
        syncfs(&self.mounted).map_err(failed)
    }

    /// Hands on each block whose hash is not `known`, which then has it. Returns how many bytes.
    ///
    /// # Errors
    /// Those of the file, and of `each`.
    pub fn differing(&self, known: &mut [u128], each: Each<'_>) -> Result<u64, GuardError> {
        walk(&self.file, 0, known, None, each)
    }

    /// As `differing`, of those blocks that begin at `first`.
    ///
    /// # Errors
    /// Those.
    pub fn differing_from(
        &self,
        first: usize,
        known: &mut [u128],
        each: Each<'_>,
    ) -> Result<u64, GuardError> {
        walk(&self.file, first, known, None, each)
    }

    /// As `differing`, of a program that stands still, for so long at most: invariants 1 and 3.
    ///
    /// # Errors
    /// Those, where somebody goes on writing, and where the time is over.
    pub fn at_rest(&self, known: &mut [u128], most: Duration, each: Each<'_>) -> Result<u64, GuardError> {
        let until = Instant::now() + most;
        let mut bytes = 0;
        for _ in 0..LOOKS {
            self.sync()?;
            let flags: u32 = 0;
            // A kernel without it keeps in the journal what the other host then works off when it mounts the image.
            // SAFETY: the kernel reads one number.
            let _ = unsafe { libc::ioctl(self.mounted.as_raw_fd(), EXT4_IOC_CHECKPOINT, &raw const flags) };
            let before = self.figures.writes().map_err(failed)?;
            bytes += walk(&self.file, 0, known, Some(until), each)?;
            if before.is_some() && self.figures.writes().map_err(failed)? == before {
                return Ok(bytes);
            }
        }
        Err(GuardError::new(
            "the image is written to although the program stands still".to_owned(),
        ))
    }
}

/// An image that another host's blocks are written into.
pub struct Target {
    image: Image,
    blocks: usize,
}

impl Target {
    /// This one, which nobody has mounted.
    ///
    /// # Errors
    /// Those of the file.
    pub fn new(image: Image) -> Result<Self, GuardError> {
        let blocks = count(&image.file)?;
        Ok(Self { image, blocks })
    }

    /// Writes a block.
    ///
    /// # Errors
    /// A block that the image does not have; a full disk.
    pub fn write(&self, number: u64, bytes: &[u8]) -> Result<(), GuardError> {
        if number >= self.blocks as u64 || bytes.len() != BLOCK_BYTES {
            return Err(GuardError::new(format!(
                "the other host's image has a block {number} of {} bytes, and the one here has not",
                bytes.len()
            )));
        }
        let at = number * BLOCK_BYTES as u64;
        let is_nothing = hash_of(bytes) == NOTHING;
        if is_nothing && punch(&self.image.file, at, BLOCK_BYTES as u64).is_ok() {
            return Ok(());
        }
        self.image.file.write_all_at(bytes, at).map_err(failed)
    }

    /// So far they are on disk.
    ///
    /// # Errors
    /// Those of fsync(2).
    pub fn sync(&self) -> Result<(), GuardError> {
        self.image.file.sync_all().map_err(failed)
    }

    /// That was all.
    #[must_use]
    pub fn end(self) -> Image {
        self.image
    }
}

fn count(file: &File) -> Result<usize, GuardError> {
    let bytes = file.metadata().map_err(failed)?.len();
    // It is a whole number of MiB.
    usize::try_from(bytes / BLOCK_BYTES as u64)
        .map_err(|_| GuardError::new("the image is too large".to_owned()))
}

fn hash_of(block: &[u8]) -> u128 {
    match block.iter().all(|byte| *byte == 0) {
        true => NOTHING,
        false => hash_block(block),
    }
}

/// Those from `first` on that `known` is of, until then at most. Holes are not read: an image is as long as its contents.
fn walk(
    file: &File,
    first: usize,
    known: &mut [u128],
    until: Option<Instant>,
    each: Each<'_>,
) -> Result<u64, GuardError> {
    let mut block = vec![0; BLOCK_BYTES];
    let mut sent = 0;
    let (mut number, end) = (first, first + known.len());
    while number < end {
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(GuardError::new(
                "the image takes too long to be read while the program stands still: it is too large, or its disk too slow".to_owned(),
            ));
        }
        let data = next_data(file, number)?.unwrap_or(end).min(end);
        // What was there before, and is a hole now.
        block.fill(0);
        for (at, known) in (first..data).zip(known.iter_mut()).skip(number - first) {
            if *known != NOTHING {
                *known = NOTHING;
                each(at as u64, &block)?;
                sent += BLOCK_BYTES as u64;
            }
        }
        number = data;
        if let Some(known) = known.get_mut(number - first) {
            file.read_exact_at(&mut block, number as u64 * BLOCK_BYTES as u64)
                .map_err(failed)?;
            let hash = hash_of(&block);
            if *known != hash {
                *known = hash;
                each(number as u64, &block)?;
                sent += BLOCK_BYTES as u64;
            }
            number += 1;
        }
    }
    Ok(sent)
}

/// The first block from this one on that has something written in it.
fn next_data(file: &File, from: usize) -> Result<Option<usize>, GuardError> {
    match seek(file, SeekFrom::Data(from as u64 * BLOCK_BYTES as u64)) {
        Ok(at) => Ok(Some((at / BLOCK_BYTES as u64) as usize)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}
