//! What it decides: which entries are agreed, in which order, and who leads.
//!
//! Flow: the shell (the fabric's `Group`, the simulator, the model) turns what happens into an `Event`, calls
//! `Consensus::step`, and obeys the `Action`s **in their order**. The interface is in `types` and `message`; this file
//! only routes; the flows are `log` (what is held), `propose` (the leader's side), `follow` (the follower's side),
//! `election` (who leads), `lease` (until when a leader may speak), `detector` (how long a silence may be), `alone` (who leads by a person's order), `quorum` (what is agreed), `tally` (what a majority is), `recover` (after a crash).
//! What is kept meanwhile is in `leading` and `standing`.
//!
//! Invariants (the numbers stand in the asserts, in the simulator's checkers and in docs/consensus.md):
//! - C1 one leader per term;
//! - C2 agreement: two replicas never hold different committed entries at one index;
//! - C3 durability: a committed entry is in the log of every later leader;
//! - C4 order: `released <= applied <= committed <= appended` (see `order`);
//! - C5 the hard state is on disk before any word that rests on it is sent;
//! - C6 only a willing, non-witness member campaigns;
//! - C7 a replica that lost its memory neither votes nor acknowledges before a leader has brought it up to date.
//!
//! Source: Raft (terms, log matching, pre-vote, one-at-a-time membership), Viewstamped Replication Revisited (4.3
//! recovery; a new view takes the best log of a majority), APUS (GAIA 2.1.2: leader and backups both write one-sidedly,
//! one round).
//!
//! Longer than 400 lines: the routing, and a page of plain getters; no decision is in here but C5's order.
//!
//! Not here: clocks, sockets, files, threads, random sources. Time and the seed are arguments.

mod alone;
mod bugs;
mod detector;
mod election;
mod follow;
mod keeper;
mod leading;
mod lease;
mod log;
mod members;
mod message;
mod order;
mod orders;
mod propose;
mod quorum;
mod reads;
mod recover;
mod standing;
mod tally;
mod types;
mod witness;

pub use bugs::Bug;
pub use keeper::Standby;
pub use message::{Entry, EntryKind, HardState, MAX_MEMBERS, MOST, Member, Message, Snapshot, Stand};
pub use order::Order;
pub use types::{Action, Config, Durability, Event, PeerState, Refusal, Restored, Role};

use crate::units::{Index, ReplicaId, Term, Viewstamp};
use bytes::Bytes;
use detector::Detector;
use leading::Leading;
use lease::Bound;
use log::Log;
use recover::Pulling;
use standing::{Following, Recovery, Votes};
use std::collections::VecDeque;

/// One replica's half of the agreement.
///
/// `Clone`, `Eq` and `Hash` are for the exhaustive model, which runs this very type.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Consensus {
    cfg: Config,
    random: u64,
    now_us: u64,
    role: Role,
    leader: Option<ReplicaId>,
    /// When the leader was last heard (the follower's side of check-quorum), by `awake_us`.
    heard_us: Option<u64>,
    /// Who led when it was last heard, and when that was, by `awake_us`: what a silence that ends is measured from.
    last_heard: Option<(ReplicaId, u64)>,
    detector: Detector,
    bound: Option<Bound>,
    deadline_us: u64,
    may_lead: bool,
    /// The hard state, what the shell was asked to keep, what it has kept (C5).
    hard_state: HardState,
    hard_state_asked: HardState,
    hard_state_kept: HardState,
    /// Goes out when the hard state is kept.
    owed_vote: Option<ReplicaId>,
    owed_ack: bool,
    log: Log,
    order: Order,
    /// Entries up to here were handed to the shell's disk; up to `durable` they are there.
    handed: Index,
    durable: Index,
    tickets: VecDeque<(u64, Index)>,
    next_ticket: u64,
    /// An installed snapshot that is not on disk yet: nothing is acknowledged meanwhile.
    saving: Option<Viewstamp>,
    /// The disk held entries that do not belong to the log: they are cut with the first step.
    refused: bool,
    /// Installed snapshots that the owner has not taken.
    untaken: u32,
    following: Following,
    votes: Votes,
    leading: Leading,
    recovery: Recovery,
    /// It was declared dead, and has told nobody of the new order that it holds anything (S4 in `alone`).
    overruled: bool,
    pulling: Pulling,
    #[cfg(feature = "bugs")]
    bug: Option<Bug>,
}

