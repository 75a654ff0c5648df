//! Where things lie: the workspace, cargo's target directory and the guest images in it.
//!
//! What tests and demos leave on purpose (images, reports, logs of failures) lies under cargo's target directory, which
//! git ignores, so `cargo clean` removes it all.

use std::path::{Path, PathBuf};

/// The root of the workspace, as it was when this crate was compiled.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("vmtest/ lies in the workspace")
        .to_path_buf()
}

/// Cargo's target directory: the one the running executable lies in, else `$CARGO_TARGET_DIR` or `target/`.
pub fn target() -> PathBuf {
    let from_exe = std::env::current_exe().ok().and_then(|exe| {
        exe.ancestors()
            .skip(1)
            .find(|dir| dir.join("CACHEDIR.TAG").exists())
            .map(Path::to_path_buf)
    });
    from_exe
        .or_else(|| std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from))
        .unwrap_or_else(|| workspace().join("target"))
}

/// Where guest images and the packages they are made of are kept.
pub fn guest_images() -> PathBuf {
    target().join("guest")
}

/// Where 'cargo xtask setup' puts CRIU.
pub fn criu() -> PathBuf {
    target().join("tools").join("criu").join("criu")
}

/// Prometheus' checker, where 'cargo xtask setup' unpacks it; else the one of the path.
pub fn promtool() -> PathBuf {
    let unpacked = target().join("tools/usr/bin/promtool");
    if unpacked.exists() {
        unpacked
    } else {
        "promtool".into()
    }
}

/// Where runs of the testbed keep their hosts' files; each run makes and removes its own directory in it.
///
/// Not in the target directory: QEMU runs as an ordinary user who need not be able to look into the workspace, the
/// control sockets' paths have to be short, and unlike /tmp this is a real disk on every system.
pub fn testbed_runs() -> PathBuf {
    PathBuf::from("/var/tmp/dunlin-testbed")
}

/// Where the logs of a run that failed are kept for looking at.
pub fn failed_runs() -> PathBuf {
    target().join("failed-runs")
}

/// Bytes that are free on the disk of `path`, or of the nearest folder above it that is there.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let there = path.ancestors().find(|folder| folder.exists())?;
    let disk = nix::sys::statvfs::statvfs(there).ok()?;
    Some(disk.blocks_available() * disk.fragment_size())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_yet_has_the_room_of_the_one_above_it() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_bytes(&dir.path().join("not/there")).is_some_and(|free| free > 0));
        assert_eq!(free_bytes(Path::new("/proc/1/stat")), Some(0));
    }
}
