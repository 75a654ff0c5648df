//! The end of a VM: by its group's agreement, or, where no group is left to agree, on this host alone.
//!
//! Flow: `dunlin down` -> core's `replica::shutdown`, whose order of things holds here -> the guest is asked, by a thread; `Agreed::Down` is proposed; other
//! hosts are told, by a thread; the VM is forgotten.
//!
//! Invariants, besides those of `replica::shutdown`:
//! 1. A host forgets a VM only when no start of its QEMU is under way: whoever starts it next finds its disks free.
//! 2. The loop waits for no word of QEMU: a loop that is away falls silent, and the others would take its host for dead.
//! 3. A host forgets a VM when nothing [remains](super::remains) of its machine there, or when that has had its time (`machine-ends`):
//!    then the answer says so. The image stays locked as long as the disk of that machine is there, so that no other machine has both.
//!    Until then the loop turns.
//!
//! Not here: what is forgotten (`daemon::store`), the entry itself (`agreement`).

use super::event::LoopEvent;
use super::group::{self, AGAIN};
use super::shared::Ended;
use super::state::ending::{AskGuestError, answer_all};
use super::state::{Role, VmLoop};
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind};
use dunlin_core::agreed::{Agreed, Life};
use dunlin_core::replica::leadership::Part;
use dunlin_core::replica::shutdown::{AgreedEnd, Shutdown, Sight, Turn};
use dunlin_core::waits::Wait;
use dunlin_core::wire::agreed;
use std::sync::atomic::Ordering;

impl VmLoop {
    /// It is carried out at the end of this step, or of a later one.
    pub(super) fn order_down(&mut self, now: bool, reply: &Sender<Answer>) {
        let now_us = self.now_us();
        self.ending.shutdown.order(now_us, now, reply.clone());
    }

    /// Whether this host may lead although it has nothing to serve.
    pub(super) fn leads_to_end(&self) -> bool {
        let life = self.agreement.state().life;
        self.ending.shutdown.leads_to_end(self.witness, life)
    }

    /// An end that is agreed waits for no sync.
    pub(super) fn skip_to_agreed_end(&mut self) {
        if !self.log_is_held() {
            return;
        }
        let (applied, committed) = (self.agreement.applied, self.group.committed());
        let is_end = |index| {
            let entry = self.group.entry(index).map(|entry| entry.payload.clone());
            entry.is_some_and(|payload| matches!(agreed::decode(payload), Ok(Agreed::Down)))
        };
        let end = self.agreement.leadership.appended_end();
        if let Some(index) = Shutdown::<()>::skips_to(end, applied, committed, is_end) {
            self.forget_cut();
            self.agreement.applied = index;
        }
    }

    /// The group has agreed, and if it is for this host to tell the others, that is done.
    pub(super) fn answer_ended(&mut self) {
        if self.ending.shutdown.is_done(self.agreement.state().life) {
            let answer = self.how_it_ended();
            answer_all(self.ending.shutdown.take_orders(), &answer);
        }
    }

    /// Invariant 3, in words.
    fn how_it_ended(&self) -> Answer {
        let mut busy = self.ending.busy_elsewhere.clone();
        if !self.shared.remains.is_none() {
            busy.push(lets_not_go(&self.host.name));
        }
        match busy.is_empty() {
            true => Answer::done("the VM is ended"),
            false => Answer::failed(format!(
                "VM '{}' is ended, and {}: it can be started again there when that disk answers",
                self.config.name,
                busy.join(", and ")
            )),
        }
    }

    /// Carries out what was ordered, if it can be now.
    pub(super) fn end_by_order(&mut self) {
        // What still ends here is not waited for in a step (invariant 3).
        if self.has_let_go() {
            self.answer_ended();
        }
        let sight = self.sight_of_the_end();
        match self.ending.shutdown.turn(&sight) {
            Turn::Nothing => {}
            Turn::Refers(leader, orders) => {
                let why = format!("host '{}' leads the VM's group", self.config.host_name(leader));
                answer_all(orders, &Answer::Failed { why, code: AGAIN });
            }
            Turn::AsksGuest => self.ask_guest(),
            Turn::GuestAsked(orders) => {
                answer_all(orders, &Answer::done("the guest was asked to switch itself off"));
            }
            Turn::Says { unasked } => {
                if unasked {
                    let why = format!("the VM is ended without its guest: {}", self.ending.why_unasked);
                    self.event(EventKind::GuestNotAsked, why);
                }
                if self.propose(&Agreed::Down) {
                    self.ending.shutdown.said(sight.term);
                }
            }
        }
        let late = self
            .ending
            .shutdown
            .overdue(sight.now_us, self.agreement.state().life);
        if !late.is_empty() {
            answer_all(late, &Answer::failed(self.why_not_ended()));
        }
    }

