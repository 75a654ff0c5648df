//! Inputs of several connections that are unread together (`order = "batch"`): both copies read them in one order, kill after kill.
//!
//! * **Decides:** what passes: fifty clients count on one key, so that the order of reading is in each answer; no output differs, nothing is
//!   lost, doubled or reset, and inputs did go together; a program that waits otherwise than in one `epoll` gets them one at a time, and says so.
//! * **Not here:** the rule (core's `program::order::batch`, and there its property test).

use anyhow::{Context, Result, ensure};
use dunlin_api::EventKind;

use super::{ACKNOWLEDGED, NAME, PATIENCE, Plan, count, down, figure, oddities, up};
use crate::cluster::Cluster;

const CLIENTS: usize = 50;
const KILLS: usize = 3;
/// redis, and fifty who count on one key.
pub(super) fn is_read_alike(cluster: &mut Cluster<'_>) -> Result<()> {
    let mut plan = Plan::redis(cluster.testbed())?;
    plan.lines.push("order = \"batch\"".to_owned());
    let (mut primary, _) = up(cluster, &plan)?;
    let counter = count(cluster, CLIENTS)?;
    let (mut together, mut inputs) = (0, 0);
    for number in 1..=KILLS {
        counter.await_more(4 * ACKNOWLEDGED, PATIENCE)?;
        together += figure(cluster, &primary, |program| program.together)?;
        inputs += figure(cluster, &primary, |program| program.inputs)?;
        let differing = figure(cluster, &primary, |program| program.differing)?;
        ensure!(
            differing == 0,
            "before kill {number} {differing} outputs differed"
        );
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
    counter.await_more(4 * ACKNOWLEDGED, PATIENCE)?;
    let differing = figure(cluster, &primary, |program| program.differing)?;
    let matched = figure(cluster, &primary, |program| program.matched)?;
    ensure!(
        differing == 0 && matched > 0,
        "at last {differing} outputs differed, {matched} did not"
    );
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    ensure!(
        together > 0,
        "none of {inputs} inputs was delivered beside another"
    );
    println!(
        "program: {CLIENTS} clients, {} counted, {} lost, {} connections broken over {KILLS} kills; {together} of {inputs} inputs went beside \
         others; outputs differing {differing}",
        clients.acknowledged, clients.lost, clients.resets
    );
    down(cluster, &primary)
}

/// A program to which batches would be wrong gets none.
pub(super) fn is_not_for_threads(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, _) = up(cluster, &Plan::odd("threads", &["order = \"batch\"".to_owned()])?)?;
    let counter = oddities::count(cluster)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let events = cluster.events(&primary)?;
    let told = events.iter().find(|event| event.kind == EventKind::NotBatched);
    let told = told.context("nobody is told that there are no batches")?;
    ensure!(told.text.contains("epoll"), "{}", told.text);
    let together = figure(cluster, &primary, |program| program.together)?;
    let differing = figure(cluster, &primary, |program| program.differing)?;
    ensure!(
        together == 0 && differing == 0,
        "{together} inputs went beside others, {differing} outputs differed"
    );
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    down(cluster, &primary)
}
