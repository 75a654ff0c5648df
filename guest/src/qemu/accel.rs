//! KVM or TCG.
//!
//! Decides:    whether KVM on this machine can run a stock guest.
//! Flow:       `VmSpec.accel` -> [`choose`] -> the command line.
//! Invariants: 1. `auto` never fails: it falls back and says why; 2. `kvm` is taken at its word, or refused with the reason.
//! Source:     stock-qemu.md section 4: a nested, software-assisted KVM opens and yet dies in a stock kernel.
//! Not here:   the CPU model.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::spawn::User;
use crate::spec::Accel;

/// `KVM_GET_API_VERSION`, `_IO(0xAE, 0x00)`.
const KVM_GET_API_VERSION: libc::Ioctl = 0xAE00;

/// Why KVM is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum NoKvm {
    /// There is no device.
    #[error("/dev/kvm does not exist (is kvm_intel or kvm_amd loaded?)")]
    Missing,
    /// We may not open it.
    #[error("/dev/kvm: {0}: run the daemon as root or as a member of group kvm")]
    Unopened(io::Error),
    /// Something else, or a KVM of another time.
    #[error("/dev/kvm answers API version {0}, not 12")]
    Version(i32),
    /// Nothing is known of it.
    #[error("/dev/kvm: {0}")]
    Unseen(io::Error),
    /// QEMU's user may not open it.
    #[error(
        "user {user} may not open /dev/kvm (owner {owner}, group {group}, mode {mode:o}): give it to a group of its own, as Debian's \
         udev does (groupadd -f --system kvm; chgrp kvm /dev/kvm; chmod 660 /dev/kvm)"
    )]
    Closed {
        /// The user's name.
        user: String,
        /// Whose it is.
        owner: u32,
        /// Whose it is, too.
        group: u32,
        /// What these and others may.
        mode: u32,
    },
    /// Nothing is known of the CPU.
    #[error("/proc/cpuinfo: {0}")]
    Cpu(io::Error),
    /// The CPU lacks it.
    #[error(
        "the CPU shows neither vmx nor svm: this KVM works by software assistance and cannot run a stock kernel (on a cloud machine \
         choose a type with nested virtualisation)"
    )]
    Assisted,
}

/// A person asked for KVM, and it is not to be had.
#[derive(Debug, thiserror::Error)]
#[error("accel = \"kvm\": {0}")]
pub struct NoAccel(pub NoKvm);

/// The accelerator to use for a QEMU that runs as `user` (`None`: as we do), and why it is not KVM if it is not.
pub fn choose(wanted: Accel, user: Option<&User>) -> Result<(Accel, Option<String>), NoAccel> {
    match (wanted, opens_for(user), hardware()) {
        (Accel::Tcg, ..) => Ok((Accel::Tcg, None)),
        (_, Ok(()), Ok(())) => Ok((Accel::Kvm, None)),
        // A person who asks for KVM may know better than the CPU flags, but not better than the device.
        (Accel::Kvm, Ok(()), Err(_)) => Ok((Accel::Kvm, None)),
        (Accel::Kvm, Err(why), _) => Err(NoAccel(why)),
        (Accel::Auto, Err(why), _) | (Accel::Auto, _, Err(why)) => Ok((
            Accel::Tcg,
            Some(format!(
                "no KVM, so TCG translates the guest (many times slower): {why}"
            )),
        )),
    }
}

/// Can a QEMU that runs as `user` (`None`: as we do) have KVM? This is all that `accel = "kvm"` asks for.
pub fn opens_for(user: Option<&User>) -> Result<(), NoKvm> {
    opens().and_then(|()| user.map_or(Ok(()), is_for))
}

/// Can /dev/kvm be opened and is it KVM?
pub fn opens() -> Result<(), NoKvm> {
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => NoKvm::Missing,
            _ => NoKvm::Unopened(e),
        })?;
    // SAFETY: this ioctl takes no argument.
    match unsafe { libc::ioctl(device.as_raw_fd(), KVM_GET_API_VERSION, 0) } {
        12 => Ok(()),
        version => Err(NoKvm::Version(version)),
    }
}

/// May that user open it? What holds for us (root) need not hold for QEMU.
pub fn is_for(user: &User) -> Result<(), NoKvm> {
    let device = std::fs::metadata("/dev/kvm").map_err(NoKvm::Unseen)?;
    if user.uid == 0 || user.reads_and_writes(&device) {
        return Ok(());
    }
    Err(NoKvm::Closed {
        user: user.name.clone(),
        owner: device.uid(),
        group: device.gid(),
        mode: device.mode() & 0o777,
    })
}

/// Does the CPU have what KVM needs to run any guest?
pub fn hardware() -> Result<(), NoKvm> {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").map_err(NoKvm::Cpu)?;
    let flags = cpu.lines().find(|l| l.starts_with("flags")).unwrap_or("");
    match flags.split_whitespace().any(|f| f == "vmx" || f == "svm") {
        true => Ok(()),
        false => Err(NoKvm::Assisted),
    }
}

/// Frequency of this host's time stamp counter in kHz, measured once; under TCG it is the guest's too.
pub fn tsc_khz() -> u64 {
    static MEASURED: OnceLock<u64> = OnceLock::new();
    *MEASURED.get_or_init(|| {
        // SAFETY: every x86-64 processor has the instruction.
        let read = || (Instant::now(), unsafe { std::arch::x86_64::_rdtsc() });
        let (began, first) = read();
        // The passing of time is what is measured.
        std::thread::sleep(Duration::from_millis(20));
        let (ended, last) = read();
        let micros = ended.duration_since(began).as_nanos() as u64 / 1000;
        last.wrapping_sub(first) * 1000 / micros
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_has_a_credible_frequency() {
        assert!((500_000..8_000_000).contains(&tsc_khz()), "{} kHz", tsc_khz());
    }

    #[test]
    fn auto_always_finds_one_and_says_why_it_is_tcg() {
        let (accel, why) = choose(Accel::Auto, None).unwrap();
        assert_ne!(accel, Accel::Auto);
        assert_eq!(accel == Accel::Tcg, why.is_some());
        assert_eq!(choose(Accel::Tcg, None).unwrap(), (Accel::Tcg, None));
    }
}
