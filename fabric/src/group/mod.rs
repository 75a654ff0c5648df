//! What it decides: nothing; it lets `core::consensus` decide and obeys, over transports and the log on disk.
//!
//! **Flow**: the owner (a VM's loop) calls [`Group::poll`] until `None`, [`Group::arm`]s, sleeps on [`Group::fds`] until
//! [`Group::next_deadline_us`], and again. Inside: landed bytes -> messages -> `Consensus::step` -> actions -> one-sided
//! writes, disk commands, events for the owner. Everything on the owner's thread except the disk's work.
//!
//! **Invariants**
//! 1. Actions are obeyed in their order; nothing blocks; heartbeats leave as long as `poll` is called.
//! 2. Entries go to the followers before the leader waits for its own disk: both take their time together.
//! 3. The log ring that a peer may write to is of the term that is promised or led by it; a newer promise revokes it.
//! 4. Losing a message is allowed, so a full ring drops only what the core will say again.
//! 5. A replica whose log was kept in memory since the one on its disk was written has lost its memory, whatever the durability is now: that
//!    log goes, and it recovers, until the disk holds again all that it has acknowledged.
//!
//! **Source**: APUS (GAIA 2.1.2): "logs locally and writes to all backups". **Not here**: what the owner says to it and hears (`types`), what it waits for
//! (`waiting`) and looks at (`status`); who connects to whom and when again (the owner: [`Group::add_link`]).

mod kept;
mod peer;
mod status;
mod types;
mod waiting;

pub use kept::{KeptGroup, may_be_real_time};
pub use types::{Bad, Counters, GroupConfig, GroupError, GroupEvent, LinkState};

use crate::link::Stream;
use crate::log::{Command, Cut, Disk, Done, Writer};
use crate::transport::TransportError;
use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Consensus, Durability, Event, HardState, Member, Message, Refusal, Restored, Role,
};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use dunlin_core::wire::consensus::encode_append;
use peer::{Heard, Peer};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// So many rounds of work in one `poll` before the owner gets its thread back.
const ROUNDS: usize = 32;
/// Whose descriptor it is, for epoll: a peer's by its id, or of no interest: whatever it woke us for is looked at anyway.
const OTHER: u64 = u64::MAX;
/// So much is taken from one peer in one round.
const BUDGET_BYTES: usize = 1 << 20;

/// One replica of one group.
pub struct Group {
    cfg: GroupConfig,
    core: Consensus,
    writer: Writer,
    peers: Vec<Peer>,
    /// By id: where in `peers` it is, plus one; 0 is nowhere. What is sent to a member must not look through all of them.
    places: [u16; 256],
    events: VecDeque<GroupEvent>,
    actions: Vec<Action>,
    epoll: OwnedFd,
    now_us: u64,
    proposed: bool,
    /// `poll` stopped though there was more to do.
    more: bool,
    armed: bool,
    /// The system was asked which links are readable, and nothing else was waited for since.
    asked: bool,
    /// The owner says at each wait whether there is something to ask for: once is enough until it waits again.
    told: bool,
    /// What the followers of one step are sent is mostly the same: its bytes, and of which entries.
    encoded: (Vec<u8>, Option<(Term, Viewstamp, Index)>),
    idle_rounds: u32,
    /// The owner is away, and its keeper here: what it decides upon waits for it.
    keeping: bool,
    buffer: Vec<u8>,
    counters: Counters,
    /// Its log is on disk, and is not what it has acknowledged yet (invariant 5).
    recovers_disk: bool,
    cut: Option<Cut>,
    violations: Vec<(ReplicaId, u64, u64)>,
}

