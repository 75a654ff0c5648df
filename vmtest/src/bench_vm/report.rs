//! What is reported: medians over windows, shares of the unreplicated figures, geometric means, targets met or missed.

mod targets;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::bound::{Bound, median_pause_ms};
use super::case::{Case, Kind, SERVICES, place};
use super::clients::Measured;
use super::cost::Cost;
use super::machine::Machine;
use super::paired::{OUTSIDE, Ratio};
use super::syscalls::Calls;

pub use targets::{AgainstItself, Target, at_most};

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
    pub mode: String,
    /// How often the mode was changed.
    pub change_overs: u64,
    /// The comparison of outputs: `matched`, `by_sync`, `differences`, ...
    pub compared: BTreeMap<String, u64>,
    /// Frames that left, and how long they were held together, in microseconds.
    pub released: u64,
    /// See `released`.
    pub held_us: u64,
    /// Mean of each figure over the syncs of this load.
    pub mean: BTreeMap<String, f64>,
    /// Pauses of this load by their length in microseconds, which is up to 1/16 less than they were.
    pub pauses: BTreeMap<u64, u64>,
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Which round, from 1.
    pub round: u32,
    /// The row whose window lay beside this one: its partner. Empty where a round has one window of each policy.
    pub beside: String,
    /// What the clients saw.
    pub load: Measured,
    /// How long it took with its probes, in seconds.
    pub took_s: f64,
    /// The syncs meanwhile.
    pub syncs: Syncs,
    /// Whether the way in which the copies are kept had been the same for long enough before the window began.
    pub settled: bool,
    /// Share of one core that each host used while clients asked, in percent: a, b, c.
    pub cpu_percent: [f64; 3],
    /// How much of all cores was used, by whomever, as a share.
    pub machine: f64,
    /// What a request cost.
    pub cost: Cost,
    /// What the primary's status said after the load.
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
    /// The median of the pauses of all windows' syncs, and of no others.
    pub pause_p50_ms: f64,
    /// Syncs by reason, in all rounds.
    pub reasons: BTreeMap<String, u64>,
    /// The comparison of outputs, in all rounds.
    pub compared: BTreeMap<String, u64>,
    /// Changes of mode, in all rounds.
    pub change_overs: u64,
    /// The mode after each round.
    pub modes: Vec<String>,
    /// Windows that began before the mode had settled.
    pub unsettled: usize,
    /// What a request cost.
    pub cost: Cost,
    /// Requests of the smallest window: of fewer than 100 the 99th percentile is the slowest.
    pub fewest: u64,
    /// What bounds the case.
    pub bound: Bound,
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
    /// Medians over the windows; nothing if the case failed.
    pub median: Option<Medians>,
    /// Throughput against the baseline's in the same case and round.
    pub of_baseline: Option<Ratio>,
    /// Median latency against the baseline's in the same case and round.
    pub latency_of_baseline: Option<Ratio>,
    /// What replication adds to the median latency, in microseconds, over pairs of windows.
    pub added_p50_us: Option<Ratio>,
    /// The same of the 99th percentile.
    pub added_p99_us: Option<Ratio>,
    /// Why there are no figures, whatever the windows say: a client saw something wrong.
    pub failures: Vec<String>,
    /// How many windows were begun, second tries aside.
    pub planned: u32,
    /// Why windows have no figure, one line for each that was tried: the first try is repeated.
    pub lost: Vec<String>,
    /// The raw values, one for each window that has a figure.
    pub samples: Vec<Sample>,
    /// The system calls of the primary's daemon, where they were asked for.
    pub syscalls: Option<Calls>,
}

impl Row {
    /// A row without measurements.
    pub fn new(case: &Case, policy: &str) -> Self {
        Self {
            service: case.service.to_owned(),
            case: case.label(),
            connections: case.connections,
            kind: case.kind,
            policy: policy.to_owned(),
            median: None,
            of_baseline: None,
            latency_of_baseline: None,
            added_p50_us: None,
            added_p99_us: None,
            failures: Vec::new(),
            planned: 0,
            lost: Vec::new(),
            samples: Vec::new(),
            syscalls: None,
        }
    }

    /// Why it has no figures: what a client saw, or more than a tenth of its windows lost.
    pub fn failure(&self) -> Option<String> {
        if !self.failures.is_empty() {
            return Some(self.failures.join("; "));
        }
        let missing = (self.planned as usize).saturating_sub(self.samples.len());
        (self.samples.is_empty() || missing * 10 > self.planned as usize).then(|| {
            let why = self.lost.last().map_or("not measured", String::as_str);
            format!("{}: {why}", self.windows())
        })
    }

    /// `9/10 windows`
    pub fn windows(&self) -> String {
        format!("{}/{} windows", self.samples.len(), self.planned)
    }

