//! Transcripts of what is large, late, or too much.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM, limits};
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::speculation::{Action, Limits, Speculation};
use dunlin_core::units::Epoch;

const NOTHING: [&str; 0] = [];

/// The VM gets it, too.
fn is_for_both(talk: &mut Talk, frame: Vec<u8>) {
    let frame = Frame {
        nic: 0,
        bytes: frame.into(),
    };
    let mut out = vec![];
    talk.core.client_sent(talk.now, frame.clone(), &mut out);
    assert_eq!(
        out,
        [Action::ToShadow(frame.bytes.slice(14..)), Action::ToVm(frame)]
    );
}

#[test]
fn a_packet_too_big_is_for_the_socket_too() {
    let mut talk = Talk::open();
    let quoted = &write(&talk.of_vm(0, 0)).bytes[14..42].to_vec();
    let mut frame = vec![4; 12];
    frame.extend([
        8, 0, 0x45, 0, 0, 56, 0, 0, 0x40, 0, 64, 1, 0, 0, 10, 0, 3, 232, 10, 0, 0, 200,
    ]);
    frame.extend([3, 4, 0, 0, 0, 0, 5, 0]);
    frame.extend(quoted);
    is_for_both(&mut talk, frame);
}

#[test]
fn a_packet_too_big_of_ipv6_is_for_the_socket_too() {
    let mut talk = Talk::new();
    talk.client = 2;
    talk.opens();
    // The header and both ports.
    let quoted = &write(&talk.of_vm(0, 0)).bytes[14..58].to_vec();
    let mut frame = vec![4; 12];
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 8 + quoted.len() as u8, 58, 64]);
    // From whom the VM's packet was for, or a router on its way.
    frame.extend(&quoted[24..40]);
    frame.extend(&quoted[8..24]);
    frame.extend([2, 0, 0, 0, 0, 0, 5, 0]);
    frame.extend(quoted);
    is_for_both(&mut talk, frame);
}

#[test]
fn offsets_of_large_packets_count_the_tags() {
    let mut talk = Talk::new();
    talk.client = 1;
    talk.opens();
    talk.data(0, b"abc");
    talk.sync();
    talk.write();
    let offload = Offload {
        needs_csum: true,
        gso_type: 1,
        hdr_len: 66,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: 16,
    };
    let mut out = vec![];
    let seg = talk.of_shadow(0, b"abc");
    talk.core
        .socket_sent(talk.now, &write_tun(&seg), offload, &mut out);
    let Some(Action::ToClient(frame, told)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!((told.hdr_len, told.csum_start, told.gso_size), (70, 38, 1000));
    assert_eq!(frame.bytes[12..16], [0x81, 0, 0, 7]);
}

#[test]
fn a_hundred_thousand_half_open_connections_disturb_nobody() {
    let mut talk = Talk::open();
    for n in 0..100_000_u32 {
        let mut syn = talk.seg(false, SYN, n, 0);
        syn.client = 4 * (1 + n as usize % 15_000);
        syn.offer = Some(talk.offer());
        let mut out = vec![];
        talk.core.client_sent(talk.now, write(&syn), &mut out);
        assert_eq!(out.len(), 1);
    }
    assert!(talk.core.handshakes() <= limits().handshakes);
    assert!(talk.core.cut(talk.now, Epoch(60), false).len() < 1 << 20);
    talk.data(0, b"abc");
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 3"]);
}

#[test]
fn beyond_the_budget_of_all_the_vms_data_is_dropped() {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        total_bytes: 1000,
        ..limits()
    });
    talk.opens();
    talk.data(0, &[1; 900]);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 900"]);
    talk.data(900, &[1; 200]);
    assert_eq!(talk.flush(), NOTHING);
    assert_eq!((talk.core.size().1, talk.core.counts().dropped), (900, 1));
}

/// A download beside hundreds of connections that were idle, or over, once had a hundredth of its window.
#[test]
fn connections_that_keep_nothing_take_nothing_of_a_windows_part() {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        total_bytes: 4 << 20,
        window_bytes: 1 << 20,
        ..limits()
    });
    for client in 1..1000 {
        talk.client = 4 * client;
        talk.opens();
    }
    talk.client = 0;
    talk.opens();
    for n in 0..2048 {
        talk.data(n * 1024, &[1; 1024]);
        talk.flush();
    }
    assert_eq!(talk.core.size(), (1000, 1 << 20), "a whole window");
}

