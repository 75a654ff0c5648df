//! How syncs grow: with the guest's RAM, with the pages that an epoch dirties, with vCPUs.
//!
//! * **Decides:** the load: each request has redis write one byte into each of so many pages of one string, the byte another each time. One
//!   connection asks, and under `remus` an answer leaves by a sync: so an epoch has the pages of one request, and what the guest dirties besides.
//! * **Flow:** for each point of an [`Axis`] and each policy a VM of its own -> requests for some seconds -> the syncs' figures.
//! * **Invariants:** a point whose VM was not protected before and after has no figures; it costs the others none.
//! * **Source:** PLOVER (NSDI'18) and its dissertation for what grows. **Not here:** throughput (`bench vm`).

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::bound::median_pause_ms;
use super::machine::Machine;
use super::report::Syncs;
use super::table::STEPS;
use super::{BenchSpec, case, plot, standing, window};
use crate::client::{Answer, Connection};
use crate::cluster::VmPlan;

/// An answer to a request that writes 256 MiB comes within this time, under TCG and over syncs.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: u64 = 4096;
const KEY: &str = "growth";
/// Writes ARGV[1] into each page of the string.
const WRITE: &str =
    "for at = 0, ARGV[2] - 1 do redis.call('SETRANGE', KEYS[1], at * 4096, ARGV[1]) end return ARGV[2]";

/// What grows, while all else stays as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// The guest's RAM in MiB.
    Memory,
    /// Pages that a request dirties.
    Dirty,
    /// The guest's virtual CPUs.
    Vcpus,
}

impl Axis {
    /// By its name.
    ///
    /// # Errors
    /// With the list of what there is.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "memory" => Ok(Self::Memory),
            "dirty" => Ok(Self::Dirty),
            "vcpus" => Ok(Self::Vcpus),
            _ => bail!("nothing grows by the name '{name}': there are memory, dirty, vcpus"),
        }
    }

    fn points(self) -> &'static [u64] {
        match self {
            Self::Memory => &[256, 512, 1024, 2048, 4096, 8192, 16_384],
            Self::Dirty => &[1024, 4096, 16_384, 65_536],
            Self::Vcpus => &[1, 2, 4],
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Memory => "MiB",
            Self::Dirty => "pages",
            Self::Vcpus => "vCPUs",
        }
    }

    /// RAM in MiB, pages of a request, vCPUs.
    fn shape(self, point: u64) -> (u64, u64, u64) {
        match self {
            Self::Memory => (point, 1024, 1),
            // The string's 256 MiB, and as much again while it is made.
            Self::Dirty => (1024, point, 1),
            Self::Vcpus => (512, 1024, point),
        }
    }
}

/// One VM's syncs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// What grows.
    pub axis: Axis,
    /// How far.
    pub value: u64,
    /// Under which policy.
    pub policy: String,
    /// Requests that were answered.
    pub requests: u64,
    /// Median latency in ms.
    pub p50_ms: f64,
    /// Median pause in ms.
    pub pause_p50_ms: f64,
    /// The syncs.
    pub syncs: Syncs,
    /// Why there are no figures.
    pub failure: Option<String>,
}

/// The whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Growth {
    /// On what, and how.
    pub on: Machine,
    /// All points.
    pub points: Vec<Point>,
}

/// Measures each point of `axes` under each policy of `spec`.
pub fn run(spec: &BenchSpec, axes: &[Axis], say: &mut dyn FnMut(&str)) -> Growth {
    let mut growth = Growth {
        on: super::nothing_yet(spec).on,
        points: Vec::new(),
    };
    for &axis in axes {
        for &value in axis.points() {
            for policy in &spec.policies {
                let point = measure(spec, axis, value, policy).unwrap_or_else(|error| Point {
                    axis,
                    value,
                    policy: policy.clone(),
                    requests: 0,
                    p50_ms: 0.0,
                    pause_p50_ms: 0.0,
                    syncs: Syncs::default(),
                    failure: Some(format!("{error:#}")),
                });
                say(&line(&point));
                growth.points.push(point);
            }
        }
    }
    growth
}

