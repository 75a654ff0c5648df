//! The files of the guest's initramfs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::cpio::Archive;
use super::kernel::Kernel;

/// A service's executable and the libraries it is linked with, as they lie on this host.
pub struct ServiceFiles {
    executable: PathBuf,
    /// Path in the guest (the one the loader asks for) -> file on this host.
    libraries: BTreeMap<String, PathBuf>,
}

impl ServiceFiles {
    /// Finds `program` in the PATH; `package` is what to install if it is not there.
    pub fn find(program: &str, package: &str) -> Result<Self> {
        let executable = std::env::var_os("PATH")
            .iter()
            .flat_map(std::env::split_paths)
            .chain([PathBuf::from("/usr/bin"), PathBuf::from("/usr/sbin")])
            .map(|dir| dir.join(program))
            .find(|path| path.is_file())
            .with_context(|| {
                format!("{program} is not here: apt-get install {package} (or 'cargo xtask setup')")
            })?;
        let output = Command::new("ldd")
            .arg(&executable)
            .output()
            .context("ldd is not here")?;
        if !output.status.success() {
            bail!("ldd cannot read {}", executable.display());
        }
        let mut libraries = BTreeMap::new();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)", or the loader: "/lib64/ld-linux... (0x...)"
            if line.contains("not found") {
                bail!("{}: {}", executable.display(), line.trim());
            }
            if let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) {
                libraries.insert(path.to_owned(), fs::canonicalize(path)?);
            }
        }
        Ok(Self {
            executable,
            libraries,
        })
    }

    /// Mixes the files' contents into `hash`, so that an upgraded library makes a new image.
    pub fn add_to(&self, hash: &mut Sha256) -> Result<()> {
        for (path, file) in &self.libraries {
            hash.update(path.as_bytes());
            hash.update(fs::read(file)?);
        }
        hash.update(fs::read(&self.executable)?);
        Ok(())
    }
}

/// Lays out the whole initramfs.
pub fn lay_out(
    archive: &mut Archive,
    busybox_root: &Path,
    redis: &ServiceFiles,
    kernel: &Kernel,
    init: &str,
) -> Result<()> {
    let busybox = ["usr/bin/busybox", "bin/busybox"]
        .map(|path| busybox_root.join(path))
        .into_iter()
        .find(|path| path.is_file())
        .context("busybox-static without a busybox")?;
    for dir in ["bin", "dev", "etc", "proc", "sys", "tmp", "data", "modules"] {
        archive.dir(dir);
    }
    archive.char_device("dev/console", 5, 1);
    archive.file("bin/busybox", true, &fs::read(busybox)?);
    archive.link("bin/sh", "busybox");
    archive.file("init", true, init.as_bytes());
    archive.file("etc/passwd", false, b"root:x:0:0:root:/:/bin/sh\n");
    archive.file("bin/redis-server", true, &fs::read(&redis.executable)?);

    let mut made = std::collections::BTreeSet::new();
    for (path, file) in &redis.libraries {
        let path = path.trim_start_matches('/');
        let mut parent = PathBuf::new();
        for part in Path::new(path).parent().iter().flat_map(|dir| dir.components()) {
            parent.push(part);
            if made.insert(parent.clone()) {
                archive.dir(&parent.to_string_lossy());
            }
        }
        archive.file(path, true, &fs::read(file)?);
    }
    let mut order = String::new();
    for (name, bytes) in &kernel.modules {
        archive.file(&format!("modules/{name}.ko"), false, bytes);
        order.push_str(name);
        order.push('\n');
    }
    archive.file("modules/order", false, order.as_bytes());
    Ok(())
}
