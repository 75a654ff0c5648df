//! A primary whose state folder is full, where agreed inputs are to be on the disks of a majority.
//!
//! * **Decides:** that the VM does not go deaf with the disk of one host: its backup goes on, and nobody loses an answer.
//! * **Flow:** VM up and protected, counters at work -> the primary's state folder takes no byte more -> the other host serves -> room
//!   again, and protected -> that host's death -> the first one serves.
//! * **Not here:** a full disk of the guest (`disks.toml`), a log of its own (`program`).

use std::time::Duration;

use anyhow::{Result, ensure};

use super::World;
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(120);
/// What a state folder holds: more than a log needs.
const STATE_MIB: u64 = 192;
/// Answers that show that the VM is served.
const SOME: u64 = 50;

/// Plays it; returns how many answers the clients got.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World) -> Result<u64> {
    in_a_testbed(
        "primary-log-disk-full",
        &TestbedSpec::three_hosts(),
        &world.dunlin,
        |cluster| play(cluster, world),
    )
}

fn play(cluster: &mut Cluster<'_>, world: &World) -> Result<u64> {
    cluster.use_small_states(STATE_MIB)?;
    cluster.use_disks()?;
    cluster.start_hosts()?;
    let plan = VmPlan::redis("dunlin");
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: plan.service(),
            connections: 2,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    counter.await_more(SOME, PATIENCE)?;
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    cluster.state_disk(&primary)?.fill()?;
    cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
    counter.await_more(SOME, PATIENCE)?;
    let told = cluster.logged()?;
    let of_primary = |kind: &str| {
        told.iter()
            .any(|event| event.host == primary && event.kind.as_str() == kind)
    };
    ensure!(
        of_primary("log-disk-full") && of_primary("left-to-backup"),
        "host {primary} does not tell why it has left the VM to its backup"
    );
    cluster.state_disk(&primary)?.free()?;
    let (second, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    cluster.kill_host(&second)?;
    counter.await_more(SOME, PATIENCE)?;
    cluster.start_host(&second)?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster.end(&second, &plan.name)?;
    Ok(clients.acknowledged)
}
