//! What it decides: what clients ask for, and what they were told.
//!
//! Flow: now and then an operation goes to a replica that believes it leads (a deposed one, too); a write is answered
//! when that replica has applied it, a read when `ReadReady` came and its index is applied; the rest is never answered.
//!
//! Invariants: every written value is unique; a history holds at most 120 operations per register.
//!
//! Source: Jepsen's habit: an unanswered operation may have happened.
//!
//! Not here: judging the history (`linear`).

use crate::linear::{Kind, Operation};
use crate::machine::{Machine, REGISTERS};
use crate::world::{Next, World};
use bytes::Bytes;
use dunlin_core::consensus::{Entry, EntryKind, Event};
use dunlin_core::units::{Index, Viewstamp};

const MOST: usize = 120;

/// Everything that clients did.
#[derive(Clone, Debug, Default)]
pub struct Clients {
    /// Per register.
    pub history: [Vec<Operation>; REGISTERS],
    /// Writes that wait: host, where the entry will be, register, operation.
    writes: Vec<(u8, Viewstamp, usize, usize)>,
    /// Reads that wait: host, id, what must be applied, register, operation.
    reads: Vec<(u8, u64, Option<Index>, usize, usize)>,
    next: u64,
    /// Answered operations.
    pub answered: u64,
}

/// A write's register and value.
#[must_use]
pub fn decode(entry: &Entry) -> Option<(usize, u64)> {
    if entry.kind != EntryKind::Data {
        return None;
    }
    let register = usize::from(*entry.payload.first()?) % REGISTERS;
    Some((
        register,
        u64::from_le_bytes(entry.payload.get(1..9)?.try_into().ok()?),
    ))
}

fn encode(register: usize, value: u64) -> Bytes {
    let mut payload = vec![register as u8];
    payload.extend_from_slice(&value.to_le_bytes());
    payload.into()
}

impl Clients {
    fn answer(&mut self, register: usize, at: usize, now_us: u64, value: Option<u64>) {
        let op = &mut self.history[register][at];
        op.answered_us = Some(now_us);
        if let Some(value) = value {
            op.kind = Kind::Read(value);
        }
        self.answered += 1;
    }
    /// The host crashed: its clients wait for ever.
    pub fn forget(&mut self, host: u8) {
        self.writes.retain(|write| write.0 != host);
        self.reads.retain(|read| read.0 != host);
    }
    /// From the core.
    pub fn on_ready(&mut self, host: u8, id: u64, index: Index) {
        for read in self
            .reads
            .iter_mut()
            .filter(|read| read.0 == host && read.1 == id)
        {
            read.2 = Some(index);
        }
    }
    /// From the core.
    pub fn on_refused(&mut self, host: u8, id: u64) {
        self.reads.retain(|read| read.0 != host || read.1 != id);
    }
    /// A host applied an entry: whoever waits for this very entry there is answered.
    pub fn on_applied(&mut self, host: u8, entry: &Entry, now_us: u64) {
        while let Some(at) = self
            .writes
            .iter()
            .position(|w| w.0 == host && w.1.index == entry.stamp.index)
        {
            let (_, stamp, register, op) = self.writes.swap_remove(at);
            if stamp == entry.stamp {
                self.answer(register, op, now_us, None);
            }
        }
    }
    /// Reads whose index is applied are answered.
    pub fn answer_reads(&mut self, host: u8, now_us: u64, machine: &Machine) {
        let ready = |read: &(u8, u64, Option<Index>, usize, usize)| {
            read.0 == host && read.2.is_some_and(|index| index <= machine.through)
        };
        while let Some(at) = self.reads.iter().position(ready) {
            let (_, _, _, register, op) = self.reads.swap_remove(at);
            self.answer(register, op, now_us, Some(machine.registers[register]));
        }
    }
}

/// One operation on a replica that believes that it leads.
pub fn operate(world: &mut World) -> Result<(), String> {
    let after_us = world.random.between(200, world.weather.client_us);
    world.plan(after_us, Next::Client);
    let mut leaders = world.leaders();
    leaders.retain(|id| world.hosts[usize::from(*id)].asleep_until_us <= world.now_us);
    let Some(host) = world.random.pick(&leaders) else {
        return Ok(());
    };
    let register = world.random.below(REGISTERS as u64) as usize;
    let full = world.clients.history[register].len() >= MOST;
    let called_us = world.now_us;
    world.clients.next += 1;
    let number = world.clients.next;
    let at = world.clients.history[register].len();
    if world.random.chance(300_000) && !full {
        let kind = Kind::Read(0);
        world.clients.history[register].push(Operation {
            called_us,
            answered_us: None,
            kind,
        });
        world.clients.reads.push((host, number, None, register, at));
        return world.step(host, Event::Read { id: number });
    }
    let batch = if world.random.chance(100_000) {
        world.random.between(2, 12)
    } else {
        1
    };
    for nth in 0..batch {
        let Some(node) = world.hosts[usize::from(host)].node.as_mut() else {
            return Ok(());
        };
        // Beyond the history's bound the load goes on with entries that no register sees.
        let payload = if full || nth > 0 {
            Bytes::from(vec![0; nth as usize % 7])
        } else {
            encode(register, number)
        };
        let term = node.term();
        let Ok(index) = node.propose(payload) else { break };
        if !full && nth == 0 {
            let kind = Kind::Write(number);
            world.clients.history[register].push(Operation {
                called_us,
                answered_us: None,
                kind,
            });
            world
                .clients
                .writes
                .push((host, Viewstamp { term, index }, register, at));
        }
    }
    world.step(host, Event::Flush)
}
