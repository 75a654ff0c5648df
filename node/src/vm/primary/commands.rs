//! What people ask of a primary: a switchover, a backup, a comparison of its disks.
//!
//! Invariant 1: a VM that was handed over stands still here until the group has said who goes on.
//!
//! Not here: the other end of a switchover (`backup`).

use crate::events::now_ms;
use crate::vm::care::{self, Link};
use crate::vm::event::{Command, LoopEvent};
use crate::vm::shared::Ended;
use crate::vm::state::{Role, VmLoop};
use crate::vm::verification::{self, Compared};
use crossbeam_channel::Sender;
use dunlin_api::{Answer, Progress};
use dunlin_core::output::gate::Voice;
use dunlin_guest::disk::VerifyOptions;
use std::io;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Progress is told no more often than this, and no more rarely: a link on which nothing is said is hung up on.
const TELL: Duration = Duration::from_millis(200);
/// The nice value of a comparison that nobody waits for.
const LAST: i32 = 19;

/// Why the disks are not compared.
#[derive(Debug, thiserror::Error)]
enum VerifyError {
    /// Its disks are not this host's to compare.
    #[error("the VM is not here")]
    NotHere,
    /// They would be compared there.
    #[error("a thread for the comparison: {0}")]
    Thread(#[source] io::Error),
}

impl VmLoop {
    /// `failover`, `protect`, `verify-disk`: the primary's business.
    pub(in crate::vm) fn primary_command(
        &mut self,
        command: Command,
        reply: &Sender<Answer>,
    ) -> Option<Answer> {
        if !self.agreement.leads() || !matches!(self.role, Role::Primary(_)) {
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
            Command::Failover => self.begin_switchover(reply),
            Command::Policy(policy) => self.order_policy(policy, reply),
            Command::Protect if !self.policy().is_replicated() => Some(Answer::refused(format!(
                "the policy of VM '{0}' protects nothing: 'dunlin policy {0} POLICY' gives it another",
                self.config.name
            ))),
            Command::Protect => {
                // Who asks anew wants to know what comes of it now: what failed before counts no more.
                self.shown.join_complaint = None;
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
            | Command::Move { .. }
            | Command::Standby(_)
            | Command::Left { .. }
            | Command::Standing
            | Command::Inject { .. } => None,
        }
    }

    /// The comparison runs beside the VM, on a thread of its own, and answers by itself.
    fn begin_verification(&mut self, repair: bool, reply: &Sender<Answer>) -> Option<Answer> {
        if self.config.spec.images() == 0 {
            return Some(Answer::refused("this VM has no disks"));
        }
        if self.care.comparing.is_running() {
            return Some(Answer::failed(
                "the disks are being compared already, as the VM's file says ('verify_disks'): 'dunlin status' shows how far it is",
            ));
        }
        let options = VerifyOptions {
            repair,
            bytes_per_s: 0,
        };
        if self.compared_session().is_none() {
            return Some(Answer::failed(
                "there is no complete backup to compare with; wait for 'protected' in status",
            ));
        }
        let (to_whom, mut told) = (reply.clone(), None::<Instant>);
        let may_ask = move |progress: Progress| {
            let due = told.is_none_or(|told| told.elapsed() >= TELL) || progress.done == progress.total;
            if due {
                told = Some(Instant::now());
                // Whoever asked may have gone; what is found is an event all the same.
                let _ = to_whom.send(Answer::Progress(progress));
            }
            ControlFlow::Continue(())
        };
        let begun = self.verify_beside(options, Some(reply.clone()), may_ask);
        begun.err().map(|why| Answer::failed(why.to_string()))
    }

    /// The session in which a complete backup follows, and whether a sync is under way in it.
    fn compared_session(&self) -> Option<(u64, bool)> {
        let Role::Primary(primary) = &self.role else {
            return None;
        };
        let session = primary.session.as_ref()?;
        let follows = primary.epochs.is_synced() && !primary.epochs.is_handed();
        let busy = primary.epochs.is_syncing() || primary.switchover.is_some();
        (follows && primary.machine.is_some()).then_some((session.id, busy))
    }

    /// Compares the disks by the schedule, when that is due and nothing else needs the link.
    pub(in crate::vm) fn look_after_disks(&mut self) {
        let link = match self.compared_session() {
            None => Link::None,
            Some((session, true)) => Link::Busy(session),
            Some((session, false)) => Link::Free(session),
        };
        if !self.care.comparing.turn(link, now_ms()) {
            return;
        }
        let Link::Free(session) = link else { return };
        let gate = self.care.comparing.begins(session);
        let options = VerifyOptions {
            repair: false,
            bytes_per_s: self.config.disks.verify_bytes_per_s,
        };
        let begun = self.verify_beside(options, None, move |progress| gate.wait(&progress));
        if let Err(why) = begun {
            self.care
                .comparing
                .ended(Compared::Not(why.to_string()), true, now_ms());
        }
    }

    /// A thread that compares, tells the event and whoever asked, and then the loop.
    fn verify_beside(
        &mut self,
        options: VerifyOptions,
        reply: Option<Sender<Answer>>,
        may_ask: impl FnMut(Progress) -> ControlFlow<()> + Send + 'static,
    ) -> Result<(), VerifyError> {
        let (host, vm, to_loop) = (
            self.host.clone(),
            self.config.name.clone(),
            self.inbox.to_loop.clone(),
        );
        let machine = self.machine().cloned().ok_or(VerifyError::NotHere)?;
        let path = self.care.comparing.path();
        let scheduled = reply.is_none();
        let work = move || {
            if scheduled {
                // The VM's own threads, and everybody else's, go first.
                let _ = rustix::process::setpriority_process(None, LAST);
            }
            let compared = verification::run(&machine.disks, options, scheduled, may_ask);
            drop(machine);
            if let Compared::Whole(verified) = &compared
                && let Err(error) = care::keep(&path, verified)
            {
                tracing::warn!(vm, "{}: {error}", path.display());
            }
            let (kind, text) = compared.event();
            host.events.push(&vm, kind, text);
            if let Some(reply) = reply {
                // Whoever asked may have gone.
                let _ = reply.send(compared.answer());
            }
            to_loop.send(LoopEvent::Verified { compared, scheduled });
        };
        std::thread::Builder::new()
            .name("verify-disk".into())
            .spawn(work)
            .map(|_detached| ())
            .map_err(VerifyError::Thread)
    }

    pub(super) fn begin_switchover(&mut self, reply: &Sender<Answer>) -> Option<Answer> {
        let voice = self.net.output.voice();
        let primary = self.primary()?;
        // In a join's last sync the voice is that of a protected VM already, and the group has not agreed yet.
        let complete = voice == Voice::Protected && primary.epochs.is_synced();
        if !complete || primary.switchover.is_some() {
            return Some(Answer::failed(
                "there is no complete backup to hand over to; wait for 'protected' in status",
            ));
        }
        primary.switchover = Some(reply.clone());
        // A sync that is under way ends first.
        if primary.epochs.may_begin() {
            self.begin_sync(true);
        }
        None
    }

    /// A sync has ended, and a switchover was asked for while it was under way: no other sync goes before it.
    pub(super) fn begin_waiting_switchover(&mut self) {
        let leads = self.agreement.leads();
        let Some(primary) = self.primary() else { return };
        if primary.switchover.is_some() && leads && primary.epochs.may_begin() {
            self.begin_sync(true);
        } else if let Some(reply) = primary.switchover.take() {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::failed(
                "not handed over: this host no longer leads the VM's group",
            ));
        }
    }

    pub(in crate::vm) fn switchover_done(&mut self) {
        if let Some(reply) = self.primary().and_then(|primary| primary.switchover.take()) {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::done("handed over"));
        }
    }

    /// The backup did not become the leader: the VM goes on here.
    pub(in crate::vm) fn transfer_failed(&mut self) {
        let Some(primary) = self.primary() else { return };
        if !primary.epochs.switchover_failed() {
            return;
        }
        if let Some(reply) = primary.switchover.take() {
            // Whoever asked may have gone.
            let _ = reply.send(Answer::failed(
                "not handed over: the backup did not take the VM over",
            ));
        }
        self.resume_vm("after a switchover");
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
        self.ending.ended = Some(Ended {
            vm: self.config.name.clone(),
            forget: false,
        });
    }
}
