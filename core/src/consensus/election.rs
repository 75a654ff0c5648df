//! What it decides: who leads.
//!
//! Flow: silence, or a lost link to the leader -> pre-vote (nothing is raised) -> a majority would -> campaign: new term,
//! hard state on disk, vote asked -> a majority gave it -> `propose::start_leading`.
//!
//! Invariants:
//! - E1 (C1) one vote per term, on disk before it is given; the candidate's own likewise before it asks;
//! - E2 (C3) a vote goes only to a log that is not older than the voter's own;
//! - E3 (C6) only an electable member in force *as appended*, that may lead, campaigns; a recovering one never votes (C7);
//! - E4 a replica that hears its leader refuses a pre-vote, so a returning or deaf one disturbs nobody;
//! - E5 whoever waits for its own vote's disk asks for no newer term, and the next votes are waited for longer than those that did not come: each term is
//!   written by all before its vote is given, and behind a slow disk a newer one would stand before any is, for ever.
//!
//! Source: APUS: "In abnormal cases (e.g., the leader fails), APUS uses an existing algorithm \[54\] to elect a new leader"
//! (GAIA 2.1.2); here Raft 5.2, 5.4.1 and Ongaro 3.10 (transfer), 9.6 (pre-vote); the witness and the "major backup"
//! that alone may take over: PLOVER's slides, GAIA 2.3.1.
//!
//! Not here: how the winner leads (`propose`); what a candidate that is behind pulls (`recover`).

use super::leading::Transfer;
use super::standing::Votes;
use super::tally::majority;
use super::{Action, Bug, Consensus, HardState, Member, Message, Role, Stand};
use crate::units::{ReplicaId, Term, Viewstamp};

/// A transfer of the office is given up after so many of the longest election time-outs (Ongaro 3.10 gives it one). An heir on a busy host needs more,
/// and one that is given up costs a backup, which has to join anew.
const TRANSFER_ELECTIONS: u64 = 4;
/// Votes that come from slow disks are waited for longer each time, by so many of the longest election time-outs at last.
const LONGER_ELECTIONS: u64 = 64;

impl Consensus {
    pub(super) fn me_in_force(&self) -> Option<Member> {
        let mut members = self.log.members().iter();
        members.find(|member| member.id == self.cfg.me).copied()
    }

    /// E3.
    pub(super) fn may_campaign(&self) -> bool {
        self.may_lead
            && self.role != Role::Recovering
            && self.me_in_force().is_some_and(|member| member.electable())
    }

    /// A willing member that can run the VM asks before, even if its log does not call it complete: the voter that refuses
    /// may hold the entry that does, and it is pulled.
    fn may_ask(&self) -> bool {
        self.may_lead
            && self.role != Role::Recovering
            && self.me_in_force().is_some_and(|member| !member.witness)
    }

    pub(super) fn set_may_lead(&mut self, may_lead: bool, out: &mut Vec<Action>) {
        // Owners say it at every turn: one that is as willing as before would put its own election off each time, for ever.
        let is_new = may_lead && !self.may_lead;
        self.may_lead = may_lead;
        if may_lead {
            if is_new && self.leader.is_none() && matches!(self.role, Role::Follower { .. }) {
                self.retry_soon();
            }
        } else if self.role == Role::Leader {
            self.stop_leading(out);
        } else if matches!(self.role, Role::Candidate { .. }) {
            self.follow(None, out);
        }
    }

    pub(super) fn on_election_timeout(&mut self, out: &mut Vec<Action>) {
        if self.leader.take().is_some() {
            self.heard_us = None;
            out.push(Action::BecameFollower {
                term: self.hard_state.term,
                leader: None,
            });
        }
        if self.role == (Role::Candidate { pre: false }) {
            // E5.
            let most_us = self.cfg.election_max_us.saturating_mul(LONGER_ELECTIONS);
            let longer_us = self
                .votes
                .longer_us
                .saturating_mul(2)
                .max(self.cfg.election_min_us);
            self.votes.longer_us = longer_us.min(most_us);
        }
        if self.may_ask() {
            self.ask_before(out);
        } else {
            let wait_us = self.draw_election_us();
            self.rest(wait_us);
        }
    }

    /// The leader's link broke: do not wait for the time-out. The first electable member goes first, the others a little
    /// later, so that they do not split the vote.
    pub(super) fn on_link_lost(&mut self, peer: ReplicaId, by_peer: bool, out: &mut Vec<Action>) {
        self.forget_echoes(peer);
        if !by_peer {
            return; // Its silence will tell.
        }
        self.unbind(peer);
        self.last_heard = self.last_heard.filter(|(whom, _)| *whom != peer);
        if self.leader != Some(peer) || self.role == Role::Recovering {
            return;
        }
        self.leader = None;
        self.heard_us = None;
        out.push(Action::BecameFollower {
            term: self.hard_state.term,
            leader: None,
        });
        if !self.may_campaign() {
            return;
        }
        let others = self
            .log
            .members()
            .iter()
            .filter(|member| member.electable() && member.id != peer);
        match others.take_while(|member| member.id != self.cfg.me).count() {
            0 => self.ask_before(out),
            rank => self.rest(rank as u64 * self.cfg.heartbeat_us),
        }
    }

