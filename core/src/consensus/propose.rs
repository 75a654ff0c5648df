//! What it decides: what the leader appends, what it sends to whom, and whether it may go on leading.
//!
//! Flow: `propose` appends -> `Flush` sends to every follower (to a `witness` mostly with the next beat) and to the own disk
//! at the same time -> acknowledgements (`on_ack`) -> `quorum` agrees. A beat each heartbeat: `Lead` to all, resend where
//! nothing moved, check-quorum.
//!
//! Invariants:
//! - P1 only a leader appends of its own accord, and only entries of its own term;
//! - P2 a peer's `matched` rises only by acknowledgements of this term;
//! - P3 a leader that no majority has answered for an election time-out, by its own awake time (`detector`), steps down. Until
//!   it knows, what it says is an old term's, and what it may let the world hear is bounded by the clock (`lease`).
//!
//! Source: APUS (GAIA 2.1.2, steps L1 to L4: log locally and write to all backups, one round); Raft 5.3; check-quorum:
//! Ongaro 6.2.
//!
//! Longer than 400 lines: a leader's peers are touched by sending, acknowledging and recovering alike, and one file shows
//! that `matched` rises in one place only (P2).
//!
//! Not here: leadership transfer and elections (`election`), changes of members (`members`), which witness may wait (`witness`), counting
//! (`quorum`), reads of the agreed state (`reads`).

use super::leading::{BEATS, Leading, Peer};
use super::tally::majority;
use super::{Action, Bug, Consensus, Entry, EntryKind, Message, Refusal, Role};
use crate::units::{Index, ReplicaId, Term, Viewstamp};
use bytes::Bytes;

/// The leader's proposals.
impl Consensus {
    /// Appends to the log; sent and persisted with the next `Event::Flush`, so that many make one batch.
    pub fn propose(&mut self, payload: Bytes) -> Result<Index, Refusal> {
        self.append_data(payload, (self.cfg.ring_entries, self.cfg.ring_bytes))
    }

    /// As [`Self::propose`], for the few and small entries by which the owner steers: they find room in a ring that is full
    /// of inputs, because one of them may be what truncates it.
    pub fn propose_control(&mut self, payload: Bytes) -> Result<Index, Refusal> {
        let cfg = &self.cfg;
        let most = (
            cfg.ring_entries.saturating_add(cfg.reserve_entries),
            cfg.ring_bytes.saturating_add(cfg.reserve_bytes),
        );
        let index = self.append_data(payload, most)?;
        self.leading.pressing = index;
        Ok(index)
    }

    fn append_data(&mut self, payload: Bytes, most: (usize, usize)) -> Result<Index, Refusal> {
        self.ready_to_propose()?;
        let (entries, bytes) = (self.log.len() + 1, self.log.payload_bytes() + payload.len());
        if entries > most.0 || bytes > most.1 {
            return Err(Refusal::RingFull);
        }
        Ok(self.append_own(EntryKind::Data, payload))
    }

    /// Whether an input of so many bytes would find room: none has to be taken off the network in vain.
    #[must_use]
    pub fn has_input_room(&self, bytes: usize) -> bool {
        self.log.len() < self.cfg.ring_entries && self.log.payload_bytes() + bytes <= self.cfg.ring_bytes
    }

    pub(super) fn ready_to_propose(&self) -> Result<(), Refusal> {
        if self.role != Role::Leader {
            return Err(Refusal::NotLeader { leader: self.leader });
        }
        if self.leading.transfer.is_some() {
            Err(Refusal::Transferring)
        } else {
            Ok(())
        }
    }

    /// P1.
    pub(super) fn append_own(&mut self, kind: EntryKind, payload: Bytes) -> Index {
        let stamp = Viewstamp {
            term: self.hard_state.term,
            index: self.log.last().index.next(),
        };
        let pushed = self.log.push(Entry { stamp, kind, payload });
        assert!(pushed.is_ok(), "own members do not decode");
        stamp.index
    }

