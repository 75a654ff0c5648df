//! How long a host's certificates are good.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One certificate's end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Certificate {
    /// `host`, or `authority`: the cluster's.
    pub what: String,
    /// In seconds since 1970.
    pub expires_s: u64,
}
