//! cluster.toml: the same file on every host.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use utoipa::ToSchema;

/// cluster.toml: the hosts that know each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// The cluster's name, for people.
    pub name: String,
    /// 32 hexadecimal digits. Hosts of another cluster are refused.
    #[schema(example = "00112233445566778899aabbccddeeff")]
    pub id: String,
    /// Where an agreed input is held.
    #[serde(default)]
    #[schema(default = Durability::default)]
    pub durability: Durability,
    /// How long, at least, a silent leader is still taken for alive, in milliseconds. Each host waits up to twice as long.
    #[serde(default = "usual_election_ms")]
    #[schema(default = usual_election_ms)]
    pub election_ms: u32,
    /// The cluster's hosts.
    pub hosts: Vec<ClusterHost>,
}

/// One host of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterHost {
    /// The host's name, which is unique.
    pub name: String,
    /// Where its daemon listens for the other hosts.
    #[schema(value_type = String, example = "10.0.0.1:7700")]
    pub address: SocketAddr,
}

/// Where an agreed input is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// In the memory of a majority: survives any single host.
    #[default]
    Memory,
    /// On the disks of a majority: survives the loss of power on all of them.
    Disk,
}

fn usual_election_ms() -> u32 {
    60
}

impl ClusterFile {
    /// One of which nothing but this is said.
    #[must_use]
    pub fn new(name: &str, id: &str, hosts: Vec<ClusterHost>) -> Self {
        Self {
            name: name.to_owned(),
            id: id.to_owned(),
            durability: Durability::default(),
            election_ms: usual_election_ms(),
            hosts,
        }
    }
}
