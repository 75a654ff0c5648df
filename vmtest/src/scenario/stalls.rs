//! A mixed load without any fault: the longest waits of its clients, and what the VM waited for meanwhile.
//!
//! * **Decides:** that the VM stays protected, that nobody is let down, and that no commit waits as long as commits once did without a
//!   fault (two to three seconds). How long the others are is told and not judged: that is for whoever knows the machine.
//! * **Flow:** a VM with redis, PostgreSQL and nginx, protected -> its clients, and a look at the primary again and again -> the
//!   waits between two commits of a client, each with what the looks in it saw.
//! * **Not here:** faults (`campaign`), other loads beside the testbed (`overload`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, ensure};

use super::campaign::loads::{Clients, Loads};
use super::campaign::{CampaignSpec, Terms, mixed};
use crate::cluster::{Cluster, VmStatus, in_a_testbed};
use crate::image;
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(150);
/// No commit may wait so long.
pub const TOO_LONG: Duration = Duration::from_secs(2);
/// Waits from this on are told one by one.
const LONG: Duration = Duration::from_secs(1);
/// So many of them, the longest.
const TOLD: usize = 10;

/// What was seen.
pub struct Outcome {
    /// Between two commits of a client, sorted.
    pub commits: Vec<Duration>,
    /// The longest of them, each with what the looks in it saw, and how often.
    pub longest: Vec<(Duration, BTreeMap<String, usize>)>,
    /// Looks at the primary.
    pub looks: usize,
}

/// One look at the primary.
struct Look {
    at: Instant,
    what: String,
}

/// Plays it for so long, with a VM of so many CPUs; `spec` says which guest and executables.
///
/// # Errors
/// When the VM was not protected all along, or clients were let down; the daemons' logs are kept.
pub fn run(spec: &CampaignSpec, vcpus: u32, lasts: Duration) -> Result<Outcome> {
    in_a_testbed("stalls", &TestbedSpec::three_hosts(), &spec.dunlin, |cluster| {
        play(cluster, spec, vcpus, lasts)
    })
}

fn play(cluster: &mut Cluster<'_>, spec: &CampaignSpec, vcpus: u32, lasts: Duration) -> Result<Outcome> {
    cluster.start_hosts()?;
    let testbed = cluster.testbed();
    let plan = mixed(&Terms {
        policy: "dunlin",
        vcpus,
        durable: false,
        idle_cards: 0,
    });
    let file = plan.write(testbed, &spec.image)?;
    cluster.dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
    let client = testbed.node("client");
    let loads = Loads::start(client, plan.service(), image::MIXED.port, Clients::SOME, PATIENCE)?;
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    loads.await_progress(PATIENCE)?;
    let (begun, begun_wall) = (Instant::now(), SystemTime::now());
    let mut looks = Vec::new();
    while begun.elapsed() < lasts {
        let status = cluster.status(&primary)?;
        let at = Instant::now();
        let what = status.vm(&plan.name).map_or_else(|| "no VM".to_owned(), what);
        looks.push(Look { at, what });
    }
    let ended = Instant::now();
    cluster.await_protected(&plan.name, PATIENCE)?;
    loads.await_progress(PATIENCE)?;
    let told = cluster.events(&primary)?;
    let lost: Vec<&str> = told
        .iter()
        .filter(|event| event.at() >= begun_wall)
        .filter(|event| ["backup-lost", "stalled", "unprotected"].contains(&event.kind.as_str()))
        .map(|event| event.text.as_str())
        .collect();
    let (_, seen) = loads.finish(
        client,
        &spec.checker,
        crate::paths::failed_runs().join("stalls-history"),
    )?;
    cluster.end(&primary, &plan.name)?;
    ensure!(
        lost.is_empty(),
        "the backup was lost without a fault: {}",
        lost.join("; ")
    );
    let mut waits: Vec<(Instant, Instant)> = Vec::new();
    for client in &seen.commits {
        let between = client.windows(2).map(|pair| (pair[0], pair[1]));
        waits.extend(between.filter(|(from, to)| *from >= begun && *to <= ended));
    }
    ensure!(!waits.is_empty(), "nothing was committed: mend the test");
    waits.sort_by_key(|(from, to)| *to - *from);
    let longest = waits.iter().rev().take(TOLD);
    let longest = longest.filter(|(from, to)| *to - *from >= LONG);
    let longest = longest.map(|&(from, to)| (to - from, seen_in(&looks, from, to)));
    Ok(Outcome {
        longest: longest.collect(),
        commits: waits.iter().map(|(from, to)| *to - *from).collect(),
        looks: looks.len(),
    })
}

/// What the primary does, in a word or two.
fn what(vm: &VmStatus) -> String {
    let wait = vm.waits.as_ref().map(|wait| &wait.name);
    match (wait, vm.held_frames) {
        (Some(wait), 0) => format!("{}, {wait}", vm.state),
        (Some(wait), _) => format!("{}, {wait}, output waits", vm.state),
        (None, 1..) => format!("{}, output waits", vm.state),
        (None, 0) => vm.state_in_words(),
    }
}

fn seen_in(looks: &[Look], from: Instant, to: Instant) -> BTreeMap<String, usize> {
    let mut seen = BTreeMap::new();
    for look in looks.iter().filter(|look| (from..=to).contains(&look.at)) {
        *seen.entry(look.what.clone()).or_default() += 1;
    }
    seen
}
