//! Orders that meet each other, that a guest does not follow, or that would lose something: what a person is told.
//!
//! * **Decides:** that a command's exit code and words say what became of it, and that none undoes what another one did.
//! * **Flow:** [`STORIES`] names them -> [`run`] plays one; each begins without a VM and ends so.
//! * **Invariants:** (1) of two orders at once one is carried out and the other changes nothing; (2) an order that takes
//!   effect says so; (3) an older disk boots only when a person has said that it is older.
//! * **Not here:** the plain life of a VM (`life`), mistakes in files (`bad_input`).

use dunlin_api::{EventKind, Role, State};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::World;
use super::life::{failed, gone};
use super::run::ask_guest_within;
use crate::client::Connection;
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;

const PATIENCE: Duration = Duration::from_secs(120);
/// How often two calls are made at once.
const TIMES: usize = 3;
/// A daemon gives a guest 30 s to switch itself off. An answer that comes sooner did not wait for that.
const POLITE: Duration = Duration::from_secs(25);

/// A VM whose disk hangs has ended within this time, or it is said where it has not: the bound `machine-ends`, and a busy machine.
const ENDS: Duration = Duration::from_secs(60);

/// One story: its name, and what happens on three hosts whose daemons run.
pub type Story = (&'static str, fn(&mut Cluster<'_>, &World) -> Result<()>);

/// All of them, by the names under which they are played.
pub const STORIES: [Story; 7] = [
    ("two-ups-at-once", two_ups_at_once),
    ("guest-switches-itself-off", off_by_itself),
    ("guest-takes-nothing", hung),
    ("down-of-a-qemu-that-hangs", hung_qemu),
    ("down-while-a-disk-hangs", hung_disks),
    ("up-says-how-far-and-why-not", progress_and_why_not),
    ("older-disk-boots-by-order-only", stale_disk),
];

/// Plays one in a testbed of its own.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World, (name, story): Story) -> Result<()> {
    in_a_testbed(name, &TestbedSpec::three_hosts(), &world.dunlin, |cluster| {
        cluster.start_hosts()?;
        story(cluster, world)?;
        for host in cluster.running() {
            cluster.stop_host(&host, Signal::SIGTERM)?;
        }
        Ok(())
    })
}

/// One of them starts the VM; the other one changes nothing, on no host.
fn two_ups_at_once(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    for number in 1..=TIMES {
        two_ups(cluster, world).with_context(|| format!("the {number}. time"))?;
    }
    Ok(())
}

fn two_ups(cluster: &Cluster<'_>, world: &World) -> Result<()> {
    let (mut files, mut calls) = (Vec::new(), Vec::new());
    for (host, members) in [("a", ["a", "b"]), ("b", ["b", "a"])] {
        let plan = VmPlan {
            members,
            ..VmPlan::redis("dunlin")
        };
        let file = plan.write(cluster.testbed(), &world.image)?;
        let own = cluster.testbed().dir().join(format!("from-{host}.toml"));
        fs::rename(file, &own)?;
        files.push((host, own));
    }
    for (host, file) in &files {
        calls.push(begin(
            cluster,
            host,
            &["up", "--no-wait", &file.to_string_lossy()],
        )?);
    }
    let outputs: Vec<Output> = calls
        .into_iter()
        .map(Child::wait_with_output)
        .collect::<std::io::Result<_>>()?;
    let won: Vec<usize> = (0..2).filter(|n| outputs[*n].status.success()).collect();
    let [winner] = won[..] else {
        bail!("not one of two calls has started the VM: {outputs:?}");
    };
    failed(&outputs[1 - winner], 2, &["VM 'redis'"])?;
    let text = fs::read_to_string(&files[winner].1)?;
    for host in cluster.hosts() {
        let kept = cluster.dir().join(host).join("state/vms/redis/vm.toml");
        let found = fs::read_to_string(&kept).unwrap_or_else(|error| error.to_string());
        ensure!(
            found == text,
            "host {host} keeps something else of the running VM: {found}"
        );
    }
    cluster.dunlin("c", &["down", "--now", "redis"])?;
    gone(cluster)
}

