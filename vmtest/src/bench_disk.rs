//! What replicating a disk costs: `none`, `gannet`, `colo` and `sync` in one run, under fio.
//!
//! * **Decides:** the order (storages alternate within each workload) and the fairness: each host's disk has the same fixed
//!   bandwidth in every storage, `none` too, because two hosts share one real disk here and contention would not show.
//! * **Flow:** [`run`]: for each workload and storage two disk ports joined by a socket -> the same fio job on the primary's
//!   and the backup's port at once (16 requests in flight each, as two active VMs would) -> a sync every interval ->
//!   throughput, latency on both sides, checkpoint time with and without the lightweight checkpoint.
//! * **Invariants:** a service's throughput is that of the slower VM ("the response to every incoming request can be returned to
//!   the client only when the slower of the primary and secondary successfully processes the request", GANNET VII-B).
//! * **Source:** GANNET, figures 3 and 4, tables I and II.
//!
//! Two modes: fio in a guest with everything around it ([`guest`], the default), and `--port`: the disk port alone, over its NBD
//! socket, for quick figures. Read all of them as ratios.

mod guest;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dunlin_core::units::{Epoch, Term};
use dunlin_guest::disk::{AttachOptions, Disk, DiskConfig, DiskEvent, Limits, MirrorStream, Storage, nbd};
pub use guest::World;
use serde::Serialize;

const SIZE_BYTES: u64 = 128 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// What to measure; see `--help`.
#[derive(Clone, Debug)]
struct Options {
    storages: Vec<String>,
    workloads: Vec<String>,
    seconds: u64,
    sync_ms: u64,
    mib_per_s: u64,
    /// The same under requests of 1 MiB: 16 of them under way are drained before each pause.
    large_mib_per_s: u64,
    /// Each host's share of one core, in percent; 0: no limit.
    host_cpu: u32,
    /// The disk port alone.
    port: bool,
    dir: PathBuf,
    json: Option<PathBuf>,
}

impl Options {
    /// Each disk's limit under requests of `block` bytes.
    fn mib_per_s(&self, block: &str) -> u64 {
        match block {
            "1m" => self.large_mib_per_s,
            _ => self.mib_per_s,
        }
    }
}

const HELP: &str = "bench disk [--port] [--host-cpu 80] [--storage none,gannet,colo,sync] [--workload randwrite-4k,...] [--seconds 4] \
    [--sync-ms 500] [--mib-per-s 4; 20 with --port] [--large-mib-per-s 32: the limit under requests of 1 MiB] [--dir DIR] [--json FILE]";
const WORKLOADS: [&str; 9] = [
    "randwrite-4k",
    "write-4k",
    "randwrite-1m",
    "write-1m",
    "randrw-4k",
    "rw-4k",
    "randrw-1m",
    "rw-1m",
    PACED,
];
/// Random writes with pauses, as a service makes them that waits for its clients: what the lightweight checkpoint is for.
const PACED: &str = "paced-4k";
const PACED_PER_S: u64 = 128;

/// One storage under one workload.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// `none`, `gannet`, `gannet-nolight`, `colo` or `sync`.
    pub storage: String,
    /// fio's pattern and block size.
    pub workload: String,
    /// Of the slower VM.
    pub service_mib_per_s: f64,
    /// The primary's fio.
    pub primary_mib_per_s: f64,
    /// The backup's fio; none without a backup.
    pub backup_mib_per_s: Option<f64>,
    /// Mean that fio in the guest saw, microseconds.
    pub guest_latency_us: Option<f64>,
    /// Mean at the primary's disk port, microseconds (with `--port`: what fio saw).
    pub primary_latency_us: f64,
    /// Mean at the backup's, microseconds.
    pub backup_latency_us: Option<f64>,
    /// From the mark (with guests: from the commit) until the sync is on the backup's image, milliseconds: median (with guests:
    /// mean, of all syncs, those that are on their way when the load ends too).
    pub checkpoint_ms: Option<f64>,
    /// Bytes that one such sync brings to the image, MiB, mean.
    pub checkpoint_mib: Option<f64>,
    /// With `--port`: from the call to the return of `commit`; else the primary VM's pause in a sync. Median, milliseconds.
    pub commit_ms: Option<f64>,
    /// Of the bytes that both VMs wrote, settled by the lightweight checkpoint.
    pub settled_mib: Option<f64>,
    /// How long it compared and wrote, seconds.
    pub settle_s: Option<f64>,
    /// What the backup still held in memory when the load ended, MiB.
    pub left_mib: Option<f64>,
    /// Writes of the backup's VM that were delayed because its buffers were nearly full.
    pub delayed_writes: Option<u64>,
    /// Syncs taken.
    pub syncs: u64,
}

