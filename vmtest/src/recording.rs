//! A recording of a real run: what Prometheus would have seen of three hosts while one of them died.
//!
//! * **Decides:** nothing but what happens and when somebody looks.
//! * **Flow:** three hosts that serve metrics -> [`scraper`] looks at all of them -> VM up and protected, load, `failover`, SIGKILL
//!   to the primary's host, nothing for as long as alarms take, its return, `verify-disk`, `policy`, calm -> [`series`] -> a file
//!   that promtool takes, and [`picture`].
//! * **Invariants:** every look is at all hosts; clients count from the load to the calm, and a run that lost something is no recording.
//! * **Source:** issue "What an operator expects"; the format is OpenMetrics 1.0.
//! * **Not here:** what each metric means (docs/monitoring.md); whether alarms ring on it (`node/src/metrics/tests/recording.rs`).

mod picture;
mod scraper;
mod series;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::image::GuestImage;
use crate::paths;
use crate::scenario::ledger::equal_images_on;
use crate::testbed::TestbedSpec;

pub use picture::draw;
use scraper::Scraper;
pub use series::{Recording, Series};

/// Seconds from one look to the next.
pub const EVERY: u64 = 1;
/// 1 while a host's daemon answers, as Prometheus says itself.
pub const UP: &str = "up";
/// The clients' answers.
pub const ANSWERS: &str = "client_answers_total";
/// When each step began; its name is in the label `step`.
pub const STEP: &str = "recording_step_timestamp_seconds";
/// The step with which the primary's host dies.
pub const KILLED: &str = "host killed";
/// The step with which it comes back.
pub const BACK: &str = "host back";

const PATIENCE: Duration = Duration::from_secs(150);
const CONNECTIONS: usize = 4;
const DISK_MIB: u64 = 64;
/// Looks at each quiet stretch of the story.
const STRETCH: u64 = 24 / EVERY;
/// Looks while a host is dead: the slowest alarms of a death take two minutes.
const DEAD: u64 = 130 / EVERY;

/// What to record.
#[derive(Clone, Debug)]
pub struct RecordingSpec {
    /// The executable.
    pub dunlin: PathBuf,
    /// The guest.
    pub image: GuestImage,
}

/// Records one run. `say` gets a line for each step.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(spec: &RecordingSpec, say: &mut dyn FnMut(&str)) -> Result<Recording> {
    in_a_testbed(
        "recording",
        &TestbedSpec::three_hosts(),
        &spec.dunlin,
        |cluster| play(cluster, spec, say),
    )
}

/// What is told while it happens: to a person, and into the recording.
struct Teller<'a> {
    scraper: Scraper,
    say: &'a mut dyn FnMut(&str),
}

impl Teller<'_> {
    fn step(&mut self, name: &str, more: &str) {
        self.scraper.step(name);
        (self.say)(&format!("{name}{more}"));
    }
}

fn play(cluster: &mut Cluster<'_>, spec: &RecordingSpec, say: &mut dyn FnMut(&str)) -> Result<Recording> {
    let client = cluster.testbed().node("client");
    let mut hosts = Vec::new();
    for host in cluster.hosts() {
        hosts.push((host.clone(), cluster.serve_metrics(host)?));
    }
    cluster.start_hosts()?;
    let scraper = Scraper::start(client, hosts)?;
    let mut teller = Teller { scraper, say };
    teller.step("hosts up", "");
    teller.scraper.await_looks(2)?;

    let plan = VmPlan {
        disk_mib: Some(DISK_MIB),
        ..VmPlan::redis("dunlin")
    };
    let vm = plan.name.as_str();
    let file = plan.write(cluster.testbed(), &spec.image)?;
    teller.step("VM up", "");
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    await_service(client, plan.service(), PATIENCE)?;
    let (primary, _) = cluster.await_protected(vm, PATIENCE)?;
    teller.step("protected", &format!(": {primary} is the primary"));
    teller.scraper.await_looks(STRETCH / 2)?;

    teller.step("load", "");
    let counter = Counter::start(
        client,
        &CounterSpec {
            target: plan.service(),
            connections: CONNECTIONS,
            together: false,
            give_up: PATIENCE,
        },
    )?;
    teller.scraper.count(counter.acknowledged_until_now());
    teller.scraper.await_looks(STRETCH)?;
    moves_and_dies(cluster, vm, &mut teller)?;

    teller.step("verify-disk", "");
    equal_images_on(cluster, vm)?;
    teller.scraper.await_looks(STRETCH / 2)?;

    teller.step("policy remus", "");
    cluster.dunlin("c", &["policy", vm, "remus"])?;
    cluster.await_protected(vm, PATIENCE)?;
    teller.scraper.await_looks(STRETCH)?;

    teller.step("calm", ": clients end");
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    (teller.say)(&format!("  {} answers, nothing lost", clients.acknowledged));
    teller.scraper.await_looks(STRETCH)?;
    let recording = teller.scraper.finish()?;
    let host = cluster.running().first().cloned().context("no host runs")?;
    cluster.end(&host, vm)?;
    Ok(recording)
}

