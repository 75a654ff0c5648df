//! A small but honest TCP: one end of one connection, the same for clients and for guests.
//!
//! Positions in a stream are `u64`: 0 is the SYN, 1 the first byte, and the FIN comes after the last one. It follows
//! RFC 9293, 7323 (timestamps, PAWS), 2018 (SACK) and 5961 as Linux does; what it does not know is congestion and
//! windows. It forgets nothing: what it said and heard is the history that the checks ask for.

use super::frame::{ACK, FIN, PSH, RST, SYN, Seg};
use super::random::Random;
use std::collections::BTreeMap;

const MOST_UNACKNOWLEDGED: u64 = 3000;
const FIRST_RETRY_US: u64 = 200_000;
const LAST_RETRY_US: u64 = 1_000_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    SynSent,
    SynReceived,
    Open,
    Dead,
}

#[derive(Clone, Debug)]
pub struct Tcp {
    seg: Seg,
    pub phase: Phase,
    pub iss: u32,
    pub irs: u32,
    pub out: Vec<u8>,
    pub closing: bool,
    /// Acknowledged by the other end; said; in the positions of what is said here.
    pub una: u64,
    pub max: u64,
    pub incoming: Vec<u8>,
    /// Heard without a gap, in the positions of the other end.
    pub received: u64,
    later: BTreeMap<u64, Vec<u8>>,
    pub peer_fin: Option<u64>,
    pub passive_close: bool,
    pub said_reset: bool,
    pub heard_reset: bool,
    stamps: bool,
    sack: bool,
    tick_base: u32,
    recent: u32,
    acked_to: u64,
    retry_at: Option<u64>,
    retry_us: u64,
    ack_at: Option<u64>,
    recover_to: u64,
    repeated_acks: u32,
    sacked: Vec<(u64, u64)>,
    /// Segments that PAWS made it throw away.
    pub paws: u32,
    /// By how many ticks an echo was ahead of what was said, since somebody looked.
    pub echo_ahead: i32,
    /// What no TCP should ever hear.
    pub trouble: Option<String>,
}

/// Where `number` lies, near `position`, whose number is known.
fn position(number: u32, position: u64, of_position: u32) -> i64 {
    position as i64 + i64::from(number.wrapping_sub(of_position) as i32)
}

impl Tcp {
    fn new(from_vm: bool, client: usize, iss: u32, tick_base: u32) -> Self {
        let seg = Seg {
            from_vm,
            client,
            ..Seg::default()
        };
        Self {
            seg,
            phase: Phase::SynSent,
            iss,
            irs: 0,
            out: vec![],
            closing: false,
            una: 0,
            max: 1,
            incoming: vec![],
            received: 0,
            later: BTreeMap::new(),
            peer_fin: None,
            passive_close: false,
            said_reset: false,
            heard_reset: false,
            stamps: false,
            sack: false,
            tick_base,
            recent: 0,
            acked_to: 0,
            retry_at: None,
            retry_us: FIRST_RETRY_US,
            ack_at: None,
            recover_to: 0,
            repeated_acks: 0,
            sacked: vec![],
            paws: 0,
            echo_ahead: 0,
            trouble: None,
        }
    }

    /// A client's, and its SYN.
    pub fn connect(client: usize, iss: u32, tick_base: u32, options: (bool, bool), now: u64) -> (Self, Seg) {
        let mut tcp = Self::new(false, client, iss, tick_base);
        (tcp.stamps, tcp.sack) = options;
        tcp.retry_at = Some(now + tcp.retry_us);
        let syn = tcp.syn(now);
        (tcp, syn)
    }

    /// A guest's, and its SYN-ACK.
    pub fn accept(syn: &Seg, iss: u32, tick_base: u32, now: u64) -> (Self, Seg) {
        let mut tcp = Self::new(true, syn.client, iss, tick_base);
        tcp.phase = Phase::SynReceived;
        tcp.irs = syn.seq;
        tcp.received = 1;
        tcp.stamps = syn.ticks.is_some();
        tcp.sack = syn.sack_permitted;
        tcp.recent = syn.ticks.map_or(0, |(value, _)| value);
        tcp.retry_at = Some(now + tcp.retry_us);
        let syn = tcp.syn(now);
        (tcp, syn)
    }

    pub fn client(&self) -> usize {
        self.seg.client
    }

    /// The position after its last, FIN included.
    pub fn end(&self) -> u64 {
        1 + self.out.len() as u64 + u64::from(self.closing)
    }

    /// Whether both ends have said and heard that it is over.
    pub fn is_done(&self) -> bool {
        self.closing && self.una == self.end() && self.peer_fin.is_some_and(|fin| self.received > fin)
    }

    pub fn is_dead(&self) -> bool {
        self.phase == Phase::Dead
    }

