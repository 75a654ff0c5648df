//! What running a bare program twice costs: servers on one host of the testbed, plain, and the same as programs of two hosts, in turns.
//!
//! * **Decides:** nothing. * **Flow:** for each server: plain and protected at once, one of them loaded at a time -> medians of the rounds.
//! * **Invariants:** it is protected from the first to the last request of a round that counts.
//! * **Not here:** VMs (`bench_vm`); what a copy of a running one costs (`bench_joins`).

mod loads;
mod plain;
mod subjects;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use dunlin_api::EventKind;
use serde::Serialize;

use super::{NAME, PATIENCE, Plan, down, up};
use crate::bench_vm::cost::DAEMON;
use crate::cluster::{Cluster, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;
use loads::{Measured, Window};
use plain::Plain;
pub(super) use subjects::Subject;
use subjects::{Asked, SUBJECTS};

/// So often a load is repeated in which copies differed that may.
const TRIES: usize = 3;
/// The host that only agrees.
const WITNESS: &str = "c";

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchSpec {
    /// Which programs; all, if none is named.
    pub programs: Vec<String>,
    /// Numbers of parallel connections; what makes sense for each, if none is named.
    pub connections: Vec<u32>,
    /// How often each.
    pub rounds: usize,
    /// About how long each load takes.
    pub about: Duration,
    /// The setting `order` of the protected ones; each one's own, if none is named.
    pub order: Option<String>,
}

/// One line.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Which program.
    pub program: String,
    /// What is asked of it.
    pub asked: String,
    /// What its next input waits for.
    pub order: String,
    /// Parallel connections.
    pub connections: u32,
    /// Medians over the rounds: requests per second, plain and as a program of two hosts.
    pub plain_per_second: f64,
    /// See `plain_per_second`.
    pub program_per_second: f64,
    /// Medians of the medians, in milliseconds.
    pub plain_p50_ms: f64,
    /// See `plain_p50_ms`.
    pub program_p50_ms: f64,
    /// CPU for one request, in microseconds.
    pub cpu_us: CpuUs,
    /// How often the second copy was lost for what it said, or did not say; each such round was measured again.
    pub lost: usize,
}

/// Medians over the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CpuUs {
    /// The server without Dunlin.
    pub plain: f64,
    /// The client of that.
    pub plain_client: f64,
    /// The daemon of the primary's host.
    pub primary: f64,
    /// That of the backup's.
    pub backup: f64,
    /// That of the witness.
    pub witness: f64,
    /// The program, on the primary's host.
    pub copy: f64,
    /// On the backup's.
    pub second_copy: f64,
    /// The client.
    pub client: f64,
}

impl CpuUs {
    fn of(rounds: &[[Measured; 2]], primary: &str, backup: &str) -> Self {
        let of = |value: &dyn Fn(&[Measured; 2]) -> f64| median(rounds.iter().map(value));
        let program = |host: &str, groups: &[&str]| of(&|round| round[1].cost.on(host, groups));
        Self {
            plain: of(&|round| round[0].cost.on(plain::HOST, &["rest"])),
            plain_client: of(&|round| round[0].client_us),
            primary: program(primary, &DAEMON),
            backup: program(backup, &DAEMON),
            witness: program(WITNESS, &DAEMON),
            copy: program(primary, &["rest"]),
            second_copy: program(backup, &["rest"]),
            client: of(&|round| round[1].client_us),
        }
    }

    /// Of a request to the program on two hosts.
    pub fn sum(&self) -> f64 {
        self.primary + self.backup + self.witness + self.copy + self.second_copy + self.client
    }
}

