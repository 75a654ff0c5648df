//! A guest that says more than may leave: first because its backup's link is slow, then because there is no majority.
//!
//! * **Decides:** that what waits to leave is bounded by its budget; that at the budget the guest is slowed and not stopped, and loses
//!   nothing; that without a majority the rest is dropped as on any wire, and that clients get every byte right in the end.
//! * **Flow:** protected -> clients fetch large values without pause -> the backup's cable carries so little that the VM has to wait
//!   -> it carries all -> backup and witness stand still until something was dropped -> they go on -> the primary's host is killed
//!   in the midst of it -> clients get further values.
//! * **Invariant:** what is held is looked at all along.
//! * **Not here:** the budget's rule (`core/src/output`), a flood towards a guest (`flood`).

use dunlin_api::EventKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use dunlin_api::files::{MemoryTable, VmFile};

use super::World;
use crate::client::upload::VALUE_BYTES;
use crate::client::{Counter, CounterSpec, Upload};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(90);
/// The longest that a client may wait for a value: the scenario's faults, one after the other.
const GIVE_UP: Duration = Duration::from_secs(120);
/// The budget in the VM's file, the least that it takes.
const OUTBOUND_MIB: u64 = 8;
/// Clients with one value each on its way, of which some 300 KiB are in frames: half as much again as the budget.
const CLIENTS: usize = 40;
/// Values between two faults.
const SOME: u64 = 16;
/// What one look at QEMU's sockets may bring beyond the budget.
const ROUND_BYTES: u64 = 1 << 20;
/// What the backup's cable carries: a sync of some 1.5 MiB takes longer than the guest takes to fill the budget, also where a backup with a tenth of a core is
/// as fast as any other, as under KVM, whose copy of the VM has nothing to do.
const SLOW_KBIT: u64 = 20_000;
const QUEUE_MS: u64 = 50;

/// What an outpour showed.
pub struct Outcome {
    /// What clients got, every byte right.
    pub poured_mib: u64,
    /// The most that was seen waiting while there was a majority, and while there was none.
    pub peak_bytes: [u64; 2],
    /// Frames dropped while there was no majority.
    pub dropped: u64,
}

/// Plays it.
///
/// # Errors
/// When more was held than the budget, something was lost, or the guest stood still; the daemons' logs are kept.
pub fn run(world: &World) -> Result<Outcome> {
    in_a_testbed("outpour", &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        play(cluster, world)
    })
}

fn play(cluster: &mut Cluster<'_>, world: &World) -> Result<Outcome> {
    cluster.start_hosts()?;
    let plan = VmPlan {
        file: VmFile {
            memory: MemoryTable {
                outbound_mib: OUTBOUND_MIB as usize,
                ..MemoryTable::default()
            },
            ..VmPlan::file()
        },
        // Everything that the VM says waits for a sync.
        ..VmPlan::redis("remus")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let (primary, backup) = cluster.await_protected(&plan.name, PATIENCE)?;
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: plan.service(),
            connections: 1,
            together: false,
            give_up: GIVE_UP,
        },
    )?;
    let pour = Pour::start(cluster, &plan)?;
    pour.await_more(2 * SOME)?;

    // A slow link: the guest is slowed, and loses nothing.
    cluster.testbed().slow_link(&backup, SLOW_KBIT, QUEUE_MS)?;
    let begun_with = pour.values();
    let slowed = watch(cluster, &plan, &primary, |outbound| {
        let events = cluster.events(&primary)?;
        let had_to_wait = events.iter().any(|event| event.kind == EventKind::OutputFull);
        Ok(outbound.dropped > 0 || (had_to_wait && pour.values() >= begun_with + 2 * OUTBOUND_MIB))
    })
    .context("with a slow link to the backup")?;
    ensure!(
        slowed.dropped == 0,
        "{} frames were dropped though they wait for a sync",
        slowed.dropped
    );
    cluster.testbed().mend_link(&backup)?;
    pour.await_more(SOME)?;

    // Nobody answers: what is beyond the budget is dropped.
    let (primary, backup) = cluster.await_protected(&plan.name, PATIENCE)?;
    // The witness first: with it, a backup that stands still is dropped.
    cluster.freeze("c")?;
    cluster.freeze(&backup)?;
    let silent = watch(cluster, &plan, &primary, |outbound| Ok(outbound.dropped > 0));
    for host in [&backup, "c"] {
        cluster.thaw(host);
    }
    let silent = silent.context("without a majority")?;
    pour.await_more(SOME)?;
    counter.await_more(3, PATIENCE)?;

    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    cluster.kill_host(&primary)?;
    cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
    pour.await_more(SOME)?;
    counter.await_more(3, PATIENCE)?;
    let poured_mib = (pour.finish()? * VALUE_BYTES as u64) >> 20;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster.start_host(&primary)?;
    cluster.end("c", &plan.name)?;
    Ok(Outcome {
        poured_mib,
        peak_bytes: [slowed.peak_bytes, silent.peak_bytes],
        dropped: silent.dropped,
    })
}

