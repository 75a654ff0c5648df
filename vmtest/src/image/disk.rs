//! Disks for the guest: a raw image with an empty ext4, made without mounting anything and without being root.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Makes `path`, a raw ext4 image of `size_mib`, on which the guest's redis keeps its append-only file.
///
/// The same size gives the same file system (fixed identity and hash seed), so images can be compared.
pub fn data_disk(path: &Path, size_mib: u64) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(size_mib << 20)?;
    drop(file);
    let output = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-L", "dunlin-data"])
        .args(["-U", "d0d0d0d0-0000-4000-8000-00000000da7a"])
        .args([
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0,hash_seed=d0d0d0d0-0000-4000-8000-00000000da7a",
        ])
        .arg(path)
        .output()
        .context("mke2fs is not here: apt-get install e2fsprogs (or 'cargo xtask setup')")?;
    if !output.status.success() {
        let _ = fs::remove_file(path);
        bail!(
            "mke2fs failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