impl Figures {
    /// For people.
    pub fn line(&self) -> String {
        let cpu = &self.cpu_us;
        let lost = match self.lost {
            0 => String::new(),
            times => format!("; the second copy was lost {times} times, and the round measured again"),
        };
        format!(
            "bench programs: {}, {}, order {:?}, {} connections: plain {:.0}/s p50 {:.2} ms, on two hosts {:.0}/s p50 {:.2} ms: share {:.3}, p50 x {:.1}; \
             CPU us a request: plain {:.0} and client {:.0}; daemons {:.0} + {:.0} + {:.0}, copies {:.0} + {:.0}, client {:.0}, in all {:.0}{lost}",
            self.program,
            self.asked,
            self.order,
            self.connections,
            self.plain_per_second,
            self.plain_p50_ms,
            self.program_per_second,
            self.program_p50_ms,
            self.program_per_second / self.plain_per_second.max(1.0),
            self.program_p50_ms / self.plain_p50_ms.max(0.001),
            cpu.plain,
            cpu.plain_client,
            cpu.primary,
            cpu.backup,
            cpu.witness,
            cpu.copy,
            cpu.second_copy,
            cpu.client,
            cpu.sum(),
        )
    }
}

/// Those that are named, or all.
///
/// # Errors
/// A name that is none.
pub(super) fn named(programs: &[String]) -> Result<Vec<&'static Subject>> {
    if let Some(unknown) = programs
        .iter()
        .find(|named| !SUBJECTS.iter().any(|known| known.name == *named))
    {
        bail!(
            "there is no program {unknown:?}: {}",
            SUBJECTS.each_ref().map(|subject| subject.name).join(", ")
        );
    }
    let is_named = |name: &str| programs.is_empty() || programs.iter().any(|named| named == name);
    Ok(SUBJECTS.iter().filter(|subject| is_named(subject.name)).collect())
}

/// Measures, in turns.
///
/// # Errors
/// When a program is not protected all the while, something does not happen at all, or none of them is on this machine.
pub fn run(binary: &Path, spec: &BenchSpec, say: &mut dyn FnMut(&str)) -> Result<Vec<Figures>> {
    let subjects = named(&spec.programs)?;
    ensure!(spec.rounds > 0, "--rounds 0 measures nothing");
    in_a_testbed("bench-programs", &TestbedSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        let mut all = Vec::new();
        for subject in subjects {
            let Some(mut plan) = (subject.plan)(cluster.testbed(), service().port())? else {
                say(&format!(
                    "bench programs: {} is not on this machine: not measured",
                    subject.name
                ));
                continue;
            };
            let order = ordered(&mut plan, spec.order.as_deref());
            let measured = compare(cluster, subject, &plan, &order, spec, say);
            all.extend(measured.with_context(|| subject.name.to_owned())?);
        }
        ensure!(!all.is_empty(), "none of these programs is on this machine");
        Ok(all)
    })
}

/// What the program's next input waits for: `order`, or what its plan says, or what the daemon takes if nothing is said.
fn ordered(plan: &mut Plan, order: Option<&str>) -> String {
    const KEY: &str = "order = ";
    if let Some(order) = order {
        plan.lines.retain(|line| !line.starts_with(KEY));
        plan.lines.push(format!("{KEY}{order:?}"));
    }
    let own = plan.lines.iter().find_map(|line| line.strip_prefix(KEY));
    own.unwrap_or("auto").trim_matches('"').to_owned()
}

