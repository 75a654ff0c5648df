//! What protection costs: eight services and the hard cases under each policy, in one run.
//!
//! * **Decides:** the fairness: each host has the same fixed share of the CPU in every policy, the unreplicated one too. Both VMs,
//!   three daemons and the client share one machine here; without fixed shares the baseline would get the CPU that a
//!   backup on another machine would not have taken from it, and the ratio would mean nothing.
//! * **Flow:** [`run`]: for each service one VM ([`standing`]), which changes its policy while it runs ([`windows`], in the order of [`order`]) ->
//!   each [`case`] by its [`clients`], with its [`cost`] ([`window`]) -> medians of [`paired`] ratios ([`report`]) -> [`table`], JSON, [`plot`].
//! * **Invariants:** (1) a share is the median of the pairs' own shares, with its interval; every raw value is in the JSON; (2) a case in which any
//!   client saw an error has no figure, and a window in which the VM was not protected all the time has none;
//!   (3) clients are not under the hosts' shares.
//! * **Source:** PLOVER (NSDI'18, section 6) for what to show: throughput, latency, pause by step, pages, intervals.
//! * **Not here:** what a fail-over costs is in [`failover`], what a card does in [`cards`].

mod beside;
mod bound;
pub mod cards;
mod case;
mod clients;
pub(crate) mod cost;
pub mod failover;
pub mod growth;
mod link;
pub mod links;
mod machine;
mod order;
pub mod paired;
mod plot;
pub mod relay;
mod report;
pub mod standby;
mod standing;
mod syscalls;
mod table;
mod window;
mod windows;
mod wish;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use dunlin_api::files::VmFile;

use crate::cluster::VmPlan;
use crate::image::{self, GuestImage};
use windows::Told;

pub use beside::beside;
pub use case::{Case, choose, over};
pub use link::Link;
pub use machine::Machine;
pub use paired::Ratio;
pub use plot::draw;
pub use report::BenchReport;
pub use syscalls::ready as strace_ready;
pub use table::table;
pub use wish::Wish;

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchSpec {
    /// The executable, built with optimisation.
    pub dunlin: PathBuf,
    /// The guests, by service.
    pub images: Vec<(String, GuestImage)>,
    /// The tree of the clients' packages.
    pub clients: PathBuf,
    /// Policies, in the order of the table.
    pub policies: Vec<String>,
    /// The loads.
    pub cases: Vec<Case>,
    /// How often each policy is measured.
    pub rounds: u32,
    /// A VM is booted for each policy and round; else one changes its policy from window to window.
    pub fresh: bool,
    /// About how long each load takes.
    pub seconds: f64,
    /// How long a VM is warmed up by its first load.
    pub warm_up_seconds: f64,
    /// Each host's share of the CPU, in percent of one core.
    pub host_cpu_percent: u32,
    /// Virtual CPUs of each guest.
    pub vcpus: u32,
    /// A data disk for the services.
    pub disk_mib: Option<u64>,
    /// Further lines for the `[sync]` table of every policy.
    pub sync: Vec<String>,
    /// Further words for the guest's kernel.
    pub append: Vec<String>,
    /// A further window of each case and policy under strace.
    pub syscalls: bool,
    /// What the guests run under, in a word.
    pub accelerator: String,
    /// From what the windows' order is drawn.
    pub seed: u64,
}

impl BenchSpec {
    /// The images of the services of `cases`, and the clients, from the cache or freshly built.
    ///
    /// # Errors
    /// When a package cannot be had.
    pub fn prepare(
        cases: &[Case],
        dir: &std::path::Path,
        say: &mut dyn FnMut(&str),
    ) -> Result<(Vec<(String, GuestImage)>, PathBuf)> {
        let mut images: Vec<(String, GuestImage)> = Vec::new();
        for case in cases {
            if images.iter().any(|(name, _)| name == case.service) {
                continue;
            }
            let image = if case.service == "redis" {
                image::ensure(dir, say)?
            } else {
                image::ensure_service(image::service(case.service)?, dir, say)?
            };
            images.push((case.service.to_owned(), image));
        }
        Ok((images, image::clients(dir, say)?))
    }
}

/// Asks the daemon whether it knows each policy, before an hour is spent on the others.
///
/// # Errors
/// With the daemon's own line, for the first policy that it does not take up and end again.
pub fn check_policies(spec: &BenchSpec) -> Result<()> {
    let mut policies: Vec<&str> = Vec::new();
    for label in &spec.policies {
        let policy = report::policy_of(label);
        if !policies.contains(&policy) {
            policies.push(policy);
        }
    }
    // With one policy there is nothing to spare: its first VM says the same.
    if policies.len() < 2 {
        return Ok(());
    }
    let testbed = standing::testbed(spec.host_cpu_percent)?;
    {
        let cluster = standing::cluster(&testbed, spec)?;
        let first = spec.cases.first().context("nothing to measure")?;
        for (number, policy) in policies.into_iter().enumerate() {
            let mut plan = standing::plan(spec, first.service, policy)?;
            plan.name = format!("check-{number}");
            let file = plan.write(&testbed, &standing::guest(spec, first.service)?)?;
            // Whether it boots and is protected is not asked here. One at a time: six guests that boot leave a host's share of the
            // CPU nothing to answer with.
            for words in [
                &["up", "--no-wait", &file.to_string_lossy()],
                &["down", "--now", &plan.name][..],
            ] {
                let output = cluster.output("a", words)?;
                if !output.status.success() {
                    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                    bail!("policy '{policy}', dunlin {}: {said}", words[0]);
                }
            }
        }
    }
    testbed.close()
}

