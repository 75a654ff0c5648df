//! A cluster is begun on one host, and the others join it with tokens: good ones, and all kinds of bad ones.
//!
//! * **Decides:** what each refusal has to say, and that no private key is anywhere but on its own host.
//! * **Flow:** `dunlin cluster init` on host a -> refused and good `dunlin cluster join` on b and c -> the daemons run with what was written.
//! * **Not here:** every way in which a token can be wrong (the executable's own tests).

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::World;
use super::told::Told;
use crate::cluster::Cluster;
use crate::testbed::{Clock, Testbed, TestbedSpec};

const HOSTS: [&str; 3] = ["a", "b", "c"];
/// Nothing at the door takes longer.
const BOUND: Duration = Duration::from_secs(60);

/// Plays it. Returns how many were refused.
///
/// # Errors
/// With what went otherwise.
pub fn run(world: &World) -> Result<usize> {
    let testbed = Testbed::new(&TestbedSpec::three_hosts())?;
    let refused = {
        let mut cluster = Cluster::with_files_of_others(&testbed, &world.dunlin, &HOSTS);
        play(&mut cluster)?
    };
    testbed.close()?;
    Ok(refused)
}

fn play(cluster: &mut Cluster<'_>) -> Result<usize> {
    let testbed = cluster.testbed();
    let mut refused = 0;
    let mut refuses = |what: &str, output: Output, code: i32, words: &str| -> Result<()> {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        ensure!(
            output.status.code() == Some(code) && said.lines().count() == 1 && said.contains(words),
            "{what}: {}, and not one line with '{words}' but: {said}",
            output.status
        );
        refused += 1;
        Ok(())
    };
    let hosts: Vec<String> = HOSTS
        .iter()
        .map(|host| format!("{host}={}:7700", testbed.node(host).address()))
        .collect();
    let mut begin = vec!["init", "lab"];
    hosts.iter().for_each(|host| begin.extend(["--host", host]));
    refuses(
        "a cluster begun on another host",
        say(cluster, "b", "elsewhere", &begin)?,
        2,
        "this machine has not the address",
    )?;
    ensure!(
        !folder(cluster, "elsewhere").exists(),
        "refused, and files were written"
    );

    let mut door = Waiting::begin(cluster, &begin)?;
    let (b, c) = (door.token("b")?, door.token("c")?);
    refuses(
        "a second cluster in one folder",
        say(cluster, "a", "a", &begin)?,
        2,
        "in a cluster already",
    )?;
    let typo = format!("{}x", &b[..b.len() - 1]);
    refuses(
        "a token with a mistake",
        join(cluster, "b", "b", &typo)?,
        2,
        "this is no token",
    )?;
    refuses(
        "a token for another host",
        join(cluster, "c", "c", &b)?,
        2,
        "this token is for host b",
    )?;
    testbed.cut_link("c")?;
    refuses(
        "a door that is not reached",
        join(cluster, "c", "c", &c)?,
        1,
        "is not reached",
    )?;
    testbed.restore_link("c")?;
    ensure!(!folder(cluster, "c").exists(), "refused, and files were written");

    succeeds(join(cluster, "b", "b", &b)?, "host b has joined cluster lab")?;
    refuses(
        "a host that has joined",
        join(cluster, "b", "b", &b)?,
        2,
        "in a cluster already",
    )?;
    refuses(
        "a token that was used",
        join(cluster, "b", "again", &b)?,
        2,
        "was used already",
    )?;
    let mut clock = Clock::new(testbed.node("c").home())?;
    clock.jump_ms(11 * 60_000)?;
    let mut late = command(cluster, "c", "c", &["join", &c])?;
    clock.onto(&mut late);
    refuses(
        "a token that has run out",
        late.output()?,
        2,
        "this token ran out at",
    )?;
    succeeds(join(cluster, "c", "c", &c)?, "host c has joined cluster lab")?;
    door.ends("all have joined")?;
    refuses(
        "a door that is closed",
        join(cluster, "c", "again", &c)?,
        1,
        "is not reached",
    )?;
    refuses(
        "a token of a host without the authority's key",
        say(cluster, "b", "b", &["token", "c"])?,
        2,
        "where the cluster was begun",
    )?;
    refuses(
        "a token for a stranger",
        say(cluster, "a", "a", &["token", "z"])?,
        2,
        "'z' is not in",
    )?;
    keys_are_where_they_were_made(cluster)?;

    // One that lost its folder comes in again, while the daemon of host a runs.
    cluster.start_host("a")?;
    fs::remove_dir_all(folder(cluster, "b"))?;
    let mut door = Waiting::begin(cluster, &["token", "b"])?;
    let again = door.token("b")?;
    succeeds(join(cluster, "b", "b", &again)?, "host b has joined")?;
    door.ends("all have joined")?;

    cluster.start_host("b")?;
    let told = Told::prepare(cluster, "c")?;
    cluster.start_host("c")?;
    told.look(cluster, "c", "b")?;
    // One that is late is said not to be reached.
    let deadline = Instant::now() + BOUND;
    loop {
        let output = cluster.output("c", &["cluster", "status"])?;
        let all = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() && all.lines().count() == 3 && !all.contains("NOT") {
            break;
        }
        ensure!(
            Instant::now() < deadline,
            "{}, and not three hosts that answer: {all}",
            output.status
        );
    }
    cluster.stop_host("b", nix::sys::signal::Signal::SIGTERM)?;
    let output = cluster.output("a", &["cluster", "status"])?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.code() == Some(1)
            && said
                .lines()
                .any(|line| line.starts_with("b ") && line.contains("NOT REACHED")),
        "a host that is gone is not told: {said}"
    );
    Ok(refused)
}