/// The whole run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was measured, in words.
    pub about: String,
    /// Every sample.
    pub samples: Vec<Sample>,
}

/// Runs the benchmark; `args` are those after `bench disk`. `world` makes what a run with guests needs.
///
/// # Errors
/// An unknown option, no fio, or a disk port that failed.
pub fn run(args: &[String], world: impl FnOnce() -> Result<World>) -> Result<()> {
    let options = options(args)?;
    let what = if options.port {
        "disk ports alone (no QEMU), 16 requests in flight per VM".to_owned()
    } else {
        format!(
            "fio in the guest (TCG, 1 vCPU), 16 threads, direct I/O; each host has {} % of one core",
            options.host_cpu
        )
    };
    let mut report = Report {
        about: format!(
            "{what}; each host's disk limited to {} MiB/s ({} under requests of 1 MiB); a sync at the latest every {} ms; {} s each",
            options.mib_per_s, options.large_mib_per_s, options.sync_ms, options.seconds
        ),
        samples: Vec::new(),
    };
    println!("bench disk: {}", report.about);
    if options.port {
        for workload in &options.workloads {
            for storage in &options.storages {
                let sample = measure(&options, storage, workload)
                    .with_context(|| format!("bench disk: {storage} under {workload}"))?;
                println!("{}", line(&sample));
                report.samples.push(sample);
            }
        }
    } else {
        let world = world()?;
        for storage in &options.storages {
            guest::measure(&options, &world, storage, &mut |sample| {
                println!("{}", line(&sample));
                report.samples.push(sample);
            })
            .with_context(|| format!("bench disk: {storage}"))?;
            // What was measured is kept, whatever comes of the next storage.
            write(&report, options.json.as_deref())?;
        }
    }
    println!("\n{}", table(&report));
    write(&report, options.json.as_deref())
}

fn write(report: &Report, file: Option<&Path>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    std::fs::write(file, serde_json::to_vec_pretty(report)?)
        .with_context(|| format!("bench disk: {} cannot be written", file.display()))
}

fn options(args: &[String]) -> Result<Options> {
    let list = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
    let mut options = Options {
        storages: list("none,gannet,gannet-nolight,colo,sync"),
        workloads: WORKLOADS.map(str::to_owned).to_vec(),
        seconds: 4,
        sync_ms: 500,
        mib_per_s: 0,
        large_mib_per_s: 32,
        host_cpu: 80,
        port: false,
        dir: std::env::temp_dir(),
        json: None,
    };
    let mut args = args.iter();
    while let Some(name) = args.next() {
        if name == "--port" {
            options.port = true;
            continue;
        }
        let value = args
            .next()
            .with_context(|| format!("{name} needs a value\n{HELP}"))?;
        match name.as_str() {
            "--storage" => options.storages = list(value),
            "--workload" => options.workloads = list(value),
            "--seconds" => options.seconds = value.parse()?,
            "--sync-ms" => options.sync_ms = value.parse()?,
            "--mib-per-s" => options.mib_per_s = value.parse()?,
            "--large-mib-per-s" => options.large_mib_per_s = value.parse()?,
            "--host-cpu" => options.host_cpu = value.parse()?,
            "--dir" => options.dir = value.into(),
            "--json" => options.json = Some(value.into()),
            _ => bail!("unknown option {name}\n{HELP}"),
        }
    }
    if options.mib_per_s == 0 {
        options.mib_per_s = if options.port { 20 } else { 4 };
    }
    for storage in &options.storages {
        let known = ["none", "gannet", "gannet-nolight", "colo", "sync"];
        ensure!(
            known.contains(&storage.as_str()),
            "unknown storage {storage}: one of {known:?}"
        );
    }
    for workload in &options.workloads {
        ensure!(
            WORKLOADS.contains(&workload.as_str()),
            "unknown workload {workload}: one of {WORKLOADS:?}"
        );
    }
    Ok(options)
}

