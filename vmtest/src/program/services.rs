//! Unmodified servers beside redis: each survives its host's death, kill after kill, with clients that check every answer.
//!
//! * **Decides:** what passes: nothing lost, doubled, reset or refused; each client keeps its one connection; the second copy says the
//!   same (`backup-lost` for what it said is a failure).
//! * **Flow:** a server on two hosts -> clients -> SIGKILL to the primary's host -> answers go on -> a copy comes to the host that is back -> again.
//! * **Source:** memcached's protocol.txt; RFC 9112. **Not here:** which programs cannot be matched (docs/programs.md).

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::{ACKNOWLEDGED, NAME, PATIENCE, Plan, down, up};
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, in_a_lab};
use crate::demo::service;
use crate::lab::{Lab, LabSpec, Node};
use crate::paths;

const CLIENTS: usize = 8;
/// What nginx has to show: files of these many bytes.
const FILES: [usize; 4] = [1, 700, 5_000, 60_000];

/// How clients speak with it.
#[derive(Clone, Copy)]
enum Speech {
    /// INCR and GET of redis' protocol.
    Counter,
    /// `incr` of memcached's.
    Memcached,
    /// GET of files, on one connection.
    Files,
}

struct Service {
    name: &'static str,
    speech: Speech,
    plan: fn(&Lab) -> Result<Option<Plan>>,
}

const SERVICES: [Service; 4] = [
    Service {
        name: "memcached",
        speech: Speech::Memcached,
        plan: memcached,
    },
    Service {
        name: "nginx",
        speech: Speech::Files,
        plan: nginx,
    },
    Service {
        name: "go",
        speech: Speech::Counter,
        plan: go,
    },
    Service {
        name: "node",
        speech: Speech::Counter,
        plan: node,
    },
];

/// Plays those that are named, or all. Returns how many were played; what this machine has not is said.
///
/// # Errors
/// When one does not go as it should; the daemons' logs are kept.
pub fn run(binary: &Path, named: &[String], kills: u32, say: &mut dyn FnMut(&str)) -> Result<usize> {
    if let Some(unknown) = named
        .iter()
        .find(|name| !SERVICES.iter().any(|known| known.name == *name))
    {
        bail!(
            "there is no program {unknown:?}: {}",
            SERVICES.map(|service| service.name).join(", ")
        );
    }
    let mut played = 0;
    in_a_lab("program-services", &LabSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        for service in SERVICES
            .iter()
            .filter(|service| named.is_empty() || named.iter().any(|name| name == service.name))
        {
            let Some(plan) = (service.plan)(cluster.lab())? else {
                say(&format!(
                    "program-services: {} is not on this machine: not played",
                    service.name
                ));
                continue;
            };
            let line = play(cluster, service, &plan, kills).with_context(|| service.name.to_owned())?;
            say(&format!("program-services: {}: {line}", service.name));
            played += 1;
        }
        Ok(())
    })?;
    ensure!(played > 0, "none of these programs is on this machine");
    Ok(played)
}

fn play(cluster: &mut Cluster<'_>, service: &Service, plan: &Plan, kills: u32) -> Result<String> {
    let (mut primary, _) = up(cluster, plan)?;
    let clients = Clients::start(cluster.lab().node("client"), service.speech)?;
    let answers = ACKNOWLEDGED;
    let (mut gaps_ms, mut differences) = (Vec::new(), BTreeSet::new());
    for number in 1..=kills {
        clients.await_more(answers)?;
        await_second_copy(cluster, &primary).with_context(|| format!("before kill {number}"))?;
        let events = cluster.events(&primary)?.into_iter();
        let differs = |text: &str| text.contains("something else");
        let lost = events.filter(|event| event.kind == "backup-lost" && differs(&event.text));
        // A host keeps its events over restarts.
        differences.extend(lost.map(|event| (primary.clone(), event.time_ms)));
        ensure!(
            differences.is_empty(),
            "its copies differ: 'backup-lost' in the events of {differences:?}"
        );
        let killed = cluster.kill_host(&primary)?;
        clients
            .await_more(answers)
            .with_context(|| format!("no answers after kill {number}"))?;
        gaps_ms.push(killed.elapsed().as_millis());
        let (took_over, _) = cluster.await_take_over(NAME, &primary, PATIENCE)?;
        let dead = std::mem::replace(&mut primary, took_over);
        cluster.start_host(&dead)?;
        await_second_copy(cluster, &primary).with_context(|| format!("after kill {number}"))?;
    }
    let said = clients.finish()?;
    down(cluster, &primary)?;
    let worst = gaps_ms.iter().max().copied().unwrap_or_default();
    Ok(format!(
        "{kills} kills, {said}; {answers} answers after a kill took at most {worst} ms"
    ))
}

