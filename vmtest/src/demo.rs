//! The demonstration: a VM survives its host, twice, and its clients notice a short pause and nothing else.
//!
//! * **Decides:** what passes: nothing lost, doubled, reset or refused, every gap at most [`DemoSpec::gap_limit`].
//! * **Flow:** three hosts -> VM up and protected -> load -> SIGKILL to the whole primary host -> take-over -> the host
//!   returns -> protected again -> the other host is killed -> ... -> `down` -> nothing is left.
//! * **Invariants:** a run that did not see what it should see fails; it never passes by default.
//! * **Source:** the take-over of PLOVER (NSDI'18, 4.4) as `ARCHITECTURE.md` has it.
//! * **Not here:** variations of it; those are [`crate::scenario`].

use dunlin_api::{FailoverStatus, Progress, Role};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::client::{Counter, CounterReport, CounterSpec, load};
use crate::cluster::{Cluster, VmPlan, await_service};
use crate::image::{self, GuestImage};
use crate::testbed::{Testbed, TestbedSpec};
use crate::traces;

/// Nothing in the demo may take longer than this, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
/// Acknowledged INCRs before and after each kill.
const ACKNOWLEDGED: u64 = 200;

/// What to demonstrate.
#[derive(Clone, Debug)]
pub struct DemoSpec {
    /// The executable.
    pub dunlin: PathBuf,
    /// The guest.
    pub image: GuestImage,
    /// The replication policy.
    pub policy: String,
    /// Counting clients.
    pub connections: usize,
    /// redis-benchmark's connections beside them; 0 for none.
    pub load_connections: u32,
    /// A data disk for redis, so that every INCR is on disk before it is answered.
    pub disk_mib: Option<u64>,
    /// The longest gap that passes.
    pub gap_limit: Duration,
}

/// One kill of a whole host.
#[derive(Clone, Debug, Serialize)]
pub struct Kill {
    /// The host that died.
    pub killed: String,
    /// The host that took over.
    pub took_over: String,
    /// The longest time that a client had no answer around the kill.
    pub gap_us: u64,
    /// What the new primary says about it.
    pub failover: FailoverStatus,
    /// From the restart of the host's daemon until the VM was protected again.
    pub reprotected_ms: u64,
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// Whether all of it was as it should be.
    pub passed: bool,
    /// Why not.
    pub failures: Vec<String>,
    /// The policy.
    pub policy: String,
    /// From `up` until the VM was protected.
    pub protected_ms: u64,
    /// The kills.
    pub kills: Vec<Kill>,
    /// What the counting clients saw.
    pub clients: CounterReport,
    /// How long the whole run took.
    pub took_ms: u64,
}

impl DemoReport {
    /// The longest gap of all kills, in milliseconds, rounded up.
    pub fn worst_gap_ms(&self) -> u64 {
        self.kills
            .iter()
            .map(|kill| kill.gap_us.div_ceil(1000))
            .max()
            .unwrap_or(0)
    }

    /// The last line.
    pub fn verdict(&self) -> String {
        let verdict = if self.passed { "PASS" } else { "FAIL" };
        let clients = &self.clients;
        let mut line = format!(
            "demo: {verdict} lost={} gap_ms={} doubled={} resets={} acknowledged={} kills={} policy={}",
            clients.lost,
            self.worst_gap_ms(),
            clients.doubled,
            clients.resets,
            clients.acknowledged,
            self.kills.len(),
            self.policy
        );
        if !self.failures.is_empty() {
            line.push_str(&format!(" ({})", self.failures.join("; ")));
        }
        line
    }
}

