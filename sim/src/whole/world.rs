//! The world: virtual time, the consensus of each host, what is under way.

use super::Tally;
use super::host::{Heard, Host, Image, Stream, Word};
use super::next::Next;
use super::orders::{Orders, Person, shutdown};
use super::tcp::net::Net;
use crate::disk::{Disk, Write};
use crate::random::Random;
use dunlin_core::agreed::{AgreedState, Unsaid};
use dunlin_core::consensus::{Action, Config, Consensus, Durability, Event, Member, Message, Snapshot};
use dunlin_core::policy::Mode;
use dunlin_core::replica::cold_start::ColdStart;
use dunlin_core::replica::epoch::Rules;
use dunlin_core::replica::leadership::Leadership;
use dunlin_core::replica::log_cut::LogCut;
use dunlin_core::replica::sync::bugs::{Bug, Bugs};
use dunlin_core::units::{Index, ReplicaId, Term};
use dunlin_core::wire::agreed;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Faults end then, and at the latest so much later the VM has to serve, protected.
const CHAOS_US: u64 = 3_000_000;
const CALM_US: u64 = 5_000_000;
/// In worlds in which all copies may die both last so many times as long: a cold start waits for leaders first.
const COLD_TIMES: u64 = 3;
/// The witness.
pub const WITNESS: u8 = 2;

/// The world.
pub struct World {
    pub(super) random: Random,
    pub(super) now_us: u64,
    pub(super) hosts: Vec<Host>,
    pub(super) streams: Vec<Stream>,
    pub(super) tally: Tally,
    /// How a join begins.
    pub(super) first: Rules,
    pub(super) bug: Option<Bug>,
    pub(super) durability: Durability,
    pub(super) cut: BTreeSet<(u8, u8)>,
    pub(super) calm: bool,
    /// All copies may die, and the VM then boots from a disk.
    pub(super) cold: bool,
    pub(super) orders: Orders,
    /// What clients were told, and the newest term in which they were.
    pub(super) released: BTreeSet<u64>,
    pub(super) spoken_in: Term,
    /// Who told them that, and in which term.
    pub(super) speaker: (u8, Term),
    /// In so many of a million inputs a copy does otherwise than the other.
    pub(super) whims: u64,
    pub(super) next_stream: u64,
    pub(super) inputs: u64,
    /// In a world with clients.
    pub(super) net: Option<Box<Net>>,
    delay_us: u64,
    loss_ppm: u64,
    failed: Option<String>,
    trace: bool,
    queue: BinaryHeap<Reverse<(u64, u64, Next)>>,
    mail: BTreeMap<u64, Message>,
    serial: u64,
}

impl World {
    /// As the seed says; `cold`: all copies may die.
    pub fn new(mut random: Random, bug: Option<Bug>, cold: bool, trace: bool) -> Self {
        let mode = Mode::ALL[random.below(3) as usize];
        let durability = match random.chance(500_000) {
            // Without its log a host boots nothing by itself.
            true if !cold => Durability::Memory,
            _ => Durability::Disk,
        };
        let members = vec![Member::full(0), Member::full(1), Member::witness(WITNESS)];
        let mut world = Self {
            now_us: 1,
            hosts: Vec::new(),
            streams: Vec::new(),
            tally: Tally::default(),
            first: Rules::of(mode, false),
            bug,
            durability,
            cut: BTreeSet::new(),
            calm: false,
            cold,
            orders: Orders::default(),
            released: BTreeSet::new(),
            spoken_in: Term(0),
            speaker: (0, Term(0)),
            whims: [0, 20_000, 200_000][random.below(3) as usize],
            next_stream: 0,
            inputs: 0,
            net: None,
            delay_us: [50, 500, 4_000][random.below(3) as usize],
            loss_ppm: [0, 1_000, 30_000][random.below(3) as usize],
            failed: None,
            trace,
            queue: BinaryHeap::new(),
            mail: BTreeMap::new(),
            serial: 0,
            random,
        };
        for id in 0..members.len() as u8 {
            let first = Snapshot {
                members: members.clone(),
                ..Snapshot::default()
            };
            let random = &mut world.random;
            world.hosts.push(Host {
                id: ReplicaId(id),
                node: None,
                disk: Disk::new(first.clone()),
                first,
                incarnation: 0,
                asleep_until_us: 0,
                tick_us: u64::MAX,
                clock_offset_us: random.below(1_000_000_000),
                clock_ppm: random.between(0, 100_000) as i64 - 50_000,
                leadership: leadership(id, bug, AgreedState::default()),
                heard: Default::default(),
                applied: Index(0),
                copy: None,
                unsaid: Unsaid::default(),
                log_cut: LogCut::new(Index(0)),
                alone_since: None,
                cold: ColdStart::default(),
                image: Image::default(),
                answers: BTreeMap::new(),
                silent: 0,
                failed: false,
                shutdown: shutdown(bug),
                forgotten: false,
            });
            world.start(id);
        }
        world
    }