impl Consensus {
    /// A replica that starts (again). `seed` feeds the time-outs and the recovery nonce: take it from the system's
    /// random source. The first `Tick` may come at once.
    #[must_use]
    pub fn new(cfg: Config, restored: Restored, seed: u64) -> Self {
        let Restored {
            mut hard_state,
            snapshot,
            log: entries,
            lost_memory,
        } = restored;
        let base = snapshot.last;
        let mut log = Log::new(snapshot);
        let mut refused = false;
        for entry in entries.into_iter().filter(|entry| entry.stamp.index > base.index) {
            // A snapshot was saved, then the machine died before the log that it replaced was cut: that log is older
            // than the snapshot's term (or does not reach it) and must not be attached to it.
            let follows = entry.stamp.index == log.last().index.next() && entry.stamp.term >= log.last_term();
            if !follows || log.push(entry).is_err() {
                refused = true;
                break;
            }
        }
        // S2: it was declared dead, wrote so, and died before its log was gone.
        let overruled = orders::is_overruled(hard_state, log.last_term(), cfg.me);
        if overruled {
            log = Log::new(alone::forgotten(&log));
            refused = true;
        }
        // An entry's term counts as one: it may have reached the disk before the hard state did. It is written down
        // with the first step (C5).
        let kept = hard_state;
        if log.last_term() > hard_state.term {
            hard_state = HardState {
                term: log.last_term(),
                voted_for: None,
            };
        }
        let last = log.last().index;
        let role = if lost_memory || overruled {
            Role::Recovering
        } else {
            Role::Follower { leader: None }
        };
        let mut this = Self {
            random: seed,
            now_us: 0,
            role,
            leader: None,
            heard_us: None,
            last_heard: None,
            detector: Detector::default(),
            bound: None,
            deadline_us: 0,
            may_lead: true,
            hard_state,
            hard_state_asked: kept,
            hard_state_kept: kept,
            owed_vote: None,
            owed_ack: false,
            order: Order::at(log.base().index),
            handed: last,
            durable: last,
            tickets: VecDeque::new(),
            next_ticket: 1,
            saving: None,
            refused,
            untaken: 0,
            following: Following::new(log.base().index),
            votes: Votes::default(),
            leading: Leading::default(),
            recovery: Recovery::default(),
            overruled,
            pulling: Pulling::default(),
            #[cfg(feature = "bugs")]
            bug: None,
            log,
            cfg,
        };
        this.recovery.nonce = this.draw();
        this
    }

