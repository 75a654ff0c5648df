//! One host or client of the testbed: how processes are started on it, and how all of them die.

use std::fs::{self, File};
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, setsid};

use super::cgroup::{CpuShare, Freezer, HostGroup};
use super::run_id::RunId;

/// Processes that were sent SIGKILL are gone within this time, or something is very wrong: one that waits for a disk is not before that is done.
const DEATH: Duration = Duration::from_secs(60);

/// A host or client.
pub struct Node {
    name: String,
    address: Ipv4Addr,
    home: PathBuf,
    here: PathBuf,
    namespace: PathBuf,
    switch: String,
    own: Vec<(PathBuf, PathBuf)>,
    group: HostGroup,
}

/// Where a program could leave files outside of its own directory: each node has these to itself.
const PLACES: [&str; 2] = ["/run", "/dev/shm"];

impl Node {
    pub(super) fn new(
        name: &str,
        run: &RunId,
        address: Ipv4Addr,
        home: PathBuf,
        here: PathBuf,
        cpu: Option<CpuShare>,
    ) -> Result<Self> {
        let namespace = Path::new("/run/netns").join(run.namespace(name));
        let group = HostGroup::new(run, name, cpu)?;
        let beside = |place: &str| home.with_file_name(format!(".{name}{}", place.replace('/', "-")));
        let own: Vec<(PathBuf, PathBuf)> = PLACES.map(|place| (beside(place), PathBuf::from(place))).to_vec();
        for (dir, _) in &own {
            // As the machine's own: QEMU runs as an ordinary user.
            fs::create_dir_all(dir)?;
            fs::set_permissions(dir, fs::Permissions::from_mode(0o1777))?;
        }
        Ok(Self {
            name: name.to_owned(),
            address,
            home,
            here,
            namespace,
            switch: run.namespace("switch"),
            own,
            group,
        })
    }

    /// Its name in the testbed.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its own address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Its own directory, removed with the testbed.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// A command that will run on this node: in its network, in its cgroup, in a session of its own (as what systemd
    /// starts, and so that a Ctrl-C at the terminal goes to the testbed, which then ends everything in order), with its own directory at
    /// [`super::Testbed::here`], as two machines have different disks under the same path, and with a /run and a /dev/shm of
    /// its own, so that what is left there is this run's.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let network = self.open_namespace()?;
        let doors = self.group.doors()?;
        let mut mounts = self.own.clone();
        mounts.push((self.home.clone(), self.here.clone()));
        let mut command = Command::new(program);
        // SAFETY: between fork and exec only setsid(2), write(2) and setns(2) on descriptors opened before the fork, unshare(2)
        // and mount(2) are called; all are plain system calls, and nothing is locked or allocated (nix copies a path
        // of less than 1 KiB to the stack).
        unsafe {
            command.pre_exec(move || {
                for mut door in &doors {
                    door.write_all(b"0")?;
                }
                setsid()?;
                setns(&network, CloneFlags::CLONE_NEWNET)?;
                unshare(CloneFlags::CLONE_NEWNS)?;
                let none = None::<&Path>;
                // Nothing mounted here may be seen outside, and the mount goes with the last process.
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
                for (dir, place) in &mounts {
                    mount(Some(dir), place, none, MsFlags::MS_BIND, none)?;
                }
                Ok(())
            });
        }
        Ok(command)
    }

    /// Runs `work` on a thread of this process that lies in this node's network (but not in its cgroup).
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<thread::JoinHandle<Result<T>>> {
        spawn_in(self.open_namespace()?, name, work)
    }

    fn open_namespace(&self) -> Result<File> {
        File::open(&self.namespace).with_context(|| format!("cannot open {}", self.namespace.display()))
    }

    /// The processes on it.
    pub fn pids(&self) -> Vec<i32> {
        self.group.pids()
    }

    /// CPU time used by its processes since the testbed was built.
    pub fn cpu_time(&self) -> Option<Duration> {
        self.group.cpu_time()
    }

    /// Gives a host that has a share of the CPU another one, or with `None` as much as there is.
    pub fn set_cpu_share(&self, share: Option<CpuShare>) -> Result<()> {
        self.group.set_share(share)
    }

    /// The host dies: SIGKILL to all of its processes at once, VMs included. Returns when they are gone; its files
    /// stay, as a disk survives a power loss.
    pub fn kill_all(&self) -> Result<()> {
        if !self.group.kill()? {
            let deadline = Instant::now() + DEATH;
            loop {
                let pids = self.group.pids();
                if pids.is_empty() || Instant::now() > deadline {
                    break;
                }
                for pid in pids {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
            }
        }
        self.group
            .await_empty(DEATH)
            .with_context(|| format!("host {}", self.name))
    }

    /// The host stands still (all of its processes at once) until the returned value is dropped.
    pub fn freeze(&self) -> Result<Freezer> {
        self.group.freeze()
    }

    /// What programs have made on this node outside of its directory and have not removed: a complaint for each
    /// interface and each file in its /run and /dev/shm. Nobody else on this machine can add to it.
    pub fn traces(&self) -> Result<Vec<String>> {
        let name = &self.name;
        let mut found = Vec::new();
        // The kernel adds interfaces to every namespace when somebody on the machine loads a tunnel's module, so also
        // to the switch, where no program runs.
        let everywhere = interfaces(Command::new("ip").args(["-n", &self.switch]))?;
        for interface in interfaces(&mut self.command("ip")?)? {
            if !["lo", "up0", "br0"].contains(&interface.as_str()) && !everywhere.contains(&interface) {
                found.push(format!("host {name}: interface {interface}"));
            }
        }
        for (dir, place) in &self.own {
            for entry in fs::read_dir(dir)?.flatten() {
                let file = place.join(entry.file_name());
                found.push(format!("host {name}: {}", file.display()));
            }
        }
        Ok(found)
    }
}

fn interfaces(ip: &mut Command) -> Result<Vec<String>> {
    let output = ip
        .args(["-o", "link", "show"])
        .output()
        .context("ip is not here: cargo xtask setup")?;
    ensure!(
        output.status.success(),
        "ip link show: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text.lines().filter_map(|line| line.split(": ").nth(1));
    Ok(names
        .map(|name| name.split('@').next().unwrap_or(name).to_owned())
        .collect())
}

/// Runs `work` on a thread of this process that lies in that network namespace.
pub(super) fn spawn_in<T: Send + 'static>(
    network: File,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<thread::JoinHandle<Result<T>>> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
        setns(&network, CloneFlags::CLONE_NEWNET).context("cannot enter the node's network")?;
        drop(network);
        Ok(work())
    })?;
    Ok(thread)
}
