//! Disks that are full, slow or broken.

use std::time::Duration;

use super::super::Action::*;
use super::super::{Scenario, Thawed};
use super::ANSWERS;

/// All of them.
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario::new(
            "full-disk-on-the-primary",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                BreakPrimaryDisk("full=on", "disk-full"),
                ANSWERS,
                // It is still full: brought in as a backup, it fails, and the VM does not mind.
                AwaitTold("none", "mirror-failed"),
                ANSWERS,
                MendDisks,
                AwaitProtected,
                ANSWERS,
                KillPrimary,
                ANSWERS,
            ],
        )
        .with_disk(),
        Scenario {
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "full-disk-without-a-backup",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    KillBackup,
                    ANSWERS,
                    Inject("primary", "full=on"),
                    AwaitState("disk-full"),
                    AwaitTold("primary", "waits-for-room"),
                    MendDisks,
                    ANSWERS,
                    AwaitTold("primary", "has-room"),
                    Restart,
                    AwaitProtected,
                    ANSWERS,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .with_disk(),
        Scenario::new(
            "disk-error-on-the-primary",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                BreakPrimaryDisk("write-error=on", "disk-error"),
                ANSWERS,
                MendDisks,
                AwaitProtected,
                ANSWERS,
                BreakPrimaryDisk("flush-error=on", "disk-error"),
                ANSWERS,
                MendDisks,
                AwaitProtected,
                ANSWERS,
            ],
        )
        .with_disk(),
        Scenario::new(
            "disk-error-on-the-backup",
            "plover",
            &[
                AwaitProtected,
                ANSWERS,
                BreakBackupDisk("write-error=on"),
                ANSWERS,
                MendDisks,
                AwaitProtected,
                ANSWERS,
                BreakBackupDisk("full=on"),
                ANSWERS,
                MendDisks,
                AwaitProtected,
                ANSWERS,
                KillPrimary,
                ANSWERS,
            ],
        )
        .with_disk(),
        Scenario {
            // The bound of a take-over that does not get on, and two elections.
            gap_limit: Duration::from_secs(50),
            ..Scenario::new(
                "disk-hangs-in-a-take-over",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    Inject("backup", "flush-hang=on"),
                    Freeze(&["primary"]),
                    AwaitTold("none", "stalled"),
                    // It was only paused, and has all that was ever said.
                    Thaw(Thawed::All),
                    ANSWERS,
                    MendDisks,
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
            // A take-over brings what the backup holds to its disk first.
            gap_limit: Duration::from_secs(20),
            ..Scenario::new(
                "backup-disk-ten-times-slower",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    Inject("primary", "bytes-per-s=16777216"),
                    Inject("backup", "bytes-per-s=1677721"),
                    AwaitAnswers(600),
                    AwaitProtected,
                    KillPrimary,
                    ANSWERS,
                    MendDisks,
                    Restart,
                    AwaitProtected,
                    ANSWERS,
                ],
            )
        }
        .with_disk(),
        Scenario {
            // The sync under way is given up first.
            gap_limit: Duration::from_secs(20),
            ..Scenario::new(
                "backup-disk-hangs",
                "plover",
                &[
                    AwaitProtected,
                    ANSWERS,
                    Inject("backup", "hang=on"),
                    ANSWERS,
                    // A copy whose disk does not answer is no second copy.
                    AwaitTold("none", "stalled"),
                    // It ends, and cannot: nothing of its host waits for that, or there is no majority now.
                    Policy("none"),
                    Freeze(&["witness"]),
                    ANSWERS,
                    Thaw(Thawed::All),
                    MendDisks,
                    Policy("plover"),
                    AwaitProtected,
                    ANSWERS,
                    KillPrimary,
                    ANSWERS,
                ],
            )
        }
        .with_disk(),
    ]
}
