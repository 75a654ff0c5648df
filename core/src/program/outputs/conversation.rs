//! One connection's outputs, of all copies.
//!
//! Places in a stream are counted from behind the copy's own SYN, so the copies' initial numbers do not matter.

use super::{MOST_KEPT_BYTES, MOST_OUTPUT_BYTES, SHOWN_BYTES, Seen};
use crate::output::compare::numbers::{after, later};
use crate::output::compare::pieces::Pieces;
use crate::output::packet::{FlowKey, Segment};
use bytes::Bytes;
use std::cmp::Ordering;
use std::collections::VecDeque;

/// A connection.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) client_isn: u32,
    /// After the last number that the client has said.
    heard_to: u32,
    last_input: Bytes,
    streams: Vec<Stream>,
    /// Where the first copy's open output begins.
    open_from: u32,
    /// Closed outputs that some copy has not said yet.
    outputs: VecDeque<Output>,
    /// How many were closed before the first of these.
    before: u64,
    /// The client has given it up: what a copy did not say is no difference.
    pub(super) reset: bool,
    given_up: bool,
}

/// What one copy says.
#[derive(Debug, Default)]
struct Stream {
    isn: Option<u32>,
    /// What is not judged yet.
    said: Pieces,
    /// After the last byte that it has said.
    end: u32,
    /// It has ended its stream, or reset the connection.
    over: bool,
    /// Where its next output begins.
    cursor: u32,
    /// How many outputs of it are judged, from the connection's beginning on.
    judged: u64,
}

#[derive(Debug)]
struct Output {
    input: Bytes,
    bytes: Bytes,
    /// How far each copy was when the next input came.
    cuts: Vec<Option<u32>>,
    /// What a copy said instead.
    other: Option<(usize, Bytes)>,
}

impl Conversation {
    pub(super) fn new(copies: usize, client_isn: u32) -> Self {
        Self {
            client_isn,
            heard_to: client_isn.wrapping_add(1),
            last_input: Bytes::new(),
            streams: (0..copies).map(|_| Stream::default()).collect(),
            open_from: 0,
            outputs: VecDeque::new(),
            before: 0,
            reset: false,
            given_up: false,
        }
    }

    /// The client says `payload`, up to `seq_end`: what the copies have said until now belongs to what it said before.
    pub(super) fn heard(&mut self, seq_end: u32, payload: &Bytes) {
        if !after(seq_end, self.heard_to) {
            return; // a repetition
        }
        self.heard_to = seq_end;
        self.cut(true);
        if !payload.is_empty() {
            self.last_input = payload.slice(..payload.len().min(SHOWN_BYTES));
        }
    }

    pub(super) fn client_reset(&mut self) {
        self.cut(true);
        self.reset = true;
    }

    /// A copy said `segment`.
    pub(super) fn said(&mut self, copy: usize, segment: &Segment, payload: &Bytes) {
        let stream = &mut self.streams[copy];
        if segment.syn() {
            stream.isn = Some(segment.seq);
            return;
        }
        if segment.rst() {
            stream.over = true;
        } else if let Some(isn) = stream.isn {
            let place = segment.seq.wrapping_sub(isn).wrapping_sub(1);
            // What lies between was lost on its way here.
            self.given_up |= after(place, stream.end) && !payload.is_empty();
            let end = place.wrapping_add(payload.len() as u32);
            if after(end, stream.end) {
                // What it repeats is what it said before.
                let known = stream.end.wrapping_sub(place) as usize;
                stream
                    .said
                    .add(stream.end, &payload.slice(known.min(payload.len())..));
                stream.end = end;
            }
            stream.over |= segment.fin();
        }
        if copy == 0 {
            while self.streams[0].end.wrapping_sub(self.open_from) as usize >= MOST_OUTPUT_BYTES {
                self.close(self.open_from.wrapping_add(MOST_OUTPUT_BYTES as u32), false);
            }
            if self.streams[0].over {
                self.cut(false);
            }
        }
        let kept: usize = self.streams.iter().map(|stream| stream.said.bytes()).sum();
        let waiting: usize = self.outputs.iter().map(|output| output.bytes.len()).sum();
        self.given_up |= kept + waiting > MOST_KEPT_BYTES;
    }

