//! How events get to `notify_url`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How many events were sent to `notify_url` since this daemon began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NotifyStatus {
    /// Events that `notify_url` has taken.
    pub sent: u64,
    /// Attempts that failed. The event is sent again.
    pub failed: u64,
    /// Events that were not sent: `notify_url` refused them, or too many waited.
    pub lost: u64,
    /// Events that wait to be sent.
    pub waiting: u64,
}
