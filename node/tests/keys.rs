//! Keys on three real daemons in network namespaces, which agree on a shared log all the while: all are exchanged and nothing is lost, and what
//! counts no more is refused in one line.
//!
//! Needs root and what `cargo xtask setup` installs; told as skipped without root.

use dunlin_api::EventKind;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::cluster::{Cluster, in_a_testbed};
use dunlin_vmtest::is_root;
use dunlin_vmtest::testbed::TestbedSpec;

#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

const HOSTS: [&str; 3] = ["a", "b", "c"];
/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);
/// What is said of a host that had no turn in time; one that refuses says why.
const LATE: [&str; 2] = [
    "no answer within",
    "it closed the connection during the handshake",
];

fn play(name: &str, story: impl FnOnce(&mut Cluster<'_>) -> Result<()>) -> Result<()> {
    if !is_root() {
        skipped::skip("network namespaces need root");
        return Ok(());
    }
    let dunlin = Path::new(env!("CARGO_BIN_EXE_dunlin"));
    in_a_testbed(name, &TestbedSpec::three_hosts(), dunlin, story)
}

/// Three hosts that run, with a log; a has the authority's key.
fn start(cluster: &mut Cluster<'_>) -> Result<()> {
    cluster.give_authority()?;
    cluster.start_hosts()?;
    cluster.dunlin("a", &["log", "create", "jobs", "a", "b", "c"])?;
    Ok(())
}

fn file(cluster: &Cluster<'_>, host: &str, name: &str) -> Result<String> {
    let path = cluster.dir().join(host).join(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

fn all_reach_all(cluster: &Cluster<'_>) -> Result<()> {
    for asked in HOSTS {
        for host in HOSTS {
            // One that had no turn for some seconds is asked again; one that is refused is not.
            let until = Instant::now() + PATIENCE;
            while let Some(problem) = cluster.problem(asked, host)? {
                let is_late = LATE.iter().any(|words| problem.contains(words)) && Instant::now() < until;
                ensure!(is_late, "{asked} to {host}: {problem}");
            }
        }
    }
    Ok(())
}

/// Proposes entries, each numbered, until `over`; returns how many were acknowledged.
fn load(cluster: &Cluster<'_>, over: &AtomicBool) -> Result<u64> {
    let mut child = cluster
        .command("a", &["log", "propose", "jobs", "--by", "writer"])?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = child.stdin.take().context("its input")?;
    let mut said = BufReader::new(child.stdout.take().context("its output")?).lines();
    let mut count = 0;
    while !over.load(Ordering::Acquire) {
        count += 1;
        writeln!(lines, "entry {count}")?;
        lines.flush()?;
        let line = said.next().context("the writer has ended")??;
        ensure!(line.starts_with(&format!("{count} ")), "{count}: {line}");
    }
    drop(lines);
    ensure!(child.wait()?.success(), "the writer failed");
    Ok(count)
}

/// Entries are agreed on while `story` is told; each that was acknowledged is on all hosts then, once and in order.
fn under_load(cluster: &Cluster<'_>, story: impl FnOnce() -> Result<()>) -> Result<u64> {
    let over = AtomicBool::new(false);
    let (told, count) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| load(cluster, &over));
        let told = story();
        over.store(true, Ordering::Release);
        (told, writer.join())
    });
    told?;
    let count = count.map_err(|_| anyhow::anyhow!("the writer's thread panicked"))??;
    let wanted: Vec<String> = (1..=count).map(|number| format!("entry {number}")).collect();
    for host in HOSTS {
        let most = count.to_string();
        let text = cluster.dunlin(host, &["log", "read", "jobs", "--follow", "--most", &most])?;
        let there: Vec<&str> = text.lines().filter_map(|line| line.split('\t').nth(1)).collect();
        ensure!(
            there == wanted,
            "host {host} has not each entry once and in order"
        );
    }
    Ok(count)
}

/// A daemon with other files than its host's, which ends with this.
struct Thief(Child);

