//! What this host shows to the others, whom it believes, and how both change while its daemon runs.
//!
//! **Decides**: which new keys, authorities and revocation lists it takes. **Flow**: `dunlin cluster rotate` and `revoke` ask each host's daemon,
//! step by step (`renewal`) -> the files that host.toml names are replaced -> `Identity::renew`: connections from now on are made with them.
//! **Invariants**: 1. a private key is made here and never leaves this host. 2. what cannot be used is refused before a file is touched. 3. no
//! other host can make this one believe an authority that the one before it has not named, nor forget what was revoked. 4. the files fit together
//! whenever the daemon or the machine dies ([`place`], [`mend`]). **Not here**: who signs (`cli::keys`), TLS (`dunlin_fabric`).

use super::BadInput;
use crate::certificates;
use crate::config::{HostConfig, Trust};
use anyhow::Result;
use dunlin_api::Certificate;
use dunlin_api::keys::HostKeys;
use dunlin_fabric::keys::{self, KeyError, revocation, succession};
use dunlin_fabric::link::{Auth, Identity, LinkError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A new authority, and the one that it follows.
const MOST_AUTHORITIES: usize = 2;

/// Why this host's keys stay as they are.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// There are none.
    #[error("the hosts of this cluster have no certificates (host.toml has no 'cert')")]
    NoCertificates,
    /// One of their files.
    #[error("{}: {error}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
    /// No new one could be made.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Its private key is not here.
    #[error(
        "it waits for no such certificate (its daemon was started since, or somebody else exchanges keys): say it again"
    )]
    NotAwaited,
    /// Of a certificate.
    #[error("the certificate is of an authority that this host does not believe")]
    StrangeCertificate,
    /// Invariant 2.
    #[error(transparent)]
    Unusable(#[from] LinkError),
    /// None, or more than a change takes.
    #[error("a host believes one authority, or {} for a while", MOST_AUTHORITIES)]
    Authorities,
    /// Invariant 3.
    #[error("that authority was not named by the one which this host believes")]
    NotNamed,
    /// Nobody would believe this host.
    #[error("its own certificate is of none of these authorities")]
    OwnOfNone,
    /// Of a revocation list.
    #[error("that revocation list is of an authority that this host does not believe")]
    StrangeList,
}

impl KeysError {
    pub(super) fn of(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::File { path, error }
    }
}

/// This host's keys.
pub struct OwnKeys {
    pub(super) trust: Trust,
    state: Mutex<State>,
    /// Hosts whose revocation lists are to be asked for: no more than there are in the cluster.
    pub(super) to_ask: Mutex<BTreeSet<String>>,
    pub(super) asked: Condvar,
}

pub(super) struct State {
    /// The private key for which a certificate was asked, until it comes.
    pub(super) pending: Option<String>,
    pub(super) certificates: Vec<Certificate>,
}

impl OwnKeys {
    pub fn new(trust: &Trust) -> Self {
        Self {
            trust: trust.clone(),
            state: Mutex::new(State {
                pending: None,
                certificates: certificates::of(trust),
            }),
            to_ask: Mutex::default(),
            asked: Condvar::new(),
        }
    }

    /// How long the certificates in use are good.
    pub fn certificates(&self) -> Vec<Certificate> {
        self.state().certificates.clone()
    }

    /// A host is there again: it may have heard of a machine that was removed.
    pub fn ask_soon(&self, host: &str) {
        let mut to_ask = self.to_ask.lock();
        to_ask.insert(host.to_owned());
        self.asked.notify_one();
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn files(&self) -> Result<Files, KeysError> {
        match &self.trust {
            Trust::Tls { key, cert, ca } => Files::read(key, cert, ca),
            _ => Err(KeysError::NoCertificates),
        }
    }
}

/// The files of a host that uses TLS, and what is in them.
pub(super) struct Files {
    pub(super) key: (PathBuf, String),
    pub(super) cert: (PathBuf, String),
    pub(super) ca: (PathBuf, String),
    pub(super) crl: (PathBuf, String),
}

impl Files {
    fn read(key: &Path, cert: &Path, ca: &Path) -> Result<Self, KeysError> {
        let read = |path: &Path| {
            let text = std::fs::read_to_string(path).map_err(KeysError::of(path));
            text.map(|text| (path.to_owned(), text))
        };
        let crl = lists_beside(ca);
        Ok(Self {
            key: read(key)?,
            cert: read(cert)?,
            ca: read(ca)?,
            crl: if crl.exists() {
                read(&crl)?
            } else {
                (crl, String::new())
            },
        })
    }

    pub(super) fn auth(&self) -> Auth {
        Auth::Tls {
            cert_pem: self.cert.1.clone(),
            key_pem: self.key.1.clone(),
            ca_pem: self.ca.1.clone(),
            crl_pem: Some(self.crl.1.clone()),
        }
    }

