//! UEFI for a guest: OVMF's code, and variables of the VM's own.
//!
//! Decides:    which files of the distribution a flash is made of.
//! Flow:       `vm.firmware = "uefi"` -> [`code`] is the first flash, read-only; [`make_variables`] makes the image of the second
//!             when a VM first has one, and from then on it is a disk like others: mirrored, committed by syncs, taken over. A VM of
//!             libvirt's brings its own ([`fits`], [`take_variables`]).
//! Invariants: 1. variables are there whole or not at all, and those that are there are never replaced by fresh ones.
//! Source:     Debian's package `ovmf`; QEMU's docs/system and hw/i386/pc_sysfw.c for the two units.
//! Not here:   what lies in the flash while the VM runs (`firmware`), mirroring (`disk`), where the image lies (node).

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Where Debian puts OVMF.
const FOLDER: &str = "/usr/share/OVMF";
const CODE: &str = "OVMF_CODE_4M.fd";
const VARIABLES: &str = "OVMF_VARS_4M.fd";
/// What to do when it is not there.
pub const INSTALL: &str =
    "install the package ovmf (Debian: apt-get install ovmf), or set vm.firmware to \"bios\"";

/// What is wrong with a UEFI's files.
#[derive(Debug, thiserror::Error)]
pub enum UefiError {
    /// The distribution's file is not there.
    #[error("there is no {}: {INSTALL}", .0.display())]
    NotInstalled(PathBuf),
    /// A VM's variables are not there, and cannot be made.
    #[error("the UEFI's variables {} cannot be made: {error}", .path.display())]
    NotMade {
        /// Where they would lie.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// Somebody's variables are of a form that we do not keep.
    #[error("it is a qcow2 image, and Dunlin keeps variables raw")]
    Qcow2,
    /// They are of another size.
    #[error("it has {found} bytes and this host's {name} has {wanted}: it is of another build of the UEFI")]
    OtherSize {
        /// Theirs.
        found: u64,
        /// The file that they are compared with.
        name: String,
        /// Its size.
        wanted: u64,
    },
    /// They are laid out otherwise than in this host's file of that name.
    #[error(
        "its variables are not laid out as in this host's {0}: it is of another build of the UEFI, or none at all"
    )]
    OtherLayout(String),
    /// They cannot be read.
    #[error("it cannot be read: {0}")]
    Unread(io::Error),
    /// They are a folder, a pipe or something like it.
    #[error("it is no ordinary file")]
    NoFile,
    /// There are variables where they would be copied to.
    #[error("{} is there already", .0.display())]
    Taken(PathBuf),
    /// They cannot be copied.
    #[error("{} cannot be made: {error}", .path.display())]
    NotCopied {
        /// Where to.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
}

/// The code that a UEFI guest runs.
pub fn code() -> Result<PathBuf, UefiError> {
    file(Path::new(FOLDER), CODE)
}

/// The variables that a new VM begins with.
pub fn variables() -> Result<PathBuf, UefiError> {
    file(Path::new(FOLDER), VARIABLES)
}

fn file(folder: &Path, name: &str) -> Result<PathBuf, UefiError> {
    let path = folder.join(name);
    match path.is_file() {
        true => Ok(path),
        false => Err(UefiError::NotInstalled(path)),
    }
}

/// Makes the image of a VM's variables at `path`, unless it has some (invariant 1).
pub fn make_variables(path: &Path) -> Result<(), UefiError> {
    match path.exists() {
        true => Ok(()),
        false => copy_whole(&variables()?, path).map_err(|error| UefiError::NotMade {
            path: path.to_owned(),
            error,
        }),
    }
}

/// What begins every store of variables that is laid out alike: the volume's header, the kind of store, and its size.
const LAYOUT: usize = 92;
/// What begins a qcow2 image.
const QCOW2: &[u8] = b"QFI\xfb";

/// Whether that file holds variables with which this host's UEFI can go on; else why not, in words that go on behind its name.
pub fn fits(path: &Path) -> Result<(), UefiError> {
    fits_like(path, &variables()?)
}

fn fits_like(path: &Path, empty: &Path) -> Result<(), UefiError> {
    let name = || empty.file_name().unwrap_or_default().display().to_string();
    let (found, wanted) = (begin(path)?, begin(empty)?);
    if found.1.starts_with(QCOW2) {
        return Err(UefiError::Qcow2);
    }
    if found.0 != wanted.0 {
        return Err(UefiError::OtherSize {
            found: found.0,
            name: name(),
            wanted: wanted.0,
        });
    }
    match found.1 == wanted.1 {
        true => Ok(()),
        false => Err(UefiError::OtherLayout(name())),
    }
}

