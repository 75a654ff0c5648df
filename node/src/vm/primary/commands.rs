//! What people ask of a primary: a hand-over, a backup, a comparison of its disks.
//!
//! Invariant 1: a VM that was handed over stands still here until the group has said who goes on.
//!
//! Not here: the other end of a hand-over (`backup`).

use super::{Phase, Session};
use crate::control::Answer;
use crate::vm::Ended;
use crate::vm::event::Command;
use crate::vm::run::{Role, VmLoop};
use crate::vm::verification;
use crossbeam_channel::Sender;
use dunlin_core::output::gate::Voice;

impl VmLoop {
    /// `failover`, `protect`, `verify-disk`: the primary's business.
    pub(in crate::vm) fn primary_command(
        &mut self,
        command: Command,
        reply: &Sender<Answer>,
    ) -> Option<Answer> {
        if !self.agreement.leads || !matches!(self.role, Role::Primary(_)) {
            return Some(Answer::failed(match self.group.leader() {
                Some(leader) => format!(
                    "this host does not serve the VM now: host '{}' leads its group ('dunlin status')",
                    self.config.host_name(leader)
                ),
                None => "nobody leads the VM's group, so nobody serves it; 'dunlin events' says why, and what can be done"
                    .to_owned(),
            }));
        }
        match command {
            Command::Failover => self.begin_hand_over(reply),
            Command::Policy(policy) => self.order_policy(policy, reply),
            Command::Protect => {
                if let Some(primary) = self.primary() {
                    primary.rejoin_at_us = 0;
                }
                Some(Answer::done("a backup is looked for"))
            }
            Command::VerifyDisk { repair } => self.begin_verification(repair, reply),
            Command::Down { .. }
            | Command::ForceDown
            | Command::ProtectAlone { .. }
            | Command::Remove
            | Command::RemoveMember(_)
            | Command::Standing
            | Command::Inject { .. } => None,
        }
    }

    /// The comparison runs beside the VM, on a thread of its own, and answers by itself.
    fn begin_verification(&mut self, repair: bool, reply: &Sender<Answer>) -> Option<Answer> {
        if self.config.spec.images() == 0 {
            return Some(Answer::refused("this VM has no disks"));
        }
        let (host, vm, reply) = (self.host.clone(), self.config.name.clone(), reply.clone());
        let session = self.primary()?.session.as_ref();
        if session.is_none_or(|session| session.phase != Phase::Synced) {
            return Some(Answer::failed(
                "there is no complete backup to compare with; wait for 'protected' in status",
            ));
        }
        let machine = self.machine()?.clone();
        let work = move || {
            let (kind, answer) = verification::run(&machine.disks, repair, |progress| {
                // Whoever asked may have gone; what is found is an event all the same.
                let _ = reply.send(Answer::Progress(progress));
            });
            drop(machine);
            if let Answer::Done { text } | Answer::Failed { why: text, .. } = &answer {
                host.events.push(&vm, kind, text.clone());
            }
            let _ = reply.send(answer);
        };
        match std::thread::Builder::new().name("verify-disk".into()).spawn(work) {
            Ok(_detached) => None,
            Err(error) => Some(Answer::failed(format!("a thread for the comparison: {error}"))),
        }
    }

    pub(super) fn begin_hand_over(&mut self, reply: &Sender<Answer>) -> Option<Answer> {
        let voice = self.output.voice();
        let primary = self.primary()?;
        // In a join's last sync the voice is that of a protected VM already, and the group has not agreed yet.
        let follows = |session: &Session| session.phase == Phase::Synced;
        let complete = voice == Voice::Protected && primary.session.as_ref().is_some_and(follows);
        if !complete || primary.hand_over.is_some() {
            return Some(Answer::failed(
                "there is no complete backup to hand over to; wait for 'protected' in status",
            ));
        }
        primary.hand_over = Some(reply.clone());
        // A sync that is under way ends first.
        if primary.sync.is_none() {
            self.begin_sync(true);
        }
        None
    }

    /// A sync has ended, and a hand-over was asked for while it was under way: no other sync goes before it.
    pub(super) fn begin_waiting_hand_over(&mut self) {
        let leads = self.agreement.leads;
        let Some(primary) = self.primary() else { return };
        if primary.hand_over.is_some() && leads {
            self.begin_sync(true);
        } else if let Some(reply) = primary.hand_over.take() {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::failed(
                "not handed over: this host no longer leads the VM's group",
            ));
        }
    }

    pub(in crate::vm) fn hand_over_done(&mut self) {
        if let Some(reply) = self.primary().and_then(|primary| primary.hand_over.take()) {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::done("handed over"));
        }
    }

    /// The backup did not become the leader: the VM goes on here.
    pub(in crate::vm) fn transfer_failed(&mut self) {
        let Some(primary) = self.primary() else { return };
        if !std::mem::take(&mut primary.handed) {
            return;
        }
        if let Some(reply) = primary.hand_over.take() {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::failed(
                "not handed over: the backup did not take the VM over",
            ));
        }
        self.resume_vm("after a hand-over");
        self.forget_cut();
        match self
            .primary()
            .and_then(|primary| primary.session.as_ref().map(|session| session.id))
        {
            Some(id) => self.session_ended(id, "the backup did not take the VM over"),
            None => self.drop_backup(),
        }
    }

    /// The daemon ends: whoever is left goes on.
    pub(in crate::vm) fn shut_down_host(&mut self) {
        self.ending = Some(Ended {
            vm: self.config.name.clone(),
            forget: false,
        });
    }
}
