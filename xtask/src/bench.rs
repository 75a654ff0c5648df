//! `cargo xtask bench`: measurements that compare in one run.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use dunlin_vmtest::bench_vm::{self, BenchSpec};
use dunlin_vmtest::{bench_consensus, bench_disk, image, paths};

/// What to measure.
#[derive(Subcommand)]
pub enum Bench {
    /// What protecting a VM costs: throughput, latency, pauses; policies alternate in one run.
    Vm(Vm),
    /// What agreement costs, beside the bare fabric, the bare disk, etcd and dragonboat; killed leaders; crashes.
    /// For figures: `cargo run --release -p xtask -- bench consensus`.
    Consensus {
        /// See `docs/fabric.md`; an unknown one prints the list.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// What replicating a disk costs: `none`, `gannet`, `colo`, `sync` under fio, each host's disk with the same bandwidth.
    /// For figures: `cargo run --release -p xtask -- bench disk`.
    Disk {
        /// An unknown one prints the list.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

/// The options of `bench vm`.
#[derive(clap::Args)]
pub struct Vm {
    /// The service in the guest.
    #[arg(long, default_value = "redis", value_parser = ["redis"])]
    service: String,
    /// Policies, by commas.
    #[arg(long, value_delimiter = ',', default_value = "none,remus,plover")]
    policy: Vec<String>,
    /// Parallel connections, by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,16,48")]
    connections: Vec<u32>,
    /// redis-benchmark's test.
    #[arg(long, default_value = "set")]
    test: String,
    /// How often each policy is measured; the medians are shown.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// About how long one measurement takes.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Each host's share of the CPU in every policy, in percent of one core.
    #[arg(long, default_value_t = 60)]
    host_cpu: u32,
    /// Give the guest a disk of that many MiB.
    #[arg(long, value_name = "MIB")]
    disk: Option<u64>,
    /// A line for the `[sync]` table, such as 'longest_ms = 50'; may be repeated.
    #[arg(long, value_name = "KEY = VALUE")]
    sync: Vec<String>,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a picture to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Runs it.
pub fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Vm(options) => vm(options),
        Bench::Consensus { args } => bench_consensus::run(args),
        Bench::Disk { args } => bench_disk::run(args),
    }
}

fn vm(options: &Vm) -> Result<()> {
    let dunlin = super::ready(true)?;
    let image = image::ensure(&paths::guest_images(), &mut |line| println!("{line}"))?;
    let spec = BenchSpec {
        dunlin,
        image,
        policies: options.policy.clone(),
        connections: options.connections.clone(),
        test: options.test.clone(),
        rounds: options.rounds,
        seconds: options.seconds,
        host_cpu_percent: options.host_cpu,
        disk_mib: options.disk,
        sync: options.sync.clone(),
    };
    println!(
        "bench vm: service {}, {} rounds of {}",
        options.service,
        options.rounds,
        options.policy.join(", ")
    );
    let report = bench_vm::run(&spec, &mut |line| println!("{line}"))?;
    println!("\n{}", bench_vm::table(&report));
    let write = |file: &Option<PathBuf>, text: &str| -> Result<()> {
        let Some(file) = file else { return Ok(()) };
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
        println!("bench vm: wrote {}", file.display());
        Ok(())
    };
    write(&options.json, &serde_json::to_string_pretty(&report)?)?;
    // The picture lies beside the figures unless it is wanted elsewhere.
    let svg = options
        .svg
        .clone()
        .or_else(|| options.json.as_ref().map(|json| json.with_extension("svg")));
    write(&svg, &bench_vm::plot(&report))
}
