//! Dunlin in the testbed: one daemon on each host, steered by the `dunlin` executable as a person would.
//!
//! * **Decides:** nothing; it runs commands and waits for what `status` says.
//! * **Flow:** [`Cluster::init`] -> [`Cluster::start_host`] -> [`Cluster::dunlin`] (`up`, `failover`, `down`) ->
//!   [`Cluster::await_status`], woken by `dunlin events --follow`.
//! * **Invariants:** (1) only the command line is used, never a Dunlin crate; (2) nothing waits for a fixed time.
//! * **Source:** the command line that `README.md` describes.
//! * **Not here:** what a scenario does ([`crate::scenario`], [`crate::demo`]).

mod events;
mod faults;
mod keys;
mod log;
mod metrics;
mod plan;
mod remains;
mod switchover;
mod whole;

use dunlin_api::Role;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::paths;
use crate::testbed::{Clock, Freezer, Node, SmallDisk, Testbed, TestbedSpec};
use crate::traces;

pub use dunlin_api::files::Machine;
pub use dunlin_api::{Event, HostStatus, VmStatus};
pub use events::Events;
pub use log::Logged;
pub use metrics::scrape;
pub use plan::VmPlan;
pub use whole::{all_take_part, both_copies};

/// Where the daemons listen for each other.
const PORT: u16 = 7700;
/// A daemon says that it is ready within this time, on a machine however busy.
const START: Duration = Duration::from_secs(30);
/// A daemon that hands its VMs over takes a minute at most.
const STOP: Duration = Duration::from_secs(90);
/// No command of a person takes longer than this, on a machine however busy.
const COMMAND: Duration = Duration::from_secs(150);
/// If no event comes, `status` is asked again after this time.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Plays a story on the hosts a, b and c of a testbed of its own. If it does not go as it should, the daemons' logs are kept under
/// `name` and the error says where; if it does, nothing of it may be left on this machine.
///
/// # Errors
/// The story's own, or what was left behind.
pub fn in_a_testbed<T>(
    name: &str,
    spec: &TestbedSpec,
    binary: &Path,
    play: impl FnOnce(&mut Cluster<'_>) -> Result<T>,
) -> Result<T> {
    let testbed = Testbed::new(spec)?;
    let outcome = {
        let hosts: Vec<&str> = spec.hosts.iter().map(String::as_str).collect();
        let mut cluster = Cluster::init(&testbed, binary, &hosts)?;
        play(&mut cluster).or_else(|error| {
            let remains = cluster.keep_remains(name);
            Err(error).context(remains)
        })?
    };
    testbed.close()?;
    Ok(outcome)
}

/// The daemons on a testbed's hosts.
pub struct Cluster<'testbed> {
    testbed: &'testbed Testbed,
    binary: PathBuf,
    /// Hosts that run another build.
    others: BTreeMap<String, PathBuf>,
    dir: PathBuf,
    hosts: Vec<String>,
    daemons: BTreeMap<String, Child>,
    /// Hosts that stand still: whatever is started there stands still too, so nobody asks them.
    frozen: BTreeMap<String, Freezer>,
    /// Wall clocks of their own, of hosts that have one.
    clocks: BTreeMap<String, Clock>,
    /// State folders with little room, of hosts that have one.
    states: BTreeMap<String, SmallDisk>,
    /// Hosts whose daemons find no CRIU.
    without_criu: BTreeSet<String>,
}

impl<'testbed> Cluster<'testbed> {
    /// Writes keys and configurations for `hosts` with `dunlin init`. Starts nothing.
    pub fn init(testbed: &'testbed Testbed, binary: &Path, hosts: &[&str]) -> Result<Self> {
        let dir = testbed.dir().join("dunlin");
        let mut command = Command::new(binary);
        // Three hosts share this machine's /run.
        command
            .arg("init")
            .arg(&dir)
            .args(["--cluster", "lab", "--control", "control.sock"]);
        for &host in hosts {
            command
                .arg("--host")
                .arg(format!("{host}={}:{PORT}", testbed.node(host).address()));
        }
        let output = command
            .output()
            .with_context(|| format!("cannot run {}", binary.display()))?;
        succeed("dunlin init", &output)?;
        Ok(Self::with_files_of_others(testbed, binary, hosts))
    }

    /// Of hosts whose files are, or will be, where [`Self::init`] has them.
    pub fn with_files_of_others(testbed: &'testbed Testbed, binary: &Path, hosts: &[&str]) -> Self {
        Self {
            testbed,
            binary: binary.to_path_buf(),
            others: BTreeMap::new(),
            dir: testbed.dir().join("dunlin"),
            hosts: hosts.iter().map(|&name| name.to_owned()).collect(),
            daemons: BTreeMap::new(),
            frozen: BTreeMap::new(),
            clocks: BTreeMap::new(),
            states: BTreeMap::new(),
            without_criu: BTreeSet::new(),
        }
    }

