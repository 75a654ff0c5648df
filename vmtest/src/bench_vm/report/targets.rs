//! What was promised, and what a policy is worth against itself: figures with their bars.

use serde::{Deserialize, Serialize};

use super::super::case::{Kind, SERVICES};
use super::super::cost::DAEMON;
use super::super::paired::Ratio;
use super::{BASELINE, BenchReport, LOADED, Row, SUBJECT, policy_of, values};

/// A figure with its bar.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// What is judged.
    pub name: String,
    /// What was measured; nothing if it was not.
    pub value: Option<f64>,
    /// Its interval, where the figure has one.
    pub interval: Option<(f64, f64)>,
    /// The bar.
    pub bar: f64,
    /// `at least` or `at most`.
    pub sense: String,
    /// `met`, `missed` or `not measured`.
    pub verdict: String,
    /// Where it is at its worst.
    pub worst: String,
}

/// One policy's windows beside others of the same policy: there is nothing to be found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AgainstItself {
    /// Throughput of the one over the other's, over all cases, with an interval of 99.5 %.
    ///
    /// Of intervals of 95 % one in twenty misses 1 by chance alone, so that of ten honest runs four in ten would have one that does;
    /// with 99.5 % it is one in twenty.
    pub throughput: Ratio,
    /// Over how many cases.
    pub cases: usize,
    /// 1 lies in the interval, and the interval is narrow enough to tell something.
    pub holds: bool,
}

/// An interval that is wide enough holds everything: a wider one, as a share of its middle, tells nothing of the bench.
const WIDEST: f64 = 0.5;
/// See [`AgainstItself::throughput`].
const OUTSIDE: f64 = 0.005;
/// The policy that the paper's figures are of, and its period.
const SPECULATIVE: &str = "remus+spec@50";
const SPECULATIVE_PERIOD_US: f64 = 50_000.0;
/// 1 MiB on a fresh connection, over each link.
const FRESH: [&str; 5] = [
    "down-1m-fresh",
    "down-1m-fresh 1gbit",
    "down-1m-fresh 5ms",
    "down-1m-fresh 20ms",
    "down-1m-fresh 1%",
];
/// Services that answer each packet with a packet.
const PACKET_PAIRS: [&str; 3] = ["redis", "memcached", "nginx"];

impl BenchReport {
    pub(super) fn judge(&self) -> Vec<Target> {
        let own: Vec<&Row> = self.rows.iter().filter(|row| row.policy == SUBJECT).collect();
        let worst = |of: &mut dyn Iterator<Item = (Ratio, String)>, greatest: bool| {
            let order = |a: &(Ratio, String), b: &(Ratio, String)| a.0.median.total_cmp(&b.0.median);
            let found = if greatest {
                of.max_by(order)
            } else {
                of.min_by(order)
            };
            found.map(|(ratio, at)| (ratio.median, ratio.interval, at))
        };
        let (mean, services) = self.services_mean(SUBJECT, |connections| connections >= LOADED);
        let mut targets = vec![at_least(
            &format!(
                "{SUBJECT}: throughput, share of {BASELINE}, geometric mean over {services} of {} services",
                SERVICES.len()
            ),
            mean.map(|mean| (mean.median, mean.interval, String::new())),
            0.90,
        )];
        let beside_best = &mut own.iter().filter_map(|row| self.beside_best(row));
        targets.push(at_least(
            &format!("{SUBJECT}: throughput, share of the best other policy, worst case"),
            worst(beside_best, false),
            0.90,
        ));
        let single = own.iter().filter(|row| row.connections == 1);
        let latency = &mut single.filter_map(|row| Some((row.latency_of_baseline?, row.title())));
        targets.push(interval_at_most(
            &format!("{SUBJECT}: p50 latency at one connection, times {BASELINE}, worst case"),
            worst(latency, true),
            1.5,
        ));
        for (connections, bar) in [(1, 40.0), (16, 15.0)] {
            let rows = own
                .iter()
                .filter(|row| row.connections == connections && row.kind == Kind::Service)
                .filter(|row| PACKET_PAIRS.contains(&row.service.as_str()));
            let daemon =
                rows.filter_map(|row| Some((row.median.as_ref()?.cost.on("a", &DAEMON), row.title())));
            targets.push(at_most(
                &format!("{SUBJECT}: CPU of the primary's daemon for a request at {connections}, us, worst of redis, memcached, nginx"),
                daemon.max_by(|a, b| a.0.total_cmp(&b.0)),
                bar,
            ));
        }
        for (policy, bar) in [(SUBJECT, 2.0), ("plover", 5.0)] {
            let rows = self
                .rows
                .iter()
                .filter(|row| row.policy == policy && row.service == "redis" && row.kind == Kind::Service);
            let pause = rows
                .filter_map(|row| Some((row.median.as_ref()?.pause_p50_ms, row.title())))
                .filter(|(pause, _)| *pause > 0.0);
            targets.push(at_most(
                &format!("{policy}: pause per sync on redis, p50 in ms, worst case"),
                pause.max_by(|a, b| a.0.total_cmp(&b.0)),
                bar,
            ));
        }
        let handshakes = own.iter().filter(|row| row.case == "tls-handshake");
        let shares = &mut handshakes.filter_map(|row| Some((row.of_baseline?, row.title())));
        targets.push(at_least(
            &format!("{SUBJECT}: TLS handshakes a second, share of {BASELINE}"),
            worst(shares, false),
            0.5,
        ));
        targets.extend(self.judge_bulk());
        targets
    }

