//! Transcripts of the time before the backup's VM runs, and of the time after.

use super::seg::*;
use super::talk::{CLIENT, Talk, limits};
use dunlin_core::output::rewriter::SequenceRewriter;
use dunlin_core::output::{Ends, packet::FlowKey};
use dunlin_core::speculation::{Action, Limits, Speculation};

const NOTHING: [&str; 0] = [];

fn hold_all(talk: &mut Talk) -> Vec<String> {
    let mut out = vec![];
    talk.core.hold_all(talk.now, &mut out);
    talk.told(out)
}

/// Behind the translation.
fn translated() -> Talk {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        translated: true,
        ..limits()
    });
    talk.opens();
    talk
}

#[test]
fn one_whose_client_has_all_is_held_at_once() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let ack = talk.of_client(0, 3);
    talk.says(&ack);
    assert!(!talk.core.all_are_held());
    assert_eq!(hold_all(&mut talk), ["destroy", "vm: ACK 0 ack 3"]);
    assert!(talk.core.all_are_held());
    assert_eq!(talk.data(3, b"more"), ["held: ACK 3 ack 0 \"more\""]);
    let ack = talk.of_client(0, 7);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 7"]);
}

#[test]
fn the_others_are_held_when_their_clients_have_what_was_kept_and_nothing_more_is() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    assert_eq!(hold_all(&mut talk), NOTHING);
    assert!(!talk.core.all_are_held());
    // What is not acknowledged the VM says again.
    assert_eq!(talk.data(3, b"more"), NOTHING);
    assert_eq!(talk.flush(), NOTHING);
    let ack = talk.of_client(0, 3);
    assert_eq!(
        talk.says(&ack),
        ["socket: ACK 0 ack 3", "destroy", "vm: ACK 0 ack 3"]
    );
    assert!(talk.core.all_are_held());
    assert_eq!(talk.data(3, b"more"), ["held: ACK 3 ack 0 \"more\""]);
}

/// The copy that is to run has heard the client's bytes; the client has to learn that.
#[test]
fn what_the_client_was_not_told_yet_leaves_with_the_epoch() {
    let mut talk = Talk::open();
    let mut question = talk.of_client(0, 0);
    question.payload = b"?".to_vec();
    talk.says(&question);
    let word = talk.of_vm(0, 1);
    assert_eq!(talk.says(&word), NOTHING);
    assert_eq!(
        hold_all(&mut talk),
        ["destroy", "held: ACK 0 ack 1", "vm: ACK 1 ack 0"]
    );
}

/// A client may keep its end open for as long as it likes.
#[test]
fn one_whose_vm_has_closed_is_held_as_well_and_ends_properly() {
    let mut talk = Talk::open();
    let mut fin = talk.of_vm(0, 0);
    fin.flags |= FIN;
    talk.says(&fin);
    talk.sync();
    let mut sent = talk.of_shadow(0, b"");
    sent.flags |= FIN;
    talk.shadow(&sent);
    assert_eq!(hold_all(&mut talk), NOTHING);
    let ack = talk.of_client(0, 1);
    assert_eq!(
        talk.says(&ack),
        ["socket: ACK 0 ack 1", "destroy", "vm: ACK 0 ack 1"]
    );
    assert!(talk.core.all_are_held());
    let mut end = talk.of_client(0, 1);
    end.flags |= FIN;
    assert_eq!(talk.says(&end), ["vm: FIN|ACK 0 ack 1"]);
    let last = talk.of_vm(1, 1);
    assert_eq!(talk.says(&last), ["held: ACK 1 ack 1"]);
    // It never comes back.
    talk.core.speculate_again();
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 1"]);
}

#[test]
fn one_that_begins_meanwhile_is_held_and_comes_back_without_waiting() {
    let mut talk = Talk::new();
    assert_eq!(hold_all(&mut talk), NOTHING);
    talk.greet();
    let third = talk.of_client(0, 0);
    assert_eq!(talk.says(&third), ["vm: ACK 0 ack 0"]);
    assert!(talk.core.all_are_held());
    assert_eq!(talk.data(0, b"abc"), ["held: ACK 0 ack 0 \"abc\""]);
    let ack = talk.of_client(0, 3);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 3"], "not yet");
    talk.core.speculate_again();
    assert_eq!(
        talk.says(&ack),
        [
            "vm: ACK 0 ack 3",
            "build at 3 mss 1460 scale Some((7, 7)) sack true"
        ]
    );
    talk.flush();
    talk.delivered(3, b"more");
}

#[test]
fn a_wish_that_is_taken_back_leaves_what_was_not_held() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    hold_all(&mut talk);
    talk.core.speculate_again();
    let ack = talk.of_client(0, 3);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 3"]);
    talk.delivered(3, b"more");
}