    fn sight_of_the_end(&self) -> Sight {
        Sight {
            now_us: self.now_us(),
            term: self.group.term(),
            life: self.agreement.state().life,
            leader_elsewhere: self.group.leader().filter(|leader| *leader != self.me),
            leads: self.agreement.leads() && self.group.is_leader(),
            part: match &self.role {
                Role::None => Part::None,
                Role::Primary(_) => Part::Primary,
                Role::Backup(_) => Part::Backup,
            },
            has_guest: matches!(&self.role, Role::Primary(primary) if primary.has_machine()),
        }
    }

    /// The end is agreed.
    pub(super) fn end_is_agreed(&mut self) {
        let now_us = self.now_us();
        match self.ending.shutdown.agreed(now_us, self.group.is_leader()) {
            AgreedEnd::Tells => self.tell_the_end(),
            AgreedEnd::Awaits | AgreedEnd::Nothing => {}
        }
    }

    fn tell_the_end(&mut self) {
        if let Err(error) = group::tell_the_end(&self.host, &self.config, self.me, &self.inbox.to_loop) {
            tracing::error!("a thread to tell the other hosts of the VM's end: {error}");
            self.forget_vm(false);
        }
    }

    /// Who led has not said a word.
    pub(super) fn forget_untold(&mut self) {
        if self.ending.shutdown.is_untold(self.now_us()) {
            self.forget_vm(false);
        }
    }

    /// All hosts that can be reached have heard of it.
    pub(super) fn end_told(&mut self, busy: Vec<String>) {
        self.ending.busy_elsewhere = busy;
        self.forget_vm(false);
    }

    /// The copy of the VM here ends for good.
    pub(super) fn end_machine(&mut self) {
        if self.agreement.state().life == Life::Down {
            // There will be no copy of it. Known before the copy has gone: whoever feeds a standby out of it tells that.
            self.shared.over.store(true, Ordering::SeqCst);
        }
        self.drop_machine();
        let until_us = self.now_us() + Wait::MachineEnds.bound().as_micros() as u64;
        self.ending.lets_go_by_us.get_or_insert(until_us);
    }

    /// Nothing of the VM is left to do here.
    pub(super) fn forget_vm(&mut self, by_force: bool) {
        self.end_machine();
        self.ending
            .shutdown
            .forgets(self.agreement.state().life, by_force);
        if self.agreement.state().life == Life::Down {
            self.host.held_memory.forget(&self.config.name);
        }
        self.ending.ended = Some(Ended {
            vm: self.config.name.clone(),
            forget: true,
        });
    }

    /// Invariant 2.
    fn ask_guest(&mut self) {
        // Not the machine: whoever forgets the VM frees its disks (invariant 1).
        let Some(qmp) = self.machine().map(|machine| machine.qemu.qmp().clone()) else {
            return;
        };
        let to_loop = self.inbox.to_loop.clone();
        let ask = move || {
            let asked = qmp.execute("system_powerdown", ().into());
            to_loop.send(LoopEvent::GuestAsked(
                asked.map(drop).map_err(AskGuestError::from),
            ));
        };
        let thread = std::thread::Builder::new().name("ask-guest".into()).spawn(ask);
        if let Err(error) = thread {
            self.guest_was_asked(Err(AskGuestError::Thread(error)));
        }
    }

    /// What became of it.
    pub(super) fn guest_was_asked(&mut self, asked: Result<(), AskGuestError>) {
        self.ending.shutdown.guest_was_asked(asked.is_ok());
        if let Err(why) = asked {
            self.ending.why_unasked = why.to_string();
        }
    }

