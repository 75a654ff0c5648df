//! What it decides: when to sync.
//!
//! Flow: asked by the primary at every look at its VMs; the answer starts a sync, or says when to look again.
//!
//! Invariants:
//! 1. Two syncs are at least the shortest interval apart.
//! 2. Output never waits longer for the *start* of a sync than the longest interval; where outputs are compared, than
//!    a second or a few times as long as the backup's first output after a load takes, whichever is more, and never more
//!    than two seconds. Acknowledgements alone wait two seconds.
//! 3. Where outputs are compared, a difference brings a sync at once (invariant 1 permitting); a word that was overtaken by others
//!    does so soon, and so does an end that differs: the client has all bytes, and under load a sync comes for something else before that.
//!
//! Where outputs are compared, output that waits is no reason by itself: the backup may be about to say the same. It
//! is one when the backup has nothing left to do and has not said it: then it never will. A backup that works on and
//! on is waited for as long as a few loads would keep it silent, and no longer: so a client never pays much more than it
//! would have to. There is no time-out to guess; a fixed one would sync too often under load and too late without (measured:
//! docs/output.md).
//!
//! Source: PLOVER, "sync when both VMs are idle"; Remus syncs at a fixed period; COLO syncs on a difference. Not
//! here: how idleness is seen (guest's thread states), what a sync does, which mode pays (`change_over`).

use crate::policy::Mode;

/// The limits, from the VM's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// No sync sooner than this after the last.
    pub shortest_us: u64,
    /// A sync at the latest this long after the last, if output waits (or, where outputs are compared, anyway).
    pub longest_us: u64,
    /// A sync even of a silent VM, so that the log and the dirty set stay short.
    pub quiet_us: u64,
}

/// What the primary sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// Now.
    pub now_us: u64,
    /// When the last sync ended; where syncs have a fixed period, what [`period_counts_from_us`] says.
    pub last_sync_us: u64,
    /// How the copies are kept now.
    pub mode: Mode,
    /// Whether output waits for a sync, or for the backup's word.
    pub output_waits: bool,
    /// Whether the backup has said something else than the primary, or the comparer can no longer tell.
    pub differs: bool,
    /// Whether the primary's VM has nothing to do.
    pub primary_idle: bool,
    /// Whether the backup's VM has nothing to do; true for a passive backup.
    pub backup_idle: bool,
    /// Whether the disk's buffers ask for a sync.
    pub disk_asks: bool,
    /// Whether another mode is to be taken up.
    pub change_over: bool,
    /// How long the oldest output that waits for the backup's word has waited.
    pub waited_us: u64,
    /// How long acknowledgements have waited for the backup's, where nothing else waits.
    pub acks_waited_us: u64,
    /// How long the end of a connection has waited that the copies ended in different ways behind the same bytes; 0 where none waits.
    pub ends_waited_us: u64,
    /// How much later than what waits for the backup's word the primary said something that the backup has said since.
    pub overtaken_us: u64,
    /// How long the backup has said nothing that the primary had said.
    pub silent_us: u64,
    /// How long the backup's first word after a load takes, if that is known.
    pub stall_us: u64,
    /// How much of its clients' time a sync costs, where one may be put off for that.
    pub cost_us: u64,
    /// How long an epoch may be until the backup's memory for a sync is a quarter full, by what the last one sent.
    pub fills_us: u64,
    /// Whether memory fills up that a sync makes free: the agreed log, or output that is held, is half full.
    pub memory_asks: bool,
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
    /// The backup said something else.
    Differs,
    /// Another mode pays.
    ChangeOver,
    /// The log, or what output is held in, was half full.
    Memory,
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

