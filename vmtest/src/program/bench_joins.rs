//! How long a program stands still for a copy of it: redis with so much in memory, under light load, from switchover to switchover.
//!
//! * **Decides:** nothing. * **Flow:** for each size: redis is filled on both hosts -> a switchover, by which the host that served loses its copy ->
//!   the event of the copy that is brought there says how long it took -> medians.
//! * **Invariants:** clients are answered right all the while, or there are no figures.
//! * **Not here:** throughput (`bench`).

use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use dunlin_api::EventKind;
use serde::Serialize;

use super::bench::median;
use super::{NAME, PATIENCE, Plan, count, down, up};
use crate::cluster::{Cluster, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;

/// The clients that count beside it.
const CLIENTS: usize = 2;
/// Answers between two joins.
const BETWEEN: u64 = 300;
/// Of each value that redis is filled with.
const VALUE_BYTES: u64 = 1000;

/// What to measure.
#[derive(Clone, Debug)]
pub struct JoinsSpec {
    /// What redis is filled with, in MB.
    pub megabytes: Vec<u64>,
    /// How many joins of each.
    pub joins: usize,
}

/// One join, or the medians of several.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Join {
    /// What redis was filled with, in MB.
    pub megabytes: u64,
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
            "bench joins: redis with {} MB: no input for {:.0} ms, stood still for {} ms, {} MiB had gone ahead, {} MiB taken then; {:.1} MiB sent then, \
             restored in {:.0} ms",
            self.megabytes,
            self.quiet_ms,
            shown(self.stood_ms),
            shown(self.ahead_mib),
            shown(self.taken_mib),
            self.sent_mib,
            self.restored_ms
        )
    }

    /// By the events of the host that it was made on, and of the one that it was brought to.
    fn of(megabytes: u64, made: &str, brought: &str) -> Result<Self> {
        Ok(Self {
            megabytes,
            quiet_ms: behind(made, "no input was taken for ").context("the primary's event")?,
            stood_ms: behind(made, "it stood still for "),
            ahead_mib: before(made, " MiB of its memory had gone ahead"),
            taken_mib: before(made, " MiB were taken then"),
            restored_ms: behind(brought, "was restored in ").context("the backup's event")?,
            sent_mib: behind(made, " (").context("the primary's event")?,
        })
    }

    fn median(all: &[Self]) -> Self {
        let of = |value: fn(&Self) -> f64| median(all.iter().map(value));
        let known = |value: fn(&Self) -> Option<f64>| {
            let known: Vec<f64> = all.iter().filter_map(value).collect();
            (!known.is_empty()).then(|| median(known.into_iter()))
        };
        Self {
            megabytes: all.first().map_or(0, |join| join.megabytes),
            quiet_ms: of(|join| join.quiet_ms),
            stood_ms: known(|join| join.stood_ms),
            ahead_mib: known(|join| join.ahead_mib),
            taken_mib: known(|join| join.taken_mib),
            restored_ms: of(|join| join.restored_ms),
            sent_mib: of(|join| join.sent_mib),
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
    in_a_testbed("bench-joins", &TestbedSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        let mut medians = Vec::new();
        for &megabytes in &spec.megabytes {
            let joins = joins(cluster, megabytes, spec.joins, say)?;
            let median = Join::median(&joins);
            say(&format!("medians of {}: {}", joins.len(), median.line()));
            medians.push(median);
        }
        Ok(medians)
    })
}

fn joins(
    cluster: &Cluster<'_>,
    megabytes: u64,
    times: usize,
    say: &mut dyn FnMut(&str),
) -> Result<Vec<Join>> {
    let mut plan = Plan::redis(cluster.testbed())?;
    plan.command
        .extend(["--enable-debug-command", "yes"].map(str::to_owned));
    // A copy is carried in memory as well; redis' own takes something for each value.
    plan.lines.push(format!("memory_mib = {}", 256 + 3 * megabytes));
    let (mut primary, _) = up(cluster, &plan)?;
    fill(cluster, megabytes)?;
    let counter = count(cluster, CLIENTS)?;
    let mut joins = Vec::new();
    for _ in 0..times {
        counter.await_more(BETWEEN, PATIENCE)?;
        let old = primary;
        cluster.dunlin(&old, &["switchover", NAME])?;
        (primary, _) = cluster.await_take_over(NAME, &old, PATIENCE)?;
        cluster.await_status("a join", PATIENCE, |hosts| {
            let host = hosts.iter().find(|host| host.host == primary)?;
            host.vm(NAME)?.protected.then_some(())
        })?;
        let last = |host: &str| -> Result<String> {
            let events = cluster.events(host)?;
            let joined = events
                .into_iter()
                .rev()
                .find(|event| event.kind == EventKind::Joined);
            Ok(joined.context("a join, and no event of that")?.text)
        };
        let join = Join::of(megabytes, &last(&primary)?, &last(&old)?)?;
        say(&join.line());
        joins.push(join);
    }
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    down(cluster, &primary)?;
    Ok(joins)
}

/// By one request: it is the same on both copies.
fn fill(cluster: &Cluster<'_>, megabytes: u64) -> Result<()> {
    let values = (megabytes * 1_000_000 / VALUE_BYTES).to_string();
    let size = VALUE_BYTES.to_string();
    let fills = move || -> Result<String> {
        use std::io::{Read, Write};
        let mut stream = TcpStream::connect(service())?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let words = ["DEBUG", "POPULATE", &values, "filled", &size];
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        stream.write_all(request.as_bytes())?;
        let mut answer = [0; 64];
        let length = stream.read(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    };
    let client = cluster.testbed().node("client").spawn("fill", fills)?;
    let answer = client.join().map_err(|_| anyhow!("the client panicked"))???;
    ensure!(answer.starts_with("+OK"), "redis is not filled: {answer}");
    Ok(())
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
        let join = Join::of(100, made, brought).expect("figures");
        assert_eq!(
            (join.quiet_ms, join.sent_mib, join.restored_ms),
            (58.0, 3.1, 75.0)
        );
        assert_eq!(join.stood_ms, None);
        let made = format!(
            "{made}; it stood still for 42 ms, 100.0 MiB of its memory had gone ahead, 1.5 MiB were taken then"
        );
        let join = Join::of(100, &made, brought).expect("figures");
        assert_eq!(
            (join.stood_ms, join.ahead_mib, join.taken_mib),
            (Some(42.0), Some(100.0), Some(1.5))
        );
        let whole = format!("{brought}; it stood still for 9 ms, its memory was taken whole then: no room");
        assert!(Join::of(1, &whole, brought).is_err(), "no event of a primary's");
    }
}
