//! What it decides: when the next input is delivered to the copies of a program.
//!
//! Flow: the clients' frames come in, in the agreed order; out come, one at a time, frames that every copy gets now, and
//! questions about the copies' sockets that the driver answers.
//!
//! An agreed order of *delivery* is no order of *processing*: a copy that is woken for one connection finds a second one
//! ready or not, by its host's timing, and `epoll` tells them in another order. So the next input waits until the last one was
//! read by every copy. It never waits for an *answer* unless that is asked for: a program may owe none.
//!
//! Invariants:
//! 1. Every copy gets the same frames in the same order.
//! 2. At most one input is unread at any time, unless a copy did not read within the patience; that is counted.
//! 3. What is no input to the program (an acknowledgement, a SYN, ARP) never waits: a copy that waits for room to write would
//!    otherwise wait for a frame that waits for it.
//! 4. (memory) What waits is bounded; what is beyond is lost, as on any network, and counted.
//! 5. The agreed time changes where it was agreed: behind the inputs before it, when every copy is done with them, and before the inputs
//!    behind it. So a copy that is still at an input sees the time that the other one saw.
//!
//! Source: what was measured is in docs/programs.md; sock_diag(7). Not here: how a socket is looked at; what a copy of a running
//! program needs to go on from here (`carried`).

mod carried;

use crate::agreed::{AgreedTime, Frame};
use crate::output::packet::{Direction, FlowKey, Parsed, Segment, UDP, parse};
use std::collections::{BTreeMap, VecDeque};

/// TCP's flag "the end of what was written at once".
const PSH: u8 = 0x08;
/// What may wait.
const MOST_WAITING_BYTES: usize = 16 << 20;
/// A connection that was not read gets this part of the patience, until it is read again; so does a program that is never at rest.
const REFUSED_SHARE: u64 = 64;
/// Ranges behind holes that are remembered of one connection, and of all; a client that has more there is read less strictly.
const MOST_BEYOND: usize = 256;
const MOST_BEYOND_IN_ALL: usize = 65_536;
/// Connections that are followed; of what is beyond nobody knows whether it was read.
const MOST_CONNECTIONS: usize = 65_536;

/// What the next input waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// For nothing: the order of delivery alone.
    Delivery,
    /// Until every copy has read the last one.
    #[default]
    Read,
    /// Until every copy has answered it.
    Answer,
}

/// A question about one copy's sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Question {
    /// Which copy.
    pub copy: usize,
    /// Whose socket: the copy is `vm`, the client `peer`.
    pub key: FlowKey,
    /// Of what kind.
    pub of: Of,
}

/// Which socket a question is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Of {
    /// The listening socket: how many connections wait to be accepted.
    Listener,
    /// The connection's own.
    Connection,
    /// The datagram socket of the port.
    Datagrams,
}

/// How a socket was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// There is none, or its program has closed it: nobody will read any more.
    Gone,
    /// There is one.
    Socket {
        /// What TCP has taken in since the connection began, its end included. Not meant where it is no connection.
        received: u64,
        /// What the program has not read of it; a listener's connections that were not accepted.
        unread: u32,
    },
}

/// What is to be done next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// Give this frame to every copy.
    Deliver(Frame),
    /// It is that time for every copy now.
    Set(AgreedTime),
    /// Look whether every copy is done with what it has read, and say so by [`Gate::are_at_rest`]; if not, look again a little later.
    AskForRest,
    /// Look at these sockets, and tell what was found; if it is not what is waited for, look again a little later.
    Ask(Vec<Question>),
    /// Nothing until a copy says something; look again at this time at the latest, in microseconds.
    Wait(u64),
    /// Nothing until a frame arrives.
    Idle,
}

/// What was seen so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Payloads, ends and new connections that were delivered.
    pub inputs: u64,
    /// Of these, the ones that some copy did not read (or answer) within the patience.
    pub impatient: u64,
    /// Frames lost because too many waited.
    pub lost: u64,
    /// Times that were set although some copy was not done with its inputs within the patience.
    pub restless: u64,
}

