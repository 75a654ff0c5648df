//! What it decides: when the next input is delivered to the copies of a program.
//!
//! Flow: the clients' frames come in, in the agreed order; out come, one at a time, frames that every copy gets now, and
//! questions about the copies' sockets that the driver answers.
//!
//! An agreed order of *delivery* is no order of *processing*: a copy that is woken for one connection finds a second one
//! ready or not, by its host's timing, and `epoll` tells them in another order. So the next input waits until the last one was
//! read by every copy. It never waits for an *answer* unless that is asked for: a program may owe none. Where a program waits in
//! one `epoll`, inputs of several connections may be unread together (`batch`).
//!
//! Invariants:
//! 1. Every copy gets the same frames in the same order.
//! 2. At most one input is unread at any time, or one of each connection in a batch, unless a copy did not read within the patience; that
//!    is counted. In a batch that holds as far as quiet copies tell (`batch`): a connection that was always read is asked after now and then.
//! 3. What is no input to the program (an acknowledgement, a SYN, ARP) never waits: a copy that waits for room to write would
//!    otherwise wait for a frame that waits for it.
//! 4. (memory) What waits is bounded; what is beyond is lost, as on any network, and counted.
//! 5. The agreed time changes where it was agreed: behind the inputs before it, when every copy is done with them, and before the inputs
//!    behind it. So a copy that is still at an input sees the time that the other one saw.
//!
//! Source: what was measured is in docs/programs.md; sock_diag(7). Not here: how a socket is looked at; what a copy of a running
//! program needs to go on from here (`carried`); which connections are followed (`followed`); what a driver may look at (`standing`).

mod batch;
mod carried;
mod followed;
mod silence;
mod standing;

use crate::agreed::{AgreedTime, Frame};
use crate::output::packet::{Direction, FlowKey, PSH, Parsed, Segment, UDP, parse};
use batch::Batch;
use followed::Spare;
use silence::{Owing, Silence};
use std::collections::{BTreeMap, VecDeque};

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
    /// The same for a connection's next one; inputs of several connections may be unread together (`batch`).
    Batch,
    /// Until every copy has answered it, or is at rest without an answer (`silence`).
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
    /// Look whether every copy waits for inputs and has been told of all of them, and say so by [`Gate::are_quiet`], or by
    /// [`Gate::cannot_be_quiet`] where nobody can know; if not yet, look again a little later.
    AskForQuiet,
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
    /// Of these, the ones that were delivered while others were unread.
    pub together: u64,
    /// Of these, the ones that some copy did not read (or answer) within the patience.
    pub impatient: u64,
    /// Of these, the ones that were owed no answer: every copy was at rest without one.
    pub silent: u64,
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
    /// Which of these may be forgotten.
    spare: Spare,
    /// How many ranges of these lie behind holes.
    beyond: usize,
    queue: VecDeque<Queued>,
    queue_bytes: usize,
    /// What was delivered and is not known to be read, in this order; more than one only in a batch.
    waiting: VecDeque<Waiting>,
    batch: Batch,
    /// Whose answers are not waited for any more, and may come still.
    owing: Owing,
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
    /// In the order in which they began.
    number: u64,
    isn: u32,
    /// How far it was delivered, counted from behind its SYN.
    said_to: u64,
    /// What was delivered behind a hole, from and to, apart from each other: it counts when the hole is filled.
    beyond: BTreeMap<u64, u64>,
    /// The acknowledgement that ends the handshake has not come yet.
    opening: bool,
    /// Some copy did not read within the patience: that is not waited for again before it has.
    refused: bool,
    /// So many inputs in a row were found read by every copy, as far as [`batch::SURE`].
    was_read: u8,
    /// Inputs that were believed to be read, since it was last asked.
    believed: u8,
    /// The batch that it had its last input in.
    batch: u64,
    /// The client has ended it: it may be forgotten.
    ended: bool,
    /// Which copies may answer its last input still (`silence`); empty where none may.
    owed: Vec<bool>,
    /// How far each copy has spoken on it; empty before one has.
    spoken: Vec<Option<u32>>,
}

