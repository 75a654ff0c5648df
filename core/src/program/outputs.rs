//! What it decides: whether the copies of a program say the same, output by output.
//!
//! Flow: every frame that a copy sends and every input that the copies get comes in, in the order in which the driver sees
//! them; a tally and the first difference come out.
//!
//! An *output* of a connection is what the first copy said on it between two inputs of its client; what is longer than
//! `MOST_OUTPUT_BYTES` is cut there. Another copy's output begins where its last one ended. As long as both say the same
//! bytes, packets, acknowledgements and the moment do not matter. Where they differ, the other's output is taken to end where
//! it stood when the next input came, or, if it had said nothing by then, after as many bytes: so a comparison goes on after
//! a difference, and an answer of another length costs one output more at most where a copy is late.
//!
//! Invariants:
//! 1. Every byte of the first copy lies in exactly one output, and every output is counted once, as equal or as differing.
//! 2. Equal means: every copy said exactly these bytes at this place of its stream.
//! 3. (memory) What waits for a slow copy is bounded; a connection beyond that is given up and counted as lost sight of.
//!
//! Source: APUS's output checker compares a running hash after N bytes; bytes are stronger, and both copies are here. Not
//! here: what may leave (`output::compare`, whose packets and streams these are).

mod conversation;

use crate::agreed::Frame;
use crate::output::packet::{Direction, FlowKey, Parsed, SYN, UDP, parse};
use bytes::Bytes;
use conversation::Conversation;
use std::collections::{BTreeMap, VecDeque};

/// An output ends here at the latest.
pub const MOST_OUTPUT_BYTES: usize = 64 << 10;
/// What is kept of one connection.
const MOST_KEPT_BYTES: usize = 16 << 20;
/// Flows that are followed at once.
const MOST_FLOWS: usize = 65_536;
/// Datagrams of one flow that wait for the other copies'.
const MOST_DATAGRAMS: usize = 4096;
/// What the first difference shows of each side, and of the input before it.
pub const SHOWN_BYTES: usize = 256;

/// What was compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Outputs that all copies said alike.
    pub equal: u64,
    /// Outputs that some copy said otherwise, or not at all.
    pub differing: u64,
    /// Connections that all copies ended, or none.
    pub ends_equal: u64,
    /// Connections that only some copies ended.
    pub ends_differing: u64,
    /// Connections and datagrams of which something was not seen, so that nothing more was compared.
    pub lost_sight: u64,
    /// Bytes of the outputs that were compared.
    pub bytes: u64,
}

impl Tally {
    /// All outputs that were compared.
    #[must_use]
    pub fn outputs(&self) -> u64 {
        self.equal + self.differing
    }

    /// Whether nothing differed and everything was seen.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.differing + self.ends_differing + self.lost_sight == 0
    }
}

/// The first output that differed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FirstDifference {
    /// The conversation.
    pub key: FlowKey,
    /// Which output of it, from 1 on.
    pub number: u64,
    /// Which copy said something else than copy 0.
    pub copy: usize,
    /// The first place at which they differ, from the beginning of the output on.
    pub at: usize,
    /// From where on both are shown: a multiple of 16 shortly before that place.
    pub shown_from: usize,
    /// The input before it, its first `SHOWN_BYTES`.
    pub input: Bytes,
    /// What the first copy said, `SHOWN_BYTES` from `shown_from` on.
    pub first: Bytes,
    /// What the other one said.
    pub other: Bytes,
}

/// The comparison of what two or more copies say.
#[derive(Debug)]
pub struct Outputs {
    copies: usize,
    conversations: BTreeMap<FlowKey, Conversation>,
    datagrams: BTreeMap<FlowKey, Datagrams>,
    seen: Seen,
}

/// What is known of all conversations.
#[derive(Debug, Default)]
struct Seen {
    tally: Tally,
    first: Option<FirstDifference>,
}

/// What the copies said on one flow of datagrams, and the others have not said yet.
#[derive(Debug)]
struct Datagrams {
    said: Vec<VecDeque<Bytes>>,
    number: u64,
    last_input: Bytes,
    given_up: bool,
}

impl Outputs {
    /// For so many copies.
    #[must_use]
    pub fn new(copies: usize) -> Self {
        Self {
            copies,
            conversations: BTreeMap::new(),
            datagrams: BTreeMap::new(),
            seen: Seen::default(),
        }
    }

