//! Keys of a cluster: one authority, one certificate per host, a random identity and a shared secret.
//!
//! **Decides**: what `dunlin init` and `dunlin cluster` write. **Flow**: `make_ca` once; per host `make_host`, or `request_host` there and
//! `sign_host` where the authority is; `link` loads the result.
//! **Invariants**: 1. a host's certificate names exactly that host (SAN), so a host can speak only for itself;
//! 2. the authority's key is needed only to add hosts and never by a running daemon.
//! **Source**: X.509 as rustls checks it. **Not here**: what counts no more ([`revocation`]), how one authority follows another ([`succession`]).

pub mod person;
pub mod revocation;
pub mod succession;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData,
};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certificate::X509Certificate;

/// Why keys could not be made.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Not usable as a host name.
    #[error(
        "host name {0:?} is not usable: 1 to 63 characters of a-z, 0-9 and '-', not beginning or ending with '-'"
    )]
    BadName(String),
    /// Not a certificate in PEM.
    #[error("this is no certificate in PEM")]
    NoCertificate,
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
    // A certificate and a revocation list find their authority by its name: that of a cluster's next authority is another one.
    params.distinguished_name.push(
        DnType::OrganizationalUnitName,
        format!("authority {:016x}", u64::from_be_bytes(random()?)),
    );
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

/// What stands in a host's certificate: exactly its name, good as client and as server.
fn host_params(name: &str) -> Result<CertificateParams, KeyError> {
    if !is_host_name(name) {
        return Err(KeyError::BadName(name.to_owned()));
    }
    let mut params = CertificateParams::new(vec![name.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    Ok(params)
}

fn issuer(ca: &Authority) -> Result<Issuer<'_, KeyPair>, KeyError> {
    Ok(Issuer::from_ca_cert_pem(
        &ca.keys.cert_pem,
        KeyPair::from_pem(&ca.keys.key_pem)?,
    )?)
}

/// A certificate for host `name`, signed by `ca`, good as client and as server.
pub fn make_host(ca: &Authority, name: &str) -> Result<KeyedCert, KeyError> {
    let key = KeyPair::generate()?;
    let cert = host_params(name)?.signed_by(&key, &issuer(ca)?)?;
    Ok(KeyedCert {
        cert_pem: cert.pem(),
        key_pem: key.serialize_pem(),
    })
}

/// A new private key for host `name`, which stays where it is, and a request for a certificate, which does not: both PEM.
pub fn request_host(name: &str) -> Result<(String, String), KeyError> {
    let key = KeyPair::generate()?;
    let request = host_params(name)?.serialize_request(&key)?;
    Ok((key.serialize_pem(), request.pem()?))
}

/// A certificate for host `name` and the key of the request. Of what else the request asks for nothing is taken over.
pub fn sign_host(ca: &Authority, name: &str, request_pem: &str) -> Result<String, KeyError> {
    let mut request = CertificateSigningRequestParams::from_pem(request_pem)?;
    request.params = host_params(name)?;
    Ok(request.signed_by(&issuer(ca)?)?.pem())
}

fn der(cert_pem: &str) -> Result<CertificateDer<'static>, KeyError> {
    CertificateDer::from_pem_slice(cert_pem.as_bytes()).map_err(|_| KeyError::NoCertificate)
}

