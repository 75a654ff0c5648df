//! What a side of a session is to its driver: what it is told, and what it says of itself.
//!
//! Not here: what either side does (`primary`, `backup`).

use super::error::UnfitState;
use super::table::Source;
use crate::sync::dirty::PageSet;
use crate::waits::Wait;
use crate::wire::sync::SyncMessage;

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event<W> {
    /// The stream is there.
    Begins,
    /// The VM loop's word.
    Word(W),
    /// The other host's message.
    Message(SyncMessage),
    /// The last effect is carried out.
    Answer(Answer),
    /// An effect has failed; those after it were not begun.
    Failed {
        /// For a person.
        why: String,
    },
    /// The stream is broken or at its end, while a message was awaited.
    StreamEnded {
        /// For a person.
        why: String,
    },
    /// What was awaited has not come in time.
    TimedOut {
        /// How many bytes of disk writes the backup has taken so far: it may be busy with these.
        mirrored: u64,
    },
    /// There is no VM loop any more, or it has ended this session.
    LoopEnded,
}

/// What an effect has brought.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The disks are copied, and their writes are mirrored.
    DisksCopied,
    /// The pages that the guest has ever used.
    Mapped(PageSet),
    /// The pages that were written since the last scan; their marks are cleared.
    Scanned(PageSet),
    /// The VM runs on.
    Resumed,
    /// The block hashes of what was copied aside, or of the pages that were named.
    Hashed(Vec<u128>),
    /// The hashes of the pages that were named, one for each.
    PagesHashed(Vec<u128>),
    /// What differs is sent.
    DeltasSent {
        /// So many bytes.
        bytes: u64,
    },
    /// The devices' state is sent, and with it the sync is whole.
    StateSent {
        /// How many bytes of disk writes the backup has taken so far.
        mirrored: u64,
    },
    /// Whether QEMU will take the state, and if not, why.
    StateChecked(Result<(), UnfitState>),
    /// The sync is applied.
    Applied {
        /// How long that took.
        took_us: u64,
    },
    /// The VM here is an ordinary one.
    TookOver,
}

/// What a machine waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Awaits {
    /// Whom to listen to.
    pub from: Source,
    /// Its name and bound; none where nothing is owed.
    pub wait: Option<Wait>,
    /// When it is in vain; `u64::MAX` where nothing is owed.
    pub until_us: u64,
}

/// One side of a session.
pub trait Machine {
    /// What its VM loop says.
    type Word;
    /// What its driver does.
    type Effect;

    /// Takes an event; what is to be done is appended to `effects`.
    fn step(&mut self, now_us: u64, event: Event<Self::Word>, effects: &mut Vec<Self::Effect>);

    /// What it waits for; none if an effect is to answer, or if it has ended.
    fn awaits(&self) -> Option<Awaits>;

    /// The state's name, as in docs/replica.md.
    fn state(&self) -> &'static str;
}

pub(super) fn awaits(listens: Option<(Source, Option<Wait>)>, until_us: u64) -> Option<Awaits> {
    listens.map(|(from, wait)| Awaits { from, wait, until_us })
}

pub(super) fn until_us(now_us: u64, listens: Option<(Source, Option<Wait>)>) -> u64 {
    let bound_us = listens.and_then(|(_, wait)| wait).map(Wait::bound_us);
    bound_us.map_or(u64::MAX, |bound_us| now_us + bound_us)
}