    /// What was compared so far.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.seen.tally
    }

    /// The first difference.
    #[must_use]
    pub fn first_difference(&self) -> Option<&FirstDifference> {
        self.seen.first.as_ref()
    }

    /// All copies get this frame of a client now.
    pub fn heard(&mut self, frame: &Frame) {
        match parse(frame, Direction::ToVm) {
            Parsed::Tcp(segment) => {
                let key = segment.key;
                let reused = |known: &Conversation| segment.syn() && known.client_isn != segment.seq;
                if self.conversations.get(&key).is_some_and(reused)
                    && let Some(mut old) = self.conversations.remove(&key)
                {
                    old.finish(&key, &mut self.seen);
                }
                if segment.syn() && !self.conversations.contains_key(&key) {
                    if self.conversations.len() >= MOST_FLOWS {
                        self.conversations.retain(|_, known| !known.reset);
                    }
                    if self.conversations.len() >= MOST_FLOWS {
                        self.seen.tally.lost_sight += 1;
                        return;
                    }
                    self.conversations
                        .insert(key, Conversation::new(self.copies, segment.seq));
                }
                let Some(known) = self.conversations.get_mut(&key) else {
                    return;
                };
                if segment.rst() {
                    known.client_reset();
                } else if segment.flags & SYN == 0 && !segment.is_pure_ack() {
                    known.heard(segment.seq_end(), &frame.bytes.slice(segment.payload));
                }
                self.judge(&key);
            }
            Parsed::Datagram(datagram) if datagram.key.protocol == UDP => {
                if let Some(flow) = self.datagrams_of(datagram.key) {
                    let payload = frame.bytes.slice(datagram.payload);
                    flow.last_input = payload.slice(..payload.len().min(SHOWN_BYTES));
                }
            }
            _ => {}
        }
    }

    /// A copy sent this frame.
    pub fn said(&mut self, copy: usize, frame: &Frame) {
        match parse(frame, Direction::FromVm) {
            Parsed::Tcp(segment) => {
                let Some(known) = self.conversations.get_mut(&segment.key) else {
                    // A reset answers what belongs to no connection; the rest repeats one that is over.
                    return;
                };
                known.said(copy, &segment, &frame.bytes.slice(segment.payload.clone()));
                self.judge(&segment.key);
            }
            Parsed::Datagram(datagram) if datagram.key.protocol == UDP => {
                let payload = frame.bytes.slice(datagram.payload);
                let mut seen = std::mem::take(&mut self.seen);
                match self.datagrams_of(datagram.key) {
                    Some(flow) => flow.said(&datagram.key, copy, payload, &mut seen),
                    None => seen.tally.lost_sight += 1,
                }
                self.seen = seen;
            }
            _ => {}
        }
    }

    /// Whether the other copies have said all that the first has.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.conversations.values().all(Conversation::is_settled)
            && self.datagrams.values().all(|flow| flow.waiting() == 0)
    }

    /// Nothing more will be said: what is open is judged as it is.
    pub fn finish(&mut self) {
        for (key, mut conversation) in std::mem::take(&mut self.conversations) {
            conversation.finish(&key, &mut self.seen);
        }
        for (key, mut flow) in std::mem::take(&mut self.datagrams) {
            flow.finish(&key, &mut self.seen);
        }
    }

    fn judge(&mut self, key: &FlowKey) {
        if let Some(known) = self.conversations.get_mut(key)
            && known.judge(key, false, &mut self.seen)
        {
            self.conversations.remove(key);
        }
    }

    fn datagrams_of(&mut self, key: FlowKey) -> Option<&mut Datagrams> {
        if self.datagrams.len() >= MOST_FLOWS && !self.datagrams.contains_key(&key) {
            return None;
        }
        let copies = self.copies;
        Some(self.datagrams.entry(key).or_insert_with(|| Datagrams {
            said: vec![VecDeque::new(); copies],
            number: 0,
            last_input: Bytes::new(),
            given_up: false,
        }))
    }
}

impl Seen {
    /// Counts one output of `first`'s, which the copies in `others` said otherwise (their number and their words).
    fn count(
        &mut self,
        key: &FlowKey,
        number: u64,
        input: &Bytes,
        first: &Bytes,
        other: Option<(usize, Bytes)>,
    ) {
        self.tally.bytes += first.len() as u64;
        let Some((copy, other)) = other else {
            self.tally.equal += 1;
            return;
        };
        self.tally.differing += 1;
        self.first.get_or_insert_with(|| {
            let at = first.iter().zip(&other).take_while(|(a, b)| a == b).count();
            let shown_from = at.saturating_sub(SHOWN_BYTES / 4) & !15;
            let shown = |bytes: &Bytes| {
                bytes.slice(shown_from.min(bytes.len())..bytes.len().min(shown_from + SHOWN_BYTES))
            };
            FirstDifference {
                key: *key,
                number,
                copy,
                at,
                shown_from,
                input: input.clone(),
                first: shown(first),
                other: shown(&other),
            }
        });
    }
}

impl Datagrams {
    fn waiting(&self) -> usize {
        self.said.iter().map(VecDeque::len).max().unwrap_or(0)
    }

    fn said(&mut self, key: &FlowKey, copy: usize, payload: Bytes, seen: &mut Seen) {
        if self.given_up {
            return;
        }
        self.said[copy].push_back(payload);
        if self.said[copy].len() > MOST_DATAGRAMS {
            self.given_up = true;
            self.said.iter_mut().for_each(VecDeque::clear);
            seen.tally.lost_sight += 1;
            return;
        }
        while self.said.iter().all(|said| !said.is_empty()) {
            self.compare_next(key, seen);
        }
    }

    /// The n-th with the n-th; one that a copy has not said is none.
    fn compare_next(&mut self, key: &FlowKey, seen: &mut Seen) {
        self.number += 1;
        let mut next: Vec<Option<Bytes>> = self.said.iter_mut().map(VecDeque::pop_front).collect();
        let first = next[0].take();
        let other = (next.into_iter().enumerate().skip(1)).find(|(_, other)| *other != first);
        let other = other.map(|(copy, other)| (copy, other.unwrap_or_default()));
        let (number, input) = (self.number, self.last_input.clone());
        seen.count(key, number, &input, &first.unwrap_or_default(), other);
    }

    fn finish(&mut self, key: &FlowKey, seen: &mut Seen) {
        while self.waiting() > 0 {
            self.compare_next(key, seen);
        }
    }
}

#[cfg(test)]
mod tests;
