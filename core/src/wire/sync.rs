//! The messages of a sync and of a join, between a primary and its backup.
//!
//! Layout: length of what follows (4, big-endian), tag (1), fields. A message is at most `MOST_BYTES`: larger
//! contents are cut into several by the sender (`parts`).

pub mod parts;

use super::{Reader, WireError};
use crate::agreed::Frame;
use crate::policy::Mode;
use crate::sync::compare::{BLOCK_BYTES, Compare, DivergentPage};
use crate::sync::dirty::PageSet;
use crate::sync::staging::PageDelta;
use crate::units::{Epoch, Index, Term};
use bytes::{BufMut, Bytes, BytesMut};

/// Since this version of the protocol a session may compare by trees (`Join`, `Nodes`, `Differ`).
pub const TREE_SINCE: u16 = 4;

/// Since this version a backup says what its memory holds before it is sent any (`Holds`).
pub const HOLDS_SINCE: u16 = 6;

/// Since this version the bytes of connections may come ahead of their sync (`ConnectionsAhead`).
pub const AHEAD_SINCE: u16 = 7;

/// The most bytes in one message, without its length.
pub const MOST_BYTES: usize = 16 << 20;

/// A run of pages.
const RUN_BYTES: usize = 8;

/// A flag of `Join`, beside that of a backup that runs.
const BY_TREE: u8 = 2;

