//! What a program's group agrees on, applied: the same entries in the same order on every member.
//!
//! Invariants: 1. an input reaches a copy only from an agreed entry, in log order; 2. an entry that drops this host counts as soon as
//! it is appended here; 3. a host that gets a snapshot instead of entries ends its copy: it never saw the inputs below it.
//!
//! Source: as `vm::agreement`. Not here: what a change of roles means for a copy (`serving`).

use super::state::{Past, ProgramLoop, Role};
use crate::vm::state::agreement::Agreement;
use crate::vm::{Ended, group};
use bytes::Bytes;
use dunlin_api::EventKind;
use dunlin_core::agreed::{Agreed, Life};
use dunlin_core::consensus::{EntryKind, Refusal};
use dunlin_core::output::gate::Voice;
use dunlin_core::units::{Index, ReplicaId, Term};
use dunlin_core::wire::agreed;
use dunlin_fabric::group::GroupEvent;

impl ProgramLoop {
    /// True: it is proposed, or will be as soon as the log takes it. Inputs that are refused are lost: the network sends them again.
    pub(super) fn propose(&mut self, entry: &Agreed) -> bool {
        if matches!(entry, Agreed::Frames(_) | Agreed::Timed { .. } | Agreed::Seed(_)) {
            return self.group.propose(agreed::encode(entry)).is_ok();
        }
        match self.agreement.propose(&mut self.group, entry) {
            Ok(()) => true,
            Err(Refusal::NotLeader { .. }) => false,
            Err(_) => self.agreement.unsaid.keep(entry),
        }
    }

    /// Lets the consensus work, and follows what it says.
    pub(super) fn follow_group(&mut self) {
        let now_us = self.now_us();
        self.stand_or_not();
        while let Some(event) = self.group.poll(now_us) {
            match event {
                GroupEvent::Committed { .. }
                | GroupEvent::ReadReady { .. }
                | GroupEvent::ReadRefused { .. } => {}
                GroupEvent::BecameLeader { term, .. } => {
                    self.agreement.leadership.elected();
                    self.agreement.unsaid.clear();
                    self.event(
                        EventKind::Elected,
                        format!("this host leads the group in term {}", term.0),
                    );
                    self.elected();
                }
                GroupEvent::BecameFollower { term, leader } => {
                    self.agreement.leadership.deposed();
                    self.follows(term, leader);
                }
                GroupEvent::LinkLost { peer, why, .. } => {
                    let host = self.config.host_name(peer).to_owned();
                    self.event(
                        EventKind::LinkLost,
                        format!("the log's link to host '{host}' is lost: {why}"),
                    );
                    self.peers.link_lost(peer);
                    if Some(peer) == self.other() {
                        self.backup_is_lost("its host's link is lost");
                    }
                }
                GroupEvent::SnapshotInstalled(snapshot) => {
                    self.install_snapshot(snapshot.last.index, snapshot.state);
                }
                GroupEvent::TransferFailed { .. } => {
                    self.answer_switchover(&dunlin_api::Answer::failed(
                        "the other host did not take the lead; say it again",
                    ));
                }
                told => {
                    if let Some((kind, text)) = group::words(told, &self.config) {
                        self.event(kind, text);
                    }
                }
            }
            self.stand_or_not();
        }
    }

    fn stand_or_not(&mut self) {
        let now_us = self.now_us();
        self.agreement.election.watch(&self.group, now_us);
        let may_lead = self.may_lead();
        self.group.may_lead(may_lead);
    }

    /// Whether this host may win an election (invariant 2).
    fn may_lead(&mut self) -> bool {
        self.agreement.look_at_appended(&self.group);
        let alive = self.role != Role::None && (self.own.running.is_some() || self.own.starting.is_some());
        let first = self.config.group[0].member.id;
        let state = &self.agreement.state();
        let by_life = match state.life {
            // A program that has run here before has lost what it knew: a person begins it anew.
            Life::Fresh => {
                self.own.past == Past::None
                    && self.me == first
                    && (self.agreement.is_fresh() || self.agreement.leads())
            }
            Life::Running | Life::Down => state.may_lead(self.me, alive, first),
        };
        let dropped = self.agreement.leadership.may_be_dropped();
        let by_data = self.has_mandate() || self.leads_for_the_other();
        let by_life = by_life && self.shown.failure.is_none();
        !self.is_witness() && (((by_life || by_data) && !dropped) || self.leads_to_end())
    }

