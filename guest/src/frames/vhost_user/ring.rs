//! One of a card's two rings in the guest's memory.
//!
//! Decides:    how a frame lies in the guest's buffers.
//! Flow:       [`Ring::take`] (the guest sends), [`Ring::put`] (the guest receives), each with the guest told at its end ([`Ring::tell`]).
//! Invariants: 1. a buffer that was taken is given back in the same call: a ring that stands has none of ours, so that its place in the available ring is all its
//!             state; 2. nothing that the guest writes makes us read or write outside its memory, or more than [`FRAME_BYTES_MAX`] for a frame; 3. a frame that fits into
//!             no buffer is lost, as on any wire; one that finds no buffer waits; 4. the buffers of one frame are shown to the guest at once: Linux drops a frame
//!             whose first buffer it finds used, and the others not yet; 5. no chain is followed for more than `MOST_IN_CHAIN` descriptors, and one that has an empty one is no
//!             chain: what is looked at for a frame is in proportion to its bytes.
//! Source:     virtio 1.1, 2.6 (split virtqueues), 5.1.6 (network device operation).
//! Not here:   when.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::Ordering;

use dunlin_core::offload::Offload;
use virtio_queue::{DescriptorChain, Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::guest_ram::Ram;
use crate::frames::FRAME_BYTES_MAX;

/// `struct virtio_net_hdr_v1`: what is left to the card or the guest, and the number of buffers.
pub const HEADER_BYTES: usize = 12;
/// Before a used ring's entries, and one of them.
const USED_HEADER_BYTES: u64 = 4;
const USED_ENTRY_BYTES: u64 = 8;
/// Where the number of buffers stands in it.
const BUFFERS_AT: usize = 10;
/// Descriptors of one chain, at most: QEMU's own bound (`VIRTQUEUE_MAX_SIZE`), and several times what drivers need.
const MOST_IN_CHAIN: usize = 1024;

/// How frames lie in buffers, as the guest's driver has agreed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Layout {
    /// Before each frame: 12 bytes, and 10 for a driver of before virtio 1.0.
    pub header_bytes: usize,
    /// A frame may lie in several buffers.
    pub merges: bool,
}

/// Where the guest has a ring, how long it is, and where it stands.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Number of descriptors.
    pub size: u16,
    /// The descriptors.
    pub descriptors: GuestAddress,
    /// What the guest has made available.
    pub available: GuestAddress,
    /// What we have used.
    pub used: GuestAddress,
    /// The next entry of the available ring.
    pub next: u16,
    /// The guest says from which entry on it wants to be told.
    pub event_index: bool,
}

/// What became of a frame for the guest.
#[derive(Debug, PartialEq, Eq, Default)]
pub enum Put {
    /// It lies in the guest's memory, or no buffer is long enough for it.
    Done,
    /// The guest has no buffer.
    #[default]
    Waits,
}

/// A ring that runs.
pub struct Ring {
    queue: Queue,
    /// The guest is told whether it wants to know or not.
    is_untold: bool,
    looked_at: usize,
}

impl Ring {
    /// Begins to serve it.
    pub fn start(ram: &Ram, place: Place) -> io::Result<Ring> {
        let mut queue = Queue::new(place.size.max(1)).map_err(io::Error::other)?;
        queue.set_size(place.size);
        let set = [
            queue.try_set_desc_table_address(place.descriptors),
            queue.try_set_avail_ring_address(place.available),
            queue.try_set_used_ring_address(place.used),
        ];
        set.into_iter()
            .collect::<Result<(), _>>()
            .map_err(io::Error::other)?;
        queue.set_event_idx(place.event_index);
        queue.set_next_avail(place.next);
        queue.set_ready(true);
        if !queue.is_valid(ram) {
            return Err(io::Error::other("a ring outside the guest's memory"));
        }
        let used = queue.used_idx(ram, Ordering::Acquire).map_err(io::Error::other)?;
        queue.set_next_used(used.0);
        Ok(Ring {
            queue,
            is_untold: false,
            looked_at: 0,
        })
    }

    /// Where it stands: all before it is used.
    pub fn next(&self) -> u16 {
        self.queue.next_avail()
    }

