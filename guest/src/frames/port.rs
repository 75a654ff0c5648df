//! One network card of a VM, whichever way its frames go between QEMU and us.
//!
//! Decides:    nothing.
//! Flow:       the VM -> [`FramePort::read`] -> gate; agreed input -> [`FramePort::queue`], [`FramePort::flush`] -> the VM.
//! Invariants: 1. never blocks; 2. frames keep their order in each direction; 3. a frame that the VM has sent before it stopped is given out by
//!             [`FramePort::read`], or is in its state and is sent after it goes on: never both.
//! Source:     stock-qemu.md; docs/guest.md "The card".
//! Not here:   the wires ([`StreamPort`], [`VhostUserPort`]), whether a frame may leave.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::stream::StreamPort;
use super::vhost_user::VhostUserPort;
use crate::memory::RamWriter;
use crate::spec::NicBackend;

/// Why the port broke. It is not usable afterwards.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// QEMU has ended.
    #[error("QEMU closed its network socket: the process has ended")]
    Closed,
    /// Not the protocol.
    #[error("a frame of {0} bytes from QEMU: the stream is out of step")]
    Length(usize),
    /// A vhost-user message that cannot be followed.
    #[error("QEMU's vhost-user socket: {0}")]
    VhostUser(String),
    /// The socket failed.
    #[error("QEMU's network socket: {0}")]
    Io(#[from] io::Error),
}

/// Our end of one NIC. Readiness comes from the node's epoll.
pub enum FramePort {
    /// Each frame passes QEMU's main thread and a socket.
    Stream(StreamPort),
    /// We serve the card's rings in the guest's memory.
    VhostUser(VhostUserPort),
}

impl FramePort {
    /// A port of that kind and the other end, for [`crate::Ports::frames`].
    pub fn pair(backend: NicBackend) -> io::Result<(FramePort, OwnedFd)> {
        Ok(match backend {
            NicBackend::Stream => {
                let (port, theirs) = StreamPort::pair()?;
                (FramePort::Stream(port), theirs)
            }
            NicBackend::VhostUser => {
                let (port, theirs) = VhostUserPort::pair()?;
                (FramePort::VhostUser(port), theirs)
            }
        })
    }

    /// Who writes to the VM's memory for this card, for [`crate::Ports::ram_writers`]; none where QEMU does.
    pub fn ram_writer(&self) -> Option<RamWriter> {
        match self {
            FramePort::Stream(_) => None,
            FramePort::VhostUser(port) => Some(port.ram_writer()),
        }
    }

    /// Gives frames that have come to `frame`, without waiting, and says how many: all that a VM that stands has sent, and a bounded number of one that
    /// goes on sending. Call when readable; it stays so where some are left.
    pub fn read(&mut self, frame: impl FnMut(&[u8])) -> Result<usize, FrameError> {
        match self {
            FramePort::Stream(port) => port.read(frame),
            FramePort::VhostUser(port) => port.read(frame),
        }
    }

    /// Appends a frame for the VM; it leaves with [`FramePort::flush`]. One that is longer than any NIC takes is lost, as on any
    /// wire: another host may have put it into the log.
    pub fn queue(&mut self, frame: &[u8]) {
        match self {
            FramePort::Stream(port) => port.queue(frame),
            FramePort::VhostUser(port) => port.queue(frame),
        }
    }

    /// What is queued here and was not written yet.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        match self {
            FramePort::Stream(port) => port.queued_bytes(),
            FramePort::VhostUser(port) => port.queued_bytes(),
        }
    }

    /// Writes what the VM takes. False: some is left.
    pub fn flush(&mut self) -> Result<bool, FrameError> {
        match self {
            FramePort::Stream(port) => port.flush(),
            FramePort::VhostUser(port) => port.flush(),
        }
    }

    /// Bytes on their way to the guest: queued here or not yet read by QEMU.
    pub fn inbound_in_flight(&self) -> io::Result<usize> {
        match self {
            FramePort::Stream(port) => port.inbound_in_flight(),
            FramePort::VhostUser(port) => Ok(port.queued_bytes()),
        }
    }

    /// Bytes on their way from the guest that have left its memory and were not yet given out by [`FramePort::read`].
    pub fn outbound_in_flight(&self) -> io::Result<usize> {
        match self {
            FramePort::Stream(port) => port.outbound_in_flight(),
            // A frame is given out as it leaves the ring.
            FramePort::VhostUser(_) => Ok(0),
        }
    }
}

impl AsFd for FramePort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            FramePort::Stream(port) => port.as_fd(),
            FramePort::VhostUser(port) => port.as_fd(),
        }
    }
}
