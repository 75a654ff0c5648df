//! What it decides: how a VM is replicated; the published systems as rows of one table.
//!
//! | policy | backup | leaves when | syncs | sends |
//! |---|---|---|---|---|
//! | `none` | none | at once | never | - |
//! | `remus` | passive | its sync is acknowledged | when idle, or every period | each dirty page, whole |
//! | `str` | active | its sync is acknowledged | every period | differing regions, most of them before the stop |
//! | `colo` | active | both said it, or its sync is acknowledged | on a difference, or every period | differing blocks |
//! | `plover` | active | its sync is acknowledged | when both are idle | differing blocks |
//! | `dunlin` | as pays | both said it, or its sync is acknowledged | as pays | differing blocks, hashed ahead |
//!
//! A policy is the frame; inside it a VM is in a *mode* from one sync to the next, and only `dunlin` changes it.
//!
//! Flow: read by every other flow. Source: Remus (NSDI'08); Lu and Chiueh, "Speculative memory state transfer for
//! active-active fault tolerance" (CCGrid'12); COLO (SoCC'13); PLOVER (NSDI'18). Not here: when exactly to sync
//! (`sync::trigger`), which mode pays (`sync::change_over`), what leaves when (`output`).

use std::str::FromStr;

/// How a VM is replicated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Unreplicated, through the same frame path: the baseline.
    None,
    /// The backup does not run; every dirty page is sent at each sync; outputs wait for the sync.
    Remus,
    /// Both run; a sync every period, most of it transferred before the stop; outputs wait for the sync.
    Str,
    /// Both run; outputs leave when both have said them; a difference, or a period, brings a sync.
    Colo,
    /// Both run on agreed inputs; only divergent pages are sent; outputs wait for the sync.
    Plover,
    /// Both run on agreed inputs, outputs leave when both have said them; and a change-over where that does not pay.
    Dunlin,
}

/// How the two copies are kept, from one sync to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// The backup runs; an output leaves when it has said the same.
    Match,
    /// The backup runs; an output leaves when its sync is acknowledged.
    Active,
    /// The backup holds the last sync's state and does not run; an output leaves when its sync is acknowledged.
    Passive,
}

impl Mode {
    /// All, in the order of their numbers on the wire.
    pub const ALL: [Mode; 3] = [Mode::Match, Mode::Active, Mode::Passive];

    /// Whether the backup's VM runs.
    #[must_use]
    pub fn backup_runs(self) -> bool {
        self != Mode::Passive
    }

    /// The name in status and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mode::Match => "match",
            Mode::Active => "active",
            Mode::Passive => "passive",
        }
    }
}

/// A policy's name was none of the known ones.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown policy '{0}': use dunlin, plover, colo, str, remus or none")]
pub struct UnknownPolicy(String);

impl Policy {
    /// All, in the order in which tables show them.
    pub const ALL: [Policy; 6] = [
        Policy::None,
        Policy::Remus,
        Policy::Str,
        Policy::Colo,
        Policy::Plover,
        Policy::Dunlin,
    ];

    /// Its number on the wire.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The policy of a number.
    #[must_use]
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Whether there is a second copy at all.
    #[must_use]
    pub fn is_replicated(self) -> bool {
        self != Policy::None
    }

    /// The mode after a join.
    #[must_use]
    pub fn first_mode(self) -> Mode {
        match self {
            Policy::None | Policy::Remus => Mode::Passive,
            Policy::Str | Policy::Plover => Mode::Active,
            Policy::Colo | Policy::Dunlin => Mode::Match,
        }
    }

    /// Whether outputs are compared while the mode allows it.
    #[must_use]
    pub fn compares_output(self) -> bool {
        self.first_mode() == Mode::Match
    }

    /// Whether the mode follows what pays.
    #[must_use]
    pub fn changes_over(self) -> bool {
        self == Policy::Dunlin
    }

    /// Whether inputs pass the agreed log before either VM sees them. A backup that is always passive does not
    /// execute inputs, and a client sends again what was lost with the primary, so there they need no agreement.
    #[must_use]
    pub fn inputs_are_agreed(self) -> bool {
        !matches!(self, Policy::None | Policy::Remus)
    }

    /// Whether pages are worked on before the VM stops for a sync.
    #[must_use]
    pub fn works_ahead(self) -> bool {
        matches!(self, Policy::Str | Policy::Dunlin)
    }

    /// The period of its syncs in milliseconds where its authors used one: Lu and Chiueh compare at 25 ms; QEMU's
    /// COLO forces a checkpoint every 10 s (docs/COLO-FT.txt sets `x-checkpoint-delay` to 10,000).
    #[must_use]
    pub fn usual_period_ms(self) -> Option<f64> {
        match self {
            Policy::Str => Some(25.0),
            Policy::Colo => Some(10_000.0),
            Policy::None | Policy::Remus | Policy::Plover | Policy::Dunlin => None,
        }
    }

    /// The period in use: the configured one, or the usual one.
    #[must_use]
    pub fn period_ms(self, configured: Option<f64>) -> Option<f64> {
        configured.or(self.usual_period_ms())
    }

    /// The name as it stands in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Policy::None => "none",
            Policy::Remus => "remus",
            Policy::Str => "str",
            Policy::Colo => "colo",
            Policy::Plover => "plover",
            Policy::Dunlin => "dunlin",
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

#[cfg(test)]
mod tests {
    use super::Policy;

    #[test]
    fn every_policy_is_found_by_its_number_and_by_its_name() {
        for policy in Policy::ALL {
            assert_eq!(Policy::numbered(policy.number()), Some(policy));
            assert_eq!(policy.name().parse(), Ok(policy));
        }
        assert_eq!(Policy::numbered(Policy::ALL.len() as u8), None);
    }
}
