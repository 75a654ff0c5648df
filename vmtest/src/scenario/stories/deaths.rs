//! Hosts, daemons and disks' power die, one after the other or all at once.

use std::time::Duration;

use super::super::Action::*;
use super::super::{Action, Scenario};
use super::{ANSWERS, THERE_AND_BACK};

/// Deaths at lines of a sync that the primary and the backup pass.
const DEATHS_IN_SYNCS: [Action; 19] = [
    AwaitProtected,
    ANSWERS,
    DieAt("backup", "backup-acknowledged"),
    ANSWERS,
    Restart,
    AwaitProtected,
    ANSWERS,
    DieAt("backup", "backup-half-applied"),
    ANSWERS,
    Restart,
    AwaitProtected,
    ANSWERS,
    DieAt("primary", "primary-stopped"),
    ANSWERS,
    Restart,
    AwaitProtected,
    ANSWERS,
    DieAt("primary", "primary-captured"),
    ANSWERS,
];

/// Each death on a network that brings everything to both hosts.
const FLOODED_DEATHS: [Action; 14] = [
    AwaitProtected,
    Flood,
    ANSWERS,
    KillPrimary,
    ANSWERS,
    Restart,
    AwaitProtected,
    ANSWERS,
    KillPrimary,
    ANSWERS,
    Restart,
    AwaitProtected,
    ANSWERS,
    HasOverheard,
];