impl Thief {
    fn start(cluster: &Cluster<'_>, host: &str, folder: &Path) -> Result<Self> {
        let mut child = cluster
            .testbed()
            .node(host)
            .command(cluster.binary())?
            .arg("host")
            .arg(folder.join("host.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("its output")?);
        let this = Self(child);
        let mut line = String::new();
        said.read_line(&mut line)?;
        ensure!(line.contains("ready"), "{line}");
        Ok(this)
    }
}

impl Drop for Thief {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for name in ["host.toml", "cluster.toml", "key.pem", "cert.pem", "ca.pem"] {
        fs::copy(from.join(name), to.join(name))?;
    }
    Ok(())
}

#[test]
fn all_keys_and_the_authority_are_exchanged_under_load_and_the_old_keys_are_refused() -> Result<()> {
    play("keys-rotate", |cluster| {
        start(cluster)?;
        let names = ["key.pem", "cert.pem", "ca.pem"];
        let snapshot = |cluster: &Cluster<'_>| -> Result<Vec<String>> {
            let pairs = HOSTS.iter().flat_map(|host| names.map(|name| (*host, name)));
            pairs.map(|(host, name)| file(cluster, host, name)).collect()
        };
        let stolen = cluster.testbed().dir().join("stolen");
        copy(&cluster.dir().join("b"), &stolen)?;
        let first = snapshot(cluster)?;
        let mut steps = vec![first.clone()];
        let agreed = under_load(cluster, || {
            for words in [&["rotate"][..], &["rotate", "b"], &["rotate", "--authority"]] {
                cluster.keys(words)?;
                all_reach_all(cluster)?;
                steps.push(snapshot(cluster)?);
            }
            Ok(())
        })?;
        println!("{agreed} entries were agreed on meanwhile, none lost or doubled");
        ensure!(agreed > 0, "no load at all");
        for (number, (before, after)) in steps.iter().zip(&steps[1..]).enumerate() {
            for (place, (old, new)) in before.iter().zip(after).enumerate() {
                let (host, name) = (HOSTS[place / 3], names[place % 3]);
                let wanted = match number {
                    0 => name != "ca.pem",
                    1 => host == "b" && name != "ca.pem",
                    _ => true,
                };
                ensure!((old != new) == wanted, "step {number}: host {host}'s {name}");
            }
        }
        ensure!(!cluster.dir().join("a/ca-next.pem").exists(), "it is not over");
        for host in HOSTS {
            let left = cluster.dir().join(host).join("key.pem.next");
            ensure!(!left.exists(), "{} is left", left.display());
        }
        // What was exchanged in memory is what a daemon finds when it starts; the new authority signs as the old one did.
        cluster.kill_host("b")?;
        cluster.start_host("b")?;
        all_reach_all(cluster)?;
        cluster.keys(&["rotate", "c"])?;
        all_reach_all(cluster)?;
        cluster.dunlin("c", &["log", "propose", "jobs", "after"])?;

        cluster.kill_host("b")?;
        let thief = Thief::start(cluster, "b", &stolen)?;
        cluster
            .refuses("a", "b", "not accepted")
            .context("who has the oldest keys is believed")?;
        drop(thief);
        Ok(())
    })
}

#[test]
fn a_key_that_was_followed_by_another_is_refused_with_its_reason() -> Result<()> {
    play("keys-stolen", |cluster| {
        start(cluster)?;
        let stolen = cluster.testbed().dir().join("stolen");
        copy(&cluster.dir().join("b"), &stolen)?;
        cluster.keys(&["rotate"])?;
        cluster.kill_host("b")?;
        let thief = Thief::start(cluster, "b", &stolen)?;
        for asked in ["a", "c"] {
            cluster.refuses(asked, "b", "the peer's certificate was revoked")?;
        }
        drop(thief);
        cluster.start_host("b")?;
        all_reach_all(cluster)
    })
}

#[test]
fn a_removed_host_is_refused_in_one_line_until_a_token_lets_one_in_again() -> Result<()> {
    play("keys-revoke", |cluster| {
        start(cluster)?;
        // c hears of it later; b runs, and has links.
        cluster.kill_host("c")?;
        cluster.dunlin("a", &["log", "propose", "jobs", "before"])?;
        let said = cluster.keys(&["revoke", "b"])?;
        ensure!(said.contains("1 certificates of host b"), "{said}");
        cluster.refuses("a", "b", "the peer's certificate was revoked")?;
        cluster.refuses("b", "a", "this host's certificate was revoked")?;
        let events = cluster.events("a")?;
        let told = events
            .iter()
            .find(|event| event.kind == EventKind::CertificatesRevoked);
        ensure!(told.is_some(), "nothing was told");
        cluster.start_host("c")?;
        // The event, and not the file: that is there before c goes by it.
        let mut command = cluster.command("c", &["events", "--follow", "--json"])?;
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let out = BufReader::new(child.stdout.take().context("its output")?);
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let mut lines = out.lines().map_while(Result::ok);
            tell.send(lines.any(|line| line.contains("certificates-revoked")))
        });
        let heard = told.recv_timeout(PATIENCE);
        let _ = child.kill();
        child.wait()?;
        ensure!(heard == Ok(true), "c does not hear of it: {heard:?}");
        ensure!(cluster.dir().join("c/crl.pem").exists(), "c forgets it");
        cluster.refuses("c", "b", "was revoked")?;
        // a and c are a majority.
        cluster.dunlin("a", &["log", "propose", "jobs", "without b"])?;

        cluster.kill_host("b")?;
        cluster.let_in("b")?;
        cluster.start_host("b")?;
        all_reach_all(cluster)?;
        let text = cluster.dunlin("b", &["log", "read", "jobs", "--follow", "--most", "2"])?;
        ensure!(text.lines().count() == 2 && text.contains("without b"), "{text}");
        Ok(())
    })
}

