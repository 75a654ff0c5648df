//! What goes into a batch and what goes alone, frame by frame, as the driver would play it.

use crate::output::packet::{ACK, FIN, SYN};
use crate::program::order::batch::{
    ALONE_SHARE, ASKED_EACH, BY_CHANCE_SHARE, MOST_DOUBLED, QUIET_SHARE, SURE,
};
use crate::program::order::tests::{PATIENCE_US, answer, client, connected, key, socket};
use crate::program::order::{Gate, Next, Of, Order, REFUSED_SHARE};

/// A gate for batches whose clients were read once, and whose copies are quiet.
fn batching(ports: &[u16]) -> Gate {
    let mut gate = connected(Order::Batch, ports);
    for port in ports {
        assert_eq!(gate.arrived(client(*port, ACK, 100, b"a")), None);
        assert!(matches!(gate.next(0), Next::Deliver(_)));
        answer(&mut gate, 0, &[socket(1, 0), socket(1, 0)], Of::Connection);
    }
    assert_eq!(gate.next(0), Next::Idle);
    gate
}

#[test]
fn a_batch_has_one_input_of_a_connection_and_the_next_one_waits_until_all_are_read_and_quiet() {
    let mut gate = batching(&[1, 2, 3]);
    for (port, seq) in [(1, 101), (2, 101), (1, 102), (3, 101)] {
        assert_eq!(gate.arrived(client(port, ACK, seq, b"b")), None);
    }
    assert_eq!(gate.next(0), Next::AskForQuiet);
    assert_eq!(gate.next(0), Next::AskForQuiet, "not yet");
    gate.are_quiet();
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    assert_eq!(
        gate.next(0),
        Next::Deliver(client(2, ACK, 101, b"b")),
        "of another"
    );
    assert_eq!(
        gate.next(0),
        Next::AskForQuiet,
        "the first one's second, and what is behind it"
    );
    gate.are_quiet();
    let Next::Ask(questions) = gate.next(0) else {
        panic!("quiet is not read: it may have refused to");
    };
    assert_eq!(questions.len(), 4, "both inputs, both copies");
    for question in questions {
        assert!(gate.told(&question, socket(2, 0)));
    }
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    assert_eq!(gate.next(0), Next::Deliver(client(3, ACK, 101, b"b")));
    assert_eq!(gate.counters().together, 2);
}

#[test]
fn what_is_new_large_or_an_end_goes_alone() {
    let mut gate = batching(&[1, 2]);
    assert!(gate.arrived(client(3, SYN, 99, b"")).is_some());
    let large = vec![b'x'; 1461];
    let alone = [
        client(3, ACK, 100, b""),
        client(3, ACK, 100, b"first"),
        client(1, ACK, 101, &large),
        client(2, ACK | FIN, 101, b""),
    ];
    let (ofs, received) = (
        [Of::Listener, Of::Connection, Of::Connection, Of::Connection],
        2000,
    );
    for frame in alone.iter().chain([&client(1, ACK, 1562, b"x")]) {
        assert_eq!(gate.arrived(frame.clone()), None);
    }
    for (frame, of) in alone.into_iter().zip(ofs) {
        assert_eq!(gate.next(0), Next::Deliver(frame));
        answer(&mut gate, 0, &[socket(received, 0), socket(received, 0)], of);
    }
    assert_eq!(gate.next(0), Next::AskForQuiet);
}

#[test]
fn where_nobody_can_know_that_copies_are_quiet_or_they_are_not_for_long_inputs_go_alone() {
    let mut gate = batching(&[1, 2]);
    let say = |gate: &mut Gate, seq: u32| {
        for port in [1, 2] {
            assert_eq!(gate.arrived(client(port, ACK, seq, b"b")), None);
        }
    };
    let read_alone = |gate: &mut Gate, now_us: u64, received: u64| {
        for _ in 0..2 {
            assert!(matches!(gate.next(now_us), Next::Deliver(_)));
            answer(
                gate,
                now_us,
                &[socket(received, 0), socket(received, 0)],
                Of::Connection,
            );
        }
        assert_eq!(gate.next(now_us), Next::Idle);
    };
    say(&mut gate, 101);
    assert_eq!(gate.next(0), Next::AskForQuiet);
    gate.cannot_be_quiet(0);
    read_alone(&mut gate, 1, 2);
    // It is asked again a while later.
    let now_us = 1_000_001;
    say(&mut gate, 102);
    assert_eq!(gate.next(now_us), Next::AskForQuiet);
    read_alone(&mut gate, now_us + PATIENCE_US / REFUSED_SHARE, 3);
    assert_eq!(gate.counters().impatient, 0);
}