/// Where a sync serves only to keep the next one small, such syncs cost clients at most one part in this many of
/// the time, up to this interval.
const COST_SHARE: u64 = 40;
const LONGEST_ROUTINE_US: u64 = 60_000_000;
/// A VM that writes much is synced sooner, so that a sync finds room in the backup; no sooner than this.
const SHORTEST_FILL_US: u64 = 100_000;
/// The backup's word is waited for this many times as long as its first one after a load took, and at least so long: a backup that works and is
/// late is believed to say it yet. After a load it is slow (under TCG it translates anew, half a second for some services),
/// and a sync would make it begin anew: with a quarter of a second a loaded backup never got beyond that (docs/output.md).
const PATIENCE_SYNCS: u64 = 4;
const PATIENCE_US: u64 = 1_000_000;
/// One that says what others wait for works off what has piled up, and gets so long. Nobody gets longer.
const LONGEST_PATIENCE_US: u64 = 2_000_000;
/// A word that was overtaken by so much is no longer hoped for: the backup is not late, it says what the primary said after it.
/// Without this a client of one service waited as long as the others' were being answered, two seconds.
const OVERTAKEN_US: u64 = 300_000;
/// The end of a connection that only its way differs in waits so long for a sync that comes anyway. A client that has half closed its own
/// end and waits for the VM's waits as long.
const ENDS_US: u64 = 100_000;

impl Limits {
    /// The limits where an epoch should not be longer than this.
    fn at_most(self, epoch_us: u64) -> Self {
        let most_us = epoch_us.max(SHORTEST_FILL_US);
        Self {
            longest_us: self.longest_us.min(most_us),
            quiet_us: self.quiet_us.min(most_us),
            ..self
        }
    }

    /// The limits where a sync costs clients `cost_us`.
    fn at_cost(self, cost_us: u64) -> Self {
        let routine_us = (cost_us * COST_SHARE).min(LONGEST_ROUTINE_US);
        Self {
            longest_us: self.longest_us.max(routine_us),
            quiet_us: self.quiet_us.max(routine_us),
            ..self
        }
    }
}

/// From when a fixed period counts: from one sync's beginning to the next one's, as in Remus; but the VM's epoch is never shorter than half of
/// it, however long a sync takes.
#[must_use]
pub fn period_counts_from_us(begun_us: u64, ended_us: u64, period_us: u64) -> u64 {
    begun_us.max(ended_us.saturating_sub(period_us / 2))
}

