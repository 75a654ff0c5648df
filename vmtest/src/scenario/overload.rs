//! A machine that has much else to do: busy loops at normal priority beside the whole testbed, a load, and a kill in between.
//!
//! * **Decides:** that a busy machine is no reason for an election or to go on unprotected: nobody is elected but after the kill,
//!   and but for the join after it the VM is protected nearly all the time. Clients lose nothing.
//! * **Flow:** VM up and protected -> busy loops -> half of the time -> SIGKILL to the primary's host, which comes back -> the
//!   other half -> the daemons' logs are read, and the clients' verdict.
//! * **Not here:** how fast it is then.

use dunlin_api::EventKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};

use super::World;
use crate::client::{Counter, CounterReport, CounterSpec};
use crate::cluster::{Cluster, Logged, VmPlan, await_service, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;

/// Nothing may take longer, though the machine is as busy as it gets.
const PATIENCE: Duration = Duration::from_secs(240);
/// The least part of the time, in percent, that the VM is protected.
const PROTECTED_PERCENT: f64 = 99.0;

/// How busy, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct OverloadSpec {
    /// Busy loops.
    pub loops: usize,
    /// How long, the join after the kill aside.
    pub lasts: Duration,
}

/// What happened.
#[derive(Clone, Debug)]
pub struct OverloadOutcome {
    /// What the clients saw.
    pub clients: CounterReport,
    /// The part of the time that the VM was protected, in percent, the join after the kill aside.
    pub protected_percent: f64,
    /// How long that join took.
    pub join: Duration,
    /// The longest that a client waited for an answer, in milliseconds.
    pub longest_gap_ms: u64,
}

/// Plays it.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World, spec: OverloadSpec) -> Result<OverloadOutcome> {
    in_a_testbed(
        "overload",
        &TestbedSpec::three_hosts(),
        &world.dunlin,
        |cluster| play(cluster, world, spec),
    )
}

fn play(cluster: &mut Cluster<'_>, world: &World, spec: OverloadSpec) -> Result<OverloadOutcome> {
    cluster.start_hosts()?;
    let plan = VmPlan::redis("dunlin");
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, service(), PATIENCE)?;
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: service(),
            connections: 4,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    cluster.await_protected(&plan.name, PATIENCE)?;
    counter.await_more(100, PATIENCE)?;
    let busy = Busy::start(spec.loops);
    let begun = SystemTime::now();
    std::thread::sleep(spec.lasts / 2);
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    let killed = SystemTime::now();
    cluster.kill_host(&primary)?;
    counter.await_more(20, PATIENCE)?;
    cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
    cluster.start_host(&primary)?;
    cluster.await_protected(&plan.name, PATIENCE)?;
    let joined = SystemTime::now();
    std::thread::sleep(spec.lasts / 2);
    let ended = SystemTime::now();
    counter.await_more(20, PATIENCE)?;
    drop(busy);
    let (clients, _) = counter.finish()?;
    let events = cluster.logged()?;
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    cluster.end(&primary, &plan.name)?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    let during = |from, to| {
        let of = events
            .iter()
            .filter(move |event| event.at > from && event.at < to);
        of.filter(|event| event.kind == EventKind::Elected).count()
    };
    let (before, kill, after) = (
        during(begun, killed),
        during(killed, joined),
        during(joined, ended),
    );
    let halves = unprotected(&events, begun, killed) + unprotected(&events, joined, ended);
    let protected_percent = 100.0 * (1.0 - halves.as_secs_f64() / spec.lasts.as_secs_f64());
    ensure!(
        before + after == 0 && kill == 1,
        "{before} elections before the kill, {kill} for it, {after} after it; protected {protected_percent:.2} % of the time"
    );
    ensure!(
        protected_percent >= PROTECTED_PERCENT,
        "protected {protected_percent:.2} % of the time, and at least {PROTECTED_PERCENT} % is demanded"
    );
    Ok(OverloadOutcome {
        longest_gap_ms: clients.longest_gap_us / 1000,
        clients,
        protected_percent,
        join: joined.duration_since(killed).unwrap_or_default(),
    })
}

/// How long the VM was not protected between two moments, at the first of which it was.
fn unprotected(events: &[Logged], from: SystemTime, to: SystemTime) -> Duration {
    let mut since = None;
    let mut sum = Duration::ZERO;
    for event in events.iter().filter(|event| event.at > from && event.at < to) {
        match event.kind.as_str() {
            "unprotected" | "took-over" | "backup-lost" | "quorum-lost" => {
                since.get_or_insert(event.at);
            }
            "protected" => {
                if let Some(since) = since.take() {
                    sum += event.at.duration_since(since).unwrap_or_default();
                }
            }
            _ => {}
        }
    }
    sum + since.map_or(Duration::ZERO, |since: SystemTime| {
        to.duration_since(since).unwrap_or_default()
    })
}

/// Threads that do nothing as fast as they can, and end with this value or with this process.
pub struct Busy {
    stop: Arc<AtomicBool>,
    loops: Vec<JoinHandle<()>>,
}

impl Busy {
    /// So many of them.
    #[must_use]
    pub fn start(count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let one = || {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let loops = (0..count).map(|_| one()).collect();
        Self { stop, loops }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for one in self.loops.drain(..) {
            let _ = one.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_without_protection_is_summed_up_between_two_moments() {
        let zero = SystemTime::UNIX_EPOCH;
        let at = |second| zero + Duration::from_secs(second);
        let events: Vec<Logged> = [
            (1, "unprotected"),
            (3, "protected"),
            (4, "elected"),
            (10, "backup-lost"),
            (11, "unprotected"),
            (15, "protected"),
            (20, "took-over"),
        ]
        .map(|(second, kind)| Logged {
            at: at(second),
            host: "a".to_owned(),
            kind: kind.into(),
        })
        .into();
        let between = |from, to| unprotected(&events, at(from), at(to)).as_secs();
        assert_eq!(between(0, 9), 2);
        assert_eq!(between(0, 30), 2 + 5 + 10);
        assert_eq!(between(5, 9), 0);
    }
}
