//! `[vm]` of a VM's file: the virtual hardware, which both hosts build alike.

use super::usual;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// `[vm]`: the virtual hardware, which is the same on both hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmTable {
    /// Ignored: the name at the file's top counts.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// How the guest's instructions are run.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = Accel::default)]
    pub accel: Accel,
    /// QEMU's machine type.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = Machine::default)]
    pub machine: Machine,
    /// The firmware that the machine starts with.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = Firmware::default)]
    pub firmware: Firmware,
    /// The QEMU executable, the same version on both hosts. Absent: `qemu-system-x86_64` from the PATH.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub qemu: Option<PathBuf>,
    /// QEMU's `-cpu`. Absent: `host` under KVM, `max,la57=off` under TCG. If the hosts' processors differ, name a common model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Number of virtual CPUs, 1 to 64.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    #[schema(default = one)]
    pub vcpus: u32,
    /// Guest RAM in MiB.
    pub memory_mib: u64,
    /// Start the VM even if the host has less free memory than the guest may use in the end. The daemon only says so, and refuses nothing.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = bool::default)]
    pub memory_overcommit: bool,
    /// Kernel for a direct boot. Absent: the firmware boots the first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk for the direct boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub initrd: Option<PathBuf>,
    /// Kernel command line for the direct boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub append: Option<String>,
    /// Disks, in the guest's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskTable>,
    /// Network cards, in the guest's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicTable>,
    /// How frames go between the cards and the daemon.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = NicBackend::default)]
    pub nic_backend: NicBackend,
    /// User that QEMU runs as when the daemon is root. Absent: `dunlin` if there is one, else `nobody`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_as: Option<String>,
    /// QEMU's system call filter (`-sandbox on,...`).
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    #[schema(default = yes)]
    pub sandbox: bool,
    /// Another object for QEMU's `LD_PRELOAD`, for tests on hosts with an unusual KVM. The same on both hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub preload: Option<PathBuf>,
    /// The file to which the serial console is appended. The end of its output is kept in memory in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub serial_log: Option<PathBuf>,
}

impl VmTable {
    /// One of which nothing but this is said: it has nothing to boot yet.
    #[must_use]
    pub fn new(memory_mib: u64) -> Self {
        Self {
            name: String::new(),
            accel: Accel::default(),
            machine: Machine::default(),
            firmware: Firmware::default(),
            qemu: None,
            cpu: None,
            vcpus: one(),
            memory_mib,
            memory_overcommit: false,
            kernel: None,
            initrd: None,
            append: None,
            disks: Vec::new(),
            nics: Vec::new(),
            nic_backend: NicBackend::default(),
            run_as: None,
            sandbox: yes(),
            preload: None,
            serial_log: None,
        }
    }
}

usual! {
    one, is_one: u32 = 1;
    yes, is_yes: bool = true;
}

/// `[[vm.disks]]`: an image file or block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskTable {
    /// The path of the image, the same on each host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// The format of the image.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = DiskFormat::default)]
    pub format: DiskFormat,
    /// Whether the qcow2 image may have a backing file. The daemon opens, as root, whatever file the image names, so allow it only for images
    /// that you made yourself.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub backing: bool,
}

/// The format of a disk's image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The disk's bytes: a plain file or a block device.
    #[default]
    Raw,
    /// QEMU's format.
    Qcow2,
}

/// `[[vm.nics]]`: one network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicTable {
    /// MAC address.
    #[schema(example = "52:54:00:12:34:56")]
    pub mac: String,
    /// Bridge on the host that the TAP joins. Absent: the TAP stands alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// Name of the TAP. Absent: the kernel chooses `dunlinN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Whether the guest also gets frames for addresses that are not its own, to watch the network.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = bool::default)]
    pub promiscuous: bool,
}

/// How frames go between a card and the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NicBackend {
    /// A socket to QEMU, whose main thread copies each frame to and from the card's rings.
    #[default]
    Stream,
    /// The daemon serves the card's rings in the guest's memory itself.
    VhostUser,
}

/// How the guest's instructions are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// KVM if it works, else TCG with a message.
    #[default]
    Auto,
    /// Hardware virtualisation only.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// QEMU's machine type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Machine {
    /// i440FX with PCI.
    #[default]
    Pc,
    /// Q35 with PCI Express.
    Q35,
    /// The small machine with virtio-mmio devices.
    Microvm,
}

impl Machine {
    /// As in its file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pc => "pc",
            Self::Q35 => "q35",
            Self::Microvm => "microvm",
        }
    }
}

/// The firmware that a machine starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Firmware {
    /// QEMU's own: SeaBIOS, on microvm qboot.
    #[default]
    Bios,
    /// OVMF, with the VM's own firmware variables, which are replicated like a disk.
    Uefi,
}