    /// The guest was asked and is still there.
    pub(super) fn end_ignoring_guest(&mut self) {
        let (now_us, term) = (self.now_us(), self.group.term());
        if self.ending.shutdown.guest_ignores(now_us, term)
            && self.propose(&Agreed::Down)
            && self.ending.shutdown.ignored_end_was_said(term)
        {
            self.event(
                EventKind::PowerdownIgnored,
                "the guest did not switch itself off in time; it is ended",
            );
        }
    }

    /// Why nothing is agreed, in words.
    fn why_not_ended(&self) -> String {
        let vm = &self.config.name;
        let here = &self.host.name;
        let away: Vec<String> = self
            .others()
            .filter(|(_, connected)| !connected)
            .map(|(name, _)| format!("'{name}'"))
            .collect();
        let why = if self.witness {
            format!("nobody leads its group, and host '{here}' is only its witness")
        } else if away.is_empty() {
            "its hosts are there, and none of them can lead ('dunlin events' says why)".to_owned()
        } else {
            format!(
                "no majority of its hosts can agree to that: {} cannot be reached",
                away.join(" and ")
            )
        };
        let changed = match self.ending.shutdown.was_said() {
            true => "It may be agreed yet.",
            false => "Nothing was changed.",
        };
        format!(
            "VM '{vm}' is not ended: {why}. {changed} If no host serves it any more, 'dunlin down --force {vm}' \
             takes it away from host '{here}' alone"
        )
    }

    fn others(&self) -> impl Iterator<Item = (&str, bool)> {
        self.config
            .group
            .iter()
            .filter(|host| host.member.id != self.me)
            .map(|host| (host.name.as_str(), self.is_connected(host.member.id)))
    }

    /// On this host alone.
    pub(super) fn force_down(&mut self) -> Answer {
        let vm = self.config.name.clone();
        let orders = match self.ending.shutdown.force(self.group.leader()) {
            Ok(orders) => orders,
            Err(leader) => {
                return Answer::refused(format!(
                    "host '{}' leads the VM's group: 'dunlin down {vm}' ends it on all hosts, and --force is for a VM that \
                     nobody leads",
                    self.config.host_name(leader)
                ));
            }
        };
        let others: Vec<String> = self.others().map(|(name, _)| format!("'{name}'")).collect();
        let others = match others.as_slice() {
            [] => String::new(),
            names => format!(
                " Nothing was said to {}: whoever of them lives goes on as it can, and whoever returns keeps its part of the \
                 VM until 'dunlin down --force {vm}' is said there.",
                names.join(" and ")
            ),
        };
        let text = format!(
            "VM '{vm}' is taken away from host '{}', and nobody has agreed to it.{others} Its disks stay as they are.",
            self.host.name
        );
        self.event(EventKind::DownByForce, text.clone());
        answer_all(
            orders,
            &Answer::done("the VM was taken away from this host by force"),
        );
        self.forget_vm(true);
        Answer::done(text)
    }

    /// The loop ends, and something of its machine remains (invariant 3).
    pub(super) fn tell_of_remains(&self) {
        let forgets = self.ending.ended.as_ref().is_some_and(|ended| ended.forget);
        if forgets && !self.shared.remains.is_none() {
            let why = Wait::MachineEnds.said_of(Wait::MachineEnds.bound());
            self.event(
                EventKind::EndsLate,
                format!(
                    "the VM is forgotten here, but its images stay locked until their disk answers: {why}"
                ),
            );
        }
    }

    /// Whether the loop may end (invariants 1 and 3; a daemon that ends takes its QEMUs with it).
    pub(super) fn is_over(&self) -> bool {
        let ends = |ended: &Ended| !ended.forget || (self.ending.starts_under_way == 0 && self.has_let_go());
        self.ending.ended.as_ref().is_some_and(ends)
    }

    /// Invariant 3.
    fn has_let_go(&self) -> bool {
        self.shared.remains.is_none()
            || self
                .ending
                .lets_go_by_us
                .is_some_and(|by_us| by_us <= self.now_us())
    }
}

/// What is said of a host where something of a VM that has ended remains.
pub fn lets_not_go(host: &str) -> String {
    format!("host '{host}' still waits for a disk of it that does not answer")
}
