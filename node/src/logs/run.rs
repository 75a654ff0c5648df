//! The loop of one log on one host: drives its group, proposes what programs propose, applies what is agreed, and cuts.
//!
//! * **Decides:** when a proposal is taken, refused or given up; what is cut away.
//! * **Flow:** [`Proposal`]s -> `group.propose` while this host leads and there is room -> `Committed` -> core's `logged` says whether it
//!   is news -> readers ([`Retained`]) and the proposer are told. After each turn what is more than is to be kept is cut.
//! * **Invariants:** 1. a proposer is told `Agreed` only of an entry that was committed and applied here. 2. what is refused or given
//!   up ends its conversation ([`super::session`]), so of one conversation nothing is taken after it. 3. the snapshot has the
//!   proposers' numbers as they were at the entry where it is cut, not as they are now. 4. a host whose disk is full does not lead.
//! * **Not here:** sockets (`session`), who may make a log (`daemon::logs`).

use super::retained::{KEEP_BYTES, KEEP_ENTRIES, Kept};
use super::{Shared, StartError};
use crate::vm::{Connector, Host};
use crossbeam_channel::{Receiver, Sender};
use dunlin_api::EventKind;
use dunlin_api::log::{LogAnswer, LogHost, LogRecord, LogState, LogStatus};
use dunlin_core::consensus::{Durability, Entry, EntryKind, Member, Refusal, Role, Snapshot};
use dunlin_core::logged::{Proposal, Proposers, Verdict};
use dunlin_core::units::{Index, ReplicaId, Term};
use dunlin_fabric::clock::HostClock;
use dunlin_fabric::group::{GroupConfig, GroupEvent, KeptGroup};
use dunlin_fabric::link::{Hello, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So much more than what is kept may be there before it is cut: a cut is a write to the disk.
const SLACK_ENTRIES: usize = KEEP_ENTRIES / 4;
const SLACK_BYTES: usize = KEEP_BYTES / 4;
/// Beside these, what is under way.
const UNDER_WAY_ENTRIES: usize = 8192;
const UNDER_WAY_BYTES: usize = 16 << 20;
/// The log's files: small ones, so that a cut gives room back soon.
const SEGMENT_BYTES: u64 = 4 << 20;
/// A proposal that is not agreed after this time has no majority.
const GIVEN_UP: Duration = Duration::from_secs(10);
/// The longest sleep.
const LONGEST_SLEEP_US: u64 = 100_000;
/// The status is at most this old.
const SHOW_US: u64 = 100_000;
/// Why nothing is taken when the loop is at its end.
const ENDS: &str = "this host's daemon ends, or the log is removed";
/// A loop that does not turn for so long is taken for hung.
const HUNG: Duration = Duration::from_secs(1);

/// What a session wants.
pub struct Asked {
    pub proposal: Proposal,
    pub number: u64,
    pub reply: Sender<LogAnswer>,
}

/// All else that can happen to the loop.
pub enum Order {
    /// We connected to a peer.
    Link(ReplicaId, Stream),
    /// A peer connected.
    Accepted(Hello, Stream),
    /// The daemon ends, or the log is forgotten here.
    End,
}

struct Pending {
    /// In which it was proposed: at its index another leader's entry may be agreed.
    term: Term,
    number: u64,
    reply: Sender<LogAnswer>,
    since: Instant,
}

/// What is agreed and applied here, and how much of it is held.
#[derive(Default)]
struct Agreed {
    /// How far each proposer has come at the entry before the first that is held (invariant 3), and now.
    at_cut: Proposers,
    now: Proposers,
    cut: Index,
    applied: Index,
}

impl Agreed {
    /// The next entry that is agreed, up to `through`. None also while the group has a snapshot that is still to be taken
    /// ([`GroupEvent::SnapshotInstalled`]): what it holds then does not follow on what is applied here, and the snapshot stands for it.
    fn follow(
        &mut self,
        through: Index,
        held: impl FnOnce(Index) -> Option<Entry>,
    ) -> Option<(Index, Entry)> {
        if self.applied >= through {
            return None;
        }
        let index = self.applied.next();
        let entry = held(index)?;
        self.applied = index;
        Some((index, entry))
    }
}

/// Why the log does not go on here.
#[derive(Default)]
struct Trouble {
    disk_full: Option<String>,
    failed: Option<String>,
}

/// The loop.
pub struct LogLoop {
    host: Arc<Host>,
    record: LogRecord,
    me: ReplicaId,
    group: KeptGroup,
    shared: Arc<Shared>,
    proposals: Receiver<Asked>,
    orders: Receiver<Order>,
    connectors: BTreeMap<ReplicaId, Connector>,
    agreed: Agreed,
    /// What this host proposed as the leader, by index.
    pending: BTreeMap<u64, Pending>,
    trouble: Trouble,
    born: HostClock,
    shown_us: u64,
    over: bool,
}

/// The name under which other hosts ask for a log: no VM has it, since a VM's name has no slash.
pub fn hello_name(log: &str) -> String {
    format!("log/{log}")
}

impl LogLoop {
    /// A loop that is ready to run.
    pub fn new(
        host: &Arc<Host>,
        record: LogRecord,
        shared: &Arc<Shared>,
        proposals: Receiver<Asked>,
        orders: Receiver<Order>,
    ) -> Result<Self, StartError> {
        let me = record.hosts.iter().position(|name| *name == host.name);
        let me = ReplicaId(me.ok_or(StartError::NoPart)? as u8);
        let members = (0..record.hosts.len() as u8).map(Member::full).collect();
        let folder = super::store::folder(&host.state, &record.name);
        let mut cfg = GroupConfig::new(folder.join("group"), me, members, Durability::Disk);
        let shortest_us = u64::from(host.cluster.election_ms) * 1000;
        (cfg.core.election_min_us, cfg.core.election_max_us) = (shortest_us, 2 * shortest_us);
        cfg.core.heartbeat_us = shortest_us / 12;
        cfg.core.ring_entries = KEEP_ENTRIES + SLACK_ENTRIES + UNDER_WAY_ENTRIES;
        cfg.core.ring_bytes = KEEP_BYTES + SLACK_BYTES + UNDER_WAY_BYTES;
        cfg.disk.segment_bytes = SEGMENT_BYTES;
        let group = KeptGroup::open(cfg, HUNG)?;
        let connectors = (0u8..)
            .map(ReplicaId)
            .zip(&record.hosts)
            .filter(|(id, _)| *id > me)
            .map(|(id, name)| {
                let shared = shared.clone();
                let deliver = move |stream| shared.order(Order::Link(id, stream));
                let connector =
                    Connector::start(host.clone(), hello_name(&record.name), name.clone(), deliver);
                (id, connector)
            })
            .collect();
        let mut this = Self {
            host: host.clone(),
            me,
            group,
            shared: shared.clone(),
            proposals,
            orders,
            connectors,
            agreed: Agreed::default(),
            pending: BTreeMap::new(),
            trouble: Trouble::default(),
            born: HostClock::begin(),
            shown_us: 0,
            over: false,
            record,
        };
        let snapshot = this.group.snapshot();
        this.begin_with(&snapshot)?;
        this.show(true);
        Ok(this)
    }

    fn begin_with(&mut self, snapshot: &Snapshot) -> Result<(), StartError> {
        let state = Proposers::decode(snapshot.state.clone())?;
        (self.agreed.at_cut, self.agreed.now) = (state.clone(), state);
        (self.agreed.cut, self.agreed.applied) = (snapshot.last.index, snapshot.last.index);
        self.shared.retained.begin(self.agreed.cut.0 + 1);
        Ok(())
    }

    /// Runs until it is told to end.
    pub fn run(mut self) {
        while !self.over {
            let readable = self.wait();
            self.shared.waker.clear();
            self.group.woke(readable);
            self.take_orders();
            self.follow_group();
            self.take_proposals();
            self.follow_group();
            self.cut_away();
            self.give_up_late();
            self.show(false);
        }
        self.refuse_all(ENDS);
        refuse_waiting(&self.proposals, ENDS);
        self.shared.retained.end();
    }

    fn wait(&mut self) -> bool {
        let waiting = !self.orders.is_empty() || (!self.proposals.is_empty() && self.takes());
        let idle = self.group.arm() && !waiting;
        let now_us = self.now_us();
        let deadline_us = self.group.next_deadline_us().unwrap_or(u64::MAX);
        let sleep_us = deadline_us.saturating_sub(now_us).min(LONGEST_SLEEP_US);
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: if idle { (sleep_us * 1000) as i64 } else { 0 },
        };
        let mut fds = [
            PollFd::new(self.shared.waker.fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.group.as_fd(), PollFlags::IN),
        ];
        // Interrupted: everything is looked at.
        poll(&mut fds, Some(&timeout)).is_err() || !fds[1].revents().is_empty()
    }

    fn now_us(&self) -> u64 {
        self.born.now_us()
    }

    fn take_orders(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            let (peer, stream) = match order {
                Order::Link(peer, stream) => (peer, stream),
                Order::Accepted(hello, stream) => {
                    let known = self.record.hosts.iter().position(|name| *name == hello.from);
                    match known {
                        Some(at) if at != usize::from(self.me.0) => (ReplicaId(at as u8), stream),
                        _ => continue,
                    }
                }
                Order::End => {
                    self.over = true;
                    continue;
                }
            };
            if let Err(error) = self.group.add_link(peer, stream) {
                tracing::debug!(log = self.record.name, "a link: {error}");
                self.connect_again(peer);
            }
        }
    }

    fn connect_again(&self, peer: ReplicaId) {
        if let Some(connector) = self.connectors.get(&peer) {
            connector.link_lost();
        }
    }

    fn follow_group(&mut self) {
        while let Some(event) = self.group.poll(self.now_us()) {
            match event {
                GroupEvent::Committed { through } => self.apply(through),
                GroupEvent::SnapshotInstalled(snapshot) => {
                    self.refuse_all("this host was behind, and took what others have agreed on");
                    if let Err(why) = self.begin_with(&snapshot) {
                        self.fail(why.to_string());
                    }
                    self.group.applied(self.agreed.applied);
                }
                GroupEvent::BecameLeader { .. } => {
                    self.event(EventKind::LogLeads, "this host leads the log".into())
                }
                GroupEvent::BecameFollower { .. } => {
                    self.refuse_all("the log's leader has changed");
                    // Invariant 4, once the lead is handed over.
                    self.group
                        .may_lead(self.trouble.disk_full.is_none() && self.trouble.failed.is_none());
                }
                GroupEvent::LinkLost { peer, .. } => self.connect_again(peer),
                GroupEvent::DiskFull(why) => {
                    let folder = self.host.state.display();
                    let text = format!("{why}: make room in {folder}; nothing that was agreed is lost");
                    self.event(EventKind::LogDiskFull, text.clone());
                    self.trouble.disk_full = Some(text);
                    if self.group.is_leader() {
                        self.group.step_down();
                    } else {
                        self.group.may_lead(false);
                    }
                }
                GroupEvent::DiskRoom => {
                    self.trouble.disk_full = None;
                    self.group.may_lead(true);
                    self.event(EventKind::LogDiskRoom, "the log's disk has room again".into());
                }
                GroupEvent::DiskFailed(why) => self.fail(why),
                GroupEvent::ProtocolViolation { peer, what, .. } => {
                    let from = &self.record.hosts[usize::from(peer.0)];
                    self.event(EventKind::BadInput, format!("host '{from}': {what}"));
                }
                GroupEvent::LinkUp { .. }
                | GroupEvent::TransferFailed { .. }
                | GroupEvent::ReadReady { .. }
                | GroupEvent::ReadRefused { .. } => continue,
            }
            self.shown_us = 0;
        }
    }

    fn fail(&mut self, why: String) {
        self.event(
            EventKind::LogFailed,
            format!("{why}: start this host's daemon again once it is mended"),
        );
        self.group.may_lead(false);
        self.trouble.failed = Some(why);
    }

    fn event(&self, kind: EventKind, text: String) {
        self.host.events.push(&hello_name(&self.record.name), kind, text);
    }

    /// Invariant 1.
    fn apply(&mut self, through: Index) {
        let mut news = Vec::new();
        while let Some((index, entry)) = self.agreed.follow(through, |index| self.group.entry(index)) {
            let pending = self.pending.remove(&index.0);
            if entry.kind != EntryKind::Data {
                continue;
            }
            let proposal = match Proposal::decode(entry.payload) {
                Ok(proposal) => proposal,
                Err(error) => {
                    self.event(
                        EventKind::BadInput,
                        format!("entry {} is left out: {error}", index.0),
                    );
                    continue;
                }
            };
            let verdict = self.agreed.now.apply(index, &proposal);
            if let Some(Pending {
                term, number, reply, ..
            }) = pending
            {
                let answer = match term == entry.stamp.term {
                    true => answer(verdict, number, index),
                    // Another leader's: what was proposed here is not agreed at this index.
                    false => nobody_knows("this host no longer leads", number),
                };
                // Whoever asked may have gone, here and below; there is room for an answer to each that is under way.
                let _ = reply.try_send(answer);
            }
            if verdict == Verdict::New {
                news.push(Kept {
                    index: index.0,
                    term: entry.stamp.term.0,
                    by: proposal.by,
                    data: proposal.data,
                });
            }
        }
        self.shared.retained.push(news, self.agreed.applied.0);
        self.group.applied(self.agreed.applied);
    }

    /// Whether what waits is to be looked at now.
    fn takes(&self) -> bool {
        !self.group.is_leader()
            || self
                .group
                .has_input_room(dunlin_core::logged::MOST_ENTRY_BYTES + 256)
    }

    fn take_proposals(&mut self) {
        while self.takes() {
            let Ok(Asked {
                proposal,
                number,
                reply,
            }) = self.proposals.try_recv()
            else {
                return;
            };
            let fault = proposal.fault();
            let proposed = match &fault {
                Some(why) => Err(why.clone()),
                None => match self.group.propose(proposal.encode()) {
                    Err(Refusal::NotLeader { .. }) => Err("this host does not lead the log now".to_owned()),
                    proposed => proposed.map_err(|refusal| refusal.to_string()),
                },
            };
            match proposed {
                Ok(index) => {
                    let pending = Pending {
                        term: self.group.term(),
                        number,
                        reply,
                        since: Instant::now(),
                    };
                    self.pending.insert(index.0, pending);
                }
                Err(why) => {
                    let why = self.trouble.disk_full.clone().unwrap_or(why);
                    let again = fault.is_none();
                    let _ = reply.try_send(LogAnswer::Refused { number, why, again });
                }
            }
        }
    }

    /// Nobody knows what becomes of these.
    fn refuse_all(&mut self, why: &str) {
        for Pending { number, reply, .. } in std::mem::take(&mut self.pending).into_values() {
            let _ = reply.try_send(nobody_knows(why, number));
        }
    }

    fn give_up_late(&mut self) {
        let late = |pending: &Pending| pending.since.elapsed() >= GIVEN_UP;
        if self
            .pending
            .first_key_value()
            .is_some_and(|(_, pending)| late(pending))
        {
            let why = match &self.trouble.disk_full {
                Some(why) => why.clone(),
                None => format!(
                    "no majority of the log's hosts has it on disk after {} s ({})",
                    GIVEN_UP.as_secs(),
                    self.who_is_here()
                ),
            };
            self.refuse_all(&why);
        }
    }

    fn who_is_here(&self) -> String {
        let words = self
            .hosts()
            .into_iter()
            .map(|LogHost { host, connected }| match connected {
                true => format!("{host} is connected"),
                false => format!("{host} is not"),
            });
        words.collect::<Vec<_>>().join(", ")
    }

    fn hosts(&self) -> Vec<LogHost> {
        let links = self.group.links();
        let ids = (0u8..).map(ReplicaId).zip(&self.record.hosts);
        ids.map(|(id, host)| LogHost {
            host: host.clone(),
            connected: id == self.me || links.iter().any(|link| link.peer == id && link.connected),
        })
        .collect()
    }

    /// Invariant 3.
    fn cut_away(&mut self) {
        let (mut entries, mut bytes) = self.group.log_size();
        if entries <= KEEP_ENTRIES + SLACK_ENTRIES && bytes <= KEEP_BYTES + SLACK_BYTES {
            return;
        }
        let before = self.agreed.cut;
        while self.agreed.cut < self.agreed.applied && (entries > KEEP_ENTRIES || bytes > KEEP_BYTES) {
            let Some(entry) = self.group.entry(self.agreed.cut.next()) else {
                break;
            };
            self.agreed.cut = self.agreed.cut.next();
            entries -= 1;
            bytes -= entry.payload.len();
            if entry.kind == EntryKind::Data
                && let Ok(proposal) = Proposal::decode(entry.payload)
            {
                self.agreed.at_cut.apply(self.agreed.cut, &proposal);
            }
        }
        if self.agreed.cut > before {
            self.shared.retained.cut(self.agreed.cut.0);
            self.group.truncate(self.agreed.cut, self.agreed.at_cut.encode());
        }
    }

    fn show(&mut self, at_once: bool) {
        let now_us = self.now_us();
        if !at_once && self.shown_us != 0 && now_us < self.shown_us + SHOW_US {
            return;
        }
        self.shown_us = now_us.max(1);
        let leader = self.group.leader();
        let (first, last, entries, bytes) = self.shared.retained.figures();
        let (state, why) = match (&self.trouble.failed, &self.trouble.disk_full, leader) {
            (Some(why), ..) => (LogState::Failed, why.clone()),
            (_, Some(why), _) => (LogState::DiskFull, why.clone()),
            (_, _, None) => {
                let here = self.who_is_here();
                (
                    LogState::NoLeader,
                    format!("no majority of its hosts has chosen one ({here})"),
                )
            }
            _ if self.group.role() == Role::Leader => (LogState::Leads, String::new()),
            _ => (LogState::Follows, String::new()),
        };
        self.shared.show(LogStatus {
            name: self.record.name.clone(),
            state,
            why,
            leader: leader.map(|id| self.record.hosts[usize::from(id.0)].clone()),
            term: self.group.term().0,
            first,
            last,
            entries,
            bytes,
            hosts: self.hosts(),
        });
    }
}

/// What waits was proposed to nobody. A new conversation is told whether there is a log here.
fn refuse_waiting(proposals: &Receiver<Asked>, why: &str) {
    for Asked { number, reply, .. } in proposals.try_iter() {
        let (why, again) = (why.to_owned(), true);
        // Whoever asked may have gone.
        let _ = reply.try_send(LogAnswer::Refused { number, why, again });
    }
}

/// Of a proposal that may have been agreed or not.
fn nobody_knows(why: &str, number: u64) -> LogAnswer {
    LogAnswer::Refused {
        number,
        why: format!("{why}: it may have been agreed or not; say it again with its number"),
        again: true,
    }
}

fn answer(verdict: Verdict, number: u64, index: Index) -> LogAnswer {
    let agreed = |index: u64, repeated| LogAnswer::Agreed {
        number,
        index,
        repeated,
    };
    match verdict {
        Verdict::New => agreed(index.0, false),
        Verdict::Repeated(before) => agreed(before.map_or(0, |index| index.0), true),
        Verdict::OutOfTurn { due } => LogAnswer::Refused {
            number,
            why: format!("this proposer's next number is {due}, not {number}"),
            again: false,
        },
    }
}

#[cfg(test)]
mod tests;
