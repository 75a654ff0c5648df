//! What a request costs on each host, and between them: figures that hold on any machine, where shares of a starved one do not.
//!
//! * **Decides:** which thread's time counts as whose ([`group`]).
//! * **Flow:** [`Reading::take`] before and after a window -> [`Reading::until`]: the difference over all requests made meanwhile.
//! * **Invariants:** (1) nothing is asked of the hosts within the window; (2) of each host the groups add up to what its cgroup used:
//!   what no thread of now has (threads that ended) is in `rest`.
//! * **Source:** `/proc/PID/task/TID/schedstat`, `cpu.stat`, `/proc/net/dev` in each host's network.
//! * **Not here:** the system calls ([`super::syscalls`]).

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};

use super::standing::HOSTS;
use crate::testbed::{Node, Testbed};

/// Groups of threads, in the order of the tables.
pub const GROUPS: [&str; 8] = [
    "vcpu",
    "qemu-main",
    "qemu-rest",
    "loop",
    "sync-read",
    "keeper",
    "dunlin-rest",
    "rest",
];
/// Those of the daemon.
pub const DAEMON: [&str; 4] = ["loop", "sync-read", "keeper", "dunlin-rest"];

/// For one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cost {
    /// Microseconds of CPU: host -> group of threads.
    pub cpu_us: BTreeMap<String, BTreeMap<String, f64>>,
    /// Bytes that hosts sent to hosts.
    pub bytes_between: f64,
    /// Bytes that hosts sent to the client.
    pub bytes_to_client: f64,
}

impl Cost {
    /// Microseconds of these groups on a host.
    pub fn on(&self, host: &str, groups: &[&str]) -> f64 {
        let of_host = self.cpu_us.get(host).into_iter().flatten();
        of_host
            .filter(|(group, _)| groups.contains(&group.as_str()))
            .map(|(_, us)| us)
            .sum()
    }
}

/// The counters of all hosts at one moment.
pub struct Reading {
    hosts: Vec<Host>,
    /// Bytes that came to the client.
    to_client: u64,
    /// Of all cores: time that they worked, and time in all, in the kernel's ticks.
    machine: (u64, u64),
}

struct Host {
    threads: BTreeMap<(i32, i32), (&'static str, u64)>,
    in_all: Duration,
    sent: u64,
}

impl Reading {
    /// Now.
    pub fn take(testbed: &Testbed) -> Result<Self> {
        let hosts = HOSTS.map(|name| -> Result<Host> {
            let node = testbed.node(name);
            Ok(Host {
                threads: threads(node),
                in_all: node.cpu_time().unwrap_or_default(),
                sent: traffic(node)?.1,
            })
        });
        Ok(Self {
            hosts: hosts.into_iter().collect::<Result<_>>()?,
            to_client: traffic(testbed.node("client"))?.0,
            machine: parse_stat(&fs::read_to_string("/proc/stat")?)
                .context("/proc/stat has no line of all cores")?,
        })
    }

    /// The CPU that each host used until `after`.
    pub fn cpu_until(&self, after: &Self) -> [Duration; 3] {
        let mut used = [Duration::ZERO; 3];
        for (at, (before, after)) in self.hosts.iter().zip(&after.hosts).enumerate() {
            used[at] = after.in_all.saturating_sub(before.in_all);
        }
        used
    }

    /// How much of all cores was used until `after`, by whomever.
    pub fn machine_until(&self, after: &Self) -> f64 {
        let (busy, in_all) = (
            after.machine.0.saturating_sub(self.machine.0),
            after.machine.1.saturating_sub(self.machine.1),
        );
        busy as f64 / in_all.max(1) as f64
    }

    /// What each of `requests` cost until `after`.
    pub fn until(&self, after: &Self, requests: u64) -> Cost {
        let each = |sum: f64| sum / requests.max(1) as f64;
        let mut cpu_us = BTreeMap::new();
        for ((name, before), after) in HOSTS.iter().zip(&self.hosts).zip(&after.hosts) {
            let mut groups: BTreeMap<String, f64> =
                GROUPS.iter().map(|group| ((*group).to_owned(), 0.0)).collect();
            let mut known_us = 0.0;
            for (thread, (group, ns)) in &after.threads {
                let begun = before.threads.get(thread).map_or(0, |(_, ns)| *ns);
                let us = ns.saturating_sub(begun) as f64 / 1e3;
                known_us += us;
                *groups.entry((*group).to_owned()).or_default() += each(us);
            }
            let in_all_us = after.in_all.saturating_sub(before.in_all).as_secs_f64() * 1e6;
            *groups.entry("rest".to_owned()).or_default() += each((in_all_us - known_us).max(0.0));
            cpu_us.insert((*name).to_owned(), groups);
        }
        let sent = |reading: &Self| reading.hosts.iter().map(|host| host.sent).sum::<u64>();
        let to_client = after.to_client.saturating_sub(self.to_client);
        let sent = sent(after).saturating_sub(sent(self));
        Cost {
            cpu_us,
            bytes_between: each(sent.saturating_sub(to_client) as f64),
            bytes_to_client: each(to_client as f64),
        }
    }
}

/// Whose time a thread's is, by its name and its process'.
fn group(process: &str, thread: &str) -> &'static str {
    let is = |prefixes: &[&str]| prefixes.iter().any(|prefix| thread.starts_with(prefix));
    if process.starts_with("qemu-system") {
        match thread {
            _ if is(&["CPU "]) => "vcpu",
            _ if thread == process => "qemu-main",
            _ => "qemu-rest",
        }
    } else if process.starts_with("dunlin") {
        match thread {
            // A loop is named after its VM.
            _ if is(&["vm-", "program-loop-"]) => "loop",
            "sync-read" => "sync-read",
            "group-keeper" => "keeper",
            _ => "dunlin-rest",
        }
    } else {
        "rest"
    }
}

