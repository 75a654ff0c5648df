//! One window: a load on a VM whose policy has settled, and all that it cost.
//!
//! * **Decides:** when a window may begin (the mode of keeping the copies has been the same for [`SETTLED_S`] under the very load), and
//!   whether it counts (protected all the time).
//! * **Flow:** [`change_to`] -> [`lead_in`] -> [`one`].
//! * **Invariants:** (1) every window of a replicated policy begins with a backup brought in anew, whatever was before it, so that all are of one
//!   kind; (2) between the counters before and after a window the bench asks the hosts nothing.

use dunlin_api::{EventKind, PausesOf, Role};
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::case::Case;
use super::clients::TooSlow;
use super::cost::Reading;
use super::report::{BASELINE, Sample, Syncs};
use super::standing::{HOSTS, Service, with_shares};
use super::syscalls::{Calls, Trace};
use crate::cluster::VmStatus;

/// Another policy is taken up, and its backup brought in, within this time.
const CHANGE: Duration = Duration::from_secs(60);
/// A policy has settled when nothing of its mode changed for so long under the load.
const SETTLED_S: f64 = 1.5;
/// Where nothing has to settle: what the last backup's end and the load's beginning take.
pub const ALONE_S: f64 = 1.0;
/// The window begins after this time at the latest, and its sample says that the mode had not settled.
const LEAD_IN_AT_MOST: Duration = Duration::from_secs(8);

/// Why a window has no figure.
pub struct Lost {
    /// A client saw something wrong: the case has no figures at all.
    pub wrong: bool,
    /// In one line.
    pub why: String,
}

/// What came of a window.
pub type Outcome = Result<Sample, Lost>;

/// What the clients say is about the service: unless they were merely too slow, it was wrong.
fn of_clients(error: anyhow::Error) -> Lost {
    Lost {
        wrong: error.downcast_ref::<TooSlow>().is_none(),
        why: format!("{error:#}"),
    }
}

impl From<anyhow::Error> for Lost {
    fn from(error: anyhow::Error) -> Self {
        Self {
            wrong: false,
            why: format!("{error:#}"),
        }
    }
}

/// The VM goes on under another policy (`now` is the one that it has), protected if that protects. The hosts have all of the CPU meanwhile: a
/// join is not what is measured.
pub fn change_to(service: &Service<'_>, now: &mut String, policy: &str) -> Result<()> {
    let vm = &service.plan.name;
    let order = |policy: &str, now: &mut String| -> Result<()> {
        service
            .cluster
            .dunlin("a", &["policy", "--no-wait", vm, policy])?;
        policy.clone_into(now);
        Ok(())
    };
    if now == BASELINE && policy == BASELINE {
        return Ok(());
    }
    for host in HOSTS {
        service.testbed.node(host).set_cpu_share(None)?;
    }
    let changed = (|| {
        if now == policy {
            order(BASELINE, now)?;
        }
        order(policy, now)?;
        if policy != BASELINE {
            service.cluster.await_protected(vm, CHANGE)?;
        }
        Ok(())
    })();
    with_shares(service.testbed, service.spec.host_cpu_percent)?;
    changed
}

/// What a lead-in left behind.
pub struct Begun {
    status: VmStatus,
    /// Answers a second, to know how many make a window.
    per_second: Option<f64>,
    settled: bool,
}

/// Makes the load until nothing of the VM's mode changes any more.
///
/// # Errors
/// When a client saw something wrong, or the VM has no primary.
pub fn lead_in(service: &Service<'_>, case: &Case, policy: &str) -> Result<Begun, Lost> {
    service.over(case.link)?;
    let begun = Instant::now();
    let piece_s = if policy == BASELINE { ALONE_S } else { SETTLED_S };
    let mut per_second = None;
    let mut before = primary(service)?;
    loop {
        match service.clients.run(case, piece_s, per_second) {
            Ok(load) => per_second = Some(load.per_second),
            Err(error) => {
                let lost = of_clients(error.context("before the window"));
                if lost.wrong {
                    return Err(lost);
                }
                per_second = None;
            }
        }
        let status = primary(service)?;
        let settled = has_settled(&before, &status);
        if settled || begun.elapsed() >= LEAD_IN_AT_MOST {
            return Ok(Begun {
                status,
                per_second,
                settled,
            });
        }
        before = status;
    }
}

