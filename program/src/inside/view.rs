//! A copy's own view of the file system: the host's, or a directory of the host's, and what it writes is its own and in memory.
//!
//! Decides:    what of the host a copy sees.
//! Flow:       keeper, in its own mount namespace -> overlays of the host's file systems -> a new root.
//! Invariants: 1. nothing that a copy writes reaches the host, or another copy, but for its data's image; 2. of /dev there is only what holds no state;
//!             3. all of it goes with the namespace: nothing is made on the host, the place it is put together at is one that
//!             is there; 4. of what the kernel tells in /sys and /proc nothing can be written but what is a process' own.
//! Source:     Documentation/filesystems/overlayfs.rst, pivot_root(2), mount_setattr(2). Not here: when /proc is mounted, which pid 1 has done.

use super::{Failure, failed};
use crate::guard::layers;
use crate::message::{Mounted, Walls};
use crate::page;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, pivot_root};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Places that every Linux has, and hardly anybody keeps anything at.
const PLACES: [&str; 4] = ["/mnt", "/media", "/srv", "/opt"];
/// What of /dev every program may have: none of it remembers anything.
const DEVICES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];
/// What is made where a root of its own has none: the kernel's file systems are put there, and programs take the last two for given.
const MADE: [&str; 5] = ["proc", "sys", "dev", "run", "tmp"];
/// Beside the layers of what is written: what lies in /dev/shm.
const SHARED: &str = "shm";
const CHANCE: [&str; 2] = ["urandom", "random"];
/// File systems that hold a user's files; what is not here is the kernel's, or made anew.
const FILES: [&str; 16] = [
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay", "tmpfs", "nfs", "nfs4",
    "9p", "virtiofs", "fuse", "squashfs",
];

/// What of /proc cannot even be read: the host's memory, its keys, what its kernel is about to do.
const SECRETS: [&str; 3] = ["kcore", "keys", "timer_list"];
/// mount_setattr(2): for all that is mounted below, too.
const AT_RECURSIVE: libc::c_uint = 0x8000;
const MOUNT_ATTR_RDONLY: u64 = 1;

type Nothing<'a> = Option<&'a Path>;

/// Mounts of this namespace reach no other.
pub(super) fn make_private() -> Result<(), Failure> {
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None as Nothing, "/", None as Nothing, flags, None as Nothing).map_err(failed("mounts of its own"))
}

/// What a view is known by from outside.
pub(super) struct View {
    /// The folder of what is written: no path leads there any more.
    written: OwnedFd,
    /// The root of the data's file system.
    data: Option<OwnedFd>,
    /// The page of the agreed clock.
    clock: Option<OwnedFd>,
    /// The pipe that agreed chance comes out of.
    chance: Option<OwnedFd>,
}

impl View {
    /// In the order in which they are told.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let rest = [&self.data, &self.clock, &self.chance];
        std::iter::once(self.written.as_fd()).chain(rest.into_iter().flatten().map(AsFd::as_fd))
    }
}

