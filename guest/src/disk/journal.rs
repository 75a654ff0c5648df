//! Decides: how a change of many sectors reaches the image all or not at all, though the power may fail half-way.
//!
//! Flow: a record is written and made durable, then the image is changed; at opening [`replay`] completes or rolls back.
//! Kinds: a *redo* carries what a commit or a take-over puts on the image; a *light* one carries, for sectors that the
//! lightweight checkpoint settles between two syncs, the new bytes and the old ones.
//! Invariants: **J1** no byte of a change reaches the image before its record is durable; **J2** a record counts only with
//! its checksum and the next sequence number; **J3** light records after the last redo are rolled back (the image is then
//! the last committed sync), those before it are repeated.
//! Source: *GANNET* IV-A: "all the checkpoint states should be well received by the secondary node first and then applied
//! in a transactional (atomic) fashion". Not here: when a record is history (`Superblock`).

use super::{faults::Faults, words};
use bytes::Bytes;
use dunlin_core::{
    disk::{Content, Generation},
    units::{Epoch, Term},
};
use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use xxhash_rust::xxh3::Xxh3;

const MAGIC: u32 = 0x4a4e_4c31;
const HEAD_BYTES: usize = 80;
const RUN_BYTES: usize = 24;
const CHUNK_BYTES: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The backup's image becomes sync `epoch` of `term`.
    Commit,
    /// The image becomes what the backup's VM saw; its host speaks in `term`.
    TakeOver,
    /// Between two syncs, see J3.
    Light,
}

/// One record, as found at opening.
#[derive(Debug)]
pub(super) struct Record {
    pub kind: Kind,
    pub term: Term,
    pub epoch: Epoch,
    pub runs: Vec<(u64, Content)>,
    /// Light only: what was there before, in the same order.
    pub old: Vec<(u64, Content)>,
}

impl Record {
    /// How new the image is with it.
    pub fn generation(&self) -> Generation {
        Generation {
            term: self.term,
            primary: self.kind == Kind::TakeOver,
            epoch: self.epoch,
        }
    }
}

/// The journal file of one disk.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    at: u64,
    next: u64,
    faults: Arc<Faults>,
    steps: Arc<AtomicU64>,
}