/// The shadow socket's clock was ahead of the VM's: the translation adds that from now on, on whichever host.
#[test]
fn a_clock_that_is_ahead_is_lifted_by_the_translation() {
    let mut talk = translated();
    // At 1000, where the VM's is at 50.
    talk.delivered(0, b"abc");
    let ack = talk.of_client(0, 3);
    talk.says(&ack);
    let mut out = vec![];
    talk.core.hold_all(talk.now, &mut out);
    let lifted = out.iter().find_map(|action| match action {
        Action::Lift(key, ticks, ends) if *ends == Ends::default() => Some((*key, *ticks)),
        _ => None,
    });
    let (key, ticks): (FlowKey, u32) = lifted.expect("the clients' clock");
    assert_eq!(ticks, 950);
    let mut primary = SequenceRewriter::new();
    primary.lift(key, ticks, Ends::default());
    let mut backup = SequenceRewriter::new();
    backup.load(&primary.table()).expect("what a primary says");
    // The VM's own word, held as it is.
    let word = Seg {
        payload: b"more".to_vec(),
        ticks: Some((51, 60)),
        ..talk.of_vm(3, 0)
    };
    let mut out = vec![];
    talk.core.vm_sent(talk.now, write(&word), &mut out);
    assert_eq!(out, [Action::Hold(write(&word))]);
    let seen = read(&primary.tell(&write(&word), false)).expect("a right checksum");
    assert_eq!(seen.ticks, Some((1001, 60)));
    let echo = Seg {
        ticks: Some((61, 1001)),
        ..talk.of_client(0, 7)
    };
    let heard = read(&primary.inbound(&write(&echo))).expect("a right checksum");
    assert_eq!(heard.ticks, Some((61, 51)));
    // And after the primary's death.
    backup.take_over();
    let seen = read(&backup.tell(&write(&word), false)).expect("a right checksum");
    assert!(seen.ticks.is_some_and(|(value, _)| value > 1001), "{seen:?}");
}

/// Both ends are closed, and all is acknowledged. Also the VM's last word.
fn over() -> (Talk, Vec<String>, Seg) {
    let mut talk = translated();
    talk.delivered(0, b"abc");
    let mut told = vec![];
    let ack = talk.of_client(0, 3);
    told.extend(talk.says(&ack));
    let mut end = talk.of_vm(3, 0);
    end.flags |= FIN;
    told.extend(talk.says(&end));
    told.extend(talk.sync());
    let mut end = talk.of_shadow(3, b"");
    end.flags |= FIN;
    told.extend(talk.shadow(&end));
    let mut end = talk.of_client(0, 4);
    end.flags |= FIN;
    told.extend(talk.says(&end));
    let ack = talk.of_vm(4, 1);
    told.extend(talk.says(&ack));
    told.extend(talk.sync());
    assert!(told.contains(&"destroy".to_owned()), "it is over: {told:?}");
    (talk, told, ack)
}

/// Each connection that had ended once left a line in the table for good, and with each sync the backup got all of them.
#[test]
fn one_that_is_over_leaves_nothing_in_the_translation_while_no_other_copy_runs() {
    let (mut talk, told, ack) = over();
    assert!(!told.iter().any(|line| line.starts_with("lift")), "{told:?}");
    // Its clock does not go back all the same: with the first word that it says again it has an entry.
    let mut out = vec![];
    talk.core.vm_sent(talk.now, write(&ack), &mut out);
    let [Action::Lift(key, ticks, ends), Action::Hold(frame)] = &out[..] else {
        panic!("{out:?}")
    };
    assert_eq!(frame, &write(&ack));
    let mut primary = SequenceRewriter::new();
    primary.lift(*key, *ticks, *ends);
    let seen = read(&primary.tell(frame, false)).expect("a right checksum");
    assert!(seen.ticks.is_some_and(|(value, _)| value >= 1000), "{seen:?}");
    assert_eq!(talk.says(&ack), ["held: ACK 4 ack 1"], "which is enough");
}

/// The VM's last acknowledgement got lost, and its primary dies while the backup's VM runs: who repeats it has the VM's clock only.
#[test]
fn one_that_is_over_is_lifted_before_another_copy_runs() {
    let (mut talk, _, ack) = over();
    let mut out = vec![];
    talk.core.hold_all(talk.now, &mut out);
    let [Action::Lift(key, ticks, ends)] = out[..] else {
        panic!("{out:?}")
    };
    let mut primary = SequenceRewriter::new();
    primary.lift(key, ticks, ends);
    let mut backup = SequenceRewriter::new();
    backup.load(&primary.table()).expect("what a primary says");
    backup.take_over();
    let seen = read(&backup.tell(&write(&ack), false)).expect("a right checksum");
    assert!(seen.ticks.is_some_and(|(value, _)| value >= 1000), "{seen:?}");
    // The VM has forgotten it, and its client says its end again.
    let mut reset = talk.of_vm(4, 0);
    (reset.flags, reset.ticks) = (RST, None);
    let seen = read(&backup.tell(&write(&reset), false)).expect("a right checksum");
    assert_eq!((seen.flags, seen.ack), (ACK, CLIENT.wrapping_add(1)));
    // It is lifted once, and how it ended is told each time.
    assert_eq!(hold_all(&mut talk), NOTHING);
    talk.core.speculate_again();
    assert_eq!(hold_all(&mut talk), ["lift 0 ends Some(4) Some(1)"]);
}
