//! What a checkpoint on the standby costs a VM under load, and what it saves a join.
//!
//! * **Decides:** nothing: the figures are told as they are.
//! * **Flow:** one VM on hosts a to c, host d beside them. *Cost:* pairs of windows under the same load, in one of which host d is the standby and is
//!   fed. *Joins:* the backup's part goes to host d, which knows nothing, or has a checkpoint; each time its daemon is a fresh one.
//! * **Invariants:** (1) a window with a checkpoint begins after its first round, which sends all of the memory; (2) joins are under the same load.
//! * **Not here:** that nothing is lost at a death (scenario `standby-has-a-checkpoint`).

use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dunlin_api::{CheckpointStatus, EventKind, HostStatus};
use serde::{Deserialize, Serialize};

use super::BenchSpec;
use super::case::Case;
use super::clients::Clients;
use super::cost::{Reading, traffic};
use super::machine::Machine;
use super::paired::Ratio;
use super::report::median_of;
use super::standing::{self, PATIENCE};
use crate::cluster::{Cluster, VmPlan};
use crate::testbed::{CpuShare, Testbed, TestbedSpec};

/// The host without a part.
const STANDBY: &str = "d";

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Pairs of windows.
    pub pairs: u32,
    /// Joins of each kind.
    pub joins: u32,
    /// `standby_checkpoint`.
    pub every: String,
    /// The guest's memory, where it is not the usual one.
    pub memory_mib: Option<u32>,
}

/// A window with a checkpoint beside one without.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pair {
    /// Requests a second: without, with.
    pub per_second: [f64; 2],
    /// CPU of the backup's host, in percent of one core: without, with.
    pub backup_cpu_percent: [f64; 2],
    /// What the last round in the window took and sent.
    pub round: CheckpointStatus,
}

/// A join of host d.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Join {
    /// It had a checkpoint.
    pub checkpoint: bool,
    /// From when the host was brought in until the VM was protected, as the primary's events say.
    pub took_ms: u64,
    /// What came to the host in that time.
    pub received_bytes: u64,
    /// What the primary said of what the host held; empty: nothing worth a word.
    pub held: String,
}

/// The whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StandbyReport {
    /// Where it was measured.
    pub on: Machine,
    /// `standby_checkpoint`.
    pub every: String,
    /// The load.
    pub load: String,
    /// The cost.
    pub pairs: Vec<Pair>,
    /// The joins.
    pub joins: Vec<Join>,
}

struct Story<'a, 'testbed> {
    spec: &'a BenchSpec,
    testbed: &'testbed Testbed,
    cluster: &'a mut Cluster<'testbed>,
    plan: VmPlan,
    case: Case,
}

/// Measures both.
///
/// # Errors
/// When a host or a client does not do what it should; the daemons' logs are kept then.
pub fn run(spec: &BenchSpec, plan: &Plan, say: &mut dyn FnMut(&str)) -> Result<StandbyReport> {
    let case = spec.cases.iter().find(|case| case.name == "set");
    let case = case.context("the load is redis' SET")?.clone();
    let mut vm = standing::plan(spec, "redis", &spec.policies[0])?;
    vm.memory_mib = plan.memory_mib.unwrap_or(vm.memory_mib);
    vm.file.standby_checkpoint = Some(plan.every.clone());
    let mut hosts = standing::HOSTS.map(str::to_owned).to_vec();
    hosts.push(STANDBY.to_owned());
    let testbed = Testbed::new(&TestbedSpec {
        hosts: hosts.clone(),
        host_cpu: Some(CpuShare::percent(spec.host_cpu_percent)),
        ..TestbedSpec::three_hosts()
    })?;
    let (pairs, joins) = {
        let names: Vec<&str> = hosts.iter().map(String::as_str).collect();
        let mut cluster = Cluster::init(&testbed, &spec.dunlin, &names)?;
        cluster.start_hosts()?;
        let told = {
            let mut story = Story {
                spec,
                testbed: &testbed,
                cluster: &mut cluster,
                plan: vm,
                case: case.clone(),
            };
            story.play(plan, say)
        };
        if told.is_err() {
            cluster.keep_logs("bench-standby");
        }
        told?
    };
    testbed.close()?;
    Ok(StandbyReport {
        on: super::nothing_yet(spec).on,
        every: plan.every.clone(),
        load: case.title(),
        pairs,
        joins,
    })
}

