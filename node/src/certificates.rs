//! How long this host's certificates are good: said in `check`, as an event once a day, and as a metric.
//!
//! **Decides**: from when on it is worth a word. **Flow**: the files of `host.toml` -> [`of`] -> `check`, `status`, metrics; the daemon looks once a
//! day -> [`word`]. **Invariants**: 1. a certificate that cannot be read has no end that could be told: whoever uses it says
//! why. **Not here**: making and exchanging keys (`dunlin cluster`, `daemon::identity`).

use crate::config::Trust;
use crate::events::now_ms;
use dunlin_api::{Certificate, Found};
use dunlin_fabric::keys;
use std::path::Path;

/// A month is enough to exchange keys.
const SOON_S: u64 = 30 * 86_400;

/// Those of a host; none without TLS.
pub fn of(trust: &Trust) -> Vec<Certificate> {
    let Trust::Tls { cert, ca, .. } = trust else {
        return Vec::new();
    };
    let one = |what: &str, path: &Path| {
        let pem = std::fs::read_to_string(path).ok()?;
        Some(Certificate {
            what: what.to_owned(),
            expires_s: keys::expires_s(&pem).ok()?,
        })
    };
    [one("host", cert), one("authority", ca)]
        .into_iter()
        .flatten()
        .collect()
}

/// What is to be said of a certificate at that time, if anything; and whether it is over.
pub fn word(certificate: &Certificate, now_s: u64) -> Option<(String, bool)> {
    let Certificate { what, expires_s } = certificate;
    let whose = match what.as_str() {
        "host" => "this host's certificate",
        _ => "the certificate of the cluster's authority",
    };
    match expires_s.checked_sub(now_s) {
        None => Some((format!("{whose} has expired: other hosts refuse this one"), true)),
        Some(left) if left < SOON_S => Some((format!("{whose} expires in {} days", left / 86_400), false)),
        Some(_) => None,
    }
}

/// The same as something that was looked at on `host`.
pub fn found(host: &str, certificates: &[Certificate]) -> Vec<Found> {
    let now_s = now_ms() / 1000;
    let found = certificates
        .iter()
        .filter_map(|certificate| word(certificate, now_s));
    found
        .map(|(words, over)| Found {
            host: host.to_owned(),
            ok: !over,
            what: format!("certificates: {words}"),
            mend: MEND.to_owned(),
        })
        .collect()
}

/// What to do about it.
pub const MEND: &str = "'dunlin cluster rotate' on the cluster's first host makes new keys, and with --authority a new authority, too";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_before_its_end_and_after_it_there_is_a_word() {
        let certificate = Certificate {
            what: "host".into(),
            expires_s: 100 * 86_400,
        };
        let at = |day: u64| word(&certificate, day * 86_400);
        assert_eq!(at(70), None);
        assert_eq!(
            at(71),
            Some(("this host's certificate expires in 29 days".into(), false))
        );
        assert!(at(101).is_some_and(|(words, over)| over && words.contains("has expired")));
    }

    #[test]
    fn the_end_is_that_of_the_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let authority = keys::make_ca("mine").expect("an authority");
        let host = keys::make_host(&authority, "a").expect("a host");
        let trust = Trust::Tls {
            key: write("key.pem", &host.key_pem),
            cert: write("cert.pem", &host.cert_pem),
            ca: write("ca.pem", "no certificate"),
        };
        let found = of(&trust);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].what, "host");
        assert!(found[0].expires_s > crate::events::now_ms() / 1000);
        assert!(of(&Trust::Insecure).is_empty());
    }
}
