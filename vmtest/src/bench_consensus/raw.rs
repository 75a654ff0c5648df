//! What it decides: nothing. What the fabric and the disk cost without any agreement: the yardsticks.
//!
//! * **Flow:** three processes; the leader writes a payload one-sidedly to both followers, each writes 8 bytes back, the
//!   leader goes on when the first has answered (as a majority would). The same transports and wait policies as `Group`'s.
//!   Twice: bare (the last word of the payload counts up, nothing is checked), and checked (a ring record out, a cumulative word
//!   back, each believed only with its checksum): what any fabric must do whose writes may tear.
//! * **Not here:** terms, logs.

use super::child::{Config, Links, Part, Scratch, figure, say, spawn, write_keys};
use super::{Durability, Fabric, Figure, Series, Wait};
use anyhow::{Context, Result, bail};
use dunlin_fabric::transport::ring::{Found, Place, RingReader, RingWriter, Sent};
use dunlin_fabric::transport::word::{SLOT_BYTES, WordReader, WordWriter};
use dunlin_fabric::transport::{self, RegionId, Transport, TransportError};
use dunlin_fabric::wait::Idle;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const R: RegionId = RegionId(0);
const REGION_BYTES: usize = 1 << 16;
pub(super) const PAYLOADS: [usize; 3] = [64, 1024, 16384];

fn config(dir: &std::path::Path, me: u8, fabric: Fabric, wait: Wait, part: Part) -> Config {
    Config {
        me,
        dir: dir.to_owned(),
        fabric,
        durability: Durability::Memory,
        wait,
        part,
    }
}

/// Reads the figures that a child prints, until it ends.
pub(super) fn figures(running: &mut super::child::Running, expected: usize) -> Result<Vec<Figure>> {
    let out = running.0.stdout.take().context("the child's output")?;
    let lines = BufReader::new(out).lines();
    let figures: Vec<Figure> = lines
        .map(|line| Ok(serde_json::from_str(&line?)?))
        .collect::<Result<_>>()?;
    if figures.len() != expected {
        bail!("{} of {expected} figures, then it ended", figures.len());
    }
    Ok(figures)
}

pub(super) fn ping_pong(
    scratch: &Scratch,
    fabric: Fabric,
    wait: Wait,
    seconds: f64,
    checked: bool,
) -> Result<Series> {
    let dir = scratch.sub("pingpong")?;
    write_keys(&dir)?;
    let start = |me| {
        spawn(&config(
            &dir,
            me,
            fabric,
            wait,
            Part::PingPong { seconds, checked },
        ))
    };
    let _followers = [start(1)?, start(2)?];
    let figures = figures(&mut start(0)?, PAYLOADS.len())?;
    let name = serde_json::to_value(fabric)?;
    let kind = if checked { "checked" } else { "raw" };
    let what = format!("{kind} ping-pong {}", name.as_str().unwrap_or("?"));
    Ok(Series {
        what,
        wait: wait.policy().to_string(),
        figures,
    })
}

/// Waits until `ready` by the policy.
fn wait_until(
    links: &mut [Box<dyn Transport>],
    wait: Wait,
    mut ready: impl FnMut(&[Box<dyn Transport>]) -> bool,
) -> Result<()> {
    let mut idle = 0;
    loop {
        for link in links.iter_mut() {
            link.progress(1 << 20)?;
        }
        if ready(links) {
            return Ok(());
        }
        match wait.policy().after(idle) {
            Idle::Spin => std::hint::spin_loop(),
            Idle::Yield => std::thread::yield_now(),
            Idle::Block => {
                for link in links.iter_mut() {
                    link.arm()?;
                }
                if !ready(links) {
                    sleep_on(links)?;
                }
                links.iter_mut().for_each(|l| l.disarm());
            }
        }
        idle += 1;
    }
}

fn sleep_on(links: &[Box<dyn Transport>]) -> Result<()> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let fds = links.iter().flat_map(|l| l.fds()).flatten();
    // SAFETY: the links outlive the call and keep their descriptors open.
    let mut fds: Vec<_> = fds
        .map(|fd| PollFd::new(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::POLLIN))
        .collect();
    poll(&mut fds, PollTimeout::from(1000u16))?;
    Ok(())
}

/// Writes; waits while the slower follower has too much under way already.
fn write(link: &mut dyn Transport, at: usize, bytes: &[u8]) -> Result<()> {
    loop {
        match link.write_notify(R, 1, at, bytes) {
            Err(TransportError::Full) => {
                link.progress(1 << 20)?;
                std::thread::yield_now();
            }
            other => return Ok(other?),
        }
    }
}

