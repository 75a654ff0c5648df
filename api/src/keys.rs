//! What is said about a host's keys while they are exchanged (docs/cluster.md, "Keys").

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A step in the exchange of a host's keys, which one host is asked to take.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "step", rename_all = "kebab-case", deny_unknown_fields)]
pub enum KeysStep {
    /// Say which certificate you show, and which authorities you believe.
    Show,
    /// Make a new private key, and answer with a request for its certificate.
    Begin,
    /// Use the new key from now on.
    Finish {
        /// Its certificate, in PEM.
        cert: String,
    },
    /// Believe these authorities, and no others.
    Trust {
        /// The authorities' certificates in PEM: one or two.
        ca: String,
        /// The proof that the new authority among them was named by one that is already believed.
        #[serde(default)]
        proof: Option<String>,
    },
    /// Refuse these certificates from now on.
    Revoke {
        /// Revocation lists in PEM, signed by authorities that are believed.
        crl: String,
    },
}

/// The certificate that a host shows, and the authorities that it believes, in PEM. No private key is in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostKeys {
    /// Its certificate.
    pub cert: String,
    /// The certificates of the authorities that it believes.
    pub ca: String,
    /// The revocation lists that it knows.
    pub crl: String,
    /// In answer to `Begin`: its request for a certificate.
    #[serde(default)]
    pub request: Option<String>,
    /// In answer to `Revoke`: how many links of removed machines were ended.
    #[serde(default)]
    pub ended_links: usize,
}
