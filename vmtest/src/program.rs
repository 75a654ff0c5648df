//! A bare program survives its host: redis, unmodified, without a VM, on two hosts of a testbed.
//!
//! * **Decides:** what passes: nothing lost, doubled, reset or refused, whoever dies; what a person is told where it cannot go on.
//! * **Flow:** three hosts -> `dunlin up` of a file with `[program]` -> clients that check each answer -> a fault -> their verdict ->
//!   `down` -> nothing is left.
//! * **Invariants:** (1) the clients' answers depend on the order in which connections were served ([`CounterSpec::together`]): copies
//!   that read in another order say something else; (2) a story that did not see what it should see fails.
//! * **Source:** docs/programs.md. **Not here:** VMs ([`crate::demo`], [`crate::scenario`]).

mod away;
mod batch;
pub mod bench;
pub mod bench_joins;
pub mod data;
mod guard;
mod holds;
mod moves;
mod oddities;
pub mod random;
mod restart;
mod root;
pub mod server;
pub mod services;
mod stories;
mod time;

use dunlin_api::{EventKind, ProgramStatus};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::client::{Counter, CounterReport, CounterSpec, load};
use crate::cluster::{Cluster, in_a_testbed};
use crate::demo::service;
use crate::testbed::{Testbed, TestbedSpec};
use crate::traces;

pub use guard::joins;
pub use stories::run as stories;

const PATIENCE: Duration = Duration::from_secs(120);
/// Acknowledged INCRs before and after the kill.
const ACKNOWLEDGED: u64 = 500;
/// Clients of each story, who count on one key as well.
const CONNECTIONS: usize = 8;
/// Debian's redis-tools have the server under this name; it is what it is called.
const REDIS: &str = "/usr/bin/redis-check-rdb";
/// Its name in the cluster.
const NAME: &str = "sessions";
/// Its card.
const MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x57];

/// A program's file, written for the testbed.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Further lines of `[program]`.
    pub lines: Vec<String>,
    /// How long a copy's host is away until a standby gets its part; none: as it is by default.
    pub standby_after: Option<&'static str>,
}

impl Plan {
    /// redis without a file, as nobody.
    pub fn redis(testbed: &Testbed) -> Result<Self> {
        let server = testbed.dir().join("redis-server");
        if !server.exists() {
            std::fs::copy(REDIS, &server)
                .with_context(|| format!("{REDIS} is not here: cargo xtask setup"))?;
        }
        let server = server.to_str().context("a path of text")?;
        let words = [
            server,
            "--protected-mode",
            "no",
            "--save",
            "",
            "--appendonly",
            "no",
        ];
        Ok(Self {
            command: words.map(str::to_owned).to_vec(),
            lines: ["user = \"nobody\"", "port = 6379"].map(str::to_owned).to_vec(),
            standby_after: None,
        })
    }

    /// A shell's command.
    pub fn shell(command: &str) -> Self {
        Self {
            command: ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
            lines: Vec::new(),
            standby_after: None,
        }
    }

    /// Writes it, and says where.
    pub fn write(&self, testbed: &Testbed) -> Result<PathBuf> {
        let file = testbed.dir().join(format!("{NAME}.toml"));
        let address = format!("{}/16", service().ip());
        let standby_after = self
            .standby_after
            .map(|after| format!("standby_after = \"{after}\"\n"));
        let standby_after = standby_after.unwrap_or_default();
        let text = format!(
            "name = \"{NAME}\"\nmembers = [\"a\", \"b\"]\nwitness = \"c\"\n{standby_after}\n[program]\ncommand = {:?}\n{}\n\n[[program.nics]]\n\
             mac = \"52:54:00:12:34:57\"\nbridge = \"br0\"\naddress = \"{address}\"\n",
            self.command,
            self.lines.join("\n")
        );
        std::fs::write(&file, text)?;
        Ok(file)
    }
}

