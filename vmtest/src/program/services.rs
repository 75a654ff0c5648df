//! Unmodified servers beside redis: each survives its host's death, kill after kill, with clients that check every answer.
//!
//! * **Decides:** what passes: nothing lost, doubled, reset or refused; each client keeps its one connection; the second copy says the
//!   same (`backup-lost` for what it said is a failure, but for a database, whose copies may differ: how often is told).
//! * **Flow:** a server on two hosts -> clients -> SIGKILL to the primary's host -> answers go on -> a copy comes to the host that is back -> again.
//! * **Not here:** the clients (`clients`, `ledger`); what the servers' directories are made of ([`crate::image::roots`]).

pub(super) mod clients;
pub(super) mod ledger;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::bench::median;
use super::{ACKNOWLEDGED, NAME, PATIENCE, Plan, down, up};
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, in_a_testbed};
use crate::demo::service;
use crate::image::roots::{self, Root};
use crate::paths;
use crate::testbed::{Node, Testbed, TestbedSpec};
use clients::{FILES, Open, Others, body};
use ledger::{Kind, Shares, Writer};

const CLIENTS: usize = 8;
/// Where they serve.
const PORT: u16 = 6379;
/// So long a server whose copies may differ is watched between two kills: to say how often they do in a minute.
const WATCHED: Duration = Duration::from_secs(20);

/// What one connection is told does not depend on another one's requests: files, or keys that are one client's.
const SHARES_NOTHING: &str = "order = \"delivery\"";

/// How clients speak with it.
#[derive(Clone, Copy)]
enum Speech {
    /// INCR and GET of redis' protocol.
    Counter,
    /// Any other, on connections that are never renewed.
    Other(Open),
    /// Transactions.
    Ledger(Kind, Shares),
}

type Server = fn(&Testbed, u16) -> Result<Option<Plan>>;

struct Service {
    name: &'static str,
    speech: Speech,
    clients: usize,
    plan: Server,
}

const fn service_of(name: &'static str, speech: Speech, clients: usize, plan: Server) -> Service {
    Service {
        name,
        speech,
        clients,
        plan,
    }
}

const fn ledger_of(name: &'static str, kind: Kind, shares: Shares, clients: usize) -> Service {
    let plan: Server = match kind {
        Kind::Mariadb => mariadb,
        Kind::Postgres => postgresql,
    };
    service_of(name, Speech::Ledger(kind, shares), clients, plan)
}

/// A number is that of writers of a common row; those of a ring wait for each other in circles.
const SERVICES: [Service; 19] = [
    service_of("memcached", Speech::Other(clients::counts), CLIENTS, memcached),
    service_of("nginx", Speech::Other(clients::fetches), CLIENTS, nginx),
    service_of("go", Speech::Counter, CLIENTS, go),
    service_of("node", Speech::Counter, CLIENTS, node),
    service_of("lighttpd", Speech::Other(clients::asks_pages), CLIENTS, lighttpd),
    ledger_of("mariadb", Kind::Mariadb, Shares::Nothing, 1),
    ledger_of("mariadb-2", Kind::Mariadb, Shares::Common, 2),
    ledger_of("mariadb-4", Kind::Mariadb, Shares::Common, 4),
    ledger_of("mariadb-8", Kind::Mariadb, Shares::Common, 8),
    ledger_of("mariadb-16", Kind::Mariadb, Shares::Common, 16),
    ledger_of("mariadb-ring-4", Kind::Mariadb, Shares::Ring, 4),
    ledger_of("mariadb-ring-16", Kind::Mariadb, Shares::Ring, 16),
    ledger_of("postgresql", Kind::Postgres, Shares::Nothing, 1),
    ledger_of("postgresql-2", Kind::Postgres, Shares::Common, 2),
    ledger_of("postgresql-4", Kind::Postgres, Shares::Common, 4),
    ledger_of("postgresql-8", Kind::Postgres, Shares::Common, 8),
    ledger_of("postgresql-16", Kind::Postgres, Shares::Common, 16),
    ledger_of("postgresql-ring-4", Kind::Postgres, Shares::Ring, 4),
    ledger_of("postgresql-ring-16", Kind::Postgres, Shares::Ring, 16),
];

