//! The kernel for a software-assisted KVM, which lies beside this tree, and the preload object that QEMU needs there.
//!
//! * **Decides:** nothing. **Flow:** `../shared/kvm`, `assisted.c` -> unpacked and compiled under the guest images -> [`super::Assisted`].
//! * **Invariants:** what lies there is whole, or not there at all.
//! * **Not here:** what the object does: its own first lines say it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::Assisted;
use crate::paths;

/// Raised whenever what is made here changes.
const BUILDER: &str = "assisted 2";
/// Where the kernel is linked to: its symbols' addresses less this are physical.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Flags of the host's interface: on, and it switches halves of the page tables.
const ARM_FLAGS: u64 = 0x7f;
const PRELOAD: &str = include_str!("assisted.c");

fn source() -> PathBuf {
    paths::workspace().join("../shared/kvm")
}

/// What is needed; `None` where it is not beside this tree.
pub fn ensure(images: &Path) -> Result<Option<Assisted>> {
    let packed = source().join("vmlinux.xz");
    if !packed.is_file() {
        return Ok(None);
    }
    let mut hash = Sha256::new();
    hash.update(BUILDER);
    hash.update(fs::read(&packed)?);
    hash.update(PRELOAD);
    let key: String = hash
        .finalize()
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let home = images.join(format!("assisted-{key}"));
    if !home.is_dir() {
        let half_made = images.join(format!("making-{}-assisted", std::process::id()));
        let _ = fs::remove_dir_all(&half_made);
        fs::create_dir_all(&half_made)?;
        make(&packed, &half_made)?;
        if let Err(error) = fs::rename(&half_made, &home) {
            let _ = fs::remove_dir_all(&half_made);
            // Another process was quicker: its files are the same.
            if !home.is_dir() {
                return Err(error).with_context(|| format!("cannot make {}", home.display()));
            }
        }
    }
    Ok(Some(Assisted {
        kernel: home.join("vmlinux"),
        preload: home.join("preload.so"),
    }))
}

fn make(packed: &Path, into: &Path) -> Result<()> {
    let kernel = into.join("vmlinux");
    let unpacked = output(Command::new("xz").arg("-dc").arg(packed), "xz-utils")?;
    fs::write(&kernel, unpacked)?;
    let symbols = String::from_utf8(output(Command::new("nm").arg(&kernel), "binutils")?)?;
    let address = symbols
        .lines()
        .find_map(|line| line.strip_suffix(" pvm_vif")?.split(' ').next())
        .context("the kernel in ../shared/kvm has no symbol pvm_vif")?;
    let arm = (u64::from_str_radix(address, 16)? - KERNEL_MAP) | ARM_FLAGS;

    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-x", "c", "-"])
        .arg(format!("-DARM={arm:#x}"))
        .arg("-o")
        .arg(into.join("preload.so"))
        .stdin(Stdio::piped())
        .spawn()
        .context("cc is not here: apt install gcc")?;
    compiler
        .stdin
        .take()
        .expect("a piped stdin")
        .write_all(PRELOAD.as_bytes())?;
    match compiler.wait()?.success() {
        true => Ok(()),
        false => bail!("cc does not compile vmtest/src/accel/assisted.c"),
    }
}

fn output(command: &mut Command, package: &str) -> Result<Vec<u8>> {
    let said = command
        .output()
        .with_context(|| format!("{command:?}: apt install {package}"))?;
    match said.status.success() {
        true => Ok(said.stdout),
        false => bail!("{command:?}: {}", String::from_utf8_lossy(&said.stderr)),
    }
}
