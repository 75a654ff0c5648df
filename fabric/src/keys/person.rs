//! Certificates of people: who may use a cluster's API over the network, and what they may do there.
//!
//! **Decides**: what a person's certificate says. **Flow**: `dunlin cluster person` makes one with the authority's key -> the person's browser or
//! program shows it -> the daemon reads name and role out of it ([`of_der`]), once TLS has checked whose signature it has and that it counts.
//! **Invariants**: 1. no host's certificate is a person's, and no person's is a host's: a person's names have dots, a host's have none, and a
//! person's is good as client alone. 2. nobody is an administrator by a certificate. **Source**: RFC 5280; RFC 2606 for the names, which no name
//! service knows. **Not here**: what a role may do (node).

use super::{Authority, KeyError, KeyedCert, is_host_name, issuer, plain};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, date_time_ymd};
use std::time::Duration;
use x509_parser::extensions::GeneralName;

/// Under it all people's names are.
const DOMAIN: &str = ".person.dunlin.invalid";

/// What a person may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PersonRole {
    /// Look.
    Viewer,
    /// Look, and start, stop and move VMs.
    Operator,
}

impl PersonRole {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Viewer, Self::Operator];

    /// As it stands in a certificate and is said by people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
        }
    }
}

/// What a certificate says of its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Person {
    /// Their name.
    pub name: String,
    /// What they may do.
    pub role: PersonRole,
    /// The certificate's number.
    pub serial: Vec<u8>,
}

/// The name that stands in the certificate of a person with that role.
#[must_use]
pub fn full_name(name: &str, role: PersonRole) -> String {
    format!("{name}.{}{DOMAIN}", role.word())
}

/// A key and a certificate for a person, good until `until_s` (seconds since 1970).
pub fn make(ca: &Authority, name: &str, role: PersonRole, until_s: u64) -> Result<KeyedCert, KeyError> {
    if !is_host_name(name) {
        return Err(KeyError::BadName(name.to_owned()));
    }
    let mut params = CertificateParams::new(vec![full_name(name, role)])?;
    params.distinguished_name.push(
        DnType::CommonName,
        format!("{name} ({} of {})", role.word(), ca.cluster),
    );
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(until_s);
    let key = KeyPair::generate()?;
    let cert = params.signed_by(&key, &issuer(ca)?)?;
    Ok(KeyedCert {
        cert_pem: cert.pem(),
        key_pem: key.serialize_pem(),
    })
}

/// Whose certificate this is; none if it is no person's. Its signature is not looked at.
#[must_use]
pub fn of_der(der: &[u8]) -> Option<Person> {
    let (_, cert) = x509_parser::parse_x509_certificate(der).ok()?;
    let names = cert.subject_alternative_name().ok()??;
    let [GeneralName::DNSName(full)] = names.value.general_names[..] else {
        return None;
    };
    let (name, role) = full.strip_suffix(DOMAIN)?.split_once('.')?;
    let role = PersonRole::ALL.into_iter().find(|known| known.word() == role)?;
    is_host_name(name).then(|| Person {
        name: name.to_owned(),
        role,
        serial: plain(cert.raw_serial()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{der, expires_s, is_for_host, is_signed_by, make_ca, make_host, serial};

    #[test]
    fn a_person_s_certificate_says_who_and_what_and_is_no_host_s() {
        let ca = make_ca("mine").expect("an authority");
        for role in PersonRole::ALL {
            let ann = make(&ca, "ann", role, 4_000_000_000).expect("a certificate");
            let seen = of_der(&der(&ann.cert_pem).expect("PEM")).expect("a person");
            assert_eq!((seen.name.as_str(), seen.role), ("ann", role));
            assert_eq!(seen.serial, serial(&ann.cert_pem).expect("a number"));
            assert_eq!(expires_s(&ann.cert_pem).expect("an end"), 4_000_000_000);
            assert!(is_signed_by(&ann.cert_pem, &ca.keys.cert_pem));
            assert!(is_for_host(&ann.cert_pem, &full_name("ann", role)));
            assert!(!is_for_host(&ann.cert_pem, "ann"), "a host's name has no dots");
        }
        let host = make_host(&ca, "ann").expect("a host");
        assert_eq!(of_der(&der(&host.cert_pem).expect("PEM")), None);
        assert_eq!(of_der(b"no certificate"), None);
        for bad in ["", "ann.viewer", "Ann", "ann viewer", "*"] {
            assert!(
                make(&ca, bad, PersonRole::Viewer, 4_000_000_000).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn other_names_are_nobody_s() {
        let ca = make_ca("mine").expect("an authority");
        for names in [
            &["ann.root.person.dunlin.invalid"][..],
            &["ann.administrator.person.dunlin.invalid"],
            &["person.dunlin.invalid"],
            &["viewer.person.dunlin.invalid"],
            &["eve.ann.viewer.person.dunlin.invalid"],
            &["ann.viewer.person.dunlin.invalid.evil.example"],
            &[
                "ann.viewer.person.dunlin.invalid",
                "ann.operator.person.dunlin.invalid",
            ],
            &[],
        ] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let params = CertificateParams::new(names.clone()).expect("names");
            let key = KeyPair::generate().expect("a key");
            let cert = params
                .signed_by(&key, &issuer(&ca).expect("it signs"))
                .expect("a certificate");
            assert_eq!(of_der(cert.der()), None, "{names:?}");
        }
    }
}
