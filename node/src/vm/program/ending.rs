//! The end of a program: by its group's agreement, or, where no group is left to agree, on this host alone.
//!
//! Flow and invariants are those of a VM's end (`vm::ending`), but that a program is not asked to switch itself off: it gets SIGKILL
//! with its namespaces, on every host, when the end is agreed.
//!
//! Not here: what is forgotten (`daemon::store`).

use super::state::{ProgramLoop, Role};
use crate::vm::group::{self, AGAIN};
use crate::vm::shared::Ended;
use crate::vm::state::ending::answer_all;
use crossbeam_channel::Sender;
use dunlin_api::{Answer, EventKind};
use dunlin_core::agreed::Agreed;
use dunlin_core::replica::leadership::Part;
use dunlin_core::replica::shutdown::{AgreedEnd, Sight, Turn};

impl ProgramLoop {
    pub(super) fn order_down(&mut self, reply: Sender<Answer>) {
        let now_us = self.now_us();
        self.ending.shutdown.order(now_us, true, reply);
    }

    /// Whether this host may lead although it has nothing to serve: all that it does is to have the end agreed.
    pub(super) fn leads_to_end(&self) -> bool {
        let life = self.agreement.state().life;
        self.ending.shutdown.leads_to_end(self.is_witness(), life)
    }

    /// The group has agreed, and if it is for this host to tell the others, that is done.
    pub(super) fn answer_ended(&mut self) {
        if self.ending.shutdown.is_done(self.agreement.state().life) {
            let orders = self.ending.shutdown.take_orders();
            answer_all(orders, &Answer::done("the program is ended"));
        }
    }

    /// Carries out what was ordered, if it can be now.
    pub(super) fn end_by_order(&mut self) {
        self.answer_ended();
        let now_us = self.now_us();
        if self.ending.shutdown.is_untold(now_us) {
            self.forget(false);
        }
        let sight = Sight {
            now_us,
            term: self.group.term(),
            life: self.agreement.state().life,
            leader_elsewhere: self.group.leader().filter(|leader| *leader != self.me),
            leads: self.agreement.leads() && self.group.is_leader(),
            part: match self.role {
                Role::None => Part::None,
                Role::Primary => Part::Primary,
                Role::Backup => Part::Backup,
            },
            has_guest: false,
        };
        match self.ending.shutdown.turn(&sight) {
            Turn::Nothing | Turn::AsksGuest | Turn::GuestAsked(_) => {}
            Turn::Refers(leader, orders) => {
                let host = self.config.host_name(leader);
                let why = format!("host '{host}' leads the program's group");
                answer_all(orders, &Answer::Failed { why, code: AGAIN });
            }
            Turn::Says { .. } => {
                if self.propose(&Agreed::Down) {
                    self.ending.shutdown.said(sight.term);
                }
            }
        }
        let late = self.ending.shutdown.overdue(now_us, self.agreement.state().life);
        if !late.is_empty() {
            let name = &self.config.name;
            let answer = Answer::failed(format!(
                "program '{name}' is not ended: no majority of its hosts agrees to that now. If no host serves it any more, \
                 'dunlin down --force {name}' takes it away from host '{}' alone",
                self.host.name
            ));
            answer_all(late, &answer);
        }
    }

    /// The end is agreed.
    pub(super) fn end_is_agreed(&mut self) {
        let now_us = self.now_us();
        let follows = self.ending.shutdown.agreed(now_us, self.group.is_leader());
        if follows == AgreedEnd::Tells
            && let Err(error) = group::tell_the_end(&self.host, &self.config, self.me, &self.inbox.to_loop)
        {
            tracing::error!("a thread to tell the other hosts of the program's end: {error}");
            self.forget(false);
        }
    }

    /// Nothing of it is left to do here.
    pub(super) fn forget(&mut self, by_force: bool) {
        self.drop_copy();
        self.ending
            .shutdown
            .forgets(self.agreement.state().life, by_force);
        self.ending.ended = Some(Ended {
            vm: self.config.name.clone(),
            forget: true,
        });
    }

    /// On this host alone.
    pub(super) fn force_down(&mut self) -> Answer {
        let name = self.config.name.clone();
        let orders = match self.ending.shutdown.force(self.group.leader()) {
            Ok(orders) => orders,
            Err(leader) => {
                return Answer::refused(format!(
                    "host '{}' leads the program's group: 'dunlin down {name}' ends it on all hosts, and --force is for one that nobody leads",
                    self.config.host_name(leader)
                ));
            }
        };
        let text = format!(
            "program '{name}' is taken away from host '{}', and nobody has agreed to it; the other hosts keep their part until \
             'dunlin down --force {name}' is said there",
            self.host.name
        );
        self.event(EventKind::DownByForce, text.clone());
        let told = Answer::done("the program was taken away from this host by force");
        answer_all(orders, &told);
        self.forget(true);
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
