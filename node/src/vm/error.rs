//! Why this host takes no part in a VM's group, or a program's.

use super::program::error::{DataError, FileError};
use dunlin_core::wire::WireError;
use dunlin_fabric::group::GroupError;
use std::io;

/// Why this host takes no part in a VM's group, or a program's.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It does already.
    #[error("VM '{0}' is here already")]
    AlreadyHere(String),
    /// Its loop would be woken by it.
    #[error("an eventfd: {0}")]
    Eventfd(#[source] io::Error),
    /// The VM's file names others.
    #[error("this host is not in the VM's group")]
    NotInVm,
    /// The program's file names others.
    #[error("this host is not in the program's group")]
    NotInProgram,
    /// The group's log, or its links.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// What was agreed is not understood.
    #[error("the log's snapshot: {0}")]
    Snapshot(#[from] WireError),
    /// The program's data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Nothing can be noted of the program.
    #[error(transparent)]
    Noted(#[from] FileError),
    /// Its loop would run there.
    #[error("a thread for the VM: {0}")]
    Thread(#[source] io::Error),
}
