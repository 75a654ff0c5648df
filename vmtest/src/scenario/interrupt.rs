//! Ctrl-C in the middle of a demonstration: nothing of it is left, though nobody says `down`.
//!
//! * **Decides:** what counts as left: a process that was not here before, a namespace, a cgroup, an interface, a file.
//! * **Not here:** a killed daemon and `down`, which other scenarios end with.

use std::collections::BTreeSet;
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
use crate::lab::{Lab, RunId};
use crate::traces;

/// Until the demonstration's VM is protected.
const PATIENCE: Duration = Duration::from_secs(120);
/// Until whatever ends with it is gone.
const GONE: Duration = Duration::from_secs(15);

/// Plays it: `program demo` is started and interrupted when its VM is protected.
///
/// # Errors
/// With what is left.
pub fn run(world: &World, program: &Path) -> Result<()> {
    let before = everything();
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
    let running = everything().difference(&before).count();
    let run = fs::read_dir(crate::paths::lab_runs())?
        .flatten()
        .find_map(|entry| RunId::of(&entry.file_name().to_string_lossy()))
        .context("no lab runs: mend the test")?;
    let seen = Lab::leftovers(&run).len();
    kill(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGINT)?;
    child.wait()?;
    ensure!(protected, "the demonstration's VM was never protected");
    ensure!(
        running >= 6 && seen >= 6,
        "only {running} and {seen} traces of a running demonstration are seen: mend the test"
    );
    let deadline = Instant::now() + GONE;
    loop {
        let mut left: Vec<String> = everything().difference(&before).cloned().collect();
        left.extend(Lab::leftovers(&run));
        if left.is_empty() {
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

/// Traces outside of processes, and the processes that could be ours.
fn everything() -> BTreeSet<String> {
    let mut found = traces::on_this_machine();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let name = name.trim();
        if name.starts_with("qemu") || name == "dunlin" {
            found.insert(format!("process {} {name}", entry.file_name().to_string_lossy()));
        }
    }
    found
}