/// What was seen of the VM's output that waits.
#[derive(Clone, Copy, Default)]
struct Outbound {
    peak_bytes: u64,
    dropped: u64,
}

/// Looks at the primary until `done`: never is more held than the budget, and one round.
fn watch(
    cluster: &Cluster<'_>,
    plan: &VmPlan,
    primary: &str,
    done: impl Fn(Outbound) -> Result<bool>,
) -> Result<Outbound> {
    let (mut seen, deadline) = (Outbound::default(), Instant::now() + PATIENCE);
    loop {
        let status = cluster.status(primary)?;
        let vm = status
            .vm(&plan.name)
            .context("the primary knows the VM no more")?;
        let outbound = vm.queues.iter().find(|queue| queue.name == "outbound");
        let outbound = outbound.context("no figures of what waits to leave")?;
        ensure!(
            outbound.limit_bytes == OUTBOUND_MIB << 20
                && outbound.bytes <= outbound.limit_bytes + ROUND_BYTES,
            "beyond its budget: {outbound:?}"
        );
        seen.peak_bytes = seen.peak_bytes.max(outbound.bytes);
        seen.dropped = outbound.dropped;
        if done(seen)? {
            return Ok(seen);
        }
        ensure!(
            Instant::now() < deadline,
            "the budget was never used up: {} bytes at most, {} dropped",
            seen.peak_bytes,
            seen.dropped
        );
    }
}

/// Clients that fetch a large value again and again, and look at every byte of it.
struct Pour {
    stop: Arc<AtomicBool>,
    values: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<Result<()>>>>,
}

impl Pour {
    fn start(cluster: &Cluster<'_>, plan: &VmPlan) -> Result<Self> {
        let (stop, values) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = Vec::new();
        for number in 0..CLIENTS {
            let (stop, values, to) = (Arc::clone(&stop), Arc::clone(&values), plan.service());
            let work = move || -> Result<()> {
                let mut client = Upload::open(to, GIVE_UP)?;
                // Each the same value: whose is there last does not matter.
                client.put()?;
                while !stop.load(Ordering::Relaxed) {
                    client.check()?;
                    values.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            };
            let client = cluster.testbed().node("client");
            workers.push(client.spawn(&format!("pour-{number}"), work)?);
        }
        Ok(Self {
            stop,
            values,
            workers,
        })
    }

    fn values(&self) -> u64 {
        self.values.load(Ordering::Relaxed)
    }

    fn await_more(&self, more: u64) -> Result<()> {
        let (goal, deadline) = (self.values() + more, Instant::now() + PATIENCE);
        while self.values() < goal {
            ensure!(
                Instant::now() < deadline && !self.workers.iter().any(JoinHandle::is_finished),
                "clients got {} of {goal} values, or one of them gave up",
                self.values()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// How many values came.
    fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        for worker in self.workers {
            let came = worker.join().map_err(|_| anyhow!("a client's thread panicked"))?;
            came?.context("a client that fetches values")?;
        }
        Ok(self.values.load(Ordering::Relaxed))
    }
}