/// The order of the inputs of one program.
#[derive(Debug)]
pub struct Gate {
    order: Order,
    copies: usize,
    patience_us: u64,
    heard: BTreeMap<FlowKey, Heard>,
    /// How many ranges of these lie behind holes.
    beyond: usize,
    queue: VecDeque<Queued>,
    queue_bytes: usize,
    waiting: Option<Waiting>,
    /// A time that waits until the copies are done.
    resting: Option<Resting>,
    /// Something was delivered since the time was set.
    stirred: bool,
    /// Some copy was not done within the patience: that is not waited for as long again before it was.
    restless: bool,
    counters: Counters,
}

/// What waits for its turn.
#[derive(Debug)]
enum Queued {
    Input(Input),
    Time(AgreedTime),
}

#[derive(Debug)]
struct Resting {
    time: AgreedTime,
    until_us: u64,
    done: bool,
}

/// A client's side of a connection.
#[derive(Debug)]
struct Heard {
    isn: u32,
    /// How far it was delivered, counted from behind its SYN.
    said_to: u64,
    /// What was delivered behind a hole, from and to, apart from each other: it counts when the hole is filled.
    beyond: BTreeMap<u64, u64>,
    /// The acknowledgement that ends the handshake has not come yet.
    opening: bool,
    /// Some copy did not read within the patience: that is not waited for again before it has.
    refused: bool,
    /// The client has ended it: it may be forgotten.
    ended: bool,
}

impl Heard {
    /// What lies behind a hole that is filled now is taken in with what filled it.
    fn fill(&mut self) {
        while let Some(next) = self
            .beyond
            .first_entry()
            .filter(|next| *next.key() <= self.said_to)
        {
            self.said_to = self.said_to.max(next.remove());
        }
    }

    /// Something was delivered behind a hole. What touches what is known becomes one with it; `is_room`: for one more.
    fn keep(&mut self, mut from: u64, mut to: u64, is_room: bool) {
        let touches = |known: &BTreeMap<u64, u64>, to: u64| {
            let (begins, ends) = known.range(..=to).next_back()?;
            Some((*begins, *ends))
        };
        let is_new = touches(&self.beyond, to).is_none_or(|(_, ends)| ends < from);
        if is_new && (!is_room || self.beyond.len() >= MOST_BEYOND) {
            return;
        }
        while let Some((begins, ends)) = touches(&self.beyond, to).filter(|(_, ends)| *ends >= from) {
            self.beyond.remove(&begins);
            (from, to) = (from.min(begins), to.max(ends));
        }
        self.beyond.insert(from, to);
    }
}

#[derive(Debug)]
struct Input {
    frame: Frame,
    key: FlowKey,
    ends: End,
    /// Ends what its client wrote at once: an answer may follow.
    pushed: bool,
}

/// What makes an input a read one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Accepted,
    /// As far as this segment's last sequence number.
    Read {
        from: u32,
        to: u32,
    },
    Datagram,
    /// A reset is seen by a program when it next looks.
    Reset,
}

#[derive(Debug)]
struct Waiting {
    key: FlowKey,
    of: Of,
    /// What TCP must have taken in.
    received: u64,
    until_us: u64,
    /// Which copies have not read it.
    unread: Vec<bool>,
    /// Which copies have not answered it.
    unanswered: Vec<bool>,
}

impl Gate {
    /// For so many copies; no input is waited for longer than `patience_us`.
    #[must_use]
    pub fn new(order: Order, copies: usize, patience_us: u64) -> Self {
        Self {
            order,
            copies,
            patience_us,
            heard: BTreeMap::new(),
            beyond: 0,
            queue: VecDeque::new(),
            queue_bytes: 0,
            waiting: None,
            resting: None,
            stirred: false,
            restless: false,
            counters: Counters::default(),
        }
    }

