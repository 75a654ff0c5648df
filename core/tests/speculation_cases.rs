//! Speculative communication as transcripts: who says what, and what is done. One for each thing that has to be right.
//!
//! Numbers are counted from each stream's first byte: the VM's from 1001, the client's from 5001.

#[path = "speculation_model/again.rs"]
mod again;
#[path = "speculation_model/ahead_cases.rs"]
mod ahead_cases;
#[path = "speculation_model/bounds.rs"]
mod bounds;
#[path = "speculation_model/carried.rs"]
mod carried;
#[path = "speculation_model/clocks.rs"]
mod clocks;
#[path = "speculation_model/given_back.rs"]
mod given_back;
#[path = "speculation_model/held.rs"]
mod held;
#[allow(dead_code, reason = "the random conversations use all of it")]
#[path = "speculation_model/seg.rs"]
mod seg;
#[path = "speculation_model/strangers.rs"]
mod strangers;
#[path = "speculation_model/talk.rs"]
mod talk;
#[path = "speculation_model/troubles.rs"]
mod troubles;

use dunlin_core::offload::Offload;
use dunlin_core::speculation::{Action, Replica, Speculation};
use dunlin_core::units::Epoch;
use seg::*;
use talk::{CLIENT, Talk, VM, limits};

const NOTHING: [&str; 0] = [];

#[test]
fn data_is_acknowledged_at_once_and_leaves_when_it_is_safe() {
    let mut talk = Talk::open();
    assert_eq!(talk.data(0, b"some "), NOTHING);
    assert_eq!(talk.data(5, b"bytes"), NOTHING);
    // One for the batch.
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 10"]);
    assert_eq!(talk.flush(), NOTHING);
    let epoch = talk.cut();
    assert_eq!(talk.write().0, b"");
    assert_eq!(talk.safe(epoch), ["write"]);
    assert_eq!(talk.write().0, b"some bytes");
    let seg = talk.of_shadow(0, b"some bytes");
    assert_eq!(talk.shadow(&seg), ["client: ACK 0 ack 0 \"some bytes\""]);
}

#[test]
fn several_epochs_wait_and_are_released_in_their_order() {
    let mut talk = Talk::open();
    talk.data(0, b"one");
    let one = talk.cut();
    talk.data(3, b"two");
    let two = talk.cut();
    talk.data(6, b"three");
    assert_eq!(talk.safe(one), ["write"]);
    assert_eq!(talk.write().0, b"one");
    assert_eq!(talk.safe(two), ["write"]);
    assert_eq!(talk.write().0, b"two");
    // A socket that said more than is safe is not believed.
    let more = talk.of_shadow(6, b"three");
    assert_eq!(talk.shadow(&more), NOTHING);
}

#[test]
fn what_the_vm_said_in_the_running_epoch_waits_for_its_end() {
    let mut talk = Talk::open();
    assert!(!talk.core.waits());
    talk.data(0, b"one");
    assert!(talk.core.waits());
    let one = talk.cut();
    assert!(!talk.core.waits(), "that epoch has ended");
    // A client's word changes what a checkpoint says, and waits for nothing.
    let word = talk.of_client(0, 0);
    talk.says(&word);
    assert!(!talk.core.waits());
    talk.safe(one);
    // An acknowledgement of the VM's has to leave, too.
    let word = talk.of_vm(3, 0);
    talk.says(&word);
    assert!(talk.core.waits());
}

#[test]
fn without_another_copy_all_is_safe_at_once_also_what_waited_for_a_sync() {
    let mut talk = Talk::open();
    talk.data(0, b"one");
    let one = talk.cut();
    talk.data(3, b"two");
    assert_eq!(talk.alone(), ["write"]);
    assert_eq!(talk.write().0, b"onetwo");
    assert!(!talk.core.waits());
    assert_eq!(talk.alone(), NOTHING, "nothing is said twice");
    // The word of a backup that was lost says nothing more.
    assert_eq!(talk.safe(one), NOTHING);
    // The next backup gets all, and epochs count again.
    talk.replica = Replica::new(limits());
    talk.epoch = Epoch(1);
    talk.data(6, b"three");
    let whole = talk.cut();
    assert_eq!(talk.write().0, b"");
    assert_eq!(talk.safe(whole), ["write"]);
    assert_eq!(talk.write().0, b"three");
    talk.die();
    let answer = talk.of_client(0, 3);
    assert_eq!(
        talk.says(&answer)[0],
        "build at 3 mss 1460 scale Some((7, 7)) sack true"
    );
    assert_eq!(talk.write().0, b"twothree");
}

