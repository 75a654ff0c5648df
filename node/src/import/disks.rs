//! The disks of a domain: local raw and qcow2 images and block devices on virtio.

use super::parts::{Import, Options};
use super::xml::{attribute, child, children, is_path, shown};
use dunlin_api::files::{DiskFormat, DiskTable};
use roxmltree::Node;
use std::path::PathBuf;

/// Places that the package's service does not write to.
const CLOSED: [&str; 4] = ["/home/", "/root/", "/tmp/", "/var/tmp/"];
/// Settings of a disk that Dunlin's own disk server decides.
const SETTINGS: [&str; 13] = [
    "cache",
    "io",
    "discard",
    "detect_zeroes",
    "queues",
    "queue_size",
    "iothread",
    "error_policy",
    "rerror_policy",
    "copy_on_read",
    "discard_no_unref",
    "event_idx",
    "packed",
];

/// What a disk that was carried over says of the boot.
struct Boot {
    order: u32,
    place: usize,
}

pub fn read(devices: Node<'_, '_>, options: &Options, import: &mut Import) {
    let mut boots = Vec::new();
    for disk in children(devices, "disk") {
        let name = format!(
            "disk {}",
            shown(attribute(disk, "target", "dev").unwrap_or("without a target"))
        );
        let before = import.disks.len();
        one(disk, &name, options, import);
        let order = attribute(disk, "boot", "order").and_then(|order| order.parse().ok());
        if let (Some(order), true) = (order, import.disks.len() > before) {
            boots.push(Boot { order, place: before });
        }
    }
    let first = boots
        .iter()
        .min_by_key(|boot| boot.order)
        .map_or(0, |boot| boot.place);
    if first > 0 && import.kernel.is_none() {
        let disk = import.disks.remove(first);
        let what = format!("disk {}", disk.path.display());
        import.disks.insert(0, disk);
        import.leave_out(
            what,
            "the VM boots it, so it is its first disk: the guest's names of its disks (vda, vdb) change",
        );
    }
}

fn one(disk: Node<'_, '_>, name: &str, options: &Options, import: &mut Import) {
    match disk.attribute("device").unwrap_or("disk") {
        "disk" => {}
        device @ ("cdrom" | "floppy") => {
            let why = "there are no removable media; what the guest needs of it has to be on a disk";
            import.leave_out(format_args!("{name} ({device})"), why);
            return;
        }
        "lun" => {
            import.refuse(name, "a SCSI unit that is passed through cannot be replicated: give the VM its block device as a disk");
            return;
        }
        other => {
            import.refuse(name, format!("there is no kind {}", shown(other)));
            return;
        }
    }
    let Some(path) = path(disk, name, import) else {
        return;
    };
    let Some(format) = format(disk, name, path, import) else {
        return;
    };
    for (element, why) in [
        (
            "readonly",
            "it is read-only, and a VM's disks can be written: take it away, or copy it",
        ),
        (
            "shareable",
            "it is shared with other VMs, and a replicated disk belongs to one",
        ),
        (
            "transient",
            "what is written to it is thrown away, and a VM's disks keep it",
        ),
        (
            "encryption",
            "its encryption is QEMU's: encrypt it within the guest, or the hosts' own devices",
        ),
    ] {
        if child(disk, element).is_some() || (element == "encryption" && source(disk, element).is_some()) {
            import.refuse(name, why);
            return;
        }
    }
    let bus = attribute(disk, "target", "bus").unwrap_or("none");
    if bus != "virtio" {
        let bus = shown(bus);
        if !options.virtio {
            let why = format!(
                "it is on the bus {bus}, and a VM's disks are virtio-blk: see that the guest boots with bus='virtio' under libvirt first, \
                 or say --virtio"
            );
            import.refuse(name, why);
            return;
        }
        import.leave_out(
            format_args!("{name}: bus {bus}"),
            "it is virtio-blk now: the guest needs that driver from its first moment, and names the disk otherwise (vda)",
        );
    }
    settings(disk, name, path, import);
    let backing = format == DiskFormat::Qcow2 && is_backed(disk);
    import.disks.push(DiskTable {
        path: PathBuf::from(path),
        format,
        backing,
    });
}

