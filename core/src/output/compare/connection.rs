//! One TCP connection: which of the primary's segments the backup has said too.
//!
//! What decides is the byte stream, not the packet: a segment may leave when its payload, its SYN and its FIN lie in
//! what the backup has said at the same place of the stream, or in what the client was told before; when its SYN settles what
//! the backup's does (`settled`); and when what it
//! acknowledges, the backup has acknowledged too. An acknowledgement is a statement: a client never sends again what
//! was acknowledged, so a backup that has not got it would miss it for ever. Segmentation, repetition, windows, time
//! stamps and everything below TCP do not matter.
//!
//! Invariants:
//! 1. Nothing is told that the backup has not said, or that a sync has not covered. What the primary's VM loses on its way out was told to
//!    nobody, whatever left after it, and is compared when it is repeated.
//! 2. Segments leave in the primary's order, what only repeats what was told as well: its timestamp is newer than those
//!    of what waits, and a client that hears it first throws away what comes later (PAWS). While nothing waits, it
//!    leaves at once.
//! 3. A connection that differs says nothing new until the next sync.
//! 4. While the primary's words wait, what the backup acknowledges is told in the primary's name (`partial_ack`): a client
//!    sends again what the backup has not got, and not only what it would have waited for longest.
//!
//! Positions are the primary's sequence numbers. A connection that began after the backup was loaded has other ones
//! there; the difference is that of the two SYNs. Not here: what clients see after a fail-over (`rewriter`).

use super::http_date;
use super::numbers::{after, later};
use super::partial_ack::PartialAck;
use super::pieces::Pieces;
use super::place::{Found, SHOWN_BYTES, alike, shown};
use super::settled::Settled;
use super::told::Told;
use super::types::{Difference, FrameId};
use crate::agreed::Frame;
use crate::output::packet::Segment;
use bytes::Bytes;
use std::cmp::Ordering;
use std::collections::VecDeque;

/// How many of the backup's resets are remembered; the oldest goes first.
const MOST_RESETS: usize = 16;

/// What words cost besides their bytes.
const WORDS_COST_BYTES: usize = 128;

/// A segment with its payload.
#[derive(Debug, Clone)]
pub struct Words {
    seq: u32,
    ack: Option<u32>,
    syn: bool,
    fin: bool,
    rst: bool,
    window: u16,
    /// Its timestamp.
    ticks: Option<u32>,
    /// A SYN's.
    settles: Option<Settled>,
    payload: Bytes,
}

impl Words {
    /// Of a segment in `frame`.
    pub fn new(segment: &Segment, frame: &Bytes) -> Self {
        Self {
            seq: segment.seq,
            ack: segment.ack_flag().then_some(segment.ack),
            syn: segment.syn(),
            fin: segment.fin(),
            rst: segment.rst(),
            window: segment.window,
            ticks: segment.timestamps.map(|found| found.value),
            settles: segment.syn().then(|| Settled::by(segment, frame)),
            payload: frame.slice(segment.payload.clone()),
        }
    }

    /// What it takes to keep them.
    fn cost(&self) -> usize {
        self.payload.len() + WORDS_COST_BYTES
    }

    /// The position after it; SYN and FIN take one each.
    fn end(&self) -> u32 {
        let len = self.payload.len() as u32 + u32::from(self.syn) + u32::from(self.fin);
        self.seq.wrapping_add(len)
    }

    /// Without bytes, SYN or FIN.
    fn is_empty(&self) -> bool {
        self.end() == self.seq
    }

    /// Where its payload begins.
    fn payload_at(&self) -> u32 {
        self.seq.wrapping_add(u32::from(self.syn))
    }

    /// Where its payload ends.
    fn payload_end(&self) -> u32 {
        self.payload_at().wrapping_add(self.payload.len() as u32)
    }

