//! How long a program stands still for a copy of it: under light load, from switchover to switchover, and after differences.
//!
//! * **Decides:** nothing. * **Flow:** a program on both hosts, redis filled with so much -> a switchover, by which the host that served loses
//!   its copy, or an answer that is not the same, by which the backup's does -> the event of the copy that is brought there says how long it took -> medians.
//! * **Invariants:** clients are answered right all the while, or there are no figures.
//! * **Not here:** throughput (`bench`).

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use dunlin_api::{Event, EventKind};
use serde::Serialize;

use super::bench::{Subject, median, named};
use super::services::clients::Others;
use super::{NAME, PATIENCE, down, up};
use crate::client::{Answer, Connection};
use crate::cluster::{Cluster, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;

/// The clients beside it.
const CLIENTS: usize = 2;
/// Answers between two joins.
const BETWEEN: u64 = 300;
/// Of each value that redis is filled with.
const VALUE_BYTES: u64 = 1000;
/// The program that can be filled, and that differs when it is asked for the time.
const REDIS: &str = "redis";

/// What to measure.
#[derive(Clone, Debug)]
pub struct JoinsSpec {
    /// Which programs; all, if none is named.
    pub programs: Vec<String>,
    /// What redis is filled with, in MB.
    pub megabytes: Vec<u64>,
    /// How many joins of each.
    pub joins: usize,
}

/// One join, or the medians of several.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Join {
    /// Which program.
    pub program: String,
    /// What it was filled with, in MB.
    pub megabytes: u64,
    /// Why it had lost its copy.
    pub after: String,
    /// No input was taken for so long.
    pub quiet_ms: f64,
    /// It stood still for so long; an earlier version does not say it.
    pub stood_ms: Option<f64>,
    /// Its memory, in MiB, that had gone ahead, and that was taken while it stood still.
    pub ahead_mib: Option<f64>,
    /// See `ahead_mib`.
    pub taken_mib: Option<f64>,
    /// The restore on the other host.
    pub restored_ms: f64,
    /// Sent after it stood still.
    pub sent_mib: f64,
}

impl Join {
    /// For people.
    pub fn line(&self) -> String {
        let shown = |value: Option<f64>| value.map_or("?".to_owned(), |value| format!("{value:.1}"));
        format!(
            "bench joins: {} with {} MB, after {}: no input for {:.0} ms, stood still for {} ms, {} MiB had gone ahead, {} MiB taken then; {:.1} MiB sent then, \
             restored in {:.0} ms",
            self.program,
            self.megabytes,
            self.after,
            self.quiet_ms,
            shown(self.stood_ms),
            shown(self.ahead_mib),
            shown(self.taken_mib),
            self.sent_mib,
            self.restored_ms
        )
    }

    /// By the events of the host that it was made on, and of the one that it was brought to.
    fn of(made: &str, brought: &str) -> Result<Self> {
        Ok(Self {
            quiet_ms: behind(made, "no input was taken for ").context("the primary's event")?,
            stood_ms: behind(made, "it stood still for "),
            ahead_mib: before(made, " MiB of its memory had gone ahead"),
            taken_mib: before(made, " MiB were taken then"),
            restored_ms: behind(brought, "was restored in ").context("the backup's event")?,
            sent_mib: behind(made, " (").context("the primary's event")?,
            ..Self::default()
        })
    }

    fn median(all: &[Self]) -> Self {
        let of = |value: fn(&Self) -> f64| median(all.iter().map(value));
        let known = |value: fn(&Self) -> Option<f64>| {
            let known: Vec<f64> = all.iter().filter_map(value).collect();
            (!known.is_empty()).then(|| median(known.into_iter()))
        };
        Self {
            quiet_ms: of(|join| join.quiet_ms),
            stood_ms: known(|join| join.stood_ms),
            ahead_mib: known(|join| join.ahead_mib),
            taken_mib: known(|join| join.taken_mib),
            restored_ms: of(|join| join.restored_ms),
            sent_mib: of(|join| join.sent_mib),
            ..all.first().cloned().unwrap_or_default()
        }
    }
}

fn behind(text: &str, words: &str) -> Option<f64> {
    let (_, rest) = text.split_once(words)?;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    rest[..end].parse().ok()
}

fn before(text: &str, words: &str) -> Option<f64> {
    let (first, _) = text.split_once(words)?;
    first.rsplit(' ').next()?.parse().ok()
}

/// Measures; the medians.
///
/// # Errors
/// When a client is let down, or a join does not come.
pub fn run(binary: &Path, spec: &JoinsSpec, say: &mut dyn FnMut(&str)) -> Result<Vec<Join>> {
    let subjects = named(&spec.programs)?;
    in_a_testbed("bench-joins", &TestbedSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        let mut medians = Vec::new();
        for subject in subjects {
            let sizes = match subject.name {
                REDIS => &spec.megabytes[..],
                _ => &[0],
            };
            for &megabytes in sizes {
                let of = format!("{} with {megabytes} MB", subject.name);
                let joins = joins(cluster, subject, megabytes, spec.joins, say).with_context(|| of)?;
                for joins in joins.iter().filter(|joins| !joins.is_empty()) {
                    let median = Join::median(joins);
                    say(&format!("medians of {}: {}", joins.len(), median.line()));
                    medians.push(median);
                }
            }
        }
        ensure!(!medians.is_empty(), "none of these programs is on this machine");
        Ok(medians)
    })
}

