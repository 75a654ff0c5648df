//! What `dunlin status --json` says, as far as tests look at it. Unknown keys are kept out of the way: a new one must
//! not break an old test.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One host's answer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HostStatus {
    /// Its name.
    pub host: String,
    /// Its VMs.
    pub vms: Vec<VmStatus>,
}

impl HostStatus {
    /// The VM of that name.
    pub fn vm(&self, name: &str) -> Option<&VmStatus> {
        self.vms.iter().find(|vm| vm.name == name)
    }
}

/// One VM on one host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct VmStatus {
    /// Its name.
    pub name: String,
    /// `primary`, `backup`, `witness` or `none`.
    pub role: String,
    /// `running`, `joining`, `alone`, `stopped`, ...
    pub state: String,
    /// The consensus' term.
    pub term: u64,
    /// Syncs so far.
    pub epoch: u64,
    /// Whether a backup could take over now.
    pub protected: bool,
    /// `none`, `remus`, `plover`.
    pub policy: String,
    /// The last syncs.
    pub sync: Option<Sync>,
    /// How the last take-over went.
    pub failover: Option<Failover>,
    /// Of work that takes long.
    pub progress: Value,
}

/// Figures of the syncs; what a step is called is the daemon's business.
pub type Sync = serde_json::Map<String, Value>;

/// When each step of a take-over was done, counted from the last word of the old primary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Failover {
    /// The old primary was given up.
    pub detected_us: u64,
    /// A majority voted.
    pub elected_us: u64,
    /// All agreed inputs were delivered and the disk was switched.
    pub applied_us: u64,
    /// The network was told.
    pub announced_us: u64,
}

impl Failover {
    /// The length of each step.
    pub fn steps(&self) -> [(&'static str, u64); 4] {
        [
            ("detection", self.detected_us),
            ("election", self.elected_us.saturating_sub(self.detected_us)),
            ("apply", self.applied_us.saturating_sub(self.elected_us)),
            ("announce", self.announced_us.saturating_sub(self.applied_us)),
        ]
    }
}
