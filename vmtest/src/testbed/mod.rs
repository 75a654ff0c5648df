//! Several hosts on one machine: network namespaces, a bridge in each, a switch between them, faults on demand.
//!
//! * **Decides:** what a "host" is here: a network namespace + a cgroup. Everything started on a host lies in both.
//! * **Flow:** [`Testbed::new`] builds; [`Node::command`] starts processes on a host; [`Node::kill_all`],
//!   [`Node::freeze`] and what is in `faults` are the faults; dropping the testbed ends and removes all.
//! * **Invariants:** (1) nothing is made outside of the run's own names, which carry pid and start time of this
//!   process; (2) they are all gone when the testbed is dropped, when this process panics, is interrupted or killed
//!   (a watching shell cleans up, see [`reaper`]) and, should even that be killed, when the next testbed starts;
//!   (3) every host gets the same share of the CPU in one testbed, whatever runs on it.
//! * **Source:** `ip-netns(8)`, the kernel's `cgroup-v2.rst`.
//! * **Not here:** anything about Dunlin. Hosts run whatever they are told to.
//!
//! The world: `switch` holds bridge `br0` and one port for each node, named like the node. Each node has the other
//! end of its cable as `up0`. On a host `up0` is a port of that host's own `br0`, to which VMs' TAPs go as well, and
//! `br0` carries the host's address; on a client `up0` carries the address itself.

mod capture;
mod cgroup;
mod clock;
mod faults;
mod node;
pub(crate) mod packet;
mod reaper;
mod run_id;
mod shaper;

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

pub use capture::{Capture, Speaker, Spoken};
pub use cgroup::{CpuShare, Freezer};
pub use clock::Clock;
pub use faults::SmallDisk;
pub use node::Node;
pub use run_id::RunId;
pub use shaper::{Counts, Shape, Shaper};

const PREFIX_LENGTH: u8 = 16;
const HERE: &str = "here";
/// The bridge in the switch and on each host.
const BRIDGE: &str = "br0";

/// What a testbed is made of.
#[derive(Clone, Debug)]
pub struct TestbedSpec {
    /// The hosts' names; they get the addresses 10.77.1.1, 10.77.1.2, ...
    pub hosts: Vec<String>,
    /// The clients' names; they get the addresses 10.77.2.1, 10.77.2.2, ...
    pub clients: Vec<String>,
    /// How much CPU each host may use. `None`: as much as there is.
    pub host_cpu: Option<CpuShare>,
    /// Where the run's own directory is made (see [`crate::paths::testbed_runs`]).
    pub base: PathBuf,
}

impl TestbedSpec {
    /// Two hosts `a` and `b` that can run VMs, a witness `c`, and a client.
    pub fn three_hosts() -> Self {
        Self {
            hosts: ["a", "b", "c"].map(str::to_owned).to_vec(),
            clients: vec!["client".to_owned()],
            host_cpu: None,
            base: crate::paths::testbed_runs(),
        }
    }
}

/// A running testbed. Dropping it kills every process in it and removes everything it made.
pub struct Testbed {
    run: RunId,
    dir: PathBuf,
    nodes: BTreeMap<String, Node>,
    // Last: fields are dropped in order, and the reaper must find no open handle of ours.
    reaper: reaper::Reaper,
}

