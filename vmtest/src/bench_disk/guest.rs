//! The benchmark of disks with everything in it: fio in a guest, two hosts, real syncs.
//!
//! * **Decides:** the order: for each storage one VM and all workloads in it, `none` first.
//! * **Flow:** hosts with a fixed CPU share each -> VM up and protected -> both hosts' disks limited to the same bandwidth ->
//!   for each workload: a line to the guest, fio's JSON back -> what the hosts' disk ports counted meanwhile.
//! * **Invariants:** the same guest, job, bandwidth and CPU share in every storage; `none` has one host and the same limits.
//! * **Source:** GANNET, figures 3 and 4, tables I and II ("we spawned 16 threads in the benchmark").

use dunlin_api::{DiskFigures, DiskRole, Role, State};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use dunlin_api::files::{SyncTable, VmFile};

use super::{Options, Sample, fio_result};
use crate::cluster::{Cluster, HostStatus, VmPlan, in_a_testbed};
use crate::demo;
use crate::image::{FIO, GuestImage};
use crate::testbed::{CpuShare, Node, TestbedSpec};

const PATIENCE: Duration = Duration::from_secs(120);
const JOBS: u64 = 16;
pub(super) const DISK_MIB: u64 = 128;

/// What the runs share.
pub struct World {
    /// The executable.
    pub dunlin: PathBuf,
    /// fio's guest.
    pub image: GuestImage,
}

/// All workloads under one storage.
pub(super) fn measure(
    options: &Options,
    world: &World,
    storage: &str,
    say: &mut dyn FnMut(Sample),
) -> Result<()> {
    let spec = TestbedSpec {
        host_cpu: (options.host_cpu > 0).then(|| CpuShare::percent(options.host_cpu)),
        ..TestbedSpec::three_hosts()
    };
    in_a_testbed("bench-disk", &spec, &world.dunlin, |cluster| {
        story(cluster, options, world, storage, say)
    })
}

