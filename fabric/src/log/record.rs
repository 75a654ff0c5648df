//! What it decides: whether bytes of a segment are a record of that segment, whole.
//!
//! A record, at a multiple of 8, little-endian: `mark:u32 length:u32 batch:u64 term:u64 index:u64 check:u64`, payload,
//! zeros up to a multiple of 8. `mark` is `0xd1_0000_00` with the kind in its lowest byte. `batch` is where the batch that
//! it was written with begins in this segment: proof that everything before was synced. `check` is xxh3 over all of it,
//! seeded with the segment's random id, so that blocks of removed files never fit.
//! **Invariants**: 1. decoding never panics. **Not here**: order and gaps (`segment`, `disk`).

use bytes::Bytes;
use dunlin_core::consensus::{Entry, EntryKind};
use dunlin_core::units::{Index, Term, Viewstamp};
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub(super) const HEAD: usize = 40;
const MARK: u32 = 0xd100_0000;
const CUT: u8 = 0x10;
const RESET: u8 = 0x11;

/// What a record says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// The next entry, or one that replaces the one at its index and all after it.
    Entry(Entry),
    /// Entries at and after this index are gone.
    Cut(Index),
    /// The log goes on after this stamp (a snapshot stands for it): all before is gone.
    Reset(Viewstamp),
}

impl Record {
    /// Where it stands; of a cut, only the index counts.
    pub(super) fn stamp(&self) -> Viewstamp {
        match self {
            Self::Entry(entry) => entry.stamp,
            Self::Reset(stamp) => *stamp,
            Self::Cut(index) => Viewstamp {
                term: Term(0),
                index: *index,
            },
        }
    }
}

fn entry_kind(kind: u8) -> Option<EntryKind> {
    [EntryKind::Barrier, EntryKind::Data, EntryKind::Members]
        .into_iter()
        .find(|k| *k as u8 == kind)
}

/// Bytes that a record with such a payload takes.
pub(super) fn size(payload: usize) -> usize {
    HEAD + payload.next_multiple_of(8)
}

/// Appends the record to `out`.
pub(super) fn encode(record: &Record, batch: u64, segment: u64, out: &mut Vec<u8>) {
    let (kind, stamp, payload): (u8, Viewstamp, &[u8]) = match record {
        Record::Entry(e) => (e.kind as u8, e.stamp, &e.payload),
        Record::Cut(index) => (
            CUT,
            Viewstamp {
                term: Term(0),
                index: *index,
            },
            &[],
        ),
        Record::Reset(stamp) => (RESET, *stamp, &[]),
    };
    encode_parts(kind, stamp, payload, batch, segment, out);
}

/// As [`encode`], for an entry, without cloning it.
pub(super) fn encode_entry(e: &Entry, batch: u64, segment: u64, out: &mut Vec<u8>) {
    encode_parts(e.kind as u8, e.stamp, &e.payload, batch, segment, out);
}

fn encode_parts(kind: u8, stamp: Viewstamp, payload: &[u8], batch: u64, segment: u64, out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(&(MARK | u32::from(kind)).to_le_bytes());
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    for word in [batch, stamp.term.0, stamp.index.0, 0] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.extend_from_slice(payload);
    out.resize(start + size(payload.len()), 0);
    let check = xxh3_64_with_seed(&out[start..], segment);
    out[start + 32..start + 40].copy_from_slice(&check.to_le_bytes());
}

/// Whether a record may begin here: cheap, for searching.
pub(super) fn marked(bytes: &[u8]) -> bool {
    bytes
        .first_chunk::<4>()
        .is_some_and(|m| u32::from_le_bytes(*m) & 0xffff_ff00 == MARK)
}

/// The record at the start of `bytes`, its batch and its size; `None` if there is none, or not whole.
pub(super) fn decode(bytes: &[u8], segment: u64) -> Option<(Record, u64, usize)> {
    let head = bytes.first_chunk::<HEAD>()?;
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
    let mark = u32::from_le_bytes(head[..4].try_into().expect("4 bytes"));
    let length = u32::from_le_bytes(head[4..8].try_into().expect("4 bytes")) as usize;
    if mark & 0xffff_ff00 != MARK {
        return None;
    }
    let total = size(length);
    let whole = bytes.get(..total)?;
    // The check was made with zeros in its own place.
    let mut copy = whole.to_vec();
    copy[32..40].fill(0);
    if xxh3_64_with_seed(&copy, segment) != word(32) {
        return None;
    }
    let stamp = Viewstamp {
        term: Term(word(16)),
        index: Index(word(24)),
    };
    let record = match (mark & 0xff) as u8 {
        CUT => Record::Cut(stamp.index),
        RESET => Record::Reset(stamp),
        kind => Record::Entry(Entry {
            stamp,
            kind: entry_kind(kind)?,
            payload: Bytes::copy_from_slice(&whole[HEAD..HEAD + length]),
        }),
    };
    Some((record, word(8), total))
}
