//! What is asked of a daemon, by people and by other daemons.

use crate::{keys, log};
use serde::{Deserialize, Serialize};

/// One call that starts a VM: drawn by the daemon that was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket(pub u64);

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
        /// The host whose disks count, whatever others have.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<String>,
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
    /// A host that has no part in the VM's group gets the one of its backup's host, or of its witness, or is its standby. One of the four.
    Move {
        /// Which VM.
        vm: String,
        /// The new backup's host.
        #[serde(default)]
        backup: Option<String>,
        /// The new witness.
        #[serde(default)]
        witness: Option<String>,
        /// The new standby.
        #[serde(default)]
        standby: Option<String>,
        /// There is to be no standby any more.
        #[serde(default)]
        no_standby: bool,
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
        /// The asker's QEMU, or the hash of a program's executable there.
        qemu_version: String,
        /// A bare program that runs already, and whose copy is to come while it does. Left out where it is false: older versions do not know it, and
        /// cannot do that.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        newcomer: bool,
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
        /// Which life of its images begins; 0, and nothing on the wire, to a daemon that knows of none.
        #[serde(default, skip_serializing_if = "is_none_yet")]
        life: u64,
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
    /// Daemon to daemon: what has a VM left on these images when it ended on your host?
    LastLife {
        /// The text of the vm.toml that names them.
        text: String,
    },
    /// Daemon to daemon: forget this VM.
    Remove {
        /// Which.
        vm: String,
    },
    /// About logs that programs share.
    Log(log::LogRequest),
}

/// A daemon of an earlier version refuses a request with a key that it does not know.
fn is_none_yet(life: &u64) -> bool {
    *life == 0
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_of_an_older_version_is_asked_in_its_words_unless_a_program_is_to_come() {
        let ask = |newcomer| Request::Prepare {
            text: String::new(),
            origin: String::new(),
            qemu_version: String::new(),
            newcomer,
            ticket: Ticket(1),
        };
        let said = |newcomer| serde_json::to_string(&ask(newcomer)).expect("a request");
        assert!(!said(false).contains("newcomer"), "{}", said(false));
        assert!(said(true).contains("\"newcomer\":true"), "{}", said(true));
    }

    #[test]
    fn a_host_that_knows_no_lives_is_given_a_file_in_its_words() {
        let install = |life| Request::Install {
            text: String::new(),
            newcomer: false,
            life,
            ticket: Ticket(1),
        };
        let said = |life| serde_json::to_string(&install(life)).expect("a request");
        assert!(!said(0).contains("life"), "{}", said(0));
        assert!(said(3).contains("\"life\":3"), "{}", said(3));
    }
}