fn story(
    cluster: &mut Cluster<'_>,
    options: &Options,
    world: &World,
    storage: &str,
    say: &mut dyn FnMut(Sample),
) -> Result<()> {
    let testbed = cluster.testbed();
    for host in ["a", "b", "c"] {
        cluster.start_host(host)?;
    }
    let (kind, light) = match storage {
        "none" => ("gannet", true),
        "gannet-nolight" => ("gannet", false),
        other => (other, true),
    };
    let plan = VmPlan {
        name: "fio".to_owned(),
        memory_mib: FIO.memory_mib,
        disk_mib: Some(DISK_MIB),
        file: VmFile {
            storage: kind.to_owned(),
            settle_when_idle: light,
            sync: SyncTable {
                quiet_ms: options.sync_ms as f64,
                // A guest that starts writes much of its memory while the first copy of it is made.
                staging_mib: 768,
                ..SyncTable::default()
            },
            ..VmPlan::file()
        },
        ..VmPlan::redis(if storage == "none" { "none" } else { "plover" })
    };
    let file = plan.write(testbed, &world.image)?;
    for host in ["a", "b"] {
        // Written once, so that no block is allocated during a measurement.
        std::fs::write(
            testbed.node(host).home().join("fio.img"),
            vec![1; (DISK_MIB << 20) as usize],
        )?;
    }
    cluster.dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
    let hosts: &[&str] = if storage == "none" { &["a"] } else { &["a", "b"] };
    if storage == "none" {
        cluster.await_status("the VM runs", PATIENCE, |hosts| {
            hosts
                .iter()
                .any(|host| host.vm("fio").is_some_and(|vm| vm.state == State::Running))
                .then_some(())
        })?;
    } else {
        cluster.await_protected("fio", PATIENCE)?;
    }
    let client = testbed.node("client");
    // The guest has booted when it answers; this run is thrown away.
    job(client, "--name=warm --rw=read --bs=64k --size=1m", PATIENCE)?;
    for workload in &options.workloads {
        let (pattern, block) = workload.split_once('-').context("a workload is PATTERN-BLOCK")?;
        settle(cluster, hosts)?;
        let limit = format!("bytes-per-s={}", options.mib_per_s(block) << 20);
        for host in hosts {
            cluster.dunlin(host, &["inject", "fio", &limit])?;
        }
        let before = figures(cluster, hosts)?;
        let part = (DISK_MIB << 20) / JOBS;
        let (pattern, pace) = if workload == super::PACED {
            ("randwrite", format!("--rate_iops={}", super::PACED_PER_S / JOBS))
        } else {
            (pattern, String::new())
        };
        let line = format!(
            "--name=job {pace} --rw={pattern} --bs={block} --direct=1 --ioengine=psync --thread --numjobs={JOBS} \
             --group_reporting --time_based --runtime={} --size={part} --offset_increment={part} --rwmixread=50 \
             --randrepeat=1 --buffer_pattern=0x5a",
            options.seconds + 1
        );
        let fio = begin(client, &line, PATIENCE + Duration::from_secs(options.seconds * 4))?;
        let requests_per_s = observe(cluster, hosts, &before, options.seconds)?;
        let fio = fio_result(&end(fio)?)?;
        let guest_latency_us = fio.latency_us;
        let after = figures(cluster, hosts)?;
        // The guest's kernel may make several requests of one, and its clock stands still in a pause: so the rate is what
        // came to the disks' ports by the host's clock.
        let all = after[0].0.requests.saturating_sub(before[0].0.requests).max(1);
        let mib_of_one = fio.bytes / all as f64 / f64::from(1 << 20);
        let rate = requests_per_s[0] * mib_of_one;
        // Syncs that wait for a slow disk are counted too.
        settle(cluster, hosts)?;
        let settled_all = figures(cluster, hosts)?;
        let latency = |at: usize| {
            let (before, after) = (before.get(at)?, after.get(at)?);
            let requests = after
                .0
                .requests
                .checked_sub(before.0.requests)
                .filter(|n| *n > 0)?;
            Some((after.0.request_ns - before.0.request_ns) as f64 / requests as f64 / 1000.0)
        };
        let settled = |figure: fn(&DiskFigures) -> u64| {
            let (before, after) = (before.get(1)?, settled_all.get(1)?);
            Some(figure(&after.0).saturating_sub(figure(&before.0)))
        };
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let settles = settled(|disk| disk.settles).filter(|n| *n > 0);
        let each = |sum: Option<u64>, unit: f64| Some(sum? as f64 / settles? as f64 / unit);
        // Both VMs' requests are alike.
        let backup_rate = requests_per_s.get(1).map(|rate| rate * mib_of_one);
        if storage != "none" {
            ensure!(
                after[0].0.role == DiskRole::Primary,
                "the backup was lost during the measurement"
            );
        }
        say(Sample {
            storage: storage.into(),
            workload: workload.clone(),
            service_mib_per_s: rate,
            primary_mib_per_s: rate,
            backup_mib_per_s: backup_rate,
            guest_latency_us: Some(guest_latency_us),
            primary_latency_us: latency(0).unwrap_or(0.0),
            backup_latency_us: latency(1),
            checkpoint_ms: each(settled(|disk| disk.settle_ns), 1e6),
            checkpoint_mib: each(settled(|disk| disk.committed_bytes), f64::from(1 << 20)),
            commit_ms: after[0].1,
            settled_mib: settled(|disk| disk.settled_bytes).map(mib),
            settle_s: settled(|disk| disk.light_ns).map(|ns| ns as f64 / 1e9),
            left_mib: after.get(1).map(|(disk, _)| mib(disk.held_bytes)),
            delayed_writes: settled(|disk| disk.delayed_writes),
            syncs: settles.unwrap_or(0),
        });
    }
    // The testbed ends all of it; how a VM goes down is not measured here.
    Ok(())
}

