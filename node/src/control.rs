//! What is said on the control socket, and between daemons about VMs that do not run yet: one JSON object a line.

pub mod client;
mod figures;
pub mod keys;
pub mod log;
mod member;
mod notify;
pub mod report;
pub mod server;

use crate::certificates::Certificate;
use crate::daemon::Ticket;
use crate::vm::Note;
pub use figures::{ProgramStatus, QueueFigures, SpeculationFigures, SyncFigures};
pub use member::Member;
pub use notify::NotifyStatus;
use report::{Found, Report};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What is asked of a daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Start a VM on its group.
    Up {
        /// The text of its vm.toml.
        text: String,
        /// The file's name, for messages.
        origin: String,
    },
    /// Shut a VM down everywhere.
    Down {
        /// Which.
        vm: String,
        /// Do not wait for the guest.
        now: bool,
        /// On this host alone, without the group's agreement.
        #[serde(default)]
        force: bool,
    },
    /// How everything is.
    Status,
    /// What happened.
    Events {
        /// Go on with what will happen.
        follow: bool,
        /// Only that, without what has happened.
        #[serde(default)]
        from_now: bool,
        /// Only what happened since then, in milliseconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since_ms: Option<u64>,
    },
    /// Hand a VM over to its backup.
    Failover {
        /// Which.
        vm: String,
    },
    /// Replicate a VM in another way from now on.
    Policy {
        /// Which.
        vm: String,
        /// The policy's name.
        policy: String,
    },
    /// Bring a backup in, or serve without any.
    Protect {
        /// Which.
        vm: String,
        /// "I know that the others are dead."
        alone: bool,
        /// ... and the VM is to boot from this host's disk.
        #[serde(default)]
        from_disk: bool,
        /// ... though another host's disk is known to be newer.
        #[serde(default)]
        force_stale: bool,
    },
    /// A dead host's place is taken by a new machine of the same name, which knows nothing of the VM.
    Replace {
        /// Which VM.
        vm: String,
        /// The host's name.
        host: String,
    },
    /// Compare the images of both hosts block by block.
    VerifyDisk {
        /// Which VM.
        vm: String,
        /// Send again what differs.
        repair: bool,
    },
    /// Tests only: makes a disk of this host misbehave. Refused unless the daemon was started with `DUNLIN_FAULTS=1`.
    Inject {
        /// Which VM.
        vm: String,
        /// Which disk, in the order of the VM's file.
        disk: usize,
        /// What, as `write-error=on`.
        fault: String,
    },
    /// What has the copy of a bare program on this host printed?
    Logs {
        /// Which program.
        vm: String,
        /// So many lines, the last ones.
        lines: u32,
    },
    /// What would the hosts of this VM lack for it?
    Check {
        /// The text of its vm.toml.
        text: String,
        /// The file's name, for messages.
        origin: String,
    },
    /// How are the hosts of the cluster?
    Cluster,
    /// A step in the exchange of a host's keys.
    Keys {
        /// Which host.
        host: String,
        /// What it is to do.
        ask: keys::KeysStep,
    },
    /// Daemon to daemon: how are you?
    Member,
    /// Daemon to daemon: what would you lack for this VM?
    Examine {
        /// The text of its vm.toml.
        text: String,
    },
    /// Daemon to daemon: could you take part in this VM's group?
    Prepare {
        /// The text of its vm.toml.
        text: String,
        /// The file's name, for messages.
        origin: String,
        /// The asker's QEMU.
        qemu_version: String,
        /// The call that the VM's name is kept for if so.
        ticket: Ticket,
    },
    /// Daemon to daemon: take part.
    Install {
        /// The text of its vm.toml.
        text: String,
        /// The group runs already, and is about to make this host a member.
        #[serde(default)]
        newcomer: bool,
        /// The call that the VM's name is kept for.
        ticket: Ticket,
    },
    /// Daemon to daemon: that call came to nothing; take back what it made, and nothing else.
    Undo {
        /// Which VM.
        vm: String,
        /// Which call.
        ticket: Ticket,
    },
    /// Daemon to daemon: what do you hold of this VM, whom nobody leads?
    Standing {
        /// Which.
        vm: String,
    },
    /// Daemon to daemon: forget this VM.
    Remove {
        /// Which.
        vm: String,
    },
    /// About logs that programs share.
    Log(log::LogRequest),
}

