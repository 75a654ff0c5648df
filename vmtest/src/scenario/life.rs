//! The life of a VM as a person steers it: begun, ended before it has begun, come back with its host, ended where nobody
//! is left to agree.
//!
//! * **Decides:** which answers a person has a right to: an exit code, a line that says what to do, and nothing left.
//! * **Flow:** [`run`] plays the parts one after the other in one testbed; each begins and ends without a VM.
//! * **Invariants:** (1) a command that fails has changed nothing; (2) after `down` nothing of the VM is left, wherever it
//!   was said.
//! * **Not here:** clients (`run`), mistakes in files (`bad_input`).

use dunlin_api::{EventKind, Role, State};
use std::fs;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::World;
use super::run::order_guest;
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;
use crate::traces;

const PATIENCE: Duration = Duration::from_secs(120);
/// How often a VM without a second copy is started and ended at once: an answer that is lost now and then is found.
const TIMES: usize = 8;

/// Plays it. Returns how many commands ended a VM.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World) -> Result<usize> {
    in_a_testbed("life", &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        play(cluster, world)
    })
}

fn play(cluster: &mut Cluster<'_>, world: &World) -> Result<usize> {
    cluster.start_hosts()?;
    let bare = VmPlan::redis("none");
    let file = bare.write(cluster.testbed(), &world.image)?;
    comes_back_with_its_host(cluster, &bare, &file).context("a VM without protection")?;
    waits_for_what_it_needs(cluster, &bare, &file).context("a VM that misses something after a power cut")?;
    for number in 1..=TIMES {
        up_and_down(cluster, "a", "a", &file).with_context(|| format!("policy none, {number}. time"))?;
    }
    let whole = VmPlan::redis("dunlin");
    let file = whole.write(cluster.testbed(), &world.image)?;
    does_not_start(cluster, &file).context("a VM that does not start")?;
    for host in ["a", "b", "c"] {
        up_and_down(cluster, "a", host, &file).with_context(|| format!("ended from host {host}"))?;
    }
    switched_off_inside(cluster, &whole, &file).context("a guest that switches itself off")?;
    begins_with_the_newest_disks(cluster, world).context("a VM that is begun again after a take-over")?;
    nobody_is_left_to_agree(cluster, &whole, &file).context("a VM without a majority")?;
    // Its name is free again, on all hosts.
    up_and_down(cluster, "b", "a", &file).context("after an end by force")?;
    for host in cluster.running() {
        cluster.stop_host(&host, Signal::SIGTERM)?;
    }
    Ok(TIMES + 10)
}

/// `down` at once after `up --no-wait` takes the VM away everywhere.
fn up_and_down(cluster: &Cluster<'_>, up: &str, down: &str, file: &Path) -> Result<()> {
    cluster.dunlin(up, &["up", "--no-wait", &file.to_string_lossy()])?;
    cluster.dunlin(down, &["down", "--now", "redis"])?;
    gone(cluster)
}

/// The host where `down` was said knows the VM no more; the others hear of it at once, but on their own.
pub(super) fn gone(cluster: &Cluster<'_>) -> Result<()> {
    cluster.await_status("no host knows the VM", PATIENCE, |hosts| {
        hosts.iter().all(|host| host.vms.is_empty()).then_some(())
    })?;
    let left = traces::after_down(cluster)?;
    ensure!(left.is_empty(), "left after down: {}", left.join(", "));
    for host in cluster.running() {
        let folder = cluster.dir().join(&host).join("state/vms/redis");
        ensure!(!folder.exists(), "host {host}: {} is left", folder.display());
    }
    Ok(())
}

/// Nobody but its own host could run it: so that host boots it again.
fn comes_back_with_its_host(cluster: &mut Cluster<'_>, plan: &VmPlan, file: &Path) -> Result<()> {
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    cluster.kill_daemon("a")?;
    cluster.start_host("a")?;
    cluster.await_status("the VM runs again", PATIENCE, |hosts| {
        let vm = hosts.iter().find_map(|host| host.vm(&plan.name))?;
        (vm.role == Role::Primary && vm.state == State::Running).then_some(())
    })?;
    await_service(cluster.testbed().node("client"), plan.service(), PATIENCE)?;
    let told = cluster.events("a")?;
    ensure!(
        told.iter().any(|event| event.kind == EventKind::ColdStart),
        "no event tells that it was booted again: {told:?}"
    );
    cluster.dunlin("a", &["down", "--now", &plan.name])?;
    gone(cluster)
}