/// A message that its sender should have cut. It is an error and no panic: how much there is to say is the guest's choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a message {name} of {bytes} bytes is longer than {MOST_BYTES}: it cannot be sent")]
pub struct TooLong {
    /// Which message.
    pub name: &'static str,
    /// How long it is.
    pub bytes: usize,
}

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SyncMessage {
    /// Primary: become my backup. The last sync of the join ends `epoch`.
    Join {
        /// The primary's term; a backup that has promised a later one refuses.
        term: Term,
        /// Size of the guest's memory in pages.
        pages: u32,
        /// Whether the backup's VM is to run.
        active: bool,
        /// How the session compares. Versions of the protocol before `TREE_SINCE` know the list alone.
        compare: Compare,
    },
    /// Backup: a part of what my memory holds already, before `JoinReady`: of an earlier copy of this VM.
    Holds {
        /// The pages, behind those of the part before.
        pages: PageSet,
        /// One for each page.
        hashes: Vec<u128>,
    },
    /// Backup: my QEMU is up and waits; send.
    JoinReady,
    /// Either: it cannot be done, with the reason for a person.
    Refused {
        /// One line.
        why: String,
    },
    /// Primary, while joining: content of pages, straight into the memory of a VM that does not run yet.
    Pages(Vec<PageDelta>),
    /// Primary: the last sync of the join follows, and begins the first protected epoch.
    JoinLast {
        /// The epoch that it ends.
        epoch: Epoch,
    },
    /// Backup: these pages I have written since I was last asked; at the end of `epoch`, where I stand still, too.
    Dirty {
        /// The epoch.
        epoch: Epoch,
        /// The pages, or a part of them.
        pages: PageSet,
        /// Another part follows.
        more: bool,
    },
    /// Primary, at the end of the epoch: hash these.
    Union {
        /// The epoch.
        epoch: Epoch,
        /// The pages that either has written, or a part of them.
        pages: PageSet,
        /// Another part follows.
        more: bool,
    },
    /// Backup: a part of the block hashes of the union, in order.
    Hashes {
        /// The epoch.
        epoch: Epoch,
        /// 16 for each page.
        hashes: Vec<u128>,
    },
    /// Primary: a part of the hashes of the tree's nodes that are in question (`sync::compare::tree`), in order.
    Nodes {
        /// The epoch.
        epoch: Epoch,
        /// One for each node.
        hashes: Vec<u128>,
    },
    /// Backup: a part of the answer to these nodes: which of them I have otherwise.
    Differ {
        /// The epoch.
        epoch: Epoch,
        /// One bit for each node.
        part: Bytes,
    },
    /// Primary: a part of what differs.
    Delta {
        /// The epoch.
        epoch: Epoch,
        /// Blocks of pages.
        deltas: Vec<PageDelta>,
    },
    /// Primary: a part of the device state, but not its last.
    DeviceState {
        /// The epoch.
        epoch: Epoch,
        /// Opaque.
        part: Bytes,
    },
    /// Primary: a part of what the connections need (`connections`), but not its last.
    Connections {
        /// The epoch.
        epoch: Epoch,
        /// Opaque.
        part: Bytes,
    },
    /// Primary, while the epoch runs: a part of what the connections will need at its end. It counts only with the sync.
    ConnectionsAhead {
        /// The epoch.
        epoch: Epoch,
        /// Opaque.
        part: Bytes,
    },
    /// Primary: the rest of the device state, and with it the sync is whole.
    State {
        /// The epoch that ends.
        epoch: Epoch,
        /// How the copies are kept in the next one.
        next: Mode,
        /// What the connections need: those that do not speak the VM's own numbers (`output::rewriter`), or what speculation keeps
        /// of them; the rest of it.
        connections: Bytes,
        /// Opaque.
        device_state: Bytes,
    },
    /// Backup: what my VM has said, in order, in the running epoch.
    Said {
        /// The epoch.
        epoch: Epoch,
        /// Its frames.
        frames: Vec<Frame>,
    },
    /// Backup: sync `epoch` is staged whole; I could go on from it. The acknowledgement that releases output.
    Staged {
        /// The epoch.
        epoch: Epoch,
    },
    /// Backup: sync `epoch` is applied, my VM runs (or could).
    Loaded {
        /// The epoch.
        epoch: Epoch,
        /// How long it took.
        took_us: u64,
    },
    /// Backup: my VM has nothing left to do; it has worked off the log up to here.
    Idle {
        /// The newest entry that my VM was given.
        applied: Index,
    },
    /// Primary, when asked to check: the hash of all memory after sync `epoch`, and the backup's answer.
    Audit {
        /// The epoch.
        epoch: Epoch,
        /// Hash of all of RAM.
        hash: u128,
    },
    /// Primary, while both VMs run: these pages I have written so far. Say yours, and hash all of them.
    PreCopy {
        /// The epoch.
        epoch: Epoch,
        /// The pages, or a part of them.
        pages: PageSet,
        /// Another part follows.
        more: bool,
    },
    /// Primary, to a backup whose VM does not run: the epoch ends here.
    Ends {
        /// The epoch.
        epoch: Epoch,
        /// Whether the log says so, too: inputs were agreed on, or will be in the next epoch.
        agreed: bool,
    },
    /// Primary: I lead in this term as well, and the session goes on. The backup believes its group, not this.
    NewTerm {
        /// The term.
        term: Term,
    },
}

impl SyncMessage {
    /// Its name, for logs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Join { .. } => "Join",
            Self::Holds { .. } => "Holds",
            Self::JoinReady => "JoinReady",
            Self::Refused { .. } => "Refused",
            Self::Pages(_) => "Pages",
            Self::JoinLast { .. } => "JoinLast",
            Self::Dirty { .. } => "Dirty",
            Self::Union { .. } => "Union",
            Self::Hashes { .. } => "Hashes",
            Self::Nodes { .. } => "Nodes",
            Self::Differ { .. } => "Differ",
            Self::Delta { .. } => "Delta",
            Self::DeviceState { .. } => "DeviceState",
            Self::Connections { .. } => "Connections",
            Self::ConnectionsAhead { .. } => "ConnectionsAhead",
            Self::State { .. } => "State",
            Self::Staged { .. } => "Staged",
            Self::Loaded { .. } => "Loaded",
            Self::Idle { .. } => "Idle",
            Self::Audit { .. } => "Audit",
            Self::PreCopy { .. } => "PreCopy",
            Self::Said { .. } => "Said",
            Self::Ends { .. } => "Ends",
            Self::NewTerm { .. } => "NewTerm",
        }
    }
}