/// Plays those that are named, or those of which more is promised than that they lose nothing. Returns how many were played; what this machine has not is said.
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
    in_a_testbed(
        "program-services",
        &TestbedSpec::three_hosts(),
        binary,
        |cluster| {
            cluster.start_hosts()?;
            for service in SERVICES.iter().filter(|service| service.is_wanted(named)) {
                let Some(plan) = (service.plan)(cluster.testbed(), PORT)? else {
                    say(&format!(
                        "program-services: {} cannot be played on this machine: not played",
                        service.name
                    ));
                    continue;
                };
                let line = play(cluster, service, &plan, kills).with_context(|| service.name.to_owned())?;
                say(&format!("program-services: {}: {line}", service.name));
                played += 1;
            }
            Ok(())
        },
    )?;
    ensure!(played > 0, "none of these programs is on this machine");
    Ok(played)
}

fn play(cluster: &mut Cluster<'_>, service: &Service, plan: &Plan, kills: u32) -> Result<String> {
    let (mut primary, _) = up(cluster, plan)?;
    let client = cluster.testbed().node("client");
    let clients = Clients::start(client, service)?;
    let (begun, mut gaps_ms, mut losses) = (Instant::now(), Vec::new(), Losses::default());
    let mut rates = Vec::new();
    for number in 1..=kills {
        clients.await_more(ACKNOWLEDGED)?;
        if service.may_differ() {
            rates.push(clients.go_on_for(WATCHED)?);
        }
        // On a busy machine an election may have come without a death: who serves now is killed.
        let protected = cluster.await_protected(NAME, PATIENCE);
        (primary, _) =
            protected.with_context(|| format!("before kill {number}; {}", losses.told(begun.elapsed())))?;
        losses.look(cluster, &primary)?;
        ensure!(
            service.may_differ() || losses.differing.is_empty(),
            "its copies differ: 'backup-lost' in the events of {:?}",
            losses.differing
        );
        let killed = cluster.kill_host(&primary)?;
        clients
            .await_more(ACKNOWLEDGED)
            .with_context(|| format!("no answers after kill {number}"))?;
        gaps_ms.push(killed.elapsed().as_millis());
        let (took_over, _) = cluster.await_take_over(NAME, &primary, PATIENCE)?;
        let dead = std::mem::replace(&mut primary, took_over);
        cluster.start_host(&dead)?;
        await_second_copy(cluster, &primary)
            .with_context(|| format!("after kill {number}; {}", losses.told(begun.elapsed())))?;
    }
    if service.may_differ() {
        rates.push(clients.go_on_for(WATCHED)?);
        losses.look(cluster, &primary)?;
    }
    let watched = begun.elapsed();
    let said = clients.finish(cluster.testbed().node("client"), service)?;
    down(cluster, &primary)?;
    let worst = gaps_ms.iter().max().copied().unwrap_or_default();
    let differed = match service.may_differ() {
        true => format!(
            "; {:.0} a second between kills (median); {}",
            median(rates.into_iter()),
            losses.told(watched)
        ),
        false => String::new(),
    };
    Ok(format!(
        "{kills} kills, {said}; {ACKNOWLEDGED} answers after a kill took at most {worst} ms{differed}"
    ))
}

/// Second copies that were lost while no host died: on which host it was told, and when. A host keeps its events over restarts.
#[derive(Default)]
struct Losses {
    /// For what they said.
    differing: BTreeSet<(String, u64)>,
    /// For what they did not say in time.
    late: BTreeSet<(String, u64)>,
    /// Copies that were brought in anew, after kills too.
    joined: BTreeSet<(String, u64)>,
    /// It was told that it cannot be matched.
    unmatched: BTreeSet<(String, u64)>,
}

impl Losses {
    fn look(&mut self, cluster: &Cluster<'_>, primary: &str) -> Result<()> {
        for event in cluster.events(primary)? {
            let at = (primary.to_owned(), event.time_ms);
            match event.kind.as_str() {
                "backup-lost" if event.text.contains("something else") => self.differing.insert(at),
                "backup-lost" if event.text.contains("has not said within") => self.late.insert(at),
                "joined" if event.text.contains("was brought to") => self.joined.insert(at),
                "cannot-be-matched" => self.unmatched.insert(at),
                _ => false,
            };
        }
        Ok(())
    }

