//! What goes wrong in a campaign, and when: all of it from its seed.

use crate::random::Random;

/// Who is meant, whichever host it is then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Who speaks.
    Primary,
    /// Who could.
    Backup,
    /// Who only agrees.
    Witness,
}

impl Role {
    /// As in `dunlin status`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::Backup => "backup",
            Self::Witness => "witness",
        }
    }
}

/// A kind of fault, as on the command line (`--kinds`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// SIGKILL to a whole host.
    Kill,
    /// SIGKILL to a daemon.
    KillDaemon,
    /// A host stands still, and goes on.
    Pause,
    /// A host stands still for a moment, again and again.
    Stutter,
    /// A host is cut off from everybody.
    Cut,
    /// A host does not hear another one.
    OneWay,
    /// A host is not heard by anybody.
    Mute,
    /// Two hosts do not hear each other.
    Between,
    /// A host's cable carries little.
    SlowLink,
    /// A host's disk is slow.
    SlowDisk,
    /// A host's disk fails.
    FailingDisk,
    /// A host's disk is full.
    FullDisk,
    /// A host's state folder is full.
    FullState,
    /// A host's wall clock jumps.
    Clock,
    /// Clients send more than a VM can take.
    Flood,
    /// A switchover.
    Switchover,
    /// A daemon is told to end, and comes back.
    Stop,
    /// The guest reboots, as if a person in it had typed it.
    Reboot,
}

/// Every kind, its name, and how often it comes in comparison.
pub const KINDS: [(Kind, &str, u64); 18] = [
    (Kind::Kill, "kill", 4),
    (Kind::KillDaemon, "kill-daemon", 1),
    (Kind::Pause, "pause", 3),
    (Kind::Stutter, "stutter", 1),
    (Kind::Cut, "cut", 2),
    (Kind::OneWay, "one-way", 2),
    (Kind::Mute, "mute", 1),
    (Kind::Between, "between", 2),
    (Kind::SlowLink, "slow-link", 2),
    (Kind::SlowDisk, "slow-disk", 1),
    (Kind::FailingDisk, "failing-disk", 1),
    (Kind::FullDisk, "full-disk", 1),
    (Kind::FullState, "full-state", 1),
    (Kind::Clock, "clock", 1),
    (Kind::Flood, "flood", 1),
    (Kind::Switchover, "switchover", 1),
    (Kind::Stop, "stop", 1),
    (Kind::Reboot, "reboot", 1),
];

/// The kind's name on the command line.
pub fn name(kind: Kind) -> &'static str {
    let found = KINDS.iter().find(|(known, ..)| *known == kind);
    found.map_or("?", |(_, name, _)| name)
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What.
    pub kind: Kind,
    /// To whom; of two hosts the first.
    pub role: Role,
    /// The second of two hosts.
    pub other: Role,
    /// How long the load runs before it.
    pub after_ms: u64,
    /// How long it lasts.
    pub for_ms: u64,
    /// Any number: which variant, how much.
    pub variant: u64,
}

/// The first `count` faults of `seed`, of those kinds alone (all, if none is named). A longer campaign of the same seed begins with
/// the shorter one's.
pub fn plan(seed: u64, count: usize, only: &[Kind]) -> Vec<Fault> {
    let mut random = Random::new(seed);
    let weights: Vec<(Kind, u64)> = KINDS
        .iter()
        .filter(|(kind, ..)| only.is_empty() || only.contains(kind))
        .map(|&(kind, _, weight)| (kind, weight))
        .collect();
    (0..count).map(|_| draw(&mut random, &weights)).collect()
}

fn draw(random: &mut Random, weights: &[(Kind, u64)]) -> Fault {
    let mut at = random.below(weights.iter().map(|(_, weight)| weight).sum());
    let kind = weights
        .iter()
        .find(|(_, weight)| {
            let here = at < *weight;
            at = at.saturating_sub(*weight);
            here
        })
        .map_or(Kind::Kill, |(kind, _)| *kind);
    let roles: &[Role] = match kind {
        // These are about the VM's own disk, or its speaker.
        Kind::SlowDisk | Kind::FailingDisk | Kind::FullDisk => &[Role::Primary, Role::Backup],
        Kind::Switchover | Kind::Flood | Kind::Reboot => &[Role::Primary],
        // The primary more often: that is what the VM is there for.
        _ => &[Role::Primary, Role::Primary, Role::Backup, Role::Witness],
    };
    let role = random.pick(roles).unwrap_or(Role::Primary);
    let others: Vec<Role> = [Role::Primary, Role::Backup, Role::Witness]
        .into_iter()
        .filter(|other| *other != role)
        .collect();
    Fault {
        kind,
        role,
        other: random.pick(&others).unwrap_or(Role::Witness),
        after_ms: random.below(1500),
        for_ms: length_ms(random, kind),
        variant: random.draw(),
    }
}

/// Short ones more often than long ones: each length between the two limits comes as often as its double.
fn length_ms(random: &mut Random, kind: Kind) -> u64 {
    let (shortest, longest): (u64, u64) = match kind {
        Kind::Pause => (1000, 30_000),
        Kind::Stutter => (20, 200),
        Kind::Kill | Kind::KillDaemon | Kind::Stop => (1, 4000),
        Kind::Cut | Kind::OneWay | Kind::Mute | Kind::Between => (50, 12_000),
        _ => (1000, 6000),
    };
    let doublings = random.below(1 + u64::from((longest / shortest).ilog2()));
    let low = shortest << doublings;
    random.between(low, (2 * low).min(longest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_is_a_campaign_and_a_longer_one_begins_with_the_shorter() {
        let (short, long) = (plan(7, 20, &[]), plan(7, 500, &[]));
        assert_eq!(short[..], long[..20]);
        assert_ne!(short, plan(8, 20, &[]));
        let kinds: BTreeSet<Kind> = long.iter().map(|fault| fault.kind).collect();
        assert_eq!(kinds.len(), KINDS.len(), "500 faults are of every kind");
        assert!(long.iter().all(|fault| fault.role != fault.other));
        for fault in long.iter().filter(|fault| fault.kind == Kind::Pause) {
            assert!((1000..=30_000).contains(&fault.for_ms), "{fault:?}");
        }
        let disks = [Kind::SlowDisk, Kind::FailingDisk, Kind::FullDisk];
        let about_disks = long.iter().filter(|fault| disks.contains(&fault.kind));
        assert!(about_disks.into_iter().all(|fault| fault.role != Role::Witness));
    }

    #[test]
    fn kinds_can_be_chosen() {
        let only = [Kind::Clock, Kind::Cut];
        let chosen = plan(1, 100, &only);
        assert!(chosen.iter().all(|fault| only.contains(&fault.kind)));
        assert!(chosen.iter().any(|fault| fault.kind == Kind::Clock));
    }
}
