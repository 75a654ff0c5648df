//! A Debian root whose systemd runs on a host of the testbed.
//!
//! * **Decides:** what such a machine has before the package comes.
//! * **Flow:** `mmdebstrap` once for a set of packages -> unpacked into the host's folder -> `systemd-nspawn --boot` in the host's network
//!   and cgroup -> [`Machine::run`] enters its name spaces.
//! * **Invariants:** it dies with its host ([`dunlin_vmtest::testbed::Node::kill_all`]), at once and whole; its files stay.
//! * **Source:** systemd-nspawn(1).

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_vmtest::paths;
use dunlin_vmtest::testbed::Node;

/// What the root has before the package comes: an ordinary small Debian, what the package depends on, and a server.
const ROOT: [&str; 9] = [
    "systemd-sysv",
    "udev",
    "dbus",
    "iproute2",
    "qemu-system-x86",
    "man-db",
    "procps",
    "bash-completion",
    "redis-server",
];

/// Of the machine's devices, those that a host of VMs needs. KVM is left out: guests are translated.
const DEVICES: [&str; 3] = ["/dev/net/tun", "/dev/userfaultfd", "/dev/fuse"];

/// The longest that a boot or a step may take; a loaded machine is slow.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Nothing tells from outside how far a boot or an end is.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A Debian root with `more` packages as a tar file, made when it is not there yet.
pub fn archive(more: &[&str]) -> Result<PathBuf> {
    let suite = codename()?;
    let mut packages = ROOT.to_vec();
    packages.extend(more);
    let mut hash = DefaultHasher::new();
    (&suite, &packages).hash(&mut hash);
    let kept = paths::target().join(format!("package-root-{:016x}.tar", hash.finish()));
    if kept.is_file() {
        return Ok(kept);
    }
    println!("package: making a Debian root, once");
    let new = kept.with_extension("tar.new");
    let status = Command::new("mmdebstrap")
        .args(["--quiet", "--variant=minbase", "--format=tar"])
        .arg(format!("--include={}", packages.join(",")))
        .arg(suite)
        .arg(&new)
        .status()
        .context("mmdebstrap is not here")?;
    if !status.success() {
        bail!("mmdebstrap made no Debian root: what it said stands above");
    }
    fs::rename(&new, &kept)?;
    Ok(kept)
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

/// A machine, on or off.
pub struct Machine<'testbed> {
    node: &'testbed Node,
    root: PathBuf,
    nspawn: Option<Child>,
    /// Its first process, in whose name spaces a step runs.
    leader: u32,
}

impl<'testbed> Machine<'testbed> {
    /// A machine that was never switched on.
    pub fn unpack(node: &'testbed Node, archive: &Path) -> Result<Self> {
        let root = node.home().join("root");
        fs::create_dir_all(&root)?;
        let status = Command::new("tar")
            .args(["--numeric-owner", "-C"])
            .arg(&root)
            .arg("-xf")
            .arg(archive)
            .status()?;
        if !status.success() {
            bail!("{} is damaged: remove it, and run this again", archive.display());
        }
        Ok(Self {
            node,
            root,
            nspawn: None,
            leader: 0,
        })
    }

    /// The host's name.
    pub fn name(&self) -> &str {
        self.node.name()
    }