#[test]
fn after_a_gap_nothing_new_is_acknowledged_and_repetitions_are_answered() {
    let mut talk = Talk::open();
    talk.data(0, b"abc");
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 3"]);
    assert_eq!(talk.data(6, b"ghi"), ["vm: ACK 0 ack 3"]);
    assert_eq!(talk.data(0, b"abc"), NOTHING);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 3"]);
    talk.data(3, b"defghi");
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 9"]);
    talk.sync();
    assert_eq!(talk.write().0, b"abcdefghi");
}

#[test]
fn the_vms_end_is_acknowledged_when_the_client_has_it() {
    let mut talk = Talk::open();
    let mut end = talk.of_vm(0, 0);
    end.flags |= FIN;
    end.payload = b"last".to_vec();
    assert_eq!(talk.says(&end), NOTHING);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 4"]);
    assert_eq!(talk.sync(), ["write"]);
    let (bytes, then) = talk.write();
    assert_eq!(
        (bytes.as_slice(), then),
        (&b"last"[..], vec!["shutdown".to_owned()])
    );
    let mut seg = talk.of_shadow(0, b"last");
    seg.flags |= FIN;
    assert_eq!(talk.shadow(&seg), ["client: FIN|ACK 0 ack 0 \"last\""]);
    let ack = talk.of_client(0, 5);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 5"]);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 5"]);
    // The client's end, and the VM's word for it: the socket goes without one.
    let mut end = talk.of_client(0, 5);
    end.flags |= FIN;
    assert_eq!(talk.says(&end), ["vm: FIN|ACK 0 ack 5"]);
    let last = talk.of_vm(5, 1);
    assert_eq!(talk.says(&last), NOTHING);
    assert_eq!(talk.sync(), ["client: ACK 5 ack 1", "destroy"]);
    // Late words are held as before.
    assert_eq!(talk.says(&last), ["held: ACK 5 ack 1"]);
}

#[test]
fn a_vms_reset_leaves_after_all_that_it_said_before() {
    let mut talk = Talk::open();
    talk.data(0, b"last words");
    let reset = talk.seg(true, RST | ACK, VM + 10, CLIENT);
    assert_eq!(talk.says(&reset), NOTHING);
    assert_eq!(talk.sync(), ["write"]);
    talk.write();
    let seg = talk.of_shadow(0, b"last words");
    talk.shadow(&seg);
    let ack = talk.of_client(0, 10);
    assert_eq!(
        talk.says(&ack),
        ["socket: ACK 0 ack 10", "client: RST|ACK 10 ack 0", "destroy"]
    );
    // A client that never answers is reset all the same.
    let mut talk = Talk::open();
    talk.data(0, b"last words");
    talk.says(&reset);
    talk.sync();
    assert_eq!(talk.wait(10_000_000), ["client: RST|ACK 0 ack 0", "destroy"]);
}

#[test]
fn a_clients_reset_passes_with_the_vms_number_and_nothing_answers_it() {
    let mut talk = Talk::open();
    // Out of place: the VM decides, and its challenge waits like any word.
    let stray = talk.seg(false, RST, CLIENT + 77, 0);
    assert_eq!(talk.says(&stray), ["vm: RST 77 ack -1001"]);
    let reset = talk.seg(false, RST, CLIENT, 0);
    assert_eq!(talk.says(&reset), ["vm: RST|ACK 0 ack 0", "destroy"]);
    // The VM had taken more than it has said: its challenge tells how much.
    let challenge = talk.of_vm(0, 9);
    assert_eq!(talk.says(&challenge), ["vm: RST|ACK 9 ack 0"]);
}

