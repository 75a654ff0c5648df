//! host.toml, checked: what one host needs to know of itself.

use super::error::PageError;
use super::{Cluster, ConfigError, beside, parse, read};
use dunlin_api::files::HostFile;
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
    /// The group whose members may start and stop VMs and switch them over, too.
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

/// A host's file beside its keys, as `dunlin init` and `dunlin cluster` name them.
pub fn file_with_keys(host: &str, control: &Path, state: &Path) -> HostFile {
    HostFile {
        control: control.to_owned(),
        key: Some("key.pem".into()),
        cert: Some("cert.pem".into()),
        ca: Some("ca.pem".into()),
        ..HostFile::new(host, "cluster.toml".into(), state.to_owned())
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
