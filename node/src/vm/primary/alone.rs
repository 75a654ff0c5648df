//! A host that serves alone because a person said that the others are dead.
//!
//! Flow and invariants: core's `replica::promotion` decides; here its orders are carried out, and told.
//!
//! Not here: terms and logs (core's `consensus::alone`), how the others come back (`vm::hosts`).

use crate::vm::state::{Role, VmLoop};
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind};
use dunlin_core::replica::promotion::{self, LOST_US, Ordered};
use dunlin_core::units::ReplicaId;

impl VmLoop {
    /// What a person may do where the other hosts are lost: said once for each loss, and not because a busy host was late.
    pub(in crate::vm) fn advise_after_loss(&mut self) {
        let now_us = self.now_us();
        let heard_us = |heard_us: Option<u64>| now_us.saturating_sub(heard_us.unwrap_or(0));
        let links = self.group.links();
        let alone = matches!(self.role, Role::Primary(_))
            && self.group.leader().is_none()
            && links.iter().all(|link| heard_us(link.heard_us) > LOST_US);
        if self.cold.advice.look(alone) {
            let hosts: Vec<String> = links
                .iter()
                .map(|link| format!("'{}'", self.config.host_name(link.peer)))
                .collect();
            self.event(
                EventKind::OthersLost,
                format!(
                    "nothing was heard of host {} for {} s. A person who knows that they are dead, and not only cut off from this \
                     one, may say 'dunlin promote --force {}' here",
                    hosts.join(" and "),
                    LOST_US / 1_000_000,
                    self.config.name
                ),
            );
        }
    }

    /// A person says that the others are dead. The answer comes when this host speaks, or when it cannot.
    pub(in crate::vm) fn protect_alone(
        &mut self,
        from_disk: bool,
        force_stale: bool,
        reply: &Sender<Answer>,
    ) -> Option<Answer> {
        let sight = promotion::Sight {
            leads: self.group.is_leader(),
            leader: self.group.leader(),
            may_lead: self.may_lead(),
            fresh: self.agreement.is_fresh(),
            from_disk,
        };
        match promotion::judge(&sight) {
            Ordered::StandsAlone => self.stand_alone(reply),
            Ordered::BootsFromDisk => self.boot_by_order(force_stale, reply),
            Ordered::MajorityAnswers => Some(Answer::refused(
                "a majority of the group answers: there is no need, and it would not be safe",
            )),
            Ordered::Led(leader) => {
                let leader = self.config.host_name(leader);
                Some(Answer::refused(format!(
                    "host '{leader}' leads the VM's group and is not dead; ask it, or end its daemon first"
                )))
            }
            Ordered::NoCopy => Some(Answer::refused(format!(
                "this host holds no complete and running copy of the VM, or one that the others have gone on without; if \
                 no copy is alive anywhere, 'dunlin promote --force --from-disk {}' boots the VM from this host's disk",
                self.config.name
            ))),
        }
    }

    /// The order itself.
    pub(in crate::vm) fn stand_alone(&mut self, reply: &Sender<Answer>) -> Option<Answer> {
        let term = self.group.term();
        let others: Vec<ReplicaId> = self.group.links().iter().map(|link| link.peer).collect();
        self.group.may_lead(true);
        self.group.stand_alone();
        if self.group.term() == term {
            return Some(Answer::failed(
                "this host may not lead its group; see 'dunlin events'",
            ));
        }
        if let Some(id) = self
            .primary()
            .and_then(|primary| primary.session.as_ref().map(|session| session.id))
        {
            self.session_ended(id, "its host was declared dead");
        }
        for peer in others {
            // `promotion`, invariant 2.
            self.group.remove_link(peer);
            self.log_link_lost(peer);
        }
        self.event(
            EventKind::StandingAlone,
            "by a person's order this host serves without the others, who were declared dead; one of them that is not \
             dead starts anew when it meets this host, and what it has told clients meanwhile is lost",
        );
        self.cold.alone_ordered = Some(reply.clone());
        None
    }

    /// This host speaks, and nobody else can.
    pub(in crate::vm) fn stands_alone(&mut self) {
        if let Some(reply) = self.cold.alone_ordered.take() {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::done(
                "this host serves the VM alone, and it is NOT protected: if this host dies now, the VM is lost. Hosts \
                 that were declared dead are taken back when they return; if one was not dead, what it served since is \
                 lost.",
            ));
        }
    }

    /// The order came to nothing.
    pub(in crate::vm) fn order_failed(&mut self, why: &str) {
        if let Some(reply) = self.cold.alone_ordered.take() {
            let _ = reply.send(Answer::failed(why));
        }
    }
}
