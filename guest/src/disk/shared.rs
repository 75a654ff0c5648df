//! Decides: in which order image, journal, superblock and dirty map are written, so that a power loss at any moment leaves
//! an image that is one sync whole, and knows it.
//!
//! Flow: what both roles ([`super::primary`], [`super::backup`]) have in common below them.
//! Invariants: S1 to S4, J1 to J3, M1, M2. Not here: roles.

use super::{
    DiskConfig, DiskError, DiskEvent, DiskFormat, EventSink, Limits,
    dirty_map::DirtyMap,
    faults::Faults,
    group::Member,
    image::Image,
    journal::{self, Journal, Kind},
    qcow2::Converter,
    ranges::RangeLocks,
    superblock::{Identity, Superblock},
};
use dunlin_core::{
    disk::{Buffer, Content, Generation, Storage, buffer::Shared as Piece, mirror::Hello},
    units::{Epoch, Term},
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    io::{self, Read},
    ops::Range,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::Sender,
    },
};
use xxhash_rust::xxh3::xxh3_128;

/// A journal that is longer is turned into history after the next commit.
const JOURNAL_MOST_BYTES: u64 = 32 << 20;

/// (offset, length, hash)
pub(super) type HashedRange = (u64, u64, [u8; 16]);

struct Ledger {
    /// Light records were written since the last redo: without a redo after them they would be rolled back.
    lights: bool,
    /// A flush of the image failed since the journal's records were put on it (S4).
    doubtful: bool,
    /// As the superblock says it (S4), but for a backup's last sync, which the journal says.
    identity: Identity,
    superblock: Superblock,
    journal: Journal,
}

/// What all roles of one disk share.
pub(super) struct Shared {
    pub name: String,
    pub image: Image,
    /// After `image`: what shows it to us as raw bytes ends when nobody reads them any more.
    _converter: Option<Converter>,
    pub ranges: RangeLocks,
    pub limits: Limits,
    pub storage: Storage,
    pub group: Option<Member>,
    pub dirty: DirtyMap,
    /// Storage `colo` only: COLO's active and hidden disks, as traffic. COLO keeps the backup VM's writes and what mirrored
    /// writes overwrite in image files on the backup's disk; memory has both here too and is what is read, but the disk
    /// must carry them, or the comparison would flatter COLO. An unlinked file: nothing is left of it.
    pub scratch: Option<Image>,
    events: EventSink,
    ledger: Mutex<Ledger>,
    /// A copy of the ledger's identity: to ask for it must not wait for a slow disk.
    told: Mutex<Identity>,
    /// What has reached the journal and the image from the buffers, counted: whoever waits for a disk sees whether it gets on.
    steps: Arc<AtomicU64>,
    /// Backup: committed syncs that the image does not have yet.
    owed: AtomicU64,
    /// Answers to a verification that runs.
    pub hashes: Mutex<Option<Sender<HashedRange>>>,
}

impl Shared {
    pub fn open(config: DiskConfig, faults: Arc<Faults>, events: EventSink) -> Result<Arc<Self>, DiskError> {
        let state = |error| DiskError::State(config.state_dir.clone(), error);
        std::fs::create_dir_all(&config.state_dir).map_err(state)?;
        let path = |what: &str| config.state_dir.join(format!("{}.{what}", config.name));
        let converter = match config.format {
            DiskFormat::Raw => None,
            DiskFormat::Qcow2 | DiskFormat::BackedQcow2 => {
                let may_be_backed = config.format == DiskFormat::BackedQcow2;
                let raw = path("raw");
                Some(Converter::start(
                    &config.image,
                    &raw,
                    config.read_only,
                    may_be_backed,
                )?)
            }
        };
        let raw = converter.as_ref().map_or(&*config.image, Converter::raw);
        let image = Image::open(raw, config.read_only, faults.clone(), Some(&config.name))?;
        let (superblock, identity) = Superblock::open(&path("super"), image.size_bytes()).map_err(state)?;
        let steps = Arc::<AtomicU64>::default();
        let (journal, records) = Journal::open(
            &path("journal"),
            identity.journal_from,
            faults.clone(),
            steps.clone(),
        )
        .map_err(state)?;
        let paired = identity.pair != [0; 16];
        let dirty =
            DirtyMap::open(&path("dirty"), image.size_bytes(), paired, faults.clone()).map_err(state)?;
        sync_dir(&config.state_dir).map_err(state)?;
        let scratch = match config.storage {
            Storage::Colo => Some(scratch(&path("scratch"), image.size_bytes(), faults)?),
            _ => None,
        };
        let mut ledger = Ledger {
            lights: false,
            doubtful: false,
            identity,
            superblock,
            journal,
        };
        if !records.is_empty() {
            recover(&image, &mut ledger, records, config.group.as_ref())?;
        }
        Ok(Arc::new(Self {
            name: config.name,
            image,
            _converter: converter,
            ranges: RangeLocks::default(),
            limits: config.limits,
            storage: config.storage,
            group: config.group,
            dirty,
            scratch,
            events,
            told: Mutex::new(ledger.identity),
            ledger: Mutex::new(ledger),
            steps,
            owed: AtomicU64::new(0),
            hashes: Mutex::new(None),
        }))
    }

