//! What protection costs: the same service under each policy, in one run.
//!
//! * **Decides:** the order (policies alternate within each round, so a machine that slows down slows them all) and
//!   the fairness: each host has the same fixed share of the CPU in every policy, the unreplicated one too. Both VMs,
//!   three daemons and the client share one machine here; without fixed shares the baseline would get the CPU that a
//!   backup on another machine would not have taken from it, and the ratio would mean nothing.
//! * **Flow:** [`run`]: a lab for each policy and round -> redis-benchmark at each number of connections -> medians
//!   over rounds -> [`table`], JSON, [`plot`].
//! * **Invariants:** a figure is the median of the rounds; every figure's raw values are in the JSON.
//! * **Source:** PLOVER (NSDI'18, section 6) for what to show: throughput, latency, pause by step, pages, intervals.
//! * **Not here:** the cost of a fail-over ([`crate::demo`]).

mod plot;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::client::load::{self, LoadReport, LoadSpec};
use crate::cluster::{Cluster, HostStatus, Sync, VmPlan, await_service};
use crate::demo::service;
use crate::image::GuestImage;
use crate::lab::{CpuShare, Lab, LabSpec};

pub use plot::plot;
pub use table::table;

const PATIENCE: Duration = Duration::from_secs(180);

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchSpec {
    /// The executable, built with optimisation.
    pub dunlin: PathBuf,
    /// The guest.
    pub image: GuestImage,
    /// Policies, in the order of the table.
    pub policies: Vec<String>,
    /// Numbers of connections.
    pub connections: Vec<u32>,
    /// redis-benchmark's test.
    pub test: String,
    /// How often each policy is measured.
    pub rounds: u32,
    /// About how long each measurement takes.
    pub seconds: f64,
    /// Each host's share of the CPU, in percent of one core.
    pub host_cpu_percent: u32,
    /// A data disk for redis.
    pub disk_mib: Option<u64>,
    /// Further lines for the `[sync]` table of every policy.
    pub sync: Vec<String>,
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Which round, from 1.
    pub round: u32,
    /// What the clients saw.
    pub load: LoadReport,
    /// Syncs during the load.
    pub syncs: u64,
    /// Syncs given up during the load.
    pub aborted: u64,
    /// Medians of the syncs' figures, as the primary reports them after the load.
    pub sync: Sync,
    /// Share of one core that each host used, in percent: a, b, c.
    pub cpu_percent: [f64; 3],
}

/// All measurements of one policy at one number of connections.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The policy.
    pub policy: String,
    /// Parallel connections.
    pub connections: u32,
    /// Medians over the rounds.
    pub median: Medians,
    /// Throughput against policy `none` at the same number of connections, if that was measured.
    pub of_unreplicated: Option<f64>,
    /// The raw values.
    pub samples: Vec<Sample>,
}

/// Medians over rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Medians {
    /// Requests per second.
    pub per_second: f64,
    /// Median latency.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Syncs per second.
    pub syncs_per_second: f64,
    /// The syncs' figures.
    pub sync: std::collections::BTreeMap<String, u64>,
}

/// The whole run.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// In words, what the figures mean.
    pub note: String,
    /// Processor cores of this machine.
    pub cores: usize,
    /// This machine's kernel.
    pub kernel: String,
    /// Each host's fixed share, in percent of one core.
    pub host_cpu_percent: u32,
    /// redis-benchmark's test.
    pub test: String,
    /// Rows in the order of the table.
    pub rows: Vec<Row>,
}

/// Measures all. `say` gets a line for each measurement.
pub fn run(spec: &BenchSpec, say: &mut dyn FnMut(&str)) -> Result<BenchReport> {
    let mut rows: Vec<Row> = Vec::new();
    for &connections in &spec.connections {
        for policy in &spec.policies {
            rows.push(Row {
                policy: policy.clone(),
                connections,
                median: Medians::default(),
                of_unreplicated: None,
                samples: Vec::new(),
            });
        }
    }
    for round in 1..=spec.rounds {
        for policy in &spec.policies {
            let samples =
                measure(spec, policy, round).with_context(|| format!("policy {policy}, round {round}"))?;
            for (connections, sample) in samples {
                say(&format!(
                    "round {round} {policy} c={connections}: {:.0} requests/s, p50 {:.2} ms, p99 {:.2} ms, {} syncs",
                    sample.load.per_second, sample.load.p50_ms, sample.load.p99_ms, sample.syncs
                ));
                let row = rows
                    .iter_mut()
                    .find(|row| row.policy == *policy && row.connections == connections);
                row.expect("a row for each pair").samples.push(sample);
            }
        }
    }
    for row in &mut rows {
        row.median = medians(&row.samples);
    }
    let base: Vec<(u32, f64)> = rows
        .iter()
        .filter(|row| row.policy == "none")
        .map(|row| (row.connections, row.median.per_second))
        .collect();
    for row in &mut rows {
        let same = base
            .iter()
            .find(|(connections, _)| *connections == row.connections);
        row.of_unreplicated = same.map(|(_, unreplicated)| row.median.per_second / unreplicated);
    }
    let percent = spec.host_cpu_percent;
    Ok(BenchReport {
        note: format!(
            "All hosts share one machine. Each host has {percent} % of one core in every policy, 'none' included, so \
             that a backup takes nothing from its primary; guests run under TCG (no hardware virtualisation here). \
             Medians of {} rounds, policies alternating.",
            spec.rounds
        ),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
            .unwrap_or_default()
            .trim()
            .to_owned(),
        host_cpu_percent: percent,
        test: spec.test.clone(),
        rows,
    })
}