/// What a VM needs may be there later than its host's daemon: it is tried again until then, and nobody has to come.
fn waits_for_what_it_needs(cluster: &mut Cluster<'_>, plan: &VmPlan, file: &Path) -> Result<()> {
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    cluster.kill_daemon("a")?;
    let kernel = cluster.testbed().dir().join("vmlinuz");
    let away = kernel.with_extension("away");
    fs::rename(&kernel, &away)?;
    cluster.start_host("a")?;
    let failed = cluster.await_status("the VM does not start", PATIENCE, |hosts| {
        let vm = hosts.iter().find_map(|host| host.vm(&plan.name))?;
        (vm.state == State::Failed).then_some(())
    });
    fs::rename(&away, &kernel)?;
    failed?;
    await_service(cluster.testbed().node("client"), plan.service(), PATIENCE)?;
    let told = cluster.events("a")?;
    let mut failed = told.iter().filter(|event| event.kind == EventKind::Failed);
    ensure!(
        failed.any(|event| event.text.contains("it is tried again until it does")),
        "it is not told that the VM did not start, and is tried again: {told:?}"
    );
    cluster.dunlin("a", &["down", "--now", &plan.name])?;
    gone(cluster)
}

/// What `up` says of a VM that cannot start has to work: "end it with 'dunlin down'".
fn does_not_start(cluster: &Cluster<'_>, file: &Path) -> Result<()> {
    let broken = cluster.testbed().dir().join("broken.toml");
    let text = fs::read_to_string(file)?;
    let damaged = text.replace("vmlinuz", "initrd.img");
    ensure!(damaged != text, "the damage changes nothing: mend the test");
    fs::write(&broken, damaged)?;
    let output = cluster.output("a", &["up", &broken.to_string_lossy()])?;
    failed(&output, 1, &["did not start", "dunlin down redis"])?;
    cluster.dunlin("a", &["down", "redis"])?;
    gone(cluster)
}

/// A guest that switches itself off is off on all hosts, also where a take-over has brought it.
fn switched_off_inside(cluster: &mut Cluster<'_>, plan: &VmPlan, file: &Path) -> Result<()> {
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = cluster.testbed().node("client");
    await_service(client, plan.service(), PATIENCE)?;
    let (primary, _) = cluster.await_protected(&plan.name, PATIENCE)?;
    cluster.kill_host(&primary)?;
    cluster.await_take_over(&plan.name, &primary, PATIENCE)?;
    await_service(client, plan.service(), PATIENCE)?;
    cluster.start_host(&primary)?;
    cluster.await_protected(&plan.name, PATIENCE)?;
    order_guest(cluster.testbed(), plan.service(), "poweroff")?;
    gone(cluster)
}

