//! `cargo xtask bench vm`: what protection costs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use dunlin_vmtest::bench_vm::{self, BenchReport, BenchSpec, Link, Wish};

use super::{Guest, spec, write};

/// Every policy, in the order of the tables.
const MATRIX: [&str; 6] = ["none", "remus", "str", "colo", "plover", "dunlin"];

/// The options of `bench vm`. Without any: one load of each of the eight services at 1 and 16 connections, in half an hour.
#[derive(clap::Args)]
pub struct Vm {
    /// Loads, separated by commas: all, usual (one load of each service), services (redis, memcached, postgresql, mariadb, nginx, php, nodejs,
    /// tomcat), hard, bulk, or single cases (set, counter, time, reconnect, pipeline, set-16k, get-16k, ...).
    #[arg(long, value_delimiter = ',', default_value = "usual")]
    service: Vec<String>,
    /// Policies, separated by commas.
    ///
    /// A policy that is named twice is measured against itself: 'none,none' must find no difference, and the exit code says whether it did.
    /// 'remus+spec' is remus with speculative communication. 'remus@50' and 'remus+spec@50' sync every 50 ms. These can only be set in a VM's file,
    /// so they need --fresh.
    #[arg(long, value_delimiter = ',', default_value = "none,dunlin")]
    policy: Vec<String>,
    /// All six policies.
    #[arg(long, conflicts_with_all = ["policy", "quick"])]
    matrix: bool,
    /// Only the cases with these numbers of parallel connections, separated by commas (1,16 if no --service is given).
    #[arg(long, value_delimiter = ',')]
    connections: Option<Vec<u32>>,
    /// Links between clients and VM, separated by commas: lan, 5ms (added to a round trip), 1% (of frames lost in each direction), 1gbit or 100mbit (in
    /// each direction), 5ms+1%. Each case
    /// is measured over each link.
    #[arg(long, value_delimiter = ',', default_value = "lan")]
    link: Vec<Link>,
    /// Pairs of windows, one of each policy and one of the baseline (10; 20 of one policy against itself; 3 with --fresh). Shown are the median of the pairs' ratios and its interval.
    #[arg(long, visible_alias = "pairs")]
    rounds: Option<u32>,
    /// About how long one window is, in seconds; at least 3 for transactions.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Boot a VM for each policy and round, instead of one VM that changes its policy while it runs.
    #[arg(long)]
    fresh: bool,
    /// Measure nginx and redis at 16 connections in six pairs, which takes three minutes.
    #[arg(long, conflicts_with_all = ["service", "rounds"])]
    quick: bool,
    /// Do the whole run this many times. Each has its own figures and its own verdict.
    #[arg(long, default_value_t = 1, conflicts_with = "add")]
    times: u32,
    /// Add a window for each case and policy in which strace counts the system calls of the primary's daemon.
    #[arg(long)]
    syscalls: bool,
    /// The seed of the order of windows, which a report's JSON has: use the same order again.
    #[arg(long)]
    seed: Option<u64>,
    /// Keep the cases of other runs in the file given by --json, and judge all of them together. Both must have the same machine, commit and length.
    #[arg(long, requires = "json")]
    add: bool,
    /// Measure nothing. Show what the file given by --json holds.
    #[arg(long, requires = "json")]
    show: bool,
    /// Show how far the shares of the file given by --json are from those of this one: of another day, or another build.
    #[arg(long, value_name = "FILE", requires = "show")]
    beside: Option<PathBuf>,
    /// Another word for the guest's kernel command line, such as 'nokaslr'; may be repeated.
    #[arg(long, value_name = "WORD")]
    append: Vec<String>,
    #[command(flatten)]
    guest: Guest,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a picture of each figure into this directory.
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
}

