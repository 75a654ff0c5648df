//! Transcripts of connections that have no socket, no VM, or no client any more.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM, limits};
use dunlin_core::speculation::{Limits, Replica, Speculation};
use dunlin_core::units::Epoch;

const NOTHING: [&str; 0] = [];

/// The driver could not do what it was told, or the kernel gave the socket up.
fn fails(talk: &mut Talk) -> Vec<String> {
    let mut out = vec![];
    talk.core.failed(talk.now, talk.flow.expect("built"), &mut out);
    talk.told(out)
}

#[test]
fn connections_between_addresses_of_a_link_are_held_as_before() {
    let mut talk = Talk::new();
    talk.client = LINK_LOCAL;
    talk.greet();
    assert_eq!(talk.core.handshakes(), 0);
    let third = talk.of_client(0, 0);
    assert_eq!(talk.says(&third), ["vm: ACK 0 ack 0"]);
    assert_eq!(talk.data(0, b"bytes"), ["held: ACK 0 ack 0 \"bytes\""]);
}

/// BGP's "ttl-security" takes no packet with a smaller TTL than 255, and a new primary knows the VM's TTL when that has said something.
#[test]
fn connections_with_the_largest_ttl_of_the_vms_are_held_as_before() {
    // The clients have IPv4 and IPv6; an odd byte of the VM's header, or of the client's.
    for (client, of_vm, at, byte, held) in [
        (0, true, 8, 255, true),
        // Some load balancers and routers send so to everybody.
        (0, false, 8, 255, false),
        (0, true, 8, 254, false),
        (2, true, 7, 255, true),
        (2, false, 7, 255, false),
        // Marks are carried on.
        (0, true, 1, 0xb8, false),
        (2, true, 1, 0x80, false),
    ] {
        let on_the_way = |seg: &Seg| {
            let mut frame = write(seg);
            if seg.from_vm == of_vm {
                let mut bytes = frame.bytes.to_vec();
                bytes[14 + at] = byte;
                frame.bytes = bytes.into();
            }
            frame
        };
        for vm_opens in [false, true] {
            let mut talk = Talk::new();
            talk.client = client;
            let (first, second) = match vm_opens {
                true => (VM, CLIENT),
                false => (CLIENT, VM),
            };
            let mut syn = talk.seg(vm_opens, SYN, first - 1, 0);
            syn.offer = Some(talk.offer());
            let mut answer = talk.seg(!vm_opens, SYN | ACK, second - 1, first);
            answer.offer = Some(talk.offer());
            let mut out = vec![];
            for seg in [&syn, &answer] {
                match seg.from_vm {
                    true => talk.core.vm_sent(talk.now, on_the_way(seg), &mut out),
                    false => talk.core.client_sent(talk.now, on_the_way(seg), &mut out),
                }
            }
            assert_eq!(out.len(), 2);
            let third = talk.seg(vm_opens, ACK, first, second);
            talk.says(&third);
            let begun = talk.core.counts().begun;
            assert_eq!(begun == 0, held, "{client} {of_vm} {at} {byte} {vm_opens}");
        }
    }
}

#[test]
fn a_connection_whose_socket_could_not_be_built_goes_on_held() {
    let mut talk = Talk::open();
    assert_eq!(fails(&mut talk), ["destroy", "vm: ACK 0 ack 0"]);
    assert_eq!(talk.core.counts().failed, 1);
    assert_eq!(talk.data(0, b"bytes"), ["held: ACK 0 ack 0 \"bytes\""]);
    let ack = talk.of_client(0, 5);
    assert_eq!(talk.says(&ack), ["vm: ACK 0 ack 5"]);
}

#[test]
fn both_ends_of_a_connection_whose_socket_was_given_up_hear_a_reset() {
    let mut talk = Talk::open();
    talk.data(0, b"abc");
    talk.sync();
    assert_eq!(
        fails(&mut talk),
        ["client: RST|ACK 0 ack 0", "vm: RST|ACK 0 ack 3", "destroy"]
    );
    assert_eq!(talk.core.size().1, 0);
    // One that did not get it hears the VM's.
    let mut question = talk.of_client(0, 0);
    question.payload = b"?".to_vec();
    assert_eq!(talk.says(&question), ["vm: ACK 0 ack 0 \"?\""]);
    let reset = talk.seg(true, RST, VM, CLIENT);
    assert_eq!(talk.says(&reset), ["held: RST 0 ack 0"]);
}