    /// Begins to lead: the barrier is appended and everybody told.
    pub(super) fn start_leading(&mut self, out: &mut Vec<Action>) {
        self.role = Role::Leader;
        self.leader = None;
        self.owed_ack = false;
        self.votes.longer_us = 0;
        self.leading = Leading::default();
        self.leading.barrier = self.append_own(EntryKind::Barrier, Bytes::new());
        self.leading.pressing = self.leading.barrier;
        self.meet_peers();
        out.push(Action::BecameLeader {
            term: self.hard_state.term,
            barrier: self.leading.barrier,
        });
        self.beat(out);
        self.flush(out);
        self.rest(self.cfg.heartbeat_us);
    }

    /// Peers are the members in force without me; known ones keep their marks.
    pub(super) fn meet_peers(&mut self) {
        let mut known = std::mem::take(&mut self.leading.peers);
        for member in self.log.members() {
            if member.id == self.cfg.me {
                continue;
            }
            let peer = match known.iter().position(|peer| peer.id == member.id) {
                Some(at) => Peer {
                    witness: member.witness,
                    ..known.swap_remove(at)
                },
                None => Peer {
                    id: member.id,
                    witness: member.witness,
                    matched: Index(0),
                    next: self.log.last().index,
                    probing: true,
                    probe_sent: false,
                    probed: Index(0),
                    beat: 0,
                    heard_us: self.now_us,
                    answered_us: self.awake_us(),
                    answers: false,
                    unheard: 0,
                    moved_us: self.now_us,
                    recovering: false,
                    nonce: 0,
                    reborn: 0,
                },
            };
            self.leading.peers.push(peer);
        }
        self.leading.find_places();
        // A leader is a member: what counts the peers and itself counts the members.
        assert_eq!(
            self.leading.peers.len() + 1,
            self.log.members().len(),
            "Q2 broken"
        );
    }

    /// Sends what `propose` appended.
    pub(super) fn flush(&mut self, out: &mut Vec<Action>) {
        if self.role != Role::Leader {
            return;
        }
        for at in 0..self.leading.peers.len() {
            self.offer_entries(at, out);
        }
        self.advance_commit(out);
    }

    /// Sends to one peer, if it is not one that may wait for the next beat.
    fn offer_entries(&mut self, at: usize, out: &mut Vec<Action>) {
        if !self.may_wait(&self.leading.peers[at]) {
            self.send_entries(at, out);
        }
    }

    /// Sends to one peer as far as its window allows.
    fn send_entries(&mut self, at: usize, out: &mut Vec<Action>) {
        let (last, base) = (self.log.last().index, self.log.base().index);
        let window = self.cfg.window_entries as u64;
        let peer = &mut self.leading.peers[at];
        loop {
            if peer.probing && peer.probe_sent {
                return;
            }
            if peer.next <= base {
                peer.probing = true;
                peer.probe_sent = true;
                peer.probed = peer.next;
                peer.moved_us = self.now_us;
                let message = Message::Snapshot {
                    term: self.hard_state.term,
                    snapshot: self.log.snapshot(),
                    leads: true,
                };
                out.push(Action::Send { to: peer.id, message });
                return;
            }
            if peer.next > last || (!peer.probing && peer.next.0 > peer.matched.0 + window) {
                return;
            }
            let through = self
                .log
                .batch_end(peer.next, self.cfg.batch_entries, self.cfg.batch_bytes);
            let Some(prev) = self.log.stamp(Index(peer.next.0 - 1)) else {
                return;
            };
            out.push(Action::SendEntries {
                to: peer.id,
                term: self.hard_state.term,
                prev,
                through,
            });
            if peer.matched.next() == peer.next {
                peer.moved_us = self.now_us;
            }
            peer.probed = peer.next;
            peer.next = through.next();
            peer.probe_sent = true;
        }
    }

