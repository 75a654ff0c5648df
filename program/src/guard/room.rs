//! Whether a disk has room for a copy that is on its way: the one that is carried lies on the disk that the logs are on.
//!
//! Decides:    what is left free.
//! Flow:       `Place::bytes` -> both hosts -> `room_for`, before anything is written.
//! Invariants: 1. what is counted is no less than what is written, but for what the kernel holds (sockets, pipes): the reserve is for that, too.
//! Source:     proc(5), memfd_create(2), statvfs(3). Not here: what follows where there is none (`node`).

use super::{GuardError, Place, failed};
use crate::proc::text;
use rustix::fs::{fstat, fstatvfs, statvfs};
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::linux::fs::MetadataExt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What is left free at most, and of a small disk the part of it.
const RESERVE: u64 = GIB;
const RESERVE_PART: u64 = 10;
/// How the kernel calls a file that is memory.
const MEMORY: &[u8] = b"/memfd:";
/// What stat(2) counts in.
const BLOCK_BYTES: u64 = 512;

impl Place {
    /// What a copy of it takes: what its processes have in memory, shared or swapped out as well, what they keep in files that are memory, mapped or
    /// not, and what it has written to files.
    ///
    /// # Errors
    /// Where it has just ended.
    pub fn bytes(&self) -> Result<u64, GuardError> {
        let its = self.all_processes()?;
        // One that ends meanwhile takes nothing.
        let in_memory = its
            .iter()
            .map(|path| in_memory(&text(path.join("status")).unwrap_or_default()));
        let in_memory: u64 = in_memory.sum();
        // Once, however many have it. What is mapped of it counts twice: it would take a look at all that is mapped to know how much that is.
        let kept: BTreeMap<_, _> = its.iter().flat_map(|path| kept(path)).collect();
        let kept: u64 = kept.values().sum();
        let written = match &self.written {
            Some(written) => {
                let disk = fstatvfs(written.as_fd()).map_err(failed("its files"))?;
                (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            }
            None => 0,
        };
        Ok(in_memory + kept + written)
    }

    /// Their folders in the host's /proc.
    pub(super) fn all_processes(&self) -> Result<Vec<PathBuf>, GuardError> {
        let own = fstat(&self.processes).map_err(failed("its processes"))?;
        let is_its = |process: &Path| {
            let namespace = fs::metadata(process.join("ns/pid"));
            namespace.is_ok_and(|it| (it.st_dev(), it.st_ino()) == (own.st_dev, own.st_ino))
        };
        let all = fs::read_dir("/proc").map_err(failed("its processes"))?;
        let paths = all.flatten().map(|entry| entry.path());
        Ok(paths.filter(|path| is_its(path)).collect())
    }
}

/// Whether the disk that this folder is on takes so much and has enough left; the most that it takes.
///
/// # Errors
/// One line, where it does not.
pub fn room_for(folder: &Path, bytes: u64) -> Result<u64, GuardError> {
    let disk = statvfs(folder).map_err(|error| GuardError(format!("{}: {error}", folder.display())))?;
    let (all, free) = (disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize);
    room(all, free, bytes).map_err(|why| GuardError(format!("{}: {why}", folder.display())))
}

/// A disk has too little room.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "no room for a copy of the program: it takes up to {} GiB, beside {} MiB that are left free for logs: free some of that disk",
    .bytes.div_ceil(GIB),
    .reserve.div_ceil(MIB)
)]
struct NoRoom {
    bytes: u64,
    reserve: u64,
}

fn room(all: u64, free: u64, bytes: u64) -> Result<u64, NoRoom> {
    let reserve = RESERVE.min(all / RESERVE_PART);
    match free.checked_sub(reserve) {
        Some(room) if bytes <= room => Ok(room),
        // No number that is another one at each try: it is told once.
        _ => Err(NoRoom { bytes, reserve }),
    }
}

/// What a process keeps in files that are memory and have no name in any folder (memfd_create(2)): which file, and how many bytes it takes.
fn kept(process: &Path) -> Vec<((u64, u64), u64)> {
    let all = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let about = |entry: fs::DirEntry| {
        let path = entry.path();
        let link = fs::read_link(&path).ok()?;
        if !link.as_os_str().as_bytes().starts_with(MEMORY) {
            return None;
        }
        let file = fs::metadata(&path).ok()?;
        Some(((file.st_dev(), file.st_ino()), file.st_blocks() * BLOCK_BYTES))
    };
    all.filter_map(about).collect()
}

fn in_memory(status: &str) -> u64 {
    let kib = |line: &str| {
        let number = line
            .strip_prefix("VmRSS:")
            .or_else(|| line.strip_prefix("VmSwap:"))?;
        number.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    status.lines().filter_map(kib).sum::<u64>() << 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn logs_keep_room_on_a_large_disk_and_on_a_small_one() {
        assert_eq!(room(100 * GIB, 5 * GIB, 4 * GIB), Ok(4 * GIB));
        let why = room(100 * GIB, 5 * GIB, 4 * GIB + 1).expect_err("a byte too many");
        assert_eq!(
            why.to_string(),
            "no room for a copy of the program: it takes up to 5 GiB, beside 1024 MiB that are left free for logs: free some of that disk"
        );
        assert_eq!(room(2000 * MIB, 500 * MIB, 300 * MIB), Ok(300 * MIB), "a tenth");
        assert!(room(2000 * MIB, 500 * MIB, 300 * MIB + 1).is_err());
        assert!(room(100 * GIB, 1023 * MIB, 0).is_err(), "it is full already");
    }

    #[test]
    fn what_is_in_memory_or_swapped_out_counts() {
        let status = "Name:\tredis\nVmPeak:\t 9000 kB\nVmRSS:\t    3000 kB\nRssAnon:\t 2000 kB\nVmSwap:\t      96 kB\n";
        assert_eq!(in_memory(status), 3096 << 10);
        assert_eq!(in_memory("Name:\tkthreadd\n"), 0);
    }

    #[test]
    fn what_lies_in_a_file_of_memory_that_is_not_mapped_counts_once() {
        let file = rustix::fs::memfd_create("cache", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        let file = fs::File::from(file);
        // What is not written takes nothing, however long the file is.
        file.set_len(GIB).expect("long");
        file.write_all_at(&vec![7_u8; 3 * MIB as usize], MIB)
            .expect("written");
        let second = file.try_clone().expect("a second one");
        let process = Path::new("/proc/self");
        let about = file.metadata().expect("its state");
        let own = (about.st_dev(), about.st_ino());
        let found: Vec<u64> = kept(process)
            .into_iter()
            .filter(|(which, _)| *which == own)
            .map(|(_, bytes)| bytes)
            .collect();
        assert_eq!(found.len(), 2, "by both of its descriptors, as one file");
        // Where the kernel takes large pages there may be more of them.
        assert!((3 * MIB..=16 * MIB).contains(&found[0]), "{found:?}");
        drop((file, second));
        assert!(!kept(process).iter().any(|(which, _)| *which == own));
    }

    #[test]
    fn a_disk_is_asked_itself() {
        let folder = tempfile::tempdir().expect("a folder");
        let why = room_for(folder.path(), 1 << 60).expect_err("no disk has that");
        assert!(
            why.to_string().starts_with(&*folder.path().to_string_lossy()),
            "{why}"
        );
        assert!(room_for(&folder.path().join("none"), 0).is_err());
    }
}
