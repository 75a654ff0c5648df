//! What it decides: what happens when, in one seeded world of replicas, links, disks and clocks.
//!
//! Flow: a queue of things to come in virtual time; each makes a replica step; its actions become things to come; the
//! checkers look at each. `chaos` adds the faults, `client` the load.
//!
//! Invariants: single-threaded, no real time, no hash order: a seed repeats exactly.
//!
//! Source: tigerbeetle's and FoundationDB's simulators: the production code under a world that lies.
//!
//! Not here: what each thing to come does (`happen`), what the log's entries do (`machine`), what is right (`check`, `linear`), which
//! faults (`chaos`).

mod happen;

use crate::busy::Busy;
use crate::chaos::Weather;
use crate::check::Checker;
use crate::client::Clients;
use crate::disk::{Disk, Write};
use crate::machine::Machine;
use crate::owner::{self, Owner};
use crate::random::Random;
use dunlin_core::consensus::{
    Action, Bug, Config, Consensus, Durability, Event, Member, Message, Role, Snapshot,
};
use dunlin_core::units::{Index, ReplicaId};
use dunlin_core::wire::consensus as wire;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// What is to come.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Next {
    /// A message arrives: sender, receiver, its place in `World::mail`.
    Mail(u8, u8, u64),
    /// A deadline of this incarnation.
    Tick(u8, u32),
    /// A hard state reached the disk.
    HardStatePersisted(u8, u32),
    /// Writes reached the disk.
    Written(u8, u32),
    /// A link's end is noticed: by whom, of whom, which of its starts.
    LinkLost(u8, u8, u32),
    /// The next fault.
    Chaos,
    /// A host's scheduler gives it no time for a while.
    Nap(u8),
    /// An owner begins a turn; drives its replica by the time that it has read; lets a frame out.
    Turn(u8),
    /// See `Turn`.
    Drive(u8, u64),
    /// See `Turn`.
    Release(u8, u64),
    /// The next client operation.
    Client,
}

/// One host.
#[derive(Debug)]
pub struct Host {
    /// `None`: it is down.
    pub node: Option<Consensus>,
    /// What survives it.
    pub disk: Disk,
    /// Its state above the log.
    pub machine: Machine,
    /// Counts its starts.
    pub incarnation: u32,
    /// Its VM is whole.
    pub willing: bool,
    /// Whose turns take time, in some worlds.
    pub owner: Option<Owner>,
    /// Asleep until then; its mail waits.
    pub asleep_until_us: u64,
    /// Its disk takes this much longer until it is healed.
    pub slow_us: u64,
    tick_us: u64,
    clock_offset_us: u64,
    clock_ppm: i64,
    first: Snapshot,
}

/// The world.
pub struct World {
    /// The only source of chance.
    pub random: Random,
    /// Virtual time.
    pub now_us: u64,
    /// All hosts, members or not.
    pub hosts: Vec<Host>,
    /// For all.
    pub durability: Durability,
    /// How bad it is.
    pub weather: Weather,
    /// Directed links that deliver nothing.
    pub cut: Vec<(u8, u8)>,
    /// Outside view.
    pub checker: Checker,
    /// The load.
    pub clients: Clients,
    /// Also check single words against the disk (C5); off when hunting bugs, so that they are found by their damage.
    pub strict: bool,
    /// Members of the newest `Members` entry appended anywhere.
    pub members: Vec<Member>,
    /// Elections won.
    pub elections: u64,
    /// Frames that busy owners let out.
    pub released: u64,
    /// Things that happened.
    pub steps: u64,
    /// A world of busy hosts instead of faults.
    pub busy: Option<Busy>,
    /// How far patience adapts. Where it does, fewer leaders come and go, and less can go wrong.
    pub most_patience: u64,
    witness_waits: bool,
    /// Print everything.
    pub trace: bool,
    /// What was put back.
    pub bug: Option<Bug>,
    queue: BinaryHeap<Reverse<(u64, u64, Next)>>,
    mail: BTreeMap<u64, Message>,
    serial: u64,
}

