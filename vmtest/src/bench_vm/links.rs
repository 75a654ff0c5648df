//! What a link carries by itself: one TCP connection between a client and a host, without a VM. Nothing that is measured over a link says more than this.
//!
//! * **Decides:** nothing. **Flow:** for each link a shaped cable -> bytes each way for some seconds, single bytes there and back -> a table.
//! * **Invariants:** both ends are plain sockets of the kernels' usual TCP; a link that lost frames for want of room ends the run.
//! * **Not here:** VMs ([`super::windows`]).

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};

use super::link::Link;
use super::machine::Machine;
use super::report::median_of;
use crate::testbed::{Counts, Node, Testbed, TestbedSpec};

/// Nothing takes longer: not even a byte that is lost several times.
const PATIENCE: Duration = Duration::from_secs(60);
const PIECE_BYTES: usize = 256 << 10;
const ROUND_TRIPS: usize = 101;

/// One link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LinkRow {
    /// By its word.
    pub link: String,
    /// MiB a second from host to client, slow start included.
    pub down_mib: f64,
    /// And from client to host.
    pub up_mib: f64,
    /// A byte there and back.
    pub round_trip_ms: f64,
    /// Frames as a wire would carry them; none is counted on a plain cable.
    pub frames: u64,
    /// Of them lost by chance.
    pub lost: u64,
}

/// All of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LinksReport {
    /// Where it was measured.
    pub on: Machine,
    /// In the order in which they were asked for.
    pub rows: Vec<LinkRow>,
}

/// Measures each link for about so long in each direction.
///
/// # Errors
/// When a connection breaks, or a link loses what it was not asked to lose.
pub fn run(links: &[Link], seconds: f64, seed: u64, say: &mut dyn FnMut(&str)) -> Result<LinksReport> {
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let mut rows = Vec::new();
    for &link in links {
        let shaper = link
            .shape(seed)
            .map(|shape| testbed.shape("client", shape))
            .transpose()?;
        let [down_mib, up_mib, round_trip_ms] =
            over(&testbed, seconds).with_context(|| format!("over {link}"))?;
        let counts = shaper.map_or(Ok(Counts::default()), |shaper| shaper.finish())?;
        ensure!(
            counts.crowded_out == 0,
            "{link} lost {} frames for want of room",
            counts.crowded_out
        );
        let row = LinkRow {
            link: link.to_string(),
            down_mib,
            up_mib,
            round_trip_ms,
            frames: counts.came,
            lost: counts.lost,
        };
        say(&line(&row));
        rows.push(row);
    }
    testbed.close()?;
    Ok(LinksReport {
        on: Machine {
            seconds,
            ..Machine::here()
        },
        rows,
    })
}

/// The report as text.
pub fn links_table(report: &LinksReport) -> String {
    let mut text = format!(
        "One TCP connection between a client and a host, no VM; {} cores of {}\n{:12} {:>10} {:>10} {:>14} {:>10} {:>8}\n",
        report.on.cores,
        report.on.processor,
        "link",
        "MiB/s down",
        "MiB/s up",
        "round trip, ms",
        "frames",
        "lost"
    );
    for row in &report.rows {
        let _ = writeln!(text, "{}", line(row));
    }
    text
}

fn line(row: &LinkRow) -> String {
    format!(
        "{:12} {:>10.0} {:>10.0} {:>14.3} {:>10} {:>8}",
        row.link, row.down_mib, row.up_mib, row.round_trip_ms, row.frames, row.lost
    )
}

/// Down and up in MiB a second, and a round trip in ms.
fn over(testbed: &Testbed, seconds: f64) -> Result<[f64; 3]> {
    let (host, client) = (testbed.node("a"), testbed.node("client"));
    let down = between(host, client, send_for(seconds), receive)?;
    let up = between(host, client, receive, send_for(seconds))?;
    let round_trip = between(host, client, echo, round_trips)?;
    Ok([down.1, up.0, round_trip.1])
}

/// A connection of the client's to the host, and what either end says of it.
fn between(
    host: &Node,
    client: &Node,
    at_host: impl FnOnce(TcpStream) -> Result<f64> + Send + 'static,
    at_client: impl FnOnce(TcpStream) -> Result<f64> + Send + 'static,
) -> Result<(f64, f64)> {
    let address: Ipv4Addr = host.address();
    let (tell, told) = std::sync::mpsc::channel();
    let serving = host.spawn("link-host", move || -> Result<f64> {
        let listener = TcpListener::bind((address, 0))?;
        let _ = tell.send(listener.local_addr()?);
        let (stream, _) = listener.accept()?;
        at_host(with_patience(stream)?)
    })?;
    let target: SocketAddr = told.recv_timeout(PATIENCE).context("the host does not listen")?;
    let asking = client.spawn("link-client", move || -> Result<f64> {
        at_client(with_patience(TcpStream::connect_timeout(&target, PATIENCE)?)?)
    })?;
    let asked = asking.join().map_err(|_| anyhow!("a client panicked"))???;
    let served = serving.join().map_err(|_| anyhow!("a host panicked"))???;
    Ok((served, asked))
}

fn with_patience(stream: TcpStream) -> Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn send_for(seconds: f64) -> impl FnOnce(TcpStream) -> Result<f64> {
    move |mut stream| {
        let (begun, piece) = (Instant::now(), vec![0x5a; PIECE_BYTES]);
        while begun.elapsed().as_secs_f64() < seconds {
            stream.write_all(&piece)?;
        }
        Ok(0.0)
    }
}

fn receive(mut stream: TcpStream) -> Result<f64> {
    let (begun, mut piece, mut bytes) = (Instant::now(), vec![0; PIECE_BYTES], 0);
    loop {
        match stream.read(&mut piece)? {
            0 => return Ok(bytes as f64 / f64::from(1 << 20) / begun.elapsed().as_secs_f64()),
            some => bytes += some,
        }
    }
}

fn echo(mut stream: TcpStream) -> Result<f64> {
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(0.0)
}

fn round_trips(mut stream: TcpStream) -> Result<f64> {
    let mut took_ms = Vec::new();
    for _ in 0..ROUND_TRIPS {
        let begun = Instant::now();
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        took_ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median_of(took_ms))
}
