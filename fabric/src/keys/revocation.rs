//! Which certificates count no more, though they have not ended: X.509 revocation lists, one for each authority.
//!
//! **Decides**: what a list says, and which of two lists of one authority is the newer. **Flow**: `dunlin cluster rotate` and `revoke` sign a
//! [`RevocationList`] -> every host's daemon reads it with [`verified`], and keeps it -> `link` refuses what is in it.
//! **Invariants**: 1. a list counts only with the signature of an authority that is trusted. 2. of one authority's lists the one with the highest
//! number counts: no older one takes its place. **Source**: RFC 5280, section 5. **Not here**: who signs and when (node).

use super::{Authority, KeyError, bundle, der, issuer, plain, serial};
use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber,
    date_time_ymd,
};
use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;
use std::time::Duration;
use x509_parser::x509::ReasonCode;

/// Why a certificate counts no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Its host has a newer one. Links that were made with it go on.
    Superseded,
    /// Its machine is not of the cluster any more. Its links end.
    Removed,
}

/// One certificate that counts no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revoked {
    /// As [`super::serial`] tells it.
    pub serial: Vec<u8>,
    /// Since when, in seconds since 1970.
    pub since_s: u64,
    /// Why.
    pub reason: Reason,
}

/// All certificates of one authority that count no more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RevocationList {
    /// Counts up.
    pub number: u64,
    /// In no order; each once.
    pub revoked: Vec<Revoked>,
}

impl RevocationList {
    /// Why a certificate with this serial number counts no more, if it does not.
    #[must_use]
    pub fn reason(&self, serial: &[u8]) -> Option<Reason> {
        let found = self.revoked.iter().find(|one| one.serial == serial);
        found.map(|one| one.reason)
    }

    /// Adds a certificate, or makes a superseded one a removed one.
    pub fn add(&mut self, cert_pem: &str, reason: Reason, now_s: u64) -> Result<(), KeyError> {
        let serial = serial(cert_pem)?;
        match self.revoked.iter_mut().find(|one| one.serial == serial) {
            Some(known) if reason == Reason::Removed => known.reason = reason,
            Some(_) => {}
            None => self.revoked.push(Revoked {
                serial,
                since_s: now_s,
                reason,
            }),
        }
        Ok(())
    }

    /// As PEM, with the authority's signature.
    pub fn sign(&self, ca: &Authority, now_s: u64) -> Result<String, KeyError> {
        let time = |seconds| date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        let revoked = self.revoked.iter().map(|one| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&one.serial),
            revocation_time: time(one.since_s),
            reason_code: Some(match one.reason {
                Reason::Superseded => RevocationReason::Superseded,
                Reason::Removed => RevocationReason::CessationOfOperation,
            }),
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: time(now_s),
            // A list holds until there is a newer one.
            next_update: date_time_ymd(4096, 1, 1),
            crl_number: SerialNumber::from_slice(&self.number.to_be_bytes()),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Ok(list.signed_by(&issuer(ca)?)?.pem()?)
    }

    fn read(der: &[u8]) -> Option<(x509_parser::revocation_list::CertificateRevocationList<'_>, Self)> {
        let (_, list) = x509_parser::parse_x509_crl(der).ok()?;
        let number = u64::try_from(list.crl_number()?).ok()?;
        let revoked = list.iter_revoked_certificates().map(|one| Revoked {
            serial: plain(one.raw_serial()),
            since_s: u64::try_from(one.revocation_date.timestamp()).unwrap_or(0),
            reason: match one.reason_code() {
                Some((_, ReasonCode::Superseded)) => Reason::Superseded,
                _ => Reason::Removed,
            },
        });
        let read = Self {
            number,
            revoked: revoked.collect(),
        };
        Some((list, read))
    }
}

/// A list whose signature was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// What it says.
    pub list: RevocationList,
    /// The authority's certificate, in PEM.
    pub authority: String,
    /// The list itself, in PEM.
    pub pem: String,
}

/// The lists in `crl_pem` that are signed by one of the authorities in `ca_pem`: the newest of each. Others are left out.
#[must_use]
pub fn verified(crl_pem: &str, ca_pem: &str) -> Vec<Verified> {
    let authorities = bundle(ca_pem);
    let mut newest: Vec<Verified> = Vec::new();
    for pem in super::blocks(crl_pem, "X509 CRL") {
        let Ok(der) = CertificateRevocationListDer::from_pem_slice(pem.as_bytes()) else {
            continue;
        };
        let Some((signed, list)) = RevocationList::read(&der) else {
            continue;
        };
        let signer = authorities.iter().find(|ca_pem| {
            self::der(ca_pem).is_ok_and(|ca| {
                let ca = x509_parser::parse_x509_certificate(&ca);
                ca.is_ok_and(|(_, ca)| signed.verify_signature(ca.public_key()).is_ok())
            })
        });
        let Some(authority) = signer.cloned() else {
            continue;
        };
        let one = Verified { list, authority, pem };
        match newest.iter_mut().find(|known| known.authority == one.authority) {
            Some(known) if known.list.number >= one.list.number => {}
            Some(known) => *known = one,
            None => newest.push(one),
        }
    }
    newest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{make_ca, make_host};

    #[test]
    fn a_list_says_what_was_signed_and_counts_only_with_its_authority() {
        let (mine, other) = (make_ca("mine").unwrap(), make_ca("mine").unwrap());
        let (b, c, d) = (
            make_host(&mine, "b").unwrap().cert_pem,
            make_host(&mine, "c").unwrap().cert_pem,
            make_host(&mine, "d").unwrap().cert_pem,
        );
        let mut list = RevocationList {
            number: 300,
            ..RevocationList::default()
        };
        list.add(&b, Reason::Removed, 1_800_000_000).unwrap();
        list.add(&c, Reason::Superseded, 1_800_000_001).unwrap();
        list.add(&b, Reason::Superseded, 1_800_000_002).unwrap();
        let pem = list.sign(&mine, 1_800_000_003).unwrap();
        let both = format!("{}{}", other.keys.cert_pem, mine.keys.cert_pem);
        let read = verified(&pem, &both);
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].list, list, "nothing is lost on the way");
        assert_eq!(read[0].authority.trim(), mine.keys.cert_pem.trim());
        let reason = |cert: &str| read[0].list.reason(&serial(cert).unwrap());
        assert_eq!(
            (reason(&b), reason(&c), reason(&d)),
            (Some(Reason::Removed), Some(Reason::Superseded), None)
        );
        assert!(
            verified(&pem, &other.keys.cert_pem).is_empty(),
            "another authority's"
        );
        assert!(verified("no list", &both).is_empty() && verified(&pem, "").is_empty());
    }

    #[test]
    fn of_one_authority_the_newest_list_counts_wherever_it_stands() {
        let (mine, other) = (make_ca("mine").unwrap(), make_ca("mine").unwrap());
        let list = |number, ca: &Authority| {
            let list = RevocationList {
                number,
                ..RevocationList::default()
            };
            list.sign(ca, 1_800_000_000).unwrap()
        };
        let both = format!("{}{}", mine.keys.cert_pem, other.keys.cert_pem);
        for order in [[1, 9], [9, 1]] {
            let lists = format!(
                "{}{}{}",
                list(order[0], &mine),
                list(2, &other),
                list(order[1], &mine)
            );
            let mut numbers: Vec<u64> = verified(&lists, &both)
                .iter()
                .map(|one| one.list.number)
                .collect();
            numbers.sort_unstable();
            assert_eq!(numbers, [2, 9]);
        }
    }
}