fn begin(cluster: &Cluster<'_>, host: &str, arguments: &[&str]) -> Result<Child> {
    let mut command = cluster.command(host, arguments)?;
    Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
}

/// The process ends before anybody reads why: that is the VM's end and no failure, and `down` returns.
fn off_by_itself(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    // Which of the two is noticed first is a matter of milliseconds.
    for number in 1..=TIMES {
        switches_off(cluster, world).with_context(|| format!("the {number}. time"))?;
    }
    Ok(())
}

/// It may be off before anybody hears `down`, who is then told that there is no such VM.
fn switches_off(cluster: &Cluster<'_>, world: &World) -> Result<()> {
    for _ in 1..TIMES {
        if is_told_of_the_end(cluster, world)? {
            return Ok(());
        }
    }
    ensure!(
        is_told_of_the_end(cluster, world)?,
        "each time it was off before anybody heard 'down'"
    );
    Ok(())
}

fn is_told_of_the_end(cluster: &Cluster<'_>, world: &World) -> Result<bool> {
    let plan = VmPlan::redis("none");
    let file = plan.write(cluster.testbed(), &world.image)?;
    let client = cluster.testbed().node("client");
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    await_service(client, plan.service(), PATIENCE)?;
    let begun = Instant::now();
    let down = begin(cluster, "a", &["down", "redis"])?;
    let target = plan.service();
    let told = client.spawn("switch-off", move || {
        let mut connection = Connection::open(target, Duration::from_secs(5))?;
        connection.send(&["SHUTDOWN", "NOSAVE"])
    })?;
    told.join()
        .map_err(|_| anyhow::anyhow!("a client thread panicked"))??
        .context("telling the guest to switch itself off")?;
    let output = down.wait_with_output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(2) && why.contains("there is no VM") {
        return gone(cluster).map(|()| false);
    }
    ensure!(
        output.status.success(),
        "down of a guest that went off: {output:?}"
    );
    let took = begun.elapsed();
    ensure!(took < POLITE, "down waited {took:?} for a guest that was off");
    gone(cluster).map(|()| true)
}

/// No card of it is ever brought up, so what the network sends to it stays where it is. `down --now` ends it all the same, and
/// says so.
fn hung(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    let plan = VmPlan::redis("dunlin");
    let file = plan.write(cluster.testbed(), &world.image)?;
    let panics = cluster.testbed().dir().join("panics.toml");
    let text = fs::read_to_string(&file)?;
    let damaged = text.replace("initrd.img", "vmlinuz");
    ensure!(damaged != text, "the damage changes nothing: mend the test");
    fs::write(&panics, damaged)?;
    let (enough, target) = (Arc::new(AtomicBool::new(false)), plan.service());
    let stop = enough.clone();
    let caller = cluster.testbed().node("client").spawn("caller", move || {
        while !stop.load(Ordering::Relaxed) {
            // Nobody answers: what counts are the questions, which every card on the bridge gets.
            let _ = Connection::open(target, Duration::from_millis(500));
        }
    })?;
    let ended = (|| {
        cluster.dunlin("a", &["up", "--no-wait", &panics.to_string_lossy()])?;
        cluster.await_status(
            "a VM whose card takes nothing, and that is to be synced",
            PATIENCE,
            |hosts| {
                let vm = hosts
                    .iter()
                    .find_map(|host| host.vm("redis").filter(|vm| vm.role == Role::Primary))?;
                let progress = vm.progress.as_ref();
                let copied = progress.is_some_and(|now| now.total > 0 && now.done == now.total);
                let called = vm.frames_in > 2;
                (called && (vm.protected || (copied && vm.committed > vm.applied))).then_some(())
            },
        )?;
        cluster.dunlin("a", &["down", "--now", "redis"])?;
        gone(cluster)
    })();
    enough.store(true, Ordering::Relaxed);
    caller
        .join()
        .map_err(|_| anyhow::anyhow!("a client thread panicked"))??;
    ended
}

