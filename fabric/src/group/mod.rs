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
//!
//! **Longer than 400 lines**: the public types and the getters are half of it; the other half is one loop.
//!
//! **Source**: APUS (GAIA 2.1.2): "logs locally and writes to all backups"; design/fabric.md. **Not here**: who connects to
//! whom and when again (the owner: [`Group::add_link`]).

mod kept;
mod peer;

pub use kept::{KeptGroup, may_be_real_time};

use crate::link::Stream;
use crate::log::{Command, Cut, Disk, DiskError, DiskOptions, Done, Mode, Writer};
use crate::transport::TransportError;
use crate::wait::{Idle, WaitPolicy};
use bytes::Bytes;
use dunlin_core::consensus::{
    Action, Config, Consensus, Durability, Entry, Event, Member, Message, Promise, Refusal, Restored, Role,
    Snapshot,
};
use dunlin_core::units::{Index, ReplicaId, Term, Viewstamp};
use dunlin_core::wire::consensus::encode_append;
use peer::{Heard, Peer};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// So many rounds of work in one `poll` before the owner gets its thread back.
const ROUNDS: usize = 32;
/// Whose descriptor it is, for epoll: a peer's by its id, or of no interest: whatever it woke us for is looked at anyway.
const OTHER: u64 = u64::MAX;
/// So much is taken from one peer in one round.
const BUDGET_BYTES: usize = 1 << 20;

/// Settings of one replica of one group.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Where its log lies; for this replica alone.
    pub dir: PathBuf,
    /// Who I am, durability, timings.
    pub core: Config,
    /// The members when the group was founded. A replica that is to be added later starts with none.
    pub members: Vec<Member>,
    /// The size of the log ring per peer, a multiple of 64. Larger entries go through in pieces.
    pub ring_bytes: usize,
    /// The log's files.
    pub disk: DiskOptions,
    /// Whose thread writes them.
    pub disk_mode: Mode,
    /// For [`Group::wait`] only.
    pub wait: WaitPolicy,
}

impl GroupConfig {
    /// The defaults.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, me: ReplicaId, members: Vec<Member>, durability: Durability) -> Self {
        let core = Config::new(me, durability);
        let (disk, disk_mode, wait) = (DiskOptions::default(), Mode::default(), WaitPolicy::default());
        Self {
            dir: dir.into(),
            core,
            members,
            ring_bytes: 2 << 20,
            disk,
            disk_mode,
            wait,
        }
    }
}

/// Why a group could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The log on disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// What the owner must know.
#[derive(Debug)]
pub enum GroupEvent {
    /// Everything up to here is agreed: read it with [`Group::entry`], then report [`Group::applied`].
    Committed {
        /// The newest agreed entry.
        through: Index,
    },
    /// This replica leads; its agreed state is current when `barrier` is committed.
    BecameLeader {
        /// The term.
        term: Term,
        /// Its first entry.
        barrier: Index,
    },
    /// This replica does not lead (any more).
    BecameFollower {
        /// The term.
        term: Term,
        /// The leader, if known.
        leader: Option<ReplicaId>,
    },
    /// Replace the agreed state with this, then report [`Group::applied`].
    SnapshotInstalled(Snapshot),
    /// The link to a peer works in both directions.
    LinkUp {
        /// Which.
        peer: ReplicaId,
    },
    /// The link to a peer ended: connect again and [`Group::add_link`].
    LinkLost {
        /// Which.
        peer: ReplicaId,
        /// Why, for the log.
        why: String,
        /// It broke the link by what it wrote: `Breach` tells of that, not every time.
        broken: bool,
    },
    /// See [`Group::read`].
    ReadReady {
        /// From the call.
        id: u64,
        /// Wait for this to be applied.
        index: Index,
    },
    /// See [`Group::read`]: not the leader any more.
    ReadRefused {
        /// From the call.
        id: u64,
    },
    /// The hand-over was not taken; this replica leads on.
    TransferFailed {
        /// Who did not take it.
        to: ReplicaId,
    },
    /// The disk is full: this replica acknowledges nothing until `DiskRoom`.
    DiskFull(String),
    /// The disk has room again.
    DiskRoom,
    /// The log cannot be written any more; this replica acknowledges nothing until it is started again.
    DiskFailed(String),
    /// A peer said what the protocol forbids; it was dropped. At most one per peer and minute.
    Breach {
        /// The peer.
        peer: ReplicaId,
        /// What.
        what: String,
        /// How many so far.
        count: u64,
    },
}