fn links_up(config: &Config) -> Result<(Vec<Box<dyn Transport>>, Links)> {
    let arrivals = Links::new(config)?;
    let peers = if config.me == 0 { 2 } else { 1 };
    let mut links: Vec<Box<dyn Transport>> = Vec::new();
    while links.len() < peers {
        let (peer, stream) = arrivals.arrived.recv().context("no links")?;
        if config.me > 0 && peer > 0 {
            continue; // followers do not talk to each other here
        }
        let mut link = transport::over(stream)?;
        link.register(R, 1, REGION_BYTES)?;
        links.push(link);
    }
    wait_until(&mut links, Wait::Polite, |links| {
        links.iter().all(|l| l.granted(R).is_some())
    })?;
    Ok((links, arrivals))
}

pub(super) fn ping_pong_child(config: &Config, seconds: f64) -> Result<()> {
    let (mut links, _arrivals) = links_up(config)?;
    // The last word of a payload, at a fixed place, counts up; the answer is one word.
    let last = REGION_BYTES - 8;
    let word = |link: &dyn Transport, at: usize| link.region(R).map_or(0, |m| m.load(at));
    if config.me > 0 {
        let mut seen = 0;
        loop {
            wait_until(&mut links, config.wait, |links| word(&*links[0], last) > seen)?;
            seen = word(&*links[0], last);
            write(&mut *links[0], 0, &seen.to_le_bytes())?;
        }
    }
    let mut n = 0u64;
    for payload in PAYLOADS {
        let mut bytes = vec![7u8; payload];
        let mut samples = Vec::new();
        let mut run =
            |samples: &mut Vec<u64>, length: f64, links: &mut [Box<dyn Transport>]| -> Result<f64> {
                let begin = Instant::now();
                while begin.elapsed().as_secs_f64() < length {
                    n += 1;
                    bytes[payload - 8..].copy_from_slice(&n.to_le_bytes());
                    let t = Instant::now();
                    for link in links.iter_mut() {
                        link.write_notify(R, 1, REGION_BYTES - payload, &bytes)?;
                    }
                    wait_until(links, config.wait, |links| {
                        links.iter().any(|l| word(&**l, 0) >= n)
                    })?;
                    samples.push(t.elapsed().as_nanos() as u64);
                }
                Ok(begin.elapsed().as_secs_f64())
            };
        run(&mut Vec::new(), 0.1, &mut links)?;
        let elapsed = run(&mut samples, seconds, &mut links)?;
        say(&figure(payload, 1, samples, elapsed))?;
    }
    Ok(())
}

/// A ring in the region, and a word before it.
const RING: Place = Place {
    region: R,
    offset: SLOT_BYTES,
    bytes: REGION_BYTES - SLOT_BYTES,
};

struct Checked {
    ring: RingWriter,
    word: WordWriter,
    record: RingReader,
    answer: WordReader,
}

impl Checked {
    fn over(link: &dyn Transport) -> Result<Self> {
        let theirs = link.granted(R).context("a grant")?;
        let ours = link.opened(R).context("a region")?;
        Ok(Self {
            ring: RingWriter::new(RING, theirs.epoch, theirs.key),
            word: WordWriter::new(R, 0, theirs.epoch, theirs.key),
            record: RingReader::new(RING, ours.epoch, ours.key),
            answer: WordReader::new(0, ours.key),
        })
    }
}

/// A record out, believed only with its checksum; a word back with the reader's cursor, believed likewise.
pub(super) fn checked_child(config: &Config, seconds: f64) -> Result<()> {
    let (mut links, _arrivals) = links_up(config)?;
    let mut ends: Vec<Checked> = links.iter().map(|l| Checked::over(&**l)).collect::<Result<_>>()?;
    if config.me > 0 {
        let (end, mut seen, mut record) = (&mut ends[0], 0u64, Vec::new());
        loop {
            wait_until(&mut links, config.wait, |links| {
                links[0]
                    .region(R)
                    .is_some_and(|memory| end.record.next(memory, &mut record) == Found::Message)
            })?;
            seen += 1;
            end.word.put(&mut *links[0], [seen, end.record.consumed(), 0])?;
            links[0].flush()?;
        }
    }
    let mut n = 0u64;
    for payload in PAYLOADS {
        let bytes = vec![7u8; payload];
        let mut run =
            |samples: &mut Vec<u64>, length: f64, links: &mut [Box<dyn Transport>]| -> Result<f64> {
                let begin = Instant::now();
                while begin.elapsed().as_secs_f64() < length {
                    n += 1;
                    let t = Instant::now();
                    for (link, end) in links.iter_mut().zip(&mut ends) {
                        // The slower follower may be a lap behind: as many records as fit.
                        while end.ring.send(&mut **link, &bytes)? != Sent::Whole {
                            link.progress(1 << 20)?;
                            if let Some([_, cursor, _]) = link.region(R).and_then(|m| end.answer.get(m)) {
                                end.ring.give_back(cursor);
                            }
                            std::thread::yield_now();
                        }
                        link.flush()?;
                    }
                    wait_until(links, config.wait, |links| {
                        let mut answered = false;
                        for (link, end) in links.iter().zip(&mut ends) {
                            if let Some([seen, cursor, _]) = link.region(R).and_then(|m| end.answer.get(m)) {
                                end.ring.give_back(cursor);
                                answered |= seen >= n;
                            }
                        }
                        answered
                    })?;
                    samples.push(t.elapsed().as_nanos() as u64);
                }
                Ok(begin.elapsed().as_secs_f64())
            };
        let mut samples = Vec::new();
        run(&mut Vec::new(), 0.1, &mut links)?;
        let elapsed = run(&mut samples, seconds, &mut links)?;
        say(&figure(payload, 1, samples, elapsed))?;
    }
    Ok(())
}

