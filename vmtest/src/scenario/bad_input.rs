//! Bad input: for each mistake one clear line, exit code 2, nothing started and nothing changed.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::World;
use crate::cluster::{Cluster, VmPlan};
use crate::lab::{Lab, LabSpec};
use crate::traces;

/// A command that refuses must do so within this time.
const REFUSAL: Duration = Duration::from_secs(20);

/// A change of a file's text that makes it wrong.
type Damage = fn(&str) -> String;

/// A mistake in vm.toml: its name, the damage, and a word that the message must have.
const VM_MISTAKES: [(&str, Damage, &str); 8] = [
    (
        "unknown-key",
        |text| format!("colour = \"red\"\n{text}"),
        "colour",
    ),
    (
        "unknown-key-in-vm",
        |text| text.replace("vcpus = 1", "vcpuss = 1"),
        "vcpuss",
    ),
    ("not-toml", |text| format!("{text}\n]]"), "line"),
    (
        "unknown-policy",
        |text| text.replace("\"plover\"", "\"pluvier\""),
        "pluvier",
    ),
    (
        "unknown-host",
        |text| text.replace("[\"a\", \"b\"]", "[\"a\", \"z\"]"),
        "z",
    ),
    (
        "host-twice",
        |text| text.replace("[\"a\", \"b\"]", "[\"a\", \"a\"]"),
        "a",
    ),
    (
        "missing-kernel",
        |text| text.replace("vmlinuz", "no-such-kernel"),
        "no-such-kernel",
    ),
    (
        "missing-disk",
        |text| text.replace("redis.img", "no-such-disk.img"),
        "no-such-disk",
    ),
];

/// A mistake in host.toml or cluster.toml, seen by `dunlin host`.
const HOST_MISTAKES: [(&str, &str, Damage, &str); 4] = [
    (
        "host-unknown-key",
        "b/host.toml",
        |text| format!("colour = \"red\"\n{text}"),
        "colour",
    ),
    (
        "host-not-in-cluster",
        "b/host.toml",
        |text| text.replace("host = \"b\"", "host = \"z\""),
        "z",
    ),
    (
        "host-without-key",
        "b/host.toml",
        |text| text.replace("key = \"", "key = \"no-such-"),
        "no-such-",
    ),
    (
        "cluster-bad-address",
        "b/cluster.toml",
        |text| text.replace(":7700", ":seven"),
        "cluster.toml",
    ),
];

/// Runs the whole table in one lab. Returns how many mistakes were refused, and a line for each that was not.
pub fn run(world: &World) -> Result<(usize, Vec<String>)> {
    let lab = Lab::new(&LabSpec::three_hosts())?;
    let mut table = Table::default();
    {
        let mut cluster = Cluster::init(&lab, &world.dunlin, &["a", "b", "c"])?;
        let played = mistakes(&mut cluster, world, &mut table);
        table.note("the table itself", played);
        if !table.failures.is_empty() {
            let kept = cluster.keep_logs("bad-input");
            table
                .failures
                .extend(kept.map(|dir| format!("logs are in {}", dir.display())));
        }
    }
    lab.close()?;
    Ok((table.passed, table.failures))
}

#[derive(Default)]
struct Table {
    passed: usize,
    failures: Vec<String>,
}

impl Table {
    fn note(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => self.failures.push(format!("{name}: {error:#}")),
        }
    }
}

fn mistakes(cluster: &mut Cluster<'_>, world: &World, table: &mut Table) -> Result<()> {
    let lab = cluster.lab();
    for (name, file, damage, word) in HOST_MISTAKES {
        table.note(name, host_mistake(cluster, file, damage, word));
    }
    for host in ["a", "c"] {
        cluster.start_host(host)?;
    }
    table.note("address-in-use", address_in_use(cluster));
    table.note("missing-host-file", {
        let file = cluster.dir().join("no-such-host.toml");
        refused(&run_host(cluster, "b", &file)?, "no-such-host")
    });
    table.note("wrong-keys", wrong_keys(cluster, world));
    cluster.start_host("b")?;

    let plan = VmPlan {
        disk_mib: Some(16),
        ..VmPlan::redis("plover")
    };
    let good = plan.write(lab, &world.image)?;
    let text = fs::read_to_string(&good)?;
    for (name, damage, word) in VM_MISTAKES {
        let file = lab.dir().join(format!("{name}.toml"));
        fs::write(&file, damage(&text))?;
        ensure!(
            damage(&text) != text,
            "the mistake {name} changes nothing: mend the test"
        );
        table.note(name, up_refused(cluster, &file, word));
    }
    table.note(
        "missing-vm-file",
        up_refused(cluster, &lab.dir().join("no-such-vm.toml"), "no-such-vm"),
    );
    table.note(
        "down-unknown-vm",
        refused(&cluster.output("a", &["down", "nobody"])?, "nobody"),
    );

    // Without its disk. (A disk that another VM *runs* with has to be refused too, but no VM runs with a disk yet.)
    let good = VmPlan::redis("plover").write(lab, &world.image)?;
    cluster.dunlin("a", &["up", &good.to_string_lossy()])?;
    table.note(
        "vm-twice",
        refused(&cluster.output("a", &["up", &good.to_string_lossy()])?, "redis"),
    );
    cluster.dunlin("a", &["down", "--now", "redis"])?;
    Ok(())
}

