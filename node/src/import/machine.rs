//! Name, memory, virtual CPUs, machine type, firmware and direct boot of a domain.

use super::parts::Import;
use super::variables;
use super::xml::{attribute, child, children, is_path, shown, words};
use dunlin_api::files::{Accel, Firmware, Machine};
use roxmltree::Node;
use std::path::PathBuf;

/// Bytes of each unit that libvirt knows; without one a number is in KiB.
const UNITS: [(&str, u64); 14] = [
    ("b", 1),
    ("bytes", 1),
    ("KB", 1_000),
    ("k", 1 << 10),
    ("KiB", 1 << 10),
    ("MB", 1_000_000),
    ("M", 1 << 20),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    ("G", 1 << 30),
    ("GiB", 1 << 30),
    ("TB", 1_000_000_000_000),
    ("T", 1 << 40),
    ("TiB", 1 << 40),
];

pub fn read(domain: Node<'_, '_>, import: &mut Import) {
    import.accel = match domain.attribute("type") {
        Some("kvm") => Accel::Kvm,
        Some("qemu") => Accel::Tcg,
        other => {
            let found = shown(other.unwrap_or("none"));
            import.refuse(
                "domain",
                format!("its type is {found}; Dunlin runs QEMU's, with KVM or without"),
            );
            Accel::Auto
        }
    };
    name(domain, import);
    memory(domain, import);
    vcpus(domain, import);
    match child(domain, "os") {
        Some(os) => system(os, import),
        None => import.refuse("os", "there is none: is this the XML of a domain?"),
    }
}

fn name(domain: Node<'_, '_>, import: &mut Import) {
    let Some(name) = words(domain, "name") else {
        import.refuse("name", "there is none");
        return;
    };
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') {
            c
        } else {
            '-'
        }
    };
    import.name = name.chars().take(64).map(plain).collect();
    if import.name.starts_with('.') {
        import.name.replace_range(..1, "-");
    }
    if import.name != name {
        let why = format!(
            "the VM is called {}: a name has 1 to 64 letters, digits, '-', '_' or '.'",
            import.name
        );
        import.leave_out(format_args!("name {}", shown(name)), &why);
    }
}

/// A size of the XML, in whole MiB, rounded up.
pub fn mib(node: Node<'_, '_>) -> Option<u64> {
    let unit = node.attribute("unit").unwrap_or("KiB");
    let (_, bytes) = UNITS.iter().find(|(name, _)| *name == unit)?;
    let number: u64 = node.text()?.trim().parse().ok()?;
    Some(number.checked_mul(*bytes)?.div_ceil(1 << 20))
}

fn memory(domain: Node<'_, '_>, import: &mut Import) {
    let Some(memory) = child(domain, "memory") else {
        import.refuse("memory", "there is none");
        return;
    };
    let Some(size) = mib(memory) else {
        let found = shown(memory.text().unwrap_or_default().trim());
        let unit = shown(memory.attribute("unit").unwrap_or("KiB"));
        import.refuse("memory", format!("{found} {unit} is no size"));
        return;
    };
    import.memory_mib = size;
    if let Some(now) = child(domain, "currentMemory").and_then(mib)
        && now < size
    {
        let why = format!("there is no balloon: the guest has all of its {size} MiB from the start");
        import.leave_out(format_args!("currentMemory of {now} MiB"), &why);
    }
}

fn vcpus(domain: Node<'_, '_>, import: &mut Import) {
    let Some(vcpu) = child(domain, "vcpu") else {
        import.vcpus = 1;
        return;
    };
    let most = vcpu.text().unwrap_or_default().trim();
    let found = vcpu.attribute("current").unwrap_or(most);
    match found.parse() {
        Ok(count) => import.vcpus = count,
        Err(_) => import.refuse("vcpu", format!("{} is no number of CPUs", shown(found))),
    }
    if found != most {
        import.leave_out(
            format_args!("vcpu: up to {} while it runs", shown(most)),
            "CPUs cannot be added to a running VM",
        );
    }
    if vcpu.attribute("cpuset").is_some() {
        import.leave_out(
            "vcpu cpuset",
            "CPUs are not pinned; systemd's CPUAffinity pins the whole daemon",
        );
    }
}

