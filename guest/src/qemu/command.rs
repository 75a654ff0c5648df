//! QEMU's command line.
//!
//! Decides:    the virtual hardware and every flag; docs/guest.md explains each.
//! Flow:       `VmSpec` + numbers of inherited descriptors -> arguments.
//! Invariants: 1. primary and backup get the same devices in the same order (the state is loaded by name and instance);
//!             2. nothing here names a file: kernel, RAM, disk, NIC and control are descriptors.
//! Source:     stock-qemu.md, vm-loop.md "Command lines that worked".
//! Not here:   making the descriptors (`qemu`), the process (`spawn`).

use std::os::fd::RawFd;

use serde_json::json;

use super::accel::tsc_khz;
use crate::spec::{Accel, FirmwareKind, Machine, NicBackend, VmSpec};

/// Numbers of the descriptors that QEMU inherits.
#[derive(Debug, Clone, Default)]
pub struct Descriptors {
    /// Guest RAM: a memfd of its whole size.
    pub ram: RawFd,
    /// QMP socket.
    pub qmp: RawFd,
    /// Serial console socket.
    pub console: RawFd,
    /// Where device state is saved: a memfd, opened write-only (QEMU matches the access mode exactly).
    pub save: RawFd,
    /// Kernel of a direct boot.
    pub kernel: Option<RawFd>,
    /// Its initial RAM disk.
    pub initrd: Option<RawFd>,
    /// One socket per NIC.
    pub frames: Vec<RawFd>,
    /// One NBD socket per disk, and with a UEFI one more for its variables.
    pub nbd: Vec<RawFd>,
    /// The UEFI's code.
    pub code: Option<RawFd>,
}

/// The file descriptor set under which the save file is known.
pub const SAVE_FDSET: u32 = 1;

const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// A QEMU without a machine that only answers QMP: for the probe.
pub fn throw_away(sandbox: bool, qmp: RawFd) -> Vec<String> {
    let mut line = format!(
        "-machine none -nodefaults -no-user-config -display none -chardev socket,id=qmp,fd={qmp} -mon chardev=qmp,mode=control"
    );
    if sandbox {
        line.push_str(" -sandbox ");
        line.push_str(SANDBOX);
    }
    line.split(' ').map(str::to_owned).collect()
}

