//! What it decides: how the log's files follow each other, and what a start finds in them.
//!
//! **Flow**: `open` -> (`append` | `cut` | `snapshot`)* -> `sync`. **Invariants**: 1. segments are numbered without gaps; a
//! new one is begun only after the old one was synced. 2. a segment goes when the snapshot stands for all its entries and
//! it is the oldest one, so what is left can always be replayed. 3. the snapshot file is replaced by rename. 4. while the log is kept in
//! memory alone a mark on the disk says so, for what was acknowledged then is not in these files; it stays until they hold it again.
//! **Not here**: threads (`worker`), what a record looks like (`record`).

use super::DiskError;
use super::hard_state::HardStateFile;
use super::record::{self, Record};
use super::segment::{Filling, Segment};
use crate::keys;
use dunlin_core::consensus::{Entry, HardState, MOST, Snapshot};
use dunlin_core::units::{Index, Viewstamp};
use dunlin_core::wire::consensus::{decode_snapshot, encode_snapshot};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Invariant 4.
const IN_MEMORY: &str = "in-memory";
/// So much of the next segment is filled at once.
const PREPARE_BYTES: u64 = 256 << 10;

/// Settings.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The size of a segment (a larger entry gets a segment of its own size).
    pub segment_bytes: u64,
    /// More than this is as a full disk; `None`: the disk's own limit.
    pub limit_bytes: Option<u64>,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 16 << 20,
            limit_bytes: None,
        }
    }
}

/// A torn tail that was cut at start. It was never acknowledged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The file.
    pub file: PathBuf,
    /// From here.
    pub offset: u64,
    /// So many bytes.
    pub bytes: u64,
}

/// What a start found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The last hard state, if this replica ever wrote one.
    pub hard_state: Option<HardState>,
    /// The last snapshot.
    pub snapshot: Option<Snapshot>,
    /// The entries after it (some before it may be there, too), consecutive.
    pub log: Vec<Entry>,
    /// A torn tail was cut.
    pub cut: Option<Cut>,
    /// Since this log was written another one was kept, in memory alone: what was acknowledged then is not here.
    pub in_memory: bool,
}

/// The files of one replica's log. One owner at a time, by a lock.
pub struct Disk {
    dir: PathBuf,
    options: DiskOptions,
    hard_state: HardStateFile,
    segments: VecDeque<Segment>,
    /// The next segment, being made ahead of time.
    spare: Option<Filling>,
    /// The last index in the log (or what the snapshot stands for).
    last: Index,
    /// What the snapshot on disk stands for.
    base: Viewstamp,
    _lock: File,
}

pub(super) fn sync_dir(dir: &Path) -> Result<(), DiskError> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(DiskError::io(dir, "syncing the directory"))
}