    /// How many descriptors were looked at since it began.
    pub fn looked_at(&self) -> usize {
        self.looked_at
    }

    /// The guest's kicks are not wanted until somebody waits for one.
    pub fn spare_kicks(&mut self, ram: &Ram) -> io::Result<()> {
        self.queue.disable_notification(ram).map_err(io::Error::other)
    }

    /// The guest is to kick when it makes more available than is seen here. True: it has, meanwhile.
    pub fn want_kick(&mut self, ram: &Ram) -> io::Result<bool> {
        self.queue.enable_notification(ram).map_err(io::Error::other)
    }

    /// The next chain; where there is none, the guest kicks for the next one. It is looked at twice at most. One that begins outside of the ring stays where it is.
    fn next_chain<'a>(&mut self, ram: &'a Ram) -> io::Result<Option<DescriptorChain<&'a Ram>>> {
        let is_there = self.has_chain(ram)? || (self.want_kick(ram)? && self.has_chain(ram)?);
        if !is_there {
            return Ok(None);
        }
        let first = self.queue.next_avail();
        let chain = self.queue.pop_descriptor_chain(ram);
        if let Some(chain) = &chain
            && chain.head_index() >= self.queue.size()
        {
            self.queue.set_next_avail(first);
            return Err(io::Error::other("a chain that begins outside of its ring"));
        }
        Ok(chain)
    }

    /// Whether the guest has made a chain available. One that says that it has made more available than a ring holds has made none available, and is not waited
    /// for. `Queue` would look as well, and say so in the daemon's log each time.
    fn has_chain(&self, ram: &Ram) -> io::Result<bool> {
        let available = self.queue.avail_idx(ram, Ordering::Acquire);
        let available = available.map_err(io::Error::other)?.0;
        let count = available.wrapping_sub(self.queue.next_avail());
        Ok((1..=self.queue.size()).contains(&count))
    }

    /// The next frame that the guest sends, in `frame`, and what it leaves to the card; an empty one is none. None: the guest kicks for the next one.
    pub fn take(&mut self, ram: &Ram, layout: Layout, frame: &mut Vec<u8>) -> io::Result<Option<Offload>> {
        let Some(chain) = self.next_chain(ram)? else {
            return Ok(None);
        };
        let head = chain.head_index();
        frame.clear();
        let (mut header, mut header_bytes) = ([0; HEADER_BYTES], 0);
        let mut is_whole = true;
        for buffer in buffers(chain, false) {
            self.looked_at += 1;
            let Some((address, bytes)) = buffer else {
                is_whole = false;
                break;
            };
            let first = bytes.min(layout.header_bytes - header_bytes);
            let (at, rest) = (frame.len(), bytes - first);
            // Invariant 2.
            if at + rest > FRAME_BYTES_MAX {
                is_whole = false;
                break;
            }
            let place = &mut header[header_bytes..header_bytes + first];
            is_whole &= ram.read_slice(place, address).is_ok();
            header_bytes += first;
            if rest > 0 {
                frame.resize(at + rest, 0);
                let from = GuestAddress(address.0.wrapping_add(first as u64));
                is_whole &= ram.read_slice(&mut frame[at..], from).is_ok();
            }
        }
        if !is_whole {
            frame.clear();
        }
        self.queue.add_used(ram, head, 0).map_err(io::Error::other)?;
        let offload = header.first_chunk().map(Offload::read);
        Ok(Some(offload.unwrap_or_default()))
    }

    /// How many buffers the guest can make available at most.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Puts a frame, in pieces, into the guest's next buffers. Where it waits, the guest kicks for the next one; a chain that is none stays where it is.
    pub fn put(&mut self, ram: &Ram, layout: Layout, offload: Offload, frame: &[&[u8]]) -> io::Result<Put> {
        let first = self.queue.next_avail();
        let needed = layout.header_bytes + frame.iter().map(|piece| piece.len()).sum::<usize>();
        let mut chains = Vec::with_capacity(1);
        let mut room = 0;
        while room < needed {
            let full = match layout.merges {
                true => chains.len() >= usize::from(self.queue.size()),
                false => !chains.is_empty(),
            };
            if full {
                // Invariant 3. The buffers wait for the next one.
                self.queue.set_next_avail(first);
                return Ok(Put::Done);
            }
            // It may have some, and not enough: it is to kick for the next one, not for those.
            let chain = match self.next_chain(ram) {
                Ok(Some(chain)) => chain,
                none => {
                    self.queue.set_next_avail(first);
                    return none.map(|_| Put::Waits);
                }
            };
            let head = chain.head_index();
            let buffers: Option<Vec<_>> = buffers(chain, true).collect();
            let Some(buffers) = buffers.filter(|buffers| !buffers.is_empty()) else {
                self.queue.set_next_avail(first);
                return Err(io::Error::other("a chain with no room in it"));
            };
            self.looked_at += buffers.len();
            room += buffers.iter().map(|(_, bytes)| bytes).sum::<usize>();
            chains.push((head, buffers));
        }
        let mut header = [0; HEADER_BYTES];
        header[..Offload::BYTES].copy_from_slice(&offload.to_bytes());
        header[BUFFERS_AT..].copy_from_slice(&(chains.len() as u16).to_le_bytes());
        let mut pieces: Vec<&[u8]> = vec![&header[..layout.header_bytes]];
        pieces.extend(frame);
        // Those before it are written.
        let mut piece_at = 0;
        let first_used = self.queue.next_used();
        let last = chains.len().saturating_sub(1);
        for (number, (head, buffers)) in chains.into_iter().enumerate() {
            let mut written = 0;
            for (address, bytes) in buffers {
                let mut filled = 0;
                while filled < bytes
                    && let Some(piece) = pieces.get_mut(piece_at)
                {
                    let (now, rest) = piece.split_at(piece.len().min(bytes - filled));
                    // An address outside the guest's memory takes nothing, as with a card that reads from nowhere.
                    let at = GuestAddress(address.0.wrapping_add(filled as u64));
                    let _ = ram.write_slice(now, at);
                    filled += now.len();
                    *piece = rest;
                    piece_at += usize::from(rest.is_empty());
                }
                written += filled;
            }
            let at = first_used.wrapping_add(number as u16);
            match number == last {
                true => {
                    self.queue.set_next_used(at);
                    self.queue
                        .add_used(ram, head, written as u32)
                        .map_err(io::Error::other)?;
                }
                false => self.write_used(ram, at, head, written as u32)?,
            }
        }
        Ok(Put::Done)
    }

    /// Invariant 4: all but the last of a frame's buffers. `Queue` shows each one at once, and its account of what the guest was not told of has the last alone.
    fn write_used(&mut self, ram: &Ram, at: u16, head: u16, written: u32) -> io::Result<()> {
        let entry = USED_HEADER_BYTES + USED_ENTRY_BYTES * u64::from(at % self.queue.size());
        let address = GuestAddress(self.queue.used_ring() + entry);
        let content = [u32::from(head).to_le_bytes(), written.to_le_bytes()].concat();
        ram.write_slice(&content, address).map_err(io::Error::other)?;
        self.is_untold = true;
        Ok(())
    }

    /// Tells the guest what was used, if it wants to know.
    pub fn tell(&mut self, ram: &Ram, call: Option<&File>) -> io::Result<()> {
        let is_wanted = self.queue.needs_notification(ram).map_err(io::Error::other)?;
        match std::mem::take(&mut self.is_untold) | is_wanted {
            true => self.tell_anyway(call),
            false => Ok(()),
        }
    }

    /// Tells the guest to look at the ring.
    pub fn tell_anyway(&self, call: Option<&File>) -> io::Result<()> {
        if let Some(mut call) = call {
            match call.write(&1u64.to_ne_bytes()) {
                // Its counter is full: the guest is told already.
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The buffers of a chain, each with its bytes, which are the card's to write or to read. None: this one breaks the chain, by invariant 5 or because it is of the other
/// kind, which no driver of a network card has there.
fn buffers(
    chain: DescriptorChain<&Ram>,
    are_to_write: bool,
) -> impl Iterator<Item = Option<(GuestAddress, usize)>> {
    chain.enumerate().map(move |(number, buffer)| {
        let is_sound = number < MOST_IN_CHAIN && buffer.len() != 0 && buffer.is_write_only() == are_to_write;
        is_sound.then(|| (buffer.addr(), buffer.len() as usize))
    })
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