/// How often idleness is looked at while output waits for it.
pub const LOOK_US: u64 = 500;
/// The same where the backup's word is what output usually waits for.
pub const MATCH_LOOK_US: u64 = 4_000;

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
    if sight.memory_asks {
        return Decision::Sync(Reason::Memory);
    }
    if sight.change_over {
        return Decision::Sync(Reason::ChangeOver);
    }
    let matches = sight.mode == Mode::Match;
    let limits = if matches {
        limits.at_cost(sight.cost_us)
    } else {
        *limits
    }
    .at_most(sight.fills_us);
    let patience_us = (PATIENCE_SYNCS * sight.stall_us).clamp(PATIENCE_US, LONGEST_PATIENCE_US);
    let patience_us = if sight.silent_us < patience_us / 2 {
        LONGEST_PATIENCE_US
    } else {
        patience_us
    };
    let overtaken = sight.overtaken_us >= (PATIENCE_SYNCS * sight.stall_us).clamp(OVERTAKEN_US, PATIENCE_US);
    // A client mends what the backup has lost of its bytes, and has had three of its own time-outs for that.
    let acks_stay = sight.acks_waited_us >= LONGEST_PATIENCE_US;
    if matches && (overtaken || acks_stay || sight.waited_us >= patience_us) {
        return Decision::Sync(Reason::Limit);
    }
    let ends_stay = sight.ends_waited_us >= ENDS_US;
    if matches && (sight.differs || ends_stay) {
        return Decision::Sync(Reason::Differs);
    }
    let both_idle = sight.primary_idle && sight.backup_idle;
    if sight.output_waits && both_idle {
        return Decision::Sync(Reason::Idle);
    }
    if (sight.output_waits || matches) && age_us >= limits.longest_us {
        return Decision::Sync(Reason::Limit);
    }
    if sight.output_waits {
        let look_us = if matches { MATCH_LOOK_US } else { LOOK_US };
        return Decision::LookAgain {
            at_us: sight.now_us + look_us,
        };
    }
    if age_us < limits.quiet_us {
        return Decision::LookAgain {
            at_us: sight.last_sync_us + limits.quiet_us,
        };
    }
    // A VM that answers without a sync is not disturbed while it works; the longest interval bounds that.
    if matches && !both_idle {
        return Decision::LookAgain {
            at_us: sight.now_us + MATCH_LOOK_US,
        };
    }
    Decision::Sync(Reason::Quiet)
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
            mode: Mode::Active,
            output_waits: true,
            differs: false,
            change_over: false,
            waited_us: 0,
            acks_waited_us: 0,
            ends_waited_us: 0,
            silent_us: u64::MAX,
            overtaken_us: 0,
            fills_us: u64::MAX,
            stall_us: 0,
            cost_us: 0,
            memory_asks: false,
            primary_idle: false,
            backup_idle: false,
            disk_asks: false,
        }
    }

    /// Syncs that take 7 of 50 ms come every 50 ms, and such that take 200 ms every 225.
    #[test]
    fn a_period_is_from_one_beginning_to_the_next() {
        let limits = Limits {
            shortest_us: 50_000,
            longest_us: 50_000,
            ..LIMITS
        };
        for (takes_us, every_us) in [(7_000, 50_000), (25_000, 50_000), (200_000, 225_000)] {
            let (begun_us, ended_us) = (1_000_000, 1_000_000 + takes_us);
            let at = |now_us| {
                let last_sync_us = period_counts_from_us(begun_us, ended_us, limits.longest_us);
                let sight = Sight {
                    last_sync_us,
                    mode: Mode::Passive,
                    primary_idle: false,
                    ..sight(now_us)
                };
                decide(&limits, &sight)
            };
            assert_eq!(at(begun_us + every_us), Decision::Sync(Reason::Limit));
            let early = at(begun_us + every_us - 1_000);
            let at_us = begun_us + every_us;
            assert_eq!(early, Decision::LookAgain { at_us });
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
    fn memory_that_fills_up_is_freed_in_every_mode_and_whatever_a_sync_costs() {
        for mode in Mode::ALL {
            let sight = |memory_asks| Sight {
                mode,
                memory_asks,
                output_waits: false,
                cost_us: 1_000_000,
                stall_us: 1_000_000,
                ..sight(2_000)
            };
            assert_eq!(decide(&LIMITS, &sight(true)), Decision::Sync(Reason::Memory));
            assert!(matches!(
                decide(&LIMITS, &sight(false)),
                Decision::LookAgain { .. }
            ));
        }
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

    #[test]
    fn a_vm_that_writes_much_is_synced_before_the_backups_memory_is_full() {
        let writes = Sight {
            output_waits: false,
            primary_idle: true,
            backup_idle: true,
            fills_us: 300_000,
            ..sight(299_999)
        };
        assert_eq!(decide(&LIMITS, &writes), Decision::LookAgain { at_us: 300_000 });
        for mode in Mode::ALL {
            let full = Sight {
                now_us: 300_000,
                cost_us: 1_000_000,
                mode,
                ..writes
            };
            assert!(matches!(decide(&LIMITS, &full), Decision::Sync(_)), "{mode:?}");
        }
    }

    #[test]
    fn invariant_3_a_difference_is_synced_at_once_but_waiting_for_the_backups_word_is_not() {
        let waits = Sight {
            mode: Mode::Match,
            ..sight(2_000)
        };
        assert_eq!(
            decide(&LIMITS, &waits),
            Decision::LookAgain {
                at_us: 2_000 + MATCH_LOOK_US
            }
        );
        let differs = Sight {
            differs: true,
            ..waits
        };
        assert_eq!(decide(&LIMITS, &differs), Decision::Sync(Reason::Differs));
        let will_never_say_it = Sight {
            primary_idle: true,
            backup_idle: true,
            ..waits
        };
        assert_eq!(decide(&LIMITS, &will_never_say_it), Decision::Sync(Reason::Idle));
    }

    #[test]
    fn an_end_that_differs_is_synced_soon_or_when_nobody_has_anything_to_do() {
        let ends = Sight {
            mode: Mode::Match,
            ends_waited_us: ENDS_US - 1,
            ..sight(2_000)
        };
        let at_us = 2_000 + MATCH_LOOK_US;
        assert_eq!(decide(&LIMITS, &ends), Decision::LookAgain { at_us });
        let idle = Sight {
            primary_idle: true,
            backup_idle: true,
            ..ends
        };
        assert_eq!(decide(&LIMITS, &idle), Decision::Sync(Reason::Idle));
        let stays = Sight {
            ends_waited_us: ENDS_US,
            ..ends
        };
        assert_eq!(decide(&LIMITS, &stays), Decision::Sync(Reason::Differs));
    }

    #[test]
    fn a_backup_that_does_not_say_it_is_waited_for_as_long_as_syncs_would_cost() {
        let waits = Sight {
            mode: Mode::Match,
            waited_us: PATIENCE_US,
            ..sight(2_000)
        };
        assert_eq!(decide(&LIMITS, &waits), Decision::Sync(Reason::Limit));
        let dear = Sight {
            stall_us: PATIENCE_US,
            ..waits
        };
        assert_eq!(
            decide(&LIMITS, &dear),
            Decision::LookAgain {
                at_us: 2_000 + MATCH_LOOK_US
            }
        );
    }

    #[test]
    fn a_backup_that_works_off_what_has_piled_up_is_waited_for_longer_and_not_for_ever() {
        let works = Sight {
            mode: Mode::Match,
            waited_us: LONGEST_PATIENCE_US - 1,
            silent_us: 1_000,
            ..sight(2_000)
        };
        assert!(matches!(decide(&LIMITS, &works), Decision::LookAgain { .. }));
        let too_long = Sight {
            waited_us: LONGEST_PATIENCE_US,
            ..works
        };
        assert_eq!(decide(&LIMITS, &too_long), Decision::Sync(Reason::Limit));
        let fell_silent = Sight {
            silent_us: PATIENCE_US / 2,
            ..works
        };
        assert_eq!(decide(&LIMITS, &fell_silent), Decision::Sync(Reason::Limit));
    }

    #[test]
    fn a_word_that_is_overtaken_is_not_waited_for_like_one_that_is_late() {
        let mixed = Sight {
            mode: Mode::Match,
            waited_us: 400_000,
            silent_us: 1_000,
            ..sight(2_000)
        };
        let overtaken = |overtaken_us| Sight {
            overtaken_us,
            ..mixed
        };
        // Others are answered, but nothing that was said after it: the backup works off what has piled up.
        assert!(matches!(decide(&LIMITS, &mixed), Decision::LookAgain { .. }));
        assert!(matches!(
            decide(&LIMITS, &overtaken(OVERTAKEN_US - 1)),
            Decision::LookAgain { .. }
        ));
        assert_eq!(
            decide(&LIMITS, &overtaken(OVERTAKEN_US)),
            Decision::Sync(Reason::Limit)
        );
        // Where a sync makes the backup slow for long, more is hoped for.
        let dear = Sight {
            stall_us: OVERTAKEN_US,
            ..overtaken(OVERTAKEN_US)
        };
        assert!(matches!(decide(&LIMITS, &dear), Decision::LookAgain { .. }));
    }

    #[test]
    fn invariant_2_acknowledgements_alone_are_synced_too_whatever_a_sync_costs() {
        let uploads = |acks_waited_us| Sight {
            mode: Mode::Match,
            output_waits: false,
            cost_us: 400_000,
            stall_us: 400_000,
            acks_waited_us,
            ..sight(60_000)
        };
        assert!(matches!(
            decide(&LIMITS, &uploads(LONGEST_PATIENCE_US - 1)),
            Decision::LookAgain { .. }
        ));
        assert_eq!(
            decide(&LIMITS, &uploads(LONGEST_PATIENCE_US)),
            Decision::Sync(Reason::Limit)
        );
    }

    #[test]
    fn a_matching_vm_is_not_disturbed_while_it_works() {
        let busy = Sight {
            mode: Mode::Match,
            output_waits: false,
            ..sight(49_000)
        };
        let limits = Limits {
            quiet_us: 10_000,
            ..LIMITS
        };
        assert_eq!(
            decide(&limits, &busy),
            Decision::LookAgain {
                at_us: 49_000 + MATCH_LOOK_US
            }
        );
        let idle = Sight {
            primary_idle: true,
            backup_idle: true,
            ..busy
        };
        assert_eq!(decide(&limits, &idle), Decision::Sync(Reason::Quiet));
        let long = Sight {
            now_us: 50_000,
            ..busy
        };
        assert_eq!(decide(&limits, &long), Decision::Sync(Reason::Limit));
    }
}