    /// To its end.
    pub fn play(mut self) -> Result<Tally, String> {
        match self.net {
            Some(_) => self.plan_net(),
            None => self.plan(1_000, Next::Input),
        }
        self.plan(50_000, Next::Strike);
        let is_slow = self.cold || matches!(self.orders.person, Person::Ends { .. });
        let times = if is_slow { COLD_TIMES } else { 1 };
        self.advance(times * CHAOS_US, |_| false)?;
        self.be_calm();
        let before = self.tally.released;
        let until_us = self.now_us + times * CALM_US;
        self.advance(until_us, |world| world.is_well(before))?;
        self.tally.conversations = self.net.as_ref().map_or(0, |net| net.conversations());
        if self.is_well(before) {
            return Ok(self.tally);
        }
        // An end that a person wants needs no copy.
        let ends = matches!(self.orders.person, Person::Ends { .. });
        if !self.cold && !ends && !self.hosts.iter().any(Host::is_heir) {
            self.tally.lost += 1;
            return Ok(self.tally);
        }
        let states: Vec<_> = self.hosts.iter().map(Host::described).collect();
        let clients = self.net.as_ref().map(|net| net.state());
        Err(format!(
            "the VM does not serve, protected, {} us after the last fault: {states:?}, clients {clients:?}",
            times * CALM_US
        ))
    }

    fn advance(&mut self, until_us: u64, is_done: impl Fn(&Self) -> bool) -> Result<(), String> {
        while !is_done(self) && self.queue.peek().is_some_and(|Reverse((at, ..))| *at <= until_us) {
            let Some(Reverse((at, _, next))) = self.queue.pop() else {
                break;
            };
            self.now_us = at;
            self.tally.steps += 1;
            self.happen(next);
            if let Some(what) = self.failed.take() {
                return Err(what);
            }
            if self.tally.steps > 2_000_000 {
                return Err("a storm: two million steps".to_owned());
            }
        }
        Ok(())
    }