    pub(super) fn shown(self) -> HostKeys {
        HostKeys {
            cert: self.cert.1,
            ca: self.ca.1,
            crl: self.crl.1,
            ..HostKeys::default()
        }
    }
}

/// Where the revocation lists are.
fn lists_beside(ca: &Path) -> PathBuf {
    ca.with_file_name("crl.pem")
}

/// Who this host is when its daemon starts.
pub fn at_start(config: &HostConfig) -> Result<Identity> {
    let bad = |why: String| BadInput(why);
    let auth = match &config.trust {
        Trust::Tls { key, cert, ca } => {
            mend(key, cert).map_err(|error| bad(format!("{}: {error}", key.display())))?;
            Files::read(key, cert, ca)
                .map_err(|error| bad(error.to_string()))?
                .auth()
        }
        Trust::Secret(path) => {
            let secret =
                std::fs::read_to_string(path).map_err(|error| bad(format!("{}: {error}", path.display())))?;
            Auth::Secret(secret.trim().as_bytes().to_vec())
        }
        Trust::Insecure => Auth::Insecure,
    };
    let names: Vec<String> = config
        .cluster
        .hosts
        .iter()
        .map(|host| host.name.clone())
        .collect();
    let identity = Identity::new(config.cluster.id, &config.name, &names, Some(auth))
        .map_err(|error| bad(error.to_string()))?;
    Ok(identity.of_build(&crate::build::name()))
}

pub(super) fn finish(
    identity: &Identity,
    mut files: Files,
    state: &mut State,
    cert: String,
) -> Result<HostKeys, KeysError> {
    let key = state.pending.as_ref().filter(|key| keys::is_for_key(&cert, key));
    let Some(key) = key.cloned() else {
        return Err(KeysError::NotAwaited);
    };
    if !keys::bundle(&files.ca.1)
        .iter()
        .any(|ca| keys::is_signed_by(&cert, ca))
    {
        return Err(KeysError::StrangeCertificate);
    }
    (files.key.1, files.cert.1) = (key, cert);
    let renewal = identity.prepare(&files.auth())?;
    place(&files.key, &files.cert).map_err(KeysError::of(&files.key.0))?;
    identity.renew(renewal);
    state.pending = None;
    Ok(files.shown())
}

pub(super) fn trust(
    identity: &Identity,
    mut files: Files,
    ca: String,
    proof: Option<&str>,
) -> Result<HostKeys, KeysError> {
    let (known, wanted) = (keys::bundle(&files.ca.1), keys::bundle(&ca));
    if wanted.is_empty() || wanted.len() > MOST_AUTHORITIES {
        return Err(KeysError::Authorities);
    }
    let is_known = |one: &String| {
        let print = keys::fingerprint(one).ok();
        print.is_some() && known.iter().any(|known| keys::fingerprint(known).ok() == print)
    };
    let is_named =
        |one: &String| proof.is_some_and(|proof| succession::is_successor(one, proof, &files.ca.1));
    if !wanted.iter().all(|one| is_known(one) || is_named(one)) {
        return Err(KeysError::NotNamed);
    }
    if !wanted.iter().any(|ca| keys::is_signed_by(&files.cert.1, ca)) {
        return Err(KeysError::OwnOfNone);
    }
    files.ca.1 = wanted.concat();
    // Lists of an authority that is believed no more say nothing any more.
    let had_lists = !files.crl.1.is_empty();
    files.crl.1 = lists(&files.crl.1, &files.ca.1);
    let renewal = identity.prepare(&files.auth())?;
    for (path, text) in [&files.ca, &files.crl]
        .into_iter()
        .take(1 + usize::from(had_lists))
    {
        replace(path, text, 0o644).map_err(KeysError::of(path))?;
    }
    identity.renew(renewal);
    Ok(files.shown())
}

/// The newest list of each of these authorities.
pub(super) fn lists(crl: &str, ca: &str) -> String {
    let lists = revocation::verified(crl, ca).into_iter();
    lists.map(|one| one.pem).collect()
}

/// Where a new key waits until its certificate is in place.
fn next_to(key: &Path) -> PathBuf {
    let mut name = key.as_os_str().to_owned();
    name.push(".next");
    name.into()
}

/// Puts a key and its certificate in place. Two files are not replaced at one moment: whichever of them a crash leaves behind, `mend` finds
/// a key for the certificate.
fn place(key: &(PathBuf, String), cert: &(PathBuf, String)) -> io::Result<()> {
    let next = next_to(&key.0);
    replace(&next, &key.1, 0o600)?;
    replace(&cert.0, &cert.1, 0o644)?;
    std::fs::rename(&next, &key.0)?;
    sync_folder(&key.0)
}

/// Ends what a crash has left half done.
fn mend(key: &Path, cert: &Path) -> io::Result<()> {
    let next = next_to(key);
    let pending = match std::fs::read_to_string(&next) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        pending => pending?,
    };
    match keys::is_for_key(&std::fs::read_to_string(cert)?, &pending) {
        true => std::fs::rename(&next, key)?,
        false => std::fs::remove_file(&next)?,
    }
    sync_folder(key)
}

/// A file with this text, or the one that was there.
pub fn replace(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&new)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .and_then(|()| std::fs::rename(&new, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    written?;
    sync_folder(path)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
