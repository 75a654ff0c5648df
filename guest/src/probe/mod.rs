//! Can this host run the VM? For `dunlin check`, before anything starts.
//!
//! Decides:    what is missing and how it is mended.
//! Flow:       `dunlin check` and `up` -> [`host`] -> [`Finding`]s.
//! Invariants: 1. what can be tried is tried, not inferred from a version: PAGEMAP_SCAN tracks a page, a throw-away QEMU runs
//!             as the real one will (user, filter, preload object) and is asked for its capabilities; 2. nothing of the
//!             host is changed.
//! Source:     stock-qemu.md; vm-loop.md pitfalls.
//! Not here:   the cluster: addresses, keys, other hosts (node).

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value;

use crate::memory::{MemoryError, track};
use crate::qemu::accel::NoAccel;
use crate::qemu::launch::{Launched, launch, open_userfaultfd};
use crate::qemu::{accel, command, executable, spawn};
use crate::spec::{Accel, FirmwareKind, Machine, VmSpec};
use crate::uefi;

/// The oldest QEMU with `-netdev stream`.
const OLDEST_QEMU: (u32, u32) = (7, 2);
const CAP_NET_ADMIN: u32 = 12;

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The thing, in a word or two.
    pub topic: &'static str,
    /// The VM can start as far as this goes.
    pub ok: bool,
    /// The topic and what was found, as one line.
    pub what: String,
    /// What to do about it; empty when there is nothing to do. Where the VM can start all the same: what it costs, and what would
    /// be better.
    pub mend: String,
}

impl Finding {
    fn good(topic: &'static str, found: impl std::fmt::Display) -> Finding {
        Finding {
            topic,
            ok: true,
            what: format!("{topic}: {found}"),
            mend: String::new(),
        }
    }

    fn note(topic: &'static str, found: impl std::fmt::Display, mend: impl Into<String>) -> Finding {
        Finding {
            ok: true,
            ..Finding::bad(topic, found, mend)
        }
    }

    fn bad(topic: &'static str, found: impl std::fmt::Display, mend: impl Into<String>) -> Finding {
        Finding {
            topic,
            ok: false,
            what: format!("{topic}: {found}"),
            mend: mend.into(),
        }
    }
}

/// Looks at everything `spec` needs on this host. Takes about 0.2 s. A spec without a name is no VM in particular: what
/// it would boot is not looked at. `held_bytes` of this host's memory are the VM's for the asking.
pub fn host(spec: &VmSpec, held_bytes: u64) -> Vec<Finding> {
    let mut findings = vec![];
    if let (false, Err(error)) = (spec.name.is_empty(), spec.validate()) {
        findings.push(Finding::bad("settings", error, "correct the VM's file"));
    }
    findings.push(tracking());
    findings.extend(qemu(spec));
    findings.push(acceleration(spec));
    findings.push(memory(spec, held_bytes));
    findings.extend(network(spec));
    findings.extend(files(spec));
    if spec.firmware == FirmwareKind::Uefi {
        findings.push(
            match uefi::code().and_then(|code| uefi::variables().map(|_| code)) {
                Ok(code) => Finding::good("UEFI", code.display().to_string()),
                Err(why) => Finding::bad("UEFI", why, uefi::INSTALL),
            },
        );
    }
    findings
}

/// The version of the QEMU that `spec` would run, as [`crate::Qemu::version`] gives it; an error says how to mend it.
/// State is only loaded between equal versions.
pub fn qemu_version(spec: &VmSpec) -> Result<String, NoQemu> {
    let launched = throw_away(spec).map_err(NoQemu)?.0;
    Ok(launched.version)
}

/// Why QEMU does not run on this host, and how to mend it.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}", .0.what, .0.mend)]
pub struct NoQemu(pub Finding);