    /// Starts again from `from`: one batch, then wait.
    fn send_again(&mut self, at: usize, from: Index, out: &mut Vec<Action>) {
        let peer = &mut self.leading.peers[at];
        peer.next = from;
        peer.probing = true;
        peer.probe_sent = false;
        peer.moved_us = self.now_us;
        self.send_entries(at, out);
    }

    pub(super) fn on_ack(
        &mut self,
        from: ReplicaId,
        term: Term,
        durable: Index,
        beat: u64,
        out: &mut Vec<Action>,
    ) {
        if term > self.hard_state.term {
            return self.obey_term(term, out);
        }
        if term < self.hard_state.term && !self.bugged(Bug::CountsAnyTerm) {
            return;
        }
        let (Role::Leader, Some(at)) = (self.role, self.leading.position(from)) else {
            return;
        };
        if (durable > self.log.last().index || beat > self.leading.beat)
            && !self.bugged(Bug::CountsAnyTerm)
            && !self.bugged(Bug::AcksUnmatched)
        {
            out.push(Action::ProtocolViolation {
                from,
                what: "it acknowledges what was never sent",
            });
            return;
        }
        let (base, awake_us) = (self.log.base().index, self.awake_us());
        let peer = &mut self.leading.peers[at];
        if peer.recovering && beat <= peer.reborn {
            return; // It forgot since what it says here.
        }
        peer.recovering = false;
        // Entries that it holds since are a sign of life as an echo is. (Not for the lease: nobody knows when they were sent.)
        let alive = beat > peer.beat || durable > peer.matched;
        let silent_since = (alive && peer.answers).then_some(peer.answered_us);
        if alive {
            (peer.answered_us, peer.answers) = (awake_us, true);
        }
        if beat > peer.beat {
            self.leading.echoed.moved(peer.beat, beat);
            peer.beat = beat;
            if beat + BEATS as u64 > self.leading.beat {
                peer.heard_us = peer
                    .heard_us
                    .max(self.leading.beat_sent_us[beat as usize % BEATS]);
            }
        }
        if durable > peer.matched {
            self.leading.held.moved(peer.matched.0, durable.0);
            peer.matched = durable;
            peer.moved_us = self.now_us;
            peer.next = peer.next.max(durable.next());
            peer.probing = false;
        } else if durable.next() == peer.next && durable >= base {
            // The logs meet here. (Not so after a snapshot: it is sent once, and again only when nothing moves.)
            peer.probing = false;
        }
        if let Some(since_us) = silent_since {
            self.learn_silence(since_us);
        }
        self.offer_entries(at, out);
        self.advance_commit(out);
        self.answer_reads(out);
        self.push_transfer(out);
    }

    pub(super) fn on_reject(&mut self, from: ReplicaId, term: Term, hint: Index, out: &mut Vec<Action>) {
        if term > self.hard_state.term {
            return self.obey_term(term, out);
        }
        let (Role::Leader, Some(at)) = (self.role, self.leading.position(from)) else {
            return;
        };
        let peer = &self.leading.peers[at];
        let from = hint.max(peer.matched).next();
        // An answer to something older than the batch under way.
        let stale = term < self.hard_state.term || from >= peer.next;
        let under_way = peer.probing && peer.probe_sent && peer.probed == from;
        if !stale && !under_way {
            self.send_again(at, from, out);
        }
    }

