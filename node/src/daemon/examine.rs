//! What the hosts of a VM lack for it, before anything is started: `dunlin check VM.TOML`.
//!
//! **Decides**: what is missing, and what of two hosts has to be alike. **Flow**: a person asks one daemon ([`check`]) -> it asks each
//! host of the VM's group ([`report`]) -> [`compare`]. **Invariants**: 1. nothing is changed on any host, and nothing reserved or kept locked. 2. a host
//! that does not answer is something missing.
//! **Not here**: the findings on one host (`dunlin_guest::probe`), the start (`requests`), which asks again by itself.

use super::{Daemon, peers, program};
use crate::certificates;
use crate::config::{ConfigError, VmConfig};
use crate::heartbeats;
use crate::vm::disks;
use dunlin_api::{Answer, Request};
use dunlin_api::{Facts, Found, Report};
use dunlin_core::agreed::Part;
use dunlin_guest::disk::{self, DiskFormat};
use dunlin_guest::{Accel, FirmwareKind, probe};
use dunlin_program::guard::{self, Criu, Untracked};
use std::collections::BTreeSet;

/// Flags of a processor in one message.
const SHOWN_FLAGS: usize = 12;

/// Asks every host of the VM's group, and gives what they found to `each`.
pub fn check(daemon: &Daemon, text: &str, origin: &str, each: &mut dyn FnMut(Found)) -> Answer {
    let config = VmConfig::parse(text, origin, &daemon.host.cluster);
    let config = match config.and_then(|config| config.with_whole_paths(origin)) {
        Ok(config) => config,
        Err(error) => return Answer::refused(error.to_string()),
    };
    let mut facts = Vec::new();
    let hosts = config.group.iter().map(|host| host.name.as_str());
    for host in hosts.chain(config.standby_host()) {
        let answer = match host == daemon.host.name {
            true => self::answer(daemon, text),
            false => peers::ask(daemon, host, &Request::Examine { text: text.into() }),
        };
        match answer {
            Answer::Report(report) => {
                report.found.into_iter().for_each(&mut *each);
                facts.extend(report.facts.map(|facts| (host, facts)));
            }
            Answer::Failed { why, .. } => each(bad(
                host,
                format!("not looked at: {why}"),
                "start its daemon, and mend its link",
            )),
            _ => each(bad(
                host,
                "it answers something else".into(),
                "run the same dunlin version on all hosts",
            )),
        }
    }
    if let [one, others @ ..] = &facts[..] {
        let found = others.iter().flat_map(|other| compare(&config, one, other));
        found.for_each(each);
    }
    Answer::done("")
}

/// Why nothing is said of what this host lacks.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The VM's file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It needs nothing for the VM.
    #[error("host '{host}' has no part in VM '{vm}'")]
    NoPart {
        /// This host.
        host: String,
        /// The VM.
        vm: String,
    },
}

/// What was found on this host, as an answer.
pub(super) fn answer(daemon: &Daemon, text: &str) -> Answer {
    match report(daemon, text) {
        Ok(report) => Answer::Report(Box::new(report)),
        Err(why) => Answer::refused(why.to_string()),
    }
}

