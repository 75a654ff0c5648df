//! Disks for the guest, made without mounting anything and without being root: an empty ext4, or a boot loader (for a BIOS or
//! a UEFI) with kernel and initramfs.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::GuestImage;

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

/// Makes `path`, a raw image with a boot loader (syslinux on a FAT file system) that boots `image` with that command line.
pub fn boot_disk(path: &Path, image: &GuestImage, append: &str) -> Result<()> {
    let fat = Fat::with_kernel(path, image)?;
    fat.write(
        "syslinux.cfg",
        &format!("DEFAULT linux\nLABEL linux\nKERNEL vmlinuz\nINITRD initrd.img\nAPPEND {append}\n"),
    )?;
    tool(Command::new("syslinux").arg("--install").arg(path), "syslinux")
}

/// The same for a UEFI: systemd-boot, where every UEFI looks for a boot loader.
pub fn uefi_boot_disk(path: &Path, image: &GuestImage, append: &str) -> Result<()> {
    const LOADER: &str = "/usr/lib/systemd/boot/efi/systemd-bootx64.efi";
    ensure!(
        Path::new(LOADER).exists(),
        "there is no {LOADER}: apt-get install systemd-boot-efi (or 'cargo xtask setup')"
    );
    let fat = Fat::with_kernel(path, image)?;
    for folder in ["EFI", "EFI/BOOT", "loader", "loader/entries"] {
        fat.folder(folder)?;
    }
    fat.copy(Path::new(LOADER), "EFI/BOOT/BOOTX64.EFI")?;
    fat.write("loader/loader.conf", "timeout 0\n")?;
    fat.write(
        "loader/entries/linux.conf",
        &format!("title linux\nlinux /vmlinuz\ninitrd /initrd.img\noptions {append}\n"),
    )
}

/// A FAT file system in a file.
struct Fat<'a>(&'a Path);

impl<'a> Fat<'a> {
    fn with_kernel(path: &'a Path, image: &GuestImage) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
        file.set_len(64 << 20)?;
        drop(file);
        tool(
            Command::new("mkfs.vfat").args(["-F", "32"]).arg(path),
            "dosfstools",
        )?;
        let fat = Self(path);
        fat.copy(&image.kernel, "vmlinuz")?;
        fat.copy(&image.initrd, "initrd.img")?;
        Ok(fat)
    }

    fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let mut command = Command::new("mcopy");
        command.arg("-i").arg(self.0).arg(from).arg(format!("::{name}"));
        tool(&mut command, "mtools")
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let file = self.0.with_extension("cfg");
        fs::write(&file, text)?;
        self.copy(&file, name)
    }

    fn folder(&self, name: &str) -> Result<()> {
        let mut command = Command::new("mmd");
        command.arg("-i").arg(self.0).arg(format!("::{name}"));
        tool(&mut command, "mtools")
    }
}

fn tool(command: &mut Command, package: &str) -> Result<()> {
    // Debian keeps these where an ordinary user's PATH does not look.
    let path = std::env::var("PATH").unwrap_or_default();
    let output = command
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .output()
        .with_context(|| format!("{command:?}: apt-get install {package} (or 'cargo xtask setup')"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