fn measure(spec: &BenchSpec, policy: &str, round: u32) -> Result<Vec<(u32, Sample)>> {
    let lab = Lab::new(&LabSpec {
        host_cpu: Some(CpuShare::percent(spec.host_cpu_percent)),
        ..LabSpec::three_hosts()
    })?;
    let mut samples = Vec::new();
    {
        let mut cluster = Cluster::init(&lab, &spec.dunlin, &["a", "b", "c"])?;
        for host in ["a", "b", "c"] {
            cluster.start_host(host)?;
        }
        let plan = VmPlan {
            disk_mib: spec.disk_mib,
            sync: spec.sync.clone(),
            ..VmPlan::redis(policy)
        };
        let file = plan.write(&lab, &spec.image)?;
        cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
        let client = lab.node("client");
        await_service(client, service(), PATIENCE)?;
        if policy != "none" {
            cluster.await_protected(&plan.name, PATIENCE)?;
        }
        for &connections in &spec.connections {
            let load = LoadSpec {
                target: service(),
                test: spec.test.clone(),
                connections,
                about: Duration::from_secs_f64(spec.seconds),
            };
            let before = primary_sync(&cluster.statuses(), &plan.name);
            let cpu = || ["a", "b", "c"].map(|host| lab.node(host).cpu_time().unwrap_or_default());
            let (cpu_before, begun) = (cpu(), std::time::Instant::now());
            let report = load::run(client, &load)?;
            let (took, cpu_after) = (begun.elapsed().as_secs_f64(), cpu());
            let after = primary_sync(&cluster.statuses(), &plan.name);
            let mut cpu_percent = [0.0; 3];
            for (index, value) in cpu_percent.iter_mut().enumerate() {
                *value = (cpu_after[index].saturating_sub(cpu_before[index])).as_secs_f64() / took * 100.0;
            }
            let sample = Sample {
                round,
                load: report,
                syncs: after.count.saturating_sub(before.count),
                aborted: after.aborted.saturating_sub(before.aborted),
                sync: after,
                cpu_percent,
            };
            if policy != "none" {
                ensure!(
                    sample.syncs > 0,
                    "no sync during the load: the policy did not replicate"
                );
            }
            samples.push((connections, sample));
        }
        cluster.dunlin("a", &["down", "--now", &plan.name])?;
    }
    lab.close()?;
    Ok(samples)
}

fn primary_sync(hosts: &[HostStatus], vm: &str) -> Sync {
    let vms = hosts.iter().filter_map(|host| host.vm(vm));
    vms.filter(|vm| vm.role == "primary")
        .map(|vm| vm.sync.clone())
        .next()
        .unwrap_or_default()
}

fn medians(samples: &[Sample]) -> Medians {
    let of = |figure: &dyn Fn(&Sample) -> f64| {
        let mut values: Vec<f64> = samples.iter().map(figure).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    };
    let mut sync = std::collections::BTreeMap::new();
    for name in samples.iter().flat_map(|sample| sample.sync.median.keys()) {
        let value = of(&|sample| sample.sync.median.get(name).copied().unwrap_or(0) as f64);
        sync.insert(name.clone(), value as u64);
    }
    let seconds = |sample: &Sample| sample.load.requests as f64 / sample.load.per_second.max(1e-9);
    Medians {
        per_second: of(&|sample| sample.load.per_second),
        p50_ms: of(&|sample| sample.load.p50_ms),
        p99_ms: of(&|sample| sample.load.p99_ms),
        syncs_per_second: of(&|sample| sample.syncs as f64 / seconds(sample)),
        sync,
    }
}

#[cfg(test)]
mod tests {
    use super::{BenchReport, Medians, Row, plot, table};

    #[test]
    fn a_report_is_shown_whole() {
        let row = |policy: &str, per_second: f64| Row {
            policy: policy.to_owned(),
            connections: 16,
            median: Medians {
                per_second,
                p50_ms: 2.5,
                p99_ms: 9.0,
                syncs_per_second: 40.0,
                sync: [("pause_us".to_owned(), 3000), ("stop_us".to_owned(), 500)].into(),
            },
            of_unreplicated: Some(per_second / 4000.0),
            samples: Vec::new(),
        };
        let report = BenchReport {
            note: "fair & square".to_owned(),
            cores: 2,
            kernel: "6.18".to_owned(),
            host_cpu_percent: 60,
            test: "set".to_owned(),
            rows: vec![row("none", 4000.0), row("plover", 1000.0)],
        };
        let text = table(&report);
        assert!(
            text.contains("25%") && text.contains("plover") && text.contains("3.00"),
            "{text}"
        );
        let svg = plot(&report);
        assert!(
            svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"),
            "{svg}"
        );
    }
}
