//! What it decides: whether bytes found in a ring are a message, whole and of this lap.
//!
//! **Flow**: [`RingWriter::send`] -> one-sided writes -> [`RingReader::next`], which polls local memory. The reader's
//! cursor travels back as a cumulative word (`word`), and is the writer's licence to overwrite.
//!
//! A record, at a multiple of 32: `seq:u64 length:u32 flags:u8 0:u24 epoch:u64 check:u64` and the payload, padded with
//! zeros to a multiple of 32. `check` is xxh3 over the other three words, the payload's xxh3 and the grant's key.
//!
//! **Invariants**
//! 1. A record is believed only if sequence, epoch and checksum fit, and only from a private copy.
//! 2. A record of an earlier lap has a smaller sequence; a payload that imitates a record does not know the key.
//! 3. The writer never overwrites what the reader has not given back.
//!
//! **Source**: APUS's canary and its second-lap defects (docs/fabric.md). **Not here**: what messages mean.

use super::{Memory, RegionId, Transport, TransportError};
use xxhash_rust::xxh3::xxh3_64;

const HEAD: usize = 32;
/// This record is only the rest of a lap: go to the start.
const FLAG_WRAP: u8 = 1;
/// More records of the same message follow.
const FLAG_MORE: u8 = 2;
/// No message is longer than this.
pub const MESSAGE_MAX_BYTES: usize = 64 << 20;

/// A message goes in records of this size at most: what is more urgent may go between two of them.
pub const PIECE_MAX_BYTES: usize = 256 << 10;

/// Where a ring lies: a part of a region.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The region.
    pub region: RegionId,
    /// Where the ring begins in it, a multiple of 64.
    pub offset: usize,
    /// Its size, a multiple of 64.
    pub bytes: usize,
}

fn check(words: [u64; 3], payload: &[u8], key: u64) -> u64 {
    let mut all = [0u8; 40];
    for (i, w) in [words[0], words[1], words[2], xxh3_64(payload), key]
        .into_iter()
        .enumerate()
    {
        all[i * 8..i * 8 + 8].copy_from_slice(&w.to_le_bytes());
    }
    xxh3_64(&all)
}

fn padded(len: usize) -> usize {
    HEAD + len.div_ceil(32) * 32
}

/// The writing end, in the process that does not own the memory.
pub struct RingWriter {
    place: Place,
    epoch: u64,
    key: u64,
    seq: u64,
    /// Bytes written so far, over all laps.
    head: u64,
    /// Bytes given back so far, over all laps.
    consumed: u64,
    scratch: Vec<u8>,
}

/// How much of a message `send` could place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// All of it.
    Whole,
    /// The message's bytes from here on have to be sent again with `send_rest`, when the reader gave space back.
    Until(usize),
}

impl RingWriter {
    /// For a ring that was just granted, still empty.
    #[must_use]
    pub fn new(place: Place, epoch: u64, key: u64) -> Self {
        Self {
            place,
            epoch,
            key,
            seq: 0,
            head: 0,
            consumed: 0,
            scratch: Vec::new(),
        }
    }

    /// Under which epoch it writes.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The reader has read so many bytes. Returns false for an impossible cursor (a broken peer).
    pub fn give_back(&mut self, consumed: u64) -> bool {
        if consumed > self.head {
            return false;
        }
        self.consumed = self.consumed.max(consumed);
        true
    }

    /// Bytes that can be written before the reader gives more back.
    #[must_use]
    pub fn room(&self) -> usize {
        self.place.bytes - (self.head - self.consumed) as usize
    }

    /// Writes the message, or its first part if the ring is full.
    pub fn send(&mut self, to: &mut dyn Transport, message: &[u8]) -> Result<Sent, TransportError> {
        self.send_rest(to, message, 0)
    }

    /// Goes on with a message at byte `at`.
    pub fn send_rest(
        &mut self,
        to: &mut dyn Transport,
        message: &[u8],
        mut at: usize,
    ) -> Result<Sent, TransportError> {
        assert!(
            message.len() <= MESSAGE_MAX_BYTES,
            "a message of {} bytes",
            message.len()
        );
        let piece_max = (self.place.bytes / 4 - HEAD).min(PIECE_MAX_BYTES);
        loop {
            let piece = &message[at..message.len().min(at + piece_max)];
            let last = at + piece.len() == message.len();
            let room_in_lap = self.place.bytes - (self.head % self.place.bytes as u64) as usize;
            let need = padded(piece.len());
            if room_in_lap < need {
                if self.room() < room_in_lap + need {
                    return Ok(Sent::Until(at));
                }
                if !self.put(to, FLAG_WRAP, &[], room_in_lap)? {
                    return Ok(Sent::Until(at));
                }
            } else if self.room() < need {
                return Ok(Sent::Until(at));
            }
            if !self.put(to, if last { 0 } else { FLAG_MORE }, piece, need)? {
                return Ok(Sent::Until(at));
            }
            at += piece.len();
            if last {
                return Ok(Sent::Whole);
            }
        }
    }