    /// For people, of that time.
    fn told(&self, watched: Duration) -> String {
        let minutes = watched.as_secs_f64() / 60.0;
        let lost = self.differing.len() + self.late.len();
        format!(
            "in {:.1} minutes the second copy was lost {} times for what it said and {} times for what it did not say ({:.1} a minute), \
             brought in anew {} times, told that it cannot be matched {} times",
            minutes,
            self.differing.len(),
            self.late.len(),
            lost as f64 / minutes,
            self.joined.len(),
            self.unmatched.len()
        )
    }
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

fn plan(port: u16, command: &[&str], more: &[&str]) -> Plan {
    let lines = more.iter().map(|line| (*line).to_owned());
    Plan {
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        lines: std::iter::once(format!("port = {port}")).chain(lines).collect(),
        standby_after: None,
    }
}

pub(super) fn memcached(_: &Testbed, port: u16) -> Result<Option<Plan>> {
    // Its clock: items do not expire here. Threads: the order of reading is not the order of work, so each connection's key is its own, and
    // the order between connections changes nothing.
    let program = installed("memcached");
    let at = port.to_string();
    Ok(program.map(|program| {
        plan(
            port,
            &[&program, "-u", "root", "-p", &at, "-U", "0", "-t", "4"],
            &[SHARES_NOTHING],
        )
    }))
}

pub(super) fn nginx(testbed: &Testbed, port: u16) -> Result<Option<Plan>> {
    let Some(program) = installed("nginx") else {
        return Ok(None);
    };
    let root = testbed.dir().join("www");
    std::fs::create_dir_all(&root)?;
    for (number, bytes) in FILES.iter().enumerate() {
        std::fs::write(root.join(format!("{number}")), body(number, *bytes))?;
    }
    let file = testbed.dir().join(format!("nginx-{port}.conf"));
    // Its answers tell the second (`Date`): the agreed one.
    let text = format!(
        "daemon off; user root; worker_processes 2; pid /tmp/nginx-{port}.pid; error_log stderr;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; etag off; server_tokens off; keepalive_requests 1000000; keepalive_timeout 600s;\n\
           client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s;\n\
           server {{ listen {port} reuseport; root {}; }} }}\n",
        root.display()
    );
    std::fs::write(&file, text)?;
    let file = file.to_str().context("a path of text")?;
    Ok(Some(plan(
        port,
        &[&program, "-c", file],
        &[SHARES_NOTHING, "patience_ms = 100"],
    )))
}

fn sources() -> PathBuf {
    paths::workspace().join("vmtest/programs")
}

/// A static one: no libc that anything could be preloaded into.
pub(super) fn go(testbed: &Testbed, port: u16) -> Result<Option<Plan>> {
    let program = testbed.dir().join("counter");
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
    Ok(Some(plan(
        port,
        &[program.to_str().context("a path of text")?],
        &[SHARES_NOTHING],
    )))
}

pub(super) fn node(_: &Testbed, port: u16) -> Result<Option<Plan>> {
    let script = sources().join("counter.js");
    let script = script.to_str().context("a path of text")?.to_owned();
    Ok(installed("node").map(|program| plan(port, &[&program, &script, &port.to_string()], &[])))
}

/// A directory of Debian's packages is the program's root: nothing of it is installed.
fn in_its_root(root: &Root, port: u16, command: &[&str], more: &[&str]) -> Result<Plan> {
    let folder = roots::ensure(root, &paths::guest_images(), &mut |line| {
        println!("program-services: making {line}")
    })?;
    let mut plan = plan(port, command, more);
    plan.lines.push(format!("root = {folder:?}"));
    Ok(plan)
}

/// Its pages are made by one of four processes: which one is nobody's business, since the session's file has the count.
pub(super) fn lighttpd(_: &Testbed, port: u16) -> Result<Option<Plan>> {
    let command = ["/usr/sbin/lighttpd", "-D", "-f", "/etc/dunlin/lighttpd.conf"];
    let more = ["user = \"root\"", "order = \"answer\"", "patience_ms = 200"];
    in_its_root(&roots::PHP, port, &command, &more).map(Some)
}

/// What a login is asked is drawn: agreed chance.
const FOR_A_DATABASE: [&str; 4] = [
    "order = \"answer\"",
    "patience_ms = 200",
    "chance = \"agreed\"",
    "scratch_mib = 512",
];

pub(super) fn mariadb(_: &Testbed, port: u16) -> Result<Option<Plan>> {
    let command = [
        "/usr/sbin/mariadbd",
        "--no-defaults",
        "--user=root",
        "--datadir=/data/mysql",
        "--socket=/tmp/my.sock",
        "--port=6379",
        "--skip-name-resolve",
        "--innodb-buffer-pool-size=16M",
        "--innodb-log-file-size=4M",
        "--innodb-use-native-aio=0",
        "--performance-schema=off",
    ];
    let more = [&["user = \"root\""], &FOR_A_DATABASE[..]].concat();
    in_its_root(&roots::MARIADB, port, &command, &more).map(Some)
}

/// It refuses to be root.
pub(super) fn postgresql(_: &Testbed, port: u16) -> Result<Option<Plan>> {
    let command = [
        "/usr/lib/postgresql/15/bin/postgres",
        "-D",
        "/data/pg",
        "-p",
        "6379",
        // Its file has 16, of which three are its own.
        "-c",
        "max_connections=80",
    ];
    let more = [&["user = \"nobody\""], &FOR_A_DATABASE[..]].concat();
    in_its_root(&roots::POSTGRESQL, port, &command, &more).map(Some)
}

/// Clients of either kind.
enum Clients {
    Counter(Counter),
    Others(Others),
    /// With how many transactions were repeated.
    Ledger(Others, Arc<AtomicU64>),
}

impl Service {
    /// A database with more than two writers has to be named: its copies part again and again, and sixteen writers take very long.
    fn is_wanted(&self, named: &[String]) -> bool {
        let few = !matches!(self.speech, Speech::Ledger(..)) || self.clients <= 2;
        (named.is_empty() && few) || named.iter().any(|name| name == self.name)
    }

