//! Hosts that live and are away, late or stuck: cut off, frozen, slow, or with a QEMU that hangs.

use std::time::Duration;

use super::super::Action::*;
use super::super::{Away, Scenario, Thawed};
use super::{ANSWERS, THERE_AND_BACK};

/// All of them.
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario::new(
            "cut-off-primary-falls-silent",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                CutPrimary,
                ANSWERS,
                RestoreLinks,
                AwaitProtected,
                ANSWERS,
            ],
        )
        .quick(),
        Scenario {
            idle_cards: 1,
            ..Scenario::new("idle-second-card", "dunlin", &THERE_AND_BACK)
        }
        .quick(),
        Scenario {
            connections: 4,
            ..Scenario::new(
                "long-lost-primary-returns",
                "dunlin",
                &[
                    AwaitProtected,
                    ANSWERS,
                    LosePrimaryFor(Away::Frozen),
                    AwaitProtected,
                    AwaitTold("backup", "ended-here"),
                    ANSWERS,
                    LosePrimaryFor(Away::Mute),
                    AwaitProtected,
                    ANSWERS,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "nothing-leaves-without-the-backup",
                "dunlin",
                &[
                    AwaitProtected,
                    ANSWERS,
                    // Two of three are there, and both say the same.
                    Freeze(&["witness"]),
                    ANSWERS,
                    AwaitProtected,
                    // Nobody is left who could say it, nor agree that it need not be said.
                    Freeze(&["backup"]),
                    AwaitSilence,
                    Thaw(Thawed::Witness),
                    ANSWERS,
                    Thaw(Thawed::All),
                    AwaitProtected,
                    ANSWERS,
                    // The witness is there to agree.
                    Freeze(&["backup"]),
                    AwaitDropped,
                    ANSWERS,
                    Thaw(Thawed::All),
                    AwaitProtected,
                    ANSWERS,
                    Freeze(&["backup", "witness"]),
                    AwaitSilence,
                    KillPrimaryAndThaw,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            // Of the watchdog's ten seconds.
            gap_limit: Duration::from_secs(20),
            ..Scenario::new(
                "primary-hangs-in-a-sync",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    HangPrimary,
                    ANSWERS,
                    AwaitProtected,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "backup-hangs-in-a-sync",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    HangBackup,
                    ANSWERS,
                    AwaitProtected,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "half-load-does-not-lead",
                "remus",
                &[
                    AwaitProtected,
                    ANSWERS,
                    HalfLoad,
                    ANSWERS,
                    AwaitProtected,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "same-leader-in-new-terms",
                "dunlin",
                &[
                    AwaitProtected,
                    ANSWERS,
                    NewTerms(5),
                    ANSWERS,
                    AwaitProtected,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario::new(
            "cut-off-backup-returns",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                CutBackup,
                ANSWERS,
                RestoreLinks,
                AwaitProtected,
                ANSWERS,
            ],
        ),
        Scenario::new(
            "paused-primary-does-not-speak-again",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                PausePrimary(1500),
                ANSWERS,
                AwaitProtected,
                ANSWERS,
            ],
        ),
        Scenario {
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "stuttering-backup",
                "dunlin",
                &[
                    AwaitProtected,
                    ANSWERS,
                    Stutter(30, 100),
                    ANSWERS,
                    AwaitProtected,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        },
        Scenario {
            cpu: Some(100),
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "slow-backup",
                "dunlin",
                &[
                    AwaitProtected,
                    ANSWERS,
                    SlowBackup(15),
                    ANSWERS,
                    AwaitProtected,
                    KillPrimary,
                    SlowBackup(100),
                    ANSWERS,
                ],
            )
        },
    ]
}
