//! The port for metrics, before whoever reaches it: nothing that is said there ends the daemon, or keeps others from asking.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use daemon::Host;
use dunlin_vmtest::free_address;

#[path = "common/callers.rs"]
mod callers;
#[path = "common/daemon.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod daemon;

/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);
const METRICS: &str = "GET /metrics HTTP/1.1\r\nHost: x\r\n";

struct Served {
    _host: Host,
    metrics: SocketAddr,
}

impl Served {
    fn start() -> Result<Self> {
        let mut host = Host::new()?;
        let metrics = free_address()?;
        host.configure(&format!("page = \"off\"\nmetrics = \"{metrics}\""))?;
        host.start()?;
        Ok(Self { _host: host, metrics })
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(self.metrics)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    /// What is answered, until the end; nothing where the daemon has hung up.
    fn says(&self, words: &str) -> Result<String> {
        let mut stream = self.connect()?;
        let (mut said, mut bytes) = (String::new(), [0; 4096]);
        let _ = stream.write_all(words.as_bytes());
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return Ok(said),
                Ok(count) => said += &String::from_utf8_lossy(&bytes[..count]),
                // What it did not read of a question makes the kernel say so.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(said),
                Err(error) => return Err(error).context("its answer"),
            }
        }
    }

    /// Metrics, however many others are there.
    fn scrape(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let said = self.says(&format!("{METRICS}\r\n"))?;
            if said.starts_with("HTTP/1.1 200 ") && said.contains("\n# TYPE dunlin_") {
                return Ok(());
            }
            ensure!(
                said.is_empty() && begun.elapsed() < PATIENCE,
                "no metrics: {said}"
            );
        }
    }
}

#[test]
fn a_body_of_any_size_is_read_by_nobody() -> Result<()> {
    let served = Served::start()?;
    for length in [
        "5000",
        "1099511627776",
        "18446744073709551615",
        "99999999999999999999",
    ] {
        let mut silent = served.connect()?;
        silent.write_all(format!("{METRICS}Content-Length: {length}\r\n\r\n").as_bytes())?;
        served
            .scrape()
            .with_context(|| format!("beside one of {length} bytes"))?;
    }
    for words in [
        "\r\n\r\n",
        "GET",
        "POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        "\0\u{ff}\r\n\r\n",
    ] {
        let said = served.says(words)?;
        ensure!(!said.starts_with("HTTP/1.1 200 "), "{words:?}: {said}");
        served.scrape()?;
    }
    Ok(())
}

#[test]
fn a_head_without_end_is_given_up() -> Result<()> {
    let served = Served::start()?;
    let mut endless = served.connect()?;
    let line = format!("X-Y: {}\r\n", "z".repeat(1000));
    endless.write_all(METRICS.as_bytes())?;
    let sent = (0..100_000)
        .take_while(|_| endless.write_all(line.as_bytes()).is_ok())
        .count();
    ensure!(sent < 100_000, "all of it was taken");
    served.scrape()
}

/// Two hundred of one address, and one of another that asks.
#[test]
fn who_only_connects_keeps_no_other_one_out() -> Result<()> {
    let served = Served::start()?;
    let idle: Vec<TcpStream> = (0..200)
        .filter_map(|_| callers::from(2, served.metrics).ok())
        .collect();
    for _ in 0..3 {
        served.scrape().context("beside those who say nothing")?;
    }
    // Who asks and is gone before the answer.
    for _ in 0..50 {
        let gone = callers::from(3, served.metrics)?;
        rustix::net::sockopt::set_socket_linger(&gone, Some(Duration::ZERO))?;
        (&gone).write_all(format!("{METRICS}\r\n").as_bytes())?;
    }
    drop(idle);
    served.scrape()
}

#[test]
fn an_address_that_this_machine_has_not_keeps_no_daemon_from_beginning() -> Result<()> {
    let mut host = Host::new()?;
    host.configure("page = \"off\"\nmetrics = \"192.0.2.1:9177\"\napi = \"192.0.2.1:7703\"")?;
    host.start()?;
    let said = host.say(daemon::ROOT, &["events"])?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    for what in ["metrics are not served yet", "the API is not served yet"] {
        ensure!(said.contains(what), "'{what}' is not said: {said}");
    }
    Ok(())
}