#[test]
fn the_socket_hears_acknowledgements_only_and_only_of_what_it_sent() {
    let mut talk = Talk::open();
    talk.delivered(0, b"0123456789");
    // Data beside an acknowledgement that says nothing new would count as a repeated one.
    let mut seg = talk.of_client(0, 0);
    seg.payload = b"question".to_vec();
    assert_eq!(talk.says(&seg), ["vm: ACK 0 ack 10 \"question\""]);
    let mut seg = talk.of_client(8, 4);
    seg.payload = b"more".to_vec();
    assert_eq!(
        talk.says(&seg),
        ["socket: ACK 0 ack 4", "vm: ACK 8 ack 10 \"more\""]
    );
    // SACK of what was sent stays, what was not goes.
    let mut seg = talk.of_client(12, 4);
    seg.sack = vec![(VM + 6, VM + 10), (VM + 20, VM + 30)];
    assert_eq!(talk.says(&seg), ["socket: ACK 0 ack 4 sack [(6, 10)]"]);
    // What came twice is told first (RFC 2883), and is of no use in another place.
    seg.sack = vec![(VM + 1, VM + 4), (VM + 6, VM + 10)];
    assert_eq!(talk.says(&seg), ["socket: ACK 0 ack 4 sack [(1, 4), (6, 10)]"]);
    seg.sack.swap(0, 1);
    assert_eq!(talk.says(&seg), ["socket: ACK 0 ack 4 sack [(6, 10)]"]);
    // An acknowledgement of what was never sent is nobody's.
    let liar = talk.of_client(12, 500);
    assert_eq!(talk.says(&liar), NOTHING);
    let (_, kept) = talk.core.size();
    assert_eq!(kept, 6);
}

#[test]
fn the_vm_hears_no_sack_no_ece_and_no_bare_acknowledgement() {
    let mut talk = Talk::open();
    talk.data(0, b"0123456789");
    talk.flush();
    let bare = talk.of_client(0, 0);
    assert_eq!(talk.says(&bare), ["socket: ACK 0 ack 0"]);
    let mut seg = talk.of_client(0, 0);
    seg.flags |= ECE | CWR;
    seg.sack = vec![(VM + 2, VM + 4)];
    seg.payload = b"x".to_vec();
    // CWR answers what the VM itself has said of the client's way to it.
    assert_eq!(talk.says(&seg), ["vm: ACK|CWR 0 ack 10 \"x\""]);
    // A client's keep-alive is the VM's to answer.
    let asks = talk.of_client(0, 0);
    assert_eq!(
        talk.says(&asks).last().map(String::as_str),
        Some("vm: ACK 0 ack 10")
    );
}

#[test]
fn the_client_hears_the_last_safe_word_of_the_vm() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let mut seg = talk.of_client(0, 3);
    seg.payload = b"upload".to_vec();
    talk.says(&seg);
    // Said, not safe.
    let mut word = talk.of_vm(3, 6);
    word.flags |= ECE;
    word.window = 99;
    assert_eq!(talk.says(&word), NOTHING);
    let repeated = talk.of_shadow(0, b"abc");
    assert_eq!(talk.shadow(&repeated), ["client: ACK 0 ack 0 \"abc\""]);
    assert_eq!(talk.sync(), ["client: ACK|ECE 3 ack 6"]);
    assert_eq!(talk.shadow(&repeated), ["client: ACK|ECE 0 ack 6 \"abc\""]);
    // The socket's own resets and bare acknowledgements are nothing, its probes are.
    let reset = Seg {
        flags: RST,
        ..talk.of_shadow(3, b"")
    };
    assert_eq!(talk.shadow(&reset), NOTHING);
    let bare = talk.of_shadow(3, b"");
    assert_eq!(talk.shadow(&bare), NOTHING);
    let probe = talk.of_shadow(2, b"");
    assert_eq!(talk.shadow(&probe), ["client: ACK|ECE 2 ack 6"]);
}

