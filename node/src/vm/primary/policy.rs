//! Another policy while the VM runs.
//!
//! Invariants:
//! 1. All members of the group change at the same entry of the log; it is in its snapshots, too.
//! 2. A backup follows under one policy from its join to its end: at the entry it is dropped, by agreement as any other, and
//!    brought in anew. The VM runs on meanwhile, unprotected.
//!
//! Not here: what the policies are (core's `policy`).

use crate::vm::state::VmLoop;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind};
use dunlin_core::agreed::Agreed;
use dunlin_core::policy::Policy;
use dunlin_core::replica::epoch::Rules;

impl VmLoop {
    /// How the VM is replicated: as its file says, unless the group has agreed on something else.
    pub(in crate::vm) fn policy(&self) -> Policy {
        match self.config.speculative {
            // Its shadow sockets are for the policy beside which its file says so, whatever was agreed before.
            true => self.config.policy,
            false => self.agreement.state().policy.unwrap_or(self.config.policy),
        }
    }

    /// What holds where nobody follows, and in the epoch after a join.
    pub(in crate::vm) fn first_rules(&self) -> Rules {
        Rules::first(self.policy(), self.config.speculative)
    }

    /// Its name for people, and for the host that is to follow: both have to do the same.
    pub(in crate::vm) fn policy_name(&self) -> &'static str {
        match (self.config.speculative, self.policy()) {
            (true, Policy::Dunlin) => "dunlin+spec",
            (true, _) => "remus+spec",
            (false, policy) => policy.name(),
        }
    }

    /// A person wants another policy. The answer comes when it is agreed, and the old backup dropped.
    pub(super) fn order_policy(&mut self, policy: Policy, reply: &Sender<Answer>) -> Option<Answer> {
        if policy == self.policy() {
            return Some(Answer::done(format!("the policy is '{}' already", policy.name())));
        }
        if self.config.speculative {
            return Some(Answer::refused(
                "this VM's file says 'speculative = true': its policy is what the file says ('remus' or 'dunlin'): change the file, and start it anew",
            ));
        }
        if policy.is_replicated()
            && self
                .config
                .group
                .iter()
                .all(|host| host.member.id == self.me || host.member.witness)
        {
            return Some(Answer::refused(format!(
                "policy '{}' needs a second host in members, and a witness: change the VM's file, and start it anew",
                policy.name()
            )));
        }
        if self.agreement.policy_ordered.is_some() {
            return Some(Answer::failed(
                "another change of the policy is under way: say it again",
            ));
        }
        if !self.propose(&Agreed::Policy(policy)) {
            return Some(Answer::failed("this host leads the group no more: say it again"));
        }
        self.agreement.policy_ordered = Some(reply.clone());
        None
    }

    /// The group has agreed on another policy (invariant 1).
    pub(in crate::vm) fn policy_agreed(&mut self, policy: Policy) {
        let text = self.policy_in_words(policy);
        self.event(EventKind::Policy, text);
        let first = self.first_rules();
        let Some(primary) = self.primary() else { return };
        primary.pace.change_over = None;
        primary.epochs.policy_changed(first);
        primary.rejoin_at_us = 0;
        if let Some(id) = primary.session.as_ref().map(|session| session.id) {
            // Invariant 2.
            self.session_ended(id, "the policy was changed");
            if let Some(primary) = self.primary() {
                primary.rejoin_at_us = 0;
            }
        }
        self.policy_settled();
    }

    /// Nobody follows under the policy of before: whoever asked may wait for the next backup.
    pub(super) fn policy_settled(&mut self) {
        if self.agreement.state().complete.len() > 1 {
            return;
        }
        if let Some(reply) = self.agreement.policy_ordered.take() {
            // Whoever asked may have gone: here and below.
            let _ = reply.send(Answer::done(self.policy_in_words(self.policy())));
        }
    }

    fn policy_in_words(&self, policy: Policy) -> String {
        match policy {
            Policy::None => {
                "by a person's order the VM is NOT protected any more: if its host dies now, it is lost"
                    .to_owned()
            }
            policy => format!(
                "the VM is replicated by policy '{}' from now on; its backup is brought in anew",
                policy.name()
            ),
        }
    }

    /// The order for another policy came to nothing, as far as this host knows.
    pub(in crate::vm) fn policy_order_failed(&mut self, why: &str) {
        if let Some(reply) = self.agreement.policy_ordered.take() {
            let _ = reply.send(Answer::failed(why));
        }
    }
}
