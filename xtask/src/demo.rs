//! `cargo xtask demo`: set-up, build, and the demonstration as often as asked for.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_vmtest::demo::{self, DemoReport, DemoSpec};
use dunlin_vmtest::program;
use dunlin_vmtest::scenario::overload::Busy;

use crate::accel::Accel;

/// The second one is of a host whose copy was made of the running program.
const KILLS_OF_A_PROGRAM: u32 = 2;

/// Show that a VM survives its host: three hosts, clients that check every answer, SIGKILL to whole hosts.
#[derive(clap::Args)]
pub struct Demo {
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run it this many times, each time from scratch. All runs must pass.
    #[arg(long, value_name = "N", default_value_t = 1)]
    times: u32,
    /// Replication policy.
    #[arg(long, default_value = "dunlin", value_parser = ["dunlin", "plover", "colo", "str", "remus"])]
    policy: String,
    /// Clients that count, each with one connection.
    #[arg(long, default_value_t = 2)]
    connections: usize,
    /// Connections of redis-benchmark in addition.
    #[arg(long, default_value_t = 2)]
    load: u32,
    /// Give the guest a disk of this many MiB, and let redis write every INCR to it before answering.
    #[arg(long, value_name = "MIB")]
    disk: Option<u64>,
    /// The run fails if a client is without an answer for longer than this.
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    gap_limit_ms: u64,
    /// Show a bare program instead: redis without a VM, on two hosts. Its primary's host is killed, comes back and gets a copy of
    /// the running program. Then the new primary's host is killed.
    #[arg(long, conflicts_with_all = ["policy", "disk"])]
    program: bool,
    /// Use the release build.
    #[arg(long)]
    release: bool,
    /// Run this many busy loops at normal priority at the same time.
    #[arg(long, default_value_t = 0, value_name = "LOOPS")]
    loops: usize,
    #[command(flatten)]
    accel: Accel,
}

/// Runs it; an error is a run that did not pass.
pub fn run(arguments: &Demo) -> Result<()> {
    let dunlin = super::ready(arguments.release)?;
    let _busy = Busy::start(arguments.loops);
    if arguments.program {
        return run_program(arguments, dunlin);
    }
    let (_, image) = arguments.accel.choose()?;
    let spec = DemoSpec {
        dunlin,
        image,
        policy: arguments.policy.clone(),
        connections: arguments.connections,
        load_connections: arguments.load,
        disk_mib: arguments.disk,
        gap_limit: Duration::from_millis(arguments.gap_limit_ms),
    };
    let mut reports: Vec<DemoReport> = Vec::new();
    let mut broken = Vec::new();
    for number in 1..=arguments.times {
        if arguments.times > 1 {
            println!("demo: run {number} of {}", arguments.times);
        }
        let begun = Instant::now();
        let said = demo::run(&spec, &mut |line| {
            println!("[{:6.2} s] {line}", begun.elapsed().as_secs_f64())
        });
        match said {
            Ok(report) => {
                if arguments.times > 1 {
                    println!("{}", report.verdict());
                }
                reports.push(report);
            }
            Err(error) => {
                println!("demo: FAIL {error:#}");
                broken.push(format!("run {number}: {error:#}"));
            }
        }
    }
    if let Some(file) = &arguments.json {
        let text = serde_json::to_string_pretty(&reports)?;
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    conclude(&reports, &broken)
}

/// As `run`, for a bare program; a line for each run, and one for all.
fn run_program(arguments: &Demo, dunlin: PathBuf) -> Result<()> {
    let spec = program::DemoSpec {
        dunlin,
        connections: arguments.connections,
        load_connections: arguments.load,
        kills: KILLS_OF_A_PROGRAM,
        gap_limit: Duration::from_millis(arguments.gap_limit_ms),
    };
    let mut reports = Vec::new();
    for number in 1..=arguments.times {
        if arguments.times > 1 {
            println!("demo: run {number} of {}", arguments.times);
        }
        let begun = Instant::now();
        let said = program::demo(&spec, &mut |line| {
            println!("[{:6.2} s] {line}", begun.elapsed().as_secs_f64())
        });
        match said {
            Ok(report) => {
                println!("{}", report.verdict());
                reports.push(report);
            }
            Err(error) => println!("demo: FAIL {error:#}"),
        }
    }
    if let Some(file) = &arguments.json {
        let text = serde_json::to_string_pretty(&reports)?;
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let passed = reports.iter().filter(|report| report.passed()).count() as u32;
    if arguments.times > 1 {
        let worst_us = reports.iter().map(|report| report.gap_us).max().unwrap_or(0);
        let lost: u64 = reports.iter().map(|report| report.clients.lost).sum();
        println!(
            "demo: {} lost={lost} gap_ms={} passed={passed}/{} program=redis",
            if passed == arguments.times { "PASS" } else { "FAIL" },
            worst_us.div_ceil(1000),
            arguments.times
        );
    }
    if passed < arguments.times {
        bail!(
            "{} of {} runs did not pass",
            arguments.times - passed,
            arguments.times
        );
    }
    Ok(())
}

/// Prints the last line and turns it into the exit code.
fn conclude(reports: &[DemoReport], broken: &[String]) -> Result<()> {
    if let ([report], []) = (reports, broken) {
        println!("{}", report.verdict());
        if !report.passed {
            bail!("the demo did not pass");
        }
        return Ok(());
    }
    let mut gaps_us: Vec<u64> = reports
        .iter()
        .flat_map(|report| &report.kills)
        .map(|kill| kill.gap_us)
        .collect();
    gaps_us.sort_unstable();
    let ms = |us: Option<&u64>| us.map_or(0, |us| us.div_ceil(1000));
    let passed = reports.iter().filter(|report| report.passed).count();
    let runs = reports.len() + broken.len();
    let lost: u64 = reports.iter().map(|report| report.clients.lost).sum();
    let all_passed = passed == runs && runs > 0;
    println!(
        "demo: {} lost={lost} gap_ms={} gap_p50_ms={} passed={passed}/{runs} kills={}",
        if all_passed { "PASS" } else { "FAIL" },
        ms(gaps_us.last()),
        ms(gaps_us.get(gaps_us.len().saturating_sub(1) / 2)),
        gaps_us.len()
    );
    if !all_passed {
        bail!("{} of {runs} runs did not pass", runs - passed);
    }
    Ok(())
}
