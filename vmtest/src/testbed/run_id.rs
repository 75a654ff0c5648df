//! The name of one run: it tells whether the process that made something is still alive.

use std::fs;

use anyhow::{Context, Result};

const PREFIX: &str = "dunlin-testbed";
const NAMESPACES: &str = "/run/netns";

/// `dunlin-testbed-PID-START-N`: START is the process's start time, so that a reused pid is not mistaken for it; N
/// counts the testbeds of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunId(String);

impl RunId {
    /// A fresh name for this process.
    pub fn mine() -> Result<Self> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let pid = std::process::id();
        let start = start_time(pid).context("/proc is not mounted")?;
        Ok(Self(format!(
            "{PREFIX}-{pid}-{start}-{}",
            COUNT.fetch_add(1, Ordering::Relaxed)
        )))
    }

    /// The name of a run, out of the name of something that it made.
    pub fn of(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix(PREFIX)?.strip_prefix('-')?.split('-');
        let numbers = [parts.next()?, parts.next()?, parts.next()?];
        numbers
            .iter()
            .all(|part| part.parse::<u64>().is_ok())
            .then(|| Self(format!("{PREFIX}-{}", numbers.join("-"))))
    }

    /// The process that this run belongs to.
    pub fn pid(&self) -> Option<u32> {
        self.0[PREFIX.len() + 1..].split('-').next()?.parse().ok()
    }

    /// Whether the process that this run belongs to still runs.
    pub fn is_alive(&self) -> bool {
        let start = self.0[PREFIX.len() + 1..].split('-').nth(1);
        let start = start.and_then(|part| part.parse().ok());
        start.is_some() && self.pid().and_then(start_time) == start
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The network namespace of one of its nodes.
    pub fn namespace(&self, node: &str) -> String {
        format!("{}-{node}", self.0)
    }
}

/// When the process was started, in clock ticks since boot.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name may hold anything; after its last bracket the fields are plain. Start time is field 22.
    stat[stat.rfind(')')? + 2..].split(' ').nth(19)?.parse().ok()
}

/// The names of all testbeds' network namespaces on this machine.
pub fn namespaces() -> Vec<String> {
    let entries = fs::read_dir(NAMESPACES).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| RunId::of(name).is_some())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::RunId;

    #[test]
    fn a_run_is_found_again_in_its_names() {
        let run = RunId::mine().unwrap();
        assert!(run.is_alive());
        assert_eq!(RunId::of(&run.namespace("a")), Some(run.clone()));
        assert_eq!(RunId::of("dunlin-testbed-x-1-0-a"), None);
        assert_eq!(RunId::of("somebody-elses"), None);
        assert!(
            !RunId::of("dunlin-testbed-1-1-0-a").unwrap().is_alive(),
            "process 1 started at another time"
        );
    }
}