/// What is known of the link to a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkState {
    /// The member.
    pub peer: ReplicaId,
    /// "shm", "tcp", "tcp+tls"; `None` if there is no link.
    pub fabric: Option<&'static str>,
    /// Messages can go both ways.
    pub connected: bool,
    /// As the leader: it holds everything up to here.
    pub acknowledged: Option<Index>,
    /// When something was last heard from it, by `poll`'s clock.
    pub heard_us: Option<u64>,
}

/// In which way a peer's words are bad.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bad {
    /// A message ends too early.
    Short,
    /// A message has bytes left over.
    Long,
    /// A tag or a count that is unknown or impossible.
    Unknown,
    /// Understood, and forbidden by the protocol.
    Forbidden,
    /// A frame or a record that ended the link: impossible lengths, a checksum that stays wrong.
    Broken,
}

/// Counters, for status and benchmarks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Messages and words understood.
    pub heard: u64,
    /// Records that were not (yet) believed when looked at.
    pub torn: u64,
    /// All that was bad, in whichever way; the next five are its parts.
    pub bad: u64,
    /// [`Bad::Short`].
    pub short: u64,
    /// [`Bad::Long`].
    pub long: u64,
    /// [`Bad::Unknown`].
    pub unknown: u64,
    /// [`Bad::Forbidden`].
    pub forbidden: u64,
    /// [`Bad::Broken`].
    pub broken: u64,
    /// Messages given up because a peer's ring and queue were full.
    pub given_up: u64,
}

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
    cut: Option<Cut>,
    breaches: Vec<(ReplicaId, u64, u64)>,
}

impl Group {
    /// Opens the log in `cfg.dir` (or founds it) and starts as a follower.
    pub fn open(cfg: GroupConfig) -> Result<Self, GroupError> {
        let io = |what| move |source| GroupError::Io { what, source };
        let (disk, found) = Disk::open(&cfg.dir, cfg.disk.clone())?;
        let memory = cfg.core.durability == Durability::Memory;
        let fresh = Restored::fresh(cfg.members.clone());
        let restored = Restored {
            promise: found.promise.unwrap_or_default(),
            snapshot: found.snapshot.filter(|_| !memory).unwrap_or(fresh.snapshot),
            log: if memory { Vec::new() } else { found.log },
            lost_memory: memory && found.promise.is_some_and(|p| p != Promise::default()),
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
            cut: found.cut,
            breaches: Vec::new(),
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
        if let Some(event) = self.events.pop_front() {
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
                return self.events.pop_front();
            }
        }
        self.flush(true);
        self.events.pop_front()
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
                    Heard::Bad(bad, what) => self.breach(from, bad, what),
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
        let broken = matches!(error, TransportError::Breach(_));
        let by_peer = matches!(error, TransportError::Closed(_));
        if broken {
            self.breach(peer, Bad::Broken, why.clone());
        }
        self.events.push_back(GroupEvent::LinkLost { peer, why, broken });
        // `lost` is closed after this: whoever sees its end sees it after this host has forgotten what came through it.
        self.step(Event::LinkLost { peer, by_peer });
    }