/// What `of` says of a certificate.
fn parsed<T>(cert_pem: &str, of: impl FnOnce(&X509Certificate<'_>) -> T) -> Result<T, KeyError> {
    let der = der(cert_pem)?;
    let (_, cert) = x509_parser::parse_x509_certificate(&der).map_err(|_| KeyError::NoCertificate)?;
    Ok(of(&cert))
}

/// The blocks of that kind in a PEM file, each as PEM.
fn blocks(pem: &str, kind: &str) -> Vec<String> {
    let (begin, end) = (format!("-----BEGIN {kind}-----"), format!("-----END {kind}-----"));
    let mut found = Vec::new();
    let mut rest = pem;
    while let Some(from) = rest.find(&begin) {
        let Some(to) = rest[from..].find(&end) else { break };
        let (block, after) = rest[from..].split_at(to + end.len());
        found.push(format!("{block}\n"));
        rest = after;
    }
    found
}

/// The certificates in a PEM file, each as PEM.
#[must_use]
pub fn bundle(pem: &str) -> Vec<String> {
    blocks(pem, "CERTIFICATE")
}

/// When a certificate ends, in seconds since 1970.
pub fn expires_s(cert_pem: &str) -> Result<u64, KeyError> {
    parsed(cert_pem, |cert| {
        u64::try_from(cert.validity().not_after.timestamp()).unwrap_or(0)
    })
}

/// A certificate's number, without zeros in front.
pub fn serial(cert_pem: &str) -> Result<Vec<u8>, KeyError> {
    parsed(cert_pem, |cert| plain(cert.raw_serial()))
}

/// The same of a certificate that a peer has shown.
pub(crate) fn serial_of_der(der: &[u8]) -> Option<Vec<u8>> {
    let (_, cert) = x509_parser::parse_x509_certificate(der).ok()?;
    Some(plain(cert.raw_serial()))
}

fn plain(number: &[u8]) -> Vec<u8> {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    number[zeros..].to_vec()
}

/// Whether a certificate is signed with the key of that authority's certificate.
#[must_use]
pub fn is_signed_by(cert_pem: &str, ca_pem: &str) -> bool {
    let signed = parsed(ca_pem, |ca| {
        parsed(cert_pem, |cert| {
            cert.verify_signature(Some(ca.public_key())).is_ok()
        })
    });
    matches!(signed, Ok(Ok(true)))
}

/// Whether a certificate is for that private key.
#[must_use]
pub fn is_for_key(cert_pem: &str, key_pem: &str) -> bool {
    let Ok(key) = KeyPair::from_pem(key_pem) else {
        return false;
    };
    let same = parsed(cert_pem, |cert| {
        cert.public_key().raw == key.subject_public_key_info()
    });
    same.unwrap_or(false)
}

/// Whether a certificate is for that host.
#[must_use]
pub fn is_for_host(cert_pem: &str, host: &str) -> bool {
    der(cert_pem).is_ok_and(|cert| crate::link::names(&cert, host))
}

/// SHA-256 of a certificate.
pub fn fingerprint(cert_pem: &str) -> Result<[u8; 32], KeyError> {
    let der = der(cert_pem)?;
    let mut fingerprint = [0; 32];
    fingerprint.copy_from_slice(digest(&SHA256, &der).as_ref());
    Ok(fingerprint)
}

/// `N` random bytes: a cluster's identity (16) or its secret (32).
pub fn random<const N: usize>() -> Result<[u8; N], KeyError> {
    let mut bytes = [0; N];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| KeyError::NoRandomness)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Auth, Identity};

    #[test]
    fn a_request_becomes_a_certificate_for_that_host_and_no_other() {
        let ca = make_ca("mine").unwrap();
        let (key_pem, request) = request_host("b").unwrap();
        assert!(!request.contains("PRIVATE"));
        let identity = |host: &str, cert_pem: &str| {
            let auth = Auth::Tls {
                cert_pem: cert_pem.to_owned(),
                key_pem: key_pem.clone(),
                ca_pem: ca.keys.cert_pem.clone(),
                crl_pem: None,
            };
            Identity::new([0; 16], host, &[], Some(auth))
        };
        let cert = sign_host(&ca, "b", &request).unwrap();
        assert!(identity("b", &cert).is_ok());
        // Who signs says for whom, whatever the request asks for.
        let cert = sign_host(&ca, "c", &request).unwrap();
        assert!(identity("c", &cert).is_ok() && identity("b", &cert).is_err());
        assert!(sign_host(&ca, "b", "no request").is_err());
        assert!(sign_host(&ca, "b", &make_host(&ca, "b").unwrap().cert_pem).is_err());
        assert!(sign_host(&ca, "B!", &request).is_err());
    }

    #[test]
    fn a_certificate_has_an_end_and_a_fingerprint() {
        let ca = make_ca("mine").unwrap();
        let mut params = host_params("b").unwrap();
        params.not_after = rcgen::date_time_ymd(2030, 1, 2);
        let cert = params
            .signed_by(&KeyPair::generate().unwrap(), &issuer(&ca).unwrap())
            .unwrap();
        assert_eq!(expires_s(&cert.pem()).unwrap(), 1_893_542_400);
        assert_eq!(
            fingerprint(&cert.pem()).unwrap(),
            fingerprint(&cert.pem()).unwrap()
        );
        assert_ne!(
            fingerprint(&cert.pem()).unwrap(),
            fingerprint(&ca.keys.cert_pem).unwrap()
        );
        assert!(expires_s("no").is_err() && fingerprint(&ca.keys.key_pem).is_err());
    }

    #[test]
    fn a_certificate_knows_its_key_its_host_and_its_authority() {
        let (mine, other) = (make_ca("mine").unwrap(), make_ca("mine").unwrap());
        let (b, c) = (make_host(&mine, "b").unwrap(), make_host(&mine, "c").unwrap());
        assert!(is_for_key(&b.cert_pem, &b.key_pem) && !is_for_key(&b.cert_pem, &c.key_pem));
        assert!(is_for_host(&b.cert_pem, "b") && !is_for_host(&b.cert_pem, "c"));
        assert!(is_signed_by(&b.cert_pem, &mine.keys.cert_pem));
        assert!(!is_signed_by(&b.cert_pem, &other.keys.cert_pem));
        assert_ne!(serial(&b.cert_pem).unwrap(), serial(&c.cert_pem).unwrap());
        let both = format!("# two\n{}and\n{}", mine.keys.cert_pem, other.keys.cert_pem);
        assert_eq!(bundle(&both).len(), 2);
        assert_eq!(
            fingerprint(&bundle(&both)[1]).unwrap(),
            fingerprint(&other.keys.cert_pem).unwrap()
        );
        assert!(bundle("-----BEGIN CERTIFICATE-----\nno end").is_empty());
    }
}