    /// Its copies take locks in an order of their own: how often they differ for that is told.
    fn may_differ(&self) -> bool {
        matches!(self.speech, Speech::Ledger(..))
    }
}

impl Clients {
    fn start(node: &Node, server: &Service) -> Result<Self> {
        match server.speech {
            Speech::Counter => {
                let spec = CounterSpec {
                    target: service(),
                    connections: server.clients,
                    together: false,
                    give_up: PATIENCE,
                };
                Ok(Self::Counter(Counter::start(node, &spec)?))
            }
            Speech::Other(open) => Others::start(node, service(), server.clients, open).map(Self::Others),
            Speech::Ledger(kind, shares) => {
                ledger::set_up(node, kind, service(), server.clients)?;
                let repeated = Arc::default();
                let writer = Writer {
                    kind,
                    shares,
                    of: server.clients,
                    repeated: Arc::clone(&repeated),
                };
                let open = move |target, client| writer.open(target, client);
                let others = Others::start(node, service(), server.clients, open)?;
                Ok(Self::Ledger(others, repeated))
            }
        }
    }

    fn await_more(&self, more: u64) -> Result<()> {
        match self {
            Self::Counter(counter) => counter.await_more(more, PATIENCE),
            Self::Others(others) | Self::Ledger(others, _) => others.await_more(more),
        }
    }

    /// Until that time is over, with answers all the while. How many came in a second, of a database.
    fn go_on_for(&self, time: Duration) -> Result<f64> {
        let done = || match self {
            Self::Counter(_) => 0,
            Self::Others(others) | Self::Ledger(others, _) => others.done(),
        };
        let (before, until) = (done(), Instant::now() + time);
        while Instant::now() < until {
            self.await_more(1)?;
        }
        Ok((done() - before) as f64 / time.as_secs_f64())
    }

    /// What they saw, if it was all as it should be.
    fn finish(self, node: &Node, server: &Service) -> Result<String> {
        let (told, what, repeated) = match self {
            Self::Counter(counter) => {
                let (clients, _) = counter.finish()?;
                ensure!(clients.is_clean(), "clients were let down: {clients:?}");
                (vec![clients.acknowledged], "answers", None)
            }
            Self::Others(others) => (others.finish()?, "answers", None),
            Self::Ledger(others, repeated) => (others.finish()?, "commits", Some(repeated)),
        };
        if let Speech::Ledger(kind, shares) = server.speech {
            ledger::check(node, kind, service(), &told, shares)?;
        }
        let repeated = repeated.map_or(0, |repeated| repeated.load(Ordering::Relaxed));
        let repeated = match repeated {
            0 => String::new(),
            times => format!(", {times} transactions repeated because they waited in a circle"),
        };
        Ok(format!(
            "{} {what} on {} connections, 0 lost, 0 wrong, 0 broken{repeated}",
            told.iter().sum::<u64>(),
            server.clients
        ))
    }
}
