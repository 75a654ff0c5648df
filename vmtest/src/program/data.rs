//! A program with data on an image of its own: redis, which writes each command to its append-only file before it answers.
//!
//! * **Decides:** what passes: what was acknowledged is there after the death of any host, of all of them, and after an end and a new
//!   beginning; an image that is half of one is not begun from; no loop device is left.
//! * **Invariants:** (1) hosts die by SIGKILL: what their kernel still had in memory goes to the image all the same. A loss of power that
//!   takes that as well is not played here.
//! * **Not here:** the images themselves (`dunlin_program::data`, and its tests).

use dunlin_api::EventKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::oddities::{ask, events, failed_on_both, told};
use super::{ACKNOWLEDGED, CONNECTIONS, NAME, PATIENCE, Plan, count, down, path, up, whole};
use crate::client::Answer;
use crate::cluster::Cluster;
use crate::testbed::Testbed;

/// How large the image is.
pub const IMAGE_MIB: u32 = 64;
/// Written one after the other, and counted.
const WRITTEN: i64 = 50;

impl Plan {
    /// redis with an append-only file on an image of its own.
    pub fn redis_with_data(testbed: &Testbed) -> Result<Self> {
        let mut plan = Self::redis(testbed)?;
        let at = testbed.dir().join("data");
        std::fs::create_dir_all(&at)?;
        let at = at.to_str().context("a path of text")?;
        let off = plan.command.iter().position(|word| word == "--appendonly");
        plan.command.truncate(off.context("redis' options")?);
        let words = ["--dir", at, "--appendonly", "yes", "--appendfsync", "always"];
        plan.command.extend(words.map(str::to_owned));
        let image = testbed.here().join("sessions.img");
        plan.lines.extend([
            format!("data = \"{}\"", image.display()),
            format!("data_at = \"{at}\""),
            format!("data_mib = {IMAGE_MIB}"),
        ]);
        Ok(plan)
    }
}

/// Whether a host's image is known to be half of one.
fn is_torn(cluster: &Cluster<'_>, host: &str) -> Result<bool> {
    let file: PathBuf = cluster.testbed().node(host).home().join("sessions.img.mark");
    let mark = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let says = |torn: bool| mark.contains(&format!("\"torn\":{torn}"));
    ensure!(says(true) != says(false), "{}: {mark}", file.display());
    Ok(says(true))
}