/// What to show.
#[derive(Clone, Debug)]
pub struct DemoSpec {
    /// The executable.
    pub dunlin: PathBuf,
    /// Counting clients, who count on a common key too.
    pub connections: usize,
    /// redis-benchmark's connections beside them; 0 for none.
    pub load_connections: u32,
    /// How often the primary's host is killed; before each but the first a copy of the running program has come to the other host.
    pub kills: u32,
    /// The longest gap that passes.
    pub gap_limit: Duration,
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct DemoReport {
    /// Why it did not pass.
    pub failures: Vec<String>,
    /// What the counting clients saw.
    pub clients: CounterReport,
    /// How often the primary's host was killed.
    pub kills: u32,
    /// The longest time that a client had no answer around the kill, in microseconds.
    pub gap_us: u64,
    /// Outputs that both copies had said alike before the kill.
    pub matched: u64,
}

impl DemoReport {
    /// Whether all of it was as it should be.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// The last line.
    pub fn verdict(&self) -> String {
        let mut line = format!(
            "demo: {} lost={} gap_ms={} doubled={} resets={} acknowledged={} kills={} policy=dunlin program=redis",
            if self.passed() { "PASS" } else { "FAIL" },
            self.clients.lost,
            self.gap_us.div_ceil(1000),
            self.clients.doubled,
            self.clients.resets,
            self.clients.acknowledged,
            self.kills
        );
        if !self.passed() {
            line.push_str(&format!(" ({})", self.failures.join("; ")));
        }
        line
    }
}

/// Runs the demonstration once. `say` gets a line for each thing that happens.
///
/// # Errors
/// When something did not happen at all; what happened wrongly is in the report.
pub fn demo(spec: &DemoSpec, say: &mut dyn FnMut(&str)) -> Result<DemoReport> {
    in_a_testbed("program", &TestbedSpec::three_hosts(), &spec.dunlin, |cluster| {
        tell(cluster, spec, say)
    })
}

fn tell(cluster: &mut Cluster<'_>, spec: &DemoSpec, say: &mut dyn FnMut(&str)) -> Result<DemoReport> {
    let testbed = cluster.testbed();
    let client = testbed.node("client");
    cluster.start_hosts()?;
    let (primary, backup) = up(cluster, &Plan::redis_with_data(testbed)?)?;
    say(&format!(
        "redis-server, without a VM, serves at {}: {primary} is the primary, {backup} the backup, each with a copy of its own, and with an \
         image of {} MiB to which it writes each command before it answers",
        service(),
        data::IMAGE_MIB
    ));
    let counter = count(cluster, spec.connections)?;
    let mut beside = match spec.load_connections {
        0 => None,
        connections => {
            let load = load::LoadSpec {
                target: service(),
                test: "set".to_owned(),
                connections,
                about: Duration::ZERO,
            };
            let mut command = load::command(client, &load, 1_000_000_000)?;
            command.arg("-q").stdin(std::process::Stdio::null());
            command
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::null());
            Some(
                command
                    .spawn()
                    .context("redis-benchmark is not here: cargo xtask setup")?,
            )
        }
    };
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let matched = figure(cluster, &primary, |program| program.matched)?;
    say(&format!(
        "load: {} clients count, each on a key of its own and all on one; redis-benchmark with {} connections; both copies have said \
         the same {matched} times",
        spec.connections, spec.load_connections
    ));
    let (mut primary, mut kills) = (primary, Vec::new());
    for number in 1..=spec.kills {
        (primary, _) = whole(cluster)?;
        let before = counter.acknowledged();
        let killed_at = cluster.kill_host(&primary)?;
        say(&format!(
            "SIGKILL to every process of host {primary} (after {before} acknowledged requests)"
        ));
        counter
            .await_more(ACKNOWLEDGED, PATIENCE)
            .context("no answers after the kill")?;
        kills.push((killed_at, Instant::now()));
        let (took_over, vm) = cluster.await_take_over(NAME, &primary, PATIENCE)?;
        let steps: Vec<String> = vm
            .failover
            .unwrap_or_default()
            .steps()
            .iter()
            .map(|(name, us)| format!("{name} {:.1}", *us as f64 / 1e3))
            .collect();
        say(&format!(
            "host {took_over} took over; its steps in ms: {}",
            steps.join(", ")
        ));
        let dead = std::mem::replace(&mut primary, took_over);
        cluster.start_host(&dead)?;
        if number < spec.kills {
            cluster.await_protected(NAME, PATIENCE)?;
            let events = cluster.events(&primary)?;
            let joined = events.iter().rev().find(|event| event.kind == EventKind::Joined);
            let joined = joined.context("a program that is protected again, and no event of that")?;
            say(&format!("host {dead} is back: {}", joined.text));
            counter.await_more(ACKNOWLEDGED, PATIENCE)?;
        }
    }
    let mut failures = Vec::new();
    if let Some(load) = &mut beside {
        if let Some(status) = load.try_wait()? {
            failures.push(format!("redis-benchmark gave up on its connections: {status}"));
        }
        let _ = load.kill();
        load.wait()?;
    }
    let (clients, answers) = counter.finish()?;
    let gaps = kills
        .iter()
        .map(|(killed_at, answered_at)| answers.longest_gap_us(*killed_at, *answered_at));
    let gap_us = gaps.max().unwrap_or_default();
    say(&format!(
        "clients: {} acknowledged, {} lost, {} doubled, {} connections broken; p50 {:.1} ms; no answer for at most {:.0} ms",
        clients.acknowledged,
        clients.lost,
        clients.doubled,
        clients.resets,
        clients.latency_p50_us as f64 / 1e3,
        gap_us as f64 / 1e3
    ));
    if !clients.is_clean() {
        failures.push(format!("clients were let down: {clients:?}"));
    }
    if matched == 0 {
        failures.push("nothing was compared".to_owned());
    }
    if Duration::from_micros(gap_us) > spec.gap_limit {
        failures.push(format!(
            "a gap of {} ms is more than {} ms",
            gap_us.div_ceil(1000),
            spec.gap_limit.as_millis()
        ));
    }
    down(cluster, &primary)?;
    if let Err(left) = data::await_detached(cluster) {
        failures.push(left.to_string());
    }
    say("the program is down; its processes, TAPs and loop devices are gone; its image stays on each host");
    Ok(DemoReport {
        failures,
        clients,
        kills: spec.kills,
        gap_us,
        matched,
    })
}