impl Request {
    /// Whether a daemon takes this from another daemon.
    #[must_use]
    pub fn is_for_peers(&self) -> bool {
        match self {
            Self::Up { .. }
            | Self::Cluster
            | Self::Check { .. }
            | Self::Events { .. }
            | Self::Status
            | Self::Inject { .. } => false,
            Self::Log(ask) => ask.is_for_peers(),
            _ => true,
        }
    }
}

/// One line of an answer; the last one is `Done` or `Failed`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// How everything is.
    Status(Box<HostStatus>),
    /// Something happened.
    Event(Event),
    /// Long work goes on.
    Progress(Progress),
    /// What this host holds of a VM.
    Standing(Standing),
    /// Something that was looked at for `Check`.
    Found(Found),
    /// How a host of the cluster is.
    Member(Box<Member>),
    /// What this host lacks for a VM.
    Report(Box<Report>),
    /// What a host shows, and whom it believes.
    Keys(Box<keys::HostKeys>),
    /// About a log.
    Log(log::LogAnswer),
    /// Nothing happened: whoever follows is still listened to.
    Alive,
    /// It is done.
    Done {
        /// For a person.
        text: String,
    },
    /// It was not done.
    Failed {
        /// One line that says what to do.
        why: String,
        /// The exit code: 2 for bad input, 1 for the rest.
        code: i32,
    },
}

impl Answer {
    /// Done.
    pub fn done(text: impl Into<String>) -> Self {
        Self::Done { text: text.into() }
    }

    /// Bad input.
    pub fn refused(why: impl Into<String>) -> Self {
        Self::Failed {
            why: why.into(),
            code: 2,
        }
    }

    /// Anything else that went wrong.
    pub fn failed(why: impl Into<String>) -> Self {
        Self::Failed {
            why: why.into(),
            code: 1,
        }
    }

    /// Whether nothing follows.
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(
            self,
            Self::Done { .. } | Self::Failed { .. } | Self::Standing(_) | Self::Report(_) | Self::Keys(_)
        )
    }
}

/// What a host holds of a VM that nobody leads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// A copy of it lives there, or will at once.
    pub alive: bool,
    /// It knows of a leader.
    pub led: bool,
    /// The newest entry of its log: term and index.
    pub last: (u64, u64),
    /// Who holds a complete copy, as far as its log says; a set of members.
    pub complete: u8,
    /// Its images, in the order of the configuration; a witness has none.
    pub disks: Vec<DiskStanding>,
    /// What it noted of who was complete, and since when.
    #[serde(default)]
    pub noted: Option<Note>,
    /// It does not know any more what was agreed.
    #[serde(default)]
    pub recovering: bool,
}

/// How new an image is: ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DiskStanding {
    /// It is the disk at one moment.
    pub consistent: bool,
    /// The reign in which it was last written.
    pub term: u64,
    /// Written as that reign's primary.
    pub primary: bool,
    /// The last sync that it holds whole.
    pub epoch: u64,
}

/// Something that happened.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    /// Counts up on each host.
    pub seq: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// On which host.
    pub host: String,
    /// About which VM.
    pub vm: String,
    /// What, in one word: `protected`, `unprotected`, `took-over`, ...
    pub kind: String,
    /// The same for a person.
    pub text: String,
}

/// A host and its VMs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HostStatus {
    /// The host.
    pub host: String,
    /// How its links to others are protected.
    pub links: String,
    /// The VMs in whose groups it is.
    pub vms: Vec<VmStatus>,
    /// The logs of which it is a host.
    #[serde(default)]
    pub logs: Vec<log::LogStatus>,
    /// Connections to this host that were refused, by what was wrong with them.
    #[serde(default)]
    pub refused: BTreeMap<String, u64>,
    /// Events on their way to `notify_url`, if there is one.
    #[serde(default)]
    pub notify: Option<NotifyStatus>,
    /// How long its certificates are good.
    #[serde(default)]
    pub certificates: Vec<Certificate>,
}

