//! Where answers are waited for: which input is owed none now, and what follows from that until it is answered after all.
//!
//! An input that was read, while every copy is at rest and has not answered it, waits for something: a lock that another client's connection
//! holds, say, whose next input would wait for it in vain. So that is given. Whatever it does may wake who waits: as long as somebody is owed
//! an answer, an input is given only to copies that are at rest, answered or not. Else who was woken, and who comes next, would run for the lock.
//!
//! It is a copy's state, and no time, that ends a wait: so each host ends it at the same place of its copy's work, however busy it is.
//!
//! Invariants: 1. rest is looked for only where another input or a time waits, and of one that is not answered not before [`ASKED_AFTER_US`]: most answers
//! are quicker; 2. a copy that has not answered has to be found at rest twice, [`APART_US`] from each other: a thread that sleeps for a moment of its
//! own accord is at work; 3. nothing is waited for longer than the patience, and what is never at rest for
//! less than that from the second time on.
//!
//! Not here: how rest is seen (`dunlin_program::rest`).

use super::{FlowKey, Gate, Heard, Next, Order, Queued, REFUSED_SHARE, Segment};
use std::collections::BTreeMap;

/// So long an answer is just waited for.
const ASKED_AFTER_US: u64 = 2_000;
/// Between two looks that find rest.
const APART_US: u64 = 2_000;
/// A TCP sends again what its send buffer has (`tcp_wmem`). A number that is further back is of another connection between the same ends.
const REPEATED_BYTES: u32 = 16 << 20;

/// What is known of the newest input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Silence {
    /// Nothing, and it is not looked at before that time.
    Unknown { from_us: u64 },
    /// Every copy was at rest then.
    Rested { at_us: u64 },
    /// It is looked at for the second time.
    Again,
    /// It waits for something else than time.
    OwesNothing,
}

impl Silence {
    pub(super) fn since(now_us: u64) -> Self {
        Self::Unknown {
            from_us: now_us + ASKED_AFTER_US,
        }
    }

    /// Every copy is at rest.
    pub(super) fn rests(&mut self, now_us: u64) {
        *self = match *self {
            Self::Unknown { .. } => Self::Rested { at_us: now_us },
            Self::Again => Self::OwesNothing,
            known => known,
        };
    }

    /// What is to be done to know it; none where it is known that no answer is owed.
    pub(super) fn next(&mut self, now_us: u64, until_us: u64) -> Option<Next> {
        match *self {
            Self::OwesNothing => None,
            Self::Unknown { from_us } if now_us < from_us => Some(Next::Wait(until_us.min(from_us))),
            Self::Rested { at_us } if now_us < at_us + APART_US => {
                Some(Next::Wait(until_us.min(at_us + APART_US)))
            }
            Self::Rested { .. } => {
                *self = Self::Again;
                Some(Next::AskForRest)
            }
            // It was not at rest when it was looked at again.
            Self::Again => {
                *self = Self::Unknown { from_us: now_us };
                Some(Next::AskForRest)
            }
            Self::Unknown { .. } => Some(Next::AskForRest),
        }
    }
}

/// Connections whose last input is not answered, and not waited for any more.
#[derive(Debug, Default)]
pub(super) struct Owing {
    connections: usize,
    /// Every copy was at rest since the last input.
    pub(super) settled: bool,
    /// Until when that is waited for.
    until_us: Option<u64>,
}

impl Owing {
    /// Nobody waits for the answer to this one any more, if there is any to come.
    pub(super) fn keep(&mut self, heard: &mut BTreeMap<FlowKey, Heard>, key: &FlowKey, unanswered: &[bool]) {
        if let Some(heard) = heard.get_mut(key).filter(|_| unanswered.contains(&true)) {
            self.connections += usize::from(heard.owed.is_empty());
            heard.owed = unanswered.to_vec();
        }
    }

    /// A connection is forgotten.
    pub(super) fn gone(&mut self, heard: Option<&Heard>) {
        self.connections -= usize::from(heard.is_some_and(|heard| !heard.owed.is_empty()));
    }
}

impl Heard {
    /// A copy has spoken so far. Whether that is news.
    fn speaks(&mut self, copy: usize, copies: usize, to: u32) -> bool {
        self.spoken.resize(copies, None);
        let is_news = self.spoken[copy].is_none_or(|before| before.wrapping_sub(to) > REPEATED_BYTES);
        if is_news {
            self.spoken[copy] = Some(to);
        }
        is_news
    }
}