    fn put(
        &mut self,
        to: &mut dyn Transport,
        flags: u8,
        payload: &[u8],
        advance: usize,
    ) -> Result<bool, TransportError> {
        let words = [
            self.seq + 1,
            payload.len() as u64 | u64::from(flags) << 32,
            self.epoch,
        ];
        let check = check(words, payload, self.key);
        self.scratch.clear();
        for word in [words[0], words[1], words[2], check] {
            self.scratch.extend_from_slice(&word.to_le_bytes());
        }
        self.scratch.extend_from_slice(payload);
        self.scratch.resize(self.scratch.len().next_multiple_of(8), 0);
        let at = self.place.offset + (self.head % self.place.bytes as u64) as usize;
        match to.write(self.place.region, self.epoch, at, &self.scratch) {
            Ok(()) => {}
            Err(TransportError::Full) => return Ok(false),
            Err(e) => return Err(e),
        }
        self.seq += 1;
        self.head += advance as u64;
        Ok(true)
    }
}

/// What the reader found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// No (whole) record yet.
    Nothing,
    /// A message is in the buffer.
    Message,
}

/// The reading end, over local memory.
pub struct RingReader {
    offset: usize,
    bytes: usize,
    epoch: u64,
    key: u64,
    seq: u64,
    read: u64,
    torn: u64,
    /// The payload copied but not whole when last looked at, with what its header said.
    partial: Vec<u8>,
    copy: Vec<u8>,
}

impl RingReader {
    /// For a ring in memory that was just registered, still empty.
    #[must_use]
    pub fn new(place: Place, epoch: u64, key: u64) -> Self {
        let (partial, copy) = (Vec::new(), Vec::new());
        Self {
            offset: place.offset,
            bytes: place.bytes,
            epoch,
            key,
            seq: 0,
            read: 0,
            torn: 0,
            partial,
            copy,
        }
    }

    /// How many bytes were read so far: the cursor that goes back to the writer.
    #[must_use]
    pub fn consumed(&self) -> u64 {
        self.read
    }

    /// How often something with the right sequence was not (yet) believed.
    #[must_use]
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// Whether a record may be there: one load.
    #[inline]
    #[must_use]
    pub fn peek(&self, memory: &Memory) -> bool {
        memory.load(self.offset + (self.read % self.bytes as u64) as usize) == self.seq + 1
    }

    /// The next message, if it is whole. Its bytes replace `out`.
    pub fn next(&mut self, memory: &Memory, out: &mut Vec<u8>) -> Found {
        while self.peek(memory) {
            let in_lap = (self.read % self.bytes as u64) as usize;
            let at = self.offset + in_lap;
            let mut head = [0u8; HEAD];
            memory.copy_out(at, &mut head);
            let word = |i: usize| u64::from_le_bytes(head[i * 8..i * 8 + 8].try_into().expect("8 bytes"));
            let words = [word(0), word(1), word(2)];
            let (length, flags) = ((words[1] & 0xffff_ffff) as usize, (words[1] >> 32) as u8);
            let advance = if flags & FLAG_WRAP != 0 {
                self.bytes - in_lap
            } else {
                padded(length)
            };
            if words[2] != self.epoch
                || length > self.bytes
                || advance > self.bytes - in_lap
                || (flags & FLAG_WRAP != 0 && length != 0)
            {
                self.torn += 1;
                return Found::Nothing;
            }
            self.copy.resize(length.next_multiple_of(8), 0);
            memory.copy_out(at + HEAD, &mut self.copy);
            if check(words, &self.copy[..length], self.key) != word(3) {
                self.torn += 1;
                return Found::Nothing;
            }
            self.seq += 1;
            self.read += advance as u64;
            if flags & FLAG_WRAP != 0 {
                continue;
            }
            if flags & FLAG_MORE == 0 && self.partial.is_empty() {
                out.clear();
                out.extend_from_slice(&self.copy[..length]);
                return Found::Message;
            }
            // A peer that never ends its message only loses it: the beginning is dropped at the limit.
            if self.partial.len() + length > MESSAGE_MAX_BYTES {
                self.partial.clear();
            }
            self.partial.extend_from_slice(&self.copy[..length]);
            if flags & FLAG_MORE == 0 {
                std::mem::swap(out, &mut self.partial);
                self.partial.clear();
                return Found::Message;
            }
        }
        Found::Nothing
    }
}