/// What this host lacks.
pub fn report(daemon: &Daemon, text: &str) -> Result<Report, ReportError> {
    let config = VmConfig::parse(text, "the VM's file", &daemon.host.cluster)?;
    let host = &daemon.host.name;
    let wanted = config.wanted_of(host);
    if wanted == Part::Gone {
        return Err(ReportError::NoPart {
            host: host.clone(),
            vm: config.name,
        });
    }
    let mut report = Report {
        host: host.clone(),
        ..Report::default()
    };
    report
        .found
        .extend(certificates::found(host, &daemon.keys.certificates()));
    let heartbeats = heartbeats::finding();
    report.found.push(note(host, heartbeats.what, heartbeats.mend));
    if wanted == Part::Witness {
        report
            .found
            .push(good(host, "witness: it agrees, and runs no copy".into()));
        return Ok(report);
    }
    if let Some(spec) = &config.program {
        let runs = daemon.vms().contains_key(&config.name);
        let found = program::findings(&config, spec, runs).into_iter();
        report
            .found
            .extend(found.map(|(what, mend)| match mend.is_empty() {
                true => good(host, what),
                false => bad(host, what, mend),
            }));
        match Criu::find() {
            Ok(_) => {
                report
                    .found
                    .push(good(host, "CRIU: a running program is copied with it".into()));
                report
                    .found
                    .push(written_pages(host, guard::tells_what_is_written()));
            }
            Err(error) => {
                let mend = "without it a program that has lost its second copy gets none while it runs";
                report.found.push(note(host, error.to_string(), mend));
            }
        }
        return Ok(report);
    }
    let held_bytes = daemon.host.held_memory.bytes();
    report.found.extend(
        probe::host(&config.spec, held_bytes)
            .into_iter()
            .map(|found| Found {
                host: host.clone(),
                ok: found.ok,
                what: found.what,
                mend: found.mend,
            }),
    );
    let runs_here = daemon.vms().contains_key(&config.name);
    if runs_here {
        let what = format!(
            "VM '{}' is on this host already: its disks are in use, and its memory is taken",
            config.name
        );
        report.found.push(note(host, what, "'dunlin down' ends it"));
    } else {
        report.found.extend(unusable_images(daemon, &config));
        report.found.extend(memory(host, &config));
    }
    let (cpu_vendor, cpu_flags) = processor(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    report.facts = Some(Facts {
        qemu: probe::qemu_version(&config.spec).ok(),
        kvm: probe::accelerator(&config.spec)
            .ok()
            .map(|accel| accel == Accel::Kvm),
        cpu_vendor,
        cpu_flags,
        disk_bytes: config
            .spec
            .disks
            .iter()
            .map(|disk| disk::size_bytes(&disk.path, disk.format).ok())
            .collect(),
    });
    Ok(report)
}

/// How long a program stands still for a copy hangs on it; it is copied in any case.
fn written_pages(host: &str, told: Result<(), Untracked>) -> Found {
    match told {
        Ok(()) => good(
            host,
            "written pages: the kernel tells them, so a copy takes little while the program stands still"
                .into(),
        ),
        Err(why) => note(
            host,
            format!("written pages: {why}"),
            "without that all of its memory is compared while it stands still for a copy, 0.4 to 1 ms a MiB",
        ),
    }
}

fn good(host: &str, what: String) -> Found {
    note(host, what, "")
}

fn note(host: &str, what: String, mend: impl Into<String>) -> Found {
    Found {
        ok: true,
        ..bad(host, what, mend)
    }
}

fn bad(host: &str, what: String, mend: impl Into<String>) -> Found {
    Found {
        host: host.to_owned(),
        ok: false,
        what,
        mend: mend.into(),
    }
}

/// Images that are there (else the probe has said so) and cannot be used.
fn unusable_images(daemon: &Daemon, config: &VmConfig) -> Vec<Found> {
    let variables = disks::variables(&daemon.host.state, &config.name);
    let variables = (config.spec.firmware == FirmwareKind::Uefi && variables.exists())
        .then_some((&variables, DiskFormat::Raw));
    let images = config.spec.disks.iter().map(|disk| (&disk.path, disk.format));
    images
        .chain(variables)
        .filter(|(path, _)| path.exists())
        .filter_map(|(path, format)| disk::check(path, format).err())
        .map(|why| {
            bad(
                &daemon.host.name,
                format!("disk: {why}"),
                "mend it, or correct the VM's file",
            )
        })
        .collect()
}

/// A copy takes its guest's memory at once; what its queues and buffers may take at the worst comes beside it.
fn memory(host: &str, config: &VmConfig) -> Option<Found> {
    let mib = 1 << 20;
    let queues =
        2 * config.memory.log_mib * mib + config.memory.inbound_bytes() + config.memory.outbound_bytes();
    // The primary copies at most four times as much aside as a backup stages.
    let syncs = 4 * config.sync.staging_mib * mib;
    let disks = config.disks.limits.most_bytes * config.spec.images() as u64;
    let needed = probe::memory_needed_bytes(&config.spec);
    let most = needed + (queues + syncs) as u64 + disks;
    let available = probe::memory_available_bytes();
    let is_short = config.policy.is_replicated() && available >= needed && available < most;
    is_short.then(|| {
        let what = format!(
            "memory at the worst: {} MiB available, a copy with full queues, syncs and disks' buffers takes {} MiB",
            available >> 20,
            most >> 20
        );
        note(host, what, "free memory, or lower sync.staging_mib, disk_memory_mib or the [memory] table")
    })
}

/// A processor's maker and flags, as /proc/cpuinfo has them.
fn processor(cpuinfo: &str) -> (String, BTreeSet<String>) {
    let value = |key: &str| {
        let line = cpuinfo
            .lines()
            .find(|line| line.split(':').next().is_some_and(|name| name.trim() == key));
        line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
            .unwrap_or_default()
    };
    let flags = value("flags").split_whitespace().map(str::to_owned).collect();
    (value("vendor_id"), flags)
}

/// What of two hosts does not fit together.
fn compare(config: &VmConfig, one: &(&str, Facts), other: &(&str, Facts)) -> Vec<Found> {
    let ((a, one), (b, other)) = (one, other);
    let mut found = Vec::new();
    if let (Some(here), Some(there)) = (&one.qemu, &other.qemu) {
        found.push(match here == there {
            true => good("", format!("QEMU: the same on hosts {a} and {b}")),
            false => bad(
                "",
                format!("QEMU: {here} on host {a}, {there} on host {b}"),
                "install the same on both",
            ),
        });
    }
    for (number, disk) in config.spec.disks.iter().enumerate() {
        let size = |facts: &Facts| facts.disk_bytes.get(number).copied().flatten();
        if let (Some(here), Some(there)) = (size(one), size(other)) {
            let path = disk.path.display();
            found.push(match here == there {
                true => good("", format!("disk {path}: {here} bytes on both hosts")),
                false => bad(
                    "",
                    format!("disk {path}: {here} bytes on host {a}, {there} bytes on host {b}"),
                    "make them equal ('qemu-img resize'); the backup's is overwritten by the primary's",
                ),
            });
        }
    }
    match (one.kvm, other.kvm) {
        (Some(true), Some(true)) => found.push(processors(config, (a, one), (b, other))),
        (Some(here), Some(there)) if here != there => {
            let (with, without) = if here { (a, b) } else { (b, a) };
            found.push(bad(
                "",
                format!("acceleration: KVM on host {with}, TCG on host {without}"),
                "give both KVM, or set vm.accel = \"tcg\"",
            ));
        }
        _ => {}
    }
    found
}

fn processors(config: &VmConfig, (a, one): (&str, &Facts), (b, other): (&str, &Facts)) -> Found {
    let only = |host: &str, has: &Facts, lacks: &Facts| {
        let flags: Vec<&str> = has
            .cpu_flags
            .difference(&lacks.cpu_flags)
            .map(String::as_str)
            .collect();
        (!flags.is_empty()).then(|| {
            let more = match flags.len().saturating_sub(SHOWN_FLAGS) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let shown = &flags[..flags.len().min(SHOWN_FLAGS)];
            format!("only host {host} has {}{more}", shown.join(", "))
        })
    };
    let mut differences: Vec<String> = [only(a, one, other), only(b, other, one)]
        .into_iter()
        .flatten()
        .collect();
    if one.cpu_vendor != other.cpu_vendor {
        differences.push(format!(
            "host {a} is {}, host {b} {}",
            one.cpu_vendor, other.cpu_vendor
        ));
    }
    let model = config.spec.cpu.as_deref().unwrap_or("host");
    let model = model.split(',').next().unwrap_or_default();
    match (differences.is_empty(), matches!(model, "host" | "max")) {
        (true, _) => good("", format!("CPU: hosts {a} and {b} have the same flags")),
        (false, true) => bad(
            "",
            format!(
                "CPU: {}, and the VM would see the host's own ({model})",
                differences.join("; ")
            ),
            "name a model in vm.cpu that both have, such as x86-64-v2-AES ('qemu-system-x86_64 -cpu help')",
        ),
        (false, false) => note(
            "",
            format!("CPU: {}", differences.join("; ")),
            format!("see that both can give a guest all of {model}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cluster;

    fn config(cpu: &str) -> VmConfig {
        let cluster = Cluster::parse(
            "name = 't'\nid = '00112233445566778899aabbccddeeff'\nhosts = [{ name = 'a', address = '10.0.0.1:7700' }, \
             { name = 'b', address = '10.0.0.2:7700' }, { name = 'c', address = '10.0.0.3:7700' }]",
            "cluster.toml",
        )
        .expect("a cluster");
        let text = format!(
            "name = 'v'\nmembers = ['a', 'b']\nwitness = 'c'\n[vm]\nmemory_mib = 64\n{cpu}\ndisks = [{{ path = '/srv/v.img' }}]"
        );
        VmConfig::parse(&text, "v.toml", &cluster).expect("a VM")
    }

    fn facts() -> Facts {
        Facts {
            qemu: Some("7.2".into()),
            kvm: Some(true),
            cpu_vendor: "GenuineIntel".into(),
            cpu_flags: ["sse2", "avx2"].map(str::to_owned).into(),
            disk_bytes: vec![Some(4096)],
        }
    }

    fn compared(cpu: &str, change: fn(&mut Facts)) -> Vec<Found> {
        let mut other = facts();
        change(&mut other);
        compare(&config(cpu), &("a", facts()), &("b", other))
    }

    #[test]
    fn one_line_says_whether_the_kernel_tells_written_pages() {
        let told = written_pages("a", Ok(()));
        assert!(told.ok && told.mend.is_empty(), "{told:?}");
        let release = "6.12.43-amd64".to_owned();
        let not_told = written_pages("a", Err(Untracked::Old { release }));
        assert!(not_told.ok, "nothing is missing for it to run: {not_told:?}");
        assert!(
            not_told.what.contains("6.12.43-amd64 does not tell") && not_told.mend.contains("1 ms a MiB"),
            "{not_told:?}"
        );
    }

    #[test]
    fn hosts_that_are_alike_lack_nothing() {
        let found = compared("", |_| {});
        assert_eq!(found.len(), 3, "QEMU, a disk, the processor: {found:?}");
        assert!(
            found.iter().all(|found| found.ok && found.mend.is_empty()),
            "{found:?}"
        );
    }

    #[test]
    fn what_differs_is_missing_and_says_on_which_host() {
        type Case = (&'static str, fn(&mut Facts), &'static str);
        let cases: [Case; 6] = [
            (
                "",
                |b| b.qemu = Some("8.2".into()),
                "QEMU: 7.2 on host a, 8.2 on host b",
            ),
            (
                "",
                |b| b.disk_bytes = vec![Some(8192)],
                "4096 bytes on host a, 8192 bytes on host b",
            ),
            ("", |b| b.kvm = Some(false), "KVM on host a, TCG on host b"),
            (
                "",
                |b| b.cpu_flags = ["sse2".to_owned()].into(),
                "only host a has avx2",
            ),
            (
                "cpu = 'host,-vmx'",
                |b| b.cpu_flags.extend(["avx512f".to_owned()]),
                "only host b has avx512f",
            ),
            (
                "",
                |b| b.cpu_vendor = "AuthenticAMD".into(),
                "host a is GenuineIntel, host b AuthenticAMD",
            ),
        ];
        for (cpu, change, words) in cases {
            let found = compared(cpu, change);
            let missing: Vec<&Found> = found.iter().filter(|found| !found.ok).collect();
            assert!(
                missing.len() == 1 && missing[0].what.contains(words) && !missing[0].mend.is_empty(),
                "{words}: {found:?}"
            );
        }
    }

    #[test]
    fn other_flags_do_not_matter_to_a_model_that_is_named_or_to_a_translator() {
        let found = compared("cpu = 'x86-64-v2-AES'", |b| b.cpu_flags.clear());
        assert!(found.iter().all(|found| found.ok), "{found:?}");
        assert!(
            found.iter().any(|found| found.mend.contains("x86-64-v2-AES")),
            "{found:?}"
        );
        let mut translated = facts();
        translated.kvm = Some(false);
        let other = Facts {
            cpu_flags: BTreeSet::new(),
            ..translated.clone()
        };
        let found = compare(&config(""), &("a", translated), &("b", other));
        assert!(
            found
                .iter()
                .all(|found| found.ok && !found.what.starts_with("CPU")),
            "{found:?}"
        );
    }

    #[test]
    fn a_processor_is_read_as_linux_describes_it() {
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2\nvmx flags\t: ept\n\nprocessor\t: 1\nflags\t\t: other\n";
        let (vendor, flags) = processor(text);
        assert_eq!(vendor, "AuthenticAMD");
        assert_eq!(flags, ["fpu", "sse2"].map(str::to_owned).into());
    }
}
