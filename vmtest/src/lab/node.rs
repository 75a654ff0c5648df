//! One host or client of the lab: how processes are started on it, and how all of them die.

use std::fs::File;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::cgroup::{CpuShare, Freezer, HostGroup};
use super::run_id::RunId;

/// Processes that were sent SIGKILL are gone within this time, or something is very wrong.
const DEATH: Duration = Duration::from_secs(10);

/// A host or client.
pub struct Node {
    name: String,
    address: Ipv4Addr,
    home: PathBuf,
    here: PathBuf,
    namespace: PathBuf,
    group: HostGroup,
}

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
        Ok(Self {
            name: name.to_owned(),
            address,
            home,
            here,
            namespace,
            group,
        })
    }

    /// Its name in the lab.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its own address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Its own directory, removed with the lab.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// A command that will run on this node: in its network, in its cgroup, in its own process group (so that a
    /// Ctrl-C at the terminal goes to the lab, which then ends everything in order), and with its own directory at
    /// [`super::Lab::here`], as two machines have different disks under the same path.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let network = self.open_namespace()?;
        let doors = self.group.doors()?;
        let (home, here) = (self.home.clone(), self.here.clone());
        let mut command = Command::new(program);
        command.process_group(0);
        // SAFETY: between fork and exec only write(2) and setns(2) on descriptors opened before the fork, unshare(2)
        // and mount(2) are called; all are plain system calls, and nothing is locked or allocated (nix copies a path
        // of less than 1 KiB to the stack).
        unsafe {
            command.pre_exec(move || {
                for mut door in &doors {
                    door.write_all(b"0")?;
                }
                setns(&network, CloneFlags::CLONE_NEWNET)?;
                unshare(CloneFlags::CLONE_NEWNS)?;
                let none = None::<&Path>;
                // Nothing mounted here may be seen outside, and the mount goes with the last process.
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
                mount(Some(&home), &here, none, MsFlags::MS_BIND, none)?;
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
        let network = self.open_namespace()?;
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            setns(&network, CloneFlags::CLONE_NEWNET).context("cannot enter the node's network")?;
            drop(network);
            Ok(work())
        })?;
        Ok(thread)
    }

    fn open_namespace(&self) -> Result<File> {
        File::open(&self.namespace).with_context(|| format!("cannot open {}", self.namespace.display()))
    }

    /// The processes on it.
    pub fn pids(&self) -> Vec<i32> {
        self.group.pids()
    }

    /// CPU time used by its processes since the lab was built.
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

    /// The interfaces on it, for the checks that nothing is left.
    pub fn interfaces(&self) -> Result<Vec<String>> {
        let output = self
            .command("ip")?
            .args(["-o", "link", "show"])
            .output()
            .context("ip is not here")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.split(": ").nth(1));
        Ok(names
            .map(|name| name.split('@').next().unwrap_or(name).to_owned())
            .collect())
    }
}
