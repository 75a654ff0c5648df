//! Programs whose answers tell the time, and are drawn by chance: both copies say the same, over deaths and joins, and no client sees the
//! time go back.
//!
//! * **Decides:** what passes: no second copy is dropped for what it said.
//! * **Flow:** redis on two hosts -> clients ask it for its `TIME` and have it draw by `SPOP`, others count on one key -> SIGKILL to the
//!   primary's host -> a copy comes to the host that is back -> again. The same with nginx, and TLS handshakes. * **Not here:** what a program reads its clock from (`node/tests/program_clock.rs`).

use dunlin_api::{Event, EventKind};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, ensure};

use super::{ACKNOWLEDGED, CONNECTIONS, NAME, PATIENCE, Plan, count, down, up, whole};
use crate::client::{Answer, Connection};
use crate::cluster::Cluster;
use crate::demo::service;
use crate::testbed::Node;

/// Who asks for the time: with those who count there are fifty clients.
const ASKERS: usize = 50 - CONNECTIONS;
const KILLS: usize = 3;
const NGINX: &str = "/usr/sbin/nginx";
/// In microseconds, as one number.
const TIME: &str = "local t = redis.call('TIME'); return t[1] * 1000000 + t[2]";

/// Draws one of eight.
const DRAW: &str =
    "redis.call('SADD', KEYS[1], 1, 2, 'c', 'd', 'e', 'f', 'g', 'h'); return redis.call('SPOP', KEYS[1])";
/// A copy that gets no processor for so long is still at its input when the next time is set, and may tell that one: longer than by default.
const LONG_PATIENCE: &str = "patience_ms = 2500";
/// TLS handshakes and answers before each kill.
const HANDSHAKES: usize = 12;

pub(super) fn is_told_alike(cluster: &mut Cluster<'_>) -> Result<()> {
    play(cluster, Plan::redis(cluster.testbed())?, false)
}

pub(super) fn is_drawn_alike(cluster: &mut Cluster<'_>) -> Result<()> {
    let mut plan = Plan::redis(cluster.testbed())?;
    plan.lines.push("chance = \"agreed\"".to_owned());
    play(cluster, plan, true)
}

fn play(cluster: &mut Cluster<'_>, mut plan: Plan, draws: bool) -> Result<()> {
    plan.lines.push(LONG_PATIENCE.to_owned());
    let since_ms = now_ms()?;
    let (mut primary, _) = up(cluster, &plan)?;
    let counter = count(cluster, CONNECTIONS)?;
    let askers = Askers::start(cluster.testbed().node("client"), draws)?;
    for number in 1..=KILLS {
        counter.await_more(ACKNOWLEDGED, PATIENCE)?;
        askers.await_more(ACKNOWLEDGED)?;
        (primary, _) = whole(cluster)?;
        no_difference(cluster, &primary, since_ms).with_context(|| format!("before kill {number}"))?;
        cluster.kill_host(&primary)?;
        counter
            .await_more(ACKNOWLEDGED, PATIENCE)
            .with_context(|| format!("no answers after kill {number}"))?;
        let (took_over, _) = cluster.await_take_over(NAME, &primary, PATIENCE)?;
        let dead = std::mem::replace(&mut primary, took_over);
        cluster.start_host(&dead)?;
        cluster.await_protected(NAME, PATIENCE)?;
    }
    // What a copy that was brought here says is compared as well.
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    askers.await_more(ACKNOWLEDGED)?;
    no_difference(cluster, &primary, since_ms)?;
    let asked = askers.finish()?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    println!(
        "program: the time was told {}{asked} times over {KILLS} kills, {} counted, 0 differing",
        if draws { "and chance drawn " } else { "" },
        clients.acknowledged
    );
    down(cluster, &primary)
}

pub(super) fn shakes_hands_alike(cluster: &mut Cluster<'_>) -> Result<()> {
    let since_ms = now_ms()?;
    let plan = nginx_with_tls(cluster)?;
    let (mut primary, _) = up(cluster, &plan)?;
    for number in 1..=2 {
        shake_hands(cluster)?;
        (primary, _) = whole(cluster)?;
        no_difference(cluster, &primary, since_ms).with_context(|| format!("before kill {number}"))?;
        cluster.kill_host(&primary)?;
        let (took_over, _) = cluster.await_take_over(NAME, &primary, PATIENCE)?;
        let dead = std::mem::replace(&mut primary, took_over);
        shake_hands(cluster)?;
        cluster.start_host(&dead)?;
        cluster.await_protected(NAME, PATIENCE)?;
    }
    shake_hands(cluster)?;
    no_difference(cluster, &primary, since_ms)?;
    println!(
        "program: {} TLS handshakes over 2 kills, 0 differing",
        5 * HANDSHAKES
    );
    down(cluster, &primary)
}