/// Runs the demonstration once. `say` gets a line for each thing that happens.
///
/// # Errors
/// When something did not happen at all; what happened wrongly is in the report.
pub fn run(spec: &DemoSpec, say: &mut dyn FnMut(&str)) -> Result<DemoReport> {
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    say(&format!(
        "hosts a {}, b {}, witness c {}, and a client {}: network namespaces, joined by a switch",
        testbed.node("a").address(),
        testbed.node("b").address(),
        testbed.node("c").address(),
        testbed.node("client").address()
    ));
    let mut report = {
        let mut cluster = Cluster::init(&testbed, &spec.dunlin, &["a", "b", "c"])?;
        match story(&mut cluster, spec, say) {
            Ok(report) => report,
            Err(error) => {
                let kept = cluster
                    .keep_logs("demo")
                    .map(|dir| format!("logs are in {}", dir.display()));
                return Err(error).context(kept.unwrap_or_else(|| "no logs could be kept".to_owned()));
            }
        }
    };
    if let Err(error) = testbed.close() {
        report.failures.push(format!("{error:#}"));
    }
    report.passed = report.failures.is_empty();
    Ok(report)
}

fn story(cluster: &mut Cluster<'_>, spec: &DemoSpec, say: &mut dyn FnMut(&str)) -> Result<DemoReport> {
    let begun = Instant::now();
    let testbed = cluster.testbed();
    let client = testbed.node("client");
    cluster.start_hosts()?;
    say("daemons run on a, b and c, and trust each other by the keys that 'dunlin init' made");

    let plan = VmPlan {
        disk_mib: spec.disk_mib,
        ..VmPlan::redis(&spec.policy)
    };
    let file = plan.write(testbed, &spec.image)?;
    let up = Instant::now();
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let target = service();
    await_service(client, target, PATIENCE)?;
    say(&format!(
        "the VM is up: Debian's linux {} and redis-server answer after {:.1} s",
        spec.image.kernel_release,
        up.elapsed().as_secs_f64()
    ));
    let (mut primary, backup) = cluster.await_protected(&plan.name, PATIENCE)?;
    let protected_ms = millis(up.elapsed());
    say(&format!(
        "protected by policy {}: {primary} is the primary, {backup} the backup",
        spec.policy
    ));

    let counter = Counter::start(
        client,
        &CounterSpec {
            target,
            connections: spec.connections,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    let mut load = Load::start(client, spec, target)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    say(&format!(
        "load: {} clients count with INCR and check each answer; redis-benchmark with {} connections",
        spec.connections, spec.load_connections
    ));

    let mut moments = Vec::new();
    let mut kills = Vec::new();
    for round in 0..2 {
        if round > 0 {
            counter.await_more(ACKNOWLEDGED, PATIENCE)?;
        }
        // A busy machine may have cost the backup since.
        (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
        let before = counter.acknowledged();
        let killed_at = cluster.kill_host(&primary)?;
        say(&format!(
            "SIGKILL to every process of host {primary} (after {before} acknowledged INCRs)"
        ));
        counter
            .await_more(ACKNOWLEDGED, PATIENCE)
            .context("no answers after the kill")?;
        let answered_at = Instant::now();
        let (took_over, vm) = cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
        let failover = vm.failover.unwrap_or_default();
        let steps: Vec<String> = failover
            .steps()
            .iter()
            .map(|(name, us)| format!("{name} {:.1}", *us as f64 / 1e3))
            .collect();
        say(&format!(
            "host {took_over} took over; its steps in ms: {}",
            steps.join(", ")
        ));

        let restarted = Instant::now();
        cluster.start_host(&primary)?;
        say(&format!(
            "host {primary} is switched on again; the VM runs on meanwhile"
        ));
        let (next, backup) = await_protected_with_progress(cluster, &plan.name, say)?;
        let killed = std::mem::replace(&mut primary, next);
        let reprotected_ms = millis(restarted.elapsed());
        say(&format!(
            "protected again after {:.1} s: {primary} is the primary, {backup} the backup",
            reprotected_ms as f64 / 1e3
        ));
        moments.push((killed_at, answered_at));
        kills.push(Kill {
            killed,
            took_over,
            gap_us: 0,
            failover,
            reprotected_ms,
        });
    }
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let mut failures = Vec::new();
    if let Err(error) = load.finish() {
        failures.push(format!("{error:#}"));
    }
    let (clients, answers) = counter.finish()?;
    for (kill, (killed_at, answered_at)) in kills.iter_mut().zip(moments) {
        kill.gap_us = answers.longest_gap_us(killed_at, answered_at);
        let gap_ms = kill.gap_us as f64 / 1e3;
        say(&format!(
            "clients of {} had no answer for at most {gap_ms:.0} ms when it died",
            kill.killed
        ));
        if Duration::from_micros(kill.gap_us) > spec.gap_limit {
            failures.push(format!(
                "a gap of {gap_ms:.0} ms is more than {} ms",
                spec.gap_limit.as_millis()
            ));
        }
    }
    say(&format!(
        "clients: {} acknowledged, {} lost, {} doubled, {} connections broken; p50 {:.1} ms, p99 {:.1} ms",
        clients.acknowledged,
        clients.lost,
        clients.doubled,
        clients.resets,
        clients.latency_p50_us as f64 / 1e3,
        clients.latency_p99_us as f64 / 1e3
    ));
    if !clients.is_clean() {
        failures.push(format!("clients were let down: {clients:?}"));
    }
    cluster.dunlin(&primary, &["down", "--now", &plan.name])?;
    failures.extend(traces::after_down(cluster)?);
    say("the VM is down; its processes, TAPs and files are gone");
    Ok(DemoReport {
        passed: false,
        failures,
        policy: spec.policy.clone(),
        protected_ms,
        kills,
        clients,
        took_ms: millis(begun.elapsed()),
    })
}

/// The redis in the guest.
pub fn service() -> SocketAddr {
    let address = image::GUEST_ADDRESS.split('/').next().expect("an address");
    SocketAddr::new(address.parse().expect("an address"), image::REDIS_PORT)
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn await_protected_with_progress(
    cluster: &Cluster<'_>,
    vm: &str,
    say: &mut dyn FnMut(&str),
) -> Result<(String, String)> {
    let mut last = String::new();
    cluster.await_status(&format!("VM {vm} protected again"), PATIENCE, |hosts| {
        for host in hosts {
            let Some(vm) = host.vm(vm).filter(|vm| vm.role == Role::Primary && !vm.protected) else {
                continue;
            };
            let Some(now) = vm.progress.as_ref().map(progress) else {
                continue;
            };
            if now != last {
                say(&format!("  host {}: {now}", host.host));
                last = now;
            }
        }
        let with_role = |role: &str| {
            hosts
                .iter()
                .find(|host| host.vm(vm).is_some_and(|vm| vm.role.as_str() == role))
        };
        let primary = with_role("primary").filter(|host| host.vm(vm).is_some_and(|vm| vm.protected))?;
        Some((primary.host.clone(), with_role("backup")?.host.clone()))
    })
}

fn progress(of: &Progress) -> String {
    format!("{}, {} of {} bytes", of.what, of.done, of.total)
}

/// redis-benchmark beside the counters: a second, foreign, judge of whether connections survive.
struct Load(Option<Child>);

impl Load {
    fn start(client: &crate::testbed::Node, spec: &DemoSpec, target: SocketAddr) -> Result<Self> {
        if spec.load_connections == 0 {
            return Ok(Self(None));
        }
        let load = load::LoadSpec {
            target,
            test: "set".to_owned(),
            connections: spec.load_connections,
            about: Duration::ZERO,
        };
        let mut command = load::command(client, &load, 1_000_000_000)?;
        command
            .arg("-q")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(Self(Some(
            command
                .spawn()
                .context("redis-benchmark is not here: cargo xtask setup")?,
        )))
    }

    fn finish(&mut self) -> Result<()> {
        let Some(mut child) = self.0.take() else {
            return Ok(());
        };
        let ended = child.try_wait()?;
        let _ = child.kill();
        child.wait()?;
        match ended {
            None => Ok(()),
            Some(status) => bail!("redis-benchmark gave up on its connections: {status}"),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}