impl Disk {
    /// Opens or creates the log in `dir`.
    pub fn open(dir: &Path, options: DiskOptions) -> Result<(Self, Found), DiskError> {
        std::fs::create_dir_all(dir).map_err(DiskError::io(dir, "creating"))?;
        let lock = File::create(dir.join("lock")).map_err(DiskError::io(dir, "creating the lock"))?;
        // SAFETY: a plain call on an open descriptor.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(DiskError::Busy { dir: dir.to_owned() });
        }
        let (hard_state, last) = HardStateFile::open(dir)?;
        let snapshot = read_snapshot(dir)?;
        let base = snapshot.as_ref().map_or(Viewstamp::default(), |s| s.last);
        let mark = dir.join(IN_MEMORY);
        let in_memory = mark
            .try_exists()
            .map_err(DiskError::io(&mark, "looking for it"))?;
        let mut found = Found {
            hard_state: last,
            snapshot,
            in_memory,
            ..Found::default()
        };
        let numbers = segment_numbers(dir)?;
        let mut segments = VecDeque::new();
        for (i, number) in numbers.iter().enumerate() {
            let path = Segment::path(dir, *number);
            if i > 0 && numbers[i - 1] + 1 != *number {
                let file = Segment::path(dir, numbers[i - 1] + 1);
                return Err(DiskError::Corrupt {
                    file,
                    offset: 0,
                    what: "this segment is missing",
                });
            }
            let last = i + 1 == numbers.len();
            let contents = Segment::read(&path, *number, last)?;
            replay(&mut found.log, contents.records, base.index, &path)?;
            found.cut = contents.cut;
            segments.push_back(contents.segment);
        }
        if let Some(first) = found.log.first().map(|e| e.stamp.index)
            && first > base.index.next()
        {
            let file = segments.front().map_or(dir.to_owned(), |s| s.path.clone());
            return Err(DiskError::Corrupt {
                file,
                offset: 0,
                what: "entries between the snapshot and this segment are missing",
            });
        }
        let last = found
            .log
            .last()
            .map_or(base.index, |e| e.stamp.index.max(base.index));
        let dir = dir.to_owned();
        Ok((
            Self {
                dir,
                options,
                hard_state,
                segments,
                spare: None,
                last,
                base,
                _lock: lock,
            },
            found,
        ))
    }

    /// Appends entries; on disk after `sync`. Entries that the snapshot stands for are left out.
    pub fn append(&mut self, entries: &[Entry]) -> Result<(), DiskError> {
        let base = self.base.index;
        for entry in entries.iter().filter(|e| e.stamp.index > base) {
            assert!(
                entry.stamp.index <= self.last.next(),
                "a gap in the log: {:?} after {:?}",
                entry.stamp,
                self.last
            );
            let segment = self.room_for(record::size(entry.payload.len()))?;
            segment.push_entry(entry);
            self.last = entry.stamp.index;
        }
        Ok(())
    }

    /// Entries at and after `from` are gone; on disk after `sync`.
    pub fn cut(&mut self, from: Index) -> Result<(), DiskError> {
        if from <= self.last && from > self.base.index {
            self.room_for(record::HEAD)?.push(&Record::Cut(from));
            self.last = Index(from.0 - 1);
        }
        Ok(())
    }

    /// Waits until everything appended is on disk.
    pub fn sync(&mut self) -> Result<(), DiskError> {
        self.segments.back_mut().map_or(Ok(()), Segment::sync)
    }

    /// Makes the hard state durable. Needs no space.
    pub fn hard_state(&mut self, hard_state: HardState) -> Result<(), DiskError> {
        self.hard_state.save(hard_state)
    }

    /// Whether such a snapshot says that what this log held does not count any more.
    pub(super) fn is_overruled_by(&self, snapshot: &Snapshot) -> bool {
        snapshot.last.index < self.base.index
    }

    /// Makes a snapshot durable, then removes the segments that it stands for.
    pub fn snapshot(&mut self, snapshot: &Snapshot) -> Result<(), DiskError> {
        let mut bytes = Vec::new();
        encode_snapshot(snapshot, &mut bytes);
        if self.is_overruled_by(snapshot) {
            // What this log held goes before the snapshot that stands for less; but not as long as there is no room to say so. It is said once,
            // however often the snapshot itself finds none.
            if self.last > snapshot.last.index {
                self.room_for(record::HEAD)?.push(&Record::Reset(snapshot.last));
                self.last = snapshot.last.index;
            }
            self.sync()?;
        }
        let check = xxh3_64(&bytes);
        let (temporary, path) = (self.dir.join("snapshot.new"), self.dir.join("snapshot"));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(&check.to_le_bytes())?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)
        };
        write().map_err(DiskError::io(&path, "writing the snapshot"))?;
        sync_dir(&self.dir)?;
        self.base = snapshot.last;
        if self.last <= snapshot.last.index {
            // The log goes on behind a gap (or exactly here): say so, in a segment that outlives the older ones.
            self.last = snapshot.last.index;
            self.room_for(record::HEAD)?.push(&Record::Reset(snapshot.last));
            self.sync()?;
        }
        while self.segments.len() > 1 && self.segments[0].max <= snapshot.last.index {
            let old = self.segments.pop_front().expect("there is one");
            std::fs::remove_file(&old.path).map_err(DiskError::io(&old.path, "removing"))?;
        }
        Ok(())
    }

    /// From here on the log is kept in memory alone (invariant 4). Needs no room if it was said before.
    pub fn leaves_for_memory(&mut self) -> Result<(), DiskError> {
        let mark = self.dir.join(IN_MEMORY);
        let marked = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&mark)
            .and_then(|file| file.sync_all());
        marked.map_err(DiskError::io(&mark, "creating"))?;
        sync_dir(&self.dir)
    }

    /// What these files hold does not count, and goes: the newest segment first, so that whatever is left after a crash is a log. The hard
    /// state stays, and the mark that says why.
    pub fn forget(&mut self) -> Result<(), DiskError> {
        self.spare = None;
        while let Some(newest) = self.segments.pop_back() {
            remove(&newest.path)?;
            sync_dir(&self.dir)?;
        }
        remove(&self.dir.join("snapshot"))?;
        sync_dir(&self.dir)?;
        (self.last, self.base) = (Index(0), Viewstamp::default());
        Ok(())
    }

    /// These files hold again whatever was acknowledged (invariant 4).
    pub fn counts_again(&mut self) -> Result<(), DiskError> {
        self.sync()?;
        remove(&self.dir.join(IN_MEMORY))?;
        sync_dir(&self.dir)
    }

    /// How many bytes the segments take.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.segments.len() as u64 + u64::from(self.spare.is_some())) * self.options.segment_bytes
    }

    /// Makes a part of the next segment ahead of time, if it will be needed soon. For idle moments: it takes some ms.
    /// False when there is nothing (more) to prepare.
    pub fn prepare(&mut self) -> Result<bool, DiskError> {
        if self.spare.is_none() && self.segments.back().is_some_and(Segment::is_half_full) {
            self.spare = Some(self.begin(self.options.segment_bytes)?);
        }
        match &mut self.spare {
            None => Ok(false),
            Some(spare) => match spare.step(PREPARE_BYTES) {
                Ok(done) => Ok(!done),
                Err(e) => {
                    self.spare = None;
                    Err(e)
                }
            },
        }
    }

    fn begin(&self, bytes: u64) -> Result<Filling, DiskError> {
        let number = self.segments.back().map_or(0, |s| s.number + 1);
        if self
            .options
            .limit_bytes
            .is_some_and(|limit| self.bytes() + bytes > limit)
        {
            return Err(DiskError::Full {
                file: Segment::path(&self.dir, number),
            });
        }
        let id = keys::random()
            .map(u64::from_le_bytes)
            .map_err(|_| DiskError::Io {
                file: self.dir.clone(),
                what: "a segment's id",
                source: ErrorKind::Other.into(),
            })?;
        Filling::begin(&self.dir, number, id, bytes)
    }

    fn room_for(&mut self, bytes: usize) -> Result<&mut Segment, DiskError> {
        if !self.segments.back().is_some_and(|s| s.has_room(bytes)) {
            self.sync()?;
            let need = super::segment::START + bytes as u64;
            let next = match self.spare.take() {
                Some(spare) if need <= self.options.segment_bytes => spare,
                spare => {
                    drop(spare); // too small for this entry; it uses the same temporary name
                    self.begin(self.options.segment_bytes.max(need))?
                }
            };
            self.segments.push_back(next.finish()?);
        }
        Ok(self.segments.back_mut().expect("there is one"))
    }
}

