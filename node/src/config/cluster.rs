//! cluster.toml, checked: the hosts that know each other.

use super::{ConfigError, parse, read};
use dunlin_api::files::{self, ClusterFile, ClusterHost};
use dunlin_core::consensus::Durability;
use dunlin_fabric::keys;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

/// The hosts that know each other.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// For people.
    pub name: String,
    /// Hosts of another cluster are refused.
    pub id: [u8; 16],
    /// Where an agreed input is held: in the memory of a majority, or on its disks.
    pub durability: Durability,
    /// How long a silent leader is believed, shortest; each host waits up to twice as long.
    pub election_ms: u32,
    /// The hosts.
    pub hosts: Vec<ClusterHost>,
}

impl Cluster {
    /// A new cluster of these hosts, with an id that no other has.
    pub fn begin(name: &str, hosts: &[(String, SocketAddr)], origin: &str) -> Result<Self, ConfigError> {
        let id = keys::random().map_err(|error| ConfigError::senseless(origin, error.to_string()))?;
        let host = |(name, address): &(String, SocketAddr)| ClusterHost {
            name: name.clone(),
            address: *address,
        };
        let hosts = hosts.iter().map(host).collect();
        Self::of(ClusterFile::new(name, &hexadecimal(id), hosts), origin)
    }

    /// Reads and checks the file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let origin = path.display().to_string();
        Self::parse(&read(path)?, &origin)
    }

    /// Checks a file's text; `origin` stands in messages.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ConfigError> {
        Self::of(parse(text, origin)?, origin)
    }

    /// Checks what stands in a file; `origin` stands in messages.
    pub fn of(file: ClusterFile, origin: &str) -> Result<Self, ConfigError> {
        let Some(id) = id_bytes(&file.id) else {
            return Err(ConfigError::senseless(
                origin,
                "id has to be 32 hexadecimal digits; 'dunlin init' makes one",
            ));
        };
        if !(10..=60_000).contains(&file.election_ms) {
            return Err(ConfigError::senseless(
                origin,
                "election_ms has to be from 10 to 60000",
            ));
        }
        let names: BTreeSet<&str> = file.hosts.iter().map(|host| host.name.as_str()).collect();
        let addresses: BTreeSet<SocketAddr> = file.hosts.iter().map(|host| host.address).collect();
        if names.len() < file.hosts.len() || addresses.len() < file.hosts.len() {
            return Err(ConfigError::senseless(
                origin,
                "two hosts have the same name or address",
            ));
        }
        Ok(Self {
            name: file.name,
            id,
            durability: match file.durability {
                files::Durability::Memory => Durability::Memory,
                files::Durability::Disk => Durability::Disk,
            },
            election_ms: file.election_ms,
            hosts: file.hosts,
        })
    }

    /// As it is written for a host.
    #[must_use]
    pub fn file(&self) -> ClusterFile {
        ClusterFile {
            durability: match self.durability {
                Durability::Memory => files::Durability::Memory,
                Durability::Disk => files::Durability::Disk,
            },
            election_ms: self.election_ms,
            ..ClusterFile::new(&self.name, &hexadecimal(self.id), self.hosts.clone())
        }
    }

    /// The host of that name.
    #[must_use]
    pub fn host(&self, name: &str) -> Option<&ClusterHost> {
        self.hosts.iter().find(|host| host.name == name)
    }
}

fn hexadecimal(id: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}

fn id_bytes(id: &str) -> Option<[u8; 16]> {
    if id.len() != 32 || !id.is_ascii() {
        return None;
    }
    u128::from_str_radix(id, 16).ok().map(u128::to_be_bytes)
}
