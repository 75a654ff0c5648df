//! What Dunlin leaves behind: nothing, after `down`, after a crash, after Ctrl-C.
//!
//! Only what the run itself has made counts: each host of a testbed has its network, its /run and its /dev/shm to itself
//! ([`crate::testbed::Node::traces`]), and processes are told by their cgroup.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::cluster::Cluster;

/// `down` waits for the other hosts for some seconds only: one that stood still meanwhile ends its copy a little later. What is there for longer is left.
const ENDS: Duration = Duration::from_secs(30);
/// It is looked at so often.
const LOOK: Duration = Duration::from_millis(50);

/// What is left of a VM on hosts whose daemons still run: a complaint for each thing.
pub fn after_down(cluster: &Cluster<'_>) -> Result<Vec<String>> {
    let deadline = Instant::now() + ENDS;
    loop {
        let left = now(cluster)?;
        if left.is_empty() || Instant::now() > deadline {
            return Ok(left);
        }
        // Nothing tells of the end of a process that is not ours.
        std::thread::sleep(LOOK);
    }
}

fn now(cluster: &Cluster<'_>) -> Result<Vec<String>> {
    let mut left = Vec::new();
    let running = cluster.running();
    for host in cluster.hosts() {
        let node = cluster.testbed().node(host);
        left.extend(node.traces()?);
        let commands: Vec<String> = node.pids().into_iter().filter_map(command_of).collect();
        let expected = usize::from(running.contains(host));
        if commands.len() > expected || commands.iter().any(|command| command.starts_with("qemu")) {
            left.push(format!("host {host}: processes {}", commands.join(", ")));
        }
    }
    Ok(left)
}

fn command_of(pid: i32) -> Option<String> {
    Some(
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .ok()?
            .trim()
            .to_owned(),
    )
}
