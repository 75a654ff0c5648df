//! Files of a program that outlive its copies: an ext4 image, one on each host, mounted in the copy's view.
//!
//! Decides:    nothing.
//! Flow:       `Data::open` (made when it is missing) -> `Image::attach` to a loop device -> the copy's keeper mounts it (`inside::view`) ->
//!             the copy ends, and with the last who holds it the device is free again. For a copy of a running program: `blocks`.
//! Invariants: 1. an image has one user: the lock is on the very opening of the file that the loop device has, so it is held until the
//!             kernel lets go of the device, whoever was killed before; 2. nothing is left behind: the device detaches itself after its last
//!             user (LO_FLAGS_AUTOCLEAR); 3. an image has its name when its file system is whole.
//! Source:     loop(4), ext4(5), mkfs.ext4(8). Not here: how new an image is (`mark`), which host's counts (`node`).

pub mod blocks;
mod device;
pub mod mark;

use crate::guard::GuardError;
use device::Device;
use rustix::fs::{FlockOperation, fallocate, flock, statvfs};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What makes the file system.
const MKFS: [&str; 4] = [
    "/usr/sbin/mkfs.ext4",
    "/sbin/mkfs.ext4",
    "/usr/bin/mkfs.ext4",
    "/usr/local/sbin/mkfs.ext4",
];
/// A large one on a slow disk.
const MADE_WITHIN: Duration = Duration::from_secs(60);
/// The kernel takes a killed copy's mounts apart after its processes are gone: so long that is waited for.
const FREE_WITHIN: Duration = Duration::from_secs(15);
/// ... and by who only asks.
const ASKED_WITHIN: Duration = Duration::from_secs(3);
/// Nothing tells when a lock becomes free but asking for it.
const LOOK_EVERY: Duration = Duration::from_millis(10);
const MIB: u64 = 1 << 20;
/// Of ext4's superblock, where the magic number is, and it.
const MAGIC_AT: u64 = 1024 + 0x38;
const MAGIC: [u8; 2] = [0x53, 0xef];

/// Where a program's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    /// The image's file on the host.
    pub image: PathBuf,
    /// The directory that its copies see it at.
    pub at: PathBuf,
    /// How large it is, in MiB.
    pub mib: u32,
}

/// An image that is this process's.
#[derive(Debug)]
pub struct Image {
    file: File,
}

/// An image on a loop device, until this and every mount of it is gone.
#[derive(Debug)]
pub struct Attached {
    file: File,
    device: Device,
}

fn failed<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> GuardError + '_ {
    move |error| GuardError::new(format!("{}: {error}", path.display()))
}