    /// A replica that lost its memory asks. Its old acknowledgements are not counted any more.
    pub(super) fn on_recover(
        &mut self,
        from: ReplicaId,
        term: Term,
        nonce: u64,
        held: Index,
        out: &mut Vec<Action>,
    ) {
        if term > self.hard_state.term {
            return self.obey_term(term, out);
        }
        let (Role::Leader, Some(at)) = (self.role, self.leading.position(from)) else {
            return;
        };
        let (last, beat, resend_us) = (self.log.last().index, self.leading.beat, self.resend_us());
        let peer = &mut self.leading.peers[at];
        if nonce == peer.nonce && !peer.recovering {
            return; // It has acknowledged since: an old word.
        }
        // One word, one answer, and entries only if the last ones have arrived or seem lost: duplicates must not breed.
        let new = nonce != peer.nonce;
        let again = new || held >= peer.next || peer.moved_us.saturating_add(resend_us) <= self.now_us;
        let arrived = held.next() == peer.next;
        if new {
            peer.reborn = beat;
        }
        peer.recovering = true;
        peer.nonce = nonce;
        self.leading.held.moved(peer.matched.0, 0);
        peer.matched = Index(0);
        out.push(Action::Send {
            to: from,
            message: Message::Recovery {
                term: self.hard_state.term,
                nonce,
                last,
            },
        });
        if again || arrived {
            // A hard state of an older term is not of this leader: what it holds is not known to match.
            let known = if term == self.hard_state.term {
                held
            } else {
                Index(0)
            };
            self.send_again(at, known.min(last).next(), out);
        }
    }

    /// Nothing moved for this long: send again.
    fn resend_us(&self) -> u64 {
        4 * self.cfg.heartbeat_us
    }

    /// The link to a peer is no more.
    pub(super) fn forget_echoes(&mut self, peer: ReplicaId) {
        if let Some(at) = self.leading.position(peer)
            && !self.bugged(Bug::CountsClosedLinks)
        {
            let beat = self.leading.beat;
            let peer = &mut self.leading.peers[at];
            (peer.unheard, peer.answers) = (beat, false);
        }
    }

    pub(super) fn on_link_up(&mut self, peer: ReplicaId, out: &mut Vec<Action>) {
        if self.role == Role::Leader
            && let Some(at) = self.leading.position(peer)
        {
            let from = self.leading.peers[at].matched.next();
            let message = Message::Lead {
                term: self.hard_state.term,
                commit: self.order.committed(),
                beat: self.leading.beat,
            };
            out.push(Action::Send { to: peer, message });
            let last = self.log.last();
            if from <= last.index {
                self.send_again(at, from, out);
            } else {
                // It holds everything. If it was started again it does not know that this is agreed, nor that it matches.
                out.push(Action::SendEntries {
                    to: peer,
                    term: self.hard_state.term,
                    prev: last,
                    through: last.index,
                });
            }
        }
    }

    /// The heartbeat.
    pub(super) fn on_beat(&mut self, out: &mut Vec<Action>) {
        // P3. A leader that slept asks first: its own sleep is no silence of the others.
        let (patience_us, awake_us) = (self.patience_us() + self.spread_us(), self.awake_us());
        let answers = |peer: &&Peer| peer.answered_us.saturating_add(patience_us) >= awake_us;
        let heard = self.leading.peers.iter().filter(answers).count();
        if heard + 1 < majority(self.log.members().len()) {
            return self.stop_leading(out);
        }
        if self.transfer_expired(out) {
            return;
        }
        // X3: without a lease it is of no use.
        if self.heir_stays_silent() {
            return self.stop_leading(out);
        }
        self.beat(out);
        self.push_transfer_again(out);
        let (last, resend_us) = (self.log.last().index, self.resend_us());
        for at in 0..self.leading.peers.len() {
            let peer = &self.leading.peers[at];
            if peer.matched < last && peer.moved_us.saturating_add(resend_us) <= self.now_us {
                let from = peer.matched.next();
                if !peer.recovering {
                    self.send_again(at, from, out);
                }
            }
            self.send_entries(at, out);
        }
        self.leading.at_beats = [last, self.leading.at_beats[0]];
        self.advance_commit(out);
        self.rest(self.cfg.heartbeat_us);
    }

    /// Counts up and tells everybody.
    pub(super) fn beat(&mut self, out: &mut Vec<Action>) {
        self.leading.beat += 1;
        self.leading.beat_sent_us[self.leading.beat as usize % BEATS] = self.now_us;
        let (open, beat) = (self.reads_asked(), self.leading.beat);
        if !open {
            for read in &mut self.leading.reads {
                read.2 = beat;
            }
        }
        self.say_lead(out);
    }
}
