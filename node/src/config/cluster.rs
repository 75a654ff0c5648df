//! cluster.toml: the same file on every host.

use super::{ConfigError, parse, read};
use dunlin_fabric::keys;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

/// The hosts that know each other.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// For people.
    pub name: String,
    /// 32 hexadecimal digits; hosts of another cluster are refused.
    pub id: String,
    /// Where an agreed input is held: in the memory of a majority, or on its disks.
    #[serde(default)]
    pub durability: Durability,
    /// How long a silent leader is believed, shortest; each host waits up to twice as long.
    #[serde(default = "default_election_ms")]
    pub election_ms: u32,
    /// The hosts.
    pub hosts: Vec<ClusterHost>,
}

/// One host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterHost {
    /// Unique.
    pub name: String,
    /// Where its daemon listens for the others.
    pub address: SocketAddr,
}

/// Where an agreed input is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// In the memory of a majority: survives any single host.
    #[default]
    Memory,
    /// On the disks of a majority: survives the loss of power on all of them.
    Disk,
}

fn default_election_ms() -> u32 {
    60
}

impl Cluster {
    /// A new cluster of these hosts, with an id that no other has.
    pub fn begin(name: &str, hosts: &[(String, SocketAddr)], origin: &str) -> Result<Self, ConfigError> {
        let id = keys::random().map_err(|error| ConfigError::senseless(origin, error.to_string()))?;
        let cluster = Self {
            name: name.to_owned(),
            id: format!("{:032x}", u128::from_be_bytes(id)),
            durability: Durability::default(),
            election_ms: default_election_ms(),
            hosts: hosts
                .iter()
                .map(|(name, address)| ClusterHost {
                    name: name.clone(),
                    address: *address,
                })
                .collect(),
        };
        cluster.check(origin)?;
        Ok(cluster)
    }

    /// Reads and checks the file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let origin = path.display().to_string();
        let cluster: Self = parse(&read(path)?, &origin)?;
        cluster.check(&origin)?;
        Ok(cluster)
    }

    pub fn check(&self, origin: &str) -> Result<(), ConfigError> {
        if self.id_bytes().is_none() {
            return Err(ConfigError::senseless(
                origin,
                "id has to be 32 hexadecimal digits; 'dunlin init' makes one",
            ));
        }
        if !(10..=60_000).contains(&self.election_ms) {
            return Err(ConfigError::senseless(
                origin,
                "election_ms has to be from 10 to 60000",
            ));
        }
        let names: BTreeSet<&str> = self.hosts.iter().map(|host| host.name.as_str()).collect();
        let addresses: BTreeSet<SocketAddr> = self.hosts.iter().map(|host| host.address).collect();
        if names.len() < self.hosts.len() || addresses.len() < self.hosts.len() {
            return Err(ConfigError::senseless(
                origin,
                "two hosts have the same name or address",
            ));
        }
        Ok(())
    }

    /// The cluster's id.
    #[must_use]
    pub fn id_bytes(&self) -> Option<[u8; 16]> {
        if self.id.len() != 32 || !self.id.is_ascii() {
            return None;
        }
        u128::from_str_radix(&self.id, 16).ok().map(u128::to_be_bytes)
    }

    /// The host of that name.
    #[must_use]
    pub fn host(&self, name: &str) -> Option<&ClusterHost> {
        self.hosts.iter().find(|host| host.name == name)
    }
}