/// Everything after the executable's name. `accel` is what was really chosen, never `Auto`.
pub fn arguments(spec: &VmSpec, accel: Accel, fds: &Descriptors, incoming: bool) -> Vec<String> {
    let mut args: Vec<String> = vec![];
    let mut add = |flag: &str, value: String| args.extend([flag.to_owned(), value]);
    let flag_only = ["-nodefaults", "-no-user-config"];

    add("-name", format!("guest={},debug-threads=on", spec.name));
    // The backup rebuilds nothing from the stream's configuration, and vmdesc is JSON that nobody reads.
    add("-global", "migration.send-configuration=off".into());
    let machine = match spec.machine {
        // hpet=off: after loads a Linux backup blames the HPET for an unstable TSC. vmport: more state for nothing.
        Machine::Pc => "pc,hpet=off,vmport=off,usb=off",
        Machine::Q35 => "q35,hpet=off,vmport=off,usb=off,sata=off",
        // rtc=on: without it the guest asks KVM's clock only and TCG guests boot in 1970.
        Machine::Microvm => "microvm,rtc=on",
    };
    let flash = match spec.firmware {
        FirmwareKind::Bios => "",
        FirmwareKind::Uefi => ",pflash0=uefi-code,pflash1=uefi-variables",
    };
    add(
        "-machine",
        format!("{machine},memory-backend=ram,suppress-vmdesc=on{flash}"),
    );
    match accel {
        Accel::Kvm => add("-accel", "kvm".into()),
        Accel::Tcg | Accel::Auto => add("-accel", "tcg,thread=multi".into()),
    }
    let cpu = spec.cpu.clone().unwrap_or_else(|| match accel {
        Accel::Kvm => "host".into(),
        // Five-level page tables make every TLB miss of the translator dearer.
        Accel::Tcg | Accel::Auto => "max,la57=off".into(),
    });
    add("-cpu", cpu);
    add(
        "-smp",
        format!("cpus={0},sockets=1,cores={0},threads=1", spec.vcpus),
    );
    add("-m", format!("size={}M", spec.memory_mib));
    // A *file* backend: x-ignore-shared skips only named files on QEMU 10, not memory-backend-memfd.
    add(
        "-object",
        json!({"qom-type": "memory-backend-file", "id": "ram", "size": spec.memory_bytes(), "share": true,
               "mem-path": format!("/proc/self/fd/{}", fds.ram)})
        .to_string(),
    );
    // -vga none: unshared video RAM would be reset from COLO's cache.
    add("-display", "none".into());
    add("-vga", "none".into());
    add("-chardev", format!("socket,id=qmp,fd={}", fds.qmp));
    add("-mon", "chardev=qmp,mode=control".into());
    add("-chardev", format!("socket,id=con,fd={}", fds.console));
    add("-serial", "chardev:con".into());
    add("-add-fd", format!("fd={},set={SAVE_FDSET}", fds.save));

    let bus = match spec.machine {
        Machine::Microvm => "device",
        Machine::Pc | Machine::Q35 => "pci",
    };
    // KVM takes each queue's doorbell out at a stop and puts it in when the VM runs on, and waits a grace period of its SRCU for each: most of a
    // pause. Without them the vCPU that rings tells the device itself. A device in another process (vhost-user) cannot do without.
    let ioeventfd = accel != Accel::Kvm;
    let backend = spec.nic_backend;
    if !ioeventfd
        && spec.machine == Machine::Microvm
        && (spec.nics.is_empty() || backend == NicBackend::Stream)
    {
        add("-global", "virtio-mmio.ioeventfd=off".into());
    }
    let nbd = |name: &str, fd: &RawFd| {
        json!({"driver": "nbd", "node-name": name, "discard": "unmap", "server": {"type": "fd", "str": fd.to_string()}})
            .to_string()
    };
    let (disks, variables) = fds.nbd.split_at(spec.disks.len().min(fds.nbd.len()));
    if let (Some(code), Some(variables)) = (fds.code, variables.first()) {
        let code = json!({"driver": "file", "node-name": "uefi-code", "read-only": true,
                          "filename": format!("/proc/self/fd/{code}")});
        add("-blockdev", code.to_string());
        add("-blockdev", nbd("uefi-variables", variables));
    }
    for (i, fd) in disks.iter().enumerate() {
        add("-blockdev", nbd(&format!("disk{i}"), fd));
        let mut device = json!({"driver": format!("virtio-blk-{bus}"), "drive": format!("disk{i}"),
                                "id": format!("blk{i}")});
        if bus == "pci" {
            device["ioeventfd"] = json!(ioeventfd);
        }
        if spec.kernel.is_none() {
            // A direct boot takes index 0 for itself.
            device["bootindex"] = json!(i);
        }
        add("-device", device.to_string());
    }
    for (i, (nic, fd)) in spec.nics.iter().zip(&fds.frames).enumerate() {
        let netdev = match backend {
            NicBackend::Stream => json!({"type": "stream", "id": format!("net{i}"), "server": false,
                                         "addr": {"type": "fd", "str": fd.to_string()}}),
            NicBackend::VhostUser => {
                add("-chardev", format!("socket,id=card{i},path=/proc/self/fd/{fd}"));
                json!({"type": "vhost-user", "id": format!("net{i}"), "chardev": format!("card{i}")})
            }
        };
        add("-netdev", netdev.to_string());
        let mut device = json!({"driver": format!("virtio-net-{bus}"), "netdev": format!("net{i}"),
                                "mac": nic.mac, "id": format!("nic{i}")});
        if backend == NicBackend::VhostUser && !incoming {
            // QEMU says yes to a guest that switches its offloads off while it runs (Linux does so for XDP), and does not tell the card, which would go on
            // to put large frames there. A guest that was never offered it says so itself. One that waits for a state offers it: a guest that has booted
            // under an earlier version may have agreed on it, and its state would be refused.
            device["ctrl_guest_offloads"] = json!(false);
        }
        if bus == "pci" {
            device["romfile"] = json!("");
            device["ioeventfd"] = json!(ioeventfd || backend == NicBackend::VhostUser);
            if backend == NicBackend::VhostUser && accel != Accel::Kvm {
                // QEMU 7.2 ends with SIGSEGV when it unmasks such a card's vectors without KVM's irqfd.
                device["vectors"] = json!(0);
            }
        }
        add("-device", device.to_string());
    }
    if let Some(kernel) = fds.kernel {
        add("-kernel", format!("/proc/self/fd/{kernel}"));
        if let Some(initrd) = fds.initrd {
            add("-initrd", format!("/proc/self/fd/{initrd}"));
        }
        let append = kernel_command_line(spec, accel);
        if !append.is_empty() {
            add("-append", append);
        }
    }
    if incoming {
        add("-incoming", "defer".into());
    }
    if spec.sandbox {
        add("-sandbox", SANDBOX.into());
    }
    args.extend(flag_only.map(str::to_owned));
    args
}