/// A directory that vanishes.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

struct Host {
    disk: Arc<Disk>,
    events: mpsc::Receiver<DiskEvent>,
    socket: PathBuf,
}

impl Host {
    fn new(dir: &Path, name: &str, storage: Storage) -> Result<Self> {
        let image = dir.join(format!("{name}.img"));
        // Written once, so that no block is allocated during a measurement.
        std::fs::write(&image, vec![1; SIZE_BYTES as usize])?;
        let config = DiskConfig {
            name: "disk0".into(),
            image,
            format: Default::default(),
            state_dir: dir.join(name),
            read_only: false,
            storage,
            limits: Limits::default(),
            group: None,
        };
        let (sender, events) = mpsc::channel();
        let sender = Mutex::new(sender);
        let disk = Disk::open(config, move |event| {
            let _nobody_listens = sender.lock().map(|sender| sender.send(event));
        })?;
        let socket = dir.join(format!("{name}.sock"));
        let served = disk.clone();
        nbd::serve_path(&socket, move |stream| {
            let _refused = served.serve(stream);
        })?;
        Ok(Self { disk, events, socket })
    }

    fn copied(&self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self
                .events
                .recv_timeout(until.saturating_duration_since(Instant::now()))
            {
                Ok(DiskEvent::Copied) => return Ok(()),
                Ok(_) => {}
                Err(_) => bail!("the first copy did not end within {} s", PATIENCE.as_secs()),
            }
        }
    }

    fn fio(&self, workload: &str, seconds: u64) -> Result<Child> {
        let (pattern, block) = workload.split_once('-').context("a workload is PATTERN-BLOCK")?;
        // Both VMs run the same program: the same seed, the same bytes.
        Command::new("fio")
            .args([
                "--name=job",
                "--ioengine=nbd",
                "--iodepth=16",
                "--time_based",
                "--output-format=json",
            ])
            .args([
                "--randrepeat=1",
                "--buffer_pattern=0x5a",
                "--rwmixread=50",
                "--size=128m",
            ])
            .arg(format!(
                "--uri=nbd+unix:///disk0?socket={}",
                self.socket.display()
            ))
            .args((workload == PACED).then(|| format!("--rate_iops={PACED_PER_S}")))
            .args([
                format!("--rw={}", if workload == PACED { "randwrite" } else { pattern }),
                format!("--bs={block}"),
                format!("--runtime={seconds}"),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("fio cannot be started: install the package `fio`")
    }
}

/// (MiB/s, mean latency in microseconds)
fn result(child: Child) -> Result<(f64, f64)> {
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "fio failed");
    let fio = fio_result(&String::from_utf8(output.stdout)?)?;
    Ok((fio.mib_per_s, fio.latency_us))
}

/// What a fio has measured.
struct FioResult {
    /// By its own clock.
    mib_per_s: f64,
    /// Mean.
    latency_us: f64,
    /// Read and written.
    bytes: f64,
}

/// Of its JSON.
fn fio_result(text: &str) -> Result<FioResult> {
    let json: serde_json::Value =
        serde_json::from_str(&text[text.find('{').context("fio printed no JSON")?..])
            .with_context(|| format!("fio said: {text}"))?;
    let job = &json["jobs"][0];
    ensure!(job["error"] == 0, "fio reports an I/O error");
    let (mut bytes_per_s, mut bytes) = (0.0, 0.0);
    let (mut latency, mut ios) = (0.0, 0.0);
    for direction in ["read", "write"] {
        let part = &job[direction];
        bytes += part["io_bytes"].as_f64().unwrap_or(0.0);
        bytes_per_s += part["bw_bytes"].as_f64().unwrap_or(0.0);
        let count = part["total_ios"].as_f64().unwrap_or(0.0);
        latency += count * part["lat_ns"]["mean"].as_f64().unwrap_or(0.0) / 1000.0;
        ios += count;
    }
    Ok(FioResult {
        mib_per_s: bytes_per_s / f64::from(1 << 20),
        latency_us: if ios > 0.0 { latency / ios } else { 0.0 },
        bytes,
    })
}

