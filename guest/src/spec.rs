//! What a VM is: the `[vm]` table of its file.
//!
//! Decides:    which values make sense, before anything is started.
//! Flow:       a VM's file (`dunlin_api::files`) -> [`VmSpec`] -> `qemu::command`.
//! Invariants: both hosts build the same virtual hardware from the same spec.
//! Source:     stock-qemu.md.
//! Not here:   the file's keys (api), who may run it and with which policy (node).

use std::path::PathBuf;

/// One VM, as its file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSpec {
    /// Name of the VM: letters, digits, `.`, `_`, `-`. It stands at the file's top level.
    pub name: String,
    /// How the guest's instructions are run.
    pub accel: Accel,
    /// QEMU's machine type.
    pub machine: Machine,
    /// What the machine begins with.
    pub firmware: FirmwareKind,
    /// The QEMU executable; `qemu-system-x86_64` from the PATH when absent.
    pub qemu: Option<PathBuf>,
    /// QEMU's `-cpu`. Absent: `host` under KVM, `max,la57=off` under TCG. With unlike hosts name a common model.
    pub cpu: Option<String>,
    /// Number of virtual CPUs, 1 to 64.
    pub vcpus: u32,
    /// Guest RAM in MiB.
    pub memory_mib: u64,
    /// The host may have less memory free than the guest may come to use: then that is said, and nothing is refused.
    pub memory_overcommit: bool,
    /// Kernel for a direct boot; absent: the firmware boots the first disk.
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk for the direct boot.
    pub initrd: Option<PathBuf>,
    /// Kernel command line for the direct boot.
    pub append: Option<String>,
    /// Disks, in the guest's order.
    pub disks: Vec<DiskSpec>,
    /// Network cards, in the guest's order.
    pub nics: Vec<NicSpec>,
    /// How frames go between the cards and the daemon.
    pub nic_backend: NicBackend,
    /// User that QEMU runs as when the daemon is root. Absent: `dunlin` if there is one, else `nobody`.
    pub run_as: Option<String>,
    /// QEMU's system call filter (`-sandbox on,...`).
    pub sandbox: bool,
    /// A further object for QEMU's `LD_PRELOAD`, for tests on hosts whose KVM is not the usual one. The same on both hosts.
    pub preload: Option<PathBuf>,
    /// The serial console is appended to this file (its end is kept in memory in any case).
    pub serial_log: Option<PathBuf>,
}

/// One disk: an image file or block device that the host's NBD server serves to QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskSpec {
    /// The image, the same path on each host.
    pub path: PathBuf,
    /// What is in the file.
    pub format: DiskFormat,
}

/// What is in a disk's image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskFormat {
    /// The disk's bytes: a plain file or a block device.
    #[default]
    Raw,
    /// QEMU's format; a `qemu-storage-daemon` that we start shows it to us as raw.
    Qcow2,
    /// The same, which may stand on another file.
    BackedQcow2,
}

/// One network card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicSpec {
    /// MAC address, as `52:54:00:12:34:56`.
    pub mac: String,
    /// Bridge on the host that the TAP joins; absent: the TAP stands alone.
    pub bridge: Option<String>,
    /// Name of the TAP; absent: the kernel chooses `dunlinN`.
    pub tap: Option<String>,
    /// Whether the guest gets frames that are for none of its addresses, too: it watches the network.
    pub promiscuous: bool,
}

/// How frames go between a card and the daemon: QEMU's `-netdev`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NicBackend {
    /// A socket to QEMU, whose main thread copies each frame to and from the card's rings.
    #[default]
    Stream,
    /// The daemon serves the card's rings in the guest's memory itself.
    VhostUser,
}

/// How the guest's instructions are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accel {
    /// KVM where it works, else TCG with a message.
    #[default]
    Auto,
    /// Hardware virtualisation only.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// QEMU's machine type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Machine {
    /// i440FX with PCI.
    #[default]
    Pc,
    /// Q35 with PCI Express.
    Q35,
    /// The small machine with virtio-mmio devices.
    Microvm,
}

/// What a machine begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FirmwareKind {
    /// QEMU's own: SeaBIOS, on microvm qboot.
    #[default]
    Bios,
    /// OVMF in a flash, with variables of the VM's own that are replicated like a disk ([`crate::uefi`]).
    Uefi,
}

/// What is wrong with a spec; the message names the key.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("vm.{key}: {problem}")]
pub struct SpecError {
    /// The key in the TOML file.
    pub key: &'static str,
    /// What is wrong, and what would be right.
    pub problem: String,
}

impl NicBackend {
    /// As in a VM's file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NicBackend::Stream => "stream",
            NicBackend::VhostUser => "vhost-user",
        }
    }
}

impl NicSpec {
    /// The six bytes of the MAC address.
    pub fn mac_bytes(&self) -> Result<[u8; 6], SpecError> {
        let wrong = || SpecError {
            key: "nics.mac",
            problem: format!(
                "{:?} is not a unicast MAC address such as 52:54:00:12:34:56",
                self.mac
            ),
        };
        let mut bytes = [0u8; 6];
        let mut parts = self.mac.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() || bytes[0] & 1 == 1 {
            return Err(wrong());
        }
        Ok(bytes)
    }
}

