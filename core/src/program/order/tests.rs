//! The gate, frame by frame, as the driver would play it.

use super::*;
use crate::output::packet::testing::{Seg, segment};
use crate::output::packet::{ACK, FIN, RST, SYN};
use proptest::prelude::*;

pub(super) const PATIENCE_US: u64 = 1000;

pub(super) fn client(port: u16, flags: u8, seq: u32, payload: &[u8]) -> Frame {
    let seg = Seg {
        port,
        ..Seg::to_vm(flags, seq, 1).with(payload)
    };
    seg.frame()
}

pub(super) fn key(port: u16) -> FlowKey {
    segment(&client(port, ACK, 1, b""), Direction::ToVm).key
}

fn gate(order: Order) -> Gate {
    Gate::new(order, 2, PATIENCE_US)
}

/// A gate whose client `port` has connected: its first number is 99, and both copies have accepted it.
pub(super) fn connected(order: Order, ports: &[u16]) -> Gate {
    let mut gate = gate(order);
    for port in ports {
        assert!(
            gate.arrived(client(*port, SYN, 99, b"")).is_some(),
            "a SYN waits for nothing"
        );
        let opens = gate.arrived(client(*port, ACK, 100, b""));
        if order == Order::Delivery {
            assert!(opens.is_some());
            continue;
        }
        assert_eq!(
            opens, None,
            "the end of a handshake is an input: somebody has to accept"
        );
        assert!(matches!(gate.next(0), Next::Deliver(_)));
        answer(&mut gate, 0, &[socket(0, 0), socket(0, 0)], Of::Listener);
        assert_eq!(gate.next(0), Next::Idle);
    }
    gate
}

/// The question about the first client's connection.
fn of_first(copy: usize) -> Question {
    let (key, of) = (key(1), Of::Connection);
    Question { copy, key, of }
}

pub(super) fn socket(received: u64, unread: u32) -> Found {
    Found::Socket { received, unread }
}

/// The gate asks both copies, and is told this.
pub(super) fn answer(gate: &mut Gate, now_us: u64, found: &[Found; 2], of: Of) {
    let Next::Ask(questions) = gate.next(now_us) else {
        panic!("no question");
    };
    for question in questions {
        assert_eq!(question.of, of);
        gate.told(&question, found[question.copy]);
    }
}

#[test]
fn an_order_of_delivery_waits_for_nothing() {
    let mut gate = connected(Order::Delivery, &[1]);
    for n in 0..3 {
        assert!(gate.arrived(client(1, ACK, 100 + n, b"x")).is_some());
    }
    assert_eq!(gate.next(0), Next::Idle);
    assert_eq!(gate.counters().inputs, 4);
}

#[test]
fn the_next_input_waits_until_every_copy_has_read_the_last() {
    let mut gate = connected(Order::Read, &[1, 2]);
    let (first, second) = (client(1, ACK, 100, b"first"), client(2, ACK, 100, b"second"));
    assert_eq!(gate.arrived(first.clone()), None);
    assert_eq!(gate.arrived(second.clone()), None);
    assert_eq!(gate.next(0), Next::Deliver(first));
    // Copy 0 has read it; in copy 1 it is not even in the socket yet: it waits for the lock that the program holds.
    answer(&mut gate, 1, &[socket(5, 0), socket(0, 0)], Of::Connection);
    assert_eq!(
        gate.next(2),
        Next::Ask(vec![Question {
            copy: 1,
            key: key(1),
            of: Of::Connection
        }])
    );
    assert!(!gate.told(&of_first(1), socket(5, 5)), "it is there, and unread");
    assert!(gate.told(&of_first(1), socket(5, 0)));
    assert_eq!(gate.next(3), Next::Deliver(second));
    assert_eq!(gate.counters().impatient, 0);
}

