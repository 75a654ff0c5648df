//! `[program]` of a VM's file: a bare server program in the VM's place.

use super::usual;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use utoipa::ToSchema;

/// `[program]`: a program of which a copy runs on each of two hosts. The same executable has to be on both hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramTable {
    /// The executable's absolute path, and its arguments. It has to stay in the foreground.
    pub command: Vec<String>,
    /// The directory of each host that the copies see as their `/`. `command`, `directory` and `data_at` are paths in it.
    #[serde(default = "root", skip_serializing_if = "is_root")]
    #[schema(value_type = String, default = root)]
    pub root: PathBuf,
    /// The working directory in which it starts.
    #[serde(default = "root", skip_serializing_if = "is_root")]
    #[schema(value_type = String, default = root)]
    pub directory: PathBuf,
    /// Its whole environment. `PATH` has a value even if it is not in here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// The user that it runs as, which has to exist on both hosts. Absent: root of its own namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The program counts as serving when it listens on this TCP port. Absent: on any port beyond loopback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// What the next input waits for.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = Order::default)]
    pub order: Order,
    /// The longest that the next input waits for that, in milliseconds.
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
    /// How many MiB each copy may write to files, which are kept in memory.
    #[serde(default = "scratch_mib", skip_serializing_if = "is_scratch_mib")]
    #[schema(default = scratch_mib)]
    pub scratch_mib: u32,
    /// A file on each host with a file system that outlives the copies. It is made if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub data: Option<PathBuf>,
    /// The directory at which the copies see that file system. It has to exist on both hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub data_at: Option<PathBuf>,
    /// The size of `data` in MiB when it is made. Absent: 256.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_mib: Option<u32>,
    /// How many MiB of its host's memory each copy may take, including the files that it writes. Absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// How many of its host's processors each copy may use, such as 1.5. Absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// How many processes and threads each copy may have. Absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<u32>,
    /// How long the program may take until it serves, in seconds.
    #[serde(default = "start_within_s", skip_serializing_if = "is_start_within_s")]
    #[schema(default = start_within_s)]
    pub start_within_s: u64,
    /// Whether the program is restarted after it has ended on all of its hosts.
    #[serde(default, skip_serializing_if = "super::is_default")]
    #[schema(default = RestartPolicy::default)]
    pub restart: RestartPolicy,
    /// Its network card: exactly one.
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

/// `[[program.nics]]`: a program's network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramNicTable {
    /// MAC address.
    #[schema(example = "52:54:00:12:34:57")]
    pub mac: String,
    /// Bridge on the host that the TAP joins. Absent: the TAP stands alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// Name of the TAP. Absent: the kernel chooses `dunlinN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// The program's IPv4 address and prefix length.
    #[schema(example = "10.0.0.57/24")]
    pub address: String,
    /// The default gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gateway: Option<Ipv4Addr>,
    /// The largest packet in bytes, if the network takes less than the usual 1500.
    #[serde(default = "mtu", skip_serializing_if = "is_mtu")]
    #[schema(default = mtu, example = 1450)]
    pub mtu: u16,
}

/// What a program's next input waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Like `batch`, until the outputs of the copies differ after inputs were unread together. From then on like `read`.
    #[default]
    Auto,
    /// It waits for nothing: only the order of delivery is agreed.
    Delivery,
    /// It waits until every copy has read the last input.
    Read,
    /// Like `read` for the inputs of one connection. Inputs of several connections may be unread together.
    Batch,
    /// It waits until every copy has answered the last input, or rests without an answer.
    Answer,
}

/// Where time or random bytes come from, which no two hosts have alike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The group agrees on them: all copies have the same.
    #[default]
    Agreed,
    /// Each copy has those of its host.
    Own,
}

/// Whether a program is restarted after it has ended on all of its hosts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// It is not restarted: a person has to start it.
    #[default]
    Never,
    /// It is restarted unless its exit code was 0.
    OnFailure,
    /// It is restarted however it has ended.
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
