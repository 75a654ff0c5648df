//! What it decides: when a sync has arrived whole, so that it may be acknowledged and applied.
//!
//! Flow: between the transfer and the backup's VM.
//!
//! Invariants:
//! 1. Nothing of a sync touches the backup's VM before all of it has arrived (all or nothing).
//! 2. Staging is bounded: a sync that would not fit is refused, and the backup's VM is as it was.
//! 3. A staged block names a page inside the guest's memory.
//! 4. Of each page the newest delta counts, and none where a later round found the page to be the same.
//!
//! Source: PLOVER and Remus both buffer a checkpoint before they apply it. Not here: applying it (node's backup).

use super::compare::{BLOCK_BYTES, DivergentPage};
use super::dirty::PageSet;
use crate::units::Epoch;
use bytes::Bytes;
use std::collections::BTreeMap;

/// The new content of one page's divergent blocks, in block order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageDelta {
    /// Which page and blocks.
    pub at: DivergentPage,
    /// The blocks' bytes, one after the other.
    pub bytes: Bytes,
}

/// Why something was not staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StagingError {
    /// It belongs to another sync than the one under way.
    #[error("a piece of sync {got} arrived during sync {expected}")]
    OtherEpoch {
        /// The sync under way.
        expected: u64,
        /// The one that the piece belongs to.
        got: u64,
    },
    /// The pieces would need more memory than allowed.
    #[error("the sync needs more than the {limit_bytes} bytes of staging memory: raise sync.staging_mib")]
    TooLarge {
        /// The limit.
        limit_bytes: usize,
    },
    /// A page outside the guest's memory, or bytes that do not fit their blocks.
    #[error("the sync names page {page}, which does not fit the guest's memory or its own bytes")]
    Malformed {
        /// The page.
        page: u32,
    },
}

/// A sync on its way into the backup.
#[derive(Debug)]
pub struct Staging {
    epoch: Epoch,
    guest_pages: u32,
    limit_bytes: usize,
    bytes: usize,
    deltas: BTreeMap<u32, PageDelta>,
    device_state: Vec<Bytes>,
    connections: Vec<Bytes>,
}

/// A sync that has arrived whole.
#[derive(Debug)]
pub struct Staged {
    /// The epoch that it ends.
    pub epoch: Epoch,
    /// What to write into the guest's memory.
    pub deltas: Vec<PageDelta>,
    /// The devices' and processors' state.
    pub device_state: Bytes,
    /// What the connections need.
    pub connections: Bytes,
}

impl Staging {
    /// An empty staging area for the sync that ends `epoch`.
    #[must_use]
    pub fn new(epoch: Epoch, guest_pages: u32, limit_bytes: usize) -> Self {
        Self {
            epoch,
            guest_pages,
            limit_bytes,
            bytes: 0,
            deltas: BTreeMap::new(),
            device_state: Vec::new(),
            connections: Vec::new(),
        }
    }

    /// A round looks at these pages anew: what is staged of them is out of date.
    pub fn look_again(&mut self, pages: &PageSet) {
        for (first, count) in pages.runs() {
            let stale: Vec<u32> = self
                .deltas
                .range(first..first + count)
                .map(|(page, _)| *page)
                .collect();
            for delta in stale.iter().filter_map(|page| self.deltas.remove(page)) {
                self.bytes -= delta.bytes.len();
            }
        }
    }

    /// Keeps what arrived.
    pub fn add(&mut self, epoch: Epoch, deltas: Vec<PageDelta>) -> Result<(), StagingError> {
        self.check_epoch(epoch)?;
        for delta in deltas {
            let expected = delta.at.blocks.count_ones() as usize * BLOCK_BYTES;
            if delta.at.page >= self.guest_pages || delta.bytes.len() != expected {
                return Err(StagingError::Malformed { page: delta.at.page });
            }
            self.bytes += expected;
            if let Some(stale) = self.deltas.insert(delta.at.page, delta) {
                self.bytes -= stale.bytes.len();
            }
            self.check_size()?;
        }
        Ok(())
    }

    /// Keeps a part of the device state.
    pub fn add_device_state(&mut self, epoch: Epoch, part: Bytes) -> Result<(), StagingError> {
        self.check_epoch(epoch)?;
        // An empty part would cost memory that nothing counts.
        self.bytes += part.len().max(1);
        self.device_state.push(part);
        self.check_size()
    }

    /// Keeps a part of what the connections need.
    pub fn add_connections(&mut self, epoch: Epoch, part: Bytes) -> Result<(), StagingError> {
        self.check_epoch(epoch)?;
        self.bytes += part.len().max(1);
        self.connections.push(part);
        self.check_size()
    }

