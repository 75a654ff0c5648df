//! What it decides: the bytes of a consensus message.
//!
//! Flow: the fabric frames, checksums and orders bytes per link; here they become `Message`s and back.
//!
//! Invariants:
//! - W1 `decode(encode(m)) == m` for every message within the bounds;
//! - W2 no input makes `decode` panic or allocate more than a small multiple of the input's length;
//! - W3 one message has one encoding: trailing bytes, unknown kinds and flags are errors.
//!
//! Layout, little-endian: kind `u8`, then the fields in the order of the type. A stamp is term `u64`, index `u64`.
//! Entries: count `u32`, then per entry kind `u8`, term `u64`, length `u32`, payload; the index is not sent: entries
//! are consecutive after `prev`. Members: count `u8`, then per member id `u8`, kind `u8` (1 witness, 2 it can run the VM).
//!
//! Source: smoltcp's habit of checked bytes apart from always-valid types.
//!
//! Not here: length prefix, version, checksum, cluster identity: the fabric's.

use crate::consensus::{Entry, EntryKind, MAX_MEMBERS, Member, Message, Snapshot, Stand};
use crate::units::{Index, ReplicaId, Term, Viewstamp};
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The most entries in one message.
pub const MAX_ENTRIES: usize = 1 << 16;

/// Why bytes are no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// It ends in the middle.
    #[error("the message ends {missing_bytes} bytes too early; drop it and the link")]
    Short {
        /// How many are missing at least.
        missing_bytes: usize,
    },
    /// There is more than one message.
    #[error("{extra_bytes} bytes follow the message; drop it and the link")]
    Long {
        /// How many.
        extra_bytes: usize,
    },
    /// A number that no version of this program writes.
    #[error("{what} {value} is unknown; the peer runs another version or is broken: drop the link")]
    Unknown {
        /// Of what.
        what: &'static str,
        /// Which.
        value: u64,
    },
    /// A count or an index out of bounds.
    #[error("{what} {value} is out of bounds; drop the message and the link")]
    Bounds {
        /// Of what.
        what: &'static str,
        /// Which.
        value: u64,
    },
}

const APPEND: u8 = 1;
const LEAD: u8 = 2;
const ACK: u8 = 3;
const REJECT: u8 = 4;
const REQUEST_VOTE: u8 = 5;
const VOTE: u8 = 6;
const SNAPSHOT: u8 = 7;
const PULL: u8 = 8;
const PULLED: u8 = 9;
const RECOVER: u8 = 10;
const RECOVERY: u8 = 11;
const CAMPAIGN: u8 = 12;

/// Appends the message's bytes to `out`.
pub fn encode(message: &Message, out: &mut Vec<u8>) {
    match message {
        Message::Append { term, prev, entries } => {
            encode_append(*term, *prev, entries.iter(), out);
        }
        Message::Lead { term, commit, beat } => words(LEAD, &[term.0, commit.0, *beat], out),
        Message::Ack { term, durable, beat } => words(ACK, &[term.0, durable.0, *beat], out),
        Message::Reject { term, hint } => words(REJECT, &[term.0, hint.0], out),
        Message::RequestVote { term, last, why } => {
            words(REQUEST_VOTE, &[term.0, last.term.0, last.index.0], out);
            out.put_u8(*why as u8);
        }
        Message::Vote {
            term,
            granted,
            pre,
            last,
        } => {
            words(VOTE, &[term.0], out);
            out.put_u8(u8::from(*granted));
            out.put_u8(u8::from(*pre));
            stamp(*last, out);
        }
        Message::Snapshot {
            term,
            snapshot,
            leads,
        } => {
            words(SNAPSHOT, &[term.0], out);
            out.put_u8(u8::from(*leads));
            put_snapshot(snapshot, out);
        }
        Message::Pull { term, at, committed } => {
            words(PULL, &[term.0, at.term.0, at.index.0, committed.0], out);
        }
        Message::Pulled {
            term,
            prev,
            entries,
            last,
        } => {
            words(
                PULLED,
                &[term.0, prev.term.0, prev.index.0, last.term.0, last.index.0],
                out,
            );
            put_entries(entries.iter(), out);
        }
        Message::Recover { term, nonce, held } => words(RECOVER, &[term.0, *nonce, held.0], out),
        Message::Recovery { term, nonce, last } => words(RECOVERY, &[term.0, *nonce, last.0], out),
        Message::Campaign { term, beat } => words(CAMPAIGN, &[term.0, *beat], out),
    }
}

/// The bytes of a `Message::Append`, straight from the log (`Action::SendEntries`) without a `Vec` in between.
pub fn encode_append<'a>(
    term: Term,
    prev: Viewstamp,
    entries: impl ExactSizeIterator<Item = &'a Entry>,
    out: &mut Vec<u8>,
) {
    words(APPEND, &[term.0, prev.term.0, prev.index.0], out);
    put_entries(entries, out);
}