    pub fn event(&self, event: DiskEvent) {
        (self.events)(event);
    }

    fn ledger(&self) -> LedgerGuard<'_> {
        LedgerGuard {
            ledger: self.ledger.lock(),
            told: &self.told,
        }
    }

    pub fn identity(&self) -> Identity {
        *self.told.lock()
    }

    pub fn image_failed(&self, what: &str, error: &io::Error) {
        let full = error.kind() == io::ErrorKind::StorageFull;
        self.event(DiskEvent::ImageFailed {
            reason: format!("disk {}: {what} failed: {error}", self.name),
            full,
        });
    }

    pub fn written(&self, result: io::Result<()>, range: &Range<u64>) -> io::Result<()> {
        result.inspect_err(|error| {
            self.image_failed(
                &format!("write of {} bytes at {}", range.end - range.start, range.start),
                error,
            );
        })
    }

    pub fn put(&self, offset: u64, content: &Content, unmap: bool) -> io::Result<()> {
        put(&self.image, offset, content, unmap)
    }

    fn put_all(&self, buffer: &Buffer) -> io::Result<()> {
        for (offset, content) in buffer.runs() {
            self.put(offset, content, true)?;
            self.gets_on();
        }
        Ok(())
    }

    pub fn gets_on(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// So many committed syncs are to be brought to the image now.
    pub fn owes(&self, syncs: usize) {
        self.owed.store(syncs as u64, Ordering::Relaxed);
    }

    pub fn owed(&self) -> u64 {
        self.owed.load(Ordering::Relaxed)
    }

    /// How this disk introduces itself. A primary names the pair to be.
    pub fn hello(&self, names_pair: bool) -> io::Result<Hello> {
        let identity = self.identity();
        let mut next_pair = [0; 16];
        if names_pair {
            std::fs::File::open("/dev/urandom")?.read_exact(&mut next_pair)?;
        }
        let storage = match self.storage {
            Storage::Gannet => 0,
            Storage::Colo => 1,
            Storage::Sync => 2,
        };
        Ok(Hello {
            size_bytes: self.image.size_bytes(),
            generation: identity.generation,
            consistent: identity.consistent,
            pair: identity.pair,
            next_pair,
            storage,
        })
    }

    // ---- primary ----

    /// This host's VM speaks in `term`, from the image as it is.
    pub fn become_primary(&self, term: Term) -> Result<(), DiskError> {
        let mut ledger = self.ledger();
        if !ledger.identity.consistent {
            return Err(DiskError::Incomplete(self.name.clone()));
        }
        let generation = Generation {
            term,
            primary: true,
            epoch: ledger.identity.generation.epoch,
        };
        let identity = Identity {
            generation,
            ..ledger.identity
        };
        ledger.retire(&self.image, identity)?;
        Ok(())
    }

    /// The peer's image is whole: from here on the two dirty maps tell all that differs.
    pub fn paired(&self, pair: [u8; 16]) -> io::Result<()> {
        let mut ledger = self.ledger();
        let identity = Identity {
            pair,
            ..ledger.identity
        };
        ledger.superblock.save(&identity)?;
        ledger.identity = identity;
        Ok(())
    }

    // ---- backup ----

    /// S2: before the image becomes a mixture.
    pub fn begin_mixing(&self) -> io::Result<()> {
        let mut ledger = self.ledger();
        if !ledger.identity.consistent {
            return Ok(());
        }
        let identity = Identity {
            consistent: false,
            ..ledger.identity
        };
        ledger.retire(&self.image, identity)
    }

    /// A committed sync reaches the image. `pair`: the first one after a join, which makes the image whole.
    pub fn settle(
        &self,
        term: Term,
        epoch: Epoch,
        buffer: &Buffer,
        pair: Option<[u8; 16]>,
        stopped: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let mut ledger = self.ledger();
        let generation = Generation {
            term,
            primary: false,
            epoch,
        };
        if let Some(pair) = pair {
            // The image is marked as a mixture since the copy's end at the latest: no journal is needed to go from that to whole.
            self.put_all(buffer)?;
            let identity = Identity {
                generation,
                consistent: self.storage == Storage::Gannet,
                pair,
                ..ledger.identity
            };
            ledger.retire(&self.image, identity)?;
            drop(ledger);
            self.dirty.track();
            self.dirty.clear(&self.dirty.all());
            return self.dirty.save();
        }
        if self.storage != Storage::Gannet {
            self.image.flush_ours()?;
            ledger.identity.generation = generation;
            return Ok(());
        }
        if buffer.is_empty() && !ledger.lights {
            self.agree(generation, false, stopped)?;
            ledger.identity.generation = generation;
            return Ok(());
        }
        let runs: Vec<_> = buffer
            .runs()
            .map(|(offset, content)| (offset, content.clone()))
            .collect();
        ledger.journal.append(Kind::Commit, term, epoch, &runs, &[])?;
        self.agree(generation, true, stopped)?;
        // Not before: an image that is put back to the sync before must not name this one.
        ledger.identity.generation = generation;
        ledger.lights = false;
        self.put_all(buffer)?;
        if ledger.journal.bytes() > JOURNAL_MOST_BYTES {
            let identity = ledger.identity;
            ledger.retire(&self.image, identity)?;
        }
        Ok(())
    }

    /// A1, for a VM with several disks.
    fn agree(&self, to: Generation, wrote: bool, stopped: &dyn Fn() -> bool) -> io::Result<()> {
        match &self.group {
            Some(member) => member.group.agree(member.number, to, wrote, stopped),
            None => Ok(()),
        }
    }

    /// Sectors that both VMs wrote alike reach the image between two syncs; the record can take them back (J3).
    pub fn settle_equal(&self, term: Term, pieces: &[Piece]) -> io::Result<()> {
        let mut ledger = self.ledger();
        let runs = joined(pieces);
        let mut old = Vec::with_capacity(runs.len());
        for (offset, content) in &runs {
            let mut before = vec![0; content.len() as usize];
            self.image.read(*offset, &mut before)?;
            old.push((*offset, Content::Data(before.into())));
        }
        let epoch = ledger.identity.generation.epoch;
        ledger.lights = true;
        ledger.journal.append(Kind::Light, term, epoch, &runs, &old)?;
        for (offset, content) in &runs {
            self.put(*offset, content, true)?;
            self.gets_on();
        }
        Ok(())
    }

    /// Fail-over: everything that the VM here wrote is on the image and on stable storage on return. `epoch`: the last sync that was committed, which
    /// all disks of the VM name alike. How far each has been with the syncs before is its own matter: one may have begun with a sync when another has
    /// the one before still to write, and each would wait for ever for those that name the same (A1).
    pub fn settle_take_over(&self, term: Term, epoch: Epoch, buffer: &Buffer) -> io::Result<()> {
        self.dirty.add(&super::backup::extents(buffer))?;
        let mut ledger = self.ledger();
        if ledger.identity.consistent {
            let runs: Vec<_> = buffer
                .runs()
                .map(|(offset, content)| (offset, content.clone()))
                .collect();
            ledger.journal.append(Kind::TakeOver, term, epoch, &runs, &[])?;
            self.gets_on();
        }
        let generation = Generation {
            term,
            primary: true,
            epoch,
        };
        // Nothing stops a take-over but a disk that cannot: its host must not speak.
        self.agree(generation, true, &|| false)?;
        self.put_all(buffer)?;
        let identity = Identity {
            generation,
            consistent: true,
            ..ledger.identity
        };
        ledger.retire(&self.image, identity)
    }

    /// A backup ends without taking over: the image is put back to its last committed sync.
    pub fn roll_back(&self, state_dir: &Path) -> Result<(), DiskError> {
        let mut ledger = self.ledger();
        let path = state_dir.join(format!("{}.journal", self.name));
        let (journal, records) = Journal::open(
            &path,
            ledger.identity.journal_from,
            self.image.faults().clone(),
            self.steps.clone(),
        )?;
        ledger.journal = journal;
        recover(&self.image, &mut ledger, records, self.group.as_ref())
    }

    // ---- verification ----

    /// What is no hash says that the peer could not read it: it is unlike.
    pub fn hash_arrived(&self, offset: u64, len: u64, hash: &[u8]) {
        let hashes = self.hashes.lock();
        if let Some(hashes) = &*hashes {
            let _nobody_waits_any_more = hashes.send((offset, len, hash.try_into().unwrap_or_default()));
        }
    }
}