/// A VM forgets an end that nobody acknowledges after a while, and resets what comes then: a slow download went on until it heard that.
#[test]
fn a_reset_after_the_vms_end_does_not_cut_a_slow_client_off() {
    let mut talk = Talk::open();
    let mut end = talk.of_vm(0, 0);
    end.flags |= FIN;
    end.payload = b"last".to_vec();
    talk.says(&end);
    talk.flush();
    talk.sync();
    talk.write();
    let reset = talk.seg(true, RST, VM + 4, 0);
    assert_eq!(talk.says(&reset), NOTHING);
    assert_eq!(talk.sync(), NOTHING);
    assert_eq!(talk.wait(10_000_000), NOTHING);
    let mut seg = talk.of_shadow(0, b"last");
    seg.flags |= FIN;
    talk.shadow(&seg);
    let ack = talk.of_client(0, 5);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 5", "destroy"]);
    // What it says from now on is the VM's to answer.
    let mut more = talk.of_client(0, 5);
    more.payload = b"more".to_vec();
    assert_eq!(talk.says(&more), ["vm: ACK 0 ack 5 \"more\""]);
    assert_eq!(talk.core.size(), (0, 0));
}

/// It was told that its end has arrived, and answers that it knows nothing of it. Systems that drop at a reset what was not read yet lost the tail.
#[test]
fn a_reset_behind_the_vms_end_that_has_arrived_is_for_a_client_that_is_owed_an_answer() {
    for asks in [false, true] {
        let mut talk = Talk::open();
        half_closed(&mut talk);
        if asks {
            let mut more = talk.of_client(0, 1);
            more.payload = b"more".to_vec();
            assert_eq!(talk.says(&more), ["vm: ACK 0 ack 1 \"more\""]);
        }
        let reset = talk.seg(true, RST, VM + 1, 0);
        assert_eq!(talk.says(&reset), NOTHING);
        let heard = talk.sync();
        match asks {
            false => assert_eq!(heard, ["destroy"]),
            true => assert_eq!(heard, ["client: RST|ACK 1 ack 0", "destroy"]),
        }
    }
}

#[test]
fn after_its_end_the_vm_hears_nothing_of_a_window() {
    let mut talk = Talk::open();
    for n in 0..64 {
        talk.data(n * 1024, &[7; 1024]);
        talk.flush();
    }
    let mut end = talk.of_vm(64 * 1024, 0);
    end.flags |= FIN;
    talk.says(&end);
    assert_eq!(talk.flush().len(), 1);
    talk.sync();
    talk.write();
    for n in 0..64 {
        let seg = talk.of_shadow(n * 1024, &[7; 1024]);
        talk.shadow(&seg);
        let ack = talk.of_client(0, (n + 1) * 1024);
        talk.says(&ack);
        assert_eq!(talk.flush(), NOTHING, "{n}");
    }
}

/// A client once heard nothing of it: the connection went on held, and nobody had the reset.
#[test]
fn a_vm_that_gives_up_after_an_urgent_byte_resets_its_client() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let mut urgent = talk.of_vm(3, 0);
    urgent.flags |= URG;
    urgent.payload = b"!".to_vec();
    talk.says(&urgent);
    let reset = talk.seg(true, RST | ACK, VM + 4, CLIENT);
    assert_eq!(talk.says(&reset), NOTHING);
    let ack = talk.of_client(0, 3);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 3"]);
    assert_eq!(talk.sync(), ["client: RST|ACK 3 ack 0", "destroy"]);
}

/// Fragments pass unread: what the VM says of them is all that is known.
#[test]
fn a_vm_that_has_more_of_its_client_than_was_seen_here_is_answered_from_there() {
    let mut talk = Talk::open();
    let mut answer = talk.of_vm(0, 8);
    answer.payload = b"ok".to_vec();
    talk.says(&answer);
    assert_eq!(talk.flush(), ["vm: ACK 8 ack 2"]);
}

/// While the VM is alone no cut takes what has changed.
#[test]
fn connections_that_come_and_go_while_the_vm_is_alone_do_not_keep_a_backup_from_joining() {
    let mut talk = Talk::new();
    for client in (0..60_000).filter(|client| *client != LINK_LOCAL) {
        talk.client = client;
        talk.opens();
        let reset = talk.seg(false, RST, CLIENT, 0);
        assert_eq!(talk.says(&reset).len(), 2);
        talk.alone();
    }
    let whole = talk.core.cut(talk.now, Epoch(1), true);
    assert!(Replica::new(limits()).stage(Epoch(1), whole).is_ok());
}

/// A talk whose client has the VM's end, and says none.
pub(super) fn half_closed(talk: &mut Talk) {
    let mut end = talk.of_vm(0, 0);
    end.flags |= FIN;
    talk.says(&end);
    talk.flush();
    talk.sync();
    let mut seg = talk.of_shadow(0, b"");
    seg.flags |= FIN;
    talk.shadow(&seg);
    let ack = talk.of_client(0, 1);
    talk.says(&ack);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 1"]);
}