/// Makes the view, and moves into it; the process then stands in `directory`.
pub(super) fn build(walls: &Walls, directory: &Path) -> Result<View, Failure> {
    let mounts = mounts()?;
    let needed = |place: &Path| {
        let data = walls.data.as_ref().map(|data| data.at.as_path());
        // Of a root of its own all lies below.
        let host = Path::new("/");
        let below = [Some(directory), data].map(|path| path.filter(|_| walls.root == host));
        let own = Some(walls.root.as_path()).filter(|root| *root != host);
        below
            .into_iter()
            .chain([own])
            .flatten()
            .any(|path| path.starts_with(place))
    };
    let is_free = |place: &str| {
        let place = Path::new(place);
        place.is_dir() && !needed(place) && !mounts.iter().any(|(at, _)| at.starts_with(place))
    };
    let place = PLACES
        .into_iter()
        .find(|place| is_free(place))
        .or_else(|| PLACES.into_iter().find(|place| !needed(Path::new(place))))
        .unwrap_or(PLACES[0]);
    let size = format!("size={}m,mode=755", walls.scratch_mib);
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("dunlin"), place, Some("tmpfs"), flags, Some(&*size))
        .map_err(failed("memory for what it writes"))?;
    let place = Path::new(place);
    let written = fs::File::open(place).map_err(failed("memory for what it writes"))?;
    let root = place.join("root");
    fs::create_dir(&root).map_err(failed("its root"))?;
    let lower = &walls.root;
    let below: Vec<(&PathBuf, &Path)> = mounts
        .iter()
        .filter(|(at, kind)| is_ours(at, kind, lower, place))
        .filter_map(|(at, _)| Some((at, at.strip_prefix(lower).ok()?)))
        .collect();
    // What is looked at from here on, by its place in the view; of the host's own files also where its links lead.
    let data_at = walls.data.as_ref().map(|data| data.at.as_path());
    let named = [Some(directory), data_at].into_iter().flatten();
    let is_the_hosts = lower == Path::new("/");
    let led_to = |path: &Path| path.canonicalize().ok().filter(|_| is_the_hosts);
    let looked_at: Vec<PathBuf> = named
        .flat_map(|path| [Some(path.to_owned()), led_to(path)])
        .flatten()
        .map(|path| path.strip_prefix("/").map_or(path.clone(), Path::to_owned))
        .chain(below.iter().map(|(_, inside)| (*inside).to_owned()))
        .collect();
    overlay(lower, &root, place, Path::new(""), &looked_at).map_err(|error| {
        format!("a view of the host's files: {error}: overlayfs is missing (modprobe overlay), or this kernel lets only root use it: run it as root")
    })?;
    for (at, below) in below {
        let inside = root.join(below);
        if inside.is_dir() {
            let further: Vec<PathBuf> = looked_at
                .iter()
                .filter_map(|path| path.strip_prefix(below).ok().map(Path::to_owned))
                .collect();
            // One that cannot be seen is an empty directory: as if it were not mounted.
            let _ = overlay(at, &inside, place, below, &further);
        }
    }
    let data = walls
        .data
        .as_ref()
        .map(|data| mount_data(data, &root))
        .transpose()?;
    let own_chance = walls.chance.is_none();
    devices(&root, place, own_chance)?;
    let clock = walls.has_page().then(|| clock(&root)).transpose()?;
    let chance = (!own_chance).then(|| chance(&root)).transpose()?;
    let sys = root.join("sys");
    if sys.is_dir() {
        bind_read_only(&sys).map_err(failed("/sys"))?;
    }
    // pid 1 mounts its own over this one, which has the host's processes.
    let bind = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(
        Some("/proc"),
        &root.join("proc"),
        None as Nothing,
        bind,
        None as Nothing,
    )
    .map_err(failed("/proc"))?;
    chdir(&root).map_err(failed("its root"))?;
    pivot_root(".", ".").map_err(failed("its root"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(failed("the host's root"))?;
    chdir(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    Ok(View {
        written: written.into(),
        data,
        clock,
        chance,
    })
}

/// A file system of the host's that is mounted below the program's root.
fn is_ours(at: &Path, kind: &str, lower: &Path, place: &Path) -> bool {
    let is_other = at != lower && !at.starts_with(place);
    is_other && FILES.contains(&kind) && !is_kernels(at)
}

/// The folders on the way to a place, in the layer of what is written, as if they had been written in: see `make_missing`.
fn make_known(lower: &Path, upper: &Path, way: &Path) -> io::Result<()> {
    let mut made = Vec::new();
    let mut at = PathBuf::new();
    for name in way {
        at.push(name);
        let Ok(about) = fs::symlink_metadata(lower.join(&at)) else {
            break;
        };
        if !about.is_dir() {
            break;
        }
        let folder = upper.join(&at);
        match fs::create_dir(&folder) {
            Ok(()) => {
                std::os::unix::fs::chown(&folder, Some(about.uid()), Some(about.gid()))?;
                fs::set_permissions(&folder, about.permissions())?;
                made.push((folder, about));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    for (folder, about) in made.iter().rev() {
        let times = fs::FileTimes::new()
            .set_accessed(about.accessed()?)
            .set_modified(about.modified()?);
        fs::File::open(folder)?.set_times(times)?;
    }
    Ok(())
}

/// Why an overlay is not there.
#[derive(Debug, thiserror::Error)]
enum OverlayError {
    /// The folders of the layer of what is written.
    #[error(transparent)]
    Layer(io::Error),
    /// One of those that are made where a root has none.
    #[error("/{name}: {error}")]
    Missing {
        /// Which.
        name: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// The folders on the way to a place.
    #[error("{}: {error}", .way.display())]
    Way {
        /// To which.
        way: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// A folder's name, which goes into a mount's options.
    #[error("{0:?} has a character that overlayfs does not take")]
    Character(String),
    /// The mount itself.
    #[error(transparent)]
    Mount(nix::Error),
}

/// In the layer of what is written, before anybody looks: what an overlay has seen of a folder holds although a layer is changed behind its
/// back, as it is when what another copy had written comes here. A folder that was only the host's then stays that: what comes into it is not
/// seen, and nothing more can be written there.
fn make_missing(lower: &Path, upper: &Path) -> Result<(), OverlayError> {
    for name in MADE {
        if fs::symlink_metadata(lower.join(name)).is_ok() {
            continue;
        }
        let mode = if name == "tmp" { 0o1777 } else { 0o755 };
        let folder = upper.join(name);
        let made = fs::create_dir(&folder).and_then(|()| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(&folder, mode)
        });
        made.map_err(|error| OverlayError::Missing { name, error })?;
    }
    Ok(())
}

/// Invariant 1 does not hold for what is written here: it is for that. It covers a directory of the host's; its root is returned.
fn mount_data(data: &Mounted, root: &Path) -> Result<OwnedFd, Failure> {
    let at = root.join(data.at.strip_prefix("/").unwrap_or(&data.at));
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOATIME;
    let step = format!("data_at: {}", data.at.display());
    mount(
        Some(&data.device),
        &at,
        Some("ext4"),
        flags,
        Some("errors=remount-ro"),
    )
    .map_err(failed(&step))?;
    let opened = fs::File::open(&at).map_err(failed(&step))?;
    Ok(opened.into())
}

/// A pipe that every user may read, under both names.
fn chance(root: &Path) -> Result<OwnedFd, Failure> {
    let [file, other] = CHANCE.map(|name| root.join("dev").join(name));
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o444);
    nix::unistd::mkfifo(&file, mode).map_err(failed("/dev/urandom"))?;
    fs::hard_link(&file, other).map_err(failed("/dev/random"))?;
    let mut options = fs::File::options();
    options.read(true).write(true);
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    Ok(options.open(&file).map_err(failed("/dev/urandom"))?.into())
}

/// A file that every user may read.
fn clock(root: &Path) -> Result<OwnedFd, Failure> {
    let file = root.join(page::FILE.trim_start_matches('/'));
    let fault = failed(page::FILE);
    let mut options = fs::File::options();
    let made = options.read(true).write(true).create_new(true).open(&file);
    let clock = made.map_err(&fault)?;
    page::make(&clock).map_err(&fault)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o444);
    clock.set_permissions(mode).map_err(&fault)?;
    Ok(clock.into())
}

/// A /proc of the new pid namespace.
pub(super) fn mount_proc() -> Result<(), Failure> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None as Nothing).map_err(failed("/proc"))
}

/// What of /proc is the kernel's, and no process', can be read from then on, and not written to: most of it is the whole host's, and asks for
/// nothing but user 0 (`core_pattern` is a command that the host runs as root).
pub(super) fn protect_proc() -> Result<(), Failure> {
    for entry in fs::read_dir("/proc").map_err(failed("/proc"))? {
        let path = entry.map_err(failed("/proc"))?.path();
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        // Links lead to a process' own.
        let is_link = fs::symlink_metadata(&path).map_or(true, |about| about.file_type().is_symlink());
        if is_link || name.iter().all(u8::is_ascii_digit) {
            continue;
        }
        let protected = match SECRETS.iter().any(|secret| secret.as_bytes() == name) {
            true => device(Path::new("/dev/null"), &path),
            false => read_only(&path),
        };
        match protected {
            // It has gone meanwhile, with a module.
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
    }
    Ok(())
}

/// The host's device, to be read and written. Its mode and its owner are the whole host's, and stay as they are.
fn device(from: &Path, to: &Path) -> nix::Result<()> {
    mount(Some(from), to, None as Nothing, MsFlags::MS_BIND, None as Nothing)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None as Nothing, to, None as Nothing, flags, None as Nothing)
}

/// Over itself.
fn read_only(path: &Path) -> nix::Result<()> {
    let bind = MsFlags::MS_BIND;
    mount(Some(path), path, None as Nothing, bind, None as Nothing)?;
    made_read_only(path)
}

/// The uppermost mount there.
fn made_read_only(path: &Path) -> nix::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None as Nothing, path, None as Nothing, flags, None as Nothing)
}

