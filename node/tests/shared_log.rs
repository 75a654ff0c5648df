//! A shared log on three real daemons in network namespaces: what was acknowledged is there, in one order on all hosts, each once,
//! through a killed leader, a paused host and full disks.
//!
//! Needs root and what `cargo xtask setup` installs; told as skipped without root.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
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

fn play(name: &str, story: impl FnOnce(&mut Cluster<'_>) -> Result<()>) -> Result<()> {
    if !is_root() {
        skipped::skip("network namespaces need root");
        return Ok(());
    }
    let dunlin = Path::new(env!("CARGO_BIN_EXE_dunlin"));
    in_a_testbed(name, &TestbedSpec::three_hosts(), dunlin, story)
}

fn start(cluster: &mut Cluster<'_>) -> Result<()> {
    for host in HOSTS {
        cluster.start_host(host)?;
    }
    cluster.dunlin("a", &["log", "create", "jobs", "a", "b", "c"])?;
    Ok(())
}

/// The host that leads, as `asked` knows it; asked again until one does.
fn leader(cluster: &Cluster<'_>, asked: &str) -> Result<String> {
    let until = Instant::now() + PATIENCE;
    loop {
        let text = cluster.dunlin(asked, &["log", "status", "jobs", "--json"])?;
        let status: serde_json::Value = serde_json::from_str(text.trim())?;
        if let Some(leader) = status["leader"].as_str() {
            return Ok(leader.to_owned());
        }
        ensure!(Instant::now() < until, "nobody leads: {text}");
    }
}

/// `dunlin log propose` under way, fed by this test.
struct Writer {
    child: Child,
    lines: Option<ChildStdin>,
    said: Receiver<String>,
    agreed: Vec<(u64, u64)>,
    fed: u64,
}

impl Writer {
    fn start(cluster: &Cluster<'_>, host: &str) -> Result<Self> {
        let mut child = cluster
            .command(host, &["log", "propose", "jobs", "--by", "writer"])?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (lines, out) = (child.stdin.take(), child.stdout.take().context("its output")?);
        let (say, said) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if say.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            lines,
            said,
            agreed: Vec::new(),
            fed: 0,
        })
    }

    /// Proposes so many, and waits until they are acknowledged.
    fn propose(&mut self, count: u64) -> Result<()> {
        let lines = self.lines.as_mut().context("its input")?;
        for _ in 0..count {
            self.fed += 1;
            writeln!(lines, "entry {}", self.fed)?;
        }
        lines.flush()?;
        while (self.agreed.len() as u64) < self.fed {
            let line = self
                .said
                .recv_timeout(PATIENCE)
                .context("no acknowledgement came")?;
            let (number, index) = line.split_once(' ').context("NUMBER INDEX")?;
            self.agreed.push((number.parse()?, index.parse()?));
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<(u64, u64)>> {
        drop(self.lines.take());
        ensure!(self.child.wait()?.success(), "the writer failed");
        Ok(std::mem::take(&mut self.agreed))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a host has of the log, when it has `count` entries.
fn read(cluster: &Cluster<'_>, host: &str, count: usize) -> Result<Vec<(u64, String)>> {
    let most = count.to_string();
    let text = cluster.dunlin(host, &["log", "read", "jobs", "--follow", "--most", &most])?;
    text.lines()
        .map(|line| {
            let (index, entry) = line.split_once('\t').context("INDEX, a tab, the entry")?;
            Ok((index.parse()?, entry.to_owned()))
        })
        .collect()
}

#[test]
fn what_was_acknowledged_survives_a_killed_leader_and_a_paused_one_in_one_order_and_each_once() -> Result<()>
{
    play("shared-log", |cluster| {
        start(cluster)?;
        let first = leader(cluster, "a")?;
        // The writer's own daemon lives on: another one is what fails.
        let near = HOSTS
            .into_iter()
            .find(|host| *host != first)
            .context("another host")?;
        let mut writer = Writer::start(cluster, near)?;
        writer.propose(50)?;
        cluster.kill_host(&first)?;
        writer.propose(50)?;
        cluster.start_host(&first)?;
        // Whoever leads now, a follower if that is the writer's own host: it stands still, and goes on.
        let second = leader(cluster, near)?;
        let paused = if second == near { first.clone() } else { second };
        cluster.freeze(&paused)?;
        writer.propose(50)?;
        cluster.thaw(&paused);
        writer.propose(50)?;
        let agreed = writer.finish()?;

        let here = read(cluster, near, 200)?;
        let wanted: Vec<String> = (1..=200).map(|number| format!("entry {number}")).collect();
        let entries: Vec<&String> = here.iter().map(|(_, entry)| entry).collect();
        ensure!(
            entries == wanted.iter().collect::<Vec<_>>(),
            "not each once and in order: {entries:?}"
        );
        for ((number, index), (at, _)) in agreed.iter().zip(&here) {
            ensure!(
                index == at || *index == 0,
                "{number} was acknowledged at {index}, and is at {at}"
            );
        }
        for host in HOSTS {
            ensure!(read(cluster, host, 200)? == here, "host {host} has another log");
        }
        // What is said again is not news.
        let again = cluster.dunlin(
            near,
            &[
                "log", "propose", "jobs", "again", "--by", "writer", "--number", "200",
            ],
        )?;
        ensure!(again.trim() == format!("200 {}", here[199].0), "{again}");
        let gap = cluster.output(
            near,
            &["log", "propose", "jobs", "x", "--by", "writer", "--number", "202"],
        )?;
        let why = String::from_utf8_lossy(&gap.stderr);
        ensure!(
            gap.status.code() == Some(2) && why.contains("next number is 201"),
            "{why}"
        );
        ensure!(read(cluster, near, 200)? == here, "what was refused is there");

        cluster.dunlin(near, &["log", "remove", "jobs"])?;
        for host in HOSTS {
            ensure!(
                !cluster.state(host).join("logs/jobs").exists(),
                "something is left on host {host}"
            );
        }
        Ok(())
    })
}

#[test]
fn mistakes_get_one_line_and_change_nothing() -> Result<()> {
    play("shared-log-mistakes", |cluster| {
        start(cluster)?;
        leader(cluster, "a")?;
        let large = "x".repeat(100_000);
        let cases: [(&[&str], &str); 8] = [
            (&["create", "jobs", "a", "b", "c"], "already"),
            (&["create", "other", "a", "nobody"], "not in the cluster"),
            (&["create", "other", "a", "a"], "named twice"),
            (&["create", "../other", "a"], "no name for a log"),
            (&["propose", "nothing", "x"], "there is no log"),
            (&["read", "nothing"], "there is no log"),
            (&["status", "nothing"], "there is no log"),
            (&["propose", "jobs", "x", "--by", &large], "1 to 64 bytes"),
        ];
        for (words, wanted) in cases {
            let words: Vec<&str> = std::iter::once("log").chain(words.iter().copied()).collect();
            let output = cluster.output("b", &words)?;
            let why = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(2), "{:?}: {why}", words[1]);
            ensure!(
                why.contains(wanted) && why.lines().count() == 1,
                "{:?}: {why}",
                words[1]
            );
        }
        // A host that cannot be reached: nothing is made on the others.
        cluster.kill_host("c")?;
        let output = cluster.output("a", &["log", "create", "other", "a", "b", "c"])?;
        ensure!(!output.status.success(), "it was made without host c");
        for host in ["a", "b"] {
            ensure!(
                !cluster.state(host).join("logs/other").exists(),
                "host {host} has it"
            );
        }
        // A majority is left.
        cluster.dunlin("a", &["log", "propose", "jobs", "one"])?;
        let text = cluster.dunlin("b", &["log", "read", "jobs", "--follow", "--most", "1"])?;
        ensure!(text.trim_end().ends_with("\tone"), "{text:?}");
        Ok(())
    })
}

/// The Go client against three daemons of its own on this machine's loopback.
#[test]
fn the_go_client_keeps_its_promises() -> Result<()> {
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../k8s/log");
    let mut go = Command::new("go");
    go.args(["test", "-count=1", "-vet=all", "./..."])
        .current_dir(module)
        .env("DUNLIN", env!("CARGO_BIN_EXE_dunlin"));
    let output = match go.output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            skipped::skip("no Go compiler: 'cargo xtask setup' installs one");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    Ok(())
}