/// The time of each thread, in nanoseconds; a thread that ends meanwhile is left out.
fn threads(node: &Node) -> BTreeMap<(i32, i32), (&'static str, u64)> {
    let name = |path: String| fs::read_to_string(path).map(|name| name.trim_end().to_owned());
    let mut found = BTreeMap::new();
    for process in node.pids() {
        let Ok(of_process) = name(format!("/proc/{process}/comm")) else {
            continue;
        };
        let tasks = fs::read_dir(format!("/proc/{process}/task"))
            .into_iter()
            .flatten();
        for task in tasks.flatten() {
            let Some(thread) = task.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let dir = format!("/proc/{process}/task/{thread}");
            let times = fs::read_to_string(format!("{dir}/schedstat")).unwrap_or_default();
            let ns = times.split_whitespace().next().and_then(|ns| ns.parse().ok());
            if let (Some(ns), Ok(own)) = (ns, name(format!("{dir}/comm"))) {
                found.insert((process, thread), (group(&of_process, &own), ns));
            }
        }
    }
    found
}

/// Bytes that came to and went from a node by its cable.
pub(super) fn traffic(node: &Node) -> Result<(u64, u64)> {
    let reader = node.spawn("traffic", || fs::read_to_string("/proc/thread-self/net/dev"))?;
    let text = reader
        .join()
        .map_err(|_| anyhow!("a reading thread panicked"))???;
    parse_traffic(&text).with_context(|| format!("{} has no cable", node.name()))
}

/// `cpu  user nice system idle iowait ...`: ticks of work, and all.
fn parse_stat(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // From the ninth on it is guests' time, which is in the first two already.
    let ticks: Vec<u64> = line
        .split_whitespace()
        .take(8)
        .filter_map(|ticks| ticks.parse().ok())
        .collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    let in_all: u64 = ticks.iter().sum();
    Some((in_all - idle, in_all))
}

fn parse_traffic(text: &str) -> Option<(u64, u64)> {
    let line = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix("up0:"))?;
    let mut fields = line.split_whitespace();
    Some((fields.next()?.parse().ok()?, fields.nth(7)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(vcpu: u64, looped: u64, in_all_us: u64, sent: u64) -> Host {
        Host {
            threads: [((1, 1), ("vcpu", vcpu)), ((2, 3), ("loop", looped))].into(),
            in_all: Duration::from_micros(in_all_us),
            sent,
        }
    }

    #[test]
    fn a_request_costs_the_difference_and_what_no_thread_has_is_the_rest() {
        let before = Reading {
            hosts: vec![
                host(1_000_000, 0, 1_000, 500),
                host(0, 0, 0, 0),
                host(0, 0, 0, 100),
            ],
            to_client: 50,
            machine: (100, 1000),
        };
        let after = Reading {
            hosts: vec![
                host(3_000_000, 500_000, 5_000, 2_500),
                host(0, 1_000_000, 900, 700),
                host(0, 0, 0, 100),
            ],
            to_client: 750,
            machine: (290, 1200),
        };
        let cost = before.until(&after, 10);
        let of = |host: &str, group: &str| cost.on(host, &[group]);
        assert_eq!(
            (of("a", "vcpu"), of("a", "loop"), of("a", "rest")),
            (200.0, 50.0, 150.0)
        );
        // The kernel's two counts are not of the same moment.
        assert_eq!((of("b", "loop"), of("b", "rest")), (100.0, 0.0));
        assert_eq!((cost.bytes_between, cost.bytes_to_client), (200.0, 70.0));
        assert!((before.machine_until(&after) - 0.95).abs() < 1e-9);
        assert_eq!(before.cpu_until(&after)[0], Duration::from_micros(4_000));
    }

    #[test]
    fn a_thread_is_known_by_its_name() {
        for (process, thread, expected) in [
            ("qemu-system-x86", "qemu-system-x86", "qemu-main"),
            ("qemu-system-x86", "CPU 0/KVM", "vcpu"),
            ("qemu-system-x86", "worker", "qemu-rest"),
            ("dunlin", "vm-nginx", "loop"),
            ("dunlin", "sync-read", "sync-read"),
            ("dunlin", "group-keeper", "keeper"),
            ("dunlin", "sync-talk", "dunlin-rest"),
            ("ip", "ip", "rest"),
        ] {
            assert_eq!(group(process, thread), expected, "{process} {thread}");
        }
    }

    #[test]
    fn a_cable_is_counted_both_ways() {
        let text = "Inter-|   Receive\n face |bytes\n    lo:    9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n   up0: 1234 5 0 0 0 0 0 0 5678 9 0 0 0 0 0 0\n";
        assert_eq!(parse_traffic(text), Some((1234, 5678)));
        assert_eq!(parse_traffic("lo: 1"), None);
        let stat = "cpu  10 1 5 70 4 2 3 5 9 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(parse_stat(stat), Some((26, 100)));
    }
}
