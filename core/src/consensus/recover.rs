//! What it decides: when a replica that lost its memory may take part again; what a voter gives to a candidate that is
//! behind it.
//!
//! Flow: restart without a log -> `Recover{nonce}` to everyone -> the leader sends its log and `Recovery{nonce, last}` ->
//! everything up to `last` is held -> follower.
//! Refused for a shorter log -> `Pull` -> `Pulled` -> campaign again.
//!
//! Invariants:
//! - R1 (C7) before it holds what the leader held *after* the restart, a recovering replica neither votes nor acknowledges.
//!   Then it holds every entry that it acknowledged in its earlier life and that was or can still be agreed: the leader's
//!   term is at least its own (which is on disk), so the leader's log has them, and `last` was read after the crash;
//! - R2 a log is replaced by pulled entries only if the other log is not older than its own (last term, then index): such
//!   a log contains every entry that was or can still be agreed on and is in this one, so nothing of value is cut. A
//!   snapshot is agreed and may always be taken: what differs from it can never be agreed, even at a greater length;
//! - R3 an answer to a pull is asked on from once: only one that reaches further than any before asks again, so that a
//!   network that doubles messages does not make them breed.
//!
//! Source: Viewstamped Replication Revisited 4.3 (recovery with a nonce) and 4.2 (a new view takes the most recent log of a
//! majority); Raft 5.4.1 (what "more up to date" means).
//!
//! Not here: replay from disk (`Consensus::new`).

use super::standing::Votes;
use super::{Action, Consensus, Entry, Message, Role, Snapshot};
use crate::units::{Index, ReplicaId, Term, Viewstamp};

/// A pull under way (R3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Pulling {
    /// Whose log.
    whom: Option<ReplicaId>,
    /// How far it is known to be held here.
    through: Viewstamp,
    /// It got on since it was begun, or taken up again.
    moved: bool,
}

impl Pulling {
    /// An answer ends here: is that news?
    fn advance(&mut self, from: ReplicaId, end: Viewstamp) -> bool {
        let news = self.whom == Some(from) && end > self.through;
        if news {
            (self.through, self.moved) = (end, true);
        }
        news
    }
}

impl Consensus {
    /// Asks everyone for the leader.
    pub(super) fn on_recovery_timeout(&mut self, out: &mut Vec<Action>) {
        let message = Message::Recover {
            term: self.hard_state.term,
            nonce: self.recovery.nonce,
            held: Index(0),
        };
        for member in self.log.members() {
            if member.id != self.cfg.me {
                out.push(Action::Send {
                    to: member.id,
                    message: message.clone(),
                });
            }
        }
        self.leader = None;
        self.rest(self.cfg.election_min_us);
    }

    /// Tells the leader how far it is, or ends the recovery.
    pub(super) fn say_recover(&mut self, out: &mut Vec<Action>) {
        let Some(to) = self.leader else { return };
        let held = self.acknowledged();
        self.owed_ack = false;
        if self.hard_state_kept.term == self.hard_state.term
            && self.recovery.target.is_some_and(|target| held >= target)
        {
            self.role = Role::Follower { leader: None };
            self.overruled = false;
            out.push(Action::BecameFollower {
                term: self.hard_state.term,
                leader: self.leader,
            });
            self.owed_ack = true;
            return self.pay_ack(out);
        }
        let message = Message::Recover {
            term: self.hard_state.term,
            nonce: self.recovery.nonce,
            held,
        };
        out.push(Action::Send { to, message });
    }

    pub(super) fn on_recovery(
        &mut self,
        from: ReplicaId,
        term: Term,
        nonce: u64,
        last: Index,
        out: &mut Vec<Action>,
    ) {
        if self.role != Role::Recovering || nonce != self.recovery.nonce || !self.hear_leader(from, term, out)
        {
            return;
        }
        if self.recovery.target.is_none() {
            self.recovery.target = Some(last);
            self.say_recover(out);
        }
    }