/// A batch of two that was read at once by a program that is found quiet for `share` of the patience no more. When it was read.
fn read_and_never_quiet(gate: &mut Gate, seq: u32, now_us: u64, share: u64) -> u64 {
    both_say(gate, seq);
    assert_eq!(gate.next(now_us), Next::AskForQuiet);
    gate.are_quiet();
    assert!(matches!(gate.next(now_us), Next::Deliver(_)));
    assert!(matches!(gate.next(now_us), Next::Deliver(_)));
    let until_us = now_us + PATIENCE_US / share;
    assert_eq!(gate.next(until_us - 1), Next::AskForQuiet);
    let Next::Ask(questions) = gate.next(until_us) else {
        panic!("it is asked what it has read");
    };
    for question in questions {
        assert!(gate.told(&question, socket(u64::from(seq) - 99, 0)));
    }
    assert_eq!(gate.next(until_us), Next::Idle);
    until_us
}

#[test]
fn a_program_that_is_quiet_by_chance_alone_is_waited_for_once_and_then_not_for_long() {
    let mut gate = batching(&[1, 2]);
    let mut now_us = read_and_never_quiet(&mut gate, 101, 0, QUIET_SHARE);
    // Inputs go alone for a while, so no batch is asked about, or waited for.
    for seq in 102..105 {
        both_say(&mut gate, seq);
        for _ in 0..2 {
            assert!(matches!(gate.next(now_us), Next::Deliver(_)));
            let read = socket(u64::from(seq) - 99, 0);
            answer(&mut gate, now_us, &[read; 2], Of::Connection);
        }
        now_us += 1;
    }
    now_us += PATIENCE_US / ALONE_SHARE;
    now_us = read_and_never_quiet(&mut gate, 105, now_us, BY_CHANCE_SHARE);
    // One that is quiet behind its batch is a program for batches again.
    now_us += 2 * PATIENCE_US / ALONE_SHARE;
    for seq in [106, 107] {
        both_say(&mut gate, seq);
        let mut delivered = 0;
        while delivered < 2 {
            match gate.next(now_us) {
                Next::AskForQuiet => gate.are_quiet(),
                Next::Deliver(_) => delivered += 1,
                Next::Ask(questions) => {
                    for question in questions {
                        gate.told(&question, socket(u64::from(seq) - 100, 0));
                    }
                }
                next => panic!("{next:?}"),
            }
        }
    }
    let late_us = now_us + PATIENCE_US / BY_CHANCE_SHARE;
    both_say(&mut gate, 108);
    assert_eq!(gate.next(late_us), Next::AskForQuiet, "it may take its time");
    assert_eq!(gate.counters().impatient, 0);
}

#[test]
fn a_batch_that_is_read_late_is_asked_about_in_vain_once() {
    let mut gate = batching(&[1, 2, 3]);
    for port in [1, 2] {
        assert_eq!(gate.arrived(client(port, ACK, 101, b"b")), None);
    }
    assert_eq!(gate.next(0), Next::AskForQuiet);
    gate.are_quiet();
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    assert!(matches!(gate.next(0), Next::Deliver(_)));
    let (half_us, alone_us) = (PATIENCE_US / QUIET_SHARE, PATIENCE_US / ALONE_SHARE);
    for now_us in [half_us, half_us + alone_us + 1, PATIENCE_US - 1] {
        assert!(matches!(gate.next(now_us), Next::Ask(_)));
    }
    assert_eq!(
        (gate.batch.unquiet, gate.batch.alone_until_us),
        (1, half_us + alone_us)
    );
}

