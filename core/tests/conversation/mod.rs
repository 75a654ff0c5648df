//! The model: clients, a network, agreed inputs, hosts, syncs and fail-overs, in virtual time (microseconds).

mod cases;
mod host;
/// The simulator's, whose whole worlds have the same clients and guests.
#[path = "../../../sim/src/tcp/mod.rs"]
#[allow(dead_code, reason = "the simulator uses more of it")]
mod tcp;

use bytes::Bytes;
use dunlin_core::agreed::Frame;
use dunlin_core::output::Output;
use dunlin_core::output::gate::Voice;
use dunlin_core::units::Epoch;
use host::{Entry, Host, Worked};
use std::collections::BTreeMap;
use tcp::client::{Client, Habits};
use tcp::frame::{RST, Seg, read, write};
use tcp::guest::Guest;
use tcp::network;
use tcp::random::Random;

/// No more faults from here on.
const CALM_US: u64 = 3_000_000;
/// All is over before.
const END_US: u64 = 60_000_000;
/// How far a guest may be behind the timestamps that it hears echoed: its clock stood in syncs. (Linux takes no notice
/// of an echo from the future.)
const BEHIND_TICKS: i32 = 2000;
const MOST_STEPS: u64 = 400_000;

/// What happens in a conversation; everything else follows from the seed.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub clients: usize,
    pub loss_percent: u8,
    /// In milliseconds; again about as long after the next join.
    pub fail_over_at: Option<u32>,
    pub stamps: bool,
    pub sack: bool,
    pub differs_percent: u8,
    /// Of the inputs, inside each VM.
    pub drop_percent: u8,
    /// Of the outputs, inside each VM.
    pub mute_percent: u8,
    /// How long output waits before it brings a sync.
    pub patience_us: u32,
    /// How many of the syncs leave a backup that does not run in the next epoch.
    pub passive_percent: u8,
    /// Whether connections are reset on purpose, by either end.
    pub resets: bool,
    pub broken: Option<Broken>,
}

/// A fault put in on purpose, for the checks to find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    ReleasesAll,
    ReleasesAcks,
    TranslatesNothing,
    TakesOverWithoutAWord,
}

/// What was seen on the way: a test that never got there shows nothing.
#[derive(Clone, Copy, Default, Debug)]
pub struct Seen {
    pub matched: u64,
    pub by_sync: u64,
    pub syncs: u64,
    /// Of these, because of a difference, or of output that nothing else let out.
    pub forced: u64,
    pub take_overs: u64,
    /// Of these, by a backup that did not run.
    pub from_passive: u64,
    pub lost_backups: u64,
    pub conversations: u64,
}

enum Event {
    ToVm(Frame),
    ToClient { reign: u64, frame: Frame },
    PrimaryRuns,
    BackupSaid { epoch: Epoch, frames: Vec<Frame> },
    Staged,
    Acknowledged,
    Complete,
    Loaded,
    LoadedHeard,
    Join,
    Fails,
    LosesBackup,
}

struct Sync {
    epoch: Epoch,
    joins: bool,
    /// The log says where the epoch ends: a backup ran in it, or will in the next one.
    agreed: bool,
    /// The backup runs in the next epoch.
    runs: bool,
    state: Option<Line>,
}

/// The primary's state at its line.
struct Line {
    table: Bytes,
    guest: Guest,
    clock: u64,
    read_to: usize,
}

struct World {
    plan: Plan,
    now: u64,
    random: Random,
    events: BTreeMap<(u64, u64), (u64, Event)>,
    next_event: u64,
    clients: Vec<Client>,
    agreed: Vec<Entry>,
    primary: Host,
    backup: Option<Host>,
    /// The group counts the backup as complete: it is the one to take over.
    complete: bool,
    /// The primary is gone, and the backup works off what was agreed.
    orphaned: bool,
    /// Events of former reigns are not heard any more, but for frames on the wire.
    reign: u64,
    sync: Option<Sync>,
    /// The backup does not run: as the primary knows it, and as it is.
    passive: bool,
    backup_is_passive: bool,
    /// Both channels from the backup to the primary keep their order.
    said_at: u64,
    told_at: u64,
    words_under_way: u64,
    waits_since: Option<u64>,
    next_sync_at: u64,
    fails_left: u32,
    late_frames: bool,
    seen: Seen,
}

/// Runs `plan`; an error is what a client must never see.
pub fn converse(plan: &Plan) -> Result<Seen, String> {
    let mut world = World::new(plan);
    for step in 0.. {
        if world.clients.iter().all(|client| client.finished) && world.now > CALM_US / 2 {
            break;
        }
        let at = world.next_at();
        if at > END_US || step > MOST_STEPS {
            return Err(format!("D: no end after {at} us: {}", world.state()));
        }
        world.now = at;
        world
            .step()
            .map_err(|why| format!("{why} at {at} us: {}", world.state()))?;
    }
    let tally = world.primary.output.tally();
    world.seen.by_sync += tally.by_sync;
    world.seen.matched += tally.released - tally.by_sync;
    world.seen.conversations = world.clients.iter().map(|client| client.had).sum();
    Ok(world.seen)
}

