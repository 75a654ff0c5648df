//! A second copy of a running program: after a take-over, after a difference, after a backup that was away.
//!
//! * **Decides:** what passes: the program is protected again by itself, its clients notice nothing, whoever dies next is replaced, and
//!   copy after copy nothing is left on the hosts.
//! * **Not here:** what a copy costs.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::holds::Holds;
use super::stories::under_counted_load;
use super::{ACKNOWLEDGED, CONNECTIONS, NAME, PATIENCE, Plan, count, down, up, whole};
use crate::cluster::{Cluster, in_a_testbed};
use crate::testbed::TestbedSpec;

/// The second take-over is by a copy of the copy that took over first.
pub(super) fn two_die(cluster: &mut Cluster<'_>) -> Result<()> {
    under_counted_load(cluster, |cluster, primary, _, counter| {
        cluster.kill_host(primary)?;
        cluster.await_take_over(NAME, primary, PATIENCE)?;
        cluster.start_host(primary)?;
        cluster
            .await_protected(NAME, PATIENCE)
            .context("after the first death")?;
        counter
            .await_more(ACKNOWLEDGED, PATIENCE)
            .context("no answers beside the new copy")?;
        let (serves, _) = whole(cluster)?;
        cluster.kill_host(&serves)?;
        cluster.await_take_over(NAME, &serves, PATIENCE).map(drop)
    })
}

/// Switchover after switchover, each by a copy that was brought in after the last one.
///
/// # Errors
/// When one does not go as it should; the daemons' logs are kept.
pub fn joins(binary: &Path, times: usize) -> Result<String> {
    in_a_testbed("program-joins", &TestbedSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        play_joins(cluster, times)
    })
}

/// A few of them, in a testbed that runs.
pub(super) fn few_joins(cluster: &mut Cluster<'_>) -> Result<()> {
    play_joins(cluster, 5).map(drop)
}

fn play_joins(cluster: &mut Cluster<'_>, times: usize) -> Result<String> {
    /// The first ones may begin something that stays: a thread of a library, memory that is kept.
    const WARM: usize = 2;
    up(cluster, &Plan::redis(cluster.testbed())?)?;
    let counter = count(cluster, CONNECTIONS)?;
    let mut first = None;
    for number in 1..=times {
        counter.await_more(ACKNOWLEDGED / 5, PATIENCE)?;
        let (old, _) = cluster.switch_over(NAME, PATIENCE)?;
        let (primary, _) = cluster
            .await_take_over(NAME, &old, PATIENCE)
            .with_context(|| format!("switchover {number}"))?;
        // The old primary may take itself for a protected one still.
        cluster.await_status(&format!("join {number}"), PATIENCE, |hosts| {
            let host = hosts.iter().find(|host| host.host == primary)?;
            host.vm(NAME)?.protected.then_some(())
        })?;
        if number == WARM {
            first = Some(Holds::of_both(cluster, &primary)?);
        }
    }
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    let (primary, _) = whole(cluster)?;
    let last = match &first {
        Some(first) => Holds::await_no_more_than(cluster, &primary, first)
            .with_context(|| format!("after {times} joins, and after {WARM}"))?,
        None => Holds::of_both(cluster, &primary)?,
    };
    down(cluster, &primary)?;
    let before = first.map_or_else(String::new, |first| Holds::told(&first));
    Ok(format!(
        "{times} joins, {} acknowledged, 0 lost; after {WARM} both hosts held {before}; at last {}; after down nothing",
        clients.acknowledged,
        Holds::told(&last)
    ))
}
