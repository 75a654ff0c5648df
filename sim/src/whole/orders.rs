//! What people order: the VM's end (`dunlin down`), and that a host serves alone because the others are dead (`dunlin promote --force`).
//!
//! The person who wants the end asks a host that lives, asks where a leader is said to be, and asks the next one until the VM has ended. Guests switch
//! themselves off when they are asked, late, or never. In one of four such worlds the VM fails wherever it is begun, so that only the order makes a
//! leader. The person who promotes a host tells the truth: the others are down, and stay so until the host serves.
//!
//! Checked from outside: nobody forgets the VM, nor says anything for it, but as was agreed; an order is carried out within a bound when the faults
//! have ended; a host that was promoted serves, takes the others back, and is protected in the end.

use super::host::{Copy, Host};
use super::next::Next;
use super::world::{WITNESS, World};
use dunlin_core::agreed::{Agreed, Life};
use dunlin_core::consensus::{Durability, Event, Member, Role};
use dunlin_core::replica::promotion::{self, Ordered};
use dunlin_core::replica::shutdown::{AgreedEnd, Shutdown, Sight, Turn};
use dunlin_core::replica::sync::bugs::{Bug, Bugs};
use dunlin_core::units::{Index, ReplicaId, Term};

/// What a person wants in a world.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Person {
    /// Nothing.
    #[default]
    Absent,
    /// The VM's end; of a VM that fails wherever it is begun.
    Ends { fails: bool },
    /// That a host serves alone when the others are dead.
    Promotes,
}

/// How far a VM's end is, as seen from outside.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    pub person: Person,
    /// The person has not heard yet that it is done.
    pub asks: bool,
    /// Who was asked last.
    pub asked_last: Option<u8>,
    /// Somebody has applied it: an entry of this term.
    pub ended_in: Option<Term>,
    /// Where a promotion is under way.
    pub promoting: Option<u8>,
}

impl World {
    /// A person is there.
    #[must_use]
    pub fn with_person(mut self, person: Person) -> Self {
        self.orders.person = person;
        let after_us = self.random.between(10_000, 2_500_000);
        match person {
            Person::Absent => {}
            Person::Ends { fails } => {
                self.orders.asks = true;
                self.hosts.iter_mut().for_each(|host| host.failed = fails);
                self.plan(after_us, Next::Order(None));
            }
            Person::Promotes => self.plan(after_us, Next::Catastrophe),
        }
        self
    }

    // The VM's end.

    /// The person asks a host for the VM's end: that one, or the next that lives.
    pub(super) fn order(&mut self, of: Option<u8>) {
        if !self.orders.asks {
            return;
        }
        let alive: Vec<u8> = (0..=WITNESS)
            .filter(|id| self.host(*id).node.is_some() && !self.host(*id).forgotten)
            .collect();
        // Where it came to nothing the next one is asked.
        let last = self.orders.asked_last;
        let next = alive.iter().find(|id| Some(**id) > last).or(alive.first());
        let whom = of.filter(|id| alive.contains(id)).or(next.copied());
        let Some(id) = whom else {
            return self.plan(100_000, Next::Order(None));
        };
        self.orders.asked_last = Some(id);
        let now = self.random.chance(400_000);
        self.note(|| format!("a person orders the end at {id}, now: {now}"));
        let now_us = self.now_us;
        self.host(id).shutdown.order(now_us, now, ());
    }

    /// A host's answers.
    pub(super) fn answered(&mut self, who: &[()], to: Option<u8>) {
        for () in who {
            let after_us = self.random.between(1_000, 50_000);
            self.plan(after_us, Next::Order(to));
        }
    }