/// Linux asks with its end's own number. The client answered nothing to what came as an acknowledgement, and the VM took it for dead.
#[test]
fn a_vm_that_has_said_its_end_asks_whether_its_client_is_there() {
    let mut talk = Talk::open();
    half_closed(&mut talk);
    let question = talk.of_vm(0, 0);
    assert_eq!(talk.says(&question), NOTHING);
    assert_eq!(talk.sync(), ["client: ACK 0 ack 0"]);
    let answer = talk.of_client(0, 1);
    talk.says(&answer);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 1"]);
    // It acknowledges what the client says, too.
    let mut more = talk.of_client(0, 1);
    more.payload = b"more".to_vec();
    assert_eq!(talk.says(&more), ["vm: ACK 0 ack 1 \"more\""]);
    let ack = talk.of_vm(1, 4);
    assert_eq!(talk.says(&ack), NOTHING);
    assert_eq!(talk.sync(), ["client: ACK 1 ack 4"]);
}

#[test]
fn connections_that_never_end_make_room_for_others_after_a_minutes_silence() {
    for is_half_closed in [false, true] {
        let mut talk = Talk::new();
        talk.core = Speculation::new(Limits {
            connections: 1,
            ..limits()
        });
        talk.opens();
        match is_half_closed {
            true => half_closed(&mut talk),
            false => assert_eq!(fails(&mut talk), ["destroy", "vm: ACK 0 ack 0"]),
        }
        talk.client = 4;
        talk.greet();
        let third = talk.of_client(0, 0);
        assert_eq!(talk.says(&third), ["vm: ACK 0 ack 0"], "it may live");
        talk.wait(60_000_000);
        talk.client = 8;
        talk.greet();
        let third = talk.of_client(0, 0);
        let lines = talk.says(&third);
        assert!(lines.iter().any(|line| line.starts_with("build")), "{lines:?}");
        assert_eq!(talk.core.size().0, 1);
    }
}

/// A guest that was rebooted knows none of its connections, and a client that is gone says nothing: their places were taken for good.
#[test]
fn connections_that_are_silent_make_room_too_or_are_forgotten_after_four_hours() {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        connections: 2,
        ..limits()
    });
    talk.opens();
    talk.client = 4;
    talk.opens();
    talk.data(0, b"abc");
    talk.flush();
    talk.wait(61_000_000);
    talk.client = 8;
    talk.greet();
    let third = talk.of_client(0, 0);
    assert_eq!(
        talk.says(&third),
        [
            "destroy",
            "vm: ACK 0 ack 0",
            "build at 0 mss 1460 scale Some((7, 7)) sack true",
            "vm: ACK 0 ack 0"
        ]
    );
    talk.flush();
    // The first one's words are held as before; the second has something to get.
    talk.client = 0;
    assert_eq!(talk.data(0, b"bytes"), ["held: ACK 0 ack 0 \"bytes\""]);
    assert_eq!(talk.wait(14_399_000_000), NOTHING);
    assert_eq!(talk.wait(1_000_000), ["destroy", "vm: ACK 0 ack 0"]);
    assert_eq!(talk.core.size(), (1, 3));
}

/// Each look is one at all connections, and a client can open many.
#[test]
fn where_nobody_makes_room_it_is_looked_for_once_a_second() {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        connections: 1,
        ..limits()
    });
    talk.opens();
    // In vain; then before a second is over.
    for (client, wait_us) in [(4, 59_500_000), (8, 600_000)] {
        talk.wait(wait_us);
        talk.client = client;
        talk.greet();
        let third = talk.of_client(0, 0);
        assert_eq!(talk.says(&third), ["vm: ACK 0 ack 0"], "{client}");
    }
    // What has ended makes room at once.
    talk.client = 0;
    let reset = talk.seg(false, RST, CLIENT, 0);
    assert_eq!(talk.says(&reset).len(), 2);
    talk.client = 12;
    talk.opens();
}

#[test]
fn a_connection_that_only_its_vm_has_ended_is_forgotten_after_ten_minutes_silence() {
    let mut talk = Talk::open();
    half_closed(&mut talk);
    assert_eq!(talk.wait(599_000_000), NOTHING);
    let word = talk.of_client(0, 1);
    talk.says(&word);
    assert_eq!(talk.wait(599_000_000), NOTHING);
    assert_eq!(talk.wait(1_000_000), ["destroy"]);
    assert_eq!(talk.core.size().0, 0);
}
