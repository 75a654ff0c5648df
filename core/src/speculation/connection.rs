//! One connection: what both ends have said and heard, in the numbers of TCP.
//!
//! Three parties share one stream of the VM's bytes: `una <= released <= nxt`, all sequence numbers. The client has acknowledged to
//! `una`; epochs up to `released` are safe; the VM has said up to `nxt`, and was told that all of it arrived. The shadow socket has been given
//! what lies before `written`, and has sent what lies before `shadow_nxt`.
//!
//! Invariants: those of `mod.rs`; `settle` asserts the order after every event.
//! Not here: what each segment does (`*_sent.rs`).

use super::carriage::Carriage;
use super::given_back::Track;
use super::handshake::Handshake;
use super::types::{Context, Link};
use super::write::{Bare, ECE};
use super::{Action, Flow, Socket};
use crate::offload::Offload;
use crate::output::packet::{ACK, RST, before};
use crate::units::Epoch;
use bytes::Bytes;
use std::collections::VecDeque;

/// How long a connection that is over is known, so that late words are understood.
pub(super) const LINGER_US: u64 = 120_000_000;

/// How long both ends of a connection for which nothing is kept may be silent until it is forgotten: longer than TCP's keep-alives wait.
const IDLE_US: u64 = 4 * 3_600_000_000;
/// The same where the VM has closed its end, the client has that, and does not close its own.
const HALF_CLOSED_US: u64 = 600_000_000;

/// Memory that a stream has had and does not need any more: a client could have each of its connections grow once.
pub(super) fn give_back(bytes: &mut VecDeque<u8>) {
    if bytes.capacity() > 64 << 10 && bytes.capacity() / 4 > bytes.len() {
        bytes.shrink_to(2 * bytes.len());
    }
}

/// The later of two sequence numbers.
pub(super) fn later(a: u32, b: u32) -> u32 {
    if before(a, b) { b } else { a }
}

/// Where the life of a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// After a take-over: the client is asked how far it is.
    Probing { tries: u8, asked_us: u64 },
    /// Acknowledged at once, sent by a shadow socket.
    Speculative,
    /// Held as before; only timestamps are kept from going back. `ended`: both ends are closed.
    Held { ended: bool },
    /// The peer is gone; the VM hears a reset to whatever it says.
    ResetByPeer,
    /// To be forgotten.
    Gone,
}

/// What the VM says of the client's bytes: it leaves as one, or not at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Pair {
    pub(super) ack: u32,
    /// As it stands in the header.
    pub(super) window: u16,
    /// TSecr.
    pub(super) echo: u32,
    /// The VM has heard of congestion on the client's way to it.
    pub(super) ece: bool,
}

/// A word without data that waits for its epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Word {
    Acknowledgement {
        pair: Pair,
        sack: Bytes,
    },
    /// Asks whether the client is there; nobody else may answer.
    KeepAlive,
}

/// The end of an epoch in this connection's life.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) epoch: Epoch,
    pub(super) nxt: u32,
    pub(super) fin: bool,
    pub(super) reset: bool,
    pub(super) pair: Pair,
    pub(super) stamp: u32,
    pub(super) words: Vec<Word>,
}

/// A reset that the VM has said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reset {
    No,
    Said,
    /// Its epoch is safe since then; it leaves after all that was said before it.
    Released(u64),
}

/// The byte before the first, which gives the shadow socket its first round-trip time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Dummy {
    /// The socket has not sent it.
    Unsent,
    /// It is acknowledged then, with this TSecr.
    Sent {
        at_us: u64,
        stamp: Option<u32>,
    },
    Over,
}

#[derive(Clone, Debug)]
pub(super) struct Connection {
    pub(super) flow: Flow,
    pub(super) nic: u8,
    pub(super) vlan: u32,
    pub(super) link: Link,
    /// Of the VM's last packet. Does not travel: the VM's next one says it again.
    pub(super) carriage: Carriage,
    pub(super) phase: Phase,
    pub(super) draining: bool,
    pub(super) socket: bool,
    /// The first sequence number of each side's bytes.
    pub(super) vm_start: u32,
    pub(super) peer_start: u32,
    pub(super) mss: u16,
    /// Window scales: the VM's and the peer's.
    pub(super) scale: Option<(u8, u8)>,
    pub(super) sack: bool,
    pub(super) stamps: bool,