/// Each host's disk, the primary's first, and the median pause of its syncs.
fn figures(cluster: &Cluster<'_>, hosts: &[&str]) -> Result<Vec<(DiskFigures, Option<f64>)>> {
    let mut found = Vec::new();
    for host in hosts {
        let status: HostStatus = cluster.status(host)?;
        let vm = status.vm("fio").context("the VM is gone")?;
        let pause = (vm.sync.count > 0).then(|| vm.sync.median.pause_us as f64 / 1000.0);
        found.push((vm.disks.first().cloned().context("the VM has no disk")?, pause));
    }
    Ok(found)
}

/// What the last workload left in the backup's memory is on its image: no run pays for another's writes.
fn settle(cluster: &Cluster<'_>, hosts: &[&str]) -> Result<()> {
    if hosts.len() < 2 {
        return Ok(());
    }
    cluster.await_status("an empty backup", PATIENCE, |hosts| {
        let held = |host: &HostStatus| {
            host.vm("fio")
                .and_then(|vm| vm.disks.first())
                .map(|disk| disk.held_bytes)
        };
        let backup = hosts
            .iter()
            .find(|host| host.vm("fio").is_some_and(|vm| vm.role == Role::Backup))?;
        (held(backup)? < 1 << 20).then_some(())
    })
}

/// Requests a second at each host's disk, over `seconds` by the host's clock, from when fio in the guest has begun.
fn observe(
    cluster: &Cluster<'_>,
    hosts: &[&str],
    before: &[(DiskFigures, Option<f64>)],
    seconds: u64,
) -> Result<Vec<f64>> {
    let begun = Instant::now();
    let first = loop {
        let now = figures(cluster, hosts)?;
        if now[0].0.requests >= before[0].0.requests + JOBS {
            break now;
        }
        ensure!(begun.elapsed() < PATIENCE, "fio in the guest does not begin");
        // A counter that grows is no event.
        std::thread::sleep(Duration::from_millis(20));
    };
    let from = Instant::now();
    std::thread::sleep(Duration::from_secs(seconds));
    let last = figures(cluster, hosts)?;
    let took = from.elapsed().as_secs_f64();
    let grown = first.iter().zip(&last);
    Ok(grown
        .map(|(first, last)| last.0.requests.saturating_sub(first.0.requests) as f64 / took)
        .collect())
}

/// A fio that runs; the outer result is the thread's way into the client's namespace.
type Fio = std::thread::JoinHandle<Result<Result<String>>>;

/// One fio in the guest; returns what it printed.
fn job(client: &Node, line: &str, at_most: Duration) -> Result<String> {
    end(begin(client, line, at_most)?)
}

fn end(fio: Fio) -> Result<String> {
    fio.join().map_err(|_| anyhow!("a client thread panicked"))??
}

fn begin(client: &Node, line: &str, at_most: Duration) -> Result<Fio> {
    let target = SocketAddr::new(demo::service().ip(), FIO.port);
    let line = format!("{line}\n");
    client.spawn("fio", move || -> Result<String> {
        let deadline = Instant::now() + at_most;
        loop {
            let text = TcpStream::connect_timeout(&target, Duration::from_secs(2)).and_then(|stream| {
                stream.set_read_timeout(Some(at_most))?;
                (&stream).write_all(line.as_bytes())?;
                let mut reader = BufReader::new(stream);
                let mut text = String::new();
                // An empty first line is a guest that is still starting.
                reader.read_line(&mut text)?;
                reader.read_to_string(&mut text)?;
                Ok(text)
            });
            match text {
                Ok(text) if text.contains('{') => return Ok(text),
                Ok(text) if !text.is_empty() => bail!("fio in the guest said: {}", text.trim()),
                Ok(_) | Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
                Ok(_) => bail!("the guest does not answer"),
                Err(error) => return Err(error).context("the guest does not answer"),
            }
        }
    })
}