    /// Agreed inputs are on the disks of a majority from now on. Before any daemon starts.
    pub fn use_disks(&self) -> Result<()> {
        for host in &self.hosts {
            let file = self.dir.join(host).join("cluster.toml");
            let text = fs::read_to_string(&file)?;
            let changed = text.replace("durability = \"memory\"", "durability = \"disk\"");
            if changed == text {
                bail!("{}: no durability to change", file.display());
            }
            fs::write(&file, changed)?;
        }
        Ok(())
    }

    /// The testbed that the daemons run in.
    pub fn testbed(&self) -> &'testbed Testbed {
        self.testbed
    }

    /// The configuration that `dunlin init` wrote.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The executable.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// A host's configuration file.
    pub fn host_file(&self, host: &str) -> PathBuf {
        self.dir.join(host).join("host.toml")
    }

    /// The names of all hosts, running or not.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// The names of the hosts whose daemon was started and not ended by us, and that do not stand still.
    pub fn running(&self) -> Vec<String> {
        let running = self.daemons.keys();
        running
            .filter(|host| !self.frozen.contains_key(*host))
            .cloned()
            .collect()
    }

    /// The host stands still from when this returns, until it is thawed.
    pub fn freeze(&mut self, host: &str) -> Result<()> {
        let freezer = self.testbed.node(host).freeze()?;
        self.frozen.insert(host.to_owned(), freezer);
        Ok(())
    }

    /// The host goes on where it stood.
    pub fn thaw(&mut self, host: &str) {
        self.frozen.remove(host);
    }

    /// Who stands still.
    pub fn frozen(&self) -> BTreeSet<String> {
        self.frozen.keys().cloned().collect()
    }

    /// Starts every host's daemon.
    ///
    /// # Errors
    /// As [`Cluster::start_host`].
    pub fn start_hosts(&mut self) -> Result<()> {
        self.hosts
            .clone()
            .iter()
            .try_for_each(|host| self.start_host(host))
    }

    /// Ends a VM by an order to `host`, then every daemon that runs. Nothing of the VM may be left in between.
    ///
    /// # Errors
    /// When the order fails, what is left, or a daemon that does not end.
    pub fn end(&mut self, host: &str, vm: &str) -> Result<()> {
        self.dunlin(host, &["down", "--now", vm])?;
        let left = traces::after_down(self)?;
        ensure!(left.is_empty(), "left after down: {}", left.join(", "));
        let running = self.running();
        running
            .iter()
            .try_for_each(|host| self.stop_host(host, Signal::SIGTERM))
    }

    /// From its next start on, `host` runs this build of dunlin, and its commands are of it.
    pub fn install(&mut self, host: &str, binary: &Path) {
        self.others.insert(host.to_owned(), binary.to_path_buf());
    }

    /// The build that is installed on `host`.
    fn binary_of(&self, host: &str) -> &Path {
        self.others.get(host).unwrap_or(&self.binary)
    }

    /// Starts the daemon of `host` and waits until it says that it is ready.
    pub fn start_host(&mut self, host: &str) -> Result<()> {
        let log_path = self.log(host);
        let log = File::options().create(true).append(true).open(&log_path)?;
        let mut command = self.testbed.node(host).command(self.binary_of(host))?;
        if let Some(clock) = self.clocks.get(host) {
            clock.onto(&mut command);
        }
        if self.without_criu.contains(host) {
            command.env("DUNLIN_CRIU", "/no/such/criu");
        } else if std::env::var_os("DUNLIN_CRIU").is_none() && paths::criu().exists() {
            command.env("DUNLIN_CRIU", paths::criu());
        }
        let mut child = command
            .arg("host")
            .arg(self.host_file(host))
            // So that `dunlin inject` is obeyed; nothing misbehaves before it is told to.
            .env("DUNLIN_FAULTS", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot run {}", self.binary_of(host).display()))?;
        let stdout = child.stdout.take().expect("a piped stdout");
        let (ready, is_ready) = mpsc::channel();
        std::thread::spawn(move || {
            let mut log = log;
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = writeln!(log, "{line}");
                if line.contains("ready") {
                    let _ = ready.send(());
                }
            }
        });
        if is_ready.recv_timeout(START).is_err() {
            let _ = child.kill();
            let _ = child.wait();
            let words = fs::read_to_string(&log_path).unwrap_or_default();
            bail!("the daemon of host {host} does not become ready:\n{words}");
        }
        self.daemons.insert(host.to_owned(), child);
        Ok(())
    }

    /// A new machine in a dead one's place: its configuration and keys are copied to it, and nothing else is there. Disks
    /// are as large as they were, and empty.
    pub fn renew_host(&self, host: &str) -> Result<()> {
        let state = self.state(host);
        fs::remove_dir_all(&state).with_context(|| format!("{}: the state folder", state.display()))?;
        for entry in fs::read_dir(self.testbed.node(host).home())? {
            let entry = entry?;
            if entry.path().extension().is_some_and(|kind| kind == "img") {
                let bytes = entry.metadata()?.len();
                File::create(entry.path())?.set_len(bytes)?;
            }
        }
        Ok(())
    }

    /// A host that never had a part in a VM gets empty disks, as large as those of `like`.
    pub fn give_empty_disks(&self, host: &str, like: &str) -> Result<()> {
        for entry in fs::read_dir(self.testbed.node(like).home())? {
            let entry = entry?;
            if entry.path().extension().is_some_and(|kind| kind == "img") {
                let file = self.testbed.node(host).home().join(entry.file_name());
                File::create(file)?.set_len(entry.metadata()?.len())?;
            }
        }
        Ok(())
    }

    /// The process of a host's daemon.
    pub fn pid(&self, host: &str) -> Option<u32> {
        self.daemons.get(host).map(Child::id)
    }

    /// The state folder of a host's daemon.
    pub fn state(&self, host: &str) -> PathBuf {
        self.dir.join(host).join("state")
    }

    /// The file that a host's daemon writes its messages to.
    pub fn log(&self, host: &str) -> PathBuf {
        self.testbed.node(host).home().join("daemon.log")
    }

    /// Power off, now: SIGKILL to every process of the host at once.
    pub fn kill_host(&mut self, host: &str) -> Result<Instant> {
        let at = Instant::now();
        self.testbed.node(host).kill_all()?;
        self.reap(host)?;
        Ok(at)
    }

    /// SIGKILL to the daemon alone; what it started has to go with it.
    pub fn kill_daemon(&mut self, host: &str) -> Result<()> {
        if let Some(child) = self.daemons.get_mut(host) {
            child.kill()?;
        }
        self.reap(host)
    }

    /// Waits until a daemon has died by its own hand, as it was told to; what it started has to go with it.
    pub fn await_death(&mut self, host: &str, at_most: Duration) -> Result<()> {
        let deadline = Instant::now() + at_most;
        while let Some(child) = self.daemons.get_mut(host) {
            if child.try_wait()?.is_some() {
                self.daemons.remove(host);
            } else if Instant::now() > deadline {
                bail!("the daemon of host {host} does not come to the line where it is to die");
            } else {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    /// Asks a daemon to end, as a service manager or Ctrl-C does, and waits until it has.
    pub fn stop_host(&mut self, host: &str, signal: Signal) -> Result<()> {
        let Some(child) = self.daemons.get(host) else {
            return Ok(());
        };
        kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
        let deadline = Instant::now() + STOP;
        while !self.testbed.node(host).pids().is_empty() {
            // The daemon stays a zombie in its cgroup until it is waited for.
            if self
                .daemons
                .get_mut(host)
                .is_some_and(|child| matches!(child.try_wait(), Ok(Some(_))))
            {
                self.daemons.remove(host);
            }
            if Instant::now() > deadline {
                bail!(
                    "host {host}: its daemon does not end on {signal}: {:?}",
                    self.testbed.node(host).pids()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.reap(host)
    }

    fn reap(&mut self, host: &str) -> Result<()> {
        if let Some(mut child) = self.daemons.remove(host) {
            child.wait()?;
        }
        Ok(())
    }

    /// A `dunlin` command as a person on that host would give it.
    pub fn command(&self, host: &str, arguments: &[&str]) -> Result<Command> {
        let mut command = self.testbed.node(host).command(self.binary_of(host))?;
        command
            .arg("--socket")
            .arg(self.socket(host)?)
            .args(arguments)
            .stdin(Stdio::null());
        Ok(command)
    }

    /// Runs it and returns what it printed.
    ///
    /// # Errors
    /// With the command's own words, when it fails.
    pub fn dunlin(&self, host: &str, arguments: &[&str]) -> Result<String> {
        let output = self.output(host, arguments)?;
        succeed(&format!("dunlin {} on host {host}", arguments.join(" ")), &output)
    }

    /// Runs it and waits for its end, but not for ever.
    pub fn output(&self, host: &str, arguments: &[&str]) -> Result<Output> {
        let mut command = self.command(host, arguments)?;
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let pid = Pid::from_raw(i32::try_from(child.id())?);
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (finished, is_finished) = mpsc::channel();
        let waiter = std::thread::spawn(move || {
            let rest = std::thread::spawn(move || read_all(stderr));
            let all = (read_all(stdout), rest.join().unwrap_or_default());
            let status = child.wait();
            let _ = finished.send(());
            (all, status)
        });
        let late = is_finished.recv_timeout(COMMAND).is_err();
        if late {
            kill(pid, Signal::SIGKILL)?;
        }
        let ((stdout, stderr), status) = waiter
            .join()
            .map_err(|_| anyhow::anyhow!("a waiting thread panicked"))?;
        if late {
            let said = String::from_utf8_lossy(&stderr).trim().to_owned();
            bail!(
                "dunlin {} on host {host} does not end ({said})",
                arguments.join(" ")
            );
        }
        Ok(Output {
            status: status?,
            stdout,
            stderr,
        })
    }

    fn socket(&self, host: &str) -> Result<PathBuf> {
        let file = self.host_file(host);
        let table: toml::Table = fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?
            .parse()
            .with_context(|| format!("{} is no TOML", file.display()))?;
        let path = table
            .get("control")
            .and_then(toml::Value::as_str)
            .context("no 'control' in host.toml")?;
        Ok(self.dir.join(host).join(path))
    }

    /// What one host says.
    pub fn status(&self, host: &str) -> Result<HostStatus> {
        let output = self.output(host, &["status", "--json"])?;
        // 3 tells a script that a VM is unprotected; the answer is whole all the same.
        if !matches!(output.status.code(), Some(0 | 3)) {
            succeed(&format!("dunlin status on host {host}"), &output)?;
        }
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(&text)
            .with_context(|| format!("status of host {host} is not what is expected: {text}"))
    }

    /// What has happened on a host, under earlier daemons too.
    pub fn events(&self, host: &str) -> Result<Vec<Event>> {
        let text = self.dunlin(host, &["events", "--json"])?;
        text.lines()
            .map(|line| {
                serde_json::from_str(line).with_context(|| format!("an event of host {host}: {line}"))
            })
            .collect()
    }

    /// What all running hosts say; a host that cannot answer is left out.
    pub fn statuses(&self) -> Vec<HostStatus> {
        self.running()
            .iter()
            .filter_map(|host| self.status(host).ok())
            .collect()
    }

    /// Waits until `found` finds something in what the running hosts say, looking again at each event.
    pub fn await_status<T>(
        &self,
        what: &str,
        at_most: Duration,
        mut found: impl FnMut(&[HostStatus]) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + at_most;
        let events = Events::follow(self)?;
        loop {
            let statuses = self.statuses();
            if let Some(result) = found(&statuses) {
                return Ok(result);
            }
            if Instant::now() > deadline {
                let said = serde_json::to_string(&statuses).unwrap_or_default();
                bail!("{what}: not within {} s; the hosts say {said}", at_most.as_secs());
            }
            events.await_one(LOOK_AGAIN);
        }
    }

    /// Waits until a primary runs the VM with a backup that can take over. Returns the two hosts' names.
    pub fn await_protected(&self, vm: &str, at_most: Duration) -> Result<(String, String)> {
        let what = format!("VM {vm} protected");
        self.await_status(&what, at_most, |hosts| both_copies(hosts, vm))
    }

    /// Waits until a host other than `old` is the VM's primary.
    pub fn await_take_over(&self, vm: &str, old: &str, at_most: Duration) -> Result<(String, VmStatus)> {
        self.await_status(&format!("VM {vm} taken over from {old}"), at_most, |hosts| {
            let host = hosts
                .iter()
                .find(|host| host.host != old && host.vm(vm).is_some_and(|vm| vm.role == Role::Primary))?;
            Some((host.host.clone(), host.vm(vm)?.clone()))
        })
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.frozen.clear();
        for (host, mut child) in std::mem::take(&mut self.daemons) {
            let _ = self.testbed.node(&host).kill_all();
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn read_all(from: Option<impl std::io::Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        let _ = from.read_to_end(&mut bytes);
    }
    bytes
}

fn succeed(what: &str, output: &Output) -> Result<String> {
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        bail!("{what}: {} ({words})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The client's view: a node with a service on the guest's address.
pub fn await_service(client: &Node, target: std::net::SocketAddr, at_most: Duration) -> Result<()> {
    let deadline = Instant::now() + at_most;
    let waited = client.spawn("await-service", move || {
        loop {
            let answer = crate::client::Connection::open(target, Duration::from_millis(500))
                .and_then(|mut connection| connection.ask(&["PING"], Duration::from_secs(5)));
            match answer {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error),
                // Nothing tells a client that a guest has booted: it has to ask.
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    })?;
    waited
        .join()
        .map_err(|_| anyhow::anyhow!("a client thread panicked"))??
        .context("the service does not answer")
}
