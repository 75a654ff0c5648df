//! `cluster`: a cluster is begun on one host, and the others come in with a token each.
//!
//! **Decides**: what lies in a host's folder, and who may come in. **Flow**: [`init`] writes this host's files and opens the
//! [`door`](super::door) for the others -> on each of them [`join`] makes its key, shows its token, sends a request and is sent its certificate, the
//! authority's and cluster.toml -> the daemons are started. [`token`] opens the door again for one host.
//! **Invariants**: 1. a private key is made on its host and never leaves it. 2. the authority's key is read by these commands alone, and no daemon.
//! 3. a folder gets all files or none, and host.toml, without which a daemon does not start, last. 4. what is there is never written over.
//! **Not here**: new keys for hosts that are in (`keys`), the way by hand, for sites where hosts do not reach each other yet (`init`), TLS (`dunlin_fabric::enroll`).

use super::door;
use super::init::{host as named, warn_of_few};
use super::issued::Issued;
use super::person;
use crate::config::{self, Cluster, file_with_keys};
use crate::control::http::Conversation;
use crate::daemon::BadInput;
use crate::events::{now_ms, utc};
use anyhow::{Context, Result, bail};
use dunlin_api::files::{CONTROL, ClusterFile, ClusterHost, HostFile};
use dunlin_api::{Answer, Request};
use dunlin_fabric::enroll::Token;
use dunlin_fabric::keys::{self, Authority, KeyedCert};
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Where the package's service looks.
const FOLDER: &str = "/etc/dunlin";
/// How long a token is good.
const MINUTES: u64 = 10;
/// The authority's key, on the host where the cluster was begun.
pub const AUTHORITY: &str = "ca-key.pem";

/// What there is to say of a cluster.
#[derive(clap::Subcommand)]
pub enum ClusterCommand {
    /// Begins a cluster on this host, prints a token for each other host, and waits ten minutes for them to join
    #[command(
        after_help = "Example:\n  dunlin cluster init mine --host a=10.0.0.1:7700 --host b=10.0.0.2:7700 --host c=10.0.0.3:7700\n\n\
                            The first host that you name is this one. The others join at its next port (7701)."
    )]
    Init {
        /// The cluster's name
        name: String,
        /// A host, and the address where its daemon listens; this host first, then the others
        #[arg(long = "host", value_name = "NAME=ADDRESS:PORT", required = true, value_parser = named)]
        hosts: Vec<(String, SocketAddr)>,
        /// Do not wait for the others; 'dunlin cluster token' lets each of them in later
        #[arg(long)]
        no_wait: bool,
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        own: Own,
    },
    /// Prints a token for one host of the cluster, and waits ten minutes for it to join. Run this on the host where the cluster was begun
    Token {
        /// The host's name
        host: String,
        #[command(flatten)]
        place: Place,
    },
    /// Makes new keys for all hosts, or for the named ones, while they run. The old keys are refused from then on. Run this on the
    /// host where the cluster was begun
    #[command(
        after_help = "No VM stops, and no link between hosts ends. Exit codes: 0 all hosts have new keys; 1 a host was not reached, and keeps its \
                            keys: run this again for that host."
    )]
    Rotate {
        /// Only these hosts
        #[arg(value_name = "HOST", conflicts_with = "authority")]
        hosts: Vec<String>,
        /// Make a new authority, too. Every host has to be reached. If one is not, the hosts go on with both authorities until you run this again
        #[arg(long)]
        authority: bool,
        /// With --authority: leave out these hosts, which are no longer in the cluster
        #[arg(long, value_name = "HOST", requires = "authority", value_delimiter = ',')]
        without: Vec<String>,
        #[command(flatten)]
        place: Place,
    },
    /// Refuses every key that a machine of this name ever had, from now on and on all hosts, and ends its links. Run this on the host
    /// where the cluster was begun
    #[command(after_help = "Exit codes: 0 the keys are refused; 2 nothing was changed.")]
    Revoke {
        /// The host's name
        #[arg(required_unless_present = "person")]
        host: Option<String>,
        /// Instead of a host's keys, refuse every certificate that a person of this name ever had ('dunlin cluster person')
        #[arg(long, value_name = "NAME", conflicts_with = "host")]
        person: Option<String>,
        #[command(flatten)]
        place: Place,
    },
    /// Makes a key and a certificate, with which a person uses the API from another machine. Run this on the host where the cluster was begun
    #[command(
        after_help = "Example:\n  dunlin cluster person ann --role viewer --out ann.pem\n  curl --cert ann.pem --cacert ann.pem --resolve a:7703:10.0.0.1 https://a:7703/api/v1/overview"
    )]
    Person {
        #[command(flatten)]
        whom: person::For,
        #[command(flatten)]
        place: Place,
    },
    /// Makes this host a member of the cluster
    Join {
        /// The token that 'dunlin cluster init' or 'dunlin cluster token' has printed; '-' reads it from standard input
        token: String,
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        own: Own,
    },
    /// Asks every host of the cluster for its state
    #[command(after_help = "Exit codes: 0 every host answers; 1 one does not.")]
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Where the host's files are.
#[derive(clap::Args)]
pub struct Place {
    /// The folder with this host's configuration and keys
    #[arg(long, default_value = FOLDER, value_name = "FOLDER")]
    dir: PathBuf,
}

