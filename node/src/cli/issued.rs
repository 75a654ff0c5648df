//! The record of the certificates that an authority has given out: `issued.pem`, beside its key.
//!
//! **Decides**: which certificates are a host's. **Flow**: whoever signs one [`notes`](Issued::note) it, before anybody gets it -> `dunlin cluster
//! revoke` and `rotate` know what counts no more. **Invariants**: 1. none is given out that is not on the disk here. 2. it only grows, in the
//! order in which they were given out. **Not here**: signing (`dunlin_fabric::keys`), revocation lists (`keys`).

use anyhow::{Context, Result};
use dunlin_fabric::keys;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Its name in the folder of the authority's key.
const FILE: &str = "issued.pem";

/// The record.
pub struct Issued(PathBuf);

impl Issued {
    /// Of the authority whose key is in that folder.
    pub fn beside_key(folder: &Path) -> Self {
        Self(folder.join(FILE))
    }

    /// Adds a certificate, unless it is there already.
    pub fn note(&self, cert_pem: &str) -> Result<()> {
        let serial = keys::serial(cert_pem)?;
        let known = self.all()?;
        if known
            .iter()
            .any(|one| keys::serial(one).is_ok_and(|one| one == serial))
        {
            return Ok(());
        }
        let noted = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.0)
            .and_then(|mut file| {
                file.write_all(format!("{}\n", cert_pem.trim_end()).as_bytes())?;
                file.sync_all()
            });
        noted.with_context(|| self.0.display().to_string())
    }

    /// The certificates of a host that this authority has signed, the newest last.
    pub fn of(&self, host: &str, ca_pem: &str) -> Result<Vec<String>> {
        let mut all = self.all()?;
        all.retain(|one| keys::is_for_host(one, host) && keys::is_signed_by(one, ca_pem));
        Ok(all)
    }

    /// All certificates of a host, the newest last: also those of authorities that nobody believes any more, with which a link may have been
    /// made that has outlived the exchange of keys.
    pub fn ever_of(&self, host: &str) -> Result<Vec<String>> {
        let mut all = self.all()?;
        all.retain(|one| keys::is_for_host(one, host));
        Ok(all)
    }

    fn all(&self) -> Result<Vec<String>> {
        match std::fs::read_to_string(&self.0) {
            Ok(text) => Ok(keys::bundle(&text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error).with_context(|| self.0.display().to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_certificate_is_there_once_under_its_host_and_its_authority() {
        let folder = tempfile::tempdir().expect("a folder");
        let issued = Issued::beside_key(folder.path());
        let (mine, other) = (
            keys::make_ca("mine").expect("a"),
            keys::make_ca("mine").expect("b"),
        );
        let make = |ca, host| keys::make_host(ca, host).expect("a host").cert_pem;
        let (b, again, c, elsewhere) = (
            make(&mine, "b"),
            make(&mine, "b"),
            make(&mine, "c"),
            make(&other, "b"),
        );
        assert!(
            issued
                .of("b", &mine.keys.cert_pem)
                .expect("no file yet")
                .is_empty()
        );
        for cert in [&b, &elsewhere, &c, &again, &b] {
            issued.note(cert).expect("noted");
        }
        let ever = [b.clone(), elsewhere.clone(), again.clone()];
        assert_eq!(issued.ever_of("b").expect("read"), ever);
        assert_eq!(issued.of("b", &mine.keys.cert_pem).expect("read"), [b, again]);
        assert_eq!(issued.of("b", &other.keys.cert_pem).expect("read"), [elsewhere]);
        assert!(issued.note("no certificate").is_err());
    }
}
