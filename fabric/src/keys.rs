//! Keys of a cluster: one authority, one certificate per host, a random identity and a shared secret.
//!
//! **Decides**: what `dunlin init` writes. **Flow**: `make_ca` once, `make_host` per host; `link` loads the result.
//! **Invariants**: 1. a host's certificate names exactly that host (SAN), so a host can speak only for itself;
//! 2. the authority's key is needed only to add hosts and never by a running daemon.
//! **Source**: X.509 as rustls checks it. **Not here**: revocation lists; to expel a host, make new keys.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use ring::rand::{SecureRandom, SystemRandom};

/// Why keys could not be made.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Not usable as a host name.
    #[error(
        "host name {0:?} is not usable: 1 to 63 characters of a-z, 0-9 and '-', not beginning or ending with '-'"
    )]
    BadName(String),
    /// The library refused.
    #[error("making a certificate failed: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The system gave no randomness.
    #[error("the system gives no random numbers")]
    NoRandomness,
}

/// A certificate and its private key, both PEM.
#[derive(Clone)]
pub struct KeyedCert {
    /// The certificate.
    pub cert_pem: String,
    /// The private key: keep it readable by its owner only (0600).
    pub key_pem: String,
}

/// A cluster's authority. Its name is part of every certificate that it signs.
#[derive(Clone)]
pub struct Authority {
    /// The cluster's name, as given to `make_ca`.
    pub cluster: String,
    /// Certificate (goes to every host) and key (stays where `init` ran).
    pub keys: KeyedCert,
}

/// Whether `name` can stand in a certificate and in messages: a DNS label.
#[must_use]
pub fn is_host_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn ca_params(cluster: &str) -> Result<CertificateParams, KeyError> {
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params
        .distinguished_name
        .push(DnType::CommonName, format!("Dunlin cluster {cluster}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

/// A new authority for the cluster called `cluster`.
pub fn make_ca(cluster: &str) -> Result<Authority, KeyError> {
    let key = KeyPair::generate()?;
    let cert = ca_params(cluster)?.self_signed(&key)?;
    let keys = KeyedCert {
        cert_pem: cert.pem(),
        key_pem: key.serialize_pem(),
    };
    Ok(Authority {
        cluster: cluster.to_owned(),
        keys,
    })
}

/// A certificate for host `name`, signed by `ca`, good as client and as server.
pub fn make_host(ca: &Authority, name: &str) -> Result<KeyedCert, KeyError> {
    if !is_host_name(name) {
        return Err(KeyError::BadName(name.to_owned()));
    }
    let issuer = Issuer::new(ca_params(&ca.cluster)?, KeyPair::from_pem(&ca.keys.key_pem)?);
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![name.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let cert = params.signed_by(&key, &issuer)?;
    Ok(KeyedCert {
        cert_pem: cert.pem(),
        key_pem: key.serialize_pem(),
    })
}

/// `N` random bytes: a cluster's identity (16) or its secret (32).
pub fn random<const N: usize>() -> Result<[u8; N], KeyError> {
    let mut bytes = [0; N];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| KeyError::NoRandomness)?;
    Ok(bytes)
}