/// QEMU stands still, so nobody can ask its guest: `down` ends the VM all the same, and no host is taken for dead meanwhile. Where this machine
/// stood still a host may be, or QEMU be silent for so long before `down` is said that the VM is left to its backup: but not each time.
fn hung_qemu(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    let mut moved = None;
    for _ in 0..TIMES {
        moved = hung_qemu_once(cluster, world)?;
        if moved.is_none() {
            return Ok(());
        }
    }
    bail!("{TIMES} times, the last one: {}", moved.unwrap_or_default())
}

/// Who was elected meanwhile, and how long `down` took then, if anybody was.
fn hung_qemu_once(cluster: &Cluster<'_>, world: &World) -> Result<Option<String>> {
    let plan = VmPlan::redis("dunlin");
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let (primary, _) = cluster.await_protected("redis", PATIENCE)?;
    let status = cluster.status(&primary)?;
    let pid = status.vm("redis").and_then(|vm| vm.qemu_pid);
    let pid = pid.and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.context("the primary does not say which process its QEMU is")?;
    let began = SystemTime::now();
    nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGSTOP).context("stopping QEMU")?;
    cluster.dunlin(&primary, &["down", "redis"])?;
    let took = began.elapsed()?;
    gone(cluster)?;
    for host in cluster.running() {
        let told = cluster.events(&host)?;
        let told = told.iter().filter(|event| event.at() >= began);
        let elected: Vec<&str> = told
            .filter(|event| ["elected", "deposed", "quorum-lost"].contains(&event.kind.as_str()))
            .map(|event| event.text.as_str())
            .collect();
        if !elected.is_empty() {
            let elected = elected.join("; ");
            return Ok(Some(format!(
                "host {host}: nobody has died, and {elected}; down took {took:?}"
            )));
        }
    }
    ensure!(took < POLITE, "down of a QEMU that hangs took {took:?}");
    Ok(None)
}

