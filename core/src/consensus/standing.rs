//! What a replica keeps while it follows, stands for election or recovers. What it keeps as a leader is in `leading`.
//!
//! Flow: each is replaced as a whole when its part begins anew: with a term, a campaign, a lost log.
//!
//! Not here: what is done with it (`follow`, `election`, `recover`, `alone`).

use crate::units::Index;

/// What a follower knows of the leader of its term.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Following {
    /// F2.
    pub(super) matched: Index,
    /// What the leader says is agreed.
    pub(super) commit: Index,
    /// The newest beat of this term.
    pub(super) beat: u64,
    /// The last acknowledged index of this term.
    pub(super) acked: Index,
}

impl Following {
    /// A new term: only what is agreed is known to match.
    pub(super) fn new(committed: Index) -> Self {
        Self {
            matched: committed,
            commit: committed,
            beat: 0,
            acked: Index(0),
        }
    }

    /// Whether a later beat than this one was heard.
    pub(super) fn has_heard_after(&self, beat: u64) -> bool {
        self.beat > beat
    }
}

/// Every member has a bit.
const _: () = assert!(super::MAX_MEMBERS <= u128::BITS as usize);

/// Votes for this candidate, by position in the members in force.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Votes {
    pub(super) given: u128,
    /// The own vote waits for the disk.
    pub(super) mine_pending: bool,
    /// By a person's order: nobody else is asked.
    pub(super) alone: bool,
    /// By the leader's own word (X3 in `lease`).
    pub(super) handed_over: bool,
    pub(super) pulled: bool,
    /// They are waited for so much longer than the first ones, after votes that did not come in time.
    pub(super) longer_us: u64,
}

/// A recovery under way.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Recovery {
    pub(super) nonce: u64,
    /// What the leader of the current term held after the restart.
    pub(super) target: Option<Index>,
}
