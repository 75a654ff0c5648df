//! What it decides: in which form a message travels to one peer: a cumulative word, the mailbox ring or the log ring.
//!
//! **Flow**: every link has a control region in each direction (words and mailbox ring) for the link's life, and a log ring
//! in the direction leader -> follower, one per term. `Lead` and `Ack` are words: only the newest counts. Entries go into
//! the log ring if the follower has opened one for this term, else into the mailbox, like all the rest.
//! **Invariants**: 1. a follower's log ring is of its promised term and granted to one peer only. 2. a message found in the
//! log ring is heard after what was in the mailbox when it was found, so both together keep the order of sending.
//! 3. a peer whose ring does not move for [`STUCK_US`] though something waits is given up: better a new link.
//! 4. a link has one log ring for a term at most, so what was written into it, and what is said of how far it was read, is never
//! taken for another one's. A writer goes by the whole grant all the same: a build that does not keep to this may be at the other end.
//! **Not here**: what messages mean.

use super::{Bad, Counters};
use crate::link::{Spoken, Stream};
use crate::transport::TransportError::ProtocolViolation;
use crate::transport::ring::{Found, MESSAGE_MAX_BYTES, Place, RingReader, RingWriter, Sent};
use crate::transport::word::{WordReader, WordWriter};
use crate::transport::{self, Grant, Memory, RegionId, Transport, TransportError};
use dunlin_core::consensus::Message;
use dunlin_core::units::{Index, ReplicaId, Term};
use dunlin_core::wire::consensus::{WireError, decode, encode};
use std::collections::VecDeque;

const CONTROL: RegionId = RegionId(0);
const LOG: RegionId = RegionId(1);
const MAIL: Place = Place {
    region: CONTROL,
    offset: 4096,
    bytes: 1 << 20,
};
const CONTROL_BYTES: usize = MAIL.offset + MAIL.bytes;
const CONTROL_EPOCH: u64 = 1;
/// Slots of the control region.
const LEAD: usize = 0;
const ACK: usize = 1;
const CURSOR: usize = 2;
/// More than this waiting for a full ring is given up; the core says it again.
const QUEUE_MAX_BYTES: usize = 8 << 20;
/// Two rings, each with a message whose beginning is in it already.
pub(super) const QUEUES_MAX_BYTES: usize = 2 * (QUEUE_MAX_BYTES + MESSAGE_MAX_BYTES);
/// A ring that did not move for so long is broken.
const STUCK_US: u64 = 2_000_000;

fn log_place(bytes: usize) -> Place {
    Place {
        region: LOG,
        offset: 0,
        bytes,
    }
}

/// A ring to the peer, with what does not fit into it yet.
struct Channel {
    ring: RingWriter,
    queue: VecDeque<Vec<u8>>,
    /// So much of the queue's first message is in the ring already.
    at: usize,
    queued_bytes: usize,
    moved_us: u64,
}

impl Channel {
    fn new(place: Place, epoch: u64, key: u64, now_us: u64) -> Self {
        Self {
            ring: RingWriter::new(place, epoch, key),
            queue: VecDeque::new(),
            at: 0,
            queued_bytes: 0,
            moved_us: now_us,
        }
    }

    /// False if it was given up.
    fn push(&mut self, to: &mut dyn Transport, message: &[u8]) -> Result<bool, TransportError> {
        let at = if self.queue.is_empty() {
            match self.ring.send(to, message)? {
                Sent::Whole => return Ok(true),
                Sent::Until(at) => at,
            }
        } else {
            0
        };
        // A message whose beginning is in the ring must be finished, whatever its size.
        if at == 0 && !self.queue.is_empty() && self.queued_bytes + message.len() > QUEUE_MAX_BYTES {
            return Ok(false);
        }
        if self.queue.is_empty() {
            self.at = at;
        }
        self.queued_bytes += message.len();
        self.queue.push_back(message.to_vec());
        Ok(true)
    }