/// The images are this testbed's, and outlive a program: each story begins with none.
pub(super) fn forget(cluster: &Cluster<'_>) -> Result<()> {
    for host in cluster.hosts() {
        for name in ["sessions.img", "sessions.img.mark"] {
            match std::fs::remove_file(cluster.testbed().node(host).home().join(name)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => bail!("{name}: {error}"),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Adds so many to a key that only this writes; each is acknowledged.
pub(super) fn write(cluster: &Cluster<'_>) -> Result<()> {
    for _ in 0..WRITTEN {
        let answer = ask(cluster, &["INCR", "written"], PATIENCE)?;
        ensure!(matches!(answer, Some(Answer::Integer(_))), "INCR: {answer:?}");
    }
    Ok(())
}

pub(super) fn is_there(cluster: &Cluster<'_>, times: i64) -> Result<()> {
    let answer = ask(cluster, &["INCRBY", "written", "0"], PATIENCE)?;
    ensure!(
        answer == Some(Answer::Integer(times * WRITTEN)),
        "{} were acknowledged, and there are {answer:?}",
        times * WRITTEN
    );
    Ok(())
}

/// Ends it; the images stay, and nobody has them.
fn end(cluster: &Cluster<'_>) -> Result<()> {
    down(cluster, "a")?;
    await_detached(cluster)?;
    for host in ["a", "b"] {
        let image = cluster.testbed().node(host).home().join("sessions.img");
        ensure!(image.exists(), "host {host}: its image is gone");
    }
    forget(cluster)
}

/// The kernel lets go of a device when its last user has gone.
pub(super) fn await_detached(cluster: &Cluster<'_>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = attached(cluster)?;
        if left.is_empty() {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "on loop devices still: {}",
            left.join(", ")
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The images of this testbed that are on loop devices.
fn attached(cluster: &Cluster<'_>) -> Result<Vec<String>> {
    let blocks = std::fs::read_dir("/sys/block")?.flatten();
    let files =
        blocks.filter_map(|block| std::fs::read_to_string(block.path().join("loop/backing_file")).ok());
    let testbed = cluster.dir().to_string_lossy().into_owned();
    let here = cluster.testbed().here().to_string_lossy().into_owned();
    Ok(files
        .map(|file| file.trim().to_owned())
        .filter(|file| file.starts_with(&testbed) || file.starts_with(&here))
        .collect())
}

/// Both primaries die, one after the other; then it is ended and begun again, and all of it is there.
pub(super) fn outlive_two_primaries(cluster: &mut Cluster<'_>) -> Result<()> {
    let plan = Plan::redis_with_data(cluster.testbed())?;
    up(cluster, &plan)?;
    let counter = count(cluster, CONNECTIONS)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    write(cluster)?;
    let (primary, backup) = whole(cluster)?;
    cluster.kill_host(&primary)?;
    cluster.await_take_over(NAME, &primary, PATIENCE)?;
    write(cluster)?;
    cluster.start_host(&primary)?;
    cluster
        .await_protected(NAME, PATIENCE)
        .context("after the first death")?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    whole(cluster)?;
    cluster.kill_host(&backup)?;
    cluster.await_take_over(NAME, &backup, PATIENCE)?;
    write(cluster)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("no answers afterwards")?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    // The host that is away has the older image: it is begun again where the newer one is.
    cluster.start_host(&backup)?;
    cluster.await_protected(NAME, PATIENCE)?;
    cluster.kill_host(&primary)?;
    cluster.await_take_over(NAME, &primary, PATIENCE)?;
    write(cluster)?;
    cluster.dunlin(&backup, &["down", NAME])?;
    cluster.start_host(&primary)?;
    // It was away when the end was agreed, and waits for hosts that know the program no more.
    cluster.dunlin(&primary, &["down", "--force", NAME])?;
    cluster.await_status("no host knows the program", PATIENCE, |hosts| {
        (hosts.len() == 3 && hosts.iter().all(|host| host.vms.is_empty())).then_some(())
    })?;
    let file = plan.write(cluster.testbed())?;
    cluster.dunlin(&primary, &["up", path(&file)?])?;
    let (first, _) = cluster.await_protected(NAME, PATIENCE)?;
    ensure!(
        first == backup,
        "it has begun on {first}, and the newer image is on {backup}"
    );
    is_there(cluster, 4)?;
    end(cluster)
}

/// All hosts die at once: what was acknowledged is there when they are back, on whichever host it begins again.
pub(super) fn outlive_all_hosts(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, _) = up(cluster, &Plan::redis_with_data(cluster.testbed())?)?;
    write(cluster)?;
    die_and_come_back(cluster)?;
    is_there(cluster, 1)?;
    // One goes on alone, and is the one to begin again.
    let (primary, backup) = match cluster.await_protected(NAME, PATIENCE)? {
        (first, second) if first == primary => (first, second),
        other => other,
    };
    cluster.kill_host(&backup)?;
    super::stories::await_alone(cluster, &primary)?;
    write(cluster)?;
    die_and_come_back(cluster)?;
    is_there(cluster, 2)?;
    end(cluster)
}

/// What a program with data draws in one life it does not draw again in the next one, on the same data.
pub(super) fn draw_anew(cluster: &mut Cluster<'_>) -> Result<()> {
    let mut plan = Plan::redis_with_data(cluster.testbed())?;
    plan.lines.push("chance = \"agreed\"".to_owned());
    up(cluster, &plan)?;
    let first = run_id(cluster)?;
    down(cluster, "a")?;
    // The kernel lets go of an image a moment later than its processes end.
    await_detached(cluster)?;
    up(cluster, &plan)?;
    let second = run_id(cluster)?;
    ensure!(first != second, "both lives have drawn {first}");
    end(cluster)
}

/// What redis draws when it begins.
fn run_id(cluster: &Cluster<'_>) -> Result<String> {
    let said = match ask(cluster, &["INFO", "server"], PATIENCE)? {
        Some(Answer::Bulk(Some(said))) => String::from_utf8(said)?,
        other => bail!("INFO: {other:?}"),
    };
    let id = said.lines().find_map(|line| line.strip_prefix("run_id:"));
    id.map(|id| id.trim().to_owned())
        .with_context(|| format!("no run_id: {said}"))
}

/// A program that was ended on both hosts stays so, also where one of their daemons does not know it any more.
pub(super) fn stay_ended(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, _) = up(cluster, &Plan::redis_with_data(cluster.testbed())?)?;
    write(cluster)?;
    // It closes the connection in place of an answer.
    ask(cluster, &["SHUTDOWN", "NOSAVE"], Duration::from_secs(2))?;
    failed_on_both(cluster, "ended with exit code 0")?;
    cluster.kill_host(&primary)?;
    cluster.start_host(&primary)?;
    told(
        cluster,
        &primary,
        &["has ended and is not begun again by itself", "'dunlin up'"],
    )?;
    ensure!(
        !events(cluster, &primary)?
            .iter()
            .any(|event| event.kind == EventKind::ColdStart),
        "it was begun again"
    );
    end(cluster)
}

/// All hosts die while a copy is on its way: the image that it was to have is half of one.
pub(super) fn torn_is_not_begun_from(cluster: &mut Cluster<'_>) -> Result<()> {
    /// On a busy machine a copy may be complete before all hosts have died: then it is played again.
    const TRIES: i64 = 5;
    up(cluster, &Plan::redis_with_data(cluster.testbed())?)?;
    write(cluster)?;
    let mut written = 1;
    while !die_while_torn(cluster)? {
        written += 1;
        ensure!(
            written <= TRIES,
            "each copy was complete before all hosts died, {TRIES} times"
        );
        come_back(cluster)?;
        is_there(cluster, written)?;
    }
    come_back(cluster)?;
    is_there(cluster, written + 1)?;
    end(cluster)
}

/// Writes while one host is away, and has all die when a copy is on its way to that one. Whether it was on its way still.
fn die_while_torn(cluster: &mut Cluster<'_>) -> Result<bool> {
    let (primary, backup) = whole(cluster)?;
    // The mark is written beside the agreement.
    let deadline = Instant::now() + PATIENCE;
    while is_torn(cluster, &backup)? {
        ensure!(
            Instant::now() < deadline,
            "the image on host {backup} never counts"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    cluster.kill_host(&backup)?;
    super::stories::await_alone(cluster, &primary)?;
    write(cluster)?;
    cluster.start_host(&backup)?;
    let deadline = Instant::now() + PATIENCE;
    while !is_torn(cluster, &backup)? {
        ensure!(Instant::now() < deadline, "no copy comes to host {backup}");
        std::thread::sleep(Duration::from_millis(1));
    }
    die(cluster)?;
    is_torn(cluster, &backup)
}

/// All hosts die, and the disk of the only one whose image is whole is not mounted when they come back: nothing is made in its place.
pub(super) fn gone_is_waited_for(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup) = up(cluster, &Plan::redis_with_data(cluster.testbed())?)?;
    cluster.kill_host(&backup)?;
    super::stories::await_alone(cluster, &primary)?;
    write(cluster)?;
    die(cluster)?;
    let home: PathBuf = cluster.testbed().node(&primary).home().to_owned();
    let rename = |from: &str, to: &str| -> Result<()> {
        for name in ["sessions.img", "sessions.img.mark"] {
            std::fs::rename(
                home.join(format!("{name}{from}")),
                home.join(format!("{name}{to}")),
            )?;
        }
        Ok(())
    };
    rename("", ".away")?;
    for host in cluster.hosts().to_vec() {
        cluster.start_host(&host)?;
    }
    cluster.await_status("the host tells that its image is gone", PATIENCE, |_| {
        let events = cluster.events(&primary).ok()?;
        let tells = |text: &str| text.contains("is not there, and the program has lived with it");
        events.iter().any(|event| tells(&event.text)).then_some(())
    })?;
    ensure!(
        !home.join("sessions.img").exists(),
        "an empty image was made in its place"
    );
    rename(".away", "")?;
    cluster.await_protected(NAME, PATIENCE)?;
    is_there(cluster, 1)?;
    end(cluster)
}

/// What is agreed was in memory alone: a person says that all copies are dead, and begins it from what is there.
pub(super) fn outlive_what_was_agreed(cluster: &mut Cluster<'_>) -> Result<()> {
    let plan = Plan::redis_with_data(cluster.testbed())?;
    up(cluster, &plan)?;
    write(cluster)?;
    die(cluster)?;
    for host in cluster.hosts().to_vec() {
        cluster.start_host(&host)?;
    }
    cluster.await_status("a host says what a person can do", PATIENCE, |_| {
        let events = cluster.events("a").ok()?;
        let tells = |text: &str| text.contains("'dunlin down --force sessions' on each host");
        events.iter().any(|event| tells(&event.text)).then_some(())
    })?;
    for host in cluster.hosts() {
        cluster.dunlin(host, &["down", "--force", NAME])?;
    }
    cluster.await_status("no host knows the program", PATIENCE, |hosts| {
        hosts.iter().all(|host| host.vms.is_empty()).then_some(())
    })?;
    up(cluster, &plan)?;
    is_there(cluster, 1)?;
    end(cluster)
}

/// Each is told in one line, before anything is begun.
pub(super) fn cannot_be_had(cluster: &mut Cluster<'_>) -> Result<()> {
    let plan = Plan::redis_with_data(cluster.testbed())?;
    let refused = |lines: Vec<String>, words: &str| {
        let file = Plan {
            lines,
            command: plan.command.clone(),
            standby_after: None,
        }
        .write(cluster.testbed())?;
        let output = cluster.output("a", &["up", path(&file)?])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(2) && said.contains(words) && said.lines().count() == 1,
            "{words}: {:?}: {said}",
            output.status
        );
        Ok(())
    };
    let with = |key: &str, value: &str| -> Vec<String> {
        let lines = plan
            .lines
            .iter()
            .filter(|line| !line.starts_with(&format!("{key} = ")));
        lines.cloned().chain([format!("{key} = {value}")]).collect()
    };
    refused(
        with("data_at", "\"/no/such/directory\""),
        "is no directory on this host",
    )?;
    refused(
        with("data", "\"/no/such/sessions.img\""),
        "/no/such: No such file",
    )?;
    let image = cluster.testbed().node("b").home().join("sessions.img");
    std::fs::write(&image, vec![0; 1 << 20])?;
    refused(plan.lines.clone(), "it has 1 MiB and not 64, as data_mib says")?;
    forget(cluster)
}

fn die(cluster: &mut Cluster<'_>) -> Result<()> {
    for host in cluster.running() {
        cluster.kill_host(&host)?;
    }
    Ok(())
}

fn come_back(cluster: &mut Cluster<'_>) -> Result<()> {
    for host in cluster.hosts().to_vec() {
        cluster.start_host(&host)?;
    }
    cluster.await_protected(NAME, PATIENCE).map(drop)
}

fn die_and_come_back(cluster: &mut Cluster<'_>) -> Result<()> {
    die(cluster)?;
    come_back(cluster)
}

/// A program that has ended on both hosts is begun again with what it had written.
pub(super) fn outlive_a_restart(cluster: &mut Cluster<'_>) -> Result<()> {
    // On a busy machine it lives for longer.
    if !outlives_a_restart(cluster, 20)? {
        ensure!(
            outlives_a_restart(cluster, 90)?,
            "this machine is too slow for this story"
        );
    }
    Ok(())
}

/// Of a program that ends after so many seconds. No: it was not written to in time.
fn outlives_a_restart(cluster: &Cluster<'_>, lives_s: u64) -> Result<bool> {
    /// Not by an input: five seconds after the last one at least.
    const BEFORE: Duration = Duration::from_secs(6);
    let mut plan = Plan::redis_with_data(cluster.testbed())?;
    let words: Vec<String> = plan.command.iter().map(|word| format!("'{word}'")).collect();
    let command = format!("{} & sleep {lives_s}; kill -9 $!; exit 1", words.join(" "));
    plan.command = Plan::shell(&command).command;
    plan.lines.push("restart = \"on-failure\"".to_owned());
    let begun = Instant::now();
    let written = up(cluster, &plan).and_then(|_| write(cluster));
    if begun.elapsed() + BEFORE >= Duration::from_secs(lives_s) {
        // A second copy may never have come, and no image with it.
        down(cluster, "a")?;
        await_detached(cluster)?;
        return forget(cluster).map(|()| false);
    }
    written?;
    cluster.await_status("it is begun again", PATIENCE, |_| {
        let has = |host| {
            let events = events(cluster, host).unwrap_or_default();
            events.iter().any(|event| event.kind == EventKind::BegunAgain)
        };
        (has("a") || has("b")).then_some(())
    })?;
    is_there(cluster, 1)?;
    end(cluster).map(|()| true)
}
