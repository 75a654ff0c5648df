//! What running a bare program twice costs: redis on one host of the lab, plain, and the same redis as a program of two hosts, in turns.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::{PATIENCE, Plan, down, figure, up};
use crate::client::load::{LoadReport, LoadSpec, run_requests};
use crate::cluster::{Cluster, await_service, in_a_lab};
use crate::demo::service;
use crate::lab::LabSpec;

/// The requests of a first, rough measure.
const LEAST_REQUESTS: u64 = 1000;
/// Where the plain one listens.
const PLAIN_PORT: u16 = 6380;

/// One line.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Parallel connections of redis-benchmark, SET of 64 bytes.
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
            "bench programs: redis SET, {} connections: plain {:.0}/s p50 {:.2} ms, on two hosts {:.0}/s p50 {:.2} ms: share {:.3}, p50 x {:.1}",
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

/// Measures, in turns. It has to be protected from the first to the last round.
///
/// # Errors
/// When it is not, or something does not happen at all.
pub fn run(
    binary: &Path,
    connections: &[u32],
    rounds: usize,
    about: Duration,
    order: &str,
    say: &mut dyn FnMut(&str),
) -> Result<Vec<Figures>> {
    in_a_lab("bench-programs", &LabSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        let mut plan = Plan::redis(cluster.lab())?;
        plan.lines.push(format!("order = {order:?}"));
        let (primary, _) = up(cluster, &plan)?;
        let mut plain = Plain::start(cluster, &plan)?;
        let mut all = Vec::new();
        for &connections in connections {
            let mut measured: [Vec<LoadReport>; 2] = Default::default();
            for _ in 0..rounds {
                for (target, reports) in [plain.address, service()].into_iter().zip(&mut measured) {
                    let spec = LoadSpec {
                        target,
                        test: "set".to_owned(),
                        connections,
                        about,
                    };
                    reports.push(measure(cluster, &spec)?);
                }
            }
            let [plain, program] = measured;
            let figures = Figures {
                connections,
                plain_per_second: median(&plain, |report| report.per_second),
                program_per_second: median(&program, |report| report.per_second),
                plain_p50_ms: median(&plain, |report| report.p50_ms),
                program_p50_ms: median(&program, |report| report.p50_ms),
            };
            say(&figures.line());
            all.push(figures);
        }
        let differing = figure(cluster, &primary, "differing")?;
        let (still, _) = cluster.await_protected(super::NAME, PATIENCE)?;
        ensure!(
            still == primary && differing == 0,
            "{primary} served at first, {still} at last, {differing} outputs differed"
        );
        plain.stop()?;
        down(cluster, &primary)?;
        Ok(all)
    })
}

/// A first load says how many requests the time holds: a handful of them says too little.
fn measure(cluster: &Cluster<'_>, spec: &LoadSpec) -> Result<LoadReport> {
    let client = cluster.lab().node("client");
    let first = run_requests(client, spec, LEAST_REQUESTS)?;
    let requests = (first.per_second * spec.about.as_secs_f64()) as u64;
    run_requests(client, spec, requests.max(LEAST_REQUESTS))
}

fn median(reports: &[LoadReport], of: fn(&LoadReport) -> f64) -> f64 {
    let mut all: Vec<f64> = reports.iter().map(of).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// The same redis without Dunlin, on the first host.
struct Plain {
    server: Child,
    address: SocketAddr,
}

impl Plain {
    fn start(cluster: &Cluster<'_>, plan: &Plan) -> Result<Self> {
        let node = cluster.lab().node("a");
        let address = SocketAddr::new(IpAddr::V4(node.address()), PLAIN_PORT);
        let server = node
            .command(&plan.command[0])?
            .args(&plan.command[1..])
            .args(["--port", &PLAIN_PORT.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("redis does not start")?;
        let plain = Self { server, address };
        await_service(cluster.lab().node("client"), address, PATIENCE)?;
        Ok(plain)
    }

    fn stop(&mut self) -> Result<()> {
        self.server.kill()?;
        self.server.wait()?;
        Ok(())
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // Ended already, or ended now.
        let _ = self.stop();
    }
}
