//! What it decides: speculative communication. The VM's TCP data is acknowledged to it at once and kept; it is sent to the
//! client when the VM's state that said it is safe, by a *shadow socket*: a TCP of the host's own kernel that speaks with
//! the VM's address and numbers, and retransmits, paces and probes as Linux does.
//!
//! Flow: segments of the VM, of the client and of the shadow socket, and the ends of epochs, come in; `Action`s go out, in the
//! order in which they are to be done. `vm_sent.rs`, `client_sent.rs` and `socket_sent.rs` have one way each, `opening.rs` and
//! `place.rs` whose connection a segment is of, `carriage.rs` what its packets ask of the network, `clock.rs` their timestamps, `given_back.rs` how one that was held comes back, `hold.rs` how all are, `epochs.rs` what a cut and its release do, `timers.rs` what waits for the clock, `state.rs`
//! what travels with a checkpoint, `replica.rs` what a backup makes of it. A driver owns the sockets and does as it is told.
//!
//! Invariants:
//! 1. No byte of the VM leaves before the epoch that said it is released (`released`), whatever the shadow socket sends.
//! 2. A client is told that its bytes are received only in the words of a released epoch (`told`).
//! 3. What the VM was told is acknowledged is kept here, and in the checkpoint, until the client has acknowledged it.
//! 4. The window that the VM was told is never taken back, and nothing beyond it is kept: memory is bounded by `Limits`.
//! 5. The VM's FIN is acknowledged when the client has done so, and a VM's reset leaves when all before it has arrived.
//! 6. Where the backup's VM runs all connections are held (`hold_all`): nothing is kept here that a running copy would lack.
//! 7. What is not known here passes as if this room was not there: `Action::Hold` for the VM's, `Action::ToVm` unchanged.
//!
//! Source: Gerofi and Ishikawa, VEE'12; RFC 9293, 7323, 2018, 3168, 5961. Not here: sockets, the clock, when epochs end, and the
//! translation of a new copy's numbers (`output::rewriter`), which is on the clients' side of this room: all numbers here are the VM's.

mod carriage;
mod client_sent;
mod clock;
mod connection;
mod epochs;
mod given_back;
mod handshake;
mod hold;
mod opening;
mod place;
mod replica;
mod socket_sent;
mod state;
mod timers;
mod types;
mod vm_sent;
mod write;

pub use replica::Replica;
pub use types::{Action, Counts, Flow, Limits, Socket};

use crate::agreed::Frame;
use crate::offload::Offload;
use crate::output::packet::{Direction, FlowKey, Parsed, Segment, parse, u16_at};
use crate::output::rewriter::rewrite::intact;
use connection::{Connection, Phase};
use handshake::Handshake;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use types::Context;

/// A connection that keeps no more than this may use the quarter of the total that others leave alone.
const FEW_BYTES: usize = 64 << 10;
/// The window that a connection has however little is left: it has to get on.
const LEAST_WINDOW_BYTES: usize = 4 << 10;

/// Of the total, where no more than this part of it is left connections are held as before.
const SCARCE: usize = 16;

/// A connection that may never end makes room for another one after this silence.
const SILENT_US: u64 = 60_000_000;
/// Where nobody makes room, it is not looked for again before this time: that is a look at all connections, for each new one.
const FULL_US: u64 = 1_000_000;

/// All connections of one VM.
#[derive(Debug)]
pub struct Speculation {
    limits: Limits,
    connections: BTreeMap<Flow, Connection>,
    handshakes: BTreeMap<Flow, Handshake>,
    /// The handshakes' stamps, oldest first.
    ages: VecDeque<(u64, Flow)>,
    next_stamp: u64,
    /// What has changed since the last cut.
    dirty: BTreeSet<Flow>,
    /// Flows with a mark, by epoch.
    marked: VecDeque<(crate::units::Epoch, Vec<Flow>)>,
    /// Of whom a backup may hear ahead of the next cut.
    much_untold: BTreeSet<Flow>,
    /// How many bytes went ahead of the next cut.
    told_ahead: usize,
    /// Who has an acknowledgement to get.
    due: BTreeSet<Flow>,
    timers: BTreeSet<(u64, Flow)>,
    /// Whose VM has said something since the last cut.
    unmarked: BTreeSet<Flow>,
    kept_bytes: usize,
    /// How many connections keep something.
    keeping: usize,
    /// Nobody makes room before that, unless a connection ends.
    full_until_us: u64,
    /// No connection is to be ahead of its client.
    holds_all: bool,
    /// Connections that are not held, and not over.
    open: usize,
    counts: Counts,
}

