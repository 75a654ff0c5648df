//! Two VMs on the same two hosts with opposite roles: each host is the primary of one and the backup of the other.
//!
//! * **Decides:** that a host's death costs each VM what it should, and no VM the other's.
//! * **Flow:** both up and protected -> both counted on -> host a killed -> both go on from host b -> a returns -> both
//!   protected -> host b killed -> both go on from host a.

use dunlin_api::Role;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use super::World;
use crate::client::{Answers, Counter, CounterReport, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, both_copies, in_a_testbed};
use crate::testbed::TestbedSpec;
use crate::traces;

const PATIENCE: Duration = Duration::from_secs(120);
/// So often both are brought to their places.
const TIMES: usize = 3;
const GIVE_UP: Duration = Duration::from_secs(60);
/// The longest time without an answer. Two VMs with two copies each share the machine, and a client that was not heard sends again after 0.2, 0.6,
/// 1.4, 3 and 6.2 seconds: what takes a little more than three looks like more than six.
const GAP: Duration = Duration::from_secs(8);

/// What both VMs' clients saw.
pub struct Outcome {
    /// Answers to all clients.
    pub acknowledged: u64,
    /// The longest gap around a kill, in microseconds.
    pub worst_gap_us: u64,
}

/// Plays it.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World) -> Result<Outcome> {
    in_a_testbed("two-vms", &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        play(cluster, world)
    })
}

fn play(cluster: &mut Cluster<'_>, world: &World) -> Result<Outcome> {
    cluster.start_hosts()?;
    let plans = [
        VmPlan {
            name: "left".into(),
            ..VmPlan::redis("plover")
        },
        VmPlan {
            name: "right".into(),
            members: ["b", "a"],
            number: 1,
            ..VmPlan::redis("plover")
        },
    ];
    let client = cluster.testbed().node("client");
    for plan in &plans {
        let file = plan.write(cluster.testbed(), &world.image)?;
        cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
        await_service(client, plan.service(), PATIENCE)?;
    }
    // A busy machine may have moved one already, and moves one while the other is looked at.
    let opposite = [("a".into(), "b".into()), ("b".into(), "a".into())];
    let mut roles = Vec::new();
    for _ in 0..TIMES {
        for plan in &plans {
            cluster.serve_on(&plan.name, plan.members[0], PATIENCE)?;
        }
        roles = protected(cluster, &plans)?;
        if roles == opposite {
            break;
        }
    }
    ensure!(roles == opposite, "not opposite roles: {roles:?}");
    let counters = plans
        .iter()
        .map(|plan| {
            let spec = CounterSpec {
                target: plan.service(),
                connections: 2,
                together: false,
                give_up: GIVE_UP,
            };
            Counter::start(client, &spec)
        })
        .collect::<Result<Vec<_>>>()?;
    let mut moments = Vec::new();
    for (killed, other) in [("a", "b"), ("b", "a")] {
        await_answers(&counters, 100)?;
        // Four VMs on this machine's cores: a leader that was late begins a new term, and its backup joins anew.
        let names = plans.each_ref().map(|plan| plan.name.as_str());
        let (_, at) = cluster.kill_primary(&names, Some(killed), PATIENCE)?;
        await_answers(&counters, 50)?;
        moments.push((at, Instant::now()));
        cluster.await_status("both VMs served by the host that is left", PATIENCE, |hosts| {
            let host = hosts.iter().find(|host| host.host == other)?;
            plans
                .iter()
                .all(|plan| {
                    host.vm(&plan.name)
                        .is_some_and(|vm| vm.role == Role::Primary && !vm.protected)
                })
                .then_some(())
        })?;
        cluster.start_host(killed)?;
        protected(cluster, &plans)?;
    }
    await_answers(&counters, 100)?;
    let mut outcome = Outcome {
        acknowledged: 0,
        worst_gap_us: 0,
    };
    for counter in counters {
        let (clients, answers) = counter.finish()?;
        judge(&mut outcome, &clients, &answers, &moments)?;
    }
    for plan in &plans {
        cluster.dunlin("a", &["down", "--now", &plan.name])?;
    }
    let left = traces::after_down(cluster)?;
    ensure!(left.is_empty(), "left after down: {}", left.join(", "));
    for host in cluster.running() {
        cluster.stop_host(&host, Signal::SIGTERM)?;
    }
    Ok(outcome)
}

/// Primary and backup of each VM, when each has both at once.
fn protected(cluster: &Cluster<'_>, plans: &[VmPlan]) -> Result<Vec<(String, String)>> {
    cluster.await_status("both VMs protected", PATIENCE, |hosts| {
        plans.iter().map(|plan| both_copies(hosts, &plan.name)).collect()
    })
}

fn await_answers(counters: &[Counter], count: u64) -> Result<()> {
    counters
        .iter()
        .try_for_each(|counter| counter.await_more(count, PATIENCE))
}

fn judge(
    outcome: &mut Outcome,
    clients: &CounterReport,
    answers: &Answers,
    moments: &[(Instant, Instant)],
) -> Result<()> {
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    outcome.acknowledged += clients.acknowledged;
    for &(from, to) in moments {
        outcome.worst_gap_us = outcome.worst_gap_us.max(answers.longest_gap_us(from, to));
    }
    ensure!(
        Duration::from_micros(outcome.worst_gap_us) <= GAP,
        "clients waited {} ms, and at most {} ms is allowed",
        outcome.worst_gap_us / 1000,
        GAP.as_millis()
    );
    Ok(())
}
