//! What it decides: where in one file the log ends, and whether it ends there rightly.
//!
//! **Flow**: [`Filling`] (its room is taken at once or not at all; zero-filled, so that a later sync has no metadata to write) -> `append` ->
//! `sync`; at start [`Segment::read`].
//! **Invariants**: 1. bytes before `synced` are never written again. 2. behind the last whole record, a whole record of a
//! batch that began later proves that something synced is damaged: an error. Otherwise the rest is a torn tail.
//! **Not here**: which files there are (`disk`).

use super::record::{self, Record};
use super::{Cut, DiskError};
use dunlin_core::consensus::{Entry, MOST};
use dunlin_core::units::Index;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"dunlog01";
/// Where records begin.
pub(super) const START: u64 = 64;

/// One file of the log.
pub(super) struct Segment {
    pub(super) path: PathBuf,
    pub(super) number: u64,
    file: File,
    id: u64,
    bytes: u64,
    /// Where the next record goes.
    at: u64,
    /// Where the batch that is being written began.
    batch: u64,
    /// The highest index in it.
    pub(super) max: Index,
    buffer: Vec<u8>,
}

/// A segment that is being filled with zeros, in steps, so that nothing else waits long.
pub(super) struct Filling {
    dir: PathBuf,
    temporary: PathBuf,
    file: File,
    number: u64,
    id: u64,
    bytes: u64,
    at: u64,
}

impl Filling {
    pub(super) fn begin(dir: &Path, number: u64, id: u64, bytes: u64) -> Result<Self, DiskError> {
        let temporary = dir.join("log.new");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary);
        let file = file.map_err(DiskError::io(&temporary, "creating a segment"))?;
        let this = Self {
            dir: dir.to_owned(),
            temporary,
            file,
            number,
            id,
            bytes,
            at: 0,
        };
        // Where there is too little, nothing is written to find that out, and nobody else meets a disk that was full for that.
        reserve(&this.file, bytes).map_err(DiskError::io(&this.temporary, "taking room for a segment"))?;
        Ok(this)
    }

    /// Fills about `bytes` more and syncs them. True when all is filled.
    pub(super) fn step(&mut self, bytes: u64) -> Result<bool, DiskError> {
        if self.at == self.bytes {
            return Ok(true);
        }
        let zeros = vec![0u8; 256 << 10];
        let until = (self.at + bytes).min(self.bytes);
        while self.at < until {
            let n = zeros.len().min((until - self.at) as usize);
            let filled = self.file.write_all_at(&zeros[..n], self.at);
            filled.map_err(DiskError::io(&self.temporary, "filling a segment"))?;
            self.at += n as u64;
        }
        self.file
            .sync_data()
            .map_err(DiskError::io(&self.temporary, "filling a segment"))?;
        Ok(self.at == self.bytes)
    }

    /// Fills the rest, writes the header, and gives it its final name, all synced.
    pub(super) fn finish(mut self) -> Result<Segment, DiskError> {
        self.step(self.bytes)?;
        let mut head = [0u8; START as usize];
        head[..8].copy_from_slice(MAGIC);
        head[8..16].copy_from_slice(&self.number.to_le_bytes());
        head[16..24].copy_from_slice(&self.id.to_le_bytes());
        let check = xxh3_64(&head[..24]);
        head[24..32].copy_from_slice(&check.to_le_bytes());
        let write = self
            .file
            .write_all_at(&head, 0)
            .and_then(|()| self.file.sync_all());
        write.map_err(DiskError::io(&self.temporary, "writing a segment's header"))?;
        let path = Segment::path(&self.dir, self.number);
        std::fs::rename(&self.temporary, &path).map_err(DiskError::io(&path, "renaming a new segment"))?;
        super::disk::sync_dir(&self.dir)?;
        let file = self.file.try_clone().map_err(DiskError::io(&path, "opening"))?;
        let (number, id, bytes) = (self.number, self.id, self.bytes);
        Ok(Segment {
            path,
            number,
            file,
            id,
            bytes,
            at: START,
            batch: START,
            max: Index(0),
            buffer: Vec::new(),
        })
    }
}

/// Takes the room that a file will need. A file system that cannot do it tells when it is filled.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    if free_bytes(file)?.is_some_and(|free| free < bytes) {
        // Some take what there is before they say so.
        return Err(io::Error::from_raw_os_error(libc::ENOSPC));
    }
    loop {
        // SAFETY: a plain call on an open descriptor.
        let rc = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes as libc::off_t) };
        if rc == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => return Ok(()),
            _ => return Err(error),
        }
    }
}

/// What is free where this file is, for root as well; none where that is not known.
fn free_bytes(file: &File) -> io::Result<Option<u64>> {
    // SAFETY: plain data that lives across the call; the descriptor is open.
    let (rc, system) = unsafe {
        let mut system: libc::statvfs = std::mem::zeroed();
        (libc::fstatvfs(file.as_raw_fd(), &raw mut system), system)
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((system.f_blocks > 0).then(|| system.f_bfree.saturating_mul(system.f_frsize)))
}

impl Drop for Filling {
    /// A segment that was given up does not keep its space. (After `finish` there is no such file.)
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.temporary);
    }
}