fn folder(cluster: &Cluster<'_>, name: &str) -> PathBuf {
    cluster.dir().join(name)
}

/// `dunlin cluster ...` on a host, for the folder of that name.
fn command(
    cluster: &Cluster<'_>,
    host: &str,
    name: &str,
    arguments: &[&str],
) -> Result<std::process::Command> {
    let (verb, rest) = arguments.split_first().context("no verb")?;
    let dir = folder(cluster, name);
    let mut command = cluster.testbed().node(host).command(cluster.binary())?;
    command
        .args(["cluster", verb])
        .args(rest)
        .arg("--dir")
        .arg(&dir)
        .stdin(Stdio::null());
    if *verb != "token" {
        command
            .arg("--state")
            .arg(dir.join("state"))
            .arg("--control")
            .arg(dir.join("control.sock"));
    }
    Ok(command)
}

fn say(cluster: &Cluster<'_>, host: &str, name: &str, arguments: &[&str]) -> Result<Output> {
    Ok(command(cluster, host, name, arguments)?.output()?)
}

fn join(cluster: &Cluster<'_>, host: &str, name: &str, token: &str) -> Result<Output> {
    say(cluster, host, name, &["join", token])
}

fn succeeds(output: Output, words: &str) -> Result<String> {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && said.contains(words),
        "{}, '{said}', {why}",
        output.status
    );
    Ok(said)
}

/// `dunlin cluster init` or `token` on host a, which waits for others.
struct Waiting {
    child: Child,
    lines: mpsc::Receiver<String>,
    tokens: BTreeMap<String, String>,
}

impl Waiting {
    fn begin(cluster: &Cluster<'_>, arguments: &[&str]) -> Result<Self> {
        let mut child = command(cluster, "a", "a", arguments)?
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("a piped stdout")?;
        let (tell, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            lines,
            tokens: BTreeMap::new(),
        })
    }

    /// The token that it prints for a host.
    fn token(&mut self, host: &str) -> Result<String> {
        let mut last = String::new();
        while !self.tokens.contains_key(host) {
            let line = self
                .lines
                .recv_timeout(BOUND)
                .with_context(|| format!("no token for host {host}"))?;
            if let (Some(token), Some(rest)) = (
                line.trim().strip_prefix("dunlin cluster join "),
                last.strip_prefix("on host "),
            ) {
                let name = rest.split(',').next().unwrap_or_default();
                self.tokens.insert(name.to_owned(), token.to_owned());
            }
            last = line;
        }
        Ok(self.tokens[host].clone())
    }

    fn ends(mut self, words: &str) -> Result<()> {
        let deadline = Instant::now() + BOUND;
        while let Ok(line) = self
            .lines
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            if line.contains(words) {
                let status = self.child.wait()?;
                ensure!(status.success(), "'{words}', and then {status}");
                return Ok(());
            }
        }
        bail!("it does not say '{words}'")
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // It has ended, unless the test fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// No host has another one's key, and nobody else may read its own.
fn keys_are_where_they_were_made(cluster: &Cluster<'_>) -> Result<()> {
    let read = |host: &str, file: &str| fs::read_to_string(folder(cluster, host).join(file));
    for host in HOSTS {
        let key = read(host, "key.pem")?;
        let body = key
            .lines()
            .nth(1)
            .with_context(|| format!("host {host} has an empty key"))?;
        let mode = fs::metadata(folder(cluster, host).join("key.pem"))?
            .permissions()
            .mode()
            & 0o777;
        ensure!(mode == 0o600, "host {host}'s key has mode {mode:o}");
        for other in HOSTS {
            let found = files_with(&folder(cluster, other), body)?;
            let expected = usize::from(host == other);
            ensure!(
                found == expected,
                "{found} files of host {other} hold host {host}'s key"
            );
        }
        ensure!(
            read(host, "ca.pem")? == read("a", "ca.pem")?,
            "host {host} has another authority"
        );
        ensure!(
            read(host, "cluster.toml")? == read("a", "cluster.toml")?,
            "host {host} has another cluster"
        );
        ensure!(
            folder(cluster, host).join("ca-key.pem").exists() == (host == "a"),
            "the authority's key is not on host a alone"
        );
    }
    Ok(())
}

fn files_with(dir: &Path, words: &str) -> Result<usize> {
    let mut found = 0;
    for entry in fs::read_dir(dir)?
        .flatten()
        .filter(|entry| entry.path().is_file())
    {
        found += usize::from(String::from_utf8_lossy(&fs::read(entry.path())?).contains(words));
    }
    Ok(found)
}
