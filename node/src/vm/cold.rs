//! After the loss of all hosts: no copy of the VM is alive anywhere. This host asks the others what they hold, and does what core's
//! [`ColdStart`] makes of the answers.
//!
//! Flow: the loop's look -> an *inquest* on a thread: how new are the disks here, and what do the other hosts hold? -> core's verdict -> an event, and
//! perhaps a mandate with which this host stands for election.
//!
//! Invariants: those of core's `replica::cold_start`.
//!
//! Not here: who boots (core), how new an image is (the guest's `disk`), what a leader may do (`agreement`, `primary`).

mod words;
use super::Host;
use super::connect::ask_host;
use super::event::LoopEvent;
use super::holding::Holding;
use super::state::cold::{AskError, Inquest};
use super::state::{Role, VmLoop};
use crossbeam_channel::Sender;
use dunlin_api::{Answer, DiskStanding, EventKind, Request, Standing};
use dunlin_core::agreed::{Life, ReplicaSet};
use dunlin_core::consensus::{Member, Role as ConsensusRole};
use dunlin_core::replica::cold_start::{self, Answered, DiskMark, LivingCopy, Look, Noted, Sight};
use dunlin_core::replica::leadership::Mandate;
use dunlin_core::units::{Epoch, Index, Term, Viewstamp};
use std::collections::BTreeMap;
use std::time::Duration;
use words::Found;

/// How long another host may take to open its disks.
const PATIENCE: Duration = Duration::from_secs(20);

impl VmLoop {
    /// What the loop itself knows.
    pub(super) fn standing(&self) -> Standing {
        let last = self.group.appended();
        Standing {
            alive: !matches!(self.role, Role::None),
            may_lead: Some(self.agreement.leadership.may_lead(self.candidacy())),
            led: self.group.leader().is_some(),
            last: (last.term.0, last.index.0),
            complete: self.agreement.leadership.appended_complete().0,
            disks: Vec::new(),
            noted: self.cold.notebook.newest(),
            recovering: self.group.role() == ConsensusRole::Recovering,
            ended_after: Vec::new(),
            ended: false,
            begins_again: false,
        }
    }

    /// No copy here and nobody leads: is that so everywhere?
    pub(super) fn look_after_loss(&mut self) {
        let me = self.me;
        let sight = Sight {
            now_us: self.now_us(),
            lost: matches!(self.role, Role::None)
                && !self.witness
                && self.shown.failure.is_none()
                && self.agreement.state().life != Life::Down
                && self.group.leader().is_none_or(|leader| leader == me),
            leads: self.group.is_leader(),
            has_lived: !self.agreement.is_fresh(),
            recovering: self.group.role() == ConsensusRole::Recovering,
        };
        match self.cold.machine.look(&sight) {
            Look::Nothing => {}
            Look::Over => {
                self.cold.said.clear();
                self.answer_boot_order(Answer::refused(
                    "another host leads the VM's group, or the VM runs",
                ));
            }
            Look::Inquires => self.hold_inquest(),
            Look::Recovering => {
                let vm = &self.config.name;
                let why = format!(
                    "nobody leads the VM's group, and this host does not know any more what was agreed (durability = \"memory\"): it \
                     waits for a host that does. If no copy of the VM is alive anywhere, 'dunlin promote --force --from-disk {vm}' \
                     boots it from the disk of the host where it is said; 'dunlin down --force {vm}' takes it away"
                );
                self.tell_once(EventKind::Waiting, why);
            }
        }
    }

    fn tell_once(&mut self, kind: EventKind, why: String) {
        if self.cold.said != why {
            self.event(kind, &*why);
            self.cold.said = why;
        }
    }

    fn answer_boot_order(&mut self, answer: Answer) {
        if let Some(reply) = self.cold.reply.take() {
            // Whoever asked may have gone.
            let _ = reply.send(answer);
        }
    }

    fn hold_inquest(&mut self) {
        let (host, to_loop) = (self.host.clone(), self.inbox.to_loop.clone());
        let holding = Holding::new(to_loop.clone(), self.shared.clone(), self.config.clone(), &host);
        let me = self.me;
        let work = move || {
            let (vm, host) = (&holding.config.name, &host);
            let others = holding.config.group.iter().filter(|peer| peer.member.id != me);
            // At once: a dead host is waited for, and may not be the only one.
            let others = std::thread::scope(|scope| {
                let asked: Vec<_> = others
                    .map(|peer| {
                        let named = std::thread::Builder::new().name("ask-standing".into());
                        let ask = move || ask_standing(host, &peer.name, vm);
                        (peer, named.spawn_scoped(scope, ask))
                    })
                    .collect();
                let said = asked.into_iter().map(|(peer, asked)| {
                    let answer = match asked {
                        Ok(asked) => asked.join().unwrap_or(Err(AskError::NoAnswer)),
                        // The system has no thread left.
                        Err(_) => ask_standing(host, &peer.name, vm),
                    };
                    (peer.member.id, answer)
                });
                said.collect()
            });
            let disks = holding.disks();
            to_loop.send(LoopEvent::Inquest(Inquest { disks, others }));
        };
        if let Err(error) = std::thread::Builder::new().name("inquest".into()).spawn(work) {
            self.cold.machine.could_not_ask();
            tracing::error!("a thread to ask the other hosts: {error}");
        }
    }

