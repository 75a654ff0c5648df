//! Hosts of a program's group that come and go while it runs.
//!
//! * **Decides:** what becomes of the second copy when its host's part goes to another one: it counts no more, and the new host gets one of what runs.
//! * **Flow:** `dunlin move`, `dunlin replace`, a standby's turn (`daemon::standby`) -> the group goes on without that host, and agrees on the list (`vm::replacing`) -> it is followed on
//!   each host, and the new one is made a member (`vm::hosts`) -> a copy of the running program is brought there (`joining`).
//! * **Invariants:** 1. the copy of a host that leaves is dropped from the complete set, as one that is lost; 2. no copy is brought to a host that the
//!   group has not made a member, and that has not heard that it is one: a copy that counts has a vote.
//! * **Not here:** what a VM has alike (`vm::hosts`, `vm::replacing`).

use super::state::{ProgramLoop, Role};
use crate::vm::hosts::Membership;
use crate::vm::program::state::Tries;
use crossbeam_channel::Sender;
use dunlin_api::Answer;
use dunlin_core::agreed::Hosts;
use dunlin_core::units::{Index, ReplicaId};

/// Who is gone, and who may come, is looked at so often: each turn of the loop counts.
const LOOK_US: u64 = 20_000;

impl ProgramLoop {
    pub(super) fn membership(&mut self) -> Membership<'_> {
        Membership {
            now_us: self.now_us(),
            host: &self.host,
            config: &mut self.config,
            me: self.me,
            group: &mut self.group,
            agreement: &mut self.agreement,
            peers: &mut self.peers,
            shared: &self.shared,
            to_loop: &self.inbox.to_loop,
            told: &self.shown.told,
        }
    }

    /// A list of hosts is agreed, or was found.
    pub(super) fn follow_hosts(&mut self) {
        let before = self.other();
        match self.membership().follow_hosts() {
            Some(newest) => drop(self.was_left(newest)),
            // What has failed with the old one says nothing of the new one.
            None if self.other() != before => self.backup.tries = Tries::default(),
            None => {}
        }
    }

    pub(super) fn was_left(&mut self, newest: u8) -> Answer {
        if let Err(refused) = self.membership().was_left(newest) {
            return refused;
        }
        self.forget(true);
        Answer::done("it goes")
    }

    pub(super) fn remove_member(&mut self, id: ReplicaId, reply: Sender<Answer>) {
        let serves = self.role == Role::Primary;
        let answer = self.membership().remove_member(serves, id, &reply);
        self.leaves(id, answer, &reply);
    }

    pub(super) fn move_part(
        &mut self,
        leaves: ReplicaId,
        hosts: Hosts,
        unprotected_meanwhile: bool,
        reply: Sender<Answer>,
    ) {
        if let Some(why) = self.stays_for_an_upgrade() {
            // Whoever asked may have gone: here and below.
            let _ = reply.send(Answer::failed(why.to_string()));
            return;
        }
        let serves = self.role == Role::Primary;
        let answer = self
            .membership()
            .move_part(serves, leaves, hosts, unprotected_meanwhile, &reply);
        self.leaves(leaves, answer, &reply);
    }

    pub(super) fn name_standby(&mut self, hosts: Hosts, reply: Sender<Answer>) {
        let serves = self.role == Role::Primary;
        if let Some(answer) = self.membership().name_standby(serves, hosts, &reply) {
            let _ = reply.send(answer);
        }
    }

    /// Where nothing was answered that host leaves, and invariant 1 holds for its copy.
    fn leaves(&mut self, id: ReplicaId, answer: Option<Answer>, reply: &Sender<Answer>) {
        if let Some(answer) = answer {
            let _ = reply.send(answer);
            return;
        }
        if Some(id) != self.other() {
            return;
        }
        let why = "it leaves the program's group";
        match self.backup.join {
            Some(_) => self.join_fails(why),
            None => self.backup_is_lost(why),
        }
    }

    /// How far those are that leave and that come.
    pub(super) fn look_after_hosts(&mut self) {
        if let Some(entry) = self.membership().follow_leaving() {
            self.propose(&entry);
        }
        let now_us = self.now_us();
        if self.agreement.leads() && now_us >= self.peers.next_look_us {
            self.peers.next_look_us = now_us + LOOK_US;
            self.membership().tell_who_is_gone();
            self.membership().readmit_hosts();
        }
    }

    /// Whether a copy may be brought to that host (invariant 2).
    pub(super) fn may_have_a_copy(&self, id: ReplicaId) -> bool {
        let links = self.group.links();
        let link = links.iter().find(|link| link.peer == id);
        let since = self.peers.readmitted.filter(|(member, _)| *member == id);
        self.peers.leaving.is_none()
            && self.group.members().iter().any(|member| member.id == id)
            && knows_its_part(
                since.map(|(_, since)| since),
                self.group.committed(),
                link.and_then(|link| link.acknowledged),
            )
    }
}

/// Whether a member has heard that it is one, which was said by that entry, if by this leader.
fn knows_its_part(since: Option<Index>, committed: Index, heard: Option<Index>) -> bool {
    since.is_none_or(|since| since <= committed && heard.is_some_and(|heard| since <= heard))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_gets_a_copy_when_it_has_heard_that_it_is_one() {
        let said = Some(Index(7));
        assert!(
            !knows_its_part(said, Index(6), Some(Index(7))),
            "it is not agreed"
        );
        assert!(!knows_its_part(said, Index(7), None), "nothing is heard of it");
        assert!(!knows_its_part(said, Index(7), Some(Index(6))), "it is behind");
        assert!(knows_its_part(said, Index(7), Some(Index(7))));
        assert!(
            knows_its_part(None, Index(0), None),
            "it was one before this host led"
        );
    }
}
