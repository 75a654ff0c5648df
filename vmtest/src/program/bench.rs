//! What running a bare program twice costs: servers on one host of the testbed, plain, and the same as programs of two hosts, in turns.
//!
//! * **Decides:** nothing. * **Flow:** for each server: plain and protected at once, one of them loaded at a time -> medians of the rounds.
//! * **Invariants:** it is protected from the first to the last round, or there are no figures.
//! * **Not here:** VMs (`bench_vm`); what a copy of a running one costs (`bench_joins`).

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;

use super::services::clients::{Open, counts, fetches_one, increments};
use super::services::{memcached, nginx, node};
use super::{PATIENCE, Plan, down, figure, up};
use crate::client::load::{LoadSpec, run_requests};
use crate::cluster::{Cluster, in_a_testbed};
use crate::demo::service;
use crate::testbed::{Node, Testbed, TestbedSpec};

/// The requests of a first, rough measure.
const LEAST_REQUESTS: u64 = 1000;
/// Where the plain one listens.
const PLAIN_PORT: u16 = 6380;

/// What is asked.
#[derive(Clone, Copy)]
enum Load {
    /// redis-benchmark's SET of 64 bytes.
    RedisBenchmark,
    /// A thread for each connection, one request at a time.
    Own(Open),
}

/// A server, by its port.
type Server = fn(&Testbed, u16) -> Result<Option<Plan>>;

/// Name, what is asked of it, the server.
const PROGRAMS: [(&str, &str, Load, Server); 4] = [
    ("redis", "SET", Load::RedisBenchmark, redis),
    ("memcached", "incr", Load::Own(counts), memcached),
    ("nginx", "a file of 700 bytes", Load::Own(fetches_one), nginx),
    ("node", "INCR", Load::Own(increments), node),
];

fn redis(testbed: &Testbed, port: u16) -> Result<Option<Plan>> {
    let mut plan = Plan::redis(testbed)?;
    plan.command.extend(["--port".to_owned(), port.to_string()]);
    Ok(Some(plan))
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchSpec {
    /// Which programs; all, if none is named.
    pub programs: Vec<String>,
    /// Numbers of parallel connections.
    pub connections: Vec<u32>,
    /// How often each.
    pub rounds: usize,
    /// About how long each load takes.
    pub about: Duration,
    /// The setting `order` of the protected ones; each one's own, if none is named.
    pub order: Option<String>,
}

/// One line.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Which program.
    pub program: String,
    /// What is asked of it.
    pub asked: String,
    /// What its next input waits for.
    pub order: String,
    /// Parallel connections.
    pub connections: u32,
    /// Medians over the rounds: requests per second, plain and as a program of two hosts.
    pub plain_per_second: f64,
    /// See `plain_per_second`.
    pub program_per_second: f64,
    /// Medians of the medians, in milliseconds.
    pub plain_p50_ms: f64,
    /// See `plain_p50_ms`.
    pub program_p50_ms: f64,
}

impl Figures {
    /// For people.
    pub fn line(&self) -> String {
        format!(
            "bench programs: {} {}, order {:?}, {} connections: plain {:.0}/s p50 {:.2} ms, on two hosts {:.0}/s p50 {:.2} ms: share {:.3}, p50 x {:.1}",
            self.program,
            self.asked,
            self.order,
            self.connections,
            self.plain_per_second,
            self.plain_p50_ms,
            self.program_per_second,
            self.program_p50_ms,
            self.program_per_second / self.plain_per_second.max(1.0),
            self.program_p50_ms / self.plain_p50_ms.max(0.001)
        )
    }
}

