//! Decides: how one raw image file or block device is opened, locked, read and written.
//!
//! Flow: the bottom of the disk port; everything above ([`super`]) goes through it, faults included.
//! Invariants: **I1** an image is open in one place only: a second opener (another VM of ours, a QEMU, a mount) is
//! refused with one clear line; **I2** no access outside the size found at opening; **I3** an error that the image
//! gives reaches the caller, never a shorter read; **I4** an error that one of our own flushes met is told to the guest's next
//! one: it is of the guest's writes, and the kernel tells it once.
//! Source: fcntl(2) "Open file description locks", fallocate(2), lseek(2) SEEK_HOLE. Not here: qcow2 ([`super::qcow2`]
//! shows it as raw), caching (the kernel's page cache is the cache, flush is fdatasync).

use super::faults::Faults;
use crate::spec::DiskFormat;
use parking_lot::{Mutex, MutexGuard, RwLock};

use rustix::fs::{Advice, FallocateFlags, SeekFrom, fadvise, fallocate, seek};
use rustix::io::Errno;
use std::num::NonZeroU64;
use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Much longer than a process takes from its beginning until it executes something.
const STARTS_WITHIN: Duration = Duration::from_millis(500);

/// An open, locked image.
#[derive(Debug)]
pub struct Image {
    file: File,
    size_bytes: u64,
    read_only: bool,
    faults: Arc<Faults>,
    /// Shared by the guest's flushes, and held alone by one of ours: which of two at once hears of an error would be chance (I4).
    flushes: RwLock<()>,
    /// I4.
    owed: Mutex<Option<io::ErrorKind>>,
    failed_flushes: AtomicU64,
    _held: Held,
}

/// The images that this process has open: which file, and for which of its VMs' disks.
static HELD: Mutex<Vec<(FileId, String)>> = Mutex::new(Vec::new());

/// Device and inode.
type FileId = (u64, u64);

/// An entry of [`HELD`], for as long as the image is open.
#[derive(Debug)]
struct Held(FileId);

impl Held {
    fn new(file: FileId, owner: &str) -> Self {
        held().push((file, owner.to_owned()));
        Self(file)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = held();
        if let Some(at) = held.iter().position(|(file, _)| *file == self.0) {
            held.swap_remove(at);
        }
    }
}

fn held() -> MutexGuard<'static, Vec<(FileId, String)>> {
    HELD.lock()
}

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// I1.
    #[error(
        "disk {0} is in use by another VM or is mounted: stop that VM (or unmount it), or give this VM a disk of its own"
    )]
    InUse(PathBuf),
    /// I1: the VM's own last copy on this host has not let go of it yet.
    #[error(
        "disk {0} is still held by the last copy of this VM on this host, which is being ended; it is free in a moment"
    )]
    OwnCopy(PathBuf),
    /// No such file, no right to open it, a directory, ...
    #[error("disk {0} cannot be opened: {1}")]
    Open(PathBuf, io::Error),
    /// Nothing to boot from.
    #[error("disk {0} has no bytes: make an image first, for instance with `truncate -s 8G {0}`")]
    Empty(PathBuf),
    /// A qcow2 that nothing here can read.
    #[error(
        "disk {0} is to be served as qcow2, but {1}: install the package qemu-system-common (it has qemu-storage-daemon), or make the image raw with `qemu-img convert -O raw`"
    )]
    NoConverter(PathBuf, String),
    /// Q3.
    #[error(
        "disk {0} is qcow2 on another file, {1}, which would be opened as root: make it whole with `qemu-img rebase -b \"\" {0}`, or, if you \
         made it so yourself, say backing = true in its [[vm.disks]], with that file on both hosts"
    )]
    Backed(PathBuf, String),
    /// Q3.
    #[error("disk {0} is qcow2 that {1}: make it anew with `qemu-img convert -O qcow2`")]
    Unfit(PathBuf, &'static str),
    /// The file is not what `format` says.
    #[error("disk {0} is {1}, and not raw: {2}")]
    NotRaw(PathBuf, &'static str, &'static str),
}

