//! Clients that open, use and close connections all the time while the primary's host dies, again and again.
//!
//! * **Decides:** that connections which began since the last sync survive: no reset, no stall, nothing lost or doubled.
//! * **Flow:** protected -> traffic -> primary's host killed -> traffic -> the host returns -> protected -> again.
//!   TCP time stamps and SACK are on for the first half of the kills and off for the second, as the clients' kernel is
//!   told.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use dunlin_api::files::VmFile;

use super::World;
use crate::client::{Passers, PassersReport, PassersSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::demo::service;
use crate::testbed::{Node, TestbedSpec};

const PATIENCE: Duration = Duration::from_secs(120);
/// Clients that come and go.
const WORKERS: usize = 32;
/// The longest step that a client may notice. Hosts die about a second apart: who loses its SYN at one death and its first request at the next
/// waits for two of TCP's first time-outs, a second each; where take-overs last longer than these, for three. A connection that does not go on waits for
/// as long as its client does.
const STALL: Duration = Duration::from_secs(10);
const GIVE_UP: Duration = Duration::from_secs(60);
/// Each client begins a connection so often at most: each closed one keeps its port for a minute, and at native speed a VM answers more than there are ports
/// for. Clients that wait for a port look as if the VM did not answer.
const EVERY: Duration = Duration::from_millis(40);
const PORTS: &str = "1024 65535";
/// Connections between two events: enough that some began before the last sync and some after it.
const SOME: u64 = 96;

/// Plays it with so many kills, under a policy, or `remus+spec`.
///
/// # Errors
/// When clients were let down, or it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World, policy: &str, kills: u32) -> Result<PassersReport> {
    in_a_testbed(
        "connections-come-and-go",
        &TestbedSpec::three_hosts(),
        &world.dunlin,
        |cluster| play(cluster, world, policy, kills),
    )
}

fn play(cluster: &mut Cluster<'_>, world: &World, policy: &str, kills: u32) -> Result<PassersReport> {
    cluster.start_hosts()?;
    let (policy, speculative) = match policy.strip_suffix("+spec") {
        Some(policy) => (policy, true),
        None => (policy, false),
    };
    let plan = VmPlan {
        file: VmFile {
            speculative,
            ..VmPlan::file()
        },
        ..VmPlan::redis(policy)
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, service(), PATIENCE)?;
    set_options(client, true)?;
    set(client, "ip_local_port_range", PORTS)?;
    let passers = Passers::start(
        client,
        &PassersSpec {
            target: service(),
            workers: WORKERS,
            most_incrs: 7,
            every: EVERY,
            stall: STALL,
            give_up: GIVE_UP,
        },
    )?;
    for kill in 0..kills {
        if kill == kills / 2 {
            set_options(client, false)?;
        }
        cluster.await_protected(&plan.name, PATIENCE)?;
        passers.await_more(SOME, PATIENCE)?;
        // A busy machine may have cost the backup since.
        let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
        cluster.kill_host(&primary)?;
        let killed = || format!("kill {} of {kills}, of host {primary}", kill + 1);
        passers.await_more(SOME, PATIENCE).with_context(killed)?;
        cluster
            .await_take_over(&plan.name, &primary, PATIENCE)
            .with_context(killed)?;
        cluster.start_host(&primary)?;
    }
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    let report = passers.finish()?;
    ensure!(
        report.counted.is_clean() && report.stalls == 0,
        "clients were let down: {report:?}"
    );
    cluster.end(&primary, &plan.name)?;
    Ok(report)
}

/// New connections of this node use TCP time stamps and SACK, or neither.
fn set_options(node: &Node, on: bool) -> Result<()> {
    for name in ["tcp_timestamps", "tcp_sack"] {
        set(node, name, if on { "1" } else { "0" })?;
    }
    Ok(())
}

fn set(node: &Node, name: &str, value: &str) -> Result<()> {
    let setting = format!("net.ipv4.{name}={value}");
    let done = node.command("sysctl")?.args(["-q", "-w", &setting]).status()?;
    ensure!(done.success(), "sysctl {setting} failed");
    Ok(())
}