    /// What was seen so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.waiting.is_none() && self.resting.is_none()
    }

    /// What waits to be delivered.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        self.queue_bytes
    }

    /// What may wait.
    #[must_use]
    pub fn most_waiting_bytes(&self) -> usize {
        MOST_WAITING_BYTES
    }

    /// A frame of a client arrived. Given back where it is no input: every copy gets it now (invariant 3).
    #[must_use]
    pub fn arrived(&mut self, frame: Frame) -> Option<Frame> {
        let Some(input) = self.input_of(&frame) else {
            return Some(frame);
        };
        if self.order == Order::Delivery && self.queue.is_empty() && self.resting.is_none() {
            self.stirred = true;
            self.deliver(&input);
            return Some(frame);
        }
        if self.queue_bytes + frame.bytes.len() > MOST_WAITING_BYTES {
            self.counters.lost += 1;
            return None;
        }
        self.queue_bytes += frame.bytes.len();
        self.queue.push_back(Queued::Input(input));
        None
    }

    /// It is that time behind what has arrived so far (invariant 5).
    pub fn time(&mut self, time: AgreedTime) {
        // One that nothing came behind is as if it had never been: so there are no more than inputs.
        match self.queue.back_mut() {
            Some(Queued::Time(last)) => *last = time,
            _ => self.queue.push_back(Queued::Time(time)),
        }
    }

    /// Every copy is done with what it has read: what [`Next::AskForRest`] asked.
    pub fn are_at_rest(&mut self) {
        if let Some(resting) = &mut self.resting {
            resting.done = true;
        }
    }

    fn input_of(&mut self, frame: &Frame) -> Option<Input> {
        let (key, ends, pushed) = match parse(frame, Direction::ToVm) {
            Parsed::Tcp(segment) => (segment.key, self.end_of(&segment)?, segment.flags & PSH != 0),
            Parsed::Datagram(datagram) if datagram.key.protocol == UDP => (datagram.key, End::Datagram, true),
            _ => return None,
        };
        let frame = frame.clone();
        Some(Input {
            frame,
            key,
            ends,
            pushed,
        })
    }

    fn end_of(&mut self, segment: &Segment) -> Option<End> {
        if segment.syn() {
            let known = self
                .heard
                .get(&segment.key)
                .is_some_and(|heard| heard.isn == segment.seq);
            if self.heard.len() >= MOST_CONNECTIONS {
                self.heard.retain(|_, heard| !heard.ended);
                self.beyond = self.heard.values().map(|heard| heard.beyond.len()).sum();
            }
            if !known && self.heard.len() < MOST_CONNECTIONS {
                let heard = Heard {
                    isn: segment.seq,
                    said_to: 0,
                    beyond: BTreeMap::new(),
                    opening: true,
                    refused: false,
                    ended: false,
                };
                let before = self.heard.insert(segment.key, heard);
                self.beyond -= before.map_or(0, |before| before.beyond.len());
            }
            return None;
        }
        if segment.rst() {
            return Some(End::Reset);
        }
        if segment.fin()
            && let Some(heard) = self.heard.get_mut(&segment.key)
        {
            heard.ended = true;
        }
        if !segment.is_pure_ack() {
            return Some(End::Read {
                from: segment.seq,
                to: segment.seq_end(),
            });
        }
        let heard = self.heard.get_mut(&segment.key)?;
        std::mem::take(&mut heard.opening).then_some(End::Accepted)
    }

    /// Notes that every copy gets `input` now, and returns what it has to be read to; none where nothing of it is new.
    fn deliver(&mut self, input: &Input) -> Option<(Of, u64)> {
        let heard = self.heard.get_mut(&input.key);
        let read_to = match (input.ends, heard) {
            (End::Accepted, _) => Some((Of::Listener, 0)),
            (End::Datagram, _) => Some((Of::Datagrams, 0)),
            (End::Reset, _) => {
                let gone = self.heard.remove(&input.key);
                self.beyond -= gone.map_or(0, |gone| gone.beyond.len());
                None
            }
            (End::Read { from, to }, Some(heard)) => {
                // The difference of two places in the circle, as far as half of it.
                let beyond = |place: u32| {
                    let place = place.wrapping_sub(heard.isn).wrapping_sub(1);
                    place.wrapping_sub(heard.said_to as u32) as i32
                };
                let (begins, more) = (beyond(from), beyond(to));
                // Behind a hole nobody can read before it is filled, and what fills it may wait behind this one: after a loss a client
                // repeats its last segment first (RFC 8985, 7.3).
                if begins > 0 {
                    let place = |from_here: i32| heard.said_to.saturating_add_signed(i64::from(from_here));
                    // Whoever has not finished the handshake may not be who it says, and gets nothing kept.
                    if !heard.opening {
                        let before = heard.beyond.len();
                        let is_room = self.beyond < MOST_BEYOND_IN_ALL;
                        heard.keep(place(begins), place(more), is_room);
                        self.beyond = self.beyond - before + heard.beyond.len();
                    }
                    return None;
                }
                if more <= 0 {
                    return None;
                }
                heard.said_to = heard.said_to.saturating_add_signed(i64::from(more));
                let before = heard.beyond.len();
                heard.fill();
                self.beyond -= before - heard.beyond.len();
                Some((Of::Connection, heard.said_to))
            }
            (End::Read { .. }, None) => Some((Of::Connection, 0)),
        };
        self.counters.inputs += u64::from(read_to.is_some());
        read_to
    }

    /// A copy said something on this connection: bytes, or its end.
    pub fn answered(&mut self, copy: usize, key: &FlowKey) {
        if let Some(waiting) = self.waiting.as_mut().filter(|waiting| waiting.key == *key) {
            waiting.unanswered[copy] = false;
        }
    }

    /// What the driver found where `Next::Ask` asked about this copy. Whether that is what was waited for.
    pub fn told(&mut self, copy: usize, found: Found) -> bool {
        let Some(waiting) = &mut self.waiting else {
            return false;
        };
        match found {
            Found::Gone => {
                waiting.unread[copy] = false;
                waiting.unanswered[copy] = false;
            }
            Found::Socket { received, unread } => {
                let arrived = waiting.of != Of::Connection || received >= waiting.received;
                waiting.unread[copy] = unread > 0 || !arrived;
            }
        }
        !waiting.unread[copy]
    }

    /// What is to be done next; call it until it is `Wait` or `Idle`, or a question's answer was not the one hoped for.
    #[must_use]
    pub fn next(&mut self, now_us: u64) -> Next {
        if let Some(waiting) = &self.waiting {
            let unread = waiting.unread.contains(&true);
            let unanswered = waiting.unanswered.contains(&true);
            if (unread || unanswered) && now_us < waiting.until_us {
                return match unread {
                    true => Next::Ask(self.questions()),
                    false => Next::Wait(waiting.until_us),
                };
            }
            self.stop_waiting(unread, unread || unanswered);
        }
        if let Some(resting) = &self.resting {
            if !resting.done && now_us < resting.until_us {
                return Next::AskForRest;
            }
            self.restless = !resting.done;
            self.counters.restless += u64::from(self.restless);
            return self.set(resting.time);
        }
        let input = match self.queue.pop_front() {
            None => return Next::Idle,
            Some(Queued::Time(time)) if !self.stirred => return self.set(time),
            Some(Queued::Time(time)) => {
                self.resting = Some(Resting {
                    time,
                    until_us: now_us + self.patience_us / if self.restless { REFUSED_SHARE } else { 1 },
                    done: false,
                });
                return Next::AskForRest;
            }
            Some(Queued::Input(input)) => input,
        };
        self.queue_bytes -= input.frame.bytes.len();
        self.stirred = true;
        if self.order == Order::Delivery {
            self.deliver(&input);
            return Next::Deliver(input.frame);
        }
        if let Some((of, received)) = self.deliver(&input) {
            let wants_answer = self.order == Order::Answer && input.pushed && of != Of::Listener;
            let refused = self.heard.get(&input.key).is_some_and(|heard| heard.refused);
            self.waiting = Some(Waiting {
                key: input.key,
                of,
                received,
                until_us: now_us + self.patience_us / if refused { REFUSED_SHARE } else { 1 },
                unread: vec![true; self.copies],
                unanswered: vec![wants_answer; self.copies],
            });
        }
        Next::Deliver(input.frame)
    }

    fn set(&mut self, time: AgreedTime) -> Next {
        self.resting = None;
        self.stirred = false;
        Next::Set(time)
    }

    fn questions(&self) -> Vec<Question> {
        let Some(waiting) = &self.waiting else {
            return Vec::new();
        };
        let unread = waiting.unread.iter().enumerate().filter(|(_, unread)| **unread);
        unread
            .map(|(copy, _)| Question {
                copy,
                key: waiting.key,
                of: waiting.of,
            })
            .collect()
    }

    fn stop_waiting(&mut self, unread: bool, impatient: bool) {
        let Some(waiting) = self.waiting.take() else {
            return;
        };
        self.counters.impatient += u64::from(impatient);
        if let Some(heard) = self.heard.get_mut(&waiting.key) {
            heard.refused = unread;
        }
    }
}

#[cfg(test)]
mod tests;