/// Runs it.
pub fn run(options: &Vm) -> Result<()> {
    let older = match &options.json {
        Some(file) if options.show || (options.add && file.exists()) => Some(read(file)?),
        _ => None,
    };
    if options.show {
        let report = older.context("--show needs the file that --json names")?;
        if let Some(other) = &options.beside {
            print!("{}", bench_vm::beside(&report, &read(other)?));
            return Ok(());
        }
        return show(options, &report, options.json.as_deref(), false);
    }
    let spec = what(options)?;
    println!(
        "bench vm: {} cases, {} pairs of windows of {}",
        spec.cases.len(),
        spec.rounds,
        spec.policies.join(", ")
    );
    bench_vm::check_policies(&spec)?;
    let (mut failed, begun) = (0, Instant::now());
    for time in 1..=options.times {
        let numbered = options
            .json
            .as_ref()
            .filter(|_| options.times > 1)
            .map(|file| file.with_extension(format!("{time}.json")));
        let file = numbered.as_ref().or(options.json.as_ref());
        let spec = BenchSpec {
            // Each time another order.
            seed: spec.seed.wrapping_add(u64::from(time - 1)),
            ..spec.clone()
        };
        let report = once(&spec, older.as_ref(), file.map(PathBuf::as_path))?;
        println!(
            "\nbench vm: measured for {:.1} minutes",
            begun.elapsed().as_secs_f64() / 60.0
        );
        let shown = show(options, &report, file.map(PathBuf::as_path), true);
        match shown {
            Err(error) if options.times > 1 => {
                println!("time {time} of {}: {error:#}", options.times);
                failed += 1;
            }
            shown => shown?,
        }
    }
    if options.times > 1 {
        println!(
            "bench vm: {} of {} in order",
            options.times - failed,
            options.times
        );
    }
    if failed > 0 {
        bail!("{failed} of {} times not all was in order", options.times);
    }
    Ok(())
}

/// What is to be measured.
fn what(options: &Vm) -> Result<BenchSpec> {
    if options.syscalls {
        bench_vm::strace_ready()?;
    }
    let (words, connections) = match options.quick {
        true => (vec!["nginx".to_owned(), "set".to_owned()], Some(vec![16])),
        false => (options.service.clone(), options.connections.clone()),
    };
    // Half an hour's worth, unless something was asked for.
    let connections = connections.or_else(|| (words == ["usual"]).then(|| vec![1, 16]));
    let policies = match options.matrix {
        true => MATRIX.map(str::to_owned).to_vec(),
        false => options.policy.clone(),
    };
    for label in &policies {
        if Wish::of(label)?.is_of_the_file() && !options.fresh {
            bail!("--policy {label}: a VM that runs cannot be given it: add --fresh");
        }
    }
    let against_itself = policies.len() > 1 && policies.iter().all(|label| *label == policies[0]);
    let rounds = match (options.quick, options.fresh) {
        (true, _) => 6,
        (false, true) => 3,
        // What is looked for is so small that it takes more of them.
        (false, false) if against_itself => 20,
        (false, false) => 10,
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Ok(BenchSpec {
        rounds: options.rounds.unwrap_or(rounds),
        seconds: options.seconds,
        fresh: options.fresh,
        append: options.append.clone(),
        syscalls: options.syscalls,
        seed: options.seed.unwrap_or(now.as_ref().map_or(0, Duration::as_secs)),
        ..spec(
            &words,
            connections.as_deref(),
            &policies,
            &options.guest,
            &options.link,
        )?
    })
}

fn once(spec: &BenchSpec, older: Option<&BenchReport>, file: Option<&Path>) -> Result<BenchReport> {
    let with_older = |report: &BenchReport| -> Result<BenchReport> {
        let mut whole = report.clone();
        if let (Some(older), Some(file)) = (older, file) {
            whole
                .add_from(older.clone())
                .map_err(|why| anyhow::anyhow!("--add: {} was measured otherwise ({why})", file.display()))?;
        }
        Ok(whole)
    };
    // Before anything is measured.
    with_older(&bench_vm::nothing_yet(spec))?;
    let report = bench_vm::run(spec, &mut |line| println!("{line}"), &mut |report| {
        let Some(file) = file else { return Ok(()) };
        write(file, &serde_json::to_string_pretty(&with_older(report)?)?)
    })?;
    with_older(&report)
}

fn show(options: &Vm, report: &BenchReport, file: Option<&Path>, written: bool) -> Result<()> {
    println!("\n{}", bench_vm::table(report));
    if let Some(file) = file.filter(|_| written) {
        println!("bench vm: wrote {}", file.display());
    }
    // The pictures lie beside the figures unless they are wanted elsewhere.
    let svg = options
        .svg
        .clone()
        .or_else(|| file.map(|json| json.with_extension("svg.d")));
    if let Some(dir) = svg {
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        for (name, text) in bench_vm::draw(report)? {
            write(&dir.join(name), &text)?;
        }
        println!("bench vm: pictures are in {}", dir.display());
    }
    let failures = report.failures();
    if !failures.is_empty() {
        bail!("{} measurements failed, and have no figures", failures.len());
    }
    if report.itself.as_ref().is_some_and(|itself| !itself.holds) {
        bail!("a policy is not worth 1 against itself: these figures are not to be believed");
    }
    if !report.ends.is_empty() {
        bail!("{}: the figures stand", report.ends.join("; "));
    }
    Ok(())
}

fn read(file: &Path) -> Result<BenchReport> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is no report of this 'bench vm': measure it anew",
            file.display()
        )
    })
}
