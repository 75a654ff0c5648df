//! `cargo xtask bench`: measurements that compare in one run.

mod vm;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use dunlin_vmtest::bench_vm::growth::Axis;
use dunlin_vmtest::bench_vm::{self, BenchSpec, Link};
use dunlin_vmtest::cluster::Machine;
use dunlin_vmtest::page::watched::{self, WatchSpec};
use dunlin_vmtest::{bench_consensus, bench_disk, image, paths, program};

use crate::accel::Accel;

/// What to measure.
#[derive(Subcommand)]
pub enum Bench {
    /// What protecting a VM costs: throughput, latency, pauses; policies alternate in one run.
    Vm(vm::Vm),
    /// How the cost of syncs grows with the guest's RAM, the pages that an epoch dirties, and the number of vCPUs.
    Growth(Grow),
    /// How long clients wait when the primary's whole host is killed under load.
    Failover(Kills),
    /// What a checkpoint on a standby (`standby_checkpoint`) costs a VM under load, and what it saves a join.
    Standby(Standbys),
    /// What a guest's network card costs: each of Dunlin's, unprotected and protected, compared with that of a plain QEMU on a TAP.
    Cards(Cards),
    /// What a client's link carries by itself, with delay, with loss, or with neither: one TCP connection to a host, no VM.
    Links(Links),
    /// What viewers of the page cost a VM: a client's latency with fifty real streams of events and without any, in pairs of windows.
    /// Fails if the whole 95 % interval of p50's or p99's ratio lies above 1.05.
    Page(Watched),
    /// What running a bare program on two hosts costs: several servers, each compared with the same server without Dunlin.
    Programs(Programs),
    /// What agreement costs, compared with the bare fabric, the bare disk, etcd and dragonboat. Also: killed leaders, crashes.
    /// For figures: `cargo run --release -p xtask -- bench consensus`.
    Consensus {
        /// See `docs/fabric.md`. An unknown argument prints the list.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// What replicating a disk costs: `none`, `gannet`, `colo`, `sync` under fio, each host's disk with the same bandwidth.
    /// For figures: `cargo run --release -p xtask -- bench disk`.
    Disk {
        /// An unknown argument prints the list.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

/// The options of `bench programs`.
#[derive(clap::Args)]
pub struct Programs {
    /// Only these programs, separated by commas: redis, memcached, nginx, lighttpd, node, go, postgresql, mariadb.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    programs: Vec<String>,
    /// Numbers of parallel connections, separated by commas. Without it: 1,16,50, and 1,2,4,16 for loads that write into a database.
    #[arg(long, value_delimiter = ',')]
    connections: Vec<u32>,
    /// How often each program is measured. Medians are shown.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// About how long one load takes.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// What the next input waits for (`[program] order`): read, batch, answer, delivery. Without it: what suits each program.
    #[arg(long)]
    order: Option<String>,
    /// Instead of throughput, measure how long each program stands still while it is copied: this many switchovers, and with redis this many
    /// differences, for each size.
    #[arg(long, value_name = "TIMES")]
    joins: Option<usize>,
    /// With `--joins`: how many MB redis is filled with, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "3,100,300", value_name = "MB")]
    filled: Vec<u64>,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The options of `bench page`.
#[derive(clap::Args)]
pub struct Watched {
    /// How many viewers there are.
    #[arg(long, default_value_t = 50)]
    watchers: usize,
    /// Pairs of windows.
    #[arg(long, default_value_t = 6)]
    pairs: usize,
    /// How long each window with viewers is, in seconds.
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// How long each window without viewers is. Without it: as long as those with.
    #[arg(long, value_name = "SECONDS")]
    without_seconds: Option<f64>,
    /// The client's connections.
    #[arg(long, default_value_t = 4)]
    connections: usize,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    accel: Accel,
}

/// The options of `bench cards`.
#[derive(clap::Args)]
pub struct Cards {
    /// Loads, separated by commas, as for `bench vm`. Each load is one case for each number of connections that it has.
    #[arg(long, value_delimiter = ',', default_value = "down-64m,up-64m,down-1m,up-1m")]
    service: Vec<String>,
    /// Only the cases with these numbers of parallel connections, separated by commas.
    #[arg(long, value_delimiter = ',')]
    connections: Option<Vec<u32>>,
    /// Only the ways whose names contain one of these words, separated by commas, such as vhost-user, none or relay; and the plain TAP in any case.
    /// Without it, relays are left out: they are the way that was not taken (docs/guest.md).
    #[arg(long, value_delimiter = ',')]
    way: Vec<String>,
    /// How often each case is measured. Medians are shown.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// How long one window is, in seconds; at least 3 for bulk.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    #[command(flatten)]
    guest: Guest,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The options of `bench links`.
#[derive(clap::Args)]
pub struct Links {
    /// Links, separated by commas, as for `bench vm`. 0ms is a shaper that has nothing to do.
    #[arg(long, value_delimiter = ',', default_value = "lan,0ms,5ms,20ms,1%")]
    link: Vec<Link>,
    /// How long bytes are sent in each direction, in seconds.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// The seed of the choice which frames are lost.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The options of `bench growth`.
#[derive(clap::Args)]
pub struct Grow {
    /// What grows, separated by commas: memory (256 to 16,384 MiB), dirty (1,024 to 65,536 pages a request), vcpus (1 to 4; not under a
    /// software-assisted KVM).
    #[arg(long, value_delimiter = ',', default_value = "memory,dirty")]
    grow: Vec<String>,
    /// Policies, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "remus,plover")]
    policy: Vec<String>,
    /// How long each case is measured, in seconds.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Write every figure to this file, and pictures beside it.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    guest: Guest,
}

/// The options of `bench failover`.
#[derive(clap::Args)]
pub struct Kills {
    /// Policies, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "remus,plover")]
    policy: Vec<String>,
    /// How often the primary's host is killed under each policy.
    #[arg(long, default_value_t = 10)]
    kills: u32,
    /// Clients that count, each with one connection.
    #[arg(long, default_value_t = 16)]
    connections: usize,
    /// Use a network that carries frames for the VM to both of its hosts.
    #[arg(long)]
    flooding: bool,
    #[command(flatten)]
    guest: Guest,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The options of `bench standby`.
#[derive(clap::Args)]
pub struct Standbys {
    /// Pairs of windows, with a checkpoint and without.
    #[arg(long, default_value_t = 10)]
    pairs: u32,
    /// Joins with a checkpoint, and as many without.
    #[arg(long, default_value_t = 3)]
    joins: u32,
    /// How often the standby gets a checkpoint.
    #[arg(long, default_value = "1s")]
    every: String,
    /// How long one window is, in seconds.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// The guest's memory in MiB, if it is not the usual one.
    #[arg(long, value_name = "MIB")]
    memory: Option<u32>,
    /// Connections of the load, which is redis' SET.
    #[arg(long, default_value_t = 16)]
    connections: u32,
    #[command(flatten)]
    guest: Guest,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What the VMs and hosts of a benchmark are.
#[derive(clap::Args)]
pub struct Guest {
    /// Each host's share of the CPU in every policy, in percent of one core.
    #[arg(long, default_value_t = 60)]
    host_cpu: u32,
    /// Virtual CPUs of each guest.
    #[arg(long, default_value_t = 1)]
    vcpus: u32,
    /// Give the guest a disk of this many MiB.
    #[arg(long, value_name = "MIB")]
    disk: Option<u64>,
    /// A line for the `[sync]` table, such as 'longest_ms = 50'; may be repeated.
    #[arg(long, value_name = "KEY = VALUE")]
    sync: Vec<String>,
    #[command(flatten)]
    accel: Accel,
}

/// Runs it.
pub fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Vm(options) => vm::run(options),
        Bench::Growth(options) => growth(options),
        Bench::Failover(options) => failover(options),
        Bench::Standby(options) => standby(options),
        Bench::Cards(options) => cards(options),
        Bench::Links(options) => links(options),
        Bench::Page(options) => page(options),
        Bench::Programs(options) => programs(options),
        Bench::Consensus { args } => bench_consensus::run(args),
        Bench::Disk { args } => bench_disk::run(args, || {
            let dunlin = super::ready(true)?;
            let image = image::ensure_service(&image::FIO, &paths::guest_images(), &mut |line| {
                println!("{line}")
            })?;
            Ok(bench_disk::World { dunlin, image })
        }),
    }
}

fn spec(
    words: &[String],
    connections: Option<&[u32]>,
    policies: &[String],
    guest: &Guest,
    links: &[Link],
) -> Result<BenchSpec> {
    // A wrong word is said before anything is built.
    let cases = bench_vm::over(&bench_vm::choose(words, connections)?, links);
    let dunlin = super::ready(true)?;
    let (runs_under, _) = guest.accel.choose()?;
    let cards = guest.accel.nic_backend();
    if let Some(why) = runs_under.refuses(Machine::Pc, guest.vcpus) {
        bail!("--vcpus {}: {why}: use --vcpus 1, or --accel tcg", guest.vcpus);
    }
    let (images, clients) =
        BenchSpec::prepare(&cases, &paths::guest_images(), &mut |line| println!("{line}"))?;
    let images = images
        .into_iter()
        .map(|(name, image)| (name, image.under(&runs_under).with_cards(cards)))
        .collect();
    Ok(BenchSpec {
        dunlin,
        images,
        clients,
        policies: labels(policies),
        cases,
        rounds: 1,
        fresh: true,
        seconds: 2.0,
        warm_up_seconds: 5.0,
        host_cpu_percent: guest.host_cpu,
        vcpus: guest.vcpus,
        disk_mib: guest.disk,
        sync: guest.sync.clone(),
        append: Vec::new(),
        syscalls: false,
        accelerator: runs_under.name().to_owned(),
        seed: 0,
    })
}

fn growth(options: &Grow) -> Result<()> {
    let named = options.grow.iter().map(|name| Axis::named(name));
    let axes: Vec<Axis> = named.collect::<Result<_>>()?;
    let mut spec = spec(
        &["set".to_owned()],
        Some(&[1]),
        &options.policy,
        &options.guest,
        &[],
    )?;
    spec.seconds = options.seconds;
    let image = spec.images.first().context("no image")?;
    if axes.contains(&Axis::Vcpus)
        && let Some(why) = image.1.runs_under.refuses(Machine::Pc, 2)
    {
        bail!("--grow vcpus: {why}: use --accel tcg");
    }
    bench_vm::check_policies(&spec)?;
    let grown = bench_vm::growth::run(&spec, &axes, &mut |line| println!("{line}"));
    println!("\n{}", bench_vm::growth::growth_table(&grown));
    if let Some(file) = &options.json {
        write(file, &serde_json::to_string_pretty(&grown)?)?;
        write_pictures(file, "growth", bench_vm::growth::growth_pictures(&grown)?)?;
    }
    if grown.points.iter().any(|point| point.failure.is_some()) {
        bail!("a point failed, and has no figures");
    }
    Ok(())
}

fn cards(options: &Cards) -> Result<()> {
    if let Some(relayed) = bench_vm::relay::is_wanted() {
        return relayed;
    }
    let connections = options.connections.as_deref();
    let mut spec = spec(
        &options.service,
        connections,
        &["dunlin".to_owned()],
        &options.guest,
        &[],
    )?;
    (spec.rounds, spec.seconds) = (options.rounds, options.seconds);
    let report = bench_vm::cards::run(&spec, &options.way, &mut |line| println!("{line}"))?;
    println!("\n{}", bench_vm::cards::cards_table(&report));
    match &options.json {
        Some(file) => write(file, &serde_json::to_string_pretty(&report)?),
        None => Ok(()),
    }
}

fn links(options: &Links) -> Result<()> {
    let report = bench_vm::links::run(&options.link, options.seconds, options.seed, &mut |line| {
        println!("{line}");
    })?;
    println!("\n{}", bench_vm::links::links_table(&report));
    match &options.json {
        Some(file) => write(file, &serde_json::to_string_pretty(&report)?),
        None => Ok(()),
    }
}

fn standby(options: &Standbys) -> Result<()> {
    let (redis, dunlin) = (["redis".to_owned()], ["dunlin".to_owned()]);
    let mut spec = spec(&redis, Some(&[options.connections]), &dunlin, &options.guest, &[])?;
    spec.seconds = options.seconds;
    let plan = bench_vm::standby::Plan {
        pairs: options.pairs,
        joins: options.joins,
        every: options.every.clone(),
        memory_mib: options.memory,
    };
    let report = bench_vm::standby::run(&spec, &plan, &mut |line| println!("{line}"))?;
    println!("\n{}", bench_vm::standby::standby_table(&report));
    match &options.json {
        Some(file) => write(file, &serde_json::to_string_pretty(&report)?),
        None => Ok(()),
    }
}

fn failover(options: &Kills) -> Result<()> {
    let redis = ["redis".to_owned()];
    let spec = spec(&redis, None, &options.policy, &options.guest, &[])?;
    bench_vm::check_policies(&spec)?;
    let deaths = bench_vm::failover::Deaths {
        kills: options.kills,
        connections: options.connections,
        flooding: options.flooding,
    };
    let report = bench_vm::failover::run(&spec, &deaths, &mut |line| println!("{line}"))?;
    println!("\n{}", bench_vm::failover::failover_table(&report));
    if let Some(file) = &options.json {
        write(file, &serde_json::to_string_pretty(&report)?)?;
        write_pictures(file, "failover", bench_vm::failover::failover_pictures(&report)?)?;
    }
    if report.rows.iter().any(|row| row.failure.is_some()) {
        bail!("a policy failed, and has no figures");
    }
    Ok(())
}

/// Beside the file with the figures.
fn write_pictures(file: &Path, bench: &str, pictures: Vec<(String, String)>) -> Result<()> {
    let dir = file.with_extension("svg.d");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    for (name, text) in pictures {
        write(&dir.join(name), &text)?;
    }
    println!("bench {bench}: pictures are in {}", dir.display());
    Ok(())
}

/// A policy that is named again gets a mark for each time: its windows are rows of their own.
fn labels(policies: &[String]) -> Vec<String> {
    let mut labels: Vec<String> = Vec::new();
    for policy in policies {
        let mut label = policy.clone();
        while labels.contains(&label) {
            label.push('\'');
        }
        labels.push(label);
    }
    labels
}

/// Whole or not at all: a report that took an hour must survive a full disk.
fn write(file: &Path, text: &str) -> Result<()> {
    let half = file.with_extension("half");
    std::fs::write(&half, text)
        .and_then(|()| std::fs::rename(&half, file))
        .with_context(|| format!("cannot write {}", file.display()))
}

fn page(options: &Watched) -> Result<()> {
    let dunlin = super::ready(true)?;
    let (runs_under, image) = options.accel.choose()?;
    let spec = WatchSpec {
        dunlin,
        image,
        watchers: options.watchers,
        pairs: options.pairs,
        window: Duration::from_secs_f64(options.seconds),
        without: Duration::from_secs_f64(options.without_seconds.unwrap_or(options.seconds)),
        connections: options.connections,
    };
    let report = watched::run(&spec, &mut |line| println!("{line}"))?;
    println!(
        "bench page: {} watched for {:.0} s, beside windows without of {:.0} s each; {}, {} connections. With over without, medians of {} pairs:",
        spec.watchers,
        report.watched_seconds,
        spec.without.as_secs_f64(),
        runs_under.name(),
        spec.connections,
        spec.pairs
    );
    for (name, ratio) in report.ratios() {
        println!(
            "  {name}: {}",
            ratio.map_or_else(|| "nothing was measured".to_owned(), |ratio| ratio.in_words())
        );
    }
    if let Some(file) = &options.json {
        write(file, &serde_json::to_string_pretty(&report)?)?;
    }
    println!("bench page: {}", report.verdict()?);
    Ok(())
}

fn programs(options: &Programs) -> Result<()> {
    let dunlin = super::ready(true)?;
    if let Some(joins) = options.joins {
        let spec = program::bench_joins::JoinsSpec {
            programs: options.programs.clone(),
            megabytes: options.filled.clone(),
            joins,
        };
        let figures = program::bench_joins::run(&dunlin, &spec, &mut |line| println!("{line}"))?;
        return written(options.json.as_deref(), &serde_json::to_string_pretty(&figures)?);
    }
    let spec = program::bench::BenchSpec {
        programs: options.programs.clone(),
        connections: options.connections.clone(),
        rounds: options.rounds,
        about: Duration::from_secs_f64(options.seconds),
        order: options.order.clone(),
    };
    let figures = program::bench::run(&dunlin, &spec, &mut |line| println!("{line}"))?;
    written(options.json.as_deref(), &serde_json::to_string_pretty(&figures)?)
}

fn written(file: Option<&Path>, text: &str) -> Result<()> {
    match file {
        Some(file) => std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display())),
        None => Ok(()),
    }
}