#[test]
fn inputs_that_are_kept_apart_wait_for_a_batch_that_is_unread_and_then_go_one_at_a_time() {
    let mut gate = batching(&[1, 2, 3, 4]);
    for port in 1..=4 {
        assert_eq!(gate.arrived(client(port, ACK, 101, b"b")), None);
    }
    assert_eq!(gate.next(0), Next::AskForQuiet);
    gate.are_quiet();
    for _ in 0..2 {
        assert!(matches!(gate.next(0), Next::Deliver(_)));
    }
    gate.keep_apart();
    let read = |gate: &mut Gate| loop {
        match gate.next(0) {
            Next::AskForQuiet => gate.are_quiet(),
            Next::Ask(questions) => {
                for question in questions {
                    assert!(gate.told(&question, socket(2, 0)));
                }
            }
            next => return next,
        }
    };
    for port in [3, 4] {
        assert_eq!(read(&mut gate), Next::Deliver(client(port, ACK, 101, b"b")));
        assert!(
            matches!(gate.next(0), Next::Ask(_)),
            "nothing goes beside what is unread"
        );
    }
    assert_eq!(read(&mut gate), Next::Idle);
    assert_eq!(gate.counters().together, 1);
}

#[test]
fn a_client_who_asks_alone_waits_for_no_batch() {
    let mut gate = batching(&[1]);
    for n in 0..3 {
        assert_eq!(gate.arrived(client(1, ACK, 101 + n, b"b")), None);
        assert!(matches!(gate.next(0), Next::Deliver(_)));
        let read = socket(2 + u64::from(n), 0);
        answer(&mut gate, 0, &[read, read], Of::Connection);
    }
}

#[test]
fn who_does_not_read_in_a_batch_is_waited_for_once_and_then_goes_alone() {
    let mut gate = batching(&[1, 2, 3]);
    for (port, seq) in [(1, 101), (2, 101), (1, 102)] {
        assert_eq!(gate.arrived(client(port, ACK, seq, b"b")), None);
    }
    assert_eq!(gate.next(0), Next::AskForQuiet);
    gate.are_quiet();
    for _ in 0..2 {
        assert!(matches!(gate.next(0), Next::Deliver(_)));
    }
    // The copies are at work for long: their sockets are asked then.
    assert_eq!(gate.next(0), Next::AskForQuiet);
    let Next::Ask(questions) = gate.next(PATIENCE_US / 2) else {
        panic!("no question");
    };
    for question in questions {
        gate.told(&question, socket(2, u32::from(question.key == key(2))));
    }
    assert!(matches!(gate.next(PATIENCE_US - 1), Next::Ask(_)));
    assert!(matches!(gate.next(PATIENCE_US), Next::AskForQuiet));
    assert_eq!(gate.counters().impatient, 1, "the second client's");
    assert!(gate.heard[&key(2)].refused && !gate.heard[&key(1)].refused);
}

#[test]
fn a_batch_is_bounded() {
    let ports: Vec<u16> = (1..=200).collect();
    let mut gate = batching(&ports);
    for port in &ports {
        assert_eq!(gate.arrived(client(*port, ACK, 101, b"b")), None);
    }
    assert_eq!(gate.next(0), Next::AskForQuiet);
    gate.are_quiet();
    let delivered = std::iter::from_fn(|| matches!(gate.next(0), Next::Deliver(_)).then_some(())).count();
    assert_eq!(delivered, 128);
}

/// Two clients' next inputs; the first opens a batch, if there is to be one.
fn both_say(gate: &mut Gate, seq: u32) {
    for port in [1, 2] {
        assert_eq!(gate.arrived(client(port, ACK, seq, b"b")), None);
    }
}