/// A disk hangs with a write on its way: `down` ends the VM all the same, on all hosts, and says where its disk is not free. Nothing else
/// starts with that disk there before it is.
fn hung_disks(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    let plan = VmPlan {
        disk_mib: Some(64),
        ..VmPlan::redis("dunlin")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    // A primary whose QEMU is silent gives its office up within some seconds: before `down` is said, or not.
    // The backup's hang costs no answer.
    for (role, down_after) in [("backup", 60), ("primary", 5), ("primary", 1)] {
        let down_after = Duration::from_secs(down_after);
        hung_disk(cluster, &plan, &file.to_string_lossy(), role, down_after)
            .with_context(|| format!("the {role}'s, down after {down_after:?}"))?;
    }
    Ok(())
}

fn hung_disk(
    cluster: &mut Cluster<'_>,
    plan: &VmPlan,
    file: &str,
    role: &str,
    down_after: Duration,
) -> Result<()> {
    cluster.dunlin("a", &["up", file])?;
    await_service(cluster.testbed().node("client"), plan.service(), PATIENCE)?;
    let (primary, backup) = cluster.await_protected("redis", PATIENCE)?;
    let host = if role == "backup" { &backup } else { &primary };
    let took_over_before = take_overs(cluster, &backup)?;
    let elections_before = elections(cluster, &backup)?;
    cluster.dunlin(host, &["inject", "redis", "hang=on"])?;
    // Redis writes it to its disk before it answers: the primary's takes it at once, the backup's with the next sync.
    let asked = ask_guest_within(
        cluster.testbed(),
        plan.service(),
        &["SET", "hangs", role],
        down_after,
    );
    if role == "backup" {
        asked?;
        // Its buffers take more: it goes on following, and only what is to be durable waits.
        let epoch = cluster.status(&primary)?.vm("redis").map_or(0, |vm| vm.epoch);
        cluster.await_status("syncs after that write", PATIENCE, |hosts| {
            let vm = hosts.iter().find(|host| host.host == primary)?.vm("redis")?;
            // A busy machine may have cost the backup, whose copy ends as late then.
            (vm.epoch > epoch + 2 || !vm.protected).then_some(())
        })?;
    }
    let began = Instant::now();
    let output = cluster.output(&primary, &["down", "--now", "redis"])?;
    let took = began.elapsed();
    let where_to = format!("host '{host}' still waits for a disk");
    failed(&output, 1, &["VM 'redis' is ended", &where_to])?;
    ensure!(took < ENDS, "down took {took:?}");
    cluster.await_status("no host knows the VM", PATIENCE, |hosts| {
        hosts.iter().all(|host| host.vms.is_empty()).then_some(())
    })?;
    // The disk that hangs is the newest, unless the backup has taken over.
    let is_newest = host == &primary && take_overs(cluster, &backup)? == took_over_before;
    let told = cluster.events(host)?;
    ensure!(
        told.iter().any(|event| event.kind == EventKind::EndsLate),
        "host {host} does not tell what remains there: {told:?}"
    );
    failed(&cluster.output("a", &["up", file])?, 2, &["redis.img"])?;
    // The disk answers again.
    cluster.kill_host(host)?;
    cluster.start_host(host)?;
    let begun = cluster.output("a", &["up", file])?;
    if begun.status.success() {
        // A take-over that `down` has cut short may have made the backup's disk the newer one, and tells of nothing.
        let is_cut_short = host == &primary && elections(cluster, &backup)? > elections_before;
        ensure!(!is_newest || is_cut_short, "begun from an older disk: {begun:?}");
    } else {
        ensure!(is_newest, "the other host's disk is the newest: {begun:?}");
        // What it had written last could not be read when the VM ended: a person says that it counts.
        let unclear = ["not clear", "could not be read", &format!("--from {host}")];
        failed(&begun, 2, &unclear)?;
        cluster.dunlin("a", &["up", file, "--from", host])?;
    }
    cluster.await_protected("redis", PATIENCE)?;
    cluster.dunlin("a", &["down", "--now", "redis"])?;
    gone(cluster)
}

/// How often that host has taken a VM over.
fn take_overs(cluster: &Cluster<'_>, host: &str) -> Result<usize> {
    count(cluster, host, &EventKind::TookOver)
}

/// How often that host was elected.
fn elections(cluster: &Cluster<'_>, host: &str) -> Result<usize> {
    count(cluster, host, &EventKind::Elected)
}

fn count(cluster: &Cluster<'_>, host: &str, kind: &EventKind) -> Result<usize> {
    let told = cluster.events(host)?;
    Ok(told.iter().filter(|event| event.kind == *kind).count())
}

/// `up` says how far it is, and where the backup cannot join, why; the VM runs all the same, and is protected once that is mended.
fn progress_and_why_not(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    let plan = VmPlan {
        disk_mib: Some(64),
        ..VmPlan::redis("dunlin")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    // Whoever gets no core while the backup joins has nothing to say of that.
    let mut number = 1;
    loop {
        let said = cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
        let missing = ["QEMU runs", "%", "up and protected"].map(|word| (word, said.contains(word)));
        if missing.iter().all(|(_, is_said)| *is_said) {
            break;
        }
        ensure!(number < TIMES, "up does not say all of {missing:?}: {said}");
        number += 1;
        cluster.dunlin("a", &["down", "--now", "redis"])?;
        gone(cluster)?;
    }
    protects_anew(cluster)?;
    // Where it was served last the disks are the newest.
    cluster.serve_on("redis", "a", PATIENCE)?;
    cluster.dunlin("a", &["down", "--now", "redis"])?;
    gone(cluster)?;

    let smaller = File::options()
        .write(true)
        .open(cluster.testbed().node("b").home().join("redis.img"))?;
    smaller.set_len(48 << 20)?;
    let output = cluster.output("a", &["up", &file.to_string_lossy()])?;
    failed(
        &output,
        3,
        &["NOT protected", "host 'b'", "50331648", "same size"],
    )?;
    let output = cluster.output("a", &["protect", "redis"])?;
    failed(&output, 3, &["NOT protected", "host 'b'", "same size"])?;
    cluster.dunlin("a", &["down", "--now", "redis"])?;
    gone(cluster)
}

/// `protect` waits for the backup as `up` does, from whichever host it is said; with `--no-wait` it does not.
fn protects_anew(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup) = cluster.await_protected("redis", PATIENCE)?;
    cluster.kill_host(&backup)?;
    cluster.await_status("a primary without a backup", PATIENCE, |hosts| {
        let vm = hosts.iter().find(|host| host.host == primary)?.vm("redis")?;
        (vm.state == State::Alone && !vm.protected).then_some(())
    })?;
    let output = cluster.output(&primary, &["protect", "redis"])?;
    failed(
        &output,
        3,
        &["NOT protected", &format!("host '{backup}' is not reached")],
    )?;
    let asked = cluster.dunlin("c", &["protect", "--no-wait", "redis"])?;
    ensure!(asked.trim() == "a backup is looked for", "{asked}");
    let protected = |cluster: &Cluster<'_>| -> Result<usize> {
        let told = cluster.events(&primary)?;
        Ok(told
            .iter()
            .filter(|event| event.kind == EventKind::Protected)
            .count())
    };
    let before = protected(cluster)?;
    cluster.start_host(&backup)?;
    let said = cluster.dunlin(&primary, &["protect", "redis"])?;
    ensure!(
        said.contains("up and protected") && !said.contains('\u{1b}'),
        "protect says {said:?}"
    );
    // It may be protected no more by now.
    ensure!(
        protected(cluster)? > before,
        "protect returned before the VM was protected"
    );
    Ok(())
}