#[test]
fn what_the_vm_says_of_uploads_is_told_also_without_data_of_its_own() {
    let mut talk = Talk::open();
    let mut seg = talk.of_client(0, 0);
    seg.payload = b"upload".to_vec();
    talk.says(&seg);
    // Carried by data that the socket cannot send yet: the client's window may be closed.
    let mut word = talk.of_vm(0, 6);
    word.payload = b"ok".to_vec();
    talk.says(&word);
    assert_eq!(talk.sync(), ["write", "client: ACK 0 ack 6"]);
}

#[test]
fn timestamps_are_of_who_hears_them() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let mut out = vec![];
    // An echo of the VM's own SYN-ACK, older than the socket.
    let ack = talk.of_client(0, 3);
    talk.core.client_sent(talk.now, write(&ack), &mut out);
    let Some(Action::ToShadow(packet)) = out.pop() else {
        panic!("{out:?}")
    };
    // The socket's first is even and later than the VM's 50.
    assert_eq!(read_ip(&packet).and_then(|seg| seg.ticks), Some((60, 52)));
    let mut data = talk.of_client(0, 3);
    data.ticks = Some((61, 1000));
    data.payload = b"x".to_vec();
    talk.core.client_sent(talk.now, write(&data), &mut out);
    let Some(Action::ToVm(frame)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(read(&frame).and_then(|seg| seg.ticks), Some((61, 50)));
    // While the client's data is not acknowledged, its clock is that which the safe VM has echoed.
    talk.core.socket_sent(
        talk.now,
        &write_tun(&talk.of_shadow(0, b"abc")),
        Offload::default(),
        &mut out,
    );
    let Some(Action::ToClient(frame, _)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(read(&frame).and_then(|seg| seg.ticks), Some((1000, 60)));
}

#[test]
fn a_keep_alive_is_for_the_client_to_answer() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let ack = talk.of_client(0, 3);
    talk.says(&ack);
    talk.flush();
    let asks = talk.of_vm(2, 0);
    assert_eq!(talk.says(&asks), NOTHING);
    assert_eq!(talk.flush(), NOTHING);
    assert_eq!(talk.sync(), ["client: ACK 2 ack 0"]);
    assert_eq!(talk.flush(), NOTHING);
    talk.says(&ack);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 3"]);
    // With a byte, as older stacks ask.
    let mut asks = talk.of_vm(2, 0);
    asks.payload = b"c".to_vec();
    talk.says(&asks);
    assert_eq!(talk.flush(), NOTHING);
}

/// The window that the VM was told last.
fn window(out: &[Action]) -> Option<u16> {
    out.iter().rev().find_map(|action| match action {
        Action::ToVm(frame) => read(frame).map(|seg| seg.window),
        _ => None,
    })
}

#[test]
fn the_window_closes_at_the_limit_is_never_taken_back_and_opens_by_an_eighth() {
    let mut talk = Talk::open();
    let (limit, mut at, mut edge) = (64 << 10, 0_u32, 0_u32);
    while at < limit {
        talk.data(at, &[7; 1024]);
        at += 1024;
        let mut out = vec![];
        talk.core.flush(talk.now, &mut out);
        let said = at + (u32::from(window(&out).expect("an acknowledgement")) << 7);
        assert!(said >= edge, "taken back: {edge} -> {said}");
        edge = said;
    }
    assert_eq!(edge, limit);
    // Beyond it nothing is taken.
    talk.data(at, &[7; 1024]);
    assert_eq!(talk.core.size().1, limit as usize);
    // A probe of a closed window is answered here.
    let probe = talk.of_vm(at - 1, 0);
    talk.flush();
    talk.says(&probe);
    assert_eq!(talk.flush().len(), 1);
    talk.sync();
    assert_eq!(talk.write().0.len(), limit as usize);
    for n in 0..64 {
        let seg = talk.of_shadow(n * 1024, &[7; 1024]);
        talk.shadow(&seg);
    }
    let mut told = vec![];
    for n in 1..=64 {
        let ack = talk.of_client(0, n * 1024);
        talk.says(&ack);
        let mut out = vec![];
        talk.core.flush(talk.now, &mut out);
        told.extend(window(&out).map(|window| u32::from(window) << 7));
    }
    // Eight times an eighth, until it is half open.
    assert!(told.len() >= 4 && told.len() <= 8, "{told:?}");
    assert!(told[0] >= limit / 8, "{told:?}");
}

