//! What a machine needs, in one place: Debian packages (each with its reason) and the guest image.

use std::process::Command;

use anyhow::{Context, Result, bail};
use dunlin_vmtest::{image, paths};

/// Packages that start a service where systemd runs; the tests start their own, so a service that came with them goes again.
const SERVICES: [(&str, &str); 2] = [("memcached", "memcached"), ("nginx-light", "nginx")];

/// Package, and what it is for.
const PACKAGES: [(&str, &str); 25] = [
    ("qemu-system-x86", "runs the VMs"),
    ("ovmf", "the UEFI of guests that have one"),
    ("qemu-utils", "qemu-img and qemu-io: the tests' disk images"),
    (
        "libnbd-bin",
        "nbdinfo and nbdcopy: the disk server is tested with tools that are not ours",
    ),
    (
        "redis-tools",
        "the guest's redis-server (redis-check-rdb is the same program) and redis-benchmark",
    ),
    (
        "busybox-static",
        "all that is in the small guest of the QEMU tests",
    ),
    (
        "fio",
        "writes through the disk server and reads back what it wrote",
    ),
    ("iproute2", "hosts as network namespaces, bridges and TAPs"),
    ("nftables", "cuts hosts off from each other in the tests"),
    ("e2fsprogs", "makes the guest's disks without mounting them"),
    ("syslinux", "the boot loader of guests that boot from a disk"),
    ("dosfstools", "the file system that it lies on"),
    ("mtools", "puts files there without mounting it"),
    ("systemd-boot-efi", "the boot loader of guests with a UEFI"),
    ("xz-utils", "unpacks the kernel modules of newer kernel packages"),
    (
        "gcc",
        "the linker that Rust calls, and the small object preloaded into QEMU",
    ),
    ("libc6-dev", "what gcc links with"),
    ("memcached", "a server with threads: the tests of bare programs"),
    (
        "nginx-light",
        "a server with processes: the tests of bare programs",
    ),
    (
        "openssl",
        "a certificate and a client of TLS: the tests of bare programs",
    ),
    ("curl", "a client of TLS: the tests of bare programs"),
    ("procps", "looks at processes in the tests"),
    (
        "python3",
        "a crowd of connections, and a program that tells its clocks, in the daemon's tests",
    ),
    (
        "golang-go",
        "builds what is in Go: k8s, and the checker of linearizability (vmtest/linearizability)",
    ),
    ("ca-certificates", "cargo fetches the libraries over TLS"),
];

/// Installs what is missing and builds the guest image.
///
/// # Errors
/// One line that says what to do by hand, where this cannot do it.
pub fn run() -> Result<()> {
    install(&PACKAGES)?;
    kernel_is_new_enough();
    promtool()?;
    crate::criu::ensure()?;
    image::ensure(&paths::guest_images(), &mut |line| println!("setup: {line}"))?;
    Ok(())
}

/// Prometheus' own checker of metrics and alarms, for the tests: its package is unpacked and not installed, since that would start a server.
fn promtool() -> Result<()> {
    let tools = paths::target().join("tools");
    if tools.join("usr/bin/promtool").exists() {
        return Ok(());
    }
    println!("setup: will unpack prometheus: promtool checks metrics and alarms");
    image::unpack("prometheus", &paths::guest_images(), &tools)
}

/// Builds the guest images of `names`, and fetches the clients.
///
/// # Errors
/// When a name is unknown or a package cannot be had.
pub fn services(names: &[String]) -> Result<()> {
    let mut say = |line: &str| println!("setup: {line}");
    let all = names.iter().any(|name| name == "all");
    let names: Vec<&str> = if all {
        image::SERVICES.iter().map(|service| service.name).collect()
    } else {
        names.iter().map(String::as_str).collect()
    };
    for name in &names {
        let image = image::ensure_service(image::service(name)?, &paths::guest_images(), &mut say)?;
        println!("setup: {name}: {}", image.initrd.display());
    }
    if !names.is_empty() {
        image::clients(&paths::guest_images(), &mut say)?;
    }
    Ok(())
}