/// After switchovers, and after differences.
fn joins(
    cluster: &Cluster<'_>,
    subject: &Subject,
    megabytes: u64,
    times: usize,
    say: &mut dyn FnMut(&str),
) -> Result<[Vec<Join>; 2]> {
    let Some(mut plan) = (subject.plan)(cluster.testbed(), service().port())? else {
        say(&format!(
            "bench joins: {} is not on this machine: not measured",
            subject.name
        ));
        return Ok(Default::default());
    };
    let is_redis = subject.name == REDIS;
    if is_redis {
        plan.command
            .extend(["--enable-debug-command", "yes"].map(str::to_owned));
        // A copy is carried in memory as well; redis' own takes something for each value.
        plan.lines.push(format!("memory_mib = {}", 256 + 3 * megabytes));
        // A copy that was brought has drawn what the other one has: their hosts' clocks differ.
        plan.lines.push("clock = \"own\"".to_owned());
    }
    let (mut primary, _) = up(cluster, &plan)?;
    let client = cluster.testbed().node("client");
    subject.set_up(client, service())?;
    if is_redis {
        ask(
            cluster,
            &[
                "DEBUG",
                "POPULATE",
                &values(megabytes),
                "filled",
                &VALUE_BYTES.to_string(),
            ],
        )?;
    }
    let open = subject.loads[0].load.opener(CLIENTS);
    let clients = Others::start(client, service(), CLIENTS, open)?;
    let (mut moved, mut differed) = (Vec::new(), Vec::new());
    let tell = |mut join: Join, after: &str| {
        (join.program, join.megabytes, join.after) = (subject.name.to_owned(), megabytes, after.to_owned());
        join
    };
    for _ in 0..times {
        clients.await_more(BETWEEN)?;
        let (old, _) = cluster.switch_over(NAME, PATIENCE)?;
        (primary, _) = cluster.await_take_over(NAME, &old, PATIENCE)?;
        let join = tell(joined(cluster, &primary, &old, 0)?, "a switchover");
        say(&join.line());
        moved.push(join);
    }
    for _ in 0..if is_redis { times } else { 0 } {
        clients.await_more(BETWEEN)?;
        let (_, backup) = cluster.await_protected(NAME, PATIENCE)?;
        let last = last_joined(cluster, &primary)?.map_or(0, |event| event.time_ms);
        // To the microsecond.
        ask(cluster, &["EVAL", "return redis.call('TIME')[2]", "0"])?;
        let join = tell(joined(cluster, &primary, &backup, last)?, "a difference");
        say(&join.line());
        differed.push(join);
    }
    clients.finish()?;
    down(cluster, &primary)?;
    Ok([moved, differed])
}

/// The join of `primary`'s that came after that time, when it is through.
fn joined(cluster: &Cluster<'_>, primary: &str, backup: &str, after_ms: u64) -> Result<Join> {
    let until = std::time::Instant::now() + PATIENCE;
    loop {
        cluster.await_protected(NAME, PATIENCE)?;
        let made = last_joined(cluster, primary)?.filter(|event| event.time_ms > after_ms);
        if let (Some(made), Some(brought)) = (made, last_joined(cluster, backup)?) {
            return Join::of(&made.text, &brought.text);
        }
        ensure!(
            std::time::Instant::now() < until,
            "no copy was brought to {backup}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn last_joined(cluster: &Cluster<'_>, host: &str) -> Result<Option<Event>> {
    let mut events = cluster.events(host)?.into_iter().rev();
    Ok(events.find(|event| event.kind == EventKind::Joined))
}

fn values(megabytes: u64) -> String {
    (megabytes * 1_000_000 / VALUE_BYTES).to_string()
}

/// One request of redis': its answer, which is no error.
fn ask(cluster: &Cluster<'_>, words: &[&str]) -> Result<Answer> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let asks = move || {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Connection::open(service(), PATIENCE)?.ask(&words, PATIENCE)
    };
    let client = cluster.testbed().node("client").spawn("ask", asks)?;
    Ok(client.join().map_err(|_| anyhow!("the client panicked"))???)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_events_of_this_version_and_the_one_before() {
        let brought =
            "a copy of the running program was brought here, and was restored in 75 ms; 3 inputs behind it";
        let made =
            "a copy of the running program was brought to host 'b' (3.1 MiB): no input was taken for 58 ms";
        let join = Join::of(made, brought).expect("figures");
        assert_eq!(
            (join.quiet_ms, join.sent_mib, join.restored_ms),
            (58.0, 3.1, 75.0)
        );
        assert_eq!(join.stood_ms, None);
        let made = format!(
            "{made}; it stood still for 42 ms, 100.0 MiB of its memory had gone ahead, 1.5 MiB were taken then"
        );
        let join = Join::of(&made, brought).expect("figures");
        assert_eq!(
            (join.stood_ms, join.ahead_mib, join.taken_mib),
            (Some(42.0), Some(100.0), Some(1.5))
        );
        let whole = format!("{brought}; it stood still for 9 ms, its memory was taken whole then: no room");
        assert!(Join::of(&whole, brought).is_err(), "no event of a primary's");
    }
}
