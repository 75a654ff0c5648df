//! Scenarios: lists of actions on real hosts, each with the check that belongs to it.
//!
//! * **Decides:** what can happen in a story. Which stories are told is in `vmtest/scenarios`.
//! * **Flow:** [`all`] or [`read`] -> [`run::run`] plays one in a fresh testbed -> [`bad_input`] is a table of its own.
//! * **Invariants:** (1) roles are asked for, never assumed: `KillPrimary` kills whoever is the primary then;
//!   (2) clients count from the first to the last action, and every scenario ends with their verdict, with `down`
//!   and with the check that nothing is left.
//! * **Source:** `SPECIFICATION.md`: a scenario's name stands there beside the promise that it holds.
//! * **Not here:** faults that a simulator finds better (message order, crashes at every step): `sim/`.

pub mod bad_input;
pub mod campaign;
pub mod compared;
pub mod flood;
pub mod full_log;
pub mod interrupt;
pub mod joining;
pub mod ledger;
pub mod life;
pub mod orders;
pub mod outpour;
pub mod overload;
pub mod passers;
pub mod rejoins;
pub mod rolling;
mod run;
mod secrets;
pub mod sizes;
pub mod soak;
pub mod speculative;
pub mod stalls;
mod stories;
mod told;
pub mod two_vms;
pub mod upload;

use dunlin_api::files::{Compare, Machine, SyncTable};
use serde::Deserialize;

pub use run::{Outcome, World, run};
pub use stories::{all, read};

/// One step of a story. In a file: its name with hyphens, and what belongs to it (`{ die-at = ["backup", "backup-acknowledged"] }`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Wait until the VM has a backup that could take over.
    AwaitProtected,
    /// The clients have got on: a hundred further answers.
    Answers,
    /// Wait until the clients have so many further answers.
    AwaitAnswers(u64),
    /// From now on the network brings what is for the VM to all hosts.
    Flood,
    /// In one of the take-overs so far the new primary gave frames to the VM that it had heard and nobody had agreed on.
    HasOverheard,
    /// SIGKILL to every process of the primary's host at once; then wait for the take-over.
    KillPrimary,
    /// The same for the backup's host; the primary goes on unprotected, and says so.
    KillBackup,
    /// The same for the witness's host; the VM stays protected.
    KillWitness,
    /// SIGKILL to the backup's and the witness's hosts at once; the primary must fall silent, and say so.
    KillOthers,
    /// `dunlin promote --force` on the primary's host.
    ProtectAlone,
    /// SIGKILL to the primary's daemon alone: its QEMU must end with it, then as `KillPrimary`.
    KillPrimaryDaemon,
    /// Start the daemons of all dead hosts.
    Restart,
    /// New machines take the places of all dead hosts: same names and keys, nothing in their state folders, empty disks.
    Replace,
    /// `dunlin move VM --backup HOST`: to a host that has no part in the VM, and empty disks, or that has lost all. While the backup is well that is refused, and has to be
    /// said with `--unprotected-meanwhile`.
    MoveBackup(String),
    /// `dunlin move VM --witness HOST`.
    MoveWitness(String),
    /// A host whose part another one has got has nothing of the VM any more.
    AwaitGone(String),
    /// All hosts take part in the group.
    AwaitAllLinked,
    /// Pull the cable of the primary's host; then wait for the take-over. It must stop speaking.
    CutPrimary,
    /// Pull the cable of the backup's host.
    CutBackup,
    /// Plug all cables in.
    RestoreLinks,
    /// These roles' hosts stand still (all of their processes at once), and stay so.
    Freeze(Vec<Role>),
    /// The standby has got the part of a host that is away: the VM is protected, and its backup is there.
    AwaitBackup(String),
    /// The standby has a checkpoint of the VM's memory, of a round that began after this step.
    AwaitCheckpoint,
    /// Of the memory that the last host to join held, at least so many percent were not sent.
    MemoryWasHeld(u64),
    /// One of the dead hosts comes back.
    RestartHost(String),
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
    /// The same to the host of a primary that goes on without its frozen backup: that one's copy lives, and may not be served from.
    KillUnprotectedAndThaw,
    /// So many further syncs of one primary and one backup, none of which costs the VM its backup.
    AwaitSyncs(u64),
    /// The copies are kept in that mode. The clients count together as well, so that matching does not pay.
    AwaitMode(String),
    /// The daemon of that role dies at a line of its next sync (`dunlin inject VM die-at=LINE`).
    DieAt(Role, String),
    /// The primary's host stands still for that many milliseconds, long enough to be deposed or not.
    PausePrimary(u64),
    /// The primary's host is away until the others have cut from their logs what it would need to follow them; then it is back.
    LosePrimaryFor(Away),
    /// By `dunlin switchover`.
    Switchover,
    /// `dunlin policy VM NAME`, asked of the witness's host; the VM is then under that policy, and unprotected or protected as it says.
    Policy(String),
    /// SIGINT to the primary's daemon, as Ctrl-C does: its VM goes to the backup first.
    InterruptPrimary,
    /// The same by SIGTERM, as a service manager does.
    StopPrimary,
    /// The same when no other host runs: the VM ends with its host, which does not wait for anybody.
    StopAlone,
    /// SIGKILL to every process of every host.
    KillAll,
    /// After `KillAll`: only the daemon of the last primary's host is started.
    RestartLast,
    /// `dunlin promote --force --from-disk` there; what a person is told before it says so.
    BootFromDisk,
    /// The primary's disk misbehaves (a fault of `dunlin inject`): the backup goes on with the VM, and the old primary's events
    /// say why, with this word.
    BreakPrimaryDisk(String, String),
    /// The backup's disk misbehaves: the primary goes on without it, and both say why.
    BreakBackupDisk(String),
    /// A fault in the disk of whoever has that role; nothing is expected of it yet.
    Inject(Role, String),
    /// No disk misbehaves any more, on any host that runs.
    MendDisks,
    /// An event of that kind is told by whoever has that role.
    AwaitTold(Role, String),
    /// An event of that kind is told by any host.
    AwaitToldByAny(String),
    /// The guest is told to reboot, as by a person in it; then the clients are served again.
    Reboot,
    /// The same, and SIGKILL to the primary's host as soon as the guest has reset its machine.
    RebootAndKill,
    /// The guest is told to make a variable of that name in its UEFI.
    Remember(String),
    /// The guest reboots, and then has these variables: its own, in that order, and no others.
    RebootAndRecall(Vec<String>),
    /// The guest has booted anew and has these variables.
    Recall(Vec<String>),
    /// The primary is in that state.
    AwaitState(String),
    /// The backup's session hangs in the middle of a sync; then it goes on.
    HangBackup,
    /// The primary's session hangs while its VM stands; then it goes on.
    HangPrimary,
    /// The primary's QEMU stands still, and nothing else of its host does: the backup goes on with the VM.
    HangQemu,
    /// A switchover in whose middle the backup dies.
    BreakSwitchover,
    /// The backup fails to apply a sync that it has acknowledged, and the primary stands still meanwhile.
    HalfLoad,
    /// The leader loses its office and wins it back, so many times.
    NewTerms(usize),
    /// All hosts get new keys, and a new authority, while the VM stays on its two hosts.
    RotateKeys,
    /// The backup's machine is removed from the cluster while it runs; then it comes in again with a token.
    RevokeBackup,
    /// After `KillAll` and `Restart`: the VM runs again, on the host that was its last primary.
    AwaitBootOnLast,
}