    /// A would-be candidate asks for what it lacks.
    pub(super) fn on_pull(
        &mut self,
        from: ReplicaId,
        at: Viewstamp,
        committed: Index,
        out: &mut Vec<Action>,
    ) {
        if self.role == Role::Recovering {
            return;
        }
        let common = if self.log.stamp(at.index) == Some(at) {
            at.index
        } else {
            committed
        };
        let term = self.hard_state.term;
        let message = match self.log.stamp(common) {
            Some(prev) => {
                let from = common.next();
                let through = self
                    .log
                    .batch_end(from, self.cfg.batch_entries, self.cfg.batch_bytes);
                Message::Pulled {
                    term,
                    prev,
                    entries: self.log.copy(from, through),
                    last: self.log.last(),
                }
            }
            None if common < self.log.base().index => Message::Snapshot {
                term,
                snapshot: self.log.snapshot(),
                leads: false,
            },
            None => return,
        };
        out.push(Action::Send { to: from, message });
    }

    /// Only a would-be candidate takes what nobody leads with.
    pub(super) fn takes_pulled(&mut self, term: Term, out: &mut Vec<Action>) -> bool {
        if term > self.hard_state.term {
            self.obey_term(term, out);
            self.retry_soon();
            return false;
        }
        self.role == (Role::Candidate { pre: true })
    }

    pub(super) fn on_pulled(
        &mut self,
        from: ReplicaId,
        term: Term,
        prev: Viewstamp,
        entries: Vec<Entry>,
        last: Viewstamp,
        out: &mut Vec<Action>,
    ) {
        let fits = self.log.stamp(prev.index) == Some(prev);
        if !self.takes_pulled(term, out) || last < self.log.last() || !fits {
            return;
        }
        let Some(end) = entries.last().map(|entry| entry.stamp) else {
            return;
        };
        let members = self.log.members_index();
        match self.merge(self.hard_state.term, prev, entries, out) {
            // A full ring: no way to win before a truncation.
            Ok(through) if through < end.index => {}
            Ok(_) if !self.pulling.advance(from, end) => {}
            Ok(_) if end < last => self.say_pull(from, end, out),
            Ok(_) => return self.ask_before(out),
            Err(what) => out.push(Action::ProtocolViolation { from, what }),
        }
        self.recount(members);
    }

    /// A voter's log begins after what was asked for: its snapshot was taken as far as it was news, and the pull goes on
    /// after it.
    pub(super) fn on_pulled_snapshot(
        &mut self,
        from: ReplicaId,
        term: Term,
        snapshot: Snapshot,
        out: &mut Vec<Action>,
    ) {
        if !self.takes_pulled(term, out) {
            return;
        }
        let (members, end) = (self.log.members_index(), snapshot.last);
        self.take_snapshot(snapshot, out);
        if self.pulling.advance(from, end) {
            self.say_pull(from, self.log.last(), out);
        }
        self.recount(members);
    }

    /// The members may have changed, and with them the positions of the votes.
    fn recount(&mut self, members: Index) {
        if self.log.members_index() != members {
            self.votes = Votes::default();
        }
    }

    /// A voter refused because it holds more (`last`). A pull that got on since the last refusal goes on where it is.
    pub(super) fn begin_pull(&mut self, from: ReplicaId, out: &mut Vec<Action>) {
        let at = match self.pulling {
            Pulling {
                whom: Some(whom),
                through,
                moved: true,
            } if whom == from => through,
            _ => {
                self.pulling = Pulling {
                    whom: Some(from),
                    through: Viewstamp::default(),
                    moved: false,
                };
                self.log.last()
            }
        };
        self.pulling.moved = false;
        self.say_pull(from, at, out);
    }

    fn say_pull(&self, to: ReplicaId, at: Viewstamp, out: &mut Vec<Action>) {
        let message = Message::Pull {
            term: self.hard_state.term,
            at,
            committed: self.order.committed(),
        };
        out.push(Action::Send { to, message });
    }
}