/// All loads of one server, plain and protected.
fn compare(
    cluster: &Cluster<'_>,
    subject: &Subject,
    plan: &Plan,
    order: &str,
    spec: &BenchSpec,
    say: &mut dyn FnMut(&str),
) -> Result<Vec<Figures>> {
    let (primary, backup) = up(cluster, plan)?;
    let mut plain = Plain::start(cluster, plan)?;
    let client = cluster.testbed().node("client");
    for target in [plain.address, service()] {
        subject.set_up(client, target)?;
    }
    // A first greeting may have cost the second copy.
    cluster.await_protected(NAME, PATIENCE)?;
    let pair = Pair {
        cluster,
        subject,
        plain: &plain,
        hosts: [&primary, &backup],
        about: spec.about,
    };
    let mut all = Vec::new();
    for asked in subject.loads {
        let own = match &spec.connections[..] {
            [] => asked.connections,
            named => named,
        };
        for &connections in own {
            let (mut rounds, mut lost) = (Vec::new(), 0);
            while rounds.len() < spec.rounds {
                let Some(round) = pair.round(asked, connections, &mut lost)? else {
                    break;
                };
                rounds.push(round);
            }
            if rounds.is_empty() {
                say(&format!(
                    "bench programs: {}, {}, {connections} connections: no figures: its second copy was lost {lost} times, in each of {TRIES} loads",
                    subject.name, asked.what
                ));
                continue;
            }
            let of =
                |at: usize, value: fn(&Measured) -> f64| median(rounds.iter().map(|round| value(&round[at])));
            let figures = Figures {
                program: subject.name.to_owned(),
                asked: asked.what.to_owned(),
                order: order.to_owned(),
                connections,
                plain_per_second: of(0, |round| round.per_second),
                program_per_second: of(1, |round| round.per_second),
                plain_p50_ms: of(0, |round| round.p50_ms),
                program_p50_ms: of(1, |round| round.p50_ms),
                cpu_us: CpuUs::of(&rounds, &primary, &backup),
                lost,
            };
            say(&figures.line());
            all.push(figures);
        }
    }
    plain.stop()?;
    down(cluster, &primary)?;
    Ok(all)
}

/// A server that runs plain, and as a program of two hosts.
struct Pair<'a> {
    cluster: &'a Cluster<'a>,
    subject: &'a Subject,
    plain: &'a Plain,
    /// The primary and the backup.
    hosts: [&'a str; 2],
    about: Duration,
}

impl Pair<'_> {
    /// Both, one after the other. The program is protected from its load's beginning to the end, or it is measured again; none, if it never was.
    fn round(&self, asked: &Asked, connections: u32, lost: &mut usize) -> Result<Option<[Measured; 2]>> {
        let window = |target| Window {
            testbed: self.cluster.testbed(),
            target,
            connections,
            about: self.about,
        };
        let plain = window(self.plain.address).measure(asked.load, || Ok(()))?;
        let losses = || -> Result<usize> {
            let events = self.cluster.events(self.hosts[0])?;
            Ok(events
                .iter()
                .filter(|event| event.kind == EventKind::BackupLost)
                .count())
        };
        for _ in 0..TRIES {
            let mut before = 0;
            let program = window(service()).measure(asked.load, || {
                // A greeting may have cost the second copy: MariaDB's has a nonce of its own in each.
                self.cluster.await_protected(NAME, PATIENCE)?;
                before = losses()?;
                Ok(())
            })?;
            let (primary, backup) = self.cluster.await_protected(NAME, PATIENCE)?;
            ensure!(
                [&*primary, &*backup] == self.hosts,
                "{} served at first, {primary} at last",
                self.hosts[0]
            );
            let more = losses()? - before;
            if more == 0 {
                return Ok(Some([plain, program]));
            }
            *lost += more;
            ensure!(
                self.subject.may_differ(),
                "its copies differ: 'backup-lost' in the events of host {primary}"
            );
        }
        Ok(None)
    }
}

pub(super) fn median(all: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = all.collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::{Plan, ordered};

    /// A key that stands twice is no TOML: `bench programs` ended at its third program.
    #[test]
    fn an_order_stands_once_in_a_programs_file_and_the_one_asked_for_wins() {
        let with = |lines: &[&str]| Plan {
            command: vec!["/bin/true".to_owned()],
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            standby_after: None,
        };
        let own = ["port = 80", "order = \"answer\""];
        for (lines, asked, order) in [
            (&own[..], None, "answer"),
            (&own[..], Some("batch"), "batch"),
            (&own[..1], Some("delivery"), "delivery"),
            (&own[..1], None, "auto"),
        ] {
            let mut plan = with(lines);
            assert_eq!(ordered(&mut plan, asked), order);
            let table: toml::Table = plan.lines.join("\n").parse().expect("TOML");
            let said = table.get("order").and_then(toml::Value::as_str);
            assert_eq!(said.unwrap_or("auto"), order);
        }
    }
}
