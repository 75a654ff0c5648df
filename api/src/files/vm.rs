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

/// A VM's file. It has one of `vm` and `program`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmFile {
    /// The name that people use: 1 to 64 letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// The hosts that can run it, the first preferred: two, or one under policy `none`.
    pub members: Vec<String>,
    /// The third host, which only agrees. Needed unless the policy is `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub witness: Option<String>,
    /// Which number each host has, or had, in the group: `dunlin move` writes it, and nobody else.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub numbers: BTreeMap<String, u8>,
    /// A host without a part, which gets that of a copy's host that stays away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<String>,
    /// So long that one has to be away.
    #[serde(default = "standby_after", skip_serializing_if = "is_standby_after")]
    #[schema(default = standby_after)]
    pub standby_after: String,
    /// How often the standby gets a checkpoint of the VM's memory, out of the backup's copy, as `30s`: its join is sent the rest alone. Without it, never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby_checkpoint: Option<String>,
    /// How the copies are kept.
    #[serde(default = "usual_policy", skip_serializing_if = "is_usual_policy")]
    #[schema(schema_with = policy)]
    pub policy: String,
    /// Its TCP connections are acknowledged before they may leave; under policy `remus` alone.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = bool::default)]
    pub speculative: bool,
    /// What a backup does with the primary's disk writes.
    #[serde(default = "usual_storage", skip_serializing_if = "is_usual_storage")]
    #[schema(schema_with = storage)]
    pub storage: String,
    /// The first copy of the disks to a backup takes no more than this, over all disks; 0: as fast as it goes.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = u64::default)]
    pub copy_mib_per_s: u64,
    /// What a backup may hold in memory, for each disk.
    #[serde(default = "disk_memory_mib", skip_serializing_if = "is_disk_memory_mib")]
    #[schema(default = disk_memory_mib)]
    pub disk_memory_mib: u64,
    /// Equal writes of both VMs leave a backup's memory between two syncs.
    #[serde(default = "settle_when_idle", skip_serializing_if = "is_settle_when_idle")]
    #[schema(default = settle_when_idle)]
    pub settle_when_idle: bool,
    /// How often both hosts' disks are compared by themselves: `never`, `daily`, `weekly`, `monthly`, or a time such as `36h`.
    #[serde(default = "weekly", skip_serializing_if = "is_weekly")]
    #[schema(default = weekly)]
    pub verify_disks: String,
    /// No more is compared in a second then, over all disks.
    #[serde(default = "verify_mib_per_s", skip_serializing_if = "is_verify_mib_per_s")]
    #[schema(default = verify_mib_per_s)]
    pub verify_mib_per_s: u64,
    /// When to sync.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub sync: SyncTable,
    /// What its queues may take of each host's memory.
    #[serde(default, skip_serializing_if = "super::is_default")]
    pub memory: MemoryTable,
    /// The VM itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmTable>,
    /// A bare program in the VM's place.
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

/// `[sync]`: when to sync, and how much may pile up. Times in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SyncTable {
    /// No sync sooner than this after the last.
    #[serde(skip_serializing_if = "is_shortest_ms")]
    pub shortest_ms: f64,
    /// A sync at the latest this long after the last: while output waits for syncs 100 ms, while outputs are compared 5,000 ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_ms: Option<f64>,
    /// A sync even of a silent VM.
    #[serde(skip_serializing_if = "is_quiet_ms")]
    pub quiet_ms: f64,
    /// Fixed period instead of idle moments; `str` and `colo` have one of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period_ms: Option<f64>,
    /// Memory for a sync on its way into the backup.
    #[serde(skip_serializing_if = "is_staging_mib")]
    pub staging_mib: usize,
    /// How the two sides find out what differs.
    #[serde(skip_serializing_if = "super::is_default")]
    pub compare: Compare,
    /// After every sync hash all of both memories and give up the backup if they differ. For tests: slow.
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
            audit: false,
        }
    }
}

/// How the two sides find out what differs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", rename_all = "lowercase")]
pub enum Compare {
    /// By the hash of every block: one round trip.
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

/// `[memory]`: what the queues of one VM may take of each host's memory, beside the VM's own and its disks' (docs/budgets.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryTable {
    /// Agreed inputs that a sync has not made superfluous yet; a follower may hold twice as much.
    #[serde(skip_serializing_if = "is_log_mib")]
    pub log_mib: usize,
    /// Frames for the VM that it has not read yet, over all its NICs.
    #[serde(skip_serializing_if = "is_inbound_mib")]
    pub inbound_mib: usize,
    /// Frames of the VM that wait for a sync, for the backup's word or for a majority.
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
