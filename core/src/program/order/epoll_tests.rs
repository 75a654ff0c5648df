//! A model of Linux' `epoll` and of a program with one thread that waits in it, and what the gate's batches come to there.
//!
//! Flow: an agreed order of inputs -> on each of two copies a gate of its own, whose deliveries, looks and program take turns by chance -> what
//! each program has read, in which order. Both must be the agreed order.
//!
//! As in fs/eventpoll.c: `ep_poll_callback` puts what became ready at the list's end, once, or while the list is being told of into `ovflist`;
//! `ep_send_events` takes from the front as many as there is room for, looks whether each is ready, and puts it back at the end where it is
//! level-triggered; `ep_done_scan` puts `ovflist` before these, in the order of its arrival, and what was not told before all.
//!
//! Not here: `EPOLLONESHOT`, `EPOLLEXCLUSIVE`, `EPOLLOUT`; several threads.

use super::tests::{PATIENCE_US, client, key};
use super::*;
use crate::output::packet::{ACK, FIN, SYN};
use proptest::prelude::*;

/// The listening socket; connections have the numbers of their clients, from 1.
const LISTENER: usize = 0;
const CLIENTS: usize = 6;

#[derive(Debug, Default)]
struct Epoll {
    edge: bool,
    /// Which sockets it watches.
    watched: Vec<bool>,
    ready: VecDeque<usize>,
    /// What became ready while the list is told of: it is only there then.
    overflow: Option<Vec<usize>>,
}

impl Epoll {
    /// `ep_poll_callback`.
    fn became_ready(&mut self, socket: usize) {
        if !self.watched[socket] {
            return;
        }
        match &mut self.overflow {
            Some(overflow) if !overflow.contains(&socket) => overflow.push(socket),
            Some(_) => {}
            None if !self.ready.contains(&socket) => self.ready.push_back(socket),
            None => {}
        }
    }

    /// `ep_start_scan`.
    fn begin(&mut self) -> VecDeque<usize> {
        self.overflow = Some(Vec::new());
        std::mem::take(&mut self.ready)
    }

    /// `ep_done_scan`. The kernel's `ovflist` has the newest first, and each goes to the head.
    fn end(&mut self, untold: VecDeque<usize>) {
        for socket in self.overflow.take().unwrap_or_default().into_iter().rev() {
            if !self.ready.contains(&socket) && !untold.contains(&socket) {
                self.ready.push_front(socket);
            }
        }
        for socket in untold.into_iter().rev() {
            self.ready.push_front(socket);
        }
    }
}

/// What its thread does.
#[derive(Debug)]
enum Doing {
    Sleeps,
    /// `epoll_wait`, half-way: what is to be looked at, what was told, and for how many there is room.
    Waits(VecDeque<usize>, Vec<usize>, usize),
    /// What it was told of, and how often it has read from the first of it.
    Works(VecDeque<usize>),
}

/// One copy: sockets, `epoll`, program.
#[derive(Debug)]
struct Copy {
    epoll: Epoll,
    doing: Doing,
    /// What each socket has taken in and nobody has read, by the number in the agreed order; of the listener who wants to be accepted.
    unread: Vec<VecDeque<usize>>,
    received: Vec<u64>,
    /// What the program has read, and accepted: the same numbers.
    read: Vec<usize>,
    /// It tries the socket that it has just read once more, before it looks at the next one.
    insists: bool,
    /// For how many it has room.
    most: usize,
}

impl Copy {
    fn new(edge: bool, insists: bool, most: usize) -> Self {
        let mut watched = vec![false; CLIENTS + 1];
        watched[LISTENER] = true;
        let epoll = Epoll {
            edge,
            watched,
            ..Epoll::default()
        };
        Self {
            epoll,
            doing: Doing::Sleeps,
            unread: vec![VecDeque::new(); CLIENTS + 1],
            received: vec![0; CLIENTS + 1],
            read: Vec::new(),
            insists,
            most,
        }
    }

    fn takes_in(&mut self, input: &Agreed, number: usize) {
        let socket = match input.kind {
            Kind::Opens => LISTENER,
            Kind::Says | Kind::Ends => input.client,
        };
        self.unread[socket].push_back(number);
        self.received[input.client] += u64::from(socket != LISTENER);
        self.epoll.became_ready(socket);
    }

    /// Whether it sleeps in `epoll_wait`, and was told of all: the ready list is empty.
    fn is_quiet(&self) -> bool {
        matches!(self.doing, Doing::Sleeps) && self.epoll.ready.is_empty()
    }

