//! What is said about a host's keys while they are exchanged (docs/cluster.md, "Keys").

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A step, asked of one host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "step", rename_all = "kebab-case", deny_unknown_fields)]
pub enum KeysStep {
    /// What do you show, and whom do you believe?
    Show,
    /// Make a new private key, and ask for its certificate.
    Begin,
    /// Use that key from now on.
    Finish {
        /// Its certificate, in PEM.
        cert: String,
    },
    /// Believe these authorities, and no others.
    Trust {
        /// In PEM: one, or two.
        ca: String,
        /// That the authority which is new among them was named by one that is believed already.
        #[serde(default)]
        proof: Option<String>,
    },
    /// These certificates count no more.
    Revoke {
        /// Revocation lists in PEM, signed by authorities that are believed.
        crl: String,
    },
}

/// What a host shows, and whom it believes. No private key is in it. All PEM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostKeys {
    /// Its certificate.
    pub cert: String,
    /// The authorities that it believes.
    pub ca: String,
    /// The revocation lists that it knows.
    pub crl: String,
    /// Answers `Begin`: its request for a certificate.
    #[serde(default)]
    pub request: Option<String>,
    /// Answers `Revoke`: links of removed machines that were ended for it.
    #[serde(default)]
    pub ended_links: usize,
}