/// What a host has for itself.
#[derive(clap::Args)]
pub struct Own {
    /// The control socket of this host's daemon
    #[arg(long, default_value = CONTROL, value_name = "PATH")]
    control: PathBuf,
    /// The folder where this host's daemon keeps its state
    #[arg(long, default_value = "/var/lib/dunlin", value_name = "PATH")]
    state: PathBuf,
}

/// Does it.
pub fn run(socket: &Path, command: &ClusterCommand) -> Result<ExitCode> {
    match command {
        ClusterCommand::Init {
            name,
            hosts,
            no_wait,
            place,
            own,
        } => init(name, hosts, *no_wait, &place.dir, own),
        ClusterCommand::Token { host, place } => token(socket, host, &place.dir),
        ClusterCommand::Rotate {
            hosts: _,
            authority: true,
            without,
            place,
        } => super::keys::rotate_authority(socket, &place.dir, without),
        ClusterCommand::Rotate { hosts, place, .. } => super::keys::rotate(socket, &place.dir, hosts),
        ClusterCommand::Revoke { host, person, place } => match (host, person) {
            (_, Some(person)) => super::keys::revoke_person(socket, &place.dir, person),
            (Some(host), None) => super::keys::revoke(socket, &place.dir, host),
            (None, None) => Err(bad("say whose keys: a host's name, or --person NAME")),
        },
        ClusterCommand::Person { whom, place } => person::make(&place.dir, whom),
        ClusterCommand::Join { token, place, own } => join(token, &place.dir, own),
        ClusterCommand::Status { json } => status(socket, *json),
    }
}

fn bad(why: impl Into<String>) -> anyhow::Error {
    BadInput(why.into()).into()
}

fn init(
    name: &str,
    hosts: &[(String, SocketAddr)],
    no_wait: bool,
    dir: &Path,
    own: &Own,
) -> Result<ExitCode> {
    is_free(dir)?;
    let cluster =
        Cluster::begin(name, hosts, "dunlin cluster init").map_err(|error| bad(error.to_string()))?;
    let this = &cluster.hosts[0];
    has_address(this.address).map_err(|why| bad(format!("the first host named is this one: {why}")))?;
    // Before anything is written: another one may have this port.
    let listener = (!no_wait).then(|| listen(this.address)).transpose()?;
    let authority = keys::make_ca(name).map_err(|error| bad(error.to_string()))?;
    let keyed = keys::make_host(&authority, &this.name).map_err(|error| bad(error.to_string()))?;
    let more = [(AUTHORITY, authority.keys.key_pem.as_str())];
    write_all(dir, &cluster, this, &keyed, &authority.keys.cert_pem, &more, own)?;
    Issued::beside_key(dir).note(&keyed.cert_pem)?;
    let file = dir.join("host.toml");
    println!("host {} has begun cluster {name}: {}", this.name, file.display());
    println!(
        "keep {} safe: it makes keys for hosts",
        dir.join(AUTHORITY).display()
    );
    warn_of_few(hosts.len());
    match listener {
        None => Ok(ExitCode::SUCCESS),
        Some(listener) => {
            let door = (listener, Issued::beside_key(dir));
            wait_for(&cluster, this, &cluster.hosts[1..], &authority, &keyed, door)
        }
    }
}

/// What the host with the authority's key has in its folder.
pub struct First {
    /// The cluster.
    pub cluster: Cluster,
    /// This host's name.
    pub this: String,
    /// The authority.
    pub authority: Authority,
    keyed: KeyedCert,
}