impl Group {
    /// Opens the log in `cfg.dir` (or founds it) and starts as a follower.
    pub fn open(cfg: GroupConfig) -> Result<Self, GroupError> {
        let io = |what| move |source| GroupError::Io { what, source };
        let (mut disk, found) = Disk::open(&cfg.dir, cfg.disk.clone())?;
        let memory = cfg.core.durability == Durability::Memory;
        // Invariant 5.
        let forgot = memory || found.in_memory;
        if memory {
            disk.leaves_for_memory()?;
        } else if forgot {
            disk.forget()?;
        }
        let fresh = Restored::fresh(cfg.members.clone());
        let restored = Restored {
            hard_state: found.hard_state.unwrap_or_default(),
            snapshot: found.snapshot.filter(|_| !forgot).unwrap_or(fresh.snapshot),
            log: if forgot { Vec::new() } else { found.log },
            lost_memory: forgot && found.hard_state.is_some_and(|p| p != HardState::default()),
        };
        let seed = crate::keys::random()
            .map(u64::from_le_bytes)
            .unwrap_or_else(|_| u64::from(std::process::id()));
        let writer = Writer::new(disk, cfg.disk_mode).map_err(io("starting the log's thread"))?;
        // SAFETY: a plain call; the result is checked and owned by nobody else.
        let epoll = unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if fd < 0 {
                return Err(io("epoll")(std::io::Error::last_os_error()));
            }
            OwnedFd::from_raw_fd(fd)
        };
        let group = Self {
            core: Consensus::new(cfg.core.clone(), restored, seed),
            cfg,
            writer,
            peers: Vec::new(),
            places: [0; 256],
            events: VecDeque::new(),
            actions: Vec::with_capacity(16),
            epoll,
            now_us: 0,
            proposed: false,
            more: false,
            armed: false,
            asked: false,
            told: false,
            encoded: (Vec::with_capacity(1024), None),
            idle_rounds: 0,
            keeping: false,
            buffer: Vec::new(),
            counters: Counters::default(),
            recovers_disk: forgot && !memory,
            cut: found.cut,
            violations: Vec::new(),
        };
        if let Some(fd) = group.writer.fd() {
            group.watch(fd, libc::EPOLLIN, OTHER).map_err(io("epoll"))?;
        }
        Ok(group)
    }

    /// A torn tail that was cut when the log was opened: worth a line in the log.
    #[must_use]
    pub fn cut(&self) -> Option<&Cut> {
        self.cut.as_ref()
    }

    /// A connected (or accepted) stream of purpose `Log` to this member. Replaces an older link to it.
    pub fn add_link(&mut self, id: ReplicaId, stream: Stream) -> Result<(), TransportError> {
        let peer = Peer::new(id, stream)?;
        self.remove_link(id);
        for (fd, whose) in peer.transport.fds().into_iter().zip([u64::from(id.0), OTHER]) {
            if let Some(fd) = fd {
                self.watch(fd, libc::EPOLLIN, whose)
                    .map_err(crate::transport::io("epoll"))?;
            }
        }
        self.peers.push(peer);
        self.find_places();
        self.open_rings();
        self.more = true; // grants that are there already have rung already
        Ok(())
    }

    /// Ends the link to a member.
    pub fn remove_link(&mut self, id: ReplicaId) {
        if self.peers.iter().any(|p| p.id == id) {
            // What came through it counts no more, from before the peer can see its end.
            let by_peer = false;
            self.step(Event::LinkLost { peer: id, by_peer });
        }
        let ended = self.peers.extract_if(.., |p| p.id == id); // closing its descriptors takes them out of epoll
        self.counters.torn += ended.map(|p| p.torn()).sum::<u64>();
        self.find_places();
    }

    /// Other peers are linked.
    fn find_places(&mut self) {
        self.places = [0; 256];
        for (at, peer) in self.peers.iter().enumerate() {
            self.places[usize::from(peer.id.0)] = at as u16 + 1;
        }
    }

    fn peer_mut(&mut self, id: ReplicaId) -> Option<&mut Peer> {
        let at = usize::from(self.places[usize::from(id.0)]).checked_sub(1)?;
        self.peers.get_mut(at)
    }

    fn watch(&self, fd: RawFd, events: i32, whose: u64) -> std::io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: whose,
        };
        // SAFETY: the event lives across the call; both descriptors are open.
        let rc = unsafe {
            let add = libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event);
            if add != 0 && *libc::__errno_location() == libc::EEXIST {
                libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_MOD, fd, &raw mut event)
            } else {
                add
            }
        };
        if rc == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    }

    /// Does what can be done now, without blocking (except for the disk with [`Mode::Inline`]), and tells what came of it.
    /// Call it until it says `None`. `now_us` is any clock that rises steadily.
    pub fn poll(&mut self, now_us: u64) -> Option<GroupEvent> {
        if let Some(event) = self.next_event() {
            return Some(event);
        }
        self.now_us = self.now_us.max(now_us);
        let was_armed = std::mem::take(&mut self.armed);
        if was_armed {
            self.peers.iter_mut().for_each(|p| p.transport.disarm());
        }
        // One question for all links instead of one system call for each. Not where writes land by themselves and nobody slept.
        if !self.asked && (was_armed || self.peers.iter().any(|p| !p.transport.lands_by_itself())) {
            self.ask(0);
        }
        self.more = true;
        for _ in 0..ROUNDS {
            let mut busy = std::mem::take(&mut self.proposed);
            if busy {
                self.step(Event::Flush);
                self.flush(false);
            }
            busy |= self.hear();
            if self.core.next_deadline_us().is_some_and(|at| at <= self.now_us) {
                self.step(Event::Tick);
            }
            self.flush(false);
            busy |= self.take_done();
            if !busy {
                self.more = false;
                self.asked = self.told;
                break;
            }
            self.idle_rounds = 0;
            if !self.events.is_empty() {
                return self.next_event();
            }
        }
        self.flush(true);
        self.next_event()
    }

    /// From here on the owner speaks of the state that it is given.
    fn next_event(&mut self) -> Option<GroupEvent> {
        let event = self.events.pop_front();
        if let Some(GroupEvent::SnapshotInstalled(_)) = event {
            self.step(Event::SnapshotTaken);
        }
        event
    }

    /// What cannot wait for the owner ([`KeptGroup`]): hears the peers and the disk, acknowledges, votes, and as the leader lets the
    /// clock tick. No campaign begins here. True if there is something for the owner to look at.
    fn keep(&mut self, now_us: u64) -> bool {
        self.now_us = self.now_us.max(now_us);
        self.keeping = true;
        self.ask(0);
        let mut heard = self.peers.iter().any(|p| p.readable);
        for _ in 0..ROUNDS {
            let mut busy = self.hear();
            let due = self.core.next_deadline_us().is_some_and(|at| at <= self.now_us);
            if due && self.is_leader() {
                self.step(Event::Tick);
                heard = true;
            }
            self.flush(false);
            busy |= self.take_done();
            heard |= busy;
            if !busy {
                break;
            }
        }
        self.asked = false;
        self.more |= heard;
        self.flush(true);
        self.keeping = false;
        heard || !self.events.is_empty()
    }

    /// Lands and hears what the peers wrote.
    fn hear(&mut self) -> bool {
        let mut busy = false;
        let mut at = 0;
        while at < self.peers.len() {
            match self.peers[at].progress(BUDGET_BYTES, self.now_us, self.asked) {
                Ok(progress) => {
                    busy |= progress.busy;
                    if progress.came_up {
                        let peer = self.peers[at].id;
                        self.events.push_back(GroupEvent::LinkUp { peer });
                        self.step(Event::LinkUp { peer });
                    }
                }
                // A follower may begin a campaign at a broken link: not without the owner's word.
                Err(why) if self.keeping => {
                    self.peers[at].fail(why);
                    at += 1;
                    continue;
                }
                Err(why) => {
                    self.lose(at, &why);
                    busy = true;
                    continue;
                }
            }
            while let Some(heard) = self.peers[at].hear(&mut self.buffer, self.now_us) {
                busy = true;
                let from = self.peers[at].id;
                match heard {
                    Heard::Message(message) => {
                        self.counters.heard += 1;
                        self.step(Event::Received { from, message });
                    }
                    Heard::Bad(bad, what) => self.violation(from, bad, what),
                }
            }
            at += 1;
        }
        busy
    }

    fn lose(&mut self, at: usize, error: &TransportError) {
        let lost = self.peers.swap_remove(at);
        self.find_places();
        self.counters.torn += lost.torn();
        let (peer, why) = (lost.id, error.to_string());
        let broken = matches!(error, TransportError::ProtocolViolation(_));
        let by_peer = matches!(error, TransportError::Closed(_));
        if broken {
            self.violation(peer, Bad::Broken, why.clone());
        }
        self.events.push_back(GroupEvent::LinkLost { peer, why, broken });
        // `lost` is closed after this: whoever sees its end sees it after this host has forgotten what came through it.
        self.step(Event::LinkLost { peer, by_peer });
    }

    /// Counted always, told once per peer and minute.
    fn violation(&mut self, peer: ReplicaId, bad: Bad, what: String) {
        const QUIET_US: u64 = 60_000_000;
        self.counters.bad += 1;
        *match bad {
            Bad::Short => &mut self.counters.short,
            Bad::Long => &mut self.counters.long,
            Bad::Unknown => &mut self.counters.unknown,
            Bad::Forbidden => &mut self.counters.forbidden,
            Bad::Broken => &mut self.counters.broken,
        } += 1;
        let now = self.now_us;
        let at = self
            .violations
            .iter()
            .position(|b| b.0 == peer)
            .unwrap_or_else(|| {
                self.violations.push((peer, 0, 0));
                self.violations.len() - 1
            });
        let (_, count, told) = &mut self.violations[at];
        *count += 1;
        if *count == 1 || *told + QUIET_US <= now {
            *told = now;
            self.events.push_back(GroupEvent::ProtocolViolation {
                peer,
                what,
                count: *count,
            });
        }
    }

    /// Hears what the disk has done.
    fn take_done(&mut self) -> bool {
        if !self.writer.is_ready() {
            return false;
        }
        let done: Vec<Done> = self.writer.done().collect();
        let busy = !done.is_empty();
        for done in done {
            match done {
                Done::Persisted(ticket) => self.step(Event::Persisted { ticket }),
                Done::HardState(hard_state) => self.step(Event::HardStatePersisted(hard_state)),
                Done::Snapshot(last) => self.step(Event::SnapshotPersisted { last }),
                Done::Full(why) => self.events.push_back(GroupEvent::DiskFull(why)),
                Done::Room => self.events.push_back(GroupEvent::DiskRoom),
                Done::Failed(why) => self.events.push_back(GroupEvent::DiskFailed(why)),
            }
        }
        busy
    }

    fn step(&mut self, event: Event) {
        self.encoded.1 = None;
        let mut actions = std::mem::take(&mut self.actions);
        self.core.step(self.now_us, event, &mut actions);
        for action in actions.drain(..) {
            self.obey(action);
        }
        self.actions = actions;
        // Invariant 5. A candidate may be one by a person's order, which is not on disk yet.
        if self.recovers_disk && matches!(self.core.role(), Role::Follower { .. } | Role::Leader) {
            self.recovers_disk = false;
            self.writer.submit(Command::CountsAgain);
        }
    }

    fn obey(&mut self, action: Action) {
        match action {
            Action::Send { to, message } => self.send(to, &message),
            Action::SendEntries {
                to,
                term,
                prev,
                through,
            } => {
                let core = &self.core;
                let at = usize::from(self.places[usize::from(to.0)]);
                let peer = at.checked_sub(1).and_then(|at| self.peers.get_mut(at));
                if let Some(peer) = peer.filter(|peer| peer.is_up()) {
                    let (bytes, of) = &mut self.encoded;
                    if *of != Some((term, prev, through)) {
                        *of = Some((term, prev, through));
                        let first = prev.index.0 + 1;
                        let entry = |i| {
                            core.entry(Index(first + i as u64))
                                .expect("held until the next step")
                        };
                        bytes.clear();
                        let entries = (0..(through.0 - prev.index.0) as usize).map(entry);
                        encode_append(term, prev, entries, bytes);
                    }
                    peer.send_entries(term, bytes, &mut self.counters);
                }
            }
            Action::Persist {
                from,
                through,
                ticket,
            } => {
                let entries = (from.0..=through.0)
                    .filter_map(|i| self.core.entry(Index(i)).cloned())
                    .collect();
                self.writer.submit(Command::Persist { entries, ticket });
            }
            Action::TruncateSuffix { from } => self.writer.submit(Command::Cut(from)),
            Action::PersistHardState(hard_state) => {
                self.writer.submit(Command::HardState(hard_state));
                self.open_rings();
            }
            Action::SaveSnapshot(snapshot) => self.writer.submit(Command::Snapshot(snapshot)),
            Action::InstallSnapshot(snapshot) => {
                self.events.push_back(GroupEvent::SnapshotInstalled(snapshot))
            }
            Action::Committed { through } => match self.events.back_mut() {
                Some(GroupEvent::Committed { through: last }) => *last = through,
                _ => self.events.push_back(GroupEvent::Committed { through }),
            },
            Action::BecameLeader { term, barrier } => {
                self.events.push_back(GroupEvent::BecameLeader { term, barrier })
            }
            Action::BecameFollower { term, leader } => {
                self.events.push_back(GroupEvent::BecameFollower { term, leader });
                self.open_rings();
            }
            Action::ReadReady { id, index } => self.events.push_back(GroupEvent::ReadReady { id, index }),
            Action::ReadRefused { id } => self.events.push_back(GroupEvent::ReadRefused { id }),
            Action::TransferFailed { to } => self.events.push_back(GroupEvent::TransferFailed { to }),
            Action::ProtocolViolation { from, what } => self.violation(from, Bad::Forbidden, what.to_owned()),
        }
    }

    fn send(&mut self, to: ReplicaId, message: &Message) {
        let at = usize::from(self.places[usize::from(to.0)]);
        if let Some(peer) = at.checked_sub(1).and_then(|at| self.peers.get_mut(at)) {
            peer.send(message, &mut self.counters);
        }
    }

    /// Invariant 3: revokes rings of older terms, opens one for the leader that is followed or voted for.
    fn open_rings(&mut self) {
        let hard_state = self.core.hard_state();
        let leader = self
            .core
            .leader()
            .or(hard_state.voted_for)
            .filter(|l| *l != self.cfg.core.me);
        for peer in &mut self.peers {
            peer.open_log(hard_state.term, leader, self.cfg.ring_bytes);
        }
    }

    /// Sends what is held back: what others wait for, or (`all`) also what can ride with the next proposal.
    fn flush(&mut self, all: bool) {
        let mut at = 0;
        while at < self.peers.len() {
            match self.peers[at].flush(all, &mut self.counters) {
                Ok(()) => at += 1,
                Err(why) if self.keeping => {
                    self.peers[at].fail(why);
                    at += 1;
                }
                Err(why) => self.lose(at, &why),
            }
        }
    }
}

