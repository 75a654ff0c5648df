//! What is reported: medians over rounds, shares of the unreplicated figures, geometric means, targets met or missed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::case::{Case, Kind, SERVICES};
use super::clients::Measured;
use super::paired::Ratio;

/// The unreplicated VM.
pub const BASELINE: &str = "none";
/// The policy that the targets are about.
pub const SUBJECT: &str = "dunlin";
/// From this number of connections on a case counts as loaded: there throughput is compared; below it, latency.
const LOADED: u32 = 16;

/// Syncs during one load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Syncs {
    /// How many.
    pub count: u64,
    /// How many were given up.
    pub aborted: u64,
    /// Why they were made: reason -> how many.
    pub reasons: BTreeMap<String, u64>,
    /// How the copies were kept after the load.
    pub manner: String,
    /// How often the manner was changed.
    pub change_overs: u64,
    /// The comparison of outputs: `matched`, `by_sync`, `differences`, ...
    pub compared: BTreeMap<String, u64>,
    /// Mean of each figure over the syncs of this load.
    pub mean: BTreeMap<String, f64>,
    /// Median of each figure over the last 1,000 syncs of this VM, which may reach back to the loads before.
    pub median: BTreeMap<String, u64>,
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Which round, from 1.
    pub round: u32,
    /// What the clients saw.
    pub load: Measured,
    /// How long it took with its probes, in seconds.
    pub took_s: f64,
    /// The syncs meanwhile.
    pub syncs: Syncs,
    /// Share of one core that each host used, in percent: a, b, c.
    pub cpu_percent: [f64; 3],
    /// Whatever else the primary's status said after the load.
    pub status: BTreeMap<String, Value>,
}

/// Medians over rounds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Medians {
    /// Requests per second.
    pub per_second: f64,
    /// Median latency.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Syncs per second.
    pub syncs_per_second: f64,
    /// The syncs' mean figures.
    pub sync: BTreeMap<String, f64>,
    /// The median of the syncs' pauses.
    pub pause_p50_ms: f64,
    /// Syncs by reason, in all rounds.
    pub reasons: BTreeMap<String, u64>,
    /// The comparison of outputs, in all rounds.
    pub compared: BTreeMap<String, u64>,
    /// Changes of manner, in all rounds.
    pub change_overs: u64,
    /// The manner after each round.
    pub manners: Vec<String>,
}

/// All measurements of one policy in one case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The service.
    pub service: String,
    /// The case.
    pub case: String,
    /// Parallel connections.
    pub connections: u32,
    /// Service or hard case.
    pub kind: Kind,
    /// The policy.
    pub policy: String,
    /// Medians over the rounds; nothing if any round failed.
    pub median: Option<Medians>,
    /// Throughput against the baseline's in the same case and round.
    pub of_baseline: Option<Ratio>,
    /// Median latency against the baseline's in the same case and round.
    pub latency_of_baseline: Option<Ratio>,
    /// What went wrong, by round. A case that failed once has no figures.
    pub failures: Vec<String>,
    /// The raw values.
    pub samples: Vec<Sample>,
}

impl Row {
    /// A row without measurements.
    pub fn new(case: &Case, policy: &str) -> Self {
        Self {
            service: case.service.to_owned(),
            case: case.name.to_owned(),
            connections: case.connections,
            kind: case.kind,
            policy: policy.to_owned(),
            median: None,
            of_baseline: None,
            latency_of_baseline: None,
            failures: Vec::new(),
            samples: Vec::new(),
        }
    }

    /// Whether both are about the same load.
    pub fn same_case(&self, other: &Row) -> bool {
        (&self.service, &self.case, self.connections) == (&other.service, &other.case, other.connections)
    }

    /// `redis set c=16`
    pub fn title(&self) -> String {
        format!("{} {} c={}", self.service, self.case, self.connections)
    }
}

/// A figure with its bar.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// What is judged.
    pub name: String,
    /// What was measured; nothing if it was not.
    pub value: Option<f64>,
    /// The bar.
    pub bar: f64,
    /// `at least` or `at most`.
    pub sense: String,
    /// `met`, `missed` or `not measured`.
    pub verdict: String,
    /// Where it is at its worst.
    pub worst: String,
}

/// The geometric mean of one policy's throughput over the services, as a share of the baseline's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GeometricMean {
    /// The policy.
    pub policy: String,
    /// Over the loaded cases (16 connections and more).
    pub loaded: Option<f64>,
    /// Over the cases with one connection, where throughput is latency.
    pub single: Option<f64>,
    /// How many of the eight services it is over.
    pub services: usize,
}

