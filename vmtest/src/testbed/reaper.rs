//! The end of a testbed, whatever ends it.
//!
//! A small shell waits on a pipe whose other end only this process holds. When the testbed is dropped, or this process
//! dies in any way (Ctrl-C, panic, SIGKILL), the pipe closes and the shell kills and removes what the run made. It
//! lies in its own session and in no cgroup of the testbed, so neither a Ctrl-C nor `kill_all` reaches it. One way of
//! cleaning up for all ends means that it is the tested one.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use super::cgroup;
use super::run_id::{self, RunId};

/// $1 the run's name, $2 its directory, the rest: its cgroup directories.
const SCRIPT: &str = r#"
trap '' INT TERM HUP QUIT
while read -r line; do :; done
run=$1; dir=$2; shift 2
for group in "$@"; do
    for kill in "$group"/cgroup.kill; do [ -e "$kill" ] && echo 1 > "$kill"; done
    for frozen in "$group"/*/cgroup.freeze; do [ -e "$frozen" ] && echo 0 > "$frozen"; done
done
for ns in /run/netns/"$run"-*; do
    [ -e "$ns" ] || continue
    name=${ns##*/}
    for pid in $(ip netns pids "$name"); do kill -9 "$pid"; done
done
tries=0
for group in "$@"; do
    while [ -d "$group" ]; do
        # A host that ran systemd has groups in its group.
        find "$group" -mindepth 1 -depth -type d -exec rmdir {} +
        rmdir "$group"
        [ -d "$group" ] || break
        tries=$((tries + 1)); [ $tries -gt 200 ] && break
        for inner in "$group"/*/; do
            [ -d "$inner" ] && while read -r pid; do kill -9 "$pid"; done < "$inner/cgroup.procs"
        done
        sleep 0.02
    done
done
for ns in /run/netns/"$run"-*; do [ -e "$ns" ] && ip netns del "${ns##*/}"; done
while read -r _ mount _; do
    case $mount in "$dir"/*) umount -l "$mount" ;; esac
done < /proc/self/mounts
rm -rf "$dir"
"#;

/// The waiting shell.
pub struct Reaper {
    shell: Child,
}

impl Reaper {
    /// Starts to watch over `run`, before the first thing of it is made.
    pub fn start(run: &RunId, dir: &Path) -> Result<Self> {
        let mut command = shell(run, dir);
        command.stdin(Stdio::piped());
        // SAFETY: setsid is async-signal-safe, takes no pointer and touches nothing of the parent.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                Ok(())
            });
        }
        Ok(Self {
            shell: command.spawn().context("cannot start sh")?,
        })
    }

    /// Lets the shell clean up and waits until it has.
    pub fn finish(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

fn shell(run: &RunId, dir: &Path) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", SCRIPT, "dunlin-testbed-reaper", run.as_str()])
        .arg(dir)
        .args(cgroup::paths(run));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Removes what runs of dead processes left: only possible when their reaper was killed as well.
pub fn sweep(base: &Path) -> Result<()> {
    let mut runs: Vec<RunId> = run_id::namespaces()
        .iter()
        .filter_map(|name| RunId::of(name))
        .collect();
    runs.extend(cgroup::all_runs());
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        runs.extend(entry.file_name().to_str().and_then(RunId::of));
    }
    runs.sort_by(|left, right| left.as_str().cmp(right.as_str()));
    runs.dedup();
    for run in runs.iter().filter(|run| !run.is_alive()) {
        shell(run, &base.join(run.as_str()))
            .status()
            .context("cannot start sh")?;
    }
    Ok(())
}