/// A file that is gone already is no error.
fn remove(file: &Path) -> Result<(), DiskError> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(DiskError::io(file, "removing")(error)),
        _ => Ok(()),
    }
}

fn segment_numbers(dir: &Path) -> Result<Vec<u64>, DiskError> {
    let mut numbers = Vec::new();
    for file in std::fs::read_dir(dir).map_err(DiskError::io(dir, "reading the directory"))? {
        let name = file
            .map_err(DiskError::io(dir, "reading the directory"))?
            .file_name();
        if let Some(hex) = name.to_str().and_then(|n| n.strip_prefix("log-"))
            && let Ok(number) = u64::from_str_radix(hex, 16)
        {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Adds one segment's records to the log.
fn replay(log: &mut Vec<Entry>, records: Vec<Record>, base: Index, file: &Path) -> Result<(), DiskError> {
    let cut = |log: &mut Vec<Entry>, from: Index| {
        while log.last().is_some_and(|e| e.stamp.index >= from) {
            log.pop();
        }
    };
    for record in records {
        match record {
            Record::Entry(entry) => {
                cut(log, entry.stamp.index);
                let follows = log
                    .last()
                    .is_none_or(|l| l.stamp.index.next() == entry.stamp.index);
                if !follows && entry.stamp.index <= base.next() {
                    log.clear(); // the snapshot stands for what is missing
                } else if !follows {
                    return Err(DiskError::Corrupt {
                        file: file.to_owned(),
                        offset: 0,
                        what: "entries are missing",
                    });
                }
                log.push(entry);
            }
            Record::Cut(from) => cut(log, from),
            Record::Reset(_) => log.clear(),
        }
    }
    Ok(())
}

fn read_snapshot(dir: &Path) -> Result<Option<Snapshot>, DiskError> {
    let path = dir.join("snapshot");
    let data = match std::fs::read(&path) {
        Ok(data) => data,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(DiskError::io(&path, "reading")(e)),
    };
    let corrupt = |what| DiskError::Corrupt {
        file: path.clone(),
        offset: 0,
        what,
    };
    let (check, bytes) = data
        .split_first_chunk::<8>()
        .ok_or_else(|| corrupt("too short"))?;
    if u64::from_le_bytes(*check) != xxh3_64(bytes) {
        return Err(corrupt("the checksum does not fit"));
    }
    let snapshot = decode_snapshot(bytes).map_err(|_| corrupt("it does not decode"))?;
    if snapshot.last.index.0.max(snapshot.last.term.0) >= MOST {
        return Err(corrupt("a term or an index that no log has reached"));
    }
    Ok(Some(snapshot))
}
