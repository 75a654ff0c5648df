//! The loads, each by its usual client, run from the unpacked packages of [`crate::image::clients`].
//!
//! An error is an error: a client that fails, an answer that is wrong, a request without an answer make the case a
//! failure. It has no figure then, because a service that fails fast would look fast. A client that saw nothing wrong and nothing
//! in time either ([`TooSlow`]) costs its window only.

mod bulk;
mod http;
mod iperf3;
mod memcached;
mod redis;
mod sql;
mod ssh;

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::case::{Bulk, Case, Load, Way};
use crate::testbed::Node;
use http::Ask;

/// A load of which nothing ended in its time, and nothing that ended was wrong.
#[derive(Debug)]
pub struct TooSlow(String);

impl std::fmt::Display for TooSlow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TooSlow {}

#[cfg(test)]
impl TooSlow {
    pub fn for_tests() -> Self {
        Self("nothing".to_owned())
    }
}

/// An error of this kind.
fn too_slow(why: impl Into<String>) -> anyhow::Error {
    TooSlow(why.into()).into()
}

/// What the clients of one load saw.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Requests (transactions, pages) that were answered, rightly.
    pub requests: u64,
    /// The same with those that only told how many make a window: what the hosts had to do meanwhile.
    #[serde(default)]
    pub in_all: u64,
    /// Per second.
    pub per_second: f64,
    /// Median latency in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of it.
    pub p99_ms: f64,
}

impl Measured {
    /// From each request's latency in microseconds.
    fn from_latencies(latencies_us: &mut [u64], seconds: f64) -> Result<Self> {
        if latencies_us.is_empty() {
            return Err(too_slow("no request was answered"));
        }
        latencies_us.sort_unstable();
        let rank = |percent: usize| latencies_us[(latencies_us.len() - 1) * percent / 100] as f64 / 1e3;
        Ok(Self {
            requests: latencies_us.len() as u64,
            in_all: latencies_us.len() as u64,
            per_second: latencies_us.len() as f64 / seconds,
            p50_ms: rank(50),
            p99_ms: rank(99),
        })
    }
}

/// A place to run clients.
pub struct Clients<'testbed> {
    /// The unpacked packages.
    pub root: PathBuf,
    /// Where in the testbed.
    pub node: &'testbed Node,
    /// The guest.
    pub guest: Ipv4Addr,
    /// The service's port.
    pub port: u16,
}

impl Clients<'_> {
    fn target(&self) -> SocketAddr {
        SocketAddr::from((self.guest, self.port))
    }

    /// A client, in the clients' own tree, with the node's directory at /work.
    fn command(&self, program: &str) -> Result<Command> {
        self.inside("exec chroot . \"$@\"", program)
    }

    /// The same, but `then` is a script of this machine's shell that runs it: it stands in the clients' tree, and has its words as `$@`.
    fn inside(&self, then: &str, program: &str) -> Result<Command> {
        let mut command = self.node.command("sh")?;
        // -n: mount would note it in the node's /run, where nothing may be left.
        let mounts =
            "mount -n --bind \"$2\" \"$1/work\" && mount -n --bind /dev \"$1/dev\" && cd \"$1\" && shift 2";
        command
            .args(["-c", &format!("{mounts} && {then}"), "sh"])
            .arg(&self.root)
            .arg(self.node.home())
            .arg(program);
        Ok(command)
    }

    /// Makes the load of `case` for about `seconds`. `known`: how many a second there were just before; a client that counts
    /// requests, not seconds, has to try otherwise.
    ///
    /// # Errors
    /// When anything went wrong for a client; [`TooSlow`] when nothing did, but nothing ended.
    pub fn run(&self, case: &Case, seconds: f64, known: Option<f64>) -> Result<Measured> {
        let connections = case.connections;
        match case.load {
            Load::Redis(words) => redis::run(self, words, connections, seconds, known),
            Load::Counter => redis::count(self, connections, seconds, known),
            Load::Memcached => memcached::run(self, connections, seconds),
            Load::Pgbench(words) => sql::pgbench(self, words, connections, seconds),
            Load::Sysbench => sql::sysbench(self, connections, seconds),
            Load::Http(path) => http::run(self, &Ask::pages(path), connections, seconds),
            Load::Https(path, handshakes) => {
                http::run(self, &Ask::over_tls(path, handshakes), connections, seconds)
            }
            Load::Short { keeps_connections } => {
                http::run(self, &Ask::short(keeps_connections), connections, seconds)
            }
            Load::Bulk(bulk) => bulk::run(self, bulk, connections, seconds),
            Load::Ssh(handshakes) => ssh::run(self, handshakes, connections, seconds),
            Load::Iperf3(way, wire) => iperf3::run(self, way, wire, seconds),
        }
    }

    /// Waits until the service of `case` answers as it should.
    pub fn await_service(&self, case: &Case, at_most: Duration) -> Result<()> {
        let target = self.target();
        let load = case.load;
        let deadline = Instant::now() + at_most;
        let waited = self.node.spawn("await-service", move || {
            loop {
                match probe(load, target) {
                    Ok(()) => return Ok(()),
                    Err(error) if Instant::now() > deadline => return Err(error),
                    // Nothing tells a client that a guest has booted: it has to ask.
                    Err(_) => std::thread::sleep(Duration::from_millis(50)),
                }
            }
        })?;
        waited
            .join()
            .map_err(|_| anyhow::anyhow!("a client thread panicked"))??
            .context("the service does not answer")
    }
}