/// The spec's, and for a translated guest what Linux must know of the TSC: without a HPET it calibrates the TSC against PIT and
/// PM timer, which fails on a busy host. Then microvm (no PM timer) hangs before its first line of output, and pc falls back to the
/// slow acpi_pm clock. Its check whether the timer interrupts in time fails there too ("8254 timer not connected to IO-APIC") and the boot
/// hangs; under KVM Linux leaves that check out by itself. Under TCG the TSC is the host's, stopped while the VM is stopped: its frequency is known and it is reliable.
fn kernel_command_line(spec: &VmSpec, accel: Accel) -> String {
    const KEYS: [&str; 2] = ["tsc_early_khz=", "tsc="];
    let given = spec.append.clone().unwrap_or_default();
    match accel == Accel::Kvm || KEYS.iter().any(|key| given.contains(key)) {
        true => given,
        false => format!("{given} no_timer_check tsc=reliable tsc_early_khz={}", tsc_khz())
            .trim_start()
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{DiskFormat, DiskSpec, NicSpec};

    fn disk(path: &str) -> DiskSpec {
        DiskSpec {
            path: path.into(),
            format: DiskFormat::Raw,
        }
    }

    #[test]
    fn backup_and_primary_differ_only_in_incoming() {
        let spec = VmSpec {
            kernel: Some("/k".into()),
            machine: Machine::Q35,
            ..VmSpec::new("v", 64)
        };
        let fds = Descriptors::default();
        let mut backup = arguments(&spec, Accel::Tcg, &fds, true);
        let at = backup.iter().position(|a| a == "-incoming").unwrap();
        backup.drain(at..at + 2);
        assert_eq!(backup, arguments(&spec, Accel::Tcg, &fds, false));
    }

    #[test]
    fn no_argument_names_a_file_of_the_host() {
        for machine in [Machine::Pc, Machine::Q35, Machine::Microvm] {
            let spec = VmSpec {
                machine,
                kernel: Some("/secret/k".into()),
                initrd: Some("/secret/i".into()),
                serial_log: Some("/secret/s".into()),
                disks: vec![disk("/secret/d")],
                nics: vec![NicSpec {
                    mac: "52:54:00:00:00:01".into(),
                    bridge: None,
                    tap: None,
                    promiscuous: false,
                }],
                ..VmSpec::new("v", 64)
            };
            let fds = Descriptors {
                kernel: Some(5),
                initrd: Some(6),
                frames: vec![7],
                nbd: vec![8, 9],
                code: Some(10),
                ..Default::default()
            };
            let line = arguments(&spec, Accel::Kvm, &fds, false).join(" ");
            assert!(!line.contains("secret"), "{line}");
            assert!(
                line.contains("\"str\":\"8\"") && line.contains("/proc/self/fd/5"),
                "{line}"
            );
        }
    }

    #[test]
    fn kvm_has_doorbells_of_its_own_for_vhost_user_alone() {
        let nic = NicSpec {
            mac: "52:54:00:00:00:01".into(),
            bridge: None,
            tap: None,
            promiscuous: false,
        };
        let of = |machine, nic_backend, accel| {
            let spec = VmSpec {
                machine,
                nic_backend,
                disks: vec![disk("/d")],
                nics: vec![nic.clone()],
                ..VmSpec::new("v", 64)
            };
            let fds = Descriptors {
                frames: vec![7],
                nbd: vec![8],
                ..Default::default()
            };
            let args = arguments(&spec, accel, &fds, false);
            let has = |driver: &str| {
                let device = args
                    .iter()
                    .find(|a| a.contains(&format!("\"driver\":\"{driver}\"")));
                device.is_some_and(|a| !a.contains("\"ioeventfd\":false"))
            };
            let mmio = args.iter().any(|a| a == "virtio-mmio.ioeventfd=off");
            let bus = if machine == Machine::Microvm {
                "device"
            } else {
                "pci"
            };
            (
                has(&format!("virtio-blk-{bus}")) && !mmio,
                has(&format!("virtio-net-{bus}")) && !mmio,
            )
        };
        use Machine::{Microvm, Pc};
        use NicBackend::{Stream, VhostUser};
        assert_eq!(of(Pc, Stream, Accel::Kvm), (false, false));
        assert_eq!(of(Pc, VhostUser, Accel::Kvm), (false, true));
        assert_eq!(of(Microvm, Stream, Accel::Kvm), (false, false));
        assert_eq!(of(Microvm, VhostUser, Accel::Kvm), (true, true));
        assert_eq!(of(Pc, Stream, Accel::Tcg), (true, true));
    }

    /// It is not told of that. A backup's offers it, for guests of earlier versions that have agreed on it.
    #[test]
    fn a_card_outside_of_qemu_has_no_offloads_that_are_switched_while_a_guest_runs() {
        let has = |nic_backend, incoming| {
            let nic = NicSpec {
                mac: "52:54:00:00:00:01".into(),
                bridge: None,
                tap: None,
                promiscuous: false,
            };
            let spec = VmSpec {
                nic_backend,
                nics: vec![nic],
                ..VmSpec::new("v", 64)
            };
            let fds = Descriptors {
                frames: vec![7],
                ..Default::default()
            };
            let line = arguments(&spec, Accel::Kvm, &fds, incoming).join(" ");
            !line.contains("\"ctrl_guest_offloads\":false")
        };
        assert!(!has(NicBackend::VhostUser, false));
        assert!(has(NicBackend::VhostUser, true));
        assert!(has(NicBackend::Stream, false), "QEMU itself cuts there");
    }

    #[test]
    fn a_uefi_has_its_code_from_a_file_and_its_variables_behind_the_last_disk() {
        let spec = VmSpec {
            firmware: FirmwareKind::Uefi,
            disks: vec![disk("/d")],
            ..VmSpec::new("v", 256)
        };
        let fds = Descriptors {
            nbd: vec![8, 9],
            code: Some(10),
            ..Default::default()
        };
        let args = arguments(&spec, Accel::Kvm, &fds, false);
        let line = args.join(" ");
        assert!(
            line.contains("suppress-vmdesc=on,pflash0=uefi-code,pflash1=uefi-variables"),
            "{line}"
        );
        let node = |name: &str| {
            let named = args
                .iter()
                .find(|a| a.contains(&format!("\"node-name\":\"{name}\"")));
            named.unwrap_or_else(|| panic!("no {name} in {line}")).clone()
        };
        assert!(
            node("uefi-code").contains("\"read-only\":true")
                && node("uefi-code").contains("/proc/self/fd/10")
        );
        assert!(node("disk0").contains("\"str\":\"8\"") && node("uefi-variables").contains("\"str\":\"9\""));
        assert_eq!(line.matches("virtio-blk").count(), 1, "{line}");
    }
}