impl World {
    /// A world from a seed; its group has so many members, or as many as the seed says.
    #[must_use]
    pub fn new(seed: u64, size: Option<u8>, bug: Option<Bug>, strict: bool, trace: bool) -> Self {
        let mut random = Random::new(seed);
        // Of its own, so that a seed that failed before these were thought of is still the same world.
        let mut more = Random::new(seed ^ 0x6c61_7465);
        let durability = if random.chance(500_000) {
            Durability::Memory
        } else {
            Durability::Disk
        };
        let drawn = [3, 3, 3, 3, 3, 5, 5, 4, 2, 7, 6, 1][random.below(12) as usize];
        let size = size.map_or(drawn, u64::from);
        let witnesses = if size >= 3 { random.below(size / 2 + 1) } else { 0 };
        let full = size - witnesses;
        let members: Vec<_> = (0..size)
            .map(|at| {
                if at < full {
                    Member::full(at as u8)
                } else {
                    Member::witness(at as u8)
                }
            })
            .collect();
        let mut world = Self {
            weather: Weather::draw(&mut random),
            random,
            now_us: 1,
            hosts: Vec::new(),
            durability,
            cut: Vec::new(),
            checker: Checker::default(),
            clients: Clients::default(),
            strict,
            members: members.clone(),
            elections: 0,
            released: 0,
            steps: 0,
            busy: None,
            most_patience: 8,
            // Of its own, as what was added later is: known seeds keep their worlds otherwise.
            witness_waits: Random::new(seed ^ 0x7769_746e_6573).chance(500_000),
            trace,
            bug,
            queue: BinaryHeap::new(),
            mail: BTreeMap::new(),
            serial: 0,
        };
        if more.chance(60_000) {
            world.weather.double_much();
        }
        if more.chance(60_000) {
            world.weather.calm();
            world.busy = Some(Busy::draw(&mut more, size as usize));
        } else if more.chance(700_000) {
            world.most_patience = 1;
        }
        let spares = if (6..9).contains(&size) { 0 } else { 2 };
        for id in 0..size + spares {
            let members = if id < size { members.clone() } else { Vec::new() };
            world.add_host(members);
        }
        // Of its own as well.
        if world.busy.is_none() && Random::new(seed ^ 0x006f_776e_6572).chance(150_000) {
            world
                .hosts
                .iter_mut()
                .for_each(|host| host.owner = Some(Owner::new(bug)));
        }
        world
    }

    fn add_host(&mut self, members: Vec<Member>) {
        let first = Snapshot {
            members,
            ..Snapshot::default()
        };
        let random = &mut self.random;
        self.hosts.push(Host {
            node: None,
            disk: Disk::new(first.clone()),
            machine: Machine::default(),
            incarnation: 0,
            willing: true,
            owner: None,
            asleep_until_us: 0,
            slow_us: 0,
            tick_us: u64::MAX,
            clock_offset_us: random.below(1_000_000_000),
            clock_ppm: random.between(0, 100_000) as i64 - 50_000,
            first,
        });
        let id = (self.hosts.len() - 1) as u8;
        self.start(id);
    }

    fn config(&self, id: u8) -> Config {
        Config {
            ring_entries: 64,
            most_patience: self.most_patience,
            batch_entries: self.weather.batch,
            window_entries: self.weather.window,
            witness_waits: self.witness_waits,
            ..Config::new(ReplicaId(id), self.durability)
        }
    }

    /// Something will happen in `after_us`.
    pub fn plan(&mut self, after_us: u64, next: Next) {
        self.serial += 1;
        self.queue
            .push(Reverse((self.now_us + after_us, self.serial, next)));
    }

    /// The next thing to come, not after `until_us`.
    pub fn take_next(&mut self, until_us: u64) -> Option<Next> {
        if self.queue.peek().is_none_or(|Reverse((at, ..))| *at > until_us) {
            return None;
        }
        let Reverse((at, _, next)) = self.queue.pop()?;
        self.now_us = at;
        self.steps += 1;
        Some(next)
    }

