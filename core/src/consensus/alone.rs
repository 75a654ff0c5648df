//! What it decides: how one replica goes on when a person says that all others are dead, and what becomes of those others
//! when they return all the same.
//!
//! Flow: `Event::StandAlone` -> a term of a newer *order*, own vote on disk -> the members are `[me]`, in force as appended ->
//! `propose::start_leading`: a group of one, whose majority is its leader. The owner adds the others again with
//! `change_members`, one at a time. Another replica that meets a term of a newer order forgets its log and recovers.
//!
//! Invariants:
//! - S1 a term is (order, election): the upper half counts persons' orders, with the member that it went to, so that no
//!   election of those who are declared dead ever reaches a term of the lone one, nor do two orders make one term;
//! - S2 who meets a newer order was declared dead. It behaves as dead: it gives up its log and its right to vote until it
//!   holds all that the lone one holds (R1). So it cannot elect against it, nor bring back entries of its own;
//! - S3 what the others had agreed on without the lone one is lost. No program can know whether there was anything: that
//!   is what the person answers for;
//! - S4 it may vote before that, if it has told nobody of the new order that it holds anything, for whoever holds entries of that order: its
//!   vote is worth what one is of a replica with an empty log, and nothing was agreed with its word. Without it the lone one, once it has taken
//!   a host back and lost its lead before that host held its log, could not be elected, and nobody else may be.
//!
//! Source: ours; the forced new configuration of other systems (etcd's `--force-new-cluster`), made safe against return.
//!
//! Not here: who may give such an order, and when (the owner).

use super::log::Log;
use super::order::Order;
use super::orders::{next_order, order_of};
use super::standing::{Following, Recovery, Votes};
use super::{Action, Consensus, Durability, EntryKind, HardState, Role, Snapshot};
use crate::units::{Index, Term, Viewstamp};
use crate::wire::consensus::encode_members;

/// What is left of a log: whom to ask.
pub(super) fn forgotten(log: &Log) -> Snapshot {
    Snapshot {
        members: log.members().to_vec(),
        ..Snapshot::default()
    }
}

impl Consensus {
    /// A person's order. Nothing happens to a leader, nor to a replica that may not lead.
    pub(super) fn stand_alone(&mut self, out: &mut Vec<Action>) {
        // Also one that lost its log: nobody else has a better one, says the person.
        let able = self.may_lead && self.me_in_force().is_some_and(|member| member.electable());
        if self.role == Role::Leader || !able {
            return;
        }
        self.follow(None, out);
        self.owed_vote = None;
        self.hard_state = HardState {
            term: next_order(self.hard_state.term, self.cfg.me),
            voted_for: Some(self.cfg.me),
        };
        self.role = Role::Candidate { pre: false };
        self.votes = Votes::default();
        self.votes.mine_pending = true;
        self.votes.alone = true;
        // The disk answers, however slowly: no election has to come in between.
        self.rest(u64::MAX / 2);
    }

    /// The order is on disk.
    pub(super) fn lead_alone(&mut self, out: &mut Vec<Action>) {
        let Some(me) = self.me_in_force() else { return };
        self.append_own(EntryKind::Members, encode_members(&[me]));
        self.start_leading(out);
    }

    /// S4.
    pub(super) fn may_vote_overruled(&self, term: Term, last: Viewstamp) -> bool {
        let order = order_of(self.hard_state.term);
        self.overruled && order_of(term) == order && order_of(last.term) == order
    }

    /// S2. The hard state is on disk before the log is gone, so that a crash in between is recognised.
    pub(super) fn forget(&mut self, out: &mut Vec<Action>) {
        self.log = Log::new(forgotten(&self.log));
        self.order = Order::at(Index(0));
        self.following = Following::new(Index(0));
        (self.bound, self.last_heard) = (None, None);
        (self.handed, self.durable) = (Index(0), Index(0));
        self.tickets.clear();
        self.saving = None;
        self.refused = false;
        self.role = Role::Recovering;
        self.overruled = true;
        self.recovery = Recovery {
            nonce: self.draw(),
            target: None,
        };
        let snapshot = self.log.snapshot();
        if self.cfg.durability == Durability::Disk {
            self.hard_state_asked = self.hard_state;
            out.push(Action::PersistHardState(self.hard_state));
            out.push(Action::SaveSnapshot(snapshot.clone()));
            out.push(Action::TruncateSuffix { from: Index(1) });
        }
        self.untaken += 1;
        out.push(Action::InstallSnapshot(snapshot));
        self.rest(self.cfg.heartbeat_us);
    }
}