    /// Ends the open output, if anything was said in it.
    fn cut(&mut self, by_input: bool) {
        let end = self.streams[0].end;
        if end != self.open_from {
            self.close(end, by_input);
        }
    }

    fn close(&mut self, end: u32, by_input: bool) {
        let first = &mut self.streams[0];
        let bytes = first
            .said
            .bytes_from(self.open_from, end.wrapping_sub(self.open_from) as usize);
        first.said.forget(self.open_from, end);
        self.open_from = end;
        let cuts = self.streams.iter().map(|stream| by_input.then_some(stream.end));
        self.outputs.push_back(Output {
            input: self.last_input.clone(),
            bytes,
            cuts: cuts.collect(),
            other: None,
        });
    }

    /// Whether the other copies have said all that the first has.
    pub(super) fn is_settled(&self) -> bool {
        let said = |stream: &Stream| stream.end == self.streams[0].end && stream.over == self.streams[0].over;
        self.given_up || self.reset || (self.outputs.is_empty() && self.streams.iter().all(said))
    }

    /// Judges what can be judged; with `last` everything. Whether the conversation may be forgotten.
    pub(super) fn judge(&mut self, key: &FlowKey, last: bool, seen: &mut Seen) -> bool {
        if self.given_up {
            seen.tally.lost_sight += 1;
            return true;
        }
        for copy in 1..self.streams.len() {
            while self.judge_next(copy, last) {}
        }
        let done = |streams: &[Stream], before: u64| streams[1..].iter().all(|stream| stream.judged > before);
        while !self.outputs.is_empty() && done(&self.streams, self.before) {
            let Some(output) = self.outputs.pop_front() else {
                break;
            };
            self.before += 1;
            seen.count(key, self.before, &output.input, &output.bytes, output.other);
        }
        let over = self.streams.iter().all(|stream| stream.over);
        if over && self.outputs.is_empty() && !last {
            self.end(key, seen);
            return true;
        }
        false
    }

    /// Judges the next output of one copy. False where there is none, or its words are not all here yet.
    fn judge_next(&mut self, copy: usize, last: bool) -> bool {
        let stream = &mut self.streams[copy];
        let Some(output) = self.outputs.get_mut((stream.judged - self.before) as usize) else {
            return false;
        };
        let length = output.bytes.len();
        let until = stream.cursor.wrapping_add(length as u32);
        let next = match stream.said.compare(stream.cursor, &output.bytes) {
            Ordering::Equal => until,
            Ordering::Less if !last && !stream.over => return false,
            Ordering::Less | Ordering::Greater => {
                let cut = output.cuts[copy].filter(|cut| after(*cut, stream.cursor));
                // Beyond its last word a copy that is over says nothing.
                let next = match (cut, stream.over || last) {
                    (Some(cut), _) => cut,
                    (None, true) if after(until, stream.end) => later(stream.end, stream.cursor),
                    (None, _) => until,
                };
                let words = stream
                    .said
                    .bytes_from(stream.cursor, next.wrapping_sub(stream.cursor) as usize);
                output.other.get_or_insert((copy, words));
                next
            }
        };
        stream.said.forget(stream.cursor, next);
        stream.cursor = next;
        stream.judged += 1;
        true
    }

    /// Nothing more will be said.
    pub(super) fn finish(&mut self, key: &FlowKey, seen: &mut Seen) {
        if self.reset {
            // What all have said is compared, the rest was nobody's to hear.
            self.judge(key, false, seen);
            return;
        }
        self.cut(false);
        if !self.judge(key, true, seen) {
            self.end(key, seen);
        }
    }

    /// What the others said beyond the first copy's last word, and who ended the connection.
    fn end(&mut self, key: &FlowKey, seen: &mut Seen) {
        let more =
            (self.streams.iter().enumerate().skip(1)).find(|(_, stream)| after(stream.end, stream.cursor));
        if let Some((copy, stream)) = more {
            let words = stream.said.bytes_from(stream.cursor, MOST_OUTPUT_BYTES);
            self.before += 1;
            seen.count(
                key,
                self.before,
                &self.last_input,
                &Bytes::new(),
                Some((copy, words)),
            );
        }
        let over = self.streams.iter().filter(|stream| stream.over).count();
        match over {
            0 => {}
            all if all == self.streams.len() => seen.tally.ends_equal += 1,
            _ => seen.tally.ends_differing += 1,
        }
    }
}
