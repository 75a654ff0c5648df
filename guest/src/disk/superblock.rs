//! Decides: what a host knows about its image after a restart or a power loss.
//!
//! Flow: read at opening, written when the role or the generation changes. Two slots are written in turn, so that a torn
//! write leaves the other one.
//! Invariants: **S1** a superblock is believed only with its checksum; the higher sequence wins; **S2** `consistent` is false
//! on disk before the first byte of a copy, of the sync that ends a join, or of COLO's writes reaches the image, and true only
//! after the last;
//! **S3** journal records below `journal_from` are history: whatever they say is on the image for good; **S4** what is said of an image
//! is durable here first, and a flush that failed is not made good by the next one: the kernel tells an error once, and keeps what it
//! could not write as if it were written, so the journal is put on the image again before it becomes history.
//! Not here: the journal's records ([`super::journal`]).

use dunlin_core::{
    disk::Generation,
    units::{Epoch, Term},
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::Path,
};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"DUNLSUP1";
const SLOT_BYTES: usize = 4096;
const USED_BYTES: usize = 88;

/// What is known about the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Identity {
    pub generation: Generation,
    /// The image (with the journal) is the disk at one moment.
    pub consistent: bool,
    /// The random name of the pair that last held the same disk; zero: never paired.
    pub pair: [u8; 16],
    /// S3.
    pub journal_from: u64,
}

/// The superblock file of one disk.
#[derive(Debug)]
pub(super) struct Superblock {
    file: File,
    sequence: u64,
    size_bytes: u64,
}

impl Superblock {
    /// Opens or makes the file. A disk that was never seen is whole, and nobody's pair.
    pub fn open(path: &Path, size_bytes: u64) -> io::Result<(Self, Identity)> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let mut bytes = vec![0; SLOT_BYTES * 2];
        let mut got = 0;
        while got < bytes.len() {
            match file.read_at(&mut bytes[got..], got as u64)? {
                0 => break,
                more => got += more,
            }
        }
        let newest = bytes
            .chunks_exact(SLOT_BYTES)
            .filter_map(decode)
            .max_by_key(|(sequence, ..)| *sequence);
        let (sequence, told_bytes, identity) = newest.unwrap_or((
            0,
            size_bytes,
            Identity {
                consistent: true,
                journal_from: 1,
                ..Identity::default()
            },
        ));
        if told_bytes != size_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "{} is about a disk of {told_bytes} bytes, but the image has {size_bytes}: if the image was replaced on purpose, remove that file and its .journal and .dirty",
                    path.display()
                ),
            ));
        }
        Ok((
            Self {
                file,
                sequence,
                size_bytes,
            },
            identity,
        ))
    }

    /// Puts `identity` on stable storage.
    pub fn save(&mut self, identity: &Identity) -> io::Result<()> {
        let sequence = self.sequence + 1;
        let mut slot = vec![0; SLOT_BYTES];
        slot[0..8].copy_from_slice(MAGIC);
        let words = [
            sequence,
            self.size_bytes,
            identity.generation.term.0,
            identity.generation.epoch.0,
            u64::from(identity.generation.primary) | u64::from(identity.consistent) << 1,
            identity.journal_from,
        ];
        for (at, word) in words.iter().enumerate() {
            slot[8 + at * 8..16 + at * 8].copy_from_slice(&word.to_le_bytes());
        }
        slot[56..72].copy_from_slice(&identity.pair);
        let check = xxh3_64(&slot[..80]);
        slot[80..USED_BYTES].copy_from_slice(&check.to_le_bytes());
        super::power::point();
        self.file
            .write_all_at(&slot, (sequence % 2) * SLOT_BYTES as u64)?;
        self.file.sync_data()?;
        super::power::point();
        self.sequence = sequence;
        Ok(())
    }
}

fn decode(slot: &[u8]) -> Option<(u64, u64, Identity)> {
    let word = |at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().expect("8 bytes"));
    if slot[0..8] != *MAGIC || xxh3_64(&slot[..80]) != word(80) {
        return None;
    }
    let flags = word(40);
    let identity = Identity {
        generation: Generation {
            term: Term(word(24)),
            primary: flags & 1 != 0,
            epoch: Epoch(word(32)),
        },
        consistent: flags & 2 != 0,
        pair: slot[56..72].try_into().expect("16 bytes"),
        journal_from: word(48),
    };
    Some((word(8), word(16), identity))
}