/// Writes a page of a small shared file and looks whether exactly that one is reported.
fn tracking() -> Finding {
    const WHAT: &str = "dirty tracking";
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let device = match open_userfaultfd() {
        Ok(device) => device,
        Err(why) => return Finding::bad(WHAT, why, "run the daemon as root"),
    };
    match try_tracking(&device) {
        Ok(pages) if pages == [3] => Finding::good(
            WHAT,
            format!("userfaultfd and PAGEMAP_SCAN work (Linux {release})"),
        ),
        Ok(pages) => Finding::bad(
            WHAT,
            format!("page 3 was written and {pages:?} were reported on Linux {release}"),
            "report this: the kernel's dirty tracking is wrong",
        ),
        Err(error) => Finding::bad(
            WHAT,
            format!("Linux {release} cannot track a shared file: {error}"),
            "needs Linux 6.7 or newer with CONFIG_USERFAULTFD and CONFIG_PTE_MARKER_UFFD_WP (Debian 12: the kernel of \
             bookworm-backports; Debian 13's own)",
        ),
    }
}

fn try_tracking(device: &File) -> Result<Vec<u64>, MemoryError> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    const PAGES: usize = 8;
    const PAGE: usize = crate::PAGE_BYTES;
    let file = crate::sys::memfd("dunlin-probe")?;
    file.set_len((PAGES * PAGE) as u64)?;
    // SAFETY: USERFAULTFD_IOC_NEW, _IO(0xAA, 0), takes flags and answers a descriptor.
    let uffd = match unsafe { libc::ioctl(device.as_raw_fd(), 0xAA00, libc::O_CLOEXEC | libc::O_NONBLOCK) } {
        -1 => return Err(MemoryError::Tracking(std::io::Error::last_os_error())),
        // SAFETY: a fresh descriptor of ours.
        fd => unsafe { OwnedFd::from_raw_fd(fd) },
    };
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping, unmapped below.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            PAGES * PAGE,
            protection,
            MapFlags::SHARED,
            &file,
            0,
        )
    }
    .map_err(std::io::Error::from)?;
    let attempt = || {
        let start = base as u64;
        let tracker = track::Tracker::new(
            std::process::id(),
            uffd,
            vec![(start..start + (PAGES * PAGE) as u64, 0)],
        )?;
        tracker.scan(|_| ())?;
        // SAFETY: inside the mapping.
        unsafe { base.cast::<u8>().add(3 * PAGE).write_volatile(1) };
        let mut pages = vec![];
        tracker.scan(|r| pages.extend(r.start / PAGE as u64..r.end / PAGE as u64))?;
        Ok(pages)
    };
    let result = attempt().map_err(MemoryError::Tracking);
    // SAFETY: the mapping made above.
    let _ = unsafe { munmap(base, PAGES * PAGE) };
    result
}

/// Runs a QEMU without a machine, as the real one will run; it ends when dropped.
fn throw_away(spec: &VmSpec) -> Result<(Launched, String), Finding> {
    let binary = executable(spec).map_err(|e| Finding::bad("QEMU", e, "apt-get install qemu-system-x86"))?;
    let user = spawn::choose_user(spec.run_as.as_deref())
        .map_err(|why| Finding::bad("QEMU's user", why, "set vm.run_as to an ordinary user"))?;
    let as_user = user
        .as_ref()
        .map_or("the daemon's user".to_owned(), |u| format!("user {}", u.name));
    let arguments = |qmp| command::throw_away(spec.sandbox, qmp);
    let launched = launch(&binary, user, None, None, vec![], arguments, ()).map_err(|error| {
        Finding::bad(
            "QEMU",
            format!("{} as {as_user}: {error}", binary.display()),
            "install a stock QEMU 7.2 or newer; if its system call filter is the cause, set vm.sandbox = false",
        )
    })?;
    Ok((launched, as_user))
}

fn qemu(spec: &VmSpec) -> Vec<Finding> {
    match throw_away(spec) {
        Ok((launched, as_user)) => ask(spec, &launched, &as_user),
        Err(finding) => vec![finding],
    }
}

