//! The guest image: Debian's own kernel and an initramfs with busybox and redis-server.
//!
//! Guests with other services ([`services`]) are made of Debian trees in the same way.
//!
//! * **Decides:** what the guest of the demo, the tests and the benchmarks is made of.
//! * **Flow:** packages -> [`kernel`] (vmlinuz, modules, their load order) + [`tree`] (files) -> [`cpio`] -> cache.
//! * **Invariants:** (1) nothing is installed and nothing but Debian's packages is downloaded; (2) equal inputs give
//!   an equal image, byte for byte (but for a database's first files, which carry times and identifiers); (3) an image appears in the cache whole or not at all.
//! * **Source:** the packages `linux-image-cloud-amd64`, `busybox-static` and `redis-tools` (its `redis-check-rdb`
//!   *is* redis-server under another name).
//! * **Not here:** how a VM is started: that is Dunlin's, from a vm.toml that names these files.

pub(crate) mod cpio;
mod disk;
mod kernel;
mod packages;
mod rootfs;
pub mod roots;
mod services;
mod tree;

pub use dunlin_guest::NicBackend;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::accel::RunsUnder;

pub use disk::{boot_disk, data_disk, uefi_boot_disk};
pub use services::{FIO, MIXED, SERVICES, SSH, Service, clients, ensure as ensure_service, service};

/// Raised whenever the builder itself changes what an image holds.
const BUILDER: &str = "dunlin guest image 1";
const INIT: &str = include_str!("init.sh");

/// The guest's address, as the kernel's command line carries it, with its prefix length.
pub const GUEST_ADDRESS: &str = "10.77.0.10/16";
/// The port redis listens on.
pub const REDIS_PORT: u16 = 6379;

/// A guest that boots straight from a kernel and an initramfs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GuestImage {
    /// A bzImage.
    pub kernel: PathBuf,
    /// A compressed cpio archive.
    pub initrd: PathBuf,
    /// The kernel's command line.
    pub append: String,
    /// What the image was made of: a hash over all inputs.
    pub key: String,
    /// The kernel's release, as in `uname -r`.
    pub kernel_release: String,
    /// What it was prepared for ([`GuestImage::under`]).
    #[serde(skip)]
    pub runs_under: RunsUnder,
    /// How frames go between its cards and the daemon.
    #[serde(skip)]
    pub nic_backend: NicBackend,
}

impl GuestImage {
    /// The same image in the folder that it was found in: a target directory may have been moved since it was made.
    fn in_folder(mut self, home: &Path) -> Self {
        self.kernel = home.join("vmlinuz");
        self.initrd = home.join("initrd.img");
        self
    }

    /// The same image for a VM with such cards.
    pub fn with_cards(self, nic_backend: NicBackend) -> Self {
        Self { nic_backend, ..self }
    }

    /// The kernel's command line for a guest that has another address than [`GUEST_ADDRESS`].
    pub fn append_for(&self, address: &str) -> String {
        self.append.replace(GUEST_ADDRESS, address)
    }
}

/// Unpacks Debian's package `name` into `into`, without installing it; downloads are kept in `cache`.
///
/// # Errors
/// When the package cannot be had.
pub fn unpack(name: &str, cache: &Path, into: &Path) -> Result<()> {
    packages::unpack(&packages::resolve(name)?, cache, into).map(drop)
}

/// The image, from the cache under `dir` or freshly built. `say` gets one line for each step that takes time.
///
/// # Errors
/// When a package cannot be had (the line says which) or a file cannot be written.
pub fn ensure(dir: &Path, say: &mut dyn FnMut(&str)) -> Result<GuestImage> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let kernel = packages::resolve("linux-image-cloud-amd64")?;
    let busybox = packages::resolve("busybox-static")?;
    let redis = tree::ServiceFiles::find("redis-check-rdb", "redis-tools")?;

    let mut hash = Sha256::new();
    for part in [
        BUILDER,
        INIT,
        &kernel.to_string(),
        &busybox.to_string(),
        kernel::COMMAND_LINE,
    ] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    redis.add_to(&mut hash)?;
    let key = short(hash);

    let home = dir.join(format!("redis-{key}"));
    let manifest = home.join("image.json");
    if let Ok(text) = fs::read_to_string(&manifest) {
        let image: GuestImage = serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged: remove it", home.display()))?;
        return Ok(image.in_folder(&home));
    }

    let begun = Instant::now();
    say(&format!(
        "guest image: {kernel}, {busybox}, redis-server from this host's redis-tools"
    ));
    let half_made = dir.join(format!("making-{}-{key}", std::process::id()));
    let _ = fs::remove_dir_all(&half_made);
    fs::create_dir_all(&half_made)?;
    let kernel_root = packages::unpack(&kernel, dir, &half_made.join("kernel.d"))?;
    let busybox_root = packages::unpack(&busybox, dir, &half_made.join("busybox.d"))?;

    let found = kernel::find(&kernel_root, &kernel::UNDER_UEFI)?;
    fs::copy(&found.image, half_made.join("vmlinuz"))?;
    let mut archive = cpio::Archive::new();
    tree::lay_out(&mut archive, &busybox_root, &redis, &found, INIT)?;
    let initrd = half_made.join("initrd.img");
    let size = archive.write_compressed(&initrd)?;
    fs::remove_dir_all(half_made.join("kernel.d"))?;
    fs::remove_dir_all(half_made.join("busybox.d"))?;

    let image = GuestImage {
        kernel: home.join("vmlinuz"),
        initrd: home.join("initrd.img"),
        append: format!("{} dunlin.ip={GUEST_ADDRESS}", kernel::COMMAND_LINE),
        key,
        kernel_release: found.release,
        runs_under: RunsUnder::Tcg,
        nic_backend: NicBackend::Stream,
    };
    fs::write(
        half_made.join("image.json"),
        serde_json::to_string_pretty(&image)?,
    )?;
    into_place(&half_made, &home)?;
    say(&format!(
        "guest image: linux {}, initramfs {:.1} MB, in {:.1} s",
        image.kernel_release,
        size as f64 / 1e6,
        begun.elapsed().as_secs_f64()
    ));
    Ok(image)
}

/// The first 64 bits of a digest, as a name.
fn short(hash: Sha256) -> String {
    let digest = hash.finalize();
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A finished directory appears in the cache at once, or somebody else's of the same contents already has.
fn into_place(half_made: &Path, home: &Path) -> Result<()> {
    match fs::rename(half_made, home) {
        Ok(()) => Ok(()),
        // Another process was quicker: its image is the same one.
        Err(_) if home.exists() => Ok(fs::remove_dir_all(half_made)?),
        Err(error) => Err(error).with_context(|| format!("cannot make {}", home.display())),
    }
}