    /// Something happened at `now_us` (any clock that does not go backwards by itself; if it does, time stands still).
    /// Appends to `out` what must be done.
    pub fn step(&mut self, now_us: u64, event: Event, out: &mut Vec<Action>) {
        if self.deadline_us == 0 && self.now_us == 0 {
            self.now_us = now_us;
            let wait_us = if self.role == Role::Recovering {
                0
            } else {
                self.draw_election_us()
            };
            self.rest(wait_us);
            self.bind_after_start();
        }
        self.now_us = self.now_us.max(now_us);
        self.look_at_clock();
        match event {
            Event::Tick => self.on_tick(out),
            Event::Flush => self.flush(out),
            Event::Received { from, message } => self.on_message(from, message, out),
            Event::Persisted { ticket } => self.on_persisted(ticket, out),
            Event::HardStatePersisted(hard_state) => self.on_hard_state_persisted(hard_state, out),
            Event::SnapshotPersisted { last } => self.on_snapshot_persisted(last, out),
            Event::SnapshotTaken => self.untaken = self.untaken.saturating_sub(1),
            Event::Applied { .. } | Event::Released { .. } | Event::Truncate { .. } if self.untaken > 0 => {}
            Event::Applied { through } => self.order.apply(through, self.log.last().index),
            Event::Released { through } => self.order.release(through, self.log.last().index),
            Event::Truncate { through, state } => self.truncate(through, state, out),
            Event::LinkUp { peer } => self.on_link_up(peer, out),
            Event::LinkLost { peer, by_peer } => self.on_link_lost(peer, by_peer, out),
            Event::MayLead(may_lead) => self.set_may_lead(may_lead, out),
            Event::TransferTo(to) => self.transfer_to(to, false, out),
            Event::StepDown => self.step_down(out),
            Event::StandAlone => self.stand_alone(out),
            Event::Read { id } => self.on_read(id, out),
        }
        self.finish(out);
    }

    fn on_tick(&mut self, out: &mut Vec<Action>) {
        if self.now_us < self.deadline_us {
            return;
        }
        match self.role {
            Role::Leader => self.on_beat(out),
            Role::Recovering => self.on_recovery_timeout(out),
            Role::Follower { .. } | Role::Candidate { .. } => self.on_election_timeout(out),
        }
    }

    fn on_message(&mut self, from: ReplicaId, message: Message, out: &mut Vec<Action>) {
        if from == self.cfg.me {
            return;
        }
        if !message.is_possible() {
            return out.push(Action::ProtocolViolation {
                from,
                what: "a term or an index that nobody can have reached",
            });
        }
        match message {
            Message::Append { term, prev, entries } => self.on_append(from, term, prev, entries, out),
            Message::Lead { term, commit, beat } => self.on_lead(from, term, commit, beat, out),
            Message::Ack { term, durable, beat } => self.on_ack(from, term, durable, beat, out),
            Message::Reject { term, hint } => self.on_reject(from, term, hint, out),
            Message::RequestVote { term, last, why } => self.on_request_vote(from, term, last, why, out),
            Message::Vote {
                term,
                granted,
                pre,
                last,
            } => self.on_vote(from, term, granted, pre, last, out),
            Message::Snapshot {
                term,
                snapshot,
                leads,
            } => self.on_snapshot(from, term, snapshot, leads, out),
            Message::Pull { at, committed, .. } => self.on_pull(from, at, committed, out),
            Message::Pulled {
                term,
                prev,
                entries,
                last,
            } => {
                self.on_pulled(from, term, prev, entries, last, out);
            }
            Message::Recover { term, nonce, held } => self.on_recover(from, term, nonce, held, out),
            Message::Recovery { term, nonce, last } => self.on_recovery(from, term, nonce, last, out),
            Message::Campaign { term, beat } => self.on_campaign(from, term, beat, out),
        }
    }

    /// What every step ends with: a new hard state and new entries go to the disk; C4 is looked at.
    fn finish(&mut self, out: &mut Vec<Action>) {
        if self.hard_state != self.hard_state_asked {
            self.hard_state_asked = self.hard_state;
            out.push(Action::PersistHardState(self.hard_state));
        }
        if std::mem::take(&mut self.refused) && self.cfg.durability == Durability::Disk {
            if self.log.last().index == Index(0) {
                out.push(Action::SaveSnapshot(self.log.snapshot()));
            }
            out.push(Action::TruncateSuffix {
                from: self.handed.next(),
            });
        }
        let last = self.log.last().index;
        if last > self.handed {
            if self.cfg.durability == Durability::Disk {
                let ticket = self.next_ticket;
                self.next_ticket += 1;
                self.tickets.push_back((ticket, last));
                out.push(Action::Persist {
                    from: self.handed.next(),
                    through: last,
                    ticket,
                });
            }
            self.handed = last;
        }
        self.order.check(last);
    }

