//! Keys that are exchanged while a VM runs.

use super::super::Action::*;
use super::super::Scenario;
use super::ANSWERS;

/// All of them.
pub fn all() -> Vec<Scenario> {
    vec![
        Scenario::new(
            "keys",
            "dunlin",
            &[
                AwaitProtected,
                ANSWERS,
                RotateKeys,
                ANSWERS,
                RevokeBackup,
                AwaitProtected,
                ANSWERS,
                RotateKeys,
                // Who takes over and who comes back believe each other by keys that no daemon has begun with.
                KillPrimary,
                ANSWERS,
                Restart,
                AwaitProtected,
                ANSWERS,
            ],
        )
        .quick(),
    ]
}
