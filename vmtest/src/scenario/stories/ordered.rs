//! What a person orders: switchovers, other policies, a VM that goes on alone.

use std::time::Duration;

use super::super::Action::*;
use super::super::{Scenario, Thawed};
use super::ANSWERS;

/// All of them.
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario::new(
            "alone-by-order-and-back",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                KillOthers,
                AwaitTold("primary", "others-lost"),
                ProtectAlone,
                ANSWERS,
                Restart,
                AwaitProtected,
                ANSWERS,
                KillPrimary,
                ANSWERS,
            ],
        )
        .quick(),
        Scenario::new(
            "planned-switchover",
            "plover",
            &[AwaitProtected, ANSWERS, Failover, ANSWERS, AwaitProtected],
        )
        .quick(),
        // A sync is nearly always under way: a switchover waits for its end and goes before the next one.
        Scenario::new(
            "switchover-between-back-to-back-syncs",
            "remus",
            &[
                AwaitProtected,
                ANSWERS,
                Failover,
                ANSWERS,
                AwaitProtected,
                Failover,
                ANSWERS,
                AwaitProtected,
            ],
        )
        .quick(),
        Scenario::new(
            "policies-change-while-it-runs",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                Policy("remus"),
                ANSWERS,
                KillPrimary,
                ANSWERS,
                Restart,
                AwaitProtected,
                Policy("none"),
                AwaitState("protection-paused"),
                ANSWERS,
                Policy("dunlin"),
                ANSWERS,
                KillPrimary,
                ANSWERS,
            ],
        )
        .quick(),
        Scenario {
            gap_limit: Duration::from_millis(500),
            ..Scenario::new(
                "stopped-daemon-switches-over",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    StopPrimary,
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "stopped-daemon-waits-for-its-backup",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    Freeze(&["backup"]),
                    AwaitDropped,
                    Thaw(Thawed::All),
                    // It has no backup in that moment.
                    StopPrimary,
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            durable: true,
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "stopped-daemon-that-is-alone",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    KillOthers,
                    StopAlone,
                    Restart,
                    AwaitBootOnLast,
                    AwaitProtected,
                    ANSWERS,
                ],
            )
        }
        .with_disk()
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "switchover-broken-off",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    BreakSwitchover,
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    Failover,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "alone-from-disk-by-order",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    // The newest disk is not the preferred host's.
                    KillPrimary,
                    ANSWERS,
                    KillAll,
                    RestartLast,
                    BootFromDisk,
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    ANSWERS,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .with_disk()
        .quick(),
    ]
}