fn measure(spec: &BenchSpec, axis: Axis, value: u64, policy: &str) -> Result<Point> {
    let (memory_mib, pages, vcpus) = axis.shape(value);
    let plan = VmPlan {
        memory_mib: u32::try_from(memory_mib)?,
        vcpus: u32::try_from(vcpus)?,
        file: spec.file()?,
        ..VmPlan::redis(policy)
    };
    let cases = case::choose(&["set".to_owned()], Some(&[1]))?;
    let (measured, ended) = standing::with_vm(spec, &cases, plan, |service| -> Result<Point> {
        let vm = &service.plan.name;
        let seconds = Duration::from_secs_f64(spec.seconds);
        let target = service.plan.service();
        // The first requests make the string, and what follows from that is no epoch of this load.
        ask(service, move || requests(target, pages, Duration::ZERO))?;
        service.cluster.await_protected(vm, PATIENCE)?;
        ask(service, move || requests(target, pages, seconds / 4))?;
        let before = window::primary(service)?;
        let mut latencies_ms = ask(service, move || requests(target, pages, seconds))?;
        let after = window::primary(service)?;
        ensure!(
            before.protected && after.protected && before.term == after.term,
            "the VM was not protected all the time"
        );
        let syncs = window::difference(&before, &after);
        latencies_ms.sort_by(f64::total_cmp);
        Ok(Point {
            axis,
            value,
            policy: policy.to_owned(),
            requests: latencies_ms.len() as u64,
            p50_ms: latencies_ms[latencies_ms.len() / 2],
            pause_p50_ms: median_pause_ms(&syncs.pauses),
            syncs,
            failure: None,
        })
    })?;
    let point = measured?;
    ended?;
    Ok(point)
}

fn ask<T: Send + 'static>(
    service: &standing::Service<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let asked = service.clients.node.spawn("growth", work)?;
    asked
        .join()
        .map_err(|_| anyhow::anyhow!("a client thread panicked"))??
}

/// Requests for that long, one at the least; how long each took in ms.
fn requests(target: std::net::SocketAddr, pages: u64, length: Duration) -> Result<Vec<f64>> {
    let mut connection = Connection::open(target, PATIENCE)?;
    let whole = (pages * PAGE - 1).to_string();
    match connection.ask(&["SETRANGE", KEY, &whole, "."], PATIENCE)? {
        Answer::Integer(bytes) if bytes as u64 == pages * PAGE => {}
        other => bail!("SETRANGE was answered by {other:?}"),
    }
    let (begun, mut latencies_ms) = (Instant::now(), Vec::new());
    while latencies_ms.is_empty() || begun.elapsed() < length {
        let letter = char::from(b'a' + (latencies_ms.len() % 26) as u8).to_string();
        let at = Instant::now();
        match connection.ask(&["EVAL", WRITE, "1", KEY, &letter, &pages.to_string()], PATIENCE)? {
            Answer::Bulk(Some(_)) | Answer::Integer(_) => {}
            other => bail!("EVAL was answered by {other:?}"),
        }
        latencies_ms.push(at.elapsed().as_secs_f64() * 1e3);
    }
    Ok(latencies_ms)
}

const HEADING: &str = "grows         policy   requests   p50 ms    syncs  pause p50     pause      stop      save      scan      wait      copy      cont    dirtyP    united    diverg   equal %       KiB";

fn line(point: &Point) -> String {
    let mut text = format!("{:>6} {:6} {:8}", point.value, point.axis.unit(), point.policy);
    if let Some(why) = &point.failure {
        let _ = write!(text, " FAILED {why}");
        return text;
    }
    let mean = |name: &str| point.syncs.mean.get(name).copied().unwrap_or(0.0);
    let _ = write!(
        text,
        " {:>8} {:>8.1} {:>8} {:>10.2} {:>9.2}",
        point.requests,
        point.p50_ms,
        point.syncs.count,
        point.pause_p50_ms,
        mean("pause_us") / 1e3
    );
    for (_, key) in STEPS {
        let _ = write!(text, " {:>9.2}", mean(key) / 1e3);
    }
    // Of the pages that either copy wrote, those that both wrote alike.
    let equal = 100.0 * (1.0 - mean("divergent") / mean("united").max(1.0));
    let _ = write!(
        text,
        " {:>9.0} {:>9.0} {:>9.0} {equal:>9.0} {:>9.0}",
        mean("dirty_primary"),
        mean("united"),
        mean("divergent"),
        mean("bytes") / 1024.0
    );
    text
}

