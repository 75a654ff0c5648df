//! Guests of several kinds: machine types, virtual CPUs, boots from a disk; guests that reboot, and such whose memory is compared.

use std::time::Duration;

use super::super::Action::*;
use super::super::{Action, Scenario};
use super::ANSWERS;

/// A guest that a take-over has brought to another host boots again there: after one, two and three.
const BOOTS_ELSEWHERE: [Action; 18] = [
    AwaitProtected,
    ANSWERS,
    KillPrimary,
    Reboot,
    Restart,
    AwaitProtected,
    KillPrimary,
    Reboot,
    Restart,
    AwaitProtected,
    Reboot,
    AwaitProtected,
    KillPrimary,
    Reboot,
    Restart,
    AwaitProtected,
    RebootAndKill,
    ANSWERS,
];

/// All of them.
pub fn all() -> Vec<Scenario> {
    let mut scenarios = Vec::new();
    for (name, policy, machine, from_disk) in [
        ("reboot-elsewhere-pc", "dunlin", "pc", false),
        ("reboot-elsewhere-q35", "plover", "q35", false),
        ("reboot-elsewhere-microvm", "dunlin", "microvm", false),
        ("reboot-elsewhere-from-disk", "dunlin", "pc", true),
        ("reboot-elsewhere-passive", "remus", "pc", false),
    ] {
        let story = Scenario::new(name, policy, &BOOTS_ELSEWHERE).with_disk();
        scenarios.push(Scenario {
            machine,
            boots_from_disk: from_disk,
            gap_limit: Duration::from_secs(5),
            ..story
        });
    }
    scenarios.push(
        Scenario {
            boots_from_disk: true,
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "reboot-after-a-take-over",
                "dunlin",
                &[
                    AwaitProtected,
                    ANSWERS,
                    KillPrimary,
                    Restart,
                    AwaitProtected,
                    RebootAndKill,
                    Reboot,
                    ANSWERS,
                ],
            )
        }
        .with_disk()
        .quick(),
    );
    for (name, policy, machine, vcpus) in [
        ("audited-pc-1", "plover", "pc", 1),
        ("audited-pc-2", "plover", "pc", 2),
        ("audited-q35-1", "plover", "q35", 1),
        ("audited-q35-2", "plover", "q35", 2),
        ("audited-microvm-1", "plover", "microvm", 1),
        ("audited-microvm-2", "plover", "microvm", 2),
        // Its syncs have a round while both VMs run.
        ("audited-ahead", "str", "pc", 1),
    ] {
        let actions = [AwaitProtected, AwaitAnswers(400), KillPrimary, ANSWERS];
        scenarios.push(Scenario {
            machine,
            vcpus,
            audit: true,
            quick: policy == "str",
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(name, policy, &actions)
        });
    }
    scenarios.push(Scenario {
        audit: true,
        gap_limit: Duration::from_secs(5),
        ..Scenario::new(
            "two-hundred-audited-syncs",
            "plover",
            &[AwaitProtected, AwaitSyncs(200), KillPrimary, ANSWERS],
        )
    });
    scenarios
}
