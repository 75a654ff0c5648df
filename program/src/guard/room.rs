//! Whether a disk has room for a copy that is on its way: the one that is carried lies on the disk that the logs are on.
//!
//! Decides:    what is left free.
//! Flow:       `Place::bytes` -> both hosts -> `room_for`, before anything is written.
//! Invariants: 1. what is counted is no less than what is written, but for what the kernel holds (sockets, pipes): the reserve is for that, too.
//! Source:     proc(5), statvfs(3). Not here: what follows where there is none (`node`).

use super::{GuardError, Place, failed};
use crate::proc::text;
use rustix::fs::{fstat, fstatvfs, statvfs};
use std::fs;
use std::os::fd::AsFd;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What is left free at most, and of a small disk the part of it.
const RESERVE: u64 = GIB;
const RESERVE_PART: u64 = 10;

impl Place {
    /// What a copy of it takes: what its processes have in memory, shared or swapped out as well, and what it has written to files.
    ///
    /// # Errors
    /// Where it has just ended.
    pub fn bytes(&self) -> Result<u64, GuardError> {
        let its = self.all_processes()?.into_iter();
        // One that ends meanwhile takes nothing.
        let in_memory = its.map(|path| in_memory(&text(path.join("status")).unwrap_or_default()));
        let in_memory: u64 = in_memory.sum();
        let written = match &self.written {
            Some(written) => {
                let disk = fstatvfs(written.as_fd()).map_err(failed("its files"))?;
                (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            }
            None => 0,
        };
        Ok(in_memory + written)
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