#[test]
fn what_is_behind_a_hole_is_not_waited_for_and_what_fills_it_is() {
    let mut gate = connected(Order::Read, &[1, 2]);
    let (filling, behind) = (client(1, ACK, 100, b"first"), client(1, ACK, 105, b"second"));
    let other = client(2, ACK, 100, b"x");
    for frame in [&behind, &other, &filling] {
        assert_eq!(gate.arrived(frame.clone()), None);
    }
    assert_eq!(gate.next(0), Next::Deliver(behind.clone()));
    assert_eq!(
        gate.next(0),
        Next::Deliver(other),
        "nobody can read what is behind a hole"
    );
    answer(&mut gate, 1, &[socket(1, 0), socket(1, 0)], Of::Connection);
    assert_eq!(gate.next(2), Next::Deliver(filling));
    // Both have come together now, and one copy has read the first alone.
    answer(&mut gate, 3, &[socket(11, 0), socket(11, 6)], Of::Connection);
    assert!(matches!(gate.next(4), Next::Ask(_)));
    assert!(gate.told(&of_first(1), socket(11, 0)));
    assert_eq!(gate.next(5), Next::Idle);
    // Said once more, it is no news.
    assert_eq!(gate.arrived(behind.clone()), None);
    assert_eq!(gate.next(6), Next::Deliver(behind));
    assert_eq!(gate.next(8), Next::Idle);
    assert_eq!(gate.counters().impatient, 0);
}

#[test]
fn an_acknowledgement_waits_for_nothing() {
    let mut gate = connected(Order::Read, &[1]);
    assert_eq!(gate.arrived(client(1, ACK, 100, b"x")), None);
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    // A copy that waits for room to write reads nothing before this one comes.
    assert!(gate.arrived(client(1, ACK, 101, b"")).is_some());
}

#[test]
fn a_copy_that_refuses_to_read_is_waited_for_once() {
    let mut gate = connected(Order::Read, &[1, 2]);
    for n in 0..3 {
        assert_eq!(gate.arrived(client(1, ACK, 100 + n, b"x")), None);
    }
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    answer(
        &mut gate,
        PATIENCE_US - 1,
        &[socket(1, 0), socket(1, 1)],
        Of::Connection,
    );
    assert!(
        matches!(gate.next(PATIENCE_US), Next::Deliver(_)),
        "the patience is over"
    );
    assert_eq!(gate.counters().impatient, 1);
    answer(
        &mut gate,
        PATIENCE_US,
        &[socket(2, 0), socket(2, 2)],
        Of::Connection,
    );
    let soon = PATIENCE_US + PATIENCE_US / REFUSED_SHARE + 1;
    assert!(
        matches!(gate.next(soon), Next::Deliver(_)),
        "it is not given so much again"
    );
    // It reads again: it is waited for as any other.
    answer(&mut gate, soon, &[socket(3, 0), socket(3, 0)], Of::Connection);
    assert_eq!(gate.next(soon), Next::Idle);
    assert_eq!(gate.arrived(client(1, ACK, 103, b"x")), None);
    assert!(matches!(gate.next(soon), Next::Deliver(_)));
    assert!(matches!(gate.next(soon + PATIENCE_US - 1), Next::Ask(_)));
}

#[test]
fn a_socket_that_is_closed_is_read() {
    let mut gate = connected(Order::Answer, &[1]);
    assert_eq!(gate.arrived(client(1, ACK | PSH, 100, b"x")), None);
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    answer(&mut gate, 0, &[Found::Gone, Found::Gone], Of::Connection);
    assert_eq!(gate.next(0), Next::Idle);
}

