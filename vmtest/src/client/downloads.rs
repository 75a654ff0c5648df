//! Clients that fetch a file again and again, each time over a new connection, and look at every byte of it.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use serde::Serialize;

use super::Boots;
use crate::testbed::Node;

/// How long one read waits before the deadline is looked at.
const SLICE: Duration = Duration::from_millis(200);
/// Between two downloads: a client that reads takes its time, and the machine has other things to do.
const REST: Duration = Duration::from_millis(50);
/// The file, and how many numbers are in it, a line each.
const PATH: &str = "/numbers";
const NUMBERS: u32 = 40_000;

/// What they saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DownloadsReport {
    /// Files that came whole, every byte right.
    pub whole: u64,
    /// Files with a byte that was not the server's.
    pub wrong: u64,
    /// Connections that were refused, or ended before the file did.
    pub resets: u64,
    /// Clients that heard nothing for too long.
    pub stuck: u64,
    /// The longest download, in microseconds.
    pub longest_us: u64,
}

impl DownloadsReport {
    /// Whether each promise was kept.
    pub fn is_clean(&self) -> bool {
        self.wrong + self.resets + self.stuck == 0 && self.whole > 0
    }
}

/// Clients at work.
pub struct Downloads {
    stop: Arc<AtomicBool>,
    whole: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<DownloadsReport>>>,
}

impl Downloads {
    /// Starts the clients in `node`'s network.
    pub fn start(
        node: &Node,
        target: SocketAddr,
        clients: usize,
        give_up: Duration,
        boots: &Boots,
    ) -> Result<Self> {
        let (stop, whole) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = Vec::new();
        for number in 0..clients {
            let (stop, whole, boots) = (Arc::clone(&stop), Arc::clone(&whole), boots.clone());
            workers.push(node.spawn(&format!("download-{number}"), move || {
                work(target, give_up, &boots, &stop, &whole)
            })?);
        }
        Ok(Self { stop, whole, workers })
    }

    /// Files that came whole so far.
    pub fn whole(&self) -> u64 {
        self.whole.load(Ordering::Relaxed)
    }

    /// Waits until `more` further files came whole.
    pub fn await_more(&self, more: u64, at_most: Duration) -> Result<()> {
        let (goal, deadline) = (self.whole() + more, Instant::now() + at_most);
        while self.whole() < goal {
            if Instant::now() > deadline {
                bail!(
                    "clients got {} of {goal} files within {} s",
                    self.whole(),
                    at_most.as_secs()
                );
            }
            // A look is enough: nothing is measured here.
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the load and returns what was seen.
    pub fn finish(self) -> Result<DownloadsReport> {
        self.stop.store(true, Ordering::Relaxed);
        let mut total = DownloadsReport::default();
        for worker in self.workers {
            let report = worker.join().map_err(|_| anyhow!("a download panicked"))??;
            total.whole += report.whole;
            total.wrong += report.wrong;
            total.resets += report.resets;
            total.stuck += report.stuck;
            total.longest_us = total.longest_us.max(report.longest_us);
        }
        Ok(total)
    }
}

fn work(
    target: SocketAddr,
    give_up: Duration,
    boots: &Boots,
    stop: &AtomicBool,
    whole: &AtomicU64,
) -> DownloadsReport {
    let expected = numbers();
    let mut report = DownloadsReport::default();
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        match fetch(target, begun + give_up, give_up, boots) {
            Ok(body) if body == expected => {
                report.whole += 1;
                whole.fetch_add(1, Ordering::Relaxed);
                let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
                report.longest_us = report.longest_us.max(took_us);
            }
            Ok(body) if expected.starts_with(&body) => {
                report.resets += u64::from(!boots.excuse(begun));
            }
            Ok(_) => report.wrong += 1,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                report.stuck += 1;
                return report;
            }
            Err(_) => report.resets += u64::from(!boots.excuse(begun)),
        }
        std::thread::sleep(REST);
    }
    report
}

/// What the file must be.
fn numbers() -> Vec<u8> {
    let mut text = String::new();
    for number in 1..=NUMBERS {
        text.push_str(&number.to_string());
        text.push('\n');
    }
    text.into_bytes()
}

fn fetch(
    target: SocketAddr,
    deadline: Instant,
    give_up: Duration,
    boots: &Boots,
) -> std::io::Result<Vec<u8>> {
    let mut stream = boots.connect(give_up, |timeout| {
        let open = TcpStream::connect_timeout(&target, timeout)?;
        boots.watch(&open)?;
        Ok(open)
    })?;
    stream.set_read_timeout(Some(SLICE))?;
    stream.write_all(
        format!("GET {PATH} HTTP/1.1\r\nHost: guest\r\nAccept: */*\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = Vec::new();
    let mut chunk = [0; 16_384];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&chunk[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if Instant::now() >= deadline {
                    return Err(ErrorKind::TimedOut.into());
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    body_of(answer)
}

fn body_of(mut answer: Vec<u8>) -> std::io::Result<Vec<u8>> {
    let invalid = |what: &str| std::io::Error::new(ErrorKind::InvalidData, what.to_owned());
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.ok_or_else(|| invalid("no whole HTTP answer"))?;
    if !answer.starts_with(b"HTTP/1.1 200 ") {
        return Err(invalid("another status than 200"));
    }
    Ok(answer.split_off(end + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_cut_off_is_none_and_one_with_a_wrong_byte_is_not_right() {
        let expected = numbers();
        assert!(
            expected.len() > 200_000 && expected.starts_with(b"1\n2\n") && expected.ends_with(b"40000\n")
        );
        let answer = [b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n", &expected[..]].concat();
        assert_eq!(body_of(answer).unwrap(), expected);
        assert!(body_of(b"HTTP/1.1 502 Bad Gateway\r\n\r\n1\n2\n".to_vec()).is_err());
        assert!(body_of(b"HTTP/1.1 200 OK\r\nSer".to_vec()).is_err());
        let clean = DownloadsReport {
            whole: 1,
            ..DownloadsReport::default()
        };
        assert!(clean.is_clean() && !DownloadsReport::default().is_clean());
        assert!(!DownloadsReport { wrong: 1, ..clean }.is_clean());
    }
}