/// The host's /sys, with all that is mounted below it: its control groups, the kernel's own files for debugging.
fn bind_read_only(sys: &Path) -> nix::Result<()> {
    let bind = |flags| mount(Some("/sys"), sys, None as Nothing, flags, None as Nothing);
    bind(MsFlags::MS_BIND | MsFlags::MS_REC)?;
    // MS_REMOUNT changes the uppermost mount alone.
    let attributes: [u64; 4] = [MOUNT_ATTR_RDONLY, 0, 0, 0];
    let path = std::ffi::CString::new(sys.as_os_str().as_encoded_bytes()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the path ends in a zero, and the four words are a struct mount_attr, whose size is told.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            AT_RECURSIVE,
            attributes.as_ptr(),
            size_of_val(&attributes),
        )
    };
    match Errno::result(set) {
        // Before Linux 5.12: without what is mounted below.
        Err(Errno::ENOSYS) => {}
        set => return set.map(drop),
    }
    umount2(sys, MntFlags::MNT_DETACH)?;
    bind(MsFlags::MS_BIND)?;
    made_read_only(sys)
}

/// Puts `bytes` in the place of the kernel's chance: every opening of it reads them from the beginning.
pub(super) fn replace_chance(bytes: &[u8]) -> Result<(), Failure> {
    let file = Path::new("/dev/chance");
    fs::write(file, bytes).map_err(failed("/dev/urandom"))?;
    fs::set_permissions(file, std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .map_err(failed("/dev/urandom"))?;
    for device in ["/dev/urandom", "/dev/random"] {
        mount(
            Some(file),
            device,
            None as Nothing,
            MsFlags::MS_BIND,
            None as Nothing,
        )
        .map_err(failed(device))?;
    }
    Ok(())
}

fn is_kernels(at: &Path) -> bool {
    ["/proc", "/sys", "/dev"]
        .iter()
        .any(|kernels| at.starts_with(kernels))
}

/// `from` at `to`, which is at `inside` of the view; what is written lies beside, in a layer of that place's name.
/// `looked_at`: places in it that are looked at before what another copy had written may come.
fn overlay(
    from: &Path,
    to: &Path,
    place: &Path,
    inside: &Path,
    looked_at: &[PathBuf],
) -> Result<(), OverlayError> {
    let name = layers::name_of(inside);
    let (upper, work) = (
        place.join(&name),
        place.join([OsStr::new("w"), &name].join(OsStr::new(""))),
    );
    for folder in [&upper, &work] {
        fs::create_dir(folder).map_err(OverlayError::Layer)?;
    }
    // The root of an overlay is the upper folder: it must say what the lower one says.
    if let Ok(about) = fs::metadata(from) {
        let _ = fs::set_permissions(&upper, about.permissions());
        let _ = std::os::unix::fs::chown(&upper, Some(about.uid()), Some(about.gid()));
    }
    if inside.as_os_str().is_empty() {
        make_missing(from, &upper)?;
    }
    for way in looked_at {
        make_known(from, &upper, way).map_err(|error| OverlayError::Way {
            way: way.clone(),
            error,
        })?;
    }
    let text = from.to_string_lossy();
    if text.contains([',', ':', '\\']) {
        return Err(OverlayError::Character(text.into_owned()));
    }
    let data = format!(
        "lowerdir={text},upperdir={},workdir={}",
        upper.display(),
        work.display()
    );
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("overlay"), to, Some("overlay"), flags, Some(&*data)).map_err(OverlayError::Mount)
}