    /// The last piece, the rest of the connections' part and of the device state: the sync is whole.
    pub fn complete(
        self,
        epoch: Epoch,
        connections: Bytes,
        device_state: Bytes,
    ) -> Result<Staged, StagingError> {
        self.check_epoch(epoch)?;
        let whole = |mut first: Vec<Bytes>, rest: Bytes| match first.is_empty() {
            true => rest,
            false => {
                first.push(rest);
                first.concat().into()
            }
        };
        Ok(Staged {
            epoch,
            deltas: self.deltas.into_values().collect(),
            device_state: whole(self.device_state, device_state),
            connections: whole(self.connections, connections),
        })
    }

    fn check_size(&self) -> Result<(), StagingError> {
        if self.bytes <= self.limit_bytes {
            return Ok(());
        }
        Err(StagingError::TooLarge {
            limit_bytes: self.limit_bytes,
        })
    }

    fn check_epoch(&self, epoch: Epoch) -> Result<(), StagingError> {
        if epoch == self.epoch {
            Ok(())
        } else {
            Err(StagingError::OtherEpoch {
                expected: self.epoch.0,
                got: epoch.0,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(page: u32, blocks: u16, bytes: usize) -> PageDelta {
        PageDelta {
            at: DivergentPage { page, blocks },
            bytes: vec![1; bytes].into(),
        }
    }

    #[test]
    fn a_sync_is_whole_only_with_its_own_pieces() {
        let mut staging = Staging::new(Epoch(4), 10, 10_000);
        staging
            .add(Epoch(4), vec![delta(9, 0b101, 2 * BLOCK_BYTES)])
            .unwrap();
        assert_eq!(
            staging.add(Epoch(3), vec![]),
            Err(StagingError::OtherEpoch { expected: 4, got: 3 })
        );
        for part in ["one ", "two "] {
            staging.add_device_state(Epoch(4), part.into()).unwrap();
        }
        staging.add_connections(Epoch(4), "some ".into()).unwrap();
        let staged = staging
            .complete(Epoch(4), "flows".into(), "three".into())
            .unwrap();
        assert_eq!(
            (staged.deltas.len(), staged.device_state, staged.connections),
            (1, "one two three".into(), "some flows".into())
        );
    }

    #[test]
    fn a_later_round_replaces_what_an_earlier_one_staged() {
        let mut staging = Staging::new(Epoch(1), 10, 3 * BLOCK_BYTES);
        let first = vec![delta(1, 0b11, 2 * BLOCK_BYTES), delta(2, 1, BLOCK_BYTES)];
        staging.add(Epoch(1), first).unwrap();
        // Page 1 is looked at again and found to be the same; page 2 differs elsewhere now. Their memory is free again.
        staging.look_again(&PageSet::from_runs([(0, 2)]));
        staging
            .add(
                Epoch(1),
                vec![delta(2, 0b10, BLOCK_BYTES), delta(3, 0b11, 2 * BLOCK_BYTES)],
            )
            .unwrap();
        let staged = staging.complete(Epoch(1), Bytes::new(), Bytes::new()).unwrap();
        let kept: Vec<_> = staged
            .deltas
            .iter()
            .map(|delta| (delta.at.page, delta.at.blocks))
            .collect();
        assert_eq!(kept, [(2, 0b10), (3, 0b11)]);
    }

    #[test]
    fn what_lies_outside_the_guest_or_does_not_fit_is_refused() {
        let mut staging = Staging::new(Epoch(1), 10, BLOCK_BYTES);
        assert!(matches!(
            staging.add(Epoch(1), vec![delta(10, 1, BLOCK_BYTES)]),
            Err(StagingError::Malformed { .. })
        ));
        assert!(matches!(
            staging.add(Epoch(1), vec![delta(1, 1, 5)]),
            Err(StagingError::Malformed { .. })
        ));
        staging.add(Epoch(1), vec![delta(1, 1, BLOCK_BYTES)]).unwrap();
        assert!(matches!(
            staging.add(Epoch(1), vec![delta(2, 1, BLOCK_BYTES)]),
            Err(StagingError::TooLarge { .. })
        ));
        let mut staging = Staging::new(Epoch(1), 10, 3);
        staging.add_device_state(Epoch(1), "abc".into()).unwrap();
        assert!(matches!(
            staging.add_device_state(Epoch(1), Bytes::new()),
            Err(StagingError::TooLarge { .. })
        ));
    }
}