/// One question that only a service that is ready answers.
fn probe(load: Load, target: SocketAddr) -> Result<()> {
    let soon = Duration::from_millis(500);
    let ask = |question: &[u8], right: &dyn Fn(&[u8]) -> bool| -> Result<()> {
        let mut stream = std::net::TcpStream::connect_timeout(&target, soon)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        std::io::Write::write_all(&mut stream, question)?;
        let mut answer = vec![0; 512];
        let length = stream.read(&mut answer)?;
        ensure!(right(&answer[..length]), "a wrong answer from {target}");
        Ok(())
    };
    match load {
        Load::Redis(_) | Load::Counter | Load::Bulk(Bulk { way: Way::Up, .. }) => {
            ask(b"PING\r\n", &|answer| answer == b"+PONG\r\n")
        }
        Load::Memcached => ask(b"version\r\n", &|answer| answer.starts_with(b"VERSION")),
        // An SSLRequest: a server that is still recovering says so only to a real start-up message.
        Load::Pgbench(_) => ask(&postgresql_hello(), &|answer| answer.first() == Some(&b'R')),
        // The greeting: protocol version 10 behind a header of four bytes.
        Load::Sysbench => ask(b"", &|answer| answer.get(4) == Some(&10)),
        Load::Bulk(Bulk { way: Way::Down, .. }) | Load::Short { .. } => {
            http::page(target, "/", soon).map(|_| ())
        }
        Load::Http(path) | Load::Https(path, _) => http::page(target, path, soon).map(|_| ()),
        Load::Iperf3(..) => ask(&iperf3::cookie(), &iperf3::greets),
        Load::Ssh(_) => ask(b"", &|answer| answer.starts_with(b"SSH-2.0")),
    }
}

fn postgresql_hello() -> Vec<u8> {
    let words = b"user\0service\0database\0bench\0\0";
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&(u32::try_from(words.len()).expect("short") + 8).to_be_bytes());
    bytes.extend_from_slice(&196_608_u32.to_be_bytes());
    bytes.extend_from_slice(words);
    bytes
}

/// Runs a client to its end, and kills it at the deadline: a service that stopped answering must not stop the bench.
fn finish(mut command: Command, what: &str, at_most: Duration) -> Result<String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {what}"))?;
    let group = Pid::from_raw(i32::try_from(child.id())?);
    let (mut stdout, mut stderr) = (
        child.stdout.take().context("piped")?,
        child.stderr.take().context("piped")?,
    );
    let (done, is_done) = mpsc::channel();
    let reader = std::thread::spawn(move || -> std::io::Result<Output> {
        let errors = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            stderr.read_to_end(&mut bytes).map(|_| bytes)
        });
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes)?;
        let stderr = errors.join().expect("a reader does not panic")?;
        let status = child.wait()?;
        let _ = done.send(());
        Ok(Output {
            status,
            stdout: bytes,
            stderr,
        })
    });
    let late = is_done.recv_timeout(at_most).is_err();
    if late {
        // Each command of a node is the leader of its own process group.
        let _ = killpg(group, Signal::SIGKILL);
    }
    let output = reader
        .join()
        .map_err(|_| anyhow::anyhow!("a waiting thread panicked"))??;
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    );
    if late {
        return Err(too_slow(format!(
            "{what} does not end within {} s ({errors})",
            at_most.as_secs()
        )));
    }
    if !output.status.success() {
        let last = said.trim().lines().next_back().unwrap_or_default();
        bail!("{what}: {} ({errors} {last})", output.status);
    }
    Ok(said)
}

/// How long a client may take that shall take `seconds`.
fn patience(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds * 4.0 + 30.0)
}
