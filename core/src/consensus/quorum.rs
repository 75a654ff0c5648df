//! What it decides: what a majority has agreed on.
//!
//! Flow: acknowledgement (or own disk) -> `advance_commit` -> `Committed`, told to the followers with `Lead`: at once, or
//! where they can count themselves (F5 in `follow`) with the next beat.
//!
//! Invariants:
//! - Q1 an entry is counted only if it is of the leader's own term; earlier ones are agreed with it (Raft 5.4.2);
//! - Q2 and Q3, what a majority is and how it is counted, are `tally`'s.
//!
//! Source: FALCON 3.1: "The last step is leader collecting the ACKs from the replicas, once it reaches Quorum, it means
//! the consensus is completed"; mended per fabric.md: acknowledgements carry the term and are cumulative.
//!
//! Not here: who may be counted in an election (`election`).

use super::leading::Peer;
use super::tally::counted;
use super::{Action, Bug, Consensus, Message, Role};
use crate::units::Index;

impl Consensus {
    /// The newest mark that a majority of the members has reached, the leader's own being `mine`: all are looked at.
    pub(super) fn majority_mark(&self, mine: u64, theirs: impl Fn(&Peer) -> u64) -> u64 {
        counted(mine, self.leading.peers.iter().map(theirs))
    }

    /// Leader: agrees on what a majority holds (Q1).
    pub(super) fn advance_commit(&mut self, out: &mut Vec<Action>) {
        if self.role != Role::Leader {
            return;
        }
        let (mine, leading) = (self.durable().0, &mut self.leading);
        let matched = leading.peers.iter().map(|peer| peer.matched.0);
        let held = Index(leading.held.reached(mine, matched));
        if held <= self.order.committed() {
            return;
        }
        let own_term = self
            .log
            .stamp(held)
            .is_some_and(|stamp| stamp.term == self.hard_state.term);
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
            term: self.hard_state.term,
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