impl VmSpec {
    /// A VM with one vCPU, and with nothing to boot yet.
    #[must_use]
    pub fn new(name: &str, memory_mib: u64) -> Self {
        Self {
            name: name.to_owned(),
            accel: Accel::default(),
            machine: Machine::default(),
            firmware: FirmwareKind::default(),
            qemu: None,
            cpu: None,
            vcpus: 1,
            memory_mib,
            memory_overcommit: false,
            kernel: None,
            initrd: None,
            append: None,
            disks: Vec::new(),
            nics: Vec::new(),
            nic_backend: NicBackend::default(),
            run_as: None,
            sandbox: true,
            preload: None,
            serial_log: None,
        }
    }

    /// Guest RAM in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }

    /// How many NBD ports its QEMU has: its disks, and after these a UEFI's variables.
    pub fn images(&self) -> usize {
        self.disks.len() + usize::from(self.firmware == FirmwareKind::Uefi)
    }

    /// Looks for values that cannot work, without touching the system (files are looked at by the probe).
    pub fn validate(&self) -> Result<(), SpecError> {
        let fail = |key, problem: String| Err(SpecError { key, problem });
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(plain) {
            return fail(
                "name",
                format!("{:?} must be 1 to 64 letters, digits, '.', '_' or '-'", self.name),
            );
        }
        if !(1..=64).contains(&self.vcpus) {
            return fail("vcpus", format!("{} is not in 1..=64", self.vcpus));
        }
        if !(8..=4 << 20).contains(&self.memory_mib) {
            return fail(
                "memory_mib",
                format!("{} is not in 8..={}", self.memory_mib, 4 << 20),
            );
        }
        if self.kernel.is_none() && (self.initrd.is_some() || self.append.is_some()) {
            return fail("kernel", "initrd and append need a kernel".into());
        }
        if self.kernel.is_none() && self.disks.is_empty() {
            return fail("kernel", "nothing to boot: give a kernel or a disk".into());
        }
        if self.firmware == FirmwareKind::Uefi && self.machine == Machine::Microvm {
            return fail(
                "firmware",
                "machine microvm has no UEFI: set machine to \"pc\" or \"q35\", or firmware to \"bios\""
                    .into(),
            );
        }
        if self.kernel.is_none() && self.machine == Machine::Microvm {
            return fail(
                "kernel",
                "machine microvm boots a kernel only: its firmware (qboot) reads no disk".into(),
            );
        }
        if self
            .cpu
            .as_deref()
            .is_some_and(|c| c.is_empty() || c.starts_with('-'))
        {
            return fail(
                "cpu",
                "must be a QEMU CPU model, see qemu-system-x86_64 -cpu help".into(),
            );
        }
        for (i, nic) in self.nics.iter().enumerate() {
            let mac = nic.mac_bytes()?;
            if self.nics[..i].iter().any(|n| n.mac_bytes() == Ok(mac)) {
                return fail("nics.mac", format!("{} is given twice", nic.mac));
            }
            for (key, name) in [("nics.bridge", &nic.bridge), ("nics.tap", &nic.tap)] {
                if let Some(name) = name.as_deref().filter(|n| n.is_empty() || n.len() > 15) {
                    return fail(key, format!("{name:?} must have 1 to 15 characters"));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_named() {
        let good = VmSpec {
            kernel: Some("/k".into()),
            nics: vec![NicSpec {
                mac: "52:54:00:12:34:56".into(),
                bridge: None,
                tap: None,
                promiscuous: false,
            }],
            ..VmSpec::new("a", 64)
        };
        assert_eq!(good.validate(), Ok(()));
        let wrong = |change: fn(&mut VmSpec)| {
            let mut bad = good.clone();
            change(&mut bad);
            bad.validate().unwrap_err().key
        };
        assert_eq!(wrong(|s| s.name = "a b".into()), "name");
        assert_eq!(wrong(|s| s.vcpus = 0), "vcpus");
        assert_eq!(wrong(|s| s.memory_mib = 1), "memory_mib");
        assert_eq!(wrong(|s| s.kernel = None), "kernel");
        let boots_disk = |s: &mut VmSpec| {
            s.kernel = None;
            s.disks = vec![DiskSpec {
                path: "/d".into(),
                format: DiskFormat::Raw,
            }];
        };
        let mut from_disk = good.clone();
        boots_disk(&mut from_disk);
        assert_eq!(from_disk.validate(), Ok(()));
        from_disk.machine = Machine::Microvm;
        assert_eq!(from_disk.validate().unwrap_err().key, "kernel");
        let uefi = |s: &mut VmSpec| s.firmware = FirmwareKind::Uefi;
        let mut with_uefi = good.clone();
        uefi(&mut with_uefi);
        assert_eq!((with_uefi.validate(), with_uefi.images()), (Ok(()), 1));
        with_uefi.machine = Machine::Microvm;
        let refused = with_uefi.validate().unwrap_err().to_string();
        assert!(refused.starts_with("vm.firmware: machine microvm has no UEFI") && !refused.contains('\n'));
        assert_eq!(wrong(|s| s.nics[0].mac = "53:54:00:12:34:56".into()), "nics.mac");
        assert_eq!(wrong(|s| s.nics.push(s.nics[0].clone())), "nics.mac");
        assert_eq!(
            wrong(|s| s.nics[0].bridge = Some("a-name-that-is-too-long".into())),
            "nics.bridge"
        );
    }
}
