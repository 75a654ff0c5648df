//! The VM's network: its NICs' ports into QEMU, and a TAP on the host for each.
//!
//! Invariants:
//! 1. What is on its way into a NIC never takes more than its share of the VM's budget, so a card that nobody reads, or a
//!    guest slower than a flood, costs neither memory nor the other cards.
//! 2. Where a queue is half full, what its TAP has is dropped before it is proposed, so both VMs miss it alike. What was
//!    taken and is still being agreed on counts.
//! 3. A copy of the VM that is so much slower than the primary's that an *agreed* frame finds no room loses it alone. That is
//!    sound: a guest loses frames behind its card too (a full ring, a full socket buffer), and not in both copies alike, so
//!    nothing rests on both having got it. The comparison lets no acknowledgement out that the backup's TCP has not made too,
//!    so a client sends again what only one of them has got; what a copy says for want of a frame differs, and is synced;
//!    and after a sync it has what the primary has (docs/output.md, claim B).
//! 4. A TAP that somebody has removed is waited for by nobody, and told once: its card is as silent as one whose cable is pulled, until the VM has others.

use crate::config::VmConfig;
use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::offload::{MOST_CUT, MOST_HEADERS_BYTES, MOST_SEGMENTS, Offload};
use dunlin_core::output::multipath;
use dunlin_core::overheard::Overheard;
use dunlin_core::sync::drain::Drain;
use dunlin_core::wire::agreed::MOST_FRAMES;
use dunlin_guest::frames::{Announcer, FrameError, FramePort, GsoTap, RxFilter, TapError};
use dunlin_guest::spec::SpecError;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// No Ethernet frame with an MTU up to 64 KiB is larger.
const FRAME_BYTES: usize = 65_600;
/// A batch is over when it has so many bytes, so that it takes its turn on the links.
const BATCH_BYTES: usize = 1 << 20;
/// The most that a batch takes in the log: there has to be room for it before it is taken off the network.
pub const MOST_BATCH_BYTES: usize =
    BATCH_BYTES + FRAME_BYTES + MOST_CUT * MOST_HEADERS_BYTES + 8 * (MOST_FRAMES + MOST_CUT);
/// Frames that have waited in a TAP: several times what its queue in the kernel holds.
const MOST_STALE: usize = 4096;
/// A backup looks this often at what the network brings to it as well: no wake-up is made for it, since agreed inputs and heartbeats
/// make enough of them.
const OVERHEAR_US: u64 = 2_000;

/// The NICs' ports: the loop's alone.
pub type FramePorts = Vec<FramePort>;

/// Why a VM's cards are not in the network.
#[derive(Debug, thiserror::Error)]
pub enum NicsError {
    /// A TAP cannot be made.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A card's own address.
    #[error(transparent)]
    Mac(#[from] SpecError),
    /// A TAP does not take which frames are for its card.
    #[error("TAP {tap:?}: its filter: {error}")]
    Filter {
        /// Its name.
        tap: String,
        /// The system's answer.
        #[source]
        error: io::Error,
    },
}

/// All NICs of a VM.
pub struct Nics {
    nics: Vec<Nic>,
    /// No other cards of this process have it.
    number: u64,
    /// Whose TAP is read first.
    turn: usize,
    drain: Drain,
    /// What each NIC's queue may take.
    share_bytes: usize,
    /// Frames for the VM that found no room.
    dropped: u64,
    old_source: bool,
    /// What the network has brought while another host spoke for the VM.
    overheard: Overheard,
    overheard_us: u64,
}

struct Nic {
    port: FramePort,
    tap: GsoTap,
    announcer: Announcer,
    rx_filter: RxFilter,
    /// Somebody was told that the TAP is gone.
    gone_is_told: bool,
    /// Taken off the network and not queued yet: it is being agreed on.
    taken_bytes: usize,
}

impl Nics {
    /// Makes a TAP for each port.
    pub fn open(config: &VmConfig, ports: FramePorts) -> Result<Self, NicsError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut nics = Vec::with_capacity(ports.len());
        for (port, spec) in ports.into_iter().zip(&config.spec.nics) {
            let name = spec.tap.as_deref().unwrap_or("dunlin%d");
            let tap = GsoTap::open(name, spec.bridge.as_deref())?;
            let mac = spec.mac_bytes()?;
            let rx_filter = RxFilter::new(mac, spec.promiscuous);
            tap.set_rx_filter(rx_filter.addresses())
                .map_err(|error| NicsError::Filter {
                    tap: tap.name().to_owned(),
                    error,
                })?;
            nics.push(Nic {
                port,
                tap,
                announcer: Announcer::new(mac),
                rx_filter,
                gone_is_told: false,
                taken_bytes: 0,
            });
        }
        Ok(Self {
            share_bytes: config.memory.inbound_bytes() / nics.len().max(1),
            nics,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            turn: 0,
            drain: Drain::default(),
            dropped: 0,
            old_source: false,
            overheard: Overheard::new(config.memory.inbound_bytes() / 2),
            overheard_us: 0,
        })
    }

