//! What QEMU has told of a card, and its two rings.
//!
//! Decides:    which features the card has.
//! Flow:       QEMU's messages (`messages`) -> rings start and stop; the loop takes and puts frames ([`Card::take_frames`], [`Card::put_frames`]).
//! Invariants: 1. a ring runs from its kick descriptor to `GET_VRING_BASE`, and only while it is enabled; after that answer nothing is read from or written to it;
//!             2. a message that cannot be followed ends the port with its reason, and never half a start; what the guest has set wrong is no such message: its ring does
//!             not run until it is set right, and that is all; 3. the lock is held by nobody who waits.
//! Source:     QEMU docs/interop/vhost-user.rst; hw/virtio/vhost.c (the order of its messages).
//! Not here:   how messages come (`messages`), how large frames are cut, and which frames go to the guest as one (core's `offload`). Between cards there are segments, as on a wire.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};

use dunlin_core::offload::merge::Run;
use dunlin_core::offload::segment::segments;
use dunlin_core::offload::{MOST_SEGMENTS, Offload};
use parking_lot::Mutex;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandler};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::guest_ram::GuestRam;
use super::ring::{HEADER_BYTES, Layout, Place, Put, Ring};
use super::{MOST_LOOKED_AT, MOST_READ, MOST_READ_BYTES, Signals};
use crate::frames::FrameError;
use crate::memory::{Bitmap, RamIdentity, WritesRam};

/// The guest receives by the first ring and sends by the second.
const RX: usize = 0;
const TX: usize = 1;
const RINGS: usize = 2;
/// virtio's own bound.
const MOST_DESCRIPTORS: u32 = 32768;
/// A ring with as many buffers has room for a large frame, however small they are (1,526 bytes for Linux), and for others.
const ENOUGH_BUFFERS: u16 = 128;
/// A driver of before virtio 1.0 that does not merge buffers has a header without their number.
const LEGACY_HEADER_BYTES: usize = 10;

/// `LOG_ALL` and `LOG_SHMFD` are asked for by a QEMU that loads a state. Nothing is written while one is saved: the rings stand.
const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_HOST_ECN
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | VhostUserVirtioFeatures::LOG_ALL.bits()
    | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// A ring as QEMU has described it, and its descriptors.
#[derive(Default)]
struct Description {
    /// 0: what the guest has chosen is no size.
    size: u16,
    next: u16,
    /// By QEMU's addresses: descriptors, available, used.
    at: Option<[u64; 3]>,
    enabled: bool,
    kick: Option<File>,
    call: Option<File>,
}

#[derive(Default)]
struct State {
    features: u64,
    /// The file that is the guest's RAM. What QEMU shows is to lie in it.
    ram_file: Option<RamIdentity>,
    ram: Option<GuestRam>,
    described: [Description; RINGS],
    running: [Option<Ring>; RINGS],
    /// Why nothing comes any more.
    ended: Option<String>,
}

impl State {
    fn has(&self, feature: u32) -> bool {
        self.features & 1 << feature != 0
    }

    /// Whether the guest takes segments as one large frame, in as many buffers as it needs.
    fn takes_large_frames(&self) -> bool {
        let needed = [
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
        ];
        needed.into_iter().all(|feature| self.has(feature))
    }

    fn layout(&self) -> Layout {
        let merges = self.has(VIRTIO_NET_F_MRG_RXBUF);
        let header_bytes = match merges || self.has(VIRTIO_F_VERSION_1) {
            true => HEADER_BYTES,
            false => LEGACY_HEADER_BYTES,
        };
        Layout { header_bytes, merges }
    }

    fn place(&self, ring: usize, ram: &GuestRam) -> Option<Place> {
        let described = &self.described[ring];
        if described.size == 0 {
            return None;
        }
        let [descriptors, available, used] = described.at?;
        Some(Place {
            size: described.size,
            descriptors: ram.guest_address(descriptors)?,
            available: ram.guest_address(available)?,
            used: ram.guest_address(used)?,
            next: described.next,
            event_index: self.has(VIRTIO_RING_F_EVENT_IDX),
        })
    }

