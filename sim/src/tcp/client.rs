//! A client: some conversations one after the other, and what it must see in them.

use super::endpoint::{Phase, Tcp, reset_for};
use super::frame::{ACK, FIN, RST, SYN, Seg};
use super::guest::{ABORT, ASK, CLOCK, COUNT, Guest, OWN_BYTES, QUIT, answer};
use super::random::Random;
use super::told::Told;
use std::collections::VecDeque;

/// What a client asks for, and how it ends.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// So many requests of a hundred are for the time.
    pub differs_percent: u8,
    /// Of the others, so many are for the counter.
    pub counts_percent: u8,
    /// Whether connections are reset on purpose, by either end.
    pub resets: bool,
}

#[derive(Debug)]
pub struct Client {
    pub tcp: Tcp,
    random: Random,
    options: (bool, bool),
    tick_base: u32,
    habits: Habits,
    to_come: u64,
    /// Conversations that it has begun.
    pub had: u64,
    requests: u64,
    act_at: u64,
    /// What the service must answer; none for a byte of a clock's, or of the counter.
    expected: Vec<Option<u8>>,
    /// Where the counter is to come, and what it has to be beyond.
    counts: VecDeque<(usize, u64)>,
    /// What the counter was when any client last heard of it: the world says so.
    pub counted: u64,
    /// What came, from whichever host.
    seen: Vec<Option<u8>>,
    may_be_reset: bool,
    asked_at: u64,
    over: bool,
    pub finished: bool,
    wire: Wire,
    told: Told,
}

/// A receiver to which every frame comes in the order in which it left.
#[derive(Debug)]
struct Wire {
    next: u64,
    ack: u64,
    recent: Option<u32>,
}

impl Default for Wire {
    /// It has heard the SYN.
    fn default() -> Self {
        Self {
            next: 1,
            ack: 1,
            recent: None,
        }
    }
}

impl Client {
    /// It connects at the beginning of time.
    pub fn new(number: usize, options: (bool, bool), habits: Habits, mut random: Random) -> (Self, Seg) {
        let (iss, tick_base) = (random.number(), random.number());
        let (tcp, syn) = Tcp::connect(number, iss, tick_base, options, 0);
        let client = Self {
            tcp,
            options,
            tick_base,
            habits,
            to_come: random.within(0, 3),
            had: 1,
            requests: random.within(1, 12),
            act_at: random.within(0, 30_000),
            expected: vec![],
            seen: vec![],
            counts: VecDeque::new(),
            counted: 0,
            may_be_reset: false,
            asked_at: 0,
            over: false,
            finished: false,
            wire: Wire::default(),
            told: Told::default(),
            random,
        };
        (client, syn)
    }

    /// So many more conversations after this one.
    pub fn has_to_come(&mut self, conversations: u64) {
        self.to_come = conversations;
    }

    pub fn state(&self) -> String {
        let Tcp {
            phase,
            una,
            max,
            received,
            ..
        } = self.tcp;
        let (end, expected, over) = (self.tcp.end(), self.expected.len(), self.over);
        format!("{phase:?} acknowledged {una} said {max} of {end}, got {received} of {expected}, over {over}")
    }

    pub fn timer(&self) -> Option<u64> {
        let acts = (!self.finished).then_some(self.act_at);
        acts.into_iter().chain(self.tcp.timer()).min()
    }

    /// Does what is due.
    pub fn work(&mut self, now: u64) -> Vec<Seg> {
        let mut said = Vec::new();
        if self.act_at <= now && !self.finished {
            self.act(now, &mut said);
        }
        self.tcp.poll(now, &mut self.random, &mut said);
        said
    }

    fn act(&mut self, now: u64, said: &mut Vec<Seg>) {
        self.act_at = now + self.random.within(100, 40_000);
        if self.over {
            if self.to_come == 0 {
                self.finished = true;
                return;
            }
            self.to_come -= 1;
            self.had += 1;
            self.requests = self.random.within(1, 12);
            let iss = self
                .tcp
                .iss
                .wrapping_add(self.tcp.end() as u32 + self.random.number() % 100_000 + 1);
            let (tcp, syn) = Tcp::connect(self.tcp.client(), iss, self.tick_base, self.options, now);
            self.tcp = tcp;
            (self.expected, self.seen) = (vec![], vec![]);
            (self.over, self.may_be_reset) = (false, false);
            self.wire = Wire::default();
            self.told = Told::default();
            self.counts.clear();
            said.push(syn);
        } else if self.may_be_reset {
            // The reset may have got lost, and nothing would ever ask for it again.
            if now > self.asked_at + 2_000_000 {
                said.push(self.tcp.abort(now));
                self.over = true;
            }
        } else if self.tcp.phase == Phase::Open && !self.tcp.closing {
            self.ask(now, said);
        }
    }