#[test]
fn an_answer_is_waited_for_where_one_may_come() {
    let mut gate = connected(Order::Answer, &[1]);
    // Half of a request: only its last part can be answered.
    for (seq, flags) in [(100, ACK), (101, ACK | PSH)] {
        assert_eq!(gate.arrived(client(1, flags, seq, b"x")), None);
    }
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    answer(&mut gate, 0, &[socket(1, 0), socket(1, 0)], Of::Connection);
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    answer(&mut gate, 0, &[socket(2, 0), socket(2, 0)], Of::Connection);
    assert_eq!(gate.next(0), Next::Wait(PATIENCE_US));
    gate.answered(0, &key(1));
    gate.answered(1, &key(2));
    assert_eq!(
        gate.next(1),
        Next::Wait(PATIENCE_US),
        "another connection's answer is none"
    );
    gate.answered(1, &key(1));
    assert_eq!(gate.next(1), Next::Idle);
}

#[test]
fn what_a_client_repeats_is_no_input() {
    let mut gate = connected(Order::Answer, &[1]);
    let question = client(1, ACK | PSH, 100, b"x");
    // Its TCP says it again when it has waited for a while.
    assert_eq!(gate.arrived(question.clone()), None);
    assert_eq!(gate.arrived(question), None);
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    answer(&mut gate, 0, &[socket(1, 0), socket(1, 0)], Of::Connection);
    gate.answered(0, &key(1));
    gate.answered(1, &key(1));
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    assert_eq!(gate.next(0), Next::Idle, "it owes no second answer");
    assert_eq!(gate.counters().inputs, 2, "the connection and the question");
}

#[test]
fn an_end_is_read_like_bytes() {
    let mut gate = connected(Order::Read, &[1]);
    assert_eq!(gate.arrived(client(1, ACK | FIN, 100, b"bye")), None);
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    answer(&mut gate, 0, &[socket(4, 1), socket(4, 0)], Of::Connection);
    assert!(matches!(gate.next(0), Next::Ask(_)));
    gate.told(&of_first(0), socket(4, 0));
    assert_eq!(gate.next(0), Next::Idle);
}

proptest! {
    /// Whatever arrives and however slowly the copies read: every copy gets every input once, in the order of arrival, and none
    /// while another is unread.
    #[test]
    fn inputs_are_read_in_the_order_of_arrival(
        ports in prop::collection::vec(1_u16..6, 1..60),
        slow in prop::collection::vec(0_u8..4, 200),
        first in any::<u32>(),
    ) {
        let mut gate = gate(Order::Read);
        let mut said = [0_u64; 6];
        for port in 1..6 {
            prop_assert!(gate.arrived(client(port, SYN, first, b"")).is_some());
        }
        let mut arrived = Vec::new();
        for port in ports {
            let at = &mut said[usize::from(port)];
            let frame = client(port, ACK, first.wrapping_add(1).wrapping_add(*at as u32), b"abc");
            *at += 3;
            arrived.push((frame.clone(), *at));
            prop_assert_eq!(gate.arrived(frame), None);
        }
        let (mut delivered, mut unread, mut slow) = (0, [false; 2], slow.into_iter().cycle());
        loop {
            match gate.next(0) {
                Next::Set(_) | Next::AskForRest | Next::AskForQuiet => unreachable!("no time was agreed"),
                Next::Deliver(frame) => {
                    prop_assert!(!unread.contains(&true));
                    prop_assert_eq!(&frame, &arrived[delivered].0);
                    delivered += 1;
                    unread = [true; 2];
                }
                Next::Ask(questions) => for question in questions {
                    let reads = slow.next() == Some(0);
                    unread[question.copy] &= !reads;
                    let received = arrived[delivered - 1].1;
                    gate.told(&question, socket(received, u32::from(!reads)));
                },
                Next::Idle => break,
                Next::Wait(_) => prop_assert!(false, "nothing waits for an answer"),
            }
        }
        prop_assert_eq!(delivered, arrived.len());
        prop_assert_eq!(gate.counters().impatient, 0);
    }
}

#[test]
fn what_waits_is_bounded() {
    let mut gate = connected(Order::Read, &[1]);
    let block = vec![7; 48 << 10];
    let most = MOST_WAITING_BYTES / block.len();
    for n in 0..most as u32 + 3 {
        assert_eq!(gate.arrived(client(1, ACK, 100 + n, &block)), None);
    }
    let lost = gate.counters().lost;
    assert!((3..6).contains(&lost), "{lost}");
}

