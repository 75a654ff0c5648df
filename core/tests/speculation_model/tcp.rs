//! A TCP with windows: one end of one connection, for clients and for the VM, whose whole state can be copied and put back.
//!
//! Positions in a stream are `u64`: 0 is the SYN, 1 the first byte, and the FIN comes after the last one. It follows RFC 9293 (windows,
//! probes, SND.WL1), 7323 (timestamps, PAWS) and 5961 as Linux does; it has no congestion control.

use super::random::Random;
use super::seg::{ACK, FIN, Offer, PSH, RST, SYN, Seg};
use std::collections::BTreeMap;

const FIRST_RETRY_US: u64 = 200_000;
const LAST_RETRY_US: u64 = 800_000;
/// What is on its way at most.
const FLIGHT: u64 = 40_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    SynSent,
    SynReceived,
    Open,
    Dead,
}

/// How one end behaves.
#[derive(Clone, Copy, Debug)]
pub struct Nature {
    pub iss: u32,
    pub tick_base: u32,
    pub stamps: bool,
    pub sack: bool,
    pub scale: Option<u8>,
    pub mss: u16,
    /// How many bytes it keeps for an application that does not read.
    pub room: u64,
    /// Its connection may be given back: then the window is the other end's own, and may be smaller.
    pub given_back: bool,
}

#[derive(Clone, Debug)]
pub struct Tcp {
    from_vm: bool,
    pub client: usize,
    pub nature: Nature,
    pub phase: Phase,
    irs: u32,
    pub out: Vec<u8>,
    pub closing: bool,
    pub una: u64,
    pub max: u64,
    /// How far the other end lets it say, and by which segment it did.
    edge: u64,
    said_by: (u64, u64),
    peer_scale: u8,
    mss: u64,
    pub incoming: Vec<u8>,
    pub received: u64,
    /// What the application has read.
    pub read: u64,
    later: BTreeMap<u64, Vec<u8>>,
    pub peer_fin: Option<u64>,
    recent: u32,
    acked_to: u64,
    said_edge: u64,
    retry_at: Option<u64>,
    retry_us: u64,
    /// What was said before its time was over is said again, as acknowledgements come.
    recover_to: u64,
    ack_at: Option<u64>,
    pub heard_reset: bool,
    /// What no TCP should ever hear.
    pub trouble: Option<String>,
}

fn position(number: u32, position: u64, of_position: u32) -> i64 {
    position as i64 + i64::from(number.wrapping_sub(of_position) as i32)
}

impl Tcp {
    fn new(from_vm: bool, client: usize, nature: Nature) -> Self {
        Self {
            from_vm,
            client,
            nature,
            phase: Phase::SynSent,
            irs: 0,
            out: vec![],
            closing: false,
            una: 0,
            max: 1,
            edge: 1,
            said_by: (0, 0),
            peer_scale: 0,
            mss: 536,
            incoming: vec![],
            received: 0,
            read: 0,
            later: BTreeMap::new(),
            peer_fin: None,
            recent: 0,
            acked_to: 0,
            said_edge: 0,
            retry_at: None,
            retry_us: FIRST_RETRY_US,
            recover_to: 0,
            ack_at: None,
            heard_reset: false,
            trouble: None,
        }
    }

    pub fn connect(from_vm: bool, client: usize, nature: Nature, now: u64) -> (Self, Seg) {
        let mut tcp = Self::new(from_vm, client, nature);
        tcp.retry_at = Some(now + tcp.retry_us);
        let syn = tcp.syn(now);
        (tcp, syn)
    }

    pub fn accept(syn: &Seg, nature: Nature, now: u64) -> (Self, Seg) {
        let mut tcp = Self::new(!syn.from_vm, syn.client, nature);
        tcp.phase = Phase::SynReceived;
        tcp.agree(syn);
        tcp.retry_at = Some(now + tcp.retry_us);
        let answer = tcp.syn(now);
        (tcp, answer)
    }