/// The first member's disks are those of before the take-over. It does not begin with them, unless somebody says so.
fn begins_with_the_newest_disks(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    let plan = VmPlan {
        name: "with-a-disk".to_owned(),
        disk_mib: Some(32),
        ..VmPlan::redis("dunlin")
    };
    let written = plan.write(cluster.testbed(), &world.image)?;
    let (file, name) = (written.to_string_lossy(), plan.name.as_str());
    let before = SystemTime::now();
    let said = cluster.dunlin("a", &["up", &file])?;
    ensure!(
        said.contains("on host 'a'"),
        "it does not begin on the first of its members: {said}"
    );
    begun_on(cluster, name, "a", before)?;
    cluster.serve_on(name, "a", PATIENCE)?;
    cluster.kill_host("a")?;
    cluster.await_take_over(name, "a", PATIENCE)?;
    cluster.dunlin("b", &["down", "--now", name])?;
    // It has the disks of before, and nobody is left who could tell it of the end.
    cluster.start_host("a")?;
    cluster.dunlin("a", &["down", "--force", name])?;
    gone(cluster)?;
    // A life that ends before it has begun is no news.
    cluster.dunlin("a", &["up", "--no-wait", &file])?;
    cluster.dunlin("a", &["down", "--now", name])?;
    gone(cluster)?;
    let before = SystemTime::now();
    let said = cluster.dunlin("c", &["up", "--no-wait", &file])?;
    ensure!(
        said.contains("on host 'b', whose disks are the newest"),
        "it does not say where it begins: {said}"
    );
    begun_on(cluster, name, "b", before)?;
    cluster.serve_on(name, "b", PATIENCE)?;
    cluster.dunlin("a", &["down", "--now", name])?;
    gone(cluster)?;
    // Both have the same since, but for what b's VM wrote last. A person puts a byte there: nobody knows whose disks count.
    let image = cluster.testbed().node("b").home().join(format!("{name}.img"));
    let disk = fs::OpenOptions::new().write(true).open(image)?;
    std::os::unix::fs::FileExt::write_all_at(&disk, b"!", 0)?;
    drop(disk);
    let output = cluster.output("a", &["up", &file])?;
    failed(
        &output,
        2,
        &["somebody has written to them", "--from b", "--from a"],
    )?;
    let before = SystemTime::now();
    let said = cluster.dunlin("a", &["up", "--no-wait", "--from", "a", &file])?;
    ensure!(said.contains("on host 'a'"), "it does not begin there: {said}");
    begun_on(cluster, name, "a", before)?;
    cluster.dunlin("a", &["down", "--now", name])?;
    gone(cluster)
}

/// The VM is protected, and its life began on that host. A busy machine may have moved it since: then another host says that it took over.
fn begun_on(cluster: &Cluster<'_>, vm: &str, host: &str, before: SystemTime) -> Result<()> {
    let (primary, _) = cluster.await_protected(vm, PATIENCE)?;
    let logged = cluster.logged()?;
    let took_over = logged
        .iter()
        .any(|event| event.kind == EventKind::TookOver && event.at >= before);
    ensure!(
        primary == host || took_over,
        "it begins on host {primary}, and not on {host}"
    );
    Ok(())
}

/// Two of three hosts are dead: `down` cannot be agreed on and says so; by force one host is freed, and no other.
fn nobody_is_left_to_agree(cluster: &mut Cluster<'_>, plan: &VmPlan, file: &Path) -> Result<()> {
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let output = cluster.output("a", &["down", "--force", &plan.name])?;
    failed(&output, 2, &["leads", "dunlin down redis"])?;
    cluster.serve_on(&plan.name, "a", PATIENCE)?;
    for host in ["b", "c"] {
        cluster.kill_host(host)?;
    }
    cluster.await_status("host a has no majority", PATIENCE, |hosts| {
        let vm = hosts.iter().find_map(|host| host.vm(&plan.name))?;
        (vm.role == Role::Primary && vm.state == State::QuorumLost).then_some(())
    })?;
    let output = cluster.output("a", &["down", &plan.name])?;
    failed(&output, 1, &["'b' and 'c'", "--force", "Nothing was changed"])?;
    let status = cluster.status("a")?;
    let role = status.vm(&plan.name).map(|vm| &vm.role);
    ensure!(
        role == Some(&Role::Primary),
        "a refused command has changed something: {role:?}"
    );
    let said = cluster.dunlin("a", &["down", "--force", &plan.name])?;
    ensure!(
        ["'b' and 'c'", "Nothing was said", "--force"]
            .iter()
            .all(|word| said.contains(word)),
        "it does not say what it did not do: {said}"
    );
    gone(cluster)?;
    for host in ["b", "c"] {
        cluster.start_host(host)?;
        let status = cluster.status(host)?;
        ensure!(
            status.vm(&plan.name).is_some(),
            "host {host} was never told, and has forgotten the VM"
        );
    }
    for host in ["b", "c"] {
        failed(&cluster.output(host, &["down", &plan.name])?, 1, &["--force"])?;
        cluster.dunlin(host, &["down", "--force", &plan.name])?;
    }
    gone(cluster)
}

/// One line, with these words in it.
pub(super) fn failed(output: &Output, code: i32, words: &[&str]) -> Result<()> {
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(code),
        "{} instead of exit code {code}: {said}",
        output.status
    );
    ensure!(said.trim().lines().count() == 1, "not one line but: {said}");
    for word in words {
        ensure!(said.contains(word), "the message does not say \"{word}\": {said}");
    }
    Ok(())
}