/// What the owner asks for.
impl Group {
    /// Appends to the agreed log; everything proposed since the last `poll` leaves together with the next one.
    pub fn propose(&mut self, payload: Bytes) -> Result<Index, Refusal> {
        if self.disk_lags() {
            return Err(Refusal::RingFull);
        }
        let index = self.core.propose(payload)?;
        self.proposed = true;
        Ok(index)
    }

    /// As [`Self::propose`], for the owner's own few and small entries: a log full of inputs takes them too.
    pub fn propose_control(&mut self, payload: Bytes) -> Result<Index, Refusal> {
        let index = self.core.propose_control(payload)?;
        self.proposed = true;
        Ok(index)
    }

    /// Changes the members, one at a time.
    pub fn change_members(&mut self, members: Vec<Member>) -> Result<Index, Refusal> {
        let index = self.core.change_members(members)?;
        self.proposed = true;
        Ok(index)
    }

    /// The agreed state contains everything up to here.
    pub fn applied(&mut self, through: Index) {
        self.step(Event::Applied { through });
    }

    /// Outputs that rest on entries up to here have left.
    pub fn released(&mut self, through: Index) {
        self.step(Event::Released { through });
    }

    /// Entries up to here are not needed again; `state` stands for them.
    pub fn truncate(&mut self, through: Index, state: Bytes) {
        self.step(Event::Truncate { through, state });
    }

    /// Whether this replica is ready to lead.
    pub fn may_lead(&mut self, may: bool) {
        self.step(Event::MayLead(may));
    }

    /// Leader: hand over to this member.
    pub fn transfer_to(&mut self, to: ReplicaId) {
        self.step(Event::TransferTo(to));
    }

    /// Leader: hand over to the best member.
    pub fn step_down(&mut self) {
        self.step(Event::StepDown);
    }

    /// A person says that all others are dead: lead a group of one (core's `consensus::alone`). Who returns is added again
    /// with [`Self::change_members`].
    pub fn stand_alone(&mut self) {
        self.step(Event::StandAlone);
    }

    /// Answered by `ReadReady` when it is certain that no newer leader had committed anything before this call.
    pub fn read(&mut self, id: u64) {
        self.step(Event::Read { id });
    }
}

#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod tests;
