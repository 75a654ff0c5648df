//! What the group agrees on, applied: the same entries in the same order on every member.
//!
//! Invariants:
//! 1. A frame reaches the VM only from a committed entry (where inputs are agreed: core's `replica::epoch`), and in log order.
//! 2. An entry is applied once.
//! 3. A host that an applied entry drops from the complete set ends its copy of the VM (core's `replica::leadership` says so); so does
//!    one that gets a snapshot instead of entries, whatever its role: its copy never saw the inputs below it.
//! 4. The log never holds more than its limit: core's `replica::log_cut` says where it is cut.
//! 5. An entry of ours that the log refuses is said again until it is taken, or another term decides what holds.
//!
//! Source: PLOVER, "VSMR"; ARCHITECTURE.md. Not here: consensus itself.

mod log_room;
use super::state::agreement::Agreement;
use super::state::primary::PrimaryRole;
use super::state::{Role, VmLoop};
use super::{Line, group};
use crate::events::now_ms;
use bytes::Bytes;
use dunlin_api::EventKind;
use dunlin_core::agreed::{Agreed, Life, ReplicaSet};
use dunlin_core::consensus::{EntryKind, Refusal};
use dunlin_core::replica::epoch::primary::Phase;
use dunlin_core::replica::leadership::{Candidacy, Settled};
use dunlin_core::units::{Epoch, Index, ReplicaId, Term};
use dunlin_core::wire::agreed;
use dunlin_fabric::group::GroupEvent;

impl VmLoop {
    /// Proposes an entry; without leadership nothing happens, and the caller's state is resolved by whoever leads. True: it
    /// is proposed, or will be as soon as the log takes it (invariant 5).
    pub(super) fn propose(&mut self, entry: &Agreed) -> bool {
        if matches!(entry, Agreed::Frames(_)) {
            return self.group.propose(agreed::encode(entry)).is_ok();
        }
        match self.agreement.propose(&mut self.group, entry) {
            Ok(()) => {
                self.agreement.refuses = false;
                true
            }
            Err(refusal @ Refusal::NotLeader { .. }) => {
                tracing::debug!(vm = self.config.name, "not proposed: {refusal}");
                false
            }
            Err(refusal) => {
                if !std::mem::replace(&mut self.agreement.refuses, true) {
                    self.agreement.refused += 1;
                    let name = entry.name();
                    self.event(
                        EventKind::LogRefused,
                        format!(
                            "the log does not take '{name}' now ({refusal}); it is tried again until it does"
                        ),
                    );
                }
                self.agreement.unsaid.keep(entry)
            }
        }
    }

    /// Lets the consensus work, and follows what it says.
    pub(super) fn follow_group(&mut self) {
        let now_us = self.now_us();
        let may_lead = self.may_lead();
        self.group.may_lead(may_lead);
        self.agreement.election.watch(&self.group, now_us);
        while let Some(event) = self.group.poll(now_us) {
            match event {
                GroupEvent::Committed { .. }
                | GroupEvent::ReadReady { .. }
                | GroupEvent::ReadRefused { .. } => {}
                GroupEvent::BecameLeader { term, .. } => self.became_leader(term),
                GroupEvent::BecameFollower { term, leader } => self.follows(term, leader),
                // One that broke its last link may go on like that.
                GroupEvent::LinkUp { peer } if self.peers.broke.remove(&peer) => {}
                GroupEvent::LinkLost { peer, why, broken } => {
                    let host = self.config.host_name(peer).to_owned();
                    if broken {
                        self.peers.broke.insert(peer);
                    } else {
                        self.event(
                            EventKind::LinkLost,
                            format!("the log's link to host '{host}' is lost: {why}"),
                        );
                    }
                    self.log_link_lost(peer);
                    self.peer_link_lost(peer);
                }
                GroupEvent::SnapshotInstalled(snapshot) => {
                    self.install_snapshot(snapshot.last.term, snapshot.last.index, snapshot.state)
                }
                GroupEvent::TransferFailed { .. } => self.transfer_failed(),
                told => {
                    let ill = match &told {
                        GroupEvent::DiskFull(_) | GroupEvent::DiskFailed(_) => true,
                        GroupEvent::DiskRoom => false,
                        _ => self.agreement.log_is_ill,
                    };
                    if let Some((kind, text)) = group::words(told, &self.config) {
                        self.event(kind, text);
                    }
                    if std::mem::replace(&mut self.agreement.log_is_ill, ill) != ill {
                        self.leave_with_ill_log();
                    }
                }
            }
            self.agreement.election.watch(&self.group, now_us);
            let may_lead = self.may_lead();
            self.group.may_lead(may_lead);
        }
        self.tell_full_log();
    }

