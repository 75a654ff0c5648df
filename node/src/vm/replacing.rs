//! A host's place in the group of a VM or a bare program, for another one: for a new machine of the same name (`dunlin replace`), or for a host of
//! another name (`dunlin move`). And who is the standby, which is a place in the same list.
//!
//! The new machine has no memory of what the old one promised or acknowledged. Were it to speak with the old one's voice, a
//! majority could be counted that never was. So the others first agree to go on without that member; only then does the
//! new machine hear of the VM, and it is made a member anew.
//!
//! Flow of a move: the group goes on without the member -> it agrees on the list with the new host, whose number is new -> the new host is told.
//!
//! Invariants:
//! 1. Nobody is told that a member has left before that is agreed.
//! 2. A list names a new host only after the group has gone on without the old one, said by the same leader.
//! 3. A list that names a standby is said only to a group of which each member can read it.
//!
//! Not here: what becomes of the old host's copy (each loop's own), how a host comes in (`hosts`: as any that is not a member), how a list is
//! followed (`hosts`).

use super::group;
use super::hosts::Membership;
use super::state::hosts::Leaving;
use crate::config::{NAMES_STANDBY_SINCE, newest, readable_by};
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind};
use dunlin_core::agreed::{Agreed, Hosts};
use dunlin_core::consensus::Member;
use dunlin_core::units::{Index, ReplicaId};

impl Membership<'_> {
    /// The answer comes when it is agreed. `serves`: here it is served from. `None`: that member leaves, and its copy is one no longer.
    pub(in crate::vm) fn remove_member(
        &mut self,
        serves: bool,
        id: ReplicaId,
        reply: &Sender<Answer>,
    ) -> Option<Answer> {
        if let Some(refused) = self.may_let_go(serves) {
            return Some(refused);
        }
        let host = self.config.host_name(id);
        if id == self.me || group::is_connected(self.group, id) {
            return Some(Answer::refused(format!(
                "host '{host}' takes part in the VM's group: there is nothing to replace"
            )));
        }
        if self.group.members().iter().all(|member| member.id != id) {
            return Some(Answer::done("it has left"));
        }
        self.let_go(id, None, reply)
    }

    /// Another host gets the part of `leaves`. The answer comes when the group knows it. `None`: as above.
    pub(in crate::vm) fn move_part(
        &mut self,
        serves: bool,
        leaves: ReplicaId,
        hosts: Hosts,
        unprotected_meanwhile: bool,
        reply: &Sender<Answer>,
    ) -> Option<Answer> {
        if let Some(refused) = self.may_let_go(serves) {
            return Some(refused);
        }
        if newest(&hosts) != self.config.newest_number() + 1 || leaves == self.me {
            return Some(changed());
        }
        let host = self.config.host_name(leaves);
        let is_well =
            group::is_connected(self.group, leaves) && self.agreement.state().complete.contains(leaves);
        if is_well && !unprotected_meanwhile {
            let noun = self.config.noun();
            return Some(Answer::refused(format!(
                "host '{host}' is the {noun}'s backup, and well: without it the {noun} is NOT protected until the new host has its copy. \
                 '--unprotected-meanwhile' says that this is meant"
            )));
        }
        self.let_go(leaves, Some(hosts), reply)
    }

    /// Another host is the standby, or none. The answer comes when the group knows it.
    pub(in crate::vm) fn name_standby(
        &mut self,
        serves: bool,
        hosts: Hosts,
        reply: &Sender<Answer>,
    ) -> Option<Answer> {
        if let Some(refused) = self.may_let_go(serves) {
            return Some(refused);
        }
        if newest(&hosts) != self.config.newest_number() + 1 {
            return Some(changed());
        }
        if let Some(why) = cannot_read(self.group.protocol()) {
            return Some(why);
        }
        self.peers.leaving = Some(Leaving {
            since: Index(0),
            term: self.group.term(),
            hosts: Some(hosts),
            names_standby: true,
            said: false,
            reply: reply.clone(),
        });
        None
    }

    fn may_let_go(&self, serves: bool) -> Option<Answer> {
        if !self.agreement.leads() || !serves {
            return Some(Answer::failed(
                "this host does not serve the VM; ask the one that does ('dunlin status')",
            ));
        }
        let busy = self.peers.leaving.is_some();
        busy.then(|| Answer::failed("another host is about to leave the VM's group: say it again"))
    }

    /// By now it is meant.
    fn let_go(&mut self, id: ReplicaId, hosts: Option<Hosts>, reply: &Sender<Answer>) -> Option<Answer> {
        let host = self.config.host_name(id);
        let members = self.group.members();
        let rest: Vec<Member> = members.iter().filter(|member| member.id != id).copied().collect();
        let since = match rest.len() == members.len() {
            // It has left, and what was to follow did not.
            true => Index(0),
            false => match self.group.change_members(rest) {
                Ok(index) => index,
                Err(refusal) => {
                    return Some(Answer::failed(format!(
                        "host '{host}' cannot leave the group now: {refusal}; try again when all other hosts answer"
                    )));
                }
            },
        };
        self.event(
            EventKind::Removed,
            format!("the group goes on without host '{host}', for another one in its place"),
        );
        self.peers.leaving = Some(Leaving {
            since,
            term: self.group.term(),
            hosts,
            names_standby: false,
            said: false,
            reply: reply.clone(),
        });
        None
    }

    /// Invariants 1 and 2. What is to be proposed now, if anything is.
    #[must_use]
    pub(in crate::vm) fn follow_leaving(&mut self) -> Option<Agreed> {
        let leaving = self.peers.leaving.as_mut()?;
        let leads = self.agreement.leads() && self.group.term() == leaving.term;
        let agreed = &self.agreement.state().hosts;
        let is_known = match (&leaving.hosts, agreed) {
            (None, _) => true,
            (Some(hosts), Some(agreed)) => newest(agreed) >= newest(hosts),
            (Some(_), None) => false,
        };
        let left = leads && leaving.since <= self.group.committed();
        if left && is_known || !leads {
            let answer = match leads {
                true => Answer::done("it has left"),
                false => Answer::failed("this host leads the group no more; say it again"),
            };
            // Whoever asked may have gone.
            let _ = leaving.reply.send(answer);
            self.peers.leaving = None;
            return None;
        }
        let hosts = leaving.hosts.clone().filter(|_| left && !leaving.said)?;
        let protocol = self.group.protocol();
        // A host may have gone since it was asked for.
        if leaving.names_standby
            && let Some(why) = cannot_read(protocol)
        {
            let _ = leaving.reply.send(why);
            self.peers.leaving = None;
            return None;
        }
        leaving.said = true;
        // Invariant 3: where a part moves, each host knows by itself who is the standby then.
        Some(Agreed::Hosts(readable_by(&hosts, protocol)))
    }
}

/// Why a list that names a standby is not said to a group (invariant 3), if it is not.
fn cannot_read(protocol: Option<u16>) -> Option<Answer> {
    match protocol {
        Some(version) if version >= NAMES_STANDBY_SINCE => None,
        Some(_) => Some(Answer::failed(
            "a host of its group runs an older version of dunlin, which knows of no other standby: upgrade it first",
        )),
        None => Some(Answer::failed(
            "a host of its group is not there, and may come back with an older version of dunlin: try again when all of them answer",
        )),
    }
}

fn changed() -> Answer {
    Answer::failed(
        "the VM's hosts have just changed: see 'dunlin status', and say it again if it is still wanted",
    )
}
