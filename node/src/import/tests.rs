use super::*;
use crate::config::{Cluster, VmConfig};
use dunlin_guest::{Accel, FirmwareKind, Machine};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

const UEFI: &str = include_str!("fixtures/virt-install-uefi.xml");
const KERNEL: &str = include_str!("fixtures/virt-install-direct-kernel.xml");
const PROXMOX: &str = include_str!("fixtures/proxmox-like.xml");

fn options() -> Options {
    Options {
        members: vec!["a".into(), "b".into()],
        witness: Some("c".into()),
        ..Options::default()
    }
}

/// What `dunlin up` makes of the text, in a cluster of a, b and c.
fn up(text: &str) -> VmConfig {
    let cluster = Cluster::parse(
        "name = 't'\nid = '00112233445566778899aabbccddeeff'\nhosts = [{ name = 'a', address = '10.0.0.1:7700' }, \
         { name = 'b', address = '10.0.0.2:7700' }, { name = 'c', address = '10.0.0.3:7700' }]",
        "cluster.toml",
    )
    .expect("a cluster");
    VmConfig::parse(text, "shop.toml", &cluster).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn says(lines: &[String], words: &[&str]) {
    for word in words {
        assert!(
            lines.iter().any(|line| line.contains(word)),
            "no line has {word:?}: {lines:#?}"
        );
    }
}

fn refused(xml: &str) -> Vec<String> {
    match domain(xml, &options()) {
        Err(ImportError::Refused(reasons)) => reasons,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_domain_of_virt_install_with_uefi_becomes_a_file_that_up_takes() {
    let imported = domain(UEFI, &options()).expect("it can be carried over");
    let vm = up(&imported.text());
    let names: Vec<&str> = vm.group.iter().map(|host| host.name.as_str()).collect();
    assert_eq!((vm.name.as_str(), names), ("shop", vec!["a", "b", "c"]));
    let spec = &vm.spec;
    assert_eq!((spec.memory_mib, spec.vcpus), (2048, 2));
    assert_eq!(
        (spec.machine, spec.firmware, spec.accel),
        (Machine::Q35, FirmwareKind::Uefi, Accel::Kvm)
    );
    assert_eq!(spec.cpu.as_deref(), Some("host"));
    let disks: Vec<_> = spec
        .disks
        .iter()
        .map(|disk| (disk.path.to_str(), disk.format))
        .collect();
    assert_eq!(
        disks,
        [
            (
                Some("/var/lib/libvirt/images/shop.qcow2"),
                dunlin_guest::disk::DiskFormat::Qcow2
            ),
            (Some("/dev/vg0/shop-data"), dunlin_guest::disk::DiskFormat::Raw)
        ]
    );
    let nics: Vec<_> = spec
        .nics
        .iter()
        .map(|nic| (nic.mac.as_str(), nic.bridge.as_deref(), nic.tap.as_deref()))
        .collect();
    assert_eq!(
        nics,
        [
            ("52:54:00:7a:01:02", Some("br0"), None),
            ("52:54:00:7a:01:03", None, None)
        ]
    );
    says(
        &imported.left_out,
        &[
            "hostdev",
            "filesystem",
            "graphics (spice)",
            "redirdev (spicevmc): there is no USB (2 times)",
            "disk sda (cdrom)",
            "memballoon",
            "rng (virtio)",
            "tpm",
            "channel (unix)",
            "libvirt's network 'default'",
            "--bridge",
            "input tablet",
            "watchdog",
            "uuid",
            "PCI addresses",
            "disk vda: cache, discard",
            "controllers: pci, sata, usb, virtio-serial",
            "machine pc-q35-7.2",
            "sound",
            "clock timers",
        ],
    );
    for silent in [
        "emulator", "serial", "console", "on_", "pm:", "secure", "name", "acpi",
    ] {
        assert!(
            !imported.left_out.iter().any(|line| line.starts_with(silent)),
            "{silent}: {:#?}",
            imported.left_out
        );
    }
    // Everything is in the file, too, for whoever reads it later.
    assert!(
        imported
            .left_out
            .iter()
            .all(|line| imported.text().contains(&format!("# - {line}\n")))
    );
}

#[test]
fn a_card_of_a_network_joins_the_bridge_that_is_named() {
    let options = Options {
        bridge: Some("br7".into()),
        ..options()
    };
    let imported = domain(UEFI, &options).expect("it can be carried over");
    assert_eq!(up(&imported.text()).spec.nics[1].bridge.as_deref(), Some("br7"));
}

#[test]
fn a_direct_kernel_boot_and_a_named_model_are_carried_over() {
    let imported = domain(KERNEL, &options()).expect("it can be carried over");
    let spec = up(&imported.text()).spec;
    assert_eq!(
        spec.kernel.as_deref(),
        Some(std::path::Path::new("/srv/boot/vmlinuz"))
    );
    assert_eq!(
        spec.initrd.as_deref(),
        Some(std::path::Path::new("/srv/boot/initrd.img"))
    );
    assert_eq!(spec.append.as_deref(), Some("console=ttyS0 root=/dev/vda1 quiet"));
    assert_eq!(spec.cpu.as_deref(), Some("qemu64,+x2apic,-svm"));
    assert_eq!(
        (spec.accel, spec.machine, spec.memory_mib),
        (Accel::Tcg, Machine::Pc, 512)
    );
    assert_eq!(imported.left_out.len(), 1, "{:#?}", imported.left_out);
    says(&imported.left_out, &["machine pc-i440fx-7.2"]);
}

#[test]
fn a_domain_as_proxmox_has_them_says_what_to_change_or_becomes_virtio() {
    let reasons = refused(PROXMOX);
    assert_eq!(reasons.len(), 3, "{reasons:#?}");
    says(
        &reasons,
        &[
            "disk sdb: it is on the bus scsi",
            "disk sda",
            "its model is e1000",
            "--virtio",
        ],
    );
    let options = Options {
        virtio: true,
        ..options()
    };
    let imported = domain(PROXMOX, &options).expect("it can be carried over as virtio");
    let vm = up(&imported.text());
    assert_eq!(vm.name, "web-100");
    assert_eq!((vm.spec.memory_mib, vm.spec.vcpus), (4096, 2));
    assert_eq!(vm.spec.cpu.as_deref(), Some("x86-64-v2-AES"));
    // The disk that it boots comes first.
    assert_eq!(vm.spec.disks[0].path.to_str(), Some("/dev/pve/vm-100-disk-0"));
    assert_eq!(vm.spec.nics[0].bridge.as_deref(), Some("vmbr0"));
    assert_eq!(vm.spec.nics[0].tap.as_deref(), Some("tap100i0"));
    says(
        &imported.left_out,
        &[
            "name web 100",
            "currentMemory of 2048 MiB",
            "up to 4 while it runs",
            "vcpu cpuset",
            "cputune",
            "maxMemory",
            "cpu topology",
            "clock localtime",
            "feature kvm",
            "vlan",
            "commandline",
            "disk sdb: bus scsi",
            "disk sdb: serial",
            "os bootmenu",
            "graphics (vnc)",
            "so it is its first disk",
        ],
    );
}

/// The direct-boot fixture with one thing exchanged.
fn with(from: &str, to: &str) -> String {
    let changed = KERNEL.replace(from, to);
    assert_ne!(changed, KERNEL, "{from} is not there");
    changed
}

#[test]
fn what_would_not_work_is_refused_in_one_line_that_says_what_to_do() {
    let source = "<source file='/srv/vm/probe.img'/>";
    let cases = [
        (
            with("type='raw'", "type='vmdk'"),
            "'qemu-img convert -p -O qcow2 /srv/vm/probe.img /srv/vm/probe.img.qcow2'",
        ),
        (with(source, ""), "no absolute path"),
        (with(source, "<source file='probe.img'/>"), "no absolute path"),
        (
            with(source, &format!("{source}<shareable/>")),
            "shared with other VMs",
        ),
        (with(source, &format!("{source}<readonly/>")), "read-only"),
        (
            with(
                source,
                "<source file='/srv/vm/probe.img'><encryption format='luks'/></source>",
            ),
            "encryption",
        ),
        (with("disk type='file'", "disk type='network'"), "on the network"),
        (with("disk type='file'", "disk type='volume'"), "virsh vol-path"),
        (with("device='disk'", "device='lun'"), "SCSI unit"),
        (with("arch='x86_64'", "arch='aarch64'"), "aarch64"),
        (with("pc-i440fx-7.2", "isapc"), "isapc"),
        (with("type='qemu'", "type='xen'"), "xen"),
        (
            with("<memory unit='MiB'>512", "<memory unit='furlong'>512"),
            "no size",
        ),
        (
            with(
                "<memory unit='MiB'>512",
                "<memory unit='TiB'>18446744073709551615",
            ),
            "no size",
        ),
        (
            with("<memory unit='MiB'>512", "<memory unit='MiB'>1"),
            "memory_mib",
        ),
        (with("<vcpu>1", "<vcpu>100"), "vcpus"),
        (with("<mac address='52:54:00:aa:bb:cc'/>", ""), "no MAC address"),
        (with("52:54:00:aa:bb:cc", "53:54:00:aa:bb:cc"), "unicast MAC"),
        (with("qemu64", "-qemu64"), "no model's name"),
        (
            with("<devices>", "<launchSecurity type='sev'/><devices>"),
            "encrypted",
        ),
        (
            with("bridge='virbr7'", "bridge='a-name-that-is-too-long'"),
            "no bridge's name",
        ),
    ];
    for (xml, words) in cases {
        let reasons = refused(&xml);
        assert_eq!(reasons.len(), 1, "{words}: {reasons:#?}");
        says(&reasons, &[words]);
    }
}

#[test]
fn memory_has_the_units_of_libvirt_and_is_rounded_up() {
    for (words, size) in [
        ("<memory>1048577</memory>", 1025),
        ("<memory unit='b'>536870912</memory>", 512),
        ("<memory unit='GiB'>2</memory>", 2048),
        ("<memory unit='GB'>1</memory>", 954),
        ("<memory unit='k'>65536</memory>", 64),
    ] {
        let xml = with("<memory unit='MiB'>512</memory>", words);
        assert_eq!(
            up(&domain(&xml, &options()).expect(words).text()).spec.memory_mib,
            size,
            "{words}"
        );
    }
}

#[test]
fn what_is_no_domain_is_one_line() {
    let bomb = "<!DOCTYPE d [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;'>]><domain>&b;</domain>";
    let many = format!("<domain>{}</domain>", "<a/>".repeat(MOST_NODES as usize + 1));
    let deep = "<a>".repeat(source::MOST_BYTES / 3);
    let closed = format!("{}{}", "<a>".repeat(30_000), "</a>".repeat(30_000));
    let wide = format!(
        "<domain {}/>",
        (0..20_000)
            .map(|number| format!("a{number}='' "))
            .collect::<String>()
    );
    let long = " ".repeat(source::MOST_BYTES + 1);
    for xml in [
        "",
        "\u{0}",
        "no XML",
        "<domainsnapshot/>",
        "<domain",
        bomb,
        &many,
        &deep,
        &closed,
        &long,
    ] {
        let Err(ImportError::NoDomain(why)) = domain(xml, &options()) else {
            panic!("taken: {}", shown(xml));
        };
        assert!(!why.contains('\n') && why.len() < 400, "{why:?}");
    }
    assert!(matches!(domain(&wide, &options()), Err(ImportError::Refused(_))));
}

/// Pieces of domains, right and wrong, put together in any way.
fn pieces() -> impl Strategy<Value = String> {
    let words: Vec<String> = [UEFI, KERNEL, PROXMOX]
        .iter()
        .flat_map(|xml| xml.split_inclusive(['>', ' ', '\n', '\'']))
        .map(str::to_owned)
        .collect();
    let values = prop_oneof![
        Just(String::from("18446744073709551616")),
        Just(String::from("-1")),
        Just(String::from("../../etc/passwd")),
        Just(String::from("&#10;&#27;[31m\"]]\n[vm]")),
        Just(String::from("\"\"\"")),
        "[ -~]{0,40}",
        "\\PC{0,12}",
    ];
    let piece = prop_oneof![4 => proptest::sample::select(words), 1 => values];
    proptest::collection::vec(piece, 0..200).prop_map(|pieces| pieces.concat())
}

/// A whole domain with a few things in it exchanged.
fn damaged() -> impl Strategy<Value = String> {
    let values = prop_oneof![
        Just(String::from("18446744073709551615")),
        Just(String::from("0")),
        Just(String::from("&#10;&#13;&#9;x&quot;\\\"")),
        Just(String::from("/srv/&#10;[vm]")),
        "[a-z0-9./:_-]{0,24}",
        "\\PC{0,12}".prop_map(|text| text.replace(['<', '&', '\'', '"'], "")),
    ];
    let changes = proptest::collection::vec((any::<proptest::sample::Index>(), values), 1..8);
    (proptest::sample::select(vec![UEFI, KERNEL, PROXMOX]), changes).prop_map(|(xml, changes)| {
        // What stands between two quotes of the same kind.
        let quote = if xml.contains("type=\"") { '"' } else { '\'' };
        let mut parts: Vec<String> = xml.split(quote).map(str::to_owned).collect();
        for (place, value) in changes {
            let values = parts.len() / 2;
            parts[2 * place.index(values) + 1] = value;
        }
        parts.join(&quote.to_string())
    })
}

#[test]
fn any_xml_gives_a_file_that_up_takes_or_lines_that_say_why_not() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 =
        seed.unwrap_or_else(|| u64::from_ne_bytes(dunlin_fabric::keys::random().expect("random numbers")));
    println!("repeat with SEED={seed}");
    let config = Config {
        cases: 2_000,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let any = (prop_oneof![pieces(), damaged()], any::<bool>());
    let taken = std::cell::Cell::new(0);
    let outcome = runner.run(&any, |(xml, virtio)| {
        let options = Options { virtio, ..options() };
        let lines = match domain(&xml, &options) {
            Ok(imported) => {
                taken.set(taken.get() + 1);
                up(&imported.text());
                imported.left_out
            }
            Err(ImportError::Refused(reasons)) => {
                prop_assert!(!reasons.is_empty());
                reasons
            }
            Err(ImportError::NoDomain(why)) => vec![why],
        };
        for line in lines {
            prop_assert!(
                !line.chars().any(char::is_control) && line.len() < 2_000,
                "{:?}",
                line
            );
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("SEED={seed}: {error}"));
    assert!(
        taken.get() > 100,
        "only {} domains were taken: mend the test",
        taken.get()
    );
}