/// Whether an image is there, of that format, and not in use.
///
/// # Errors
/// One line that says what to do.
pub fn check(path: &Path, format: DiskFormat) -> Result<(), ImageError> {
    let found = super::qcow2::known_format(path);
    match (format, found) {
        (DiskFormat::Raw, Some("qcow2")) => Err(ImageError::NotRaw(
            path.into(),
            "qcow2",
            "say format = \"qcow2\" in its [[vm.disks]], or make it raw with `qemu-img convert -O raw`",
        )),
        (DiskFormat::Raw, Some(other)) => Err(ImageError::NotRaw(
            path.into(),
            other,
            "make it raw with `qemu-img convert -O raw`",
        )),
        (DiskFormat::Raw, None) => Image::open(path, false, Arc::default(), None).map(drop),
        (DiskFormat::Qcow2 | DiskFormat::BackedQcow2, Some("qcow2")) => {
            static CHECKS: AtomicU64 = AtomicU64::new(0);
            let number = CHECKS.fetch_add(1, Ordering::Relaxed);
            let at = std::env::temp_dir().join(format!("dunlin-check-{}-{number}", std::process::id()));
            let looked = super::qcow2::Converter::start(path, &at, false, format == DiskFormat::BackedQcow2);
            let _ = std::fs::remove_file(at);
            looked.map(drop)
        }
        (DiskFormat::Qcow2 | DiskFormat::BackedQcow2, _) => Err(ImageError::Open(
            path.into(),
            io::Error::new(
                io::ErrorKind::InvalidData,
                "it is not qcow2, though its format says so",
            ),
        )),
    }
}