impl Data {
    /// What this host lacks for it, or why its image cannot be used: a line each, and how to mend it. `may_be_in_use`: a copy may run here
    /// already. `root`: the directory that copies see as theirs.
    #[must_use]
    pub fn lacks(&self, root: &Path, may_be_in_use: bool) -> Vec<(String, &'static str)> {
        let mut lacks = Vec::new();
        let at = root.join(self.at.strip_prefix("/").unwrap_or(&self.at));
        if !at.is_dir() {
            let what = format!("data_at: {} is no directory on this host", at.display());
            lacks.push((what, "make it, on both hosts, or correct program.data_at"));
        }
        if !fs::metadata(device::CONTROL).is_ok_and(|about| about.file_type().is_char_device()) {
            let what = format!("data: {} is not there", device::CONTROL);
            lacks.push((what, "modprobe loop; a container has to be given its devices"));
        }
        match fs::metadata(&self.image) {
            Ok(_) => {
                let looked = File::options()
                    .read(true)
                    .write(true)
                    .open(&self.image)
                    .map_err(failed(&self.image))
                    .and_then(|file| {
                        self.suits(&file)?;
                        match may_be_in_use {
                            true => Ok(()),
                            false => self.lock(&file, ASKED_WITHIN),
                        }
                    });
                if let Err(why) = looked {
                    let mend =
                        "correct program.data or data_mib, or take that file away: a new one is made then";
                    lacks.push((format!("data: {why}"), mend));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if mkfs().is_none() {
                    let what = "data: mkfs.ext4 is not on this host".to_owned();
                    lacks.push((what, "apt-get install e2fsprogs"));
                }
                if let Err(why) = self.has_room() {
                    let mend =
                        "make that folder or free some of its disk, or correct program.data or data_mib";
                    lacks.push((format!("data: {why}"), mend));
                }
            }
            Err(error) => {
                let what = format!("data: {}: {error}", self.image.display());
                lacks.push((what, "correct program.data"));
            }
        }
        lacks
    }

    /// The image, for this process alone. One that is not there is made, with an empty file system whose root is `owner`'s (user and group;
    /// root's, if none is named). Waits up to 15 s for one that a killed copy still has.
    ///
    /// # Errors
    /// One line: another has it, it is of another size, no ext4, or there is no room for it.
    pub fn open(&self, owner: Option<(u32, u32)>) -> Result<Image, GuardError> {
        let file = match self.existing()? {
            Some(file) => file,
            None => self.make(owner)?,
        };
        self.suits(&file)?;
        self.lock(&file, FREE_WITHIN)?;
        Ok(Image { file })
    }

    fn lock(&self, file: &File, within: Duration) -> Result<(), GuardError> {
        let until = Instant::now() + within;
        while flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if Instant::now() > until {
                return Err(failed(&self.image)("it is in use by another program or daemon"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn existing(&self) -> Result<Option<File>, GuardError> {
        match File::options().read(true).write(true).open(&self.image) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&self.image)(error)),
        }
    }

    /// Invariant 3.
    fn make(&self, owner: Option<(u32, u32)>) -> Result<File, GuardError> {
        self.has_room()?;
        let making = self.beside("new");
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&making)
            .map_err(failed(&making))?;
        let made = self.fill(&file, &making, owner).and_then(|()| {
            fs::rename(&making, &self.image).map_err(failed(&self.image))?;
            self.sync_folder()
        });
        if made.is_err() {
            // What cannot be removed is overwritten the next time.
            let _ = fs::remove_file(&making);
        }
        made.map(|()| file)
    }

    fn fill(&self, file: &File, making: &Path, owner: Option<(u32, u32)>) -> Result<(), GuardError> {
        file.set_len(self.bytes()).map_err(failed(making))?;
        let mkfs = mkfs().ok_or_else(|| {
            GuardError::new("mkfs.ext4 is not on this host: apt-get install e2fsprogs".to_owned())
        })?;
        let (user, group) = owner.unwrap_or((0, 0));
        let mut command = Command::new(mkfs);
        // All of it is made now: what the kernel would go on with later would be written while the program stands still.
        command.args(["-q", "-F", "-m", "0", "-E"]);
        command.arg(format!(
            "lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner={user}:{group}"
        ));
        command.arg(making).stdin(Stdio::null());
        crate::guard::succeed_within(&mut command, MADE_WITHIN, "mkfs.ext4")?;
        file.sync_all().map_err(failed(making))
    }

    fn suits(&self, file: &File) -> Result<(), GuardError> {
        use std::os::unix::fs::FileExt;
        let about = file.metadata().map_err(failed(&self.image))?;
        if !about.is_file() {
            return Err(failed(&self.image)("it is no file"));
        }
        if about.len() != self.bytes() {
            return Err(failed(&self.image)(format!(
                "it has {} MiB and not {}, as data_mib says",
                about.len() / MIB,
                self.mib
            )));
        }
        let mut magic = [0; 2];
        let read = file.read_exact_at(&mut magic, MAGIC_AT);
        read.map_err(failed(&self.image))?;
        match magic == MAGIC {
            true => Ok(()),
            false => Err(failed(&self.image)("it has no ext4 file system")),
        }
    }

    fn has_room(&self) -> Result<(), GuardError> {
        let folder = self.folder();
        let disk = statvfs(folder).map_err(failed(folder))?;
        match disk.f_bavail * disk.f_frsize > self.bytes() {
            true => Ok(()),
            false => Err(failed(folder)(format!(
                "no room for an image of {} MiB",
                self.mib
            ))),
        }
    }

    /// The file system's bytes, holes included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.mib) * MIB
    }

    fn folder(&self) -> &Path {
        self.image.parent().unwrap_or(Path::new("/"))
    }

    fn beside(&self, kind: &str) -> PathBuf {
        let mut name = self.image.clone().into_os_string();
        name.push(".");
        name.push(kind);
        name.into()
    }

    /// So that a new name is there after a loss of power.
    fn sync_folder(&self) -> Result<(), GuardError> {
        let folder = self.folder();
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(failed(folder))
    }
}

impl Image {
    /// Puts it on a loop device.
    ///
    /// # Errors
    /// Those of the kernel: no loop devices, or none that is free.
    pub fn attach(self) -> Result<Attached, GuardError> {
        let device = Device::attach(&self.file)?;
        Ok(Attached {
            file: self.file,
            device,
        })
    }

    /// Its contents.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Attached {
    /// The device that it is mounted from.
    #[must_use]
    pub fn device(&self) -> &Path {
        self.device.path()
    }

    /// What a copy of the running program needs of it. `mounted`: the root of its file system.
    ///
    /// # Errors
    /// Too many open files.
    pub fn source(&self, mounted: &OwnedFd) -> io::Result<blocks::Source> {
        Ok(blocks::Source::new(
            self.file.try_clone()?,
            self.device.figures(),
            mounted.as_fd().try_clone_to_owned()?,
        ))
    }
}

/// An image gets its blocks on disk before anything else is said of them.
///
/// # Errors
/// Those of fsync(2).
pub fn sync(image: &Image) -> Result<(), GuardError> {
    let synced = image.file.sync_all();
    synced.map_err(|error| GuardError::new(format!("the image: {error}")))
}

fn mkfs() -> Option<&'static str> {
    MKFS.into_iter().find(|path| Path::new(path).exists())
}

/// Whether a file has no room yet for all of its bytes does not matter: holes are filled when they are written.
pub(crate) fn punch(file: &File, at: u64, bytes: u64) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, flags, at, bytes)?)
}

#[cfg(test)]
mod tests;