impl Gate {
    /// Every copy is done with what it has read: what [`Next::AskForRest`] asked.
    pub fn are_at_rest(&mut self, now_us: u64) {
        match (&mut self.resting, self.waiting.back_mut()) {
            (Some(resting), _) => resting.done = true,
            (None, Some(waiting)) => waiting.silence.rests(now_us),
            (None, None) => {
                self.owing.settled = true;
                self.restless = false;
            }
        }
    }

    /// A copy sent this on a connection: bytes, or its end. What its TCP sends again answers nothing: the acknowledgement of a copy's last answer comes
    /// with the client's next input, and waits for its turn as that does.
    pub fn said(&mut self, copy: usize, segment: &Segment) {
        let (copies, to) = (self.copies, segment.seq_end());
        let heard = self.heard.get_mut(&segment.key);
        if segment.rst() || heard.is_none_or(|heard| heard.speaks(copy, copies, to)) {
            self.answered(copy, &segment.key);
        }
    }

    /// A copy said something on this connection.
    pub fn answered(&mut self, copy: usize, key: &FlowKey) {
        if let Some(waiting) = self.waiting.iter_mut().find(|waiting| waiting.key == *key) {
            waiting.unanswered[copy] = false;
            waiting.is_silent = false;
        }
        if self.owing.connections == 0 {
            return;
        }
        if let Some(heard) = self.heard.get_mut(key).filter(|heard| !heard.owed.is_empty()) {
            heard.owed[copy] = false;
            if !heard.owed.contains(&true) {
                heard.owed.clear();
                self.owing.connections -= 1;
            }
        }
    }

    /// What was read and is not answered is waited for no longer, and nobody was impatient.
    pub(super) fn waits_for_another(&mut self) {
        for waiting in &mut self.waiting {
            self.owing
                .keep(&mut self.heard, &waiting.key, &waiting.unanswered);
            waiting.unanswered.fill(false);
        }
        self.owing.settled = true;
        self.counters.silent += 1;
        self.stop_waiting();
    }

    /// While the next input waits for rest.
    pub(super) fn settles(&mut self, now_us: u64) -> Option<Next> {
        let is_input = matches!(self.queue.front(), Some(Queued::Input(_)));
        if self.order != Order::Answer || self.owing.connections == 0 || self.owing.settled || !is_input {
            self.owing.until_us = None;
            return None;
        }
        let patience_us = self.patience_us / if self.restless { REFUSED_SHARE } else { 1 };
        let until_us = *self.owing.until_us.get_or_insert(now_us + patience_us);
        if now_us < until_us {
            return Some(Next::AskForRest);
        }
        self.owing.until_us = None;
        self.owing.settled = true;
        self.restless = true;
        None
    }

    pub(super) fn count_owing(&mut self) {
        self.owing.connections = self.heard.values().filter(|heard| !heard.owed.is_empty()).count();
    }
}

#[cfg(test)]
mod tests {
    use crate::agreed::Frame;
    use crate::output::packet::testing::{Seg, segment};
    use crate::output::packet::{ACK, Direction, FIN, PSH, RST, SYN};
    use crate::program::order::tests::{answer, client, key, socket};
    use crate::program::order::{Gate, Next, Of, Order};

    /// Two clients' inputs: the first one is read, waits for a lock, and owes no answer before the second one's connection has let it go.
    fn one_waits_for_another() -> (Gate, Frame) {
        let mut gate = Gate::new(Order::Answer, 2, 200_000);
        for port in [1, 2] {
            assert!(gate.arrived(client(port, SYN, 99, b"")).is_some());
            assert_eq!(gate.arrived(client(port, ACK, 100, b"")), None);
            assert!(matches!(gate.next(0), Next::Deliver(_)));
            answer(&mut gate, 0, &[socket(0, 0), socket(0, 0)], Of::Listener);
            assert_eq!(gate.next(0), Next::Idle);
        }
        assert_eq!(gate.arrived(client(1, ACK | PSH, 100, b"update")), None);
        assert!(matches!(gate.next(0), Next::Deliver(_)));
        answer(&mut gate, 0, &[socket(6, 0), socket(6, 0)], Of::Connection);
        assert_eq!(gate.next(0), Next::Wait(200_000), "nothing waits for it");
        let commit = client(2, ACK | PSH, 100, b"commit");
        assert_eq!(gate.arrived(commit.clone()), None);
        (gate, commit)
    }

