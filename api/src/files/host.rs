//! host.toml: what one host needs to know of itself.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use utoipa::ToSchema;

/// Where a daemon's control socket usually is.
pub const CONTROL: &str = "/run/dunlin/dunlin.sock";

/// host.toml: the settings of one host. It has one of three ways to authenticate other hosts: `key`, `cert` and `ca`; or `secret`; or `insecure`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostFile {
    /// The host's name in the cluster.
    pub host: String,
    /// The path of cluster.toml.
    #[schema(value_type = String)]
    pub cluster: PathBuf,
    /// The folder where the daemon keeps its state.
    #[schema(value_type = String)]
    pub state: PathBuf,
    /// The path of the control socket.
    #[serde(default = "usual_control")]
    #[schema(value_type = String, default = usual_control)]
    pub control: PathBuf,
    /// The address where metrics are served for Prometheus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub metrics: Option<SocketAddr>,
    /// The address where the page and the API are served to this machine alone (a loopback address), or `off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
    /// The address where the page and the API are served to other machines, by TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub api: Option<SocketAddr>,
    /// The URL to which each event is posted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notify_url: Option<String>,
    /// A group of this host's operating system whose members may look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub viewers: Option<String>,
    /// A group of this host's operating system whose members may also start and stop VMs and switch them over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operators: Option<String>,
    /// The path of this host's private key (TLS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub key: Option<PathBuf>,
    /// The path of this host's certificate (TLS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub cert: Option<PathBuf>,
    /// The path of the certificate of the cluster's authority (TLS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub ca: Option<PathBuf>,
    /// The path of a file with a shared secret, instead of TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub secret: Option<PathBuf>,
    /// Neither TLS nor a secret: for tests on one machine.
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
