//! Transcripts of timestamps, and of who makes room: whose own clock its client would take for an old one does not.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM, limits};
use super::troubles::half_closed;
use dunlin_core::offload::Offload;
use dunlin_core::speculation::{Action, Limits, Replica, Speculation};

const NOTHING: [&str; 0] = [];
/// A connection is built for the next client.
const BUILT: [&str; 2] = [
    "build at 0 mss 1460 scale Some((7, 7)) sack true",
    "vm: ACK 0 ack 0",
];

fn with_room_for(connections: usize) -> Talk {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        connections,
        ..limits()
    });
    talk
}

/// The client has one byte of the VM, which its shadow socket sent at `clock`. The VM's own says 50.
fn has_heard(talk: &mut Talk, clock: u32) {
    talk.data(0, b"x");
    talk.flush();
    talk.sync();
    talk.write();
    let seg = Seg {
        ticks: Some((clock, 60)),
        ..talk.of_shadow(0, b"x")
    };
    assert_eq!(talk.shadow(&seg), ["client: ACK 0 ack 0 \"x\""]);
    let ack = talk.of_client(0, 1);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 1"]);
    talk.flush();
}

/// The next client's handshake ends.
fn comes(talk: &mut Talk, client: usize) -> Vec<String> {
    talk.client = client;
    talk.greet();
    let third = talk.of_client(0, 0);
    talk.says(&third)
}

/// The VM's clock stands while the VM does. A client throws away as old what comes with one that is behind what it has heard.
#[test]
fn the_longest_silent_makes_room_unless_its_own_clock_may_be_behind() {
    let mut talk = with_room_for(2);
    talk.opens();
    has_heard(&mut talk, 50_000);
    talk.client = 4;
    talk.opens();
    // The first one's clock counts as 30,550 now.
    assert_eq!(talk.wait(61_000_000), NOTHING);
    let second_goes = ["destroy", "vm: ACK 0 ack 0", BUILT[0], BUILT[1]];
    assert_eq!(comes(&mut talk, 8), second_goes);
    // As 50,550.
    assert_eq!(talk.wait(40_000_000), NOTHING);
    let first_goes = ["destroy", "vm: ACK 0 ack 1", BUILT[0], BUILT[1]];
    assert_eq!(comes(&mut talk, 12), first_goes);
}

#[test]
fn where_every_clock_may_be_behind_nobody_makes_room() {
    let mut talk = with_room_for(1);
    talk.opens();
    has_heard(&mut talk, 50_000);
    talk.wait(61_000_000);
    assert_eq!(comes(&mut talk, 4), ["vm: ACK 0 ack 0"], "held as before");
    assert_eq!(talk.data(0, b"bytes"), ["held: ACK 0 ack 0 \"bytes\""]);
    // The first one is what it was.
    talk.client = 0;
    assert_eq!(talk.data(1, b"bytes"), NOTHING);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 6"]);
}

#[test]
fn what_has_ended_makes_room_before_what_is_silent() {
    let mut talk = with_room_for(2);
    talk.opens();
    talk.client = 4;
    talk.opens();
    let reset = talk.seg(false, RST, CLIENT, 0);
    assert_eq!(talk.says(&reset).len(), 2);
    talk.wait(61_000_000);
    assert_eq!(comes(&mut talk, 8), BUILT);
    talk.client = 0;
    assert_eq!(talk.data(0, b"bytes"), NOTHING, "it lives");
}