/// Reads one message that fills `bytes`. Payloads are copied: the bytes may lie in memory that a peer can write.
pub fn decode(bytes: &[u8]) -> Result<Message, WireError> {
    let mut r = Reader(bytes);
    let message = match r.u8()? {
        APPEND => {
            let (term, prev) = (Term(r.u64()?), r.stamp()?);
            Message::Append {
                term,
                prev,
                entries: r.entries(prev)?,
            }
        }
        LEAD => Message::Lead {
            term: Term(r.u64()?),
            commit: Index(r.u64()?),
            beat: r.u64()?,
        },
        ACK => Message::Ack {
            term: Term(r.u64()?),
            durable: Index(r.u64()?),
            beat: r.u64()?,
        },
        REJECT => Message::Reject {
            term: Term(r.u64()?),
            hint: Index(r.u64()?),
        },
        REQUEST_VOTE => Message::RequestVote {
            term: Term(r.u64()?),
            last: r.stamp()?,
            why: r.stand()?,
        },
        VOTE => Message::Vote {
            term: Term(r.u64()?),
            granted: r.flag()?,
            pre: r.flag()?,
            last: r.stamp()?,
        },
        SNAPSHOT => {
            let (term, leads) = (Term(r.u64()?), r.flag()?);
            Message::Snapshot {
                term,
                leads,
                snapshot: r.snapshot()?,
            }
        }
        PULL => Message::Pull {
            term: Term(r.u64()?),
            at: r.stamp()?,
            committed: Index(r.u64()?),
        },
        PULLED => {
            let (term, prev, last) = (Term(r.u64()?), r.stamp()?, r.stamp()?);
            Message::Pulled {
                term,
                prev,
                last,
                entries: r.entries(prev)?,
            }
        }
        RECOVER => Message::Recover {
            term: Term(r.u64()?),
            nonce: r.u64()?,
            held: Index(r.u64()?),
        },
        RECOVERY => Message::Recovery {
            term: Term(r.u64()?),
            nonce: r.u64()?,
            last: Index(r.u64()?),
        },
        CAMPAIGN => Message::Campaign {
            term: Term(r.u64()?),
            beat: r.u64()?,
        },
        kind => {
            return Err(WireError::Unknown {
                what: "message kind",
                value: u64::from(kind),
            });
        }
    };
    r.end()?;
    Ok(message)
}

/// The payload of an `EntryKind::Members`.
#[must_use]
pub fn encode_members(members: &[Member]) -> Bytes {
    let mut out = BytesMut::with_capacity(1 + 2 * members.len());
    put_members(members, &mut out);
    out.freeze()
}

/// Reads the payload of an `EntryKind::Members`: at most [`MAX_MEMBERS`], none twice.
pub fn decode_members(bytes: &[u8]) -> Result<Vec<Member>, WireError> {
    let mut r = Reader(bytes);
    let members = r.members()?;
    r.end()?;
    Ok(members)
}

/// Appends a snapshot's bytes to `out` (for `SaveSnapshot` on disk, too).
pub fn encode_snapshot(snapshot: &Snapshot, out: &mut Vec<u8>) {
    put_snapshot(snapshot, out);
}

/// Reads what `encode_snapshot` wrote.
pub fn decode_snapshot(bytes: &[u8]) -> Result<Snapshot, WireError> {
    let mut r = Reader(bytes);
    let snapshot = r.snapshot()?;
    r.end()?;
    Ok(snapshot)
}

/// Appends one entry's bytes to `out`, index included (for the log on disk).
pub fn encode_entry(entry: &Entry, out: &mut Vec<u8>) {
    out.put_u64_le(entry.stamp.index.0);
    put_entry(entry, out);
}

/// Reads what `encode_entry` wrote.
pub fn decode_entry(bytes: &[u8]) -> Result<Entry, WireError> {
    let mut r = Reader(bytes);
    let index = Index(r.u64()?);
    let entry = r.entry(index)?;
    r.end()?;
    Ok(entry)
}

fn words(kind: u8, words: &[u64], out: &mut Vec<u8>) {
    out.reserve(1 + 8 * words.len());
    out.put_u8(kind);
    for &word in words {
        out.put_u64_le(word);
    }
}

fn stamp(stamp: Viewstamp, out: &mut Vec<u8>) {
    out.put_u64_le(stamp.term.0);
    out.put_u64_le(stamp.index.0);
}

fn put_entries<'a>(entries: impl ExactSizeIterator<Item = &'a Entry>, out: &mut Vec<u8>) {
    out.put_u32_le(entries.len() as u32);
    for entry in entries {
        put_entry(entry, out);
    }
}

fn put_entry(entry: &Entry, out: &mut Vec<u8>) {
    out.reserve(13 + entry.payload.len());
    out.put_u8(entry.kind as u8);
    out.put_u64_le(entry.stamp.term.0);
    out.put_u32_le(entry.payload.len() as u32);
    out.put_slice(&entry.payload);
}

