//! `[vm]` of a VM's file, as the engine has it.
//!
//! **Decides**: nothing; which values make sense, [`VmSpec::validate`] says.

use dunlin_api::files::{self, DiskTable, NicTable, VmTable};
use dunlin_guest::disk::DiskFormat;
use dunlin_guest::{Accel, DiskSpec, FirmwareKind, Machine, NicBackend, NicSpec, VmSpec};

/// The VM of that name.
#[must_use]
pub fn vm_spec(name: &str, table: VmTable) -> VmSpec {
    // Every key by its name: one that is new and not carried over does not compile.
    let VmTable {
        name: _,
        accel,
        machine,
        firmware,
        qemu,
        cpu,
        vcpus,
        memory_mib,
        memory_overcommit,
        kernel,
        initrd,
        append,
        disks,
        nics,
        nic_backend,
        run_as,
        sandbox,
        preload,
        serial_log,
    } = table;
    VmSpec {
        name: name.to_owned(),
        accel: match accel {
            files::Accel::Auto => Accel::Auto,
            files::Accel::Kvm => Accel::Kvm,
            files::Accel::Tcg => Accel::Tcg,
        },
        machine: match machine {
            files::Machine::Pc => Machine::Pc,
            files::Machine::Q35 => Machine::Q35,
            files::Machine::Microvm => Machine::Microvm,
        },
        firmware: match firmware {
            files::Firmware::Bios => FirmwareKind::Bios,
            files::Firmware::Uefi => FirmwareKind::Uefi,
        },
        qemu,
        cpu,
        vcpus,
        memory_mib,
        memory_overcommit,
        kernel,
        initrd,
        append,
        disks: disks.into_iter().map(disk_spec).collect(),
        nics: nics.into_iter().map(nic_spec).collect(),
        nic_backend: match nic_backend {
            files::NicBackend::Stream => NicBackend::Stream,
            files::NicBackend::VhostUser => NicBackend::VhostUser,
        },
        run_as,
        sandbox,
        preload,
        serial_log,
    }
}

fn disk_spec(table: DiskTable) -> DiskSpec {
    let DiskTable {
        path,
        format,
        backing,
    } = table;
    DiskSpec {
        path,
        format: match (format, backing) {
            (files::DiskFormat::Raw, _) => DiskFormat::Raw,
            (files::DiskFormat::Qcow2, false) => DiskFormat::Qcow2,
            (files::DiskFormat::Qcow2, true) => DiskFormat::BackedQcow2,
        },
    }
}

fn nic_spec(table: NicTable) -> NicSpec {
    let NicTable {
        mac,
        bridge,
        tap,
        promiscuous,
    } = table;
    NicSpec {
        mac,
        bridge,
        tap,
        promiscuous,
    }
}
