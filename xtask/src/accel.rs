//! `--accel`, which every command has that runs VMs.

use anyhow::Result;
use dunlin_vmtest::accel::{self, RunsUnder, Wanted};
use dunlin_vmtest::image::{self, GuestImage};
use dunlin_vmtest::paths;

/// What the guests run under.
#[derive(clap::Args, Clone, Debug)]
pub struct Accel {
    /// `tcg` is QEMU's translator; `kvm` must be KVM, and a guest is booted, saved and loaded to try it; `auto` is KVM where that
    /// works, else TCG. A KVM without vmx or svm runs the kernel of ../shared/kvm.
    #[arg(long, value_name = "auto|kvm|tcg", default_value = "tcg")]
    accel: Wanted,
}

impl Accel {
    /// Without a choice.
    pub fn tcg() -> Self {
        Self { accel: Wanted::Tcg }
    }

    /// KVM where a guest runs under it.
    pub fn auto() -> Self {
        Self { accel: Wanted::Auto }
    }

    /// Says which one it is, and why; returns it with the redis guest prepared for it.
    pub fn choose(&self) -> Result<(RunsUnder, GuestImage)> {
        let mut say = |line: &str| println!("{line}");
        let image = image::ensure(&paths::guest_images(), &mut say)?;
        let chosen = accel::choose(self.accel, &image, &paths::guest_images(), &mut say)?;
        let image = image.under(&chosen);
        Ok((chosen, image))
    }
}
