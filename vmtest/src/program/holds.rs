//! What a host that runs a program holds: what grows with each copy is a leak.
//!
//! * **Decides:** what counts as more. * **Flow:** before and after many copies, in the same state of the program -> [`Holds::is_more_than`].
//! * **Not here:** what is left after `down` ([`crate::traces`]).

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::PATIENCE;
use crate::cluster::Cluster;

/// The namespaces of a process, by what they are of.
const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

/// Of one host.
#[derive(Clone, Debug)]
pub(super) struct Holds {
    /// Of its daemon.
    descriptors: usize,
    threads: usize,
    mounts: usize,
    /// Of all of its processes.
    processes: usize,
    namespaces: usize,
    /// Its TAPs.
    taps: usize,
}

impl Holds {
    /// Both hosts that run the program, the primary first: it has the way to the network, whichever host it is.
    pub(super) fn of_both(cluster: &Cluster<'_>, primary: &str) -> Result<Vec<Self>> {
        let backup = ["a", "b"].into_iter().find(|host| *host != primary);
        std::iter::once(primary)
            .chain(backup)
            .map(|host| Self::of(cluster, host))
            .collect()
    }

    fn of(cluster: &Cluster<'_>, host: &str) -> Result<Self> {
        let (pid, node) = (
            cluster.pid(host).context("a daemon")?,
            cluster.testbed().node(host),
        );
        let entries = |of: &str| Ok::<_, std::io::Error>(fs::read_dir(format!("/proc/{pid}/{of}"))?.count());
        let processes = node.pids();
        let of_processes = processes
            .iter()
            .flat_map(|pid| NAMESPACES.map(|name| format!("/proc/{pid}/ns/{name}")));
        // A process that has just ended has none.
        let namespaces: BTreeSet<_> = of_processes.filter_map(|link| fs::read_link(link).ok()).collect();
        let taps = node
            .command("ip")?
            .args(["-o", "link", "show", "type", "tun"])
            .output()?;
        Ok(Self {
            descriptors: entries("fd")?,
            threads: entries("task")?,
            mounts: fs::read_to_string(format!("/proc/{pid}/mountinfo"))?
                .lines()
                .count(),
            processes: processes.len(),
            namespaces: namespaces.len(),
            taps: String::from_utf8_lossy(&taps.stdout).lines().count(),
        })
    }

    /// What both hosts hold when it is no more than `then`: what was done last may still be ending.
    pub(super) fn await_no_more_than(
        cluster: &Cluster<'_>,
        primary: &str,
        then: &[Self],
    ) -> Result<Vec<Self>> {
        let until = Instant::now() + PATIENCE;
        loop {
            let now = Self::of_both(cluster, primary)?;
            let mut both = now.iter().zip(then);
            if !both.any(|(now, then)| now.is_more_than(then)) {
                return Ok(now);
            }
            ensure!(
                Instant::now() < until,
                "the hosts hold {now:?}, and held {then:?} before"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Links and requests come and go: a few of each are no leak, one for each start is.
    pub(super) fn is_more_than(&self, then: &Self) -> bool {
        const FEW: usize = 8;
        self.descriptors > then.descriptors + FEW
            || self.threads > then.threads + FEW
            || self.mounts > then.mounts
            || self.processes > then.processes
            || self.namespaces > then.namespaces
            || self.taps > then.taps
    }

    /// For people.
    pub(super) fn told(all: &[Self]) -> String {
        let sum = |of: fn(&Self) -> usize| all.iter().map(of).sum::<usize>();
        format!(
            "{} processes, {} namespaces, {} mounts, {} TAPs, {} descriptors, {} threads",
            sum(|held| held.processes),
            sum(|held| held.namespaces),
            sum(|held| held.mounts),
            sum(|held| held.taps),
            sum(|held| held.descriptors),
            sum(|held| held.threads)
        )
    }
}