    /// A figure of each window beside that of its partner in `base`: their `of`.
    fn pairs(
        &self,
        base: &Row,
        figure: impl Fn(&Sample) -> f64,
        of: impl Fn(f64, f64) -> f64,
    ) -> Vec<(u32, f64)> {
        let pairs = self.samples.iter().filter_map(|own| {
            let beside = base.samples.iter().find(|beside| {
                beside.round == own.round && [self.policy.as_str(), ""].contains(&beside.beside.as_str())
            })?;
            Some((own.round, of(figure(own), figure(beside))))
        });
        pairs.filter(|(_, value)| value.is_finite()).collect()
    }

    /// Whether its policy is that of its name, or another's against which that one is measured.
    fn is_of(&self, policy: &str) -> bool {
        policy_of(&self.policy) == policy
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

/// The geometric mean of one policy's throughput over the services, as a share of the baseline's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GeometricMean {
    /// The policy.
    pub policy: String,
    /// Over the loaded cases (16 connections and more).
    pub loaded: Option<Ratio>,
    /// Over the cases with one connection, where throughput is latency.
    pub single: Option<Ratio>,
    /// How many of the eight services it is over.
    pub services: usize,
}

/// The whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchReport {
    /// On what, and how.
    pub on: Machine,
    /// How often each policy was measured.
    pub rounds: u32,
    /// From what the windows' order was drawn.
    pub seed: u64,
    /// Policies in the order of the table.
    pub policies: Vec<String>,
    /// Rows in the order of the table.
    pub rows: Vec<Row>,
    /// Services that did not end as they should after their figures were taken.
    pub ends: Vec<String>,
    /// One for each policy.
    pub geometric_means: Vec<GeometricMean>,
    /// What was promised.
    pub targets: Vec<Target>,
    /// What a policy is worth against itself, where that was measured.
    pub itself: Option<AgainstItself>,
}

impl BenchReport {
    /// Takes the rows of another run for the cases that this one did not measure, so that a long matrix can be
    /// measured case by case.
    ///
    /// # Errors
    /// With what differs, when the other's figures were measured otherwise.
    pub fn add_from(&mut self, other: BenchReport) -> Result<(), String> {
        if let Some(why) = self.on.unlike(&other.on) {
            return Err(why);
        }
        let mine = self.rows.clone();
        let rows = other.rows.into_iter();
        self.rows
            .extend(rows.filter(|row| !mine.iter().any(|own| own.same_case(row))));
        for policy in other.policies {
            if !self.policies.contains(&policy) {
                self.policies.push(policy);
            }
        }
        self.ends.extend(other.ends);
        self.rounds = self.rounds.min(other.rounds);
        // Stable: cases and policies of a service stay in their order.
        self.rows.sort_by_key(|row| place(&row.service));
        self.conclude();
        Ok(())
    }

    /// The row's label with which the others are compared: the baseline, or of one policy against itself the first.
    pub fn base(&self) -> Option<&str> {
        base(&self.policies).map(|at| self.policies[at].as_str())
    }

    /// Computes all that follows from the samples.
    pub fn conclude(&mut self) {
        let percent = f64::from(self.on.host_cpu_percent.max(1));
        for row in &mut self.rows {
            row.median = row.failure().is_none().then(|| medians(&row.samples, percent));
        }
        let base = self.base().map(str::to_owned);
        let bases: Vec<Row> = self
            .rows
            .iter()
            .filter(|row| Some(&row.policy) == base.as_ref() && row.median.is_some())
            .cloned()
            .collect();
        for row in &mut self.rows {
            let base = bases
                .iter()
                .find(|base| base.same_case(row) && row.median.is_some());
            let paired = |figure: fn(&Sample) -> f64, of: fn(f64, f64) -> f64| {
                let pairs = if base?.policy == row.policy {
                    row.samples
                        .iter()
                        .map(|own| of(figure(own), figure(own)))
                        .collect()
                } else {
                    values(row.pairs(base?, figure, of))
                };
                Ratio::of(&pairs)
            };
            let share = paired(|sample| sample.load.per_second, |own, base| own / base);
            let times = paired(|sample| sample.load.p50_ms, |own, base| own / base);
            let p50 = paired(|sample| sample.load.p50_ms * 1e3, |own, base| own - base);
            let p99 = paired(|sample| sample.load.p99_ms * 1e3, |own, base| own - base);
            (row.of_baseline, row.latency_of_baseline) = (share, times);
            (row.added_p50_us, row.added_p99_us) = (p50, p99);
        }
        self.geometric_means = self
            .policies
            .iter()
            .map(|policy| {
                let (loaded, services) = self.services_mean(policy, |connections| connections >= LOADED);
                let (single, _) = self.services_mean(policy, |connections| connections == 1);
                GeometricMean {
                    policy: policy.clone(),
                    loaded,
                    single,
                    services,
                }
            })
            .collect();
        self.targets = self.judge();
        self.itself = self.against_itself();
    }

