//! A campaign: random faults, one after the other, on real QEMU under a mixed load, all from one seed.
//!
//! * **Decides:** what must be true however the faults come: nothing that a client was told is lost, no connection breaks, the
//!   history of the registers is linearizable, one host speaks at a time, long faults leave clients served, and after each fault
//!   the VM is protected again.
//! * **Flow:** [`plan::plan`] draws the faults -> a VM with redis, PostgreSQL and nginx, protected -> for each fault: the load
//!   runs -> [`faults`] -> protected again, all hosts linked, every client gets on, one speaker -> the clients' verdicts.
//! * **Invariants:** the same seed draws the same faults; what the machine makes of them differs from run to run.
//! * **Not here:** deaths at a chosen line (scenarios `death-in-...`), lost messages at every step (`sim/`).

mod faults;
mod flood;
pub mod loads;
pub mod plan;
pub mod speaker;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use dunlin_api::files::{SyncTable, VmFile};
use serde::Serialize;

use super::run::no_oops;
use crate::accel::RunsUnder;
use crate::client::Broadcasts;
use crate::cluster::{Cluster, HostStatus, VmPlan, all_take_part, both_copies, in_a_testbed};
use crate::image::{self, GuestImage};
use crate::paths;
use crate::random::Random;
use crate::testbed::{Capture, Spoken, TestbedSpec};
use loads::{Clients, Loads, LoadsReport, gaps_ms};
use plan::{Kind, Role, name, plan};
use speaker::{OneSpeaker, Queue, TakeOvers, take_overs};

/// Nothing in a campaign may take longer than this, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(150);
/// Room in a state folder: some segments of a log.
const STATE_MIB: u64 = 192;
const DISK_MIB: u64 = 1024;

/// What to play.
#[derive(Clone, Debug)]
pub struct CampaignSpec {
    /// The executable.
    pub dunlin: PathBuf,
    /// The guest: [`image::MIXED`].
    pub image: GuestImage,
    /// See [`crate::linear`].
    pub checker: PathBuf,
    /// All chance comes from it.
    pub seed: u64,
    /// How many faults.
    pub faults: usize,
    /// Only these kinds; all, if none is named.
    pub kinds: Vec<Kind>,
}