fn has_settled(before: &VmStatus, after: &VmStatus) -> bool {
    let of = |vm: &VmStatus| {
        (
            vm.policy.clone(),
            vm.sync.mode.clone(),
            vm.sync.change_overs,
            vm.protected,
            vm.term,
        )
    };
    of(before) == of(after)
}

/// The window itself.
///
/// # Errors
/// When a client saw something wrong, or the VM was not protected all the time.
pub fn one(service: &Service<'_>, case: &Case, policy: &str, round: u32, begun: Begun) -> Outcome {
    let before = begun.status;
    let crowded_out = service.crowded_out();
    let counters = Reading::take(service.testbed)?;
    let (at, clock) = (Instant::now(), SystemTime::now());
    let load = service
        .clients
        .run(case, case.window_s(service.spec.seconds), begun.per_second)
        .map_err(of_clients)?;
    let took_s = at.elapsed().as_secs_f64();
    let counters_after = Reading::take(service.testbed)?;
    let after = primary(service)?;
    ensure_answered(load.per_second)?;
    let crowded_out = service.crowded_out() - crowded_out;
    if crowded_out > 0 {
        return Err(anyhow::anyhow!(
            "the link lost {crowded_out} frames for want of room, which was not asked of it"
        )
        .into());
    }
    if policy != BASELINE {
        // A figure of a VM that lost its backup under way would be one of no replication at all.
        protected_since(service, clock, &before, &after)?;
    }
    let used = counters.cpu_until(&counters_after);
    // A client needs a moment to start, in which its host does nothing for it.
    let loaded_s = (load.in_all as f64 / load.per_second).min(took_s);
    Ok(Sample {
        round,
        beside: String::new(),
        took_s,
        settled: begun.settled,
        syncs: difference(&before, &after),
        cpu_percent: used.map(|time| time.as_secs_f64() / loaded_s * 100.0),
        machine: counters.machine_until(&counters_after),
        cost: counters.until(&counters_after, load.in_all),
        load,
        status: by_name(&after),
    })
}

fn ensure_answered(per_second: f64) -> Result<()> {
    ensure!(per_second.is_finite() && per_second > 0.0, "nothing was answered");
    Ok(())
}

fn protected_since(
    service: &Service<'_>,
    since: SystemTime,
    before: &VmStatus,
    after: &VmStatus,
) -> Result<()> {
    ensure!(
        before.protected && after.protected && before.term == after.term,
        "the VM was not protected all the time"
    );
    let vm = &service.plan.name;
    let events = service.cluster.events("a")?;
    let lapses = events
        .iter()
        .filter(|event| event.vm == *vm && event.at() >= since && event.kind == EventKind::Unprotected)
        .count();
    ensure!(
        lapses == 0,
        "the VM was without its backup {lapses} times meanwhile"
    );
    Ok(())
}

/// A window under strace, which has no other figure.
///
/// # Errors
/// As [`lead_in`], or strace's own.
pub fn traced(service: &Service<'_>, case: &Case, policy: &str) -> Result<Calls, Lost> {
    let begun = lead_in(service, case, policy)?;
    let daemon = service.cluster.pid("a").context("host a has no daemon")?;
    let file = service.testbed.dir().join("strace.txt");
    let trace = Trace::begin(daemon, &file)?;
    let load = service
        .clients
        .run(case, case.window_s(service.spec.seconds), begun.per_second)
        .map_err(of_clients)?;
    Ok(trace.end(&file, load.in_all)?)
}

/// The primary's status. It stays on host a; others are asked only where it does not.
pub fn primary(service: &Service<'_>) -> Result<VmStatus> {
    let vm = &service.plan.name;
    if let Ok(status) = service.cluster.status("a")
        && let Some(found) = status.vm(vm).filter(|vm| vm.role == Role::Primary)
    {
        return Ok(found.clone());
    }
    let statuses = service.cluster.statuses();
    let vms = statuses.iter().filter_map(|host| host.vm(vm));
    let found = vms.filter(|vm| vm.role == Role::Primary).max_by_key(|vm| vm.term);
    found.cloned().context("no host is the VM's primary")
}