/// After four hours, too, it is not the VM that speaks next: what it says is held, and its clock is lifted.
#[test]
fn a_silent_connection_whose_own_clock_is_behind_is_held_for_as_long_again() {
    let mut talk = Talk::open();
    // More than half of four hours, in milliseconds.
    has_heard(&mut talk, 8_000_000);
    assert_eq!(talk.wait(14_399_000_000), NOTHING);
    assert_eq!(talk.wait(1_000_000), ["destroy", "vm: ACK 0 ack 1"]);
    assert_eq!(talk.core.size(), (1, 0));
    let mut answer = talk.of_vm(1, 0);
    answer.payload = b"late".to_vec();
    let mut out = vec![];
    talk.core.vm_sent(talk.now, write(&answer), &mut out);
    let Some(Action::Hold(frame)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(read(&frame).and_then(|seg| seg.ticks), Some((8_000_000, 60)));
    assert_eq!(talk.wait(14_399_000_000), NOTHING);
    assert_eq!(talk.core.size().0, 1);
    assert_eq!(talk.wait(1_000_000), NOTHING);
    assert_eq!(talk.core.size().0, 0);
}

/// The VM has nothing more to say there: no clock of it can be behind.
#[test]
fn where_the_vms_end_has_arrived_no_clock_keeps_a_connection() {
    for is_full in [true, false] {
        let mut talk = with_room_for(1);
        talk.opens();
        half_closed(&mut talk);
        // A repetition that was on its way.
        let mut end = talk.of_shadow(0, b"");
        end.flags |= FIN;
        end.ticks = Some((8_000_000, 60));
        assert_eq!(talk.shadow(&end), ["client: FIN|ACK 0 ack 0"]);
        if is_full {
            assert_eq!(talk.wait(60_000_000), NOTHING);
            assert_eq!(comes(&mut talk, 4), ["destroy", BUILT[0], BUILT[1]]);
        } else {
            assert_eq!(talk.wait(600_000_000), ["destroy"]);
            assert_eq!(talk.core.size().0, 0);
        }
    }
}

/// The client's clock in the next acknowledgement for the VM, and the VM's.
fn acknowledged(talk: &mut Talk) -> Option<(u32, u32)> {
    let mut out = vec![];
    talk.core.flush(talk.now, &mut out);
    let Some(Action::ToVm(frame)) = out.pop() else {
        panic!("{out:?}")
    };
    read(&frame).and_then(|seg| seg.ticks)
}

/// Fragments pass unread, with the clock in them: the VM threw away as old an acknowledgement that had an older one.
#[test]
fn acknowledgements_have_the_newest_clock_of_the_client_that_the_vm_has_echoed() {
    let mut talk = Talk::open();
    let mut answer = talk.of_vm(0, 8);
    answer.ticks = Some((51, 75));
    answer.payload = b"ok".to_vec();
    talk.says(&answer);
    assert_eq!(acknowledged(&mut talk), Some((75, 51)));
    // One without timestamps takes back nothing of that, for neither end.
    let mut more = talk.of_vm(2, 8);
    more.ticks = None;
    more.payload = b"more".to_vec();
    talk.says(&more);
    assert_eq!(acknowledged(&mut talk), Some((75, 51)));
    talk.sync();
    assert_eq!(talk.write().0, b"okmore");
    let mut out = vec![];
    let seg = talk.of_shadow(0, b"okmore");
    talk.core
        .socket_sent(talk.now, &write_tun(&seg), Offload::default(), &mut out);
    let Some(Action::ToClient(frame, _)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(read(&frame).and_then(|seg| seg.ticks), Some((1000, 75)));
}

/// What the client itself said later than the VM has echoed is newer.
#[test]
fn acknowledgements_have_the_clients_own_clock_where_that_is_newer() {
    let mut talk = Talk::open();
    let mut question = talk.of_client(0, 0);
    question.ticks = Some((90, 50));
    question.payload = b"?".to_vec();
    talk.says(&question);
    talk.data(0, b"not yet of it");
    assert_eq!(acknowledged(&mut talk), Some((90, 50)));
}

/// Its peer may have got the repeated SYN alone, and throws away as old what has an older clock: a connection whose first SYN was lost stood still.
#[test]
fn a_repeated_syn_of_the_vm_has_the_newer_clock() {
    for dies in [false, true] {
        let mut talk = Talk::new();
        let mut syn = talk.seg(true, SYN, VM - 1, 0);
        syn.offer = Some(talk.offer());
        syn.ticks = Some((50, 0));
        talk.says(&syn);
        if dies {
            talk.sync();
            talk.die();
        }
        syn.ticks = Some((1050, 0));
        let frame = write(&syn);
        talk.says(&syn);
        talk.core.leaves(talk.now, &frame);
        let mut answer = talk.seg(false, SYN | ACK, CLIENT - 1, VM);
        answer.offer = Some(talk.offer());
        answer.ticks = Some((60, 1050));
        assert_eq!(talk.says(&answer), ["vm: SYN|ACK -1 ack 0"]);
        let mut third = talk.of_vm(0, 0);
        third.ticks = Some((1050, 60));
        assert_eq!(talk.says(&third).len(), 1, "built");
        let epoch = talk.cut();
        let mut out = vec![];
        talk.core.released(talk.now, epoch, &mut out);
        let Some(Action::ToClient(frame, _)) = out.first() else {
            panic!("{out:?}")
        };
        assert_eq!(read(frame).and_then(|seg| seg.ticks), Some((1050, 60)));
    }
}

/// A client that hears nothing but acknowledgements of what it says: after 24.9 days of a clock that stood still what the shadow socket said counted as old.
#[test]
fn the_clock_of_a_connection_on_which_only_the_client_says_something_goes_on() {
    let mut talk = Talk::open();
    has_heard(&mut talk, 1_000);
    let begun = talk.now;
    let mut heard = 1_000_u32;
    for hour in 1..=30 * 24 {
        talk.now = begun + hour * 3_600_000_000;
        let at = hour as u32 - 1;
        let mut question = talk.of_client(at, 1);
        question.payload = b"?".to_vec();
        talk.says(&question);
        let answer = talk.of_vm(1, at + 1);
        talk.says(&answer);
        let epoch = talk.cut();
        let mut out = vec![];
        talk.core.released(talk.now, epoch, &mut out);
        let Some(Action::ToClient(frame, _)) = out.pop() else {
            panic!("{out:?}")
        };
        let now = read(&frame).and_then(|seg| seg.ticks).expect("a clock").0;
        // Of the shadow socket's own, which counts milliseconds since then.
        let behind = (1_000 + hour as u32 * 3_600_000).wrapping_sub(now);
        assert!(behind < 20_000, "{behind} after {hour} h");
        assert!(now.wrapping_sub(heard) < 1 << 31);
        heard = now;
    }
}

/// The state that said it is exported before it leaves. A silent hour before a word once put the client's clock far ahead of what the next primary knew.
#[test]
fn a_new_primarys_clock_is_ahead_after_a_long_silence_too() {
    for only_acknowledges in [false, true] {
        let mut talk = Talk::open();
        has_heard(&mut talk, 1_000);
        talk.sync();
        talk.now += 3_600_000_000;
        let mut heard = 3_601_000;
        if only_acknowledges {
            let mut question = talk.of_client(0, 1);
            question.payload = b"?".to_vec();
            talk.says(&question);
            let answer = talk.of_vm(1, 1);
            talk.says(&answer);
            assert_eq!(talk.sync(), ["client: ACK 1 ack 1"]);
            heard -= 5_000;
        } else {
            talk.data(1, b"y");
            talk.flush();
            talk.sync();
            talk.write();
            let seg = Seg {
                ticks: Some((heard, 60)),
                ..talk.of_shadow(1, b"y")
            };
            assert_eq!(talk.shadow(&seg).len(), 1);
        }
        let replica = std::mem::replace(&mut talk.replica, Replica::new(limits()));
        let mut out = vec![];
        talk.core = Speculation::take_over(limits(), replica, talk.now, &mut out);
        let Some(Action::ToClient(frame, _)) = out.pop() else {
            panic!("{out:?}")
        };
        let asks = read(&frame).and_then(|seg| seg.ticks).expect("a clock").0;
        assert!(asks > heard && asks - heard < 400_000, "{asks} after {heard}");
    }
}

/// A VM sizes its window by what comes in a round trip, which it takes from the echoes. It acknowledges each of a flight's segments at once, but the
/// client has heard the last epoch's word only: with an echo of the newest one the round trip was next to nothing.
#[test]
fn a_clients_bytes_echo_what_it_was_told() {
    let mut talk = Talk::open();
    let upload = |talk: &mut Talk, at: u32, echo: u32| {
        let seg = Seg {
            payload: b"abcd".to_vec(),
            ticks: Some((61, echo)),
            ..talk.of_client(at, 0)
        };
        let mut out = vec![];
        talk.core.client_sent(talk.now, write(&seg), &mut out);
        let [Action::ToVm(frame)] = &out[..] else {
            panic!("{out:?}")
        };
        read(frame).and_then(|seg| seg.ticks).map(|(_, echo)| echo)
    };
    let acknowledges = |talk: &mut Talk, ack: u32, clock: u32| {
        let seg = Seg {
            ticks: Some((clock, 61)),
            ..talk.of_vm(0, ack)
        };
        assert_eq!(talk.says(&seg), NOTHING);
    };
    // The SYN-ACK was said at 50.
    assert_eq!(upload(&mut talk, 0, 50), Some(50));
    acknowledges(&mut talk, 4, 70);
    assert_eq!(upload(&mut talk, 4, 50), Some(50), "it was not told of 70");
    acknowledges(&mut talk, 8, 71);
    let told = talk.sync();
    assert_eq!(told, ["client: ACK 0 ack 8"]);
    acknowledges(&mut talk, 8, 90);
    assert_eq!(upload(&mut talk, 8, 1001), Some(71));
    assert_eq!(upload(&mut talk, 12, 1001), Some(71));
}