/// The ledger, locked; tells the identity when it is let go.
struct LedgerGuard<'a> {
    ledger: MutexGuard<'a, Ledger>,
    told: &'a Mutex<Identity>,
}

impl std::ops::Deref for LedgerGuard<'_> {
    type Target = Ledger;

    fn deref(&self) -> &Ledger {
        &self.ledger
    }
}

impl std::ops::DerefMut for LedgerGuard<'_> {
    fn deref_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }
}

impl Drop for LedgerGuard<'_> {
    fn drop(&mut self) {
        *self.told.lock() = self.ledger.identity;
    }
}

impl Ledger {
    /// What the image holds is durable, the superblock says `identity` of it, and the journal is history (S3). Where that fails, nothing
    /// of it counts (S4).
    fn retire(&mut self, image: &Image, identity: Identity) -> io::Result<()> {
        if self.doubtful && self.journal.bytes() > 0 {
            return Err(io::Error::other(
                "a flush of it failed before, and the journal must be put on it once more: end the VM's copy on this host, which does that",
            ));
        }
        image.flush_ours().inspect_err(|_| self.doubtful = true)?;
        let identity = Identity {
            journal_from: self.journal.next(),
            ..identity
        };
        self.superblock.save(&identity)?;
        self.identity = identity;
        (self.lights, self.doubtful) = (false, false);
        self.journal.restart()
    }
}