fn devices(root: &Path, place: &Path, with_chance: bool) -> Result<(), Failure> {
    let dev = root.join("dev");
    let data = Some("mode=755,size=4m");
    mount(Some("dev"), &dev, Some("tmpfs"), MsFlags::MS_NOSUID, data).map_err(failed("/dev"))?;
    let given = |name: &&str| with_chance || !CHANCE.contains(name);
    for name in DEVICES.into_iter().filter(given) {
        let (from, to) = (Path::new("/dev").join(name), dev.join(name));
        fs::write(&to, []).map_err(failed("/dev"))?;
        device(&from, &to).map_err(failed("/dev"))?;
    }
    let links = [
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ];
    for (name, to) in links {
        std::os::unix::fs::symlink(to, dev.join(name)).map_err(failed("/dev"))?;
    }
    // With what else it writes: it goes along with a copy, and is bounded.
    let (kept, shm) = (place.join(SHARED), dev.join("shm"));
    let fault = failed("/dev/shm");
    for folder in [&kept, &shm] {
        fs::create_dir(folder).map_err(&fault)?;
    }
    fs::set_permissions(&kept, std::os::unix::fs::PermissionsExt::from_mode(0o1777)).map_err(&fault)?;
    mount(
        Some(&kept),
        &shm,
        None as Nothing,
        MsFlags::MS_BIND,
        None as Nothing,
    )
    .map_err(failed("/dev/shm"))
}

