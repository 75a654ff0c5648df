//! `redis-benchmark`, run on a client for about a given time.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::testbed::Node;

/// What to load the service with.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The service.
    pub target: SocketAddr,
    /// redis-benchmark's test: `set`, `get`, `incr`, ...
    pub test: String,
    /// Parallel connections.
    pub connections: u32,
    /// About how long it shall take: redis-benchmark counts requests, so a short probe sets their number.
    pub about: Duration,
}

/// What redis-benchmark measured.
#[derive(Clone, Debug, Default, Serialize, PartialEq)]
pub struct LoadReport {
    /// Requests in all.
    pub requests: u64,
    /// Requests per second.
    pub per_second: f64,
    /// Latencies in milliseconds.
    pub mean_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 95th percentile.
    pub p95_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// The worst.
    pub max_ms: f64,
}

/// Runs the load on `node` and waits for its end.
pub fn run(node: &Node, spec: &LoadSpec) -> Result<LoadReport> {
    let probe = run_requests(node, spec, u64::from(spec.connections) * 8)?;
    let requests = (probe.per_second * spec.about.as_secs_f64()) as u64;
    run_requests(node, spec, requests.max(u64::from(spec.connections) * 8))
}

/// Runs a load of `requests`.
pub fn run_requests(node: &Node, spec: &LoadSpec, requests: u64) -> Result<LoadReport> {
    let output = command(node, spec, requests)?
        .arg("--csv")
        .output()
        .context("redis-benchmark is not here: apt-get install redis-tools (or 'cargo xtask setup')")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!(
            "redis-benchmark failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(LoadReport {
        requests,
        ..parse(&text)?
    })
}

/// The command line of a load of `requests`, for callers that want it to run beside something else.
pub fn command(node: &Node, spec: &LoadSpec, requests: u64) -> Result<Command> {
    let mut command = node.command("redis-benchmark")?;
    command
        .args([
            "-h",
            &spec.target.ip().to_string(),
            "-p",
            &spec.target.port().to_string(),
        ])
        .args([
            "-t",
            &spec.test,
            "-n",
            &requests.to_string(),
            "-c",
            &spec.connections.to_string(),
        ])
        .args(["-r", "10000", "-d", "64"]);
    Ok(command)
}

/// The line that `--csv` prints under its heading.
fn parse(csv: &str) -> Result<LoadReport> {
    let mut rows = csv.lines().map(|line| {
        line.split(',')
            .map(|cell| cell.trim().trim_matches('"'))
            .collect::<Vec<_>>()
    });
    let heading = rows
        .find(|row| row.first() == Some(&"test"))
        .context("redis-benchmark printed no heading")?;
    let row = rows.next().context("redis-benchmark printed no figures")?;
    let cell = |name: &str| -> Result<f64> {
        let at = heading
            .iter()
            .position(|&title| title == name)
            .with_context(|| format!("no column {name}"))?;
        let text = row.get(at).with_context(|| format!("no value for {name}"))?;
        text.parse().with_context(|| format!("{name}: {text}"))
    };
    Ok(LoadReport {
        requests: 0,
        per_second: cell("rps")?,
        mean_ms: cell("avg_latency_ms")?,
        p50_ms: cell("p50_latency_ms")?,
        p95_ms: cell("p95_latency_ms")?,
        p99_ms: cell("p99_latency_ms")?,
        max_ms: cell("max_latency_ms")?,
    })
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_csv_of_redis_benchmark_is_read() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"\n\
                   \"SET\",\"5917.16\",\"2.604\",\"0.392\",\"2.527\",\"3.823\",\"5.647\",\"9.631\"\n";
        let report = parse(csv).unwrap();
        assert_eq!(
            (report.per_second, report.p50_ms, report.p99_ms),
            (5917.16, 2.527, 5.647)
        );
        assert!(parse("").is_err());
        assert!(parse("\"test\",\"rps\"\n\"SET\",\"1\"\n").is_err());
    }
}
