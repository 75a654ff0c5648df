//! Network cards, and everything that a VM of Dunlin has not.

use super::parts::{Import, Options};
use super::xml::{attribute, child, children, shown};
use dunlin_api::files::NicTable;
use roxmltree::Node;
use std::collections::BTreeSet;

/// Parts of a domain beside its devices, and why they are not carried over.
const TOP: [(&str, &str); 26] = [
    (
        "uuid",
        "the machine's UUID that the guest sees is another one: what is licensed by it asks again",
    ),
    ("genid", "there is no generation id"),
    ("title", "a VM has no title"),
    ("description", "a VM has no description"),
    ("metadata", "it is libvirt's own"),
    ("maxMemory", "memory cannot be added to a running VM"),
    (
        "memoryBacking",
        "guest RAM is a memory file of QEMU's, without huge pages",
    ),
    ("memtune", "use systemd's MemoryMax for the service"),
    ("blkiotune", "use systemd's IOWeight for the service"),
    ("cputune", "virtual CPUs are neither pinned nor limited"),
    ("numatune", "memory is not bound to nodes"),
    ("iothreads", "Dunlin's own disk server has its threads"),
    ("iothreadids", "Dunlin's own disk server has its threads"),
    ("defaultiothread", "Dunlin's own disk server has its threads"),
    ("resource", "the service has its own control group"),
    ("sysinfo", "the guest sees QEMU's own tables"),
    ("idmap", "it is for containers"),
    (
        "seclabel",
        "QEMU runs as an ordinary user with a system call filter",
    ),
    ("perf", "there are no performance events"),
    ("pm", "the guest cannot sleep"),
    ("on_lockfailure", "there are no lock leases"),
    ("commandline", "arguments of QEMU's own are not passed on"),
    ("capabilities", "arguments of QEMU's own are not passed on"),
    ("override", "arguments of QEMU's own are not passed on"),
    ("bootloader", "it is Xen's"),
    ("keywrap", "it is for other machines"),
];

/// Devices, and why they are not carried over.
const DEVICES: [(&str, &str); 26] = [
    ("hostdev", "a device of the host stays on that host"),
    (
        "filesystem",
        "a folder of the host (virtiofs, 9p) stays on that host: use a disk or a network file system",
    ),
    (
        "graphics",
        "there is no screen (spice, vnc), and no console to type on: use the network; 'serial_log' keeps what the guest prints",
    ),
    ("video", "there is no screen"),
    ("sound", "there is no sound"),
    ("audio", "there is no sound"),
    ("channel", "there is no channel to a guest agent"),
    ("redirdev", "there is no USB"),
    ("redirfilter", "there is no USB"),
    ("hub", "there is no USB"),
    ("smartcard", "there are no smart cards"),
    ("parallel", "there is no parallel port"),
    (
        "tpm",
        "there is no TPM: a guest whose disk's key is in it (BitLocker) needs its recovery key",
    ),
    (
        "rng",
        "there is no virtio-rng: both copies would be given other random numbers; the CPU's rdrand is there",
    ),
    (
        "memballoon",
        "there is no balloon: the guest has all of its memory from the start",
    ),
    (
        "memory",
        "memory modules cannot be added: give the VM all of it in vm.memory_mib",
    ),
    ("watchdog", "there is no watchdog device"),
    ("panic", "there is no panic device"),
    (
        "shmem",
        "memory that is shared with other VMs cannot be replicated",
    ),
    ("vsock", "there is no vsock: use the network"),
    ("iommu", "there is no IOMMU in the guest"),
    ("crypto", "there is no crypto device"),
    ("lease", "there are no lock leases"),
    ("nvram", "it is for other machines"),
    ("pstore", "there is no pstore"),
    ("panel", "there is no screen"),
];

/// What the domain is beside its machine and devices.
pub fn top(domain: Node<'_, '_>, import: &mut Import) {
    const SILENT: [&str; 9] = [
        "name",
        "memory",
        "currentMemory",
        "vcpu",
        "os",
        "cpu",
        "devices",
        "on_poweroff",
        "vcpus",
    ];
    for element in domain.children().filter(Node::is_element) {
        let name = element.tag_name().name();
        let text = element.text().unwrap_or_default().trim();
        match name {
            _ if SILENT.contains(&name) => {}
            "features" => features(element, import),
            "clock" => clock(element, import),
            "on_reboot" if text == "restart" => {}
            "on_crash" if matches!(text, "destroy" | "restart") => {}
            "on_reboot" | "on_crash" => {
                import.leave_out(
                    format_args!("{name} {}", shown(text)),
                    "a guest that reboots goes on, one that is gone is down",
                );
            }
            "pm" if element
                .children()
                .filter(Node::is_element)
                .all(|way| way.attribute("enabled") == Some("no")) => {}
            "launchSecurity" => import.refuse(
                name,
                "memory that is encrypted for one host cannot be copied to another",
            ),
            _ => {
                let why = TOP.iter().find(|(known, _)| *known == name).map(|(_, why)| *why);
                import.leave_out(shown(name), why.unwrap_or("there is nothing like it"));
            }
        }
    }
}