    /// One small step of its thread.
    fn step(&mut self, agreed: &[Agreed]) {
        self.doing = match std::mem::replace(&mut self.doing, Doing::Sleeps) {
            Doing::Sleeps if self.epoll.ready.is_empty() => Doing::Sleeps,
            Doing::Sleeps => Doing::Waits(self.epoll.begin(), Vec::new(), self.most),
            Doing::Waits(mut to_look_at, mut told, room) => {
                match to_look_at.front().copied().filter(|_| told.len() < room) {
                    Some(socket) => {
                        to_look_at.pop_front();
                        if !self.unread[socket].is_empty() {
                            told.push(socket);
                            if !self.epoll.edge {
                                self.epoll.ready.push_back(socket);
                            }
                        }
                        Doing::Waits(to_look_at, told, room)
                    }
                    None => {
                        self.epoll.end(to_look_at);
                        match told.is_empty() {
                            true => Doing::Sleeps,
                            false => Doing::Works(told.into()),
                        }
                    }
                }
            }
            Doing::Works(mut told) => match told.front().copied() {
                None => Doing::Sleeps,
                Some(socket) => {
                    let has_read = self.reads(socket, agreed);
                    if !has_read || !(self.insists || self.epoll.edge) {
                        told.pop_front();
                    }
                    Doing::Works(told)
                }
            },
        };
    }