    fn ticks(&self, now: u64) -> u32 {
        self.tick_base.wrapping_add((now / 1000) as u32)
    }

    fn number(&self, position: u64) -> u32 {
        self.iss.wrapping_add(position as u32)
    }

    fn syn(&mut self, now: u64) -> Seg {
        let answers = self.phase == Phase::SynReceived;
        let mut seg = self.segment(0, SYN, vec![], now);
        seg.sack_permitted = self.sack;
        if !answers {
            (seg.ack, seg.flags) = (0, SYN);
        }
        seg
    }

    fn segment(&mut self, at: u64, flags: u8, payload: Vec<u8>, now: u64) -> Seg {
        self.acked_to = self.received;
        self.ack_at = None;
        let rcv = |position: u64| self.irs.wrapping_add(position as u32);
        let blocks = self
            .later
            .iter()
            .filter(|_| self.sack && flags & (SYN | RST) == 0);
        Seg {
            seq: self.number(at),
            ack: rcv(self.received),
            flags: flags | ACK,
            ticks: self.stamps.then(|| (self.ticks(now), self.recent)),
            sack: blocks
                .map(|(at, bytes)| (rcv(*at), rcv(at + bytes.len() as u64)))
                .take(2)
                .collect(),
            payload,
            ..self.seg.clone()
        }
    }

    fn pure_ack(&mut self, now: u64) -> Seg {
        self.segment(self.max, 0, vec![], now)
    }

    /// Ends it at once.
    pub fn abort(&mut self, now: u64) -> Seg {
        self.phase = Phase::Dead;
        self.said_reset = true;
        self.retry_at = None;
        self.segment(self.max, RST, vec![], now)
    }

    /// When it wants to be polled.
    pub fn timer(&self) -> Option<u64> {
        match self.phase {
            Phase::Dead => None,
            _ => self.retry_at.into_iter().chain(self.ack_at).min(),
        }
    }

