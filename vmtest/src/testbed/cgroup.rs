//! A host's processes as one thing: killed at once, frozen at once, with one share of the CPU.
//!
//! cgroup v2 does all three. Where a machine still mounts the old hierarchies for the controllers (v2 then has kill
//! and freeze, but no `cpu`), the share comes from the old `cpu` hierarchy. Without cgroup v2 there is no
//! atomic kill: the testbed says so and kills process by process.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::run_id::RunId;

/// A fixed share of the CPU: `percent` of one core, dealt out anew every period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuShare {
    /// 100 is one whole core.
    pub percent: u32,
    /// A short period keeps a throttled host from pausing for long.
    pub period_us: u32,
}

impl CpuShare {
    /// That much of one core, in slices of 10 ms.
    pub fn percent(percent: u32) -> Self {
        Self {
            percent,
            period_us: 10_000,
        }
    }

    fn quota_us(self) -> u64 {
        u64::from(self.period_us) * u64::from(self.percent) / 100
    }
}

/// Where this machine keeps which hierarchy.
#[derive(Clone, Debug, Default)]
struct Mounts {
    unified: Option<PathBuf>,
    cpu_v1: Option<PathBuf>,
    /// Where an init that runs on a host makes groups of its own, as long as the old hierarchies are mounted.
    systemd_v1: Option<PathBuf>,
}

fn mounts() -> Mounts {
    let mut found = Mounts::default();
    for line in fs::read_to_string("/proc/self/mounts")
        .unwrap_or_default()
        .lines()
    {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, point, kind, options, ..] = fields[..] else {
            continue;
        };
        let point = PathBuf::from(point);
        if kind == "cgroup2" && found.unified.is_none() && writable(&point) {
            found.unified = Some(point);
        } else if kind == "cgroup" && options.split(',').any(|option| option == "cpu") && writable(&point) {
            found.cpu_v1 = Some(point);
        } else if kind == "cgroup"
            && options.split(',').any(|option| option == "name=systemd")
            && writable(&point)
        {
            found.systemd_v1 = Some(point);
        }
    }
    found
}

fn writable(dir: &Path) -> bool {
    nix::unistd::access(dir, nix::unistd::AccessFlags::W_OK).is_ok()
}

/// The directories that `run` has in each hierarchy, whether they exist or not.
pub fn paths(run: &RunId) -> Vec<PathBuf> {
    let mounts = mounts();
    [mounts.unified, mounts.cpu_v1, mounts.systemd_v1]
        .into_iter()
        .flatten()
        .map(|mount| mount.join(run.as_str()))
        .collect()
}

/// Those of them that exist.
pub fn directories(run: &RunId) -> Vec<PathBuf> {
    paths(run).into_iter().filter(|dir| dir.exists()).collect()
}

/// How many processes lie in the groups of `run`'s nodes.
pub fn processes(run: &RunId) -> usize {
    let first = paths(run).into_iter().next();
    let nodes = first.and_then(|dir| fs::read_dir(dir).ok()).into_iter();
    let listed = nodes.flatten().flatten().map(|node| {
        let text = fs::read_to_string(node.path().join("cgroup.procs")).unwrap_or_default();
        text.lines().count()
    });
    listed.sum()
}

/// Every run that has a cgroup on this machine.
pub fn all_runs() -> Vec<RunId> {
    let mounts = mounts();
    let entries = [mounts.unified, mounts.cpu_v1, mounts.systemd_v1]
        .into_iter()
        .flatten()
        .filter_map(|mount| fs::read_dir(mount).ok());
    entries
        .flatten()
        .flatten()
        .filter_map(|entry| RunId::of(entry.file_name().to_str()?))
        .collect()
}

/// One host's cgroup.
pub struct HostGroup {
    unified: Option<PathBuf>,
    cpu_v1: Option<PathBuf>,
    systemd_v1: Option<PathBuf>,
}

impl HostGroup {
    /// Makes the group of `node`, with its share of the CPU.
    pub fn new(run: &RunId, node: &str, cpu: Option<CpuShare>) -> Result<Self> {
        let mounts = mounts();
        let unified = match &mounts.unified {
            None => {
                eprintln!("testbed: no cgroup v2 here: hosts are killed process by process, not at once");
                None
            }
            Some(mount) => Some(make(mount, run, node)?),
        };
        let systemd_v1 = mounts.systemd_v1.as_ref();
        let mut group = Self {
            unified,
            cpu_v1: None,
            systemd_v1: systemd_v1.map(|mount| make(mount, run, node)).transpose()?,
        };
        if let Some(share) = cpu {
            group.limit(share, &mounts, run, node)?;
        }
        Ok(group)
    }