    pub(super) una: u32,
    pub(super) released: u32,
    pub(super) nxt: u32,
    pub(super) written: u32,
    pub(super) shadow_nxt: u32,
    /// What may have been sent before a take-over by the one that is dead.
    pub(super) sent_before: u32,
    /// The bytes from `base` to `nxt`.
    pub(super) bytes: VecDeque<u8>,
    pub(super) base: u32,
    /// The VM's end of the stream comes at `nxt`.
    pub(super) fin: bool,
    pub(super) fin_released: bool,
    pub(super) fin_shut: bool,
    pub(super) fin_acked: bool,
    pub(super) reset: Reset,
    /// How far the VM may say, and how far it was told so.
    pub(super) edge: u32,
    pub(super) said_edge: u32,

    pub(super) said: Pair,
    pub(super) told: Pair,
    /// What the client was last sent of it.
    pub(super) heard: (u32, u16),
    pub(super) words: Vec<Word>,
    pub(super) marks: VecDeque<Mark>,
    pub(super) vm_stamp: u32,
    /// The VM's clock when it said what its client was told last.
    pub(super) told_stamp: u32,

    /// How far the VM was given the client's stream, and the newest TSval in it.
    pub(super) client_nxt: u32,
    pub(super) client_stamp: u32,
    pub(super) client_window: u16,
    /// Where the client's stream ends.
    pub(super) client_fin: Option<u32>,
    pub(super) shadow_acked: u32,
    /// The first byte that the shadow socket was to send, behind its dummy; none when it is long past, as numbers come again.
    pub(super) socket_start: Option<u32>,
    /// The last TSval that the client was sent, and the shadow socket's first.
    pub(super) last_stamp: u32,
    pub(super) first_stamp: u32,
    /// When the shadow socket's clock was at `last_stamp`, or later than that. Does not travel.
    pub(super) clock_us: u64,
    /// The client was asked by the VM whether it is there, or whether it has this connection.
    pub(super) asked: bool,
    pub(super) rtt_us: u64,
    pub(super) dummy: Dummy,
    /// Where it is while it is given back, if that is known, and how often it was. Does not travel.
    pub(super) track: Option<Track>,
    pub(super) times_given_back: u32,
    /// When it is forgotten.
    pub(super) forget_at: Option<u64>,
    /// When either end spoke last. Does not travel.
    pub(super) spoke_us: u64,
    /// `nxt` of the last cut that a backup was told of.
    pub(super) exported: u32,
    pub(super) dirty: bool,
    /// The VM has said something since the last cut.
    pub(super) unmarked: bool,
    pub(super) due: bool,
}

impl Connection {
    /// A handshake has ended. None if it was not whole.
    pub(super) fn begin(
        flow: Flow,
        handshake: &Handshake,
        to_vm: Option<Bytes>,
        window: Option<u16>,
        rtt_us: u64,
    ) -> Option<Self> {
        let (vm, peer) = handshake.offers()?;
        let stamps = vm.stamp.is_some() && peer.stamp.is_some();
        let (vm_start, peer_start) = (vm.isn.wrapping_add(1), peer.isn.wrapping_add(1));
        let mut link = handshake.link.clone();
        if let Some(header) = to_vm {
            link.to_vm = header;
        }
        let pair = Pair {
            ack: peer_start,
            // A SYN's window is not scaled.
            window: vm.window >> vm.scale.zip(peer.scale).map_or(0, |(vm, _)| vm),
            echo: peer.stamp.unwrap_or(0),
            ece: false,
        };
        let vm_stamp = vm.stamp.unwrap_or(0);
        Some(Self {
            flow,
            nic: handshake.nic,
            vlan: handshake.vlan,
            link,
            carriage: Carriage::default(),
            phase: Phase::Speculative,
            draining: false,
            socket: false,
            vm_start,
            peer_start,
            // What the VM offers says how large its own frames are: the network on the way may carry no more.
            mss: peer.mss.min(vm.mss),
            scale: vm.scale.zip(peer.scale),
            sack: vm.sack && peer.sack,
            stamps,
            una: vm_start,
            released: vm_start,
            nxt: vm_start,
            written: vm_start,
            shadow_nxt: vm_start,
            sent_before: vm_start,
            bytes: VecDeque::new(),
            base: vm_start,
            fin: false,
            fin_released: false,
            fin_shut: false,
            fin_acked: false,
            reset: Reset::No,
            // What the peer's SYN has opened the VM may use before it hears of more.
            edge: vm_start.wrapping_add(u32::from(peer.window)),
            said_edge: vm_start.wrapping_add(u32::from(peer.window)),
            said: pair,
            told: pair,
            heard: (peer_start, pair.window),
            words: Vec::new(),
            marks: VecDeque::new(),
            vm_stamp,
            told_stamp: vm_stamp,
            client_nxt: peer_start,
            client_stamp: peer.stamp.unwrap_or(0),
            client_window: window
                .unwrap_or(peer.window >> vm.scale.zip(peer.scale).map_or(0, |(_, peer)| peer)),
            client_fin: None,
            shadow_acked: vm_start,
            socket_start: None,
            last_stamp: vm_stamp,
            first_stamp: vm_stamp,
            clock_us: 0,
            asked: false,
            rtt_us,
            dummy: Dummy::Unsent,
            track: None,
            times_given_back: 0,
            forget_at: None,
            spoke_us: 0,
            exported: vm_start,
            dirty: true,
            unmarked: false,
            due: false,
        })
    }