    fn ask(&mut self, now: u64, said: &mut Vec<Seg>) {
        if self.requests == 0 {
            // Not always only after the last answer: half-closed.
            match self.random.within(0, 9) {
                0 if self.habits.resets => {
                    said.push(self.tcp.abort(now));
                    self.over = true;
                    self.act_at += 100_000;
                }
                1..4 => self.tcp.closing = true,
                _ => self.tcp.closing = self.tcp.incoming.len() >= self.expected.len(),
            }
            return;
        }
        self.requests -= 1;
        let kind = match self.random.within(0, 9) {
            0 if self.requests == 0 && self.habits.resets => ABORT,
            1..4 if self.requests == 0 => QUIT,
            _ if self.random.percent(self.habits.differs_percent) => CLOCK,
            _ if self.habits.counts_percent > 0 && self.random.percent(self.habits.counts_percent) => COUNT,
            _ => ASK,
        };
        let length = self.random.within(0, 255).min(self.random.within(0, 255));
        let request: Vec<u8> = (0..length).map(|_| self.random.number() as u8).collect();
        self.tcp.out.extend([kind, length as u8]);
        self.tcp.out.extend(&request);
        match kind {
            ABORT => (self.may_be_reset, self.asked_at) = (true, now),
            _ => {
                if kind == COUNT {
                    self.counts.push_back((self.expected.len(), self.counted));
                }
                let own = if matches!(kind, CLOCK | COUNT) {
                    OWN_BYTES
                } else {
                    0
                };
                let answer = answer(&request);
                let byte = |(n, byte)| (n >= own).then_some(byte);
                self.expected.extend(answer.into_iter().enumerate().map(byte));
            }
        }
    }

    /// It says no more on this connection, and begins another one.
    pub fn gives_up(&mut self, now: u64) {
        self.tcp.abort(now);
        self.over = true;
        self.to_come = self.to_come.max(1);
        self.counted = 0;
        self.act_at = self.act_at.max(now + 100_000);
    }

    /// A segment that came. An error if it cannot be true.
    pub fn receive(&mut self, seg: &Seg, now: u64) -> Result<Vec<Seg>, String> {
        let mut said = Vec::new();
        if self.over {
            if self.tcp.is_dead() && !seg.has(RST) {
                said.push(reset_for(seg));
            } else if self.tcp.is_done() && !seg.has(RST) {
                self.tcp.receive(seg, now, &mut self.random, &mut said);
            }
            return Ok(said);
        }
        self.tcp.receive(seg, now, &mut self.random, &mut said);
        if let Some(trouble) = &self.tcp.trouble {
            return Err(trouble.clone());
        }
        self.check_bytes(seg)?;
        self.check_counts()?;
        if self.tcp.heard_reset && !self.may_be_reset {
            return Err(format!("a reset that nobody meant: {seg:?}"));
        }
        if self.tcp.peer_fin.is_some() && !self.may_be_reset && !self.tcp.closing && self.requests > 0 {
            return Err(format!("the end of a stream that nobody ended: {seg:?}"));
        }
        // The service has ended it: the client ends it as well.
        if self.tcp.peer_fin.is_some_and(|fin| self.tcp.received > fin) {
            self.tcp.closing = true;
            self.tcp.poll(now, &mut self.random, &mut said);
        }
        if self.tcp.is_done() || self.tcp.is_dead() {
            if self.tcp.is_done() && self.tcp.incoming.len() != self.expected.len() && !self.may_be_reset {
                return Err(format!(
                    "{} bytes in place of {}",
                    self.tcp.incoming.len(),
                    self.expected.len()
                ));
            }
            self.over = true;
            self.act_at = now + 100_000 + self.random.within(0, 50_000);
        }
        Ok(said)
    }

    /// Claim C: one stream, byte for byte, in one set of numbers.
    fn check_bytes(&mut self, seg: &Seg) -> Result<(), String> {
        if self.tcp.irs == 0 || seg.payload.is_empty() || seg.has(RST) {
            return Ok(());
        }
        let Some(at) = self.place(seg) else {
            return Ok(());
        };
        for (n, byte) in seg.payload.iter().enumerate() {
            let at = at as usize - 1 + n;
            match self.expected.get(at) {
                Some(expected) if expected.is_none_or(|expected| expected == *byte) => {}
                Some(_) => return Err(format!("another byte at {at}: {seg:?}")),
                None => return Err(format!("a byte at {at} that nobody asked for: {seg:?}")),
            }
            self.seen.resize(self.seen.len().max(at + 1), None);
            if self.seen[at].is_some_and(|seen| seen != *byte) {
                return Err(format!("two different bytes at {at}: {seg:?}"));
            }
            self.seen[at] = Some(*byte);
        }
        Ok(())
    }