/// Starts it, and waits until both copies run: the primary's and the backup's host.
fn up(cluster: &Cluster<'_>, plan: &Plan) -> Result<(String, String)> {
    let file = plan.write(cluster.testbed())?;
    cluster.dunlin("a", &["up", path(&file)?])?;
    cluster.await_protected(NAME, PATIENCE)
}

/// Before a host dies: who serves, and who follows with a copy that counts. On a busy machine a second copy may have been lost, and an election
/// have come, without a death.
fn whole(cluster: &Cluster<'_>) -> Result<(String, String)> {
    let both = cluster.await_protected(NAME, PATIENCE);
    both.context("both copies, before a host dies")
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path of text")
}

/// Clients on so many connections.
fn count(cluster: &Cluster<'_>, connections: usize) -> Result<Counter> {
    Counter::start(
        cluster.testbed().node("client"),
        &CounterSpec {
            target: service(),
            connections,
            together: true,
            give_up: PATIENCE,
        },
    )
}

/// A number of `status --json` on that host, of the program.
fn figure(cluster: &Cluster<'_>, host: &str, of: fn(&ProgramStatus) -> u64) -> Result<u64> {
    cluster.await_status("the program's figures", PATIENCE, |hosts| {
        let host = hosts.iter().find(|known| known.host == host)?;
        host.vm(NAME)?.program.as_ref().map(of)
    })
}

/// Ends it, and looks for what is left on hosts that run.
fn down(cluster: &Cluster<'_>, host: &str) -> Result<()> {
    cluster.dunlin(host, &["down", NAME])?;
    let running = cluster.running().len();
    cluster.await_status("no host knows the program", PATIENCE, |hosts| {
        let knows = hosts.iter().any(|host| !host.vms.is_empty());
        // One that does not answer in time is not among them.
        (hosts.len() == running && !knows).then_some(())
    })?;
    let left = traces::after_down(cluster)?;
    ensure!(left.is_empty(), "left after down: {}", left.join(", "));
    for host in cluster.running() {
        let folder = cluster.dir().join(&host).join("state/vms").join(NAME);
        ensure!(!folder.exists(), "host {host}: {} is left", folder.display());
    }
    Ok(())
}
