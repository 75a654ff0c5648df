//! Ctrl-C in the middle of a demonstration: nothing of it is left, though nobody says `down`.
//!
//! * **Decides:** what counts as left: of this demonstration, a process, a namespace, a cgroup, its directory.
//! * **Not here:** a killed daemon and `down`, which other scenarios end with.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::World;
use crate::paths;
use crate::testbed::{RunId, Testbed};

/// Until the demonstration's VM is protected.
const PATIENCE: Duration = Duration::from_secs(120);
/// Until whatever ends with it is gone.
const GONE: Duration = Duration::from_secs(60);

/// Plays it: `program demo` is started and interrupted when its VM is protected.
///
/// # Errors
/// With what is left.
pub fn run(world: &World, program: &Path) -> Result<()> {
    let mut child = Command::new(program)
        .arg("demo")
        .env("DUNLIN_XTASK_BUILT", &world.dunlin)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let stdout = child.stdout.take().context("a piped stdout")?;
    let (told, is_protected) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if line.contains("protected by policy") {
                // Whoever waits may have given up.
                let _ = told.send(());
            }
        }
    });
    let protected = is_protected.recv_timeout(PATIENCE).is_ok();
    let run = fs::read_dir(paths::testbed_runs())?
        .flatten()
        .filter_map(|entry| RunId::of(&entry.file_name().to_string_lossy()))
        .find(|run| run.pid() == Some(child.id()))
        .context("no testbed of this demonstration runs: mend the test")?;
    // Its story goes on meanwhile: a host may be dead already, and two daemons and a QEMU are left.
    let running = Testbed::processes(&run);
    let seen = left_of(&run).len();
    kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGINT)?;
    child.wait()?;
    ensure!(protected, "the demonstration's VM was never protected");
    ensure!(
        running >= 3 && seen >= 6,
        "only {running} processes and {seen} traces of a running demonstration are seen: mend the test"
    );
    let deadline = Instant::now() + GONE;
    loop {
        let left = left_of(&run);
        if left.is_empty() && Testbed::processes(&run) == 0 {
            break;
        }
        if Instant::now() > deadline {
            bail!("left behind after Ctrl-C: {}", left.join(", "));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    reader
        .join()
        .map_err(|_| anyhow::anyhow!("a reading thread panicked"))
}

/// What there is of a run. A process of it lies in its cgroup, which cannot be removed before.
fn left_of(run: &RunId) -> Vec<String> {
    let mut found = Testbed::leftovers(run);
    let dir = paths::testbed_runs().join(run.as_str());
    if dir.exists() {
        found.push(format!("directory {}", dir.display()));
    }
    found
}
