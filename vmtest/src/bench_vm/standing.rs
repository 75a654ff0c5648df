//! One VM under one policy, up, protected and warm, and what a load on it costs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::BenchSpec;
use super::case::Case;
use super::clients::Clients;
use super::paired;
use super::report::{BASELINE, Sample, Syncs};
use crate::cluster::{Cluster, VmPlan, VmStatus};
use crate::image::{self, GuestImage};
use crate::lab::{CpuShare, Lab, LabSpec};

/// Nothing takes longer than this, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a load has run under a policy before its window begins.
const LEAD_IN_S: f64 = 1.0;
const HOSTS: [&str; 3] = ["a", "b", "c"];

/// Builds a lab whose hosts have their share of the CPU, but may use all of it until [`with_shares`].
pub fn lab(host_cpu_percent: u32) -> Result<Lab> {
    let lab = Lab::new(&LabSpec {
        host_cpu: Some(CpuShare::percent(host_cpu_percent)),
        ..LabSpec::three_hosts()
    })?;
    for host in HOSTS {
        lab.node(host).set_cpu_share(None)?;
    }
    Ok(lab)
}

/// From here on each host has its share: booting is not what is measured.
pub fn with_shares(lab: &Lab, host_cpu_percent: u32) -> Result<()> {
    for host in HOSTS {
        lab.node(host)
            .set_cpu_share(Some(CpuShare::percent(host_cpu_percent)))?;
    }
    Ok(())
}

/// The daemons.
pub fn cluster<'lab>(lab: &'lab Lab, spec: &BenchSpec) -> Result<Cluster<'lab>> {
    let mut cluster = Cluster::init(lab, &spec.dunlin, &HOSTS)?;
    for host in HOSTS {
        cluster.start_host(host)?;
    }
    Ok(cluster)
}

/// The VM of a service.
pub fn plan(spec: &BenchSpec, service: &str, policy: &str) -> VmPlan {
    let redis = VmPlan::redis(policy);
    let memory_mib = image::service(service).map_or(redis.memory_mib, |service| service.memory_mib);
    VmPlan {
        name: service.to_owned(),
        memory_mib,
        disk_mib: spec.disk_mib,
        sync: spec.sync.clone(),
        vcpus: spec.vcpus,
        ..redis
    }
}

/// The image of a service with the bench's further words for its kernel.
pub fn guest(spec: &BenchSpec, service: &str) -> Result<GuestImage> {
    let found = spec.images.iter().find(|(name, _)| name == service);
    let (_, image) = found.with_context(|| format!("no image of {service}"))?;
    let mut image = image.clone();
    for word in &spec.append {
        image.append.push(' ');
        image.append.push_str(word);
    }
    Ok(image)
}

/// The clients of a lab for a service.
pub fn clients<'lab>(lab: &'lab Lab, spec: &BenchSpec, service: &str) -> Clients<'lab> {
    Clients {
        root: spec.clients.clone(),
        node: lab.node("client"),
        guest: image::GUEST_ADDRESS
            .split('/')
            .next()
            .and_then(|address| address.parse().ok())
            .expect("the guest's address"),
        port: image::service(service).map_or(image::REDIS_PORT, |service| service.port),
    }
}

/// A load that went wrong does not end the others.
pub type Outcome = std::result::Result<Sample, String>;

/// Boots `cases`' service once, and makes each load in windows of every policy, round after round. `told` gets the round, the
/// policy's place, what came of it, and the case's place.
///
/// # Errors
/// When the VM cannot be had at all.
pub fn windows(
    spec: &BenchSpec,
    cases: &[Case],
    told: &mut dyn FnMut(u32, usize, Outcome, usize),
) -> Result<()> {
    let first = cases.first().context("no case")?;
    // The daemon takes a VM up as replicated: one that never was has a group of its own kind.
    let boot = spec
        .policies
        .iter()
        .map(|label| policy_of(label))
        .find(|policy| *policy != BASELINE);
    let mut now = boot.unwrap_or(BASELINE).to_owned();
    let lab = lab(spec.host_cpu_percent)?;
    {
        let cluster = cluster(&lab, spec)?;
        let plan = plan(spec, first.service, &now);
        let file = plan.write(&lab, &guest(spec, first.service)?)?;
        cluster.dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
        let clients = clients(&lab, spec, first.service);
        let begun = clients.await_service(first, PATIENCE).and_then(|()| {
            with_shares(&lab, spec.host_cpu_percent)?;
            // What is translated or compiled when it first runs.
            clients.run(first, spec.warm_up_seconds).map(drop)
        });
        if let Err(error) = begun {
            let kept = cluster.keep_logs(&format!("bench-{}", first.service));
            return Err(error.context(format!("logs: {kept:?}")));
        }
        for (number, case) in cases.iter().enumerate() {
            for round in 1..=spec.rounds {
                for at in paired::order(spec.policies.len(), round) {
                    let policy = policy_of(&spec.policies[at]);
                    let outcome = change_to(&cluster, &plan.name, &mut now, policy)
                        .and_then(|()| one(spec, &cluster, &plan, &clients, case, policy, round, LEAD_IN_S));
                    if outcome.is_err() {
                        cluster.keep_logs(&format!("bench-{}-{}-{policy}", case.service, case.name));
                    }
                    told(
                        round,
                        at,
                        outcome.map_err(|error| format!("round {round}: {error:#}")),
                        number,
                    );
                }
            }
        }
        cluster.dunlin("a", &["down", "--now", &plan.name])?;
    }
    lab.close()
}