/// The whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchReport {
    /// In words, what the figures mean.
    pub note: String,
    /// Processor cores of this machine.
    pub cores: usize,
    /// This machine's kernel.
    pub kernel: String,
    /// Each host's fixed share, in percent of one core.
    pub host_cpu_percent: u32,
    /// Rounds, and seconds of each load.
    pub rounds: u32,
    /// See `rounds`.
    pub seconds: f64,
    /// Policies in the order of the table.
    pub policies: Vec<String>,
    /// Rows in the order of the table.
    pub rows: Vec<Row>,
    /// One for each policy.
    pub geometric_means: Vec<GeometricMean>,
    /// What was promised.
    pub targets: Vec<Target>,
}

impl BenchReport {
    /// Takes the rows of another run for the services that this one did not measure, so that a long matrix can be
    /// measured service by service.
    pub fn add_from(&mut self, other: BenchReport) {
        let mine: Vec<String> = self.rows.iter().map(|row| row.service.clone()).collect();
        let rows = other.rows.into_iter();
        self.rows.extend(rows.filter(|row| !mine.contains(&row.service)));
        for policy in other.policies {
            if !self.policies.contains(&policy) {
                self.policies.push(policy);
            }
        }
        // Stable: cases and policies of a service stay in their order.
        self.rows
            .sort_by_key(|row| SERVICES.iter().position(|&name| name == row.service));
        self.conclude();
    }

    /// Computes all that follows from the samples.
    pub fn conclude(&mut self) {
        for row in &mut self.rows {
            row.median = (row.failures.is_empty() && !row.samples.is_empty()).then(|| medians(&row.samples));
        }
        let bases: Vec<Row> = self
            .rows
            .iter()
            .filter(|row| row.policy == BASELINE)
            .cloned()
            .collect();
        for row in &mut self.rows {
            let base = bases
                .iter()
                .find(|base| base.same_case(row) && base.median.is_some());
            let ratio = |figure: &dyn Fn(&Sample) -> f64| {
                let base = base.filter(|_| row.median.is_some())?;
                let pairs = row.samples.iter().filter_map(|own| {
                    let beside = base.samples.iter().find(|beside| beside.round == own.round)?;
                    Some(figure(own) / figure(beside))
                });
                Ratio::of(&pairs.collect::<Vec<f64>>())
            };
            let (share, times) = (
                ratio(&|sample| sample.load.per_second),
                ratio(&|sample| sample.load.p50_ms),
            );
            (row.of_baseline, row.latency_of_baseline) = (share, times);
        }
        self.geometric_means = self
            .policies
            .iter()
            .map(|policy| {
                let (loaded, services) = self.services_mean(policy, |connections| connections >= LOADED);
                let (single, _) = self.services_mean(policy, |connections| connections < LOADED);
                GeometricMean {
                    policy: policy.clone(),
                    loaded,
                    single,
                    services,
                }
            })
            .collect();
        self.targets = self.judge();
    }

    /// Each service counts once: its share is the geometric mean of its cases' shares.
    fn services_mean(&self, policy: &str, counts: impl Fn(u32) -> bool) -> (Option<f64>, usize) {
        let mut shares = Vec::new();
        for service in SERVICES {
            let cases: Vec<f64> = self
                .rows
                .iter()
                .filter(|row| row.service == service && row.policy == policy)
                .filter(|row| row.kind == Kind::Service && counts(row.connections))
                .filter_map(|row| row.of_baseline.map(|share| share.median))
                .collect();
            shares.extend(geometric_mean(&cases));
        }
        (geometric_mean(&shares), shares.len())
    }