    /// What of its payload, which has them all, lies between two positions.
    fn between(&self, from: u32, to: u32) -> &[u8] {
        let at = |position: u32| position.wrapping_sub(self.payload_at()) as usize;
        &self.payload[at(from)..at(to)]
    }
}

/// One side's newest SYN.
#[derive(Debug, Default, Clone, Copy)]
struct Beginning {
    isn: Option<u32>,
    /// How often a connection of this name began on this side since the backup was loaded.
    count: u32,
}

impl Beginning {
    /// A SYN with this number; whether a new connection begins.
    fn saw(&mut self, isn: u32) -> bool {
        let new = self.isn != Some(isn);
        if new {
            self.isn = Some(isn);
            self.count += 1;
        }
        new
    }
}

/// What becomes of the primary's words.
#[derive(Debug, PartialEq, Eq)]
pub enum Said {
    /// They leave at once.
    Leaves,
    /// They wait for the backup's.
    Waits,
    /// They wait for a sync, as all on this connection: it begins anew while its end waits. So many of the backup's bytes are kept no more.
    GivenUp(usize),
}

/// What is known of a connection.
#[derive(Debug, Default)]
pub struct Connection {
    /// Which bytes the client was told. An acknowledgement tells none by its place: what lies before that may have been lost inside the VM.
    told: Told,
    /// The furthest place that it was told of, by bytes or by an acknowledgement's own place.
    told_place: Option<u32>,
    /// Everything before this position was told to have arrived.
    told_ack: Option<u32>,
    /// The furthest byte that the client was told to have arrived out of order, since the last sync.
    told_edge: Option<u32>,
    /// The SYN that the client was told: positions mean nothing across two connections of one name.
    told_isn: Option<u32>,
    /// How many bytes the client was told; since its SYN, if that was told here.
    told_bytes: u64,
    ours: Beginning,
    theirs: Beginning,
    /// What the backup has said of what the client was not told.
    said: Pieces,
    said_ack: Option<u32>,
    said_fin: Option<u32>,
    /// What its SYN has settled.
    said_syn: Option<Settled>,
    /// Its resets that were not said here yet. There may be many, one for each stray segment, each at its own place.
    said_rst: VecDeque<u32>,
    /// It has said a reset, here or before: its connection is gone.
    gone: bool,
    /// The backup's words on a connection that has not begun here.
    early: Vec<Words>,
    early_bytes: usize,
    waiting: VecDeque<(FrameId, Words)>,
    differs: bool,
    /// They differ in nothing but how it ended.
    ends_differ: bool,
    /// The primary's VM has said its FIN.
    has_ended: bool,
}

impl Connection {
    /// The backup has loaded a sync: both connections are one again, and what it had said is history.
    pub fn reload(&mut self) {
        debug_assert!(self.waiting.is_empty(), "a sync covers all that waited");
        let ours = Beginning {
            isn: self.ours.isn,
            count: 0,
        };
        // Where they are one again they hold the same before what was told, said or lost.
        self.told.covered();
        *self = Self {
            told: std::mem::take(&mut self.told),
            told_place: self.told_place,
            told_ack: self.told_ack,
            told_isn: self.told_isn,
            told_bytes: self.told_bytes,
            has_ended: self.has_ended,
            ours,
            theirs: ours,
            ..Self::default()
        };
    }

    /// The primary's words. What may leave is taken by `next_matched`, except what may leave at once.
    pub fn primary_said(&mut self, id: FrameId, words: Words) -> Said {
        let (differed, kept) = (self.brings_sync(), self.kept_bytes());
        if words.syn && self.ours.saw(words.seq) {
            self.begin_here();
        }
        self.has_ended |= words.fin;
        if !self.differs && self.waiting.is_empty() && self.was_told(&words) {
            return Said::Leaves;
        }
        let tells = self.tells(&words);
        self.waiting.push_back((id, words));
        if self.ends_differ && tells {
            self.give_up();
        }
        match self.brings_sync() && !differed {
            true => Said::GivenUp(kept),
            false => Said::Waits,
        }
    }

