//! A TAP by which TCP goes in large frames: one system call, and one way through the host's bridge, for what a wire carries in many segments.
//!
//! Decides:    nothing.
//! Flow:       TAP -> [`GsoTap::read`], segment by segment -> node (proposes); node (released) -> [`GsoTap::queue`] -> [`GsoTap::send_next`] -> TAP.
//! Invariants: 1. frames keep their order; 2. a frame that contradicts its header is lost, as on any wire.
//! Source:     Documentation/networking/tuntap.rst; linux/virtio_net.h.
//! Not here:   how frames are cut, and which of them may leave as one (core's `offload`).

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};

use bytes::Bytes;
use dunlin_core::offload::merge::Run;
use dunlin_core::offload::segment::segments;
use dunlin_core::offload::{MOST_SEGMENTS, Offload};

use super::{FRAME_BYTES_MAX, Tap, TapError};

/// A TAP, and frames that are to leave by it.
#[derive(Debug)]
pub struct GsoTap {
    tap: Tap,
    outgoing: VecDeque<Bytes>,
    buffer: Vec<u8>,
    scratch: Vec<u8>,
    is_gone: bool,
}

impl GsoTap {
    /// As [`Tap::open`].
    pub fn open(name: &str, bridge: Option<&str>) -> Result<Self, TapError> {
        Ok(Self {
            tap: Tap::open_with_offloads(name, bridge)?,
            outgoing: VecDeque::new(),
            buffer: vec![0; Offload::BYTES + FRAME_BYTES_MAX],
            scratch: Vec::new(),
            is_gone: false,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.tap.name()
    }

    /// As [`Tap::set_rx_filter`].
    pub fn set_rx_filter(&self, addresses: &[[u8; 6]]) -> io::Result<()> {
        self.tap.set_rx_filter(addresses)
    }

    /// Gives what comes next to `each`: a frame, or up to [`dunlin_core::offload::MOST_CUT`] segments. False: there is nothing.
    pub fn read(&mut self, each: impl FnMut(&[u8])) -> io::Result<bool> {
        let read = self.tap.read(&mut self.buffer);
        if let Err(error) = &read {
            // One that is only switched off comes again, and has other errors.
            self.is_gone |= error.raw_os_error() == Some(libc::EBADFD);
        }
        let Some(length) = read? else {
            return Ok(false);
        };
        if let Some((header, frame)) = self.buffer[..length].split_first_chunk_mut() {
            // Invariant 2.
            let _ = segments(&Offload::read(header), frame, &mut self.scratch, each);
        }
        Ok(true)
    }

    /// Whether somebody has removed the device, as far as the last read has shown: nothing comes or goes by it any more, and its descriptor is readable for ever.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// Appends a frame for the network; it leaves with [`GsoTap::send_next`]. One beyond [`MOST_SEGMENTS`] is lost, as on any wire.
    pub fn queue(&mut self, frame: Bytes) {
        if self.outgoing.len() < MOST_SEGMENTS {
            self.outgoing.push_back(frame);
        }
    }

    /// Whether there are frames that have not left.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Sends the first of the queued frames, and with it those that may leave in one. False when the kernel had no room: they are lost, as on any wire.
    pub fn send_next(&mut self) -> io::Result<bool> {
        let run = Run::at_front(self.outgoing.iter().map(|frame| &frame[..]), MOST_SEGMENTS);
        let header = run.offload.to_bytes();
        let frames: Vec<Bytes> = self
            .outgoing
            .drain(..run.frames.min(self.outgoing.len()))
            .collect();
        let mut pieces = Vec::with_capacity(2 + frames.len());
        pieces.extend([IoSlice::new(&header), IoSlice::new(&run.head)]);
        pieces.extend(frames.iter().map(|frame| IoSlice::new(&frame[run.payload_at..])));
        self.tap.write_pieces(&pieces)
    }

    /// Loses the queued frames.
    pub fn lose_queued(&mut self) {
        self.outgoing.clear();
    }

    /// Sends a frame past the queue, with what it leaves to the kernel. False when the kernel had no room.
    pub fn write(&self, frame: &[u8], offload: Offload) -> io::Result<bool> {
        let header = offload.to_bytes();
        self.tap
            .write_pieces(&[IoSlice::new(&header), IoSlice::new(frame)])
    }
}

impl AsFd for GsoTap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }
}

#[cfg(test)]
mod tests;
