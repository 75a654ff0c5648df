//! A client for memcached, our own: Debian has neither memtier nor memaslap, and libmemcached's `memcslap` says no
//! latencies. One thread and one connection each, one request at a time; one `set` for nine `get`, as memtier does it,
//! of 64 bytes on keys of its own, so that every value that comes back can be checked.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::{Clients, Measured};

const KEYS: u64 = 100;
const VALUE: usize = 64;

/// The load.
pub fn run(clients: &Clients<'_>, connections: u32, seconds: f64) -> Result<Measured> {
    let target = clients.target();
    let begun = Instant::now();
    let end = begun + Duration::from_secs_f64(seconds);
    let mut workers = Vec::new();
    for number in 0..connections {
        workers.push(
            clients
                .node
                .spawn(&format!("memcached-{number}"), move || work(target, number, end))?,
        );
    }
    let mut latencies_us = Vec::new();
    let mut failure = None;
    for worker in workers {
        match worker
            .join()
            .map_err(|_| anyhow!("a memcached client panicked"))
            .and_then(|result| result?)
        {
            Ok(latencies) => latencies_us.extend(latencies),
            Err(error) => failure = Some(error),
        }
    }
    if let Some(error) = failure {
        return Err(error.context("memcached client"));
    }
    Measured::from_latencies(&mut latencies_us, begun.elapsed().as_secs_f64())
}

fn work(target: SocketAddr, number: u32, end: Instant) -> Result<Vec<u64>> {
    let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(10))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    // What was stored last under each key.
    let mut stored: Vec<Option<String>> = vec![None; KEYS as usize];
    let mut latencies_us = Vec::new();
    let mut turn = 0_u64;
    while Instant::now() < end {
        // A fixed walk over the keys: nothing random, so that two runs ask for the same.
        let key = usize::try_from(turn * 7 % KEYS)?;
        let name = format!("dunlin:{number}:{key}");
        let began = Instant::now();
        if turn % 10 == 0 {
            let value = format!("{:0>VALUE$}", format!("{number}.{turn}"));
            stream.write_all(format!("set {name} 0 0 {VALUE}\r\n{value}\r\n").as_bytes())?;
            let answer = line(&mut reader)?;
            ensure!(answer == "STORED", "set was answered by '{answer}'");
            stored[key] = Some(value);
        } else {
            stream.write_all(format!("get {name}\r\n").as_bytes())?;
            let answer = get(&mut reader)?;
            // Before the first set a value of an earlier load may be there.
            if stored[key].is_some() {
                ensure!(
                    answer == stored[key],
                    "{name} is {answer:?}, not {:?}",
                    stored[key]
                );
            }
        }
        latencies_us.push(u64::try_from(began.elapsed().as_micros())?);
        turn += 1;
    }
    Ok(latencies_us)
}

fn line(reader: &mut impl BufRead) -> Result<String> {
    let mut text = String::new();
    reader.read_line(&mut text)?;
    let line = text.strip_suffix("\r\n").context("the connection broke")?;
    Ok(line.to_owned())
}

fn get(reader: &mut BufReader<TcpStream>) -> Result<Option<String>> {
    let first = line(reader)?;
    if first == "END" {
        return Ok(None);
    }
    let length = first
        .strip_prefix("VALUE ")
        .and_then(|rest| rest.split(' ').nth(2))
        .with_context(|| format!("get was answered by '{first}'"))?
        .parse::<usize>()?;
    let mut value = vec![0; length + 2];
    reader.read_exact(&mut value)?;
    value.truncate(length);
    match line(reader)?.as_str() {
        "END" => Ok(Some(String::from_utf8(value)?)),
        other => bail!("a value ended with '{other}'"),
    }
}