/// Measures, in turns.
///
/// # Errors
/// When a program is not protected all the while, or something does not happen at all.
pub fn run(binary: &Path, spec: &BenchSpec, say: &mut dyn FnMut(&str)) -> Result<Vec<Figures>> {
    let is_named = |name: &str| spec.programs.is_empty() || spec.programs.iter().any(|named| named == name);
    if let Some(unknown) = spec
        .programs
        .iter()
        .find(|named| !PROGRAMS.iter().any(|(name, ..)| name == *named))
    {
        bail!(
            "there is no program {unknown:?}: {}",
            PROGRAMS.map(|(name, ..)| name).join(", ")
        );
    }
    in_a_testbed("bench-programs", &TestbedSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        let mut all = Vec::new();
        for (name, asked, load, server) in PROGRAMS.into_iter().filter(|(name, ..)| is_named(name)) {
            let testbed = cluster.testbed();
            let (Some(mut plan), Some(plain)) =
                (server(testbed, service().port())?, server(testbed, PLAIN_PORT)?)
            else {
                say(&format!(
                    "bench programs: {name} is not on this machine: not measured"
                ));
                continue;
            };
            let order = ordered(&mut plan, spec.order.as_deref());
            let measured = compare(cluster, load, [&plain, &plan], spec).with_context(|| name.to_owned())?;
            for (connections, [plain, program]) in measured {
                let figures = Figures {
                    program: name.to_owned(),
                    asked: asked.to_owned(),
                    order: order.clone(),
                    connections,
                    plain_per_second: plain.per_second,
                    program_per_second: program.per_second,
                    plain_p50_ms: plain.p50_ms,
                    program_p50_ms: program.p50_ms,
                };
                say(&figures.line());
                all.push(figures);
            }
        }
        Ok(all)
    })
}

/// What the program's next input waits for: `order`, or what its plan says, or what the daemon takes if nothing is said.
fn ordered(plan: &mut Plan, order: Option<&str>) -> String {
    const KEY: &str = "order = ";
    if let Some(order) = order {
        plan.lines.retain(|line| !line.starts_with(KEY));
        plan.lines.push(format!("{KEY}{order:?}"));
    }
    let own = plan.lines.iter().find_map(|line| line.strip_prefix(KEY));
    own.unwrap_or("auto").trim_matches('"').to_owned()
}

/// Requests per second, and the median of their times.
#[derive(Clone, Copy)]
struct Measured {
    per_second: f64,
    p50_ms: f64,
}

/// Medians of plain and protected, by the number of connections.
fn compare(
    cluster: &Cluster<'_>,
    load: Load,
    [plain, plan]: [&Plan; 2],
    spec: &BenchSpec,
) -> Result<Vec<(u32, [Measured; 2])>> {
    let (primary, _) = up(cluster, plan)?;
    let mut plain = Plain::start(cluster, plain)?;
    let client = cluster.testbed().node("client");
    let mut all = Vec::new();
    for &connections in &spec.connections {
        let mut rounds: [Vec<Measured>; 2] = Default::default();
        for _ in 0..spec.rounds {
            for (target, measured) in [plain.address, service()].into_iter().zip(&mut rounds) {
                measured.push(match load {
                    Load::RedisBenchmark => redis_benchmark(client, target, connections, spec.about)?,
                    Load::Own(open) => own(client, target, connections, spec.about, open)?,
                });
            }
        }
        let medians = rounds.map(|rounds| Measured {
            per_second: median(rounds.iter().map(|round| round.per_second)),
            p50_ms: median(rounds.iter().map(|round| round.p50_ms)),
        });
        all.push((connections, medians));
    }
    let differing = figure(cluster, &primary, |program| program.differing)?;
    let (still, _) = cluster.await_protected(super::NAME, PATIENCE)?;
    ensure!(
        still == primary && differing == 0,
        "{primary} served at first, {still} at last, {differing} outputs differed"
    );
    plain.stop()?;
    down(cluster, &primary)?;
    Ok(all)
}

