//! The same server without Dunlin, on the first host: as it is, or with a directory as its root.
//!
//! * **Decides:** nothing. * **Flow:** [`Plain::start`] -> it listens -> loads -> [`Plain::stop`].
//! * **Invariants:** what it writes in a root is in memory, as a copy's is, and goes with it.
//! * **Not here:** its plan (`services`).

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cluster::Cluster;
use crate::demo::service;
use crate::program::{PATIENCE, Plan, path};
use crate::testbed::Node;

/// Where it runs.
pub(super) const HOST: &str = "a";
/// Arguments: a directory of its own, the root, a user's number, the command. A mount that is noted leaves a file in the host's /run.
const IN_A_ROOT: &str = "set -e; own=$1; root=$2; user=$3; shift 3\n\
    mount -n -t tmpfs tmpfs \"$own\"; mkdir \"$own/upper\" \"$own/work\" \"$own/all\"; all=$own/all\n\
    mount -n -t overlay -o \"lowerdir=$root,upperdir=$own/upper,workdir=$own/work\" overlay \"$all\"\n\
    mkdir -p \"$all/proc\" \"$all/dev\" \"$all/run\"\n\
    mount -n -t proc proc \"$all/proc\"; mount -n --rbind /dev \"$all/dev\"; mount -n -t tmpfs tmpfs \"$all/run\"\n\
    mount -n -t tmpfs -o mode=1777 tmpfs \"$all/dev/shm\"\n\
    chroot \"--userspec=$user:$user\" \"$all\" \"$@\"; exit $?";

pub(super) struct Plain {
    server: Child,
    pub(super) address: SocketAddr,
    /// By what it is told to end, so that what it has begun itself ends with it.
    end: Signal,
}

impl Plain {
    pub(super) fn start(cluster: &Cluster<'_>, plan: &Plan) -> Result<Self> {
        let node = cluster.testbed().node(HOST);
        let address = SocketAddr::new(IpAddr::V4(node.address()), service().port());
        let (mut command, end) = command(cluster, plan)?;
        let said = cluster.testbed().dir().join("plain.log");
        let server = command
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&said)?)
            .stderr(std::fs::File::options().append(true).open(&said)?)
            .spawn()
            .with_context(|| format!("{} does not start", plan.command[0]))?;
        let mut plain = Self { server, address, end };
        if let Err(error) = plain.await_port(cluster.testbed().node("client")) {
            let said = std::fs::read_to_string(&said).unwrap_or_default();
            let last = said.lines().last().unwrap_or("nothing").to_owned();
            return Err(error.context(format!("{} without Dunlin; it said: {last}", plan.command[0])));
        }
        Ok(plain)
    }

    /// Whatever it speaks. Nothing tells a client that a server has begun: it has to ask.
    fn await_port(&mut self, client: &Node) -> Result<()> {
        let (target, until) = (self.address, Instant::now() + PATIENCE);
        loop {
            let asked = client.spawn("await-port", move || {
                TcpStream::connect_timeout(&target, PATIENCE).map(drop)
            })?;
            let Err(error) = asked.join().map_err(|_| anyhow!("a client panicked"))?? else {
                return Ok(());
            };
            if let Some(status) = self.server.try_wait()? {
                return Err(anyhow!("it has ended: {status}"));
            }
            ensure!(Instant::now() < until, "nobody listens at {target}: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn stop(&mut self) -> Result<()> {
        // One that has ended is collected below.
        let _ = kill(Pid::from_raw(i32::try_from(self.server.id())?), self.end);
        self.server.wait()?;
        Ok(())
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // Ended already, or ended now.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn command(cluster: &Cluster<'_>, plan: &Plan) -> Result<(Command, Signal)> {
    let node = cluster.testbed().node(HOST);
    let keys: toml::Table = plan.lines.join("\n").parse().context("the plan's lines")?;
    let text = |key: &str| keys.get(key).and_then(toml::Value::as_str);
    let Some(root) = text("root") else {
        let mut command = node.command(&plan.command[0])?;
        command.args(&plan.command[1..]);
        return Ok((command, Signal::SIGTERM));
    };
    let user = match text("user") {
        Some("nobody") => "65534",
        _ => "0",
    };
    let own = cluster.testbed().dir().join("plain");
    std::fs::create_dir_all(&own)?;
    let mut command = node.command("unshare")?;
    command
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            IN_A_ROOT,
            "sh",
        ])
        .args([path(&own)?, root, user])
        .args(&plan.command);
    // The namespace's first process, the shell, dies with whoever made it, and all others with that one. The server could not be the first: who
    // becomes another user is not killed with its parent any more.
    Ok((command, Signal::SIGKILL))
}