impl First {
    /// Reads it.
    pub fn load(dir: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read_to_string(&path).map_err(|error| bad(format!("{}: {error}", path.display())))
        };
        let key_pem = read(AUTHORITY).map_err(|error| {
            bad(format!(
                "{error}: say this on the host where the cluster was begun"
            ))
        })?;
        let cluster = Cluster::load(&dir.join("cluster.toml")).map_err(|error| bad(error.to_string()))?;
        let origin = dir.join("host.toml").display().to_string();
        let own: HostFile =
            config::parse(&read("host.toml")?, &origin).map_err(|error| bad(error.to_string()))?;
        let cert_pem = super::keys::authority_of(dir, &key_pem, &read("ca.pem")?).ok_or_else(|| {
            let (key, ca) = (dir.join(AUTHORITY), dir.join("ca.pem"));
            bad(format!(
                "{}: it is the key of no authority in {}",
                key.display(),
                ca.display()
            ))
        })?;
        let this = Self {
            authority: Authority {
                cluster: cluster.name.clone(),
                keys: KeyedCert { cert_pem, key_pem },
            },
            keyed: KeyedCert {
                cert_pem: read("cert.pem")?,
                key_pem: read("key.pem")?,
            },
            this: own.host,
            cluster,
        };
        this.host(&this.this)?;
        Ok(this)
    }

    /// A host of the cluster.
    pub fn host(&self, name: &str) -> Result<&ClusterHost> {
        let found = self.cluster.host(name);
        found.ok_or_else(|| bad(format!("host '{name}' is not in this host's cluster.toml")))
    }
}

fn token(socket: &Path, host: &str, dir: &Path) -> Result<ExitCode> {
    let first = First::load(dir)?;
    let (this, wanted) = (first.host(&first.this)?, first.host(host)?);
    if this.name == wanted.name {
        return Err(bad(format!("host '{host}' is this one: it is in the cluster")));
    }
    if !keys::is_signed_by(&first.keyed.cert_pem, &first.authority.keys.cert_pem) {
        return Err(bad(
            "one authority is following another just now: 'dunlin cluster rotate --authority' first",
        ));
    }
    let code = wait_for(
        &first.cluster,
        this,
        std::slice::from_ref(wanted),
        &first.authority,
        &first.keyed,
        (listen(this.address)?, Issued::beside_key(dir)),
    )?;
    if let Err(error) = super::keys::replaced(socket, dir, &first, host) {
        eprintln!(
            "dunlin: another machine's keys of that name, if there are any, still count ({error:#}): 'dunlin cluster rotate {host}' when this host's daemon runs"
        );
    }
    Ok(code)
}

/// The port after the daemon's, which may run already.
fn listen(address: SocketAddr) -> Result<TcpListener> {
    let port = address
        .port()
        .checked_add(1)
        .ok_or_else(|| bad("the host's port has none after it"))?;
    let door = SocketAddr::new(address.ip(), port);
    TcpListener::bind(door).map_err(|error| bad(format!("{door}, where hosts come in: {error}")))
}

/// Prints a token for each of them, and lets them in.
fn wait_for(
    cluster: &Cluster,
    this: &ClusterHost,
    others: &[ClusterHost],
    authority: &Authority,
    keyed: &KeyedCert,
    (listener, issued): (TcpListener, Issued),
) -> Result<ExitCode> {
    let until_s = now_ms() / 1000 + MINUTES * 60;
    let door = listener.local_addr().context("where hosts come in")?;
    let mut tokens = Vec::new();
    for host in others {
        let token = Token::draw(
            (host.name.as_str(), host.address),
            (this.name.as_str(), door),
            until_s,
            &authority.keys.cert_pem,
        )
        .map_err(|error| bad(error.to_string()))?;
        println!(
            "on host {}, until {}:\n  dunlin cluster join {}",
            host.name,
            utc(until_s * 1000),
            token.encode()
        );
        tokens.push(token);
    }
    std::io::stdout().flush().context("saying the tokens")?;
    let text = toml::to_string(&cluster.file()).context("writing the cluster's file")?;
    let left = door::let_in((listener, issued), tokens, authority, keyed, &text, &mut |host| {
        println!("host {host} has joined")
    })?;
    if left.is_empty() {
        println!("all have joined: start the daemons ('systemctl start dunlin', or 'dunlin host HOST.TOML')");
        return Ok(ExitCode::SUCCESS);
    }
    bail!(
        "{} did not join within {MINUTES} minutes; 'dunlin cluster token HOST' makes a new token",
        left.join(", ")
    )
}

fn join(word: &str, dir: &Path, own: &Own) -> Result<ExitCode> {
    let word = match word {
        "-" => std::io::read_to_string(std::io::Read::take(std::io::stdin(), 4096))
            .context("reading the token")?,
        word => word.to_owned(),
    };
    let token = Token::decode(&word).map_err(|error| bad(error.to_string()))?;
    is_free(dir)?;
    has_address(token.address).map_err(|why| bad(format!("this token is for host {}: {why}", token.host)))?;
    if now_ms() / 1000 > token.until_s {
        return Err(bad(format!(
            "this token ran out at {}: 'dunlin cluster token {}' on host {} makes a new one",
            utc(token.until_s * 1000),
            token.host,
            token.issuer
        )));
    }
    let (key_pem, request) = keys::request_host(&token.host).map_err(|error| bad(error.to_string()))?;
    let welcome = door::come_in(&token, &request)?;
    let file: ClusterFile = toml::from_str(&welcome.cluster).context("the cluster's file")?;
    let cluster = Cluster::of(file, "the cluster's file").map_err(|error| bad(error.to_string()))?;
    let this = cluster
        .host(&token.host)
        .context("the cluster's file does not name this host")?;
    let keyed = KeyedCert {
        cert_pem: welcome.cert,
        key_pem,
    };
    write_all(dir, &cluster, this, &keyed, &welcome.ca, &[], own)?;
    println!(
        "host {} has joined cluster {}: 'systemctl start dunlin', or 'dunlin host {}'",
        this.name,
        cluster.name,
        dir.join("host.toml").display()
    );
    Ok(ExitCode::SUCCESS)
}

