//! What it decides: what a majority is, and what it has agreed on.
//!
//! Flow: acknowledgement (or own disk) -> `advance_commit` -> `Committed`, told to the followers with `Lead`: at once, or
//! where they can count themselves (F5 in `follow`) with the next beat.
//!
//! Invariants:
//! - Q1 an entry is counted only if it is of the leader's own term; earlier ones are agreed with it (Raft 5.4.2);
//! - Q2 majorities are of the members in force, which change by one, so any two consecutive ones overlap.
//!
//! Source: FALCON 3.1: "The last step is leader collecting the ACKs from the replicas, once it reaches Quorum, it means
//! the consensus is completed"; mended per fabric.md: acknowledgements carry the term and are cumulative.
//!
//! Not here: who may be counted in an election (`election`).

use super::{Action, Bug, Consensus, MAX_MEMBERS, Message, Role};
use crate::units::Index;

/// How many of `members` are a majority.
#[must_use]
pub(super) fn majority(members: usize) -> usize {
    members / 2 + 1
}

/// The largest mark that a majority has reached; `marks` in any order, not empty.
#[must_use]
pub(super) fn reached_by_majority(marks: &mut [u64]) -> u64 {
    marks.sort_unstable_by(|a, b| b.cmp(a));
    marks[majority(marks.len()) - 1]
}

impl Consensus {
    /// The newest mark that a majority of the members has reached, the leader's own being `mine`.
    pub(super) fn majority_mark(&self, mine: u64, theirs: impl Fn(&super::propose::Peer) -> u64) -> u64 {
        let mut marks = [0u64; MAX_MEMBERS];
        let members = self.log.members();
        for (mark, member) in marks.iter_mut().zip(members) {
            *mark = if member.id == self.cfg.me {
                mine
            } else {
                self.leading.peer(member.id).map_or(0, &theirs)
            };
        }
        reached_by_majority(&mut marks[..members.len().clamp(1, MAX_MEMBERS)])
    }

    /// Leader: agrees on what a majority holds (Q1).
    pub(super) fn advance_commit(&mut self, out: &mut Vec<Action>) {
        if self.role != Role::Leader {
            return;
        }
        let held = Index(self.majority_mark(self.durable().0, |peer| peer.matched.0));
        if held <= self.order.committed() {
            return;
        }
        let own_term = self
            .log
            .stamp(held)
            .is_some_and(|stamp| stamp.term == self.promise.term);
        if !own_term && !self.bugged(Bug::CommitsOldTerm) {
            return;
        }
        self.order.commit(held, self.log.last().index);
        out.push(Action::Committed { through: held });
        if !self.followers_count() {
            self.say_lead(out);
        }
        self.answer_reads(out);
    }

    /// Leader to all: the cumulative word.
    pub(super) fn say_lead(&self, out: &mut Vec<Action>) {
        let message = |commit, beat| Message::Lead {
            term: self.promise.term,
            commit,
            beat,
        };
        for peer in &self.leading.peers {
            out.push(Action::Send {
                to: peer.id,
                message: message(self.order.committed(), self.leading.beat),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn majorities_of_one_to_seven() {
        assert_eq!((1..=7).map(majority).collect::<Vec<_>>(), [1, 2, 2, 3, 3, 4, 4]);
        assert_eq!(reached_by_majority(&mut [5]), 5);
        assert_eq!(reached_by_majority(&mut [5, 9]), 5);
        assert_eq!(reached_by_majority(&mut [1, 9, 5]), 5);
        assert_eq!(reached_by_majority(&mut [1, 9, 5, 7]), 5);
        assert_eq!(reached_by_majority(&mut [7, 6, 5, 4, 3, 2, 1]), 4);
    }
}
