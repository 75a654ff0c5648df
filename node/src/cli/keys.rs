//! `cluster rotate` and `cluster revoke`: keys are exchanged, and machines refused, while every host's daemon runs.
//!
//! **Decides**: the order of the steps, and what is missing if a host is not reached. **Flow**: said on the host with the authority's key -> this
//! host's daemon passes each [`KeysStep`] on to the host that it is for -> that host makes its key, or checks what it is to believe.
//! **Invariants**: 1. no private key leaves its host, and no daemon reads the authority's. 2. whoever ends this half-way, at any moment, says it
//! again, and it goes on: no step is done before all that it stands on is done on every host. 3. two hosts that are reached believe each other all
//! the time. **Source**: RFC 4210, section 4.4, for the order in which one authority follows another.
//! **Not here**: what a host refuses (`daemon::identity`), the record of what was signed (`issued`).

use super::cluster::{AUTHORITY, First};
use super::issued::Issued;
use super::teller::Teller;
use crate::control::http::Conversation;
use crate::daemon::{BadInput, identity::replace};
use crate::events::now_ms;
use anyhow::{Context, Result, bail};
use dunlin_api::files::ClusterHost;
use dunlin_api::keys::{HostKeys, KeysStep};
use dunlin_api::{Answer, Request};
use dunlin_fabric::keys::person::{PersonRole, full_name};
use dunlin_fabric::keys::revocation::{self, Reason, RevocationList};
use dunlin_fabric::keys::{self, Authority, KeyedCert, succession};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The authority that is to follow: its key and certificate, the word of the old one for it, and the old one's certificate.
const NEXT: &str = "ca-next.pem";

fn bad(why: impl Into<String>) -> anyhow::Error {
    BadInput(why.into()).into()
}

/// Why a host's keys are not as they are to be.
#[derive(Debug, thiserror::Error)]
enum HostError {
    /// Its own words, or those of this host's daemon, which does not reach it.
    #[error("{0}")]
    Said(String),
    /// It began no exchange.
    #[error("it did not ask for a certificate (another version?)")]
    NoRequest,
}

fn refused(why: HostError) -> anyhow::Error {
    bad(why.to_string())
}

/// Asks a host, by way of this host's daemon.
struct Hosts<'a> {
    socket: &'a Path,
    first: &'a First,
    issued: Issued,
}

impl Hosts<'_> {
    /// The inner error is the host's own, or that it is not reached.
    fn ask(&self, host: &str, ask: KeysStep) -> Result<Result<HostKeys, HostError>> {
        let request = Request::Keys {
            host: host.to_owned(),
            ask,
        };
        match Conversation::connect(self.socket)?.talk(&request, |_| {})? {
            Answer::Keys(shown) => Ok(Ok(*shown)),
            Answer::Failed { why, .. } => Ok(Err(HostError::Said(why))),
            _ => bail!("the daemon did not say what became of host {host}'s keys"),
        }
    }

    /// A new key for a host, made there, and its certificate; returns the latter.
    fn renew(&self, host: &str, authority: &Authority) -> Result<Result<String, HostError>> {
        let begun = match self.ask(host, KeysStep::Begin)? {
            Ok(begun) => begun,
            Err(why) => return Ok(Err(why)),
        };
        // Of a cluster that is older than the record.
        self.issued.note(&begun.cert)?;
        let Some(request) = begun.request else {
            return Ok(Err(HostError::NoRequest));
        };
        let cert = keys::sign_host(authority, host, &request)?;
        self.issued.note(&cert)?;
        Ok(self
            .ask(host, KeysStep::Finish { cert: cert.clone() })?
            .map(|_| cert))
    }

    /// Has certificates refused on every host but `without`, this one first. Says which hosts will hear of it later.
    fn refuse(&self, authority: &Authority, revoked: &[(String, Reason)], without: &str) -> Result<()> {
        let this = &self.first.this;
        let shown = self.ask(this, KeysStep::Show)?.map_err(refused)?;
        let known = revocation::verified(&shown.crl, &authority.keys.cert_pem);
        let before = known.into_iter().next().map(|one| one.list).unwrap_or_default();
        let (mut list, now_s) = (before.clone(), now_ms() / 1000);
        for (cert, reason) in revoked {
            list.add(cert, *reason, now_s)?;
        }
        if list == before {
            return Ok(());
        }
        list.number += 1;
        let crl = list.sign(authority, now_s)?;
        let step = || KeysStep::Revoke { crl: crl.clone() };
        let shown = self.ask(this, step())?.map_err(refused)?;
        if !in_force(&shown.crl, authority, &list) {
            bail!("another list was made at the same time: say it again");
        }
        for host in self.others().filter(|host| host.name != without) {
            if let Err(why) = self.ask(&host.name, step())? {
                eprintln!(
                    "dunlin: {why}; it will hear of what counts no more from another host when it is back"
                );
            }
        }
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = &ClusterHost> {
        let hosts = self.first.cluster.hosts.iter();
        hosts.filter(|host| host.name != self.first.this)
    }
}