    fn on_persisted(&mut self, ticket: u64, out: &mut Vec<Action>) {
        while let Some(&(first, through)) = self.tickets.front() {
            if first > ticket {
                break;
            }
            self.durable = self.durable.max(through);
            self.tickets.pop_front();
        }
        self.on_durable(out);
    }

    fn on_snapshot_persisted(&mut self, last: Viewstamp, out: &mut Vec<Action>) {
        if self.saving == Some(last) {
            self.saving = None;
            self.durable = self.durable.max(last.index);
            self.on_durable(out);
        }
    }

    fn on_durable(&mut self, out: &mut Vec<Action>) {
        match self.role {
            Role::Leader => self.advance_commit(out),
            Role::Recovering => self.say_recover(out),
            Role::Follower { .. } | Role::Candidate { .. } => {
                if self.acknowledged() > self.following.acked {
                    self.owed_ack = true;
                    self.pay_ack(out);
                }
            }
        }
    }

    fn on_hard_state_persisted(&mut self, hard_state: HardState, out: &mut Vec<Action>) {
        if hard_state.term >= self.hard_state_kept.term {
            self.hard_state_kept = hard_state;
        }
        if self.hard_state_kept != self.hard_state {
            return;
        }
        if let Some(to) = self.owed_vote.take() {
            self.say_vote(to, out);
        }
        if self.role == (Role::Candidate { pre: false }) && self.votes.mine_pending {
            self.ask_for_votes(out);
        }
        self.pay_ack(out);
    }

    /// Everything up to here is held as durably as the group asks.
    fn durable(&self) -> Index {
        if self.bugged(Bug::AcksBeforePersist) {
            return self.log.last().index;
        }
        match (self.cfg.durability, self.saving) {
            (Durability::Memory, _) => self.log.last().index,
            (Durability::Disk, None) => self.durable,
            (Durability::Disk, Some(_)) => Index(0),
        }
    }

    fn truncate(&mut self, through: Index, state: Bytes, out: &mut Vec<Action>) {
        assert!(
            through <= self.order.applied(),
            "C4: truncation at {through:?} of what is not applied"
        );
        if through <= self.log.base().index {
            return;
        }
        self.log.truncate_prefix(through, state);
        self.save_snapshot(false, out);
    }

    fn save_snapshot(&mut self, installed: bool, out: &mut Vec<Action>) {
        if self.cfg.durability == Durability::Disk {
            let snapshot = self.log.snapshot();
            if installed || self.saving.is_some() {
                self.saving = Some(snapshot.last);
            }
            out.push(Action::SaveSnapshot(snapshot));
        }
    }

    /// Cuts the log's end, here and on disk.
    fn cut_suffix(&mut self, from: Index, out: &mut Vec<Action>) {
        self.log.truncate_suffix(from);
        let kept = Index(from.0 - 1);
        if self.handed >= from {
            self.handed = kept;
            if self.cfg.durability == Durability::Disk {
                out.push(Action::TruncateSuffix { from });
            }
        }
        self.following.matched = self.following.matched.min(kept);
        if self.bugged(Bug::KeepsDurableMark) {
            return;
        }
        self.durable = self.durable.min(kept);
        for (_, through) in &mut self.tickets {
            *through = (*through).min(kept);
        }
    }

    fn rest(&mut self, for_us: u64) {
        self.deadline_us = self.now_us.saturating_add(for_us);
    }

