//! `redis-benchmark`. It counts requests, not seconds: as many make a window as there were in its seconds just before, or by a short try.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::{Clients, Measured, finish, patience};
use crate::client::{Answer, Connection};

/// A load with `words`.
pub fn run(
    clients: &Clients<'_>,
    words: &[&str],
    connections: u32,
    seconds: f64,
    known: Option<f64>,
) -> Result<Measured> {
    series(clients, words, connections, seconds, known)
}

/// INCRs of one key by all connections. The key must have counted each of them once.
pub fn count(clients: &Clients<'_>, connections: u32, seconds: f64, known: Option<f64>) -> Result<Measured> {
    // Without -r redis-benchmark uses its pattern as it stands, for all requests.
    const KEY: &str = "counter:__rand_int__";
    let before = value(clients, KEY)?;
    let measured = series(clients, &["-t", "incr"], connections, seconds, known)?;
    let in_all = measured.in_all;
    let after = value(clients, KEY)?;
    ensure!(
        after - before == i64::try_from(in_all)?,
        "{in_all} INCRs were acknowledged, and the counter went from {before} to {after}"
    );
    Ok(measured)
}

/// A try that took less time, and had fewer requests, tells nothing: its first answers took most of it.
const TRY_S: f64 = 0.1;
/// See [`TRY_S`].
const TRY_REQUESTS: u64 = 1000;

fn series(
    clients: &Clients<'_>,
    words: &[&str],
    connections: u32,
    seconds: f64,
    known: Option<f64>,
) -> Result<Measured> {
    let least = u64::from(connections) * 8;
    let mut tried = 0;
    let per_second = match known {
        Some(per_second) => per_second,
        None => {
            let mut requests = least;
            loop {
                let per_second = once(clients, words, connections, requests, seconds)?.per_second;
                tried += requests;
                match next_try(requests, per_second) {
                    Some(more) => requests = more,
                    None => break per_second,
                }
            }
        }
    };
    let enough = ((per_second * seconds) as u64).max(least);
    let measured = once(clients, words, connections, enough, seconds)?;
    ensure!(
        measured.per_second.is_finite() && measured.per_second > 0.0,
        "redis-benchmark: {enough} requests at {} a second",
        measured.per_second
    );
    Ok(Measured {
        in_all: enough + tried,
        ..measured
    })
}

/// How many requests the next try needs, after one of `requests`; nothing if that one tells enough. What took no time at all is printed as
/// `inf`.
fn next_try(requests: u64, per_second: f64) -> Option<u64> {
    let took_s = match per_second.is_finite() && per_second > 0.0 {
        true => requests as f64 / per_second,
        false => 0.0,
    };
    (took_s < TRY_S && (requests < TRY_REQUESTS || took_s == 0.0)).then_some(requests * 8)
}

fn once(
    clients: &Clients<'_>,
    words: &[&str],
    connections: u32,
    requests: u64,
    seconds: f64,
) -> Result<Measured> {
    let mut command = clients.command("/usr/bin/redis-benchmark")?;
    command
        .args(["-h", &clients.guest.to_string(), "-p", &clients.port.to_string()])
        // -e: without it an answer that is an error counts as any other.
        .args([
            "--csv",
            "-e",
            "-c",
            &connections.to_string(),
            "-n",
            &requests.to_string(),
        ])
        .args(words);
    let text = finish(command, "redis-benchmark", patience(seconds))?;
    if let Some(line) = text.lines().find(|line| line.to_lowercase().contains("error")) {
        bail!("redis-benchmark: {line}");
    }
    parse(&text, requests)
}

/// The line that `--csv` prints under its heading.
fn parse(csv: &str, requests: u64) -> Result<Measured> {
    let mut rows = csv.lines().map(|line| {
        line.split("\",\"")
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
            .with_context(|| format!("redis-benchmark has no column {name}"))?;
        let text = row.get(at).with_context(|| format!("no value for {name}"))?;
        text.parse().with_context(|| format!("{name}: {text}"))
    };
    Ok(Measured {
        requests,
        in_all: requests,
        per_second: cell("rps")?,
        p50_ms: cell("p50_latency_ms")?,
        p99_ms: cell("p99_latency_ms")?,
    })
}

fn value(clients: &Clients<'_>, key: &'static str) -> Result<i64> {
    let target = clients.target();
    let asked = clients.node.spawn("read-counter", move || -> Result<i64> {
        let timeout = Duration::from_secs(30);
        match Connection::open(target, timeout)?.ask(&["GET", key], timeout)? {
            Answer::Bulk(Some(text)) => Ok(String::from_utf8(text)?.parse()?),
            Answer::Bulk(None) => Ok(0),
            other => bail!("GET was answered by {other:?}"),
        }
    })?;
    asked
        .join()
        .map_err(|_| anyhow::anyhow!("a client thread panicked"))??
}

#[cfg(test)]
mod tests {
    use super::{next_try, parse};

    #[test]
    fn the_csv_of_redis_benchmark_is_read() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"\n\
                   \"SET\",\"5917.16\",\"2.604\",\"0.392\",\"2.527\",\"3.823\",\"5.647\",\"9.631\"\n";
        let read = parse(csv, 7).unwrap();
        assert_eq!(
            (read.per_second, read.p50_ms, read.p99_ms),
            (5917.16, 2.527, 5.647)
        );
        assert!(parse("WARNING: nothing\n", 7).is_err());
        assert!(parse(csv.lines().next().unwrap(), 7).is_err());
    }
    #[test]
    fn a_try_that_took_no_time_is_not_believed() {
        assert_eq!(next_try(8, f64::INFINITY), Some(64));
        assert_eq!(next_try(8, 8000.0), Some(64));
        assert_eq!(next_try(8, 25.0), None);
        assert_eq!(next_try(4096, 50_000.0), None);
        assert_eq!(next_try(4096, f64::INFINITY), Some(32_768));
        assert_eq!(next_try(64, f64::NAN), Some(512));
    }
}