#[test]
fn a_copy_counts_anew_from_where_its_client_stood() {
    let mut first = connected(Order::Read, &[1, 2]);
    assert_eq!(first.arrived(client(1, ACK, 100, b"abc")), None);
    assert!(matches!(first.next(0), Next::Deliver(_)));
    answer(&mut first, 0, &[socket(3, 0), socket(3, 0)], Of::Connection);
    assert_eq!(first.next(0), Next::Idle);
    let mut copy = gate(Order::Read);
    copy.load(first.table()).expect("its own table");
    assert_eq!(copy.table(), first.table());
    copy.time(time(7));
    assert_eq!(copy.next(0), Next::AskForRest, "its last input may be under way");
    copy.are_at_rest(0);
    assert_eq!(copy.next(0), Next::Set(time(7)));
    // Both go on from here; the copy's kernel has taken in nothing yet.
    assert_eq!(copy.arrived(client(1, ACK, 103, b"de")), None);
    assert!(matches!(copy.next(0), Next::Deliver(_)));
    answer(&mut copy, 0, &[socket(0, 0), socket(0, 0)], Of::Connection);
    assert!(matches!(copy.next(0), Next::Ask(_)), "it has not arrived");
    answer(&mut copy, 0, &[socket(2, 0), socket(2, 0)], Of::Connection);
    assert_eq!(copy.next(0), Next::Idle);
    // What was delivered before is nothing new.
    assert_eq!(copy.arrived(client(1, ACK, 100, b"abc")), None);
    assert!(matches!(copy.next(0), Next::Deliver(_)));
    assert_eq!(copy.next(0), Next::Idle);
}

proptest! {
    #[test]
    fn a_table_that_is_none_changes_nothing(bytes in prop::collection::vec(any::<u8>(), 0..80), cut in any::<prop::sample::Index>()) {
        let mut gate = connected(Order::Read, &[1, 2]);
        let before = gate.table();
        let _ = gate.load(bytes.into());
        let mut gate = connected(Order::Read, &[1, 2]);
        prop_assert!(gate.load(before.slice(..cut.index(before.len()))).is_err());
        prop_assert_eq!(gate.table(), before);
    }
}

/// A loss once made every later segment of its connection one behind a hole, and none of them was waited for.
#[test]
fn after_a_hole_is_filled_a_connection_is_waited_for_again() {
    let mut gate = connected(Order::Read, &[1]);
    for (seq, payload) in [(103, b"def"), (106, b"ghi"), (100, b"abc")] {
        assert_eq!(gate.arrived(client(1, ACK, seq, payload)), None);
        assert!(matches!(gate.next(0), Next::Deliver(_)));
    }
    // The hole is filled: all of it has to be read.
    answer(&mut gate, 0, &[socket(3, 0), socket(3, 0)], Of::Connection);
    assert!(matches!(gate.next(0), Next::Ask(_)), "what lay behind the hole");
    answer(&mut gate, 0, &[socket(9, 0), socket(9, 0)], Of::Connection);
    assert_eq!(gate.next(0), Next::Idle);
    assert_eq!(gate.arrived(client(1, ACK, 109, b"jkl")), None);
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    answer(&mut gate, 0, &[socket(9, 0), socket(9, 0)], Of::Connection);
    assert!(matches!(gate.next(0), Next::Ask(_)), "it is waited for as before");
    answer(&mut gate, 0, &[socket(12, 0), socket(12, 0)], Of::Connection);
    assert_eq!(gate.next(0), Next::Idle);
}

/// What the gate remembers behind the holes of a connection.
fn beyond(gate: &Gate, port: u16) -> Vec<(u64, u64)> {
    let ranges = gate.heard[&key(port)].beyond.iter();
    ranges.map(|(from, to)| (*from, *to)).collect()
}

