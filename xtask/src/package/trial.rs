//! The package in a fresh Debian root that runs systemd: installed, started, upgraded, purged.
//!
//! * **Decides:** what must hold of an installed package.
//! * **Flow:** `mmdebstrap` (kept by the set of packages) -> a copy -> `systemd-nspawn --boot` without a network -> the steps of
//!   [`STEPS`] inside, one after the other.
//! * **Not here:** virtual machines (the scenarios).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;

use crate::setup;

const PACKAGES: [(&str, &str); 2] = [
    ("mmdebstrap", "a fresh Debian root to try the package in"),
    ("systemd-container", "runs systemd in that root"),
];

/// What the root has before the package comes: an ordinary small Debian, and what the package depends on.
const ROOT: [&str; 6] = [
    "systemd-sysv",
    "dbus",
    "iproute2",
    "qemu-system-x86",
    "man-db",
    "bash-completion",
];

/// The longest that a boot or a step may take; a loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(180);

/// What is done in the root, and why it must succeed.
const STEPS: [(&str, &str); 12] = [
    (
        "installs",
        "apt-get install -y --no-install-recommends /dunlin.deb",
    ),
    (
        "knows its version",
        "dunlin version --json | grep -q '\"protocol\":'",
    ),
    (
        "has manual pages and completions",
        "man -w dunlin dunlin-up dunlin-failover && test -s /usr/share/bash-completion/completions/dunlin",
    ),
    (
        "has a user for QEMU, who may open /dev/kvm",
        "id -nG dunlin | grep -qw kvm",
    ),
    (
        "waits for its configuration",
        "! systemctl is-failed dunlin && ! systemctl is-active dunlin",
    ),
    (
        "starts from what 'dunlin init' wrote",
        "ip link set lo up && dunlin init /root/c --cluster c --state /var/lib/dunlin --host a=127.0.0.1:7400 --host b=127.0.0.2:7400 --host c=127.0.0.3:7400 \
         && cp /root/c/a/* /etc/dunlin/ && systemctl start dunlin && systemctl is-active dunlin",
    ),
    (
        "answers on the socket that the command line looks at",
        "dunlin status | grep -q '^host a' && dunlin status --json | grep -q '\"host\":\"a\"'",
    ),
    (
        "keeps its state where Debian does",
        "test -e /var/lib/dunlin/lock && test ! -e /etc/dunlin/state",
    ),
    (
        "is ended and started again by systemd when it stands still",
        "old=$(systemctl show -P MainPID dunlin) && kill -ABRT $old && timeout 60 sh -c \
         'until [ \"$(systemctl show -P SubState dunlin)\" = running ] && [ \"$(systemctl show -P MainPID dunlin)\" != '$old' ]; do \
         sleep 0.2; done'",
    ),
    (
        "is the new program after an upgrade",
        "old=$(systemctl show -P MainPID dunlin) && apt-get install -y --reinstall /dunlin.deb && test \"$(systemctl show -P MainPID \
         dunlin)\" != $old && systemctl is-active dunlin && dunlin status",
    ),
    (
        "keeps state and configuration when it is removed",
        "apt-get remove -y dunlin && test -e /etc/dunlin/host.toml && test -d /var/lib/dunlin",
    ),
    (
        "leaves no program behind when it is purged",
        "apt-get purge -y dunlin && test ! -e /usr/bin/dunlin && test ! -e /usr/lib/systemd/system/dunlin.service && ! pgrep -x dunlin",
    ),
];

/// Tries the package; an error names the step.
pub fn run(deb: &Path) -> Result<()> {
    setup::install(&PACKAGES)?;
    let root = fresh_root()?;
    fs::copy(deb, root.path.join("dunlin.deb"))?;
    let machine = Machine::boot(&root.path)?;
    for (what, script) in STEPS {
        machine
            .run(script)
            .with_context(|| format!("the package {what}"))?;
        println!("package: {what} ... ok");
    }
    machine.off()?;
    println!("{} passed, 0 failed", STEPS.len());
    Ok(())
}

/// A folder that is removed with this.
struct Root {
    path: PathBuf,
}

