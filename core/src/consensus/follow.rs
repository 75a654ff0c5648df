//! What it decides: which of a leader's entries a follower takes, and what it acknowledges.
//!
//! Flow: `Append` -> checked against the log -> merged -> disk -> `Ack` (cumulative), straight into the leader's memory.
//! `Lead` -> commit as far as the log is known to match.
//!
//! Invariants:
//! - F1 nothing is taken from a leader of an older term than the current one, whatever the transport let through;
//! - F2 `matched` is what is known to equal the log of this term's leader; only that is acknowledged and committed;
//! - F3 an agreed entry is never cut;
//! - F4 an acknowledgement leaves only when the hard state of its term is on disk (C5);
//! - F5 what this follower and its leader hold is agreed where two are a majority.
//!
//! Source: APUS (GAIA 2.1.2, steps B1, B2: "all replicas store inputs to local SSD (L2, B1)"); fabric.md "safety rests on
//! terms in acknowledgements"; Raft 5.3.
//!
//! Not here: how entries get here (the fabric's ring per peer and term), the rest of a recovery (`recover`).

use super::leading::Leading;
use super::orders::order_of;
use super::standing::Following;
use super::tally::majority;
use super::{Action, Bug, Consensus, Durability, Entry, EntryKind, HardState, Message, Role, Snapshot};
use crate::units::{Index, ReplicaId, Term, Viewstamp};

impl Consensus {
    /// Promises a newer term.
    pub(super) fn obey_term(&mut self, term: Term, out: &mut Vec<Action>) {
        assert!(term > self.hard_state.term, "C5: a term goes only forwards");
        let declared_dead = order_of(term) > order_of(self.hard_state.term);
        self.hard_state = HardState {
            term,
            voted_for: None,
        };
        self.owed_vote = None;
        self.follow(None, out);
        if declared_dead {
            self.forget(out);
        }
    }

    /// Follows `leader` (or nobody yet) in the current term.
    pub(super) fn follow(&mut self, leader: Option<ReplicaId>, out: &mut Vec<Action>) {
        let led = self.role == Role::Leader;
        self.refuse_reads(out);
        if led {
            self.leading = Leading::default();
        }
        self.following = Following::new(self.order.committed());
        self.owed_ack = false;
        self.recovery.target = None;
        if leader.is_some() {
            self.votes.longer_us = 0;
        }
        self.leader = leader;
        self.heard_us = leader.map(|_| self.awake_us());
        if self.role != Role::Recovering {
            self.role = Role::Follower { leader: None };
        }
        let wait_us = if leader.is_some() {
            self.draw_patience_us()
        } else {
            self.draw_election_us()
        };
        self.rest(wait_us);
        out.push(Action::BecameFollower {
            term: self.hard_state.term,
            leader,
        });
    }

    /// A word from a leader of `term`: true if it is the one to follow (F1).
    pub(super) fn hear_leader(&mut self, from: ReplicaId, term: Term, out: &mut Vec<Action>) -> bool {
        if term < self.hard_state.term {
            // The deposed leader learns it from the term.
            let message = Message::Ack {
                term: self.hard_state.term,
                durable: Index(0),
                beat: 0,
            };
            if self.hard_state_kept.term == self.hard_state.term {
                out.push(Action::Send { to: from, message });
            }
            return false;
        }
        if term > self.hard_state.term {
            self.obey_term(term, out);
        }
        if self.role == Role::Leader || self.leader.is_some_and(|leader| leader != from) {
            out.push(Action::ProtocolViolation {
                from,
                what: "a second leader in one term (C1)",
            });
            return false;
        }
        if self.leader.is_none() {
            // A candidate of this very term that lost, or a follower that had lost sight of it: what matched still does.
            let following = self.following.clone();
            self.follow(Some(from), out);
            self.following = following;
        }
        true
    }

    fn heard(&mut self, leader: ReplicaId) {
        if let Some((_, since_us)) = self.last_heard.filter(|(whom, _)| *whom == leader) {
            self.learn_silence(since_us);
        }
        self.last_heard = Some((leader, self.awake_us()));
        self.heard_us = Some(self.awake_us());
        self.bind(leader);
        let wait_us = self.draw_patience_us();
        self.rest(wait_us);
    }

