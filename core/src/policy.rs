//! What it decides: how a VM is replicated; the published systems as rows of one table.
//!
//! Flow: read by every other flow. Source: the table of policies in ARCHITECTURE.md, after Remus (NSDI'08),
//! PLOVER (NSDI'18). Not here: when exactly to sync (`sync::trigger`), what leaves when (`output::gate`).

use std::str::FromStr;

/// How a VM is replicated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Unreplicated, through the same frame path: the baseline.
    None,
    /// The backup does not run; every dirty page is sent at each sync; outputs wait for the sync.
    Remus,
    /// Both run on agreed inputs; only divergent pages are sent; outputs wait for the sync.
    Plover,
}

/// A policy's name was none of the known ones.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown policy '{0}': use none, remus or plover")]
pub struct UnknownPolicy(String);

impl Policy {
    /// All, in the order in which tables show them.
    pub const ALL: [Policy; 3] = [Policy::None, Policy::Remus, Policy::Plover];

    /// Whether there is a second copy at all.
    #[must_use]
    pub fn is_replicated(self) -> bool {
        self != Policy::None
    }

    /// Whether the backup's VM executes, fed with the same inputs.
    #[must_use]
    pub fn backup_is_active(self) -> bool {
        self == Policy::Plover
    }

    /// Whether inputs pass the agreed log before either VM sees them. A passive backup does not execute inputs, and
    /// a client sends again what was lost with the primary, so there they need no agreement.
    #[must_use]
    pub fn inputs_are_agreed(self) -> bool {
        self.backup_is_active()
    }

    /// The name as it stands in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Policy::None => "none",
            Policy::Remus => "remus",
            Policy::Plover => "plover",
        }
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Policy::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