    fn drain(&mut self, to: &mut dyn Transport) -> Result<(), TransportError> {
        while let Some(message) = self.queue.front() {
            match self.ring.send_rest(to, message, self.at)? {
                Sent::Until(at) => {
                    self.at = at;
                    return Ok(());
                }
                Sent::Whole => {
                    self.queued_bytes -= message.len();
                    self.at = 0;
                    self.queue.pop_front();
                }
            }
        }
        Ok(())
    }

    /// What is not in the ring yet.
    fn unplaced_bytes(&self) -> usize {
        self.queued_bytes - self.at.min(self.queued_bytes)
    }

    fn give_back(&mut self, consumed: u64, now_us: u64) -> bool {
        self.moved_us = now_us;
        self.ring.give_back(consumed)
    }

    fn is_stuck(&mut self, now_us: u64) -> bool {
        if self.queue.is_empty() {
            self.moved_us = now_us;
        }
        self.moved_us + STUCK_US < now_us
    }
}

/// What can be written once the peer has granted its control region.
struct Outgoing {
    lead: WordWriter,
    ack: WordWriter,
    cursor: WordWriter,
    mail: Channel,
}

/// What was heard.
pub(super) enum Heard {
    Message(Message),
    Bad(Bad, String),
}

/// What `progress` found.
pub(super) struct Progress {
    /// Look again before waiting.
    pub(super) busy: bool,
    pub(super) came_up: bool,
}

/// One peer and the link to it.
pub(super) struct Peer {
    pub(super) id: ReplicaId,
    /// What was found out of it when the link began.
    pub(super) spoken: Spoken,
    pub(super) transport: Box<dyn Transport>,
    pub(super) watched_for_write: bool,
    /// The system said that the link is readable, and it was not read to its end since.
    pub(super) readable: bool,
    /// The newest `Lead` that is not written yet: it is a word, so only the newest counts, and entries go first.
    lead_due: Option<[u64; 3]>,
    out: Option<Outgoing>,
    log_out: Option<Channel>,
    /// What `log_out` is for.
    log_grant: Option<Grant>,
    lead: WordReader,
    ack: WordReader,
    cursor: WordReader,
    mail: RingReader,
    log: Option<(RingReader, u64)>,
    /// The newest term for which the peer was given a log ring (invariant 4).
    log_term: Term,
    /// The cursors that the peer was told: mail, log.
    told: (u64, u64),
    /// The peer should know how far its rings were read, and the link was too full to tell it.
    owes_cursor: bool,
    /// Something was written that others wait for; something was written at all.
    urgent: bool,
    dirty: bool,
    heard_us: Option<u64>,
    /// A record whose sequence fits and whose content does not, since when.
    torn_since_us: Option<u64>,
    failed: Option<TransportError>,
}

impl Peer {
    pub(super) fn new(id: ReplicaId, stream: Stream) -> Result<Self, TransportError> {
        let spoken = stream.spoken().clone();
        Self::over(id, transport::over(stream)?, spoken)
    }

    pub(super) fn over(
        id: ReplicaId,
        mut transport: Box<dyn Transport>,
        spoken: Spoken,
    ) -> Result<Self, TransportError> {
        transport.register(CONTROL, CONTROL_EPOCH, CONTROL_BYTES)?;
        let key = transport.opened(CONTROL).expect("just registered").key;
        Ok(Self {
            id,
            spoken,
            transport,
            watched_for_write: false,
            readable: true,
            lead_due: None,
            out: None,
            log_out: None,
            log_grant: None,
            lead: WordReader::new(LEAD, key),
            ack: WordReader::new(ACK, key),
            cursor: WordReader::new(CURSOR, key),
            mail: RingReader::new(MAIL, CONTROL_EPOCH, key),
            log: None,
            log_term: Term(0),
            told: (0, 0),
            owes_cursor: false,
            urgent: false,
            dirty: false,
            heard_us: None,
            torn_since_us: None,
            failed: None,
        })
    }