    pub(super) fn on_append(
        &mut self,
        from: ReplicaId,
        term: Term,
        prev: Viewstamp,
        entries: Vec<Entry>,
        out: &mut Vec<Action>,
    ) {
        if !self.hear_leader(from, term, out) {
            return;
        }
        let fits = prev.index < self.log.base().index || self.log.stamp(prev.index) == Some(prev);
        if !fits {
            let message = Message::Reject {
                term,
                hint: self.hint(prev.index),
            };
            if self.hard_state_kept.term == self.hard_state.term {
                out.push(Action::Send { to: from, message });
            }
            return;
        }
        let had = self.log.last();
        match self.merge(term, prev, entries, out) {
            Ok(through) => self.following.matched = self.following.matched.max(through),
            Err(what) => return out.push(Action::ProtocolViolation { from, what }),
        }
        self.advance_follower(out);
        // With a disk, new entries are acknowledged when they are there (`on_durable`).
        let nothing_new = self.log.last() == had;
        if self.cfg.durability == Durability::Memory || nothing_new || self.bugged(Bug::AcksBeforePersist) {
            self.owed_ack = true;
            self.pay_ack(out);
        }
    }

    /// The latest index at which the logs may still agree, below a `prev` that does not fit.
    fn hint(&self, prev: Index) -> Index {
        let last = self.log.last().index;
        if prev > last {
            return last;
        }
        let floor = self.order.committed();
        let first = self.log.first_of_term(prev, floor.next());
        Index(first.0.saturating_sub(1)).max(floor)
    }

