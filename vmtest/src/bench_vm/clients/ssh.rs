//! OpenSSH's own client, one for each connection: a line goes there and has to come back as it was, over a connection that is
//! kept, or by a login for each line. All have had a first line before the window begins: no login is in that of kept connections.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::super::case::Handshakes;
use super::{Clients, Measured, patience, too_slow};

/// Nothing of the user's or an earlier run's: no settings, no known hosts, no questions.
const OPTIONS: [&str; 14] = [
    "-F",
    "none",
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=no",
    "-o",
    "UserKnownHostsFile=/dev/null",
    "-o",
    "GlobalKnownHostsFile=/dev/null",
    "-o",
    "LogLevel=ERROR",
    "-o",
    "ConnectTimeout=30",
];
/// Reads lines, each of which a command of its own login says again. What is no word for a shell never comes.
const LOGINS: &str = "while read -r line; do chroot . \"$@\" \"echo $line\" < /dev/null || exit; done";
/// The same over one connection.
const ECHO: &str = "exec chroot . \"$@\" cat";

/// The load.
pub fn run(
    clients: &Clients<'_>,
    handshakes: Handshakes,
    connections: u32,
    seconds: f64,
) -> Result<Measured> {
    let then = match handshakes {
        Handshakes::Kept => ECHO,
        Handshakes::Each => LOGINS,
    };
    let window = Duration::from_secs_f64(seconds);
    let (tell, told) = mpsc::channel();
    let (mut groups, mut gates) = (Vec::new(), Vec::new());
    for number in 0..connections {
        let mut command = clients.inside(then, "/usr/bin/ssh")?;
        command.args(OPTIONS).arg(format!("root@{}", clients.guest));
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run ssh")?;
        // Each command of a node is the leader of its own process group.
        groups.push(Some(Pid::from_raw(i32::try_from(child.id())?)));
        let (open, gate) = mpsc::channel();
        gates.push(open);
        let client = Client {
            number,
            tell: tell.clone(),
            gate,
        };
        let work = move || {
            let spoken = client.speak(child, window);
            client.tell(Told::Ended(spoken));
        };
        std::thread::Builder::new()
            .name(format!("ssh-{number}"))
            .spawn(work)?;
    }
    // Twice: all logins come before the window, and in a slow guest they are as long as one.
    let at_most = 2 * patience(seconds);
    let collected = collect(&told, gates, &mut groups, at_most);
    for group in groups.into_iter().flatten() {
        let _ = killpg(group, Signal::SIGKILL);
    }
    let spoken = collected?;
    let per_second = spoken.iter().map(Spoken::per_second).sum();
    let mut latencies_us: Vec<u64> = spoken.into_iter().flat_map(|one| one.latencies_us).collect();
    let mut measured = Measured {
        per_second,
        ..Measured::from_latencies(&mut latencies_us, seconds)?
    };
    // Each client's first line.
    measured.in_all += u64::from(connections);
    Ok(measured)
}

/// What one client did in its window, which ends with its last line.
struct Spoken {
    latencies_us: Vec<u64>,
    window: Duration,
}

impl Spoken {
    fn per_second(&self) -> f64 {
        self.latencies_us.len() as f64 / self.window.as_secs_f64()
    }
}

/// What a client tells.
enum Told {
    /// Its first line has come back.
    Ready,
    /// Its process has ended.
    Ended(Result<Spoken>),
}

/// Opens the gates when all clients are ready, and takes those out of `groups` that have ended.
fn collect(
    told: &mpsc::Receiver<(u32, Told)>,
    gates: Vec<mpsc::Sender<()>>,
    groups: &mut [Option<Pid>],
    at_most: Duration,
) -> Result<Vec<Spoken>> {
    let deadline = Instant::now() + at_most;
    let (mut ready, mut all) = (0, Vec::new());
    while all.len() < groups.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        let (number, what) = told.recv_timeout(left).map_err(|_| {
            let seconds = at_most.as_secs();
            too_slow(format!("ssh does not end within {seconds} s"))
        })?;
        match what {
            Told::Ready => ready += 1,
            Told::Ended(spoken) => {
                groups[number as usize] = None;
                all.push(spoken?);
            }
        }
        if ready == groups.len() {
            ready = 0;
            // One that has ended since says so itself.
            for gate in &gates {
                let _ = gate.send(());
            }
        }
    }
    Ok(all)
}

struct Client {
    number: u32,
    tell: mpsc::Sender<(u32, Told)>,
    gate: mpsc::Receiver<()>,
}

impl Client {
    fn tell(&self, what: Told) {
        // Nobody listens any more where another client has failed.
        let _ = self.tell.send((self.number, what));
    }

    /// A line, and when that has come back and the gate is open line after line for as long as `window`.
    fn speak(&self, mut child: Child, window: Duration) -> Result<Spoken> {
        let (mut to, from) = (
            child.stdin.take().context("piped")?,
            child.stdout.take().context("piped")?,
        );
        let mut from = BufReader::new(from);
        let mut turn = 0_u64;
        let mut there_and_back = || -> Result<u64> {
            let line = format!("{:0>63}\n", format!("{}.{turn}", self.number));
            turn += 1;
            let began = Instant::now();
            to.write_all(line.as_bytes())?;
            let mut answer = String::new();
            from.read_line(&mut answer)?;
            ensure!(
                answer == line,
                "'{}' came back as '{}'",
                line.trim(),
                answer.trim()
            );
            Ok(u64::try_from(began.elapsed().as_micros())?)
        };
        let mut all = || -> Result<Spoken> {
            there_and_back()?;
            self.tell(Told::Ready);
            self.gate.recv().context("another client has failed")?;
            let begun = Instant::now();
            let mut latencies_us = Vec::new();
            while begun.elapsed() < window {
                latencies_us.push(there_and_back()?);
            }
            let window = begun.elapsed();
            Ok(Spoken { latencies_us, window })
        };
        let spoken = all();
        drop(to);
        let output = child.wait_with_output()?;
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let spoken = spoken.with_context(|| format!("ssh: {} ({words})", output.status))?;
        match output.status.success() {
            true => Ok(spoken),
            false => Err(anyhow!("ssh: {} ({words})", output.status)),
        }
    }
}