    pub(super) fn is_up(&self) -> bool {
        self.out.is_some()
    }

    pub(super) fn queued_bytes(&self) -> usize {
        let mail = self.out.as_ref().map_or(0, |out| out.mail.queued_bytes);
        mail + self.log_out.as_ref().map_or(0, |log| log.queued_bytes)
    }

    /// It will be found broken when it is looked at next.
    pub(super) fn fail(&mut self, why: TransportError) {
        self.failed = Some(why);
    }

    pub(super) fn heard_us(&self) -> Option<u64> {
        self.heard_us
    }

    pub(super) fn torn(&self) -> u64 {
        self.mail.torn() + self.log.as_ref().map_or(0, |(ring, _)| ring.torn())
    }

    /// Lets bytes land and looks at grants. `asked`: `readable` is what the system says.
    pub(super) fn progress(
        &mut self,
        budget: usize,
        now_us: u64,
        asked: bool,
    ) -> Result<Progress, TransportError> {
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        let by_itself = self.transport.lands_by_itself();
        let progress = if by_itself || self.readable || !asked || self.transport.wants_write() {
            if by_itself && asked {
                self.transport.hint(self.readable);
            }
            let waited = self.transport.wants_write();
            let progress = self.transport.progress(budget)?;
            self.readable = progress.more;
            // What the link had no room for can go on.
            self.urgent |= waited && !self.transport.wants_write() && self.unplaced_bytes() > 0;
            progress
        } else {
            transport::Progress::default()
        };
        let mut came_up = false;
        if progress.grants {
            if self.out.is_none()
                && let Some(grant) = self.transport.granted(CONTROL)
            {
                if grant.bytes != CONTROL_BYTES || grant.epoch != CONTROL_EPOCH {
                    return Err(ProtocolViolation("a control region of another size"));
                }
                let word = |slot| WordWriter::new(CONTROL, slot, grant.epoch, grant.key);
                let mail = Channel::new(MAIL, grant.epoch, grant.key, now_us);
                self.out = Some(Outgoing {
                    lead: word(LEAD),
                    ack: word(ACK),
                    cursor: word(CURSOR),
                    mail,
                });
                came_up = true;
            }
            let granted = self.transport.granted(LOG);
            if self.log_grant != granted {
                self.log_grant = granted;
                self.log_out = granted.map(|g| Channel::new(log_place(g.bytes), g.epoch, g.key, now_us));
            }
        }
        let stuck = self.out.as_mut().is_some_and(|o| o.mail.is_stuck(now_us))
            || self.log_out.as_mut().is_some_and(|c| c.is_stuck(now_us));
        if stuck {
            return Err(TransportError::GivenUp("its ring does not move".into()));
        }
        if self.torn_since_us.is_some_and(|since| since + STUCK_US < now_us) {
            return Err(ProtocolViolation("a record whose checksum stays wrong"));
        }
        Ok(Progress {
            busy: progress.grants || progress.more,
            came_up,
        })
    }

    /// Whether something is there to be heard: a few loads.
    pub(super) fn has_something(&self) -> bool {
        let Some(control) = self.transport.region(CONTROL) else {
            return false;
        };
        self.mail.peek(control)
            || self.lead.peek(control)
            || self.ack.peek(control)
            || self.cursor.peek(control)
            || self
                .log
                .as_ref()
                .zip(self.transport.region(LOG))
                .is_some_and(|((log, _), memory)| log.peek(memory))
    }