    /// The shares of each pair of windows of a row, by round; nothing of a row that failed, or whose baseline did.
    fn shares(&self, row: &Row) -> Vec<(u32, f64)> {
        let base = self.base();
        let base = self
            .rows
            .iter()
            .find(|other| Some(other.policy.as_str()) == base && other.same_case(row));
        match base.filter(|base| base.median.is_some() && row.median.is_some() && base.policy != row.policy) {
            Some(base) => row.pairs(base, |sample| sample.load.per_second, |own, base| own / base),
            None => Vec::new(),
        }
    }

    /// Each service counts once: its share is the geometric mean of its cases' shares.
    fn services_mean(&self, policy: &str, counts: impl Fn(u32) -> bool) -> (Option<Ratio>, usize) {
        let mut services = Vec::new();
        for service in SERVICES {
            let cases: Vec<Vec<f64>> = self
                .rows
                .iter()
                .filter(|row| row.service == service && row.policy == policy)
                .filter(|row| row.kind == Kind::Service && counts(row.connections))
                .map(|row| values(self.shares(row)))
                .filter(|shares| !shares.is_empty())
                .collect();
            if !cases.is_empty() {
                services.push(cases);
            }
        }
        (Ratio::pooled(&services, OUTSIDE), services.len())
    }

    /// What has no figures, for the exit code.
    pub fn failures(&self) -> Vec<String> {
        let failed = self
            .rows
            .iter()
            .filter_map(|row| Some(format!("{} {}: {}", row.policy, row.title(), row.failure()?)));
        failed.collect()
    }
}

/// The place of the label with which the others are compared.
pub fn base(labels: &[String]) -> Option<usize> {
    let first = policy_of(labels.first()?);
    let itself = labels.len() > 1 && labels.iter().all(|label| policy_of(label) == first);
    labels
        .iter()
        .position(|label| label == BASELINE)
        .or(itself.then_some(0))
}

/// The policy of a label: one that is measured against itself has a mark behind its name.
pub fn policy_of(label: &str) -> &str {
    label.trim_end_matches('\'')
}

fn values(pairs: Vec<(u32, f64)>) -> Vec<f64> {
    pairs.into_iter().map(|(_, value)| value).collect()
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

fn medians(samples: &[Sample], host_percent: f64) -> Medians {
    let of = |figure: &dyn Fn(&Sample) -> f64| median_of(samples.iter().map(figure).collect());
    let mut pauses = BTreeMap::new();
    for (length, many) in samples.iter().flat_map(|sample| &sample.syncs.pauses) {
        *pauses.entry(*length).or_insert(0) += many;
    }
    let mut cost = Cost {
        bytes_between: of(&|sample| sample.cost.bytes_between),
        bytes_to_client: of(&|sample| sample.cost.bytes_to_client),
        ..Cost::default()
    };
    for (host, groups) in samples.iter().flat_map(|sample| &sample.cost.cpu_us) {
        for group in groups.keys() {
            let us = of(&|sample| sample.cost.on(host, &[group]));
            cost.cpu_us
                .entry(host.clone())
                .or_default()
                .insert(group.clone(), us);
        }
    }
    let bound = Bound::of(
        of(&|sample| sample.cpu_percent[0]) / host_percent,
        of(&|sample| sample.cpu_percent[1]) / host_percent,
        of(&|sample| sample.machine),
        of(&|sample| {
            let pause_us = sample.syncs.mean.get("pause_us").copied().unwrap_or(0.0);
            pause_us * sample.syncs.count as f64 / 1e6 / sample.took_s.max(1e-9)
        }),
        of(&|sample| {
            let each_us = sample.syncs.held_us as f64 / sample.syncs.released.max(1) as f64;
            each_us / 1e3 / sample.load.p50_ms.max(1e-9)
        }),
    );
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
        pause_p50_ms: median_pause_ms(&pauses),
        reasons: added(|syncs| &syncs.reasons),
        compared: added(|syncs| &syncs.compared),
        change_overs: samples.iter().map(|sample| sample.syncs.change_overs).sum(),
        modes: samples.iter().map(|sample| sample.syncs.mode.clone()).collect(),
        unsettled: samples.iter().filter(|sample| !sample.settled).count(),
        cost,
        fewest: samples
            .iter()
            .map(|sample| sample.load.requests)
            .min()
            .unwrap_or(0),
        bound,
    }
}

#[cfg(test)]
mod tests;