    /// Prints when asked to.
    pub fn say(&self, what: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>9} us  {}", self.now_us, what());
        }
    }

    /// A host starts with what its disk holds.
    pub fn start(&mut self, id: u8) {
        let cfg = self.config(id);
        let memory = self.durability == Durability::Memory;
        let seed = self.random.draw();
        let host = &mut self.hosts[usize::from(id)];
        let restored = host.disk.restore(memory, &host.first);
        host.machine = Machine::decode(&restored.snapshot.state);
        let mut node = Consensus::new(cfg, restored, seed);
        node.put_back(self.bug);
        host.incarnation += 1;
        host.node = Some(node);
        host.asleep_until_us = 0;
        host.willing = true;
        host.tick_us = self.now_us;
        let incarnation = host.incarnation;
        self.say(|| format!("{id} starts"));
        self.plan(0, Next::Tick(id, incarnation));
    }

    /// Its last actions may be half done; what was on its way to the disk may be there or not.
    pub fn crash(&mut self, id: u8) {
        self.say(|| format!("{id} crashes"));
        let host = &mut self.hosts[usize::from(id)];
        host.node = None;
        let died = host.incarnation;
        host.disk.crash(&mut self.random);
        self.clients.forget(id);
        for peer in 0..self.hosts.len() as u8 {
            if peer != id && self.random.chance(500_000) {
                let after_us = self.random.between(50, 20_000);
                self.plan(after_us, Next::LinkLost(peer, id, died));
            }
        }
    }

    /// A host's own clock.
    pub(crate) fn clock_us(&self, id: u8) -> u64 {
        let host = &self.hosts[usize::from(id)];
        let rate = (1_000_000 + host.clock_ppm) as u64;
        host.clock_offset_us + self.now_us * rate / 1_000_000
    }

    /// Makes a host step and does what it asks. An error is a violation.
    pub fn step(&mut self, id: u8, event: Event) -> Result<(), String> {
        let clock_us = self.clock_us(id);
        let owner = self.hosts[usize::from(id)].owner.as_mut();
        let time_us = owner.map_or(clock_us, |owner| owner.drives(clock_us));
        self.step_at(id, time_us, event)
    }

    /// The same by another clock.
    pub fn step_at(&mut self, id: u8, time_us: u64, event: Event) -> Result<(), String> {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let Some(node) = self.hosts[usize::from(id)].node.as_mut() else {
                return Ok(());
            };
            if self.trace {
                println!("{:>9} us  {id} <- {event:?}", self.now_us);
            }
            let mut out = Vec::new();
            node.step(time_us, event, &mut out);
            let crash = self.weather.crash_in_step(&mut self.random) && crate::chaos::may_crash(self, id);
            let keep = if crash {
                self.random.below(out.len() as u64 + 1) as usize
            } else {
                out.len()
            };
            for action in out.into_iter().take(keep) {
                self.obey(id, action, &mut events)?;
            }
            if crash {
                self.crash(id);
                return Ok(());
            }
            self.check_speakers()?;
            self.plan_tick(id);
        }
        Ok(())
    }

    /// X1, seen from outside: whoever may let the world hear its VM now, by its own clock, is the newest leader that there
    /// ever was.
    fn check_speakers(&self) -> Result<(), String> {
        let newest = self.checker.newest_leader();
        for (id, host) in self.hosts.iter().enumerate() {
            let Some(node) = &host.node else { continue };
            let may_speak = |until_us| self.clock_us(id as u8) < until_us;
            if Some(node.term()) < newest.map(|(term, _)| term)
                && node.speaks_until_us().is_some_and(may_speak)
            {
                return Err(format!(
                    "X1 one speaker: replica {id} may speak in term {} while there was a leader {newest:?}",
                    node.term().0
                ));
            }
        }
        Ok(())
    }

    fn plan_tick(&mut self, id: u8) {
        let clock_us = self.clock_us(id);
        let wakes_after_us = owner::wakes_after_us(self, id);
        let host = &mut self.hosts[usize::from(id)];
        let Some(deadline) = host.node.as_ref().and_then(Consensus::next_deadline_us) else {
            return;
        };
        let rate = (1_000_000 + host.clock_ppm) as u64;
        let after_us = (deadline.saturating_sub(clock_us) * 1_000_000 / rate + 1).max(wakes_after_us);
        if host.tick_us < self.now_us || host.tick_us > self.now_us + after_us {
            host.tick_us = self.now_us + after_us;
            let incarnation = host.incarnation;
            self.plan(after_us, Next::Tick(id, incarnation));
        }
    }

    fn plan_tick_again(&mut self, id: u8, incarnation: u32, after_us: u64) -> Result<(), String> {
        self.hosts[usize::from(id)].tick_us = self.now_us + after_us;
        self.plan(after_us, Next::Tick(id, incarnation));
        Ok(())
    }

    fn obey(&mut self, id: u8, action: Action, events: &mut Vec<Event>) -> Result<(), String> {
        if self.trace {
            println!("{:>9} us    {id} -> {action:?}", self.now_us);
        }
        let at = usize::from(id);
        let incarnation = self.hosts[at].incarnation;
        match action {
            Action::Send { to, message } => return self.send(id, to.0, message),
            Action::SendEntries {
                to,
                term,
                prev,
                through,
            } => {
                let message = self.hosts[at]
                    .node
                    .as_ref()
                    .map(|node| node.append_message(term, prev, through));
                return message.map_or(Ok(()), |message| self.send(id, to.0, message));
            }
            Action::Persist {
                from,
                through,
                ticket,
            } => {
                let node = self.hosts[at].node.as_ref();
                let entries = (from.0..=through.0)
                    .filter_map(|i| node?.entry(Index(i)).cloned())
                    .collect();
                self.write(id, Write::Append(entries, ticket));
            }
            Action::TruncateSuffix { from } => self.write(id, Write::Truncate(from)),
            Action::SaveSnapshot(snapshot) => self.write(id, Write::Snapshot(snapshot)),
            Action::PersistHardState(hard_state) => {
                if self.hosts[at].disk.hard_state(hard_state) {
                    let after_us = self.disk_us(id);
                    self.plan(after_us, Next::HardStatePersisted(id, incarnation));
                }
            }
            Action::InstallSnapshot(snapshot) => {
                let machine = Machine::decode(&snapshot.state);
                if machine.through != snapshot.last.index {
                    return Err(format!(
                        "C2: a snapshot of {:?} holds {:?}",
                        snapshot.last, machine.through
                    ));
                }
                self.checker
                    .on_state(ReplicaId(id), machine.through, machine.chain)?;
                self.hosts[at].machine = machine;
                if let Some(node) = &mut self.hosts[at].node {
                    // At once: nothing that this owner says is older. It asks for nothing.
                    node.step(0, Event::SnapshotTaken, &mut Vec::new());
                }
                events.push(Event::Applied {
                    through: snapshot.last.index,
                });
            }
            Action::Committed { through } => {
                self.apply(id, through)?;
                events.push(Event::Applied { through });
            }
            Action::BecameLeader { .. } => {
                self.elections += 1;
                if let Some(busy) = &self.busy {
                    busy.excuse(id, self.now_us)?;
                }
                let host = &self.hosts[at];
                if let Some(node) = &host.node {
                    self.checker.on_leader(node, host.willing)?;
                }
            }
            Action::ReadReady { id: read, index } => self.clients.on_ready(id, read, index),
            Action::ReadRefused { id: read } => self.clients.on_refused(id, read),
            Action::ProtocolViolation { from, what } => {
                return Err(format!(
                    "replica {id} saw a violation by replica {}: {what}",
                    from.0
                ));
            }
            Action::BecameFollower { .. } | Action::TransferFailed { .. } => {}
        }
        let (now_us, host) = (self.now_us, &self.hosts[at]);
        self.clients.answer_reads(id, now_us, &host.machine);
        Ok(())
    }

    fn apply(&mut self, id: u8, through: Index) -> Result<(), String> {
        let host = &mut self.hosts[usize::from(id)];
        let Some(node) = &host.node else { return Ok(()) };
        while host.machine.through < through {
            let Some(entry) = node.entry(host.machine.through.next()) else {
                return Err(format!(
                    "C3: replica {id} cannot apply {:?}",
                    host.machine.through.next()
                ));
            };
            self.checker.on_committed(ReplicaId(id), node.term(), entry)?;
            host.machine.apply(entry);
            self.clients.on_applied(id, entry, self.now_us);
        }
        self.checker
            .on_state(ReplicaId(id), host.machine.through, host.machine.chain)
    }

    fn disk_us(&mut self, id: u8) -> u64 {
        let slow_us = self.hosts[usize::from(id)].slow_us;
        self.random.between(20, self.weather.disk_us) + self.random.below(slow_us + 1)
    }

    fn write(&mut self, id: u8, write: Write) {
        let host = &mut self.hosts[usize::from(id)];
        let incarnation = host.incarnation;
        if host.disk.write(write) {
            let after_us = self.disk_us(id);
            self.plan(after_us, Next::Written(id, incarnation));
        }
    }

    /// C5, then the network: lost, late, twice.
    fn send(&mut self, from: u8, to: u8, message: Message) -> Result<(), String> {
        if self.strict {
            self.check_word(from, to, &message)?;
        }
        if usize::from(to) >= self.hosts.len() {
            return Ok(());
        }
        if self.random.chance(20_000) {
            let mut bytes = Vec::new();
            wire::encode(&message, &mut bytes);
            if wire::decode(&bytes).as_ref() != Ok(&message) {
                return Err(format!("W1: {message:?} does not survive the wire"));
            }
        }
        let copies = self.weather.copies(&mut self.random);
        for _ in 0..copies {
            let after_us = self.weather.delay_us(&mut self.random);
            let serial = self.serial;
            self.mail.insert(serial, message.clone());
            self.plan(after_us, Next::Mail(from, to, serial));
        }
        Ok(())
    }

    fn check_word(&self, from: u8, to: u8, message: &Message) -> Result<(), String> {
        let host = &self.hosts[usize::from(from)];
        let hard_state = host.disk.hard_state;
        match message {
            Message::Vote {
                term,
                granted: true,
                pre: false,
                ..
            } if hard_state.term != *term || hard_state.voted_for != Some(ReplicaId(to)) => Err(format!(
                "C5: replica {from} gave {to} its vote of term {} with {hard_state:?}",
                term.0
            )),
            Message::Ack { term, .. } if hard_state.term != *term => Err(format!(
                "C5: replica {from} acknowledged in term {} with {hard_state:?} on disk",
                term.0
            )),
            Message::Ack { durable, .. } if self.durability == Durability::Disk && durable.0 > 0 => {
                let entry = host.node.as_ref().and_then(|node| node.entry(*durable));
                if host.disk.holds(*durable, entry.map(|entry| entry.stamp)) {
                    return Ok(());
                }
                Err(format!(
                    "C5: replica {from} acknowledged {} which is not on its disk",
                    durable.0
                ))
            }
            _ => Ok(()),
        }
    }

    /// Hosts that believe that they lead.
    #[must_use]
    pub fn leaders(&self) -> Vec<u8> {
        self.ids(|node| node.role() == Role::Leader)
    }
    /// Hosts that are up and of which this holds.
    #[must_use]
    pub fn ids(&self, holds: impl Fn(&Consensus) -> bool) -> Vec<u8> {
        let up = |id: &u8| self.hosts[usize::from(*id)].node.as_ref().is_some_and(&holds);
        (0..self.hosts.len() as u8).filter(up).collect()
    }
}