impl Story<'_, '_> {
    fn play(&mut self, plan: &Plan, say: &mut dyn FnMut(&str)) -> Result<(Vec<Pair>, Vec<Join>)> {
        let file = self
            .plan
            .write(self.testbed, &standing::guest(self.spec, "redis")?)?;
        self.cluster
            .dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
        let clients = standing::clients(self.testbed, self.spec, "redis");
        clients.await_service(&self.case, PATIENCE)?;
        self.cluster.await_protected(&self.plan.name, PATIENCE)?;
        clients.run(&self.case, self.spec.warm_up_seconds, None)?;
        let mut pairs = Vec::new();
        for number in 0..plan.pairs {
            // In turn: a machine that becomes slower makes neither of them the slower one.
            let order = if number % 2 == 0 {
                [false, true]
            } else {
                [true, false]
            };
            let mut windows = [None, None];
            for fed in order {
                windows[usize::from(fed)] = Some(self.window(&clients, fed)?);
            }
            let [Some(without), Some(with)] = windows else {
                unreachable!("both were measured");
            };
            say(&format!(
                "pair {}: {:.0}/s without, {:.0}/s with: {:.3}",
                number + 1,
                without.0,
                with.0,
                with.0 / without.0
            ));
            pairs.push(Pair {
                per_second: [without.0, with.0],
                backup_cpu_percent: [without.1, with.1],
                round: with.2,
            });
        }
        let mut joins = Vec::new();
        for number in 0..2 * plan.joins {
            let join = self.join(&clients, number % 2 == 1)?;
            say(&format!(
                "join {} a checkpoint: {} ms, {} MiB came; {}",
                if join.checkpoint { "with" } else { "without" },
                join.took_ms,
                join.received_bytes >> 20,
                join.held
            ));
            joins.push(join);
        }
        self.cluster.dunlin("c", &["down", "--now", &self.plan.name])?;
        Ok((pairs, joins))
    }

    /// Requests a second, CPU of the backup's host, the last round.
    fn window(&mut self, clients: &Clients<'_>, fed: bool) -> Result<(f64, f64, CheckpointStatus)> {
        self.feed(fed)?;
        let lead_in = clients.run(&self.case, 1.0, None)?;
        let before = Reading::take(self.testbed)?;
        let begun = Instant::now();
        let seconds = self.case.window_s(self.spec.seconds);
        let load = clients.run(&self.case, seconds, Some(lead_in.per_second))?;
        let used = before.cpu_until(&Reading::take(self.testbed)?);
        let took = begun.elapsed();
        let backup = self.role("backup")?;
        let at = standing::HOSTS.iter().position(|host| *host == backup);
        let used = used[at.context("the backup is on one of the first hosts")?];
        let cpu_percent = used.as_secs_f64() / took.as_secs_f64() * 100.0;
        Ok((
            load.per_second,
            cpu_percent,
            self.checkpoint()?.unwrap_or_default(),
        ))
    }

    /// Host d is the standby and has all of a checkpoint, or there is none.
    fn feed(&mut self, fed: bool) -> Result<()> {
        let vm = self.plan.name.clone();
        let names = self.status(|status| status.vm(&vm)?.standby.clone())?.is_some();
        match (fed, names) {
            (true, false) => self.cluster.dunlin("c", &["move", &vm, "--standby", STANDBY])?,
            (false, true) => self.cluster.dunlin("c", &["move", &vm, "--no-standby"])?,
            _ => String::new(),
        };
        let is_so = |hosts: &[HostStatus]| {
            let mut statuses = hosts.iter().filter_map(|host| host.vm(&vm));
            let checkpoint = statuses.find_map(|status| status.checkpoint.as_ref());
            (fed == checkpoint.is_some_and(|checkpoint| checkpoint.rounds > 0)).then_some(())
        };
        let what = "the standby has a checkpoint, or none";
        self.cluster.await_status(what, PATIENCE, is_so)
    }