impl CampaignSpec {
    /// The command that plays the same again, up to its `faults`-th fault.
    pub fn command(&self, faults: usize) -> String {
        let mut command = format!(
            "cargo xtask scenarios campaign --seed {} --faults {faults}",
            self.seed
        );
        if self.image.runs_under != RunsUnder::Tcg {
            command.push_str(" --accel kvm");
        }
        if !self.kinds.is_empty() {
            let kinds: Vec<&str> = self.kinds.iter().map(|&kind| name(kind)).collect();
            command.push_str(&format!(" --kinds {}", kinds.join(",")));
        }
        command
    }
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct CampaignOutcome {
    /// What the clients saw.
    pub loads: LoadsReport,
    /// By kind of fault: how long any client waited for an answer around each, in milliseconds, sorted.
    pub gaps_ms: BTreeMap<&'static str, Vec<u64>>,
    /// From the end of each fault until the VM was protected, in milliseconds, sorted.
    pub reprotected_ms: Vec<u64>,
    /// How often another host began to speak.
    pub turns: usize,
    /// Frames of the VM that the capture missed.
    pub missed: u64,
}

/// How the VM is kept, as the seed says.
pub(super) struct Terms {
    pub(super) policy: &'static str,
    pub(super) vcpus: u32,
    pub(super) durable: bool,
    pub(super) idle_cards: u8,
}

impl Terms {
    fn of(seed: u64) -> Self {
        // Not the faults' numbers: `--kinds` draws others of these, and the VM stays.
        let mut random = Random::new(!seed);
        Self {
            policy: random
                .pick(&["dunlin", "dunlin", "dunlin", "plover", "remus"])
                .unwrap_or("dunlin"),
            vcpus: random.pick(&[1, 1, 2]).unwrap_or(1),
            durable: random.chance(500_000),
            idle_cards: random.pick(&[0, 1]).unwrap_or(0),
        }
    }
}

/// Plays it in a testbed of its own. `say` gets a line for each fault.
///
/// # Errors
/// When anything is not as it should be; the daemons' logs are kept, and the error says where, and how to repeat it.
pub fn run(spec: &CampaignSpec, say: &mut dyn FnMut(&str)) -> Result<CampaignOutcome> {
    let mut so_far = 0;
    in_a_testbed("campaign", &TestbedSpec::three_hosts(), &spec.dunlin, |cluster| {
        play(cluster, spec, &mut so_far, say)
    })
    .with_context(|| format!("fault {so_far}; repeat it with '{}'", spec.command(so_far.max(1))))
}

pub(super) struct Stage<'cluster, 'testbed> {
    cluster: &'cluster mut Cluster<'testbed>,
    vm: String,
    loads: Loads,
    broadcasts: Broadcasts,
    /// Cables that were slow, for whoever judges what came late.
    queues: Vec<Queue>,
}

fn play(
    cluster: &mut Cluster<'_>,
    spec: &CampaignSpec,
    so_far: &mut usize,
    say: &mut dyn FnMut(&str),
) -> Result<CampaignOutcome> {
    let testbed = cluster.testbed();
    let mut terms = Terms::of(spec.seed);
    let runs_under = &spec.image.runs_under;
    if runs_under
        .refuses(VmPlan::redis(terms.policy).machine, terms.vcpus)
        .is_some()
    {
        terms.vcpus = 1;
    }
    let (capture, mut stage) = set_up(cluster, spec, &terms)?;
    say(&format!(
        "campaign: seed {}, {} faults, policy {}, {} vCPUs under {}, {} idle cards, agreed on {}",
        spec.seed,
        spec.faults,
        terms.policy,
        terms.vcpus,
        runs_under.name(),
        terms.idle_cards,
        if terms.durable { "disk" } else { "memory" }
    ));
    let (mut moments, mut reprotected_ms) = (Vec::new(), Vec::new());
    let mut one_speaker = OneSpeaker::default();
    for fault in plan(spec.seed, spec.faults, &spec.kinds) {
        *so_far += 1;
        // The load runs for a while: the fault's moment is a part of it.
        std::thread::sleep(Duration::from_millis(fault.after_ms));
        // One fault at a time: on a busy machine the VM may have moved by itself meanwhile, and not be protected yet.
        stage.is_protected().context("before the fault")?;
        let begun = Instant::now();
        let what = stage
            .play(&fault)
            .with_context(|| format!("{} of the {}: {fault:?}", name(fault.kind), fault.role.name()))?;
        let mended = Instant::now();
        stage.recovers().with_context(|| what.clone())?;
        moments.push((fault.kind, (begun, Instant::now())));
        reprotected_ms.push(u64::try_from(mended.elapsed().as_millis())?);
        let (heard, told) = heard_and_told(&capture, stage.cluster)?;
        one_speaker
            .judge(&heard, &told, &stage.queues)
            .map_err(|why| anyhow!(why))
            .with_context(|| what.clone())?;
        say(&format!(
            "campaign: {so_far} of {}: {what}; protected again after {:.1} s; {}",
            spec.faults,
            mended.elapsed().as_secs_f64(),
            stage.loads.so_far()
        ));
    }
    let Stage {
        cluster,
        vm,
        loads,
        broadcasts,
        ..
    } = stage;
    broadcasts.finish()?;
    let (loads, seen) = loads.finish(
        testbed.node("client"),
        &spec.checker,
        paths::failed_runs().join("campaign-history"),
    )?;
    let heard = capture.finish()?;
    ensure!(
        !heard.spoken.is_empty(),
        "the capture heard nothing: mend the test"
    );
    no_oops(testbed)?;
    let (primary, _) = cluster.await_protected(&vm, PATIENCE)?;
    cluster.end(&primary, &vm)?;
    let mut gaps = BTreeMap::new();
    for kind in moments.iter().map(|(kind, _)| *kind) {
        let of_kind: Vec<_> = moments
            .iter()
            .filter(|(other, _)| *other == kind)
            .map(|(_, moment)| *moment)
            .collect();
        gaps.insert(name(kind), gaps_ms(&seen.answers, &of_kind));
    }
    reprotected_ms.sort_unstable();
    Ok(CampaignOutcome {
        loads,
        gaps_ms: gaps,
        reprotected_ms,
        turns: heard.spoken.len() - 1,
        missed: heard.missed,
    })
}

/// The hosts, the VM, the clients, and who listens to them.
fn set_up<'cluster, 'testbed>(
    cluster: &'cluster mut Cluster<'testbed>,
    spec: &CampaignSpec,
    terms: &Terms,
) -> Result<(Capture, Stage<'cluster, 'testbed>)> {
    let testbed = cluster.testbed();
    cluster.use_clocks()?;
    cluster.use_small_states(STATE_MIB)?;
    if terms.durable {
        cluster.use_disks()?;
    }
    cluster.start_hosts()?;
    let plan = mixed(terms);
    let capture = Capture::start(testbed, plan.mac())?;
    let file = plan.write(testbed, &spec.image)?;
    cluster.dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
    let loads = Loads::start(
        testbed.node("client"),
        plan.service(),
        image::MIXED.port,
        Clients::SOME,
        PATIENCE,
    )?;
    let stage = Stage {
        vm: plan.name,
        loads,
        // What an idle card gets, and never takes.
        broadcasts: Broadcasts::start(testbed.node("client"))?,
        cluster,
        queues: Vec::new(),
    };
    stage.recovers().context("before the first fault")?;
    Ok((capture, stage))
}

/// Who was heard and what was told, of one moment: a take-over by chance may be told now and heard a moment later.
fn heard_and_told(capture: &Capture, cluster: &Cluster<'_>) -> Result<(Vec<Spoken>, TakeOvers)> {
    const SOON: Duration = Duration::from_millis(200);
    const TIMES: usize = 50;
    let look = || anyhow::Ok((capture.heard().spoken, take_overs(cluster)?));
    for _ in 0..TIMES {
        let (heard, told) = look()?;
        std::thread::sleep(SOON);
        let (later, told_later) = look()?;
        if later.len() == heard.len() && told_later == told {
            return Ok((heard, told));
        }
    }
    look()
}

/// The VM with redis, PostgreSQL and nginx.
pub(super) fn mixed(terms: &Terms) -> VmPlan {
    VmPlan {
        name: "mixed".to_owned(),
        memory_mib: image::MIXED.memory_mib,
        disk_mib: Some(DISK_MIB),
        vcpus: terms.vcpus,
        idle_cards: terms.idle_cards,
        file: VmFile {
            sync: SyncTable {
                // A database that starts writes much of its memory while the first copy of it is made.
                staging_mib: 768,
                ..SyncTable::default()
            },
            ..VmPlan::file()
        },
        ..VmPlan::redis(terms.policy)
    }
}

impl Stage<'_, '_> {
    fn host_of(&self, role: Role) -> Result<String> {
        let role = role.name();
        self.cluster
            .await_status(&format!("a {role}"), PATIENCE, |hosts| {
                let has = |host: &&HostStatus| host.vm(&self.vm).is_some_and(|vm| vm.role.as_str() == role);
                hosts.iter().find(has).map(|host| host.host.clone())
            })
    }

    /// Protected, every host takes part, and each kind of client gets on.
    fn recovers(&self) -> Result<()> {
        self.is_protected()?;
        self.loads.await_progress(PATIENCE)
    }

    fn is_protected(&self) -> Result<()> {
        self.cluster
            .await_status("VM protected and every host linked", PATIENCE, |hosts| {
                both_copies(hosts, &self.vm)?;
                all_take_part(hosts, &self.vm).then_some(())
            })
    }
}
