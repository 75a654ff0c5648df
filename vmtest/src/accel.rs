//! What runs the guests of a test: KVM or TCG, tried before it is believed.
//!
//! * **Decides:** the accelerator, and with it the guest's kernel.
//! * **Flow:** `--accel auto|kvm|tcg` -> [`choose`]: [`probe`] boots a guest, saves and loads it -> [`GuestImage::under`] -> VM files.
//! * **Invariants:** (1) `auto` never fails, it says why it is TCG; (2) `kvm` is KVM, or an error; (3) nothing of [`Assisted`] is part of
//!   the product, and its kernel not of this tree: it lies beside it, in `../shared/kvm`.
//! * **Source:** `../shared/kvm/README.md`: a KVM without vmx or svm runs no stock kernel, and one that knows its host's interface natively.
//! * **Not here:** what users have: `accel = "auto"` in a VM's file (`guest/src/qemu/accel.rs`).

mod assisted;
#[cfg(test)]
mod clock_tests;
mod probe;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dunlin_api::files::{Accel, Machine, VmTable};
use dunlin_guest::qemu::{accel, spawn};

use crate::image::GuestImage;

/// What somebody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// KVM where a guest boots, is saved and loaded under it, else TCG.
    Auto,
    /// KVM or nothing.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl std::str::FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "kvm" => Ok(Self::Kvm),
            "tcg" => Ok(Self::Tcg),
            _ => Err(format!("{text:?} is none of auto, kvm, tcg")),
        }
    }
}

/// What a guest runs under.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RunsUnder {
    /// QEMU's translator.
    #[default]
    Tcg,
    /// A KVM of the hardware: Debian's kernel runs as it is.
    Kvm,
    /// A software-assisted KVM, which runs only a kernel made for it.
    Assisted(Assisted),
}

/// What a software-assisted KVM needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assisted {
    /// A Linux that knows the host's interface: an ELF file.
    pub kernel: PathBuf,
    /// What a QEMU needs that loads such a guest's state.
    pub preload: PathBuf,
}

impl RunsUnder {
    /// A VM file's `[vm]` table that runs under it; `preload` is where the object of an assisted KVM lies for QEMU.
    pub fn table(&self, memory_mib: u64, preload: &Path) -> VmTable {
        // Where /dev/kvm is root's alone, as on a machine without udev.
        let closed = spawn::choose_user(None)
            .ok()
            .flatten()
            .is_some_and(|user| accel::is_for(&user).is_err());
        let table = VmTable::new(memory_mib);
        let kvm = VmTable {
            accel: Accel::Kvm,
            run_as: closed.then(|| "root".to_owned()),
            ..table.clone()
        };
        match self {
            Self::Tcg => VmTable {
                accel: Accel::Tcg,
                ..table
            },
            Self::Kvm => kvm,
            Self::Assisted(_) => VmTable {
                cpu: Some("host,arch-capabilities=off".to_owned()),
                preload: Some(preload.to_owned()),
                ..kvm
            },
        }
    }

    /// Why such a VM cannot run under it.
    pub fn refuses(&self, machine: Machine, vcpus: u32) -> Option<&'static str> {
        match self {
            Self::Assisted(_) if vcpus > 1 || machine == Machine::Microvm => {
                Some("the kernel for this software-assisted KVM has one vCPU, on pc and q35")
            }
            _ => None,
        }
    }

    /// Why its guests have no IPv6.
    pub fn lacks_ipv6(&self) -> Option<&'static str> {
        match self {
            Self::Assisted(_) => {
                Some("the kernel for this software-assisted KVM has no IPv6 (--accel tcg has)")
            }
            Self::Tcg | Self::Kvm => None,
        }
    }

    /// In a word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
            Self::Assisted(_) => "kvm, software-assisted",
        }
    }
}

impl GuestImage {
    /// The same guest under an accelerator.
    #[must_use]
    pub fn under(mut self, runs_under: &RunsUnder) -> Self {
        if let RunsUnder::Assisted(assisted) = runs_under {
            self.kernel.clone_from(&assisted.kernel);
            // It finds its clock by itself, and its host has no asynchronous page faults for it.
            self.append.push_str(" no-kvmapf");
        }
        self.runs_under = runs_under.clone();
        self
    }
}

/// Chooses; `say` gets one line that says which one it is and why. `images` is where what it unpacks is kept.
///
/// # Errors
/// When KVM was asked for and a guest does not run under it.
pub fn choose(
    wanted: Wanted,
    image: &GuestImage,
    images: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<RunsUnder> {
    if wanted == Wanted::Tcg {
        say("accel: tcg (--accel auto or kvm for KVM)");
        return Ok(RunsUnder::Tcg);
    }
    match kvm(image, images) {
        Ok((runs_under, why)) => {
            say(&format!("accel: {}: {why}", runs_under.name()));
            Ok(runs_under)
        }
        Err(error) if wanted == Wanted::Auto => {
            say(&format!("accel: tcg, since KVM does not do: {error:#}"));
            Ok(RunsUnder::Tcg)
        }
        Err(error) => Err(error).context("--accel kvm"),
    }
}

fn kvm(image: &GuestImage, images: &Path) -> Result<(RunsUnder, String)> {
    if let Err(why) = accel::opens() {
        bail!(why);
    }
    let runs_under = match accel::hardware() {
        Ok(()) => RunsUnder::Kvm,
        Err(why) => RunsUnder::Assisted(assisted::ensure(images)?.with_context(|| {
            format!("{why}; and the kernel for such a KVM, ../shared/kvm, is not beside this tree")
        })?),
    };
    let told = probe::run(&image.clone().under(&runs_under))?;
    Ok((runs_under, told))
}

/// The lines for a shared KVM test: what [`choose`] with [`Wanted::Auto`] answers, for tests that are skipped under TCG.
///
/// # Errors
/// As [`crate::image::ensure`].
pub fn native(images: &Path) -> Result<Option<GuestImage>> {
    let image = crate::image::ensure(images, &mut |line| println!("{line}"))?;
    let chosen = choose(Wanted::Auto, &image, images, &mut |line| println!("{line}"))?;
    Ok((chosen != RunsUnder::Tcg).then(|| image.under(&chosen)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accelerator_that_does_not_exist_is_refused_by_name() {
        assert_eq!("kvm".parse(), Ok(Wanted::Kvm));
        assert!("xen".parse::<Wanted>().unwrap_err().contains("xen"));
    }

    #[test]
    fn the_table_is_one_of_a_vm_file() {
        let assisted = Assisted {
            kernel: "/k".into(),
            preload: "/p".into(),
        };
        for one in [RunsUnder::Tcg, RunsUnder::Kvm, RunsUnder::Assisted(assisted)] {
            let table = one.table(64, Path::new("/testbed/p"));
            let preloads = matches!(one, RunsUnder::Assisted(_));
            assert_eq!(table.memory_mib, 64);
            assert_eq!(table.accel == Accel::Tcg, one == RunsUnder::Tcg);
            assert_eq!(table.preload, preloads.then(|| "/testbed/p".into()));
            assert_eq!(one.refuses(Machine::Pc, 2).is_some(), preloads);
            assert_eq!(one.refuses(Machine::Pc, 1), None);
        }
    }
}
