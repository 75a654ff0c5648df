//! How long clients wait when the primary's host dies under load, policy by policy.
//!
//! * **Decides:** what the gap is: the longest time that one of the counting clients had no answer around a kill. Of
//!   it, detection is what the new primary says it took to give the old one up; the rest is the gap after detection.
//! * **Flow:** one VM for each policy; SIGKILL to all of the primary's host; the host returns and is the backup;
//!   the other one is killed; and so on.
//! * **Invariants:** a run in which an acknowledged INCR was lost or doubled, or a connection broke, has no figures.
//! * **Source:** PLOVER (NSDI'18, 6.6). **Not here:** scenarios with other faults ([`crate::scenario`]).

use dunlin_api::FailoverStatus;
use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::report::{Target, at_most, median_of};
use super::{BenchSpec, plot, standing};
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, await_service};
use crate::demo::service;

const PATIENCE: Duration = Duration::from_secs(120);
/// Bars of the histogram: so many ms each, and so many of them before the last one, which holds all longer gaps.
const BAR_MS: u64 = 25;
const BARS: u64 = 16;
/// Acknowledged INCRs before and after each kill.
const ACKNOWLEDGED: u64 = 300;

/// One kill.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kill {
    /// The host that died.
    pub killed: String,
    /// Without an answer, in all.
    pub gap_us: u64,
    /// Of it, after the old primary was given up.
    pub after_detection_us: u64,
    /// The new primary's steps.
    pub failover: FailoverStatus,
}

/// All kills under one policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FailoverRow {
    /// The policy.
    pub policy: String,
    /// The kills.
    pub kills: Vec<Kill>,
    /// INCRs that were answered, all of them rightly.
    pub acknowledged: u64,
    /// What went wrong; then there are no figures.
    pub failure: Option<String>,
}

/// The whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FailoverReport {
    /// Where it was measured.
    pub on: Machine,
    /// In words, what the figures mean.
    pub note: String,
    /// One for each policy.
    pub rows: Vec<FailoverRow>,
    /// What was promised.
    pub targets: Vec<Target>,
}

/// How hosts die, and under whom.
#[derive(Clone, Copy, Debug)]
pub struct Deaths {
    /// How often the primary's host is killed under each policy.
    pub kills: u32,
    /// Clients that count, each with one connection.
    pub connections: usize,
    /// The network brings what is for the VM to both of its hosts.
    pub flooding: bool,
}

/// Kills the primary's host again and again under each policy.
pub fn run(spec: &BenchSpec, deaths: &Deaths, say: &mut dyn FnMut(&str)) -> Result<FailoverReport> {
    let mut rows = Vec::new();
    for policy in &spec.policies {
        let row = match one_policy(spec, policy, deaths, say) {
            Ok(row) => row,
            Err(error) => {
                say(&format!("FAILED {policy}: {error:#}"));
                FailoverRow {
                    policy: policy.clone(),
                    kills: Vec::new(),
                    acknowledged: 0,
                    failure: Some(format!("{error:#}")),
                }
            }
        };
        rows.push(row);
    }
    let subject = rows.iter().find(|row| row.policy == super::report::SUBJECT);
    let gap = subject.and_then(|row| median(row, |kill| kill.after_detection_us));
    let with_name = |figure: Option<f64>| figure.map(|figure| (figure, String::new()));
    let whole = subject.and_then(|row| median(row, |kill| kill.gap_us));
    let worst = subject.filter(|row| row.failure.is_none() && !row.kills.is_empty());
    let targets = vec![
        at_most(
            "dunlin: gap under load after detection, p50 in ms",
            with_name(gap),
            50.0,
        ),
        at_most(
            "dunlin: gap under load, p50 in ms",
            with_name(whole),
            if deaths.flooding { 50.0 } else { 250.0 },
        ),
        at_most(
            "dunlin: gap under load, p99 in ms, on a network that floods",
            with_name(worst.filter(|_| deaths.flooding).map(|row| percentile(row, 99))),
            150.0,
        ),
    ];
    Ok(FailoverReport {
        on: super::nothing_yet(spec).on,
        note: format!(
            "{} kills of the whole primary host for each policy, under {} clients that INCR and check every answer; each host has \
             {} % of one core; the network {}. Detection is the primary's silence until it is given up.",
            deaths.kills,
            deaths.connections,
            spec.host_cpu_percent,
            if deaths.flooding {
                "brings what is for the VM to both hosts"
            } else {
                "learns where the VM is"
            }
        ),
        rows,
        targets,
    })
}

