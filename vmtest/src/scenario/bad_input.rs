//! Bad input: for each mistake one clear line, exit code 2, nothing started and nothing changed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::World;
use super::secrets::Secrets;
use crate::cluster::{Cluster, VmPlan};
use crate::testbed::{Testbed, TestbedSpec};
use crate::traces;

/// A command that refuses must do so within this time.
const REFUSAL: Duration = Duration::from_secs(60);

/// A change of a file's text that makes it wrong.
type Damage = fn(&str) -> String;

/// A mistake in vm.toml: its name, the damage, and a word that the message must have.
const VM_MISTAKES: [(&str, Damage, &str); 9] = [
    (
        "unknown-key",
        |text| format!("colour = \"red\"\n{text}"),
        "colour",
    ),
    (
        "unknown-key-in-vm",
        |text| text.replace("memory_mib", "memroy_mib"),
        "memroy_mib",
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
    (
        "uefi-on-a-machine-that-has-none",
        |text| text.replace("[vm]", "[vm]\nmachine = \"microvm\"\nfirmware = \"uefi\""),
        "microvm has no UEFI",
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

/// Runs the whole table in one testbed. Returns how many mistakes were refused, and a line for each that was not.
pub fn run(world: &World) -> Result<(usize, Vec<String>)> {
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let mut table = Table::default();
    {
        let mut cluster = Cluster::init(&testbed, &world.dunlin, &["a", "b", "c"])?;
        let played = mistakes(&mut cluster, world, &mut table);
        table.note("the table itself", played);
        if !table.failures.is_empty() {
            let kept = cluster.keep_logs("bad-input");
            table
                .failures
                .extend(kept.map(|dir| format!("logs are in {}", dir.display())));
        }
    }
    testbed.close()?;
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
    let testbed = cluster.testbed();
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
    cluster.start_host("b")?;

    let plan = VmPlan {
        disk_mib: Some(16),
        ..VmPlan::redis("plover")
    };
    let good = plan.write(testbed, &world.image)?;
    let text = fs::read_to_string(&good)?;
    for (name, damage, word) in VM_MISTAKES {
        let file = testbed.dir().join(format!("{name}.toml"));
        fs::write(&file, damage(&text))?;
        ensure!(
            damage(&text) != text,
            "the mistake {name} changes nothing: mend the test"
        );
        table.note(name, up_refused(cluster, &file, word));
    }
    table.note(
        "missing-vm-file",
        up_refused(cluster, &testbed.dir().join("no-such-vm.toml"), "no-such-vm"),
    );
    table.note(
        "down-unknown-vm",
        refused(&cluster.output("a", &["down", "nobody"])?, "nobody"),
    );

    table.note("other-qemu", other_qemu(cluster, &text));
    table.note("check-of-all-hosts", checked(cluster, &good, &text));
    cluster.dunlin("a", &["up", &good.to_string_lossy()])?;
    table.note(
        "vm-twice",
        refused(&cluster.output("a", &["up", &good.to_string_lossy()])?, "redis"),
    );
    table.note("disk-of-another-vm", disk_of_another(cluster, &text));
    cluster.dunlin("a", &["down", "--now", "redis"])?;
    for (name, damage, words) in STRANGERS {
        table.note(name, stranger(cluster, world, &good, damage, words));
    }
    // Keys that were refused are as secret as others, and host a's shared secret has been in use.
    let looked = Secrets::of(cluster.dir()).and_then(|secrets| secrets.look(cluster));
    table.note("no-secret-told", looked.map(drop));
    for host in ["a", "b", "c"] {
        let looked = Secrets::of(cluster.dir()).and_then(|secrets| secrets.look_in_bundle(cluster, host));
        table.note("no-secret-in-a-bundle", looked);
    }
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
        .testbed()
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
        cluster.testbed().node("b").pids().is_empty(),
        "refused, but left processes"
    );
    Ok(())
}

/// A second daemon for host a, beside the one that runs.
fn address_in_use(cluster: &Cluster<'_>) -> Result<()> {
    refused(&run_host(cluster, "a", &cluster.host_file("a"))?, "")
}

/// Host b has another QEMU: a copy of this machine's whose distribution's version, wherever it stands in it, is one off.
fn other_qemu(cluster: &Cluster<'_>, text: &str) -> Result<()> {
    let testbed = cluster.testbed();
    let found = std::process::Command::new("sh")
        .args(["-c", "command -v qemu-system-x86_64"])
        .output()?;
    let qemu = PathBuf::from(String::from_utf8(found.stdout)?.trim());
    let said = std::process::Command::new(&qemu).arg("--version").output()?;
    let said = String::from_utf8(said.stdout)?;
    let version = said
        .lines()
        .next()
        .and_then(|line| line.split_once('(')?.1.strip_suffix(')'))
        .context("this machine's QEMU names no distribution's version")?;
    let last = version.bytes().last().context("an empty version")?;
    let other = format!(
        "{}{}",
        &version[..version.len() - 1],
        if last == b'1' { '2' } else { '1' }
    );
    for (host, wanted) in [("a", version), ("b", &other)] {
        // QEMU looks for its firmware and modules beside itself.
        let home = testbed.node(host).home().join("other");
        fs::create_dir_all(home.join("bin"))?;
        for place in ["lib", "share"] {
            std::os::unix::fs::symlink(Path::new("/usr").join(place), home.join(place))?;
        }
        let mut bytes = fs::read(&qemu)?;
        let mut at = 0;
        while let Some(found) = bytes[at..]
            .windows(version.len())
            .position(|window| window == version.as_bytes())
        {
            at += found;
            bytes[at..at + version.len()].copy_from_slice(wanted.as_bytes());
            at += version.len();
        }
        let file = home.join("bin/qemu-system-x86_64");
        fs::write(&file, bytes)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
    }
    let file = testbed.dir().join("other-qemu.toml");
    // Each host sees its own directory there.
    let path = testbed.here().join("other/bin/qemu-system-x86_64");
    let line = format!("[vm]\nqemu = \"{}\"", path.display());
    fs::write(&file, text.replacen("[vm]", &line, 1))?;
    up_refused(cluster, &file, &other)
}

/// What a VM's hosts lack is said before anything is started, whichever host lacks it.
fn checked(cluster: &mut Cluster<'_>, good: &Path, text: &str) -> Result<()> {
    check(cluster, good, 0, "disk")?;
    let file = cluster.testbed().dir().join("check.toml");
    fs::write(&file, text.replace("bridge = \"br0\"", "bridge = \"br-none\""))?;
    check(
        cluster,
        &file,
        1,
        "MISSING host b: bridge: there is no interface \"br-none\"",
    )?;
    let disk = cluster.testbed().node("b").home().join("redis.img");
    let bytes = fs::metadata(&disk)?.len();
    fs::File::options().write(true).open(&disk)?.set_len(2 * bytes)?;
    let other_size = format!("{bytes} bytes on host a, {} bytes on host b", 2 * bytes);
    let said = check(cluster, good, 1, &other_size);
    fs::File::options().write(true).open(&disk)?.set_len(bytes)?;
    said?;
    fs::write(&file, text.replace("[\"a\", \"b\"]", "[\"a\", \"z\"]"))?;
    refused(&cluster.output("a", &["check", &file.to_string_lossy()])?, "'z'")?;
    cluster.stop_host("b", nix::sys::signal::Signal::SIGTERM)?;
    let said = check(cluster, good, 1, "MISSING host b: not looked at");
    cluster.start_host("b")?;
    said?;
    let left = traces::after_down(cluster)?;
    ensure!(left.is_empty(), "a check started {}", left.join(", "));
    Ok(())
}

/// Asked of the witness, which runs no copy itself.
fn check(cluster: &Cluster<'_>, file: &Path, code: i32, words: &str) -> Result<()> {
    let output = cluster.output("c", &["check", &file.to_string_lossy()])?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.code() == Some(code) && said.contains(words),
        "dunlin check: {}, and not '{words}' but: {said}",
        output.status
    );
    Ok(())
}

/// A second VM on a disk that the first one runs with.
fn disk_of_another(cluster: &Cluster<'_>, text: &str) -> Result<()> {
    let file = cluster.testbed().dir().join("disk-of-another.toml");
    fs::write(&file, text.replacen("name = \"redis\"", "name = \"second\"", 1))?;
    let output = cluster.output("a", &["up", &file.to_string_lossy()])?;
    refused(&output, "redis.img")?;
    for host in cluster.statuses() {
        ensure!(
            host.vm("second").is_none(),
            "refused, but host {} knows it",
            host.host
        );
        host.vm("redis").context("the first VM is gone")?;
    }
    // Protected as before; a busy machine may have moved it to its backup meanwhile.
    cluster.await_protected("redis", Duration::from_secs(60))?;
    Ok(())
}

/// What makes host b a stranger: the files that it takes over from another cluster, and words that both sides say.
type Stranger = (&'static str, fn(&Cluster<'_>, &Path) -> Result<()>, &'static str);

const STRANGERS: [Stranger; 3] = [
    (
        "host-of-another-cluster",
        |cluster, foreign| {
            let files = ["cluster.toml", "ca.pem", "cert.pem", "key.pem"];
            take_over(cluster, foreign, &files)
        },
        "another cluster",
    ),
    (
        "wrong-keys",
        |cluster, foreign| take_over(cluster, foreign, &["ca.pem", "cert.pem", "key.pem"]),
        "certificate is not accepted",
    ),
    (
        "wrong-secret",
        |cluster, _| {
            for host in ["a", "b"] {
                let dir = cluster.dir().join(host);
                fs::write(dir.join("secret"), format!("the secret of host {host}"))?;
                let text = fs::read_to_string(dir.join("host.toml"))?;
                let lines = text.lines().filter(|line| {
                    !["key =", "cert =", "ca ="]
                        .iter()
                        .any(|key| line.starts_with(key))
                });
                let lines: Vec<&str> = lines.chain(["secret = \"secret\""]).collect();
                fs::write(dir.join("host.toml"), lines.join("\n"))?;
            }
            Ok(())
        },
        "secret",
    ),
];

fn take_over(cluster: &Cluster<'_>, foreign: &Path, files: &[&str]) -> Result<()> {
    for file in files {
        fs::copy(foreign.join("b").join(file), cluster.dir().join("b").join(file))?;
    }
    Ok(())
}

/// Host b is none of the others': each of the two sides says so in one line, and no VM counts on it.
fn stranger(
    cluster: &mut Cluster<'_>,
    world: &World,
    vm: &Path,
    damage: fn(&Cluster<'_>, &Path) -> Result<()>,
    words: &str,
) -> Result<()> {
    let foreign = cluster.testbed().dir().join("foreign");
    if !foreign.exists() {
        let hosts = ["a=10.77.1.1:7700", "b=10.77.1.2:7700", "c=10.77.1.3:7700"];
        let mut init = std::process::Command::new(&world.dunlin);
        init.arg("init").arg(&foreign).args(["--cluster", "lab"]);
        for host in hosts {
            init.args(["--host", host]);
        }
        let output = init.output()?;
        ensure!(
            output.status.success(),
            "dunlin init: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let own: Vec<(PathBuf, Vec<u8>)> = ["a", "b"]
        .iter()
        .flat_map(|host| {
            fs::read_dir(cluster.dir().join(host))
                .into_iter()
                .flatten()
                .flatten()
        })
        .filter(|entry| entry.path().is_file())
        .map(|entry| Ok((entry.path(), fs::read(entry.path())?)))
        .collect::<Result<_>>()?;
    let restart = |cluster: &mut Cluster<'_>| -> Result<()> {
        for host in ["a", "b"] {
            cluster.stop_host(host, nix::sys::signal::Signal::SIGTERM)?;
            cluster.start_host(host)?;
        }
        Ok(())
    };
    damage(cluster, &foreign)?;
    let before = fs::read_to_string(cluster.log("b"))?.len();
    let played = restart(cluster).and_then(|()| {
        up_refused(cluster, vm, words)?;
        // It may say so later than the other side.
        let deadline = Instant::now() + REFUSAL;
        loop {
            let log = fs::read_to_string(cluster.log("b"))?;
            let told = log[before..]
                .lines()
                .filter(|line| line.contains("connection from"));
            let told: Vec<&str> = told.collect();
            if told.is_empty() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            ensure!(
                told.len() == 1 && told[0].contains(words),
                "host b does not say in one line that its keys are the trouble: {told:?}"
            );
            return Ok(());
        }
    });
    for (path, bytes) in own {
        fs::write(path, bytes)?;
    }
    restart(cluster)?;
    played
}
