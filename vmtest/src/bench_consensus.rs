//! `cargo xtask bench consensus`: what agreement costs, beside what the fabric and the disk alone cost, in one run.
//!
//! * **Decides:** nothing. Three replicas as processes of this very executable (the environment variable
//!   `DUNLIN_BENCH_CHILD` says which), their figures, and a table against the targets.
//! * **Flow:** [`run`] -> raw figures ([`raw`]) -> replicas ([`replica`]) per fabric and durability -> rivals ([`rivals`]) ->
//!   table and JSON. `leader-kill` and `crash` ([`faults`]) are runs of their own.
//! * **Invariants:** (1) every figure stands beside its wait policy and build profile; (2) a rival that cannot run is
//!   named as skipped, never left out silently; (3) children die with their parent.
//! * **Not here:** VMs; this is the one place of vmtest that uses a crate of Dunlin's (the fabric) directly.

mod child;
mod faults;
mod raw;
mod replica;
mod rivals;
mod scale;

use anyhow::{Context, Result, bail};
use dunlin_fabric::wait::WaitPolicy;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Which fabric.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fabric {
    /// Shared memory.
    Shm,
    /// TCP on the loopback.
    Tcp,
    /// The same with mutually authenticated TLS.
    Tls,
}

/// What an acknowledgement promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// In memory.
    Memory,
    /// On disk.
    Disk,
}

/// A wait policy by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// Spin a little, then yield for ever.
    Yield,
    /// Spin, yield, then block.
    Polite,
    /// Block at once.
    Block,
}

impl Wait {
    fn policy(self) -> WaitPolicy {
        match self {
            Self::Yield => WaitPolicy::YIELD,
            Self::Polite => WaitPolicy::POLITE,
            Self::Block => WaitPolicy::BLOCK,
        }
    }
}

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Bytes of an entry.
    pub payload_bytes: usize,
    /// Entries under way.
    pub outstanding: usize,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Throughput.
    pub per_s: f64,
}

/// A set of figures taken in one way.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Series {
    /// What was measured.
    pub what: String,
    /// How its processes waited.
    pub wait: String,
    /// The figures.
    pub figures: Vec<Figure>,
}

impl Series {
    fn find(&self, payload_bytes: usize, outstanding: usize) -> Option<&Figure> {
        self.figures
            .iter()
            .find(|f| f.payload_bytes == payload_bytes && f.outstanding == outstanding)
    }
}

/// Everything that one run found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Cores, kernel, build profile.
    pub machine: String,
    /// All series.
    pub series: Vec<Series>,
    /// What could not be measured, and why.
    pub skipped: Vec<String>,
    /// The targets and whether they were met.
    pub targets: Vec<Target>,
    /// `leader-kill`: times to a new leader's first agreed entry, ms.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub leader_kill: Vec<faults::Kills>,
    /// `scale`.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub scale: Vec<scale::Scale>,
    /// `crash`.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub crash: Vec<faults::Crash>,
}

/// One target of the issue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// In words.
    pub what: String,
    /// What it is about, measured.
    pub measured: f64,
    /// What was asked.
    pub limit: f64,
    /// Whether it was met.
    pub met: bool,
}

struct Options {
    seconds: f64,
    rounds: usize,
    json: Option<PathBuf>,
    dir: PathBuf,
    runs: usize,
    entries: u64,
    rivals: bool,
    only: Option<String>,
    replicas: Vec<u8>,
    what: Vec<String>,
}

const USAGE: &str = "bench consensus [latency] [leader-kill] [crash] [--json FILE] [--seconds S] [--rounds N] [--runs N] [--entries N] [--dir DIR] [--no-rivals] [--only PART-OF-A-NAME] [--replicas N,N,...: groups of these sizes, and nothing else unless it is named]";

fn options(args: &[String]) -> Result<Options> {
    let mut o = Options {
        seconds: 0.5,
        rounds: 3,
        json: None,
        dir: std::env::temp_dir(),
        runs: 100,
        entries: 100_000,
        rivals: true,
        only: None,
        replicas: Vec::new(),
        what: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || {
            args.next()
                .with_context(|| format!("{arg} needs a value; {USAGE}"))
        };
        match arg.as_str() {
            "--rounds" => o.rounds = value()?.parse()?,
            "--json" => o.json = Some(value()?.into()),
            "--seconds" => o.seconds = value()?.parse()?,
            "--dir" => o.dir = value()?.into(),
            "--runs" => o.runs = value()?.parse()?,
            "--entries" => o.entries = value()?.parse()?,
            "--no-rivals" => o.rivals = false,
            "--only" => o.only = Some(value()?.to_lowercase()),
            "--replicas" => o.replicas = scale::sizes(value()?)?,
            "latency" | "leader-kill" | "crash" => o.what.push(arg.clone()),
            other => bail!("unknown argument {other:?}; {USAGE}"),
        }
    }
    if !o.replicas.is_empty() {
        o.what.push("scale".into());
    }
    if o.what.is_empty() {
        o.what = vec!["latency".into(), "leader-kill".into(), "crash".into()];
    }
    Ok(o)
}