    /// Asks for the shadow socket, at `una`.
    pub(super) fn build(&mut self, cx: &mut Context<'_>) {
        self.phase = Phase::Speculative;
        self.spoke_us = cx.now_us;
        self.drop_to(self.una);
        (self.written, self.shadow_nxt, self.shadow_acked) = (self.base, self.base, self.base);
        self.socket_start = Some(self.base);
        self.fin_shut = false;
        self.socket = !self.fin_acked;
        if self.fin_acked {
            // All has arrived, the end too: there is nothing to send.
            self.shadow_nxt = self.nxt.wrapping_add(1);
            self.due = true;
            return;
        }
        self.dummy = Dummy::Unsent;
        // Bit 0 asks a newer kernel for a clock in microseconds.
        self.first_stamp = self.last_stamp.wrapping_add(2) & !1;
        self.clock_us = cx.now_us;
        let window = u32::from(self.client_window) << self.scale.map_or(0, |(_, peer)| peer);
        cx.out.push(Action::Build(Box::new(Socket {
            flow: self.flow,
            start: self.base,
            peer_start: self.peer_start,
            mss: self.mss,
            scale: self.scale.map(|(vm, peer)| (peer, vm)),
            sack: self.sack,
            stamp: self.stamps.then_some(self.first_stamp),
            // From the dummy on: behind a closed window it would never be sent, and nothing after it.
            window: window.saturating_add(1),
        })));
        self.due = true;
        self.write(cx);
    }

    /// So long may both ends be silent, where it may never end properly; none: it ends by itself, or is alive.
    pub(super) fn patience_us(&self) -> Option<u64> {
        match self.phase {
            // It may live. Once it is forgotten its timestamps may go back.
            Phase::Held { ended: false } => Some(IDLE_US),
            Phase::Speculative if self.is_idle() => Some(IDLE_US),
            // The client has the VM's end, and says none.
            Phase::Probing { .. } | Phase::Speculative if self.fin_acked => Some(HALF_CLOSED_US),
            _ => None,
        }
    }

    /// Whether its client has all that the VM has said. Only events change it: a cut does not.
    pub(super) fn is_idle(&self) -> bool {
        self.una == self.nxt && !self.fin && self.reset == Reset::No
    }