    /// The backup's part goes to host d, and back.
    fn join(&mut self, clients: &Clients<'_>, checkpoint: bool) -> Result<Join> {
        let vm = self.plan.name.clone();
        self.feed(false)?;
        // What it held goes with its daemon.
        self.cluster.kill_host(STANDBY)?;
        self.cluster.start_host(STANDBY)?;
        self.feed(checkpoint)?;
        let left = self.role("backup")?;
        let node = self.testbed.node(STANDBY);
        let before = traffic(node)?.0;
        let words = ["move", &vm, "--backup", STANDBY, "--unprotected-meanwhile"];
        let ordered = std::thread::scope(|scope| {
            let loads = scope.spawn(|| clients.run(&self.case, 1.0, None));
            let ordered = self.cluster.dunlin("c", &words);
            loads.join().expect("it does not panic")?;
            ordered
        });
        ordered?;
        let received_bytes = traffic(node)?.0.saturating_sub(before);
        ensure!(self.role("backup")? == STANDBY, "another host has the part");
        let told = self.cluster.events(&self.role("primary")?)?;
        let begun = told
            .iter()
            .rposition(|event| event.text.contains("is being brought in"));
        let since = &told[begun.context("no host was brought in")?..];
        let protected = since.iter().find(|event| event.kind == EventKind::Protected);
        let took_ms = protected.context("it is protected")?.time_ms - since[0].time_ms;
        let held = since
            .iter()
            .find(|event| event.text.contains("of an earlier copy"));
        let held = held.map(|event| event.text.clone()).unwrap_or_default();
        let back = ["move", &vm, "--backup", &left, "--unprotected-meanwhile"];
        self.cluster.dunlin("c", &back)?;
        Ok(Join {
            checkpoint,
            took_ms,
            received_bytes,
            held,
        })
    }

    fn status<T>(&self, of: impl Fn(&HostStatus) -> Option<T>) -> Result<Option<T>> {
        Ok(self.cluster.statuses().iter().find_map(of))
    }

    fn checkpoint(&self) -> Result<Option<CheckpointStatus>> {
        self.status(|host| host.vm(&self.plan.name)?.checkpoint.clone())
    }

    fn role(&self, role: &str) -> Result<String> {
        let vm = &self.plan.name;
        let found = self.status(|host| {
            let status = host.vm(vm)?;
            (status.role.as_str() == role).then(|| host.host.clone())
        })?;
        found.with_context(|| format!("no host is the VM's {role}"))
    }
}

/// The report in words.
#[must_use]
pub fn standby_table(report: &StandbyReport) -> String {
    let mut text = String::new();
    let ratios: Vec<f64> = report
        .pairs
        .iter()
        .map(|pair| pair.per_second[1] / pair.per_second[0])
        .collect();
    if let Some(ratio) = Ratio::of(&ratios) {
        let interval = ratio.interval.map_or_else(
            || "too few pairs for an interval".to_owned(),
            |(low, high)| format!("95 %: {low:.3} to {high:.3}"),
        );
        let of = |figure: &dyn Fn(&Pair) -> f64| median_of(report.pairs.iter().map(figure).collect());
        let _ = writeln!(
            text,
            "cost of a checkpoint every {} under {}: {:.3} of the requests ({interval}, {} pairs); backup's host {:.1} % of a core, without it {:.1} %",
            report.every,
            report.load,
            ratio.median,
            ratio.pairs,
            of(&|pair| pair.backup_cpu_percent[1]),
            of(&|pair| pair.backup_cpu_percent[0]),
        );
        let _ = writeln!(
            text,
            "a round: {:.0} MiB of memory looked at, {:.1} MiB sent, {:.2} s (medians)",
            of(&|pair| (pair.round.memory_bytes >> 20) as f64),
            of(&|pair| pair.round.sent_bytes as f64 / f64::from(1 << 20)),
            of(&|pair| pair.round.took_ms as f64 / 1e3),
        );
    }
    for checkpoint in [false, true] {
        let joins = || report.joins.iter().filter(|join| join.checkpoint == checkpoint);
        if joins().next().is_some() {
            let _ = writeln!(
                text,
                "join {} a checkpoint: {:.0} ms, {:.1} MiB came to the host (medians of {})",
                if checkpoint { "with" } else { "without" },
                median_of(joins().map(|join| join.took_ms as f64).collect()),
                median_of(
                    joins()
                        .map(|join| join.received_bytes as f64 / f64::from(1 << 20))
                        .collect()
                ),
                joins().count()
            );
        }
    }
    text
}