fn ask(spec: &VmSpec, launched: &Launched, as_user: &str) -> Vec<Finding> {
    let mut findings = vec![];
    let number = |text: Option<&str>| text.and_then(|t| t.parse().ok()).unwrap_or(0);
    let mut parts = launched.version.split(['.', ' ']);
    let version: (u32, u32) = (number(parts.next()), number(parts.next()));
    let newer = "install QEMU 7.2 or newer (Debian 12 and 13 have it)";
    findings.push(match version >= OLDEST_QEMU {
        true => Finding::good("QEMU", format!("{} runs as {as_user}", launched.version)),
        false => Finding::bad("QEMU", format!("{} is too old", launched.version), newer),
    });
    if let Err(error) = track::enable_api(launched.uffd.as_fd()) {
        findings.push(Finding::bad(
            "userfaultfd of QEMU",
            format!("lacks features: {error}"),
            "needs Linux 6.7 or newer",
        ));
    }
    let names = |command: &str, field: &str| -> HashSet<String> {
        let answer = launched.qmp.execute(command, Value::Null).unwrap_or_default();
        let entries = answer.as_array().cloned().unwrap_or_default();
        entries
            .iter()
            .filter_map(|e| e[field].as_str().map(str::to_owned))
            .collect()
    };
    let mut missing = vec![];
    let capabilities = names("query-migrate-capabilities", "capability");
    missing.extend(
        ["x-colo", "x-ignore-shared"]
            .into_iter()
            .filter(|c| !capabilities.contains(*c)),
    );
    let commands = names("query-commands", "name");
    let needed = [
        "xen-save-devices-state",
        "x-colo-lost-heartbeat",
        "migrate-incoming",
        "query-cpus-fast",
    ];
    missing.extend(needed.into_iter().filter(|c| !commands.contains(*c)));
    findings.push(match missing.is_empty() {
        true => Finding::good("COLO", "the backup's protocol and device state commands are there"),
        false => Finding::bad(
            "COLO",
            format!("this QEMU lacks {}", missing.join(", ")),
            "it was built without replication: use the distribution's QEMU, or build it with --enable-replication",
        ),
    });
    let wanted = match spec.machine {
        Machine::Pc => "pc",
        Machine::Q35 => "q35",
        Machine::Microvm => "microvm",
    };
    let machines: HashSet<String> = names("query-machines", "name")
        .union(&names("query-machines", "alias"))
        .cloned()
        .collect();
    if !machines.contains(wanted) {
        let found = format!("this QEMU has no machine {wanted}");
        findings.push(Finding::bad(
            "machine",
            found,
            "set vm.machine to pc, or use another QEMU",
        ));
    }
    findings
}

fn acceleration(spec: &VmSpec) -> Finding {
    const WHAT: &str = "acceleration";
    // Whether there is such a user is the finding on QEMU itself.
    let user = spawn::choose_user(spec.run_as.as_deref()).ok().flatten();
    match accel::choose(spec.accel, user.as_ref()) {
        Ok((Accel::Kvm, _)) => Finding::good(WHAT, "KVM"),
        Ok((_, None)) => Finding::good(WHAT, "TCG, as the VM's file says"),
        Ok((_, Some(why))) => Finding::note(
            WHAT,
            why,
            "switch virtualisation on in the firmware where the CPU shows neither vmx nor svm (nested virtualisation, where this host is \
             a VM), or say vm.accel = \"tcg\"",
        ),
        Err(why) => Finding::bad(WHAT, why, "set vm.accel = \"auto\" to fall back to TCG"),
    }
}

/// How the VM's instructions would be run on this host.
///
/// # Errors
/// One line: what is asked for is not there.
pub fn accelerator(spec: &VmSpec) -> Result<Accel, NoAccel> {
    let user = spawn::choose_user(spec.run_as.as_deref()).ok().flatten();
    accel::choose(spec.accel, user.as_ref()).map(|(accel, _)| accel)
}

