//! Clients that move long streams both ways over connections that they keep: values into a redis, several under way at once, and all of
//! them back.
//!
//! * **Decides:** that each byte that comes back is the one that was sent, in its place, and that the streams' sha256 is the same.
//! * **Flow:** a worker: its connection -> SETs of [`VALUE_BYTES`] each, several under way -> GETs of all of them, as many under way -> again.
//! * **Invariants:** (1) a connection is never renewed: a reset, an early end or silence for too long ends its worker with an error that
//!   says how far it was. (2) a value is made of its worker, its round and its number: one of another place is told from the right one.
//!   (3) a connection stands still while its kernel gets nothing acknowledged and receives nothing: of a slow upload a client's own writes and reads may
//!   wait for long, with megabytes on their way.
//! * **Not here:** faults (the scenario).

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sha2::{Digest, Sha256};

use crate::testbed::Node;

/// Bytes of one value.
pub const VALUE_BYTES: usize = 1 << 20;
/// Questions ahead of the answers: the stream never waits for its other end's word.
const UNDER_WAY: usize = 4;
/// How long one read or write waits before the deadline and the kernel's figures are looked at.
const SLICE: Duration = Duration::from_millis(20);

/// What the workers saw.
#[derive(Clone, Debug, Default)]
pub struct StreamsReport {
    /// Bytes of values that went there, and came back, every one of them right.
    pub up_bytes: u64,
    /// The same back.
    pub down_bytes: u64,
    /// Time spent in that, over all workers.
    pub up: Duration,
    /// The same back.
    pub down: Duration,
    /// The longest that a connection stood still.
    pub longest: Duration,
}

/// What the workers do.
#[derive(Clone, Copy)]
pub struct StreamsSpec {
    /// The redis.
    pub target: SocketAddr,
    /// Connections at once.
    pub workers: usize,
    /// Of one stream.
    pub values: usize,
    /// The longest that a connection may stand still.
    pub give_up: Duration,
}

/// Workers at work.
pub struct Streams {
    stop: Arc<AtomicBool>,
    whole: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<Result<StreamsReport>>>>,
}

impl Streams {
    /// Starts the workers in `node`'s network. `rounds`: there and back so often, or until `finish`.
    pub fn start(node: &Node, spec: StreamsSpec, rounds: Option<u64>) -> Result<Self> {
        let (stop, whole) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = Vec::new();
        for number in 0..spec.workers {
            let (stop, whole) = (Arc::clone(&stop), Arc::clone(&whole));
            let rounds = rounds.unwrap_or(u64::MAX);
            let work = move || work(number, &spec, rounds, &stop, &whole);
            workers.push(node.spawn(&format!("stream-{number}"), work)?);
        }
        Ok(Self { stop, whole, workers })
    }

    /// Streams that came whole so far.
    pub fn whole(&self) -> u64 {
        self.whole.load(Ordering::Relaxed)
    }