impl Heard {
    /// One that begins with this number of its client's.
    fn since(isn: u32, number: u64) -> Self {
        Self {
            number,
            isn,
            said_to: 0,
            beyond: BTreeMap::new(),
            opening: true,
            refused: false,
            was_read: 0,
            believed: 0,
            batch: 0,
            ended: false,
            owed: Vec::new(),
            spoken: Vec::new(),
        }
    }

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
    /// Nothing joins it before it is read.
    is_alone: bool,
    /// Which copies have not read it.
    unread: Vec<bool>,
    /// Which copies have not answered it.
    unanswered: Vec<bool>,
    /// No copy has said anything on its connection since.
    is_silent: bool,
    /// That it was read is believed: every copy was quiet.
    is_believed: bool,
    silence: Silence,
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
            spare: Spare::default(),
            beyond: 0,
            queue: VecDeque::new(),
            queue_bytes: 0,
            waiting: VecDeque::new(),
            batch: Batch::default(),
            owing: Owing::default(),
            resting: None,
            stirred: false,
            restless: false,
            counters: Counters::default(),
        }
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
            self.begins(segment);
            return None;
        }
        if segment.fin() || segment.rst() {
            self.ends(&segment.key);
        }
        if segment.rst() {
            return Some(End::Reset);
        }
        if !segment.is_pure_ack() {
            return Some(End::Read {
                from: segment.seq,
                to: segment.seq_end(),
            });
        }
        let heard = self.heard.get_mut(&segment.key)?;
        // Of one that was reset another host may know nothing any more.
        if heard.ended || !std::mem::take(&mut heard.opening) {
            return None;
        }
        self.spare.opened(heard.number);
        Some(End::Accepted)
    }

    /// Notes that every copy gets `input` now, and returns what it has to be read to; none where nothing of it is new.
    fn deliver(&mut self, input: &Input) -> Option<(Of, u64)> {
        let heard = self.heard.get_mut(&input.key);
        let read_to = match (input.ends, heard) {
            (End::Accepted, _) => Some((Of::Listener, 0)),
            (End::Datagram, _) => Some((Of::Datagrams, 0)),
            (End::Reset, heard) => {
                // Not one that has begun since it arrived.
                if heard.is_some_and(|heard| heard.ended) {
                    self.forget(&input.key);
                }
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

    /// What the driver found where `Next::Ask` asked this. Whether that is what was waited for.
    pub fn told(&mut self, question: &Question, found: Found) -> bool {
        let is_meant = |waiting: &&mut Waiting| waiting.key == question.key && waiting.of == question.of;
        let Some(waiting) = self.waiting.iter_mut().find(is_meant) else {
            return false;
        };
        let copy = question.copy;
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
        if !self.joins()
            && let Some(next) = self.wait_for_reads(now_us)
        {
            return next;
        }
        if let Some(resting) = &self.resting {
            if !resting.done && now_us < resting.until_us {
                return Next::AskForRest;
            }
            self.restless = !resting.done;
            self.owing.settled |= resting.done;
            self.counters.restless += u64::from(self.restless);
            return self.set(resting.time);
        }
        if let Some(next) = self.settles(now_us) {
            return next;
        }
        if self.wants_quiet(now_us) {
            return Next::AskForQuiet;
        }
        let is_alone = !self.joins();
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
        let delivered = self.deliver(&input);
        self.batch.delivered(&input.key, delivered.is_some());
        // Whoever is owed an answer may be woken by it, also by a reset, after which nothing waits.
        self.owing.settled = false;
        if let Some((of, received)) = delivered {
            let wants_answer = self.order == Order::Answer && input.pushed && of != Of::Listener;
            let number = self.batch.number;
            let refused = self.heard.get_mut(&input.key).is_some_and(|heard| {
                heard.batch = number;
                heard.refused
            });
            self.counters.together += u64::from(!self.waiting.is_empty());
            self.waiting.push_back(Waiting {
                key: input.key,
                of,
                received,
                until_us: now_us + self.patience_us / if refused { REFUSED_SHARE } else { 1 },
                is_alone,
                unread: vec![true; self.copies],
                unanswered: vec![wants_answer; self.copies],
                is_silent: true,
                is_believed: false,
                silence: Silence::since(now_us),
            });
        }
        Next::Deliver(input.frame)
    }

    /// While something that was delivered is unread, or not answered where that is waited for.
    fn wait_for_reads(&mut self, now_us: u64) -> Option<Next> {
        let until_us = self.waiting.back()?.until_us;
        let unread = self.waiting.iter().any(|waiting| waiting.unread.contains(&true));
        let unanswered = self
            .waiting
            .iter()
            .any(|waiting| waiting.unanswered.contains(&true));
        if (unread || unanswered) && now_us < until_us {
            return Some(match unread {
                true if self.is_quiet_asked_first(now_us, until_us) => Next::AskForQuiet,
                true => Next::Ask(self.questions()),
                // Only who waits for more asks whether it is owed.
                false if self.queue.is_empty() => Next::Wait(until_us),
                false => match self.waiting.back_mut()?.silence.next(now_us, until_us) {
                    Some(next) => next,
                    None => {
                        self.waits_for_another();
                        return None;
                    }
                },
            });
        }
        self.stop_waiting();
        None
    }

    fn set(&mut self, time: AgreedTime) -> Next {
        self.resting = None;
        self.stirred = false;
        Next::Set(time)
    }

    fn questions(&self) -> Vec<Question> {
        let of_one = |waiting: &Waiting| {
            let (key, of) = (waiting.key, waiting.of);
            let unread = waiting.unread.clone().into_iter().enumerate();
            unread
                .filter(|(_, unread)| *unread)
                .map(move |(copy, _)| Question { copy, key, of })
        };
        self.waiting.iter().flat_map(of_one).collect()
    }

    fn stop_waiting(&mut self) {
        for waiting in self.waiting.drain(..) {
            let unread = waiting.unread.contains(&true);
            self.owing
                .keep(&mut self.heard, &waiting.key, &waiting.unanswered);
            let was_impatient = unread || waiting.unanswered.contains(&true);
            self.counters.impatient += u64::from(was_impatient);
            // It was waited for as long as anything is.
            self.owing.settled |= was_impatient;
            if unread {
                self.batch.is_over();
            }
            if let Some(heard) = self.heard.get_mut(&waiting.key) {
                heard.refused = unread;
                if unread {
                    heard.was_read = 0;
                } else if waiting.of == Of::Connection && !waiting.is_believed {
                    heard.was_read = (heard.was_read + 1).min(batch::SURE);
                }
            }
        }
    }
}

#[cfg(test)]
mod epoll_tests;
#[cfg(test)]
mod tests;