fn recover(
    image: &Image,
    ledger: &mut Ledger,
    records: Vec<journal::Record>,
    group: Option<&Member>,
) -> Result<(), DiskError> {
    let mark = group.map(|member| member.group.mark());
    let counts = |record: &journal::Record| mark.is_none_or(|mark| record.generation() <= mark);
    let beyond = records
        .iter()
        .flat_map(|record| record.runs.iter().chain(&record.old))
        .any(|(offset, content)| {
            offset
                .checked_add(content.len())
                .is_none_or(|end| end > image.size_bytes())
        });
    if beyond {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the journal is of another disk").into());
    }
    let done = journal::replay(records, counts, |offset, content| {
        put(image, offset, content, true)
    })?;
    // What a flush may have lost is written again.
    ledger.doubtful = false;
    let generation = match done {
        Some((kind, term, epoch)) => Generation {
            term,
            primary: kind == Kind::TakeOver,
            epoch,
        },
        None => ledger.identity.generation,
    };
    let identity = Identity {
        generation,
        ..ledger.identity
    };
    ledger.retire(image, identity)?;
    Ok(())
}

/// Neighbouring pieces as one run: fewer and longer accesses.
fn joined(pieces: &[Piece]) -> Vec<(u64, Content)> {
    let mut runs = Vec::new();
    let mut open: Option<(u64, Vec<u8>)> = None;
    let close = |(offset, bytes): (u64, Vec<u8>)| (offset, Content::Data(bytes.into()));
    for piece in pieces {
        match (&piece.ours, &mut open) {
            (Content::Data(data), Some((start, bytes))) if *start + bytes.len() as u64 == piece.offset => {
                bytes.extend(data);
            }
            (Content::Data(data), _) => {
                runs.extend(open.replace((piece.offset, data.to_vec())).map(close));
            }
            (zero @ Content::Zero(_), _) => {
                runs.extend(open.take().map(close));
                runs.push((piece.offset, zero.clone()));
            }
        }
    }
    runs.extend(open.map(close));
    runs
}

fn put(image: &Image, offset: u64, content: &Content, unmap: bool) -> io::Result<()> {
    match content {
        Content::Data(data) => image.write(offset, data),
        Content::Zero(len) => image.zero(offset, *len, unmap),
    }
}

fn scratch(path: &Path, size_bytes: u64, faults: Arc<Faults>) -> Result<Image, DiskError> {
    let failed = |error| DiskError::State(path.into(), error);
    std::fs::File::create(path)
        .and_then(|file| file.set_len(size_bytes))
        .map_err(failed)?;
    let image = Image::open(path, false, faults, None)?;
    std::fs::remove_file(path).map_err(failed)?;
    Ok(image)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    std::fs::File::open(dir)?.sync_all()
}

/// The hash that a verification compares.
pub(super) fn hash(data: &[u8]) -> [u8; 16] {
    xxh3_128(data).to_le_bytes()
}