/// Whether a VM that asks for KVM, and names no user of its own, gets it on this host now.
pub fn has_kvm() -> bool {
    // A host is asked how it is every second, and users may be looked up over a network.
    static USER: OnceLock<Option<spawn::User>> = OnceLock::new();
    let user = USER.get_or_init(|| spawn::choose_user(None).ok().flatten());
    accel::opens_for(user.as_ref()).is_ok()
}

fn meminfo_kib(key: &str) -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// What this host, and this process' control group, could still give.
pub fn memory_available_bytes() -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let group = read("/proc/self/cgroup")
        .lines()
        .find_map(|l| l.strip_prefix("0::").map(str::to_owned));
    let group = format!("/sys/fs/cgroup{}", group.unwrap_or_default());
    let bytes = |file: &str| read(&format!("{group}/{file}")).trim().parse::<u64>().ok();
    let in_group = bytes("memory.max").map(|max| max.saturating_sub(bytes("memory.current").unwrap_or(0)));
    in_group
        .unwrap_or(u64::MAX)
        .min(meminfo_kib("MemAvailable:") << 10)
}

/// What a VM's copy takes of a host's memory beside its disks' and queues': guest RAM, and QEMU itself.
pub fn memory_needed_bytes(spec: &VmSpec) -> u64 {
    let guest_bytes = spec.memory_bytes();
    guest_bytes + guest_bytes / 16 + (64 << 20) // QEMU itself, bitmaps, staging
}

/// Guest RAM is a memfd: bounded by free memory and this cgroup's limit (not by the size of /dev/shm).
fn memory(spec: &VmSpec, held_bytes: u64) -> Finding {
    const WHAT: &str = "memory";
    let needed = memory_needed_bytes(spec);
    // QEMU's translator keeps what it has translated: up to an eighth of the host's memory, and 1 GiB at most.
    let translates = accelerator(spec).is_ok_and(|accel| accel != Accel::Kvm);
    let translated = match translates {
        true => (meminfo_kib("MemTotal:") << 10).div_euclid(8).min(1 << 30),
        false => 0,
    };
    let available = memory_available_bytes() + held_bytes;
    let found = format!("{} MiB available, {} MiB needed", available >> 20, needed >> 20);
    match available >= needed {
        true if translated > 0 => {
            let found = format!(
                "{found}, and up to {} MiB more for TCG's translations",
                translated >> 20
            );
            match available >= needed + translated {
                true => Finding::good(WHAT, found),
                false => Finding::note(
                    WHAT,
                    found,
                    "a guest that runs much code may not fit; free memory",
                ),
            }
        }
        true => Finding::good(WHAT, found),
        false if spec.memory_overcommit => Finding::note(
            WHAT,
            found,
            "a guest that uses all of its memory is killed by this host's kernel (vm.memory_overcommit allows that)",
        ),
        false => Finding::bad(
            WHAT,
            found,
            "free memory, set vm.memory_overcommit if the guest will not use all of it, raise the cgroup's memory.max, or lower vm.memory_mib",
        ),
    }
}

/// Whether cards can be made here: TAPs, and the bridges that they join.
pub fn network(spec: &VmSpec) -> Vec<Finding> {
    const WHAT: &str = "network";
    if spec.nics.is_empty() {
        return vec![];
    }
    if let Err(error) = File::options().read(true).write(true).open("/dev/net/tun") {
        let found = format!("/dev/net/tun: {error}");
        return vec![Finding::bad(
            WHAT,
            found,
            "modprobe tun, and run the daemon as root",
        )];
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let capabilities = capabilities
        .and_then(|c| u64::from_str_radix(c.trim(), 16).ok())
        .unwrap_or(0);
    if capabilities >> CAP_NET_ADMIN & 1 == 0 {
        let mend = "run the daemon as root or give it CAP_NET_ADMIN";
        return vec![Finding::bad(WHAT, "no right to make a TAP", mend)];
    }
    let mut findings = vec![Finding::good(WHAT, "TAP devices can be made")];
    for bridge in spec.nics.iter().filter_map(|n| n.bridge.as_deref()) {
        if rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::DGRAM,
            None,
        )
        .and_then(|socket| rustix::net::netdevice::name_to_index(&socket, bridge))
        .is_err()
        {
            let mend = format!(
                "ip link add {bridge} type bridge forward_delay 0 && ip link set {bridge} up, and put this host's card into it: docs/networks.md"
            );
            findings.push(Finding::bad(
                "bridge",
                format!("there is no interface {bridge:?} here"),
                mend,
            ));
        }
    }
    findings
}