/// What is mounted: where, and of what kind; proc(5), mountinfo.
fn mounts() -> Result<Vec<(PathBuf, String)>, Failure> {
    let text = fs::read_to_string("/proc/self/mountinfo").map_err(failed("the host's mounts"))?;
    Ok(text.lines().filter_map(mount_of).collect())
}

fn mount_of(line: &str) -> Option<(PathBuf, String)> {
    let at = line.split(' ').nth(4)?;
    let kind = line.split_once(" - ")?.1.split(' ').next()?;
    // Spaces and the like are told as octal numbers: such a place is left out, not guessed.
    (!at.contains('\\')).then(|| {
        (
            PathBuf::from(at),
            kind.split('.').next().unwrap_or(kind).to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::mount_of;
    use std::path::PathBuf;

    #[test]
    fn a_line_of_mountinfo_is_a_place_and_a_kind() {
        let line = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        assert_eq!(mount_of(line), Some((PathBuf::from("/mnt2"), "ext3".to_owned())));
        let fuse = "40 35 0:32 / /home/me/s rw - fuse.sshfs me@there: rw";
        assert_eq!(
            mount_of(fuse),
            Some((PathBuf::from("/home/me/s"), "fuse".to_owned()))
        );
        assert_eq!(mount_of("36 35 98:0 /a /with\\040space rw - ext3 x rw"), None);
        assert_eq!(mount_of("nonsense"), None);
    }
}
