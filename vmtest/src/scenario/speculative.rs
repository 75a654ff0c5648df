//! Long streams both ways with `speculative = true`: under `remus`, beside plain `remus`, through switchovers, and while hosts die; under `dunlin`
//! while modes change and hosts die in either.
//!
//! * **Decides:** that no byte is lost, doubled or another one, that no connection is reset or stands still for good, that the streams
//!   pass shadow sockets, and how long they take beside plain `remus`.
//! * **Flow:** `timed`: per policy: protected -> one client sends a stream and fetches it back. `faults`: protected -> clients with kept
//!   connections -> in the midst of their streams a switchover, or the primary's host dies -> protected again -> the next.
//! * **Invariant:** every connection is kept from its beginning to the end.
//! * **Not here:** what is decided of a segment (`core/src/speculation`), the sockets (`speculation/tests`).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dunlin_api::Mode;
use dunlin_api::files::VmFile;

use super::World;
use crate::client::streams::{Streams, StreamsReport, StreamsSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::{Shape, Shaper, TestbedSpec};

const PATIENCE: Duration = Duration::from_secs(90);
/// The longest that a connection may stand still: a fault on a busy machine.
const GIVE_UP: Duration = Duration::from_secs(30);
/// So long another mode is waited for.
const MODE_PATIENCE: Duration = Duration::from_secs(20);
/// Clients while faults happen.
const CLIENTS: usize = 3;
/// Values of a stream while faults happen, one megabyte each.
const VALUES: usize = 8;
/// ... and over a cable that loses frames: an upload is slow there.
const FEW_VALUES: usize = 2;

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
                let plan = begin(cluster, world, "remus", speculative, false)?;
                let client = cluster.testbed().node("client");
                let report = Streams::start(client, spec(&plan, 1, mib), Some(1))?.finish()?;
                cluster.end("c", &plan.name)?;
                Ok(report)
            },
        )
    };
    Ok([one(false).context("remus")?, one(true).context("remus+spec")?])
}

/// What happens while streams go on.
#[derive(Clone, Copy)]
pub struct Faults {
    /// The clients come by IPv6.
    pub ipv6: bool,
    /// Their cable.
    pub cable: Option<Shape>,
    /// The policy beside `speculative = true`.
    pub policy: &'static str,
    /// The VM is handed over so often.
    pub switchovers: u32,
    /// ... and its host dies so often; under `dunlin` by turns while the backup's VM runs and while it does not.
    pub kills: u32,
}

/// A cable with a round trip of 5 ms that loses one frame of a hundred each way.
pub fn lossy(seed: u64) -> Shape {
    Shape {
        delay: Duration::from_micros(2_500),
        lost_of_million: 10_000,
        megabits: None,
        seed,
    }
}

/// Streams all along, and these faults. Under `dunlin` also how many deaths came while outputs were compared.
///
/// # Errors
/// As `timed`.
pub fn faults(world: &World, faults: Faults) -> Result<(StreamsReport, u32)> {
    in_a_testbed(
        "speculative",
        &TestbedSpec::three_hosts(),
        &world.dunlin,
        |cluster| {
            let plan = begin(cluster, world, faults.policy, true, faults.ipv6)?;
            let testbed = cluster.testbed();
            let shaper = faults
                .cable
                .map(|cable| testbed.shape("client", cable))
                .transpose()?;
            let client = testbed.node("client");
            let values = match faults.cable {
                Some(_) => FEW_VALUES,
                None => VALUES,
            };
            let streams = Streams::start(client, spec(&plan, CLIENTS, values), None)?;
            let outcome = play(cluster, &plan, &streams, faults);
            let streams = streams.finish();
            let lost = shaper.map(Shaper::finish).transpose()?;
            let (report, compared) = match (outcome, streams) {
                (Ok(compared), streams) => (streams?, compared),
                // Why the clients gave up says more than that they did.
                (Err(error), Err(clients)) => return Err(error.context(format!("{clients:#}"))),
                (Err(error), Ok(report)) => return Err(error.context(format!("the clients saw {report:?}"))),
            };
            ensure!(
                lost.is_none_or(|counts| counts.lost > 0),
                "a cable that loses frames has lost none"
            );
            cluster.end("c", &plan.name)?;
            Ok((report, compared))
        },
    )
}

fn begin(
    cluster: &mut Cluster<'_>,
    world: &World,
    policy: &str,
    speculative: bool,
    ipv6: bool,
) -> Result<VmPlan> {
    cluster.start_hosts()?;
    let plan = VmPlan {
        file: VmFile {
            speculative,
            ..VmPlan::file()
        },
        memory_mib: 384,
        ipv6,
        ..VmPlan::redis(policy)
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    if ipv6 {
        cluster.testbed().give_ipv6("client")?;
    }
    await_service(cluster.testbed().node("client"), service(&plan), PATIENCE)?;
    cluster.await_protected(&plan.name, PATIENCE)?;
    Ok(plan)
}

fn service(plan: &VmPlan) -> SocketAddr {
    match plan.ipv6 {
        true => plan.service_ipv6(),
        false => plan.service(),
    }
}

fn spec(plan: &VmPlan, workers: usize, values: usize) -> StreamsSpec {
    StreamsSpec {
        target: service(plan),
        workers,
        values,
        give_up: GIVE_UP,
    }
}

/// Waits until the VM is kept in a mode in which outputs are compared, or in another one, for a while.
fn await_mode(cluster: &mut Cluster<'_>, plan: &VmPlan, primary: &str, compared: bool) -> Result<bool> {
    let until = Instant::now() + MODE_PATIENCE;
    loop {
        let status = cluster.status(primary)?;
        let vm = status.vm(&plan.name).context("the primary knows the VM")?;
        let is = vm.sync.mode == Mode::Match;
        if is == compared || Instant::now() > until {
            return Ok(is);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn play(cluster: &mut Cluster<'_>, plan: &VmPlan, streams: &Streams, faults: Faults) -> Result<u32> {
    let Faults {
        policy,
        switchovers,
        kills,
        ..
    } = faults;
    let changes = policy == "dunlin";
    let mut died_compared = 0;
    let some = 2 * CLIENTS as u64;
    streams.await_more(some, PATIENCE).context("before any fault")?;
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    let status = cluster.status(&primary)?;
    let vm = status.vm(&plan.name).context("the primary knows the VM")?;
    ensure!(
        vm.policy == format!("{policy}+spec"),
        "the policy is shown as '{}'",
        vm.policy
    );
    let begun = vm.speculation.as_ref().map(|figures| figures.begun);
    ensure!(
        changes || begun.is_some_and(|begun| begun >= CLIENTS as u64),
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
        if changes {
            let compared = await_mode(cluster, plan, &primary, number % 2 == 0)?;
            died_compared += u32::from(compared);
        }
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
    Ok(died_compared)
}