impl Image {
    /// Opens and locks a raw image or block device.
    ///
    /// # Errors
    /// It is missing, in use, or empty.
    ///
    /// `owner` is the disk's name among this process' VMs, if it is one of theirs.
    pub fn open(
        path: &Path,
        read_only: bool,
        faults: Arc<Faults>,
        owner: Option<&str>,
    ) -> Result<Self, ImageError> {
        let failed = |error| ImageError::Open(path.into(), error);
        let found = std::fs::metadata(path).map_err(failed)?;
        let (kind, id) = (found.file_type(), (found.dev(), found.ino()));
        let in_use = || {
            let own = held()
                .iter()
                .any(|(file, holder)| *file == id && Some(holder.as_str()) == owner);
            match own {
                true => ImageError::OwnCopy(path.into()),
                false => ImageError::InUse(path.into()),
            }
        };
        if !kind.is_file() && !kind.is_block_device() {
            return Err(failed(io::Error::new(
                io::ErrorKind::InvalidInput,
                "neither a file nor a block device",
            )));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(!read_only);
        if kind.is_block_device() {
            // Exclusive against mounts and other exclusive openers.
            options.custom_flags(libc::O_EXCL);
        }
        let mut file = options.open(path).map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => in_use(),
            _ => failed(error),
        })?;
        lock_soon(&file, read_only).map_err(|error| match is_locked(&error) {
            true => in_use(),
            false => failed(error),
        })?;
        let size_bytes = io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(failed)?;
        if size_bytes == 0 {
            return Err(ImageError::Empty(path.into()));
        }
        Ok(Self {
            file,
            size_bytes,
            read_only,
            faults,
            flushes: RwLock::new(()),
            owed: Mutex::new(None),
            failed_flushes: AtomicU64::new(0),
            _held: Held::new(id, owner.unwrap_or_default()),
        })
    }

    /// Size found at opening.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// What makes it misbehave; the journal beside it shares them, being on the same disk.
    pub(super) fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    /// Opened without the right to write.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// I2. An error and no panic: a guest, a peer or a file on disk named the range, and whoever let it through is no reason to
    /// end every other VM here.
    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.size_bytes) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{len} bytes at {offset} of an image of {}", self.size_bytes),
        ))
    }

    /// Fills `out` from `offset` on.
    ///
    /// # Errors
    /// What the kernel said, or an injected fault.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.check(offset, out.len() as u64)?;
        self.faults.before_read(out.len() as u64)?;
        self.file.read_exact_at(out, offset)
    }

    /// Writes all of `data` at `offset`.
    ///
    /// # Errors
    /// What the kernel said, or an injected fault. A part may have been written.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len() as u64)?;
        self.faults.before_write(data.len() as u64)?;
        super::power::before_write(&self.file, offset, data.len() as u64);
        self.file.write_all_at(data, offset)
    }

    /// Zeroes a range; `unmap`: space may be given back.
    ///
    /// # Errors
    /// What the kernel said, or an injected fault.
    pub fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.check(offset, len)?;
        self.faults.before_write(4096)?;
        super::power::before_write(&self.file, offset, len);
        let how = if unmap {
            FallocateFlags::PUNCH_HOLE
        } else {
            FallocateFlags::ZERO_RANGE
        };
        let how = how | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, how, offset, len) {
            Ok(()) => Ok(()),
            // A file system or device that cannot, or an unaligned range on a block device: by hand.
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => self.write_zeroes(offset, len),
            Err(error) => Err(error.into()),
        }
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        static ZEROES: [u8; 64 << 10] = [0; 64 << 10];
        let mut done = 0;
        while done < len {
            let now = (len - done).min(ZEROES.len() as u64);
            self.file.write_all_at(&ZEROES[..now as usize], offset + done)?;
            done += now;
        }
        Ok(())
    }

    /// The guest flushes: everything written so far is on stable storage on return.
    ///
    /// # Errors
    /// What the kernel said, now or to a flush of our own before (I4), or an injected fault.
    pub fn flush(&self) -> io::Result<()> {
        let flushed = self.sync(false);
        let owed = self.owed.lock().take();
        flushed?;
        owed.map_or(Ok(()), |kind| {
            Err(io::Error::new(
                kind,
                "an earlier flush failed, and what it may have lost nobody knows",
            ))
        })
    }

    /// The same for what we do with the image: of an error that it meets the guest hears, too.
    ///
    /// # Errors
    /// What the kernel said, or an injected fault.
    pub fn flush_ours(&self) -> io::Result<()> {
        self.sync(true)
    }

    /// What is read of this range next comes from the disk, as far as the kernel lets that be: after a flush that failed it may keep
    /// bytes that the disk does not have.
    pub fn forget_cached(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(len) = NonZeroU64::new(len) else {
            return Ok(());
        };
        Ok(fadvise(&self.file, offset, Some(len), Advice::DontNeed)?)
    }

    /// Another VM begins on this image: whoever wrote before hears nothing more.
    pub fn owes_nothing(&self) {
        *self.owed.lock() = None;
    }

    /// How many flushes have failed. No later one makes good what one of them may have lost: the kernel keeps it as if it were
    /// written.
    pub fn failed_flushes(&self) -> u64 {
        self.failed_flushes.load(Ordering::Acquire)
    }

    fn sync(&self, ours: bool) -> io::Result<()> {
        let failed = |error: &io::Error| {
            self.failed_flushes.fetch_add(1, Ordering::AcqRel);
            if ours {
                *self.owed.lock() = Some(error.kind());
            }
        };
        self.faults.before_flush().inspect_err(failed)?;
        let _alone = ours.then(|| self.flushes.write());
        let _with_others = (!ours).then(|| self.flushes.read());
        self.sync_data().inspect_err(failed)
    }

    fn sync_data(&self) -> io::Result<()> {
        super::power::point();
        let covered = super::power::flushing(&self.file);
        self.file.sync_data()?;
        super::power::flushed(&self.file, covered);
        Ok(())
    }

    /// All of it is a hole, set aside or not, and so reads as zeroes. Where nobody knows, it holds data.
    pub fn is_hole(&self, offset: u64, len: u64) -> bool {
        self.status(offset, len).is_ok_and(|stretches| {
            let holes = stretches.iter().filter(|(_, holds_data)| !holds_data);
            holes.map(|(len, _)| len).sum::<u64>() == len
        })
    }

    /// Consecutive stretches from `offset` on: (length, holds data).
    ///
    /// # Errors
    /// What the kernel said.
    pub fn status(&self, offset: u64, len: u64) -> io::Result<Vec<(u64, bool)>> {
        self.check(offset, len)?;
        let end = offset + len;
        let mut at = offset;
        let mut out = Vec::new();
        while at < end && out.len() < 256 {
            let data = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                // No holes known here (block devices): all is data.
                Err(Errno::INVAL) => {
                    out.push((end - at, true));
                    return Ok(out);
                }
                Err(error) => return Err(error.into()),
            };
            if data > at {
                out.push((data - at, false));
            }
            at = data;
            if at < end {
                let hole = seek(&self.file, SeekFrom::Hole(at))?.min(end);
                if hole == at {
                    // Punched between the two calls: look again.
                    continue;
                }
                out.push((hole - at, true));
                at = hole;
            }
        }
        Ok(out)
    }
}

/// As `lock`. A process that this one is just starting has all of its descriptors, those too that were closed here a moment ago, and with them
/// their locks, until it executes something.
fn lock_soon(file: &File, read_only: bool) -> io::Result<()> {
    let until = Instant::now() + STARTS_WITHIN;
    loop {
        match lock(file, read_only) {
            Err(error) if is_locked(&error) && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            locked => return locked,
        }
    }
}

fn is_locked(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// I1. An open-file-description lock on the whole file: it ends with the descriptor, so a SIGKILL leaves nothing behind,
/// and it conflicts with the byte locks that QEMU puts on images.
fn lock(file: &File, read_only: bool) -> io::Result<()> {
    let lock = libc::flock {
        l_type: if read_only { libc::F_RDLCK } else { libc::F_WRLCK } as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the lock is read during the call alone. (rustix has no locks of an open file description.)
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
