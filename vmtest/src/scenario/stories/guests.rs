//! Guests of several kinds: machine types, virtual CPUs, boots from a disk; guests that reboot, and such whose memory is compared.

use std::time::Duration;

use super::super::Action::*;
use super::super::{Action, Scenario};
use super::ANSWERS;
use crate::cluster::Machine;

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

/// What a UEFI guest wrote into its variables is there after a take-over and a reboot on the other host, again and again.
const REMEMBERS_ELSEWHERE: [Action; 15] = [
    AwaitProtected,
    ANSWERS,
    Remember("one"),
    KillPrimary,
    RebootAndRecall(&["one"]),
    Restart,
    AwaitProtected,
    Remember("two"),
    KillPrimary,
    RebootAndRecall(&["one", "two"]),
    Restart,
    AwaitProtected,
    RebootAndKill,
    Recall(&["one", "two"]),
    ANSWERS,
];

/// ... and when all hosts were lost: on the host that a take-over has brought the VM to, and on the other one after that.
const REMEMBERS_IN_THE_COLD: [Action; 15] = [
    AwaitProtected,
    Remember("one"),
    KillPrimary,
    Restart,
    AwaitProtected,
    Remember("two"),
    KillAll,
    Restart,
    AwaitBootOnLast,
    Recall(&["one", "two"]),
    AwaitProtected,
    Failover,
    KillAll,
    Restart,
    Recall(&["one", "two"]),
];

fn with_uefi() -> Vec<Scenario> {
    let story = |name, policy, actions: &[Action]| Scenario {
        uefi: true,
        // Right after the kills the guest boots, for half a minute where its OVMF is translated: a client may wait for both at once.
        gap_limit: Duration::from_secs(90),
        ..Scenario::new(name, policy, actions).with_disk()
    };
    vec![
        story("reboot-elsewhere-uefi", "dunlin", &REMEMBERS_ELSEWHERE),
        Scenario {
            machine: Machine::Q35,
            boots_from_disk: true,
            ..story("reboot-elsewhere-uefi-from-disk", "plover", &REMEMBERS_ELSEWHERE)
        },
        story("reboot-elsewhere-uefi-passive", "remus", &REMEMBERS_ELSEWHERE),
        Scenario {
            durable: true,
            ..story("power-loss-uefi", "dunlin", &REMEMBERS_IN_THE_COLD)
        },
    ]
}

/// All of them.
pub fn all() -> Vec<Scenario> {
    let mut scenarios = Vec::new();
    for (name, policy, machine, from_disk) in [
        ("reboot-elsewhere-pc", "dunlin", Machine::Pc, false),
        ("reboot-elsewhere-q35", "plover", Machine::Q35, false),
        ("reboot-elsewhere-microvm", "dunlin", Machine::Microvm, false),
        ("reboot-elsewhere-from-disk", "dunlin", Machine::Pc, true),
        ("reboot-elsewhere-passive", "remus", Machine::Pc, false),
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
        ("audited-pc-1", "plover", Machine::Pc, 1),
        ("audited-pc-2", "plover", Machine::Pc, 2),
        ("audited-q35-1", "plover", Machine::Q35, 1),
        ("audited-q35-2", "plover", Machine::Q35, 2),
        ("audited-microvm-1", "plover", Machine::Microvm, 1),
        ("audited-microvm-2", "plover", Machine::Microvm, 2),
        // Its syncs have a round while both VMs run.
        ("audited-ahead", "str", Machine::Pc, 1),
        // As GAIA's Algorithm 1 has it, in both rounds.
        ("audited-tree", "str", Machine::Pc, 1),
    ] {
        let actions = [AwaitProtected, AwaitAnswers(400), KillPrimary, ANSWERS];
        scenarios.push(Scenario {
            machine,
            vcpus,
            audit: true,
            tree: name == "audited-tree",
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
    scenarios.extend(with_uefi());
    scenarios
}