fn source<'a, 'input>(disk: Node<'a, 'input>, element: &str) -> Option<Node<'a, 'input>> {
    child(child(disk, "source")?, element)
}

/// Where the image is, if it is on the host.
fn path<'a>(disk: Node<'a, '_>, name: &str, import: &mut Import) -> Option<&'a str> {
    let of_source = |attribute_name| attribute(disk, "source", attribute_name).unwrap_or_default();
    let path = match disk.attribute("type").unwrap_or("file") {
        "file" => of_source("file"),
        "block" => of_source("dev"),
        "network" => {
            let protocol = shown(of_source("protocol"));
            let why = format!(
                "it is on the network ({protocol}), and Dunlin replicates the hosts' own disks: copy it with 'qemu-img convert -p -O raw \
                 {protocol}:... /srv/vm/NAME.img', and name that file"
            );
            import.refuse(name, why);
            return None;
        }
        "volume" => {
            let (pool, volume) = (shown(of_source("pool")), shown(of_source("volume")));
            import.refuse(
                name,
                format!("it is a volume of a pool: 'virsh vol-path --pool {pool} {volume}' says its path, which goes into <source file='...'/>"),
            );
            return None;
        }
        other => {
            import.refuse(name, format!("there is nothing like its type {}", shown(other)));
            return None;
        }
    };
    if !is_path(path) {
        import.refuse(
            name,
            format!("its source {} is no absolute path of one line", shown(path)),
        );
        return None;
    }
    Some(path)
}

fn format(disk: Node<'_, '_>, name: &str, path: &str, import: &mut Import) -> Option<DiskFormat> {
    match attribute(disk, "driver", "type").unwrap_or("raw") {
        "raw" => Some(DiskFormat::Raw),
        "qcow2" => Some(DiskFormat::Qcow2),
        other => {
            let path = shown(path);
            let why = format!(
                "its format is {}, and Dunlin takes raw and qcow2: 'qemu-img convert -p -O qcow2 {path} {path}.qcow2', and name that file",
                shown(other)
            );
            import.refuse(name, why);
            None
        }
    }
}

/// Whether its image is said to stand on another file.
fn is_backed(disk: Node<'_, '_>) -> bool {
    child(disk, "backingStore").is_some_and(|store| child(store, "source").is_some())
}

fn settings(disk: Node<'_, '_>, name: &str, path: &str, import: &mut Import) {
    let driver = child(disk, "driver");
    let mut found: Vec<&str> = SETTINGS
        .into_iter()
        .filter(|setting| driver.is_some_and(|driver| driver.has_attribute(*setting)))
        .collect();
    const ELEMENTS: [&str; 4] = ["iotune", "blockio", "geometry", "throttlefilters"];
    found.extend(
        ELEMENTS
            .into_iter()
            .filter(|element| child(disk, element).is_some()),
    );
    if !found.is_empty() {
        let what = format!("{name}: {}", found.join(", "));
        import.leave_out(what, "Dunlin's own disk server decides this");
    }
    for element in ["serial", "wwn", "vendor", "product"] {
        if child(disk, element).is_some() {
            import.leave_out(
                format_args!("{name}: {element}"),
                "the guest sees none: mount by UUID or label, not by id",
            );
        }
    }
    if is_backed(disk) {
        import.leave_out(
            format_args!("{name}: its backing file"),
            "it has to be on both hosts under the same path, or be made part of the image with 'qemu-img rebase -b \"\"'",
        );
    }
    if let Some(closed) = CLOSED.iter().find(|closed| path.starts_with(**closed)) {
        let why = format!(
            "the package's service does not write below {closed}: move it, to /srv/vm for instance, and correct the path"
        );
        import.leave_out(format_args!("{name}: {}", shown(path)), &why);
    }
}
