//! What it decides: which of the primary's frames the backup has said too, so that they may leave without a sync.
//!
//! Flow: the primary's frames and the backup's come in, names of frames that may leave come out; `gate` holds the
//! frames. Both speak in their VM's own numbers.
//!
//! Invariants:
//! 1. A frame is named only if everything it tells a client was said by the backup in the same epoch, or was told
//!    before. So whatever a client has seen, the backup's own state explains, and whatever a client was told was
//!    received, the backup has received.
//! 2. What the primary says after the line of a sync is compared only with what the backup says after loading it.
//! 3. Frames of a flow are named in the primary's order. What repeats only what was told needs no word of the backup.
//! 4. Losing sight (a full buffer, too many flows, a frame that is not understood, a connection that begins anew while its end waits)
//!    makes frames wait for a sync, and says so: a sync is asked for at once.
//!
//! Where the backup has acknowledged less than the primary, clients are told that (`partial_ack`).
//!
//! ARP, neighbour discovery and multicast reports tell nothing about the VM's state: they need no match.
//!
//! Source: COLO (SoCC'13) compares packets; the byte streams, the acknowledgements' rule and the argument are in
//! docs/output.md. Not here: when a difference brings a sync (`sync::trigger`).

mod connection;
mod datagrams;
mod http_date;
pub(crate) mod numbers;
mod partial_ack;
pub(crate) mod pieces;
mod place;
mod settled;
mod told;
mod types;

use crate::agreed::Frame;
use crate::output::packet::{Direction, FlowKey, Parsed, Segment, parse};
use connection::{Connection, Said, Words};
use datagrams::{Datagrams, Message};
use place::Found;
pub use place::Place;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
pub use types::{Counters, Difference, FrameId, Limits, Matched, Verdict};

/// So many partial acknowledgements wait to leave, where nobody may speak; a further one is lost, as any segment may be.
const MOST_PARTIAL_ACKS: usize = 1024;

/// The comparison of two outputs.
pub struct Comparer {
    limits: Limits,
    flows: BTreeMap<FlowKey, Flow>,
    /// The backup's loads so far: a flow of an older one is reloaded when it is looked at.
    loads: u64,
    matched: VecDeque<Matched>,
    /// Of these, the partial acknowledgements.
    partial_acks: usize,
    /// Frames that wait in a flow, or in none.
    waiting: BTreeMap<FrameId, Option<FlowKey>>,
    /// Of these, the ones that say more than an acknowledgement.
    telling: BTreeSet<FrameId>,
    /// The newest frame that the backup has said, too.
    newest_said: Option<FrameId>,
    /// Said by the primary after the line of the sync under way.
    after_line: Option<Vec<(FrameId, Frame)>>,
    kept_bytes: usize,
    difference: Option<Difference>,
    /// What waits for nothing but how a connection ended, until it has left.
    ends: BTreeSet<FrameId>,
    /// Where the first of them is that is one of bytes, of an end or of datagrams.
    place: Option<Place>,
    counters: Counters,
}

struct Flow {
    loads: u64,
    words: FlowWords,
}

enum FlowWords {
    Connection(Box<Connection>),
    Datagrams(Datagrams),
}

impl FlowWords {
    /// Bytes of the backup that are kept.
    fn kept_bytes(&self) -> usize {
        match self {
            Self::Connection(connection) => connection.kept_bytes(),
            Self::Datagrams(datagrams) => datagrams.kept_bytes(),
        }
    }

    /// What the primary's oldest words that wait here are, beside the backup's at that place.
    fn found(&self) -> Found {
        match self {
            Self::Connection(connection) => connection.found(),
            Self::Datagrams(datagrams) => datagrams.found(),
        }
    }

    /// Says no more until the next sync. How many bytes that sets free.
    fn give_up(&mut self) -> usize {
        let kept = self.kept_bytes();
        match self {
            Self::Connection(connection) => connection.give_up(),
            Self::Datagrams(datagrams) => datagrams.give_up(),
        }
        kept
    }
}