/// Clients that take nothing, by a slow link or a closed window, once used up the budget of all, and others got nothing for good.
#[test]
fn what_a_few_clients_do_not_take_leaves_room_for_the_others() {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        total_bytes: 256 << 10,
        ..limits()
    });
    for client in [0, 4, 8, 12] {
        talk.client = client;
        talk.opens();
        talk.fills();
    }
    assert!(talk.core.size().1 >= 192 << 10, "{:?}", talk.core.size());
    talk.client = 16;
    talk.opens();
    talk.data(0, b"answer");
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 6"]);
    assert_eq!(talk.core.counts().dropped, 0, "windows have closed before");
}

#[test]
fn late_copies_of_a_handshake_do_not_begin_it_again() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let mut syn = talk.seg(false, SYN, CLIENT - 1, 0);
    syn.offer = Some(talk.offer());
    talk.says(&syn);
    let mut answer = talk.seg(true, SYN | ACK, VM - 1, CLIENT);
    answer.offer = Some(talk.offer());
    talk.says(&answer);
    let third = talk.of_client(0, 0);
    assert_eq!(talk.says(&third), ["socket: ACK 0 ack 0"]);
}

/// All at once they would be a second in which a new primary does nothing else, and is taken for dead.
#[test]
fn after_a_take_over_sockets_are_built_a_few_in_a_turn() {
    let mut talk = Talk::new();
    for client in 0..1000 {
        talk.client = client;
        talk.opens();
    }
    talk.sync();
    assert_eq!(talk.die().len(), 1000);
    for _ in 0..2 {
        assert_eq!(talk.wait(100_000).len(), 1000);
    }
    talk.now += 100_000;
    let mut built = 0;
    while built < 1000 {
        assert!(talk.core.deadline().is_some_and(|at| at <= talk.now));
        let lines = talk.wait(0);
        assert!(lines.iter().all(|line| line.starts_with("build")), "{lines:?}");
        assert!(!lines.is_empty() && lines.len() <= 64, "{}", lines.len());
        built += lines.len();
    }
    assert_eq!(talk.wait(0), NOTHING);
}

/// What it knew of a silent connection was a part of the whole message of the epoch in which that had last changed: with a thousand of them it kept a thousand messages.
#[test]
fn a_backup_keeps_nothing_of_a_message_but_what_it_knows() {
    let mut talk = Talk::new();
    talk.greet();
    for has_opened in [false, true] {
        if has_opened {
            let third = talk.of_client(0, 0);
            talk.says(&third);
            talk.data(0, b"bytes");
        }
        let part = talk.core.cut(talk.now, talk.epoch, talk.epoch == Epoch(1));
        talk.replica
            .stage(talk.epoch, part.clone())
            .expect("what a primary says");
        talk.replica.complete(talk.epoch);
        talk.epoch = talk.epoch.next();
        assert_eq!(talk.replica.size().0, 1);
        assert!(part.is_unique());
    }
}

/// They use up all that there is, and nobody can tell when they take something: the others are held as before, which needs no memory.
#[test]
fn any_number_of_clients_that_take_nothing_keep_nothing_from_the_others() {
    let mut talk = Talk::new();
    talk.core = Speculation::new(Limits {
        total_bytes: 1 << 20,
        ..limits()
    });
    // Both are here before the others come.
    let (silent, slow) = (0, 4);
    for client in [silent, slow] {
        talk.client = client;
        talk.opens();
    }
    talk.data(0, &[3; 100]);
    talk.flush();
    talk.sync();
    for client in (8..).step_by(4).take(1000) {
        talk.client = client;
        talk.greet();
        let third = talk.of_client(0, 0);
        if talk.says(&third).len() == 1 {
            assert_eq!(talk.data(0, b"bytes"), ["held: ACK 0 ack 0 \"bytes\""]);
            continue;
        }
        talk.flush();
        talk.fills();
    }
    let kept = talk.core.size().1;
    assert!((960 << 10..=1 << 20).contains(&kept), "{kept}");
    assert!(talk.core.counts().held > 500, "{:?}", talk.core.counts());
    // One that keeps something goes on as long as there is room at all.
    talk.client = slow;
    assert_eq!(talk.data(100, b"more"), NOTHING);
    assert_eq!(talk.flush(), ["vm: ACK 0 ack 104"]);
    // One for which nothing is kept goes on held at once.
    talk.client = silent;
    let said = talk.data(0, b"answer");
    assert_eq!(
        said,
        ["destroy", "vm: ACK 0 ack 0", "held: ACK 0 ack 0 \"answer\""]
    );
}