impl Journal {
    /// Opens or makes the file and reads the records from number `from` on. `faults` are those of the disk that it is on; each piece of a
    /// record that is written is one of the `steps`.
    pub fn open(
        path: &Path,
        from: u64,
        faults: Arc<Faults>,
        steps: Arc<AtomicU64>,
    ) -> io::Result<(Self, Vec<Record>)> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let mut journal = Self {
            file,
            path: path.to_owned(),
            at: 0,
            next: from,
            faults,
            steps,
        };
        let mut records = Vec::new();
        while let Some(record) = journal.read_next()? {
            records.push(record);
        }
        Ok((journal, records))
    }

    /// Bytes of records that are not history yet.
    pub fn bytes(&self) -> u64 {
        self.at
    }

    /// The number that the next record gets.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The superblock says that every record so far is history: the file is used from its start again.
    pub fn restart(&mut self) -> io::Result<()> {
        self.at = 0;
        if self.file.metadata()?.len() > KEEP_BYTES {
            self.file.set_len(KEEP_BYTES)?;
        }
        Ok(())
    }

    /// Appends a record and makes it durable (J1).
    pub fn append(
        &mut self,
        kind: Kind,
        term: Term,
        epoch: Epoch,
        runs: &[(u64, Content)],
        old: &[(u64, Content)],
    ) -> io::Result<()> {
        let mut out = Writer {
            file: &self.file,
            path: &self.path,
            faults: &self.faults,
            steps: &self.steps,
            at: self.at + HEAD_BYTES as u64,
            chunk: Vec::new(),
            hash: Xxh3::new(),
        };
        for (offset, content) in runs.iter().chain(old) {
            let zero = matches!(content, Content::Zero(_));
            for word in [*offset, content.len(), u64::from(zero)] {
                out.put(&word.to_le_bytes())?;
            }
        }
        for (_, content) in runs.iter().chain(old) {
            if let Content::Data(data) = content {
                out.put(data)?;
            }
        }
        out.flush()?;
        let end = out.at;
        let body = end - self.at - HEAD_BYTES as u64;
        let mut head = [0; HEAD_BYTES];
        head[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        head[4] = match kind {
            Kind::Commit => 1,
            Kind::TakeOver => 2,
            Kind::Light => 3,
        };
        for (at, word) in [
            self.next,
            term.0,
            epoch.0,
            runs.len() as u64,
            old.len() as u64,
            body,
        ]
        .iter()
        .enumerate()
        {
            head[8 + at * 8..16 + at * 8].copy_from_slice(&word.to_le_bytes());
        }
        out.hash.update(&head[..64]);
        let check = out.hash.digest128();
        head[64..80].copy_from_slice(&check.to_le_bytes());
        super::power::point();
        let failed = |error| words::of_state_folder(&self.path, error);
        self.file.write_all_at(&head, self.at).map_err(failed)?;
        self.faults.before_flush()?;
        self.file.sync_data().map_err(failed)?;
        super::power::point();
        self.at = end.next_multiple_of(512);
        self.next += 1;
        Ok(())
    }

    /// J2. `None` at the first thing that is no record.
    fn read_next(&mut self) -> io::Result<Option<Record>> {
        let len = self.file.metadata()?.len();
        let mut head = [0; HEAD_BYTES];
        if self.at + HEAD_BYTES as u64 > len {
            return Ok(None);
        }
        self.file.read_exact_at(&mut head, self.at)?;
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        let (sequence, term, epoch, runs, old, body) =
            (word(8), word(16), word(24), word(32), word(40), word(48));
        let kind = match head[4] {
            1 => Kind::Commit,
            2 => Kind::TakeOver,
            3 => Kind::Light,
            _ => return Ok(None),
        };
        let start = self.at + HEAD_BYTES as u64;
        let fits = fits(start, body, len);
        let count = runs
            .checked_add(old)
            .filter(|count| *count <= body / RUN_BYTES as u64);
        let (true, Some(count)) = (
            head[0..4] == MAGIC.to_le_bytes() && sequence == self.next && fits,
            count,
        ) else {
            return Ok(None);
        };
        if self.checksum(start..start + body, &head)?.to_le_bytes() != head[64..80] {
            return Ok(None);
        }
        let bytes = Bytes::from(self.read(start, body)?);
        let mut at = count as usize * RUN_BYTES;
        let mut all = Vec::with_capacity(count as usize);
        for run in bytes[..at].chunks_exact(RUN_BYTES) {
            let word = |at: usize| u64::from_le_bytes(run[at..at + 8].try_into().expect("8 bytes"));
            let (offset, len, zero) = (word(0), word(8), word(16) != 0);
            let content = if zero {
                Content::Zero(len)
            } else {
                let data = bytes.slice(at..at + len as usize);
                at += len as usize;
                Content::Data(data)
            };
            all.push((offset, content));
        }
        let old = all.split_off(runs as usize);
        self.at = (start + body).next_multiple_of(512);
        self.next += 1;
        Ok(Some(Record {
            kind,
            term: Term(term),
            epoch: Epoch(epoch),
            runs: all,
            old,
        }))
    }

    /// Over a body and its head. It takes no memory to find out that a length is none of a record's.
    fn checksum(&self, body: Range<u64>, head: &[u8; HEAD_BYTES]) -> io::Result<u128> {
        let mut hash = Xxh3::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut at = body.start;
        while at < body.end {
            let len = (body.end - at).min(CHUNK_BYTES as u64) as usize;
            self.file.read_exact_at(&mut chunk[..len], at)?;
            hash.update(&chunk[..len]);
            at += len as u64;
        }
        hash.update(&head[..64]);
        Ok(hash.digest128())
    }

    /// A body that counts. A host without so much memory says so: the image is torn until it is repeated.
    fn read(&self, start: u64, body: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(body as usize);
        reserved.map_err(|_| {
            let (path, mib) = (self.path.display(), body >> 20);
            words::sentence(
                io::ErrorKind::OutOfMemory,
                format!(
                    "reading a sync of {mib} MiB in {path} takes more memory than this host has: free as much"
                ),
            )
        })?;
        bytes.resize(body as usize, 0);
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes)
    }
}

/// Whether a record's body may be there. No other bound: how much one commit may carry is for `append`'s callers, and what was appended is read.
fn fits(start: u64, body: u64, len: u64) -> bool {
    start.checked_add(body).is_some_and(|end| end <= len)
}

/// A journal that was longer is cut to this when it starts again.
const KEEP_BYTES: u64 = 64 << 20;

/// Gathers small pieces, hashes what it writes.
struct Writer<'a> {
    file: &'a File,
    path: &'a Path,
    faults: &'a Faults,
    steps: &'a AtomicU64,
    at: u64,
    chunk: Vec<u8>,
    hash: Xxh3,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.chunk.extend(bytes);
        if self.chunk.len() >= CHUNK_BYTES {
            self.flush()
        } else {
            Ok(())
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.faults.before_write(self.chunk.len() as u64)?;
        self.file
            .write_all_at(&self.chunk, self.at)
            .map_err(|error| words::of_state_folder(self.path, error))?;
        self.at += self.chunk.len() as u64;
        self.chunk.clear();
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// What the records ask for, in order (J3), and the generation that the image then has.
/// `counts` says whether a redo counts (a group's other disks may lack theirs): one that does not is as if it had never been.
pub(super) fn replay(
    mut records: Vec<Record>,
    counts: impl Fn(&Record) -> bool,
    mut put: impl FnMut(u64, &Content) -> io::Result<()>,
) -> io::Result<Option<(Kind, Term, Epoch)>> {
    records.retain(|record| record.kind == Kind::Light || counts(record));
    let last_redo = records.iter().rposition(|record| record.kind != Kind::Light);
    let done = last_redo.map(|at| (records[at].kind, records[at].term, records[at].epoch));
    let (forward, back) = records.split_at(last_redo.map_or(0, |at| at + 1));
    for (offset, content) in forward.iter().flat_map(|record| &record.runs) {
        put(*offset, content)?;
    }
    for (offset, content) in back.iter().rev().flat_map(|record| record.old.iter().rev()) {
        put(*offset, content)?;
    }
    Ok(done)
}

#[cfg(test)]
mod tests;