    /// The counter is beyond what any client had heard of it before it was asked for.
    fn check_counts(&mut self) -> Result<(), String> {
        while let Some((at, before)) = self.counts.front().copied()
            && let Some(bytes) = self.tcp.incoming.get(at..at + OWN_BYTES)
        {
            let count = bytes.iter().fold(0, |count, byte| count << 8 | u64::from(*byte));
            if count <= before {
                return Err(format!("the counter goes back: {count} after {before}"));
            }
            self.counted = self.counted.max(count);
            self.counts.pop_front();
        }
        Ok(())
    }

    /// The position of the VM's segment; none if it is of another connection. One of a former connection may have a number near this one's, but
    /// what it acknowledges lies just before the SYN.
    fn place(&self, seg: &Seg) -> Option<u64> {
        let at = i64::from(seg.seq.wrapping_sub(self.tcp.irs) as i32);
        let ack = i64::from(seg.ack.wrapping_sub(self.tcp.iss) as i32);
        let is_former = seg.has(ACK) && (-(1 << 20)..0).contains(&ack);
        ((0..1 << 20).contains(&at) && !is_former).then_some(at as u64)
    }

    /// A segment left for this client. Claims A and B: the backup has said it, and got what it acknowledges.
    pub fn left(&mut self, seg: &Seg, backup: Option<&Guest>) -> Result<(), String> {
        if self.over || self.tcp.is_dead() {
            return Ok(());
        }
        if self.tcp.phase == Phase::SynSent {
            // Whatever else comes is of a former connection.
            if seg.has(SYN) && seg.ack == self.tcp.iss.wrapping_add(1) {
                self.told.accepts();
                if let Some(backup) = backup {
                    backup
                        .connection(self.tcp.client(), self.tcp.iss)
                        .ok_or_else(|| format!("A: the backup has not accepted it: {seg:?}"))?;
                }
            }
            return Ok(());
        }
        let Some(at) = self.place(seg).filter(|_| !seg.has(SYN)) else {
            return Ok(());
        };
        let heard = i64::from(seg.ack.wrapping_sub(self.tcp.iss) as i32);
        if !seg.has(ACK) || !(0..1 << 20).contains(&heard) {
            return Ok(());
        }
        self.left_in_time(seg, at, heard as u64)?;
        if self.may_be_reset {
            return Ok(());
        }
        self.told.left(seg, at, heard as u64);
        let Some(backup) = backup else { return Ok(()) };
        let copy = backup
            .connection(self.tcp.client(), self.tcp.iss)
            .ok_or_else(|| format!("A: the backup does not know the connection of {seg:?}"))?;
        if seg.has(RST) && !copy.said_reset {
            return Err(format!("A: the backup has not reset {seg:?}"));
        }
        let end = at + u64::from(seg.seq_len());
        // Where a mere acknowledgement stands in the stream tells a client nothing.
        if end > copy.max && seg.seq_len() > 0 || seg.has(FIN) && !(copy.closing && end == copy.end()) {
            return Err(format!("A: the backup has said {} of {end}: {seg:?}", copy.max));
        }
        let said = copy.out.get(at as usize - 1..).unwrap_or_default();
        if !said.starts_with(&seg.payload) {
            return Err(format!("A: the backup has said something else than {seg:?}"));
        }
        if heard as u64 > copy.received {
            return Err(format!(
                "B: the backup has got {} of {heard}: {seg:?}",
                copy.received
            ));
        }
        if !self.tcp.out.starts_with(&copy.incoming) {
            return Err(format!("B: the backup has got something else: {seg:?}"));
        }
        Ok(())
    }

    /// Whether a VM that begins to speak, `guest`, explains what has left for this client.
    pub fn is_explained_by(&self, guest: &Guest) -> Result<(), String> {
        if self.over || self.may_be_reset || self.tcp.is_dead() {
            return Ok(());
        }
        let copy = guest.connection(self.tcp.client(), self.tcp.iss);
        let told = self.told.is_explained_by(copy);
        told.map_err(|why| format!("client {}: {why}", self.tcp.client()))
    }

    /// Timestamps never go back: nothing new that leaves would be thrown away by a receiver who got all in order (PAWS).
    fn left_in_time(&mut self, seg: &Seg, at: u64, ack: u64) -> Result<(), String> {
        let end = at + u64::from(seg.seq_len());
        let is_new = end > self.wire.next || ack > self.wire.ack;
        if let Some((value, _)) = seg.ticks
            && !seg.has(RST)
            && end >= self.wire.next
        {
            let back = self
                .wire
                .recent
                .map_or(0, |recent| recent.wrapping_sub(value) as i32);
            if back > 0 && is_new {
                return Err(format!("C: a timestamp goes back by {back}: {seg:?}"));
            }
            if back <= 0 && at <= self.wire.next {
                self.wire.recent = Some(value);
            }
        }
        if at <= self.wire.next {
            self.wire.next = self.wire.next.max(end);
        }
        self.wire.ack = self.wire.ack.max(ack);
        Ok(())
    }
}
