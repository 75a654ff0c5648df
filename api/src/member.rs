//! A host of the cluster, as `dunlin cluster status` shows it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Its name.
    pub host: String,
    /// Where its daemon listens, by cluster.toml.
    pub address: String,
    /// Why it was not reached, if it was not: then the rest is not known.
    pub problem: Option<String>,
    /// Its program's version.
    pub version: String,
    /// The newest version of the protocol that it speaks with other hosts; none from builds of protocol 2, and of hosts that were not reached.
    #[serde(default)]
    pub protocol: Option<u16>,
    /// In how many VMs' groups it is.
    pub vms: usize,
    /// Of which it is primary.
    pub serves: Vec<String>,
    /// What is to be said of its certificates.
    pub words: Vec<String>,
}