    /// What both offer counts.
    fn agree(&mut self, syn: &Seg) {
        let offer = syn.offer.clone().unwrap_or_default();
        self.irs = syn.seq;
        self.received = 1;
        self.read = 1;
        self.nature.stamps &= syn.ticks.is_some();
        self.nature.sack &= offer.sack;
        self.nature.scale = self.nature.scale.filter(|_| offer.scale.is_some());
        self.peer_scale = offer.scale.filter(|_| self.nature.scale.is_some()).unwrap_or(0);
        self.mss = u64::from(offer.mss.min(self.nature.mss)) - if self.nature.stamps { 12 } else { 0 };
        self.recent = syn.ticks.map_or(0, |(value, _)| value);
        self.edge = 1 + u64::from(syn.window);
    }

    pub fn end(&self) -> u64 {
        1 + self.out.len() as u64 + u64::from(self.closing)
    }

    pub fn is_done(&self) -> bool {
        self.closing && self.una == self.end() && self.peer_fin.is_some_and(|fin| self.received > fin)
    }

    fn ticks(&self, now: u64) -> u32 {
        self.nature.tick_base.wrapping_add((now / 1000) as u32)
    }

    fn number(&self, position: u64) -> u32 {
        self.nature.iss.wrapping_add(position as u32)
    }

    fn syn(&mut self, now: u64) -> Seg {
        let answers = self.phase == Phase::SynReceived;
        let mut seg = self.segment(0, SYN, vec![], now);
        seg.offer = Some(Offer {
            mss: self.nature.mss,
            scale: self.nature.scale,
            sack: self.nature.sack,
            extra: vec![],
        });
        seg.window = self.nature.room.min(0xffff) as u16;
        if !answers {
            (seg.ack, seg.flags) = (0, SYN);
        }
        seg
    }

    fn segment(&mut self, at: u64, flags: u8, payload: Vec<u8>, now: u64) -> Seg {
        self.acked_to = self.received;
        self.ack_at = None;
        let rcv = |position: u64| self.irs.wrapping_add(position as u32);
        let shift = self.nature.scale.unwrap_or(0);
        // What is free, but never less than was promised.
        let free = (self.nature.room + self.read).saturating_sub(self.received);
        let window = free.max(self.said_edge.saturating_sub(self.received)) >> shift;
        let window = window.min(0xffff);
        self.said_edge = self.said_edge.max(self.received + (window << shift));
        Seg {
            from_vm: self.from_vm,
            client: self.client,
            seq: self.number(at),
            ack: rcv(self.received),
            flags: flags | ACK,
            window: window as u16,
            ticks: self.nature.stamps.then(|| (self.ticks(now), self.recent)),
            sack: self
                .later
                .iter()
                .filter(|_| self.nature.sack && flags & (SYN | RST) == 0)
                .map(|(at, bytes)| (rcv(*at), rcv(at + bytes.len() as u64)))
                .take(2)
                .collect(),
            offer: None,
            payload,
        }
    }

    fn pure_ack(&mut self, now: u64) -> Seg {
        self.segment(self.max, 0, vec![], now)
    }

    /// The application reads all there is; a window that opens is told.
    pub fn read_all(&mut self, now: u64, said: &mut Vec<Seg>) {
        let small = self.said_edge.saturating_sub(self.received) < self.nature.room / 2;
        self.read = self.received;
        if small && self.phase == Phase::Open {
            said.push(self.pure_ack(now));
        }
    }

    pub fn timer(&self) -> Option<u64> {
        match self.phase {
            Phase::Dead => None,
            _ => self.retry_at.into_iter().chain(self.ack_at).min(),
        }
    }

