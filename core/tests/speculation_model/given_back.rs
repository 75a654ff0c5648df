//! Transcripts of connections that were given back to their VM, and come back.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM, limits};
use dunlin_core::speculation::{Action, Limits, Speculation};

const NOTHING: [&str; 0] = [];
const AGAIN_US: u64 = 10_000_000;

/// Three bytes have arrived; then the VM says an urgent one, and the connection is given back.
fn given_back() -> Talk {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let urgent = urgent(&talk);
    talk.says(&urgent);
    let ack = talk.of_client(0, 3);
    assert_eq!(
        talk.says(&ack),
        ["socket: ACK 0 ack 3", "destroy", "vm: ACK 0 ack 3"]
    );
    talk
}

fn urgent(talk: &Talk) -> Seg {
    let mut urgent = talk.of_vm(3, 0);
    urgent.flags |= URG;
    urgent.payload = b"!".to_vec();
    urgent
}

/// What was held leaves.
fn leaves(talk: &mut Talk, seg: &Seg) {
    talk.core.leaves(talk.now, &write(seg));
}

#[test]
fn a_connection_comes_back_when_its_client_has_all_and_some_time_is_over() {
    let mut talk = given_back();
    let said = urgent(&talk);
    assert_eq!(talk.says(&said), ["held: ACK|URG 3 ack 0 \"!\""]);
    talk.sync();
    leaves(&mut talk, &said);
    // Too soon.
    let ack = talk.of_client(0, 4);
    talk.now += AGAIN_US / 2;
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 4"]);
    talk.now += AGAIN_US / 2;
    // Something is on its way.
    let mut more = talk.of_vm(4, 0);
    more.payload = b"more".to_vec();
    assert_eq!(talk.says(&more), ["held: ACK 4 ack 0 \"more\""]);
    talk.sync();
    leaves(&mut talk, &more);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 4"]);
    let ack = talk.of_client(0, 8);
    assert_eq!(
        talk.says(&ack),
        [
            "vm: ACK 0 ack 8",
            "build at 8 mss 1460 scale Some((7, 7)) sack true"
        ]
    );
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 8"]);
    // As at its beginning.
    let dummy = talk.of_shadow(7, b"\0");
    assert_eq!(talk.shadow(&dummy), NOTHING);
    talk.delivered(8, b"again");
    let ack = talk.of_client(0, 13);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 13"]);
    assert_eq!(talk.core.size(), (1, 0));
}

/// The shadow socket's clock must not be behind what the VM itself has said meanwhile.
#[test]
fn its_socket_begins_with_the_clock_that_the_client_has_heard() {
    let mut talk = given_back();
    let mut said = urgent(&talk);
    said.ticks = Some((5_000, 60));
    talk.says(&said);
    leaves(&mut talk, &said);
    talk.now += AGAIN_US;
    let ack = talk.of_client(0, 4);
    let mut out = vec![];
    talk.core.client_sent(talk.now, write(&ack), &mut out);
    let Some(Action::Build(socket)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(socket.stamp, Some(5_002));
}

/// What the VM had said of its client's bytes when the connection came back, and had not left, leaves with its epoch.
#[test]
fn words_that_were_held_are_told_and_no_others() {
    let mut talk = given_back();
    talk.now += AGAIN_US;
    let mut question = talk.of_client(0, 3);
    question.payload = b"?".to_vec();
    assert_eq!(talk.says(&question).len(), 2, "it comes back");
    let answer = talk.of_vm(3, 1);
    assert_eq!(talk.says(&answer), NOTHING);
    assert_eq!(talk.sync(), ["client: ACK 3 ack 1"]);
}

#[test]
fn what_the_vm_would_not_take_brings_no_connection_back() {
    // The client's place and what it acknowledges; the VM's window is 100 << 7.
    for (at, ack) in [(u32::MAX, 3), (12_801, 3), (0, 2), (0, 4)] {
        let mut talk = given_back();
        talk.now += AGAIN_US;
        let odd = talk.seg(false, ACK, CLIENT.wrapping_add(at), VM + ack);
        let said = talk.says(&odd);
        assert!(
            said.len() == 1 && said[0].starts_with("vm: "),
            "{at} {ack}: {said:?}"
        );
    }
}

#[test]
fn behind_an_end_or_after_a_take_over_it_stays_held() {
    for (from_vm, flag) in [(true, FIN), (false, FIN), (true, RST), (false, RST)] {
        let mut talk = given_back();
        let mut end = match from_vm {
            true => talk.of_vm(3, 0),
            false => talk.of_client(0, 3),
        };
        end.flags |= flag;
        talk.says(&end);
        talk.now += AGAIN_US;
        let ack = talk.of_client(0, 3);
        assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 3"], "{from_vm} {flag}");
    }
    let mut talk = given_back();
    talk.sync();
    assert_eq!(talk.die(), NOTHING);
    talk.now += AGAIN_US;
    let ack = talk.of_client(0, 3);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 3"]);
}

/// The driver says at once that it cannot be built.
#[test]
fn one_whose_socket_cannot_be_built_again_is_held_again() {
    let mut talk = given_back();
    talk.now += AGAIN_US;
    let ack = talk.of_client(0, 3);
    assert_eq!(talk.says(&ack).len(), 2);
    let mut out = vec![];
    talk.core.failed(talk.now, talk.flow.expect("built"), &mut out);
    assert_eq!(talk.told(out), ["destroy", "vm: ACK 0 ack 3"]);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 3"], "not at once");
    talk.now += AGAIN_US;
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 3"], "later than the first time");
    talk.now += AGAIN_US;
    assert_eq!(talk.says(&ack).len(), 2);
}

#[test]
fn where_memory_is_scarce_nobody_comes_back() {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        total_bytes: 64 << 10,
        ..limits()
    });
    talk.opens();
    // The others take nothing, and have nearly all that there is.
    for client in (4..).step_by(4).take(16) {
        if talk.core.size().1 > 60 << 10 {
            break;
        }
        talk.client = client;
        talk.opens();
        talk.fills();
    }
    let kept = talk.core.size().1;
    assert!(kept > 60 << 10, "{kept}");
    talk.client = 0;
    assert_eq!(talk.data(0, b"bytes").len(), 3, "given back");
    let mut seg = talk.of_vm(0, 0);
    seg.payload = b"bytes".to_vec();
    leaves(&mut talk, &seg);
    talk.now += AGAIN_US;
    let ack = talk.of_client(0, 5);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 5"]);
    // Until one of the others has ended.
    talk.client = 4;
    let reset = talk.seg(false, RST, CLIENT, 0);
    talk.says(&reset);
    talk.client = 0;
    assert_eq!(talk.says(&ack).len(), 2);
}

/// What the VM has of its client may have come while the connection was held. A client that asks whether a window is open was heard once, and
/// then no more, and its upload stood still for good.
#[test]
fn a_client_that_asks_for_a_window_is_heard_each_time() {
    let mut talk = Talk::open();
    // The client's hundred bytes were not seen here.
    let word = talk.of_vm(0, 100);
    talk.says(&word);
    talk.sync();
    let question = talk.of_client(99, 0);
    for _ in 0..3 {
        assert!(talk.says(&question).contains(&"vm: ACK 99 ack 0".to_owned()));
    }
}
