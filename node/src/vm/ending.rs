//! The end of a VM: by its group's agreement, or, where no group is left to agree, on this host alone.
//!
//! Flow: `dunlin down` -> an *order*, which waits for a leader -> this host leads: the guest is asked to switch itself off, by a
//! thread, and if it cannot be asked, `Agreed::Down` is proposed -> every member forgets the VM. Another host leads: whoever asked is
//! sent there.
//!
//! Invariants:
//! 1. A host with an order may be elected without a living copy, since a VM that failed or never ran has to end too; all
//!    that it does as leader is to have `Down` agreed.
//!    An order lasts until that is agreed: without it the host would give up the lead with `Down` on its way.
//! 2. If nothing is agreed within [`PATIENCE_US`] the answer says so, and what can be done.
//! 3. An end by force concerns this host alone, and is refused while a leader is known.
//! 4. Who led when the end was agreed tells each other host, and is the last to forget: one whose link did not stand yet
//!    has to hear of it too, and no host may hear of it when the next VM of that name is there. The others wait for that word.
//!    Whoever ordered it is answered when the hosts that can be reached have forgotten the VM: then nothing of it runs there.
//! 5. An end that is agreed waits for no sync.
//! 6. A host forgets a VM only when no start of its QEMU is under way: whoever starts it next finds its disks free.
//! 7. The loop waits for no word of QEMU: a loop that is away falls silent, and the others would take its host for dead.
//! 8. A host forgets a VM when nothing [remains](super::remains) of its machine there, or when that has had its time (`machine-ends`):
//!    then the answer says so. The image stays locked as long as the disk of that machine is there, so that no other machine has both.
//!    Until then the loop turns.
//!
//! Not here: what is forgotten (`daemon::store`), the entry itself (`agreement`).

use super::event::LoopEvent;
use super::group::{self, AGAIN, TOLD};
use super::shared::Ended;
use super::state::ending::{AskGuestError, GuestAsked, Order};
use super::state::{Role, VmLoop};
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind};
use dunlin_core::agreed::{Agreed, Life};
use dunlin_core::units::Index;
use dunlin_core::waits::Wait;
use dunlin_core::wire::agreed;

/// How long an order waits for a leader: an election takes a twentieth of it, on a busy machine a fifth.
const PATIENCE_US: u64 = 5_000_000;

impl VmLoop {
    /// It is carried out at the end of this step, or of a later one.
    pub(super) fn order_down(&mut self, now: bool, reply: &Sender<Answer>) {
        self.ending.orders.push(Order {
            now,
            until_us: self.now_us() + PATIENCE_US,
            reply: reply.clone(),
        });
    }

    /// Whether this host may lead although it has nothing to serve (invariant 1).
    pub(super) fn leads_to_end(&self) -> bool {
        !self.witness && !self.ending.orders.is_empty() && self.agreement.state().life != Life::Down
    }

    /// Invariant 5: a sync whose guest takes nothing any more would hold it back for good, and the
    /// hosts that have ended the VM already would look as if they were lost.
    pub(super) fn skip_to_agreed_end(&mut self) {
        let end = self.agreement.leadership.appended_end().filter(|end| {
            self.log_is_held() && self.agreement.applied < *end && *end <= self.group.committed()
        });
        // An entry that was never agreed may have been replaced.
        let is_end = |index: &Index| {
            let entry = self.group.entry(*index).map(|entry| entry.payload.clone());
            entry.is_some_and(|payload| matches!(agreed::decode(payload), Ok(Agreed::Down)))
        };
        if let Some(end) = end.filter(is_end) {
            self.forget_cut();
            self.agreement.applied = Index(end.0 - 1);
        }
    }

    /// The group has agreed, and if it is for this host to tell the others, that is done (invariant 4).
    pub(super) fn answer_ended(&mut self) {
        let still_tells = self.ending.tells_end && self.ending.ended.is_none();
        if self.agreement.state().life == Life::Down && !still_tells {
            let answer = self.how_it_ended();
            self.answer_orders(&answer);
        }
    }