/// Appends the message, with its length.
///
/// # Errors
/// If it is longer than `MOST_BYTES`; nothing is appended then.
pub fn encode(message: &SyncMessage, out: &mut BytesMut) -> Result<(), TooLong> {
    let start = out.len();
    out.put_u32(0);
    put(message, out);
    let bytes = out.len() - start - 4;
    if bytes > MOST_BYTES {
        out.truncate(start);
        let name = message.name();
        return Err(TooLong { name, bytes });
    }
    out[start..start + 4].copy_from_slice(&(bytes as u32).to_be_bytes());
    Ok(())
}

fn put(message: &SyncMessage, out: &mut BytesMut) {
    match message {
        SyncMessage::Join {
            term,
            pages,
            active,
            compare,
        } => {
            out.put_u8(1);
            out.put_u64(term.0);
            out.put_u32(*pages);
            // A list is what versions before `TREE_SINCE` read here, too.
            let by_tree = if *compare == Compare::Tree { BY_TREE } else { 0 };
            out.put_u8(u8::from(*active) | by_tree);
        }
        SyncMessage::JoinReady => out.put_u8(2),
        SyncMessage::Refused { why } => {
            out.put_u8(3);
            out.put_slice(why.as_bytes());
        }
        SyncMessage::Pages(deltas) => {
            out.put_u8(4);
            put_deltas(out, deltas);
        }
        SyncMessage::JoinLast { epoch } => put_epoch(out, 5, *epoch),
        SyncMessage::Dirty { epoch, pages, more } => put_pages(out, 6, *epoch, pages, *more),
        SyncMessage::Union { epoch, pages, more } => put_pages(out, 7, *epoch, pages, *more),
        SyncMessage::Hashes { epoch, hashes } => put_hashes(out, 8, *epoch, hashes),
        SyncMessage::Nodes { epoch, hashes } => put_hashes(out, 21, *epoch, hashes),
        SyncMessage::Delta { epoch, deltas } => {
            put_epoch(out, 9, *epoch);
            put_deltas(out, deltas);
        }
        SyncMessage::State {
            epoch,
            next,
            connections,
            device_state,
        } => {
            put_epoch(out, 10, *epoch);
            out.put_u8(*next as u8);
            out.put_u32(connections.len() as u32);
            out.put_slice(connections);
            out.put_slice(device_state);
        }
        SyncMessage::Staged { epoch } => put_epoch(out, 11, *epoch),
        SyncMessage::Loaded { epoch, took_us } => {
            put_epoch(out, 12, *epoch);
            out.put_u64(*took_us);
        }
        SyncMessage::Idle { applied } => {
            out.put_u8(13);
            out.put_u64(applied.0);
        }
        SyncMessage::Audit { epoch, hash } => {
            put_epoch(out, 14, *epoch);
            out.put_u128(*hash);
        }
        SyncMessage::PreCopy { epoch, pages, more } => put_pages(out, 15, *epoch, pages, *more),
        SyncMessage::Said { epoch, frames } => {
            put_epoch(out, 16, *epoch);
            out.reserve(frames.iter().map(|frame| 5 + frame.bytes.len()).sum());
            for frame in frames {
                out.put_u8(frame.nic);
                out.put_u32(frame.bytes.len() as u32);
                out.put_slice(&frame.bytes);
            }
        }
        SyncMessage::Ends { epoch, agreed } => {
            put_epoch(out, 17, *epoch);
            out.put_u8(u8::from(*agreed));
        }
        SyncMessage::NewTerm { term } => {
            out.put_u8(18);
            out.put_u64(term.0);
        }
        SyncMessage::DeviceState { epoch, part } => {
            put_epoch(out, 19, *epoch);
            out.put_slice(part);
        }
        SyncMessage::Connections { epoch, part } => {
            put_epoch(out, 20, *epoch);
            out.put_slice(part);
        }
        SyncMessage::ConnectionsAhead { epoch, part } => {
            put_epoch(out, 24, *epoch);
            out.put_slice(part);
        }
        SyncMessage::Differ { epoch, part } => {
            put_epoch(out, 22, *epoch);
            out.put_slice(part);
        }
        SyncMessage::Holds { pages, hashes } => {
            out.put_u8(23);
            out.put_u32(pages.runs().count() as u32);
            put_runs(out, pages);
            out.reserve(16 * hashes.len());
            hashes.iter().for_each(|hash| out.put_u128(*hash));
        }
    }
}