fn shake_hands(cluster: &Cluster<'_>) -> Result<()> {
    let url = format!("https://{}/", service());
    for number in 1..=HANDSHAKES {
        let mut curl = cluster.testbed().node("client").command("curl")?;
        let said = curl.args(["-sk", "--max-time", "60", &url]).output()?;
        let hello = said.status.success() && said.stdout == b"hello";
        ensure!(hello, "handshake {number}: {said:?}");
    }
    Ok(())
}

fn nginx_with_tls(cluster: &Cluster<'_>) -> Result<Plan> {
    let folder = cluster.testbed().dir();
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"])
        .args([
            "-subj",
            "/CN=test",
            "-keyout",
            &at("key.pem"),
            "-out",
            &at("certificate.pem"),
        ])
        .output()
        .context("openssl (cargo xtask setup)")?;
    ensure!(
        Path::new(NGINX).exists(),
        "{NGINX} is not here (cargo xtask setup)"
    );
    ensure!(made.status.success(), "openssl: {made:?}");
    let settings = format!(
        "daemon off; user root; worker_processes 1; pid /tmp/nginx.pid; error_log stderr; events {{}}\n\
         http {{ access_log off; server {{ listen {} ssl; ssl_certificate {}; ssl_certificate_key {};\n\
         location / {{ return 200 hello; }} }} }}\n",
        service().port(),
        at("certificate.pem"),
        at("key.pem")
    );
    std::fs::write(at("tls.conf"), settings)?;
    let command = [NGINX, "-c", &at("tls.conf")].map(str::to_owned).to_vec();
    let lines = ["port = 6379", "chance = \"agreed\""].map(str::to_owned).to_vec();
    Ok(Plan {
        command,
        lines,
        standby_after: None,
    })
}

fn now_ms() -> Result<u64> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(u64::try_from(since.as_millis())?)
}

/// Since then, by a host's events, which it keeps over restarts.
fn no_difference(cluster: &Cluster<'_>, primary: &str, since_ms: u64) -> Result<()> {
    let events = cluster.events(primary)?.into_iter();
    let differs =
        |event: &Event| event.kind == EventKind::BackupLost && event.text.contains("something else");
    let lost: Vec<String> = events
        .filter(|event| event.time_ms >= since_ms && differs(event))
        .map(|event| event.text)
        .collect();
    ensure!(lost.is_empty(), "host {primary}: {lost:?}");
    Ok(())
}

struct Askers {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Result<Result<()>>>>,
}

impl Askers {
    fn start(node: &Node, draws: bool) -> Result<Self> {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = Vec::new();
        for number in 0..ASKERS {
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            workers.push(node.spawn(&format!("time-{number}"), move || {
                ask(number, draws, &stop, &done)
            })?);
        }
        Ok(Self { stop, done, workers })
    }

    fn await_more(&self, more: u64) -> Result<()> {
        let done = || self.done.load(Ordering::Relaxed);
        let (goal, until) = (done() + more, Instant::now() + PATIENCE);
        while done() < goal {
            let gone = self.workers.iter().any(JoinHandle::is_finished);
            ensure!(!gone, "who asks for the time gave up");
            ensure!(
                Instant::now() < until,
                "the time was told {} times, not {goal}",
                done()
            );
            // A look is enough: nothing is measured here.
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        for worker in self.workers {
            worker
                .join()
                .map_err(|_| anyhow!("who asks for the time panicked"))???;
        }
        Ok(self.done.load(Ordering::Relaxed))
    }
}

fn ask(number: usize, draws: bool, stop: &AtomicBool, done: &AtomicU64) -> Result<()> {
    let key = format!("drawn-{number}");
    let mut connection = Connection::open(service(), PATIENCE)?;
    let mut last = 0;
    while !stop.load(Ordering::Relaxed) {
        match connection.ask(&["EVAL", TIME, "0"], PATIENCE)? {
            Answer::Integer(now) => {
                ensure!(now >= last, "the time goes back: {now} after {last}");
                last = now;
            }
            other => anyhow::bail!("{other:?} is no time"),
        }
        if draws {
            let drawn = connection.ask(&["EVAL", DRAW, "1", &key], PATIENCE)?;
            ensure!(matches!(drawn, Answer::Bulk(Some(_))), "{drawn:?} was drawn");
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