fn features(features: Node<'_, '_>, import: &mut Import) {
    for feature in features.children().filter(Node::is_element) {
        let name = feature.tag_name().name();
        let state = feature.attribute("state");
        let why = match name {
            "acpi" | "apic" | "pae" | "privnet" | "viridian" => continue,
            "vmport" if state == Some("off") => continue,
            "smm" => "there is no system management mode",
            "hyperv" => {
                "its flags can be given in vm.cpu, as in host,hv-relaxed,hv-vapic,hv-spinlocks=0x1fff"
            }
            "kvm" => "its flags can be given in vm.cpu, as in host,kvm=off",
            "pmu" => "the CPU's counters are as the model in vm.cpu has them",
            _ => "it is as QEMU has it by itself",
        };
        import.leave_out(format_args!("feature {}", shown(name)), why);
    }
    if child(features, "acpi").is_none() {
        import.leave_out("features without acpi", "the machine has ACPI");
    }
}

fn clock(clock: Node<'_, '_>, import: &mut Import) {
    let offset = clock.attribute("offset").unwrap_or("utc");
    if offset != "utc" {
        let what = format!("clock {}", shown(offset));
        import.leave_out(
            what,
            "the machine's clock is in UTC: tell the guest (Windows: RealTimeIsUniversal)",
        );
    }
    if children(clock, "timer").next().is_some() {
        import.leave_out("clock timers", "they are as QEMU has them by itself");
    }
}

/// The network cards.
pub fn nics(devices: Node<'_, '_>, options: &Options, import: &mut Import) {
    for interface in children(devices, "interface") {
        let mac = attribute(interface, "mac", "address").unwrap_or_default();
        let name = format!("network card {}", shown(mac));
        if mac.is_empty() {
            import.refuse(
                "network card",
                "it has no MAC address: 'virsh dumpxml' of the defined domain has one",
            );
            continue;
        }
        if interface.attribute("type") == Some("hostdev") {
            import.leave_out(
                &name,
                "a device of the host stays on that host: give the VM a card on a bridge",
            );
            continue;
        }
        let model = attribute(interface, "model", "type").unwrap_or("none");
        if !model.starts_with("virtio") {
            let model = shown(model);
            if !options.virtio {
                let why = format!(
                    "its model is {model}, and a VM's cards are virtio-net: see that the guest works with model type='virtio' under libvirt \
                     first, or say --virtio"
                );
                import.refuse(&name, why);
                continue;
            }
            let what = format!("{name}: model {model}");
            import.leave_out(
                what,
                "it is virtio-net now: the guest needs that driver, and may name the card otherwise",
            );
        }
        let bridge = bridge(interface, &name, options, import);
        settings(interface, &name, import);
        let tap = attribute(interface, "target", "dev").filter(|tap| is_own_name(tap));
        import.nics.push(NicTable {
            mac: mac.to_ascii_lowercase(),
            bridge,
            tap: tap.map(str::to_owned),
            promiscuous: false,
        });
    }
}

/// A TAP's name that a person gave: libvirt counts its own.
fn is_own_name(tap: &str) -> bool {
    let counted = ["vnet", "macvtap", "tap"].iter().any(|prefix| {
        tap.strip_prefix(prefix)
            .is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    });
    !counted && is_interface(tap)
}

/// As Linux names them.
fn is_interface(name: &str) -> bool {
    (1..=15).contains(&name.len()) && name.chars().all(|c| c.is_ascii_graphic() && c != '/' && c != '%')
}

fn bridge(interface: Node<'_, '_>, name: &str, options: &Options, import: &mut Import) -> Option<String> {
    let open_vswitch = attribute(interface, "virtualport", "type").is_some();
    let kind = interface.attribute("type").unwrap_or("none");
    if kind == "bridge" && !open_vswitch {
        let bridge = attribute(interface, "source", "bridge").unwrap_or_default();
        if !is_interface(bridge) {
            import.refuse(name, format!("{} is no bridge's name", shown(bridge)));
            return None;
        }
        return Some(bridge.to_owned());
    }
    let network = attribute(interface, "source", "network").map(|network| format!(" '{}'", shown(network)));
    let what = match kind {
        "network" => format!("{name}: libvirt's network{}", network.unwrap_or_default()),
        "bridge" => format!("{name}: a bridge of Open vSwitch"),
        other => format!("{name}: its connection of type {}", shown(other)),
    };
    let why = "a card joins a Linux bridge, which is to be on both hosts in the same network";
    match &options.bridge {
        Some(bridge) => {
            import.leave_out(what, &format!("{why}; it is on {bridge}, as you said"));
            Some(bridge.clone())
        }
        None => {
            import.leave_out(
                what,
                &format!(
                    "{why}: say --bridge BRIDGE, or set 'bridge' in the file; until then it reaches nobody"
                ),
            );
            None
        }
    }
}

