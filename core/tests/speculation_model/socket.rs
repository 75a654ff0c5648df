//! A shadow socket: the sending half of a TCP, built at any number of a stream. It says what it hears and should not.

use super::seg::{ACK, FIN, FIRST_PORT, RST, SYN, Seg};
use dunlin_core::speculation::Socket;
use std::collections::VecDeque;

const FLIGHT: u32 = 30_000;
const RETRY_US: u64 = 200_000;
/// What it takes from who writes.
const BUFFER: usize = 20_000;

#[derive(Debug)]
pub struct Shadow {
    spec: Socket,
    client: usize,
    /// From `una` on.
    bytes: VecDeque<u8>,
    una: u32,
    nxt: u32,
    closing: bool,
    window: u32,
    retry_at: Option<u64>,
    recent: u32,
    began: u64,
    pub trouble: Option<String>,
    said_dummy: bool,
}

impl Shadow {
    pub fn build(spec: Socket, now: u64) -> Self {
        let first = spec.start.wrapping_sub(1);
        Self {
            spec,
            client: usize::from(spec.flow.peer.port() - FIRST_PORT),
            bytes: [0xee].into(),
            una: first,
            nxt: first,
            closing: false,
            window: spec.window,
            retry_at: None,
            recent: 0,
            began: now,
            trouble: None,
            said_dummy: false,
        }
    }

    pub fn room(&self) -> usize {
        BUFFER.saturating_sub(self.bytes.len())
    }

    pub fn write(&mut self, bytes: &[u8]) {
        assert!(!self.closing, "bytes after the end");
        self.bytes.extend(bytes);
    }

    pub fn shutdown(&mut self) {
        self.closing = true;
    }

    fn end(&self) -> u32 {
        self.una.wrapping_add(self.bytes.len() as u32)
    }

    fn all(&self) -> u32 {
        self.end().wrapping_add(u32::from(self.closing))
    }

    fn segment(&self, at: u32, length: u32, now: u64) -> Seg {
        let from = at.wrapping_sub(self.una) as usize;
        let payload: Vec<u8> = match length {
            0 => vec![],
            _ => self.bytes.range(from..from + length as usize).copied().collect(),
        };
        let fin = self.closing && length > 0 && at.wrapping_add(length) == self.end()
            || self.closing && at == self.end();
        Seg {
            from_vm: true,
            client: self.client,
            seq: at,
            ack: self.spec.peer_start,
            flags: ACK | if fin { FIN } else { 0 },
            window: 0x1000,
            ticks: self.spec.stamp.map(|base| {
                let since = ((now - self.began) / 1000) as u32;
                (base.wrapping_add(since), self.recent)
            }),
            payload,
            ..Seg::default()
        }
    }

    pub fn timer(&self) -> Option<u64> {
        self.retry_at
    }

    /// Says what the window allows.
    pub fn poll(&mut self, now: u64, said: &mut Vec<Seg>) {
        let mss = u32::from(self.spec.mss) - if self.spec.stamp.is_some() { 12 } else { 0 };
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = Some(now + RETRY_US);
            if self.una != self.nxt {
                let sent = self.nxt.wrapping_sub(self.una);
                let length = mss.min(self.end().wrapping_sub(self.una)).min(sent);
                let mut seg = self.segment(self.una, length, now);
                if self.nxt != self.all() {
                    // Its end was not sent yet.
                    seg.flags &= !FIN;
                }
                said.push(seg);
            } else {
                said.push(self.segment(self.una.wrapping_sub(1), 0, now));
            }
        }
        // The window may have been taken back below what was said.
        let within = |nxt: u32| {
            (self.una.wrapping_add(self.window.min(FLIGHT)).wrapping_sub(nxt) as i32).max(0) as u32
        };
        loop {
            let left = self.all().wrapping_sub(self.nxt);
            // The dummy goes by itself.
            let mss = if self.said_dummy { mss } else { 1 };
            let data = self.end().wrapping_sub(self.nxt).min(mss).min(within(self.nxt));
            let only_fin = left == 1 && self.closing && self.nxt == self.end();
            if left == 0 || data == 0 && !only_fin {
                break;
            }
            let mut seg = self.segment(self.nxt, if only_fin { 0 } else { data }, now);
            if !self.said_dummy {
                seg.flags &= !FIN;
            }
            self.said_dummy = true;
            self.nxt = self.nxt.wrapping_add(seg.len());
            said.push(seg);
        }
        if self.una != self.all() && self.retry_at.is_none() {
            self.retry_at = Some(now + RETRY_US);
        }
    }

    pub fn receive(&mut self, seg: &Seg, now: u64, said: &mut Vec<Seg>) {
        let wrong = |what: &str| Some(format!("a shadow socket hears {what}: {seg:?}"));
        let ahead = seg.ack.wrapping_sub(self.una) as i32;
        if seg.len() > 0 || seg.has(SYN | FIN | RST) || seg.seq != self.spec.peer_start {
            self.trouble = wrong("more than an acknowledgement");
        } else if seg.ack.wrapping_sub(self.nxt) as i32 > 0 {
            self.trouble = wrong("of bytes that it has not sent");
            return;
        } else if seg
            .sack
            .iter()
            .any(|(_, to)| to.wrapping_sub(self.nxt) as i32 > 0)
        {
            self.trouble = wrong("SACK of bytes that it has not sent");
        } else if let (Some((_, echo)), Some(base)) = (seg.ticks, self.spec.stamp)
            && (echo.wrapping_sub(base) as i32) < 0
        {
            self.trouble = wrong("an echo from before its time");
        }
        if ahead < 0 {
            return;
        }
        let fin = self.closing && seg.ack == self.all();
        let n = (ahead as usize).min(self.bytes.len());
        self.bytes.drain(..n);
        self.una = seg.ack;
        // Nothing is left to say.
        self.closing &= !fin;
        self.window = u32::from(seg.window) << self.spec.scale.map_or(0, |(peer, _)| peer);
        if let Some((value, _)) = seg.ticks {
            self.recent = value;
        }
        if ahead > 0 {
            self.retry_at = None;
        }
        self.poll(now, said);
    }
}