fn files(spec: &VmSpec) -> Vec<Finding> {
    let mut findings = vec![];
    let mut look = |what, path: &Path, write: bool| {
        match File::options().read(true).write(write).open(path) {
            Ok(_) => findings.push(Finding::good(what, path.display().to_string())),
            Err(e) => findings.push(Finding::bad(
                what,
                format!("{}: {e}", path.display()),
                "correct the path in the VM's file, or give the daemon the right to open it (as a service it neither writes below /home, /root and /usr nor sees /tmp: use \
                 /srv/vm)",
            )),
        };
    };
    spec.kernel.iter().for_each(|p| look("kernel", p, false));
    spec.initrd.iter().for_each(|p| look("initrd", p, false));
    spec.disks.iter().for_each(|d| look("disk", &d.path, true));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad(spec: &VmSpec) -> Vec<&'static str> {
        host(spec, 0)
            .into_iter()
            .filter(|f| !f.ok)
            .map(|f| f.topic)
            .collect()
    }

    #[test]
    fn each_thing_that_is_missing_is_found_and_has_a_remedy() {
        let good = VmSpec {
            kernel: Some("/proc/self/exe".into()),
            accel: Accel::Tcg,
            ..VmSpec::new("v", 64)
        };
        let findings = host(&good, 0);
        findings
            .iter()
            .for_each(|f| println!("{} {} {}", f.ok, f.what, f.mend));
        assert!(findings.iter().all(|f| f.ok), "this machine cannot run the tests");

        let wrong = |change: fn(&mut VmSpec)| {
            let mut spec = good.clone();
            change(&mut spec);
            assert!(host(&spec, 0).iter().all(|f| f.ok || !f.mend.is_empty()));
            bad(&spec)
        };
        assert_eq!(wrong(|s| s.qemu = Some("/no/such/qemu".into())), ["QEMU"]);
        assert_eq!(wrong(|s| s.qemu = Some("/bin/true".into())), ["QEMU"]);
        assert_eq!(wrong(|s| s.run_as = Some("no-such-user".into())), ["QEMU's user"]);
        assert_eq!(wrong(|s| s.memory_mib = 4 << 20), ["memory"]);
        let mut large = good.clone();
        large.memory_mib = 4 << 20;
        let has_room = host(&large, 8 << 40).iter().all(|finding| finding.ok);
        assert!(has_room, "what is held is room");
        assert_eq!(wrong(|s| s.kernel = Some("/no/such/kernel".into())), ["kernel"]);
        assert_eq!(
            wrong(|s| s.disks = vec![crate::DiskSpec {
                path: "/no/disk".into(),
                format: Default::default(),
            }]),
            ["disk"]
        );
        assert_eq!(wrong(|s| s.vcpus = 0), ["settings"]);
        let nic = |s: &mut VmSpec| {
            let nic = crate::NicSpec {
                mac: "52:54:00:00:00:01".into(),
                bridge: Some("nobridge0".into()),
                tap: None,
                promiscuous: false,
            };
            s.nics.push(nic);
        };
        assert_eq!(wrong(nic), ["bridge"]);
    }

    #[test]
    fn a_vm_that_asks_for_kvm_gets_it_where_the_host_says_so() {
        let spec = VmSpec {
            accel: Accel::Kvm,
            ..VmSpec::new("v", 64)
        };
        assert_eq!(has_kvm(), accelerator(&spec).is_ok());
    }

    #[test]
    fn tracking_is_really_tried() {
        assert!(tracking().ok, "{:?}", tracking());
    }
}
