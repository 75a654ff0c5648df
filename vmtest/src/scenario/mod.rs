//! Scenarios: lists of actions on real hosts, each with the check that belongs to it.
//!
//! * **Decides:** which stories are told, and which of them are quick enough for every commit.
//! * **Flow:** [`all`] names them -> [`run::run`] plays one in a fresh lab -> [`bad_input`] is a table of its own.
//! * **Invariants:** (1) roles are asked for, never assumed: `KillPrimary` kills whoever is the primary then;
//!   (2) clients count from the first to the last action, and every scenario ends with their verdict, with `down`
//!   and with the check that nothing is left.
//! * **Source:** `SPECIFICATION.md`: a scenario's name stands there beside the promise that it holds.
//! * **Longer than 400 lines:** it is one table, a row a story; what its words do is in `run`.
//! * **Not here:** faults that a simulator finds better (message order, crashes at every step): `sim/`.

pub mod bad_input;
pub mod campaign;
pub mod flood;
pub mod interrupt;
pub mod ledger;
pub mod life;
pub mod orders;
pub mod overload;
pub mod passers;
mod run;
mod secrets;
pub mod sizes;
pub mod soak;
pub mod two_vms;
pub mod upload;

use std::time::Duration;

pub use run::{Outcome, World, run};

/// One step of a story.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Wait until the VM has a backup that could take over.
    AwaitProtected,
    /// Wait until the clients have so many further answers.
    AwaitAnswers(u64),
    /// SIGKILL to every process of the primary's host at once; then wait for the take-over.
    KillPrimary,
    /// The same for the backup's host; the primary goes on unprotected, and says so.
    KillBackup,
    /// The same for the witness's host; the VM stays protected.
    KillWitness,
    /// SIGKILL to the backup's and the witness's hosts at once; the primary must fall silent, and say so.
    KillOthers,
    /// `dunlin protect --alone` on the primary's host.
    ProtectAlone,
    /// SIGKILL to the primary's daemon alone: its QEMU must end with it, then as `KillPrimary`.
    KillPrimaryDaemon,
    /// Start the daemons of all dead hosts.
    Restart,
    /// New machines take the places of all dead hosts: same names and keys, nothing in their state folders, empty disks.
    Replace,
    /// All hosts take part in the group.
    AwaitAllLinked,
    /// Pull the cable of the primary's host; then wait for the take-over. It must stop speaking.
    CutPrimary,
    /// Pull the cable of the backup's host.
    CutBackup,
    /// Plug all cables in.
    RestoreLinks,
    /// These roles' hosts stand still (all of their processes at once), and stay so.
    Freeze(&'static [&'static str]),
    /// What needs a frozen backup's word stays where it is: until the group has agreed to go on without it.
    AwaitDropped,
    /// Backup and witness are frozen: nothing leaves, and the primary says that it has no majority.
    AwaitSilence,
    /// The frozen host that is a witness, or one that is not, or each, goes on where it stood.
    Thaw(Thawed),
    /// The backup's host stands still again and again, each time for so many milliseconds: too short to be dropped.
    Stutter(usize, u64),
    /// The backup's host gets that much of one core, in percent.
    SlowBackup(u32),
    /// SIGKILL to the primary's host while others are frozen, who then go on: the backup takes over.
    KillPrimaryAndThaw,
    /// So many further syncs of one primary and one backup, none of which costs the VM its backup.
    AwaitSyncs(u64),
    /// The copies are kept in that manner. The clients count together as well, so that matching does not pay.
    AwaitManner(&'static str),
    /// The daemon of that role dies at a line of its next sync (`dunlin inject VM die-at=LINE`).
    DieAt(&'static str, &'static str),
    /// The primary's host stands still for that many milliseconds, long enough to be deposed or not.
    PausePrimary(u64),
    /// The primary's host is away until the others have cut from their logs what it would need to follow them; then it is back.
    LosePrimaryFor(Away),
    /// A planned hand-over by `dunlin failover`.
    Failover,
    /// `dunlin policy VM NAME`, asked of the witness's host; the VM is then under that policy, and unprotected or protected as it says.
    Policy(&'static str),
    /// SIGINT to the primary's daemon, as Ctrl-C does: its VM goes to the backup first.
    InterruptPrimary,
    /// The same by SIGTERM, as a service manager does.
    StopPrimary,
    /// SIGKILL to every process of every host.
    KillAll,
    /// After `KillAll`: only the daemon of the last primary's host is started.
    RestartLast,
    /// `dunlin protect --alone --from-disk` there; what a person is told before it says so.
    BootFromDisk,
    /// The primary's disk misbehaves (a fault of `dunlin inject`): the backup goes on with the VM, and the old primary's events
    /// say why, with this word.
    BreakPrimaryDisk(&'static str, &'static str),
    /// The backup's disk misbehaves: the primary goes on without it, and both say why.
    BreakBackupDisk(&'static str),
    /// A fault in the disk of whoever has that role; nothing is expected of it yet.
    Inject(&'static str, &'static str),
    /// No disk misbehaves any more, on any host that runs.
    MendDisks,
    /// An event of that kind is told by whoever has that role.
    AwaitTold(&'static str, &'static str),
    /// The guest is told to reboot, as by a person in it; then the clients are served again.
    Reboot,
    /// The same, and SIGKILL to the primary's host as soon as the guest has reset its machine.
    RebootAndKill,
    /// The primary is in that state.
    AwaitState(&'static str),
    /// The backup's session hangs in the middle of a sync; then it goes on.
    HangBackup,
    /// The primary's session hangs while its VM stands; then it goes on.
    HangPrimary,
    /// A hand-over in whose middle the backup dies.
    BreakHandOver,
    /// The backup fails to apply a sync that it has acknowledged, and the primary stands still meanwhile.
    HalfLoad,
    /// The leader loses its office and wins it back, so many times.
    NewTerms(usize),
    /// After `KillAll` and `Restart`: the VM runs again, on the host that was its last primary.
    AwaitBootOnLast,
}

/// Which of the frozen hosts go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thawed {
    /// The witness.
    Witness,
    /// All.
    All,
}

/// In which way a host is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Away {
    /// All of its processes stand still.
    Frozen,
    /// Its cable is pulled.
    Mute,
}

/// A story.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// As on the command line and in `SPECIFICATION.md`.
    pub name: &'static str,
    /// Whether it is played for every commit.
    pub quick: bool,
    /// Replication policy.
    pub policy: &'static str,
    /// Machine type.
    pub machine: &'static str,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The guest's disk.
    pub disk_mib: Option<u64>,
    /// Cards that the guest never sets up; the client's network is full of broadcasts then.
    pub idle_cards: u8,
    /// It boots from a disk with a boot loader, not from a kernel that QEMU is given.
    pub boots_from_disk: bool,
    /// After each sync both memories are hashed and compared (slow).
    pub audit: bool,
    /// Agreed inputs are on disk, so that the group survives the loss of all hosts.
    pub durable: bool,
    /// Each host's share of the CPU, in percent of one core; none: as much as there is.
    pub cpu: Option<u32>,
    /// Counting clients.
    pub connections: usize,
    /// The longest time without an answer that a fault may cost a client.
    pub gap_limit: Duration,
    /// What happens.
    pub actions: Vec<Action>,
}

