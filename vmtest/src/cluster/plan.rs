//! A VM's TOML file, written for the testbed.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use dunlin_api::files::{self, DiskFormat, DiskTable, Firmware, Machine, NicTable, VmFile, VmTable};

use crate::accel::RunsUnder;
use crate::image::{GuestImage, NicBackend};
use crate::testbed::Testbed;

/// What a test wants of its VM.
#[derive(Clone, Debug)]
pub struct VmPlan {
    /// Its name.
    pub name: String,
    /// `none`, `remus` or `plover`.
    pub policy: String,
    /// QEMU's machine type.
    pub machine: Machine,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory.
    pub memory_mib: u32,
    /// The hosts may have less memory free.
    pub memory_overcommit: bool,
    /// A data disk of that size, on which redis logs every write before it answers.
    pub disk_mib: Option<u64>,
    /// Disks of the same size beside it, each with a redis of its own on the ports from 6380 on.
    pub more_disks: u8,
    /// Cards beside the first that the guest never sets up.
    pub idle_cards: u8,
    /// Boots from a disk with a boot loader, its first, instead of a kernel that QEMU is given.
    pub boots_from_disk: bool,
    /// It has a UEFI with variables, and no BIOS.
    pub uefi: bool,
    /// The hosts that can run it, the first preferred (under `none` the first alone).
    pub members: [&'static str; 2],
    /// It has an IPv6 address as well, and its redis listens there.
    pub ipv6: bool,
    /// Tells several VMs in one testbed apart: their addresses and MACs.
    pub number: u8,
    /// What else its file says, beside name, hosts, policy and VM.
    pub file: VmFile,
}

impl VmPlan {
    /// The redis guest under `policy`, on the default machine, without a disk.
    pub fn redis(policy: &str) -> Self {
        Self {
            name: "redis".to_owned(),
            policy: policy.to_owned(),
            machine: Machine::Pc,
            vcpus: 1,
            memory_mib: 256,
            memory_overcommit: false,
            disk_mib: None,
            more_disks: 0,
            idle_cards: 0,
            boots_from_disk: false,
            uefi: false,
            members: ["a", "b"],
            ipv6: false,
            number: 0,
            file: Self::file(),
        }
    }

    /// A file that says nothing else.
    pub fn file() -> VmFile {
        VmFile::new("", &[])
    }

    /// Where its redis listens, if it has an IPv6 address.
    pub fn service_ipv6(&self) -> SocketAddr {
        let address = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x10 + u16::from(self.number));
        SocketAddr::new(address.into(), self.service().port())
    }

    /// Where its redis listens.
    pub fn service(&self) -> SocketAddr {
        let first = crate::demo::service();
        match first.ip() {
            IpAddr::V4(address) => {
                let [a, b, c, d] = address.octets();
                SocketAddr::new(IpAddr::V4([a, b, c, d + self.number].into()), first.port())
            }
            IpAddr::V6(_) => first,
        }
    }

    /// The address of its first card, the one that it uses.
    pub fn mac(&self) -> [u8; 6] {
        [0x52, 0x54, 0x00, 0x12, 0x34, 0x56 + self.number]
    }

    fn address(&self) -> String {
        let prefix = crate::image::GUEST_ADDRESS.split('/').nth(1).unwrap_or("16");
        format!("{}/{prefix}", self.service().ip())
    }

    /// A microvm has neither HPET nor PM timer, so the kernel measures its time stamp counter against the PIT, which
    /// fails when the host is busy; then it boots no further. Under TCG that counter is the host's, so tell it.
    fn clock_words(&self, runs_under: &RunsUnder) -> String {
        if self.machine != Machine::Microvm || *runs_under != RunsUnder::Tcg {
            return String::new();
        }
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let mhz = info.lines().find_map(|line| {
            line.strip_prefix("cpu MHz")?
                .split(':')
                .nth(1)?
                .trim()
                .parse()
                .ok()
        });
        mhz.map_or(String::new(), |mhz: f64| {
            format!(" tsc_early_khz={:.0}", mhz * 1000.0)
        })
    }