    /// Tells these cards' descriptors from those of others that had the same numbers before.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Descriptors that are readable when the VM has sent something.
    pub fn port_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nics.iter().map(|nic| nic.port.as_fd())
    }

    /// Descriptors that are readable when the network has sent something.
    pub fn tap_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let there = self.nics.iter().filter(|nic| !nic.tap.is_gone());
        there.map(|nic| nic.tap.as_fd())
    }

    /// The TAPs that were found to be removed since the last call (invariant 4), each with its card's number.
    pub fn newly_gone(&mut self) -> Vec<(usize, String)> {
        let nics = self.nics.iter_mut().enumerate();
        let new = nics.filter_map(|(number, nic)| {
            let is_new = nic.tap.is_gone() && !std::mem::replace(&mut nic.gone_is_told, true);
            is_new.then(|| (number, nic.tap.name().to_owned()))
        });
        new.collect()
    }

    /// What the VM has sent.
    pub fn read_ports(&mut self, mut each: impl FnMut(Frame)) -> Result<(), FrameError> {
        for (number, nic) in self.nics.iter_mut().enumerate() {
            let Nic {
                port,
                tap,
                announcer,
                rx_filter,
                ..
            } = nic;
            port.read(|bytes| {
                announcer.learn(bytes);
                if rx_filter.learn(bytes) {
                    // It fails for want of memory alone; the next new address tries again.
                    let _ = tap.set_rx_filter(rx_filter.addresses());
                }
                each(Frame {
                    nic: number as u8,
                    bytes: Bytes::copy_from_slice(bytes),
                });
            })?;
        }
        Ok(())
    }

    /// What the network has sent: at most one batch, and what a large frame of small segments makes more.
    pub fn read_taps(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        // A flood for one card takes no other's turn.
        let cards = self.nics.len().max(1);
        self.turn = (self.turn + 1) % cards;
        for number in (0..cards).map(|card| (self.turn + card) % cards) {
            let Some(nic) = self.nics.get_mut(number) else {
                break;
            };
            let (mut bytes, mut looked_at) = (0, 0);
            // What is read at once is as many segments, as a rule.
            while looked_at < MOST_FRAMES / cards
                && bytes < BATCH_BYTES / cards
                && frames.len() + MOST_SEGMENTS <= MOST_FRAMES
            {
                let Nic {
                    port,
                    tap,
                    announcer,
                    taken_bytes,
                    ..
                } = nic;
                let read = tap.read(|frame| {
                    looked_at += 1;
                    self.old_source |= announcer.is_from_here(frame);
                    if port.queued_bytes() + *taken_bytes > self.share_bytes / 2 {
                        // Invariant 2.
                        self.dropped += 1;
                        return;
                    }
                    bytes += frame.len();
                    *taken_bytes += frame.len();
                    frames.push(heard(number, frame));
                });
                // A TAP that was taken down, or away, gives errors; it is as silent as an unplugged cable.
                let Ok(true) = read else { break };
            }
        }
        frames
    }

    /// What was taken last will not be agreed on: the log refused it.
    pub fn lost(&mut self, frames: usize) {
        self.dropped += frames as u64;
        self.nothing_under_way();
    }

    /// Nothing that was taken is being agreed on any more: all of it is queued, or was lost with a term.
    pub fn nothing_under_way(&mut self) {
        self.nics.iter_mut().for_each(|nic| nic.taken_bytes = 0);
    }

    /// Bytes of frames that were heard and may be needed if this host takes over, what may be kept, and how many found no room.
    pub fn overheard(&self) -> (usize, usize, u64) {
        self.overheard.held()
    }

    /// What is on its way into the VM, what may be, and how many frames found no room.
    pub fn inbound(&self) -> (usize, usize, u64) {
        let queued = |nic: &Nic| nic.port.queued_bytes() + nic.taken_bytes;
        let bytes = self.nics.iter().map(queued).sum();
        (bytes, self.share_bytes * self.nics.len(), self.dropped)
    }

    /// Whether the network has brought a frame that the VM is said to have sent: another host's.
    pub fn old_source_was_seen(&mut self) -> bool {
        std::mem::take(&mut self.old_source)
    }

    /// Keeps what the network has brought to this host while another one speaks for the VM.
    pub fn overhear(&mut self, now_us: u64) {
        if now_us - self.overheard_us >= OVERHEAR_US {
            self.overheard_us = now_us;
            self.empty_taps(MOST_FRAMES, now_us);
        }
    }

    /// The group has agreed on a frame, which this host may have heard as well.
    pub fn agreed(&mut self, frame: &Frame, now_us: u64) {
        self.overheard.agreed(frame, now_us);
    }

    /// This host speaks for the VM from now on: frames of the last moment that nobody has agreed on. They count as taken off the network.
    pub fn take_overheard(&mut self, inputs_are_agreed: bool, now_us: u64) -> Vec<Frame> {
        self.empty_taps(MOST_STALE, now_us);
        let mut frames = self.overheard.take(inputs_are_agreed, now_us);
        frames.retain(|frame| match self.nics.get_mut(usize::from(frame.nic)) {
            // Invariant 2.
            Some(nic) if nic.port.queued_bytes() + nic.taken_bytes <= self.share_bytes / 2 => {
                nic.taken_bytes += frame.bytes.len();
                true
            }
            _ => false,
        });
        frames
    }

    fn empty_taps(&mut self, most: usize, now_us: u64) {
        for (number, nic) in self.nics.iter_mut().enumerate() {
            let Nic { tap, announcer, .. } = nic;
            let mut looked_at = 0;
            while looked_at < most {
                let read = tap.read(|bytes| {
                    looked_at += 1;
                    // The primary's own announcements, and what the guest has sent, come back by a network that floods.
                    if announcer.is_from_here(bytes) {
                        return;
                    }
                    self.overheard.heard(heard(number, bytes), now_us);
                });
                let Ok(true) = read else { break };
            }
        }
    }

    /// Queues a frame for the VM.
    pub fn queue(&mut self, frame: &Frame) {
        let Some(nic) = self.nics.get_mut(usize::from(frame.nic)) else {
            return;
        };
        nic.taken_bytes = nic.taken_bytes.saturating_sub(frame.bytes.len());
        if nic.port.queued_bytes() + frame.bytes.len() > self.share_bytes {
            // Invariant 3.
            self.dropped += 1;
        } else {
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

    /// Takes a frame of the VM for the network; it leaves with [`Nics::send_next`].
    pub fn release(&mut self, frame: Frame) {
        if let Some(nic) = self.nics.get_mut(usize::from(frame.nic)) {
            nic.tap.queue(frame.bytes);
        }
    }

    /// Sends what is released and leaves as one large frame, or loses it where the host may not speak. What the kernel has no room for is lost too, as on
    /// any wire. False: nothing is left.
    pub fn send_next(&mut self, may_speak: bool) -> bool {
        let Some(nic) = self.nics.iter_mut().find(|nic| nic.tap.has_queued()) else {
            return false;
        };
        match may_speak {
            true => drop(nic.tap.send_next()),
            false => nic.tap.lose_queued(),
        }
        true
    }

    /// Sends a frame, large or not, with what it leaves to the kernel.
    pub fn send(&self, frame: &Frame, offload: Offload) {
        if let Some(nic) = self.nics.get(usize::from(frame.nic)) {
            let _ = nic.tap.write(&frame.bytes, offload);
        }
    }

    /// Tells the network's switches that the VM is here now.
    pub fn announce(&self) {
        for nic in &self.nics {
            for frame in nic.announcer.frames() {
                let _ = nic.tap.write(&frame, Offload::default());
            }
        }
    }
}

/// A frame off the network, as the VM is to hear it.
fn heard(nic: usize, bytes: &[u8]) -> Frame {
    let frame = Frame {
        nic: nic as u8,
        bytes: Bytes::copy_from_slice(bytes),
    };
    multipath::without(&frame).unwrap_or(frame)
}

#[cfg(test)]
mod tests;