    /// splitmix64: small, and good enough to keep candidates apart.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn draw_between(&mut self, low: u64, high: u64) -> u64 {
        if low >= high {
            low
        } else {
            low + self.draw() % (high - low + 1)
        }
    }

    fn draw_election_us(&mut self) -> u64 {
        self.draw_between(self.cfg.election_min_us, self.cfg.election_max_us)
    }

    /// How long to believe in the leader that was just heard.
    fn draw_patience_us(&mut self) -> u64 {
        let patience_us = self.patience_us();
        self.draw_between(patience_us, patience_us + self.spread_us())
    }

    #[inline]
    fn bugged(&self, bug: Bug) -> bool {
        #[cfg(feature = "bugs")]
        return self.bug == Some(bug);
        #[cfg(not(feature = "bugs"))]
        {
            let _ = bug;
            false
        }
    }

    /// Puts a fault back, for the simulator to find.
    #[cfg(feature = "bugs")]
    pub fn put_back(&mut self, bug: Option<Bug>) {
        self.bug = bug;
        if bug == Some(Bug::SkipsRecovery) && self.role == Role::Recovering {
            self.role = Role::Follower { leader: None };
        }
    }
}

/// Reading the state.
impl Consensus {
    /// Call `Tick` at this time at the latest.
    #[must_use]
    pub fn next_deadline_us(&self) -> Option<u64> {
        Some(self.deadline_us.min(self.look_at_us()))
    }
    /// What this replica is.
    #[must_use]
    pub fn role(&self) -> Role {
        match self.role {
            Role::Follower { .. } => Role::Follower { leader: self.leader },
            role => role,
        }
    }
    /// Who I am.
    #[must_use]
    pub fn me(&self) -> ReplicaId {
        self.cfg.me
    }
    /// The current term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.hard_state.term
    }
    /// The leader of `term`, if known; may be this replica.
    #[must_use]
    pub fn leader(&self) -> Option<ReplicaId> {
        if self.role == Role::Leader {
            Some(self.cfg.me)
        } else {
            self.leader
        }
    }
    /// The members in force.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        self.log.members()
    }
    /// The first index that is still held.
    #[must_use]
    pub fn first(&self) -> Index {
        self.log.base().index.next()
    }
    /// The last entry held (or what the snapshot stands for).
    #[must_use]
    pub fn appended(&self) -> Viewstamp {
        self.log.last()
    }
    /// Agreed up to here.
    #[must_use]
    pub fn committed(&self) -> Index {
        self.order.committed()
    }
    /// Applied up to here, as reported.
    #[must_use]
    pub fn applied(&self) -> Index {
        self.order.applied()
    }
    /// Released up to here, as reported.
    #[must_use]
    pub fn released(&self) -> Index {
        self.order.released()
    }
    /// An entry that is held; agreed only if `index <= committed()`.
    #[must_use]
    #[inline]
    pub fn entry(&self, index: Index) -> Option<&Entry> {
        self.log.get(index)
    }
    /// Whether the owner has still to take a snapshot: entries do not follow on what it has applied.
    #[must_use]
    pub fn awaits_owner(&self) -> bool {
        self.untaken > 0
    }
    /// How many entries are held.
    #[must_use]
    pub fn log_entries(&self) -> usize {
        self.log.len()
    }
    /// The payload bytes of all entries that are held.
    #[must_use]
    pub fn log_bytes(&self) -> usize {
        self.log.payload_bytes()
    }
    /// The limits and time-outs in use.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.cfg
    }
    /// What stands for everything before `first()`.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.log.snapshot()
    }
    /// The hard state now (not necessarily on disk yet).
    #[must_use]
    pub fn hard_state(&self) -> HardState {
        self.hard_state
    }
    /// The message of an `Action::SendEntries`, for shells that do not write straight from the log.
    #[must_use]
    pub fn append_message(&self, term: Term, prev: Viewstamp, through: Index) -> Message {
        Message::Append {
            term,
            prev,
            entries: self.log.copy(prev.index.next(), through),
        }
    }
    /// The leader's view of a peer.
    #[must_use]
    pub fn peer(&self, id: ReplicaId) -> Option<PeerState> {
        if self.role != Role::Leader {
            return None;
        }
        self.leading.peer(id).map(|peer| PeerState {
            acknowledged: peer.matched,
            heard_us: peer.heard_us,
            recovering: peer.recovering,
        })
    }
}