/// A plain TCP echo between two threads of this process, without anything of ours.
pub(super) fn echo(_scratch: &Scratch, wait: Wait, seconds: f64) -> Result<Series> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let mut near = std::net::TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    for s in [&near, &far] {
        s.set_nodelay(true)?;
        s.set_nonblocking(wait == Wait::Yield)?;
    }
    let read = move |stream: &mut std::net::TcpStream, buf: &mut [u8]| -> std::io::Result<()> {
        let (mut at, mut idle) = (0, 0);
        while at < buf.len() {
            match stream.read(&mut buf[at..]) {
                Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => at += n,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    match wait.policy().after(idle) {
                        Idle::Spin => std::hint::spin_loop(),
                        _ => std::thread::yield_now(),
                    }
                    idle += 1;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    };
    let mut figures = Vec::new();
    let sizes = std::sync::mpsc::channel::<usize>();
    let server = std::thread::spawn(move || {
        while let Ok(size) = sizes.1.recv() {
            let mut buf = vec![0u8; size];
            while read(&mut far, &mut buf).is_ok() && buf[0] == 1 {
                if far.write_all(&buf[..8]).is_err() {
                    return;
                }
            }
        }
    });
    for payload in PAYLOADS {
        sizes.0.send(payload)?;
        let (mut bytes, mut samples, begin) = (vec![1u8; payload], Vec::new(), Instant::now());
        while begin.elapsed() < Duration::from_secs_f64(seconds / 2.0) {
            let t = Instant::now();
            near.write_all(&bytes)?;
            read(&mut near, &mut [0; 8])?;
            samples.push(t.elapsed().as_nanos() as u64);
        }
        figures.push(figure(payload, 1, samples, begin.elapsed().as_secs_f64()));
        bytes[0] = 0;
        near.write_all(&bytes)?;
    }
    drop((near, sizes.0));
    let _ = server.join();
    Ok(Series {
        what: "TCP echo, two threads".into(),
        wait: wait.policy().to_string(),
        figures,
    })
}

/// fdatasync after a write into a preallocated, zero-filled file, by `processes` at once.
pub(super) fn fdatasync(scratch: &Scratch, seconds: f64, processes: u8) -> Result<Series> {
    let dir = scratch.sub("fdatasync")?;
    let start = |me| {
        spawn(&config(
            &dir,
            me,
            Fabric::Shm,
            Wait::Block,
            Part::Fdatasync { seconds },
        ))
    };
    let mut all: Vec<_> = (0..processes).map(start).collect::<Result<_>>()?;
    let figures = figures(&mut all[0], PAYLOADS.len())?;
    let what = if processes == 1 {
        "fdatasync alone".into()
    } else {
        format!("fdatasync, {processes} processes at once")
    };
    Ok(Series {
        what,
        wait: "the system call's".into(),
        figures,
    })
}

pub(super) fn fdatasync_child(config: &Config, seconds: f64) -> Result<()> {
    let file = std::fs::File::create(config.dir.join(format!("{}.data", config.me)))?;
    let bytes = 64u64 << 20;
    let zeros = vec![0u8; 1 << 20];
    for at in (0..bytes).step_by(1 << 20) {
        file.write_all_at(&zeros, at)?;
    }
    file.sync_all()?;
    for payload in PAYLOADS {
        let (buf, mut at, mut samples, begin) = (vec![3u8; payload], 0, Vec::new(), Instant::now());
        while begin.elapsed().as_secs_f64() < seconds {
            let t = Instant::now();
            file.write_all_at(&buf, at)?;
            file.sync_data()?;
            samples.push(t.elapsed().as_nanos() as u64);
            at = (at + payload as u64) % (bytes - payload as u64);
        }
        say(&figure(payload, 1, samples, begin.elapsed().as_secs_f64()))?;
    }
    // The others go on meanwhile: whoever was first must not have it quieter.
    if config.me > 0 {
        loop {
            file.write_all_at(&[3], 0)?;
            file.sync_data()?;
        }
    }
    Ok(())
}