fn await_second_copy(cluster: &Cluster<'_>, primary: &str) -> Result<()> {
    cluster.await_status("a second copy", PATIENCE, |hosts| {
        let host = hosts.iter().find(|host| host.host == primary)?;
        host.vm(NAME)?.protected.then_some(())
    })
}

fn installed(program: &str) -> Option<String> {
    let folders = ["/usr/bin", "/usr/sbin", "/usr/local/bin"];
    let mut paths = folders.iter().map(|folder| format!("{folder}/{program}"));
    paths.find(|path| Path::new(path).exists())
}

fn plan(command: &[&str], more: &[&str]) -> Plan {
    let lines = ["port = 6379"].iter().chain(more);
    Plan {
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        lines: lines.map(|line| (*line).to_owned()).collect(),
    }
}

fn memcached(_: &Lab) -> Result<Option<Plan>> {
    // Its clock: items do not expire here. Threads: the order of reading is not the order of work, so each connection's key is its own.
    let program = installed("memcached");
    Ok(program.map(|program| plan(&[&program, "-u", "root", "-p", "6379", "-U", "0", "-t", "4"], &[])))
}

fn nginx(lab: &Lab) -> Result<Option<Plan>> {
    let Some(program) = installed("nginx") else {
        return Ok(None);
    };
    let root = lab.dir().join("www");
    std::fs::create_dir_all(&root)?;
    for (number, bytes) in FILES.iter().enumerate() {
        std::fs::write(root.join(format!("{number}")), body(number, *bytes))?;
    }
    let file = lab.dir().join("nginx.conf");
    // Its answers tell the second (`Date`): the agreed one.
    let text = format!(
        "daemon off; user root; worker_processes 2; pid /tmp/nginx.pid; error_log stderr;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; etag off; server_tokens off; keepalive_requests 1000000; keepalive_timeout 600s;\n\
           client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s;\n\
           server {{ listen 6379 reuseport; root {}; }} }}\n",
        root.display()
    );
    std::fs::write(&file, text)?;
    let file = file.to_str().context("a path of text")?;
    Ok(Some(plan(
        &[&program, "-c", file],
        &["order = \"answer\"", "patience_ms = 100"],
    )))
}

fn body(number: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| b'a' + ((at * 7 + number) % 26) as u8)
        .collect()
}

fn sources() -> PathBuf {
    paths::workspace().join("vmtest/programs")
}

/// A static one: no libc that anything could be preloaded into.
fn go(lab: &Lab) -> Result<Option<Plan>> {
    let program = lab.dir().join("counter");
    let built = Command::new("go")
        .args(["build", "-o"])
        .args([&program, Path::new(".")])
        .current_dir(sources().join("counter"))
        .envs([("CGO_ENABLED", "0"), ("GOFLAGS", "-buildvcs=false")])
        .output();
    let Ok(built) = built else { return Ok(None) };
    ensure!(
        built.status.success(),
        "vmtest/programs/counter: {}",
        String::from_utf8_lossy(&built.stderr).trim()
    );
    Ok(Some(plan(&[program.to_str().context("a path of text")?], &[])))
}

fn node(_: &Lab) -> Result<Option<Plan>> {
    let script = sources().join("counter.js");
    let script = script.to_str().context("a path of text")?.to_owned();
    Ok(installed("node").map(|program| plan(&[&program, &script, "6379"], &[])))
}

/// Clients of either kind.
enum Clients {
    Counter(Counter),
    Others(Others),
}