    pub fn poll(&mut self, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        let due = self.retry_at.is_some_and(|at| at <= now);
        match self.phase {
            Phase::Dead => return,
            Phase::SynSent | Phase::SynReceived => {
                if due {
                    self.backs_off(now);
                    said.push(self.syn(now));
                }
                return;
            }
            Phase::Open => {}
        }
        if due {
            self.backs_off(now);
            if self.una < self.max {
                self.recover_to = self.max;
                self.say(self.una, now, random, said);
            } else if self.max < self.end() {
                // Is the window still closed?
                let probe = self.segment(self.una - 1, 0, vec![], now);
                said.push(probe);
            } else {
                self.retry_at = None;
            }
        }
        while self.max < self.end() && self.max - self.una < FLIGHT && self.max < self.edge {
            self.say(self.max, now, random, said);
        }
        if self.una < self.end() && self.retry_at.is_none() {
            self.retry_at = Some(now + self.retry_us);
        }
        if self.ack_at.is_some_and(|at| at <= now) {
            said.push(self.pure_ack(now));
        }
    }

    fn backs_off(&mut self, now: u64) {
        self.retry_us = (self.retry_us * 2).min(LAST_RETRY_US);
        self.retry_at = Some(now + self.retry_us);
    }

    fn say(&mut self, at: u64, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        let from = at as usize - 1;
        let open = self.edge.max(at + 1) - at;
        let most = if random.percent(10) {
            random.within(1, self.mss)
        } else {
            self.mss
        };
        let length = (most.min(open) as usize).min(self.out.len() - from);
        let payload = self.out[from..from + length].to_vec();
        let mut end = at + length as u64;
        let mut flags = if length > 0 { PSH } else { 0 };
        if self.closing && end + 1 == self.end() && (length == 0 || random.percent(50)) {
            flags |= FIN;
            end += 1;
        }
        self.max = self.max.max(end);
        said.push(self.segment(at, flags, payload, now));
    }

    pub fn receive(&mut self, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        match self.phase {
            Phase::Dead => {}
            Phase::SynSent => {
                if !seg.has(ACK) || seg.ack != self.number(1) {
                    return;
                }
                if seg.has(RST) {
                    (self.phase, self.heard_reset) = (Phase::Dead, true);
                } else if seg.has(SYN) {
                    self.agree(seg);
                    self.opens();
                    said.push(self.pure_ack(now));
                }
            }
            Phase::SynReceived => {
                if seg.has(SYN) {
                    said.push(self.syn(now));
                } else if seg.has(RST) {
                    if seg.seq == self.irs.wrapping_add(1) {
                        (self.phase, self.heard_reset) = (Phase::Dead, true);
                    }
                } else if seg.has(ACK) && seg.ack == self.number(1) {
                    self.opens();
                    self.open(seg, now, random, said);
                } else if seg.has(ACK) {
                    self.trouble = Some(format!(
                        "what it never said is acknowledged in a handshake: {seg:?}"
                    ));
                }
            }
            Phase::Open => self.open(seg, now, random, said),
        }
    }

    fn opens(&mut self) {
        self.phase = Phase::Open;
        self.una = 1;
        self.retry_at = None;
        self.retry_us = FIRST_RETRY_US;
    }

