//! What it decides: how a child process is told what to be, and how its links come about.
//!
//! * **Flow:** parent [`spawn`]s this executable with a JSON configuration in the environment; the child's [`main`] runs
//!   it and prints JSON lines. Replica `i` listens in the scratch directory; the higher id connects to the lower.
//! * **Not here:** what is measured.

use super::{Durability, Fabric, Wait, raw, replica};
use anyhow::{Context, Result};
use dunlin_fabric::link::{Auth, Hello, Identity, Listener, Purpose, Stream, connect};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// The child's configuration.
pub(super) const VARIABLE: &str = "DUNLIN_BENCH_CHILD";

/// What a child is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Part {
    /// A replica.
    Replica(replica::ReplicaPart),
    /// One end of the raw ping-pong; 0 leads. `checked`: with records and words that are believed only whole.
    PingPong { seconds: f64, checked: bool },
    /// Syncs a file over and over.
    Fdatasync { seconds: f64 },
}

impl Part {
    /// To all lower ids; in a large group whose leader is given, to that one alone.
    fn connects_to(&self, me: u8) -> std::ops::Range<u8> {
        match self {
            Self::Replica(part) if part.job.is_led_by_the_first() => 0..me.min(1),
            _ => 0..me,
        }
    }
}

/// Everything a child must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Config {
    pub(super) me: u8,
    pub(super) dir: PathBuf,
    pub(super) fabric: Fabric,
    pub(super) durability: Durability,
    pub(super) wait: Wait,
    pub(super) part: Part,
}

/// A directory that goes with its value.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(under: &Path) -> Result<Self> {
        let path = under.join(format!("dunlin-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }
    /// A fresh directory inside.
    pub(super) fn sub(&self, name: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A child that is killed with its value.
pub(super) struct Running(pub(super) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn spawn(config: &Config) -> Result<Running> {
    let me = std::env::current_exe().context("finding this executable")?;
    let child = Command::new(me)
        .args(["bench", "consensus"])
        .env(VARIABLE, serde_json::to_string(config)?)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a replica")?;
    Ok(Running(child))
}

pub(super) fn main(config: &str) -> Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).context("dying with the parent")?;
    let config: Config = serde_json::from_str(config).context("the child's configuration")?;
    match &config.part {
        Part::Replica(part) => replica::child(&config, part),
        Part::PingPong { seconds, checked } if *checked => raw::checked_child(&config, *seconds),
        Part::PingPong { seconds, .. } => raw::ping_pong_child(&config, *seconds),
        Part::Fdatasync { seconds } => raw::fdatasync_child(&config, *seconds),
    }
}

/// Prints one JSON line.
pub(super) fn say(value: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    std::io::stdout()
        .lock()
        .write_all(&line)
        .context("the parent is gone")
}

/// Links as they come: accepted ones, and those asked for with the sender.
pub(super) struct Links {
    pub(super) arrived: Receiver<(u8, Stream)>,
    wanted: Sender<u8>,
}

impl Links {
    /// Listens, and connects to all lower ids. All of it on threads that end with the process.
    pub(super) fn new(config: &Config) -> Result<Self> {
        let (arrived, receiver) = channel();
        let (wanted, wishes) = channel::<u8>();
        listen(config, arrived.clone())?;
        let config = config.clone();
        let own = config.part.connects_to(config.me).collect::<Vec<_>>();
        std::thread::spawn(move || {
            let mut open = own;
            loop {
                open.extend(wishes.try_iter());
                open.sort_unstable();
                open.dedup();
                open.retain(|peer| match connect_to(&config, *peer) {
                    Ok(stream) => arrived.send((*peer, stream)).is_err(),
                    Err(_) => true,
                });
                if open.is_empty() {
                    match wishes.recv() {
                        Ok(peer) => open.push(peer),
                        Err(_) => return,
                    }
                } else {
                    std::thread::sleep(Duration::from_millis(5)); // the peer is not there yet; nothing tells when it is
                }
            }
        });
        Ok(Self {
            arrived: receiver,
            wanted,
        })
    }

    /// A link ended: the higher id connects again.
    pub(super) fn lost(&self, me: u8, peer: u8) {
        if peer < me {
            let _ = self.wanted.send(peer);
        }
    }
}

fn identity(config: &Config, me: u8) -> Result<Identity> {
    let read = |name: &str| std::fs::read_to_string(config.dir.join(name)).context("reading keys");
    let auth = Auth::Tls {
        cert_pem: read(&format!("{me}.crt"))?,
        key_pem: read(&format!("{me}.key"))?,
        ca_pem: read("ca.crt")?,
        crl_pem: None,
    };
    Ok(Identity::new([1; 16], &format!("r{me}"), &[], Some(auth))?)
}

/// Keys for three hosts.
pub(super) fn write_keys(dir: &Path) -> Result<()> {
    let ca = dunlin_fabric::keys::make_ca("bench")?;
    std::fs::write(dir.join("ca.crt"), &ca.keys.cert_pem)?;
    for i in 0..3 {
        let host = dunlin_fabric::keys::make_host(&ca, &format!("r{i}"))?;
        std::fs::write(dir.join(format!("{i}.crt")), host.cert_pem)?;
        std::fs::write(dir.join(format!("{i}.key")), host.key_pem)?;
    }
    Ok(())
}

fn publish(config: &Config, port: u16) -> Result<()> {
    let (new, file) = (
        config.dir.join(format!("{}.new", config.me)),
        config.dir.join(format!("{}.port", config.me)),
    );
    std::fs::write(&new, port.to_string())?;
    std::fs::rename(new, file).context("publishing the port")
}

fn listen(config: &Config, arrived: Sender<(u8, Stream)>) -> Result<()> {
    match config.fabric {
        Fabric::Shm => {
            let path = config.dir.join(format!("{}.sock", config.me));
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(path).context("listening")?;
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let mut stream = stream;
                    let mut id = [0];
                    if stream.read_exact(&mut id).is_ok()
                        && arrived.send((id[0], Stream::local(stream, "peer"))).is_err()
                    {
                        return;
                    }
                }
            });
        }
        Fabric::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").context("listening")?;
            publish(config, listener.local_addr()?.port())?;
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let mut stream = stream;
                    let mut id = [0];
                    let _ = stream.set_nodelay(true);
                    if stream.read_exact(&mut id).is_ok()
                        && arrived
                            .send((id[0], Stream::unprotected(stream, "peer")))
                            .is_err()
                    {
                        return;
                    }
                }
            });
        }
        Fabric::Tls => {
            let listener = Listener::bind("127.0.0.1:0", identity(config, config.me)?)?;
            publish(config, listener.local_addr().port())?;
            std::thread::spawn(move || {
                loop {
                    if let Ok((hello, stream)) = listener.accept()
                        && let Some(id) = hello.from.strip_prefix('r').and_then(|id| id.parse().ok())
                        && arrived.send((id, stream)).is_err()
                    {
                        return;
                    }
                }
            });
        }
    }
    Ok(())
}