fn settings(interface: Node<'_, '_>, name: &str, import: &mut Import) {
    for (element, why) in [
        (
            "vlan",
            "tags belong to the bridge: make one on the VLAN, on both hosts",
        ),
        (
            "mtu",
            "Dunlin's cards carry frames of 1500 bytes: set no larger MTU in the guest",
        ),
        ("bandwidth", "use tc on the TAP or the bridge"),
        ("filterref", "use nftables on the bridge"),
        ("portOptions", "use the bridge's own"),
        ("rom", "a VM does not boot from the network"),
        ("boot", "a VM does not boot from the network"),
        ("ip", "the guest sets its addresses itself"),
        ("route", "the guest sets its routes itself"),
        ("backend", "Dunlin carries the frames itself"),
        ("tune", "Dunlin carries the frames itself"),
        ("coalesce", "Dunlin carries the frames itself"),
        ("teaming", "there is no card of the host to team with"),
    ] {
        if child(interface, element).is_some() {
            import.leave_out(format_args!("{name}: {element}"), why);
        }
    }
    if child(interface, "driver").is_some() {
        import.leave_out(
            format_args!("{name}: driver"),
            "Dunlin carries the frames itself, in one queue",
        );
    }
    if attribute(interface, "link", "state") == Some("down") {
        import.leave_out(format_args!("{name}: link down"), "its link is up");
    }
}

/// All devices that are neither disks nor network cards.
pub fn devices(devices: Node<'_, '_>, import: &mut Import) {
    let mut controllers = BTreeSet::new();
    let mut has_addresses = false;
    for device in devices.children().filter(Node::is_element) {
        let name = device.tag_name().name();
        match name {
            "disk" | "interface" => has_addresses |= child(device, "address").is_some(),
            "controller" => {
                controllers.insert(shown(device.attribute("type").unwrap_or("of no type")));
            }
            // The first serial port is kept in memory, and in vm.serial_log.
            "serial" | "console" if is_first_serial(device) => {}
            "serial" | "console" => import.leave_out(
                format_args!(
                    "{name} of type {}",
                    shown(device.attribute("type").unwrap_or("none"))
                ),
                "there is one serial port, whose words are kept: vm.serial_log",
            ),
            "input" if device.attribute("bus") == Some("ps2") => {}
            "input" => import.leave_out(
                format_args!("input {}", shown(device.attribute("type").unwrap_or("none"))),
                "there is no screen to point at",
            ),
            "memballoon" | "video" | "audio" | "watchdog" | "iommu"
                if device.attribute("model").or(device.attribute("type")) == Some("none") => {}
            "emulator" => emulator(device.text().unwrap_or_default().trim(), import),
            _ => {
                let why = DEVICES
                    .iter()
                    .find(|(known, _)| *known == name)
                    .map(|(_, why)| *why);
                let kind = ["model", "type", "mode"]
                    .iter()
                    .find_map(|key| device.attribute(*key));
                let what = match kind {
                    Some(kind) => format!("{} ({})", shown(name), shown(kind)),
                    None => shown(name),
                };
                import.leave_out(what, why.unwrap_or("there is nothing like it"));
            }
        }
    }
    if !controllers.is_empty() {
        let all: Vec<String> = controllers.into_iter().collect();
        let what = format!("controllers: {}", shown(&all.join(", ")));
        import.leave_out(what, "the machine has those that its disks and cards need");
    }
    if has_addresses {
        import.leave_out(
            "PCI addresses",
            "disks and cards are in other slots: names such as enp1s0 may change, so name cards by MAC and disks by UUID in the guest",
        );
    }
}

fn is_first_serial(device: Node<'_, '_>) -> bool {
    let first = attribute(device, "target", "port").is_none_or(|port| port == "0");
    let plain =
        attribute(device, "target", "type").is_none_or(|kind| kind.starts_with("isa") || kind == "serial");
    first && plain && device.attribute("type") == Some("pty") && child(device, "log").is_none()
}

fn emulator(path: &str, import: &mut Import) {
    let usual = ["/qemu-system-x86_64", "/kvm", "/qemu-kvm"]
        .iter()
        .any(|name| path.ends_with(name));
    if !usual {
        import.leave_out(
            format_args!("emulator {}", shown(path)),
            "the VM has qemu-system-x86_64 of the PATH; another one goes into vm.qemu",
        );
    }
}
