//! host.toml: what one host needs to know of itself.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use utoipa::ToSchema;

/// Where a daemon's control socket usually is.
pub const CONTROL: &str = "/run/dunlin/dunlin.sock";

/// host.toml: what one host needs to know of itself. How hosts know each other is said in one of three ways: `key`, `cert` and `ca`; or `secret`; or `insecure`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostFile {
    /// The host's name in the cluster.
    pub host: String,
    /// The cluster's file.
    #[schema(value_type = String)]
    pub cluster: PathBuf,
    /// The state folder.
    #[schema(value_type = String)]
    pub state: PathBuf,
    /// The control socket.
    #[serde(default = "usual_control")]
    #[schema(value_type = String, default = usual_control)]
    pub control: PathBuf,
    /// The metrics address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub metrics: Option<SocketAddr>,
    /// Where the page is served: an address of this machine for itself alone, or `off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
    /// Where the API is served to other machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub api: Option<SocketAddr>,
    /// Where events are posted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notify_url: Option<String>,
    /// A group that may look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub viewers: Option<String>,
    /// A group that may start, stop and move VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operators: Option<String>,
    /// TLS key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub key: Option<PathBuf>,
    /// TLS certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub cert: Option<PathBuf>,
    /// TLS authority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub ca: Option<PathBuf>,
    /// A file with the shared secret, instead of TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub secret: Option<PathBuf>,
    /// Neither TLS nor a secret.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

fn usual_control() -> PathBuf {
    CONTROL.into()
}

impl HostFile {
    /// One of which nothing but this is said.
    #[must_use]
    pub fn new(host: &str, cluster: PathBuf, state: PathBuf) -> Self {
        Self {
            host: host.to_owned(),
            cluster,
            state,
            control: usual_control(),
            metrics: None,
            page: None,
            api: None,
            notify_url: None,
            viewers: None,
            operators: None,
            key: None,
            cert: None,
            ca: None,
            secret: None,
            insecure: false,
        }
    }
}
