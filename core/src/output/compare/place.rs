//! Where two outputs are not the same: on which flow, how far into it, and what each has said from there on.
//!
//! Invariant 1: (memory) of what was said [`SHOWN_BYTES`] of each side are kept, and of the first difference alone.

use super::types::Difference;
use crate::output::packet::FlowKey;
use bytes::Bytes;

/// So many bytes of each side are shown.
pub const SHOWN_BYTES: usize = 16;

/// The first difference of a comparison.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// On which flow.
    pub flow: FlowKey,
    /// Of which kind.
    pub why: Difference,
    /// So many bytes of the flow's output are alike before it; of datagrams those of this one.
    pub at_byte: u64,
    /// Counted from the flow's beginning; else from the first that was compared of it.
    pub from_beginning: bool,
    /// What the primary says there, [`SHOWN_BYTES`] at most.
    pub primary: Bytes,
    /// What the backup has said there, [`SHOWN_BYTES`] at most.
    pub backup: Bytes,
}

/// The same, without what the flow itself does not know.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub at_byte: u64,
    pub from_beginning: bool,
    pub primary: Bytes,
    pub backup: Bytes,
}

impl Found {
    pub(super) fn on(self, flow: FlowKey, why: Difference) -> Place {
        Place {
            flow,
            why,
            at_byte: self.at_byte,
            from_beginning: self.from_beginning,
            primary: self.primary,
            backup: self.backup,
        }
    }
}

/// How many bytes both begin with.
pub(super) fn alike(ours: &[u8], theirs: &[u8]) -> usize {
    ours.iter()
        .zip(theirs)
        .take_while(|(ours, theirs)| ours == theirs)
        .count()
}

/// From `from` on, as much as is shown. (A copy: the frame that it is of need not be kept for it.)
pub(super) fn shown(bytes: &[u8], from: usize) -> Bytes {
    let rest = bytes.get(from..).unwrap_or_default();
    Bytes::copy_from_slice(&rest[..rest.len().min(SHOWN_BYTES)])
}
