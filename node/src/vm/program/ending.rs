//! The end of a program: by its group's agreement, or, where no group is left to agree, on this host alone.
//!
//! Flow and invariants are those of a VM's end (`vm::ending`), but that a program is not asked to switch itself off: it gets SIGKILL
//! with its namespaces, on every host, when the end is agreed.
//!
//! Not here: what is forgotten (`daemon::store`).

use super::state::{ProgramLoop, Role};
use crate::vm::group::{self, AGAIN, TOLD};
use crate::vm::shared::Ended;
use crate::vm::state::ending::Order;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind};
use dunlin_core::agreed::{Agreed, Life};

/// How long an order waits for a leader.
const PATIENCE_US: u64 = 5_000_000;

impl ProgramLoop {
    pub(super) fn order_down(&mut self, reply: Sender<Answer>) {
        self.ending.orders.push(Order {
            now: true,
            until_us: self.now_us() + PATIENCE_US,
            reply,
        });
    }

    /// Whether this host may lead although it has nothing to serve: all that it does is to have the end agreed.
    pub(super) fn leads_to_end(&self) -> bool {
        !self.witness && !self.ending.orders.is_empty() && self.agreement.state().life != Life::Down
    }

    /// The group has agreed, and if it is for this host to tell the others, that is done.
    pub(super) fn answer_ended(&mut self) {
        let still_tells = self.ending.tells_end && self.ending.ended.is_none();
        if self.agreement.state().life == Life::Down && !still_tells {
            self.answer_orders(&Answer::done("the program is ended"));
        }
    }

    /// Carries out what was ordered, if it can be now.
    pub(super) fn end_by_order(&mut self) {
        self.answer_ended();
        let now_us = self.now_us();
        if self.ending.forgets_at_us.is_some_and(|at_us| at_us <= now_us) {
            self.forget();
        }
        if self.ending.orders.is_empty() || self.agreement.state().life == Life::Down {
            return;
        }
        if let Some(leader) = self.group.leader().filter(|leader| *leader != self.me) {
            let why = format!(
                "host '{}' leads the program's group",
                self.config.host_name(leader)
            );
            return self.answer_orders(&Answer::Failed { why, code: AGAIN });
        }
        let term = self.group.term();
        if self.agreement.leads()
            && self.group.is_leader()
            && self.ending.down_proposed != Some(term)
            && self.propose(&Agreed::Down)
        {
            self.ending.down_proposed = Some(term);
        }
        if self.ending.orders.iter().any(|order| order.until_us <= now_us) {
            let name = &self.config.name;
            self.answer_orders(&Answer::failed(format!(
                "program '{name}' is not ended: no majority of its hosts agrees to that now. If no host serves it any more, \
                 'dunlin down --force {name}' takes it away from host '{}' alone",
                self.host.name
            )));
        }
    }

    fn answer_orders(&mut self, answer: &Answer) {
        for order in self.ending.orders.drain(..) {
            // Whoever asked may have gone.
            let _ = order.reply.send(answer.clone());
        }
    }

    /// This host leads, and the end is agreed.
    pub(super) fn tell_the_end(&mut self) {
        if std::mem::replace(&mut self.ending.tells_end, true) {
            return;
        }
        if let Err(error) = group::tell_the_end(&self.host, &self.config, self.me, &self.inbox.to_loop) {
            tracing::error!("a thread to tell the other hosts of the program's end: {error}");
            self.forget();
        }
    }

    /// Another host led when the end was agreed: it still needs this host's word that it holds the entry.
    pub(super) fn await_word_of_the_end(&mut self) {
        let until_us = self.now_us() + TOLD.as_micros() as u64;
        self.ending.forgets_at_us.get_or_insert(until_us);
    }

    /// Nothing of it is left to do here.
    pub(super) fn forget(&mut self) {
        self.drop_copy();
        self.ending.ended = Some(Ended {
            vm: self.config.name.clone(),
            forget: true,
        });
    }

    /// On this host alone.
    pub(super) fn force_down(&mut self) -> Answer {
        let name = self.config.name.clone();
        if let Some(leader) = self.group.leader() {
            return Answer::refused(format!(
                "host '{}' leads the program's group: 'dunlin down {name}' ends it on all hosts, and --force is for one that nobody leads",
                self.config.host_name(leader)
            ));
        }
        let text = format!(
            "program '{name}' is taken away from host '{}', and nobody has agreed to it; the other hosts keep their part until \
             'dunlin down --force {name}' is said there",
            self.host.name
        );
        self.event(EventKind::DownByForce, text.clone());
        self.answer_orders(&Answer::done(
            "the program was taken away from this host by force",
        ));
        self.forget();
        Answer::done(text)
    }

    /// Whether the loop may end: not while a thread makes a copy that the next program of this name would meet.
    pub(super) fn is_over(&self) -> bool {
        let making = (self.own.starting.is_some() || self.is_carrying()) && self.role == Role::None;
        self.ending
            .ended
            .as_ref()
            .is_some_and(|ended| !ended.forget || !making)
    }
}
