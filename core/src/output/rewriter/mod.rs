//! What it decides: by which numbers the client and the VM here call the same bytes of a TCP connection.
//!
//! Both VMs get the same inputs, yet a connection that began since the last sync has another initial sequence number and
//! other timestamps in each. The client knows the primary's only. So the backup changes the client's acknowledgements
//! into its own VM's numbers, and if it takes over, its VM's numbers into the client's, for as long as they live.
//!
//! Flow: the last station of a frame into the VM, and the last of a frame from the VM to the client.
//!
//! Invariants:
//! 1. Translation in undoes translation out, for every number.
//! 2. A segment whose checksum was wrong is wrong afterwards, one whose checksum was right is right, and nothing is
//!    learnt from a wrong one.
//! 3. What a client sees of a connection's timestamps never goes back, whichever host speaks.
//! 4. A connection whose numbers are not known for certain is left alone: the comparison finds the difference, and a
//!    sync mends it.
//! 5. Both ends have closed a connection, but the client is not known to have heard that its own end was: what it repeats
//!    is acknowledged, even when the VM has forgotten the connection and says a reset.
//!
//! Source: RFC 9293, 7323 (PAWS), 2018, 1624. COLO's rewriter in QEMU moves sequence numbers, too; timestamps, SACK and
//! a translation that outlives the fail-over are ours. Not here: signed segments (TCP-MD5, TCP-AO), which no
//! translation can serve; when a frame leaves (`gate`).

mod connection;
mod ends;
mod quoted;
mod recent;
pub(crate) mod rewrite;
pub(crate) mod table;

use super::packet::{ACK, Direction, FlowKey, Parsed, Segment, UDP, parse};
use crate::agreed::Frame;
use crate::wire::WireError;
use bytes::Bytes;
use connection::{Connection, MARGIN_TICKS};
pub use ends::Ends;
use recent::Recent;
use rewrite::{Rewriter, intact};
use std::collections::VecDeque;

/// How many connections are followed; the longest unused is forgotten first.
pub const MOST_CONNECTIONS: usize = 65_536;

/// How many of them may be in their handshake or over: a flood of SYNs must not push out connections that live.
const MOST_PASSING: usize = 16_384;

/// How many connections that are over another host is told of, the newest: the VM's last acknowledgement may have got lost,
/// and its client waits for it; or the client's reset, and the VM goes on.
pub const MOST_OVER_TOLD: usize = 256;

/// Of how many connections it is remembered how far they were when the VM reset them; the oldest is forgotten first.
const MOST_ENDED: usize = 128;

/// How much a client can have said, at most, while a copy of its SYN was still under way.
const MOST_SINCE_SYN: u32 = 16 << 20;

/// A table of another host that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TableError {
    /// Another version of the layout.
    #[error("the table of connections is of another version: run the same version on all hosts")]
    Version,
    /// It does not make sense.
    #[error("the table of connections is damaged: {0}")]
    Damaged(#[from] WireError),
}

/// Why a connection may be forgotten early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Passing {
    Open,
    Over,
    /// The client's end was heard, and of the VM not a word: there may be no such connection.
    Ended,
}

/// The connections of one VM whose numbers may differ from the client's.
#[derive(Debug)]
pub struct SequenceRewriter {
    connections: Recent<Connection>,
    /// What the VM here had acknowledged of connections that it has reset: who speaks tells it to the other host.
    ended: Recent<u32>,
    passing: VecDeque<(FlowKey, Passing)>,
    /// What every connection without its own figure adds to timestamps: the take-overs so far.
    raise: u32,
}

impl Default for SequenceRewriter {
    fn default() -> Self {
        Self::new()
    }
}

impl SequenceRewriter {
    /// Nothing to translate.
    #[must_use]
    pub fn new() -> Self {
        Self {
            connections: Recent::new(MOST_CONNECTIONS),
            ended: Recent::new(MOST_ENDED),
            passing: VecDeque::new(),
            raise: 0,
        }
    }

