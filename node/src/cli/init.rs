//! `init`: the files of a new cluster.

use super::issued::Issued;
use crate::config::{Cluster, file_with_keys};
use crate::daemon::BadInput;
use anyhow::{Context, Result};
use dunlin_fabric::keys;
use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;

/// What is wrong with a host on the command line.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Something else.
    #[error("write NAME=ADDRESS:PORT, such as a=10.0.0.1:7700")]
    Form,
    /// Names are names in certificates.
    #[error("'{0}' is no host name")]
    Name(String),
    /// It has no port, or is a name.
    #[error("'{0}' is no ADDRESS:PORT, such as 10.0.0.1:7700 or [fd00::1]:7700")]
    Address(String),
    /// It stands for any.
    #[error("{0} is no address that other hosts can reach: write the host's own, such as 10.0.0.1:7700")]
    Nobodys(SocketAddr),
}

/// A `NAME=ADDRESS:PORT` of the command line.
pub fn host(text: &str) -> Result<(String, SocketAddr), HostError> {
    let (name, address) = text.split_once('=').ok_or(HostError::Form)?;
    if !keys::is_host_name(name) {
        return Err(HostError::Name(name.to_owned()));
    }
    let address: SocketAddr = address
        .parse()
        .map_err(|_| HostError::Address(address.to_owned()))?;
    if address.ip().is_unspecified() || address.port() == 0 {
        return Err(HostError::Nobodys(address));
    }
    Ok((name.to_owned(), address))
}

/// Writes everything, or nothing into a folder that is there already.
pub fn run(
    dir: &Path,
    name: &str,
    hosts: &[(String, SocketAddr)],
    control: &Path,
    state: &Path,
) -> Result<ExitCode> {
    if dir.join("cluster.toml").exists() {
        return Err(BadInput(format!(
            "{}: there is a cluster already; name another folder",
            dir.display()
        ))
        .into());
    }
    let cluster = Cluster::begin(name, hosts, "dunlin init").map_err(|error| BadInput(error.to_string()))?;
    let authority = keys::make_ca(name).map_err(|error| BadInput(error.to_string()))?;
    folder(dir)?;
    let cluster_text = toml::to_string(&cluster.file()).context("writing the cluster's file")?;
    for (host, _) in hosts {
        let own = dir.join(host);
        folder(&own)?;
        let keyed = keys::make_host(&authority, host).map_err(|error| BadInput(error.to_string()))?;
        let file = file_with_keys(host, control, state);
        write(&own.join("cluster.toml"), &cluster_text, 0o644)?;
        write(&own.join("ca.pem"), &authority.keys.cert_pem, 0o644)?;
        Issued::beside_key(dir).note(&keyed.cert_pem)?;
        write(&own.join("cert.pem"), &keyed.cert_pem, 0o644)?;
        write(&own.join("key.pem"), &keyed.key_pem, 0o600)?;
        write(
            &own.join("host.toml"),
            &toml::to_string(&file).context("writing a host's file")?,
            0o644,
        )?;
    }
    write(&dir.join("ca-key.pem"), &authority.keys.key_pem, 0o600)?;
    // Last: its presence says that the folder is complete.
    write(&dir.join("cluster.toml"), &cluster_text, 0o644)?;
    println!(
        "{}: copy each host's folder to its host, as /etc/dunlin for 'systemctl start dunlin', or anywhere for 'dunlin host FOLDER/host.toml'",
        dir.display()
    );
    println!(
        "keep {} safe and off the hosts: it makes keys for new ones",
        dir.join("ca-key.pem").display()
    );
    warn_of_few(hosts.len());
    Ok(ExitCode::SUCCESS)
}

/// Says what cannot be had with so few hosts.
pub fn warn_of_few(hosts: usize) {
    if hosts < 3 {
        println!(
            "NOTE protection takes three hosts, two with a copy and a witness: with fewer a VM runs alone (policy = \"none\")"
        );
    }
}

fn folder(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| BadInput(format!("{}: {error}", path.display())).into())
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)
        .with_context(|| path.display().to_string())?;
    file.write_all(text.as_bytes())
        .with_context(|| path.display().to_string())
}