    /// Writes the file into the testbed's directory, with a disk for each of the two hosts if one is wanted. The image
    /// is copied there too: QEMU runs as an ordinary user, who may not be able to read the workspace.
    pub fn write(&self, testbed: &Testbed, image: &GuestImage) -> Result<PathBuf> {
        let copy = |from: &Path, name: &str| -> Result<PathBuf> {
            let to = testbed.dir().join(name);
            if !to.exists() {
                std::fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            }
            Ok(to)
        };
        let kernel = copy(&image.kernel, "vmlinuz")?;
        let preload = match &image.runs_under {
            RunsUnder::Assisted(assisted) => copy(&assisted.preload, "preload.so")?,
            RunsUnder::Tcg | RunsUnder::Kvm => PathBuf::new(),
        };
        let initrd = copy(&image.initrd, "initrd.img")?;
        let append = format!(
            "{}{}{}",
            image.append_for(&self.address()),
            self.clock_words(&image.runs_under),
            match self.ipv6 {
                true => format!(" dunlin.ip6={}/64", self.service_ipv6().ip()),
                false => String::new(),
            }
        );
        let boot_kernel = !self.boots_from_disk;
        let mut table = VmTable {
            machine: self.machine,
            vcpus: self.vcpus,
            nic_backend: match image.nic_backend {
                NicBackend::Stream => files::NicBackend::Stream,
                NicBackend::VhostUser => files::NicBackend::VhostUser,
            },
            firmware: match self.uefi {
                true => Firmware::Uefi,
                false => Firmware::Bios,
            },
            memory_overcommit: self.memory_overcommit,
            kernel: boot_kernel.then_some(kernel),
            initrd: boot_kernel.then_some(initrd),
            append: boot_kernel.then(|| append.clone()),
            serial_log: Some(testbed.here().join(format!("serial-{}.log", self.name))),
            nics: (0..=self.idle_cards).map(|card| self.nic(card)).collect(),
            ..image.runs_under.table(self.memory_mib.into(), &preload)
        };
        let disk = |file: &str| DiskTable {
            path: testbed.here().join(file),
            format: DiskFormat::Raw,
            backing: false,
        };
        if self.boots_from_disk {
            let file = format!("{}-boot.img", self.name);
            for host in ["a", "b"] {
                let append = format!("{append} no_timer_check");
                let make = match self.uefi {
                    true => crate::image::uefi_boot_disk,
                    false => crate::image::boot_disk,
                };
                make(&testbed.node(host).home().join(&file), image, &append)?;
            }
            table.disks.push(disk(&file));
        }
        let sizes = self.disk_mib.into_iter();
        let sizes =
            sizes.flat_map(|size_mib| std::iter::repeat_n(size_mib, 1 + usize::from(self.more_disks)));
        for (number, size_mib) in sizes.enumerate() {
            let file = match number {
                0 => format!("{}.img", self.name),
                _ => format!("{}-{number}.img", self.name),
            };
            for host in ["a", "b"] {
                crate::image::data_disk(&testbed.node(host).home().join(&file), size_mib)?;
            }
            table.disks.push(disk(&file));
        }
        let copies = match self.policy.as_str() {
            "none" => 1,
            _ => self.members.len(),
        };
        let file = VmFile {
            name: self.name.clone(),
            members: self.members[..copies]
                .iter()
                .map(|&host| host.to_owned())
                .collect(),
            witness: (copies > 1).then(|| "c".to_owned()),
            policy: self.policy.clone(),
            vm: Some(table),
            ..self.file.clone()
        };
        let path = testbed.dir().join(format!("{}.toml", self.name));
        std::fs::write(&path, toml::to_string(&file)?)?;
        Ok(path)
    }

    /// A card of that number; the guest sets up the first alone.
    fn nic(&self, card: u8) -> NicTable {
        let [first @ .., group, number] = self.mac();
        let mac: Vec<u8> = first.into_iter().chain([group + card, number]).collect();
        let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        NicTable {
            mac: mac.join(":"),
            bridge: Some("br0".to_owned()),
            tap: None,
            promiscuous: false,
        }
    }
}