fn system(os: Node<'_, '_>, import: &mut Import) {
    let kind = words(os, "type").unwrap_or("none");
    if kind != "hvm" {
        import.refuse(
            "os type",
            format!("it is {}; only hvm, a whole machine, can be run", shown(kind)),
        );
    }
    if let Some(arch) = attribute(os, "type", "arch")
        && arch != "x86_64"
    {
        import.refuse(
            "os type",
            format!("it is for {}; Dunlin runs x86_64", shown(arch)),
        );
    }
    machine(attribute(os, "type", "machine").unwrap_or("pc"), import);
    firmware(os, import);
    direct_boot(os, import);
    let order: Vec<&str> = children(os, "boot")
        .filter_map(|boot| boot.attribute("dev"))
        .collect();
    if !order.is_empty() && order != ["hd"] {
        import.leave_out(
            format_args!("boot order {}", shown(&order.join(", "))),
            "a VM boots its first disk, or its kernel",
        );
    }
    const SILENT: [&str; 8] = [
        "type", "loader", "nvram", "kernel", "initrd", "cmdline", "boot", "firmware",
    ];
    for element in os.children().filter(Node::is_element) {
        let name = element.tag_name().name();
        if SILENT.contains(&name) {
            continue;
        }
        let why = match name {
            "dtb" => "x86 machines have no device tree",
            "bootmenu" => "there is no boot menu",
            "bios" => "the firmware is QEMU's own, as it is",
            "smbios" | "acpi" => "the guest sees QEMU's own tables",
            _ => "there is nothing like it",
        };
        import.leave_out(format_args!("os {}", shown(name)), why);
    }
}

fn machine(found: &str, import: &mut Import) {
    let (machine, plain) = match found {
        "pc" | "q35" | "microvm" => (found, true),
        _ if found.starts_with("pc-i440fx-") || found.starts_with("pc-0.") || found.starts_with("pc-1.") => {
            ("pc", false)
        }
        _ if found.starts_with("pc-q35-") => ("q35", false),
        _ => {
            import.refuse(
                "machine",
                format!("{} is none of pc, q35 and microvm", shown(found)),
            );
            return;
        }
    };
    import.machine = match machine {
        "pc" => Machine::Pc,
        "q35" => Machine::Q35,
        _ => Machine::Microvm,
    };
    if !plain {
        let why = format!(
            "the VM has {machine} as the hosts' QEMU builds it: the guest may find its hardware a little newer"
        );
        import.leave_out(format_args!("machine {}", shown(found)), &why);
    }
}

fn firmware(os: Node<'_, '_>, import: &mut Import) {
    let loader = child(os, "loader");
    let path = words(os, "loader").unwrap_or_default();
    let flash = loader.and_then(|loader| loader.attribute("type")) == Some("pflash");
    let named = ["OVMF", "edk2", "efi"].iter().any(|word| path.contains(word));
    if os.attribute("firmware") == Some("efi") || flash || named {
        import.firmware = Firmware::Uefi;
    } else if !path.is_empty() && !path.contains("bios") {
        import.leave_out(
            format_args!("loader {}", shown(path)),
            "the firmware is QEMU's own BIOS",
        );
    }
    if import.firmware != Firmware::Uefi {
        return;
    }
    if !path.is_empty() && !path.ends_with("/OVMF_CODE_4M.fd") {
        import.leave_out(
            format_args!("loader {}", shown(path)),
            "the UEFI is the hosts' OVMF_CODE_4M.fd (package ovmf)",
        );
    }
    let secure = child(os, "firmware")
        .into_iter()
        .flat_map(|firmware| children(firmware, "feature"))
        .any(|feature| {
            feature.attribute("name") == Some("secure-boot") && feature.attribute("enabled") == Some("yes")
        });
    if secure || loader.and_then(|loader| loader.attribute("secure")) == Some("yes") {
        import.leave_out(
            "secure boot",
            "it is not enforced: the UEFI boots what is not signed, too",
        );
    }
    variables::read(os, import);
}

fn direct_boot(os: Node<'_, '_>, import: &mut Import) {
    for element in ["kernel", "initrd"] {
        let Some(path) = words(os, element) else { continue };
        if !is_path(path) {
            import.refuse(
                element,
                format!("{} is no absolute path of one line", shown(path)),
            );
            continue;
        }
        match element {
            "kernel" => import.kernel = Some(PathBuf::from(path)),
            _ => import.initrd = Some(PathBuf::from(path)),
        }
    }
    import.append = words(os, "cmdline").map(str::to_owned);
    if import.kernel.is_none() && (import.initrd.is_some() || import.append.is_some()) {
        import.leave_out("initrd and cmdline", "they mean nothing without a kernel");
        (import.initrd, import.append) = (None, None);
    }
    if import
        .append
        .as_ref()
        .is_some_and(|words| words.chars().any(char::is_control))
    {
        import.refuse("cmdline", "it is not one line");
    }
}
