//! Identities and counters. A bare number elsewhere ends in its unit; these are the ones that must not be mixed up.

/// A member of one group, of at most `consensus::MAX_MEMBERS`. In a VM's group: by its position in the VM's member list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ReplicaId(pub u8);

/// A leader's reign. Term 0 is "before any election".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Term(pub u64);

/// A position in the agreed log, counted from 1; 0 is "nothing".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Index(pub u64);

/// The stretch of a VM's life between two syncs. Epoch k ends with `Sync(k)`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Epoch(pub u64);

/// APUS's name for a log position that says also who wrote it: ordered by term first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Viewstamp {
    /// The leader's term.
    pub term: Term,
    /// The position in the log.
    pub index: Index,
}

impl Index {
    /// The position after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Epoch {
    /// The epoch after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
