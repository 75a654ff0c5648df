//! What is left of a story that did not go as it should: the logs of daemons and guests, and what each QEMU is busy with. The ends of
//! the logs and the last are also in the error, for whoever has no more than that.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Cluster;

/// Of each log.
const LAST_LINES: usize = 8;
/// Over which the threads of QEMU are watched.
const LOOK: Duration = Duration::from_secs(1);

impl Cluster<'_> {
    /// Keeps the logs, and returns a word on all that is left.
    pub(super) fn keep_remains(&self, name: &str) -> String {
        let words = self.last_words();
        let kept = self.keep_logs(name).map(|to| {
            let _ = fs::write(to.join("last-words"), &words);
            format!("logs are in {}", to.display())
        });
        format!(
            "{}; {}\n{words}",
            kept.unwrap_or_else(|| "no logs could be kept".to_owned()),
            room_left()
        )
    }

    /// Copies the logs to where they outlive the testbed.
    pub fn keep_logs(&self, name: &str) -> Option<PathBuf> {
        let to = crate::paths::failed_runs().join(name);
        let _ = fs::remove_dir_all(&to);
        fs::create_dir_all(&to).ok()?;
        for host in &self.hosts {
            for file in logs(self.testbed.node(host).home()) {
                let name = file
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                let _ = fs::copy(&file, to.join(format!("{host}-{name}")));
            }
        }
        let statuses = serde_json::to_string_pretty(&self.statuses()).unwrap_or_default();
        let _ = fs::write(to.join("status.json"), statuses);
        Some(to)
    }

    fn last_words(&self) -> String {
        let mut words = String::new();
        for host in &self.hosts {
            for file in logs(self.testbed.node(host).home()) {
                let name = file
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                let text = String::from_utf8_lossy(&fs::read(&file).unwrap_or_default()).into_owned();
                let lines: Vec<&str> = text
                    .lines()
                    .map(str::trim)
                    .filter(|line| !line.is_empty())
                    .collect();
                for line in &lines[lines.len().saturating_sub(LAST_LINES)..] {
                    let _ = writeln!(words, "{host} {name}: {line}");
                }
            }
        }
        let mut machines = Vec::new();
        for host in self.statuses() {
            for vm in &host.vms {
                let _ = writeln!(
                    words,
                    "{}: {} is {}, {:?}; {}",
                    host.host,
                    vm.name,
                    vm.role.as_str(),
                    vm.state,
                    vm.why
                );
            }
            let pids = host.vms.iter().filter_map(|vm| vm.qemu_pid.map(u64::from));
            machines.extend(pids.map(|pid| (host.host.clone(), pid, threads(pid))));
        }
        std::thread::sleep(LOOK);
        for (host, pid, before) in machines {
            for thread in threads(pid) {
                let busy = |earlier: &Thread| thread.ticks - earlier.ticks;
                let ticks = before.iter().find(|one| one.id == thread.id).map_or(0, busy);
                let Thread { name, state, .. } = thread;
                let _ = writeln!(
                    words,
                    "{host} QEMU's thread {name}: {state}, {ticks} ticks in {LOOK:?}"
                );
            }
        }
        words
    }
}

/// Of the disks that hosts and logs lie on: a guest whose image's disk is full stands still, and nothing else tells of it.
fn room_left() -> String {
    let folders = [crate::paths::testbed_runs(), crate::paths::failed_runs()];
    let left = folders.map(|folder| {
        let free = crate::paths::free_bytes(&folder).map(|bytes| format!("{} MiB", bytes >> 20));
        format!(
            "{} free in {}",
            free.unwrap_or_else(|| "?".to_owned()),
            folder.display()
        )
    });
    left.join(", ")
}

/// The logs in a host's folder.
fn logs(home: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(home).into_iter().flatten().flatten();
    let files = entries.map(|entry| entry.path());
    files
        .filter(|file| file.extension().is_some_and(|kind| kind == "log"))
        .collect()
}

/// A thread, as /proc has it.
struct Thread {
    id: String,
    name: String,
    state: String,
    /// Of the processor's time.
    ticks: u64,
}

fn threads(pid: u64) -> Vec<Thread> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let stats = entries.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    stats.filter_map(|stat| thread_of(&stat)).collect()
}

/// `ID (NAME) STATE …`: user and system time are the 14th and 15th field, and a name may hold anything.
fn thread_of(stat: &str) -> Option<Thread> {
    let (id, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    Some(Thread {
        id: id.to_owned(),
        name: name.to_owned(),
        state: (*fields.first()?).to_owned(),
        ticks: fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::thread_of;

    #[test]
    fn a_thread_is_read_whatever_its_name_is() {
        let stat = "77 (CPU 0) (TCG) R 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0 4 0 99";
        let thread = thread_of(stat).unwrap();
        assert_eq!((thread.id.as_str(), thread.name.as_str()), ("77", "CPU 0) (TCG"));
        assert_eq!((thread.state.as_str(), thread.ticks), ("R", 150));
        assert!(thread_of("77 (short) R 1 2").is_none());
    }
}