    /// What this host would bring to an election.
    pub(super) fn candidacy(&self) -> Candidacy {
        let whole = match &self.role {
            // One that leaves its office does so when the backup can have it.
            Role::Primary(primary) => {
                primary.is_whole() && (self.group.is_leader() || !primary.guest.is_left(self.now_us()))
            }
            Role::Backup(_) if self.shared.fault_at.always_fails(Line::BackupCampaigns) => false,
            Role::Backup(backup) => backup.may_lead() && !self.take_over_stalls(),
            Role::None => false,
        };
        Candidacy {
            whole,
            failed: self.shown.failure.is_some(),
            mandate: self.cold.mandate(),
            ends: self.leads_to_end(),
        }
    }

    pub(super) fn may_lead(&mut self) -> bool {
        self.agreement.look_at_appended(&self.group);
        self.agreement.leadership.may_lead(self.candidacy())
    }

    fn became_leader(&mut self, term: Term) {
        self.agreement.leadership.elected();
        self.agreement.unsaid.clear();
        self.event(
            EventKind::Elected,
            format!("this host leads the group in term {}", term.0),
        );
        self.elected();
        self.speaks_as_it_may();
    }

    /// The gate has the voice that this host has.
    pub(super) fn speaks_as_it_may(&mut self) {
        self.net.output.set_voice(self.agreement.leadership.voice());
    }