    pub(super) fn kept(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it is known only so that late words are understood.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Held { ended: true } | Phase::ResetByPeer)
    }

    /// Whether there is a shadow socket.
    pub(super) fn has_socket(&self) -> bool {
        self.phase == Phase::Speculative && self.socket
    }

    /// Whether the client can be told something.
    pub(super) fn speaks(&self) -> bool {
        self.phase == Phase::Speculative
    }

    /// Asks for what may be written, and for the end after it.
    pub(super) fn write(&mut self, cx: &mut Context<'_>) {
        if !self.has_socket() {
            return;
        }
        if self.unsent().is_some() {
            cx.out.push(Action::Write(self.flow));
        } else if self.fin_released && !self.fin_shut && self.written == self.nxt {
            self.fin_shut = true;
            cx.out.push(Action::Shutdown(self.flow));
        }
    }

    /// The first part of what may be written.
    pub(super) fn unsent(&self) -> Option<&[u8]> {
        if !self.has_socket() || !before(self.written, self.released) {
            return None;
        }
        let from = self.written.wrapping_sub(self.base) as usize;
        let to = self.released.wrapping_sub(self.base) as usize;
        let (head, tail) = self.bytes.as_slices();
        match from < head.len() {
            true => Some(&head[from..to.min(head.len())]),
            false => Some(&tail[from - head.len()..to - head.len()]),
        }
    }

    pub(super) fn wrote(&mut self, cx: &mut Context<'_>, n: usize) {
        let may = self.released.wrapping_sub(self.written);
        self.written = self.written.wrapping_add((n as u32).min(may));
        self.drop_acknowledged();
        if !before(self.written, self.released) {
            self.write(cx);
        }
    }

    /// Forgets what the client has and the shadow socket does not need. A socket that was built before it was known how far the
    /// client is goes on from where it is, with bytes that the client has.
    pub(super) fn drop_acknowledged(&mut self) {
        match self.has_socket() && before(self.written, self.una) {
            true => self.drop_to(self.written),
            false => self.drop_to(self.una),
        }
    }

    fn drop_to(&mut self, to: u32) {
        let n = (to.wrapping_sub(self.base) as usize).min(self.bytes.len());
        self.bytes.drain(..n);
        self.base = to;
        give_back(&mut self.bytes);
    }

    /// What the client has, with the VM's end.
    pub(super) fn arrived(&self) -> u32 {
        self.una.wrapping_add(u32::from(self.fin_acked))
    }

    /// What the VM is told of its bytes: its end only when the client has it.
    pub(super) fn ack_for_vm(&self) -> u32 {
        self.nxt.wrapping_add(u32::from(self.fin && self.fin_acked))
    }

    /// The window that the VM is told: `una + limit` for ever growing, and what was promised before never taken back.
    pub(super) fn window_for_vm(&mut self, limit: u32) -> u16 {
        let shift = self.scale.map_or(0, |(_, peer)| peer);
        self.edge = later(self.edge, self.una.wrapping_add(limit));
        let ack = self.ack_for_vm();
        let room = if before(ack, self.edge) {
            self.edge.wrapping_sub(ack)
        } else {
            0
        };
        // Rounded up: a window that is cut to whole units would take a promise back.
        let units = (u64::from(room) + (1 << shift) - 1) >> shift;
        let units = units.min(0xffff) as u16;
        let said = ack.wrapping_add(u32::from(units) << shift);
        self.said_edge = later(self.said_edge, said);
        self.edge = later(self.edge, said);
        units
    }

    /// The most that the VM can be told is open.
    pub(super) fn widest(&self, limit: u32) -> u32 {
        limit.min(0xffff << self.scale.map_or(0, |(_, peer)| peer))
    }

    /// Says to the VM how much of its stream arrived.
    pub(super) fn acknowledge(&mut self, cx: &mut Context<'_>) {
        self.due = false;
        if matches!(self.phase, Phase::Probing { .. } | Phase::Speculative) {
            let window = self.window_for_vm(cx.limit);
            let frame = self.for_vm(self.client_place(), self.ack_for_vm(), ACK, window);
            cx.out.push(Action::ToVm(frame));
        }
    }

    /// Where the client's stream is for the VM, which may know more of it than came by here whole: fragments pass unread. What comes
    /// from before that the VM throws away as old, with the acknowledgement in it.
    pub(super) fn client_place(&self) -> u32 {
        later(self.client_nxt, self.said.ack)
    }

    pub(super) fn for_vm(&self, seq: u32, ack: u32, flags: u8, window: u16) -> crate::agreed::Frame {
        let bare = Bare {
            flags,
            stamps: self
                .stamps
                .then_some((later(self.client_stamp, self.said.echo), self.vm_stamp)),
            ..Bare::acknowledgement(seq, ack, window)
        };
        bare.to_vm(self.nic, &self.link, &self.flow)
    }

    /// A segment without data for the client, with what the VM was last safe in saying.
    pub(super) fn for_client(&self, seq: u32, pair: Pair, flags: u8, sack: &[u8]) -> Action {
        let bare = Bare {
            flags: flags | if pair.ece { ECE } else { 0 },
            stamps: self.stamps.then_some((self.last_stamp, pair.echo)),
            sack: sack.to_vec(),
            ..Bare::acknowledgement(seq, pair.ack, pair.window)
        };
        Action::ToClient(
            bare.to_peer(self.nic, &self.link, self.carriage, &self.flow),
            Offload::default(),
        )
    }

    /// Resets the VM's end, with the number that it takes.
    pub(super) fn reset_vm(&mut self, cx: &mut Context<'_>, seq: u32) {
        let frame = self.for_vm(seq, self.ack_for_vm(), RST | ACK, 0);
        cx.out.push(Action::ToVm(frame));
    }

    /// No client any more: ETIMEDOUT, or a socket that could not be. Where nothing is kept for the client that is no end of the connection.
    pub(super) fn fail(&mut self, cx: &mut Context<'_>) {
        if self.speaks() && self.is_idle() {
            self.go_on_held(cx);
        } else if matches!(self.phase, Phase::Probing { .. } | Phase::Speculative) {
            // What is kept for it comes no more, and a client that only listens would never learn that.
            let reset = self.for_client(self.arrived(), self.told, RST | ACK, &[]);
            cx.out.push(reset);
            if before(self.arrived(), self.shadow_nxt) {
                // It may have what was sent, and its acknowledgements were lost.
                let reset = self.for_client(self.shadow_nxt, self.told, RST | ACK, &[]);
                cx.out.push(reset);
            }
            self.reset_vm(cx, self.said.ack);
            self.close_socket(cx);
            self.lapse(cx, Phase::ResetByPeer);
        }
    }

    /// Another connection takes its place, or none.
    pub(super) fn end(&mut self, cx: &mut Context<'_>) {
        self.close_socket(cx);
        self.phase = Phase::Gone;
    }

    /// It makes room. Where it may live the VM hears what its client takes, and has its word from now on.
    pub(super) fn forget(&mut self, cx: &mut Context<'_>) {
        if self.speaks() && self.is_idle() {
            self.go_on_held(cx);
        }
        self.end(cx);
    }

    pub(super) fn drain(&mut self, _cx: &mut Context<'_>) {
        self.draining = true;
        self.dirty = true;
    }

    pub(super) fn close_socket(&mut self, cx: &mut Context<'_>) {
        if self.has_socket() {
            cx.out.push(Action::Destroy(self.flow));
        }
    }

    /// Goes on without a socket and without bytes.
    pub(super) fn lapse(&mut self, cx: &mut Context<'_>, phase: Phase) {
        self.phase = phase;
        (self.una, self.released, self.base) = (self.nxt, self.nxt, self.nxt);
        self.bytes = VecDeque::new();
        self.words.clear();
        self.marks.clear();
        self.unmarked = false;
        self.due = false;
        self.dirty = true;
        self.dummy = Dummy::Over;
        self.track = None;
        self.forget_at = Some(cx.now_us + LINGER_US);
        if self.is_lifted(cx) {
            self.lift(cx);
        }
    }

    /// After each event: what has come to its end does so.
    pub(super) fn settle(&mut self, cx: &mut Context<'_>) {
        if !matches!(self.phase, Phase::Probing { .. } | Phase::Speculative) {
            return;
        }
        debug_assert!(
            !before(self.nxt, self.released) && !before(self.released, self.una),
            "{self:?}"
        );
        let all_arrived = self.una == self.nxt && (!self.fin || self.fin_acked);
        if let Reset::Released(_) = self.reset
            && all_arrived
        {
            // What a VM says that has forgotten the connection is no news for a client that has all of it: it would lose what it has not read yet.
            match self.fin_acked && !before(self.said.ack, self.client_nxt) {
                true => self.end(cx),
                false => self.reset_client(cx),
            }
            return;
        }
        let client_ended = self
            .client_fin
            .is_some_and(|fin| !before(self.told.ack, fin.wrapping_add(1)));
        if self.fin_acked && client_ended && self.speaks() {
            if self.due {
                // The VM has to know that its end has arrived.
                self.acknowledge(cx);
            }
            self.close_socket(cx);
            self.lapse(cx, Phase::Held { ended: true });
        } else if (self.may_be_held(cx) || self.draining && self.has_socket() && !self.fin)
            && all_arrived
            && self.released == self.nxt
            && self.reset == Reset::No
        {
            // A reset that waits for its epoch is the last word, and leaves from here.
            self.go_on_held(cx);
        }
    }

    /// All that the VM said before its reset has arrived.
    pub(super) fn reset_client(&mut self, cx: &mut Context<'_>) {
        let reset = self.for_client(self.arrived(), self.told, RST | ACK, &[]);
        cx.out.push(reset);
        self.close_socket(cx);
        self.phase = Phase::Gone;
    }
}