impl Scenario {
    fn new(name: &'static str, policy: &'static str, actions: &[Action]) -> Self {
        Self {
            name,
            quick: false,
            policy,
            machine: "pc",
            vcpus: 1,
            disk_mib: None,
            idle_cards: 0,
            boots_from_disk: false,
            audit: false,
            durable: false,
            cpu: None,
            connections: 2,
            gap_limit: Duration::from_secs(1),
            actions: actions.to_vec(),
        }
    }

    fn quick(self) -> Self {
        Self { quick: true, ..self }
    }

    fn with_disk(self) -> Self {
        Self {
            disk_mib: Some(64),
            ..self
        }
    }
}

/// Every scenario, the quick ones first.
pub fn all() -> Vec<Scenario> {
    // The table below names nearly all of them.
    use Action::*;
    let answers = AwaitAnswers(100);
    let there_and_back = [
        AwaitProtected,
        answers,
        KillPrimary,
        answers,
        Restart,
        AwaitProtected,
        answers,
        KillPrimary,
        answers,
    ];
    let deaths_in_syncs = [
        AwaitProtected,
        answers,
        DieAt("backup", "backup-acknowledged"),
        answers,
        Restart,
        AwaitProtected,
        answers,
        DieAt("backup", "backup-half-applied"),
        answers,
        Restart,
        AwaitProtected,
        answers,
        DieAt("primary", "primary-stopped"),
        answers,
        Restart,
        AwaitProtected,
        answers,
        DieAt("primary", "primary-captured"),
        answers,
    ];
    let mut scenarios = vec![
        Scenario::new("kill-primary-and-back", "plover", &there_and_back).quick(),
        Scenario::new(
            "kill-primary-passive-backup",
            "remus",
            &[AwaitProtected, answers, KillPrimary, answers],
        )
        .quick(),
        Scenario::new("kill-primary-with-disk", "plover", &there_and_back)
            .with_disk()
            .quick(),
        Scenario::new(
            "backup-and-witness-die",
            "plover",
            &[
                AwaitProtected,
                answers,
                KillBackup,
                answers,
                Restart,
                AwaitProtected,
                answers,
                KillWitness,
                answers,
                Restart,
                answers,
            ],
        )
        .quick(),
        Scenario::new(
            "alone-by-order-and-back",
            "plover",
            &[
                AwaitProtected,
                answers,
                KillOthers,
                AwaitTold("primary", "others-lost"),
                ProtectAlone,
                answers,
                Restart,
                AwaitProtected,
                answers,
                KillPrimary,
                answers,
            ],
        )
        .quick(),
        Scenario::new(
            "planned-hand-over",
            "plover",
            &[AwaitProtected, answers, Failover, answers, AwaitProtected],
        )
        .quick(),
        Scenario::new(
            "policies-change-while-it-runs",
            "plover",
            &[
                AwaitProtected,
                answers,
                Policy("remus"),
                answers,
                KillPrimary,
                answers,
                Restart,
                AwaitProtected,
                Policy("none"),
                AwaitState("protection-paused"),
                answers,
                Policy("dunlin"),
                answers,
                KillPrimary,
                answers,
            ],
        )
        .quick(),
        Scenario::new(
            "cut-off-primary-falls-silent",
            "plover",
            &[
                AwaitProtected,
                answers,
                CutPrimary,
                answers,
                RestoreLinks,
                AwaitProtected,
                answers,
            ],
        )
        .quick(),
        Scenario::new(
            "daemon-crash-leaves-nothing",
            "plover",
            &[
                AwaitProtected,
                answers,
                KillPrimaryDaemon,
                answers,
                Restart,
                AwaitProtected,
            ],
        )
        .quick(),
        Scenario {
            idle_cards: 1,
            ..Scenario::new("idle-second-card", "dunlin", &there_and_back)
        }
        .quick(),
        Scenario::new(
            "interrupted-daemon-leaves-nothing",
            "plover",
            &[
                AwaitProtected,
                answers,
                InterruptPrimary,
                answers,
                Restart,
                AwaitProtected,
            ],
        ),
        Scenario::new(
            "cut-off-backup-returns",
            "plover",
            &[
                AwaitProtected,
                answers,
                CutBackup,
                answers,
                RestoreLinks,
                AwaitProtected,
                answers,
            ],
        ),
        Scenario::new(
            "paused-primary-does-not-speak-again",
            "plover",
            &[
                AwaitProtected,
                answers,
                PausePrimary(1500),
                answers,
                AwaitProtected,
                answers,
            ],
        ),
        Scenario {
            connections: 4,
            ..Scenario::new(
                "long-lost-primary-returns",
                "dunlin",
                &[
                    AwaitProtected,
                    answers,
                    LosePrimaryFor(Away::Frozen),
                    AwaitProtected,
                    AwaitTold("backup", "ended-here"),
                    answers,
                    LosePrimaryFor(Away::Mute),
                    AwaitProtected,
                    answers,
                    KillPrimary,
                    answers,
                ],
            )
        }
        .quick(),
        Scenario::new(
            "new-machines-replace-dead-hosts",
            "dunlin",
            &[
                AwaitProtected,
                answers,
                KillPrimary,
                answers,
                Replace,
                AwaitProtected,
                answers,
                KillPrimary,
                answers,
                Replace,
                AwaitProtected,
                KillWitness,
                Replace,
                AwaitAllLinked,
                answers,
                KillPrimary,
                answers,
            ],
        )
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
                    answers,
                    // The newest disk is not the preferred host's.
                    KillPrimary,
                    answers,
                    KillAll,
                    Restart,
                    AwaitBootOnLast,
                    AwaitProtected,
                    answers,
                    KillPrimary,
                    answers,
                ],
            )
        }
        .with_disk()
        .quick(),
        Scenario {
            durable: true,
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "power-loss-while-protected",
                "plover",
                &[
                    AwaitProtected,
                    answers,
                    KillAll,
                    Restart,
                    AwaitBootOnLast,
                    AwaitProtected,
                    answers,
                ],
            )
        }
        .with_disk(),
        Scenario {
            gap_limit: Duration::from_millis(500),
            ..Scenario::new(
                "stopped-daemon-hands-over",
                "plover",
                &[
                    AwaitProtected,
                    answers,
                    StopPrimary,
                    answers,
                    Restart,
                    AwaitProtected,
                    answers,
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
                    answers,
                    // Two of three are there, and both say the same.
                    Freeze(&["witness"]),
                    answers,
                    AwaitProtected,
                    // Nobody is left who could say it, nor agree that it need not be said.
                    Freeze(&["backup"]),
                    AwaitSilence,
                    Thaw(Thawed::Witness),
                    answers,
                    Thaw(Thawed::All),
                    AwaitProtected,
                    answers,
                    // The witness is there to agree.
                    Freeze(&["backup"]),
                    AwaitDropped,
                    answers,
                    Thaw(Thawed::All),
                    AwaitProtected,
                    answers,
                    Freeze(&["backup", "witness"]),
                    AwaitSilence,
                    KillPrimaryAndThaw,
                    answers,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "stuttering-backup",
                "dunlin",
                &[
                    AwaitProtected,
                    answers,
                    Stutter(30, 100),
                    answers,
                    AwaitProtected,
                    KillPrimary,
                    answers,
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
                    answers,
                    SlowBackup(15),
                    answers,
                    AwaitProtected,
                    KillPrimary,
                    SlowBackup(100),
                    answers,
                ],
            )
        },
        Scenario {
            // Of the watchdog's ten seconds.
            gap_limit: Duration::from_secs(20),
            ..Scenario::new(
                "primary-hangs-in-a-sync",
                "plover",
                &[
                    AwaitProtected,
                    answers,
                    HangPrimary,
                    answers,
                    AwaitProtected,
                    KillPrimary,
                    answers,
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
                    answers,
                    HangBackup,
                    answers,
                    AwaitProtected,
                    KillPrimary,
                    answers,
                ],
            )
        }
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "hand-over-broken-off",
                "plover",
                &[
                    AwaitProtected,
                    answers,
                    BreakHandOver,
                    answers,
                    Restart,
                    AwaitProtected,
                    Failover,
                    answers,
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
                    answers,
                    HalfLoad,
                    answers,
                    AwaitProtected,
                    KillPrimary,
                    answers,
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
                    answers,
                    NewTerms(5),
                    answers,
                    AwaitProtected,
                    KillPrimary,
                    answers,
                ],
            )
        }
        .quick(),
        Scenario {
            audit: true,
            gap_limit: Duration::from_secs(5),
            ..Scenario::new(
                "audited-death-after-release",
                "plover",
                &[
                    AwaitProtected,
                    answers,
                    DieAt("primary", "primary-released"),
                    answers,
                ],
            )
        },
        Scenario::new("death-in-a-sync", "plover", &deaths_in_syncs),
        Scenario::new("death-in-a-passive-sync", "remus", &deaths_in_syncs),
        Scenario {
            connections: 8,
            ..Scenario::new(
                "death-in-a-change-over",
                "dunlin",
                &[
                    // Out of matching, then out of passive epochs: each at the primary and at the backup.
                    AwaitProtected,
                    DieAt("primary", "primary-changes-over"),
                    answers,
                    Restart,
                    AwaitProtected,
                    AwaitManner("passive"),
                    DieAt("primary", "primary-changes-over"),
                    answers,
                    Restart,
                    AwaitProtected,
                    DieAt("backup", "backup-changes-over"),
                    answers,
                    Restart,
                    AwaitProtected,
                    AwaitManner("passive"),
                    DieAt("backup", "backup-changes-over"),
                    answers,
                    Restart,
                    AwaitProtected,
                    KillPrimary,
                    answers,
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
                    AwaitManner("passive"),
                    AwaitAnswers(300),
                    KillPrimary,
                    answers,
                    Restart,
                    AwaitProtected,
                    AwaitManner("passive"),
                    AwaitAnswers(700),
                    KillPrimary,
                    answers,
                    Restart,
                    AwaitProtected,
                    AwaitManner("passive"),
                    Failover,
                    answers,
                ],
            )
        }
        .quick(),
        Scenario::new(
            "take-over-cut-short",
            "dunlin",
            &[
                AwaitProtected,
                answers,
                Inject("backup", "step-down-at=backup-took-over"),
                KillPrimary,
                AwaitTold("primary", "stepped-down"),
                answers,
                Restart,
                AwaitProtected,
                KillPrimary,
                answers,
            ],
        )
        .quick(),
        Scenario {
            gap_limit: Duration::from_secs(60),
            ..Scenario::new(
                "alone-from-disk-by-order",
                "plover",
                &[
                    AwaitProtected,
                    answers,
                    // The newest disk is not the preferred host's.
                    KillPrimary,
                    answers,
                    KillAll,
                    RestartLast,
                    BootFromDisk,
                    answers,
                    Restart,
                    AwaitProtected,
                    answers,
                    KillPrimary,
                    answers,
                ],
            )
        }
        .with_disk()
        .quick(),
        Scenario::new("passive-backup-with-disk", "remus", &there_and_back).with_disk(),
        Scenario::new(
            "full-disk-on-the-primary",
            "plover",
            &[
                AwaitProtected,
                answers,
                BreakPrimaryDisk("full=on", "disk-full"),
                answers,
                // It is still full: brought in as a backup, it fails, and the VM does not mind.
                AwaitTold("none", "mirror-failed"),
                answers,
                MendDisks,
                AwaitProtected,
                answers,
                KillPrimary,
                answers,
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
                    answers,
                    KillBackup,
                    answers,
                    Inject("primary", "full=on"),
                    AwaitState("disk-full"),
                    AwaitTold("primary", "waits-for-room"),
                    MendDisks,
                    answers,
                    AwaitTold("primary", "has-room"),
                    Restart,
                    AwaitProtected,
                    answers,
                    KillPrimary,
                    answers,
                ],
            )
        }
        .with_disk(),
        Scenario::new(
            "disk-error-on-the-primary",
            "plover",
            &[
                AwaitProtected,
                answers,
                BreakPrimaryDisk("write-error=on", "disk-error"),
                answers,
                MendDisks,
                AwaitProtected,
                answers,
                BreakPrimaryDisk("flush-error=on", "disk-error"),
                answers,
                MendDisks,
                AwaitProtected,
                answers,
            ],
        )
        .with_disk(),
        Scenario::new(
            "disk-error-on-the-backup",
            "plover",
            &[
                AwaitProtected,
                answers,
                BreakBackupDisk("write-error=on"),
                answers,
                MendDisks,
                AwaitProtected,
                answers,
                BreakBackupDisk("full=on"),
                answers,
                MendDisks,
                AwaitProtected,
                answers,
                KillPrimary,
                answers,
            ],
        )
        .with_disk(),
        Scenario {
            // A take-over brings what the backup holds to its disk first.
            gap_limit: Duration::from_secs(20),
            ..Scenario::new(
                "backup-disk-ten-times-slower",
                "plover",
                &[
                    AwaitProtected,
                    answers,
                    Inject("primary", "bytes-per-s=16777216"),
                    Inject("backup", "bytes-per-s=1677721"),
                    AwaitAnswers(600),
                    AwaitProtected,
                    KillPrimary,
                    answers,
                    MendDisks,
                    Restart,
                    AwaitProtected,
                    answers,
                ],
            )
        }
        .with_disk(),
    ];
    // A guest that a take-over has brought to another host boots again there: after one, two and three.
    let boots_elsewhere = [
        AwaitProtected,
        answers,
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
        answers,
    ];
    for (name, policy, machine, from_disk) in [
        ("reboot-elsewhere-pc", "dunlin", "pc", false),
        ("reboot-elsewhere-q35", "plover", "q35", false),
        ("reboot-elsewhere-microvm", "dunlin", "microvm", false),
        ("reboot-elsewhere-from-disk", "dunlin", "pc", true),
        ("reboot-elsewhere-passive", "remus", "pc", false),
    ] {
        let story = Scenario::new(name, policy, &boots_elsewhere).with_disk();
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
                    answers,
                    KillPrimary,
                    Restart,
                    AwaitProtected,
                    RebootAndKill,
                    Reboot,
                    answers,
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
        let actions = [AwaitProtected, AwaitAnswers(400), KillPrimary, answers];
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
            &[AwaitProtected, AwaitSyncs(200), KillPrimary, answers],
        )
    });
    scenarios
}