    /// Bulk transfers: beside what Linux's own TCP moves out of and into a VM without protection.
    fn judge_bulk(&self) -> [Target; 3] {
        let of = |policy: &str, cases: &'static [&str]| {
            let rows = self
                .rows
                .iter()
                .filter(move |row| cases.contains(&row.case.as_str()));
            let policy = policy.to_owned();
            rows.filter(move |row| policy_of(&row.policy) == policy)
        };
        let least = |rows: &mut dyn Iterator<Item = &Row>| {
            let shares = rows.filter_map(|row| Some((row.of_baseline?, row.title())));
            shares
                .min_by(|a, b| a.0.median.total_cmp(&b.0.median))
                .map(|(share, at)| (share.median, share.interval, at))
        };
        let later = of(SPECULATIVE, &FRESH).filter_map(|row| Some((row.added_p50_us?, row.title())));
        let later = later.map(|(added, at)| (added.median / SPECULATIVE_PERIOD_US, at));
        [
            at_least(
                &format!("{SPECULATIVE}: 64 MiB down over a LAN, share of {BASELINE}, worst case"),
                least(&mut of(SPECULATIVE, &["down-64m", "down-64m 1gbit"])),
                0.90,
            ),
            at_most(
                &format!(
                    "{SPECULATIVE}: 1 MiB on a fresh connection, periods more than {BASELINE}, worst case"
                ),
                later.max_by(|a, b| a.0.total_cmp(&b.0)),
                2.0,
            ),
            at_least(
                &format!("{SUBJECT}: 64 MiB down and up over a LAN, share of {BASELINE}, worst case"),
                least(&mut of(
                    SUBJECT,
                    &["down-64m", "down-64m 1gbit", "up-64m", "up-64m 1gbit"],
                )),
                0.90,
            ),
        ]
    }

    /// A row's throughput as a share of the best other replicated policy's, over pairs of one round: each one's share of the baseline
    /// beside it, or where nothing was measured beside them their throughputs.
    fn beside_best(&self, row: &Row) -> Option<(Ratio, String)> {
        row.median.as_ref()?;
        let others = self
            .rows
            .iter()
            .filter(|other| other.same_case(row) && !other.is_of(SUBJECT) && !other.is_of(BASELINE));
        let paired = others.filter_map(|other| {
            let best = other.median.as_ref()?;
            let (mine, theirs) = (self.shares(row), self.shares(other));
            let pairs = if mine.is_empty() || theirs.is_empty() {
                row.pairs(other, |sample| sample.load.per_second, |own, other| own / other)
            } else {
                let both = mine.iter().filter_map(|(round, own)| {
                    let (_, other) = theirs.iter().find(|(other, _)| other == round)?;
                    Some((*round, own / other))
                });
                both.collect()
            };
            let speed = other.of_baseline.map_or(best.per_second, |share| share.median);
            Some((speed, Ratio::of(&values(pairs))?, &other.policy))
        });
        let (_, ratio, other) = paired.max_by(|a, b| a.0.total_cmp(&b.0))?;
        Some((ratio, format!("{}, beside {other}", row.title())))
    }

    /// Where all policies are one.
    pub(super) fn against_itself(&self) -> Option<AgainstItself> {
        let first = policy_of(self.policies.first()?);
        if self.policies.len() < 2 || self.policies.iter().any(|label| policy_of(label) != first) {
            return None;
        }
        let cases: Vec<Vec<Vec<f64>>> = self
            .rows
            .iter()
            .map(|row| values(self.shares(row)))
            .filter(|shares| !shares.is_empty())
            .map(|shares| vec![shares])
            .collect();
        let throughput = Ratio::pooled(&cases, OUTSIDE)?;
        let holds = throughput
            .interval
            .is_some_and(|(low, high)| low <= 1.0 && 1.0 <= high && high - low <= WIDEST * throughput.median);
        Some(AgainstItself {
            throughput,
            cases: cases.len(),
            holds,
        })
    }
}

/// A value, its interval, and where it was measured.
type Figure = Option<(f64, Option<(f64, f64)>, String)>;

fn at_least(name: &str, value: Figure, bar: f64) -> Target {
    target(name, value, bar, "at least", |value| value >= bar)
}

fn interval_at_most(name: &str, value: Figure, bar: f64) -> Target {
    target(name, value, bar, "at most", |value| value <= bar)
}

/// A target whose value must not be above the bar.
pub fn at_most(name: &str, value: Option<(f64, String)>, bar: f64) -> Target {
    interval_at_most(name, value.map(|(value, worst)| (value, None, worst)), bar)
}

fn target(name: &str, value: Figure, bar: f64, sense: &str, met: impl Fn(f64) -> bool) -> Target {
    let verdict = match &value {
        None => "not measured",
        Some((value, ..)) if met(*value) => "met",
        Some(_) => "missed",
    };
    Target {
        name: name.to_owned(),
        value: value.as_ref().map(|(value, ..)| *value),
        interval: value.as_ref().and_then(|(_, interval, _)| *interval),
        bar,
        sense: sense.to_owned(),
        verdict: verdict.to_owned(),
        worst: value.map(|(.., worst)| worst).unwrap_or_default(),
    }
}