impl Testbed {
    /// Removes what a crashed run may have left, then builds the hosts, the switch and the clients.
    ///
    /// # Errors
    /// When not root, or without `ip`; the message says what to do. Nothing is left behind then either.
    pub fn new(spec: &TestbedSpec) -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            bail!("the testbed makes network namespaces, which needs root: run it with sudo");
        }
        reaper::sweep(&spec.base)?;
        let run = RunId::mine()?;
        let dir = spec.base.join(run.as_str());
        fs::create_dir_all(dir.join(HERE)).with_context(|| format!("cannot make {}", dir.display()))?;
        let reaper = reaper::Reaper::start(&run, &dir)?;
        let mut testbed = Self {
            run,
            dir,
            nodes: BTreeMap::new(),
            reaper,
        };

        let switch = testbed.run.namespace("switch");
        ip(&["netns", "add", &switch])?;
        batch(
            &switch,
            "link set lo up\nlink add br0 type bridge mcast_snooping 0\nlink set br0 up\n",
        )?;
        for (index, name) in spec.hosts.iter().enumerate() {
            testbed.add_node(&switch, name, address(1, index), true, spec.host_cpu)?;
        }
        for (index, name) in spec.clients.iter().enumerate() {
            testbed.add_node(&switch, name, address(2, index), false, None)?;
        }
        Ok(testbed)
    }

    fn add_node(
        &mut self,
        switch: &str,
        name: &str,
        address: Ipv4Addr,
        bridged: bool,
        cpu: Option<CpuShare>,
    ) -> Result<()> {
        let namespace = self.run.namespace(name);
        ip(&["netns", "add", &namespace])?;
        connect(switch, name, &namespace)?;
        if bridged {
            // A bridge takes over its lowest port's address unless it has one of its own: then a new TAP would move it.
            let mac = mac_of(address);
            batch(
                &namespace,
                &format!(
                    "link set lo up\nlink add br0 address {mac} type bridge mcast_snooping 0\nlink set up0 master br0\nlink set br0 up\n\
                     link set up0 up\naddr add {address}/{PREFIX_LENGTH} dev br0\n"
                ),
            )?;
        } else {
            batch(&namespace, "link set lo up\n")?;
            address_cable(&namespace, address)?;
        }
        let home = self.dir.join(name);
        fs::create_dir_all(&home)?;
        let node = Node::new(name, &self.run, address, home, self.here(), cpu)?;
        self.nodes.insert(name.to_owned(), node);
        Ok(())
    }

    /// Takes a client's cable away, whatever it is.
    fn unplug(&self, client: &str) -> Result<()> {
        batch(&self.switch(), &format!("link del dev {client}\n"))
    }

    /// Gives a client that has none a plain cable.
    fn plug_in(&self, client: &str) -> Result<()> {
        connect(&self.switch(), client, &self.run.namespace(client))?;
        self.address_client(client)
    }

    /// A client's new cable gets the addresses that the one before had.
    fn address_client(&self, client: &str) -> Result<()> {
        address_cable(&self.run.namespace(client), self.node(client).address())
    }

    /// Gives a client an IPv6 address beside its other one, in the guests' network.
    ///
    /// # Errors
    /// Where the kernel here has no IPv6.
    pub fn give_ipv6(&self, client: &str) -> Result<()> {
        let [_, _, group, number] = self.node(client).address().octets();
        batch(
            &self.run.namespace(client),
            &format!("addr add fd77::{group:x}:{number:x}/64 dev up0 nodad\n"),
        )
    }

    /// A host or client by its name.
    ///
    /// # Panics
    /// When the testbed has none of that name: the caller's error.
    pub fn node(&self, name: &str) -> &Node {
        self.nodes
            .get(name)
            .unwrap_or_else(|| panic!("the testbed has no node {name}"))
    }

    /// All nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// This run's directory; removed with the testbed.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path under which every node sees its own directory ([`Node::home`]).
    pub fn here(&self) -> PathBuf {
        self.dir.join(HERE)
    }

    /// This run's name, which all that it made carries.
    pub fn run(&self) -> &RunId {
        &self.run
    }

    /// What of this run still exists outside of this process: for the checks that nothing is left.
    /// Empty after [`Testbed::close`].
    pub fn leftovers(run: &RunId) -> Vec<String> {
        let mut found: Vec<String> = run_id::namespaces()
            .into_iter()
            .filter(|name| name.starts_with(run.as_str()))
            .map(|name| format!("network namespace {name}"))
            .collect();
        found.extend(
            cgroup::directories(run)
                .iter()
                .map(|dir| format!("cgroup {}", dir.display())),
        );
        found
    }

    /// How many processes of this run there are on its hosts.
    pub fn processes(run: &RunId) -> usize {
        cgroup::processes(run)
    }

    /// Ends the testbed now and reports what its programs left on the hosts, and whether all of it is gone.
    pub fn close(self) -> Result<()> {
        let (run, dir) = (self.run.clone(), self.dir.clone());
        let mut left = Vec::new();
        for node in self.nodes() {
            node.kill_all()?;
            left.extend(node.traces()?);
        }
        drop(self);
        left.extend(Self::leftovers(&run));
        if dir.exists() {
            left.push(format!("directory {}", dir.display()));
        }
        if left.is_empty() {
            Ok(())
        } else {
            bail!("left behind: {}", left.join(", "))
        }
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        self.nodes.clear();
        self.reaper.finish();
    }
}

fn address(group: u8, index: usize) -> Ipv4Addr {
    let number = u8::try_from(index + 1).expect("at most 254 nodes");
    Ipv4Addr::new(10, 77, group, number)
}

/// The address of a node's card, or of a host's bridge.
fn mac_of(address: Ipv4Addr) -> String {
    let [_, _, group, number] = address.octets();
    format!("02:d0:00:00:{group:02x}:{number:02x}")
}

/// A cable from a port of the switch, named like the node, to the node's `up0`.
fn connect(switch: &str, name: &str, namespace: &str) -> Result<()> {
    batch(
        switch,
        &format!(
            "link add name {name} type veth peer name up0 netns {namespace}\nlink set dev {name} master br0\nlink set dev {name} up\n"
        ),
    )
}

/// The node's end of it, where that carries the address itself.
fn address_cable(namespace: &str, address: Ipv4Addr) -> Result<()> {
    let mac = mac_of(address);
    batch(
        namespace,
        &format!("link set up0 address {mac}\nlink set up0 up\naddr add {address}/{PREFIX_LENGTH} dev up0\n"),
    )
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .context("ip is not here: apt-get install iproute2 (or 'cargo xtask setup')")?;
    if !output.status.success() {
        bail!(
            "ip {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// Runs several `ip` lines in one namespace with one process.
fn batch(namespace: &str, lines: &str) -> Result<()> {
    run_with_input(Command::new("ip").args(["-n", namespace, "-batch", "-"]), lines)
}

fn run_with_input(command: &mut Command, input: &str) -> Result<()> {
    use std::io::Write;
    use std::process::Stdio;
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    child
        .stdin
        .take()
        .expect("a piped stdin")
        .write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!(
            "{command:?} failed: {}\n{input}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