/// A first load says how many requests the time holds: a handful of them says too little.
fn redis_benchmark(client: &Node, target: SocketAddr, connections: u32, about: Duration) -> Result<Measured> {
    let spec = LoadSpec {
        target,
        test: "set".to_owned(),
        connections,
        about,
    };
    let first = run_requests(client, &spec, LEAST_REQUESTS)?;
    let requests = (first.per_second * about.as_secs_f64()) as u64;
    let report = run_requests(client, &spec, requests.max(LEAST_REQUESTS))?;
    Ok(Measured {
        per_second: report.per_second,
        p50_ms: report.p50_ms,
    })
}

/// All connections stand before the first one asks.
fn own(client: &Node, target: SocketAddr, connections: u32, about: Duration, open: Open) -> Result<Measured> {
    let barrier = std::sync::Arc::new(std::sync::Barrier::new(connections as usize));
    let mut workers = Vec::new();
    for number in 0..connections {
        let barrier = std::sync::Arc::clone(&barrier);
        let work = move || -> Result<Vec<u64>> {
            let opened = open(target, number as usize);
            barrier.wait();
            let (mut ask, until) = (opened?, Instant::now() + about);
            let (mut turn, mut times_us) = (0, Vec::new());
            while Instant::now() < until {
                turn += 1;
                let asked = Instant::now();
                ask(turn)?;
                times_us.push(asked.elapsed().as_micros() as u64);
            }
            Ok(times_us)
        };
        workers.push(client.spawn(&format!("bench-{number}"), work)?);
    }
    let mut times_us = Vec::new();
    for worker in workers {
        times_us.extend(worker.join().map_err(|_| anyhow!("a client panicked"))???);
    }
    Ok(Measured {
        per_second: times_us.len() as f64 / about.as_secs_f64(),
        p50_ms: median(times_us.iter().map(|us| *us as f64 / 1e3)),
    })
}

/// Whatever it speaks. Nothing tells a client that a server has begun: it has to ask.
fn await_port(client: &Node, target: SocketAddr) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    let waited = client.spawn("await-port", move || {
        loop {
            match TcpStream::connect_timeout(&target, PATIENCE) {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > until => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    })?;
    let asked = waited.join().map_err(|_| anyhow!("a client panicked"))??;
    asked.with_context(|| format!("nobody listens at {target}"))
}

pub(super) fn median(all: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = all.collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// The same server without Dunlin, on the first host.
struct Plain {
    server: Child,
    address: SocketAddr,
}

impl Plain {
    fn start(cluster: &Cluster<'_>, plan: &Plan) -> Result<Self> {
        let node = cluster.testbed().node("a");
        let address = SocketAddr::new(IpAddr::V4(node.address()), PLAIN_PORT);
        let server = node
            .command(&plan.command[0])?
            .args(&plan.command[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("{} does not start", plan.command[0]))?;
        let plain = Self { server, address };
        await_port(cluster.testbed().node("client"), address)?;
        Ok(plain)
    }

    /// By SIGTERM: what it has begun itself ends with it.
    fn stop(&mut self) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.server.id())?);
        // One that has ended is collected below.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        self.server.wait()?;
        Ok(())
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // Ended already, or ended now.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::{Plan, ordered};

    /// A key that stands twice is no TOML: `bench programs` ended at its third program.
    #[test]
    fn an_order_stands_once_in_a_programs_file_and_the_one_asked_for_wins() {
        let with = |lines: &[&str]| Plan {
            command: vec!["/bin/true".to_owned()],
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            standby_after: None,
        };
        let own = ["port = 80", "order = \"answer\""];
        for (lines, asked, order) in [
            (&own[..], None, "answer"),
            (&own[..], Some("batch"), "batch"),
            (&own[..1], Some("delivery"), "delivery"),
            (&own[..1], None, "auto"),
        ] {
            let mut plan = with(lines);
            assert_eq!(ordered(&mut plan, asked), order);
            let table: toml::Table = plan.lines.join("\n").parse().expect("TOML");
            let said = table.get("order").and_then(toml::Value::as_str);
            assert_eq!(said.unwrap_or("auto"), order);
        }
    }
}