fn measure(options: &Options, storage: &str, workload: &str) -> Result<Sample> {
    let scratch = Scratch(
        options
            .dir
            .join(format!("dunlin-bench-disk-{}", std::process::id())),
    );
    std::fs::create_dir_all(&scratch.0)?;
    let kind = match storage {
        "colo" => Storage::Colo,
        "sync" => Storage::Sync,
        _ => Storage::Gannet,
    };
    let primary = Host::new(&scratch.0, "a", kind)?;
    primary.disk.start_alone(Term(1))?;
    let mut sample = Sample {
        storage: storage.into(),
        workload: workload.into(),
        service_mib_per_s: 0.0,
        primary_mib_per_s: 0.0,
        backup_mib_per_s: None,
        guest_latency_us: None,
        primary_latency_us: 0.0,
        backup_latency_us: None,
        checkpoint_ms: None,
        checkpoint_mib: None,
        commit_ms: None,
        settled_mib: None,
        settle_s: None,
        left_mib: None,
        delayed_writes: None,
        syncs: 0,
    };
    if storage == "none" {
        primary.disk.faults().bytes_per_s(options.mib_per_s << 20);
        let (rate, latency) = result(primary.fio(workload, options.seconds)?)?;
        (
            sample.primary_mib_per_s,
            sample.service_mib_per_s,
            sample.primary_latency_us,
        ) = (rate, rate, latency);
        return Ok(sample);
    }
    let backup = Host::new(&scratch.0, "b", kind)?;
    let (left, right) = std::os::unix::net::UnixStream::pair()?;
    backup.disk.start_backup(MirrorStream::from_unix(right)?)?;
    primary
        .disk
        .attach_backup(MirrorStream::from_unix(left)?, AttachOptions::default())?;
    primary.copied()?;
    let mut syncs = Syncs {
        epoch: 0,
        checkpoint: Vec::new(),
        commit: Vec::new(),
    };
    syncs.take(&primary, &backup)?;
    syncs.checkpoint.clear();
    syncs.commit.clear();
    for host in [&primary, &backup] {
        host.disk.faults().bytes_per_s(options.mib_per_s << 20);
    }
    let mut ours = primary.fio(workload, options.seconds)?;
    let theirs = backup.fio(workload, options.seconds)?;
    let mut next = Instant::now() + Duration::from_millis(options.sync_ms);
    // fio ends by itself: its process is asked, since nothing signals both an exit and a time to sync.
    while ours.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_millis(20));
        if storage == "gannet" {
            backup.disk.idle();
        }
        if Instant::now() >= next {
            syncs.take(&primary, &backup)?;
            next = Instant::now() + Duration::from_millis(options.sync_ms);
        }
    }
    let (ours, theirs) = (result(ours)?, result(theirs)?);
    let figures = backup.disk.status().backup;
    (sample.primary_mib_per_s, sample.primary_latency_us) = ours;
    (sample.backup_mib_per_s, sample.backup_latency_us) = (Some(theirs.0), Some(theirs.1));
    sample.service_mib_per_s = ours.0.min(theirs.0);
    sample.checkpoint_ms = median(&mut syncs.checkpoint);
    sample.commit_ms = median(&mut syncs.commit);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    sample.settled_mib = Some(mib(figures.counters.settled_bytes));
    sample.settle_s = Some(figures.light_ns as f64 / 1e9);
    sample.left_mib = Some(mib(figures.held_bytes));
    sample.delayed_writes = Some(figures.delayed_writes);
    sample.checkpoint_mib = Some(mib(figures.counters.committed_bytes) / syncs.epoch.max(1) as f64);
    sample.syncs = syncs.epoch;
    ensure!(
        primary.disk.status().role == "primary",
        "the backup was lost during the measurement"
    );
    Ok(sample)
}

struct Syncs {
    epoch: u64,
    checkpoint: Vec<f64>,
    commit: Vec<f64>,
}