fn put_epoch(out: &mut BytesMut, tag: u8, epoch: Epoch) {
    out.put_u8(tag);
    out.put_u64(epoch.0);
}

fn put_hashes(out: &mut BytesMut, tag: u8, epoch: Epoch, hashes: &[u128]) {
    put_epoch(out, tag, epoch);
    out.reserve(16 * hashes.len());
    hashes.iter().for_each(|hash| out.put_u128(*hash));
}

fn put_pages(out: &mut BytesMut, tag: u8, epoch: Epoch, pages: &PageSet, more: bool) {
    put_epoch(out, tag, epoch);
    out.put_u8(u8::from(more));
    put_runs(out, pages);
}

fn put_runs(out: &mut BytesMut, pages: &PageSet) {
    for (first, count) in pages.runs() {
        out.put_u32(first);
        out.put_u32(count);
    }
}

fn put_deltas(out: &mut BytesMut, deltas: &[PageDelta]) {
    out.reserve(deltas.iter().map(|delta| 6 + delta.bytes.len()).sum());
    for delta in deltas {
        out.put_u32(delta.at.page);
        out.put_u16(delta.at.blocks);
        out.put_slice(&delta.bytes);
    }
}

/// A message from its bytes, without the length.
pub fn decode(bytes: Bytes) -> Result<SyncMessage, WireError> {
    let mut reader = Reader::new(bytes);
    let message = match reader.u8()? {
        1 => {
            let (term, pages) = (Term(reader.u64()?), reader.u32()?);
            let flags = reader.u8()?;
            if flags & !(1 | BY_TREE) != 0 {
                return Err(WireError::Invalid("flag"));
            }
            SyncMessage::Join {
                term,
                pages,
                active: flags & 1 != 0,
                compare: match flags & BY_TREE {
                    0 => Compare::List,
                    _ => Compare::Tree,
                },
            }
        }
        2 => SyncMessage::JoinReady,
        3 => SyncMessage::Refused {
            why: String::from_utf8(reader.rest().to_vec()).map_err(|_| WireError::Invalid("text"))?,
        },
        4 => SyncMessage::Pages(take_deltas(&mut reader)?),
        5 => SyncMessage::JoinLast {
            epoch: Epoch(reader.u64()?),
        },
        6 => SyncMessage::Dirty {
            epoch: Epoch(reader.u64()?),
            more: take_flag(&mut reader)?,
            pages: take_pages(&mut reader)?,
        },
        7 => SyncMessage::Union {
            epoch: Epoch(reader.u64()?),
            more: take_flag(&mut reader)?,
            pages: take_pages(&mut reader)?,
        },
        8 => SyncMessage::Hashes {
            epoch: Epoch(reader.u64()?),
            hashes: take_hashes(&mut reader)?,
        },
        9 => SyncMessage::Delta {
            epoch: Epoch(reader.u64()?),
            deltas: take_deltas(&mut reader)?,
        },
        10 => {
            let epoch = Epoch(reader.u64()?);
            let next = Mode::ALL
                .get(usize::from(reader.u8()?))
                .copied()
                .ok_or(WireError::Invalid("manner"))?;
            let connection_bytes = reader.u32()? as usize;
            SyncMessage::State {
                epoch,
                next,
                connections: reader.take(connection_bytes)?,
                device_state: reader.rest(),
            }
        }
        11 => SyncMessage::Staged {
            epoch: Epoch(reader.u64()?),
        },
        12 => SyncMessage::Loaded {
            epoch: Epoch(reader.u64()?),
            took_us: reader.u64()?,
        },
        13 => SyncMessage::Idle {
            applied: Index(reader.u64()?),
        },
        14 => SyncMessage::Audit {
            epoch: Epoch(reader.u64()?),
            hash: reader.u128()?,
        },
        15 => SyncMessage::PreCopy {
            epoch: Epoch(reader.u64()?),
            more: take_flag(&mut reader)?,
            pages: take_pages(&mut reader)?,
        },
        16 => {
            let epoch = Epoch(reader.u64()?);
            let mut frames = Vec::new();
            while reader.left() > 0 {
                let nic = reader.u8()?;
                let len = reader.u32()? as usize;
                // A copy: a frame may be kept for long, and would keep the whole message, of which no budget knows.
                let bytes = Bytes::copy_from_slice(&reader.take(len)?);
                frames.push(Frame { nic, bytes });
            }
            SyncMessage::Said { epoch, frames }
        }
        17 => SyncMessage::Ends {
            epoch: Epoch(reader.u64()?),
            agreed: take_flag(&mut reader)?,
        },
        18 => SyncMessage::NewTerm {
            term: Term(reader.u64()?),
        },
        19 => SyncMessage::DeviceState {
            epoch: Epoch(reader.u64()?),
            part: reader.rest(),
        },
        20 => SyncMessage::Connections {
            epoch: Epoch(reader.u64()?),
            part: reader.rest(),
        },
        21 => SyncMessage::Nodes {
            epoch: Epoch(reader.u64()?),
            hashes: take_hashes(&mut reader)?,
        },
        22 => SyncMessage::Differ {
            epoch: Epoch(reader.u64()?),
            part: reader.rest(),
        },
        23 => {
            let runs = reader.u32()? as usize;
            let mut named = Reader::new(reader.take(runs.saturating_mul(RUN_BYTES))?);
            let (pages, hashes) = (take_pages(&mut named)?, take_hashes(&mut reader)?);
            if hashes.len() != pages.len() {
                return Err(WireError::Invalid("number of hashes"));
            }
            SyncMessage::Holds { pages, hashes }
        }
        24 => SyncMessage::ConnectionsAhead {
            epoch: Epoch(reader.u64()?),
            part: reader.rest(),
        },
        _ => return Err(WireError::Invalid("message tag")),
    };
    reader.end()?;
    Ok(message)
}