impl Clients {
    fn start(node: &Node, speech: Speech) -> Result<Self> {
        match speech {
            Speech::Counter => {
                let spec = CounterSpec {
                    target: service(),
                    connections: CLIENTS,
                    together: false,
                    give_up: PATIENCE,
                };
                Ok(Self::Counter(Counter::start(node, &spec)?))
            }
            Speech::Memcached => Ok(Self::Others(Others::start(node, counts)?)),
            Speech::Files => Ok(Self::Others(Others::start(node, fetches)?)),
        }
    }

    fn await_more(&self, more: u64) -> Result<()> {
        match self {
            Self::Counter(counter) => counter.await_more(more, PATIENCE),
            Self::Others(others) => others.await_more(more),
        }
    }

    /// What they saw, if it was all as it should be.
    fn finish(self) -> Result<String> {
        let acknowledged = match self {
            Self::Counter(counter) => {
                let (clients, _) = counter.finish()?;
                ensure!(clients.is_clean(), "clients were let down: {clients:?}");
                clients.acknowledged
            }
            Self::Others(others) => others.finish()?,
        };
        Ok(format!(
            "{acknowledged} answers on {CLIENTS} connections, 0 lost, 0 wrong, 0 broken"
        ))
    }
}

/// Asks the `turn`th question of a client's, and checks its answer: an error is a promise that was broken.
type Ask = fn(&mut BufReader<TcpStream>, client: usize, turn: u64) -> Result<()>;

/// Workers, each with one connection that is never renewed.
struct Others {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<Result<()>>>>,
}

impl Others {
    fn start(node: &Node, ask: Ask) -> Result<Self> {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = Vec::new();
        for client in 0..CLIENTS {
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            workers.push(node.spawn(&format!("service-{client}"), move || -> Result<()> {
                let stream = TcpStream::connect_timeout(&service(), PATIENCE)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let mut stream = BufReader::new(stream);
                let mut turn = 0;
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    ask(&mut stream, client, turn)
                        .with_context(|| format!("client {client}, question {turn}"))?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })?);
        }
        Ok(Self { stop, done, workers })
    }

    fn await_more(&self, more: u64) -> Result<()> {
        let done = || self.done.load(Ordering::Relaxed);
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

    fn finish(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        for worker in self.workers.drain(..) {
            worker.join().map_err(|_| anyhow!("a client panicked"))???;
        }
        Ok(self.done.load(Ordering::Relaxed))
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

fn line(stream: &mut BufReader<TcpStream>) -> Result<String> {
    let mut line = String::new();
    ensure!(stream.read_line(&mut line)? > 0, "the connection is closed");
    Ok(line.trim_end().to_owned())
}

/// `incr` of the client's own key: each answer is the last one plus one, or something is lost or doubled.
fn counts(stream: &mut BufReader<TcpStream>, client: usize, turn: u64) -> Result<()> {
    if turn == 1 {
        stream
            .get_mut()
            .write_all(format!("set key{client} 0 0 1\r\n0\r\n").as_bytes())?;
        let said = line(stream)?;
        ensure!(said == "STORED", "{said}");
    }
    stream
        .get_mut()
        .write_all(format!("incr key{client} 1\r\n").as_bytes())?;
    let said = line(stream)?;
    ensure!(said == turn.to_string(), "{said} instead of {turn}");
    Ok(())
}

/// A file, whole and byte by byte.
fn fetches(stream: &mut BufReader<TcpStream>, client: usize, turn: u64) -> Result<()> {
    let number = (client + turn as usize) % FILES.len();
    stream
        .get_mut()
        .write_all(format!("GET /{number} HTTP/1.1\r\nHost: lab\r\n\r\n").as_bytes())?;
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
    let wanted = body(number, FILES[number]);
    ensure!(
        length == Some(wanted.len()),
        "a body of {length:?} bytes instead of {}",
        wanted.len()
    );
    let mut bytes = vec![0; wanted.len()];
    stream.read_exact(&mut bytes)?;
    ensure!(bytes == wanted, "file {number} came otherwise");
    Ok(())
}