impl Syncs {
    fn take(&mut self, primary: &Host, backup: &Host) -> Result<()> {
        self.epoch += 1;
        let epoch = Epoch(self.epoch);
        let started = Instant::now();
        primary.disk.mark(epoch)?;
        ensure!(
            backup.disk.wait_marked(epoch, PATIENCE)?,
            "mark {epoch:?} did not arrive"
        );
        let commit = Instant::now();
        backup.disk.commit(epoch)?;
        self.commit.push(commit.elapsed().as_secs_f64() * 1000.0);
        ensure!(
            backup.disk.wait_settled(PATIENCE)?,
            "sync {epoch:?} did not reach the image"
        );
        self.checkpoint.push(started.elapsed().as_secs_f64() * 1000.0);
        Ok(())
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn line(sample: &Sample) -> String {
    let or_dash = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
    format!(
        "{:13} {:15} service {:7.1} MiB/s (backup's VM {:>5})  latency us {:>9.0} / {:>9}  checkpoint ms {:>7} of MiB {:>5}  commit ms {:>6}  \
         settled MiB {:>6} in s {:>5}  left MiB {:>6}  syncs {}",
        sample.workload,
        sample.storage,
        sample.service_mib_per_s,
        or_dash(sample.backup_mib_per_s),
        sample.primary_latency_us,
        or_dash(sample.backup_latency_us),
        or_dash(sample.checkpoint_ms),
        or_dash(sample.checkpoint_mib),
        or_dash(sample.commit_ms),
        or_dash(sample.settled_mib),
        or_dash(sample.settle_s),
        or_dash(sample.left_mib),
        sample.syncs,
    )
}

/// Service throughput by workload and storage, as a share of `none` where it was measured.
#[must_use]
pub fn table(report: &Report) -> String {
    let mut out = String::from("service throughput, share of `none`:\n");
    for workload in WORKLOADS {
        let of = |storage: &str| {
            report
                .samples
                .iter()
                .find(|sample| sample.workload == workload && sample.storage == storage)
        };
        let Some(none) = of("none") else { continue };
        out += &format!("{workload:13}");
        for sample in report.samples.iter().filter(|sample| sample.workload == workload) {
            out += &format!(
                "  {} {:.2}",
                sample.storage,
                sample.service_mib_per_s / none.service_mib_per_s
            );
        }
        out.push('\n');
    }
    let rate = |storage: &str, workload: &str| {
        let found = report
            .samples
            .iter()
            .find(|s| s.workload == workload && s.storage == storage);
        found.map(|sample| sample.service_mib_per_s)
    };
    let word = |met: bool| if met { "met" } else { "MISSED" };
    let shares: Vec<(f64, &str)> = WORKLOADS
        .iter()
        .filter(|workload| **workload != PACED)
        .filter_map(|workload| Some((rate("gannet", workload)? / rate("none", workload)?, *workload)))
        .collect();
    if let Some((lowest, where_)) = shares.iter().min_by(|a, b| a.0.total_cmp(&b.0)) {
        let mean = (shares.iter().map(|(share, _)| share.ln()).sum::<f64>() / shares.len() as f64).exp();
        out += &format!(
            "target {}: gannet at least 0.9 of none: {lowest:.2} at its lowest ({where_}), {mean:.2} in the geometric mean of {} \
             loads\n",
            word(*lowest >= 0.9),
            shares.len()
        );
    }
    if let (Some(gannet), Some(colo)) = (rate("gannet", "randwrite-4k"), rate("colo", "randwrite-4k")) {
        out += &format!(
            "target {}: gannet at least twice colo on randwrite-4k: {:.2}\n",
            word(gannet / colo >= 2.0),
            gannet / colo
        );
    }
    let checkpoint = |storage: &str| {
        let found = report
            .samples
            .iter()
            .find(|s| s.workload == PACED && s.storage == storage);
        found.and_then(|s| s.checkpoint_ms)
    };
    if let (Some(with), Some(without)) = (checkpoint("gannet"), checkpoint("gannet-nolight")) {
        out += &format!(
            "checkpoint under {PACED}: {with:.1} ms with the lightweight checkpoint, {without:.1} ms without\n"
        );
    }
    // GANNET's own measure: the slower of the two VMs.
    let slower = |storage: &str| {
        let found = report
            .samples
            .iter()
            .find(|s| s.workload == "randwrite-4k" && s.storage == storage);
        found.map(|s| {
            s.backup_mib_per_s
                .map_or(s.service_mib_per_s, |rate| rate.min(s.service_mib_per_s))
        })
    };
    if let (Some(none), Some(gannet), Some(colo)) = (slower("none"), slower("gannet"), slower("colo")) {
        out += &format!(
            "by the slower VM, randwrite-4k: gannet {:.2} of none, {:.2} times colo\n",
            gannet / none,
            gannet / colo
        );
    }
    out
}