impl Speculation {
    /// Without any connection.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits: Limits {
                window_bytes: limits.window_bytes.clamp(64 << 10, 256 << 20),
                ..limits
            },
            connections: BTreeMap::new(),
            handshakes: BTreeMap::new(),
            ages: VecDeque::new(),
            next_stamp: 0,
            dirty: BTreeSet::new(),
            marked: VecDeque::new(),
            much_untold: BTreeSet::new(),
            told_ahead: 0,
            due: BTreeSet::new(),
            timers: BTreeSet::new(),
            unmarked: BTreeSet::new(),
            kept_bytes: 0,
            keeping: 0,
            full_until_us: 0,
            holds_all: false,
            open: 0,
            counts: Counts::default(),
        }
    }

    /// What it did.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How many connections are known, and how many bytes of them are kept.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.connections.len(), self.kept_bytes)
    }

    /// Whether the VM has said something in the running epoch that waits for its end.
    #[must_use]
    pub fn waits(&self) -> bool {
        !self.unmarked.is_empty()
    }

    /// Handshakes in progress that are remembered.
    #[must_use]
    pub fn handshakes(&self) -> usize {
        self.handshakes.len()
    }

    /// The VM sent `frame`.
    pub fn vm_sent(&mut self, now_us: u64, frame: Frame, out: &mut Vec<Action>) {
        let Some(segment) = tcp(&frame, Direction::FromVm) else {
            out.push(Action::Hold(frame));
            return;
        };
        let flow = Flow::of(&segment.key);
        if segment.syn() {
            self.opens_anew(now_us, flow, &segment, out);
            self.heard_syn(flow, &frame, &segment, true);
            out.push(Action::Hold(frame));
            return;
        }
        // A new handshake over an older connection's end takes its place.
        if self.begins(flow, &segment, true) {
            self.begin(now_us, flow, None, out);
        }
        if !self.is_here(&flow, &frame, &segment, true) {
            self.ticks(&flow, &segment);
            out.push(Action::Hold(frame));
            return;
        }
        self.with(now_us, flow, out, |connection, cx| {
            connection.vm_sent(cx, &frame, &segment)
        });
    }

    /// The client sent `frame`.
    pub fn client_sent(&mut self, now_us: u64, frame: Frame, out: &mut Vec<Action>) {
        let Some(segment) = tcp(&frame, Direction::ToVm) else {
            self.too_big(&frame, out);
            out.push(Action::ToVm(frame));
            return;
        };
        let flow = Flow::of(&segment.key);
        if segment.syn() {
            self.heard_syn(flow, &frame, &segment, false);
            self.round_trip(now_us, &flow);
            out.push(Action::ToVm(frame));
            return;
        }
        // A new handshake over an older connection's end takes its place.
        let begins = self.begins(flow, &segment, false);
        if begins {
            self.begin(now_us, flow, Some((&frame, &segment)), out);
        }
        if !self.is_here(&flow, &frame, &segment, false) {
            out.push(Action::ToVm(frame));
            return;
        }
        self.with(now_us, flow, out, |connection, cx| {
            connection.client_sent(cx, &frame, &segment, begins)
        });
    }

    /// The shadow sockets sent a packet, written behind an empty Ethernet header of 14 bytes that names IPv4 or IPv6; `offload`
    /// counts from that header.
    pub fn socket_sent(&mut self, now_us: u64, frame: &Frame, offload: Offload, out: &mut Vec<Action>) {
        let Parsed::Tcp(segment) = parse(frame, Direction::FromVm) else {
            return;
        };
        let flow = Flow::of(&segment.key);
        if self.connections.contains_key(&flow) {
            self.with(now_us, flow, out, |connection, cx| {
                connection.socket_sent(cx, frame, &segment, offload)
            });
        }
    }

    /// A frame that was held leaves: from now on its answer may come.
    pub fn leaves(&mut self, now_us: u64, frame: &Frame) {
        let Parsed::Tcp(segment) = parse(frame, Direction::FromVm) else {
            return;
        };
        let flow = Flow::of(&segment.key);
        if segment.syn() {
            if let Some(handshake) = self.handshakes.get_mut(&flow) {
                // A repeated one would make the round trip look short.
                handshake.left_us.get_or_insert(now_us);
            }
        } else if self.is_known(&flow, &segment.key)
            && let Some(connection) = self.connections.get_mut(&flow)
        {
            connection.left(&segment);
        }
    }

    /// A batch of frames is over: each connection gets at most one acknowledgement for it.
    pub fn flush(&mut self, now_us: u64, out: &mut Vec<Action>) {
        for flow in std::mem::take(&mut self.due) {
            self.with(now_us, flow, out, Connection::acknowledge);
        }
    }

    /// Bytes that may be written to the socket of `flow` now; none if there are none.
    #[must_use]
    pub fn unsent(&self, flow: &Flow) -> Option<&[u8]> {
        self.connections.get(flow)?.unsent()
    }

    /// `n` of these bytes were written.
    pub fn wrote(&mut self, now_us: u64, flow: Flow, n: usize, out: &mut Vec<Action>) {
        self.with(now_us, flow, out, |connection, cx| connection.wrote(cx, n));
    }

    /// The socket of `flow` could not be built, or gave up (ETIMEDOUT): both ends hear a reset. Where nothing is kept for the client the connection
    /// goes on, held as before.
    pub fn failed(&mut self, now_us: u64, flow: Flow, out: &mut Vec<Action>) {
        self.counts.failed += u64::from(self.connections.contains_key(&flow));
        self.with(now_us, flow, out, Connection::fail);
    }

    /// The VM's words are held as before: connections are given back as soon as their client has all that was kept. They come back after a while
    /// ([`Limits::again_us`]).
    pub fn drain(&mut self, now_us: u64, out: &mut Vec<Action>) {
        let handshakes: Vec<Flow> = self.handshakes.keys().copied().collect();
        handshakes.iter().for_each(|flow| self.forget_handshake(flow));
        let flows: Vec<Flow> = self.connections.keys().copied().collect();
        for flow in flows {
            self.with(now_us, flow, out, Connection::drain);
        }
    }

    fn is_known(&self, flow: &Flow, key: &FlowKey) -> bool {
        self.connections
            .get(flow)
            .is_some_and(|known| known.nic == key.nic && known.vlan == key.vlan)
    }

    /// Lets the connection take an event, and notes what it has changed.
    fn with(
        &mut self,
        now_us: u64,
        flow: Flow,
        out: &mut Vec<Action>,
        event: impl FnOnce(&mut Connection, &mut Context<'_>),
    ) {
        let scarce = self.is_scarce();
        let Some(connection) = self.connections.get_mut(&flow) else {
            return;
        };
        let (before, timer, was_open) = (connection.kept(), connection.timer(), connection.is_open());
        // Those that keep something share what there is: none gets more than twice its part. Of many connections most are idle, or over.
        let others = self.keeping - usize::from(before > 0);
        let part = self.limits.total_bytes / (others + 1) * 2;
        // What is promised to an idle one is not taken back when many begin at once.
        let part = match before {
            0 => part.min(self.limits.total_bytes / 8),
            _ => part,
        };
        // Nor more than half of what the others leave, so that there is always something left. What counts is what is kept, and not what is
        // promised: most connections do not use their windows, and those that come later would get none.
        let total = self.limits.total_bytes;
        let half_left = total.saturating_sub(self.kept_bytes.saturating_sub(before)) / 2;
        let half_left = half_left.max(LEAST_WINDOW_BYTES);
        let limit = part.clamp(FEW_BYTES, self.limits.window_bytes as usize);
        let limit = limit.min(half_left) as u32;
        let mut cx = Context {
            now_us,
            again_us: self.limits.again_us,
            translated: self.limits.translated,
            holds_all: self.holds_all,
            limit,
            room: total.saturating_sub(self.kept_bytes),
            reserve: total / 4,
            few: half_left.min(FEW_BYTES),
            scarce,
            dropped: 0,
            out,
        };
        event(connection, &mut cx);
        connection.settle(&mut cx);
        self.counts.dropped += cx.dropped;
        self.kept_bytes = self.kept_bytes + connection.kept() - before;
        self.keeping = others + usize::from(connection.kept() > 0);
        self.open = self.open + usize::from(connection.is_open()) - usize::from(was_open);
        if std::mem::take(&mut connection.dirty) {
            self.dirty.insert(flow);
        }
        if connection.due {
            self.due.insert(flow);
        }
        if connection.untold() >= self.limits.ahead_bytes as usize {
            self.much_untold.insert(flow);
        }
        match connection.unmarked {
            true => self.unmarked.insert(flow),
            false => self.unmarked.remove(&flow),
        };
        let gone = connection.phase == Phase::Gone;
        if connection.is_over() {
            self.full_until_us = 0;
        }
        if timer != connection.timer() || gone {
            timer.map(|at| self.timers.remove(&(at, flow)));
            if let Some(at) = connection.timer().filter(|_| !gone) {
                self.timers.insert((at, flow));
            }
        }
        if gone {
            self.kept_bytes -= connection.kept();
            self.keeping = others;
            self.connections.remove(&flow);
            self.unmarked.remove(&flow);
            self.much_untold.remove(&flow);
            self.dirty.insert(flow);
            // A handshake in its place may be forgotten; the backup has to hear of this end all the same.
            if let Some(handshake) = self.handshakes.get_mut(&flow) {
                handshake.exported = true;
            }
        }
    }

    /// Whether what clients do not take leaves so little that a new connection is better off held as before.
    fn is_scarce(&self) -> bool {
        let total = self.limits.total_bytes;
        total.saturating_sub(self.kept_bytes) < total / SCARCE
    }

    fn end(&mut self, now_us: u64, flow: Flow, out: &mut Vec<Action>) {
        self.with(now_us, flow, out, Connection::end);
    }

    /// Makes room: a connection that is over is only known so that late words of it are understood. Then the longest silent of those that
    /// may never end.
    fn forget_an_ended_one(&mut self, now_us: u64, out: &mut Vec<Action>) -> bool {
        if now_us < self.full_until_us {
            return false;
        }
        let soon = now_us + connection::LINGER_US;
        let ended = self
            .timers
            .iter()
            .take_while(|(at, _)| *at <= soon)
            .find(|(_, flow)| {
                let known = self.connections.get(flow);
                known.is_some_and(Connection::is_over)
            });
        let silent = || {
            let silent = self
                .connections
                .iter()
                .filter(|(_, known)| known.patience_us().is_some() && known.spoke_us + SILENT_US <= now_us)
                .filter(|(_, known)| known.fin_acked || known.may_speak_itself(now_us));
            silent.min_by_key(|(_, known)| known.spoke_us)
        };
        let Some(flow) = ended
            .map(|(_, flow)| *flow)
            .or_else(|| silent().map(|(flow, _)| *flow))
        else {
            self.full_until_us = now_us + FULL_US;
            return false;
        };
        self.with(now_us, flow, out, Connection::forget);
        true
    }

    /// ICMP's "fragmentation needed" and ICMPv6's "packet too big" are for who cuts the segments: the shadow socket.
    fn too_big(&self, frame: &Frame, out: &mut Vec<Action>) {
        let Parsed::Datagram(datagram) = parse(frame, Direction::ToVm) else {
            return;
        };
        // Type and code, after the checksum four bytes with the MTU, then the packet.
        let quoted = (datagram.payload.start + 4..datagram.payload.end).clone();
        let Some(quoted) = frame.bytes.get(quoted) else {
            return;
        };
        let (header, from, ports) = match (datagram.kind, quoted.first()) {
            (0x0304, Some(first)) => (usize::from(first & 0xf) * 4, 12..20, 4),
            (0x0200, Some(_)) => (40, 8..40, 16),
            _ => return,
        };
        let (Some(addresses), Some(vm_port), Some(peer_port)) = (
            quoted.get(from),
            u16_at(quoted, header),
            u16_at(quoted, header + 2),
        ) else {
            return;
        };
        let address = |at: usize| match ports {
            4 => <[u8; 4]>::try_from(&addresses[at..at + 4]).ok().map(Into::into),
            _ => <[u8; 16]>::try_from(&addresses[at..at + 16]).ok().map(Into::into),
        };
        if let (Some(vm), Some(peer)) = (address(0), address(ports)) {
            let flow = Flow {
                vm: SocketAddr::new(vm, vm_port),
                peer: SocketAddr::new(peer, peer_port),
            };
            if self.connections.contains_key(&flow) {
                let packet = frame.bytes.slice(write::ip_at(&frame.bytes)..);
                out.push(Action::ToShadow(packet));
            }
        }
    }
}

/// The TCP segment in `frame`, if its checksum is right: of others nothing is learnt.
fn tcp(frame: &Frame, direction: Direction) -> Option<Segment> {
    match parse(frame, direction) {
        Parsed::Tcp(segment) if intact(frame, &segment) => Some(segment),
        _ => None,
    }
}
