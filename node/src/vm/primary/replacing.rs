//! A host's place for another one, of a VM that this host serves: its copy is the VM's no longer.
//!
//! Not here: how the group goes on without it (`vm::replacing`), how another one comes back (`hosts`: as any host that is not a member), its copy of
//! the VM (`joining`).

use crate::vm::state::{Role, VmLoop};
use crossbeam_channel::Sender;
use dunlin_api::Answer;
use dunlin_core::agreed::Hosts;
use dunlin_core::units::ReplicaId;

impl VmLoop {
    /// The answer comes when it is agreed.
    pub(in crate::vm) fn remove_member(&mut self, id: ReplicaId, reply: &Sender<Answer>) -> Option<Answer> {
        let serves = self.is_primary();
        let answer = self.membership().remove_member(serves, id, reply);
        self.ends_session_with(id, answer)
    }

    /// Another host gets the part of `leaves`. The answer comes when the group knows it.
    pub(in crate::vm) fn move_part(
        &mut self,
        leaves: ReplicaId,
        hosts: Hosts,
        unprotected_meanwhile: bool,
        reply: &Sender<Answer>,
    ) -> Option<Answer> {
        let serves = self.is_primary();
        let answer = self
            .membership()
            .move_part(serves, leaves, hosts, unprotected_meanwhile, reply);
        self.ends_session_with(leaves, answer)
    }

    /// Another host is the standby, or none. The answer comes when the group knows it.
    pub(in crate::vm) fn name_standby(&mut self, hosts: Hosts, reply: &Sender<Answer>) -> Option<Answer> {
        let serves = self.is_primary();
        self.membership().name_standby(serves, hosts, reply)
    }

    fn is_primary(&self) -> bool {
        matches!(self.role, Role::Primary(_))
    }

    /// Where it leaves, its copy is one of the VM's no longer, however well it is.
    fn ends_session_with(&mut self, id: ReplicaId, answer: Option<Answer>) -> Option<Answer> {
        let session = self.primary().and_then(|primary| primary.session.as_ref());
        let session = session.filter(|session| session.peer == id && answer.is_none());
        if let Some(session) = session.map(|session| session.id) {
            self.session_ended(session, "its host leaves the VM's group");
        }
        answer
    }

    /// How far that is, whatever this host has become meanwhile.
    pub(in crate::vm) fn follow_leaving(&mut self) {
        if let Some(entry) = self.membership().follow_leaving() {
            self.propose(&entry);
        }
    }
}
