//! A VM's file: which hosts it has, how it is replicated, and the VM or bare program itself.

use super::{ProgramTable, VmTable, usual};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};

/// The words for `policy`. Which of them a word is, the daemon says.
pub const POLICIES: [&str; 6] = ["none", "remus", "str", "colo", "plover", "dunlin"];

/// The words for `storage`. Which of them a word is, the daemon says.
pub const STORAGES: [&str; 3] = ["gannet", "colo", "sync"];

/// A VM's file. It has either `vm` or `program`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmFile {
    /// The VM's name: 1 to 64 letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// The hosts that can run the VM, the preferred one first: two, or one with policy `none`.
    pub members: Vec<String>,
    /// The third host, which only votes. Needed unless the policy is `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness: Option<String>,
    /// The number that each host has, or had, in the VM's group. `dunlin move` writes it; do not set it yourself.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub numbers: BTreeMap<String, u8>,
    /// A host without a part in the VM. If the host of a copy stays away, the standby gets its part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<String>,
    /// How long that host has to be away first, such as `30s`.
    #[serde(default = "standby_after", skip_serializing_if = "is_standby_after")]
    #[schema(default = standby_after)]
    pub standby_after: String,
    /// How often the standby gets a checkpoint of the VM's memory from the backup's copy, such as `30s`. When it joins, only the rest is sent.
    /// Without this key: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby_checkpoint: Option<String>,
    /// How the copies are kept.
    #[serde(default = "usual_policy", skip_serializing_if = "is_usual_policy")]
    #[schema(schema_with = policy)]
    pub policy: String,
    /// The VM's TCP data are acknowledged to it at once, kept, and sent when that is safe. Only with policies `remus` and `dunlin`.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = bool::default)]
    pub speculative: bool,
    /// What a backup does with the primary's disk writes.
    #[serde(default = "usual_storage", skip_serializing_if = "is_usual_storage")]
    #[schema(schema_with = storage)]
    pub storage: String,
    /// Limits the first copy of the disks to a backup to this many MiB a second, over all disks; 0: no limit.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = u64::default)]
    pub copy_mib_per_s: u64,
    /// How many MiB a backup may hold in memory for each disk.
    #[serde(default = "disk_memory_mib", skip_serializing_if = "is_disk_memory_mib")]
    #[schema(default = disk_memory_mib)]
    pub disk_memory_mib: u64,
    /// Equal writes of both VMs go from a backup's memory to its image between two syncs.
    #[serde(default = "settle_when_idle", skip_serializing_if = "is_settle_when_idle")]
    #[schema(default = settle_when_idle)]
    pub settle_when_idle: bool,
    /// How often both hosts' disks are compared automatically: `never`, `daily`, `weekly`, `monthly`, or a time such as `36h`.
    #[serde(default = "weekly", skip_serializing_if = "is_weekly")]
    #[schema(default = weekly)]
    pub verify_disks: String,
    /// How many MiB of each host's images are read in a second for that, at most.
    #[serde(default = "verify_mib_per_s", skip_serializing_if = "is_verify_mib_per_s")]
    #[schema(default = verify_mib_per_s)]
    pub verify_mib_per_s: u64,
    /// When to sync.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub sync: SyncTable,
    /// How much of each host's memory the VM's queues may take.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub memory: MemoryTable,
    /// The VM itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmTable>,
    /// A bare program instead of a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramTable>,
}

impl VmFile {
    /// One of which nothing but this is said: it is neither a VM nor a program yet.
    #[must_use]
    pub fn new(name: &str, members: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            members: members.iter().map(|&host| host.to_owned()).collect(),
            witness: None,
            numbers: BTreeMap::new(),
            standby: None,
            standby_after: standby_after(),
            standby_checkpoint: None,
            policy: usual_policy(),
            speculative: false,
            storage: usual_storage(),
            copy_mib_per_s: 0,
            disk_memory_mib: disk_memory_mib(),
            settle_when_idle: settle_when_idle(),
            verify_disks: weekly(),
            verify_mib_per_s: verify_mib_per_s(),
            sync: SyncTable::default(),
            memory: MemoryTable::default(),
            vm: None,
            program: None,
        }
    }
}

