//! One end of a TCP connection: small, but as strict as Linux is about numbers that cannot be.

use super::super::*;

/// How it answers what it hears.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Says what it is told to say.
    Asks,
    /// Answers each byte that it hears; ends when the other end does.
    Serves,
}

#[derive(Clone, Debug)]
pub struct End {
    pub in_vm: bool,
    pub port: u16,
    pub role: Role,
    pub isn: u32,
    /// Its clock, if it uses timestamps, starts here.
    pub ticks_from: Option<u32>,
    pub peer_isn: Option<u32>,
    /// Whether it sent its SYN unasked.
    pub opens: bool,
    /// Its stream. Number 0 is its SYN, 1 the first byte, and the one after the last byte its FIN.
    pub stream: Vec<u8>,
    pub ends: bool,
    pub next: u32,
    pub acknowledged: u32,
    /// The other end's stream.
    pub heard: Vec<u8>,
    pub heard_end: bool,
    ticks_recent: Option<u32>,
    first_syn_at: u32,
}

/// What a server says to `asked`, in all.
pub fn answer(asked: &[u8]) -> Vec<u8> {
    let mut sum = 0_u8;
    let mut said = Vec::new();
    for byte in asked {
        sum = sum.wrapping_mul(31).wrapping_add(*byte);
        said.extend(std::iter::repeat_n(sum, usize::from(byte % 4)));
    }
    said
}

impl End {
    pub fn new(in_vm: bool, port: u16, role: Role, isn: u32, ticks_from: Option<u32>) -> Self {
        Self {
            in_vm,
            port,
            role,
            isn,
            ticks_from,
            peer_isn: None,
            opens: false,
            stream: vec![],
            ends: false,
            next: 0,
            acknowledged: 0,
            heard: vec![],
            heard_end: false,
            ticks_recent: None,
            first_syn_at: 0,
        }
    }

    /// How far it has heard: the other end's next number.
    pub fn heard_to(&self) -> u32 {
        u32::from(self.peer_isn.is_some()) + self.heard.len() as u32 + u32::from(self.heard_end)
    }

    pub fn is_over(&self) -> bool {
        self.heard_end && self.ends && self.acknowledged == self.stream.len() as u32 + 2
    }

    fn segment(&self, number: u32, len: u32, clock: u32) -> Seg {
        let end = number + len;
        let in_stream = |number: u32| (number.max(1) as usize - 1).min(self.stream.len());
        let fin = self.ends && end == self.stream.len() as u32 + 2;
        let mut flags = if self.peer_isn.is_some() { ACK } else { 0 };
        flags |= if number == 0 && len > 0 { SYN } else { 0 };
        flags |= if fin && len > 0 { FIN } else { 0 };
        let ack = self.peer_isn.map_or(0, |isn| isn.wrapping_add(self.heard_to()));
        Seg {
            from_vm: self.in_vm,
            port: self.port,
            ticks: (self.ticks_from).map(|from| (from.wrapping_add(clock), self.ticks_recent.unwrap_or(0))),
            ..Seg::from_vm(flags, self.isn.wrapping_add(number), ack)
        }
        .with(&self.stream[in_stream(number)..in_stream(end)])
    }

    /// Its SYN-ACK once more while nobody has acknowledged that.
    pub fn acknowledge(&self, clock: u32) -> Seg {
        match self.acknowledged {
            0 => self.segment(0, 1, clock),
            _ => self.segment(self.next, 0, clock),
        }
    }

    /// What it has not said yet, in segments of at most `most` bytes.
    pub fn say(&mut self, most: u32, clock: u32) -> Vec<Seg> {
        let mut said = Vec::new();
        if self.next == 0 {
            if self.opens || self.peer_isn.is_some() {
                self.first_syn_at = clock;
                said.push(self.segment(0, 1, clock));
                self.next = 1;
            }
            return said;
        }
        let end = self.stream.len() as u32 + 1 + u32::from(self.ends);
        while self.acknowledged > 0 && self.next < end {
            let len = most.min(end - self.next);
            said.push(self.segment(self.next, len, clock));
            self.next += len;
        }
        said
    }