/// The policy of a label: one that is measured against itself has a mark behind its name.
pub fn policy_of(label: &str) -> &str {
    label.trim_end_matches('\'')
}

/// The VM goes on under another policy, protected if that protects.
fn change_to(cluster: &Cluster<'_>, vm: &str, now: &mut String, policy: &str) -> Result<()> {
    if now != policy {
        cluster.dunlin("a", &["policy", "--no-wait", vm, policy])?;
        policy.clone_into(now);
    }
    if policy != BASELINE {
        cluster.await_protected(vm, PATIENCE)?;
    }
    Ok(())
}

/// Boots `cases`' service under `policy` and makes all loads, one after the other.
///
/// # Errors
/// When the VM cannot be had at all.
pub fn measure(spec: &BenchSpec, policy: &str, round: u32, cases: &[Case]) -> Result<Vec<Outcome>> {
    let first = cases.first().context("no case")?;
    let lab = lab(spec.host_cpu_percent)?;
    let mut outcomes = Vec::new();
    {
        let cluster = cluster(&lab, spec)?;
        let policy = policy_of(policy);
        let plan = plan(spec, first.service, policy);
        let file = plan.write(&lab, &guest(spec, first.service)?)?;
        cluster.dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
        let clients = clients(&lab, spec, first.service);
        let begin = || -> Result<()> {
            clients.await_service(first, PATIENCE)?;
            if policy != BASELINE {
                cluster.await_protected(&plan.name, PATIENCE)?;
            }
            with_shares(&lab, spec.host_cpu_percent)?;
            Ok(())
        };
        if let Err(error) = begin() {
            let kept = cluster.keep_logs(&format!("bench-{}-{policy}", first.service));
            return Err(error.context(format!("logs: {kept:?}")));
        }
        for case in cases {
            let outcome = one(
                spec,
                &cluster,
                &plan,
                &clients,
                case,
                policy,
                round,
                spec.warm_up_seconds,
            );
            if outcome.is_err() {
                cluster.keep_logs(&format!("bench-{}-{}-{policy}", case.service, case.name));
            }
            outcomes.push(outcome.map_err(|error| format!("round {round}: {error:#}")));
        }
        cluster.dunlin("a", &["down", "--now", &plan.name])?;
    }
    lab.close()?;
    Ok(outcomes)
}

#[allow(clippy::too_many_arguments)] // One call, from two kinds of run.
fn one(
    spec: &BenchSpec,
    cluster: &Cluster<'_>,
    plan: &VmPlan,
    clients: &Clients<'_>,
    case: &Case,
    policy: &str,
    round: u32,
    lead_in_s: f64,
) -> Result<Sample> {
    // Emulated code is translated when it first runs, two of the services compile theirs, too, and a VM under `dunlin` looks for
    // the manner that pays: what is measured is what a load gets that lasts.
    clients.run(case, lead_in_s).context("warming up")?;
    let before = primary(cluster, &plan.name)?;
    let cpu = || HOSTS.map(|host| cluster.lab().node(host).cpu_time().unwrap_or_default());
    let (cpu_before, begun) = (cpu(), Instant::now());
    let load = clients.run(case, spec.seconds)?;
    let (took_s, cpu_after) = (begun.elapsed().as_secs_f64(), cpu());
    let after = primary(cluster, &plan.name)?;
    let mut cpu_percent = [0.0; 3];
    for (index, value) in cpu_percent.iter_mut().enumerate() {
        *value = (cpu_after[index].saturating_sub(cpu_before[index])).as_secs_f64() / took_s * 100.0;
    }
    ensure!(load.per_second > 0.0, "nothing was answered");
    if policy != BASELINE {
        // A figure of a VM that lost its backup under way would be one of no replication at all.
        ensure!(
            before.protected && after.protected && before.term == after.term,
            "the VM was not protected all the time"
        );
    }
    Ok(Sample {
        round,
        load,
        took_s,
        syncs: difference(&before, &after),
        cpu_percent,
        status: after.more,
    })
}

fn primary(cluster: &Cluster<'_>, vm: &str) -> Result<VmStatus> {
    let statuses = cluster.statuses();
    let vms = statuses.iter().filter_map(|host| host.vm(vm));
    let found = vms.filter(|vm| vm.role == "primary").max_by_key(|vm| vm.term);
    found.cloned().context("no host is the VM's primary")
}

fn difference(before: &VmStatus, after: &VmStatus) -> Syncs {
    let count = after.sync.count.saturating_sub(before.sync.count);
    let less = |after: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>| -> BTreeMap<String, u64> {
        let pairs = after.iter().map(|(name, value)| {
            let old = before.get(name).copied().unwrap_or(0);
            (name.clone(), value.saturating_sub(old))
        });
        pairs.collect()
    };
    let sums = less(&after.sync.sum, &before.sync.sum);
    Syncs {
        count,
        aborted: after.sync.aborted.saturating_sub(before.sync.aborted),
        reasons: less(&after.sync.reasons, &before.sync.reasons),
        manner: after.sync.manner.clone(),
        change_overs: after.sync.change_overs.saturating_sub(before.sync.change_overs),
        compared: less(&after.sync.compared, &before.sync.compared),
        mean: sums
            .into_iter()
            .filter(|_| count > 0)
            .map(|(name, sum)| (name, sum as f64 / count as f64))
            .collect(),
        median: after.sync.median.clone(),
    }
}
