//! Inputs of several connections that are unread together (`order = "batch"`): both copies read them in one order, kill after kill.
//!
//! * **Decides:** what passes: fifty clients count on one key, so that the order of reading is in each answer; no output differs, nothing is
//!   lost, doubled or reset, and inputs did go together; a program that reads them otherwise gets them one at a time from then on; a program that waits otherwise than in one `epoll` gets them one at a time, and says so.
//! * **Not here:** the rule (core's `program::order::batch`, and there its property test).

use anyhow::{Context, Result, ensure};
use dunlin_api::EventKind;

use super::{ACKNOWLEDGED, NAME, PATIENCE, Plan, count, down, figure, oddities, up, whole};
use crate::cluster::{Cluster, HostStatus};

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
        (primary, _) = whole(cluster)?;
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

/// Nobody has said in which order inputs are to be given. A program that answers last come, first served reads batches otherwise on each host:
/// that costs the second copy once, and then its inputs are given one at a time, on whichever host.
pub(super) fn are_kept_apart(cluster: &mut Cluster<'_>) -> Result<()> {
    const CLIENTS: usize = 16;
    let (primary, _) = up(cluster, &Plan::odd("backwards", &[])?)?;
    let counter = count(cluster, CLIENTS)?;
    let is_told = |hosts: &[HostStatus]| {
        let events = hosts.iter().find(|host| host.host == primary)?;
        events.vm(NAME)?;
        let told = oddities::events(cluster, &primary).ok()?;
        let apart = told.iter().find(|event| event.kind == EventKind::NotBatched)?;
        apart.text.contains("one at a time").then_some(())
    };
    cluster.await_status("inputs that are kept apart", PATIENCE, is_told)?;
    cluster.await_protected(NAME, PATIENCE)?;
    let differing = figure(cluster, &primary, |program| program.differing)?;
    let together = figure(cluster, &primary, |program| program.together)?;
    counter.await_more(4 * ACKNOWLEDGED, PATIENCE)?;
    ensure!(
        figure(cluster, &primary, |program| program.differing)? == differing
            && figure(cluster, &primary, |program| program.together)? == together,
        "inputs were still unread together, or outputs differed"
    );
    // The other host knows it of the copy that it got.
    let (primary, _) = whole(cluster)?;
    cluster.kill_host(&primary)?;
    let (took_over, _) = cluster.await_take_over(NAME, &primary, PATIENCE)?;
    cluster.start_host(&primary)?;
    cluster.await_protected(NAME, PATIENCE)?;
    counter.await_more(4 * ACKNOWLEDGED, PATIENCE)?;
    let differing = figure(cluster, &took_over, |program| program.differing)?;
    let together = figure(cluster, &took_over, |program| program.together)?;
    ensure!(
        (differing, together) == (0, 0),
        "after the take-over {together} inputs were unread together, {differing} outputs differed"
    );
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    println!(
        "program: {CLIENTS} clients of a server that answers last come, first served: {} counted, {} lost, {} connections broken; inputs are kept \
         apart since the first difference",
        clients.acknowledged, clients.lost, clients.resets
    );
    down(cluster, &took_over)
}

/// A program to which batches would be wrong gets none.
pub(super) fn is_not_for_threads(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, _) = up(cluster, &Plan::odd("threads", &["order = \"batch\"".to_owned()])?)?;
    let counter = oddities::count(cluster)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let events = oddities::events(cluster, &primary)?;
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