    /// Takes entries that follow `prev`, which is known to be common: skips what is there, cuts what differs, appends
    /// the rest as far as there is room. Returns the last common index.
    pub(super) fn merge(
        &mut self,
        limit: Term,
        prev: Viewstamp,
        entries: Vec<Entry>,
        out: &mut Vec<Action>,
    ) -> Result<Index, &'static str> {
        let (base, mut last) = (self.log.base().index, prev);
        for entry in entries {
            let Viewstamp { term, index } = entry.stamp;
            if index != last.index.next() || term < last.term || term > limit {
                return Err("entries out of order");
            }
            if index == base && self.log.base() != entry.stamp {
                return Err("an agreed entry differs (C2)");
            }
            if index > base && self.log.stamp(index) != Some(entry.stamp) {
                if index <= self.log.last().index {
                    if index <= self.order.committed() {
                        return Err("an agreed entry differs (C2)");
                    }
                    self.cut_suffix(index, out);
                }
                if entry.kind == EntryKind::Data && !self.has_room(entry.payload.len()) {
                    return Ok(last.index);
                }
                if self.log.push(entry).is_err() {
                    return Err("members that do not decode");
                }
            }
            last = Viewstamp { term, index };
        }
        Ok(last.index.max(base))
    }

    /// Whether a leader's next input finds no room here.
    #[must_use]
    pub fn log_is_full(&self) -> bool {
        !self.has_room(0)
    }

    /// A follower truncates a little later than its leader: twice the leader's ring, then it pushes back by silence.
    fn has_room(&self, payload_bytes: usize) -> bool {
        let cfg = &self.cfg;
        let entries = cfg.ring_entries.saturating_add(cfg.reserve_entries);
        let bytes = cfg.ring_bytes.saturating_add(cfg.reserve_bytes);
        self.log.len() < entries.saturating_mul(2)
            && self.log.payload_bytes() + payload_bytes <= bytes.saturating_mul(2)
    }

    pub(super) fn on_lead(
        &mut self,
        from: ReplicaId,
        term: Term,
        commit: Index,
        beat: u64,
        out: &mut Vec<Action>,
    ) {
        if !self.hear_leader(from, term, out) {
            return;
        }
        self.following.commit = self.following.commit.max(commit);
        self.advance_follower(out);
        if beat > self.following.beat {
            self.following.beat = beat;
            self.heard(from);
            self.owed_ack = true;
            self.pay_ack(out);
        }
    }

    /// F2: agreed is what the leader says, as far as the logs are known to be equal; and what this host can count itself (F5).
    pub(super) fn advance_follower(&mut self, out: &mut Vec<Action>) {
        let mut through = self
            .following
            .commit
            .min(self.following.matched)
            .max(self.counted());
        if self.bugged(Bug::CommitsUnmatched) {
            through = self.following.commit.min(self.log.last().index);
        }
        if through > self.order.committed() {
            self.order.commit(through, self.log.last().index);
            out.push(Action::Committed { through });
        }
    }

    /// F5: where two are a majority, whoever holds an entry of the leader's own term holds it with the leader, so it is
    /// agreed: the backup's VM need not wait a round trip for being told. It counts itself only where it would acknowledge
    /// (F4), and the leader only where it holds what it sends: with a disk its own write may still be under way.
    fn counted(&self) -> Index {
        let held = self.acknowledged();
        let may = self.followers_count()
            && self.role != Role::Recovering
            && self.hard_state_kept.term == self.hard_state.term
            && self.is_member(self.cfg.me)
            && self.leader.is_some_and(|leader| self.is_member(leader));
        let own_term = || {
            self.log
                .stamp(held)
                .is_some_and(|stamp| stamp.term == self.hard_state.term)
        };
        if may && own_term() { held } else { Index(0) }
    }

    fn is_member(&self, id: ReplicaId) -> bool {
        self.log.members().iter().any(|member| member.id == id)
    }

    /// Whether followers know by themselves what is agreed (F5).
    pub(super) fn followers_count(&self) -> bool {
        let two_are_enough = majority(self.log.members().len()) <= 2 || self.bugged(Bug::TwoAreAlwaysEnough);
        self.cfg.durability == Durability::Memory && two_are_enough
    }

    /// What may be acknowledged now.
    pub(super) fn acknowledged(&self) -> Index {
        if self.bugged(Bug::AcksUnmatched) {
            self.durable()
        } else {
            self.following.matched.min(self.durable())
        }
    }

    /// Says the cumulative word if it is owed and the hard state is kept (F4).
    pub(super) fn pay_ack(&mut self, out: &mut Vec<Action>) {
        if !self.owed_ack || self.hard_state_kept.term != self.hard_state.term {
            return;
        }
        let Some(to) = self.leader else { return };
        if self.role == Role::Recovering {
            return self.say_recover(out);
        }
        self.owed_ack = false;
        self.following.acked = self.acknowledged();
        let message = Message::Ack {
            term: self.hard_state.term,
            durable: self.following.acked,
            beat: self.following.beat,
        };
        out.push(Action::Send { to, message });
    }

    pub(super) fn on_snapshot(
        &mut self,
        from: ReplicaId,
        term: Term,
        snapshot: Snapshot,
        leads: bool,
        out: &mut Vec<Action>,
    ) {
        if snapshot.last.term > self.hard_state.term.max(term) {
            out.push(Action::ProtocolViolation {
                from,
                what: "a snapshot from the future",
            });
            return;
        }
        if !leads {
            return self.on_pulled_snapshot(from, term, snapshot, out);
        }
        if !self.hear_leader(from, term, out) {
            return;
        }
        let last = snapshot.last;
        self.take_snapshot(snapshot, out);
        self.following.matched = self.following.matched.max(last.index);
        self.owed_ack = true;
        self.pay_ack(out);
    }

    /// Takes what of a snapshot is news here.
    pub(super) fn take_snapshot(&mut self, snapshot: Snapshot, out: &mut Vec<Action>) {
        let last = snapshot.last;
        if last.index > self.order.committed() && self.log.stamp(last.index) != Some(last) {
            self.install(snapshot, out);
        } else if last.index > self.order.committed() {
            // The entries are all here: they are agreed, and the state above may go through them one by one.
            self.order.commit(last.index, self.log.last().index);
            out.push(Action::Committed { through: last.index });
        }
    }

    /// Replaces log and state. Saved first, cut afterwards: a crash in between must not lose what was acknowledged.
    fn install(&mut self, snapshot: Snapshot, out: &mut Vec<Action>) {
        let (last, held) = (snapshot.last, self.log.last().index);
        self.log = super::log::Log::new(snapshot.clone());
        self.order.commit(last.index, last.index);
        self.save_snapshot(true, out);
        if held > last.index && self.cfg.durability == Durability::Disk {
            out.push(Action::TruncateSuffix {
                from: last.index.next(),
            });
        }
        self.handed = last.index;
        self.durable = Index(0);
        self.tickets.clear();
        self.following.matched = last.index;
        self.untaken += 1;
        out.push(Action::InstallSnapshot(snapshot));
    }
}
