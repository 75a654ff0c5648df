//! The order of a program's inputs: the table that another host sends of it, then clients, copies and times in any order, as a driver plays
//! them. What is delivered and said is compared as well, as the tester does it.

use crate::output::frame;
use crate::script::Script;
use bytes::Bytes;
use dunlin_core::agreed::{AgreedTime, Frame};
use dunlin_core::output::packet::{ACK, Direction, FIN, PSH, Parsed, SYN, parse};
use dunlin_core::program::order::{Found, Gate, Next, Order, Question};
use dunlin_core::program::outputs::Outputs;
use std::collections::VecDeque;

const PATIENCE_US: u64 = 1000;
/// A gate in which fewer frames wait is compared as a whole.
const SHOWN: usize = 32;

/// A gate, and what it was given.
struct Driver {
    gate: Gate,
    outputs: Outputs,
    copies: usize,
    now_us: u64,
    /// What it keeps, in the order of arrival.
    kept: VecDeque<Frame>,
    /// How many it has kept so far, and how many of these were delivered.
    arrived: u64,
    delivered: u64,
    asked: Vec<Question>,
}

impl Driver {
    fn new(how: u8) -> Self {
        let order = match how % 4 {
            0 => Order::Delivery,
            1 => Order::Read,
            2 => Order::Batch,
            _ => Order::Answer,
        };
        let copies = 1 + usize::from(how / 4 % 3);
        Self {
            gate: Gate::new(order, copies, PATIENCE_US),
            outputs: Outputs::new(copies),
            copies,
            now_us: 0,
            kept: VecDeque::new(),
            arrived: 0,
            delivered: 0,
            asked: Vec::new(),
        }
    }

    /// A table arrives. All of a gate in which much waits is a long text.
    fn load(&mut self, table: &[u8]) {
        let all = |gate: &Gate| (self.kept.len() < SHOWN).then(|| format!("{gate:?}"));
        let before = all(&self.gate);
        if self.gate.load(Bytes::copy_from_slice(table)).is_err() {
            assert_eq!(all(&self.gate), before, "a table that is none changes nothing");
        }
    }

    /// Whoever goes on from here has the same table, and keeps it whatever else it is told. Nothing waits.
    fn read_again(&self) {
        let table = self.gate.table();
        let mut other = Gate::new(Order::Read, self.copies, PATIENCE_US);
        assert_eq!(other.load(table.clone()), Ok(()));
        let longer = Bytes::from([&table[..], &[0]].concat());
        for damaged in [table.slice(..table.len() - 1), longer] {
            assert!(other.load(damaged).is_err());
            assert_eq!(other.table(), table, "a damaged table changes nothing");
        }
    }

    /// A client says something.
    fn hear(&mut self, frame: Frame) {
        match self.gate.arrived(frame.clone()) {
            Some(same) => {
                assert_eq!(same, frame);
                self.outputs.heard(&frame);
            }
            None => {
                self.kept.push_back(frame);
                self.arrived += 1;
            }
        }
        assert_eq!(self.gate.counters().lost, 0, "no script is that long");
    }

    /// A copy says something.
    fn say(&mut self, script: &mut Script<'_>) {
        let copy = usize::from(script.byte()) % self.copies;
        let said = frame(script, true);
        match parse(&said, Direction::FromVm) {
            Parsed::Tcp(segment) => self.gate.said(copy, &segment),
            Parsed::Datagram(datagram) => self.gate.answered(copy, &datagram.key),
            _ => {}
        }
        self.outputs.said(copy, &said);
    }

    /// A time is agreed; it tells how many inputs were before it.
    fn time(&mut self) {
        self.gate.time(AgreedTime {
            monotonic_ns: self.now_us,
            wall_ns: self.arrived,
        });
    }

    /// What was asked of the copies' sockets is told.
    fn tell(&mut self, script: &mut Script<'_>) {
        for question in std::mem::take(&mut self.asked) {
            let found = match script.byte() {
                0 => Found::Gone,
                _ => Found::Socket {
                    received: script.number(),
                    unread: script.number() as u32,
                },
            };
            self.gate.told(&question, found);
        }
    }

    /// The next thing that is to be done.
    fn turn(&mut self) -> Next {
        let next = self.gate.next(self.now_us);
        match &next {
            Next::Deliver(frame) => {
                let first = self.kept.pop_front();
                assert_eq!(first.as_ref(), Some(frame), "in the order of arrival");
                self.delivered += 1;
                self.outputs.heard(frame);
            }
            Next::Set(time) => {
                assert_eq!(time.wall_ns, self.delivered, "where it was agreed");
            }
            Next::Ask(questions) => {
                let is_here = |asked: &Question| asked.copy < self.copies;
                assert!(!questions.is_empty() && questions.iter().all(is_here));
                self.asked.clone_from(questions);
            }
            Next::Wait(until_us) => assert!(*until_us > self.now_us, "it would be asked for ever"),
            Next::Idle => assert!(self.gate.is_idle() && self.kept.is_empty()),
            Next::AskForRest | Next::AskForQuiet => {}
        }
        next
    }