    /// Whether no connection needs translation. After a take-over that is never so again: any connection that is not
    /// known here may be older, and its timestamps are raised.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.raise == 0 && self.connections.len() == 0
    }

    /// An agreed input on its way into the VM here: the client's numbers become the VM's. Learns what the client says.
    pub fn inbound(&mut self, frame: &Frame) -> Frame {
        self.hear(frame, false)
    }

    /// The same while another host speaks for the VM. Also of connections that are not known here yet, because neither VM has
    /// said anything since the last sync, it is learnt that the client has ended them: the VM here may come to think that the
    /// client knows that it was heard, where the other VM, which has not got it, is the one that the client hears.
    pub fn inbound_to_backup(&mut self, frame: &Frame) -> Frame {
        self.hear(frame, true)
    }

    fn hear(&mut self, frame: &Frame, is_backup: bool) -> Frame {
        let segment = match parse(frame, Direction::ToVm) {
            Parsed::Tcp(segment) => segment,
            Parsed::Datagram(error) if error.key.protocol != UDP => {
                return quoted::inbound(frame, &error, &self.connections);
            }
            _ => return frame.clone(),
        };
        let raise = self.raise;
        if is_backup && self.ends_unknown(frame, &segment) {
            self.connections.insert(segment.key, Connection::alike());
            self.pass(segment.key, Passing::Ended);
        }
        let known = self.connections.used(&segment.key);
        let Some(connection) = known.filter(|known| !known.superseded) else {
            return lowered(frame, &segment, raise);
        };
        if !intact(frame, &segment) {
            return frame.clone();
        }
        let was_over = connection.is_over();
        connection.learn(&segment, raise);
        let (frame, ack) = translated_in(frame, &segment, connection, raise);
        connection.heard(&segment, ack, raise);
        if connection.is_over() && !was_over {
            self.pass(segment.key, Passing::Over);
        }
        frame
    }

    /// What the VM here says while another host speaks for it: only learnt from.
    pub fn overheard(&mut self, frame: &Frame) {
        let Parsed::Tcp(segment) = parse(frame, Direction::FromVm) else {
            return;
        };
        let known = self.connections.get(&segment.key);
        if segment.rst() {
            self.ends(&segment);
        } else if segment.syn() && known.is_none_or(|known| known.isn != Some(segment.seq)) {
            if self.answers_stray(&segment) {
                return;
            }
            self.ended.remove(&segment.key);
            self.connections.insert(segment.key, Connection::opened(&segment));
            self.pass(segment.key, Passing::Open);
        } else if known.is_none() {
            self.connections.insert(segment.key, Connection::alike());
        }
        // What the client will echo is the other host's, but settled by the same rule at about the same time.
        if let Some(connection) = self.connections.used(&segment.key)
            && let Some(found) = segment.timestamps
        {
            connection.ticks_out(found.value, self.raise);
        }
        self.said(&segment);
    }

    /// The VM here, which speaks, has said this; it may be held for long before it leaves.
    pub fn will_leave(&mut self, frame: &Frame) {
        let Parsed::Tcp(segment) = parse(frame, Direction::FromVm) else {
            return;
        };
        if segment.rst() {
            self.ends(&segment);
        } else if segment.syn() {
            if !self.answers_stray(&segment) {
                self.ended.remove(&segment.key);
            }
            if let Some(known) = self.connections.used(&segment.key) {
                known.superseded |= known.isn != Some(segment.seq);
            }
        }
    }

    /// What the VM here says on its way to the client: its numbers become the client's. A reset that answers the repeated
    /// end of a connection that is closed becomes the acknowledgement.
    pub fn outbound(&mut self, frame: &Frame) -> Frame {
        self.tell(frame, false)
    }

    /// The same of a frame whose checksum the device that sends it completes, if `partial`.
    pub fn tell(&mut self, frame: &Frame, partial: bool) -> Frame {
        let Parsed::Tcp(segment) = parse(frame, Direction::FromVm) else {
            return frame.clone();
        };
        // A new connection: whoever it is with learns this host's numbers.
        if segment.syn()
            && let Some(known) = self.connections.get(&segment.key)
            && known.isn != Some(segment.seq)
        {
            self.connections.remove(&segment.key);
        }
        let raise = self.raise;
        let mut out = Rewriter::of(frame, &segment).partial(partial);
        let connection = self.connections.used(&segment.key);
        if let Some(delta) = connection.as_ref().and_then(|one| one.delta()) {
            out.set(segment.tcp + 4, segment.seq.wrapping_add(delta));
        }
        if let Some(ack) = connection.as_ref().and_then(|one| one.last_word(&segment)) {
            out.set(segment.tcp + 8, ack);
            out.set_flags(segment.tcp + 12, ACK);
        }
        if let Some(found) = segment.timestamps {
            let outside = match connection {
                Some(connection) => connection.ticks_out(found.value, raise),
                None => found.value.wrapping_add(raise),
            };
            out.set(found.at, outside);
        }
        self.said(&segment);
        out.finish()
    }

    /// Clients have heard a clock of this connection that was so many ticks ahead of what the VM here has said (a shadow socket's): from now on
    /// its timestamps are that much higher, whoever speaks for the VM. `ends`: which of its ends another has heard; one that is over is forgotten as others that are.
    pub fn lift(&mut self, key: FlowKey, ticks: u32, ends: Ends) {
        if self.connections.get(&key).is_none() {
            self.connections.insert(key, Connection::alike());
        }
        let raise = self.raise;
        if let Some(connection) = self.connections.used(&key) {
            if ticks != 0 {
                connection.ticks = Some(connection.ticks.unwrap_or(raise).wrapping_add(ticks));
            }
            let was_over = connection.is_over();
            connection.close(ends);
            if connection.is_over() && !was_over {
                self.pass(key, Passing::Over);
            }
        }
    }

    /// This host begins to speak for the VM: from now on, timestamps that clients see are above all that they saw.
    pub fn take_over(&mut self) {
        let raise = self.raise;
        self.connections
            .for_each(|connection| connection.take_over(raise, MARGIN_TICKS));
        self.raise = raise.wrapping_add(MARGIN_TICKS);
    }

    /// For the host that gets a copy of the VM here. Empty if every connection speaks the VM's own numbers.
    #[must_use]
    pub fn table(&self) -> Bytes {
        let worth = || self.connections.iter().filter(|(_, one)| one.is_worth_telling());
        let over = worth().filter(|(_, one)| one.is_over()).count();
        let mut forgotten = over.saturating_sub(MOST_OVER_TOLD);
        let mut told = worth()
            .filter(|(_, one)| {
                let forget = one.is_over() && forgotten > 0;
                forgotten -= usize::from(forget);
                !forget
            })
            .peekable();
        let ended = self.ended.iter().map(|(key, at)| (*key, Connection::ended(*at)));
        let ended: Vec<_> = ended.collect();
        if self.raise == 0 && told.peek().is_none() && ended.is_empty() {
            return Bytes::new();
        }
        table::encode(self.raise, told.chain(&ended).take(MOST_CONNECTIONS))
    }

    /// The VM here is a copy of the other host's now, so is the table. On an error nothing has changed.
    ///
    /// # Errors
    /// If the bytes are not what `table` writes.
    pub fn load(&mut self, table: &Bytes) -> Result<(), TableError> {
        let (raise, connections) = match table.is_empty() {
            true => (0, Vec::new()),
            false => table::decode(table)?,
        };
        *self = Self { raise, ..Self::new() };
        for (key, connection) in connections {
            if let Some(received) = connection.ended_at() {
                self.ended.insert(key, received);
                continue;
            }
            let passing = match (connection.is_open(), connection.is_over()) {
                (true, _) => Some(Passing::Open),
                (false, true) => Some(Passing::Over),
                (false, false) => None,
            };
            self.connections.insert(key, connection);
            if let Some(passing) = passing {
                self.pass(key, passing);
            }
        }
        Ok(())
    }

    /// The VM here said `segment`, of a connection that is known.
    fn said(&mut self, segment: &Segment) {
        let Some(connection) = self.connections.used(&segment.key) else {
            return;
        };
        let was_over = connection.is_over();
        if segment.rst() {
            // One that ends nothing repeats the numbers of a stray segment: there is nothing to learn from it.
            if connection.ends_with(segment) && !connection.is_closed() {
                self.connections.remove(&segment.key);
            }
            return;
        }
        connection.said(segment);
        if connection.is_over() && !was_over {
            self.pass(segment.key, Passing::Over);
        }
    }

    /// The VM here says a reset: if it ends a connection, what it had acknowledged of that is remembered.
    fn ends(&mut self, reset: &Segment) {
        let received = match self.connections.get(&reset.key) {
            Some(known) if known.ends_with(reset) => known.received(),
            Some(_) => None,
            // With the number 0 it answers a SYN, and refuses it.
            None => (reset.ack_flag() && reset.seq != 0).then_some(reset.ack),
        };
        if let Some(received) = received {
            self.ended.insert(reset.key, received);
        }
    }

    /// Whether this SYN-ACK of the VM here answers an old copy of the SYN of a connection that the client has, or had, and the
    /// VM has no more: what the client says next is of that one still, and tells nothing of the numbers of this one. It is left
    /// alone (invariant 4): the VM refuses what does not fit, and a client that still has the old one hears that.
    fn answers_stray(&self, syn_ack: &Segment) -> bool {
        let received = match self.connections.get(&syn_ack.key) {
            Some(known) => known.received(),
            None => self.ended.get(&syn_ack.key).copied(),
        };
        let is_old = |received: u32| received.wrapping_sub(syn_ack.ack) <= MOST_SINCE_SYN;
        syn_ack.ack_flag() && received.is_some_and(is_old)
    }

    /// Whether this is the client's end of a connection that both VMs number alike, if it exists.
    fn ends_unknown(&self, frame: &Frame, segment: &Segment) -> bool {
        let ends = segment.fin() && segment.ack_flag() && !segment.syn() && !segment.rst();
        ends && self.connections.get(&segment.key).is_none() && intact(frame, segment)
    }

    /// A connection in its handshake, or one that is over (the VM may not have got the client's last word, nor the client
    /// the VM's): kept until enough others are.
    fn pass(&mut self, key: FlowKey, why: Passing) {
        self.passing.push_back((key, why));
        if self.passing.len() <= MOST_PASSING {
            return;
        }
        if let Some((key, why)) = self.passing.pop_front()
            && let Some(known) = self.connections.get(&key)
            && match why {
                Passing::Open => known.is_open(),
                Passing::Over => known.is_over(),
                Passing::Ended => known.is_silent(),
            }
        {
            self.connections.remove(&key);
        }
    }
}

