//! How one authority is followed by another while hosts run.
//!
//! **Decides**: whether a certificate is that of an authority which a trusted one has named as its successor. **Flow**: `dunlin cluster rotate
//! --authority` makes a new authority and has its key certified by the old one ([`name_successor`]) -> every host trusts both after [`is_successor`]
//! -> every host gets a certificate of the new one -> the old one is trusted no more.
//! **Invariants**: 1. nobody without the old authority's key, no host of the cluster either, can make hosts trust another one.
//! **Source**: RFC 4210, section 4.4: the new key, signed with the old one ("NewWithOld"). **Not here**: the order of the steps (node).

use super::{Authority, KeyError, bundle, ca_params, der, issuer};
use rcgen::KeyPair;

/// The new authority's key, certified by the old one: shown together with the new authority's own certificate.
pub fn name_successor(old: &Authority, new: &Authority) -> Result<String, KeyError> {
    let key = KeyPair::from_pem(&new.keys.key_pem)?;
    Ok(ca_params(&old.cluster)?.signed_by(&key, &issuer(old)?)?.pem())
}

/// Whether `proof_pem` is what [`name_successor`] makes for the authority of `new_pem`, by one of the authorities in `trusted_pem`.
#[must_use]
pub fn is_successor(new_pem: &str, proof_pem: &str, trusted_pem: &str) -> bool {
    let (Ok(new), Ok(proof)) = (der(new_pem), der(proof_pem)) else {
        return false;
    };
    let (Ok((_, new)), Ok((_, proof))) = (
        x509_parser::parse_x509_certificate(&new),
        x509_parser::parse_x509_certificate(&proof),
    ) else {
        return false;
    };
    let certified = bundle(trusted_pem).iter().any(|old| {
        der(old).is_ok_and(|old| {
            let old = x509_parser::parse_x509_certificate(&old);
            old.is_ok_and(|(_, old)| proof.verify_signature(Some(old.public_key())).is_ok())
        })
    });
    certified
        && new.is_ca()
        && proof.is_ca()
        && new.verify_signature(None).is_ok()
        && new.public_key().raw == proof.public_key().raw
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{make_ca, make_host};

    #[test]
    fn only_the_old_authority_names_its_successor() {
        let (old, new, thief) = (
            make_ca("mine").unwrap(),
            make_ca("mine").unwrap(),
            make_ca("mine").unwrap(),
        );
        let proof = name_successor(&old, &new).unwrap();
        let is = |new: &str, proof: &str| is_successor(new, proof, &old.keys.cert_pem);
        assert!(is(&new.keys.cert_pem, &proof));
        assert!(!is(&thief.keys.cert_pem, &proof), "for another one");
        assert!(
            !is(&thief.keys.cert_pem, &name_successor(&thief, &thief).unwrap()),
            "by itself"
        );
        assert!(
            !is(&new.keys.cert_pem, &new.keys.cert_pem),
            "its own certificate is no proof"
        );
        assert!(!is(&new.keys.cert_pem, "") && !is("", &proof));
        // A host's certificate is signed by the old authority too, and makes no authority of its key.
        let host = make_host(&old, "b").unwrap();
        assert!(!is(&host.cert_pem, &host.cert_pem));
        let pretender = Authority {
            cluster: "mine".into(),
            keys: host.clone(),
        };
        let own = name_successor(&pretender, &pretender);
        assert!(own.map_or(true, |own| !is(&own, &host.cert_pem)));
    }
}
