//! What is said to a daemon and between daemons: by HTTP (`address`, `http`), and on the control socket, one JSON object a line.

pub mod address;
pub mod client;
mod figures;
pub mod http;
pub mod keys;
pub mod log;
mod member;
mod notify;
pub mod report;
pub mod server;
mod status;

use crate::daemon::Ticket;
use crate::vm::Note;
pub use figures::{AnswerFigures, ProgramStatus, QueueFigures, SpeculationFigures, SyncFigures};
pub use member::Member;
pub use notify::NotifyStatus;
use report::{Found, Report};
use serde::{Deserialize, Serialize};
pub use status::{
    BadInput, ComparedStatus, DiskFigures, FailoverStatus, HostStatus, JoinProblem, PeerStatus, Progress,
    Reasons, SyncStatus, Verified, VerifyStatus, VmStatus, WaitStatus,
};
use utoipa::ToSchema;

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
    /// A host that has no part in the VM's group gets the one of its backup's host, or of its witness.
    Move {
        /// Which VM.
        vm: String,
        /// The new backup's host. This one or `witness`.
        #[serde(default)]
        backup: Option<String>,
        /// The new witness.
        #[serde(default)]
        witness: Option<String>,
        /// Though the backup is well, and the VM not protected until the new one has its copy.
        #[serde(default)]
        unprotected_meanwhile: bool,
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
        /// Go on with what it will print.
        #[serde(default)]
        follow: bool,
        /// In its place: where its copies have said something else, and what.
        #[serde(default)]
        differences: bool,
    },
    /// Run a command in the copy of a bare program on this host. After `Entered` the asker sends one byte with its standard streams.
    Exec {
        /// Which program.
        vm: String,
        /// The command and its arguments.
        command: Vec<String>,
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
    /// Daemon to daemon: how are you and your VMs, and what happened there?
    Look {
        /// From that event on; of more than a few hundred only the last.
        since: u64,
    },
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
    /// Daemon to daemon: the group has agreed on a list of hosts in which you have no part.
    Left {
        /// Which VM.
        vm: String,
        /// The newest number in that list.
        newest: u8,
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
    /// The VM that a person asks something of.
    #[must_use]
    pub fn vm(&self) -> Option<&str> {
        match self {
            Self::Down { vm, .. }
            | Self::Failover { vm }
            | Self::Policy { vm, .. }
            | Self::Protect { vm, .. }
            | Self::Replace { vm, .. }
            | Self::Move { vm, .. }
            | Self::VerifyDisk { vm, .. }
            | Self::Inject { vm, .. } => Some(vm),
            _ => None,
        }
    }

    /// Whether a daemon takes this from another daemon.
    #[must_use]
    pub fn is_for_peers(&self) -> bool {
        match self {
            Self::Up { .. }
            | Self::Cluster
            | Self::Check { .. }
            | Self::Events { .. }
            | Self::Status
            | Self::Logs { .. }
            | Self::Exec { .. }
            | Self::Inject { .. } => false,
            Self::Log(ask) => ask.is_for_peers(),
            _ => true,
        }
    }
}

/// One line of an answer; the last one is `Done` or `Failed`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
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
    /// A program has printed this.
    Printed {
        /// What, line ends included.
        text: String,
    },
    /// The command is about to run: the standard streams may come.
    Entered {
        /// For a person: where, and what that means.
        text: String,
    },
    /// The command has ended.
    Exited {
        /// Its exit code; 128 and the signal's number where a signal ended it.
        code: i32,
    },
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
            Self::Done { .. }
                | Self::Exited { .. }
                | Self::Failed { .. }
                | Self::Standing(_)
                | Self::Report(_)
                | Self::Keys(_)
        )
    }
}

/// What a host holds of a VM that nobody leads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Standing {
    /// A copy of it lives there, or will at once.
    pub alive: bool,
    /// It knows of a leader.
    pub led: bool,
    /// The newest entry of its log: term and index.
    pub last: (u64, u64),
    /// Who holds a complete copy, as far as its log says; a set of members.
    pub complete: u64,
    /// Its images, in the order of the configuration; a witness has none.
    pub disks: Vec<DiskStanding>,
    /// What it noted of who was complete, and since when.
    #[serde(default)]
    pub noted: Option<Note>,
    /// It does not know any more what was agreed.
    #[serde(default)]
    pub recovering: bool,
    /// The copy of a bare program has ended by itself, and these were the last inputs that it was given, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ended_after: Vec<String>,
    /// The copy of a bare program here has ended by itself, or could not begin.
    #[serde(default)]
    pub ended: bool,
    /// It is to be begun again when it has ended everywhere.
    #[serde(default)]
    pub begins_again: bool,
}

/// How new an image is: ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
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
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
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