    /// Whatever the copies do, nothing waits for longer than patience lasts.
    fn finish(mut self) {
        // Each input and each time is asked for at most twice before it comes.
        let most = 3 * self.gate.queued() + 8;
        let ends = (0..most).any(|_| {
            self.now_us += 2 * PATIENCE_US;
            self.turn() == Next::Idle
        });
        assert!(ends, "inputs wait for ever");
        self.read_again();
        self.outputs.finish();
        assert!(self.outputs.is_settled());
        let differs = self.outputs.tally().differing > 0;
        assert_eq!(self.outputs.first_difference().is_some(), differs);
    }
}

/// How (the order, the copies), a table, and what happens then.
pub fn gate(bytes: &[u8]) {
    let mut script = Script(bytes);
    let mut driver = Driver::new(script.byte());
    let n = usize::from(script.byte());
    driver.load(script.bytes(n));
    driver.read_again();
    while !script.is_over() {
        match script.byte() % 12 {
            0..=2 => driver.hear(frame(&mut script, false)),
            3 | 4 => {
                driver.turn();
            }
            5 => driver.tell(&mut script),
            6 => driver.say(&mut script),
            7 => driver.time(),
            8 => driver.now_us += script.number() % (4 * PATIENCE_US),
            9 => driver.gate.are_at_rest(driver.now_us),
            10 => match script.byte() % 8 {
                0 => driver.gate.cannot_be_quiet(driver.now_us),
                1 => driver.gate.keep_apart(),
                _ => driver.gate.are_quiet(),
            },
            _ => {
                let n = usize::from(script.byte());
                driver.load(script.bytes(n));
            }
        }
    }
    driver.finish();
}

/// A segment as `frame` reads it. How, the client's address and port, length, bytes, its number, acknowledgement, options, flags.
fn says(port: u8, flags: u8, seq: u8, payload: &[u8]) -> Vec<u8> {
    let head = [0, 1, port, payload.len() as u8];
    [&head[..], payload, &[seq, 7, 0, flags]].concat()
}

/// Of a gate that has three connections: one that has said something, one that has ended, one in its handshake.
fn table() -> Bytes {
    let mut gate = Gate::new(Order::Delivery, 1, PATIENCE_US);
    for words in [
        says(1, SYN, 9, b""),
        says(1, ACK, 10, b""),
        says(1, ACK | PSH, 10, b"get"),
        says(2, SYN, 9, b""),
        says(2, ACK, 10, b""),
        says(2, ACK | FIN, 10, b""),
        says(3, SYN, 9, b""),
    ] {
        let at_once = gate.arrived(frame(&mut Script(&words), false));
        assert!(at_once.is_some(), "nothing waits");
    }
    gate.table()
}

/// Both copies' words, the same.
fn both_say(flags: u8, seq: u8, payload: &[u8]) -> Vec<u8> {
    let of_one = |copy: u8| [&[6, copy][..], &says(1, flags, seq, payload)].concat();
    [of_one(0), of_one(1)].concat()
}

/// A handshake, which both copies accept.
fn opens() -> Vec<u8> {
    [
        &[0][..],
        &says(1, SYN, 9, b""),
        &both_say(SYN | ACK, 1, b""),
        &[0],
        &says(1, ACK, 10, b""),
        // It is delivered, and asked after.
        &[3, 3, 5, 1, 0, 0, 1, 0, 0],
    ]
    .concat()
}

/// A client asks with that number, both copies have read so much and answer; then a time, for which they are asked to rest.
fn asks(seq: u8, received: u8) -> Vec<u8> {
    [
        &[0][..],
        &says(1, ACK | PSH, seq, b"get"),
        &[3, 3, 5, 1, received, 0, 1, received, 0],
        &both_say(ACK | PSH, seq - 8, b"answer"),
        &[7, 3, 9, 3, 3],
    ]
    .concat()
}

/// In each order, with two copies: a connection's life, and one that goes on from a table, half of which comes again later.
pub fn seeds() -> Vec<Vec<u8>> {
    const TWO_COPIES: u8 = 4;
    let table = table();
    let length = table.len() as u8;
    let mut out = Vec::new();
    for order in 0..4 {
        let how = TWO_COPIES | order;
        out.push([&[how, 0][..], &opens(), &asks(10, 3), &asks(13, 6)].concat());
        let begins = [&[how, length][..], &table].concat();
        let again = [&[11, length / 2][..], &table[..table.len() / 2]].concat();
        let goes_on = [begins, asks(13, 3), again, vec![8, 200, 10, 2], asks(16, 6)].concat();
        out.push(goes_on);
    }
    out
}