impl Drop for Root {
    fn drop(&mut self) {
        // What is left is found in the target directory.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn fresh_root() -> Result<Root> {
    let kept = paths::target().join("package-root.tar");
    if !kept.is_file() {
        println!("package: making a Debian root, once");
        let new = kept.with_extension("tar.new");
        let status = Command::new("mmdebstrap")
            .args(["--quiet", "--variant=minbase"])
            .arg(format!("--include={}", ROOT.join(",")))
            .arg("--format=tar")
            .arg(codename()?)
            .arg(&new)
            .status()
            .context("mmdebstrap is not here")?;
        if !status.success() {
            bail!("mmdebstrap made no Debian root: what it said stands above");
        }
        fs::rename(&new, &kept)?;
    }
    let path = PathBuf::from("/var/tmp").join(format!("dunlin-package-{}", std::process::id()));
    fs::create_dir_all(&path)?;
    let root = Root { path };
    let status = Command::new("tar")
        .args(["--numeric-owner", "-C"])
        .arg(&root.path)
        .arg("-xf")
        .arg(&kept)
        .status()?;
    if !status.success() {
        bail!("{} is damaged: remove it, and run this again", kept.display());
    }
    Ok(root)
}

/// The machine's own Debian.
fn codename() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(str::to_owned)
        .context("/etc/os-release names no Debian")
}

/// A root whose systemd runs.
struct Machine {
    nspawn: Child,
    /// Its first process, in whose namespaces a step runs.
    leader: u32,
}

impl Machine {
    fn boot(root: &Path) -> Result<Self> {
        let nspawn = Command::new("systemd-nspawn")
            .args([
                "--quiet",
                "--register=no",
                "--keep-unit",
                "--private-network",
                "--boot",
                "--directory",
            ])
            .arg(root)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("systemd-nspawn is not here")?;
        let mut machine = Self { nspawn, leader: 0 };
        let begun = Instant::now();
        loop {
            if let Some(status) = machine.nspawn.try_wait()? {
                bail!("systemd-nspawn ended ({status}): this machine may not run systemd in a namespace");
            }
            if let Some(leader) = child_of(machine.nspawn.id()) {
                machine.leader = leader;
                // It waits by itself until the boot is over, and fails where nothing listens yet.
                if machine
                    .run("systemctl is-system-running --wait || true; systemctl is-active multi-user.target")
                    .is_ok()
                {
                    return Ok(machine);
                }
            }
            if begun.elapsed() > PATIENCE {
                bail!("systemd did not start within {} s", PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a script inside; an error has what it said.
    fn run(&self, script: &str) -> Result<()> {
        let output = Command::new("timeout")
            .arg(PATIENCE.as_secs().to_string())
            .args(["nsenter", "--all", "--target"])
            .arg(self.leader.to_string())
            .args([
                "env",
                "-i",
                "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                "DEBIAN_FRONTEND=noninteractive",
                "sh",
                "-c",
            ])
            .arg(script)
            .output()
            .context("nsenter is not here")?;
        if !output.status.success() {
            let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
            said.push_str(&String::from_utf8_lossy(&output.stderr));
            let last: Vec<&str> = said.lines().rev().take(12).collect();
            bail!(
                "'{script}': {}",
                last.into_iter().rev().collect::<Vec<_>>().join("\n")
            );
        }
        Ok(())
    }

    fn off(mut self) -> Result<()> {
        // Its own systemd ends with it, and this call's answer may be lost.
        let _ = self.run("systemctl poweroff");
        let begun = Instant::now();
        while self.nspawn.try_wait()?.is_none() {
            if begun.elapsed() > PATIENCE {
                bail!(
                    "the root did not switch itself off within {} s",
                    PATIENCE.as_secs()
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if matches!(self.nspawn.try_wait(), Ok(None)) {
            // With its first process all of the root's processes end.
            if self.leader != 0 {
                let _ = Command::new("kill")
                    .args(["-KILL", &self.leader.to_string()])
                    .status();
            }
            let _ = self.nspawn.kill();
            let _ = self.nspawn.wait();
        }
    }
}

/// The only child of a process.
fn child_of(process: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{process}/task/{process}/children"))
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}
