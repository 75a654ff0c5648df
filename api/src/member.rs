//! A host of the cluster, as `dunlin cluster status` shows it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// Its name.
    pub host: String,
    /// Where its daemon listens, according to cluster.toml.
    pub address: String,
    /// Why it was not reached, if it was not. The other fields are then unknown.
    pub problem: Option<String>,
    /// Its program's version.
    pub version: String,
    /// The newest version of the protocol that it speaks with other hosts. None for builds of protocol 2, and for hosts that were not reached.
    #[serde(default)]
    pub protocol: Option<u16>,
    /// The number of VMs in whose groups it is.
    pub vms: usize,
    /// The VMs of which it is the primary.
    pub serves: Vec<String>,
    /// Remarks about its certificates.
    pub words: Vec<String>,
}
