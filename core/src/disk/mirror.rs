//! What it decides: the form in which a primary's disk writes travel to the backup, and what the backup says back.
//!
//! One stream per disk, in order: "GANNET used a TCP connection for forwarding the requests" (VI-C). A frame is a fixed
//! header of [`HEADER_BYTES`], then the payload that the header announces. All numbers are little-endian.
//! Invariants: decoding never panics and never believes a length above [`MOST_PAYLOAD_BYTES`]; a frame with a wrong
//! checksum is refused.
//! Not here: sockets, queues and threads (`guest::disk`).

use super::Generation;
use crate::units::{Epoch, Term};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Size of the header before every frame.
pub const HEADER_BYTES: usize = 40;
/// No frame's payload is longer: the longest write that the disk port takes.
pub const MOST_PAYLOAD_BYTES: u64 = 32 << 20;
/// Raised when the frames change.
pub const VERSION: u32 = 1;

const MAGIC: u32 = 0x444d_4952;

/// One frame's header: what it says, apart from its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Frame {
    /// Primary, first: who I am. Payload: [`Hello`].
    Hello,
    /// Backup, first: who I am; payload [`Hello`] and then the numbers (u64) of the extents that I wrote without you.
    Welcome,
    /// Backup or primary: I will not. Payload: the reason as text.
    Refuse,
    /// A write of the primary VM; the payload is the data.
    Write {
        /// Where on the disk.
        offset: u64,
    },
    /// The primary VM zeroed this range.
    Zero {
        /// Where on the disk.
        offset: u64,
        /// How much.
        len: u64,
        /// Space may be given back.
        unmap: bool,
    },
    /// A part of the first copy; the payload is the data.
    Copy {
        /// Where on the disk.
        offset: u64,
    },
    /// A part of the first copy that holds zeroes only.
    CopyZero {
        /// Where on the disk.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// The first copy is whole: from here on writes wait for their sync. Payload: the name of the pair (16 bytes).
    CopyEnd,
    /// Everything that the primary wrote before sync `epoch` came before this.
    Mark {
        /// The sync.
        epoch: Epoch,
    },
    /// Storage `sync`: the primary VM flushed; put everything on stable storage, then acknowledge.
    Flush,
    /// Backup: I have taken in everything up to frame number `through` (storage `sync`: it is on my disk).
    Ack {
        /// Number of the last frame, counted from 1.
        through: u64,
        /// Memory that my buffers hold.
        held_bytes: u64,
    },
    /// Backup: sync `epoch` is on my image and survives a power loss.
    Committed {
        /// The sync.
        epoch: Epoch,
    },
    /// Backup: my buffers fill up.
    NeedSync,
    /// Verification or a join, primary: hash your range. Answered by `Hash`.
    AskHash {
        /// Where on the disk.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// Backup: the 128-bit hash (16 bytes of payload) of that range. Of one that cannot be read: sixteen zero bytes in a verification,
    /// nothing in a join.
    Hash {
        /// Where on the disk.
        offset: u64,
        /// How much.
        len: u64,
    },
}

/// What cannot be believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MirrorError {
    /// Not a frame of ours.
    #[error("the mirror stream does not carry frames of this version: is the peer the same build?")]
    BadMagic,
    /// Unknown kind.
    #[error("mirror frame of unknown kind {0}: is the peer the same build?")]
    BadKind(u8),
    /// Too long.
    #[error("mirror frame announces {0} bytes, more than any write can have")]
    TooLong(u64),
    /// Corrupt.
    #[error("mirror frame with a wrong checksum: the stream is corrupt")]
    BadChecksum,
    /// Hello or its like.
    #[error("mirror greeting is malformed: is the peer the same build?")]
    BadHello,
}

impl Frame {
    fn parts(self) -> (u8, u64, u64) {
        match self {
            Self::Hello => (1, 0, 0),
            Self::Welcome => (2, 0, 0),
            Self::Refuse => (3, 0, 0),
            Self::Write { offset } => (4, offset, 0),
            Self::Zero {
                offset,
                len,
                unmap: false,
            } => (5, offset, len),
            Self::Zero {
                offset,
                len,
                unmap: true,
            } => (6, offset, len),
            Self::Copy { offset } => (7, offset, 0),
            Self::CopyZero { offset, len } => (8, offset, len),
            Self::CopyEnd => (9, 0, 0),
            Self::Mark { epoch } => (10, epoch.0, 0),
            Self::Flush => (11, 0, 0),
            Self::Ack { through, held_bytes } => (12, through, held_bytes),
            Self::Committed { epoch } => (13, epoch.0, 0),
            Self::NeedSync => (14, 0, 0),
            Self::AskHash { offset, len } => (15, offset, len),
            Self::Hash { offset, len } => (16, offset, len),
        }
    }

    fn from_parts(kind: u8, a: u64, b: u64) -> Result<Self, MirrorError> {
        Ok(match kind {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Refuse,
            4 => Self::Write { offset: a },
            5 | 6 => Self::Zero {
                offset: a,
                len: b,
                unmap: kind == 6,
            },
            7 => Self::Copy { offset: a },
            8 => Self::CopyZero { offset: a, len: b },
            9 => Self::CopyEnd,
            10 => Self::Mark { epoch: Epoch(a) },
            11 => Self::Flush,
            12 => Self::Ack {
                through: a,
                held_bytes: b,
            },
            13 => Self::Committed { epoch: Epoch(a) },
            14 => Self::NeedSync,
            15 => Self::AskHash { offset: a, len: b },
            16 => Self::Hash { offset: a, len: b },
            unknown => return Err(MirrorError::BadKind(unknown)),
        })
    }