    fn judge(&self) -> Vec<Target> {
        let own: Vec<&Row> = self.rows.iter().filter(|row| row.policy == SUBJECT).collect();
        let (mean, services) = self.services_mean(SUBJECT, |connections| connections >= LOADED);
        let mut targets = vec![at_least(
            &format!(
                "{SUBJECT}: throughput, share of {BASELINE}, geometric mean over {services} of {} services",
                SERVICES.len()
            ),
            mean.map(|mean| (mean, String::new())),
            0.90,
        )];
        let beside_best = own.iter().filter_map(|row| {
            let others = self
                .rows
                .iter()
                .filter(|other| other.same_case(row) && other.policy != SUBJECT && other.policy != BASELINE);
            let best = others
                .filter_map(|other| Some((other.median.as_ref()?.per_second, &other.policy)))
                .max_by(|a, b| a.0.total_cmp(&b.0))?;
            let share = row.median.as_ref()?.per_second / best.0;
            Some((share, format!("{}, beside {}", row.title(), best.1)))
        });
        targets.push(at_least(
            &format!("{SUBJECT}: throughput, share of the best other policy, worst case"),
            beside_best.min_by(|a, b| a.0.total_cmp(&b.0)),
            0.90,
        ));
        let latency = own
            .iter()
            .filter(|row| row.connections == 1)
            .filter_map(|row| Some((row.latency_of_baseline?.median, row.title())));
        targets.push(at_most(
            &format!("{SUBJECT}: p50 latency at one connection, times {BASELINE}, worst case"),
            latency.max_by(|a, b| a.0.total_cmp(&b.0)),
            1.5,
        ));
        let pause = self
            .rows
            .iter()
            .filter(|row| row.policy == "plover" && row.service == "redis" && row.kind == Kind::Service)
            .filter_map(|row| Some((row.median.as_ref()?.pause_p50_ms, row.title())))
            .filter(|(pause, _)| *pause > 0.0);
        targets.push(at_most(
            "plover: pause per sync on redis, p50 in ms, worst case",
            pause.max_by(|a, b| a.0.total_cmp(&b.0)),
            5.0,
        ));
        targets
    }

    /// Cases that failed, for the exit code.
    pub fn failures(&self) -> Vec<String> {
        let failed = self.rows.iter().filter(|row| !row.failures.is_empty());
        failed
            .map(|row| format!("{} {}: {}", row.policy, row.title(), row.failures.join("; ")))
            .collect()
    }
}

fn at_least(name: &str, value: Option<(f64, String)>, bar: f64) -> Target {
    target(name, value, bar, "at least", |value| value >= bar)
}

/// A target whose value must not be above the bar.
pub fn at_most(name: &str, value: Option<(f64, String)>, bar: f64) -> Target {
    target(name, value, bar, "at most", |value| value <= bar)
}

fn target(
    name: &str,
    value: Option<(f64, String)>,
    bar: f64,
    sense: &str,
    met: impl Fn(f64) -> bool,
) -> Target {
    let verdict = match &value {
        None => "not measured",
        Some((value, _)) if met(*value) => "met",
        Some(_) => "missed",
    };
    Target {
        name: name.to_owned(),
        value: value.as_ref().map(|(value, _)| *value),
        bar,
        sense: sense.to_owned(),
        verdict: verdict.to_owned(),
        worst: value.map(|(_, worst)| worst).unwrap_or_default(),
    }
}

/// Nothing of nothing.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().map(|value| value.ln()).sum();
    (!values.is_empty()).then(|| (sum / values.len() as f64).exp())
}

/// The middle of an odd number of values, the mean of the two middle ones of an even number; 0 of none.
pub fn median_of(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => 0.0,
        length if length % 2 == 1 => values[half],
        _ => f64::midpoint(values[half - 1], values[half]),
    }
}

fn medians(samples: &[Sample]) -> Medians {
    let of = |figure: &dyn Fn(&Sample) -> f64| median_of(samples.iter().map(figure).collect());
    let mut sync = BTreeMap::new();
    for name in samples.iter().flat_map(|sample| sample.syncs.mean.keys()) {
        let value = of(&|sample| sample.syncs.mean.get(name).copied().unwrap_or(0.0));
        sync.insert(name.clone(), value);
    }
    let added = |figures: fn(&Syncs) -> &BTreeMap<String, u64>| {
        let mut all = BTreeMap::new();
        for (name, count) in samples.iter().flat_map(|sample| figures(&sample.syncs)) {
            *all.entry(name.clone()).or_insert(0) += count;
        }
        all
    };
    Medians {
        per_second: of(&|sample| sample.load.per_second),
        p50_ms: of(&|sample| sample.load.p50_ms),
        p99_ms: of(&|sample| sample.load.p99_ms),
        syncs_per_second: of(&|sample| sample.syncs.count as f64 / sample.took_s.max(1e-9)),
        sync,
        pause_p50_ms: of(&|sample| sample.syncs.median.get("pause_us").copied().unwrap_or(0) as f64 / 1e3),
        reasons: added(|syncs| &syncs.reasons),
        compared: added(|syncs| &syncs.compared),
        change_overs: samples.iter().map(|sample| sample.syncs.change_overs).sum(),
        manners: samples.iter().map(|sample| sample.syncs.manner.clone()).collect(),
    }
}

#[cfg(test)]
mod tests;