    #[test]
    fn who_is_at_rest_without_an_answer_owes_none() {
        let (mut gate, commit) = one_waits_for_another();
        assert_eq!(gate.next(10), Next::Wait(2_000), "most answers are quicker");
        assert_eq!(gate.next(2_000), Next::AskForRest);
        assert_eq!(gate.next(2_100), Next::AskForRest, "it is at work");
        gate.are_at_rest(2_100);
        assert_eq!(
            gate.next(2_100),
            Next::Wait(4_100),
            "it may sleep for a moment only"
        );
        assert_eq!(gate.next(4_100), Next::AskForRest);
        gate.are_at_rest(4_100);
        assert_eq!(gate.next(4_100), Next::Deliver(commit));
        assert_eq!((gate.counters().silent, gate.counters().impatient), (1, 0));
    }

    /// `redis-benchmark` with fifty connections, each of whose requests waits for all others': a copy's TCP then sent its last answer again, which ended the
    /// wait for the next one, and the copies' clock was set in the midst of it.
    #[test]
    fn an_answer_that_is_sent_again_answers_nothing() {
        let (mut gate, commit) = one_waits_for_another();
        let says = |gate: &mut Gate, copy: usize, flags: u8, seq: u32, bytes: &[u8]| {
            let said = Seg {
                port: 1,
                ..Seg::from_vm(flags | ACK, seq, 106).with(bytes)
            };
            gate.said(copy, &segment(&said.frame(), Direction::FromVm));
        };
        // Each has numbers of its own, and may say them in the circle's last ones.
        for (copy, seq) in [(0, 500), (1, u32::MAX - 2)] {
            says(&mut gate, copy, PSH, seq, b"first");
        }
        assert_eq!(gate.next(10), Next::Deliver(commit));
        answer(&mut gate, 10, &[socket(6, 0), socket(6, 0)], Of::Connection);
        gate.answered(0, &key(2));
        gate.answered(1, &key(2));
        assert_eq!(gate.arrived(client(1, ACK | PSH, 106, b"next")), None);
        assert!(matches!(gate.next(20), Next::Deliver(_)));
        answer(&mut gate, 20, &[socket(10, 0), socket(10, 0)], Of::Connection);
        let waits = Next::Wait(200_020);
        for (copy, seq) in [(0, 500), (1, u32::MAX - 2)] {
            says(&mut gate, copy, PSH, seq, b"first");
        }
        assert_eq!(gate.next(30), waits, "both have only sent it again");
        says(&mut gate, 0, PSH, 500, b"first and next");
        says(&mut gate, 1, FIN, 2, b"");
        assert_eq!(gate.next(40), Next::Idle, "more than before, and an end");
        assert_eq!(gate.arrived(client(1, ACK | PSH, 110, b"last")), None);
        assert!(matches!(gate.next(50), Next::Deliver(_)));
        answer(&mut gate, 50, &[socket(14, 0), socket(14, 0)], Of::Connection);
        for copy in 0..2 {
            says(&mut gate, copy, RST, 2, b"");
        }
        assert_eq!(gate.next(60), Next::Idle, "a reset is an end, wherever it stands");
        assert_eq!(gate.arrived(client(1, ACK | PSH, 114, b"more")), None);
        assert!(matches!(gate.next(70), Next::Deliver(_)));
        answer(&mut gate, 70, &[socket(18, 0), socket(18, 0)], Of::Connection);
        for copy in 0..2 {
            says(&mut gate, copy, PSH, u32::MAX / 2, b"more");
        }
        assert_eq!(gate.next(80), Next::Idle, "that was another connection's end");
    }

    #[test]
    fn who_sleeps_for_a_moment_and_goes_on_owes_an_answer_still() {
        let (mut gate, commit) = one_waits_for_another();
        assert_eq!(gate.next(2_000), Next::AskForRest);
        gate.are_at_rest(2_000);
        assert_eq!(gate.next(4_000), Next::AskForRest);
        assert_eq!(gate.next(4_100), Next::AskForRest, "it is at work again");
        gate.are_at_rest(4_200);
        assert_eq!(
            gate.next(4_200),
            Next::Wait(6_200),
            "found at rest once since then"
        );
        // One copy's answer is not both's.
        gate.answered(0, &key(1));
        assert_eq!(gate.next(6_100), Next::Wait(6_200));
        gate.answered(1, &key(1));
        assert_eq!(gate.next(6_100), Next::Deliver(commit));
        assert_eq!(gate.counters().silent, 0);
    }

    #[test]
    fn who_is_never_at_rest_is_waited_for_as_long_as_patience_lasts() {
        let (mut gate, commit) = one_waits_for_another();
        assert_eq!(gate.next(199_999), Next::AskForRest);
        assert_eq!(gate.next(200_000), Next::Deliver(commit));
        assert_eq!((gate.counters().silent, gate.counters().impatient), (0, 1));
    }

