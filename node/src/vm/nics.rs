//! The VM's network: its NICs' ports into QEMU, and a TAP on the host for each.

use crate::config::VmConfig;
use crate::vm::machine::FramePorts;
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::sync::drain::Drain;
use dunlin_core::wire::agreed::MOST_FRAMES;
use dunlin_guest::frames::{Announcer, FrameError, FramePort, Tap};
use std::os::fd::{AsFd, BorrowedFd};

/// No Ethernet frame with an MTU up to 64 KiB is larger.
const FRAME_BYTES: usize = 65_600;

/// All NICs of a VM.
pub struct Nics {
    nics: Vec<Nic>,
    buffer: Vec<u8>,
    drain: Drain,
}

struct Nic {
    port: FramePort,
    tap: Tap,
    announcer: Announcer,
}

impl Nics {
    /// Makes a TAP for each port.
    pub fn open(config: &VmConfig, ports: FramePorts) -> Result<Self, String> {
        let mut nics = Vec::with_capacity(ports.len());
        for (port, spec) in ports.into_iter().zip(&config.spec.nics) {
            let name = spec.tap.as_deref().unwrap_or("dunlin%d");
            let tap = Tap::open(name, spec.bridge.as_deref()).map_err(|error| error.to_string())?;
            let announcer = Announcer::new(spec.mac_bytes().map_err(|error| error.to_string())?);
            nics.push(Nic { port, tap, announcer });
        }
        Ok(Self {
            nics,
            buffer: vec![0; FRAME_BYTES],
            drain: Drain::default(),
        })
    }

    /// Descriptors that are readable when the VM has sent something.
    pub fn port_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nics.iter().map(|nic| nic.port.as_fd())
    }

    /// Descriptors that are readable when the network has sent something.
    pub fn tap_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nics.iter().map(|nic| nic.tap.as_fd())
    }

    /// What the VM has sent.
    pub fn read_ports(&mut self, mut each: impl FnMut(Frame)) -> Result<(), FrameError> {
        for (number, nic) in self.nics.iter_mut().enumerate() {
            let Nic { port, announcer, .. } = nic;
            port.read(|bytes| {
                announcer.learn(bytes);
                each(Frame {
                    nic: number as u8,
                    bytes: Bytes::copy_from_slice(bytes),
                });
            })?;
        }
        Ok(())
    }

    /// What the network has sent: at most one batch.
    pub fn read_taps(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        for (number, nic) in self.nics.iter().enumerate() {
            while frames.len() < MOST_FRAMES {
                match nic.tap.read(&mut self.buffer) {
                    Ok(Some(len)) => frames.push(Frame {
                        nic: number as u8,
                        bytes: Bytes::copy_from_slice(&self.buffer[..len]),
                    }),
                    // A TAP that was taken down gives errors; it is as silent as an unplugged cable.
                    Ok(None) | Err(_) => break,
                }
            }
        }
        frames
    }

    /// Throws away what has waited in the TAPs while another host spoke for the VM.
    pub fn discard_taps(&mut self) {
        while !self.read_taps().is_empty() {}
    }

    /// Queues a frame for the VM.
    pub fn queue(&mut self, frame: &Frame) {
        if let Some(nic) = self.nics.get_mut(usize::from(frame.nic)) {
            nic.port.queue(&frame.bytes);
        }
    }

    /// Writes what is queued. Whether nothing is left.
    pub fn flush(&mut self) -> Result<bool, FrameError> {
        let mut all = true;
        for nic in &mut self.nics {
            all &= nic.port.flush()?;
        }
        Ok(all)
    }

    /// Whether the VM has taken all that was sent to it, but for cards that it takes nothing from.
    pub fn inbound_is_settled(&mut self, now_us: u64) -> bool {
        self.look(now_us);
        self.drain.is_settled(now_us)
    }

    /// A sync waits until the VM has its inputs.
    pub fn begin_drain(&mut self, now_us: u64) {
        self.drain.begin(now_us);
    }

    /// Whether that sync may go on.
    pub fn drain_is_over(&mut self, now_us: u64) -> bool {
        self.look(now_us);
        self.drain.is_over(now_us)
    }

    fn look(&mut self, now_us: u64) {
        // A socket that cannot be asked has ended with its QEMU: that is noticed elsewhere.
        let in_flight = |nic: &Nic| nic.port.inbound_in_flight().unwrap_or(0);
        self.drain.look(now_us, self.nics.iter().map(in_flight));
    }

    /// Sends a frame of the VM to the network. One that the kernel has no room for is lost, as on any wire.
    pub fn send(&self, frame: &Frame) {
        if let Some(nic) = self.nics.get(usize::from(frame.nic)) {
            let _ = nic.tap.write(&frame.bytes);
        }
    }

    /// Tells the network's switches that the VM is here now.
    pub fn announce(&self) {
        for nic in &self.nics {
            for frame in nic.announcer.frames() {
                let _ = nic.tap.write(&frame);
            }
        }
    }
}
