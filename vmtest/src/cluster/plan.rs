//! A VM's TOML file, written for the testbed.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

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
    /// `pc`, `q35` or `microvm`.
    pub machine: String,
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
    /// Further lines for the `[sync]` table.
    pub sync: Vec<String>,
    /// The hosts that can run it, the first preferred (under `none` the first alone).
    pub members: [&'static str; 2],
    /// Tells several VMs in one testbed apart: their addresses and MACs.
    pub number: u8,
    /// Further lines for the file's top.
    pub top: Vec<String>,
}

impl VmPlan {
    /// The redis guest under `policy`, on the default machine, without a disk.
    pub fn redis(policy: &str) -> Self {
        Self {
            name: "redis".to_owned(),
            policy: policy.to_owned(),
            machine: "pc".to_owned(),
            vcpus: 1,
            memory_mib: 256,
            memory_overcommit: false,
            disk_mib: None,
            more_disks: 0,
            idle_cards: 0,
            boots_from_disk: false,
            uefi: false,
            sync: Vec::new(),
            members: ["a", "b"],
            number: 0,
            top: Vec::new(),
        }
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
        if self.machine != "microvm" || *runs_under != RunsUnder::Tcg {
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
        let [first, second] = self.members;
        let members = if self.policy == "none" {
            format!("[\"{first}\"]")
        } else {
            format!("[\"{first}\", \"{second}\"]")
        };
        let mut text = format!("name = \"{}\"\nmembers = {members}\n", self.name);
        if self.policy != "none" {
            text.push_str("witness = \"c\"\n");
        }
        text.push_str(&format!("policy = \"{}\"\n", self.policy));
        for line in &self.top {
            text.push_str(line);
            text.push('\n');
        }
        text.push_str("\n[sync]\n");
        for line in &self.sync {
            text.push_str(line);
            text.push('\n');
        }
        text.push_str(&format!(
            "\n[vm]\nmachine = \"{}\"\n{}",
            self.machine,
            image.runs_under.lines(&preload)
        ));
        text.push_str(&format!(
            "vcpus = {}\nmemory_mib = {}\n",
            self.vcpus, self.memory_mib
        ));
        if image.nic_backend == NicBackend::VhostUser {
            text.push_str("nic_backend = \"vhost-user\"\n");
        }
        if self.uefi {
            text.push_str("firmware = \"uefi\"\n");
        }
        if self.memory_overcommit {
            text.push_str("memory_overcommit = true\n");
        }
        let append = format!(
            "{}{}",
            image.append_for(&self.address()),
            self.clock_words(&image.runs_under)
        );
        if !self.boots_from_disk {
            text.push_str(&format!(
                "kernel = \"{}\"\ninitrd = \"{}\"\nappend = \"{append}\"\n",
                kernel.display(),
                initrd.display()
            ));
        }
        let serial = testbed.here().join(format!("serial-{}.log", self.name));
        text.push_str(&format!("serial_log = \"{}\"\n", serial.display()));
        for card in 0..=self.idle_cards {
            let [first @ .., group, number] = self.mac();
            let mac: Vec<u8> = first.into_iter().chain([group + card, number]).collect();
            let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
            text.push_str(&format!(
                "
[[vm.nics]]
mac = \"{}\"
bridge = \"br0\"
",
                mac.join(":")
            ));
        }
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
            text.push_str(&format!(
                "\n[[vm.disks]]\npath = \"{}\"\n",
                testbed.here().join(&file).display()
            ));
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
            text.push_str(&format!(
                "\n[[vm.disks]]\npath = \"{}\"\n",
                testbed.here().join(&file).display()
            ));
        }
        let path = testbed.dir().join(format!("{}.toml", self.name));
        std::fs::write(&path, text)?;
        Ok(path)
    }
}