/// No cluster's files are there.
fn is_free(dir: &Path) -> Result<()> {
    for name in ["cluster.toml", "host.toml", "key.pem", AUTHORITY] {
        let path = dir.join(name);
        if path.exists() {
            return Err(bad(format!(
                "{}: this host is in a cluster already; --dir names another folder",
                path.display()
            )));
        }
    }
    Ok(())
}

/// It is another machine's.
#[derive(Debug, thiserror::Error)]
#[error("this machine has not the address {address} ({error})")]
struct NoSuchAddress {
    address: IpAddr,
    #[source]
    error: io::Error,
}

/// A token is for one machine: the one that has the address.
fn has_address(address: SocketAddr) -> Result<(), NoSuchAddress> {
    let bound = TcpListener::bind(SocketAddr::new(address.ip(), 0));
    let address = address.ip();
    bound.map(drop).map_err(|error| NoSuchAddress { address, error })
}

/// Everything, or nothing.
fn write_all(
    dir: &Path,
    cluster: &Cluster,
    this: &ClusterHost,
    keyed: &KeyedCert,
    ca_pem: &str,
    more: &[(&str, &str)],
    own: &Own,
) -> Result<()> {
    let host = file_with_keys(&this.name, &own.control, &own.state);
    let cluster = toml::to_string(&cluster.file()).context("writing the cluster's file")?;
    let host = toml::to_string(&host).context("writing the host's file")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| bad(format!("{}: {error}", dir.display())))?;
    let mut files: Vec<(&str, &str, u32)> = more.iter().map(|(name, text)| (*name, *text, 0o600)).collect();
    files.extend([
        ("key.pem", keyed.key_pem.as_str(), 0o600),
        ("cert.pem", keyed.cert_pem.as_str(), 0o644),
        ("ca.pem", ca_pem, 0o644),
        ("cluster.toml", cluster.as_str(), 0o644),
        ("host.toml", host.as_str(), 0o600),
    ]);
    for (number, (name, text, mode)) in files.iter().enumerate() {
        if let Err(error) = write(&dir.join(name), text, *mode) {
            for (name, ..) in &files[..number] {
                // Best effort: the disk may be full.
                let _ = std::fs::remove_file(dir.join(name));
            }
            return Err(bad(format!("{}: {error}", dir.join(name).display())));
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    // Of an earlier cluster only certificates may be left.
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(path)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written
}

fn status(socket: &Path, json: bool) -> Result<ExitCode> {
    let mut all = Vec::new();
    let last = Conversation::connect(socket)?.talk(&Request::Cluster, |answer| {
        if let Answer::Member(member) = answer {
            all.push(*member.clone());
        }
    })?;
    if let Answer::Failed { why, .. } = last {
        bail!("{why}");
    }
    let mut reached = all.iter().filter(|member| member.problem.is_none());
    let first = reached.next().map(|member| member.protocol);
    // Worth a word only while they differ: an upgrade is under way.
    let differ = reached.any(|member| Some(member.protocol) != first);
    for member in &all {
        if json {
            println!("{}", serde_json::to_string(member)?);
            continue;
        }
        let words = match &member.problem {
            Some(why) => format!("NOT REACHED: {why}"),
            None => {
                let serves = member.serves.join(", ");
                let serves = if serves.is_empty() {
                    "nothing".to_owned()
                } else {
                    serves
                };
                let protocol = match member.protocol {
                    _ if !differ => String::new(),
                    Some(protocol) => format!(" (protocol {protocol})"),
                    None => " (an older protocol)".to_owned(),
                };
                let version = &member.version;
                format!("dunlin {version}{protocol}, {} VMs, serves {serves}", member.vms)
            }
        };
        println!("{:<12} {:<22} {words}", member.host, member.address.to_string());
        for word in &member.words {
            println!("{:<12} NOTE {word}", "");
        }
    }
    let reached = all.iter().all(|member| member.problem.is_none());
    Ok(if reached {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
