//! What a loop knows while no copy of the VM is alive anywhere, and what an inquest has found.
//!
//! Not here: what follows from it (`vm::cold`).

use crate::vm::disks::DisksError;
use crate::vm::noted::Notebook;
use crate::vm::remains::StillThere;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, DiskStanding, Standing};
use dunlin_core::replica::cold_start::ColdStart;
use dunlin_core::replica::leadership::Mandate;
use dunlin_core::replica::promotion::Advice;
use dunlin_core::units::ReplicaId;

/// How far this host is with it.
pub struct Cold {
    pub(in crate::vm) machine: ColdStart,
    /// Who waits for a person's order to be carried out.
    pub(in crate::vm) reply: Option<Sender<Answer>>,
    /// Said last, so that it is said once.
    pub(in crate::vm) said: String,
    /// Who ordered this host to serve alone, until it does.
    pub(in crate::vm) alone_ordered: Option<Sender<Answer>>,
    /// What a person was told who could order that.
    pub(in crate::vm) advice: Advice,
    /// Who held a complete copy, as far as was noted beside the log.
    pub(in crate::vm) notebook: Notebook,
    /// The VM that this host boots, or is about to, has lived before.
    pub(in crate::vm) has_lived: bool,
}

impl Cold {
    /// Of a VM of which this is noted.
    pub fn new(notebook: Notebook) -> Self {
        Self {
            machine: ColdStart::default(),
            reply: None,
            said: String::new(),
            alone_ordered: None,
            advice: Advice::default(),
            notebook,
            has_lived: false,
        }
    }

    /// What is agreed contradicts it.
    pub fn end_mandate(&mut self) {
        self.machine.end_mandate();
    }

    /// Whether this host may be elected to boot the VM.
    pub fn mandate(&self) -> Mandate {
        self.machine.mandate()
    }
}

/// Why it is not known what another host holds.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Its own words, or those of whoever asked it.
    #[error("{0}")]
    Refused(String),
    /// It says something else.
    #[error("host '{0}' does not say what it holds")]
    NotSaid(String),
    /// Whoever asked has broken off.
    #[error("no answer")]
    NoAnswer,
}

/// Why it is not known how new the disks here are.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// A machine that has ended still has them.
    #[error(transparent)]
    Remains(#[from] StillThere),
    /// They cannot be opened.
    #[error(transparent)]
    Disks(#[from] DisksError),
}

/// What was found out.
pub struct Inquest {
    pub(in crate::vm) disks: Result<Vec<DiskStanding>, LookError>,
    pub(in crate::vm) others: Vec<(ReplicaId, Result<Standing, AskError>)>,
}