    /// Invariants 1 and 2.
    fn start_if_ready(&mut self, ring: usize) -> io::Result<()> {
        let described = &self.described[ring];
        if described.kick.is_none() || !described.enabled || self.running[ring].is_some() {
            return Ok(());
        }
        let ram = self
            .ram
            .as_ref()
            .ok_or_else(|| io::Error::other("a ring before the guest's memory"))?;
        let started = self.place(ring, ram).map(|place| Ring::start(ram.ram(), place));
        let Some(Ok(mut started)) = started else {
            tracing::debug!("a guest's ring is set up as none can be: it does not run");
            return Ok(());
        };
        // The guest's kicks for buffers are wanted when there are none.
        match ring {
            TX => drop(started.want_kick(ram.ram())?),
            _ => started.spare_kicks(ram.ram())?,
        }
        // It may have been stopped between a buffer's use and the guest's interrupt.
        started.tell_anyway(self.described[ring].call.as_ref())?;
        self.running[ring] = Some(started);
        Ok(())
    }
}

/// What frames of the guest's are read into.
#[derive(Default)]
pub(super) struct Buffers {
    frame: Vec<u8>,
    segment: Vec<u8>,
}

/// A card, shared between the loop and the thread that answers QEMU.
pub struct Card {
    state: Mutex<State>,
    waits: Mutex<Option<Waits>>,
    pub(super) signals: Signals,
}

impl std::fmt::Debug for Card {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Card").finish_non_exhaustive()
    }
}

impl WritesRam for Card {
    fn is_to_write_to(&self, ram: RamIdentity) {
        self.state.lock().ram_file = Some(ram);
    }

    fn take_written(&self, dirty: &mut Bitmap) {
        if let Some(ram) = &mut self.state.lock().ram {
            ram.take_written(dirty);
        }
    }
}

impl Card {
    pub(super) fn new(signals: Signals) -> Card {
        Card {
            state: Mutex::default(),
            waits: Mutex::default(),
            signals,
        }
    }

    /// Gives out the frames that the guest sends, until they are enough (the port's fourth invariant): each as a wire has it, so that the last large one
    /// may make them more by [`dunlin_core::offload::MOST_CUT`]. How many.
    pub(super) fn take_frames(
        &self,
        buffers: &mut Buffers,
        mut each: impl FnMut(&[u8]),
    ) -> std::result::Result<usize, FrameError> {
        let mut locked = self.state.lock();
        let state = &mut *locked;
        if let Some(why) = &state.ended {
            return Err(match why.is_empty() {
                true => FrameError::Closed,
                false => FrameError::VhostUser(why.clone()),
            });
        }
        let (layout, may_leave) = (state.layout(), state.has(VIRTIO_NET_F_CSUM));
        let (Some(ring), Some(ram)) = (&mut state.running[TX], &state.ram) else {
            return Ok(0);
        };
        let ram = ram.ram();
        let Buffers { frame, segment } = buffers;
        let (mut count, mut taken, mut bytes) = (0, 0, 0);
        let looked_at = ring.looked_at();
        while count.max(taken) < MOST_READ
            && bytes < MOST_READ_BYTES
            && ring.looked_at() - looked_at < MOST_LOOKED_AT
            && let Some(offload) = sound(ring.take(ram, layout, frame))
        {
            taken += 1;
            bytes += frame.len();
            // A driver that has not agreed on it leaves nothing to the card.
            let offload = if may_leave { offload } else { Offload::default() };
            if !frame.is_empty() {
                // One that contradicts its header is lost, as on any wire.
                segments(&offload, frame, segment, |frame| {
                    each(frame);
                    count += 1;
                });
            }
        }
        if taken > 0 {
            ring.tell(ram, state.described[TX].call.as_ref())?;
        }
        let is_enough = count.max(taken) >= MOST_READ || bytes >= MOST_READ_BYTES;
        if is_enough || ring.looked_at() - looked_at >= MOST_LOOKED_AT {
            self.signals.tell_changed();
        }
        Ok(count)
    }