/// What a segment held.
pub(super) struct Contents {
    pub(super) segment: Segment,
    pub(super) records: Vec<Record>,
    pub(super) cut: Option<Cut>,
}

impl Segment {
    pub(super) fn path(dir: &Path, number: u64) -> PathBuf {
        dir.join(format!("log-{number:016x}"))
    }

    /// Reads a file. `last`: it is the newest one, and may have a torn tail, which is cut (zeroed and synced).
    pub(super) fn read(path: &Path, number: u64, last: bool) -> Result<Contents, DiskError> {
        let corrupt = |offset: u64, what| DiskError::Corrupt {
            file: path.to_owned(),
            offset,
            what,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(DiskError::io(path, "opening"))?;
        let mut data = Vec::new();
        io::Read::read_to_end(&mut &file, &mut data).map_err(DiskError::io(path, "reading"))?;
        let head = data
            .get(..START as usize)
            .ok_or_else(|| corrupt(0, "shorter than its header"))?;
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        if &head[..8] != MAGIC || word(24) != xxh3_64(&head[..24]) || word(8) != number {
            return Err(corrupt(0, "the header is not a segment's, or of another one"));
        }
        let id = word(16);
        let (mut at, mut batch, mut max) = (START as usize, START, Index(0));
        let mut records = Vec::new();
        while let Some((record, its_batch, size)) = record::decode(&data[at..], id) {
            if its_batch > at as u64 || its_batch < batch {
                return Err(corrupt(at as u64, "a record of an impossible batch"));
            }
            if record.stamp().index.0.max(record.stamp().term.0) >= MOST {
                return Err(corrupt(at as u64, "a term or an index that no log has reached"));
            }
            batch = its_batch;
            if let Record::Entry(e) = &record {
                max = max.max(e.stamp.index);
            }
            records.push(record);
            at += size;
        }
        let mut cut = None;
        if let Some(end) = data[at..].iter().rposition(|b| *b != 0) {
            let end = at + end + 1;
            if !last {
                return Err(corrupt(
                    at as u64,
                    "an unreadable record, though a later segment exists",
                ));
            }
            for later in (at + 8..end).step_by(8) {
                if record::marked(&data[later..])
                    && let Some((_, its_batch, _)) = record::decode(&data[later..], id)
                    && its_batch > at as u64
                {
                    return Err(corrupt(
                        at as u64,
                        "an unreadable record, though a later batch was written",
                    ));
                }
            }
            let zeros = vec![0u8; end - at];
            file.write_all_at(&zeros, at as u64)
                .map_err(DiskError::io(path, "cutting a torn tail"))?;
            file.sync_all()
                .map_err(DiskError::io(path, "cutting a torn tail"))?;
            cut = Some(Cut {
                file: path.to_owned(),
                offset: at as u64,
                bytes: (end - at) as u64,
            });
        }
        let (path, bytes, at) = (path.to_owned(), data.len() as u64, at as u64);
        let segment = Self {
            path,
            number,
            file,
            id,
            bytes,
            at,
            batch: at,
            max,
            buffer: Vec::new(),
        };
        Ok(Contents {
            segment,
            records,
            cut,
        })
    }

    /// Whether so many more bytes fit.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.at + self.buffer.len() as u64 + bytes as u64 <= self.bytes
    }

    /// Whether it is more than half full.
    pub(super) fn is_half_full(&self) -> bool {
        self.at * 2 > self.bytes
    }

    pub(super) fn push(&mut self, record: &Record) {
        record::encode(record, self.batch, self.id, &mut self.buffer);
    }

    pub(super) fn push_entry(&mut self, entry: &Entry) {
        record::encode_entry(entry, self.batch, self.id, &mut self.buffer);
        self.max = self.max.max(entry.stamp.index);
    }

    /// Writes what was pushed and waits until it is on disk.
    pub(super) fn sync(&mut self) -> Result<(), DiskError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let write = self.file.write_all_at(&self.buffer, self.at);
        write.map_err(DiskError::io(&self.path, "writing"))?;
        self.file.sync_data().map_err(|source| DiskError::Io {
            file: self.path.clone(),
            what: "syncing",
            source,
        })?;
        self.at += self.buffer.len() as u64;
        self.batch = self.at;
        self.buffer.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::Scratch;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn what_a_segment_needs_is_taken_before_anything_is_written_and_given_back_with_it() {
        const BYTES: u64 = 1 << 20;
        let dir = Scratch::new("room");
        let filling = Filling::begin(dir.path(), 0, 1, BYTES).unwrap();
        let file = filling.file.metadata().unwrap();
        let cannot = file.len() == 0; // this file system
        assert!(cannot || (file.len() == BYTES && file.blocks() * 512 >= BYTES));
        drop(filling);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let segment = Filling::begin(dir.path(), 0, 1, BYTES).unwrap().finish().unwrap();
        assert_eq!(std::fs::metadata(&segment.path).unwrap().len(), BYTES);
    }
}