    fn limit(&mut self, share: CpuShare, mounts: &Mounts, run: &RunId, node: &str) -> Result<()> {
        let quota = share.quota_us();
        if let (Some(mount), Some(dir)) = (&mounts.unified, &self.unified) {
            // Both steps fail quietly where v2 has no cpu controller: then cpu.max does not appear.
            let _ = fs::write(mount.join("cgroup.subtree_control"), "+cpu");
            let _ = fs::write(mount.join(run.as_str()).join("cgroup.subtree_control"), "+cpu");
            if dir.join("cpu.max").exists() {
                return Ok(fs::write(
                    dir.join("cpu.max"),
                    format!("{quota} {}", share.period_us),
                )?);
            }
        }
        let Some(mount) = &mounts.cpu_v1 else {
            bail!("hosts cannot get a fixed CPU share: no cgroup cpu controller is to be had on this machine")
        };
        let dir = make(mount, run, node)?;
        fs::write(dir.join("cpu.cfs_period_us"), share.period_us.to_string())?;
        fs::write(dir.join("cpu.cfs_quota_us"), quota.to_string())?;
        self.cpu_v1 = Some(dir);
        Ok(())
    }

    /// Gives the group another share, or with `None` as much as there is. Does nothing to a group without a share.
    pub fn set_share(&self, share: Option<CpuShare>) -> Result<()> {
        let period_us = share.map_or(100_000, |share| share.period_us);
        let quota = share.map(|share| share.quota_us().to_string());
        if let Some(dir) = &self.cpu_v1 {
            fs::write(dir.join("cpu.cfs_quota_us"), quota.as_deref().unwrap_or("-1"))?;
            return Ok(());
        }
        let file = self.unified.as_ref().map(|dir| dir.join("cpu.max"));
        if let Some(file) = file.filter(|file| file.exists()) {
            fs::write(file, format!("{} {period_us}", quota.as_deref().unwrap_or("max")))?;
        }
        Ok(())
    }

    /// The files to which a process writes "0" to join this group.
    pub fn doors(&self) -> Result<Vec<File>> {
        let open = |dir: &PathBuf| {
            let path = dir.join("cgroup.procs");
            OpenOptions::new()
                .write(true)
                .open(&path)
                .with_context(|| format!("cannot open {}", path.display()))
        };
        let groups = [&self.unified, &self.cpu_v1, &self.systemd_v1];
        groups.into_iter().flatten().map(open).collect()
    }

    /// The processes in it.
    pub fn pids(&self) -> Vec<i32> {
        let Some(dir) = self.unified.as_ref().or(self.cpu_v1.as_ref()) else {
            return Vec::new();
        };
        let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// SIGKILL to all of its processes at once. False where that cannot be done here.
    pub fn kill(&self) -> Result<bool> {
        let Some(kill) = self
            .unified
            .as_ref()
            .map(|dir| dir.join("cgroup.kill"))
            .filter(|file| file.exists())
        else {
            return Ok(false);
        };
        fs::write(kill, "1")?;
        Ok(true)
    }

    /// Waits until no process is in it any more.
    pub fn await_empty(&self, at_most: Duration) -> Result<()> {
        self.await_event("populated 0", at_most)
            .context("processes that do not die")
    }

    /// CPU time used so far by all of its processes, if the kernel counts it.
    pub fn cpu_time(&self) -> Option<Duration> {
        let text = fs::read_to_string(self.unified.as_ref()?.join("cpu.stat")).ok()?;
        let used = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
        used.parse().ok().map(Duration::from_micros)
    }

    fn await_event(&self, line: &str, at_most: Duration) -> Result<()> {
        let Some(dir) = &self.unified else { return Ok(()) };
        let mut events = File::open(dir.join("cgroup.events"))?;
        let deadline = Instant::now() + at_most;
        loop {
            let mut text = String::new();
            events.seek(SeekFrom::Start(0))?;
            events.read_to_string(&mut text)?;
            if text.lines().any(|found| found == line) {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("{} does not say '{line}'", dir.join("cgroup.events").display());
            }
            // The kernel signals a change of this file as an urgent event.
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            poll(&mut [PollFd::new(events.as_fd(), PollFlags::POLLPRI)], timeout)?;
        }
    }

    /// Stops all of its processes where they are, until the returned value is dropped.
    pub fn freeze(&self) -> Result<Freezer> {
        let Some(dir) = &self.unified else {
            bail!("a host cannot be paused here: no cgroup v2")
        };
        let file = dir.join("cgroup.freeze");
        fs::write(&file, "1")?;
        let freezer = Freezer { file };
        // One that waits for a disk stops when that is done.
        self.await_event("frozen 1", Duration::from_secs(30))?;
        Ok(freezer)
    }
}

fn make(mount: &Path, run: &RunId, node: &str) -> Result<PathBuf> {
    let dir = mount.join(run.as_str()).join(node);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make the cgroup {}", dir.display()))?;
    Ok(dir)
}

/// A paused host; dropping this lets it run on.
pub struct Freezer {
    file: PathBuf,
}

impl Drop for Freezer {
    fn drop(&mut self) {
        if let Ok(mut file) = OpenOptions::new().write(true).open(&self.file) {
            let _ = file.write_all(b"0");
        }
    }
}
