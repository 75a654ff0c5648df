//! One QEMU with what the host holds of its ports: shared between the loop and a session's thread.

use super::event::Started;
use super::session::Broken;
use crate::config::VmConfig;
use dunlin_core::units::Epoch;
use dunlin_guest::frames::FramePort;
use dunlin_guest::{Ports, Qemu, Start};
use std::sync::Arc;

/// A running VM.
pub struct Machine {
    /// The process and its control ports.
    pub qemu: Qemu,
}

/// The NICs' ports: the loop's alone.
pub type FramePorts = Vec<FramePort>;

impl Machine {
    /// Starts QEMU; blocks for some 100 ms.
    pub fn start(config: &VmConfig, start: Start) -> Result<Started, String> {
        let mut ports = Ports::default();
        let mut frames = Vec::new();
        for _ in &config.spec.nics {
            let (ours, theirs) =
                FramePort::pair().map_err(|error| format!("a socket for the NIC: {error}"))?;
            frames.push(ours);
            ports.frames.push(theirs);
        }
        let mut qemu = Qemu::start(&config.spec, start, ports).map_err(|error| error.to_string())?;
        let colo = qemu.take_colo();
        Ok(Started {
            machine: Arc::new(Self { qemu }),
            ports: frames,
            colo,
        })
    }

    /// Copies the disks to the joining backup while the VM runs.
    pub fn join_disks(&self) -> Result<(), Broken> {
        Ok(())
    }

    /// The primary stands: what it has written so far belongs to `epoch`.
    pub fn mark_disks(&self, _epoch: Epoch) -> Result<(), Broken> {
        Ok(())
    }

    /// Waits until all writes of `epoch` are in the backup's PVM buffers.
    pub fn disks_reached(&self, _epoch: Epoch) -> Result<(), Broken> {
        Ok(())
    }

    /// The backup's disks move on to the end of `epoch`.
    pub fn commit_disks(&self, _epoch: Epoch, _joining: bool) -> Result<(), Broken> {
        Ok(())
    }

    /// The backup's own writes become the disks' truth.
    pub fn take_over_disks(&self) -> Result<(), Broken> {
        Ok(())
    }
}
