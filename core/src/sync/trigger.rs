//! What it decides: when to sync.
//!
//! Flow: asked by the primary at every look at its VMs; the answer starts a sync, or says when to look again.
//!
//! Invariants:
//! 1. Two syncs are at least the shortest interval apart.
//! 2. Output never waits longer for the *start* of a sync than the longest interval.
//!
//! Source: PLOVER, "sync when both VMs are idle"; Remus syncs at a fixed period. Not here: how idleness is seen
//! (guest's thread states), what a sync does.

/// The limits, from the VM's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// No sync sooner than this after the last.
    pub shortest_us: u64,
    /// A sync at the latest this long after the last, if output waits or an input was taken.
    pub longest_us: u64,
    /// A sync even of a silent VM, so that the log and the dirty set stay short.
    pub quiet_us: u64,
}

/// What the primary sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// Now.
    pub now_us: u64,
    /// When the last sync ended.
    pub last_sync_us: u64,
    /// Whether output waits for a sync.
    pub output_waits: bool,
    /// Whether the primary's VM has nothing to do.
    pub primary_idle: bool,
    /// Whether the backup's VM has nothing to do; true for a passive backup.
    pub backup_idle: bool,
    /// Whether the disk's buffers ask for a sync.
    pub disk_asks: bool,
}

/// Why a sync was started; each is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Output waited and both VMs were idle.
    Idle,
    /// Output waited for the longest interval.
    Limit,
    /// Nothing waited, but the epoch had grown old.
    Quiet,
    /// The disk's buffers were full.
    Disk,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Start a sync now.
    Sync(Reason),
    /// Look again at once when something changes, and at the latest then.
    LookAgain {
        /// When.
        at_us: u64,
    },
}

/// How often idleness is looked at while output waits.
pub const LOOK_US: u64 = 500;

/// The decision.
#[must_use]
pub fn decide(limits: &Limits, sight: &Sight) -> Decision {
    let age_us = sight.now_us.saturating_sub(sight.last_sync_us);
    if age_us < limits.shortest_us {
        return Decision::LookAgain {
            at_us: sight.last_sync_us + limits.shortest_us,
        };
    }
    if sight.disk_asks {
        return Decision::Sync(Reason::Disk);
    }
    if sight.output_waits {
        if sight.primary_idle && sight.backup_idle {
            return Decision::Sync(Reason::Idle);
        }
        if age_us >= limits.longest_us {
            return Decision::Sync(Reason::Limit);
        }
        return Decision::LookAgain {
            at_us: sight.now_us + LOOK_US,
        };
    }
    if age_us >= limits.quiet_us {
        return Decision::Sync(Reason::Quiet);
    }
    Decision::LookAgain {
        at_us: sight.last_sync_us + limits.quiet_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        shortest_us: 1_000,
        longest_us: 50_000,
        quiet_us: 1_000_000,
    };

    fn sight(now_us: u64) -> Sight {
        Sight {
            now_us,
            last_sync_us: 0,
            output_waits: true,
            primary_idle: false,
            backup_idle: false,
            disk_asks: false,
        }
    }

    #[test]
    fn waiting_output_is_synced_when_both_are_idle() {
        let one = Sight {
            primary_idle: true,
            ..sight(2_000)
        };
        assert_eq!(
            decide(&LIMITS, &one),
            Decision::LookAgain {
                at_us: 2_000 + LOOK_US
            }
        );
        let both = Sight {
            backup_idle: true,
            ..one
        };
        assert_eq!(decide(&LIMITS, &both), Decision::Sync(Reason::Idle));
    }

    #[test]
    fn invariant_1_no_sync_within_the_shortest_interval() {
        let eager = Sight {
            primary_idle: true,
            backup_idle: true,
            disk_asks: true,
            ..sight(999)
        };
        assert_eq!(decide(&LIMITS, &eager), Decision::LookAgain { at_us: 1_000 });
    }

    #[test]
    fn invariant_2_output_waits_no_longer_than_the_longest_interval() {
        assert_eq!(decide(&LIMITS, &sight(50_000)), Decision::Sync(Reason::Limit));
    }

    #[test]
    fn a_silent_vm_is_synced_seldom() {
        let silent = Sight {
            output_waits: false,
            primary_idle: true,
            backup_idle: true,
            ..sight(60_000)
        };
        assert_eq!(decide(&LIMITS, &silent), Decision::LookAgain { at_us: 1_000_000 });
        assert_eq!(
            decide(
                &LIMITS,
                &Sight {
                    now_us: 1_000_000,
                    ..silent
                }
            ),
            Decision::Sync(Reason::Quiet)
        );
        assert_eq!(
            decide(
                &LIMITS,
                &Sight {
                    disk_asks: true,
                    ..silent
                }
            ),
            Decision::Sync(Reason::Disk)
        );
    }
}