/// One VM, as this host sees it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct VmStatus {
    /// Its name.
    pub name: String,
    /// `primary`, `backup`, `witness`, or `none` while this host has no part in running it.
    pub role: String,
    /// `starting`, `running`, `joining`, `waiting`, `no-majority`, `stopped`, `stalled: ...` (a wait of docs/waits.md), `failed: ...`.
    pub state: String,
    /// Whether a second complete copy exists, as agreed by the group.
    pub protected: bool,
    /// Whether protection is asked for at all.
    pub wants_protection: bool,
    /// The policy.
    pub policy: String,
    /// The leader's host, if known.
    pub leader: Option<String>,
    /// The consensus term.
    pub term: u64,
    /// The running epoch.
    pub epoch: u64,
    /// Entries: committed, applied.
    pub committed: u64,
    /// See `committed`.
    pub applied: u64,
    /// Frames that wait for a sync.
    pub held_frames: usize,
    /// Agreed entries that this host holds: those since the log was cut.
    pub log_entries: u64,
    /// Inbound frames taken and outbound frames released.
    pub frames_in: u64,
    /// See `frames_in`.
    pub frames_out: u64,
    /// The peers of the group: name, and whether its log link stands.
    pub peers: Vec<PeerStatus>,
    /// The last sync, and totals.
    pub sync: SyncStatus,
    /// What the last take-over on this host was made of.
    pub failover: Option<FailoverStatus>,
    /// Long work under way.
    pub progress: Option<Progress>,
    /// Primary: why no backup joins.
    #[serde(default)]
    pub join_problem: Option<JoinProblem>,
    /// QEMU's process on this host.
    pub qemu_pid: Option<u32>,
    /// The disks, in the order of the VM's file; none while the VM is not on this host.
    #[serde(default)]
    pub disks: Vec<DiskFigures>,
    /// What other hosts said that was not believed.
    #[serde(default)]
    pub bad_input: BadInput,
    /// How often a protected VM did not get on, and its session was ended for that (docs/waits.md).
    #[serde(default)]
    pub stalls: u64,
    /// What the thread between the two copies waits for now.
    pub waits: Option<WaitStatus>,
    /// What its queues hold, and may hold (docs/budgets.md).
    #[serde(default)]
    pub queues: Vec<QueueFigures>,
    /// Times that its log, or what its output is held in, was full, so that the network or the VM had to wait.
    #[serde(default)]
    pub full: u64,
    /// Times that the log began to refuse entries of its own, which are said again.
    #[serde(default)]
    pub unsaid: u64,
    /// A bare program in a VM's place: what was read and compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramStatus>,
    /// Of a VM whose file says `speculative = true`, where it is here.
    pub speculation: Option<SpeculationFigures>,
}

/// A wait of docs/waits.md.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitStatus {
    /// Its name there.
    pub name: String,
    /// For what.
    pub for_what: String,
    /// How long it has lasted.
    pub us: u64,
}

/// What a VM's group heard that was counted, told once per host and minute, and dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadInput {
    /// Messages that end too early.
    pub too_short: u64,
    /// Messages with bytes left over.
    pub too_long: u64,
    /// Messages with an unknown tag or an impossible count.
    pub unknown: u64,
    /// Messages that the protocol forbids.
    pub forbidden: u64,
    /// Links that were ended for a frame of impossible length, or for a checksum that stayed wrong.
    pub links_broken: u64,
    /// Connections from hosts that are not in the VM's group.
    pub unknown_members: u64,
    /// Records whose checksum did not fit when they were looked at. A write that is under way looks the same: a few
    /// are usual.
    pub torn: u64,
}