fn one_policy(
    spec: &BenchSpec,
    policy: &str,
    deaths: &Deaths,
    say: &mut dyn FnMut(&str),
) -> Result<FailoverRow> {
    let testbed = standing::testbed(spec.host_cpu_percent)?;
    if deaths.flooding {
        testbed.flood(&standing::HOSTS)?;
    }
    let row = {
        let mut cluster = standing::cluster(&testbed, spec)?;
        let told = story(spec, &mut cluster, policy, deaths, say);
        if told.is_err() {
            cluster.keep_logs(&format!("bench-failover-{policy}"));
        }
        told?
    };
    testbed.close()?;
    Ok(row)
}

fn story(
    spec: &BenchSpec,
    cluster: &mut Cluster<'_>,
    policy: &str,
    deaths: &Deaths,
    say: &mut dyn FnMut(&str),
) -> Result<FailoverRow> {
    let testbed = cluster.testbed();
    let client = testbed.node("client");
    let plan = standing::plan(spec, "redis", policy)?;
    let file = plan.write(testbed, &standing::guest(spec, "redis")?)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    await_service(client, service(), PATIENCE)?;
    let (mut primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    standing::with_shares(testbed, spec.host_cpu_percent)?;
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: service(),
            connections: deaths.connections,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    let mut moments = Vec::new();
    let mut done = Vec::new();
    for _ in 0..deaths.kills {
        counter.await_more(ACKNOWLEDGED, PATIENCE)?;
        let killed_at = cluster.kill_host(&primary)?;
        counter
            .await_more(ACKNOWLEDGED, PATIENCE)
            .context("no answers after the kill")?;
        moments.push((killed_at, std::time::Instant::now()));
        let (_, vm) = cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
        done.push(Kill {
            killed: primary.clone(),
            gap_us: 0,
            after_detection_us: 0,
            failover: vm.failover.unwrap_or_default(),
        });
        // Joining again is not what is measured.
        for host in cluster.hosts() {
            testbed.node(host).set_cpu_share(None)?;
        }
        cluster.start_host(&primary)?;
        (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
        standing::with_shares(testbed, spec.host_cpu_percent)?;
    }
    let (clients, answers) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    for (kill, (killed_at, answered_at)) in done.iter_mut().zip(moments) {
        kill.gap_us = answers.longest_gap_us(killed_at, answered_at);
        kill.after_detection_us = kill.gap_us.saturating_sub(kill.failover.detected_us);
        say(&format!(
            "{policy}: host {} killed: gap {:.0} ms, detection {:.0} ms, {} frames overheard",
            kill.killed,
            kill.gap_us as f64 / 1e3,
            kill.failover.detected_us as f64 / 1e3,
            kill.failover.overheard
        ));
    }
    cluster.dunlin(&primary, &["down", "--now", &plan.name])?;
    Ok(FailoverRow {
        policy: policy.to_owned(),
        kills: done,
        acknowledged: clients.acknowledged,
        failure: None,
    })
}

fn median(row: &FailoverRow, figure: impl Fn(&Kill) -> u64) -> Option<f64> {
    let values: Vec<f64> = row.kills.iter().map(|kill| figure(kill) as f64 / 1e3).collect();
    (row.failure.is_none() && !values.is_empty()).then(|| median_of(values))
}

/// Of the gaps, in ms; of fewer than a hundred the 99th is the longest.
fn percentile(row: &FailoverRow, percent: usize) -> f64 {
    let mut gaps: Vec<u64> = row.kills.iter().map(|kill| kill.gap_us).collect();
    gaps.sort_unstable();
    let at = (gaps.len() * percent).div_ceil(100).saturating_sub(1);
    gaps.get(at).map_or(0.0, |gap| *gap as f64 / 1e3)
}

/// Microseconds of a kill.
type Figure = fn(&Kill) -> u64;

/// File name and SVG of the gaps' histogram, and of what a gap is made of.
///
/// # Errors
/// When a picture cannot be drawn.
pub fn failover_pictures(report: &FailoverReport) -> Result<Vec<(String, String)>> {
    let rows: Vec<&FailoverRow> = report.rows.iter().filter(|row| !row.kills.is_empty()).collect();
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let on = report.on.in_words();
    let bar_of = |kill: &Kill| (kill.gap_us / 1_000 / BAR_MS).min(BARS);
    let bars = (0..=BARS).map(|bar| {
        let label = match bar {
            BARS => format!("{} ms and more", BARS * BAR_MS),
            _ => format!("{} to {} ms", bar * BAR_MS, (bar + 1) * BAR_MS),
        };
        let kills = |row: &&FailoverRow| row.kills.iter().filter(|kill| bar_of(kill) == bar).count();
        (label, rows.iter().map(|row| Some(kills(row) as f64)).collect())
    });
    let policies = rows.iter().map(|row| row.policy.as_str()).collect();
    let title = "kills of the primary's host by the longest time that a client waited";
    let histogram = plot::grouped(&on, title, policies, bars.collect())?;
    let mean = |row: &FailoverRow, figure: Figure| {
        let sum: u64 = row.kills.iter().map(figure).sum();
        Some(sum as f64 / row.kills.len() as f64 / 1e3)
    };
    let steps: [(&str, Figure); 5] = [
        ("detection", |kill| kill.failover.detected_us),
        ("election", |kill| kill.failover.elected_us),
        ("apply", |kill| kill.failover.applied_us),
        ("announce", |kill| kill.failover.announced_us),
        ("clients", |kill| {
            let own = kill.failover.elected_us + kill.failover.applied_us + kill.failover.announced_us;
            kill.after_detection_us.saturating_sub(own)
        }),
    ];
    let parts = rows.iter().map(|row| {
        let parts = steps.iter().map(|(_, figure)| mean(row, *figure));
        (row.policy.clone(), parts.collect())
    });
    let names = steps.iter().map(|(name, _)| *name).collect();
    let title = "what a client waits for when the primary's host dies, ms (means)";
    let steps = plot::stacked(&on, title, names, parts.collect())?;
    Ok(vec![
        ("failover-gaps.svg".to_owned(), histogram),
        ("failover-steps.svg".to_owned(), steps),
    ])
}

/// The report as a table.
pub fn failover_table(report: &FailoverReport) -> String {
    let mut text = format!("{}\n\n", report.note);
    let _ = writeln!(
        text,
        "{:8} {:>5} {:>9} {:>9} {:>9} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9} {:>12}",
        "policy",
        "kills",
        "gap p50",
        "gap p99",
        "gap max",
        "detection",
        "after p50",
        "after max",
        "election",
        "apply",
        "announce",
        "acknowledged"
    );
    for row in &report.rows {
        if let Some(failure) = &row.failure {
            let _ = writeln!(text, "{:8} FAILED {failure}", row.policy);
            continue;
        }
        let p50 = |figure: fn(&Kill) -> u64| median(row, figure).unwrap_or(0.0);
        let worst = |figure: fn(&Kill) -> u64| row.kills.iter().map(figure).max().unwrap_or(0) as f64 / 1e3;
        let _ = writeln!(
            text,
            "{:8} {:>5} {:>9.1} {:>9.1} {:>9.1} {:>10.1} {:>10.1} {:>10.1} {:>9.1} {:>9.1} {:>9.1} {:>12}",
            row.policy,
            row.kills.len(),
            p50(|kill| kill.gap_us),
            percentile(row, 99),
            worst(|kill| kill.gap_us),
            p50(|kill| kill.failover.detected_us),
            p50(|kill| kill.after_detection_us),
            worst(|kill| kill.after_detection_us),
            p50(|kill| kill.failover.elected_us),
            p50(|kill| kill.failover.applied_us),
            p50(|kill| kill.failover.announced_us),
            row.acknowledged
        );
    }
    for target in &report.targets {
        let value = target.value.map_or("-".to_owned(), |value| format!("{value:.1}"));
        let _ = writeln!(
            text,
            "{:12} {value}, {} {}: {}",
            target.verdict, target.sense, target.bar, target.name
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kill(gap_us: u64) -> Kill {
        Kill {
            killed: "a".into(),
            gap_us,
            after_detection_us: gap_us / 2,
            failover: FailoverStatus::default(),
        }
    }

    fn row(policy: &str, gaps_us: &[u64]) -> FailoverRow {
        FailoverRow {
            policy: policy.into(),
            kills: gaps_us.iter().map(|gap| kill(*gap)).collect(),
            acknowledged: 1,
            failure: None,
        }
    }

    #[test]
    fn each_kill_is_in_one_bar_and_the_longest_gaps_share_the_last() {
        let report = FailoverReport {
            on: Machine::default(),
            note: String::new(),
            rows: vec![row("dunlin", &[1, 24_999, 25_000, 9_000_000]), row("remus", &[])],
            targets: Vec::new(),
        };
        let pictures = failover_pictures(&report).unwrap();
        let names: Vec<&str> = pictures.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["failover-gaps.svg", "failover-steps.svg"]);
        let counts = |text: &str, count: &str| text.matches(&format!("\n{count}\n")).count();
        let histogram = &pictures[0].1;
        assert!(histogram.contains("400 ms and more") && !histogram.contains("remus"));
        assert_eq!((counts(histogram, "2.00"), counts(histogram, "1.00")), (1, 2));
    }

    #[test]
    fn the_99th_of_few_gaps_is_the_longest() {
        assert_eq!(percentile(&row("dunlin", &[3_000, 90_000, 5_000]), 99), 90.0);
        let many: Vec<u64> = (1..=200).map(|ms| ms * 1_000).collect();
        assert_eq!(percentile(&row("dunlin", &many), 99), 198.0);
    }
}