/// Installs those of `packages` (name, and what it is for) that are missing.
///
/// # Errors
/// One line that says what to do by hand, where this cannot do it.
pub fn install(packages: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<(&str, &str)> = packages
        .iter()
        .copied()
        .filter(|(name, _)| !is_installed(name))
        .collect();
    let lists_are_there = Command::new("apt-cache")
        .args(["show", "linux-image-cloud-amd64"])
        .output()
        .is_ok_and(|output| output.status.success() && !output.stdout.is_empty());
    if missing.is_empty() && lists_are_there {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|&(name, _)| name).collect();
    let by_hand = format!("apt-get update && apt-get install {}", names.join(" "));
    if Command::new("apt-get").arg("--version").output().is_err() {
        bail!(
            "this machine has no apt-get; install what these Debian packages hold: {}",
            names.join(" ")
        );
    }
    for (name, why) in &missing {
        println!("setup: will install {name}: {why}");
    }
    let root = dunlin_vmtest::is_root();
    if !root && Command::new("sudo").args(["-n", "true"]).output().is_err() {
        bail!("not root, and sudo is not here: as root run '{by_hand}'");
    }
    apt(root, &["update"]).with_context(|| format!("as root run '{by_hand}'"))?;
    if !missing.is_empty() {
        let mut arguments = vec!["install", "-y", "--no-install-recommends"];
        arguments.extend(names);
        apt(root, &arguments).with_context(|| format!("as root run '{by_hand}'"))?;
        let came = |package: &str| missing.iter().any(|(name, _)| *name == package);
        for (_, service) in SERVICES.iter().filter(|(package, _)| came(package)) {
            stop_service(root, service);
        }
    }
    Ok(())
}

/// Where no systemd runs nothing was started.
fn stop_service(root: bool, service: &str) {
    if !std::path::Path::new("/run/systemd/system").exists() {
        return;
    }
    let (program, first): (&str, &[&str]) = if root {
        ("systemctl", &[])
    } else {
        ("sudo", &["systemctl"])
    };
    let stopped = Command::new(program)
        .args(first)
        .args(["disable", "--now", service])
        .status();
    if !stopped.is_ok_and(|status| status.success()) {
        println!(
            "setup: {service} came with a package and runs as a service: 'systemctl disable --now {service}' stops it"
        );
    }
}

fn is_installed(package: &str) -> bool {
    // Any Go does, and many have one of their own.
    let has_go = || Command::new("go").arg("version").output().is_ok();
    if package == "golang-go" && has_go() {
        return true;
    }
    let output = Command::new("dpkg-query")
        .args(["-W", "-f=${db:Status-Status}", package])
        .output();
    output.is_ok_and(|output| output.stdout == b"installed")
}

fn apt(root: bool, arguments: &[&str]) -> Result<()> {
    let mut command = if root {
        Command::new("env")
    } else {
        Command::new("sudo")
    };
    let status = command
        .args([
            "DEBIAN_FRONTEND=noninteractive",
            "apt-get",
            "-q",
            "-o",
            "DPkg::Lock::Timeout=300",
        ])
        .args(arguments)
        .stdout(std::process::Stdio::null())
        .status()
        .context("cannot run apt-get")?;
    if !status.success() {
        bail!("apt-get {} failed", arguments.join(" "));
    }
    Ok(())
}

/// A warning only: `dunlin check` is the judge, and what needs no VM works on any kernel.
fn kernel_is_new_enough() {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release
        .split(['.', '-'])
        .map(|part| part.trim().parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 7) {
        println!(
            "setup: this kernel is {}; protected VMs need Linux 6.7 (Debian 13, or 12 with 'apt install -t bookworm-backports linux-image-amd64' and a reboot)",
            release.trim()
        );
    }
}