    /// Another host leads, or nobody: the copy is kept until the group has agreed that it is not needed.
    fn follows(&mut self, term: Term, leader: Option<ReplicaId>) {
        self.own.begins_by_us = None;
        if self.role != Role::Primary {
            return;
        }
        self.join_is_void();
        self.net.output.set_voice(Voice::Shut);
        match leader {
            Some(leader) if leader != self.me => {
                let host = self.config.host_name(leader).to_owned();
                let text = format!(
                    "host '{host}' leads in term {}: this one no longer speaks",
                    term.0
                );
                self.event(EventKind::Deposed, text);
            }
            _ => {
                let text = group::no_majority(&self.group, &self.config, self.now_us());
                self.event(EventKind::QuorumLost, text);
            }
        }
    }

    /// Applies what is agreed.
    pub(super) fn apply_agreed_entries(&mut self) {
        self.agreement.look_at_appended(&self.group);
        while self.agreement.applied < self.group.committed() {
            let index = self.agreement.applied.next();
            let Some(entry) = self.group.entry(index) else {
                // Below a snapshot that is about to be installed.
                return;
            };
            self.agreement.applied = index;
            let bytes = entry.payload.len();
            match entry.kind {
                EntryKind::Members => {}
                EntryKind::Barrier => {
                    if entry.stamp.term == self.group.term() && self.group.is_leader() {
                        self.agreement.leadership.leads_from_here();
                        self.leads();
                    }
                }
                EntryKind::Data => match agreed::decode(entry.payload) {
                    Ok(decoded) => self.apply(index, decoded),
                    Err(error) => {
                        let why = format!("entry {} of the log cannot be understood: {error}", index.0);
                        self.fails(&why);
                    }
                },
            }
            self.group.applied(self.agreement.applied);
            // No sync cuts this log. Who is more than a part of it behind has missed inputs, and gets a snapshot (invariant 3).
            let limits = self.group.log_limits();
            let Agreement {
                leadership,
                log_cut,
                applied,
                ..
            } = &mut self.agreement;
            if let Some(cut) = log_cut.applied_alone(*applied, bytes, limits, leadership.state()) {
                self.group.truncate(cut.through, cut.state);
            }
        }
        self.membership().settle_in();
    }

    fn apply(&mut self, index: Index, entry: Agreed) {
        let life = self.agreement.state().life;
        // Nothing follows the program's end.
        if !self.agreement.leadership.apply(index, &entry) {
            return;
        }
        match entry {
            Agreed::Frames(frames) => {
                self.inputs(index, None, frames);
            }
            Agreed::Seed(seed) => self.own.agreed.seed = Some(seed),
            Agreed::Timed { frames, .. } => {
                let time = self.agreement.state().time;
                self.time_is_agreed(time);
                self.inputs(index, Some(time), frames);
            }
            Agreed::Complete { set, .. } => {
                let begins = life == Life::Fresh && index > self.own.found;
                let begins_again = self.begins_again(set);
                let is_first = self.own.past == Past::None && !self.is_witness();
                if begins_again || (begins && set.contains(self.me) && is_first) {
                    self.start_copy();
                } else if begins && self.agreement.leads() && self.own.notes.is_some() {
                    self.begins_elsewhere();
                } else if self.agreement.leads() {
                    // An old word that this host is alone is none where a later one is on its way (as for a VM: core's `leadership`).
                    if set.len() > 1 || self.agreement.leadership.appended_complete() == set {
                        self.set_agreed(set);
                    }
                } else if !set.contains(self.me) && self.role != Role::None && !self.is_in_copy(index) {
                    self.end_here("another host serves the program now; the copy here is ended");
                }
                self.note_that_it_is_complete(index, set);
            }
            Agreed::Down => {
                self.event(EventKind::Down, "the program is ended");
                self.drop_copy();
                self.end_is_agreed();
            }
            Agreed::Hosts(_) => self.follow_hosts(),
            Agreed::Sync { .. } | Agreed::SyncDone { .. } | Agreed::Policy(_) => {}
        }
    }

    fn install_snapshot(&mut self, index: Index, state: Bytes) {
        match agreed::decode_state(state) {
            Ok(state) => {
                self.time_is_agreed(state.time);
                let mut leadership = self.agreement.leadership.clone();
                leadership.installed(state);
                self.agreement.installed(index, leadership);
                self.expects_no_more("this host missed inputs");
                if self.role != Role::None {
                    self.end_here("this host missed inputs; its copy of the program is ended");
                }
                self.follow_hosts();
                self.group.applied(self.agreement.applied);
                if self.agreement.state().life == Life::Down {
                    self.ending.shutdown.forgets(Life::Down, false);
                    self.ending.ended = Some(Ended {
                        vm: self.config.name.clone(),
                        forget: true,
                    });
                }
            }
            Err(error) => self.fails(&format!("the group's snapshot cannot be understood: {error}")),
        }
    }
}