    /// Says what is due.
    pub fn poll(&mut self, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        match self.phase {
            Phase::Dead => return,
            Phase::SynSent | Phase::SynReceived => {
                if self.retry_at.is_some_and(|at| at <= now) {
                    self.backs_off(now);
                    said.push(self.syn(now));
                }
                return;
            }
            Phase::Open => {}
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.backs_off(now);
            self.recover_to = self.max;
            self.repeat(now, random, said);
        }
        while self.max < self.end() && self.max - self.una < MOST_UNACKNOWLEDGED {
            let at = self.max;
            self.say(at, self.end() - at, now, random, said);
        }
        if self.una < self.max && self.retry_at.is_none() {
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

    /// One segment from `at`, at most `most` long; FIN included.
    fn say(&mut self, at: u64, most: u64, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        let from = at as usize - 1;
        let length = (random.within(20, 200).min(most) as usize).min(self.out.len() - from);
        let payload = self.out[from..from + length].to_vec();
        let mut end = at + length as u64;
        let mut flags = if length > 0 { PSH } else { 0 };
        // A FIN rides on the last bytes, or comes by itself.
        if self.closing && end + 1 == self.end() && end < at + most && (length == 0 || random.percent(50)) {
            flags |= FIN;
            end += 1;
        }
        self.max = self.max.max(end);
        said.push(self.segment(at, flags, payload, now));
    }

    fn repeat(&mut self, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        if self.una == self.max {
            return;
        }
        // What the other end has selectively acknowledged is not said again.
        let hole = self
            .sacked
            .iter()
            .map(|(from, _)| *from)
            .filter(|from| *from > self.una)
            .min();
        let most = hole.unwrap_or(self.max).min(self.max) - self.una;
        self.say(self.una, most, now, random, said);
    }

    /// A segment from the other end.
    pub fn receive(&mut self, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        match self.phase {
            Phase::Dead => {}
            Phase::SynSent => self.answered(seg, now, said),
            Phase::SynReceived => self.confirmed(seg, now, random, said),
            Phase::Open => self.received_open(seg, now, random, said),
        }
    }

    fn answered(&mut self, seg: &Seg, now: u64, said: &mut Vec<Seg>) {
        if !seg.has(ACK) || seg.ack != self.number(1) {
            if seg.has(ACK) && !seg.has(RST) {
                said.push(reset_for(seg));
            }
            return;
        }
        if seg.has(RST) {
            self.phase = Phase::Dead;
            self.heard_reset = true;
            return;
        }
        if !seg.has(SYN) {
            return;
        }
        self.irs = seg.seq;
        self.received = 1;
        self.una = 1;
        self.stamps &= seg.ticks.is_some();
        self.sack &= seg.sack_permitted;
        self.recent = seg.ticks.map_or(0, |(value, _)| value);
        self.opens();
        said.push(self.pure_ack(now));
    }

    fn opens(&mut self) {
        self.phase = Phase::Open;
        self.retry_at = None;
        self.retry_us = FIRST_RETRY_US;
    }

    fn confirmed(&mut self, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        if seg.has(SYN) {
            said.push(self.syn(now));
        } else if seg.has(RST) {
            if seg.seq == self.irs.wrapping_add(1) {
                self.phase = Phase::Dead;
                self.heard_reset = true;
            }
        } else if seg.has(ACK) {
            // More than the SYN: bytes that only a former copy of this VM has said cannot be acknowledged yet.
            if seg.ack != self.number(1) {
                said.push(reset_for(seg));
                return;
            }
            self.una = 1;
            self.opens();
            self.received_open(seg, now, random, said);
        }
    }

    fn received_open(&mut self, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        let at = position(
            seg.seq,
            self.received,
            self.irs.wrapping_add(self.received as u32),
        );
        let end = at + i64::from(seg.seq_len());
        let old = self.stamps
            && seg
                .ticks
                .is_some_and(|(value, _)| (value.wrapping_sub(self.recent) as i32) < 0);
        let inside = end >= self.acked_to as i64 && at <= self.received as i64 + 0xffff;
        if seg.has(RST) {
            if at == self.received as i64 {
                self.phase = Phase::Dead;
                self.heard_reset = true;
            } else if inside {
                said.push(self.pure_ack(now));
            }
            return;
        }
        if old || !inside || seg.has(SYN) {
            self.paws += u32::from(old);
            // An acknowledgement is not answered: two that are out of step would never end.
            if seg.seq_len() > 0 || inside && !old {
                said.push(self.pure_ack(now));
            }
            return;
        }
        let ack = position(seg.ack, self.una, self.number(self.una));
        if !seg.has(ACK) || ack > self.max as i64 {
            // Linux throws it away whole.
            if seg.seq_len() > 0 {
                said.push(self.pure_ack(now));
            }
            return;
        }
        if let Some((value, echo)) = seg.ticks.filter(|_| self.stamps) {
            // 0 is no echo, as in Linux.
            if echo != 0 {
                self.echo_ahead = self.echo_ahead.max(echo.wrapping_sub(self.ticks(now)) as i32);
            }
            if at <= self.acked_to as i64 {
                self.recent = value;
            }
        }
        self.acknowledged(ack, seg, now, random, said);
        self.take(at, seg, now, random, said);
    }

    fn acknowledged(&mut self, ack: i64, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        for (from, to) in &seg.sack {
            let at = |number| position(number, self.una, self.number(self.una));
            let (from, to) = (at(*from), at(*to));
            if to > self.max as i64 || from >= to || from < 1 {
                self.trouble = Some(format!(
                    "bytes selectively acknowledged that were not said: {seg:?}"
                ));
            } else if from > self.una as i64 {
                self.sacked.push((from as u64, to as u64));
            }
        }
        if ack > self.una as i64 {
            self.una = ack as u64;
            let una = self.una;
            self.sacked.retain(|(_, to)| *to > una);
            self.repeated_acks = 0;
            self.retry_us = FIRST_RETRY_US;
            self.retry_at = (self.una < self.max).then_some(now + self.retry_us);
            if self.una < self.recover_to {
                self.repeat(now, random, said);
            }
        } else if ack == self.una as i64 && seg.seq_len() == 0 && self.una < self.max {
            self.repeated_acks += 1;
            if self.repeated_acks == 3 {
                self.recover_to = self.max;
                self.repeat(now, random, said);
            }
        }
    }

    fn take(&mut self, at: i64, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        if seg.seq_len() == 0 {
            return;
        }
        if seg.has(FIN) {
            self.peer_fin = Some((at + i64::from(seg.seq_len())) as u64 - 1);
        }
        let before = self.received;
        let skip = usize::try_from(self.received as i64 - at).unwrap_or(0);
        let at = at.max(self.received as i64) as u64;
        if let Some(new) = seg.payload.get(skip..).filter(|new| !new.is_empty()) {
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
            self.passive_close = !(self.closing && self.max == self.end());
        }
        let in_order = self.received > before && self.later.is_empty();
        if in_order && random.percent(60) {
            let at = now + random.within(500, 40_000);
            self.ack_at = Some(self.ack_at.map_or(at, |old| old.min(at)));
        } else {
            said.push(self.pure_ack(now));
        }
    }
}

/// The answer to a segment of no connection.
pub fn reset_for(seg: &Seg) -> Seg {
    Seg {
        from_vm: !seg.from_vm,
        client: seg.client,
        seq: if seg.has(ACK) { seg.ack } else { 0 },
        ack: if seg.has(ACK) {
            0
        } else {
            seg.seq.wrapping_add(seg.seq_len())
        },
        flags: if seg.has(ACK) { RST } else { RST | ACK },
        ..Seg::default()
    }
}