    /// What of an acknowledgement of the backup's, one that says nothing else, a client may be told while the primary's waits. Safe as a match
    /// is: the backup has said it, and the primary has received more. Whether it tells of bytes that the client was not told of.
    pub fn partial_ack(&mut self, segment: &Segment, frame: &Frame) -> Option<(Frame, bool)> {
        let (_, front) = self.waiting.front()?;
        let is_told = self.told_ack.is_some_and(|told| after(told, segment.ack));
        let is_behind = !front.syn && !front.rst && after(front.ack?, segment.ack);
        if self.differs || self.gone || self.offset().is_none() || is_told || !is_behind {
            return None;
        }
        let mut newest = self.waiting.iter().rev().filter(|(_, words)| !words.rst);
        let partial = PartialAck {
            seq: self.told_place.unwrap_or(front.seq),
            ticks: front.ticks,
            window: front.window,
            primary_ack: newest.find_map(|(_, words)| words.ack)?,
        };
        let (frame, edge) = partial.of(segment, frame)?;
        let known = later(
            self.told_ack.unwrap_or(segment.ack),
            self.told_edge.unwrap_or(segment.ack),
        );
        let gets_on = self.told_ack != Some(segment.ack) || after(edge, known);
        self.told_ack = Some(segment.ack);
        self.told_edge = Some(later(edge, known));
        Some((frame, gets_on))
    }

    /// The backup's words, in its own numbers. The change of bytes kept.
    pub fn backup_said(&mut self, words: Words) -> usize {
        if words.syn && self.theirs.saw(words.seq) {
            self.said = Pieces::default();
            self.said_ack = None;
            self.said_fin = None;
            self.said_syn = None;
            self.said_rst.clear();
            self.gone = false;
            self.early.clear();
            self.early_bytes = 0;
        }
        let before = self.kept_bytes();
        match self.offset() {
            Some(offset) => self.take_in(words, offset),
            // After a difference nothing is compared any more, so nothing is kept for it.
            None if self.differs => {}
            None => {
                self.early_bytes += words.cost();
                self.early.push(words);
            }
        }
        self.kept_bytes().saturating_sub(before)
    }

    /// The next frame that may leave.
    pub fn next_matched(&mut self, http_dates: bool) -> Result<Option<FrameId>, Difference> {
        let Some((id, words)) = self.waiting.front() else {
            return Ok(None);
        };
        if self.differs {
            return Ok(None);
        }
        let id = *id;
        match self.judge(words, http_dates) {
            Ok(true) => {
                let (_, words) = self.waiting.pop_front().expect("it was looked at just now");
                self.told(&words);
                Ok(Some(id))
            }
            Ok(false) => Ok(None),
            Err(difference) => {
                self.differs = true;
                if difference != Difference::Ends {
                    return Err(difference);
                }
                // A word that waits may tell more than that.
                self.ends_differ = !self.waiting.iter().any(|(_, words)| self.tells(words));
                Err(match self.ends_differ {
                    true => Difference::Ends,
                    false => Difference::Flags,
                })
            }
        }
    }

    /// Whether a client may wait for something in it: bytes that it was not told, or the beginning of a connection.
    fn tells(&self, words: &Words) -> bool {
        words.syn || self.untold(words).next().is_some()
    }

    /// Whether the two differ, and not in how it ended alone.
    fn brings_sync(&self) -> bool {
        self.differs && !self.ends_differ
    }

    /// Whether the two differ in nothing but how it ended.
    pub fn ends_differ(&self) -> bool {
        self.ends_differ
    }

