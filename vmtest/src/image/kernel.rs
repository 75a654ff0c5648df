//! The kernel's image and the modules the guest needs, in an order in which they load.
//!
//! Debian's cloud kernel has every virtio driver as a module, and a package that is only unpacked has no
//! `modules.dep`. So the order comes from the modules themselves: each names what it needs in its `.modinfo`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// What the guest uses; everything these depend on is loaded before them.
const WANTED: [&str; 4] = ["virtio_pci", "virtio_mmio", "virtio_net", "virtio_blk"];

/// Beside these under a UEFI: the guest's variables as files.
pub const UNDER_UEFI: [&str; 1] = ["efivarfs"];

/// `tsc=reliable`: a paused and resumed VM must not lose its clock source. `nowatchdog`: a pause is no lock-up.
pub const COMMAND_LINE: &str = "console=ttyS0 loglevel=4 panic=-1 net.ifnames=0 tsc=reliable nowatchdog no_timer_check random.trust_cpu=on mitigations=off";

/// What an unpacked kernel package offers.
pub struct Kernel {
    /// The bzImage.
    pub image: PathBuf,
    /// As in `uname -r`.
    pub release: String,
    /// Name and bytes (never compressed), in load order.
    pub modules: Vec<(String, Vec<u8>)>,
}

/// Finds image and modules (the usual and `further` ones) in `root`, where a kernel package was unpacked.
pub fn find(root: &Path, further: &[&str]) -> Result<Kernel> {
    let boot = root.join("boot");
    let image = fs::read_dir(&boot)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
        })
        .with_context(|| format!("no vmlinuz in {}", boot.display()))?;
    let release = image.file_name().unwrap_or_default().to_string_lossy()["vmlinuz-".len()..].to_owned();
    // Debian 13 unpacks to usr/lib/modules, Debian 12 to lib/modules.
    let tree = ["usr/lib/modules", "lib/modules"].map(|dir| root.join(dir).join(&release));
    let tree = tree
        .iter()
        .find(|dir| dir.exists())
        .context("a kernel package without modules")?;

    let mut by_name = BTreeMap::new();
    collect(&tree.join("kernel"), &mut by_name)?;
    let mut modules = Vec::new();
    for name in WANTED.iter().chain(further) {
        add(name, &by_name, &mut modules)?;
    }
    Ok(Kernel {
        image,
        release,
        modules,
    })
}

fn collect(dir: &Path, into: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, into)?;
        } else if let Some((stem, _)) = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.split_once(".ko"))
        {
            into.insert(stem.replace('-', "_"), path);
        }
    }
    Ok(())
}

fn add(name: &str, by_name: &BTreeMap<String, PathBuf>, done: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    if done.iter().any(|(known, _)| known == name) {
        return Ok(());
    }
    // Built in, in this kernel: nothing to load.
    let Some(path) = by_name.get(name) else {
        return Ok(());
    };
    let bytes = read_module(path)?;
    for needed in depends(&bytes) {
        add(&needed, by_name, done)?;
    }
    done.push((name.to_owned(), bytes));
    Ok(())
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|ext| ext == "xz") {
        let output = Command::new("xz")
            .arg("-dc")
            .arg(path)
            .output()
            .context("xz is not here: apt install xz-utils")?;
        if !output.status.success() {
            bail!("{} is damaged", path.display());
        }
        return Ok(output.stdout);
    }
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The `depends=a,b` entry of a module's `.modinfo` section.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = &module[at + KEY.len()..];
    let end = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end])
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::depends;

    #[test]
    fn depends_are_read_from_modinfo() {
        assert_eq!(
            depends(b"\x7fELF..\0depends=virtio,net-failover\0retpoline=Y\0"),
            ["virtio", "net_failover"]
        );
        assert!(depends(b"..\0depends=\0name=virtio\0").is_empty());
        assert!(depends(b"no such entry").is_empty());
    }
}