fn take_flag(reader: &mut Reader) -> Result<bool, WireError> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(WireError::Invalid("flag")),
    }
}

fn take_hashes(reader: &mut Reader) -> Result<Vec<u128>, WireError> {
    let mut hashes = Vec::with_capacity(reader.left() / 16);
    while reader.left() > 0 {
        hashes.push(reader.u128()?);
    }
    Ok(hashes)
}

fn take_pages(reader: &mut Reader) -> Result<PageSet, WireError> {
    let mut runs = Vec::with_capacity(reader.left() / RUN_BYTES);
    while reader.left() > 0 {
        let (first, count) = (reader.u32()?, reader.u32()?);
        if first.checked_add(count).is_none() {
            return Err(WireError::Invalid("page range"));
        }
        runs.push((first, count));
    }
    Ok(PageSet::from_runs(runs))
}

fn take_deltas(reader: &mut Reader) -> Result<Vec<PageDelta>, WireError> {
    let mut deltas = Vec::new();
    while reader.left() > 0 {
        let at = DivergentPage {
            page: reader.u32()?,
            blocks: reader.u16()?,
        };
        let bytes = reader.take(at.blocks.count_ones() as usize * BLOCK_BYTES)?;
        deltas.push(PageDelta { at, bytes });
    }
    Ok(deltas)
}

#[cfg(test)]
mod tests;