usual! {
    standby_after, is_standby_after: String = "30s".to_owned();
    usual_policy, is_usual_policy: String = "dunlin".to_owned();
    usual_storage, is_usual_storage: String = "gannet".to_owned();
    disk_memory_mib, is_disk_memory_mib: u64 = 512;
    settle_when_idle, is_settle_when_idle: bool = true;
    weekly, is_weekly: String = "weekly".to_owned();
    verify_mib_per_s, is_verify_mib_per_s: u64 = 16;
    shortest_ms, is_shortest_ms: f64 = 1.0;
    quiet_ms, is_quiet_ms: f64 = 1000.0;
    staging_mib, is_staging_mib: usize = 256;
    log_mib, is_log_mib: usize = 64;
    inbound_mib, is_inbound_mib: usize = 32;
    outbound_mib, is_outbound_mib: usize = 64;
}

fn policy() -> Object {
    one_of(&POLICIES, usual_policy(), "How the copies are kept.")
}

fn storage() -> Object {
    let about = "What a backup does with the primary's disk writes.";
    one_of(&STORAGES, usual_storage(), about)
}

fn one_of(words: &[&str], usual: String, about: &str) -> Object {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .description(Some(about))
        .enum_values(Some(words.iter().copied()))
        .default(Some(usual.into()))
        .build()
}

/// `[sync]`: when to sync, and how much memory a sync may take. Times are in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SyncTable {
    /// No sync sooner than this after the last.
    #[serde(skip_serializing_if = "is_shortest_ms")]
    pub shortest_ms: f64,
    /// The latest time for a sync after the last one. Without it: 100 ms while output waits for syncs, 5,000 ms while outputs are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_ms: Option<f64>,
    /// Sync even a silent VM this long after the last sync.
    #[serde(skip_serializing_if = "is_quiet_ms")]
    pub quiet_ms: f64,
    /// A fixed period instead of idle moments. Without it: none, but policies `str` and `colo` have their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period_ms: Option<f64>,
    /// Memory for a sync on its way into the backup, in MiB.
    #[serde(skip_serializing_if = "is_staging_mib")]
    pub staging_mib: usize,
    /// How the two sides find out which blocks differ.
    #[serde(skip_serializing_if = "super::is_default")]
    pub compare: Compare,
    /// Where outputs are compared: answers that differ in nothing but HTTP's `Date`, by up to two seconds, are no difference.
    #[serde(skip_serializing_if = "super::is_default")]
    pub ignore_http_date: bool,
    /// After every sync, hash both memories completely, and give up the backup if they differ. Slow, for tests.
    #[serde(skip_serializing_if = "super::is_default")]
    pub audit: bool,
}

impl Default for SyncTable {
    fn default() -> Self {
        Self {
            shortest_ms: shortest_ms(),
            longest_ms: None,
            quiet_ms: quiet_ms(),
            period_ms: None,
            staging_mib: staging_mib(),
            compare: Compare::default(),
            ignore_http_date: false,
            audit: false,
        }
    }
}

/// How the two sides find out which blocks differ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", rename_all = "lowercase")]
pub enum Compare {
    /// By a hash of every block: one round trip.
    #[default]
    List,
    /// By a hash tree: fewer bytes, a round trip for each level.
    Tree,
}

impl TryFrom<String> for Compare {
    type Error = String;

    fn try_from(word: String) -> Result<Self, Self::Error> {
        match word.as_str() {
            "list" => Ok(Self::List),
            "tree" => Ok(Self::Tree),
            _ => Err(format!("unknown comparison '{word}': use list or tree")),
        }
    }
}

/// `[memory]`: how many MiB of each host's memory the queues of one VM may take, in addition to the VM's own memory and its disks' (docs/budgets.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryTable {
    /// Agreed inputs that are still needed because no sync has covered them. A follower may hold twice as much.
    #[serde(skip_serializing_if = "is_log_mib")]
    pub log_mib: usize,
    /// Frames that the VM has not read yet, over all its NICs.
    #[serde(skip_serializing_if = "is_inbound_mib")]
    pub inbound_mib: usize,
    /// Frames of the VM that wait for a sync, for the backup's output or for a majority.
    #[serde(skip_serializing_if = "is_outbound_mib")]
    pub outbound_mib: usize,
}

impl Default for MemoryTable {
    fn default() -> Self {
        Self {
            log_mib: log_mib(),
            inbound_mib: inbound_mib(),
            outbound_mib: outbound_mib(),
        }
    }
}