fn refused(output: &Output, word: &str) -> Result<()> {
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(2),
        "{} instead of exit code 2: {words}",
        output.status
    );
    ensure!(words.trim().lines().count() == 1, "not one line but: {words}");
    ensure!(
        words.contains(word),
        "the message does not name '{word}': {words}"
    );
    Ok(())
}

fn up_refused(cluster: &Cluster<'_>, file: &Path, word: &str) -> Result<()> {
    refused(&cluster.output("a", &["up", &file.to_string_lossy()])?, word)?;
    let left = traces::after_down(cluster)?;
    ensure!(left.is_empty(), "refused, but started: {}", left.join(", "));
    for host in cluster.statuses() {
        ensure!(host.vms.is_empty(), "refused, but host {} knows a VM", host.host);
    }
    Ok(())
}

/// Runs a daemon that is expected to refuse.
fn run_host(cluster: &Cluster<'_>, host: &str, file: &Path) -> Result<Output> {
    let mut child = cluster
        .lab()
        .node(host)
        .command(cluster.binary())?
        .arg("host")
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let deadline = Instant::now() + REFUSAL;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            let output = child.wait_with_output()?;
            bail!(
                "started instead of refusing: {}",
                String::from_utf8_lossy(&output.stdout).trim()
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(child.wait_with_output()?)
}

fn host_mistake(cluster: &Cluster<'_>, file: &str, damage: Damage, word: &str) -> Result<()> {
    let path = cluster.dir().join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        damage(&text) != text,
        "the mistake changes nothing in {file}: mend the test"
    );
    fs::write(&path, damage(&text))?;
    let result = run_host(cluster, "b", &cluster.host_file("b")).and_then(|output| refused(&output, word));
    fs::write(&path, text)?;
    result?;
    ensure!(
        cluster.lab().node("b").pids().is_empty(),
        "refused, but left processes"
    );
    Ok(())
}

/// A second daemon for host a, beside the one that runs.
fn address_in_use(cluster: &Cluster<'_>) -> Result<()> {
    refused(&run_host(cluster, "a", &cluster.host_file("a"))?, "")
}

/// Host b with the keys of another cluster: the others refuse it, and no VM of theirs counts on it.
fn wrong_keys(cluster: &Cluster<'_>, world: &World) -> Result<()> {
    let foreign = cluster.lab().dir().join("foreign");
    let output = std::process::Command::new(&world.dunlin)
        .arg("init")
        .arg(&foreign)
        .args([
            "--cluster",
            "lab",
            "--host",
            "a=10.77.1.1:7700",
            "--host",
            "b=10.77.1.2:7700",
        ])
        .args(["--host", "c=10.77.1.3:7700"])
        .output()?;
    ensure!(
        output.status.success(),
        "dunlin init: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result = run_host(cluster, "b", &foreign.join("b/host.toml"));
    let _ = cluster.lab().node("b").kill_all();
    match result {
        // Either the daemon refuses to run among strangers...
        Ok(output) => refused(&output, ""),
        // ... or it runs on its own: then the others must not have let it in.
        Err(_) => {
            let words = fs::read_to_string(cluster.log("a")).unwrap_or_default()
                + &fs::read_to_string(cluster.log("c")).unwrap_or_default();
            let heard = ["refus", "certificate", "cluster"]
                .iter()
                .any(|word| words.contains(word));
            ensure!(heard || words.is_empty(), "the others say nothing of it: {words}");
            Ok(())
        }
    }
}
