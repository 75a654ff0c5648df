//! `[program]` of a VM's file: a bare server program in the VM's place.

use super::usual;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use utoipa::ToSchema;

/// `[program]`: a program that is run twice. The same executable is on both hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramTable {
    /// The executable by its whole path, and its arguments.
    pub command: Vec<String>,
    /// The directory of each host that it sees as its root.
    #[serde(default = "root", skip_serializing_if = "is_root")]
    #[schema(value_type = String, default = root)]
    pub root: PathBuf,
    /// Where it starts.
    #[serde(default = "root", skip_serializing_if = "is_root")]
    #[schema(value_type = String, default = root)]
    pub directory: PathBuf,
    /// All of its environment; `PATH` has a value without this, too.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// The user that it runs as; absent: root of its own namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The TCP port at which it serves; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// What the next input waits for.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = Order::default)]
    pub order: Order,
    /// How long it waits for that, in milliseconds.
    #[serde(default = "patience_ms", skip_serializing_if = "is_patience_ms")]
    #[schema(default = patience_ms)]
    pub patience_ms: u64,
    /// Where its time comes from.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = Source::default)]
    pub clock: Source,
    /// Where its random bytes come from.
    #[serde(default = "own", skip_serializing_if = "is_own")]
    #[schema(default = own)]
    pub chance: Source,
    /// What each copy may write to files, in memory.
    #[serde(default = "scratch_mib", skip_serializing_if = "is_scratch_mib")]
    #[schema(default = scratch_mib)]
    pub scratch_mib: u32,
    /// A file on each host with a file system that outlives the copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub data: Option<PathBuf>,
    /// The directory that the copies see it at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub data_at: Option<PathBuf>,
    /// How large it is when it is made; absent: 256.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_mib: Option<u32>,
    /// What each copy may take of its host's memory; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// How many of its host's processors each copy may use, such as 1.5; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Processes and threads of each copy; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<u32>,
    /// How long it may take until it serves, in seconds.
    #[serde(default = "start_within_s", skip_serializing_if = "is_start_within_s")]
    #[schema(default = start_within_s)]
    pub start_within_s: u64,
    /// Whether it is begun again when it has ended on all of its hosts.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = RestartPolicy::default)]
    pub restart: RestartPolicy,
    /// Its card: one.
    pub nics: Vec<ProgramNicTable>,
}

impl ProgramNicTable {
    /// One of which nothing but this is said.
    #[must_use]
    pub fn new(mac: &str, address: &str) -> Self {
        Self {
            mac: mac.to_owned(),
            bridge: None,
            tap: None,
            address: address.to_owned(),
            gateway: None,
            mtu: mtu(),
        }
    }
}

impl ProgramTable {
    /// One of which nothing but this is said.
    #[must_use]
    pub fn new(command: Vec<String>, nic: ProgramNicTable) -> Self {
        Self {
            command,
            root: root(),
            directory: root(),
            environment: BTreeMap::new(),
            user: None,
            port: None,
            order: Order::default(),
            patience_ms: patience_ms(),
            clock: Source::default(),
            chance: own(),
            scratch_mib: scratch_mib(),
            data: None,
            data_at: None,
            data_mib: None,
            memory_mib: None,
            cpus: None,
            tasks: None,
            start_within_s: start_within_s(),
            restart: RestartPolicy::default(),
            nics: vec![nic],
        }
    }
}

usual! {
    root, is_root: PathBuf = "/".into();
    patience_ms, is_patience_ms: u64 = 500;
    own, is_own: Source = Source::Own;
    scratch_mib, is_scratch_mib: u32 = 256;
    start_within_s, is_start_within_s: u64 = 30;
    mtu, is_mtu: u16 = 1500;
}

/// `[[program.nics]]`: a program's card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramNicTable {
    /// MAC address.
    #[schema(example = "52:54:00:12:34:57")]
    pub mac: String,
    /// Bridge on the host that the TAP joins; absent: the TAP stands alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// Name of the TAP; absent: the kernel chooses `dunlinN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// The program's IPv4 address, and its network's bits.
    #[schema(example = "10.0.0.57/24")]
    pub address: String,
    /// The way to other networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gateway: Option<Ipv4Addr>,
    /// The most bytes of a packet, where the network takes fewer than the usual 1500.
    #[serde(default = "mtu", skip_serializing_if = "is_mtu")]
    #[schema(default = mtu, example = 1450)]
    pub mtu: u16,
}

/// What a program's next input waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// As `batch`, until a second copy has said something else while inputs were unread together; as `read` from then on.
    #[default]
    Auto,
    /// For nothing: the order of delivery alone.
    Delivery,
    /// Until every copy has read the last one.
    Read,
    /// The same for a connection's next one; inputs of several connections may be unread together.
    Batch,
    /// Until every copy has answered it.
    Answer,
}

/// Where what no two hosts have alike comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The group has agreed on it: all copies have the same.
    #[default]
    Agreed,
    /// Each copy has its host's.
    Own,
}

/// Whether a program that has ended on all of its hosts is begun again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// A person begins it.
    #[default]
    Never,
    /// Unless its exit code was 0.
    OnFailure,
    /// However it has ended.
    Always,
}

impl RestartPolicy {
    /// As in its file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::OnFailure => "on-failure",
            Self::Always => "always",
        }
    }
}