/// What a member is for.
const WITNESS: u8 = 1;
const RUNS: u8 = 2;

fn put_members(members: &[Member], out: &mut impl BufMut) {
    out.put_u8(members.len() as u8);
    for member in members {
        out.put_u8(member.id.0);
        out.put_u8(if member.witness { WITNESS } else { RUNS });
    }
}

fn put_snapshot(snapshot: &Snapshot, out: &mut Vec<u8>) {
    stamp(snapshot.last, out);
    put_members(&snapshot.members, out);
    out.put_u32_le(snapshot.state.len() as u32);
    out.put_slice(&snapshot.state);
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn need(&self, bytes: usize) -> Result<(), WireError> {
        if self.0.len() < bytes {
            Err(WireError::Short {
                missing_bytes: bytes - self.0.len(),
            })
        } else {
            Ok(())
        }
    }
    fn u8(&mut self) -> Result<u8, WireError> {
        self.need(1)?;
        Ok(self.0.get_u8())
    }
    fn u32(&mut self) -> Result<u32, WireError> {
        self.need(4)?;
        Ok(self.0.get_u32_le())
    }
    fn u64(&mut self) -> Result<u64, WireError> {
        self.need(8)?;
        Ok(self.0.get_u64_le())
    }
    fn flag(&mut self) -> Result<bool, WireError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(WireError::Unknown {
                what: "flag",
                value: u64::from(value),
            }),
        }
    }
    fn stand(&mut self) -> Result<Stand, WireError> {
        match self.u8()? {
            0 => Ok(Stand::Silence),
            1 => Ok(Stand::Asks),
            2 => Ok(Stand::HandedOver),
            value => Err(WireError::Unknown {
                what: "right to stand",
                value: u64::from(value),
            }),
        }
    }
    fn stamp(&mut self) -> Result<Viewstamp, WireError> {
        Ok(Viewstamp {
            term: Term(self.u64()?),
            index: Index(self.u64()?),
        })
    }
    fn bytes(&mut self) -> Result<Bytes, WireError> {
        let len = self.u32()? as usize;
        self.need(len)?;
        let (head, tail) = self.0.split_at(len);
        self.0 = tail;
        Ok(Bytes::copy_from_slice(head))
    }
    fn entry(&mut self, index: Index) -> Result<Entry, WireError> {
        let kind = match self.u8()? {
            0 => EntryKind::Barrier,
            1 => EntryKind::Data,
            2 => EntryKind::Members,
            value => {
                return Err(WireError::Unknown {
                    what: "entry kind",
                    value: u64::from(value),
                });
            }
        };
        let term = Term(self.u64()?);
        Ok(Entry {
            stamp: Viewstamp { term, index },
            kind,
            payload: self.bytes()?,
        })
    }
    /// At least 13 bytes an entry: the count is checked against what is there before anything is allocated (W2).
    fn entries(&mut self, prev: Viewstamp) -> Result<Vec<Entry>, WireError> {
        let count = self.u32()? as usize;
        if count > MAX_ENTRIES {
            return Err(WireError::Bounds {
                what: "entry count",
                value: count as u64,
            });
        }
        self.need(count * 13)?;
        let after = prev.index.0.checked_add(count as u64);
        if after.is_none_or(|last| last == u64::MAX) {
            return Err(WireError::Bounds {
                what: "index",
                value: prev.index.0,
            });
        }
        (1..=count as u64)
            .map(|nth| self.entry(Index(prev.index.0 + nth)))
            .collect()
    }
    fn members(&mut self) -> Result<Vec<Member>, WireError> {
        let count = self.u8()?;
        if usize::from(count) > MAX_MEMBERS {
            return Err(WireError::Bounds {
                what: "member count",
                value: u64::from(count),
            });
        }
        let mut members: Vec<Member> = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let (id, flags) = (self.u8()?, self.u8()?);
            if ![WITNESS, RUNS].contains(&flags) {
                return Err(WireError::Unknown {
                    what: "member flags",
                    value: u64::from(flags),
                });
            }
            if members.iter().any(|member| member.id.0 == id) {
                return Err(WireError::Bounds {
                    what: "second member with id",
                    value: u64::from(id),
                });
            }
            members.push(Member {
                id: ReplicaId(id),
                witness: flags == WITNESS,
            });
        }
        Ok(members)
    }
    fn snapshot(&mut self) -> Result<Snapshot, WireError> {
        Ok(Snapshot {
            last: self.stamp()?,
            members: self.members()?,
            state: self.bytes()?,
        })
    }
    fn end(&self) -> Result<(), WireError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(WireError::Long {
                extra_bytes: self.0.len(),
            })
        }
    }
}

#[cfg(test)]
mod tests;