/// One disk on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFigures {
    /// `idle`, `alone`, `primary` or `backup`.
    pub role: String,
    /// What a peer may lack.
    pub dirty_bytes: u64,
    /// Primary: waits to be sent to the backup.
    pub queued_bytes: u64,
    /// What the backup's buffers hold in memory, as this host knows it.
    pub held_bytes: u64,
    /// Backup: of it, the primary's writes since the last sync.
    pub pvm_bytes: u64,
    /// Backup: of it, its own VM's.
    pub svm_bytes: u64,
    /// Backup: the most that the buffers ever held.
    pub peak_bytes: u64,
    /// Backup: compared when idle (the lightweight checkpoint).
    pub compared_bytes: u64,
    /// Backup: of these, found equal and brought to the image.
    pub settled_bytes: u64,
    /// Backup: brought to the image by syncs.
    pub committed_bytes: u64,
    /// Requests of the VM on this host.
    pub requests: u64,
    /// How long they took in all.
    pub request_ns: u64,
    /// Backup: syncs that reached the image, and how long that took in all, from the commit.
    pub settles: u64,
    /// See `settles`.
    pub settle_ns: u64,
    /// Backup: syncs asked for because its buffers filled up.
    #[serde(default)]
    pub asked_syncs: u64,
    /// Backup: writes of its VM that were delayed because its buffers were nearly full.
    #[serde(default)]
    pub delayed_writes: u64,
    /// Backup: how long the lightweight checkpoint compared and wrote.
    #[serde(default)]
    pub light_ns: u64,
    /// How new the image is: term, written as its primary, epoch.
    pub generation: (u64, bool, u64),
    /// The image is the state of one moment.
    pub consistent: bool,
}

/// A peer of a group.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its host.
    pub host: String,
    /// Whether the log link stands.
    pub connected: bool,
}

/// Syncs on this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SyncStatus {
    /// How many were acknowledged since this host became primary.
    pub count: u64,
    /// Of these, by reason.
    pub reasons: Reasons,
    /// How the copies are kept now: match, active or passive.
    pub manner: String,
    /// How often another manner was chosen because it paid.
    pub change_overs: u64,
    /// The comparison of outputs since the backup joined.
    pub compared: ComparedStatus,
    /// How many were given up.
    pub aborted: u64,
    /// The last one.
    pub last: SyncFigures,
    /// Medians over the last 1,000.
    pub median: SyncFigures,
    /// Each figure summed up over all of them: the difference of two answers says what syncs cost in between.
    pub sum: SyncFigures,
}

/// Outputs of both VMs, compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComparedStatus {
    /// Frames that left because both VMs had said them.
    pub matched: u64,
    /// Frames that left because they told nothing new.
    pub free: u64,
    /// Frames that left by a sync.
    pub by_sync: u64,
    /// Times that the two said something else.
    pub differences: u64,
    /// All frames that left, and how long they were held together.
    pub released: u64,
    /// In microseconds.
    pub held_us: u64,
}

/// Why syncs were started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasons {
    /// Both VMs were idle.
    pub idle: u64,
    /// Output had waited for the longest interval.
    pub limit: u64,
    /// The epoch had grown old.
    pub quiet: u64,
    /// The disk's buffers asked.
    pub disk: u64,
    /// The backup said something else.
    pub differs: u64,
    /// Another manner was taken up.
    pub change_over: u64,
    /// The log, or what output is held in, was half full.
    #[serde(default)]
    pub memory: u64,
}

/// A take-over, step by step. Microseconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct FailoverStatus {
    /// From the last word of the old primary to this host's candidacy.
    pub detected_us: u64,
    /// To the won election.
    pub elected_us: u64,
    /// Applying the agreed inputs and the complete set's agreement.
    pub applied_us: u64,
    /// To the first frame out: disk, QEMU's switch, announcement.
    pub announced_us: u64,
}

/// Why a join fails.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinProblem {
    /// The other host, and what it or this one says.
    pub why: String,
    /// How often in a row.
    pub times: u32,
    /// It goes by itself.
    pub passes: bool,
}

/// Long work.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Progress {
    /// What.
    pub what: String,
    /// So far, in bytes.
    pub done: u64,
    /// In all, in bytes.
    pub total: u64,
}

impl Progress {
    /// How far it is, in tenths.
    #[must_use]
    pub fn tenth(&self) -> u64 {
        self.done.saturating_mul(10) / self.total.max(1)
    }
}
