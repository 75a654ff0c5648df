//! What a comparison is told and tells: names of frames, limits, differences and counts. Nothing is decided here.
//!
//! Not here: who differs, and where (`connection`, `datagrams`, `place`).

use crate::agreed::Frame;

/// A frame's name: rising in the order in which the primary's VM sent them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrameId(pub u64);

/// What may leave.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Matched {
    /// A frame of the primary's.
    Frame(FrameId),
    /// What the backup has acknowledged, while the primary's frame that acknowledges more waits.
    PartialAck {
        /// In the primary's name.
        frame: Frame,
        /// It tells of bytes that the client was not told of: the connection gets on.
        gets_on: bool,
    },
}

/// What may be kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the backup that the primary has not said yet.
    pub buffer_bytes: usize,
    /// Flows that are known at once.
    pub flows: usize,
    /// Dates of HTTP answers that are near each other are no difference.
    pub http_dates: bool,
}

/// Why two outputs are not the same, or cannot be told to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Difference {
    /// Other bytes at the same place of a stream.
    Bytes,
    /// A connection ended by one of them only, or elsewhere, or begun with other options.
    Flags,
    /// Both have ended a connection behind the same bytes, in another way: with a FIN and with a reset, or where one has heard less of its client.
    /// No client waits for bytes there, so it may wait for a sync that comes anyway, for a while.
    Ends,
    /// Another datagram.
    Datagram,
    /// A frame that is not understood: a part of a TCP segment, an unknown protocol.
    NotUnderstood,
    /// More than the limits.
    Full,
}

/// How the two outputs stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing waits.
    Agree,
    /// Some of the primary's frames wait for the backup's word.
    Waiting {
        /// The first of them.
        oldest: FrameId,
        /// How many.
        frames: usize,
        /// How many of these say more than an acknowledgement. The others may wait: the backup's delayed
        /// acknowledgement comes with its own timer, and a client that misses one repeats itself.
        telling: usize,
    },
    /// Some will never be matched.
    Differs {
        /// Why.
        why: Difference,
    },
}

/// What was seen so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Frames that both have said.
    pub matched: u64,
    /// Frames that told nothing new, or nothing of the VM's state.
    pub free: u64,
    /// Differences in a byte stream.
    pub bytes: u64,
    /// In the end of a connection, or in its beginning.
    pub flags: u64,
    /// In datagrams.
    pub datagrams: u64,
    /// Frames that were not understood.
    pub not_understood: u64,
    /// Flows given up for a limit.
    pub full: u64,
}

impl Counters {
    /// All differences.
    #[must_use]
    pub fn differences(&self) -> u64 {
        self.bytes + self.flags + self.datagrams + self.not_understood + self.full
    }
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.matched += other.matched;
        self.free += other.free;
        self.bytes += other.bytes;
        self.flags += other.flags;
        self.datagrams += other.datagrams;
        self.not_understood += other.not_understood;
        self.full += other.full;
    }
}