    /// The host that it runs on.
    pub fn node(&self) -> &'testbed Node {
        self.node
    }

    /// Where a path of the machine lies.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.root.join(inside.trim_start_matches('/'))
    }

    /// Puts a file into its root folder.
    pub fn take(&self, file: &Path, name: &str) -> Result<()> {
        fs::copy(file, self.path(name)).with_context(|| file.display().to_string())?;
        Ok(())
    }

    /// Switches it on, and waits until it has booted.
    pub fn boot(&mut self) -> Result<()> {
        let mut command = self.node.command("systemd-nspawn")?;
        command
            .args(["--quiet", "--register=no", "--keep-unit", "--boot"])
            .args(["--resolv-conf=off", "--timezone=off", "--link-journal=no"])
            // The real host's root has them all; what the service is left with is the unit's business.
            .arg("--capability=all")
            // Nor does it have a filter of system calls around it, with which nobody may copy a filtered process (ptrace(2), PTRACE_O_SUSPEND_SECCOMP).
            .env("SYSTEMD_SECCOMP", "0")
            .arg(format!("--hostname={}", self.name()))
            .args(
                DEVICES
                    .iter()
                    .filter(|path| Path::new(path).exists())
                    .map(|path| format!("--bind={path}")),
            )
            .arg("--directory")
            .arg(&self.root);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        self.nspawn = Some(command.spawn().context("systemd-nspawn is not here")?);
        let begun = Instant::now();
        while !self.has_booted()? {
            if begun.elapsed() > PATIENCE {
                bail!(
                    "host {}: systemd did not start within {} s",
                    self.name(),
                    PATIENCE.as_secs()
                );
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    fn has_booted(&mut self) -> Result<bool> {
        let Some(nspawn) = &mut self.nspawn else {
            return Ok(false);
        };
        let id = nspawn.id();
        if let Some(status) = nspawn.try_wait()? {
            let mut words = String::new();
            if let Some(mut said) = nspawn.stderr.take() {
                std::io::Read::read_to_string(&mut said, &mut words)?;
            }
            bail!(
                "systemd-nspawn ended ({status}): may this machine run systemd in name spaces? {}",
                words.trim()
            );
        }
        let Some(leader) = child_of(id) else {
            return Ok(false);
        };
        self.leader = leader;
        // It waits by itself until the boot is over, and fails where nothing listens yet.
        Ok(self
            .run("systemctl is-system-running --wait || true; systemctl is-active multi-user.target")
            .is_ok())
    }

    /// Runs a script inside and returns what it said; an error has all that it said.
    pub fn run(&self, script: &str) -> Result<String> {
        let output = Command::new("timeout")
            .arg(PATIENCE.as_secs().to_string())
            .args(["nsenter", "--all", "--target"])
            .arg(self.leader.to_string())
            .args([
                "env",
                "-i",
                "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME=/root",
                "DEBIAN_FRONTEND=noninteractive",
            ])
            .args(["bash", "-euo", "pipefail", "-c", script])
            .output()
            .context("nsenter is not here")?;
        let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(said);
        }
        said.push_str(&String::from_utf8_lossy(&output.stderr));
        let last: Vec<&str> = said.lines().rev().take(20).collect();
        let last = last.into_iter().rev().collect::<Vec<_>>().join("\n");
        bail!(
            "host {}: '{script}' ended with {}: {last}",
            self.name(),
            output.status
        )
    }

    /// Power off, now.
    pub fn kill(&mut self) -> Result<Instant> {
        let at = Instant::now();
        self.node.kill_all()?;
        self.reap()?;
        Ok(at)
    }

    /// Switches it off as a person does.
    pub fn off(&mut self) -> Result<()> {
        // Its own systemd ends with it, and this call's answer may be lost.
        let _ = self.run("systemctl poweroff");
        let begun = Instant::now();
        while let Some(nspawn) = &mut self.nspawn {
            if nspawn.try_wait()?.is_some() {
                break;
            }
            if begun.elapsed() > PATIENCE {
                bail!(
                    "host {} did not switch itself off within {} s",
                    self.name(),
                    PATIENCE.as_secs()
                );
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        self.reap()
    }

    fn reap(&mut self) -> Result<()> {
        if let Some(mut nspawn) = self.nspawn.take() {
            nspawn.wait()?;
        }
        Ok(())
    }
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        if self.nspawn.is_some() {
            // The testbed's end would do it too, but could not wait for it.
            let _ = self.kill();
        }
    }
}

/// The first child of a process.
fn child_of(process: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{process}/task/{process}/children"))
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}