impl BenchSpec {
    /// What the files of its VMs say beside name, hosts, policy and VM.
    fn file(&self) -> Result<VmFile> {
        let sync = toml::from_str(&self.sync.join("\n"));
        Ok(VmFile {
            sync: sync.context("lines for the [sync] table")?,
            ..VmPlan::file()
        })
    }

    /// Where and how it is measured.
    fn machine(&self) -> Machine {
        Machine {
            accelerator: self.accelerator.clone(),
            host_cpu_percent: self.host_cpu_percent,
            vcpus: self.vcpus,
            seconds: self.seconds,
            fresh: self.fresh,
            settings: [self.append.clone(), self.sync.clone()].concat(),
            ..Machine::here()
        }
    }
}

/// The report of a run that has measured nothing so far.
pub fn nothing_yet(spec: &BenchSpec) -> BenchReport {
    BenchReport {
        on: spec.machine(),
        rounds: spec.rounds,
        seed: spec.seed,
        policies: spec.policies.clone(),
        rows: Vec::new(),
        ends: Vec::new(),
        geometric_means: Vec::new(),
        targets: Vec::new(),
        itself: None,
    }
}

/// Measures all. `say` gets a line for each measurement; `so_far` gets the report after each service, so that a long
/// run that is interrupted has not been for nothing.
pub fn run(
    spec: &BenchSpec,
    say: &mut dyn FnMut(&str),
    so_far: &mut dyn FnMut(&BenchReport) -> Result<()>,
) -> Result<BenchReport> {
    let mut report = nothing_yet(spec);
    for cases in spec.cases.chunk_by(|a, b| a.service == b.service) {
        let start = report.rows.len();
        for case in cases {
            let rows = spec.policies.iter().map(|policy| report::Row::new(case, policy));
            report.rows.extend(rows);
        }
        let rows = &mut report.rows[start..];
        let mut tell = |case: usize, at: usize, told: Told| {
            take(
                &mut rows[case * spec.policies.len() + at],
                &spec.policies,
                told,
                say,
            );
        };
        let ended = if spec.fresh {
            windows::fresh(spec, cases, &mut tell)
        } else {
            windows::windows(spec, cases, &mut tell).unwrap_or_else(|error| {
                for case in 0..cases.len() {
                    for at in 0..spec.policies.len() {
                        tell(case, at, Told::Ended(format!("{error:#}")));
                    }
                }
                Ok(())
            })
        };
        if let Err(error) = ended {
            let line = format!("{} did not end as it should: {error:#}", cases[0].service);
            say(&line);
            report.ends.push(line);
        }
        report.conclude();
        so_far(&report)?;
    }
    Ok(report)
}

fn take(row: &mut report::Row, policies: &[String], told: Told, say: &mut dyn FnMut(&str)) {
    let of = format!("{} {}", row.policy, row.title());
    match told {
        Told::Window(round, beside, outcome) => {
            row.planned += 1;
            match *outcome {
                Ok(mut sample) => {
                    say(&format!(
                        "round {round} {of}: {}/s, p50 {:.2} ms, p99 {:.2} ms, {} syncs{}",
                        table::rate(sample.load.per_second),
                        sample.load.p50_ms,
                        sample.load.p99_ms,
                        sample.syncs.count,
                        if sample.settled { "" } else { ", not settled" },
                    ));
                    sample.beside = beside.map(|at| policies[at].clone()).unwrap_or_default();
                    row.samples.push(sample);
                }
                Err(lost) if lost.wrong => {
                    say(&format!("FAILED {of}: {}", lost.why));
                    row.failures.push(format!("round {round}: {}", lost.why));
                }
                Err(lost) => {
                    say(&format!("lost a window of {of}: {}", lost.why));
                    row.lost.push(format!("round {round}: {}", lost.why));
                }
            }
        }
        Told::Again(round, lost) => {
            say(&format!("once more, {of}: {}", lost.why));
            row.lost.push(format!("round {round}, first try: {}", lost.why));
        }
        Told::Ended(why) => {
            say(&format!("FAILED {of}: {why}"));
            row.failures.push(why);
        }
        Told::Calls(Ok(calls)) => row.syscalls = Some(calls),
        Told::Calls(Err(lost)) => say(&format!("no system calls of {of}: {}", lost.why)),
    }
}
