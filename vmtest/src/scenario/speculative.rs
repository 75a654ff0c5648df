//! Long streams both ways under `remus` with `speculative = true`: beside plain `remus`, through switchovers, and while hosts die.
//!
//! * **Decides:** that no byte is lost, doubled or another one, that no connection is reset or stands still for good, that the streams
//!   pass shadow sockets, and how long they take beside plain `remus`.
//! * **Flow:** `timed`: per policy: protected -> one client sends a stream and fetches it back. `faults`: protected -> clients with kept
//!   connections -> in the midst of their streams a switchover, or the primary's host dies -> protected again -> the next.
//! * **Invariant:** every connection is kept from its beginning to the end.
//! * **Not here:** what is decided of a segment (`core/src/speculation`), the sockets (`speculation/tests`).

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dunlin_api::files::VmFile;

use super::World;
use crate::client::streams::{Streams, StreamsReport, StreamsSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(90);
/// The longest that a connection may stand still: a fault on a busy machine.
const GIVE_UP: Duration = Duration::from_secs(30);
/// Clients while faults happen.
const CLIENTS: usize = 3;
/// Values of a stream while faults happen, one megabyte each.
const VALUES: usize = 8;

/// One stream there and back, under plain remus and with speculation.
///
/// # Errors
/// When a byte was wrong, or a connection broke or stood still; the daemons' logs are kept.
pub fn timed(world: &World, mib: usize) -> Result<[StreamsReport; 2]> {
    let one = |speculative| {
        in_a_testbed(
            "speculative",
            &TestbedSpec::three_hosts(),
            &world.dunlin,
            |cluster| {
                let plan = begin(cluster, world, speculative)?;
                let client = cluster.testbed().node("client");
                let report = Streams::start(client, spec(&plan, 1, mib), Some(1))?.finish()?;
                cluster.end("c", &plan.name)?;
                Ok(report)
            },
        )
    };
    Ok([one(false).context("remus")?, one(true).context("remus+spec")?])
}

/// Streams all along, and these faults.
///
/// # Errors
/// As `timed`.
pub fn faults(world: &World, switchovers: u32, kills: u32) -> Result<StreamsReport> {
    in_a_testbed(
        "speculative",
        &TestbedSpec::three_hosts(),
        &world.dunlin,
        |cluster| {
            let plan = begin(cluster, world, true)?;
            let client = cluster.testbed().node("client");
            let streams = Streams::start(client, spec(&plan, CLIENTS, VALUES), None)?;
            let outcome = play(cluster, &plan, &streams, switchovers, kills);
            let streams = streams.finish();
            let report = match (outcome, streams) {
                (Ok(()), streams) => streams?,
                // Why the clients gave up says more than that they did.
                (Err(error), Err(clients)) => return Err(error.context(format!("{clients:#}"))),
                (Err(error), Ok(report)) => return Err(error.context(format!("the clients saw {report:?}"))),
            };
            cluster.end("c", &plan.name)?;
            Ok(report)
        },
    )
}

fn begin(cluster: &mut Cluster<'_>, world: &World, speculative: bool) -> Result<VmPlan> {
    cluster.start_hosts()?;
    let plan = VmPlan {
        file: VmFile {
            speculative,
            ..VmPlan::file()
        },
        memory_mib: 384,
        ..VmPlan::redis("remus")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    await_service(cluster.testbed().node("client"), plan.service(), PATIENCE)?;
    cluster.await_protected(&plan.name, PATIENCE)?;
    Ok(plan)
}

fn spec(plan: &VmPlan, workers: usize, values: usize) -> StreamsSpec {
    StreamsSpec {
        target: plan.service(),
        workers,
        values,
        give_up: GIVE_UP,
    }
}

fn play(
    cluster: &mut Cluster<'_>,
    plan: &VmPlan,
    streams: &Streams,
    switchovers: u32,
    kills: u32,
) -> Result<()> {
    let some = 2 * CLIENTS as u64;
    streams.await_more(some, PATIENCE).context("before any fault")?;
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    let status = cluster.status(&primary)?;
    let vm = status.vm(&plan.name).context("the primary knows the VM")?;
    ensure!(
        vm.policy == "remus+spec",
        "the policy is shown as '{}'",
        vm.policy
    );
    let begun = vm.speculation.as_ref().map(|figures| figures.begun);
    ensure!(
        begun.is_some_and(|begun| begun >= CLIENTS as u64),
        "{begun:?} connections pass shadow sockets"
    );
    for number in 0..switchovers {
        let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
        cluster.dunlin(&primary, &["switchover", &plan.name])?;
        streams
            .await_more(some, PATIENCE)
            .with_context(|| format!("after switchover {number}, from host {primary}"))?;
    }
    for number in 0..kills {
        let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
        // Not always at the same place of an epoch.
        let until = Instant::now() + Duration::from_millis(u64::from(number) * 37 % 200);
        while Instant::now() < until {
            std::thread::yield_now();
        }
        cluster.kill_host(&primary)?;
        cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
        streams
            .await_more(some, PATIENCE)
            .with_context(|| format!("after death {number}, of host {primary}"))?;
        cluster.start_host(&primary)?;
    }
    if kills > 0 {
        cluster.await_protected(&plan.name, PATIENCE)?;
        streams.await_more(some, PATIENCE).context("at the end")?;
    }
    Ok(())
}