    /// Puts frames into the guest's buffers, in order, until there are none. How many are done with.
    pub(super) fn put_frames(&self, frames: &VecDeque<Box<[u8]>>) -> std::result::Result<usize, FrameError> {
        let mut locked = self.state.lock();
        let state = &mut *locked;
        let (layout, takes_large) = (state.layout(), state.takes_large_frames());
        let (Some(ring), Some(ram)) = (&mut state.running[RX], &state.ram) else {
            return Ok(0);
        };
        let ram = ram.ram();
        let most = match takes_large && ring.size() >= ENOUGH_BUFFERS {
            true => MOST_SEGMENTS,
            false => 1,
        };
        let (mut done, looked_at) = (0, ring.looked_at());
        while done < frames.len() {
            if ring.looked_at() - looked_at >= MOST_LOOKED_AT {
                // Others have their turn.
                self.signals.tell_changed();
                break;
            }
            let run = Run::at_front(frames.range(done..).map(|frame| &frame[..]), most);
            let payloads = frames.range(done..done + run.frames);
            let mut pieces = vec![&run.head[..]];
            pieces.extend(payloads.map(|frame| &frame[run.payload_at..]));
            if sound(ring.put(ram, layout, run.offload, &pieces)) == Put::Waits {
                break;
            }
            done += run.frames;
        }
        if done > 0 {
            ring.tell(ram, state.described[RX].call.as_ref())?;
        }
        Ok(done)
    }

    /// Whether the guest's driver has agreed on features.
    pub(super) fn has_features(&self) -> bool {
        self.state.lock().features != 0
    }

    /// The guest has put that ring where none can be.
    pub(super) fn put_nowhere(&self, ring: u32) -> Result<()> {
        self.described(ring, |state, ring| {
            state.described[ring].at = None;
            Ok(())
        })
    }

    /// What the card's thread waits on from now on.
    pub(super) fn waits_on(&self, waits: Waits) {
        *self.waits.lock() = Some(waits);
    }

    /// Nothing comes from QEMU any more.
    pub(super) fn end(&self, why: String) {
        // QEMU waits for no answer that does not come.
        self.hang_up();
        let mut state = self.state.lock();
        state.running = [None, None];
        state.ended = Some(why);
        drop(state);
        self.signals.tell_changed();
    }

    /// The port has gone: the card's thread ends.
    pub(super) fn hang_up(&self) {
        let ended = match &*self.waits.lock() {
            Some(Waits::ForQemu(listener)) => rustix::net::shutdown(listener, rustix::net::Shutdown::Both),
            Some(Waits::ForMessages(socket)) => rustix::net::shutdown(socket, rustix::net::Shutdown::Both),
            None => Ok(()),
        };
        // QEMU may have gone first.
        let _ = ended;
    }

    fn described<T>(&self, ring: u32, change: impl FnOnce(&mut State, usize) -> io::Result<T>) -> Result<T> {
        let ring = usize::try_from(ring).ok().filter(|ring| *ring < RINGS);
        let ring = ring.ok_or(Error::InvalidParam)?;
        change(&mut self.state.lock(), ring).map_err(Error::ReqHandlerError)
    }
}

/// What a thread of a card's waits on, so that it can be ended.
pub(super) enum Waits {
    ForQemu(UnixListener),
    ForMessages(UnixStream),
}

/// A guest that breaks its ring has broken its card, and nothing else: nothing is taken from there, or put there, until it mends that.
fn sound<T: Default>(done: io::Result<T>) -> T {
    done.unwrap_or_else(|error| {
        tracing::debug!("a guest's ring: {error}");
        T::default()
    })
}

/// What this card has not, and QEMU does not ask for.
fn not_offered<T>() -> Result<T> {
    Err(Error::InvalidOperation("not offered by this card"))
}

