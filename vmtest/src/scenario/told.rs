//! What a daemon tells others by itself: metrics to whoever asks, events to `notify_url`, and the newest events to a person.
//!
//! * **Decides:** whether it comes, and that Prometheus' own checker finds nothing to mend in a real daemon's metrics: which there are, and what a receiver
//!   that fails does, are the executable's own tests.
//! * **Flow:** [`Told::prepare`] writes both addresses into a host's file, and listens -> its daemon is started -> [`Told::look`].

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cluster::{Cluster, scrape};
use crate::paths;

const EVENTS: u16 = 9178;
const BOUND: Duration = Duration::from_secs(60);

/// Whoever listens for a host's events.
pub struct Told {
    events: mpsc::Receiver<String>,
    metrics: SocketAddr,
    listens: JoinHandle<Result<Result<()>>>,
}

impl Told {
    /// The host is to be started after this. The first answer that its events get is that they come too early.
    pub fn prepare(cluster: &Cluster<'_>, host: &str) -> Result<Self> {
        let testbed = cluster.testbed();
        let client = testbed.node("client").address();
        let metrics = cluster.serve_metrics(host)?;
        let file = cluster.host_file(host);
        let text = fs::read_to_string(&file)?;
        fs::write(
            &file,
            format!("notify_url = \"http://{client}:{EVENTS}/hook\"\n{text}"),
        )?;
        let (tell, events) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let listens = testbed.node("client").spawn("receiver", move || {
            let listener = TcpListener::bind(SocketAddr::new(client.into(), EVENTS))?;
            let _ = ready.send(());
            for number in 0..2 {
                let (mut tcp, _) = listener.accept()?;
                tcp.set_read_timeout(Some(BOUND))?;
                let body = request(&tcp)?;
                let status = if number == 0 {
                    "503 Service Unavailable"
                } else {
                    "200 OK"
                };
                write!(
                    tcp,
                    "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )?;
                // Whoever waits may have given up.
                let _ = tell.send(body);
            }
            Ok(())
        })?;
        is_ready
            .recv_timeout(BOUND)
            .context("nobody listens for events")?;
        Ok(Self {
            events,
            metrics,
            listens,
        })
    }

    /// The daemon of `host` runs; `other` asks it for metrics.
    pub fn look(self, cluster: &Cluster<'_>, host: &str, other: &str) -> Result<()> {
        for time in ["first", "second"] {
            let event = self
                .events
                .recv_timeout(BOUND)
                .with_context(|| format!("no event comes a {time} time"))?;
            ensure!(
                event.contains("\"kind\":\"host-begins\""),
                "the {time} event is {event}"
            );
        }
        self.listens
            .join()
            .map_err(|_| anyhow::anyhow!("the receiver panicked"))???;
        let testbed = cluster.testbed();
        let address = self.metrics;
        let asks = testbed
            .node(other)
            .spawn("scraper", move || scrape(address, BOUND))?;
        let (head, page) = asks
            .join()
            .map_err(|_| anyhow::anyhow!("the scraper panicked"))???;
        for words in [
            "text/plain; version=0.0.4",
            "# TYPE dunlin_notifications_sent_total counter",
            "dunlin_build_info{",
        ] {
            ensure!(
                head.contains(words) || page.contains(words),
                "no '{words}' in {head}{page}"
            );
        }
        check(&page)?;
        for (since, expected) in [
            ("1h", true),
            ("2000-01-01 00:00:00", true),
            ("2100-01-01 00:00:00", false),
        ] {
            let said = cluster.dunlin(host, &["events", "--json", "--since", since])?;
            ensure!(
                said.contains("host-begins") == expected,
                "events --since {since}: {said}"
            );
        }
        Ok(())
    }
}

/// Prometheus' own checker has nothing to say of a page of metrics.
fn check(metrics: &str) -> Result<()> {
    let mut promtool = Command::new(paths::promtool())
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("promtool is not here: 'cargo xtask setup' fetches it")?;
    // It reads all before it says anything, and what it says is less than a pipe holds.
    let given = promtool
        .stdin
        .take()
        .context("its input")?
        .write_all(metrics.as_bytes());
    let output = promtool.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    ensure!(
        given.is_ok() && output.status.success() && said.trim().is_empty(),
        "promtool check metrics, {}: {said}",
        output.status
    );
    Ok(())
}

/// The body of one request.
fn request(tcp: &TcpStream) -> Result<String> {
    let mut reader = BufReader::new(tcp);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim().to_ascii_lowercase();
        if let Some(bytes) = line.strip_prefix("content-length:") {
            length = bytes.trim().parse()?;
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(String::from_utf8(body)?)
}