    fn happen(&mut self, next: Next) {
        match next {
            Next::Mail(from, to, serial) => {
                if self.sleeps(to, &next) {
                    return;
                }
                let Some(message) = self.mail.remove(&serial) else {
                    return;
                };
                if !self.cut.contains(&(from, to)) {
                    let from = ReplicaId(from);
                    self.step(to, Event::Received { from, message });
                }
            }
            Next::Tick(id) => {
                if self.hosts[usize::from(id)].tick_us == self.now_us && !self.sleeps(id, &next) {
                    self.hosts[usize::from(id)].tick_us = u64::MAX;
                    self.step(id, Event::Tick);
                }
            }
            Next::HardStatePersisted(id, incarnation) => {
                if self.is_of(id, incarnation)
                    && let Some((report, more)) = self.hosts[usize::from(id)].disk.finish_hard_state()
                {
                    if more {
                        self.plan_disk(Next::HardStatePersisted(id, incarnation));
                    }
                    self.step(id, report);
                }
            }
            Next::Written(id, incarnation) => {
                if !self.is_of(id, incarnation) {
                    return;
                }
                let (reports, more) = self.hosts[usize::from(id)].disk.finish_writes(3, true);
                if more {
                    self.plan_disk(Next::Written(id, incarnation));
                }
                for report in reports {
                    self.step(id, report);
                }
            }
            Next::LinkLost(id, peer, died) => {
                if self.hosts[usize::from(peer)].incarnation == died {
                    let peer = ReplicaId(peer);
                    self.step(id, Event::LinkLost { peer, by_peer: true });
                }
            }
            Next::LinkUp(id, peer) => {
                for (here, there) in [(id, peer), (peer, id)] {
                    let peer = ReplicaId(there);
                    self.step(here, Event::LinkUp { peer });
                }
            }
            Next::Turn(id, incarnation) => {
                if self.is_of(id, incarnation) && !self.sleeps(id, &next) {
                    self.turn(id);
                    let most_us = if self.calm { 1_000 } else { 4_000 };
                    let after_us = self.random.between(100, most_us);
                    self.plan(after_us, Next::Turn(id, incarnation));
                }
            }
            Next::Input => {
                self.input_arrives();
                let after_us = self.random.between(500, 8_000);
                self.plan(after_us, Next::Input);
            }
            Next::Net => self.net_turn(),
            Next::Strike if !self.calm => self.strike(),
            Next::Strike => {}
            Next::Kill(id) if !self.calm => self.kill(id),
            Next::Kill(_) => {}
            Next::Start(id) => {
                let stays_dead = self.stays_dead();
                if self.hosts[usize::from(id)].node.is_none() && stays_dead {
                    self.plan(50_000, Next::Start(id));
                } else if self.hosts[usize::from(id)].node.is_none() {
                    self.start(id);
                }
            }
            Next::Heal(from, to) => {
                self.cut.remove(&(from, to));
            }
            Next::Asked(id, incarnation, of) => {
                if self.is_of(id, incarnation) && !self.sleeps(of, &next) {
                    self.is_asked(id, of);
                }
            }
            Next::Judges(id, incarnation) => {
                if self.is_of(id, incarnation) && !self.sleeps(id, &next) {
                    self.judges(id);
                }
            }
            Next::Order(of) => self.order(of),
            Next::GuestAsked(id, incarnation) if self.is_of(id, incarnation) => self.guest_was_asked(id),
            Next::GuestLeaves(id, incarnation) if self.is_of(id, incarnation) => self.guest_leaves(id),
            Next::EndTold(from, to) => self.is_told_of_the_end(from, to),
            Next::AllTold(id, incarnation) if self.is_of(id, incarnation) => self.forgets(id),
            Next::GuestAsked(..) | Next::GuestLeaves(..) | Next::AllTold(..) => {}
            Next::Catastrophe => self.catastrophe(),
            Next::Promote(id) => self.promote(id),
        }
    }

    fn is_of(&self, id: u8, incarnation: u32) -> bool {
        let host = &self.hosts[usize::from(id)];
        host.node.is_some() && host.incarnation == incarnation
    }

    /// A host that sleeps does it later.
    fn sleeps(&mut self, id: u8, next: &Next) -> bool {
        let wakes_us = self.hosts[usize::from(id)].asleep_until_us;
        if wakes_us <= self.now_us {
            return false;
        }
        let after_us = wakes_us - self.now_us + self.random.below(300);
        if matches!(next, Next::Tick(_)) {
            self.hosts[usize::from(id)].tick_us = self.now_us + after_us;
        }
        self.plan(after_us, next.clone());
        true
    }

    pub(super) fn plan(&mut self, after_us: u64, next: Next) {
        self.serial += 1;
        self.queue
            .push(Reverse((self.now_us + after_us, self.serial, next)));
    }

    fn plan_disk(&mut self, next: Next) {
        let after_us = self.random.between(20, 2_000);
        self.plan(after_us, next);
    }

    /// A host starts with what its disk holds. Its copy of the VM, if it had one, is gone.
    pub(super) fn start(&mut self, id: u8) {
        if self.hosts[usize::from(id)].forgotten {
            return;
        }
        self.note(|| format!("{id} starts"));
        let seed = self.random.draw();
        let memory = self.durability == Durability::Memory;
        let (durability, bug) = (self.durability, self.bug);
        let host = &mut self.hosts[usize::from(id)];
        let restored = host.disk.restore(memory, &host.first);
        let config = Config {
            ring_entries: 256,
            ..Config::new(ReplicaId(id), durability)
        };
        host.applied = restored.snapshot.last.index;
        host.leadership = leadership(id, bug, state_of(&restored.snapshot));
        host.node = Some(Consensus::new(config, restored, seed));
        host.incarnation += 1;
        host.asleep_until_us = 0;
        (host.copy, host.alone_since) = (None, None);
        host.log_cut = LogCut::new(host.applied).with_bugs(Bugs::with(bug));
        host.unsaid.clear();
        host.heard.clear();
        host.cold = ColdStart::with_bugs(Bugs::with(bug));
        host.shutdown = shutdown(bug);
        host.tick_us = self.now_us;
        let incarnation = host.incarnation;
        self.plan(0, Next::Tick(id));
        self.set_may_lead(id);
        self.plan(100, Next::Turn(id, incarnation));
        for peer in (0..self.hosts.len() as u8).filter(|peer| *peer != id) {
            let after_us = self.random.between(500, 20_000);
            self.plan(after_us, Next::LinkUp(id, peer));
        }
    }