/// All of these arrive, and are delivered.
fn hear(gate: &mut Gate, port: u16, segments: impl IntoIterator<Item = (u32, usize)>) {
    for (seq, length) in segments {
        assert_eq!(gate.arrived(client(port, ACK, seq, &vec![b'x'; length])), None);
        assert!(matches!(gate.next(0), Next::Deliver(_)));
    }
}

#[test]
fn what_touches_behind_a_hole_is_one_range_and_what_is_said_again_none() {
    let mut gate = connected(Order::Read, &[1]);
    hear(&mut gate, 1, [(110, 5), (120, 5), (110, 5), (112, 2)]);
    assert_eq!(beyond(&gate, 1), [(10, 15), (20, 25)]);
    hear(&mut gate, 1, [(115, 5)]);
    assert_eq!(beyond(&gate, 1), [(10, 25)], "it fills what lay between");
    hear(&mut gate, 1, [(130, 5), (140, 5), (105, 60)]);
    assert_eq!(beyond(&gate, 1), [(5, 65)], "it covers all of them");
    assert_eq!(gate.beyond, 1);
    // The hole is filled: all of it has to be read, and nothing is left.
    hear(&mut gate, 1, [(100, 5)]);
    assert_eq!(gate.beyond, 0);
    answer(&mut gate, 0, &[socket(64, 0), socket(65, 0)], Of::Connection);
    assert!(matches!(gate.next(0), Next::Ask(_)));
}

#[test]
fn ranges_behind_holes_cost_bounded_memory_over_all_connections() {
    let connections = (MOST_BEYOND_IN_ALL / MOST_BEYOND) as u16 + 3;
    let ports: Vec<u16> = (1..=connections).collect();
    let mut gate = connected(Order::Read, &ports);
    // Every second byte: no two of them touch.
    let holes = |count: usize| (0..count as u32).map(|n| (102 + 2 * n, 1));
    hear(&mut gate, 1, holes(MOST_BEYOND + 9));
    assert_eq!(beyond(&gate, 1).len(), MOST_BEYOND, "one connection's");
    for port in &ports[1..] {
        hear(&mut gate, *port, holes(MOST_BEYOND));
    }
    assert_eq!(gate.beyond, MOST_BEYOND_IN_ALL);
    let kept: usize = gate.heard.values().map(|heard| heard.beyond.len()).sum();
    assert_eq!(kept, MOST_BEYOND_IN_ALL);
    // What is there already may grow, and a connection that goes leaves its room to others.
    hear(&mut gate, 1, [(102, 2)]);
    assert_eq!(gate.beyond, MOST_BEYOND_IN_ALL - 1, "two became one");
    assert_eq!(gate.arrived(client(2, RST, 100, b"")), None);
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    assert_eq!(gate.beyond, MOST_BEYOND_IN_ALL - 1 - MOST_BEYOND);
    // One that begins anew has nothing behind a hole.
    assert!(gate.arrived(client(3, SYN, 5000, b"")).is_some());
    assert_eq!(gate.beyond, MOST_BEYOND_IN_ALL - 1 - 2 * MOST_BEYOND);
}

#[test]
fn nothing_is_kept_for_who_has_not_finished_its_handshake() {
    let mut gate = gate(Order::Read);
    assert!(gate.arrived(client(1, SYN, 99, b"")).is_some());
    hear(&mut gate, 1, (0..9).map(|n| (200 + 10 * n, 1)));
    assert_eq!(gate.beyond, 0);
    assert!(beyond(&gate, 1).is_empty());
}

/// A client that says nothing but its SYN.
fn mute(port: u16) -> Frame {
    let seg = Seg {
        port,
        v6: true,
        ..Seg::to_vm(SYN, 7, 1)
    };
    seg.frame()
}

/// Those that have not ended.
fn followed(gate: &Gate) -> Vec<FlowKey> {
    let open = gate.heard.iter().filter(|(_, heard)| !heard.ended);
    open.map(|(key, _)| *key).collect()
}