    /// The next thing that this peer has said.
    pub(super) fn hear(&mut self, buffer: &mut Vec<u8>, now_us: u64) -> Option<Heard> {
        if !self.has_something() && !self.owes_cursor {
            self.torn_since_us = None;
            return None;
        }
        let control = self.transport.region(CONTROL)?;
        let mut torn = false;
        let log = self
            .log
            .as_mut()
            .zip(self.transport.region(LOG))
            .map(|((ring, _), memory)| (ring, memory));
        let found = match log {
            Some((ring, memory)) if ring.peek(memory) => {
                // Invariant 2: the mailbox first.
                read(&mut self.mail, control, buffer, &mut torn) || read(ring, memory, buffer, &mut torn)
            }
            _ => read(&mut self.mail, control, buffer, &mut torn),
        };
        if torn {
            self.torn_since_us.get_or_insert(now_us);
        } else {
            self.torn_since_us = None;
        }
        self.give_back(); // also for a part of a message that is larger than the ring
        if found {
            self.heard_us = Some(now_us);
            return Some(match decode(buffer) {
                Ok(message) => Heard::Message(message),
                Err(e) => {
                    let bad = match e {
                        WireError::Short { .. } => Bad::Short,
                        WireError::Long { .. } => Bad::Long,
                        _ => Bad::Unknown,
                    };
                    Heard::Bad(bad, format!("a message that does not decode: {e}"))
                }
            });
        }
        let control = self.transport.region(CONTROL)?;
        if let Some([term, commit, beat]) = self.lead.get(control) {
            self.heard_us = Some(now_us);
            return Some(Heard::Message(Message::Lead {
                term: Term(term),
                commit: Index(commit),
                beat,
            }));
        }
        if let Some([term, durable, beat]) = self.ack.get(control) {
            self.heard_us = Some(now_us);
            return Some(Heard::Message(Message::Ack {
                term: Term(term),
                durable: Index(durable),
                beat,
            }));
        }
        if let Some([mail, epoch, log]) = self.cursor.get(control) {
            let mut fine = self.out.as_mut().is_none_or(|o| o.mail.give_back(mail, now_us));
            if let Some(channel) = self.log_out.as_mut().filter(|c| c.ring.epoch() == epoch) {
                fine &= channel.give_back(log, now_us);
            }
            self.urgent |= self.out.as_ref().is_some_and(|o| !o.mail.queue.is_empty());
            self.urgent |= self.log_out.as_ref().is_some_and(|c| !c.queue.is_empty());
            if !fine {
                return Some(Heard::Bad(
                    Bad::Forbidden,
                    "a cursor beyond what was written".into(),
                ));
            }
        }
        None
    }

    /// Tells the peer how far its rings were read, when it may soon need to know.
    fn give_back(&mut self) {
        let (mail, log) = (
            self.mail.consumed(),
            self.log.as_ref().map_or(0, |(ring, _)| ring.consumed()),
        );
        let ring = self.transport.opened(LOG).map_or(usize::MAX, |g| g.bytes) as u64;
        if mail - self.told.0 < MAIL.bytes as u64 / 8 && log - self.told.1 < ring / 8 {
            return;
        }
        let epoch = self.log.as_ref().map_or(0, |(_, epoch)| *epoch);
        if let Some(out) = &mut self.out {
            self.owes_cursor = false;
            match out.cursor.put(&mut *self.transport, [mail, epoch, log]) {
                Ok(()) => {
                    self.told = (mail, log);
                    self.urgent = true;
                }
                Err(TransportError::Full) => self.owes_cursor = true,
                Err(e) => self.failed = Some(e),
            }
        }
    }

    pub(super) fn send(&mut self, message: &Message, counters: &mut Counters) {
        let Some(out) = &mut self.out else { return };
        let to = &mut *self.transport;
        let sent = match message {
            Message::Lead { term, commit, beat } => {
                self.dirty = true;
                self.lead_due = Some([term.0, commit.0, *beat]);
                Ok(true)
            }
            Message::Ack { term, durable, beat } => {
                self.urgent = true;
                out.ack.put(to, [term.0, durable.0, *beat]).map(|()| true)
            }
            other => {
                self.urgent = true;
                let mut bytes = Vec::with_capacity(64);
                encode(other, &mut bytes);
                out.mail.push(to, &bytes)
            }
        };
        self.sent(sent, counters);
    }

