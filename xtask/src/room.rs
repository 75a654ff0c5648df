//! Room on the disks that the tests write to. A guest whose image's disk is full stands still, so a test command that runs
//! out of room fails in ways that name anything but the disk.

use std::path::PathBuf;

use anyhow::{Result, bail};
use dunlin_vmtest::paths;

/// What a whole test command writes from a clean clone, in MiB, with some to spare.
const NEEDED_MIB: u64 = 10 << 10;

fn folders() -> [PathBuf; 2] {
    [paths::target(), paths::testbed_runs()]
}

/// What is free in each, in MiB.
fn free() -> impl Iterator<Item = (PathBuf, u64)> {
    let known = |folder: PathBuf| paths::free_bytes(&folder).map(|bytes| (folder, bytes >> 20));
    folders().into_iter().filter_map(known)
}

/// An error where there is too little.
pub fn check() -> Result<()> {
    for (folder, mib) in free() {
        println!("xtask: {mib} MiB free in {}", folder.display());
        if let Some(why) = too_little(mib) {
            bail!("{}: {why}", folder.display());
        }
    }
    Ok(())
}

/// What is left, in words.
pub fn left() -> String {
    let words = free().map(|(folder, mib)| format!("{mib} MiB in {}", folder.display()));
    words.collect::<Vec<_>>().join(" and ")
}

fn too_little(free_mib: u64) -> Option<String> {
    (free_mib < NEEDED_MIB)
        .then(|| format!("{free_mib} MiB are free, the tests need {NEEDED_MIB}: make room, or set CARGO_TARGET_DIR to another disk"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_room_is_told_before_anything_is_built() {
        assert_eq!(too_little(NEEDED_MIB), None);
        assert!(too_little(NEEDED_MIB - 1).unwrap().contains("make room"));
    }
}