impl VhostUserBackendReqHandler for Card {
    fn set_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&self) -> Result<()> {
        not_offered()
    }

    fn get_features(&self) -> Result<u64> {
        Ok(FEATURES)
    }

    fn set_features(&self, features: u64) -> Result<()> {
        self.state.lock().features = features;
        Ok(())
    }

    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mut state = self.state.lock();
        let file = state.ram_file.ok_or(Error::InvalidParam)?;
        let last = state.ram.take();
        let ram = GuestRam::new(file, regions, files, last).map_err(Error::ReqHandlerError)?;
        state.ram = Some(ram);
        Ok(None)
    }

    fn set_vring_num(&self, ring: u32, size: u32) -> Result<()> {
        // Invariant 2: QEMU hands on whatever the guest has written there.
        let is_one = size <= MOST_DESCRIPTORS && size.is_power_of_two();
        self.described(ring, |state, ring| {
            state.described[ring].size = if is_one { size as u16 } else { 0 };
            Ok(())
        })
    }

    fn set_vring_addr(
        &self,
        ring: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.described(ring, |state, ring| {
            state.described[ring].at = Some([descriptors, available, used]);
            Ok(())
        })
    }

    fn set_vring_base(&self, ring: u32, next: u32) -> Result<()> {
        self.described(ring, |state, ring| {
            state.described[ring].next = next as u16;
            Ok(())
        })
    }

    fn get_vring_base(&self, ring: u32) -> Result<VhostUserVringState> {
        let next = self.described(ring, |state, ring| {
            let described = &mut state.described[ring];
            if let Some(kick) = described.kick.take() {
                self.signals.unwatch(kick.as_fd());
            }
            if let Some(ring) = state.running[ring].take() {
                described.next = ring.next();
            }
            Ok(described.next)
        })?;
        Ok(VhostUserVringState::new(ring, u32::from(next)))
    }

    fn set_vring_kick(&self, ring: u8, kick: Option<File>) -> Result<()> {
        let kick = kick.ok_or(Error::IncorrectFds)?;
        self.described(u32::from(ring), |state, ring| {
            self.signals.watch(kick.as_fd())?;
            if let Some(last) = state.described[ring].kick.replace(kick) {
                self.signals.unwatch(last.as_fd());
            }
            state.start_if_ready(ring)
        })?;
        // What lies in the ring was made available before anybody looked.
        self.signals.tell_changed();
        Ok(())
    }

    fn set_vring_call(&self, ring: u8, call: Option<File>) -> Result<()> {
        self.described(u32::from(ring), |state, ring| {
            state.described[ring].call = call;
            match &mut state.running[ring] {
                // What went to the last one may not have been heard.
                Some(running) => running.tell_anyway(state.described[ring].call.as_ref()),
                None => Ok(()),
            }
        })
    }

    fn set_vring_err(&self, _ring: u8, _error: Option<File>) -> Result<()> {
        Ok(())
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::LOG_SHMFD)
    }

    fn set_protocol_features(&self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&self) -> Result<u64> {
        Ok(RINGS as u64)
    }

    fn set_vring_enable(&self, ring: u32, enabled: bool) -> Result<()> {
        self.described(ring, |state, ring| {
            state.described[ring].enabled = enabled;
            match enabled {
                true => state.start_if_ready(ring)?,
                false => {
                    if let Some(running) = state.running[ring].take() {
                        state.described[ring].next = running.next();
                    }
                }
            }
            Ok(())
        })?;
        self.signals.tell_changed();
        Ok(())
    }

    fn set_log_base(&self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Ok(())
    }

    fn get_config(&self, _offset: u32, _size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        not_offered()
    }

    fn set_config(&self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        not_offered()
    }

    fn set_gpu_socket(&self, _gpu: GpuBackend) -> Result<()> {
        not_offered()
    }

    fn get_shared_object(&self, _uuid: VhostUserSharedMsg) -> Result<File> {
        not_offered()
    }

    fn get_inflight_fd(&self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        not_offered()
    }

    fn set_inflight_fd(&self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        not_offered()
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        not_offered()
    }

    fn add_mem_region(
        &self,
        _region: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        not_offered()
    }

    fn remove_mem_region(&self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        not_offered()
    }

    fn set_device_state_fd(
        &self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        not_offered()
    }

    fn check_device_state(&self) -> Result<()> {
        not_offered()
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        not_offered()
    }
}

#[cfg(test)]
#[path = "card_tests.rs"]
mod tests;