    /// Reads all that is there, or accepts one.
    fn reads(&mut self, socket: usize, agreed: &[Agreed]) -> bool {
        if socket == LISTENER {
            let Some(number) = self.unread[LISTENER].pop_front() else {
                return false;
            };
            let client = agreed[number].client;
            self.read.push(number);
            self.epoll.watched[client] = true;
            // `EPOLL_CTL_ADD` looks whether it is ready.
            if !self.unread[client].is_empty() {
                self.epoll.became_ready(client);
            }
            return true;
        }
        let numbers: Vec<usize> = self.unread[socket].drain(..).collect();
        self.read.extend(&numbers);
        !numbers.is_empty()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Opens,
    Says,
    Ends,
}

#[derive(Clone, Copy, Debug)]
struct Agreed {
    client: usize,
    kind: Kind,
    /// The place of its first byte.
    at: u32,
}

/// What clients say, one after the other: each opens its connection first, and says nothing after its end.
fn agreed(words: &[(usize, bool)]) -> Vec<Agreed> {
    let mut said: [Option<u32>; CLIENTS + 1] = [None; CLIENTS + 1];
    let mut ended = [false; CLIENTS + 1];
    let mut all = Vec::new();
    for &(client, ends) in words {
        if ended[client] {
            continue;
        }
        let kind = match (said[client], ends) {
            (None, _) => Kind::Opens,
            (Some(_), false) => Kind::Says,
            (Some(_), true) => Kind::Ends,
        };
        let at = *said[client].get_or_insert(0);
        all.push(Agreed { client, kind, at });
        if kind != Kind::Opens {
            said[client] = Some(at + 1);
        }
        ended[client] = kind == Kind::Ends;
    }
    all
}

fn frame(input: &Agreed) -> Frame {
    let (port, seq) = (input.client as u16, 100 + input.at);
    match input.kind {
        Kind::Opens => client(port, ACK, seq, b""),
        Kind::Says => client(port, ACK, seq, b"x"),
        Kind::Ends => client(port, ACK | FIN, seq, b""),
    }
}

/// Chance that a run has, in small numbers; when it is used up it goes on with the same.
struct Choices(std::vec::IntoIter<u8>, u64);

impl Choices {
    fn below(&mut self, most: usize) -> usize {
        // xorshift64, after what proptest has chosen and can make smaller.
        self.1 ^= self.1 << 13;
        self.1 ^= self.1 >> 7;
        self.1 ^= self.1 << 17;
        self.0.next().map_or(self.1 as usize, usize::from) % most
    }
}

/// How a copy came through.
struct Outcome {
    read: Vec<usize>,
    counters: Counters,
    /// Times and how much had been read when each was set.
    set: Vec<(u64, usize)>,
}

/// Plays one copy to its end: everything in turns by chance.
fn play(all: &[Agreed], times: &[usize], mut copy: Copy, mut chance: Choices) -> Outcome {
    let mut gate = Gate::new(Order::Batch, 1, PATIENCE_US);
    let (mut arrived, mut delivered) = (0, 0);
    let (mut set, mut steps) = (Vec::new(), 0);
    while copy.read.len() < all.len() || !gate.is_idle() {
        steps += 1;
        assert!(steps < 200_000, "it does not get on: {gate:?} {copy:?}");
        match chance.below(4) {
            0 if arrived < all.len() => {
                if times.contains(&arrived) {
                    gate.time(AgreedTime {
                        monotonic_ns: arrived as u64,
                        wall_ns: 0,
                    });
                }
                let input = &all[arrived];
                if input.kind == Kind::Opens {
                    let opens = gate.arrived(client(input.client as u16, SYN, 99, b""));
                    assert!(opens.is_some());
                }
                assert_eq!(gate.arrived(frame(input)), None);
                arrived += 1;
            }
            0 | 1 => copy.step(all),
            _ => match gate.next(0) {
                Next::Deliver(given) => {
                    assert_eq!(given, frame(&all[delivered]), "the agreed order of delivery");
                    copy.takes_in(&all[delivered], delivered);
                    delivered += 1;
                }
                Next::Ask(questions) => {
                    for question in questions {
                        // The question may be put at any time.
                        for _ in 0..chance.below(3) {
                            copy.step(all);
                        }
                        let client = (1..=CLIENTS as u16)
                            .find(|port| key(*port) == question.key)
                            .expect("a client");
                        let socket = match question.of {
                            Of::Listener => LISTENER,
                            _ => usize::from(client),
                        };
                        let (received, unread) = (copy.received[socket], copy.unread[socket].len() as u32);
                        gate.told(&question, Found::Socket { received, unread });
                    }
                }
                Next::AskForQuiet if copy.is_quiet() => gate.are_quiet(),
                Next::AskForRest if copy.is_quiet() => gate.are_at_rest(0),
                Next::Set(time) => set.push((time.monotonic_ns, copy.read.len())),
                Next::AskForQuiet | Next::AskForRest | Next::Idle => {}
                Next::Wait(_) => unreachable!("nothing waits for an answer"),
            },
        }
    }
    Outcome {
        read: copy.read,
        counters: *gate.counters(),
        set,
    }
}

/// What was seen by chance in an earlier attempt, without the rule: clients 4 7 4 4 5 1 4 (here 2 3 2 2 4 1 2), delivered as the program gets on.
#[test]
fn a_further_input_of_a_connection_that_was_just_told_takes_its_older_place() {
    let all = agreed(&[
        (1, false),
        (2, false),
        (1, false),
        (2, false),
        (1, false),
        (2, false),
    ]);
    let mut copy = Copy::new(false, false, 8);
    let settle = |copy: &mut Copy| (0..40).for_each(|_| copy.step(&all));
    for (number, input) in all.iter().enumerate().take(2) {
        copy.takes_in(input, number);
        settle(&mut copy);
    }
    // 1 is told and read, and still stands in the list.
    copy.takes_in(&all[2], 2);
    while copy.read.len() < 3 {
        copy.step(&all);
    }
    assert!(!copy.is_quiet());
    copy.takes_in(&all[3], 3);
    copy.takes_in(&all[4], 4);
    settle(&mut copy);
    assert_eq!(
        copy.read,
        [0, 1, 2, 4, 3],
        "the second input of 1 is read before the first of 2"
    );
}

fn choices() -> impl Strategy<Value = (Vec<u8>, u64)> {
    (prop::collection::vec(any::<u8>(), 0..400), 1..u64::MAX)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(proptest_cases()))]

    /// Two copies of a program that waits in `epoll`, level- or edge-triggered, with room for as many as may be, that reads once or until there is
    /// nothing more: whatever comes when, both read the agreed order, though their batches end at different places. A time is set when all before
    /// it, and nothing behind it, was read.
    #[test]
    fn invariants_1_to_4_inputs_of_a_batch_are_read_in_the_agreed_order(
        words in prop::collection::vec((1..=CLIENTS, prop::bool::weighted(0.02)), 1..80),
        times in prop::collection::vec(0_usize..80, 0..4),
        (edge, insists, most) in (any::<bool>(), any::<bool>(), 1_usize..8),
        chances in [choices(), choices()],
    ) {
        let all = agreed(&words);
        let in_order: Vec<usize> = (0..all.len()).collect();
        for (chosen, seed) in chances {
            let copy = Copy::new(edge, insists, most);
            let outcome = play(&all, &times, copy, Choices(chosen.into_iter(), seed));
            prop_assert_eq!(&outcome.read, &in_order);
            prop_assert_eq!(outcome.counters.impatient, 0);
            for (time, read) in outcome.set {
                prop_assert_eq!(time as usize, read);
            }
        }
    }
}

/// As many as for all properties, and enough for a second.
fn proptest_cases() -> u32 {
    ProptestConfig::default().cases.max(512)
}

/// It is no empty promise: inputs are unread together, and more so the slower the program is.
#[test]
fn inputs_of_several_connections_are_unread_together() {
    let words: Vec<(usize, bool)> = (0..600).map(|n| (1 + n % CLIENTS, false)).collect();
    let all = agreed(&words);
    let chance = Choices(Vec::new().into_iter(), 7);
    let outcome = play(&all, &[], Copy::new(false, false, 8), chance);
    let (together, inputs) = (outcome.counters.together, outcome.counters.inputs);
    assert!(together * 4 > inputs, "{together} of {inputs}");
}