/// The points as text.
pub fn growth_table(growth: &Growth) -> String {
    let mut text = format!(
        "{}, commit {}. One connection asks; means over the syncs, times in ms.\n\n{HEADING}\n",
        growth.on.in_words(),
        growth.on.commit
    );
    for point in &growth.points {
        text.push_str(&line(point));
        text.push('\n');
    }
    text
}

/// File name and SVG of the pauses by step and of the bytes, for each axis.
///
/// # Errors
/// When a picture cannot be drawn.
pub fn growth_pictures(growth: &Growth) -> Result<Vec<(String, String)>> {
    let mut drawn = Vec::new();
    for axis in [Axis::Memory, Axis::Dirty, Axis::Vcpus] {
        let points = growth
            .points
            .iter()
            .filter(|point| point.axis == axis && point.failure.is_none());
        let label = |point: &Point| format!("{} {} {}", point.value, axis.unit(), point.policy);
        let of = |keys: &[&str], scale: f64| -> Vec<plot::Line> {
            let points = points.clone();
            let value = |point: &Point, key: &str| point.syncs.mean.get(key).map(|value| value / scale);
            points
                .map(|point| (label(point), keys.iter().map(|key| value(point, key)).collect()))
                .collect()
        };
        let name = format!("{axis:?}").to_lowercase();
        let steps = of(&STEPS.map(|(_, key)| key), 1e3);
        if steps.is_empty() {
            continue;
        }
        let on = growth.on.in_words();
        let pauses = plot::stacked(
            &on,
            "pause of one sync by step, ms (means)",
            STEPS.map(|(step, _)| step).to_vec(),
            steps,
        );
        drawn.push((format!("growth-{name}-pause.svg"), pauses?));
        let bytes = plot::stacked(&on, "one sync, KiB", vec!["KiB"], of(&["bytes"], 1024.0));
        drawn.push((format!("growth-{name}-bytes.svg"), bytes.context("bytes")?));
    }
    Ok(drawn)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_grows_at_a_time_and_the_guest_has_room_for_it() {
        for axis in [Axis::Memory, Axis::Dirty, Axis::Vcpus] {
            let shapes: Vec<_> = axis.points().iter().map(|point| axis.shape(*point)).collect();
            for (memory_mib, pages, _) in &shapes {
                assert!(
                    memory_mib << 20 >= pages * PAGE * 3,
                    "{axis:?} {memory_mib} {pages}"
                );
            }
            let distinct = |of: fn(&(u64, u64, u64)) -> u64| {
                shapes
                    .iter()
                    .map(of)
                    .collect::<std::collections::BTreeSet<_>>()
                    .len()
            };
            let grown = [distinct(|s| s.0), distinct(|s| s.1), distinct(|s| s.2)];
            assert_eq!(grown.iter().filter(|many| **many > 1).count(), 1, "{grown:?}");
        }
        assert!(
            Axis::named("disk")
                .unwrap_err()
                .to_string()
                .contains("memory, dirty, vcpus")
        );
    }

    #[test]
    fn points_and_failures_are_shown() {
        let point = |value, failure| Point {
            axis: Axis::Memory,
            value,
            policy: "remus".to_owned(),
            requests: 3,
            p50_ms: 12.0,
            pause_p50_ms: 4.0,
            syncs: Syncs {
                count: 3,
                mean: [
                    ("pause_us".to_owned(), 4000.0),
                    ("stop_us".to_owned(), 500.0),
                    ("united".to_owned(), 200.0),
                    ("divergent".to_owned(), 50.0),
                    ("bytes".to_owned(), 4096.0),
                ]
                .into(),
                ..Syncs::default()
            },
            failure,
        };
        let growth = Growth {
            on: Machine::default(),
            points: vec![point(256, None), point(512, Some("no VM".to_owned()))],
        };
        let text = growth_table(&growth);
        assert!(
            text.contains("FAILED no VM")
                && text
                    .lines()
                    .any(|line| line.contains("   256 MiB") && line.contains(" 75 ")),
            "{text}"
        );
        let names: Vec<String> = growth_pictures(&growth)
            .unwrap()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["growth-memory-pause.svg", "growth-memory-bytes.svg"]);
    }
}
