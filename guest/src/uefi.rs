//! UEFI for a guest: OVMF's code, and variables of the VM's own.
//!
//! Decides:    which files of the distribution a flash is made of.
//! Flow:       `vm.firmware = "uefi"` -> [`code`] is the first flash, read-only; [`make_variables`] makes the image of the second
//!             when a VM first has one, and from then on it is a disk like others: mirrored, committed by syncs, taken over.
//! Invariants: 1. variables are there whole or not at all, and those that are there are never replaced by fresh ones.
//! Source:     Debian's package `ovmf`; QEMU's docs/system and hw/i386/pc_sysfw.c for the two units.
//! Not here:   what lies in the flash while the VM runs (`firmware`), mirroring (`disk`), where the image lies (node).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Where Debian puts OVMF.
const FOLDER: &str = "/usr/share/OVMF";
const CODE: &str = "OVMF_CODE_4M.fd";
const VARIABLES: &str = "OVMF_VARS_4M.fd";
/// What to do when it is not there.
pub const INSTALL: &str =
    "install the package ovmf (Debian: apt-get install ovmf), or set vm.firmware to \"bios\"";

/// The code that a UEFI guest runs.
pub fn code() -> Result<PathBuf, String> {
    file(Path::new(FOLDER), CODE)
}

/// The variables that a new VM begins with.
pub fn variables() -> Result<PathBuf, String> {
    file(Path::new(FOLDER), VARIABLES)
}

fn file(folder: &Path, name: &str) -> Result<PathBuf, String> {
    let path = folder.join(name);
    match path.is_file() {
        true => Ok(path),
        false => Err(format!("there is no {}: {INSTALL}", path.display())),
    }
}

/// Makes the image of a VM's variables at `path`, unless it has some (invariant 1).
pub fn make_variables(path: &Path) -> Result<(), String> {
    match path.exists() {
        true => Ok(()),
        false => copy_whole(&variables()?, path)
            .map_err(|error| format!("the UEFI's variables {} cannot be made: {error}", path.display())),
    }
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
        let why = file(Path::new("/no/such/folder"), CODE).unwrap_err();
        assert!(
            why.contains(CODE) && why.contains("package ovmf") && !why.contains('\n'),
            "{why}"
        );
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
