//! What this host holds of a VM, for whoever asks from another thread.
//!
//! Not here: what a loop knows of itself (`cold`), how new an image is (the guest's `disk`).

use super::ask::command;
use super::disks::Disks;
use super::event::{Command, LoopSender};
use super::shared::{Host, Shared};
use super::state::cold::LookError;
use crate::config::VmConfig;
use dunlin_api::{Answer, DiskStanding, Standing};
use std::path::PathBuf;
use std::sync::Arc;

/// What this host holds of a VM, to be asked from other threads.
#[derive(Clone)]
pub struct Holding {
    pub(in crate::vm) to_loop: LoopSender,
    pub(in crate::vm) shared: Arc<Shared>,
    pub(in crate::vm) config: Arc<VmConfig>,
    pub(in crate::vm) state: PathBuf,
    pub(in crate::vm) is_witness: bool,
}

impl Holding {
    /// Of this VM.
    pub(in crate::vm) fn new(
        to_loop: LoopSender,
        shared: Arc<Shared>,
        config: Arc<VmConfig>,
        host: &Host,
    ) -> Self {
        let state = host.state.clone();
        let is_witness = config.member(&host.name).is_some_and(|member| member.witness);
        Self {
            to_loop,
            shared,
            config,
            state,
            is_witness,
        }
    }

    /// What another host hears. Opens the disks if no VM has them.
    pub fn standing(&self) -> Answer {
        match command(&self.to_loop, Command::Standing) {
            Answer::Standing(standing)
                if !standing.alive && !standing.led && !self.is_witness && self.config.program.is_none() =>
            {
                match self.disks() {
                    Ok(disks) => Answer::Standing(Standing { disks, ..standing }),
                    Err(why) => Answer::failed(why.to_string()),
                }
            }
            answer => answer,
        }
    }

    /// The images of a VM's copy here; none of a witness, and of a bare program, whose image has marks of its own.
    pub fn images(&self) -> Vec<PathBuf> {
        if self.is_witness || self.config.program.is_some() {
            return Vec::new();
        }
        let disks = self.config.spec.disks.iter();
        disks.map(|disk| disk.path.clone()).collect()
    }

    /// None of the images is newer than that, whether or not they can be read.
    pub fn disks_at_most(&self) -> Option<DiskStanding> {
        self.shared.disks_at_most()
    }

    /// How new the images are, a UEFI's variables the last of them. Opens them.
    pub fn disks(&self) -> Result<Vec<DiskStanding>, LookError> {
        self.shared.remains.await_none()?;
        let _alone = self.shared.opening_disks.lock();
        Ok(Disks::look(&self.config, &self.state)?)
    }
}
