//! What it decides: whether a primary and its backup go on with each other when their group's term has changed, and which
//! primary a backup may acknowledge to.
//!
//! Flow: the leader is elected again -> [`Standing::survives`]; its word of the new term, and the group's -> [`Tenure::told`],
//! [`Tenure::leave`] -> the acknowledgement of a sync, or its end.
//!
//! Invariants:
//! 1. A backup acknowledges a sync only to the leader of the newest term that it has promised. So whoever leads in a later
//!    term than an acknowledgement knew was elected by this backup's vote, or is this backup: both know of the sync.
//! 2. Which term the primary leads in is the group's word and not the primary's. The primary says only that it has kept
//!    the session: one that had been dropped, and with it what was prepared for the sync, must not be acknowledged to.
//! 3. A session with a sync whose entry the log has lost, or whose join has drawn its line, does not survive.
//!
//! Not here: elections; what ends with a session.

use crate::units::{ReplicaId, Term};
use crate::waits::Wait;

/// A backup's view of its session.
#[derive(Clone, Debug)]
pub struct Tenure {
    primary: ReplicaId,
    /// The primary leads in this term: the group has said so, and the primary has kept the session.
    term: Term,
    /// The newest term in which the primary says that it has kept the session.
    told: Term,
    /// Since when a sync waits for such a word.
    waits_since_us: Option<u64>,
}

/// What a backup may say of a sync that lies here whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leave {
    /// It may be acknowledged.
    Given,
    /// Not yet: who leads, or whether the session goes on, is not known. To be asked again.
    Waits,
    /// Never: somebody else leads, or the word did not come.
    Refused,
}

impl Tenure {
    /// The session begins under this leader.
    #[must_use]
    pub fn new(primary: ReplicaId, term: Term) -> Self {
        Self {
            primary,
            term,
            told: term,
            waits_since_us: None,
        }
    }

    /// The term that the session is of.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// The primary has kept the session in that term.
    pub fn told(&mut self, term: Term) {
        self.told = self.told.max(term);
    }

    /// Whether the sync may be acknowledged, where the group's newest promised term and its leader are these.
    pub fn leave(&mut self, now_us: u64, promised: Term, leader: Option<ReplicaId>) -> Leave {
        if promised == self.term {
            self.waits_since_us = None;
            return Leave::Given;
        }
        let other = leader.is_some_and(|leader| leader != self.primary);
        if promised < self.term || other {
            return Leave::Refused;
        }
        if leader == Some(self.primary) && self.told == promised {
            self.term = promised;
            self.waits_since_us = None;
            return Leave::Given;
        }
        let since_us = *self.waits_since_us.get_or_insert(now_us);
        if now_us.saturating_sub(since_us) >= Wait::TermTold.bound_us() {
            Leave::Refused
        } else {
            Leave::Waits
        }
    }
}

/// A primary's view of its session, at the beginning of a term in which it leads again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Standing {
    /// The backup holds a complete copy, and the log says so.
    pub complete: bool,
    /// Memory is being copied to it, and no sync with it has begun.
    pub copying: bool,
    /// A sync was proposed, and all that the log holds of earlier terms is applied without it.
    pub sync_lost: bool,
    /// The VM stands here, for the backup to take it over.
    pub handed: bool,
}

impl Standing {
    /// Whether the session goes on.
    #[must_use]
    pub fn survives(self) -> bool {
        (self.complete || self.copying) && !self.sync_lost && !self.handed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ReplicaId = ReplicaId(0);
    const B: ReplicaId = ReplicaId(1);
    const NEXT: Term = Term(8);

    fn tenure() -> Tenure {
        Tenure::new(A, Term(7))
    }

    #[test]
    fn the_leader_of_the_promised_term_is_acknowledged_to() {
        assert_eq!(tenure().leave(0, Term(7), Some(A)), Leave::Given);
    }

    #[test]
    fn invariant_1_whoever_promised_a_later_term_to_another_does_not_acknowledge() {
        let mut session = tenure();
        session.told(NEXT);
        assert_eq!(session.leave(0, NEXT, Some(B)), Leave::Refused);
        // Promised, and nobody has won yet: it may be this host.
        assert_eq!(session.leave(0, NEXT, None), Leave::Waits);
        assert_eq!(session.term(), Term(7));
    }

    #[test]
    fn the_same_leader_in_a_new_term_is_acknowledged_to_when_it_has_kept_the_session() {
        let mut session = tenure();
        assert_eq!(session.leave(0, NEXT, Some(A)), Leave::Waits);
        session.told(NEXT);
        assert_eq!(session.leave(1, NEXT, Some(A)), Leave::Given);
        assert_eq!(session.leave(2, NEXT, Some(A)), Leave::Given);
        assert_eq!(session.term(), NEXT);
    }

    #[test]
    fn invariant_2_the_primarys_word_alone_gives_nothing() {
        let mut session = tenure();
        session.told(NEXT);
        assert_eq!(session.leave(0, NEXT, None), Leave::Waits);
        // Of another term than the one that the group has come to.
        assert_eq!(session.leave(0, Term(9), Some(A)), Leave::Waits);
        assert_eq!(session.leave(0, Term(6), Some(A)), Leave::Refused);
    }

    #[test]
    fn a_word_that_does_not_come_is_not_waited_for_for_ever() {
        let mut session = tenure();
        assert_eq!(session.leave(5, NEXT, None), Leave::Waits);
        let late_us = 5 + Wait::TermTold.bound_us();
        assert_eq!(session.leave(late_us, NEXT, None), Leave::Refused);
    }

    #[test]
    fn invariant_3_only_whole_sessions_survive_a_term() {
        let synced = Standing {
            complete: true,
            copying: false,
            sync_lost: false,
            handed: false,
        };
        assert!(synced.survives());
        assert!(
            !Standing {
                sync_lost: true,
                ..synced
            }
            .survives()
        );
        assert!(
            !Standing {
                handed: true,
                ..synced
            }
            .survives()
        );
        let joining = Standing {
            complete: false,
            copying: true,
            ..synced
        };
        assert!(joining.survives());
        assert!(
            !Standing {
                copying: false,
                ..joining
            }
            .survives()
        );
    }
}