#[test]
fn odd_connections_are_held_as_before() {
    for extra in [
        vec![34, 2],
        vec![19, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        vec![29, 4, 0, 0],
        vec![30, 4, 0, 0],
    ] {
        let mut talk = Talk::new();
        talk.stamps = false;
        let mut syn = talk.seg(false, SYN, CLIENT - 1, 0);
        syn.offer = Some(Offer {
            extra,
            ..talk.offer()
        });
        talk.says(&syn);
        let mut answer = talk.seg(true, SYN | ACK, VM - 1, CLIENT);
        answer.offer = Some(talk.offer());
        talk.says(&answer);
        let third = talk.of_client(0, 0);
        assert_eq!(talk.says(&third), ["vm: ACK 0 ack 0"]);
        assert_eq!(talk.data(0, b"bytes"), ["held: ACK 0 ack 0 \"bytes\""]);
        assert_eq!(talk.core.counts().begun, 0);
    }
    // Older than speculation.
    let mut talk = Talk::new();
    assert_eq!(talk.data(0, b"bytes"), ["held: ACK 0 ack 0 \"bytes\""]);
    let ack = talk.of_client(0, 5);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 5"]);
    // A SYN with data.
    let mut syn = talk.seg(false, SYN, CLIENT - 1, 0);
    syn.offer = Some(talk.offer());
    syn.payload = b"early".to_vec();
    talk.says(&syn);
    assert_eq!(talk.core.handshakes(), 0);
}

#[test]
fn urgent_bytes_are_not_taken_and_the_connection_goes_on_held() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let mut urgent = talk.of_vm(3, 0);
    urgent.flags |= URG;
    urgent.payload = b"!".to_vec();
    talk.says(&urgent);
    assert_eq!(talk.flush().len(), 0);
    let ack = talk.of_client(0, 3);
    assert_eq!(
        talk.says(&ack),
        ["socket: ACK 0 ack 3", "destroy", "vm: ACK 0 ack 3"]
    );
    // Repeated by the VM: held, with a clock that does not go back behind the socket's.
    let mut out = vec![];
    talk.core.vm_sent(talk.now, write(&urgent), &mut out);
    let Some(Action::Hold(frame)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(read(&frame).and_then(|seg| seg.ticks), Some((1000, 60)));
}

#[test]
fn a_new_primary_asks_the_client_how_far_it_is() {
    let mut talk = Talk::open();
    talk.delivered(0, b"0123456789");
    assert_eq!(talk.die(), ["client: ACK -1 ack 0"]);
    talk.now += 300;
    let ack = talk.of_client(0, 7);
    assert_eq!(
        talk.says(&ack),
        ["build at 7 mss 1460 scale Some((7, 7)) sack true", "write"]
    );
    assert_eq!(talk.write().0, b"789");
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 10"]);
}

#[test]
fn a_client_that_does_not_answer_is_asked_three_times() {
    let mut talk = Talk::open();
    talk.delivered(0, b"0123456789");
    assert_eq!(talk.die().len(), 1);
    assert_eq!(talk.wait(100_000), ["client: ACK -1 ack 0"]);
    assert_eq!(talk.wait(100_000), ["client: ACK -1 ack 0"]);
    assert_eq!(
        talk.wait(100_000),
        ["build at 0 mss 1460 scale Some((7, 7)) sack true", "write"]
    );
    assert_eq!(talk.write().0, b"0123456789");
    // It had all of it: the socket goes on from where it is, and its clock is ahead of the dead one's.
    let seg = talk.of_shadow(0, b"0123");
    talk.shadow(&seg);
    let ack = talk.of_client(0, 10);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 4"]);
}

#[test]
fn a_new_primarys_clock_is_ahead() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    talk.sync();
    let mut out = vec![];
    let replica = std::mem::replace(&mut talk.replica, Replica::new(limits()));
    talk.core = Speculation::take_over(limits(), replica, talk.now, &mut out);
    let Some(Action::ToClient(frame, _)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(
        read(&frame).and_then(|seg| seg.ticks).map(|ticks| ticks.0),
        Some(201_000)
    );
}

#[test]
fn a_handshake_in_progress_goes_on_at_the_new_primary() {
    let mut talk = Talk::new();
    talk.greet();
    talk.sync();
    assert_eq!(talk.die(), NOTHING);
    let third = talk.of_client(0, 0);
    assert_eq!(
        talk.says(&third),
        [
            "build at 0 mss 1460 scale Some((7, 7)) sack true",
            "vm: ACK 0 ack 0"
        ]
    );
}

#[test]
fn what_is_not_whole_is_no_part_of_the_new_primarys_past() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    talk.data(3, b"of the branch that is given up");
    talk.cut();
    talk.die();
    let ack = talk.of_client(0, 3);
    talk.says(&ack);
    assert_eq!(talk.write().0, b"");
    assert_eq!(talk.data(3, b"other bytes"), NOTHING);
    let epoch = Epoch(50);
    talk.core.cut(talk.now, epoch, true);
    let mut out = vec![];
    talk.core.released(talk.now, epoch, &mut out);
    assert_eq!(talk.write().0, b"other bytes");
}