/// They once filled the table for good.
#[test]
fn handshakes_that_nobody_ends_keep_no_connection_out_and_both_hosts_forget_the_same_ones() {
    let mut fast = connected(Order::Read, &[1, 2]);
    assert!(fast.arrived(client(3, SYN, 99, b"")).is_some());
    for port in (0..=u16::MAX).rev() {
        assert!(fast.arrived(mute(port)).is_some());
    }
    assert_eq!(fast.heard.len(), MOST_CONNECTIONS);
    let is_followed = |gate: &Gate, port| gate.heard.contains_key(&key(port));
    assert!(!is_followed(&fast, 3), "the longest in its handshake");
    assert!(is_followed(&fast, 1) && is_followed(&fast, 2));
    // Another host's copy goes on from here, and has not delivered the reset when the others begin.
    let mut slow = gate(Order::Read);
    slow.load(fast.table()).expect("its own table");
    for gate in [&mut fast, &mut slow] {
        assert_eq!(gate.arrived(client(2, RST, 100, b"")), None);
    }
    assert!(matches!(fast.next(0), Next::Deliver(_)));
    assert_eq!(fast.heard.len(), MOST_CONNECTIONS - 1);
    for gate in [&mut fast, &mut slow] {
        for port in 4..9 {
            assert!(gate.arrived(client(port, SYN, 99, b"")).is_some());
        }
        assert!(gate.arrived(client(2, SYN, 5000, b"")).is_some());
        let opens = gate.arrived(client(4, ACK, 100, b""));
        assert_eq!(opens, None, "the end of its handshake is an input");
        assert_eq!(gate.heard.len(), MOST_CONNECTIONS);
    }
    assert_eq!(followed(&fast), followed(&slow));
    assert!(matches!(slow.next(0), Next::Deliver(_)));
    assert!(is_followed(&slow, 2), "it has begun anew");
    assert_eq!(followed(&fast), followed(&slow));
}

proptest! {
    /// Whatever arrives in whatever order: ranges never touch, their number is known, and when the last hole is filled all counts.
    #[test]
    fn ranges_behind_holes_are_what_was_said(mut places in prop::collection::vec((1_u32..200, 1_usize..20), 1..60)) {
        let mut gate = connected(Order::Read, &[1]);
        places.retain(|(at, length)| at + *length as u32 <= 200);
        hear(&mut gate, 1, places.iter().map(|(at, length)| (100 + at, *length)));
        let ranges = beyond(&gate, 1);
        prop_assert_eq!(ranges.len(), gate.beyond);
        prop_assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
        let said = |place: u64| places.iter().any(|(at, length)| {
            (u64::from(*at)..u64::from(*at) + *length as u64).contains(&place)
        });
        let known = |place: u64| ranges.iter().any(|(from, to)| (*from..*to).contains(&place));
        prop_assert!((0..220).all(|place| said(place) == known(place)));
    }
}

fn time(ns: u64) -> AgreedTime {
    AgreedTime {
        monotonic_ns: ns,
        wall_ns: ns,
    }
}

#[test]
fn invariant_5_a_time_waits_until_the_copies_are_done_and_what_came_behind_it_waits_for_it() {
    let mut gate = connected(Order::Read, &[1]);
    let (first, second) = (client(1, ACK, 100, b"a"), client(1, ACK, 101, b"b"));
    assert_eq!(gate.arrived(first.clone()), None);
    gate.time(time(7));
    assert_eq!(gate.arrived(second.clone()), None);
    assert_eq!(gate.next(0), Next::Deliver(first));
    answer(&mut gate, 0, &[socket(1, 0), socket(1, 0)], Of::Connection);
    assert_eq!(gate.next(0), Next::AskForRest);
    assert_eq!(gate.next(10), Next::AskForRest, "it is still at its input");
    assert!(!gate.is_idle());
    gate.are_at_rest(0);
    assert_eq!(gate.next(20), Next::Set(time(7)));
    assert_eq!(gate.next(20), Next::Deliver(second));
}

