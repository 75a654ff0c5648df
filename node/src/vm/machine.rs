//! One QEMU with what the host holds of its ports: shared between the loop and a session's thread.

use super::disks::Disks;
use super::event::{LoopSender, Started};
use super::speculating::Speculating;
use super::{FaultAt, Shared};
use crate::config::VmConfig;
use dunlin_core::units::Term;
use dunlin_guest::frames::FramePort;
use dunlin_guest::{Ports, Qemu, Start};
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// A running VM.
pub struct Machine {
    /// The process and its control ports.
    pub qemu: Qemu,
    /// Its disks. After `qemu`: a process that still writes must be gone before they close.
    pub disks: Disks,
    /// Tests only.
    pub fault_at: Arc<FaultAt>,
}

/// The NICs' ports: the loop's alone.
pub type FramePorts = Vec<FramePort>;

impl Machine {
    /// Starts QEMU; blocks for some 100 ms. `state` is this host's folder.
    pub fn start(
        config: &VmConfig,
        start: Start,
        term: Term,
        state: &Path,
        shared: &Shared,
        to_loop: &LoopSender,
    ) -> Result<Started, String> {
        let mut ports = Ports::default();
        let mut frames = Vec::new();
        for _ in &config.spec.nics {
            let (ours, theirs) =
                FramePort::pair().map_err(|error| format!("a socket for the NIC: {error}"))?;
            frames.push(ours);
            ports.frames.push(theirs);
        }
        let nobody_looks = shared
            .opening_disks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (disks, ends) = Disks::open(config, state, to_loop)?;
        drop(nobody_looks);
        ports.nbd = ends;
        if start == Start::Boot {
            disks.start_alone(term)?;
        }
        let mut qemu = Qemu::start(&config.spec, start, ports).map_err(|error| error.to_string())?;
        let colo = qemu.take_colo();
        let sockets = match config.speculative {
            true => Some(Speculating::sockets()?),
            false => None,
        };
        Ok(Started {
            machine: Arc::new(Self {
                qemu,
                disks,
                fault_at: shared.fault_at.clone(),
            }),
            ports: frames,
            colo,
            sockets,
        })
    }
}
