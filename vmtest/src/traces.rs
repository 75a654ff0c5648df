//! What Dunlin leaves behind: nothing, after `down`, after a crash, after Ctrl-C.

use std::collections::BTreeSet;
use std::fs;

use anyhow::Result;

use crate::cluster::Cluster;

/// Places outside of the lab where a program like this one could leave something.
const PLACES: [&str; 3] = ["/dev/shm", "/run", "/var/tmp/dunlin-lab"];

/// Names in those places that could be ours, and interfaces of this machine.
pub fn on_this_machine() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for place in PLACES {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if ["dunlin", "qemu", "colo"].iter().any(|word| name.contains(word)) {
                found.insert(format!("{place}/{name}"));
            }
        }
    }
    for entry in fs::read_dir("/sys/class/net").into_iter().flatten().flatten() {
        found.insert(format!("interface {}", entry.file_name().to_string_lossy()));
    }
    found
}

/// What is here now and was not then, other labs' and benchmarks' directories aside (each looks after its own).
pub fn added_since(before: &BTreeSet<String>) -> Vec<String> {
    let now = on_this_machine();
    now.difference(before)
        .filter(|name| {
            !["dunlin-lab-", "dunlin-bench"]
                .iter()
                .any(|other| name.contains(other))
        })
        .cloned()
        .collect()
}

/// What is left of a VM on hosts whose daemons still run: a complaint for each thing.
pub fn after_down(cluster: &Cluster<'_>) -> Result<Vec<String>> {
    let mut left = Vec::new();
    let running = cluster.running();
    for host in cluster.hosts() {
        let node = cluster.lab().node(host);
        for name in node.interfaces()? {
            // What Lab made; the rest is a TAP.
            if !["lo", "up0", "br0"].contains(&name.as_str()) {
                left.push(format!("host {host}: interface {name}"));
            }
        }
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
