//! `--accel`, which every command has that runs VMs.

use anyhow::Result;
use dunlin_vmtest::accel::{self, RunsUnder, Wanted};
use dunlin_vmtest::image::{self, GuestImage, NicBackend};
use dunlin_vmtest::paths;

/// What the guests run under.
#[derive(clap::Args, Clone, Debug)]
pub struct Accel {
    /// `tcg` is QEMU's translator. `kvm` needs KVM; a guest is booted, saved and loaded to try it. `auto` is KVM if that works,
    /// else TCG. A KVM without vmx or svm runs the kernel of ../shared/kvm.
    #[arg(long, value_name = "auto|kvm|tcg", default_value = "tcg")]
    accel: Wanted,
    /// How frames go between the guests' cards and the daemon (`vm.nic_backend`).
    #[arg(long, value_name = "stream|vhost-user", default_value = "stream", value_parser = nic_backend)]
    nic_backend: NicBackend,
}

fn nic_backend(word: &str) -> Result<NicBackend, String> {
    match word {
        "stream" => Ok(NicBackend::Stream),
        "vhost-user" => Ok(NicBackend::VhostUser),
        _ => Err("is stream or vhost-user".to_owned()),
    }
}

impl Accel {
    /// What the guests' cards are to be.
    pub fn nic_backend(&self) -> NicBackend {
        self.nic_backend
    }

    /// Without a choice.
    pub fn tcg() -> Self {
        Self {
            accel: Wanted::Tcg,
            nic_backend: NicBackend::Stream,
        }
    }

    /// KVM where a guest runs under it.
    pub fn auto() -> Self {
        Self {
            accel: Wanted::Auto,
            nic_backend: NicBackend::Stream,
        }
    }

    /// Says which one it is, and why; returns it with the redis guest prepared for it.
    pub fn choose(&self) -> Result<(RunsUnder, GuestImage)> {
        let mut say = |line: &str| println!("{line}");
        let image = image::ensure(&paths::guest_images(), &mut say)?;
        let chosen = accel::choose(self.accel, &image, &paths::guest_images(), &mut say)?;
        let image = image.under(&chosen).with_cards(self.nic_backend);
        Ok((chosen, image))
    }
}
