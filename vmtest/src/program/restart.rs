//! Programs that end by themselves, on both hosts, and what each policy makes of that.
//!
//! * **Decides:** what passes: begun again on one host, with a copy on the other one, or not at all, as the file says; never after an input
//!   that has ended both copies.
//! * **Flow:** [`super::server`] is told to end in a while, so that no input is to blame -> both copies end -> status and events.
//! * **Not here:** the rest between two beginnings (a test of the node's), programs whose hosts die (`stories`).

use dunlin_api::{EventKind, HostStatus, Role, State};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::oddities::{ask, events, failed_on_both, told};
use super::{NAME, PATIENCE, Plan, down, figure, up};
use crate::client::Answer;
use crate::cluster::Cluster;

/// What is not to come would have come within this time.
const LONG_ENOUGH: Duration = Duration::from_secs(5);
/// The last of so many rests is of 16 s: nobody is so busy that it is not seen.
const RESTS: u32 = 5;

/// Serves anew after an end without a cause that a client could be.
pub(super) fn each_policy(cluster: &mut Cluster<'_>) -> Result<()> {
    for (policy, how, words, again) in [
        ("never", ["LATER", "1"], "ended with exit code 1", false),
        ("on-failure", ["LATER", "0"], "ended with exit code 0", false),
        ("on-failure", ["LATER", "1"], "ended with exit code 1", true),
        ("on-failure", ["LATER", "abort"], "was ended by signal 6", true),
        ("always", ["LATER", "0"], "ended with exit code 0", true),
    ] {
        ends(cluster, policy, how, words, again).with_context(|| format!("restart = {policy:?}, {how:?}"))?;
    }
    Ok(())
}

fn ends(cluster: &Cluster<'_>, policy: &str, how: [&'static str; 2], words: &str, again: bool) -> Result<()> {
    up(
        cluster,
        &Plan::odd("threads", &[format!("restart = {policy:?}")])?,
    )?;
    ensure!(ask(cluster, &["INCR", "before"], PATIENCE)? == Some(Answer::Integer(1)));
    let told_to = match how[1] {
        "0" => ask(cluster, &["LATER", "0"], PATIENCE)?,
        "1" => ask(cluster, &["LATER", "1"], PATIENCE)?,
        _ => ask(cluster, &["LATER", "abort"], PATIENCE)?,
    };
    ensure!(told_to == Some(Answer::Integer(1)), "{told_to:?}");
    if !again {
        has_failed(cluster)?;
        failed_on_both(cluster, words)?;
        std::thread::sleep(LONG_ENOUGH);
        failed_on_both(cluster, words)?;
        return down(cluster, "b");
    }
    let host = is_begun_again(cluster)?;
    for host in ["a", "b"] {
        told(cluster, host, &[words, "it is begun again, after 1 s at least"])?;
    }
    let poison = events(cluster, &host)?;
    ensure!(!poison.iter().any(|event| event.kind == EventKind::PoisonInput));
    cluster
        .await_protected(NAME, PATIENCE)
        .context("a second copy of it")?;
    // It is a new one, and survives its host.
    ensure!(ask(cluster, &["INCR", "before"], PATIENCE)? == Some(Answer::Integer(1)));
    let (old, _) = cluster.switch_over(NAME, PATIENCE)?;
    cluster.await_take_over(NAME, &old, PATIENCE)?;
    ensure!(ask(cluster, &["INCR", "before"], PATIENCE)? == Some(Answer::Integer(2)));
    down(cluster, "c")
}

/// A copy has ended by itself, for good.
fn has_failed(cluster: &Cluster<'_>) -> Result<()> {
    cluster.await_status("a copy has ended", PATIENCE, |hosts| {
        let mut vms = hosts.iter().filter_map(|host| host.vm(NAME));
        vms.any(|vm| vm.state == State::Failed).then_some(())
    })
}

/// How often it was begun again on either host.
fn begun_again(cluster: &Cluster<'_>) -> Result<usize> {
    let mut times = 0;
    for host in ["a", "b"] {
        let told = events(cluster, host)?.into_iter();
        times += told.filter(|event| event.kind == EventKind::BegunAgain).count();
    }
    Ok(times)
}

/// Both copies have ended, and it waits to be begun again. Not: that was over before it was seen.
fn rests(cluster: &Cluster<'_>, begun_before: usize) -> Result<bool> {
    cluster.await_status("both copies have ended", PATIENCE, |hosts| {
        let waits = |name: &str| {
            let host = hosts.iter().find(|host| host.host == name);
            let vm = host.and_then(|host| host.vm(NAME));
            vm.is_some_and(|vm| vm.state == State::Restarting)
        };
        if waits("a") && waits("b") {
            return Some(true);
        }
        (begun_again(cluster).ok()? > begun_before).then_some(false)
    })
}

/// The host on which that was.
fn is_begun_again(cluster: &Cluster<'_>) -> Result<String> {
    let host = cluster.await_status("the program is begun again, and serves", PATIENCE, |hosts| {
        let has = |host: &str| {
            let events = events(cluster, host).unwrap_or_default();
            events.iter().any(|event| event.kind == EventKind::BegunAgain)
        };
        let serves = |host: &&HostStatus| {
            let vm = host.vm(NAME);
            vm.is_some_and(|vm| vm.role == Role::Primary && matches!(vm.state, State::Alone | State::Running))
        };
        let mut serving = hosts.iter().filter(serves).map(|host| host.host.clone());
        serving.find(|host| has(host))
    })?;
    // An office that is lost in the moment of the beginning has it begun twice.
    ensure!(figure(cluster, &host, |program| program.begun_again)? >= 1);
    Ok(host)
}

/// An input that ends both copies is poison under each policy.
pub(super) fn not_after_poison(cluster: &mut Cluster<'_>) -> Result<()> {
    up(
        cluster,
        &Plan::odd("threads", &["restart = \"always\"".to_owned()])?,
    )?;
    ask(cluster, &["CRASH"], Duration::from_secs(2))?;
    for host in ["a", "b"] {
        told(
            cluster,
            host,
            &["the same input has ended the copies on both hosts"],
        )?;
    }
    failed_on_both(cluster, "was ended by signal 6")?;
    std::thread::sleep(LONG_ENOUGH);
    failed_on_both(cluster, "was ended by signal 6")?;
    down(cluster, "b")
}

/// A person who ends it while it waits has ended it.
pub(super) fn not_after_down(cluster: &mut Cluster<'_>) -> Result<()> {
    up(
        cluster,
        &Plan::odd("threads", &["restart = \"always\"".to_owned()])?,
    )?;
    // Each rest is twice as long as the one before.
    for number in 1.. {
        let begun_before = begun_again(cluster)?;
        ask(cluster, &["LATER", "1"], PATIENCE)?;
        if rests(cluster, begun_before)? {
            break;
        }
        ensure!(number < RESTS, "it was never seen to wait");
        cluster.await_protected(NAME, PATIENCE)?;
    }
    down(cluster, "b")?;
    std::thread::sleep(LONG_ENOUGH);
    cluster.await_status("nobody begins it", PATIENCE, |hosts| {
        hosts.iter().all(|host| host.vms.is_empty()).then_some(())
    })
}