/// Runs the benchmark (or, in a child process, the child's part). `args` are those after `bench consensus`.
pub fn run(args: &[String]) -> Result<()> {
    if let Ok(config) = std::env::var(child::VARIABLE) {
        return child::main(&config);
    }
    let options = options(args)?;
    let dir = child::Scratch::new(&options.dir)?;
    let mut report = Report {
        machine: machine(),
        ..Report::default()
    };
    println!("{}", report.machine);
    if cfg!(debug_assertions) {
        println!(
            "WARNING: not a release build: latencies in memory are not comparable (cargo run --release -p xtask -- bench consensus)"
        );
    }
    let mut failed = None;
    for what in &options.what {
        let done = match what.as_str() {
            "latency" => latency(&options, &dir, &mut report),
            "scale" => scale::run(
                &dir,
                &options.replicas,
                options.rounds,
                options.seconds,
                &mut report,
            ),
            "leader-kill" => faults::leader_kill(&dir, options.runs, &mut report),
            _ => faults::crash(&dir, options.entries, &mut report),
        };
        // What was measured so far is still shown and written.
        failed = failed.or(done.with_context(|| what.clone()).err());
    }
    for target in &report.targets {
        let word = if target.met { "met   " } else { "MISSED" };
        println!(
            "target {word} {}: {:.2} (limit {:.2})",
            target.what, target.measured, target.limit
        );
    }
    if let Some(file) = &options.json {
        std::fs::write(file, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("writing {}", file.display()))?;
        println!("bench consensus: wrote {}", file.display());
    }
    failed.map_or(Ok(()), Err)
}

fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let build = if cfg!(debug_assertions) {
        "dev build"
    } else {
        "release build"
    };
    format!(
        "{cores} cores, Linux {}, {build}, load {} at the start",
        kernel.trim(),
        load()
    )
}

fn show(series: &Series) {
    println!("\n{} [wait: {}]", series.what, series.wait);
    for f in &series.figures {
        println!(
            "  {:>6} B, {:>2} outstanding: p50 {:>9.2} us, p99 {:>9.2} us, {:>10.0} /s",
            f.payload_bytes, f.outstanding, f.p50_us, f.p99_us, f.per_s
        );
    }
}

/// Measures everything `rounds` times in turn, and keeps of each figure the round with the lowest median: the machine may be
/// shared, and whoever had the quieter moment must not win by it.
fn latency(options: &Options, dir: &child::Scratch, report: &mut Report) -> Result<()> {
    for round in 1..=options.rounds {
        println!("\nround {round} of {}, load {}", options.rounds, load());
        one_round(options, dir, report)?;
    }
    report.skipped.dedup();
    println!("\nbest of {} rounds:", options.rounds);
    report.series.iter().for_each(show);
    judge(report);
    Ok(())
}

fn one_round(options: &Options, dir: &child::Scratch, report: &mut Report) -> Result<()> {
    let seconds = options.seconds;
    let only = options.only.as_deref().unwrap_or("");
    let attempt = |report: &mut Report, name: &str, measure: &mut dyn FnMut() -> Result<Series>| {
        if only.split(',').any(|part| name.to_lowercase().contains(part)) {
            report.attempt(name, measure);
        }
    };
    for wait in [Wait::Yield, Wait::Block] {
        for fabric in [Fabric::Shm, Fabric::Tcp, Fabric::Tls] {
            for (kind, checked) in [("raw", false), ("checked", true)] {
                attempt(report, &format!("{kind} {fabric:?} {wait:?}"), &mut || {
                    raw::ping_pong(dir, fabric, wait, seconds, checked)
                });
            }
        }
        attempt(report, &format!("TCP echo {wait:?}"), &mut || {
            raw::echo(dir, wait, seconds)
        });
    }
    for processes in [1, 3] {
        attempt(report, "fdatasync disk", &mut || {
            raw::fdatasync(dir, seconds, processes)
        });
    }
    for (durability, wait) in [
        (Durability::Memory, Wait::Yield),
        (Durability::Memory, Wait::Block),
        (Durability::Disk, Wait::Block),
    ] {
        for fabric in [Fabric::Shm, Fabric::Tcp, Fabric::Tls] {
            let name = format!("dunlin {fabric:?} {durability:?} {wait:?}");
            attempt(report, &name, &mut || {
                replica::measure(dir, fabric, durability, wait, false, seconds)
            });
        }
    }
    let mut inline = || replica::measure(dir, Fabric::Tcp, Durability::Disk, Wait::Block, true, seconds);
    attempt(report, "dunlin tcp disk, inline block", &mut inline);
    if !options.rivals {
        report.skipped.push("rivals: --no-rivals".into());
        return Ok(());
    }
    for rival in rivals::all(dir, seconds) {
        match rival {
            Ok(series) => report.add(series),
            Err(why) => {
                println!("\nskipped: {why:#}");
                report.skipped.push(format!("{why:#}"));
            }
        }
    }
    Ok(())
}

