//! What protection costs: eight services and the hard cases under each policy, in one run.
//!
//! * **Decides:** the order (policies alternate within each round, by [`paired`] windows in one guest or with a guest booted anew) and
//!   the fairness: each host has the same fixed share of the CPU in every policy, the unreplicated one too. Both VMs,
//!   three daemons and the client share one machine here; without fixed shares the baseline would get the CPU that a
//!   backup on another machine would not have taken from it, and the ratio would mean nothing.
//! * **Flow:** [`run`]: for each service one VM ([`standing`]), which changes its policy while it runs -> each [`case`] by its
//!   [`clients`] -> medians of the rounds' ratios ([`report`]) -> [`table`], JSON, [`plot`].
//! * **Invariants:** (1) a share is the median of the rounds' own shares, with its interval; every raw value is in the JSON; (2) a case in which any client saw an error, or the VM was not protected all the time, has no figure;
//!   (3) clients are not under the hosts' shares.
//! * **Source:** PLOVER (NSDI'18, section 6) for what to show: throughput, latency, pause by step, pages, intervals.
//! * **Not here:** what a fail-over costs is in [`failover`].

mod case;
mod clients;
pub mod failover;
mod paired;
mod plot;
mod report;
mod standing;
mod table;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::image::{self, GuestImage};

pub use case::{Case, choose};
pub use paired::Ratio;
pub use plot::draw;
pub use report::BenchReport;
pub use table::table;

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
    // With one policy there is nothing to spare: its first VM says the same.
    if spec.policies.len() < 2 {
        return Ok(());
    }
    let lab = standing::lab(spec.host_cpu_percent)?;
    {
        let cluster = standing::cluster(&lab, spec)?;
        let first = spec.cases.first().context("nothing to measure")?;
        for policy in &spec.policies {
            let policy = standing::policy_of(policy);
            let mut plan = standing::plan(spec, first.service, policy);
            plan.name = format!("check-{policy}");
            let file = plan.write(&lab, &standing::guest(spec, first.service)?)?;
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
    lab.close()
}

/// Measures all. `say` gets a line for each measurement; `so_far` gets the report after each service, so that a long
/// run that is interrupted has not been for nothing.
pub fn run(
    spec: &BenchSpec,
    say: &mut dyn FnMut(&str),
    so_far: &mut dyn FnMut(&BenchReport) -> Result<()>,
) -> Result<BenchReport> {
    let percent = spec.host_cpu_percent;
    let further = if spec.append.is_empty() && spec.sync.is_empty() {
        String::new()
    } else {
        format!(
            " Further settings: {} {}.",
            spec.append.join(" "),
            spec.sync.join("; ")
        )
    };
    let mut report = BenchReport {
        note: format!(
            "All hosts share one machine. Each host has {percent} % of one core in every policy, 'none' included, so \
             that a backup takes nothing from its primary; clients have what is left. Guests run under TCG (no \
             hardware virtualisation here), {} vCPU each. Medians of {} rounds, {}; loads of about {} s. A share is the \
             median of the rounds' own shares, with its 95 % interval.{further}",
            spec.vcpus,
            spec.rounds,
            if spec.fresh {
                "policies alternating, each round with freshly booted VMs"
            } else {
                "in each a window of every policy, in random order, in one guest"
            },
            spec.seconds
        ),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
            .unwrap_or_default()
            .trim()
            .to_owned(),
        host_cpu_percent: percent,
        rounds: spec.rounds,
        seconds: spec.seconds,
        policies: spec.policies.clone(),
        rows: Vec::new(),
        geometric_means: Vec::new(),
        targets: Vec::new(),
    };
    for cases in spec.cases.chunk_by(|a, b| a.service == b.service) {
        let start = report.rows.len();
        for case in cases {
            let rows = spec.policies.iter().map(|policy| report::Row::new(case, policy));
            report.rows.extend(rows);
        }
        let mut told = |round: u32, at: usize, outcome: standing::Outcome, case: usize| {
            let row = &mut report.rows[start + case * spec.policies.len() + at];
            match outcome {
                Ok(sample) => {
                    say(&format!(
                        "round {round} {} {}: {:.0}/s, p50 {:.2} ms, p99 {:.2} ms, {} syncs",
                        row.policy,
                        row.title(),
                        sample.load.per_second,
                        sample.load.p50_ms,
                        sample.load.p99_ms,
                        sample.syncs.count
                    ));
                    row.samples.push(sample);
                }
                Err(failure) => {
                    say(&format!("FAILED {} {}: {failure}", row.policy, row.title()));
                    row.failures.push(failure);
                }
            }
        };
        if spec.fresh {
            for round in 1..=spec.rounds {
                for at in paired::order(spec.policies.len(), round) {
                    match standing::measure(spec, &spec.policies[at], round, cases) {
                        Ok(outcomes) => {
                            for (case, outcome) in outcomes.into_iter().enumerate() {
                                told(round, at, outcome, case);
                            }
                        }
                        Err(error) => {
                            for case in 0..cases.len() {
                                told(round, at, Err(format!("round {round}: {error:#}")), case);
                            }
                        }
                    }
                }
            }
        } else if let Err(error) = standing::windows(spec, cases, &mut told) {
            for case in 0..cases.len() {
                for at in 0..spec.policies.len() {
                    told(0, at, Err(format!("{error:#}")), case);
                }
            }
        }
        report.conclude();
        so_far(&report)?;
    }
    Ok(report)
}