    /// The header of this frame when `payload` follows it.
    #[must_use]
    pub fn header(self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let (kind, a, b) = self.parts();
        let mut header = [0; HEADER_BYTES];
        header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4] = kind;
        header[8..16].copy_from_slice(&a.to_le_bytes());
        header[16..24].copy_from_slice(&b.to_le_bytes());
        header[24..32].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        let check = checksum(&header, payload);
        header[32..40].copy_from_slice(&check.to_le_bytes());
        header
    }

    /// Reads a header: the frame, and how many bytes of payload follow. [`Self::check`] it with the payload.
    ///
    /// # Errors
    /// A header that is none, or that announces too much.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Result<(Self, u64), MirrorError> {
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
        if header[0..4] != MAGIC.to_le_bytes() {
            return Err(MirrorError::BadMagic);
        }
        let payload = word(24);
        if payload > MOST_PAYLOAD_BYTES {
            return Err(MirrorError::TooLong(payload));
        }
        Ok((Self::from_parts(header[4], word(8), word(16))?, payload))
    }

    /// Compares the checksum in `header` with header and payload.
    ///
    /// # Errors
    /// They differ.
    pub fn check(header: &[u8; HEADER_BYTES], payload: &[u8]) -> Result<(), MirrorError> {
        let told = u64::from_le_bytes(header[32..40].try_into().expect("8 bytes"));
        if told == checksum(header, payload) {
            Ok(())
        } else {
            Err(MirrorError::BadChecksum)
        }
    }
}

fn checksum(header: &[u8; HEADER_BYTES], payload: &[u8]) -> u64 {
    xxh3_64_with_seed(payload, xxh3_64_with_seed(&header[..32], 0))
}

/// How a disk introduces itself at either end of a mirror stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Its size.
    pub size_bytes: u64,
    /// How new its image is.
    pub generation: Generation,
    /// The image is the state of one moment (not half-way through a copy).
    pub consistent: bool,
    /// The random name of the pair that last held the same disk; zero: never paired. Only within a pair do the two
    /// sides' dirty extents tell all that differs.
    pub pair: [u8; 16],
    /// Primary: the name that the pair will have when the copy is whole. Backup: zero.
    pub next_pair: [u8; 16],
    /// Primary: mirrored writes go to the backup's image at once and are acknowledged (0 gannet, 1 colo, 2 sync).
    pub storage: u8,
}

impl Hello {
    /// Encoded size.
    pub const BYTES: usize = 4 + 8 + 8 + 8 + 2 + 16 + 16 + 1;

    /// As payload of a `Hello` or `Welcome`.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.size_bytes.to_le_bytes());
        out.extend(self.generation.term.0.to_le_bytes());
        out.extend(self.generation.epoch.0.to_le_bytes());
        out.extend([u8::from(self.generation.primary), u8::from(self.consistent)]);
        out.extend(self.pair);
        out.extend(self.next_pair);
        out.push(self.storage);
        out
    }

    /// Reads a payload; what follows the greeting is returned as well.
    ///
    /// # Errors
    /// Too short, another version, or nonsense.
    pub fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), MirrorError> {
        if bytes.len() < Self::BYTES || bytes[0..4] != VERSION.to_le_bytes() {
            return Err(MirrorError::BadHello);
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let name = |at: usize| -> [u8; 16] { bytes[at..at + 16].try_into().expect("16 bytes") };
        if bytes[28] > 1 || bytes[29] > 1 || bytes[62] > 2 {
            return Err(MirrorError::BadHello);
        }
        let hello = Self {
            size_bytes: word(4),
            generation: Generation {
                term: Term(word(12)),
                primary: bytes[28] == 1,
                epoch: Epoch(word(20)),
            },
            consistent: bytes[29] == 1,
            pair: name(30),
            next_pair: name(46),
            storage: bytes[62],
        };
        Ok((hello, &bytes[Self::BYTES..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire_and_corruption_does_not() {
        let frames = [
            Frame::Write { offset: 7 },
            Frame::Zero {
                offset: 1,
                len: 2,
                unmap: true,
            },
            Frame::Zero {
                offset: 1,
                len: 2,
                unmap: false,
            },
            Frame::Mark { epoch: Epoch(9) },
            Frame::Ack {
                through: 3,
                held_bytes: 4,
            },
            Frame::Hash { offset: 4, len: 5 },
        ];
        for frame in frames {
            let header = frame.header(b"payload");
            assert_eq!(Frame::decode(&header), Ok((frame, 7)));
            assert_eq!(Frame::check(&header, b"payload"), Ok(()));
            assert_eq!(Frame::check(&header, b"Payload"), Err(MirrorError::BadChecksum));
        }
        let mut header = Frame::Flush.header(b"");
        header[30] = 1;
        assert!(matches!(Frame::decode(&header), Err(MirrorError::TooLong(_))));
    }

    #[test]
    fn a_greeting_survives_the_wire() {
        let hello = Hello {
            size_bytes: 1 << 40,
            generation: Generation {
                term: Term(3),
                primary: true,
                epoch: Epoch(8),
            },
            consistent: true,
            pair: [1; 16],
            next_pair: [2; 16],
            storage: 1,
        };
        let mut bytes = hello.encode();
        assert_eq!(bytes.len(), Hello::BYTES);
        bytes.extend([1, 2]);
        assert_eq!(Hello::decode(&bytes), Ok((hello, &[1, 2][..])));
        assert_eq!(Hello::decode(&bytes[..20]), Err(MirrorError::BadHello));
    }
}
