//! Hosts that live and are away for a while: who speaks for the program meanwhile, and what becomes of the copy of who comes back.
//!
//! * **Decides:** what passes: nobody speaks who has not taken over (frames at the switch, [`OneSpeaker`]); the copy of the host that
//!   comes back ends, with a word of that, and a new one is made there.
//! * **Flow:** load -> the host is away -> the other one serves, for a while -> it is back -> its copy has ended -> who spoke.
//! * **Not here:** hosts that die (`stories`).

use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, ensure};
use dunlin_api::EventKind;

use super::stories::{await_alone, under_counted_load};
use super::{ACKNOWLEDGED, MAC, NAME, PATIENCE, whole};
use crate::client::Counter;
use crate::cluster::Cluster;
use crate::scenario::campaign::speaker::{OneSpeaker, Queue, take_overs};
use crate::testbed::Capture;

/// It comes back with frames in its queues, a term that has passed, and a copy that nobody needs.
pub(super) fn primary_stands_still(cluster: &mut Cluster<'_>) -> Result<()> {
    under_counted_load(cluster, |cluster, primary, _, counter| {
        replaced(cluster, primary, counter, &mut |cluster, is_away| {
            if is_away {
                return cluster.freeze(primary).map(|()| None);
            }
            let queue = Queue::of_a_standstill(primary, SystemTime::now());
            cluster.thaw(primary);
            Ok(Some(queue))
        })
    })
}

/// Both ends see the carrier go.
pub(super) fn primary_is_cut_off(cluster: &mut Cluster<'_>) -> Result<()> {
    under_counted_load(cluster, |cluster, primary, _, counter| {
        replaced(cluster, primary, counter, &mut |cluster, is_away| {
            match is_away {
                true => cluster.testbed().cut_link(primary)?,
                false => cluster.testbed().restore_link(primary)?,
            }
            Ok(None)
        })
    })
}

/// It hears everybody, clients too, and is heard by nobody. What it says all the same is seen at its port of the switch.
pub(super) fn primary_is_mute(cluster: &mut Cluster<'_>) -> Result<()> {
    under_counted_load(cluster, |cluster, primary, _, counter| {
        replaced(cluster, primary, counter, &mut |cluster, is_away| {
            if !is_away {
                return cluster.testbed().heal().map(|()| None);
            }
            let nodes = cluster.testbed().nodes().map(|node| node.name());
            let others: Vec<&str> = nodes.filter(|node| *node != primary).collect();
            cluster.testbed().lose(&[(&[primary], &others)])?;
            Ok(None)
        })
    })
}

/// The program goes on without it, and says so. The copy that comes back has missed inputs.
pub(super) fn backup_stands_still(cluster: &mut Cluster<'_>) -> Result<()> {
    under_counted_load(cluster, |cluster, primary, backup, counter| {
        cluster.freeze(backup)?;
        await_alone(cluster, primary)?;
        counter.await_more(ACKNOWLEDGED, PATIENCE)?;
        cluster.thaw(backup);
        await_ended(cluster, backup)?;
        cluster.await_protected(NAME, PATIENCE)?;
        counter.await_more(ACKNOWLEDGED, PATIENCE)
    })
}

/// The primary is `away` until the other host has served for a while. It tells what may have held a frame meanwhile.
fn replaced(
    cluster: &mut Cluster<'_>,
    primary: &str,
    counter: &Counter,
    away: &mut dyn FnMut(&mut Cluster<'_>, bool) -> Result<Option<Queue>>,
) -> Result<()> {
    let capture = Capture::start(cluster.testbed(), MAC)?;
    let mut one_speaker = OneSpeaker::default();
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let heard = capture.heard();
    ensure!(
        heard.spoken.iter().any(|turn| turn.host == primary),
        "nobody was heard at the switch"
    );
    let judge = |judge: &mut OneSpeaker, cluster: &Cluster<'_>, queues: &[Queue]| {
        judge
            .judge(&capture.heard().spoken, &take_overs(cluster)?, queues)
            .map_err(|why| anyhow!(why))
    };
    judge(&mut one_speaker, cluster, &[])?;
    let (serves, _) = whole(cluster)?;
    ensure!(
        serves == primary,
        "host {serves} serves meanwhile, and not {primary}"
    );
    away(cluster, true)?;
    cluster.await_take_over(NAME, primary, PATIENCE)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("no answers while it is away")?;
    let queue = away(cluster, false)?;
    await_ended(cluster, primary)?;
    cluster
        .await_protected(NAME, PATIENCE)
        .context("no new copy on the host that came back")?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("no answers after it came back")?;
    judge(&mut one_speaker, cluster, queue.as_slice())?;
    let heard = capture.finish()?;
    ensure!(heard.missed == 0, "{} frames were not seen", heard.missed);
    Ok(())
}

/// The copy on that host has ended, and is told of. That none of its processes is left is seen when the program is down.
fn await_ended(cluster: &Cluster<'_>, host: &str) -> Result<()> {
    cluster.await_status("its copy has ended", PATIENCE, |_| {
        let events = cluster.events(host).ok()?;
        // Not of an earlier story.
        let of_program = events.iter().rev().filter(|event| event.vm == NAME);
        let mut since_start = of_program.take_while(|event| event.kind != EventKind::Listens);
        since_start
            .any(|event| event.kind == EventKind::EndedHere)
            .then_some(())
    })
}
