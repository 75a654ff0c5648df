//! A cpio archive ("newc"), as the kernel unpacks it into its first file system.
//!
//! Written here, in sixty lines, because it must be the same byte for byte whoever builds it (owner root, time 0, no
//! inode numbers of this machine) and must hold a device node without anybody being root.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};

/// Entries in the order in which they were added; parents must come first.
pub struct Archive {
    bytes: Vec<u8>,
    next_inode: u32,
}

impl Archive {
    /// An empty archive.
    pub fn new() -> Self {
        Self {
            bytes: Vec::new(),
            next_inode: 1,
        }
    }

    /// A directory.
    pub fn dir(&mut self, path: &str) {
        self.entry(path, 0o040_755, (0, 0), &[]);
    }

    /// A regular file.
    pub fn file(&mut self, path: &str, executable: bool, data: &[u8]) {
        self.entry(path, if executable { 0o100_755 } else { 0o100_644 }, (0, 0), data);
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, to: &str) {
        self.entry(path, 0o120_777, (0, 0), to.as_bytes());
    }

    /// A character device.
    pub fn char_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, 0o020_600, (major, minor), &[]);
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) {
        let inode = self.next_inode;
        self.next_inode += 1;
        let size = u32::try_from(data.len()).expect("a file of an initramfs is below 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("a path is short");
        // inode, mode, uid, gid, links, time, size, device of the file (2), device it is (2), name's size, checksum
        let fields = [
            inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        while self.bytes.len() % 4 != 0 {
            self.bytes.push(0);
        }
    }

    /// Everything under `root`, sorted by name. All belongs to root in the guest; permissions are kept.
    pub fn tree(&mut self, root: &Path) -> Result<()> {
        self.subtree(root, "")
    }

    fn subtree(&mut self, dir: &Path, prefix: &str) -> Result<()> {
        let mut names = fs::read_dir(dir)
            .and_then(|entries| {
                entries
                    .map(|entry| Ok(entry?.file_name()))
                    .collect::<std::io::Result<Vec<_>>>()
            })
            .with_context(|| format!("cannot read {}", dir.display()))?;
        names.sort();
        for name in names {
            let path = dir.join(&name);
            let name = format!(
                "{prefix}{}",
                name.to_str().context("a file name that is no text")?
            );
            let meta = fs::symlink_metadata(&path)?;
            let permissions = meta.permissions().mode() & 0o1777;
            if meta.is_dir() {
                self.entry(&name, 0o040_000 | permissions, (0, 0), &[]);
                self.subtree(&path, &format!("{name}/"))?;
            } else if meta.is_symlink() {
                let to = fs::read_link(&path)?;
                self.link(&name, to.to_str().context("a link to what is no text")?);
            } else if meta.is_file() {
                let data = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
                self.entry(&name, 0o100_000 | permissions, (0, 0), &data);
            }
        }
        Ok(())
    }

    /// Ends the archive and writes it as it is. Returns the file's size in bytes.
    pub fn write(mut self, to: &Path) -> Result<u64> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        let mut file = File::create(to)?;
        file.write_all(&self.bytes)?;
        file.sync_all()?;
        Ok(file.metadata()?.len())
    }

    /// Ends the archive and writes it, compressed. Returns the file's size in bytes.
    pub fn write_compressed(mut self, to: &Path) -> Result<u64> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        let mut gz = GzBuilder::new()
            .mtime(0)
            .write(File::create(to)?, Compression::new(6));
        gz.write_all(&self.bytes)?;
        let file = gz.finish()?;
        file.sync_all()?;
        Ok(file.metadata()?.len())
    }
}