    fn open(&mut self, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        let expects = self.irs.wrapping_add(self.received as u32);
        let at = position(seg.seq, self.received, expects);
        let end = at + i64::from(seg.len());
        let old = self.nature.stamps
            && seg
                .ticks
                .is_some_and(|(value, _)| (value.wrapping_sub(self.recent) as i32) < 0);
        let right = self.said_edge.max(self.received + 1) as i64;
        let inside = end >= self.acked_to as i64 && at <= right;
        if seg.has(RST) {
            if at == self.received as i64 {
                (self.phase, self.heard_reset) = (Phase::Dead, true);
            } else if inside {
                said.push(self.pure_ack(now));
            }
            return;
        }
        if old || !inside || seg.has(SYN) {
            // Linux answers what lies outside of the window, and old data; old acknowledgements it does not.
            if seg.len() > 0 || !old {
                said.push(self.pure_ack(now));
            }
            return;
        }
        let ack = position(seg.ack, self.una, self.number(self.una));
        if !seg.has(ACK) || ack > self.max as i64 {
            if ack > self.max as i64 && self.from_vm {
                self.trouble = Some(format!(
                    "bytes acknowledged that were not said ({ack} > {}): {seg:?}",
                    self.max
                ));
            }
            return;
        }
        if let Some((value, _)) = seg.ticks.filter(|_| self.nature.stamps)
            && at <= self.acked_to as i64
        {
            self.recent = value;
        }
        // Late copies behind both ends pass as they are: nothing of the VM's is on its way any more.
        let waits = self.una < self.max;
        if self.from_vm && waits && !self.nature.given_back && !seg.sack.is_empty() {
            self.trouble = Some(format!("the VM hears of a client's SACK: {seg:?}"));
        }
        let ack = ack.max(0) as u64;
        if ack > self.una {
            self.una = ack;
            self.retry_us = FIRST_RETRY_US;
            self.retry_at = None;
            if self.una < self.recover_to {
                self.say(self.una, now, random, said);
            }
        }
        let by = (at.max(0) as u64, ack);
        if ack >= self.una && (by.0 > self.said_by.0 || by.0 == self.said_by.0 && by.1 >= self.said_by.1) {
            self.said_by = by;
            let edge = ack + (u64::from(seg.window) << self.peer_scale);
            let says = self.una < self.end() || !self.closing;
            if self.from_vm && edge < self.edge && ack > 1 && says && !self.nature.given_back {
                self.trouble = Some(format!(
                    "a window is taken back, from {} to {edge}: {seg:?}",
                    self.edge
                ));
            }
            self.edge = edge;
        }
        self.take(at, seg, now, said);
        self.poll(now, random, said);
    }

    fn take(&mut self, at: i64, seg: &Seg, now: u64, said: &mut Vec<Seg>) {
        if seg.len() == 0 {
            return;
        }
        if seg.has(FIN) {
            self.peer_fin = Some((at + i64::from(seg.len())) as u64 - 1);
        }
        let before = self.received;
        let skip = usize::try_from(self.received as i64 - at).unwrap_or(0);
        let at = at.max(self.received as i64) as u64;
        let room = (self.said_edge.max(at) - at) as usize;
        if let Some(new) = seg.payload.get(skip..).filter(|new| !new.is_empty()) {
            let new = &new[..new.len().min(room)];
            let known = self.later.entry(at).or_default();
            if known.len() < new.len() {
                *known = new.to_vec();
            }
        }
        while let Some(first) = self
            .later
            .first_entry()
            .filter(|first| *first.key() <= self.received)
        {
            let (at, bytes) = first.remove_entry();
            let known = (self.received - at) as usize;
            if let Some(new) = bytes.get(known..) {
                self.incoming.extend(new);
                self.received += new.len() as u64;
            }
        }
        if self.peer_fin == Some(self.received) {
            self.received += 1;
        }
        // In order: delayed, as Linux does. A gap or a repetition at once.
        if self.received == before
            || !self.later.is_empty()
            || seg.has(FIN)
            || self.received - self.acked_to > 2 * self.mss
        {
            said.push(self.pure_ack(now));
        } else if self.ack_at.is_none() {
            self.ack_at = Some(now + 40_000);
        }
    }
}

impl Tcp {
    /// Whether this state of the VM explains what a client is about to hear: its bytes, its end, and what it says was received.
    pub fn explains(&self, seg: &Seg) -> Option<&'static str> {
        if self.phase == Phase::SynSent {
            return (!seg.has(SYN)).then_some("A: more than a SYN of a connection that is not open");
        }
        let at = position(seg.seq, self.una, self.number(self.una));
        let end = at + i64::from(seg.len());
        if end > self.max as i64 {
            return Some("A: beyond what the safe state has said");
        }
        for (n, byte) in seg.payload.iter().enumerate() {
            let place = at + n as i64 - 1;
            if place < 0 || self.out.get(place as usize) != Some(byte) {
                return Some("A: a byte that the safe state has not said");
            }
        }
        if seg.has(FIN) && !(self.closing && end == self.end() as i64) {
            return Some("A: an end that the safe state has not said");
        }
        let ack = position(
            seg.ack,
            self.received,
            self.irs.wrapping_add(self.received as u32),
        );
        (seg.has(ACK) && ack > self.received as i64).then_some("B: what the safe state has not received")
    }
}
