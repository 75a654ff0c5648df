//! Commands are clients of the API: with nobody at the control socket they do and say the same as without the API.
//!
//! Needs root, as whom the daemon's own user is asked; three hosts: `keys.rs`, `shared_log.rs`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use daemon::{Host, ROOT};
use dunlin_vmtest::is_root;

#[path = "common/daemon.rs"]
#[allow(dead_code, reason = "other tests have other users")]
mod daemon;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);

/// What is said, and what has to be in the answer.
type Case<'a> = (&'a [&'a str], &'a str);

/// One of a daemon's two sockets put aside, until this is dropped.
struct Aside {
    path: PathBuf,
}

impl Aside {
    fn put(path: PathBuf) -> Result<Self> {
        fs::rename(&path, path.with_extension("aside"))?;
        Ok(Self { path })
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        let _ = fs::rename(self.path.with_extension("aside"), &self.path);
    }
}

/// Exit code, output, and what was said of errors.
type Outcome = (Option<i32>, String, String);

fn outcome(host: &Host, words: &[&str]) -> Result<Outcome> {
    let output = host.say(ROOT, words)?;
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

fn all(host: &Host, cases: &[Case]) -> Result<Vec<Outcome>> {
    let said = |(words, wanted): &Case| {
        let said = outcome(host, words)?;
        ensure!(
            said.1.contains(wanted) || said.2.contains(wanted),
            "{words:?}: no '{wanted}' in {said:?}"
        );
        Ok(said)
    };
    cases.iter().map(said).collect()
}

#[test]
fn commands_say_by_http_what_they_say_by_the_control_socket() -> Result<()> {
    if !is_root() {
        skipped::skip("root's own sockets need root");
        return Ok(());
    }
    let mut host = Host::new()?;
    host.configure("page = \"off\"")?;
    host.start()?;
    let file = host.file().with_file_name("shop.toml");
    fs::write(
        &file,
        "name = \"shop\"\nmembers = [\"nobody\"]\npolicy = \"none\"\n[vm]\nmemory_mib = 64\n",
    )?;
    let file = file.to_str().context("a path of text")?;
    let authority = host.file().with_file_name("../ca-key.pem");
    fs::copy(authority, host.file().with_file_name("ca-key.pem"))?;
    let dir = host.file().with_file_name("");
    let dir = dir.to_str().context("a path of text")?;
    // A name that is none of an address, too.
    let cases: [Case; 28] = [
        (&["status"], "host a"),
        (&["status", "--json"], "\"host\":\"a\""),
        (&["events", "--json", "--since", "9999d"], "host-begins"),
        (&["cluster", "status"], "127.0.0.1"),
        (&["cluster", "status", "--json"], "\"problem\":null"),
        (&["check", file], "nobody"),
        (&["up", file], "nobody"),
        (&["up", file, "--no-wait"], "nobody"),
        (&["switchover", "shop"], "there is no VM 'shop' on this host"),
        (&["failover", "shop"], "there is no VM 'shop' on this host"),
        (&["switchover", "a/b ?\u{e9}\n"], "there is no VM 'a/b"),
        (&["policy", "shop", "remus"], "there is no VM 'shop'"),
        (&["protect", "shop"], "there is no VM 'shop'"),
        (
            &["protect", "shop", "--alone", "--from-disk"],
            "there is no VM 'shop'",
        ),
        (
            &["promote", "shop", "--force", "--from-disk"],
            "there is no VM 'shop'",
        ),
        (&["replace", "shop", "b"], "there is no VM 'shop'"),
        (&["move", "shop", "--backup", "d"], "there is no VM 'shop'"),
        (&["verify-disk", "shop", "--repair"], "there is no VM 'shop'"),
        (&["inject", "shop", "none"], "there is no VM 'shop'"),
        (&["down", "shop", "--now"], "there is no VM 'shop'"),
        (&["logs", "shop", "--follow"], "there is no program 'shop'"),
        (&["log", "create", "work", "a", "a"], "named twice"),
        (&["log", "create", "work", "a"], "log 'work' is on a"),
        (&["log", "status", "work"], "work: "),
        (&["log", "read", "work", "--json"], ""),
        (&["log", "remove", "work"], ""),
        (&["log", "read", "work"], "there is no log 'work'"),
        (&["cluster", "rotate", "--dir", dir], ""),
    ];
    // By HTTP: who listens at the control socket answers nobody, and would be heard of.
    let by_http = {
        let aside = Aside::put(host.socket())?;
        let control = UnixListener::bind(&aside.path)?;
        control.set_nonblocking(true)?;
        let said = all(&host, &cases)?;
        ensure!(control.accept().is_err(), "a command went by the control socket");
        said
    };
    let by_control = {
        let _aside = Aside::put(host.socket().with_file_name("api.sock"))?;
        all(&host, &cases)?
    };
    for ((case, one), other) in cases.iter().zip(&by_http).zip(&by_control) {
        // What has happened meanwhile, and whether a log that was just made has its leader yet.
        let changes = matches!(case.0, ["events", ..] | ["log", "status", ..]);
        ensure!(
            one == other || (changes && one.0 == other.0),
            "{:?}: by HTTP {one:?}, by the control socket {other:?}",
            case.0
        );
    }
    Ok(())
}

/// A command that goes on, and its lines.
struct Followed(Child);

impl Followed {
    fn start(host: &Host, words: &[&str]) -> Result<(Self, impl BufRead)> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_dunlin"))
            .arg("--socket")
            .arg(host.socket())
            .args(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().context("its output")?);
        Ok((Self(child), lines))
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads until a line has that.
fn await_line(lines: &mut impl BufRead, wanted: &str) -> Result<()> {
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 {
        if line.contains(wanted) {
            return Ok(());
        }
        line.clear();
    }
    anyhow::bail!("it ended without '{wanted}'")
}

#[test]
fn a_follower_hears_what_happens_and_more_followers_than_there_may_be_keep_no_order_out() -> Result<()> {
    if !is_root() {
        skipped::skip("root's own sockets need root");
        return Ok(());
    }
    let mut host = Host::new()?;
    host.configure("page = \"off\"")?;
    host.start()?;
    let (_first, mut heard) = Followed::start(&host, &["events", "--follow"])?;
    await_line(&mut heard, "host-begins")?;
    let made = outcome(&host, &["log", "create", "work", "a"])?;
    ensure!(made.0 == Some(0), "{made:?}");
    await_line(&mut heard, "log-leads")?;
    let (_reader, mut entries) = Followed::start(&host, &["log", "read", "work", "--follow"])?;
    let proposed = outcome(&host, &["log", "propose", "work", "first"])?;
    ensure!(proposed.0 == Some(0), "{proposed:?}");
    await_line(&mut entries, "first")?;
    // Followers take all their places, and are refused beyond; each is heard before the next begins.
    let mut followers = Vec::new();
    let refused = loop {
        let (mut one, mut lines) = Followed::start(&host, &["events", "--follow"])?;
        let mut line = String::new();
        if lines.read_line(&mut line)? == 0 {
            break one.0.wait()?;
        }
        followers.push((one, lines));
        ensure!(followers.len() < 1000, "followers are not bounded");
    };
    ensure!(
        refused.code() == Some(1) && followers.len() > 100,
        "{refused} after {}",
        followers.len()
    );
    // Who does not follow takes none of these places.
    let told = outcome(&host, &["events"])?;
    ensure!(told.0 == Some(0) && told.1.contains("host-begins"), "{told:?}");
    let order = outcome(&host, &["log", "status"])?;
    ensure!(order.0 == Some(0) && order.1.contains("work: "), "{order:?}");
    drop(followers);
    // Their places are free again once it is noticed that they have gone.
    let until = Instant::now() + PATIENCE;
    loop {
        let (_again, mut heard) = Followed::start(&host, &["events", "--follow"])?;
        match await_line(&mut heard, "log-leads") {
            Err(error) if Instant::now() >= until => return Err(error),
            Err(_) => {}
            Ok(()) => return Ok(()),
        }
    }
}