    /// Invariant 8, in words.
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
        // What still ends here is not waited for in a step (invariant 8).
        if self.has_let_go() {
            self.answer_ended();
        }
        if self.ending.orders.is_empty() || self.agreement.state().life == Life::Down {
            return;
        }
        if let Some(leader) = self.group.leader().filter(|leader| *leader != self.me) {
            let why = format!("host '{}' leads the VM's group", self.config.host_name(leader));
            return self.answer_orders(&Answer::Failed { why, code: AGAIN });
        }
        if self.agreement.leads() && self.group.is_leader() {
            let now = self.ending.orders.iter().any(|order| order.now);
            if let Some(answer) = self.begin_down(now) {
                return self.answer_orders(&answer);
            }
        }
        let now_us = self.now_us();
        if self.ending.orders.iter().any(|order| order.until_us <= now_us) {
            let answer = Answer::failed(self.why_not_ended());
            self.ending.orders.retain(|order| {
                let waits = order.until_us > now_us;
                if !waits {
                    // Whoever asked may have gone: here and below.
                    let _ = order.reply.send(answer.clone());
                }
                waits
            });
            if self.ending.orders.is_empty() {
                self.ending.guest_asked = None;
            }
        }
    }

    /// This host leads, and the end is agreed (invariant 4).
    pub(super) fn tell_the_end(&mut self) {
        if std::mem::replace(&mut self.ending.tells_end, true) {
            return;
        }
        if let Err(error) = group::tell_the_end(&self.host, &self.config, self.me, &self.inbox.to_loop) {
            tracing::error!("a thread to tell the other hosts of the VM's end: {error}");
            self.forget_vm();
        }
    }

    /// Another host led when the end was agreed. It may not know of that yet: it still needs this host's word that it holds the
    /// entry, so the group is not left before it says that it knows (invariant 4), or has had its time.
    pub(super) fn await_word_of_the_end(&mut self) {
        let until_us = self.now_us() + TOLD.as_micros() as u64;
        self.ending.forgets_at_us.get_or_insert(until_us);
    }

    /// Who led has not said a word.
    pub(super) fn forget_untold(&mut self) {
        if self
            .ending
            .forgets_at_us
            .is_some_and(|at_us| at_us <= self.now_us())
        {
            self.forget_vm();
        }
    }

    /// All hosts that can be reached have heard of it.
    pub(super) fn end_told(&mut self, busy: Vec<String>) {
        self.ending.busy_elsewhere = busy;
        self.forget_vm();
    }

    /// The copy of the VM here ends for good.
    pub(super) fn end_machine(&mut self) {
        self.drop_machine();
        let until_us = self.now_us() + Wait::MachineEnds.bound().as_micros() as u64;
        self.ending.lets_go_by_us.get_or_insert(until_us);
    }

    /// Nothing of the VM is left to do here.
    pub(super) fn forget_vm(&mut self) {
        self.end_machine();
        self.ending.ended = Some(Ended {
            vm: self.config.name.clone(),
            forget: true,
        });
    }

    fn answer_orders(&mut self, answer: &Answer) {
        for order in self.ending.orders.drain(..) {
            let _ = order.reply.send(answer.clone());
        }
        // Whoever orders it next asks anew.
        self.ending.guest_asked = None;
    }

    /// This host leads: politely where there is a guest to ask; else the answer comes when the group has agreed.
    fn begin_down(&mut self, now: bool) -> Option<Answer> {
        match &self.role {
            // It is being taken over: then it can be asked.
            Role::Backup(_) if !now => return None,
            Role::Primary(primary) if !now && primary.has_machine() => {
                match self.ending.guest_asked.clone() {
                    None => {
                        self.ask_guest();
                        return None;
                    }
                    Some(GuestAsked::UnderWay) => return None,
                    Some(GuestAsked::Done) => {
                        self.await_powerdown();
                        return Some(Answer::done("the guest was asked to switch itself off"));
                    }
                    Some(GuestAsked::NotAsked(why))
                        if self.ending.down_proposed != Some(self.group.term()) =>
                    {
                        self.event(
                            EventKind::GuestNotAsked,
                            format!("the VM is ended without its guest: {why}"),
                        );
                    }
                    Some(GuestAsked::NotAsked(_)) => {}
                }
            }
            Role::Primary(_) | Role::Backup(_) | Role::None => {}
        }
        let term = self.group.term();
        if self.ending.down_proposed != Some(term) && self.propose(&Agreed::Down) {
            self.ending.down_proposed = Some(term);
        }
        None
    }

    /// Invariant 7.
    fn ask_guest(&mut self) {
        // Not the machine: whoever forgets the VM frees its disks (invariant 6).
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
        self.ending.guest_asked = Some(match thread {
            Ok(_) => GuestAsked::UnderWay,
            Err(error) => GuestAsked::NotAsked(AskGuestError::Thread(error).to_string()),
        });
    }

    /// What became of it, if somebody still waits for that.
    pub(super) fn guest_was_asked(&mut self, asked: Result<(), AskGuestError>) {
        if self.ending.guest_asked == Some(GuestAsked::UnderWay) {
            self.ending.guest_asked = Some(match asked {
                Ok(()) => GuestAsked::Done,
                Err(why) => GuestAsked::NotAsked(why.to_string()),
            });
        }
    }

    /// Invariant 2, in words.
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
        let changed = match self.ending.down_proposed {
            Some(_) => "It may be agreed yet.",
            None => "Nothing was changed.",
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

    /// On this host alone (invariant 3).
    pub(super) fn force_down(&mut self) -> Answer {
        let vm = self.config.name.clone();
        if let Some(leader) = self.group.leader() {
            return Answer::refused(format!(
                "host '{}' leads the VM's group: 'dunlin down {vm}' ends it on all hosts, and --force is for a VM that \
                 nobody leads",
                self.config.host_name(leader)
            ));
        }
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
        self.answer_orders(&Answer::done("the VM was taken away from this host by force"));
        self.forget_vm();
        Answer::done(text)
    }

    /// The loop ends, and something of its machine remains (invariant 8).
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

    /// Whether the loop may end (invariants 6 and 8; a daemon that ends takes its QEMUs with it).
    pub(super) fn is_over(&self) -> bool {
        let ends = |ended: &Ended| !ended.forget || (self.ending.starts_under_way == 0 && self.has_let_go());
        self.ending.ended.as_ref().is_some_and(ends)
    }

    /// Invariant 8.
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