    #[test]
    fn who_has_the_lock_and_is_reset_wakes_who_waits_for_it_as_well() {
        let (mut gate, commit) = one_waits_for_another();
        let (reset, next) = (client(2, RST, 106, b""), client(2, ACK | PSH, 106, b"next"));
        for (at_us, found) in [(2_000, Next::Wait(4_000)), (4_000, Next::Deliver(commit))] {
            assert_eq!(gate.next(at_us), Next::AskForRest);
            gate.are_at_rest(at_us);
            assert_eq!(gate.next(at_us), found);
        }
        answer(&mut gate, 4_000, &[socket(6, 0), socket(6, 0)], Of::Connection);
        gate.answered(0, &key(2));
        gate.answered(1, &key(2));
        for frame in [reset, next] {
            assert_eq!(gate.arrived(frame.clone()), None);
            assert_eq!(gate.next(4_100), Next::AskForRest, "its program has been told");
            gate.are_at_rest(4_200);
            assert_eq!(gate.next(4_200), Next::Deliver(frame));
        }
    }

    #[test]
    fn while_somebody_is_owed_an_answer_the_next_input_waits_for_rest() {
        let (mut gate, _) = one_waits_for_another();
        let begin = client(2, ACK | PSH, 106, b"begin");
        assert_eq!(gate.arrived(begin.clone()), None);
        for at_us in [2_000, 4_000] {
            assert_eq!(gate.next(at_us), Next::AskForRest);
            gate.are_at_rest(at_us);
            let _ = gate.next(at_us);
        }
        answer(&mut gate, 4_100, &[socket(6, 0), socket(6, 0)], Of::Connection);
        for copy in [0, 1] {
            gate.answered(copy, &key(2));
        }
        // It is answered; who waited for the lock has been woken by it.
        assert_eq!(gate.next(4_200), Next::AskForRest);
        assert_eq!(gate.next(4_300), Next::AskForRest);
        // A copy of the program goes on with that.
        let mut other = Gate::new(Order::Answer, 2, 200_000);
        let queued = std::mem::take(&mut gate.queue);
        other.load(gate.table()).expect("its own table");
        assert_eq!(other.owing.connections, 1);
        gate.queue = queued;
        // One copy has answered; the other one is slower.
        gate.answered(0, &key(1));
        assert_eq!(gate.next(4_400), Next::AskForRest);
        gate.are_at_rest(4_500);
        assert_eq!(gate.next(4_500), Next::Deliver(begin));
        answer(&mut gate, 4_600, &[socket(11, 0), socket(11, 0)], Of::Connection);
        for (copy, port) in [(0, 2), (1, 2), (1, 1)] {
            gate.answered(copy, &key(port));
        }
        let insert = client(2, ACK | PSH, 111, b"insert");
        assert_eq!(gate.arrived(insert.clone()), None);
        assert_eq!(gate.next(4_700), Next::Deliver(insert), "nobody is owed anything");
    }

    #[test]
    fn who_is_owed_an_answer_for_ever_costs_the_others_the_patience_at_most_and_is_forgotten_with_its_connection()
     {
        let (mut gate, commit) = one_waits_for_another();
        assert_eq!(gate.next(200_000), Next::Deliver(commit), "it was never at rest");
        answer(&mut gate, 200_000, &[socket(6, 0), socket(6, 0)], Of::Connection);
        for copy in [0, 1] {
            gate.answered(copy, &key(2));
        }
        let begin = client(2, ACK | PSH, 106, b"begin");
        assert_eq!(gate.arrived(begin.clone()), None);
        assert_eq!(gate.next(200_000), Next::AskForRest);
        assert_eq!(gate.next(399_999), Next::AskForRest);
        assert_eq!(gate.next(400_000), Next::Deliver(begin));
        assert_eq!(gate.arrived(client(1, RST, 106, b"")), None);
        answer(
            &mut gate,
            400_000,
            &[socket(11, 0), socket(11, 0)],
            Of::Connection,
        );
        for copy in [0, 1] {
            gate.answered(copy, &key(2));
        }
        assert_eq!(
            gate.next(400_000),
            Next::AskForRest,
            "its end is an input as others"
        );
        let soon = 400_000 + 200_000 / 64;
        assert_eq!(gate.next(soon - 1), Next::AskForRest);
        assert!(matches!(gate.next(soon), Next::Deliver(_)));
        assert_eq!(gate.owing.connections, 0);
    }
}