fn knows_of_one_alone(note: &Path) -> bool {
    let text = fs::read(note).ok();
    let note = text.and_then(|text| serde_json::from_slice::<dunlin_api::Note>(&text).ok());
    note.is_some_and(|note| note.complete.count_ones() == 1)
}

/// The backup was dropped, the VM went on without it, then all hosts died. The witness knows that the backup's disk is old.
fn stale_disk(cluster: &mut Cluster<'_>, world: &World) -> Result<()> {
    let plan = VmPlan {
        disk_mib: Some(64),
        ..VmPlan::redis("dunlin")
    };
    let file = plan.write(cluster.testbed(), &world.image)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let (primary, backup) = cluster.await_protected("redis", PATIENCE)?;
    cluster.kill_host(&backup)?;
    cluster.await_status("a primary without a backup", PATIENCE, |hosts| {
        let vm = hosts.iter().find(|host| host.host == primary)?.vm("redis")?;
        (vm.state == State::Alone && !vm.protected).then_some(())
    })?;
    // The witness knows it as soon as that is on its disk.
    let note = cluster.state("c").join("vms/redis/complete.json");
    let deadline = Instant::now() + PATIENCE;
    while !knows_of_one_alone(&note) {
        ensure!(
            Instant::now() < deadline,
            "the witness does not note who is complete"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    for host in [primary.as_str(), "c"] {
        cluster.kill_host(host)?;
    }
    for host in [backup.as_str(), "c"] {
        cluster.start_host(host)?;
    }
    let boot = ["promote", "--force", "--from-disk", "redis"];
    let refused = cluster.output(&backup, &boot)?;
    failed(&refused, 2, &[&format!("'{primary}'"), " UTC", "--force-stale"])?;
    let status = cluster.status(&backup)?;
    let role = status.vm("redis").map(|vm| vm.role.clone());
    ensure!(
        role == Some(Role::None),
        "a refused order has made host {backup} {role:?}"
    );
    cluster.dunlin(&backup, &[boot.as_slice(), &["--force-stale"]].concat())?;
    await_service(cluster.testbed().node("client"), plan.service(), PATIENCE)?;
    cluster.start_host(&primary)?;
    cluster.await_protected("redis", PATIENCE)?;
    cluster.dunlin(&backup, &["down", "--now", "redis"])?;
    gone(cluster)
}