#[test]
fn a_connection_that_the_vm_opens() {
    let mut talk = Talk::new();
    let mut syn = talk.seg(true, SYN, VM - 1, 0);
    syn.offer = Some(talk.offer());
    let frame = write(&syn);
    talk.says(&syn);
    talk.core.leaves(talk.now, &frame);
    let mut answer = talk.seg(false, SYN | ACK, CLIENT - 1, VM);
    answer.offer = Some(talk.offer());
    assert_eq!(talk.says(&answer), ["vm: SYN|ACK -1 ack 0"]);
    let third = talk.of_vm(0, 0);
    assert_eq!(
        talk.says(&third),
        ["build at 0 mss 1460 scale Some((7, 7)) sack true"]
    );
    // The client's handshake ends when the VM's word is safe.
    assert_eq!(talk.sync(), ["client: ACK 0 ack 0"]);
}

/// A server that speaks first would wait for ever: its client's repeated acknowledgements say nothing new, and stay here.
#[test]
fn a_vm_that_repeats_its_answer_to_a_syn_is_told_that_the_handshake_has_ended() {
    let mut talk = Talk::open();
    let mut answer = talk.seg(true, SYN | ACK, VM - 1, CLIENT);
    answer.offer = Some(talk.offer());
    for _ in 0..2 {
        assert_eq!(talk.says(&answer), ["held: SYN|ACK -1 ack 0"]);
        let third = talk.of_client(0, 0);
        talk.says(&third);
        assert_eq!(talk.flush(), ["vm: ACK 0 ack 0"]);
    }
    assert_eq!(talk.flush(), NOTHING);
}

#[test]
fn a_new_connection_between_the_same_ends_takes_the_olds_place() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let mut syn = talk.seg(false, SYN, 70_000, 0);
    syn.offer = Some(talk.offer());
    talk.says(&syn);
    // Until the new one's handshake has ended the old one lives.
    let ack = talk.of_client(0, 3);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 3"]);
    let mut answer = talk.seg(true, SYN | ACK, 90_000, 70_001);
    answer.offer = Some(talk.offer());
    talk.says(&answer);
    let third = talk.seg(false, ACK, 70_001, 90_001);
    let lines = talk.says(&third);
    assert_eq!(lines[0], "destroy");
    assert!(lines[1].starts_with("build"), "{lines:?}");
}