/// What syncs did between two answers.
pub fn difference(before: &VmStatus, after: &VmStatus) -> Syncs {
    let (old, new) = (&before.sync, &after.sync);
    let count = new.count.saturating_sub(old.count);
    let sums = less(&by_name(&new.sum), &by_name(&old.sum));
    let mut compared = less(&by_name(&new.compared), &by_name(&old.compared));
    let mut taken = |name: &str| compared.remove(name).unwrap_or(0);
    Syncs {
        count,
        aborted: new.aborted.saturating_sub(old.aborted),
        reasons: less(&by_name(&new.reasons), &by_name(&old.reasons)),
        mode: new.mode.to_string(),
        change_overs: new.change_overs.saturating_sub(old.change_overs),
        released: taken("released"),
        held_us: taken("held_us"),
        compared,
        mean: sums
            .into_iter()
            .filter(|_| count > 0)
            .map(|(name, sum)| (name, sum as f64 / count as f64))
            .collect(),
        pauses: less(&by_length(&new.pauses.0), &by_length(&old.pauses.0))
            .into_iter()
            .filter(|(_, many)| *many > 0)
            .collect(),
    }
}

/// Figures by their names, as the report keeps them.
fn by_name<Value: DeserializeOwned>(figures: &impl Serialize) -> BTreeMap<String, Value> {
    let value = serde_json::to_value(figures).and_then(serde_json::from_value);
    value.expect("plain figures with names")
}

fn by_length(pauses: &[PausesOf]) -> BTreeMap<u64, u64> {
    pauses.iter().map(|of| (of.us, of.count)).collect()
}

fn less<Key: Ord + Clone>(after: &BTreeMap<Key, u64>, before: &BTreeMap<Key, u64>) -> BTreeMap<Key, u64> {
    let pairs = after.iter().map(|(name, value)| {
        let old = before.get(name).copied().unwrap_or(0);
        (name.clone(), value.saturating_sub(old))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_api::{Mode, Pauses};

    #[test]
    fn what_syncs_did_is_the_difference_of_two_answers() {
        let mut before = VmStatus::default();
        before.sync.count = 10;
        let pauses =
            |list: &[(u64, u64)]| Pauses(list.iter().map(|&(us, count)| PausesOf { us, count }).collect());
        before.sync.pauses = pauses(&[(1024, 9), (8192, 1)]);
        before.sync.sum.pause_us = 20_000;
        (before.sync.compared.held_us, before.sync.compared.matched) = (50, 1);
        let mut after = before.clone();
        after.sync.count = 14;
        after.sync.pauses = pauses(&[(1024, 9), (2048, 3), (8192, 2)]);
        after.sync.sum.pause_us = 36_000;
        (after.sync.compared.held_us, after.sync.compared.matched) = (450, 8);
        let syncs = difference(&before, &after);
        assert_eq!(syncs.pauses, [(2048, 3), (8192, 1)].into());
        assert_eq!(
            (syncs.count, syncs.mean["pause_us"], syncs.held_us),
            (4, 4000.0, 400)
        );
        assert_eq!((syncs.compared["matched"], syncs.compared["by_sync"]), (7, 0));
    }

    #[test]
    fn a_change_of_mode_and_one_there_and_back_are_not_settled() {
        let mut before = VmStatus {
            protected: true,
            ..VmStatus::default()
        };
        before.sync.mode = Mode::Match;
        assert!(has_settled(&before, &before.clone()));
        let mut other = before.clone();
        other.sync.mode = Mode::Passive;
        assert!(!has_settled(&before, &other));
        let mut back = before.clone();
        back.sync.change_overs = 2;
        assert!(!has_settled(&before, &back));
        let lost = VmStatus {
            protected: false,
            ..before.clone()
        };
        assert!(!has_settled(&before, &lost));
    }

    #[test]
    fn a_slow_client_costs_its_window_and_a_wrong_answer_all() {
        let slow = anyhow::Error::from(TooSlow::for_tests()).context("before the window");
        assert!(!of_clients(slow).wrong);
        assert!(of_clients(anyhow::anyhow!("the page has changed")).wrong);
    }
}