fn connect_to(config: &Config, peer: u8) -> Result<Stream> {
    let port =
        || -> Result<u16> { Ok(std::fs::read_to_string(config.dir.join(format!("{peer}.port")))?.parse()?) };
    match config.fabric {
        Fabric::Shm => {
            let mut stream = UnixStream::connect(config.dir.join(format!("{peer}.sock")))?;
            stream.write_all(&[config.me])?;
            Ok(Stream::local(stream, "peer"))
        }
        Fabric::Tcp => {
            let mut stream = TcpStream::connect(("127.0.0.1", port()?))?;
            stream.set_nodelay(true)?;
            stream.write_all(&[config.me])?;
            Ok(Stream::unprotected(stream, "peer"))
        }
        Fabric::Tls => {
            let hello = Hello::new("bench", &format!("r{peer}"), Purpose::Log);
            let address = ("127.0.0.1", port()?);
            Ok(connect(
                address,
                &identity(config, config.me)?,
                &hello,
                Duration::from_secs(2),
            )?
            .1)
        }
    }
}

/// Sorted samples to a figure.
pub(super) fn figure(
    payload_bytes: usize,
    outstanding: usize,
    mut ns: Vec<u64>,
    seconds: f64,
) -> super::Figure {
    ns.sort_unstable();
    let at = |share: usize| ns.get(ns.len() * share / 100).copied().unwrap_or(0) as f64 / 1e3;
    let per_s = ns.len() as f64 / seconds;
    super::Figure {
        payload_bytes,
        outstanding,
        p50_us: at(50),
        p99_us: at(99),
        per_s,
    }
}
