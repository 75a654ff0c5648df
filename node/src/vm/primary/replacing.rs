//! A dead host's place for a new machine of the same name: `dunlin replace`.
//!
//! The new machine has no memory of what the old one promised or acknowledged. Were it to speak with the old one's voice, a
//! majority could be counted that never was. So the others first agree to go on without that member; only then does the
//! new machine hear of the VM, and it is made a member anew.
//!
//! Invariant 1: nobody is told that a member has left before that is agreed.
//!
//! Not here: how it comes back (`alone`: as any host that is not a member), its copy of the VM (`joining`).

use crate::control::Answer;
use crate::vm::run::{Role, VmLoop};
use crossbeam_channel::Sender;
use dunlin_core::consensus::Member;
use dunlin_core::units::ReplicaId;

impl VmLoop {
    /// The answer comes when it is agreed.
    pub(in crate::vm) fn remove_member(&mut self, id: ReplicaId, reply: &Sender<Answer>) -> Option<Answer> {
        if !self.agreement.leads || !matches!(self.role, Role::Primary(_)) {
            return Some(Answer::failed(
                "this host does not serve the VM; ask the one that does ('dunlin status')",
            ));
        }
        let host = self.config.host_name(id).to_owned();
        if id == self.me || self.is_connected(id) {
            return Some(Answer::refused(format!(
                "host '{host}' takes part in the VM's group: there is nothing to replace"
            )));
        }
        let members = self.group.members();
        if members.iter().all(|member| member.id != id) {
            return Some(Answer::done("it has left"));
        }
        let rest: Vec<Member> = members.iter().filter(|member| member.id != id).copied().collect();
        match self.group.change_members(rest) {
            Ok(index) => {
                self.event(
                    "removed",
                    format!("by a person's order the group goes on without host '{host}'"),
                );
                if let Some(primary) = self.primary() {
                    primary.leaving = Some((index, reply.clone()));
                }
                None
            }
            Err(refusal) => Some(Answer::failed(format!(
                "host '{host}' cannot leave the group now: {refusal}; try again when all other hosts answer"
            ))),
        }
    }

    /// Invariant 1.
    pub(super) fn say_who_left(&mut self) {
        let (committed, leads) = (self.group.committed(), self.agreement.leads);
        let Some(primary) = self.primary() else { return };
        let decided = |(index, _): &mut (_, _)| *index <= committed || !leads;
        if let Some((_, reply)) = primary.leaving.take_if(decided) {
            // Whoever asked may have gone.
            let _ = reply.send(match leads {
                true => Answer::done("it has left"),
                false => Answer::failed("this host leads the group no more; say it again"),
            });
        }
    }
}