    /// What waits here.
    pub fn waiting(&self) -> impl Iterator<Item = FrameId> + '_ {
        self.waiting.iter().map(|(id, _)| *id)
    }

    /// How the oldest words that wait stand to what the backup has said at their place.
    pub fn found(&self) -> Found {
        let Some((_, words)) = self.waiting.front() else {
            return Found::default();
        };
        let (mut from, mut new) = (words.payload_end(), &[][..]);
        let mut alike_before = 0;
        let mut equal = 0;
        for (start, end) in self.untold(words) {
            alike_before += equal;
            (from, new) = (start, words.between(start, end));
            equal = alike(new, &self.said.bytes_from(from, new.len()));
            if equal < new.len() {
                break;
            }
        }
        Found {
            at_byte: self.told_bytes + (alike_before + equal) as u64,
            from_beginning: self.told_isn.is_some() && self.told_isn == self.ours.isn,
            primary: shown(new, equal),
            backup: self.said.bytes_from(from.wrapping_add(equal as u32), SHOWN_BYTES),
        }
    }

    /// A sync covers all that waited: the client is told.
    pub fn covered(&mut self) {
        while let Some((_, words)) = self.waiting.pop_front() {
            self.told(&words);
        }
    }

    /// Says no more until the next sync.
    pub fn give_up(&mut self) {
        self.differs = true;
        self.ends_differ = false;
        self.said = Pieces::default();
        self.early.clear();
        self.early_bytes = 0;
    }

    /// What it takes to keep what the backup has said.
    pub fn kept_bytes(&self) -> usize {
        self.said.cost() + self.early_bytes
    }

    /// A new connection of the same name: what was told of the old one means nothing.
    fn begin_here(&mut self) {
        self.told = Told::default();
        self.told_place = None;
        self.told_ack = None;
        self.told_edge = None;
        self.has_ended = false;
        if !self.waiting.is_empty() {
            // The end of the old connection waits still, and would be judged by the new one's words.
            self.give_up();
            return;
        }
        if let Some(offset) = self.offset() {
            self.early_bytes = 0;
            for words in std::mem::take(&mut self.early) {
                self.take_in(words, offset);
            }
        }
    }

    /// From the backup's numbers to the primary's; none while only one of them has begun.
    fn offset(&self) -> Option<u32> {
        if self.ours.count != self.theirs.count {
            return None;
        }
        match (self.ours.isn, self.theirs.isn) {
            (Some(ours), Some(theirs)) => Some(ours.wrapping_sub(theirs)),
            // It began before anything was seen of it, in both alike.
            _ => Some(0),
        }
    }

    fn take_in(&mut self, words: Words, offset: u32) {
        let at = |position: u32| position.wrapping_add(offset);
        // A reset that answers a stray segment repeats that one's numbers: they are no place in this stream.
        if words.rst {
            self.gone = true;
            self.said_rst.push_back(at(words.seq));
            if self.said_rst.len() > MOST_RESETS {
                self.said_rst.pop_front();
            }
            return;
        }
        if let Some(ack) = words.ack {
            self.said_ack = Some(self.said_ack.map_or(ack, |said| later(said, ack)));
        }
        if words.fin {
            self.said_fin = Some(at(words.end().wrapping_sub(1)));
        }
        self.said_syn = words.settles.or(self.said_syn);
        if !words.payload.is_empty() && !self.differs {
            let from = at(words.payload_at());
            let place = |position: u32| position.wrapping_sub(from) as usize;
            for (start, end) in self.told.untold(from, at(words.payload_end())) {
                self.said
                    .add(start, &words.payload.slice(place(start)..place(end)));
            }
            if self.said.are_too_many() {
                // Out of sight: what the primary says there waits for a sync.
                self.said = Pieces::default();
            }
        }
    }

    /// Whether there is nothing in it that the client does not know.
    fn was_told(&self, words: &Words) -> bool {
        let known_bytes = words.is_empty() || self.told.is_told(words.seq, words.end());
        let known_ack = words
            .ack
            .is_none_or(|ack| self.told_ack.is_some_and(|told| !after(ack, told)));
        // A segment without content is a statement by its place only if it lies beyond what was told; a window's
        // update or a keep-alive does not.
        !words.rst && known_bytes && known_ack
    }

    fn told(&mut self, words: &Words) {
        if words.rst {
            // It tells no bytes, and its numbers may be a stray segment's, of a former connection of this name: what lies
            // before them was not told.
            if let Some(place) = self.said_rst.iter().position(|at| *at == words.seq) {
                self.said_rst.drain(..=place);
            }
            return;
        }
        let end = words.end();
        if words.syn && self.told_isn.replace(words.seq) != Some(words.seq) {
            (self.told, self.told_place, self.told_ack) = (Told::default(), None, None);
            self.told_bytes = 0;
        }
        let new: usize = self
            .untold(words)
            .map(|(from, to)| words.between(from, to).len())
            .sum();
        self.told_bytes += new as u64;
        self.told.tell(words.seq, end);
        self.told_place = Some(self.told_place.map_or(end, |place| later(place, end)));
        self.said.forget_far_before(end);
        self.said.forget(words.seq, end);
        if let Some(ack) = words.ack {
            self.told_ack = Some(self.told_ack.map_or(ack, |told| later(told, ack)));
        }
    }

    /// Whether the backup has said all of it. An error if it has said something else.
    fn judge(&self, words: &Words, http_dates: bool) -> Result<bool, Difference> {
        if self.was_told(words) {
            return Ok(true);
        }
        if self.offset().is_none() {
            return Ok(false);
        }
        if words.rst {
            return match self.said_rst.contains(&words.seq) {
                true => Ok(true),
                false if self.said_rst.is_empty() => Ok(false),
                false => Err(Difference::Ends),
            };
        }
        let syn = self.judge_syn(words)?;
        let bytes = self.judge_bytes(words, http_dates)?;
        let fin = self.judge_fin(words)?;
        let known = |told: Option<u32>, ack| told.is_some_and(|told| !after(ack, told));
        let acknowledged = words
            .ack
            .is_none_or(|ack| known(self.told_ack, ack) || known(self.said_ack, ack));
        let whole = syn && bytes && fin && acknowledged;
        if !whole && self.gone {
            // Its connection is gone: it will not say more.
            return Err(match self.has_ended {
                true => Difference::Ends,
                false => Difference::Flags,
            });
        }
        Ok(whole)
    }

    /// What the client was not told of these words' bytes: from where to where.
    fn untold(&self, words: &Words) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.told.untold(words.payload_at(), words.payload_end())
    }

    fn judge_syn(&self, words: &Words) -> Result<bool, Difference> {
        match (words.settles, self.said_syn) {
            (None, _) => Ok(true),
            (Some(_), None) => Ok(false),
            (Some(ours), Some(theirs)) if ours == theirs => Ok(true),
            (Some(_), Some(_)) => Err(Difference::Flags),
        }
    }

    fn judge_bytes(&self, words: &Words, http_dates: bool) -> Result<bool, Difference> {
        let mut whole = true;
        for (from, to) in self.untold(words) {
            let new = words.between(from, to);
            let mut found = self.said.compare(from, new);
            if found == Ordering::Greater && http_dates {
                found = http_date::compare(new, &self.said.bytes_from(from, new.len()));
            }
            match found {
                Ordering::Equal => {}
                Ordering::Greater => return Err(Difference::Bytes),
                Ordering::Less => whole = false,
            }
        }
        match self.said_fin {
            // It has ended its stream before these bytes.
            Some(fin) if !whole && after(words.payload_end(), fin) => Err(Difference::Flags),
            _ => Ok(whole),
        }
    }

    fn judge_fin(&self, words: &Words) -> Result<bool, Difference> {
        if !words.fin {
            return Ok(true);
        }
        let at = words.end().wrapping_sub(1);
        match self.said_fin {
            Some(fin) if fin == at => Ok(true),
            Some(_) => Err(Difference::Flags),
            None if self.said.end().is_some_and(|end| after(end, at)) => Err(Difference::Flags),
            None => Ok(false),
        }
    }
}
