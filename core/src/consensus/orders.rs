//! What it decides: which order of a person's a term belongs to.
//!
//! Flow: `alone` draws the first term of the next order. Whoever hears of a term (`follow`), or finds one on its disk (`Consensus::new`),
//! sees in it whether an order was given meanwhile, and to whom.
//!
//! Invariants: S1 and S2 of `alone`.
//!
//! Not here: what an order does (`alone`).

use super::HardState;
use crate::units::{ReplicaId, Term};

/// Where the order stands in a term.
const ORDER_SHIFT: u32 = 32;
/// As many as a member's id can name: an order carries the member it went to.
const MEMBERS: u64 = 1 << u8::BITS;

/// The order that a term belongs to; 0 until the first one.
pub(super) fn order_of(term: Term) -> u64 {
    term.0 >> ORDER_SHIFT
}

/// The first term of the next order, given to `me` (S1).
pub(super) fn next_order(term: Term, me: ReplicaId) -> Term {
    Term(((order_of(term) / MEMBERS + 1) * MEMBERS + u64::from(me.0)) << ORDER_SHIFT)
}

/// S2, after a crash: an order was written for another that the log knows nothing of.
pub(super) fn is_overruled(hard_state: HardState, last: Term, me: ReplicaId) -> bool {
    order_of(hard_state.term) > order_of(last) && hard_state.voted_for != Some(me)
}
