//! Bulk: files that are fetched from nginx, and values that redis is given. What is counted is MiB; a latency is that of a whole transfer, to its last
//! byte or to the answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sha2::{Digest, Sha256};

use super::super::case::{Bulk, Way};
use super::{Clients, Measured, too_slow};

const MIB: f64 = (1 << 20) as f64;
/// A transfer that takes longer costs its window: over a link that loses frames a slow policy would take hours.
const LONGEST: Duration = Duration::from_secs(120);
/// So much is written or read before the time is looked at.
const PIECE_BYTES: usize = 1 << 18;

/// The load: each connection transfers one after the other, and the last one to its end.
pub fn run(clients: &Clients<'_>, bulk: Bulk, connections: u32, seconds: f64) -> Result<Measured> {
    let target = clients.target();
    let mut workers = Vec::new();
    for number in 0..connections {
        let work = move || match bulk.way {
            Way::Down => repeat(target, bulk, seconds, &mut Down::default()),
            Way::Up => repeat(target, bulk, seconds, &mut Up::new(number, bulk.bytes)),
        };
        workers.push(clients.node.spawn(&format!("bulk-{number}"), work)?);
    }
    let (mut latencies_us, mut per_second) = (Vec::new(), 0.0);
    let mut failure = None;
    for worker in workers {
        let done = worker.join().map_err(|_| anyhow!("a bulk client panicked"));
        match done.and_then(|result| result?) {
            Ok((latencies, rate)) => {
                latencies_us.extend(latencies);
                per_second += rate;
            }
            Err(error) => failure = Some(error),
        }
    }
    if let Some(error) = failure {
        return Err(error.context("bulk client"));
    }
    let transfers = latencies_us.len();
    // A slow policy ends less than half of a MiB in a window; what a MiB cost is told as if it were one.
    let mib = ((transfers as f64 * bulk.bytes as f64 / MIB).round() as u64).max(1);
    let measured = Measured::from_latencies(&mut latencies_us, seconds)?;
    Ok(Measured {
        requests: mib,
        in_all: mib,
        per_second,
        ..measured
    })
}

/// One connection's transfers: how long each took, in microseconds, and MiB a second.
fn repeat(
    target: SocketAddr,
    bulk: Bulk,
    seconds: f64,
    transfer: &mut impl Transfer,
) -> Result<(Vec<u64>, f64)> {
    let begun = Instant::now();
    let mut latencies_us = Vec::new();
    let mut connection = None;
    while begun.elapsed().as_secs_f64() < seconds {
        let began = Instant::now();
        let mut stream = match connection.take() {
            Some(stream) => stream,
            None => connect(target)?,
        };
        transfer.once(&mut stream, bulk, began + LONGEST)?;
        latencies_us.push(u64::try_from(began.elapsed().as_micros())?);
        if bulk.keeps_connections {
            connection = Some(stream);
        }
    }
    let mib = latencies_us.len() as f64 * bulk.bytes as f64 / MIB;
    Ok((latencies_us, mib / begun.elapsed().as_secs_f64()))
}

fn connect(target: SocketAddr) -> Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect_timeout(&target, Duration::from_secs(10))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    stream.set_write_timeout(Some(Duration::from_secs(60)))?;
    Ok(BufReader::with_capacity(1 << 18, stream))
}

fn in_time(until: Instant) -> Result<()> {
    match Instant::now() < until {
        true => Ok(()),
        false => Err(too_slow(format!(
            "a transfer takes longer than {} s",
            LONGEST.as_secs()
        ))),
    }
}

trait Transfer {
    fn once(&mut self, stream: &mut BufReader<TcpStream>, bulk: Bulk, until: Instant) -> Result<()>;
}

/// Files of nginx's.
#[derive(Default)]
struct Down {
    body: Vec<u8>,
    first: Option<[u8; 32]>,
    checked: u64,
}

impl Transfer for Down {
    fn once(&mut self, stream: &mut BufReader<TcpStream>, bulk: Bulk, until: Instant) -> Result<()> {
        let question = format!("GET /bulk/{} HTTP/1.1\r\nHost: guest\r\n\r\n", bulk.bytes);
        stream.get_mut().write_all(question.as_bytes())?;
        let mut length = None;
        let mut line = String::new();
        for number in 0.. {
            line.clear();
            stream.read_line(&mut line)?;
            ensure!(
                number > 0 || line.contains(" 200 "),
                "nginx says '{}'",
                line.trim()
            );
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = Some(value.trim().parse::<usize>()?);
            }
            if line.trim().is_empty() {
                break;
            }
        }
        ensure!(length == Some(bulk.bytes), "a file of {length:?} bytes");
        self.body.resize(bulk.bytes, 0);
        for piece in self.body.chunks_mut(PIECE_BYTES) {
            stream.read_exact(piece)?;
            in_time(until)?;
        }
        // A hash of each would be what is measured: of the first ones, and of every hundredth.
        self.checked += 1;
        if self.checked <= 2 || self.checked.is_multiple_of(100) {
            let hash: [u8; 32] = Sha256::digest(&self.body).into();
            ensure!(
                *self.first.get_or_insert(hash) == hash,
                "a file came with other bytes than before"
            );
        }
        Ok(())
    }
}

/// Values for redis.
struct Up {
    command: Vec<u8>,
}

impl Up {
    fn new(number: u32, bytes: usize) -> Self {
        let key = format!("bulk:{number}");
        let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${bytes}\r\n", key.len());
        let value = (0..bytes).map(|at| (at * 7 + at / 251) as u8);
        let command = head
            .into_bytes()
            .into_iter()
            .chain(value)
            .chain(*b"\r\n")
            .collect();
        Self { command }
    }
}

impl Transfer for Up {
    fn once(&mut self, stream: &mut BufReader<TcpStream>, _bulk: Bulk, until: Instant) -> Result<()> {
        for piece in self.command.chunks(PIECE_BYTES) {
            stream.get_mut().write_all(piece)?;
            in_time(until)?;
        }
        let mut line = String::new();
        stream.read_line(&mut line).context("redis does not answer")?;
        match line.trim_end() {
            "+OK" => Ok(()),
            other => bail!("redis says '{other}'"),
        }
    }
}