    /// Counted always, told once per peer and minute.
    fn breach(&mut self, peer: ReplicaId, bad: Bad, what: String) {
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
        let at = self.breaches.iter().position(|b| b.0 == peer).unwrap_or_else(|| {
            self.breaches.push((peer, 0, 0));
            self.breaches.len() - 1
        });
        let (_, count, told) = &mut self.breaches[at];
        *count += 1;
        if *count == 1 || *told + QUIET_US <= now {
            *told = now;
            self.events.push_back(GroupEvent::Breach {
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
                Done::Promise(promise) => self.step(Event::PromisePersisted(promise)),
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
            Action::PersistPromise(promise) => {
                self.writer.submit(Command::Promise(promise));
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
            Action::Breach { from, what } => self.breach(from, Bad::Forbidden, what.to_owned()),
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
        let promise = self.core.promise();
        let leader = self
            .core
            .leader()
            .or(promise.voted_for)
            .filter(|l| *l != self.cfg.core.me);
        for peer in &mut self.peers {
            peer.open_log(promise.term, leader == Some(peer.id), self.cfg.ring_bytes);
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

    /// Before sleeping: false means that there is something to do already, so call `poll` instead.
    pub fn arm(&mut self) -> bool {
        self.flush(true);
        let mut idle = self.events.is_empty() && !self.proposed && !self.more && !self.writer.is_ready();
        self.armed = true;
        (self.asked, self.told) = (false, false);
        for at in 0..self.peers.len() {
            idle &= self.peers[at].transport.arm().is_ok() && !self.peers[at].has_something();
            if let Some(fd) = self.peers[at].transport.fds()[0] {
                let wants = self.peers[at].transport.wants_write();
                if wants != self.peers[at].watched_for_write {
                    self.peers[at].watched_for_write = wants;
                    let events = if wants {
                        libc::EPOLLIN | libc::EPOLLOUT
                    } else {
                        libc::EPOLLIN
                    };
                    idle &= self.watch(fd, events, u64::from(self.peers[at].id.0)).is_ok();
                }
            }
        }
        idle
    }

    /// For an owner that has waited for the group's descriptor itself, after [`Group::arm`]: whether it was readable. If not, `poll`
    /// need not ask the system which links are.
    pub fn woke(&mut self, readable: bool) {
        (self.asked, self.told) = (!readable, true);
    }

    /// For an owner without its own epoll: waits by the configured policy until there may be something to do, at the
    /// latest until `until_us` or the next deadline. `now_us` is the caller's clock, as for `poll`.
    pub fn wait(&mut self, now_us: u64, until_us: u64) {
        let until_us = self
            .core
            .next_deadline_us()
            .map_or(until_us, |at| at.min(until_us));
        match self.cfg.wait.after(self.idle_rounds) {
            Idle::Spin => std::hint::spin_loop(),
            Idle::Yield => std::thread::yield_now(),
            Idle::Block => {
                if self.arm() && until_us > now_us {
                    self.ask(until_us - now_us);
                }
            }
        }
        self.idle_rounds = self.idle_rounds.saturating_add(1);
    }

    /// Asks the system which links are readable, waiting for one at most so long.
    fn ask(&mut self, for_us: u64) {
        let timeout = libc::timespec {
            tv_sec: (for_us / 1_000_000) as i64,
            tv_nsec: (for_us % 1_000_000 * 1000) as i64,
        };
        const MOST: usize = 16;
        let mut events = [libc::epoll_event {
            events: 0,
            u64: OTHER,
        }; MOST];
        let most = MOST as i32;
        // SAFETY: the events and the timeout live across the call. Being woken early for any reason is fine.
        let n = unsafe {
            let epoll = self.epoll.as_raw_fd();
            let n = libc::epoll_pwait2(
                epoll,
                events.as_mut_ptr(),
                most,
                &raw const timeout,
                std::ptr::null(),
            );
            if n < 0 && *libc::__errno_location() == libc::ENOSYS {
                libc::epoll_wait(
                    epoll,
                    events.as_mut_ptr(),
                    most,
                    for_us.div_ceil(1000).min(1000) as i32,
                )
            } else {
                n
            }
        };
        self.asked = n >= 0;
        for event in &events[..n.max(0) as usize] {
            let whose = event.u64;
            let peer = u8::try_from(whose)
                .ok()
                .and_then(|id| self.peer_mut(ReplicaId(id)));
            if let Some(peer) = peer {
                peer.readable = true;
            }
        }
    }

    /// Readable means: call `poll`. One descriptor, the same for the group's life.
    #[must_use]
    pub fn fds(&self) -> Vec<RawFd> {
        vec![self.epoll.as_raw_fd()]
    }

    /// `poll` must be called at this time at the latest.
    #[must_use]
    pub fn next_deadline_us(&self) -> Option<u64> {
        self.core.next_deadline_us()
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

/// What the owner looks at.
impl Group {
    /// An entry that is held; agreed only up to [`Self::committed`].
    #[must_use]
    pub fn entry(&self, index: Index) -> Option<&Entry> {
        self.core.entry(index)
    }

    /// Whether an input of so many bytes would be taken.
    #[must_use]
    pub fn has_input_room(&self, bytes: usize) -> bool {
        !self.disk_lags() && self.core.has_input_room(bytes)
    }

    /// More waits for the log's disk than the log may hold: the followers are quick enough for both, and it never ends.
    fn disk_lags(&self) -> bool {
        self.writer.queued_bytes() > self.core.config().ring_bytes
    }

    /// What waits for the log's disk, and what may.
    #[must_use]
    pub fn disk_queue(&self) -> (usize, usize) {
        (self.writer.queued_bytes(), self.core.config().ring_bytes)
    }

    /// What waits for room in the rings of the other hosts, what may, and how many messages were given up for that.
    #[must_use]
    pub fn link_queue(&self) -> (usize, usize, u64) {
        let bytes = self.peers.iter().map(Peer::queued_bytes).sum();
        (
            bytes,
            peer::QUEUES_MAX_BYTES * self.peers.len(),
            self.counters.given_up,
        )
    }

    /// The consensus, to look at.
    #[must_use]
    pub fn core(&self) -> &Consensus {
        &self.core
    }

    /// Agreed up to here.
    #[must_use]
    pub fn committed(&self) -> Index {
        self.core.committed()
    }

    /// What this replica is.
    #[must_use]
    pub fn role(&self) -> Role {
        self.core.role()
    }

    /// Whether it leads.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.core.role() == Role::Leader
    }

    /// Whether this leader may let the world hear its VM at `now_us` without asking anyone (core's `lease`): the last look
    /// before something leaves. A group that has agreed that this host alone is complete needs no such look.
    #[must_use]
    pub fn may_speak(&self, now_us: u64) -> bool {
        self.core
            .speaks_until_us()
            .is_some_and(|until_us| now_us < until_us)
    }

    /// How long a silence may be before this replica believes that somebody died (core's `detector`).
    #[must_use]
    pub fn patience_us(&self) -> u64 {
        self.core.patience_us()
    }

    /// Its term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.core.promise().term
    }

    /// The leader, if known.
    #[must_use]
    pub fn leader(&self) -> Option<ReplicaId> {
        self.core.leader()
    }

    /// What stands for everything before the first entry (after a start: what was found on disk).
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.core.snapshot()
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let torn = self.peers.iter().map(Peer::torn).sum::<u64>();
        Counters {
            torn: self.counters.torn + torn,
            ..self.counters
        }
    }

    /// The state of the links to all other members, and to hosts that are to be members (again).
    #[must_use]
    pub fn links(&self) -> Vec<LinkState> {
        let is_member = |id| self.core.members().iter().any(|m| m.id == id);
        let members = self.core.members().iter().map(|m| m.id);
        let guests = self.peers.iter().map(|p| p.id).filter(|id| !is_member(*id));
        members
            .filter(|id| *id != self.cfg.core.me)
            .chain(guests)
            .map(|id| {
                let peer = self.peers.iter().find(|p| p.id == id);
                LinkState {
                    peer: id,
                    fabric: peer.map(|p| p.transport.fabric()),
                    connected: peer.is_some_and(Peer::is_up),
                    acknowledged: self.core.peer(id).map(|p| p.acknowledged),
                    heard_us: peer.and_then(Peer::heard_us),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod tests;

impl std::os::fd::AsFd for Group {
    /// Readable means: call `poll`. The same descriptor for the group's life.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