impl World {
    fn new(plan: &Plan) -> Self {
        let mut random = Random::new(plan.seed);
        let mut own = || Random::new(random.draw());
        let output = Output::new(Voice::Alone, Epoch(1));
        let primary = Host::new(output, Guest::default(), own(), 0, false);
        let habits = Habits {
            differs_percent: plan.differs_percent,
            counts_percent: 0,
            resets: plan.resets,
        };
        let (mut clients, mut first) = (vec![], vec![]);
        for number in 0..plan.clients {
            let options = (plan.stamps, plan.sack);
            let (client, syn) = Client::new(number, options, habits, own());
            clients.push(client);
            first.push(syn);
        }
        let mut world = Self {
            plan: plan.clone(),
            now: 0,
            events: BTreeMap::new(),
            next_event: 0,
            clients,
            agreed: vec![],
            primary,
            backup: None,
            complete: false,
            orphaned: false,
            reign: 0,
            sync: None,
            passive: false,
            backup_is_passive: false,
            said_at: 0,
            told_at: 0,
            words_under_way: 0,
            waits_since: None,
            next_sync_at: u64::MAX,
            fails_left: plan.fail_over_at.map_or(0, |_| 3),
            late_frames: random.percent(50),
            seen: Seen::default(),
            random,
        };
        first.iter().for_each(|syn| world.send_to_vm(syn));
        world.after(0, 30_000, Event::Join);
        world
    }

    fn state(&self) -> String {
        let backup = self.backup.as_ref().map(|host| host.output.epoch());
        let epoch = self.primary.output.epoch();
        let clients: Vec<String> = self.clients.iter().map(Client::state).collect();
        format!(
            "reign {}, clients {clients:?}, primary in {epoch:?}, backup in {backup:?}, sync {}, orphaned {}, {} frames held, {:?}",
            self.reign,
            self.sync.is_some(),
            self.orphaned,
            self.primary.output.held_frames(),
            self.primary.output.counters(),
        )
    }

    fn at(&mut self, at: u64, event: Event) {
        self.events.insert((at, self.next_event), (self.reign, event));
        self.next_event += 1;
    }

    fn after(&mut self, from: u64, to: u64, event: Event) {
        let at = self.now + self.random.within(from, to);
        self.at(at, event);
    }

    fn is_calm(&self) -> bool {
        self.now >= CALM_US
    }

    fn next_at(&self) -> u64 {
        let agreed = self.agreed.len();
        let primary = (!self.orphaned).then(|| self.primary.next_at(agreed)).flatten();
        let backup = self.backup.as_ref().and_then(|backup| backup.next_at(agreed));
        let clients = self.clients.iter().filter_map(Client::timer).min();
        let event = self.events.keys().next().map(|(at, _)| *at);
        let sync = self.sync_at();
        let all = [primary, backup, clients, event, sync];
        all.into_iter()
            .flatten()
            .min()
            .unwrap_or(END_US + 1)
            .max(self.now)
    }

    fn step(&mut self) -> Result<(), String> {
        if let Some(entry) = self
            .events
            .first_entry()
            .filter(|entry| entry.key().0 <= self.now)
        {
            let (reign, event) = entry.remove();
            if reign == self.reign || matches!(event, Event::ToVm(_) | Event::ToClient { .. }) {
                self.happens(event)?;
            }
            return self.release();
        }
        for at in 0..self.clients.len() {
            if self.clients[at].timer().is_some_and(|timer| timer <= self.now) {
                let said = self.clients[at].work(self.now);
                said.iter().for_each(|seg| self.send_to_vm(seg));
                return Ok(());
            }
        }
        let agreed = self.agreed.len();
        let due = |host: &Host| host.next_at(agreed).is_some_and(|at| at <= self.now);
        if !self.orphaned && due(&self.primary) {
            self.primary_works()?;
        } else if self.backup.as_ref().is_some_and(due) {
            self.backup_works()?;
        } else if self.sync_at().is_some_and(|at| at <= self.now) {
            self.seen.forced += u64::from(self.now < self.next_sync_at);
            self.request_sync(false);
        }
        self.release()
    }

    /// What of its words a VM loses on their way out nobody hears.
    fn gets_out(random: &mut Random, mute_percent: u8, frames: Vec<Frame>) -> Vec<Frame> {
        let is_lost = |_: &Frame| mute_percent > 0 && random.percent(mute_percent);
        let lost: Vec<bool> = frames.iter().map(is_lost).collect();
        let all = frames.into_iter().zip(lost);
        all.filter(|(_, lost)| !lost).map(|(frame, _)| frame).collect()
    }

    fn mute_percent(&self) -> u8 {
        if self.is_calm() { 0 } else { self.plan.mute_percent }
    }

    fn faults(&self) -> Option<u8> {
        (!self.is_calm()).then_some(self.plan.drop_percent)
    }

