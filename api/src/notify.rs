//! How events get to `notify_url`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Since this daemon began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NotifyStatus {
    /// Events that were taken.
    pub sent: u64,
    /// Attempts that failed; the event is sent again.
    pub failed: u64,
    /// Events that were not sent: refused, or too many waited.
    pub lost: u64,
    /// Events that wait to be sent.
    pub waiting: u64,
}