    pub(super) fn end_by_order(&mut self, id: u8) {
        let now_us = self.now_us;
        let host = self.host(id);
        let Some(node) = &host.node else { return };
        let sight = Sight {
            now_us,
            term: node.term(),
            life: host.leadership.state().life,
            leader_elsewhere: node.leader().filter(|leader| *leader != ReplicaId(id)),
            leads: host.leadership.leads() && node.role() == Role::Leader,
            part: host.leadership.part(),
            has_guest: matches!(&host.copy, Some(Copy::Primary(primary)) if primary.boots_at_us.is_none()),
        };
        let turn = host.shutdown.turn(&sight);
        match turn {
            Turn::Nothing => {}
            Turn::Refers(leader, who) => self.answered(&who, Some(leader.0)),
            Turn::AsksGuest => {
                let (after_us, incarnation) = (self.random.between(100, 20_000), self.host(id).incarnation);
                self.plan(after_us, Next::GuestAsked(id, incarnation));
            }
            // The person sees that it is still there, and asks again.
            Turn::GuestAsked(who) => self.answered(&who, None),
            Turn::Says { .. } => {
                if self.propose(id, &Agreed::Down) {
                    self.host(id).shutdown.said(sight.term);
                    self.may_die_soon(id, 200_000);
                }
            }
        }
        let host = self.host(id);
        let late = host.shutdown.overdue(now_us, host.leadership.state().life);
        self.answered(&late, None);
        let host = self.host(id);
        if host.shutdown.is_done(host.leadership.state().life) {
            let told = host.shutdown.take_orders();
            self.orders.asks &= told.is_empty();
        }
        if self.host(id).shutdown.is_untold(now_us) {
            self.forgets(id);
        }
    }

    /// QEMU has answered, or not.
    pub(super) fn guest_was_asked(&mut self, id: u8) {
        let asked = self.random.chance(800_000);
        let leaves = asked && self.random.chance(600_000);
        let (after_us, incarnation) = (self.random.between(1_000, 300_000), self.host(id).incarnation);
        self.host(id).shutdown.guest_was_asked(asked);
        if leaves {
            self.plan(after_us, Next::GuestLeaves(id, incarnation));
        }
    }

    /// It switches itself off, if it still runs here; its process ends with that.
    pub(super) fn guest_leaves(&mut self, id: u8) {
        if self.host(id).primary().is_none() || !self.host(id).leadership.leads() {
            return;
        }
        self.note(|| format!("the guest on {id} switches itself off"));
        let said = self.propose(id, &Agreed::Down);
        self.host(id).shutdown.guest_left(said);
    }

    /// The VM's end is agreed, and applied here.
    pub(super) fn end_is_agreed(&mut self, id: u8, index: Index) {
        self.note(|| format!("{id}: the end is agreed"));
        if self.orders.ended_in.is_none() {
            let node = self.host(id).node.as_ref();
            self.orders.ended_in = node
                .and_then(|node| node.entry(index))
                .map(|entry| entry.stamp.term);
            self.tally.ended += 1;
        }
        self.end_copy(id);
        let now_us = self.now_us;
        let host = self.host(id);
        let leads = host.node.as_ref().is_some_and(|node| node.role() == Role::Leader);
        if host.shutdown.agreed(now_us, leads) == AgreedEnd::Tells {
            let incarnation = host.incarnation;
            for other in (0..=WITNESS).filter(|other| *other != id) {
                let after_us = self.random.between(100, 50_000);
                self.plan(after_us, Next::EndTold(id, other));
            }
            // Those that can be reached have heard of it by then.
            self.plan(60_000, Next::AllTold(id, incarnation));
        }
    }

    /// Another host says that the VM has ended.
    pub(super) fn is_told_of_the_end(&mut self, from: u8, to: u8) {
        let is_cut = self.cut.contains(&(from, to));
        let host = self.host(to);
        if host.node.is_some() && !host.forgotten && !is_cut {
            host.leadership.is_told_of_the_end();
            self.forgets(to);
        }
    }

    /// Nothing of the VM is left to do on this host: neither its log nor its copy.
    pub(super) fn forgets(&mut self, id: u8) {
        self.note(|| format!("{id} forgets the VM"));
        if self.orders.ended_in.is_none() {
            self.verdict(format!("{id} forgets the VM, and nobody has agreed to its end"));
        }
        self.end_copy(id);
        let host = self.host(id);
        let life = host.leadership.state().life;
        host.shutdown.forgets(life, false);
        let told = host.shutdown.take_orders();
        host.forgotten = true;
        host.node = None;
        self.orders.asks &= told.is_empty();
        for peer in (0..=WITNESS).filter(|peer| *peer != id) {
            let died = self.host(id).incarnation;
            self.plan(500, Next::LinkLost(peer, id, died));
        }
    }

    /// Nobody says anything for a VM that has ended. Who led until then may not have come to that entry yet.
    pub(super) fn check_silence(&mut self, id: u8, term: Term) {
        if self.orders.ended_in.is_some_and(|ended_in| term > ended_in) {
            self.verdict(format!("{id} speaks for a VM that has ended"));
        }
    }