    fn primary_works(&mut self) -> Result<(), String> {
        let (faults, mute) = (self.faults(), self.mute_percent());
        match self.primary.work(&self.agreed, self.now, faults, false) {
            Worked::Stands => self.draw_line(),
            Worked::Said(frames) => {
                for frame in Self::gets_out(&mut self.primary.random, mute, frames) {
                    let seg = read(&frame).ok_or("a checksum of the model is wrong")?;
                    let early = match self.plan.broken {
                        Some(Broken::ReleasesAll) => true,
                        Some(Broken::ReleasesAcks) => seg.seq_len() == 0 && !seg.has(RST),
                        _ => false,
                    };
                    if early && self.primary.output.voice() == Voice::Protected {
                        self.leaves(frame.clone())?;
                    }
                    self.primary.output.said(frame, self.now);
                }
            }
        }
        self.primary.guest.no_trouble(BEHIND_TICKS)
    }

    fn backup_works(&mut self) -> Result<(), String> {
        let mute = self.mute_percent();
        let (faults, blind) = (self.faults(), self.plan.broken == Some(Broken::TranslatesNothing));
        let Some(backup) = &mut self.backup else {
            return Ok(());
        };
        match backup.work(&self.agreed, self.now, faults, blind) {
            Worked::Stands => {
                if self.orphaned {
                    backup.run(self.now);
                } else {
                    self.both_stand();
                }
            }
            Worked::Said(frames) => {
                let frames = Self::gets_out(&mut backup.random, mute, frames);
                for frame in &frames {
                    backup.output.said(frame.clone(), self.now);
                }
                let epoch = backup.output.epoch();
                if !frames.is_empty() && !self.orphaned {
                    self.said_at = self.said_at.max(self.now + self.random.within(20, 1500));
                    self.words_under_way += 1;
                    self.at(self.said_at, Event::BackupSaid { epoch, frames });
                }
            }
        }
        if let Some(backup) = &mut self.backup {
            backup.guest.no_trouble(i32::MAX)?;
        }
        self.take_over_if_ready();
        Ok(())
    }

    fn send_to_vm(&mut self, seg: &Seg) {
        let frame = write(seg);
        for _ in 0..self.copies() {
            let is_calm = self.is_calm();
            let frame = network::arriving(&mut self.random, is_calm, &frame);
            let delay = self.delay();
            self.after(delay, delay + 100, Event::ToVm(frame));
        }
    }

    fn copies(&mut self) -> u32 {
        let is_calm = self.is_calm();
        network::copies(&mut self.random, is_calm, self.plan.loss_percent)
    }

    fn delay(&mut self) -> u64 {
        let is_calm = self.is_calm();
        network::delay_us(&mut self.random, is_calm)
    }

    fn release(&mut self) -> Result<(), String> {
        self.look();
        while !self.orphaned
            && let Some(frame) = self.primary.output.release(self.now)
        {
            self.leaves(frame)?;
        }
        Ok(())
    }

    fn leaves(&mut self, frame: Frame) -> Result<(), String> {
        let seg = read(&frame).ok_or_else(|| format!("a wrong checksum leaves: {frame:?}"))?;
        let protected = self.primary.output.voice() == Voice::Protected && self.complete;
        let backup = self
            .backup
            .as_ref()
            .filter(|_| protected)
            .map(|backup| &backup.guest);
        self.clients[seg.client].left(&seg, backup)?;
        for _ in 0..self.copies() {
            let frame = frame.clone();
            let (delay, reign) = (self.delay(), self.reign);
            self.after(delay, delay + 100, Event::ToClient { reign, frame });
        }
        Ok(())
    }

    fn happens(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::ToVm(frame) => {
                let at_once = self.passive && self.sync.as_ref().is_none_or(|sync| !sync.agreed);
                // Where nobody leads nothing is agreed.
                if at_once {
                    self.primary.hears(&frame);
                } else if !self.orphaned {
                    self.agreed.push(Entry::Input(frame));
                }
            }
            Event::ToClient { reign, frame } => {
                if reign == self.reign || self.late_frames {
                    let seg = read(&frame).ok_or("a checksum of the model is wrong")?;
                    let client = &mut self.clients[seg.client];
                    let said = client.receive(&seg, self.now)?;
                    said.iter().for_each(|seg| self.send_to_vm(seg));
                }
            }
            Event::PrimaryRuns => self.primary.run(self.now),
            Event::BackupSaid { epoch, frames } => {
                self.words_under_way -= 1;
                self.primary.output.backup_said(epoch, frames);
            }
            Event::Staged => self.staged()?,
            Event::Acknowledged => self.acknowledged(),
            Event::Complete => self.completed(),
            Event::Loaded => self.loaded(),
            Event::LoadedHeard => self.loaded_heard(),
            Event::Join => self.request_sync(true),
            Event::Fails => self.fails(),
            Event::LosesBackup => self.loses_backup(),
        }
        Ok(())
    }
}

mod syncs;