/// The VM goes to the other host by order, and back because that one dies; then the dead host returns.
fn moves_and_dies(cluster: &mut Cluster<'_>, vm: &str, teller: &mut Teller<'_>) -> Result<()> {
    let (primary, _) = cluster.await_protected(vm, PATIENCE)?;
    teller.step("failover", &format!(": away from {primary}"));
    cluster.dunlin(&primary, &["switchover", vm])?;
    cluster.await_take_over(vm, &primary, PATIENCE)?;
    cluster.await_protected(vm, PATIENCE)?;
    teller.scraper.await_looks(STRETCH)?;

    let (primary, _) = cluster.await_protected(vm, PATIENCE)?;
    cluster.kill_host(&primary)?;
    teller.step(KILLED, &format!(": SIGKILL to every process of host {primary}"));
    let (took_over, _) = cluster.await_take_over(vm, &primary, PATIENCE)?;
    (teller.say)(&format!("  host {took_over} took over"));
    teller.scraper.await_looks(DEAD)?;

    teller.step(BACK, &format!(": {primary}"));
    cluster.start_host(&primary)?;
    let (primary, backup) = cluster.await_protected(vm, PATIENCE)?;
    let roles = format!(": {primary} is the primary, {backup} the backup");
    teller.step("protected again", &roles);
    teller.scraper.await_looks(STRETCH)
}

/// Where the one that everybody has is kept.
pub fn kept() -> PathBuf {
    paths::workspace().join("monitoring/recording.om.gz")
}

/// Where its picture is kept.
pub fn kept_picture() -> PathBuf {
    paths::workspace().join("docs/pictures/recording.svg")
}

/// The metrics that alarms and dashboard speak of.
///
/// # Errors
/// When their files cannot be read.
pub fn spoken_of() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for file in ["alerts.yml", "dashboard.json"] {
        let file = paths::workspace().join("monitoring").join(file);
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        names.extend(
            words
                .filter(|word| word.starts_with("dunlin_"))
                .map(str::to_owned),
        );
    }
    Ok(names)
}

/// As gzip does.
///
/// # Errors
/// None on a machine that works.
pub fn pack(text: &str) -> Result<Vec<u8>> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(text.as_bytes())?;
    Ok(packed.finish()?)
}

/// The text that was packed.
///
/// # Errors
/// When it is no gzip.
pub fn unpack(packed: &[u8]) -> Result<String> {
    let mut text = String::new();
    GzDecoder::new(packed).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::{Recording, draw, kept, kept_picture, unpack};

    #[test]
    fn the_kept_recording_is_read_and_its_picture_is_of_it() {
        let text = unpack(&std::fs::read(kept()).unwrap()).unwrap();
        let recording = Recording::parse(&text).unwrap();
        assert_eq!(recording.to_string(), text);
        let picture = std::fs::read_to_string(kept_picture()).unwrap();
        assert_eq!(
            draw(&recording).unwrap(),
            picture,
            "cargo xtask record --redraw draws it anew"
        );
    }
}