/// A file's size, and what it begins with.
fn begin(path: &Path) -> Result<(u64, Vec<u8>), UefiError> {
    let about = fs::metadata(path).map_err(UefiError::Unread)?;
    // Before it is opened: a pipe may make whoever opens it wait for ever.
    if !about.is_file() {
        return Err(UefiError::NoFile);
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(LAYOUT as u64).read_to_end(&mut bytes))
        .map_err(UefiError::Unread)?;
    Ok((about.len(), bytes))
}

/// Makes the image of a VM's variables at `to` of those in `from`, which fit. Variables that are there are not replaced (invariant 1).
pub fn take_variables(from: &Path, to: &Path) -> Result<(), UefiError> {
    if to.exists() {
        return Err(UefiError::Taken(to.to_owned()));
    }
    copy_whole(from, to).map_err(|error| UefiError::NotCopied {
        path: to.to_owned(),
        error,
    })
}

fn copy_whole(from: &Path, to: &Path) -> io::Result<()> {
    let folder = to.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let half_made = to.with_extension("new");
    let made = fill(from, &half_made).and_then(|()| fs::rename(&half_made, to));
    if made.is_err() {
        // Best effort: the disk may be full, and this is the part that is in the way.
        let _ = fs::remove_file(&half_made);
    }
    made?;
    File::open(folder)?.sync_all()
}

fn fill(from: &Path, to: &Path) -> io::Result<()> {
    let mut file = File::create(to)?;
    io::copy(&mut File::open(from)?, &mut file)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_one_line_that_names_the_package() {
        let why = file(Path::new("/no/such/folder"), CODE).unwrap_err().to_string();
        assert!(
            why.contains(CODE) && why.contains("package ovmf") && !why.contains('\n'),
            "{why}"
        );
    }

    #[test]
    fn only_variables_of_the_same_layout_fit() {
        let folder = std::env::temp_dir().join(format!("dunlin-uefi-fits-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (empty, path) = (folder.join("empty.fd"), folder.join("vm.fd"));
        let mut image = vec![0xff; 4096];
        image[..LAYOUT].fill(7);
        fs::write(&empty, &image).unwrap();
        let why = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            fits_like(&path, &empty)
                .err()
                .map_or_else(String::new, |why| why.to_string())
        };
        let mut written = image.clone();
        written[LAYOUT..].fill(1);
        assert_eq!(why(&written), "", "what is in the store may differ");
        assert!(why(&image[..2048]).contains("it has 2048 bytes and this host's empty.fd has 4096"));
        written[LAYOUT - 1] = 0;
        assert!(why(&written).contains("not laid out as in this host's empty.fd"));
        image[..4].copy_from_slice(QCOW2);
        assert!(why(&image).contains("qcow2"));
        assert!(why(b"").contains("it has 0 bytes"));
        assert!(
            matches!(fits_like(&folder, &empty), Err(UefiError::NoFile)),
            "nor a pipe, for which one would wait"
        );
        assert!(matches!(
            fits_like(&folder.join("none"), &empty),
            Err(UefiError::Unread(_))
        ));
        fs::write(&path, b"the guest's").unwrap();
        assert!(matches!(take_variables(&empty, &path), Err(UefiError::Taken(_))));
        assert_eq!(fs::read(&path).unwrap(), b"the guest's");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn variables_are_made_once_and_kept() {
        let folder = std::env::temp_dir().join(format!("dunlin-uefi-{}", std::process::id()));
        let path = folder.join("vm.fd");
        make_variables(&path).unwrap();
        let fresh = fs::read(variables().unwrap()).unwrap();
        assert_eq!(fs::read(&path).unwrap(), fresh);
        fs::write(&path, b"the guest's").unwrap();
        make_variables(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"the guest's");
        assert_eq!(
            fs::read_dir(&folder).unwrap().count(),
            1,
            "nothing half-made is left"
        );
        let why = copy_whole(Path::new("/dev/full/none"), &folder.join("other.fd")).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::NotADirectory);
        assert_eq!(
            fs::read_dir(&folder).unwrap().count(),
            1,
            "nor of one that failed"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