    pub(super) fn retry_soon(&mut self) {
        let wait_us = self.draw_between(self.cfg.heartbeat_us, 2 * self.cfg.heartbeat_us);
        self.rest(wait_us);
    }

    fn say_to_members(&self, message: &Message, out: &mut Vec<Action>) {
        for member in self.log.members() {
            if member.id != self.cfg.me {
                out.push(Action::Send {
                    to: member.id,
                    message: message.clone(),
                });
            }
        }
    }

    /// Pre-vote: would a majority vote for me?
    pub(super) fn ask_before(&mut self, out: &mut Vec<Action>) {
        if !self.may_ask() {
            self.role = Role::Follower { leader: None };
            let wait_us = self.draw_election_us();
            return self.rest(wait_us);
        }
        self.leader = None;
        self.role = Role::Candidate { pre: true };
        self.votes = Votes {
            longer_us: self.votes.longer_us,
            ..Votes::default()
        };
        let term = Term(self.hard_state.term.0 + 1);
        self.say_to_members(
            &Message::RequestVote {
                term,
                last: self.log.last(),
                why: Stand::Asks,
            },
            out,
        );
        let wait_us = self.draw_between(2 * self.cfg.heartbeat_us, 4 * self.cfg.heartbeat_us);
        self.rest(wait_us);
        self.count_vote(self.cfg.me, out);
    }

    /// Raises the term; asks when the hard state is on disk (`on_hard_state_persisted`).
    fn campaign(&mut self, handed_over: bool, out: &mut Vec<Action>) {
        let term = Term(self.hard_state.term.0 + 1);
        self.obey_term(term, out);
        self.hard_state = HardState {
            term,
            voted_for: Some(self.cfg.me),
        };
        self.role = Role::Candidate { pre: false };
        self.votes = Votes {
            mine_pending: true,
            handed_over,
            longer_us: self.votes.longer_us,
            ..Votes::default()
        };
        // E5: the disk answers, however slowly.
        self.rest(u64::MAX / 2);
    }

    /// E1: the own vote is on disk.
    pub(super) fn ask_for_votes(&mut self, out: &mut Vec<Action>) {
        self.votes.mine_pending = false;
        if self.votes.alone {
            return self.lead_alone(out);
        }
        let message = Message::RequestVote {
            term: self.hard_state.term,
            last: self.log.last(),
            why: if self.votes.handed_over {
                Stand::HandedOver
            } else {
                Stand::Silence
            },
        };
        self.say_to_members(&message, out);
        let wait_us = self.draw_election_us().saturating_add(self.votes.longer_us);
        self.rest(wait_us);
        self.count_vote(self.cfg.me, out);
    }

    pub(super) fn on_request_vote(
        &mut self,
        from: ReplicaId,
        term: Term,
        last: Viewstamp,
        why: Stand,
        out: &mut Vec<Action>,
    ) {
        if self.role == Role::Recovering && !self.may_vote_overruled(term, last) {
            return;
        }
        let pre = why == Stand::Asks;
        let bound = why != Stand::HandedOver && self.is_bound(from);
        let fit = last >= self.log.last() || self.bugged(Bug::VotesForShorterLog);
        if pre {
            // E4.
            let patience_us = self.patience_us();
            let hears = |heard: u64| self.awake_us() < heard.saturating_add(patience_us);
            let hears = bound || (self.heard_us.is_some_and(hears) && !self.bugged(Bug::VotesWhenBound));
            let granted = term > self.hard_state.term && fit && !hears && self.role != Role::Leader;
            let term = if granted { term } else { self.hard_state.term };
            let message = Message::Vote {
                term,
                granted,
                pre,
                last: self.log.last(),
            };
            out.push(Action::Send { to: from, message });
            return;
        }
        if bound {
            // X1: not even its term is taken over: the leader that is heard would be deposed by it.
            return;
        }
        if term > self.hard_state.term {
            self.obey_term(term, out);
        }
        if self.role == Role::Recovering && !self.may_vote_overruled(term, last) {
            return; // It lost its memory, or was declared dead by whoever stood for this term just now (S2).
        }
        let free = self.hard_state.voted_for.is_none_or(|whom| whom == from);
        if term == self.hard_state.term && fit && free && self.role != Role::Leader {
            self.hard_state.voted_for = Some(from);
            self.owed_vote = Some(from);
            let wait_us = self.draw_election_us();
            self.rest(wait_us);
            if self.hard_state_kept == self.hard_state || self.bugged(Bug::VotesBeforePersist) {
                self.owed_vote = None;
                self.say_vote(from, out);
            }
        } else if self.hard_state_kept.term == self.hard_state.term {
            let message = Message::Vote {
                term: self.hard_state.term,
                granted: false,
                pre,
                last: self.log.last(),
            };
            out.push(Action::Send { to: from, message });
        }
    }