    /// Where a person wants the end it is done: who knows of it has no copy, and no order waits. A host that was away, or cut off, keeps its part
    /// until a person takes it away there.
    pub(super) fn is_at_its_end(&self) -> Option<bool> {
        let over = |host: &Host| {
            let knows = host.leadership.state().life == Life::Down;
            host.forgotten || (!knows || host.copy.is_none()) && !host.shutdown.is_ordered()
        };
        let done = || self.calm && self.orders.ended_in.is_some() && self.hosts.iter().all(over);
        matches!(self.orders.person, Person::Ends { .. }).then(done)
    }

    // A promotion.

    /// All hosts but one die, and a person says so to that one.
    pub(super) fn catastrophe(&mut self) {
        // Without logs on their disks the others would not know what was agreed when they are back.
        if self.calm || self.durability == Durability::Memory {
            return;
        }
        let able: Vec<u8> = (0..WITNESS)
            .filter(|id| {
                let host = &self.hosts[usize::from(*id)];
                host.is_heir() && host.copy.is_some() && !host.leadership.is_fresh()
            })
            .collect();
        let Some(left) = self.random.pick(&able) else {
            return self.plan(200_000, Next::Catastrophe);
        };
        self.note(|| format!("a catastrophe: {left} is left"));
        self.orders.promoting = Some(left);
        for id in (0..=WITNESS).filter(|id| *id != left) {
            self.dies(id, 400_000);
        }
        let after_us = self.random.between(1_000, 300_000);
        self.plan(after_us, Next::Promote(left));
    }

    /// The person says so. What clients were told that this host does not know is lost, and whoever says it knows that.
    pub(super) fn promote(&mut self, id: u8) {
        if self.orders.promoting != Some(id) {
            return;
        }
        let host = self.host(id);
        let Some(node) = &host.node else {
            return self.orders.promoting = None;
        };
        let sight = promotion::Sight {
            leads: node.role() == Role::Leader,
            leader: node.leader().filter(|leader| *leader != ReplicaId(id)),
            may_lead: host.may_lead(),
            fresh: host.leadership.is_fresh(),
            from_disk: false,
        };
        let (term, ordered) = (node.term(), promotion::judge(&sight));
        self.note(|| format!("{id} is to serve alone: {ordered:?}"));
        if ordered != Ordered::StandsAlone {
            // It has not noticed yet, or has lost its copy.
            match self.host(id).may_lead() {
                true => self.plan(50_000, Next::Promote(id)),
                false => self.orders.promoting = None,
            }
            return;
        }
        self.step(id, Event::MayLead(true));
        self.step(id, Event::StandAlone);
        if self.host(id).term() == term {
            return self.orders.promoting = None;
        }
        self.tally.promotions += 1;
        self.orders.promoting = None;
        (0..=WITNESS).for_each(|other| self.break_streams(id, other));
        if let Some(Copy::Primary(_) | Copy::Backup(_)) = &self.host(id).copy {
            let known = match &self.host(id).copy {
                Some(Copy::Primary(primary)) => primary.vm.said.clone(),
                Some(Copy::Backup(backup)) => backup.vm.said.clone(),
                None => return,
            };
            self.released.retain(|word| known.contains(word));
        }
    }

    /// A leader takes hosts back that are not members.
    pub(super) fn readmit_hosts(&mut self, id: u8) {
        if self.orders.person != Person::Promotes || !self.host(id).leadership.leads() {
            return;
        }
        let hosts = [Member::full(0), Member::full(1), Member::witness(WITNESS)];
        let lives: Vec<bool> = self.hosts.iter().map(|host| host.node.is_some()).collect();
        let is_connected = |of: ReplicaId| {
            let (here, there) = ((id, of.0), (of.0, id));
            lives[usize::from(of.0)] && !self.cut.contains(&here) && !self.cut.contains(&there)
        };
        let Some(node) = &self.hosts[usize::from(id)].node else {
            return;
        };
        let Some((back, members)) = promotion::readmits(hosts.into_iter(), node.members(), is_connected)
        else {
            return;
        };
        self.note(|| format!("{id} takes {back:?} back"));
        if let Some(node) = self.host(id).node.as_mut()
            && node.change_members(members).is_ok()
        {
            self.step(id, Event::Flush);
        }
    }

    /// Whether a host that died is to stay so: the person has said that it is dead, and it is.
    pub(super) fn stays_dead(&self) -> bool {
        self.orders.promoting.is_some() && !self.calm
    }
}

/// Its end, as a host that has just started knows it.
pub fn shutdown(bug: Option<Bug>) -> Shutdown<()> {
    Shutdown::with_bugs(Bugs::with(bug))
}
