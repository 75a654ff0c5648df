//! A flood for a guest that does not read: its QEMU stands still while a client sends as fast as it can.
//!
//! * **Decides:** that what is on its way to a VM is bounded by its budget, and dropped beyond it as on any wire, that this is
//!   counted, and that the VM and its clients go on afterwards.
//! * **Flow:** a VM that counts -> its QEMU is stopped -> datagrams, several times the budget -> the daemon's memory and its own
//!   figures are looked at -> QEMU goes on -> the clients get further answers.
//! * **Not here:** a card that is never brought up, a VM with a backup.

use dunlin_api::QueueFigures;
use std::fs;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use dunlin_api::files::{MemoryTable, VmFile};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::World;
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, VmPlan, VmStatus, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;
use crate::traces;

const PATIENCE: Duration = Duration::from_secs(120);
/// The guest does not read for so long, and a flood more.
const FLOODS: Duration = Duration::from_secs(20);
/// The budget in the VM's file, and how often over it the flood is.
const INBOUND_MIB: u64 = 8;
const TIMES: u64 = 8;
/// What the daemon may take beside that, with what its allocator keeps.
const SLACK_MIB: u64 = 16;
/// Nobody listens there; what is sent is small enough for any path.
const PORT: u16 = 9;
const DATAGRAM_BYTES: usize = 1400;

/// What a flood showed.
pub struct Outcome {
    /// Sent while the guest did not read.
    pub sent_mib: u64,
    /// Frames that the budget cost.
    pub dropped: u64,
    /// What the daemon's memory grew by.
    pub grown_mib: u64,
}

/// Plays it.
///
/// # Errors
/// When memory grew beyond the budget, or the VM's clients were let down; the daemons' logs are kept.
pub fn run(world: &World) -> Result<Outcome> {
    in_a_testbed("flood", &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        play(cluster, world)
    })
}

fn play(cluster: &mut Cluster<'_>, world: &World) -> Result<Outcome> {
    cluster.start_host("a")?;
    let plan = VmPlan {
        file: VmFile {
            memory: MemoryTable {
                inbound_mib: INBOUND_MIB as usize,
                ..MemoryTable::default()
            },
            ..VmPlan::file()
        },
        ..VmPlan::redis("none")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: plan.service(),
            connections: 1,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    counter.await_more(100, PATIENCE)?;
    let daemon = cluster.pid("a").context("the daemon of host a runs")?;
    let before = rss_mib(daemon)?;
    let looked = vm(cluster, &plan.name)?;
    let qemu = looked.qemu_pid.context("no QEMU runs")?;
    let qemu = Pid::from_raw(i32::try_from(qemu)?);
    kill(qemu, Signal::SIGSTOP)?;
    let flooded = flood_until_dropped(cluster, &plan);
    let after = rss_mib(daemon);
    kill(qemu, Signal::SIGCONT)?;
    let ((sent_mib, looked), after) = (flooded?, after?);
    counter.await_more(100, PATIENCE)?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    let grown_mib = after.saturating_sub(before);
    ensure!(
        grown_mib <= INBOUND_MIB + SLACK_MIB,
        "{sent_mib} MiB for a guest that does not read, and the daemon grew by {grown_mib} MiB; {INBOUND_MIB} MiB is the budget"
    );
    let inbound = inbound(&looked)?;
    ensure!(
        inbound.bytes <= INBOUND_MIB << 20 && inbound.limit_bytes == INBOUND_MIB << 20,
        "beyond its budget: {inbound:?}"
    );
    ensure!(is_flooded(inbound), "the flood was none: {inbound:?}");
    cluster.dunlin("a", &["down", "--now", &plan.name])?;
    let left = traces::after_down(cluster)?;
    ensure!(left.is_empty(), "left after down: {}", left.join(", "));
    cluster.stop_host("a", Signal::SIGTERM)?;
    Ok(Outcome {
        sent_mib,
        dropped: inbound.dropped,
        grown_mib,
    })
}

/// Where the daemon gets no core for as long as that takes, the network drops the flood before it: then there is another one.
fn flood_until_dropped(cluster: &Cluster<'_>, plan: &VmPlan) -> Result<(u64, VmStatus)> {
    let (mut sent_mib, until) = (0, Instant::now() + FLOODS);
    loop {
        sent_mib += flood(cluster, plan)?;
        let looked = vm(cluster, &plan.name)?;
        if is_flooded(inbound(&looked)?) || Instant::now() > until {
            return Ok((sent_mib, looked));
        }
    }
}

fn is_flooded(inbound: &QueueFigures) -> bool {
    inbound.bytes > INBOUND_MIB << 18 && inbound.dropped > 0
}

fn inbound(vm: &VmStatus) -> Result<&QueueFigures> {
    let inbound = vm.queues.iter().find(|queue| queue.name == "inbound");
    inbound.context("no figures of what is on its way to the VM")
}

/// Datagrams as fast as the network takes them.
fn flood(cluster: &Cluster<'_>, plan: &VmPlan) -> Result<u64> {
    let mut to = plan.service();
    to.set_port(PORT);
    let sender = cluster
        .testbed()
        .node("client")
        .spawn("flood", move || -> Result<u64> {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            let (datagram, mut sent) = ([0_u8; DATAGRAM_BYTES], 0);
            let deadline = Instant::now() + FLOODS;
            while sent < (TIMES * INBOUND_MIB) << 20 && Instant::now() < deadline {
                // Refused now and then: no buffers. It is a flood all the same.
                sent += socket.send_to(&datagram, to).unwrap_or(0) as u64;
            }
            Ok(sent >> 20)
        })?;
    sender
        .join()
        .map_err(|_| anyhow!("the flood's thread panicked"))??
}

fn vm(cluster: &Cluster<'_>, name: &str) -> Result<VmStatus> {
    let status = cluster.status("a")?;
    status.vm(name).cloned().context("host a knows the VM no more")
}

fn rss_mib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("no VmRSS of the daemon")? >> 10)
}