fn load() -> String {
    let all = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    all.split(' ').next().unwrap_or("?").to_owned()
}

impl Report {
    /// On a crowded machine even a patient leader may lose its term: once more, then said as skipped.
    fn attempt(&mut self, name: &str, mut measure: impl FnMut() -> Result<Series>) {
        match measure().or_else(|_| measure()) {
            Ok(series) => self.add(series),
            Err(why) => {
                println!("\nskipped: {name}: {why:#}");
                self.skipped.push(format!("{name}: {why:#}"));
            }
        }
    }

    fn add(&mut self, new: Series) {
        print!(".");
        let _ = std::io::Write::flush(&mut std::io::stdout());
        let Some(old) = self
            .series
            .iter_mut()
            .find(|s| s.what == new.what && s.wait == new.wait)
        else {
            return self.series.push(new);
        };
        for figure in new.figures {
            match old
                .figures
                .iter_mut()
                .find(|f| (f.payload_bytes, f.outstanding) == (figure.payload_bytes, figure.outstanding))
            {
                Some(f) if f.p50_us <= figure.p50_us => {}
                Some(f) => *f = figure,
                None => old.figures.push(figure),
            }
        }
    }
}

/// The targets against what was measured.
fn judge(report: &mut Report) {
    let find = |what: &str, wait: &str, outstanding: usize| {
        let series = report
            .series
            .iter()
            .find(|s| s.what == what && s.wait.contains(wait))?;
        series.find(64, outstanding).cloned()
    };
    let mut targets = Vec::new();
    let mut at_most = |what: String, measured: f64, limit: f64| {
        targets.push(Target {
            what,
            measured,
            limit,
            met: measured <= limit,
        });
    };
    for fabric in ["shm", "tcp"] {
        for wait in ["yield", "block"] {
            let Some(ours) = find(&format!("dunlin {fabric} memory"), wait, 1) else {
                continue;
            };
            // The bare one checks nothing; the checked one is what a fabric costs whose writes are believed only whole.
            for (kind, called) in [("raw", "raw"), ("checked", "checked")] {
                let Some(raw) = find(&format!("{kind} ping-pong {fabric}"), wait, 1) else {
                    continue;
                };
                let what = format!(
                    "{fabric} in memory ({wait}), 64 B: p50 over {called} round trip ({:.2}/{:.2} us)",
                    ours.p50_us, raw.p50_us
                );
                at_most(what, ours.p50_us / raw.p50_us, 1.3);
            }
        }
        // Three replicas of one machine share its disk, which syncs one after the other; three hosts do not.
        for sync in ["fdatasync alone", "fdatasync, 3 processes at once"] {
            if let (Some(ours), Some(raw), Some(alone)) = (
                find(&format!("dunlin {fabric} disk"), "block", 1),
                find(&format!("raw ping-pong {fabric}"), "block", 1),
                find(sync, "", 1),
            ) {
                let sum = alone.p50_us + raw.p50_us;
                let what = format!(
                    "{fabric} durable, 64 B: p50 over {sync} + round trip ({:.0}/{sum:.0} us)",
                    ours.p50_us
                );
                at_most(what, ours.p50_us / sum, 1.3);
            }
        }
    }
    for (durability, rival, wait) in [
        ("memory", "dragonboat tmpfs", "yield"),
        ("disk", "dragonboat disk", "block"),
    ] {
        let name = format!("dunlin tcp {durability}");
        if let (Some(ours), Some(theirs)) = (find(&name, wait, 1), find(rival, "", 1)) {
            let (measured, limit) = (theirs.p50_us / ours.p50_us, 4.0);
            targets.push(Target {
                what: format!("{rival}'s p50 over {name}'s, at least"),
                measured,
                limit,
                met: measured >= limit,
            });
        }
        if let (Some(ours), Some(theirs)) = (find(&name, wait, 64), find(rival, "", 64)) {
            let (measured, limit) = (ours.per_s / theirs.per_s, 5.0);
            targets.push(Target {
                what: format!("{name}'s throughput over {rival}'s at 64 outstanding, at least"),
                measured,
                limit,
                met: measured >= limit,
            });
        }
    }
    report.targets.extend(targets);
}
