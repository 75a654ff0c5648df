//! What it decides: until when a leader may let the world hear its VM without asking anyone.
//!
//! Flow: a follower that hears a new beat refuses every vote for a while (`is_bound`), and echoes it. The leader knows when it
//! sent what a majority has echoed (`speaks_until_us`). What leaves a host is checked against that as the last thing.
//!
//! Invariants:
//! - X1 no leader of a newer term is elected before every older one's lease is over, whatever is delayed: a majority has
//!   promised the older one its silence, counted from when it heard a beat; the lease counts from when that beat was sent, and is
//!   a quarter shorter, for clocks that do not run alike;
//! - X2 the promise outlives terms, roles and (by a pause after the start) restarts. It ends early only when the leader's own
//!   system says that its end of the link is closed: then that process is gone, or has itself let go of the link, and with it of
//!   what came through it;
//! - X3 a leadership transfer ends the lease before the heir is told. It comes back only by an echo that the heir sent after it had let
//!   the word to stand for election pass, or when it is agreed that the heir is no member: every later leader's log says so, and whoever
//!   holds that stands for nothing. A leader whose heir says nothing gives its term up: in the next one that word counts no more.
//!
//! Source: Gray and Cheriton 1989 (leases); Ongaro 6.4.1, and 4.2.3 (who hears a leader disregards candidates).
//!
//! Not here: a primary whose group has agreed that it alone is complete: nobody else can be elected, and it needs no lease.
//! Nor a person's order to stand alone (`alone`): that person answers for it.

use super::leading::Peer;
use super::{Bug, Consensus, HardState, Role};
use crate::units::ReplicaId;

/// What a follower that heard a leader owes it: silence towards all others since then.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Bound {
    /// Nobody: it was started again and does not know to whom.
    to: Option<ReplicaId>,
    since_us: u64,
}

impl Consensus {
    /// Until when this leader may speak, by its own clock; none if it does not lead, or has to ask a majority first.
    #[must_use]
    pub fn speaks_until_us(&self) -> Option<u64> {
        if self.role != Role::Leader {
            return None;
        }
        if self.bugged(Bug::SpeaksUntilDeposed) {
            return Some(u64::MAX);
        }
        if !self.heirs_have_passed() && !self.bugged(Bug::SpeaksWhileTransferring) {
            return None;
        }
        let sent_us = self.majority_mark(u64::MAX / 2, Peer::echoed_us);
        (sent_us > 0).then(|| sent_us.saturating_add(self.lease_us()))
    }

    /// X3: whether nobody who was told to stand for election in this term can be elected by that word any more.
    fn heirs_have_passed(&self) -> bool {
        let settled = self.log.members_index() <= self.order.committed();
        let passed = |(heir, told): &(ReplicaId, u64)| match self.leading.peer(*heir) {
            Some(peer) => peer.beat > *told,
            None => settled,
        };
        self.leading.heirs.iter().all(passed)
    }

    /// X3: whether an heir has said nothing for so long after its transfer was given up that only a newer term helps. It says more with
    /// its next echo if it lives, so that is waited for.
    pub(super) fn heir_stays_silent(&mut self) -> bool {
        if self.leading.transfer.is_some() || self.heirs_have_passed() {
            self.leading.heir_silent_since_us = None;
            return false;
        }
        let awake_us = self.awake_us();
        let since_us = *self.leading.heir_silent_since_us.get_or_insert(awake_us);
        awake_us >= since_us.saturating_add(self.cfg.election_max_us)
    }

    /// X1: shorter than the shortest time in which anybody else is voted for.
    fn lease_us(&self) -> u64 {
        self.cfg.election_min_us / 4 * 3
    }

    /// A new beat of this leader was heard, and will be echoed.
    pub(super) fn bind(&mut self, to: ReplicaId) {
        self.bound = Some(Bound {
            to: Some(to),
            since_us: self.now_us,
        });
    }

    /// X2: it may have echoed something just before.
    pub(super) fn bind_after_start(&mut self) {
        if self.hard_state_kept != HardState::default() && !self.bugged(Bug::ForgetsItsSilence) {
            self.bound = Some(Bound {
                to: None,
                since_us: self.now_us,
            });
        }
    }

    /// X2: that leader is gone, or has let go.
    pub(super) fn unbind(&mut self, from: ReplicaId) {
        if self.bound.is_some_and(|bound| bound.to == Some(from)) {
            self.bound = None;
        }
    }

    /// Whether somebody other than `candidate` may be speaking who counts on this replica's silence.
    pub(super) fn is_bound(&self, candidate: ReplicaId) -> bool {
        let other = |bound: &Bound| {
            bound.to != Some(candidate)
                && self.now_us < bound.since_us.saturating_add(self.cfg.election_min_us)
        };
        self.bound.as_ref().is_some_and(other) && !self.bugged(Bug::VotesWhenBound)
    }
}