    /// Applies what is agreed, as far as no sync holds it back.
    pub(super) fn apply_agreed_entries(&mut self) {
        self.skip_to_agreed_end();
        self.agreement.look_at_appended(&self.group);
        while !self.log_is_held() && self.agreement.applied < self.group.committed() {
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
                        self.leads();
                    }
                }
                EntryKind::Data => match agreed::decode(entry.payload) {
                    Ok(decoded) => self.apply(index, entry.stamp.term, decoded),
                    Err(error) => {
                        self.shown.failure = Some(format!("entry {} of the log: {error}", index.0));
                        self.event(
                            EventKind::Failed,
                            format!("entry {} of the log cannot be understood: {error}", index.0),
                        );
                        self.drop_machine();
                    }
                },
            }
            self.group.applied(self.agreement.applied);
            self.cut_log_where_nothing_syncs(bytes);
        }
        if self.agreement.applied == self.group.appended().index
            && let Some(nics) = &mut self.net.nics
        {
            nics.nothing_under_way();
        }
        self.membership().settle_in();
    }

    fn apply(&mut self, index: Index, term: Term, entry: Agreed) {
        // Nothing follows the VM's end.
        if !self.agreement.leadership.apply(index, &entry) {
            return;
        }
        if let Agreed::Complete { set, .. } = &entry {
            self.cold.notebook.note((term.0, index.0), *set, now_ms());
            // No later one is on its way.
            if self.agreement.leadership.appended_complete() == *set {
                self.agreement.unsaid.agreed(&entry);
            }
        }
        match entry {
            Agreed::Frames(frames) => {
                self.match_overheard(&frames);
                if self.executes_inputs() {
                    for frame in &frames {
                        self.queue_input(frame);
                    }
                }
            }
            // A VM's clock and its chance are its own: its saved state has them.
            Agreed::Timed { .. } | Agreed::Seed(_) => {}
            Agreed::Sync { epoch } => {
                let state = self.agreement.leadership.state();
                self.agreement.log_cut.sync_agreed(index, state);
                self.sync_agreed(epoch);
            }
            Agreed::SyncDone { .. } => {
                let cut = self.agreement.log_cut.sync_done();
                self.cut_log(cut);
            }
            Agreed::Complete { set, epoch } => {
                self.agreement.another_policy = false;
                let cut = self.agreement.log_cut.complete_agreed(set);
                self.cut_log(cut);
                self.complete_set_agreed(set, epoch);
            }
            Agreed::Policy(policy) => {
                self.agreement.another_policy = true;
                self.policy_agreed(policy);
            }
            Agreed::Hosts(_) => self.follow_hosts(),
            Agreed::Down => {
                self.event(EventKind::Down, "the VM is shut down");
                self.end_machine();
                self.end_is_agreed();
            }
        }
    }

    fn complete_set_agreed(&mut self, set: ReplicaSet, epoch: Epoch) {
        if set.len() > 1 {
            self.shown.join_complaint = None;
        }
        let joins = match &self.role {
            Role::Primary(primary) => primary.epochs().session() == Some(Phase::LastSync),
            Role::Backup(_) | Role::None => false,
        };
        let settled = self.agreement.leadership.complete_agreed(joins);
        match settled {
            Settled::Nothing => {}
            Settled::Boots => self.boot(),
            Settled::Speaks => self.speak_after_take_over(),
            Settled::Alone => self.is_alone(),
            Settled::Protected => self.is_protected(epoch),
            Settled::Follows | Settled::Dropped => self.backup_set_agreed(settled == Settled::Dropped),
            Settled::EndedHere => {
                self.switchover_done();
                self.event(
                    EventKind::EndedHere,
                    "another host serves the VM now; the copy here is ended",
                );
                self.drop_machine();
            }
        }
        self.speaks_as_it_may();
    }

    fn install_snapshot(&mut self, term: Term, index: Index, state: Bytes) {
        match agreed::decode_state(state) {
            Ok(state) => {
                if state.life == Life::Running {
                    self.cold
                        .notebook
                        .note((term.0, index.0), state.complete, now_ms());
                }
                // Backwards, too: what this host held counts no more when it was declared dead.
                let mut leadership = self.agreement.leadership.clone();
                leadership.installed(state);
                self.agreement.installed(index, leadership);
                if index == Index(0) {
                    self.event(
                        EventKind::Overruled,
                        "this host was declared dead by 'dunlin promote --force' on another one: it starts anew",
                    );
                    self.drop_machine();
                }
                self.end_stale_copy();
                self.follow_hosts();
                self.group.applied(self.agreement.applied);
                if self.agreement.state().life == Life::Down {
                    self.forget_vm(false);
                }
            }
            Err(error) => {
                self.shown.failure = Some(format!("the group's snapshot: {error}"));
                self.event(
                    EventKind::Failed,
                    format!("the group's snapshot cannot be understood: {error}"),
                );
            }
        }
    }

    /// Invariant 3. A primary that was away for long gets a snapshot instead of the entry that made another host the VM's: a
    /// copy that it kept would keep it from being the backup for good.
    fn end_stale_copy(&mut self) {
        match &self.role {
            Role::Backup(_) => self.event(
                EventKind::BackupLost,
                "this host missed inputs; its copy of the VM is ended",
            ),
            Role::Primary(_) => {
                self.switchover_done();
                self.event(
                    EventKind::EndedHere,
                    "another host served the VM while this one was away; the copy here is ended",
                );
            }
            Role::None => return,
        }
        self.drop_machine();
    }

    /// Another host leads, or nobody.
    fn follows(&mut self, term: Term, leader: Option<ReplicaId>) {
        let now_us = self.now_us();
        self.agreement.leadership.deposed();
        self.speaks_as_it_may();
        self.policy_order_failed("this host leads the group no more; say it again");
        if leader.is_some() {
            self.order_failed("another host leads the group now; see 'dunlin status'");
        }
        if !matches!(self.role, Role::Primary(_)) {
            return;
        }
        if self
            .primary()
            .is_some_and(|primary| primary.deposed(leader.is_some()))
        {
            self.forget_cut();
        }
        match leader {
            Some(leader) if leader != self.me => {
                let host = self.config.host_name(leader).to_owned();
                self.event(
                    EventKind::Deposed,
                    format!(
                        "host '{host}' leads in term {}: this one no longer speaks",
                        term.0
                    ),
                );
            }
            // Who hands the VM over, or leaves it to the backup, has asked the other host to be elected: nobody leads for that moment, and
            // nothing is wrong.
            _ if self
                .primary()
                .is_some_and(|primary| primary.epochs().is_handed() || primary.guest.is_left(now_us)) => {}
            _ => {
                let text = group::no_majority(&self.group, &self.config, now_us);
                self.event(EventKind::QuorumLost, text);
            }
        }
    }

    pub(super) fn primary(&mut self) -> Option<&mut PrimaryRole> {
        match &mut self.role {
            Role::Primary(primary) => Some(primary),
            _ => None,
        }
    }
}
