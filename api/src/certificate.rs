//! How long a host's certificates are good.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// When a certificate of a host expires.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Certificate {
    /// Which certificate: the `host`'s own, or that of the cluster's `authority`.
    pub what: String,
    /// When it expires, in seconds since 1970.
    pub expires_s: u64,
}