/// All of them.
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario::new("kill-primary-and-back", "plover", &THERE_AND_BACK).quick(),
        Scenario::new("overheard-by-the-backup", "dunlin", &FLOODED_DEATHS).quick(),
        Scenario::new("overheard-by-a-passive-backup", "remus", &FLOODED_DEATHS),
        Scenario::new(
            "kill-primary-passive-backup",
            "remus",
            &[AwaitProtected, ANSWERS, KillPrimary, ANSWERS],
        )
        .quick(),
        Scenario::new("kill-primary-with-disk", "plover", &THERE_AND_BACK)
            .with_disk()
            .quick(),
        Scenario::new(
            "backup-and-witness-die",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                KillBackup,
                ANSWERS,
                Restart,
                AwaitProtected,
                ANSWERS,
                KillWitness,
                ANSWERS,
                Restart,
                ANSWERS,
            ],
        )
        .quick(),
        Scenario::new(
            "daemon-crash-leaves-nothing",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                KillPrimaryDaemon,
                ANSWERS,
                Restart,
                AwaitProtected,
            ],
        )
        .quick(),
        Scenario::new(
            "new-machines-replace-dead-hosts",
            "dunlin",
            &[
                AwaitProtected,
                ANSWERS,
                KillPrimary,
                ANSWERS,
                Replace,
                AwaitProtected,
                ANSWERS,
                KillPrimary,
                ANSWERS,
                Replace,
                AwaitProtected,
                KillWitness,
                Replace,
                AwaitAllLinked,
                ANSWERS,
                KillPrimary,
                ANSWERS,
            ],
        )
        .with_disk()
        .quick(),
        Scenario::new(
            "move-to-a-new-host",
            "dunlin",
            &[
                AwaitProtected,
                ANSWERS,
                KillBackup,
                MoveBackup("d"),
                ANSWERS,
                KillBackup,
                MoveBackup("d"),
                // The preferred host is lost, and never comes back under this name.
                KillPrimary,
                ANSWERS,
                MoveBackup("e"),
                ANSWERS,
                // Those who were dead hear of it when they are back.
                Restart,
                AwaitGone("a"),
                AwaitGone("b"),
                // A witness that begins anew reads its VM's file as it is now.
                KillWitness,
                Restart,
                AwaitAllLinked,
                MoveWitness("b"),
                AwaitGone("c"),
                // A host that had a part comes back under a new number.
                MoveBackup("a"),
                AwaitGone("e"),
                ANSWERS,
                KillPrimary,
                ANSWERS,
                Restart,
                AwaitProtected,
                ANSWERS,
            ],
        )
        .with_disk()
        .quick(),
        Scenario::new(
            "standby-survives-two-deaths",
            "dunlin",
            &[
                AwaitProtected,
                ANSWERS,
                KillPrimary,
                // Nobody orders anything from here on.
                AwaitBackup("d"),
                ANSWERS,
                // Of its first two hosts none is left.
                KillPrimary,
                ANSWERS,
                // The first host is the standby now; the second one stays away.
                RestartHost("a"),
                AwaitBackup("a"),
                ANSWERS,
                KillPrimary,
                ANSWERS,
                Restart,
                AwaitProtected,
                ANSWERS,
            ],
        )
        .with_disk()
        .quick(),
        Scenario {
            durable: true,
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "power-loss-after-a-move",
                "dunlin",
                &[
                    AwaitProtected,
                    ANSWERS,
                    KillBackup,
                    MoveBackup("d"),
                    ANSWERS,
                    KillPrimary,
                    ANSWERS,
                    MoveBackup("e"),
                    ANSWERS,
                    // All come back, and with them two that know the VM's first hosts only: of the first three they are a majority.
                    KillAll,
                    Restart,
                    AwaitBootOnLast,
                    AwaitGone("a"),
                    AwaitGone("b"),
                    AwaitProtected,
                    ANSWERS,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .with_disk()
        .quick(),
        Scenario {
            durable: true,
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "power-loss-boots-the-newest-disk",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    // The newest disk is not the preferred host's.
                    KillPrimary,
                    ANSWERS,
                    KillAll,
                    Restart,
                    AwaitBootOnLast,
                    AwaitProtected,
                    ANSWERS,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .with_disk()
        .quick(),
        Scenario {
            durable: true,
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "dropped-copy-keeps-nobody-from-booting",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    Freeze(&["backup"]),
                    AwaitDropped,
                    ANSWERS,
                    // The backup's copy lives, and lacks what clients were told since: the VM is served again when its last host is back.
                    KillUnprotectedAndThaw,
                    Restart,
                    AwaitBootOnLast,
                    AwaitProtected,
                    ANSWERS,
                ],
            )
        }
        .with_disk(),
        Scenario {
            connections: 8,
            ..Scenario::new(
                "death-in-a-change-over",
                "dunlin",
                &[
                    // Out of matching, then out of passive epochs: each at the primary and at the backup.
                    AwaitProtected,
                    DieAt("primary", "primary-changes-over"),
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    AwaitMode("passive"),
                    DieAt("primary", "primary-changes-over"),
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    DieAt("backup", "backup-changes-over"),
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    AwaitMode("passive"),
                    DieAt("backup", "backup-changes-over"),
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario {
            connections: 8,
            ..Scenario::new(
                "kill-primary-where-matching-does-not-pay",
                "dunlin",
                &[
                    AwaitProtected,
                    AwaitMode("passive"),
                    AwaitAnswers(300),
                    KillPrimary,
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    AwaitMode("passive"),
                    AwaitAnswers(700),
                    KillPrimary,
                    ANSWERS,
                    Restart,
                    AwaitProtected,
                    AwaitMode("passive"),
                    Failover,
                    ANSWERS,
                ],
            )
        }
        .quick(),
        Scenario::new(
            "take-over-cut-short",
            "dunlin",
            &[
                AwaitProtected,
                ANSWERS,
                Inject("backup", "step-down-at=backup-took-over"),
                KillPrimary,
                AwaitTold("primary", "stepped-down"),
                ANSWERS,
                Restart,
                AwaitProtected,
                KillPrimary,
                ANSWERS,
            ],
        )
        .quick(),
        Scenario::new("passive-backup-with-disk", "remus", &THERE_AND_BACK).with_disk(),
        Scenario {
            durable: true,
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "power-loss-while-protected",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    KillAll,
                    Restart,
                    AwaitBootOnLast,
                    AwaitProtected,
                    ANSWERS,
                ],
            )
        }
        .with_disk(),
        Scenario::new(
            "interrupted-daemon-leaves-nothing",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                InterruptPrimary,
                ANSWERS,
                Restart,
                AwaitProtected,
            ],
        ),
        Scenario {
            audit: true,
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "audited-death-after-release",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    DieAt("primary", "primary-released"),
                    ANSWERS,
                ],
            )
        },
        Scenario::new("death-in-a-sync", "plover", &DEATHS_IN_SYNCS),
        Scenario::new("death-in-a-passive-sync", "remus", &DEATHS_IN_SYNCS),
    ]
}