#[test]
fn a_time_behind_nothing_is_set_at_once_and_of_several_the_last_one() {
    let mut gate = connected(Order::Read, &[1]);
    gate.time(time(1));
    assert_eq!(gate.next(0), Next::AskForRest, "it has accepted a connection");
    gate.are_at_rest(0);
    assert_eq!(gate.next(0), Next::Set(time(1)));
    gate.time(time(2));
    gate.time(time(3));
    assert_eq!(gate.next(0), Next::Set(time(3)));
    assert_eq!(gate.next(0), Next::Idle);
    assert_eq!(gate.counters().restless, 0);
}

#[test]
fn a_program_that_is_never_at_rest_is_waited_for_once_and_then_for_less() {
    let mut gate = connected(Order::Read, &[1]);
    gate.time(time(1));
    assert_eq!(gate.next(0), Next::AskForRest);
    assert_eq!(gate.next(PATIENCE_US), Next::Set(time(1)));
    assert!(gate.arrived(client(1, ACK, 100, b"a")).is_none());
    gate.time(time(2));
    assert!(matches!(gate.next(PATIENCE_US), Next::Deliver(_)));
    answer(
        &mut gate,
        PATIENCE_US,
        &[socket(1, 0), socket(1, 0)],
        Of::Connection,
    );
    assert_eq!(gate.next(PATIENCE_US), Next::AskForRest);
    let soon = PATIENCE_US + PATIENCE_US / REFUSED_SHARE;
    assert_eq!(gate.next(soon), Next::Set(time(2)));
    assert_eq!(gate.counters().restless, 2);
}

#[test]
fn in_the_order_of_delivery_too_an_input_waits_for_the_time_before_it() {
    let mut gate = connected(Order::Delivery, &[1]);
    gate.time(time(1));
    let input = client(1, ACK, 100, b"x");
    assert_eq!(gate.arrived(input.clone()), None);
    assert_eq!(gate.next(0), Next::AskForRest);
    gate.are_at_rest(0);
    assert_eq!(gate.next(0), Next::Set(time(1)));
    assert_eq!(gate.next(0), Next::Deliver(input));
    assert_eq!(gate.next(0), Next::Idle);
}

proptest! {
    /// However inputs and times come, and whatever is found: what is set and delivered has the order in which it came, and a time that is
    /// left out had nothing behind it.
    #[test]
    fn times_and_inputs_keep_their_order(steps in prop::collection::vec((any::<bool>(), any::<bool>()), 1..60)) {
        let mut gate = connected(Order::Read, &[1]);
        let (mut now_us, mut sent, mut delivered) = (0, 0_u32, 0_u32);
        let (mut said, mut set) = (Vec::new(), Vec::new());
        for (is_time, rests) in steps {
            if is_time {
                said.push((said.len() as u64 + 1, sent));
                gate.time(time(said.len() as u64));
            } else {
                prop_assert!(gate.arrived(client(1, ACK, 100 + sent, b"x")).is_none());
                sent += 1;
            }
            loop {
                match gate.next(now_us) {
                    Next::Idle => break,
                    Next::Wait(until_us) => now_us = until_us,
                    Next::AskForQuiet => unreachable!("no batches"),
                    Next::AskForRest if rests => gate.are_at_rest(now_us),
                    Next::AskForRest => now_us += PATIENCE_US,
                    Next::Set(time) => set.push((time.wall_ns, delivered)),
                    Next::Deliver(_) => delivered += 1,
                    Next::Ask(questions) => for question in questions {
                        gate.told(&question, socket(u64::from(delivered), 0));
                    },
                }
            }
        }
        prop_assert_eq!(delivered, sent);
        prop_assert_eq!(set, said);
    }
}