    /// `bytes`: an encoded `Append` of `term`.
    pub(super) fn send_entries(&mut self, term: Term, bytes: &[u8], counters: &mut Counters) {
        let Some(out) = &mut self.out else { return };
        self.urgent = true;
        let to = &mut *self.transport;
        let sent = match self.log_out.as_mut().filter(|c| c.ring.epoch() == term.0) {
            Some(channel) => channel.push(to, bytes),
            None => out.mail.push(to, bytes),
        };
        self.sent(sent, counters);
    }

    fn sent(&mut self, sent: Result<bool, TransportError>, counters: &mut Counters) {
        match sent {
            Ok(true) => {}
            // The core repeats what is not acknowledged; words are cumulative.
            Ok(false) | Err(TransportError::Full) => counters.given_up += 1,
            // Revoked meanwhile: the peer has promised a newer term.
            Err(TransportError::Stale { region, .. }) if region == LOG.0 => self.log_out = None,
            Err(e) => self.failed = Some(e),
        }
    }

    /// `leader`: who leads `term`, or may come to lead it, as far as is known. While nobody is known the term's ring stays: who led
    /// it is often heard again.
    pub(super) fn open_log(&mut self, term: Term, leader: Option<ReplicaId>, bytes: usize) {
        let open = self.transport.opened(LOG).map(|g| g.epoch);
        let another = leader.is_some_and(|leader| leader != self.id);
        if open.is_some_and(|epoch| epoch < term.0 || another) {
            self.transport.revoke(LOG);
            self.log = None;
            // What was told of an older term's ring says nothing of the next one.
            self.told.1 = 0;
            self.urgent = true;
        }
        // Invariant 4: without a ring entries come by the mailbox.
        if leader == Some(self.id) && term > self.log_term {
            self.log_term = term;
            match self.transport.register(LOG, term.0, bytes) {
                Ok(()) => {
                    let grant = self.transport.opened(LOG).expect("just registered");
                    self.log = Some((
                        RingReader::new(log_place(bytes), grant.epoch, grant.key),
                        grant.epoch,
                    ));
                    self.told.1 = 0;
                    self.urgent = true;
                }
                Err(e) => self.failed = Some(e),
            }
        }
    }

    pub(super) fn flush(&mut self, all: bool, counters: &mut Counters) -> Result<(), TransportError> {
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        if !(self.urgent || all && self.dirty) {
            return Ok(());
        }
        (self.urgent, self.dirty) = (false, false);
        let lead = self.lead_due.take().zip(self.out.as_mut());
        let led = lead.map_or(Ok(()), |(word, out)| out.lead.put(&mut *self.transport, word));
        self.sent(led.map(|()| true), counters);
        loop {
            let before = self.unplaced_bytes();
            let drained = self.drain();
            self.sent(drained.map(|()| true), counters);
            self.transport.flush()?;
            // The link takes little at a time: while the system takes all of it, there is room for more.
            let left = self.unplaced_bytes();
            if left == 0 || left == before || self.transport.wants_write() {
                return Ok(());
            }
        }
    }

    /// Places what waits for room in its ring or on the link.
    fn drain(&mut self) -> Result<(), TransportError> {
        let to = &mut *self.transport;
        let mail = self.out.as_mut().map_or(Ok(()), |out| out.mail.drain(to));
        let log = self.log_out.as_mut().map_or(Ok(()), |log| log.drain(to));
        mail.and(log)
    }

    fn unplaced_bytes(&self) -> usize {
        let mail = self.out.as_ref().map_or(0, |out| out.mail.unplaced_bytes());
        mail + self.log_out.as_ref().map_or(0, Channel::unplaced_bytes)
    }
}

/// Reads one message of a ring; notes if something is there that is not whole.
fn read(ring: &mut RingReader, memory: &Memory, buffer: &mut Vec<u8>, torn: &mut bool) -> bool {
    let before = ring.torn();
    let found = ring.next(memory, buffer) == Found::Message;
    *torn |= ring.torn() != before;
    found
}

#[cfg(test)]
mod tests;
