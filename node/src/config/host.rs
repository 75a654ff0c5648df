//! host.toml: what one host needs to know of itself.

use super::error::PageError;
use super::{Cluster, ConfigError, beside, parse, read};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// One host's configuration, with its cluster's.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Its name in the cluster.
    pub name: String,
    /// The cluster.
    pub cluster: Cluster,
    /// Where promises, logs and VM configurations are kept.
    pub state: PathBuf,
    /// The control socket.
    pub control: PathBuf,
    /// Where metrics are served, if anywhere.
    pub metrics: Option<SocketAddr>,
    /// Where the page and the API are served.
    pub page: PageAt,
    /// Where the API is served to other machines, if anywhere.
    pub api: Option<SocketAddr>,
    /// Where events are posted, if anywhere. It may hold a secret.
    pub notify_url: Option<String>,
    /// How peers are believed.
    pub trust: Trust,
    /// The group whose members may look, by the control socket.
    pub viewers: Option<String>,
    /// The group whose members may start, stop and move VMs, too.
    pub operators: Option<String>,
    /// The files of VMs that they may start: the folder `vms` beside host.toml.
    pub vm_files: PathBuf,
}

/// Where the page and the API are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageAt {
    /// At [`PageAt::USUAL`], if that is free.
    Usual,
    /// There, or the daemon does not start.
    Address(SocketAddr),
    /// Not at all.
    Nowhere,
}

impl PageAt {
    /// For people on this machine.
    pub const USUAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7702);

    fn of(text: Option<&str>) -> Result<Self, PageError> {
        let Some(text) = text else {
            return Ok(Self::Usual);
        };
        if text == "off" {
            return Ok(Self::Nowhere);
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(Self::Address(address)),
            Ok(address) => Err(PageError::NotOwn(address)),
            Err(_) => Err(PageError::NoAddress(text.to_owned())),
        }
    }
}

/// How peers are believed.
#[derive(Debug, Clone)]
pub enum Trust {
    /// Mutually authenticated TLS.
    Tls {
        /// This host's private key.
        key: PathBuf,
        /// This host's certificate.
        cert: PathBuf,
        /// The cluster's authority.
        ca: PathBuf,
    },
    /// A shared secret; the traffic itself is in the clear.
    Secret(PathBuf),
    /// Nothing: for tests on one machine.
    Insecure,
}

/// The file's shape.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFile {
    /// The host's name in the cluster.
    pub host: String,
    /// The cluster's file.
    pub cluster: PathBuf,
    /// The state folder.
    pub state: PathBuf,
    /// The control socket.
    #[serde(default = "usual_control")]
    pub control: PathBuf,
    /// The metrics address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
    /// Where the page is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<String>,
    /// Where the API is served to other machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
    pub key: Option<PathBuf>,
    /// TLS certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// TLS authority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// A file with the shared secret, instead of TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<PathBuf>,
    /// Neither TLS nor a secret.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

fn usual_control() -> PathBuf {
    super::CONTROL.into()
}

impl HostFile {
    /// A host's file beside its keys, as `dunlin init` and `dunlin cluster` name them.
    pub fn with_keys(host: &str, control: &Path, state: &Path) -> Self {
        Self {
            host: host.to_owned(),
            cluster: "cluster.toml".into(),
            state: state.to_owned(),
            control: control.to_owned(),
            metrics: None,
            page: None,
            api: None,
            notify_url: None,
            viewers: None,
            operators: None,
            key: Some("key.pem".into()),
            cert: Some("cert.pem".into()),
            ca: Some("ca.pem".into()),
            secret: None,
            insecure: false,
        }
    }
}

impl HostConfig {
    /// Reads and checks the file and the cluster's.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let origin = path.display().to_string();
        let file: HostFile = parse(&read(path)?, &origin)?;
        let cluster = Cluster::load(&beside(path, &file.cluster))?;
        if cluster.host(&file.host).is_none() {
            let why = format!("host '{}' is not in {}", file.host, file.cluster.display());
            return Err(ConfigError::senseless(&origin, why));
        }
        let trust = match (&file.key, &file.cert, &file.ca, &file.secret, file.insecure) {
            (Some(key), Some(cert), Some(ca), None, false) => Trust::Tls {
                key: beside(path, key),
                cert: beside(path, cert),
                ca: beside(path, ca),
            },
            (None, None, None, Some(secret), false) => Trust::Secret(beside(path, secret)),
            (None, None, None, None, true) => Trust::Insecure,
            _ => {
                let why = "hosts have to know each other: give key, cert and ca (from 'dunlin init'), or secret, \
                           or insecure = true, and only one of these";
                return Err(ConfigError::senseless(&origin, why));
            }
        };
        if let Some(url) = &file.notify_url {
            crate::notify::check(url).map_err(|why| ConfigError::senseless(&origin, why))?;
        }
        let page = PageAt::of(file.page.as_deref()).map_err(|why| ConfigError::senseless(&origin, why))?;
        Ok(Self {
            page,
            state: beside(path, &file.state),
            control: beside(path, &file.control),
            name: file.host,
            metrics: file.metrics,
            api: file.api,
            notify_url: file.notify_url,
            viewers: file.viewers,
            operators: file.operators,
            vm_files: beside(path, Path::new("vms")),
            cluster,
            trust,
        })
    }
}