/// A host by what it is for the VM at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// It serves.
    Primary,
    /// It has the copy that would take over.
    Backup,
    /// It agrees.
    Witness,
}

impl Role {
    /// As in a status.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::Backup => "backup",
            Self::Witness => "witness",
        }
    }
}

/// Which of the frozen hosts go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Thawed {
    /// The witness.
    Witness,
    /// All.
    All,
}

/// In which way a host is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Away {
    /// All of its processes stand still.
    Frozen,
    /// Its cable is pulled.
    Mute,
}

/// A story, as a file has it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// As on the command line and in `SPECIFICATION.md`.
    pub name: String,
    /// Whether it is played for every commit.
    #[serde(default)]
    pub quick: bool,
    /// Replication policy.
    pub policy: String,
    /// Machine type.
    #[serde(default)]
    pub machine: Machine,
    /// Virtual CPUs.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// The guest's disk.
    pub disk_mib: Option<u64>,
    /// Cards that the guest never sets up; the client's network is full of broadcasts then.
    #[serde(default)]
    pub idle_cards: u8,
    /// It boots from a disk with a boot loader, not from a kernel that QEMU is given.
    #[serde(default)]
    pub boots_from_disk: bool,
    /// It has a UEFI with variables.
    #[serde(default)]
    pub uefi: bool,
    /// After each sync both memories are hashed and compared (slow).
    #[serde(default)]
    pub audit: bool,
    /// `sync.compare`.
    #[serde(default)]
    pub compare: Compare,
    /// Agreed inputs are on disk, so that the group survives the loss of all hosts.
    #[serde(default)]
    pub durable: bool,
    /// Each host's share of the CPU, in percent of one core; none: as much as there is.
    pub cpu: Option<u32>,
    /// Counting clients.
    #[serde(default = "two")]
    pub connections: usize,
    /// The longest time without an answer that a fault may cost a client, in milliseconds.
    #[serde(default = "some_seconds")]
    pub gap_limit_ms: u64,
    /// What happens is what the course of that name says.
    course: Option<String>,
    /// What happens.
    #[serde(default)]
    pub steps: Vec<Action>,
}

const fn one() -> u32 {
    1
}

const fn two() -> usize {
    2
}

/// A fault costs some 0.3 s on a machine that has nothing else to do: this is for one that is some times slower and stands still now and then. A client
/// that was not heard sends again after 0.2, 0.6, 1.4, 3 and 6.2 seconds: what takes a little more than three looks like more than six.
const fn some_seconds() -> u64 {
    8000
}

impl Scenario {
    /// The VM file's `[sync]` table.
    fn sync(&self) -> SyncTable {
        SyncTable {
            audit: self.audit,
            compare: self.compare,
            ..SyncTable::default()
        }
    }
}