/// `frame` in the VM's numbers, and what it acknowledges in them, if they are known.
fn translated_in(
    frame: &Frame,
    segment: &Segment,
    connection: &mut Connection,
    raise: u32,
) -> (Frame, Option<u32>) {
    if !segment.ack_flag() {
        return (frame.clone(), None);
    }
    let mut out = Rewriter::of(frame, segment);
    let ack = connection
        .delta()
        .map(|delta| connection.clamped(segment.ack.wrapping_sub(delta)));
    if let (Some(delta), Some(ack)) = (connection.delta(), ack) {
        out.set(segment.tcp + 8, ack);
        for at in segment.sack.clone().step_by(4) {
            out.lower(at, delta);
        }
    }
    // Also where the numbers stay open: the VM repeated its SYN when the answer to it was in the VM's ring already, and had
    // passed here as one of an unknown connection. What the VM says has its timestamps raised.
    if let Some(found) = segment.timestamps
        && found.echo != 0
    {
        out.set(found.at + 4, connection.ticks_in(found.echo, raise));
    }
    (out.finish(), ack)
}

/// `frame` of a connection that only the common raise concerns.
fn lowered(frame: &Frame, segment: &Segment, raise: u32) -> Frame {
    let mut out = Rewriter::of(frame, segment);
    if let Some(found) = segment.timestamps
        && segment.ack_flag()
        && found.echo != 0
    {
        // Linux resets a connection whose SYN is answered with an echo from outside the time since. The VM said this SYN
        // before the last sync, so whether a take-over has raised what is echoed, or a primary whose clock is ahead has
        // said it again, nobody here knows; 0 is no echo at all.
        let echo = match segment.syn() {
            true => 0,
            false => found.echo.wrapping_sub(raise),
        };
        out.set(found.at + 4, echo);
    }
    out.finish()
}

#[cfg(test)]
mod tests;
