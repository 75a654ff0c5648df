//! How long clients wait when the primary's host dies under load, policy by policy.
//!
//! * **Decides:** what the gap is: the longest time that one of the counting clients had no answer around a kill. Of
//!   it, detection is what the new primary says it took to give the old one up; the rest is the gap after detection.
//! * **Flow:** one VM for each policy; SIGKILL to all of the primary's host; the host returns and is the backup;
//!   the other one is killed; and so on.
//! * **Invariants:** a run in which an acknowledged INCR was lost or doubled, or a connection broke, has no figures.
//! * **Source:** PLOVER (NSDI'18, 6.6). **Not here:** scenarios with other faults ([`crate::scenario`]).

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::report::{Target, at_most, median_of};
use super::{BenchSpec, standing};
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, Failover, await_service};
use crate::demo::service;

const PATIENCE: Duration = Duration::from_secs(120);
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
    pub failover: Failover,
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
    /// In words, what the figures mean.
    pub note: String,
    /// One for each policy.
    pub rows: Vec<FailoverRow>,
    /// What was promised.
    pub targets: Vec<Target>,
}

/// Kills the primary's host `kills` times under each policy.
pub fn run(
    spec: &BenchSpec,
    kills: u32,
    connections: usize,
    say: &mut dyn FnMut(&str),
) -> Result<FailoverReport> {
    let mut rows = Vec::new();
    for policy in &spec.policies {
        let row = match one_policy(spec, policy, kills, connections, say) {
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
    let target = at_most(
        "dunlin: gap under load after detection, p50 in ms",
        gap.map(|gap| (gap, String::new())),
        50.0,
    );
    Ok(FailoverReport {
        note: format!(
            "{kills} kills of the whole primary host for each policy, under {connections} clients that INCR and check \
             every answer; each host has {} % of one core. Detection is the primary's silence until it is given up.",
            spec.host_cpu_percent
        ),
        rows,
        targets: vec![target],
    })
}

fn one_policy(
    spec: &BenchSpec,
    policy: &str,
    kills: u32,
    connections: usize,
    say: &mut dyn FnMut(&str),
) -> Result<FailoverRow> {
    let lab = standing::lab(spec.host_cpu_percent)?;
    let row = {
        let mut cluster = standing::cluster(&lab, spec)?;
        let told = story(spec, &mut cluster, policy, kills, connections, say);
        if told.is_err() {
            cluster.keep_logs(&format!("bench-failover-{policy}"));
        }
        told?
    };
    lab.close()?;
    Ok(row)
}

fn story(
    spec: &BenchSpec,
    cluster: &mut Cluster<'_>,
    policy: &str,
    kills: u32,
    connections: usize,
    say: &mut dyn FnMut(&str),
) -> Result<FailoverRow> {
    let lab = cluster.lab();
    let client = lab.node("client");
    let plan = standing::plan(spec, "redis", policy);
    let file = plan.write(lab, &standing::guest(spec, "redis")?)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    await_service(client, service(), PATIENCE)?;
    let (mut primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    standing::with_shares(lab, spec.host_cpu_percent)?;
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: service(),
            connections,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    let mut moments = Vec::new();
    let mut done = Vec::new();
    for _ in 0..kills {
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
            lab.node(host).set_cpu_share(None)?;
        }
        cluster.start_host(&primary)?;
        (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
        standing::with_shares(lab, spec.host_cpu_percent)?;
    }
    let (clients, answers) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    for (kill, (killed_at, answered_at)) in done.iter_mut().zip(moments) {
        kill.gap_us = answers.longest_gap_us(killed_at, answered_at);
        kill.after_detection_us = kill.gap_us.saturating_sub(kill.failover.detected_us);
        say(&format!(
            "{policy}: host {} killed: gap {:.0} ms, detection {:.0} ms",
            kill.killed,
            kill.gap_us as f64 / 1e3,
            kill.failover.detected_us as f64 / 1e3
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

/// The report as a table.
pub fn failover_table(report: &FailoverReport) -> String {
    let mut text = format!("{}\n\n", report.note);
    let _ = writeln!(
        text,
        "{:8} {:>5} {:>9} {:>9} {:>10} {:>10} {:>9} {:>9} {:>9} {:>12}",
        "policy",
        "kills",
        "gap p50",
        "gap max",
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
            "{:8} {:>5} {:>9.1} {:>9.1} {:>10.1} {:>10.1} {:>9.1} {:>9.1} {:>9.1} {:>12}",
            row.policy,
            row.kills.len(),
            p50(|kill| kill.gap_us),
            worst(|kill| kill.gap_us),
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