fn in_force(crl: &str, authority: &Authority, list: &RevocationList) -> bool {
    let lists = revocation::verified(crl, &authority.keys.cert_pem);
    lists.iter().any(|one| one.list == *list)
}

/// New keys for these hosts, or for all.
pub fn rotate(socket: &Path, dir: &Path, names: &[String]) -> Result<ExitCode> {
    let first = First::load(dir)?;
    if dir.join(NEXT).exists() {
        return Err(bad(
            "one authority is following another just now: 'dunlin cluster rotate --authority' goes on with that, and makes new keys for all hosts",
        ));
    }
    for name in names {
        first.host(name)?;
    }
    let hosts = Hosts {
        socket,
        first: &first,
        issued: Issued::beside_key(dir),
    };
    let asked = |name: &String| names.is_empty() || names.contains(name);
    let all: Vec<&String> = first
        .cluster
        .hosts
        .iter()
        .map(|host| &host.name)
        .filter(|name| asked(name))
        .collect();
    let (mut superseded, mut missed) = (Vec::new(), 0);
    let teller = Teller::new()?;
    teller.hosts("new keys", all.len());
    for name in all {
        match hosts.renew(name, &first.authority)? {
            Ok(cert) => {
                teller.line(&format!("host {name} has new keys"));
                let all = hosts.issued.of(name, &first.authority.keys.cert_pem)?.into_iter();
                superseded.extend(all.filter(|one| one.trim() != cert.trim()));
            }
            Err(why) => {
                teller.wrong(&format!("host {name} keeps its keys: {why}"));
                missed += 1;
            }
        }
        teller.host_done();
    }
    drop(teller);
    let superseded: Vec<_> = superseded
        .into_iter()
        .map(|one| (one, Reason::Superseded))
        .collect();
    hosts.refuse(&first.authority, &superseded, "")?;
    Ok(match missed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Every certificate that a host ever had counts no more.
pub fn revoke(socket: &Path, dir: &Path, host: &str) -> Result<ExitCode> {
    let first = First::load(dir)?;
    if first.host(host)?.name == first.this {
        return Err(bad(format!(
            "host '{host}' is this one, which has the authority's key: nobody would be left to let it in again"
        )));
    }
    let hosts = Hosts {
        socket,
        first: &first,
        issued: Issued::beside_key(dir),
    };
    // One that still answers may have a certificate that is not on record. That it does not is usual here.
    if let Ok(shown) = hosts.ask(host, KeysStep::Show)? {
        hosts.issued.note(&shown.cert)?;
    }
    let next = Next::load(dir, &first)?;
    let all = hosts.issued.ever_of(host)?.into_iter();
    let revoked: Vec<_> = all.map(|one| (one, Reason::Removed)).collect();
    let count = revoked.len();
    if count == 0 {
        return Err(bad(format!(
            "no certificate of host '{host}' is on record here: 'dunlin cluster rotate --authority --without {host}' makes all that it has worthless"
        )));
    }
    for authority in [Some(&first.authority), next.as_ref().map(|next| &next.authority)] {
        let Some(authority) = authority else { continue };
        hosts.refuse(authority, &revoked, host)?;
    }
    println!(
        "{count} certificates of host {host} count no more, and its links have ended; 'dunlin cluster token {host}' lets a machine in again under that name"
    );
    Ok(ExitCode::SUCCESS)
}

/// Every certificate that a person ever had counts no more.
pub fn revoke_person(socket: &Path, dir: &Path, name: &str) -> Result<ExitCode> {
    let first = First::load(dir)?;
    let hosts = Hosts {
        socket,
        first: &first,
        issued: Issued::beside_key(dir),
    };
    let mut revoked = Vec::new();
    for role in PersonRole::ALL {
        revoked.extend(hosts.issued.ever_of(&full_name(name, role))?);
    }
    let revoked: Vec<_> = revoked.into_iter().map(|one| (one, Reason::Removed)).collect();
    if revoked.is_empty() {
        return Err(bad(format!(
            "no certificate of a person '{name}' is on record here"
        )));
    }
    let next = Next::load(dir, &first)?;
    for authority in [Some(&first.authority), next.as_ref().map(|next| &next.authority)] {
        let Some(authority) = authority else { continue };
        hosts.refuse(authority, &revoked, "")?;
    }
    println!(
        "{} certificates of {name} count no more, and their connections end",
        revoked.len()
    );
    Ok(ExitCode::SUCCESS)
}

/// A machine has come in under that name: what another one of that name had counts no more.
pub fn replaced(socket: &Path, dir: &Path, first: &First, host: &str) -> Result<()> {
    let hosts = Hosts {
        socket,
        first,
        issued: Issued::beside_key(dir),
    };
    let mut earlier = hosts.issued.ever_of(host)?;
    earlier.pop();
    let earlier: Vec<_> = earlier.into_iter().map(|one| (one, Reason::Removed)).collect();
    if earlier.is_empty() {
        return Ok(());
    }
    hosts.refuse(&first.authority, &earlier, host)
}

/// The authority that is to follow.
struct Next {
    path: PathBuf,
    authority: Authority,
    /// The old one's word for it.
    proof: String,
}

impl Next {
    fn load(dir: &Path, first: &First) -> Result<Option<Self>> {
        let path = dir.join(NEXT);
        if !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let mut certs = keys::bundle(&text).into_iter();
        let (Some(cert_pem), Some(proof)) = (certs.next(), certs.next()) else {
            return Err(bad(format!("{}: it is not whole", path.display())));
        };
        Ok(Some(Self {
            path,
            authority: Authority {
                cluster: first.cluster.name.clone(),
                keys: KeyedCert {
                    cert_pem,
                    key_pem: text,
                },
            },
            proof,
        }))
    }

    fn make(dir: &Path, first: &First) -> Result<Self> {
        let authority = keys::make_ca(&first.cluster.name)?;
        let proof = succession::name_successor(&first.authority, &authority)?;
        let path = dir.join(NEXT);
        let text = [
            &authority.keys.key_pem,
            &authority.keys.cert_pem,
            &proof,
            &first.authority.keys.cert_pem,
        ];
        let text: String = text
            .into_iter()
            .map(|pem| format!("{}\n", pem.trim_end()))
            .collect();
        replace(&path, &text, 0o600).with_context(|| path.display().to_string())?;
        Ok(Self {
            path,
            authority,
            proof,
        })
    }
}

/// The certificate of the authority whose key this is, where it may be while one authority follows another.
pub fn authority_of(dir: &Path, key_pem: &str, ca_pem: &str) -> Option<String> {
    let next = std::fs::read_to_string(dir.join(NEXT)).unwrap_or_default();
    let known = keys::bundle(ca_pem).into_iter().chain(keys::bundle(&next));
    // The old one's word for the new one is for the new one's key, too, and signed by another.
    known
        .into_iter()
        .find(|one| keys::is_for_key(one, key_pem) && keys::is_signed_by(one, one))
}

/// A new authority, and new keys for all hosts but those in `without`, which are of the cluster no more.
pub fn rotate_authority(socket: &Path, dir: &Path, without: &[String]) -> Result<ExitCode> {
    let first = First::load(dir)?;
    for name in without {
        if first.host(name)?.name == first.this {
            return Err(bad(format!(
                "host '{name}' is this one, which has the authority's key"
            )));
        }
    }
    let next = match Next::load(dir, &first)? {
        Some(next) => next,
        None => Next::make(dir, &first)?,
    };
    let key_path = dir.join(AUTHORITY);
    if keys::is_for_key(&next.authority.keys.cert_pem, &first.authority.keys.key_pem) {
        // Ended before its last word.
        return over(&next, &first);
    }
    let hosts = Hosts {
        socket,
        first: &first,
        issued: Issued::beside_key(dir),
    };
    let (new, old) = (&next.authority.keys.cert_pem, &first.authority.keys.cert_pem);
    let is_there = |ca: &str, one: &str| {
        let print = keys::fingerprint(one).ok();
        keys::bundle(ca)
            .iter()
            .any(|ca| keys::fingerprint(ca).ok() == print)
    };
    // This host last: it speaks for the others until they are through.
    let this = first.host(&first.this)?;
    let all = hosts.others().chain([this]);
    let all: Vec<&str> = all
        .map(|host| host.name.as_str())
        .filter(|name| !without.iter().any(|out| out == name))
        .collect();
    let teller = Teller::new()?;
    teller.hosts("the new authority is believed", all.len());
    each(&all, &teller, "does not know the new authority yet", |host| {
        let shown = match hosts.ask(host, KeysStep::Show)? {
            Ok(shown) => shown,
            Err(why) => return Ok(Err(why)),
        };
        if is_there(&shown.ca, new) {
            return Ok(Ok(()));
        }
        let step = KeysStep::Trust {
            ca: format!("{new}{old}"),
            proof: Some(next.proof.clone()),
        };
        Ok(hosts
            .ask(host, step)?
            .map(|_| teller.line(&format!("host {host} believes the new authority, too"))))
    })?;
    teller.hosts("new keys", all.len());
    each(&all, &teller, "has no keys of the new authority yet", |host| {
        let shown = match hosts.ask(host, KeysStep::Show)? {
            Ok(shown) => shown,
            Err(why) => return Ok(Err(why)),
        };
        if keys::is_signed_by(&shown.cert, new) {
            return Ok(Ok(()));
        }
        Ok(hosts
            .renew(host, &next.authority)?
            .map(|_| teller.line(&format!("host {host} has new keys"))))
    })?;
    teller.hosts("the old authority counts no more", all.len());
    each(&all, &teller, "still believes the old authority", |host| {
        let shown = match hosts.ask(host, KeysStep::Show)? {
            Ok(shown) => shown,
            Err(why) => return Ok(Err(why)),
        };
        if !is_there(&shown.ca, old) {
            return Ok(Ok(()));
        }
        let step = KeysStep::Trust {
            ca: new.clone(),
            proof: None,
        };
        Ok(hosts
            .ask(host, step)?
            .map(|_| teller.line(&format!("host {host} believes the old authority no more"))))
    })?;
    drop(teller);
    let key = private_key(&next.authority.keys.key_pem);
    replace(&key_path, &key, 0o600).with_context(|| key_path.display().to_string())?;
    over(&next, &first)
}

fn over(next: &Next, first: &First) -> Result<ExitCode> {
    std::fs::remove_file(&next.path).with_context(|| next.path.display().to_string())?;
    println!(
        "the new authority of cluster {} has followed the old one",
        first.cluster.name
    );
    Ok(ExitCode::SUCCESS)
}

/// The key alone, of a file that holds more.
fn private_key(pem: &str) -> String {
    const END: &str = "-----END PRIVATE KEY-----";
    let end = pem.find(END).map_or(pem.len(), |at| at + END.len());
    format!("{}\n", pem[..end].trim())
}

/// The same on each host. The next step stands on this one, so it waits until all have done it.
fn each(
    hosts: &[&str],
    teller: &Teller,
    lacks: &str,
    mut step: impl FnMut(&str) -> Result<Result<(), HostError>>,
) -> Result<()> {
    let mut missed = Vec::new();
    for host in hosts {
        if let Err(why) = step(host)? {
            teller.wrong(&format!("host {host} {lacks}: {why}"));
            missed.push(*host);
        }
        teller.host_done();
    }
    if missed.is_empty() {
        return Ok(());
    }
    bail!(
        "nothing is lost: hosts go on with both authorities. Say it again when {0} can be reached; one that is of the cluster no more \
         is left out with --without {0}",
        missed.join(",")
    )
}