    /// What nobody has acknowledged yet, once more.
    pub fn say_again(&self, most: u32, clock: u32) -> Vec<Seg> {
        let (mut at, mut said) = (self.acknowledged, Vec::new());
        while at < self.next {
            let len = if at == 0 { 1 } else { most.min(self.next - at) };
            said.push(self.segment(at, len, clock));
            at += len;
        }
        said
    }

    /// Hears a segment: what is wrong with it, or whether it wants an answer.
    pub fn hear(&mut self, seg: &Seg, clock: u32) -> Result<bool, String> {
        if seg.flags & RST != 0 {
            return Err("a reset".into());
        }
        let other = seg.flags & SYN != 0 && self.peer_isn.is_some_and(|isn| isn != seg.seq);
        if other && self.heard_to() == 1 {
            // A new primary that does not know yet what the client heard: RFC 9293 answers with an acknowledgement.
            return Ok(true);
        }
        if let Some((value, _)) = seg.ticks
            && let Some(recent) = self.ticks_recent
            && before(value, recent)
        {
            return Err(format!("PAWS: {value} after {recent}"));
        }
        if seg.flags & SYN != 0 {
            self.hear_syn(seg, clock)?;
        }
        let Some(peer_isn) = self.peer_isn else {
            // Linux drops it if it acknowledges the SYN, and resets otherwise.
            let right = self.opens && seg.ack == self.isn.wrapping_add(1);
            return right.then_some(false).ok_or("a segment before any SYN".into());
        };
        let number = seg.seq.wrapping_sub(peer_isn) as i32;
        let far = number.abs_diff(self.heard_to() as i32);
        if far > 100_000 {
            return Err(format!("{} is {far} from where the stream is", seg.seq));
        }
        self.hear_acknowledgement(seg)?;
        if let Some((value, _)) = seg.ticks
            && number <= self.heard_to() as i32
        {
            self.ticks_recent = Some(value);
        }
        self.hear_stream(seg, number);
        Ok(seg.flags & (SYN | FIN) != 0 || !seg.payload.is_empty())
    }

    fn hear_syn(&mut self, seg: &Seg, clock: u32) -> Result<(), String> {
        let known = self.peer_isn.replace(seg.seq);
        if known.is_some_and(|isn| isn != seg.seq) {
            return Err("another SYN in the middle of the stream".into());
        }
        let (Some((_, echo)), Some(from)) = (seg.ticks, self.ticks_from) else {
            return Ok(());
        };
        // Linux resets a connection whose SYN is answered with an echo from outside the time since.
        let (first, now) = (from.wrapping_add(self.first_syn_at), from.wrapping_add(clock));
        if known.is_none() && self.opens && echo != 0 && (before(echo, first) || before(now, echo)) {
            return Err(format!("SYN-ACK echoes {echo}, not {first} to {now}"));
        }
        Ok(())
    }

    fn hear_acknowledgement(&mut self, seg: &Seg) -> Result<(), String> {
        if seg.flags & ACK == 0 {
            return Ok(());
        }
        let ack = seg.ack.wrapping_sub(self.isn);
        if ack > self.next {
            return Err(format!("acknowledges {ack} of {}", self.next));
        }
        self.acknowledged = self.acknowledged.max(ack);
        Ok(())
    }

    /// Takes what continues the stream; what comes too early is not kept.
    fn hear_stream(&mut self, seg: &Seg, number: i32) {
        let first = number + i32::from(seg.flags & SYN != 0);
        let skip = self.heard_to() as i32 - first;
        if skip < 0 || self.heard_end {
            return;
        }
        if let Some(new) = seg.payload.get(skip as usize..) {
            self.heard.extend(new);
            self.heard_end = seg.flags & FIN != 0;
        }
        if self.role == Role::Serves {
            self.stream = answer(&self.heard);
            self.ends = self.heard_end;
        }
    }
}