#[test]
fn a_program_that_is_never_quiet_is_waited_for_more_and_more_seldom() {
    let mut gate = batching(&[1, 2]);
    let (mut now_us, mut seq) = (0, 101);
    for doubled in (0..=MOST_DOUBLED).chain([MOST_DOUBLED]) {
        both_say(&mut gate, seq);
        assert_eq!(gate.next(now_us), Next::AskForQuiet);
        now_us += PATIENCE_US / REFUSED_SHARE;
        // Until then they go alone.
        for at_us in [now_us, now_us + ((PATIENCE_US / ALONE_SHARE) << doubled) - 1] {
            for _ in 0..2 {
                assert!(matches!(gate.next(at_us), Next::Deliver(_)));
                let received = u64::from(seq) - 99;
                answer(&mut gate, at_us, &[socket(received, 0); 2], Of::Connection);
            }
            seq += 1;
            if at_us == now_us {
                both_say(&mut gate, seq);
            }
        }
        now_us += (PATIENCE_US / ALONE_SHARE) << doubled;
    }
    assert_eq!(gate.counters().together, 0);
    both_say(&mut gate, seq);
    assert_eq!(gate.next(now_us), Next::AskForQuiet);
    gate.are_quiet();
    for _ in 0..2 {
        assert!(matches!(gate.next(now_us), Next::Deliver(_)));
    }
    assert_eq!(gate.counters().together, 1);
}

#[test]
fn who_has_always_read_is_believed_where_the_copies_are_quiet_and_asked_now_and_then() {
    let mut gate = batching(&[1, 2]);
    let mut asked = Vec::new();
    for turn in 0..40 {
        both_say(&mut gate, 101 + turn);
        let mut delivered = 0;
        while delivered < 2 {
            match gate.next(0) {
                Next::AskForQuiet => gate.are_quiet(),
                Next::Deliver(_) => delivered += 1,
                Next::Ask(questions) => {
                    asked.push(turn);
                    for question in questions {
                        assert!(gate.told(&question, socket(1 + u64::from(turn), 0)));
                    }
                }
                next => panic!("{next:?}"),
            }
        }
    }
    // Each asks after the inputs of the turn before.
    let (sure, each) = (u32::from(SURE), u32::from(ASKED_EACH));
    let mut expected: Vec<u32> = (1..sure).collect();
    expected.extend([sure + each - 1, sure + 2 * each - 1]);
    assert_eq!(asked, expected);
    assert_eq!(gate.counters().impatient, 0);
}

#[test]
fn who_was_found_not_to_read_is_believed_no_more() {
    let mut gate = batching(&[1, 2]);
    for heard in gate.heard.values_mut() {
        // The next one is asked after.
        (heard.was_read, heard.believed) = (SURE, ASKED_EACH - 1);
    }
    both_say(&mut gate, 101);
    assert_eq!(gate.next(0), Next::AskForQuiet);
    gate.are_quiet();
    for _ in 0..2 {
        assert!(matches!(gate.next(0), Next::Deliver(_)));
    }
    assert_eq!(gate.next(0), Next::AskForQuiet);
    gate.are_quiet();
    let Next::Ask(questions) = gate.next(0) else {
        panic!("no question");
    };
    for question in questions {
        gate.told(&question, socket(2, u32::from(question.key == key(2))));
    }
    assert_eq!(gate.next(PATIENCE_US), Next::Idle);
    assert_eq!(gate.counters().impatient, 1);
    assert_eq!(gate.heard[&key(1)].was_read, SURE);
    assert_eq!(gate.heard[&key(2)].was_read, 0);
}

#[test]
fn what_a_program_has_answered_it_does_not_owe() {
    let mut gate = batching(&[1, 2]);
    both_say(&mut gate, 101);
    assert_eq!(gate.next(0), Next::AskForQuiet);
    assert!(gate.has_more() && gate.owed() == 0);
    gate.are_quiet();
    for _ in 0..2 {
        assert!(matches!(gate.next(0), Next::Deliver(_)));
    }
    assert!(!gate.has_more() && gate.owed() == 2);
    gate.answered(0, &key(2));
    assert_eq!(gate.owed(), 1);
    gate.answered(0, &key(1));
    assert_eq!(gate.owed(), 0);
}