#[test]
fn an_exchange_that_a_missing_host_stops_goes_on_when_it_is_back_and_mistakes_change_nothing() -> Result<()> {
    play("keys-half-way", |cluster| {
        start(cluster)?;
        let dir = cluster.dir().join("a");
        let dir = dir.to_str().context("a path")?;
        let refused = |cluster: &Cluster<'_>, code: i32, words: &[&str], wanted: &str| -> Result<()> {
            let words = [&["cluster"], words, &["--dir", dir]].concat();
            let output = cluster.output("a", &words)?;
            let why = String::from_utf8_lossy(&output.stderr);
            ensure!(
                output.status.code() == Some(code),
                "{words:?}: {:?} {why}",
                output.status
            );
            ensure!(why.contains(wanted), "{words:?}: {why}");
            Ok(())
        };
        let before = file(cluster, "b", "cert.pem")?;
        refused(
            cluster,
            2,
            &["rotate", "nobody"],
            "not in this host's cluster.toml",
        )?;
        refused(
            cluster,
            2,
            &["revoke", "nobody"],
            "not in this host's cluster.toml",
        )?;
        refused(cluster, 2, &["revoke", "a"], "is this one")?;
        refused(
            cluster,
            2,
            &["rotate", "--authority", "--without", "a"],
            "is this one",
        )?;
        ensure!(before == file(cluster, "b", "cert.pem")?, "something was changed");

        cluster.kill_host("c")?;
        refused(cluster, 1, &["rotate"], "host c keeps its keys")?;
        refused(cluster, 1, &["rotate", "--authority"], "--without c")?;
        refused(cluster, 2, &["rotate"], "rotate --authority")?;
        // Hosts go on with both authorities, one that comes back among them.
        cluster.start_host("c")?;
        all_reach_all(cluster)?;
        cluster.keys(&["rotate", "--authority"])?;
        all_reach_all(cluster)?;
        ensure!(
            file(cluster, "c", "ca.pem")? == file(cluster, "a", "ca.pem")?,
            "two authorities"
        );

        // One that never comes back.
        cluster.kill_host("c")?;
        cluster.keys(&["rotate", "--authority", "--without", "c"])?;
        cluster.start_host("c")?;
        let why = cluster.problem("a", "c")?.context("c is believed")?;
        ensure!(!why.contains('\n'), "{why}");
        cluster.dunlin("a", &["log", "propose", "jobs", "still a majority"])?;
        Ok(())
    })
}
