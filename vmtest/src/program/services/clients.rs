//! Clients of servers that are no redis: each keeps its one connection, and checks every answer.
//!
//! * **Decides:** what an answer has to be: anything else is a promise that was broken.
//! * **Flow:** a thread for each client -> one connection -> question after question, until all are told to stop.
//! * **Invariants:** (1) a connection is never renewed; (2) a client stops between two questions, so what was asked was answered.
//! * **Source:** memcached's protocol.txt; RFC 9112. **Not here:** redis' protocol ([`crate::client::Counter`]); what is in a database at last (`ledger`).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::client::{Answer, Connection};
use crate::program::PATIENCE;
use crate::testbed::Node;

/// What a server of files has to show: files of these many bytes.
pub(super) const FILES: [usize; 4] = [1, 700, 5_000, 60_000];

/// Asks the `turn`th question, and checks its answer.
pub(in crate::program) type Ask = Box<dyn FnMut(u64) -> Result<()>>;
/// Connects a client, by its number.
pub(in crate::program) type Open = fn(target: SocketAddr, client: usize) -> Result<Ask>;

/// Workers, each with one connection that is never renewed.
pub(in crate::program) struct Others {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<Result<u64>>>>,
}

impl Others {
    pub(in crate::program) fn start(
        node: &Node,
        target: SocketAddr,
        clients: usize,
        open: impl Fn(SocketAddr, usize) -> Result<Ask> + Clone + Send + 'static,
    ) -> Result<Self> {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = Vec::new();
        for client in 0..clients {
            let (stop, done, open) = (Arc::clone(&stop), Arc::clone(&done), open.clone());
            let work = move || -> Result<u64> {
                let mut ask = open(target, client).with_context(|| format!("client {client}"))?;
                let mut turn = 0;
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    ask(turn).with_context(|| format!("client {client}, question {turn}"))?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(turn)
            };
            workers.push(node.spawn(&format!("service-{client}"), work)?);
        }
        Ok(Self { stop, done, workers })
    }

    /// Questions of all clients that were answered.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub(in crate::program) fn await_more(&self, more: u64) -> Result<()> {
        let done = || self.done();
        let (goal, until) = (done() + more, Instant::now() + PATIENCE);
        while done() < goal {
            let gone = self.workers.iter().filter(|worker| worker.is_finished()).count();
            ensure!(
                gone == 0,
                "{gone} clients gave up; they say why at the end of the run"
            );
            ensure!(
                Instant::now() < until,
                "{} of {goal} answers within {} s",
                done(),
                PATIENCE.as_secs()
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    }

    /// How many questions of each were answered.
    pub(in crate::program) fn finish(mut self) -> Result<Vec<u64>> {
        self.stop.store(true, Ordering::Relaxed);
        let joined = self.workers.drain(..).map(JoinHandle::join);
        joined
            .map(|worker| worker.map_err(|_| anyhow!("a client panicked"))??)
            .collect()
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for worker in self.workers.drain(..).filter(JoinHandle::is_finished) {
            if let Ok(Ok(Err(error)) | Err(error)) = worker.join() {
                eprintln!("program-services: {error:#}");
            }
        }
    }
}

type Stream = BufReader<TcpStream>;

fn connect(target: SocketAddr) -> Result<Stream> {
    let stream = TcpStream::connect_timeout(&target, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(BufReader::new(stream))
}

fn line(stream: &mut Stream) -> Result<String> {
    let mut line = String::new();
    ensure!(stream.read_line(&mut line)? > 0, "the connection is closed");
    Ok(line.trim_end().to_owned())
}

/// memcached's `incr` of the client's own key: each answer is the last one plus one, or something is lost or doubled.
pub(in crate::program) fn counts(target: SocketAddr, client: usize) -> Result<Ask> {
    let mut stream = connect(target)?;
    stream
        .get_mut()
        .write_all(format!("set key{client} 0 0 1\r\n0\r\n").as_bytes())?;
    let said = line(&mut stream)?;
    ensure!(said == "STORED", "{said}");
    Ok(Box::new(move |turn| {
        stream
            .get_mut()
            .write_all(format!("incr key{client} 1\r\n").as_bytes())?;
        let said = line(&mut stream)?;
        ensure!(said == turn.to_string(), "{said} instead of {turn}");
        Ok(())
    }))
}

/// A file, whole and byte by byte.
pub(in crate::program) fn fetches(target: SocketAddr, client: usize) -> Result<Ask> {
    let mut stream = connect(target)?;
    Ok(Box::new(move |turn| {
        let number = (client + turn as usize) % FILES.len();
        let bytes = get(&mut stream, &format!("/{number}"), "")?;
        ensure!(
            bytes == body(number, FILES[number]),
            "file {number} came otherwise"
        );
        Ok(())
    }))
}

/// One small file again and again.
pub(in crate::program) fn fetches_one(target: SocketAddr, _: usize) -> Result<Ask> {
    const NUMBER: usize = 1;
    let mut stream = connect(target)?;
    let wanted = body(NUMBER, FILES[NUMBER]);
    Ok(Box::new(move |_| {
        let bytes = get(&mut stream, &format!("/{NUMBER}"), "")?;
        ensure!(bytes == wanted, "file {NUMBER} came otherwise");
        Ok(())
    }))
}

/// redis' INCR of the client's own key.
pub(in crate::program) fn increments(target: SocketAddr, client: usize) -> Result<Ask> {
    let mut connection = Connection::open(target, PATIENCE)?;
    let key = format!("bench{client}");
    let mut last = None;
    Ok(Box::new(move |_| {
        let said = connection.ask(&["INCR", &key], PATIENCE)?;
        let Answer::Integer(value) = said else {
            bail!("{said:?}");
        };
        ensure!(
            last.is_none_or(|last: i64| value == last + 1),
            "{value} after {last:?}"
        );
        last = Some(value);
        Ok(())
    }))
}

/// A page that counts in its session's file, each client in a session of its own, and computes something of that.
pub(in crate::program) fn asks_pages(target: SocketAddr, _: usize) -> Result<Ask> {
    static SESSIONS: AtomicU64 = AtomicU64::new(0);
    let mut stream = connect(target)?;
    let number = SESSIONS.fetch_add(1, Ordering::Relaxed);
    Ok(Box::new(move |turn| {
        let session = format!("Cookie: PHPSESSID=session{number}\r\n");
        let page = get(&mut stream, "/count.php", &session)?;
        let page = String::from_utf8_lossy(&page).into_owned();
        let wanted = format!("{turn} {}\n", computed(turn));
        ensure!(page == wanted, "{page:?} instead of {wanted:?}");
        Ok(())
    }))
}

/// As the page does (`image/roots/php/count.php`).
fn computed(turn: u64) -> u64 {
    (1..=1000).fold(turn, |sum, n| (sum * 31 + n * n) % 1_000_003)
}

/// What a file has in it.
pub(super) fn body(number: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| b'a' + ((at * 7 + number) % 26) as u8)
        .collect()
}

fn get(stream: &mut Stream, path: &str, headers: &str) -> Result<Vec<u8>> {
    stream
        .get_mut()
        .write_all(format!("GET {path} HTTP/1.1\r\nHost: testbed\r\n{headers}\r\n").as_bytes())?;
    let status = line(stream)?;
    ensure!(status == "HTTP/1.1 200 OK", "{status}");
    let mut length = None;
    loop {
        let header = line(stream)?;
        if header.is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = Some(value.trim().parse::<usize>()?);
        }
    }
    let mut bytes = vec![0; length.context("an answer without its length")?];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