    pub(super) fn clock_us(&self, id: u8) -> u64 {
        let host = &self.hosts[usize::from(id)];
        let rate = (1_000_000 + host.clock_ppm) as u64;
        host.clock_offset_us + self.now_us * rate / 1_000_000
    }

    pub(super) fn set_may_lead(&mut self, id: u8) {
        let may_lead = self.hosts[usize::from(id)].may_lead();
        self.step(id, Event::MayLead(may_lead));
    }

    /// The consensus of a host takes a step, and the world does what it asks.
    pub(super) fn step(&mut self, id: u8, event: Event) {
        let clock_us = self.clock_us(id);
        let Some(node) = self.hosts[usize::from(id)].node.as_mut() else {
            return;
        };
        let mut actions = Vec::new();
        node.step(clock_us, event, &mut actions);
        for action in actions {
            self.obey(id, action);
        }
        self.plan_tick(id);
    }

    fn plan_tick(&mut self, id: u8) {
        let clock_us = self.clock_us(id);
        let host = &mut self.hosts[usize::from(id)];
        let Some(deadline_us) = host.node.as_ref().and_then(Consensus::next_deadline_us) else {
            return;
        };
        let rate = (1_000_000 + host.clock_ppm) as u64;
        let after_us = deadline_us.saturating_sub(clock_us) * 1_000_000 / rate + 1;
        if host.tick_us < self.now_us || host.tick_us > self.now_us + after_us {
            host.tick_us = self.now_us + after_us;
            self.plan(after_us, Next::Tick(id));
        }
    }

    fn obey(&mut self, id: u8, action: Action) {
        let at = usize::from(id);
        let incarnation = self.hosts[at].incarnation;
        match action {
            Action::Send { to, message } => self.send(id, to.0, message),
            Action::SendEntries {
                to,
                term,
                prev,
                through,
            } => {
                let node = self.hosts[at].node.as_ref();
                if let Some(message) = node.map(|node| node.append_message(term, prev, through)) {
                    self.send(id, to.0, message);
                }
            }
            Action::Persist {
                from,
                through,
                ticket,
            } => {
                let node = self.hosts[at].node.as_ref();
                let entries = (from.0..=through.0)
                    .filter_map(|index| node?.entry(Index(index)).cloned())
                    .collect();
                self.write(id, Write::Append(entries, ticket));
            }
            Action::TruncateSuffix { from } => self.write(id, Write::Truncate(from)),
            Action::SaveSnapshot(snapshot) => self.write(id, Write::Snapshot(snapshot)),
            Action::PersistHardState(hard_state) => {
                if self.hosts[at].disk.hard_state(hard_state) {
                    self.plan_disk(Next::HardStatePersisted(id, incarnation));
                }
            }
            Action::InstallSnapshot(snapshot) => self.hosts[at].heard.push_back(Heard::Snapshot(snapshot)),
            Action::BecameLeader { .. } => self.hosts[at].heard.push_back(Heard::Leads),
            Action::BecameFollower { leader, .. } => self.hosts[at].heard.push_back(Heard::Follows(leader)),
            Action::ProtocolViolation { from, what } => {
                self.verdict(format!(
                    "replica {id} saw a violation by replica {}: {what}",
                    from.0
                ));
            }
            Action::Committed { .. }
            | Action::ReadReady { .. }
            | Action::ReadRefused { .. }
            | Action::TransferFailed { .. } => {}
        }
    }

