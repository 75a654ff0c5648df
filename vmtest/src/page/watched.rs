//! What those who watch the page cost a VM: pairs of windows, one with so many real streams of events open and one with none.
//!
//! * **Decides:** in which order the windows follow each other, what counts as watching, and when watching costs too much.
//! * **Flow:** three hosts -> a protected VM -> for each pair a window with and one without watchers, in turns the one or the other first -> the client's
//!   latencies of both -> their ratios, with the interval in which the median lies.
//! * **Invariants:** (1) each watcher holds a stream of `/api/v1/stream` of the primary's own daemon and reads all of it; one that ends, or that is shown nothing
//!   in a window, fails the run; (2) a ratio compares two windows of one VM that follow each other.
//!   (3) the verdict is against those who watch only where the whole interval is beyond [`MOST`]: noise alone does not fail a run.
//! * **Not here:** the interval ([`crate::bench_vm`]), the client ([`Counter`]).

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::bench_vm::Ratio;
use crate::bench_vm::paired::LEAST_PAIRS;
use crate::client::{Counter, CounterReport, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::image::GuestImage;
use crate::testbed::{Node, TestbedSpec};

const PATIENCE: Duration = Duration::from_secs(120);
const PAGE: &str = "127.0.0.1:7702";
/// A watcher looks this often whether it is to end.
const LOOK: Duration = Duration::from_millis(200);
/// Between two windows: what began with the one is over.
const SETTLE: Duration = Duration::from_secs(3);
/// Watching may make a client's latency longer by this factor, and no more.
pub const MOST: f64 = 1.05;

/// What to measure.
#[derive(Clone, Debug)]
pub struct WatchSpec {
    /// The executable.
    pub dunlin: PathBuf,
    /// Of the VM.
    pub image: GuestImage,
    /// How many watch.
    pub watchers: usize,
    /// Pairs of windows.
    pub pairs: usize,
    /// How long each window with watchers is.
    pub window: Duration,
    /// How long each window without them is.
    pub without: Duration,
    /// The client's connections.
    pub connections: usize,
}

/// One window.
#[derive(Clone, Debug, Serialize)]
pub struct Window {
    /// How many watched.
    pub watchers: usize,
    /// Answers a second.
    pub per_second: f64,
    /// The client's median and 99th percentile, in milliseconds.
    pub p50_ms: f64,
    /// See `p50_ms`.
    pub p99_ms: f64,
    /// What the watchers were sent, in all: overviews and bytes.
    pub overviews: u64,
    /// See `overviews`.
    pub bytes: u64,
}

/// All of them, in pairs.
#[derive(Clone, Debug, Serialize)]
pub struct WatchReport {
    /// With watchers, without.
    pub pairs: Vec<(Window, Window)>,
    /// How long the watchers watched in all windows together.
    pub watched_seconds: f64,
}

impl WatchReport {
    /// With watchers over without, of the medians, the 99th percentiles and the rates.
    pub fn ratios(&self) -> [(&'static str, Option<Ratio>); 3] {
        let of = |figure: fn(&Window) -> f64| {
            let ratios = self
                .pairs
                .iter()
                .map(|(with, without)| figure(with) / figure(without));
            Ratio::of(&ratios.collect::<Vec<_>>())
        };
        [
            ("p50", of(|window| window.p50_ms)),
            ("p99", of(|window| window.p99_ms)),
            ("answers a second", of(|window| window.per_second)),
        ]
    }

    /// What the ratios of the two latencies say; the rate follows from them.
    ///
    /// # Errors
    /// One line, when watching costs more than [`MOST`], or when that cannot be told.
    pub fn verdict(&self) -> Result<String> {
        let ratios = self.ratios();
        let latencies = ratios.iter().filter(|(name, _)| name.starts_with('p'));
        let mut unclear = Vec::new();
        for (name, ratio) in latencies {
            let ratio = ratio.as_ref().context("no window was measured: --pairs is 0")?;
            let (low, high) = ratio.interval.with_context(|| {
                format!(
                    "{} pairs have no interval, so nothing can be said of {name}: give --pairs {LEAST_PAIRS} or more",
                    ratio.pairs
                )
            })?;
            ensure!(
                low <= MOST,
                "those who watch cost the VM's client too much: {name} is {} times what it is without them, and may be {MOST}",
                ratio.in_words()
            );
            if high > MOST {
                unclear.push(*name);
            }
        }
        Ok(match unclear[..] {
            [] => format!("passed: watching makes neither p50 nor p99 longer than by a factor of {MOST}"),
            _ => format!(
                "passed: no interval lies beyond {MOST} as a whole; {}'s reaches beyond it, more --pairs would tell",
                unclear.join("'s and ")
            ),
        })
    }
}

/// Measures it. `say` gets a line for each window.
///
/// # Errors
/// When the VM or a watcher fails.
pub fn run(spec: &WatchSpec, say: &mut dyn FnMut(&str)) -> Result<WatchReport> {
    in_a_testbed(
        "page-watched",
        &TestbedSpec::three_hosts(),
        &spec.dunlin,
        |cluster| {
            cluster.start_hosts()?;
            let plan = VmPlan::redis("dunlin");
            let file = plan.write(cluster.testbed(), &spec.image)?;
            cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
            await_service(cluster.testbed().node("client"), plan.service(), PATIENCE)?;
            let mut report = WatchReport {
                pairs: Vec::new(),
                watched_seconds: 0.0,
            };
            for pair in 0..spec.pairs {
                let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
                let mut one = |watchers: usize| -> Result<Window> {
                    let window = window(cluster, spec, &plan, &primary, watchers)?;
                    say(&format!(
                        "pair {}: {watchers} watch: {:.0} answers a second, p50 {:.2} ms, p99 {:.2} ms; {} overviews, {:.1} MiB",
                        pair + 1,
                        window.per_second,
                        window.p50_ms,
                        window.p99_ms,
                        window.overviews,
                        window.bytes as f64 / f64::from(1 << 20)
                    ));
                    Ok(window)
                };
                let both = match pair % 2 {
                    0 => {
                        let with = one(spec.watchers)?;
                        (with, one(0)?)
                    }
                    _ => {
                        let without = one(0)?;
                        (one(spec.watchers)?, without)
                    }
                };
                report.pairs.push(both);
                report.watched_seconds += spec.window.as_secs_f64();
            }
            let host = cluster.running().first().cloned().context("a host")?;
            cluster.end(&host, &plan.name)?;
            Ok(report)
        },
    )
}

fn window(
    cluster: &Cluster<'_>,
    spec: &WatchSpec,
    plan: &VmPlan,
    primary: &str,
    count: usize,
) -> Result<Window> {
    let watchers = Watchers::start(cluster.testbed().node(primary), count)?;
    std::thread::sleep(SETTLE);
    let before = watchers.seen.load(Ordering::Relaxed);
    let begun = Instant::now();
    let counter = Counter::start(
        cluster.testbed().node("client"),
        &CounterSpec {
            target: plan.service(),
            connections: spec.connections,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    std::thread::sleep(match count {
        0 => spec.without,
        _ => spec.window,
    });
    let seconds = begun.elapsed().as_secs_f64();
    let (client, _) = counter.finish()?;
    ensure!(client.is_clean(), "the client was let down: {client:?}");
    let CounterReport {
        acknowledged,
        latency_p50_us,
        latency_p99_us,
        ..
    } = client;
    ensure!(
        acknowledged > 0 && latency_p50_us > 0,
        "the client measured nothing"
    );
    let overviews = watchers.seen.load(Ordering::Relaxed) - before;
    ensure!(
        overviews >= count as u64 * (seconds / 4.0) as u64,
        "{count} who watched for {seconds:.0} s were shown {overviews} overviews"
    );
    let bytes = watchers.finish()?;
    Ok(Window {
        watchers: count,
        per_second: acknowledged as f64 / seconds,
        p50_ms: latency_p50_us as f64 / 1e3,
        p99_ms: latency_p99_us as f64 / 1e3,
        overviews,
        bytes,
    })
}

/// People before the page of one host.
struct Watchers {
    over: Arc<AtomicBool>,
    /// Overviews that were shown to all of them.
    seen: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<Result<u64>>>>,
}

impl Watchers {
    fn start(node: &Node, count: usize) -> Result<Self> {
        let (over, seen) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let threads = (0..count).map(|number| {
            let (over, seen) = (over.clone(), seen.clone());
            node.spawn(&format!("watcher-{number}"), move || watch(&over, &seen))
        });
        let threads = threads.collect::<Result<_>>()?;
        Ok(Self { over, seen, threads })
    }

    /// Ends them; what they were sent, in bytes.
    fn finish(self) -> Result<u64> {
        self.over.store(true, Ordering::Release);
        let mut bytes = 0;
        for thread in self.threads {
            let watched = thread.join().map_err(|_| anyhow::anyhow!("a watcher panicked"))?;
            bytes += watched?.context("a watcher")?;
        }
        Ok(bytes)
    }
}

fn watch(over: &AtomicBool, seen: &AtomicU64) -> Result<u64> {
    let mut stream = TcpStream::connect(PAGE)?;
    stream.set_read_timeout(Some(LOOK))?;
    stream
        .write_all(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")?;
    let (mut bytes, mut buffer) = (0, vec![0; 64 << 10]);
    // The end of what came before, for a word that comes in two pieces.
    let mut rest: Vec<u8> = Vec::new();
    const WORD: &[u8] = b"event: overview";
    while !over.load(Ordering::Acquire) {
        match stream.read(&mut buffer) {
            Ok(0) => anyhow::bail!("its stream has ended"),
            Ok(read) => {
                if bytes == 0 {
                    let head = String::from_utf8_lossy(&buffer[..read.min(64)]).into_owned();
                    ensure!(head.starts_with("HTTP/1.1 200"), "it is answered: {head}");
                }
                bytes += read as u64;
                rest.extend_from_slice(&buffer[..read]);
                let found = rest.windows(WORD.len()).filter(|piece| *piece == WORD).count();
                seen.fetch_add(found as u64, Ordering::Relaxed);
                let keep = rest.len().saturating_sub(WORD.len() - 1);
                rest.drain(..keep);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(pairs: &[(f64, f64)]) -> WatchReport {
        let window = |p50_ms, p99_ms| Window {
            watchers: 0,
            per_second: 100.0,
            p50_ms,
            p99_ms,
            overviews: 0,
            bytes: 0,
        };
        let pairs = pairs.iter();
        WatchReport {
            pairs: pairs
                .map(|(p50, p99)| (window(*p50, *p99), window(1.0, 1.0)))
                .collect(),
            watched_seconds: 1.0,
        }
    }

    fn why(pairs: &[(f64, f64)]) -> String {
        let why = report(pairs).verdict().expect_err("not passed").to_string();
        assert_eq!(why.lines().count(), 1, "{why}");
        why
    }

    #[test]
    fn only_an_interval_that_lies_beyond_the_limit_as_a_whole_fails() {
        let twice = |three: [(f64, f64); 3]| [three, three].concat();
        let said = report(&twice([(1.0, 1.04), (1.01, 0.99), (0.98, 1.02)])).verdict();
        assert!(said.is_ok_and(|said| said.contains("neither")));
        // One pair in three is far away: noise, as far as anybody can tell.
        let said = report(&twice([(1.0, 1.5), (1.01, 1.0), (0.98, 1.0)])).verdict();
        assert!(said.is_ok_and(|said| said.contains("p99's reaches beyond")));
        assert!(why(&twice([(1.06, 1.0), (1.07, 1.0), (1.08, 1.0)])).contains("p50 is 1.07"));
        assert!(why(&twice([(1.0, 1.2), (1.0, 1.3), (1.0, 1.4)])).contains("p99 is 1.30"));
    }

    #[test]
    fn without_an_interval_there_is_no_verdict() {
        assert!(why(&[]).contains("--pairs"));
        assert!(why(&[(1.0, 1.0)]).contains("--pairs 6"));
    }
}
