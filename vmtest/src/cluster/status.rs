//! What `dunlin status --json` says, as far as tests look at it. Unknown keys are kept out of the way: a new one must
//! not break an old test.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One host's answer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HostStatus {
    /// Its name.
    pub host: String,
    /// Which build its daemon is; empty where that does not say it.
    pub version: String,
    /// The newest version of the protocol that it speaks; 0 where it does not say it.
    pub protocol: u16,
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
    /// The syncs since this host became primary.
    pub sync: Sync,
    /// How the last take-over went.
    pub failover: Option<Failover>,
    /// Of work that takes long.
    pub progress: Value,
    /// The disks.
    pub disks: Vec<Disk>,
    /// The other hosts of its group.
    pub peers: Vec<Peer>,
    /// The version of the protocol that all of them speak.
    pub protocol: Option<u16>,
    /// All else that the daemon says.
    #[serde(flatten)]
    pub more: BTreeMap<String, Value>,
}

impl VmStatus {
    /// A count that has no field of its own here; 0 if the daemon does not say it.
    pub fn count(&self, name: &str) -> u64 {
        self.more.get(name).and_then(Value::as_u64).unwrap_or(0)
    }
}

/// Another host of a VM's group.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// Its name.
    pub host: String,
    /// Whether the log's link to it stands.
    pub connected: bool,
    /// Whether it has no copy.
    #[serde(default)]
    pub witness: bool,
    /// The version of the protocol that is spoken with it.
    pub protocol: Option<u16>,
    /// Which build it is, where it says so.
    pub version: Option<String>,
}

/// One disk on one host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// `alone`, `primary` or `backup`.
    pub role: String,
    /// What a peer may lack.
    pub dirty_bytes: u64,
    /// Memory of the backup's buffers.
    pub held_bytes: u64,
    /// The most that they ever held.
    pub peak_bytes: u64,
    /// Found equal when idle.
    pub settled_bytes: u64,
    /// Brought to the image by syncs.
    pub committed_bytes: u64,
    /// Requests of the VM there, and how long they took in all.
    pub requests: u64,
    /// See `requests`.
    pub request_ns: u64,
    /// Syncs that reached the backup's image, and how long that took in all.
    pub settles: u64,
    /// See `settles`.
    pub settle_ns: u64,
    /// Writes of the backup's VM that were delayed because its buffers were nearly full.
    pub delayed_writes: u64,
    /// How long the lightweight checkpoint compared and wrote.
    pub light_ns: u64,
}

/// Syncs on a primary.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sync {
    /// How many were acknowledged.
    pub count: u64,
    /// How many were given up.
    pub aborted: u64,
    /// The longest that the VM has stood for one, also one that was given up.
    pub longest_pause_us: u64,
    /// Why they were made: reason -> how many. The names are the daemon's.
    pub reasons: BTreeMap<String, u64>,
    /// How the copies are kept now.
    pub manner: String,
    /// How often the manner was changed.
    pub change_overs: u64,
    /// The comparison of both VMs' outputs: name of the figure -> count.
    pub compared: BTreeMap<String, u64>,
    /// Each figure summed up over all of them.
    pub sum: BTreeMap<String, u64>,
    /// The pauses by their length.
    pub pauses: Vec<PausesOf>,
    /// Medians over the last ones: name of the figure -> value. The names are the daemon's.
    pub median: BTreeMap<String, u64>,
}

/// Pauses of one length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PausesOf {
    /// So long, or up to 1/16 longer.
    pub us: u64,
    /// How many.
    pub count: u64,
}

/// How long each step of a take-over took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Failover {
    /// From the last word of the old primary until it was given up.
    pub detected_us: u64,
    /// Until a majority had voted.
    pub elected_us: u64,
    /// Until all agreed inputs were delivered.
    pub applied_us: u64,
    /// Until the network was told.
    pub announced_us: u64,
    /// Frames for the VM that the new primary had heard, and that nobody had agreed on.
    pub overheard: u64,
}

impl Failover {
    /// The steps by name.
    pub fn steps(&self) -> [(&'static str, u64); 4] {
        [
            ("detection", self.detected_us),
            ("election", self.elected_us),
            ("apply", self.applied_us),
            ("announce", self.announced_us),
        ]
    }
}