    fn write(&mut self, id: u8, write: Write) {
        let host = &mut self.hosts[usize::from(id)];
        let incarnation = host.incarnation;
        if host.disk.write(write) {
            self.plan_disk(Next::Written(id, incarnation));
        }
    }

    fn send(&mut self, from: u8, to: u8, message: Message) {
        if !self.calm && self.random.chance(self.loss_ppm) {
            return;
        }
        let after_us = self.delay();
        self.mail.insert(self.serial, message);
        let serial = self.serial;
        self.plan(after_us, Next::Mail(from, to, serial));
    }

    fn delay(&mut self) -> u64 {
        let most_us = if self.calm { 200 } else { self.delay_us };
        self.random.between(10, most_us)
    }

    /// Says something on a stream.
    pub(super) fn say(&mut self, stream: u64, from: u8, word: Word) {
        let at_us = self.now_us + self.delay();
        let Some(stream) = self.streams.iter_mut().find(|known| known.id == stream) else {
            return;
        };
        if stream.closed {
            return;
        }
        let way = match from == stream.primary {
            true => &mut stream.to_backup,
            false => &mut stream.to_primary,
        };
        let at_us = way.back().map_or(at_us, |(last_us, _)| at_us.max(*last_us));
        way.push_back((at_us, word));
    }

    /// What has arrived for this host on that stream.
    pub(super) fn arrived(&mut self, stream: u64, at: u8) -> Option<Word> {
        let (now_us, cut) = (self.now_us, &self.cut);
        let stream = self.streams.iter_mut().find(|known| known.id == stream)?;
        let (way, from) = match at == stream.primary {
            true => (&mut stream.to_primary, stream.backup),
            false => (&mut stream.to_backup, stream.primary),
        };
        let due = way.front().is_some_and(|(at_us, _)| *at_us <= now_us);
        (due && !cut.contains(&(from, at))).then(|| way.pop_front().map(|(_, word)| word))?
    }

    pub(super) fn is_closed(&self, stream: u64) -> bool {
        let known = self.streams.iter().find(|known| known.id == stream);
        known.is_none_or(|known| known.closed)
    }

    /// Some of what was on its way still arrives.
    pub(super) fn close(&mut self, stream: u64) {
        let random = &mut self.random;
        if let Some(stream) = self.streams.iter_mut().find(|known| known.id == stream)
            && !std::mem::replace(&mut stream.closed, true)
        {
            for way in [&mut stream.to_primary, &mut stream.to_backup] {
                way.truncate(random.below(way.len() as u64 + 1) as usize);
            }
        }
    }

    fn be_calm(&mut self) {
        self.note(|| "calm".to_owned());
        self.calm = true;
        self.cut.clear();
        if let Some(net) = &mut self.net {
            net.be_calm();
        }
        for id in 0..self.hosts.len() as u8 {
            let host = &mut self.hosts[usize::from(id)];
            host.asleep_until_us = host.asleep_until_us.min(self.now_us);
            if host.node.is_none() {
                self.start(id);
            }
        }
        // A link that was cut was lost, and stands again.
        for (id, peer) in [(0, 1), (0, WITNESS), (1, WITNESS)] {
            self.plan(1_000, Next::LinkUp(id, peer));
        }
    }

    /// It serves and is protected, and has answered since.
    fn is_well(&self, before: u64) -> bool {
        if let Some(is_done) = self.is_at_its_end() {
            return is_done;
        }
        let is_protected = |host: &Host| {
            host.leadership.leads()
                && host.leadership.state().complete.len() == 2
                && self.tally.released > before
        };
        let served = self.net.as_ref().is_none_or(|net| net.is_done());
        self.calm && served && self.hosts.iter().any(is_protected)
    }

    pub(super) fn note(&self, what: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>9} us  {}", self.now_us, what());
        }
    }

    pub(super) fn verdict(&mut self, what: String) {
        self.failed.get_or_insert(what);
    }
}

fn leadership(id: u8, bug: Option<Bug>, state: AgreedState) -> Leadership {
    Leadership::new(ReplicaId(id), id == WITNESS, ReplicaId(0), state).with_bugs(Bugs::with(bug))
}

/// What a snapshot stands for.
pub fn state_of(snapshot: &Snapshot) -> AgreedState {
    agreed::decode_state(snapshot.state.clone()).expect("this world's own")
}