    /// Waits until `more` further streams came whole.
    pub fn await_more(&self, more: u64, at_most: Duration) -> Result<()> {
        let (goal, deadline) = (self.whole() + more, Instant::now() + at_most);
        while self.whole() < goal {
            ensure!(
                Instant::now() < deadline && !self.workers.iter().any(JoinHandle::is_finished),
                "{} of {goal} streams came whole within {} s, or a client gave up",
                self.whole(),
                at_most.as_secs()
            );
            // A look is enough: nothing is measured here.
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Waits for the rounds that were asked for, or lets those end that have begun.
    pub fn finish(self) -> Result<StreamsReport> {
        self.stop.store(true, Ordering::Relaxed);
        let mut total = StreamsReport::default();
        let mut failures = Vec::new();
        for (number, worker) in self.workers.into_iter().enumerate() {
            match worker
                .join()
                .map_err(|_| anyhow!("a stream's thread panicked"))??
            {
                Ok(one) => {
                    total.up_bytes += one.up_bytes;
                    total.down_bytes += one.down_bytes;
                    total.up += one.up;
                    total.down += one.down;
                    total.longest = total.longest.max(one.longest);
                }
                Err(error) => failures.push(format!("client {number}: {error:#}")),
            }
        }
        ensure!(failures.is_empty(), "{}", failures.join("; "));
        Ok(total)
    }
}

fn work(
    number: usize,
    spec: &StreamsSpec,
    rounds: u64,
    stop: &AtomicBool,
    whole: &AtomicU64,
) -> Result<StreamsReport> {
    let mut report = StreamsReport::default();
    let mut stream = Stream::open(spec)?;
    let mut round = 0;
    let bytes = (spec.values * VALUE_BYTES) as u64;
    while round < rounds && (round == 0 || !stop.load(Ordering::Relaxed)) {
        let value = |place: usize| value(number as u64, round, place as u64);
        let (begun, set) = (Instant::now(), |place: usize| set(number, place, &value(place)));
        stream
            .go(spec.values, set, |_| b"+OK\r\n".to_vec())
            .with_context(|| format!("up, round {round}"))?;
        report.up += begun.elapsed();
        report.up_bytes += bytes;
        whole.fetch_add(1, Ordering::Relaxed);
        let begun = Instant::now();
        let came = stream
            .go(
                spec.values,
                |place| get(number, place),
                |place| bulk(&value(place)),
            )
            .with_context(|| format!("down, round {round}"))?;
        report.down += begun.elapsed();
        let mut sent = Sha256::new();
        (0..spec.values).for_each(|place| sent.update(bulk(&value(place))));
        ensure!(sent.finalize() == came, "down, round {round}: another sha256");
        report.down_bytes += bytes;
        whole.fetch_add(1, Ordering::Relaxed);
        report.longest = report.longest.max(stream.longest);
        round += 1;
    }
    Ok(report)
}

fn value(worker: u64, round: u64, place: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(VALUE_BYTES);
    for at in 0..VALUE_BYTES as u64 / 16 {
        let word = worker << 56 | round << 40 | place << 24 | at;
        bytes.extend_from_slice(format!("{word:016x}").as_bytes());
    }
    bytes
}

fn bulk(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

fn key(worker: usize, place: usize) -> Vec<u8> {
    bulk(format!("dunlin:stream:{worker}:{place}").as_bytes())
}

fn set(worker: usize, place: usize, value: &[u8]) -> Vec<u8> {
    [b"*3\r\n", &bulk(b"SET")[..], &key(worker, place), &bulk(value)].concat()
}

fn get(worker: usize, place: usize) -> Vec<u8> {
    [b"*2\r\n", &bulk(b"GET")[..], &key(worker, place)].concat()
}

/// One connection.
struct Stream {
    connection: TcpStream,
    give_up: Duration,
    moved: Instant,
    /// What its kernel had moved then.
    passed: [u64; 2],
    longest: Duration,
    /// Bytes since the connection's beginning.
    sent: u64,
    received: u64,
}

impl Stream {
    fn open(spec: &StreamsSpec) -> Result<Self> {
        let connection = TcpStream::connect_timeout(&spec.target, spec.give_up)
            .with_context(|| format!("connecting to {}", spec.target))?;
        connection.set_nodelay(true)?;
        connection.set_read_timeout(Some(SLICE))?;
        connection.set_write_timeout(Some(SLICE))?;
        Ok(Self {
            connection,
            give_up: spec.give_up,
            moved: Instant::now(),
            passed: [0; 2],
            longest: Duration::ZERO,
            sent: 0,
            received: 0,
        })
    }

    /// Asks so many times, with some questions ahead of the answers; the answers' sha256.
    fn go(
        &mut self,
        count: usize,
        question: impl Fn(usize) -> Vec<u8>,
        answer: impl Fn(usize) -> Vec<u8>,
    ) -> Result<sha2::digest::Output<Sha256>> {
        let mut hash = Sha256::new();
        self.moved = Instant::now();
        for place in 0..count + UNDER_WAY {
            if place < count {
                self.send(&question(place))
                    .with_context(|| format!("question {place}"))?;
            }
            if let Some(place) = place.checked_sub(UNDER_WAY).filter(|place| *place < count) {
                self.receive(&answer(place), &mut hash)
                    .with_context(|| format!("answer {place}"))?;
            }
        }
        Ok(hash.finalize())
    }

    /// Something moved, or did not; how much.
    fn moves(&mut self, moved: std::io::Result<usize>) -> Result<usize> {
        let (sent, received) = (self.sent, self.received);
        let far = || format!("after {sent} bytes sent and {received} received");
        let passed = passed(&self.connection)?;
        let stood = self.moved.elapsed();
        self.longest = self.longest.max(stood);
        // Invariant 3.
        if std::mem::replace(&mut self.passed, passed) != passed {
            self.moved = Instant::now();
        }
        match moved {
            Ok(0) => bail!("the connection ended {}", far()),
            Ok(count) => Ok(count),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                ensure!(stood < self.give_up, "nothing moved for {stood:?} {}", far());
                Ok(0)
            }
            Err(error) => Err(error).with_context(far),
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let wrote = self.connection.write(bytes);
            let count = self.moves(wrote)?;
            self.sent += count as u64;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    fn receive(&mut self, expected: &[u8], hash: &mut Sha256) -> Result<()> {
        let mut chunk = vec![0; 64 << 10];
        let mut at = 0;
        while at < expected.len() {
            let most = chunk.len().min(expected.len() - at);
            let read = self.connection.read(&mut chunk[..most]);
            let count = self.moves(read)?;
            let (came, due) = (&chunk[..count], &expected[at..at + count]);
            if let Some(wrong) = came.iter().zip(due).position(|(came, due)| came != due) {
                let to = (wrong + 32).min(count);
                bail!(
                    "byte {} of the connection is wrong: {:?} came, and {:?} was due",
                    self.received + wrong as u64,
                    String::from_utf8_lossy(&came[wrong..to]),
                    String::from_utf8_lossy(&due[wrong..to])
                );
            }
            hash.update(came);
            at += count;
            self.received += count as u64;
        }
        Ok(())
    }
}

/// Bytes that the other end has acknowledged, and that have come from it.
fn passed(connection: &TcpStream) -> Result<[u64; 2]> {
    // SAFETY: numbers, for which zero is a value; an older kernel fills the beginning.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` lives through the call and is `length` bytes long.
    let got = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    ensure!(got == 0, "TCP_INFO: {}", std::io::Error::last_os_error());
    Ok([info.tcpi_bytes_acked, info.tcpi_bytes_received])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_full_and_differ_by_worker_round_and_place() {
        let values = [value(0, 0, 0), value(1, 0, 0), value(0, 1, 0), value(0, 0, 1)];
        assert!(values.iter().all(|value| value.len() == VALUE_BYTES));
        for (n, one) in values.iter().enumerate() {
            for other in &values[n + 1..] {
                assert!(one.chunks(16).zip(other.chunks(16)).all(|(a, b)| a != b));
            }
        }
        assert_eq!(get(2, 3), b"*2\r\n$3\r\nGET\r\n$17\r\ndunlin:stream:2:3\r\n");
    }
}