    /// The answers are here.
    pub(super) fn inquest_done(&mut self, inquest: Inquest) {
        let group: Vec<Member> = self.config.group.iter().map(|host| host.member).collect();
        let (mut answers, mut silent) = (BTreeMap::new(), BTreeMap::new());
        for (id, said) in inquest.others {
            match said {
                Ok(standing) => drop(answers.insert(id, holding(&standing))),
                Err(why) => drop(silent.insert(id, why)),
            }
        }
        let mine = inquest.disks.map(|disks| {
            holding(&Standing {
                disks,
                ..self.standing()
            })
        });
        let (verdict, why) = match &mine {
            Ok(mine) => {
                let verdict = self.cold.machine.judge(&group, self.me, mine, &answers);
                let found = Found {
                    config: &self.config,
                    verdict: &verdict,
                    disks: &mine.disks,
                    silent: &silent,
                };
                let why = found.tell();
                (Some(verdict), why)
            }
            Err(why) => (None, format!("the VM's disk here cannot be read: {why}")),
        };
        let now_us = self.now_us();
        match self.cold.machine.answered(now_us, verdict.as_ref()) {
            Answered::Late => {}
            Answered::Mandated if self.cold.mandate() != Mandate::Informs => {
                self.tell_once(EventKind::ColdStart, why)
            }
            Answered::Mandated | Answered::Waits => self.tell_once(EventKind::Waiting, why),
            Answered::Refuses => {
                let is_stale = verdict.is_some_and(|verdict| verdict.is_stale());
                self.answer_boot_order(Answer::refused(match is_stale {
                    true => format!(
                        "{why}. If that host is gone for good, 'dunlin promote --force --from-disk --force-stale {}' boots the VM \
                         from the older disk here, and what clients were told since then is lost",
                        self.config.name
                    ),
                    false => why,
                }));
            }
            Answered::Obeys => self.obeys(&why),
        }
    }

    /// A person has said so.
    fn obeys(&mut self, why: &str) {
        let older = match self.cold.mandate() {
            Mandate::Stale => "from an older disk: ",
            Mandate::Newest | Mandate::Informs | Mandate::None => "",
        };
        self.event(EventKind::ColdStart, format!("by a person's order: {older}{why}"));
        let Some(reply) = self.cold.reply.take() else {
            return;
        };
        if let Some(answer) = self.stand_alone(&reply) {
            self.cold.end_mandate();
            // Whoever asked may have gone.
            let _ = reply.send(answer);
        }
    }

    /// A person wants the VM to boot from this host's disk.
    pub(super) fn boot_by_order(&mut self, force_stale: bool, reply: &Sender<Answer>) -> Option<Answer> {
        if self.witness || !matches!(self.role, Role::None) {
            return Some(Answer::refused(
                "this host has no disk of the VM that it could boot from now",
            ));
        }
        if let Some(why) = &self.shown.failure {
            return Some(Answer::refused(format!(
                "the VM has failed here: {why}; end this host's daemon and start it again first"
            )));
        }
        self.cold.machine.order(force_stale);
        self.cold.reply = Some(reply.clone());
        None
    }
}

/// As core judges it.
fn holding(standing: &Standing) -> cold_start::Holding {
    let at = |(term, index)| Viewstamp {
        term: Term(term),
        index: Index(index),
    };
    let mark = |disk: &DiskStanding| DiskMark {
        consistent: disk.consistent,
        term: Term(disk.term),
        primary: disk.primary,
        epoch: Epoch(disk.epoch),
    };
    cold_start::Holding {
        copy: match (standing.alive, standing.may_lead) {
            (false, _) => LivingCopy::None,
            (true, Some(false)) => LivingCopy::Waits,
            (true, _) => LivingCopy::Stands,
        },
        led: standing.led,
        last: at(standing.last),
        complete: ReplicaSet(standing.complete),
        disks: standing.disks.iter().map(mark).collect(),
        noted: standing.noted.map(|note| Noted {
            at: at(note.at),
            complete: ReplicaSet(note.complete),
            since_ms: note.since_ms,
        }),
        recovering: standing.recovering,
    }
}

/// What another host holds of a VM or a program.
///
/// # Errors
/// Where it does not say so.
pub(super) fn ask_standing(host: &Host, peer: &str, vm: &str) -> Result<Standing, AskError> {
    let request = Request::Standing { vm: vm.to_owned() };
    match ask_host(host, peer, &request, PATIENCE, &mut |_| {}) {
        Answer::Standing(standing) => Ok(standing),
        Answer::Failed { why, .. } => Err(AskError::Refused(why)),
        _ => Err(AskError::NotSaid(peer.to_owned())),
    }
}
