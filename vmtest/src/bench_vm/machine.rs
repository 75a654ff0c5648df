//! What a report was measured on and how: all that has to be alike before two reports' figures may stand in one table.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// Where and how.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// What the guests ran under: `tcg`, `kvm`, `kvm, software-assisted`.
    pub accelerator: String,
    /// The processor by its own name.
    pub processor: String,
    /// Its cores.
    pub cores: usize,
    /// This machine's kernel.
    pub kernel: String,
    /// The project's commit; `+` behind it where its tree was changed.
    pub commit: String,
    /// Each host's fixed share, in percent of one core.
    pub host_cpu_percent: u32,
    /// Virtual CPUs of each guest.
    pub vcpus: u32,
    /// Seconds of each window.
    pub seconds: f64,
    /// Each figure from a VM booted for it; else from windows of one guest.
    pub fresh: bool,
    /// Whatever else was set for this run.
    pub settings: Vec<String>,
}

impl Machine {
    /// This machine, without what the run itself decides.
    pub fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo").lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == "model name").then(|| value.trim().to_owned())
        });
        Self {
            processor: processor.unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            commit: commit(&crate::paths::workspace()),
            ..Self::default()
        }
    }

    /// The first thing in which another report's figures are none of these.
    pub fn unlike(&self, other: &Self) -> Option<String> {
        let pairs = [
            ("accelerator", &self.accelerator, &other.accelerator),
            ("processor", &self.processor, &other.processor),
            ("kernel", &self.kernel, &other.kernel),
            ("commit", &self.commit, &other.commit),
        ];
        let words = pairs
            .into_iter()
            .map(|(name, own, others)| (name, own.clone(), others.clone()));
        let figures = [
            ("cores", self.cores.to_string(), other.cores.to_string()),
            (
                "host's share",
                self.host_cpu_percent.to_string(),
                other.host_cpu_percent.to_string(),
            ),
            ("vCPUs", self.vcpus.to_string(), other.vcpus.to_string()),
            ("seconds", self.seconds.to_string(), other.seconds.to_string()),
            ("fresh guests", self.fresh.to_string(), other.fresh.to_string()),
            ("settings", self.settings.join("; "), other.settings.join("; ")),
        ];
        let unlike = words.chain(figures).find(|(_, own, others)| own != others);
        unlike.map(|(name, own, others)| format!("{name}: '{own}' here, '{others}' there"))
    }

    /// `kvm, 2 cores of NAME, each host 60 % of one in every policy`
    pub fn in_words(&self) -> String {
        format!(
            "{}, {} cores of {}, each host {} % of one in every policy",
            self.accelerator, self.cores, self.processor, self.host_cpu_percent
        )
    }
}

/// Nothing where there is no git, as in an unpacked archive.
fn commit(workspace: &Path) -> String {
    let git = |words: &[&str]| -> Option<String> {
        let output = Command::new("git").args(words).current_dir(workspace).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return String::new();
    };
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|list| !list.is_empty());
    commit + if changed { "+" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let one = Machine {
            seconds: 2.0,
            ..Machine::here()
        };
        assert_eq!(one.unlike(&one.clone()), None);
        let other = Machine {
            accelerator: "kvm".to_owned(),
            ..one.clone()
        };
        assert!(one.unlike(&other).unwrap().starts_with("accelerator: ''"));
        for other in [
            Machine {
                seconds: 3.0,
                ..one.clone()
            },
            Machine {
                commit: "0".to_owned(),
                ..one.clone()
            },
            Machine {
                host_cpu_percent: 61,
                ..one.clone()
            },
            Machine {
                fresh: true,
                ..one.clone()
            },
            Machine {
                cores: 0,
                ..one.clone()
            },
            Machine {
                settings: vec!["nokaslr".to_owned()],
                ..one.clone()
            },
        ] {
            assert!(one.unlike(&other).is_some(), "{other:?}");
        }
    }
}