impl Comparer {
    /// A comparer that has seen nothing: what it does not know, it makes wait.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            flows: BTreeMap::new(),
            loads: 0,
            matched: VecDeque::new(),
            partial_acks: 0,
            waiting: BTreeMap::new(),
            telling: BTreeSet::new(),
            newest_said: None,
            after_line: None,
            kept_bytes: 0,
            difference: None,
            ends: BTreeSet::new(),
            place: None,
            counters: Counters::default(),
        }
    }

    /// One that goes on counting.
    #[must_use]
    pub fn with_counters(self, counters: Counters) -> Self {
        Self { counters, ..self }
    }

    /// The primary's VM sent a frame, which is held under this name.
    pub fn primary_said(&mut self, id: FrameId, frame: &Frame) {
        match &mut self.after_line {
            Some(after_line) => after_line.push((id, frame.clone())),
            None => self.take_in(id, frame),
        }
    }

    fn take_in(&mut self, id: FrameId, frame: &Frame) {
        match parse(frame, Direction::FromVm) {
            Parsed::Tcp(segment) => {
                let words = Words::new(&segment, &frame.bytes);
                let Some(connection) = self.connection(segment.key) else {
                    return self.wait_for_sync(id, Difference::Full);
                };
                let said = connection.primary_said(id, words);
                let ends = connection.ends_differ();
                let telling = !segment.is_pure_ack() && !ends;
                if said == Said::Leaves {
                    self.counters.free += 1;
                    self.matched.push_back(Matched::Frame(id));
                    return;
                }
                self.wait(id, Some(segment.key), telling);
                if ends {
                    self.ends.insert(id);
                }
                if let Said::GivenUp(kept) = said {
                    self.kept_bytes = self.kept_bytes.saturating_sub(kept);
                    return self.differs(Difference::Flags);
                }
                self.advance(segment.key);
            }
            Parsed::Datagram(datagram) => {
                self.datagram_said(id, datagram.key, Message::whole(&datagram, &frame.bytes));
            }
            Parsed::Piece(piece) => {
                self.datagram_said(id, piece.key, Message::part(&piece, &frame.bytes));
            }
            Parsed::Neighbour => {
                self.counters.free += 1;
                self.matched.push_back(Matched::Frame(id));
            }
            Parsed::Fragment | Parsed::Other => self.wait_for_sync(id, Difference::NotUnderstood),
        }
    }

    fn wait_for_sync(&mut self, id: FrameId, why: Difference) {
        self.wait(id, None, true);
        self.differs(why);
    }

    fn wait(&mut self, id: FrameId, flow: Option<FlowKey>, telling: bool) {
        self.waiting.insert(id, flow);
        if telling {
            self.telling.insert(id);
        }
    }

    /// The backup's VM sent a frame.
    pub fn backup_said(&mut self, frame: &Frame) {
        match parse(frame, Direction::FromVm) {
            Parsed::Tcp(segment) => {
                let words = Words::new(&segment, &frame.bytes);
                let Some(connection) = self.connection(segment.key) else {
                    return self.differs(Difference::Full);
                };
                let grown = connection.backup_said(words);
                self.keep(segment.key, grown);
                self.advance(segment.key);
                if segment.is_pure_ack() {
                    self.tell_partially(&segment, frame);
                }
            }
            Parsed::Datagram(datagram) => {
                self.backups_datagram(datagram.key, Message::whole(&datagram, &frame.bytes));
            }
            Parsed::Piece(piece) => {
                self.backups_datagram(piece.key, Message::part(&piece, &frame.bytes));
            }
            // The primary's own wait for a sync.
            Parsed::Neighbour | Parsed::Fragment | Parsed::Other => {}
        }
    }

    /// A datagram of the primary's, or a part of one.
    fn datagram_said(&mut self, id: FrameId, key: FlowKey, message: Message) {
        let Some(datagrams) = self.datagrams(key) else {
            return self.wait_for_sync(id, Difference::Full);
        };
        datagrams.primary_said(id, message);
        self.wait(id, Some(key), true);
        self.advance(key);
    }

    /// The same of the backup's.
    fn backups_datagram(&mut self, key: FlowKey, message: Message) {
        let Some(datagrams) = self.datagrams(key) else {
            return self.differs(Difference::Full);
        };
        let grown = datagrams.backup_said(message);
        self.keep(key, grown);
        self.advance(key);
    }

    /// The primary's VM stood still here: what it said before is covered by the sync under way.
    pub fn line_drawn(&mut self) {
        self.after_line.get_or_insert_default();
        self.forget_difference();
    }

    fn forget_difference(&mut self) {
        self.difference = None;
        self.place = None;
    }

    /// The sync is acknowledged: what was said before the line has left.
    pub fn sync_acknowledged(&mut self) {
        self.telling.clear();
        // What was to be told in part is told whole now, and with a newer timestamp.
        self.matched.retain(|next| matches!(next, Matched::Frame(_)));
        self.partial_acks = 0;
        for flow in std::mem::take(&mut self.waiting).into_values() {
            let Some(key) = flow else { continue };
            match self.flows.get_mut(&key).map(|flow| &mut flow.words) {
                Some(FlowWords::Connection(connection)) => connection.covered(),
                Some(FlowWords::Datagrams(datagrams)) => datagrams.covered(),
                None => {}
            }
        }
    }

    /// All that the primary has said so far has left, by nobody's word: it is told, and nothing of it waits.
    pub fn all_has_left(&mut self) {
        self.sync_acknowledged();
        self.matched.clear();
    }

    /// The backup has loaded the sync: from here on it says what a copy of the primary says.
    pub fn backup_loaded(&mut self) {
        // An acknowledgement comes before a load; frames that it would have let out are out or gone.
        self.sync_acknowledged();
        self.ends.clear();
        self.loads += 1;
        self.kept_bytes = 0;
        self.forget_difference();
        self.let_go();
        if self.flows.len() > self.limits.flows / 2 {
            // Most of them have ended without a word. What is forgotten waits once more, and no longer.
            self.flows.clear();
        }
        for (id, frame) in self.after_line.take().unwrap_or_default() {
            self.take_in(id, &frame);
        }
    }

    /// What flows keep of the epoch before the load is of no use, and counted nowhere; many of them say no more.
    fn let_go(&mut self) {
        self.flows
            .retain(|_, flow| matches!(flow.words, FlowWords::Connection(_)));
        let loads = self.loads;
        for flow in self.flows.values_mut() {
            if let FlowWords::Connection(connection) = &mut flow.words
                && flow.loads != loads
                && connection.kept_bytes() > 0
            {
                connection.reload();
                flow.loads = loads;
            }
        }
    }

    /// Words of the backup were lost on their way here: what waits for them is not waited for (invariant 4).
    pub fn backup_was_not_heard(&mut self) {
        self.differs(Difference::Full);
    }

    /// What is kept of the backup, at most.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// What may leave next, where it is.
    #[must_use]
    pub fn peek_matched(&self) -> Option<&Matched> {
        self.matched.front()
    }

    /// The next frame that may leave.
    pub fn next_matched(&mut self) -> Option<Matched> {
        let next = self.matched.pop_front()?;
        self.partial_acks -= usize::from(matches!(next, Matched::PartialAck { .. }));
        Some(next)
    }

    /// How the two stand.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match (self.difference, self.waiting.first_key_value()) {
            (Some(why), _) => Verdict::Differs { why },
            (None, Some((oldest, _))) => Verdict::Waiting {
                oldest: *oldest,
                frames: self.waiting.len(),
                telling: self.telling.len(),
            },
            (None, None) => Verdict::Agree,
        }
    }

    /// The oldest frame that waits and says more than an acknowledgement.
    #[must_use]
    pub fn oldest_telling(&self) -> Option<FrameId> {
        self.telling.first().copied()
    }

    /// The flow on which that waits.
    #[must_use]
    pub fn waits_on(&self) -> Option<FlowKey> {
        *self.waiting.get(self.telling.first()?)?
    }

    /// Where the first difference is, if it is in what was said on some flow.
    #[must_use]
    pub fn place(&self) -> Option<&Place> {
        self.place.as_ref()
    }

    /// The newest frame that the backup has said, too.
    #[must_use]
    pub fn newest_said(&self) -> Option<FrameId> {
        self.newest_said
    }

    /// What was seen so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn differs(&mut self, why: Difference) {
        let counter = match why {
            Difference::Bytes => &mut self.counters.bytes,
            Difference::Flags | Difference::Ends => &mut self.counters.flags,
            Difference::Datagram => &mut self.counters.datagrams,
            Difference::NotUnderstood => &mut self.counters.not_understood,
            Difference::Full => &mut self.counters.full,
        };
        *counter += 1;
        self.difference.get_or_insert(why);
        // An end is not what brings the sync.
        if why != Difference::Ends {
            self.place = self.place.take().filter(|place| place.why != Difference::Ends);
        }
    }

    /// Names what both have said on a flow.
    fn advance(&mut self, key: FlowKey) {
        let http_dates = self.limits.http_dates;
        loop {
            let next = match self.flows.get_mut(&key).map(|flow| &mut flow.words) {
                Some(FlowWords::Connection(connection)) => connection.next_matched(http_dates),
                Some(FlowWords::Datagrams(datagrams)) => datagrams.next_matched(),
                None => return,
            };
            match next {
                Ok(Some(id)) => {
                    self.waiting.remove(&id);
                    self.telling.remove(&id);
                    self.newest_said = self.newest_said.max(Some(id));
                    self.counters.matched += 1;
                    self.matched.push_back(Matched::Frame(id));
                }
                Ok(None) => return,
                Err(why) => {
                    self.saw_place(key, why);
                    return match why {
                        Difference::Ends => self.ends_differ(&key),
                        _ => self.differs(why),
                    };
                }
            }
        }
    }

    /// That of an end counts as none beside others.
    fn saw_place(&mut self, key: FlowKey, why: Difference) {
        let known = self.place.as_ref().map(|place| place.why);
        let is_first = known.is_none() || known == Some(Difference::Ends) && why != Difference::Ends;
        if let (Some(flow), true) = (self.flows.get(&key), is_first) {
            self.place = Some(flow.words.found().on(key, why));
        }
    }

    /// Nobody waits for what is left on this flow, so it brings no sync at once.
    fn ends_differ(&mut self, key: &FlowKey) {
        self.counters.flags += 1;
        if let Some(FlowWords::Connection(connection)) = self.flows.get(key).map(|flow| &flow.words) {
            for id in connection.waiting() {
                self.telling.remove(&id);
                self.ends.insert(id);
            }
        }
    }

    /// The first frame that waits for nothing but how a connection ended.
    #[must_use]
    pub fn oldest_end(&self) -> Option<FrameId> {
        let waits = self.ends.iter().find(|id| self.waiting.contains_key(id));
        waits.copied()
    }

    /// A frame leaves; whether it was one of these.
    pub fn end_leaves(&mut self, id: FrameId) -> bool {
        self.ends.remove(&id)
    }

    /// Where the primary's words wait still after the backup's acknowledgement, the client is told that one.
    fn tell_partially(&mut self, segment: &Segment, frame: &Frame) {
        let flow = self.flows.get_mut(&segment.key).map(|flow| &mut flow.words);
        if self.partial_acks < MOST_PARTIAL_ACKS
            && let Some(FlowWords::Connection(connection)) = flow
            && let Some((frame, gets_on)) = connection.partial_ack(segment, frame)
        {
            self.partial_acks += 1;
            self.matched.push_back(Matched::PartialAck { frame, gets_on });
        }
    }

    /// Counts what is kept of the backup; over the limit the flow that grew is given up (invariant 4).
    ///
    /// The count is of what came since the last load and not of what is left: a bound, and cheap.
    fn keep(&mut self, key: FlowKey, grown: usize) {
        self.kept_bytes += grown;
        if self.kept_bytes <= self.limits.buffer_bytes {
            return;
        }
        self.kept_bytes = self
            .flows
            .values()
            .filter(|flow| flow.loads == self.loads)
            .map(|flow| flow.words.kept_bytes())
            .sum();
        if self.kept_bytes > self.limits.buffer_bytes {
            if let Some(flow) = self.flows.get_mut(&key) {
                self.kept_bytes = self.kept_bytes.saturating_sub(flow.words.give_up());
            }
            self.differs(Difference::Full);
        }
    }

    fn connection(&mut self, key: FlowKey) -> Option<&mut Connection> {
        match &mut self.flow(key, || FlowWords::Connection(Box::default()))?.words {
            FlowWords::Connection(connection) => Some(connection),
            FlowWords::Datagrams(_) => None,
        }
    }

    fn datagrams(&mut self, key: FlowKey) -> Option<&mut Datagrams> {
        match &mut self
            .flow(key, || FlowWords::Datagrams(Datagrams::default()))?
            .words
        {
            FlowWords::Datagrams(datagrams) => Some(datagrams),
            FlowWords::Connection(_) => None,
        }
    }

    fn flow(&mut self, key: FlowKey, new: impl FnOnce() -> FlowWords) -> Option<&mut Flow> {
        let loads = self.loads;
        if self.flows.len() >= self.limits.flows && !self.flows.contains_key(&key) {
            return None;
        }
        let flow = self
            .flows
            .entry(key)
            .or_insert_with(|| Flow { loads, words: new() });
        if flow.loads != loads {
            flow.loads = loads;
            match &mut flow.words {
                FlowWords::Connection(connection) => connection.reload(),
                FlowWords::Datagrams(datagrams) => *datagrams = Datagrams::default(),
            }
        }
        Some(flow)
    }
}

#[cfg(test)]
mod tests;