    pub(super) fn say_vote(&self, to: ReplicaId, out: &mut Vec<Action>) {
        let message = Message::Vote {
            term: self.hard_state.term,
            granted: true,
            pre: false,
            last: self.log.last(),
        };
        out.push(Action::Send { to, message });
    }

    pub(super) fn on_vote(
        &mut self,
        from: ReplicaId,
        term: Term,
        granted: bool,
        pre: bool,
        last: Viewstamp,
        out: &mut Vec<Action>,
    ) {
        if granted {
            let asked = if pre {
                Term(self.hard_state.term.0 + 1)
            } else {
                self.hard_state.term
            };
            if self.role == (Role::Candidate { pre }) && term == asked {
                self.count_vote(from, out);
            }
            return;
        }
        if term > self.hard_state.term {
            self.obey_term(term, out);
            return self.retry_soon();
        }
        if self.role == (Role::Candidate { pre: true }) && last > self.log.last() && !self.votes.pulled {
            self.votes.pulled = true;
            self.begin_pull(from, out);
        }
    }

    fn count_vote(&mut self, from: ReplicaId, out: &mut Vec<Action>) {
        let members = self.log.members();
        let Some(at) = members.iter().position(|member| member.id == from) else {
            return;
        };
        self.votes.given |= 1 << at;
        if (self.votes.given.count_ones() as usize) < majority(members.len()) || self.votes.mine_pending {
            return;
        }
        match self.role {
            // X1 holds for the own vote, too; the time-out asks again.
            Role::Candidate { pre: true } if self.may_campaign() && !self.is_bound(self.cfg.me) => {
                self.campaign(false, out);
            }
            Role::Candidate { pre: false } => self.start_leading(out),
            _ => {}
        }
    }
}

/// Giving up the lead.
impl Consensus {
    /// Leads no more in this term and lets the others go first.
    pub(super) fn stop_leading(&mut self, out: &mut Vec<Action>) {
        self.follow(None, out);
        let wait_us = self.draw_election_us().saturating_add(self.cfg.election_max_us);
        self.rest(wait_us);
    }

    /// To the best electable peer; without one, simply stops.
    pub(super) fn step_down(&mut self, out: &mut Vec<Action>) {
        if self.role != Role::Leader {
            return;
        }
        let peers = self.leading.peers.iter();
        let best = peers
            .filter(|peer| self.electable(peer.id))
            .max_by_key(|peer| (peer.heard_us, peer.matched));
        match best.map(|peer| peer.id) {
            Some(to) => self.transfer_to(to, true, out),
            None => self.stop_leading(out),
        }
    }

    fn electable(&self, id: ReplicaId) -> bool {
        self.log
            .members()
            .iter()
            .any(|member| member.id == id && member.electable())
    }

    pub(super) fn transfer_to(&mut self, to: ReplicaId, must_go: bool, out: &mut Vec<Action>) {
        if self.role != Role::Leader {
            return;
        }
        if !self.electable(to) || to == self.cfg.me {
            out.push(Action::TransferFailed { to });
            return;
        }
        let until_us = self
            .now_us
            .saturating_add(self.cfg.election_max_us.saturating_mul(TRANSFER_ELECTIONS));
        self.leading.transfer = Some(Transfer {
            to,
            until_us,
            must_go,
            told: false,
        });
        self.push_transfer(out);
    }

    /// Tells the heir as soon as it holds everything; proposals are refused meanwhile.
    pub(super) fn push_transfer(&mut self, out: &mut Vec<Action>) {
        let last = self.log.last().index;
        let Some(transfer) = &self.leading.transfer else {
            return;
        };
        let to = transfer.to;
        if transfer.told || self.leading.peer(to).is_none_or(|peer| peer.matched < last) {
            return;
        }
        // X3: no lease from here on.
        let beat = self.leading.tell_heir(to);
        out.push(Action::Send {
            to,
            message: Message::Campaign {
                term: self.hard_state.term,
                beat,
            },
        });
        if let Some(transfer) = &mut self.leading.transfer {
            transfer.told = true;
        }
    }

    /// An heir passes over a word that comes while it may not lead, or behind a later beat: each beat says it anew, until it is too late.
    pub(super) fn push_transfer_again(&mut self, out: &mut Vec<Action>) {
        if let Some(transfer) = &mut self.leading.transfer {
            transfer.told = false;
        }
        self.push_transfer(out);
    }

    /// True if the leader stepped down.
    pub(super) fn transfer_expired(&mut self, out: &mut Vec<Action>) -> bool {
        let Some(transfer) = self
            .leading
            .transfer
            .take_if(|transfer| transfer.until_us <= self.now_us)
        else {
            return false;
        };
        out.push(Action::TransferFailed { to: transfer.to });
        if transfer.must_go {
            self.stop_leading(out);
        }
        transfer.must_go
    }

    /// The leader hands over to me: campaign without asking before (the others still hear it).
    pub(super) fn on_campaign(&mut self, from: ReplicaId, term: Term, beat: u64, out: &mut Vec<Action>) {
        let late = self.following.has_heard_after(beat);
        if term == self.hard_state.term && self.leader == Some(from) && !late && self.may_campaign() {
            self.campaign(true, out);
        }
    }
}
