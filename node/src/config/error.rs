//! What is wrong with values in a file: each kind of value has its own type, and the file's name goes before it (`ConfigError`).

use dunlin_core::agreed::{HostPart, MOST_HOSTS};
use dunlin_guest::spec::SpecError;
use dunlin_program::options::NetworkError;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why there can be no such standby.
#[derive(Debug, thiserror::Error)]
pub enum StandbyError {
    /// No time, or one that makes no sense.
    #[error("standby_after = '{0}' is no time from 1s to 1day, such as '30s'")]
    After(String),
    /// No time, or one that makes no sense.
    #[error("standby_checkpoint = '{0}' is no time from 1s to 1day, such as '30s'")]
    Checkpoint(String),
    /// A bare program's copies are made of another kind of checkpoint.
    #[error("standby_checkpoint is of a VM's memory, and this is a bare program")]
    CheckpointOfProgram,
    /// Its host has one.
    #[error("standby: host '{0}' has a part in the VM already")]
    HasPart(String),
    /// Nobody's part could be taken.
    #[error("policy '{0}' has no copy, and no standby for one")]
    NoCopy(&'static str),
}

/// No time after which disks are compared.
#[derive(Debug, thiserror::Error)]
#[error(
    "verify_disks = '{0}' is none of never, daily, weekly, monthly, nor a time from 10s to 366days, such as '12h'"
)]
pub struct VerifyEveryError(pub(super) String);

/// Too little or too much memory for a queue.
#[derive(Debug, thiserror::Error)]
#[error("memory.{name} is from {least} to {most}")]
pub struct MemoryError {
    pub(super) name: &'static str,
    pub(super) least: usize,
    pub(super) most: usize,
}

/// Why the page cannot be served there.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// Others would see it.
    #[error(
        "page: {0} is not an address of this machine for itself alone: it is served at one such as 127.0.0.1:7702; 'ssh -L \
         7702:127.0.0.1:7702 HOST' brings it to another machine, or 'api' with certificates"
    )]
    NotOwn(SocketAddr),
    /// Something else.
    #[error("page: '{0}' is neither an address, as 127.0.0.1:7702, nor \"off\"")]
    NoAddress(String),
}

/// Why a part does not go to another host, or why that host is no standby.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// Nobody knows its address.
    #[error("host '{0}' is not in the cluster")]
    NotInCluster(String),
    /// It has one.
    #[error("host '{host}' has a part in VM '{vm}' already")]
    HasPart {
        /// Who is to come.
        host: String,
        /// To this VM.
        vm: String,
    },
    /// It does not fit into what is agreed.
    #[error("a host's name has {} bytes at the most", HostPart::LONGEST_NAME)]
    LongName,
    /// Of a VM.
    #[error(
        "VM '{vm}' has had {} hosts, and no number is used again: end it ('dunlin down') and start it anew",
        MOST_HOSTS
    )]
    NoNumber {
        /// Which.
        vm: String,
    },
    /// Nothing is to be given away.
    #[error("host '{host}' has no part in VM '{vm}'")]
    NoPart {
        /// Who is to leave.
        host: String,
        /// This VM.
        vm: String,
    },
}

/// Why a `[program]` makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// Both hosts have to run the same.
    #[error("program.command: the executable's whole path is needed, such as \"/usr/bin/redis-server\"")]
    NoExecutable,
    /// A relative path, or one with `..`.
    #[error("program.{key}: {path:?} is no whole path")]
    NoWholePath {
        /// Where it stands.
        key: &'static str,
        /// It.
        path: PathBuf,
    },
    /// A folder of the kernel's.
    #[error("program.{key}: {path:?} is the kernel's")]
    Kernels {
        /// Where it stands.
        key: &'static str,
        /// It.
        path: PathBuf,
    },
    /// It goes into a mount's options.
    #[error("program.root: {0:?} has a character that overlayfs does not take")]
    Character(PathBuf),
    /// A number that is too small or too large.
    #[error("program.{key}: is from {range} ({usual} if it is left out)")]
    Range {
        /// Where it stands.
        key: &'static str,
        /// What it may be.
        range: &'static str,
        /// What it is otherwise.
        usual: &'static str,
    },
    /// None, or several.
    #[error("program.nics: a program has one card")]
    OneCard,
    /// Its card's.
    #[error("program.nics.address: {0}")]
    Address(#[source] NetworkError),
    /// Its card's own address.
    #[error("program.nics: {0}")]
    Mac(#[source] SpecError),
    /// The kernel takes no other.
    #[error("program.nics: {key} {name:?} must have 1 to 15 characters")]
    DeviceName {
        /// Of what.
        key: &'static str,
        /// It.
        name: String,
    },
    /// The image's file is not named.
    #[error("program.data: data_at and data_mib are for an image, whose file it names")]
    NoImage,
    /// Nobody would see the image.
    #[error("program.data_at: where the program is to see its data")]
    NoPlace,
    /// It would cover itself.
    #[error("program.data_at: the image itself is there")]
    ImageThere,
}
