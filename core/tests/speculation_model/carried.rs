//! Transcripts of what packets ask of the network: a mark, and how far they may go.

use super::seg::*;
use super::talk::{Talk, limits};
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::speculation::{Action, Replica, Speculation};

/// IP's first byte in the frames of the clients 0 (IPv4), 1 (in a VLAN) and 2 (IPv6).
const BEGINS: [usize; 3] = [14, 18, 14];

/// The traffic class and the TTL in what the client gets; IPv4's checksum is looked at.
fn asked(client: usize, frame: &Frame) -> (u8, u8) {
    let ip = &frame.bytes[BEGINS[client]..];
    if is_v6(client) {
        return (ip[0] << 4 | ip[1] >> 4, ip[7]);
    }
    let words = ip[..20].chunks(2);
    let sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]))
        .sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "{ip:x?}");
    (ip[1], ip[8])
}

fn said(talk: &mut Talk, seg: &Seg, class: u8, ttl: u8) {
    let frame = write(seg);
    let mut bytes = frame.bytes.to_vec();
    let ip = &mut bytes[BEGINS[talk.client]..];
    match is_v6(talk.client) {
        true => {
            (ip[0], ip[1]) = (0x60 | class >> 4, class << 4 | 5);
            ip[7] = ttl;
        }
        false => (ip[1], ip[8]) = (class, ttl),
    }
    let bytes = bytes.into();
    let mut out = vec![];
    talk.core.vm_sent(talk.now, Frame { bytes, ..frame }, &mut out);
}

/// A VM marks its bytes when it knows what they are: `ssh` does so when a session has a terminal.
#[test]
fn what_the_client_gets_has_the_mark_and_the_ttl_of_the_vms_last_packet() {
    for client in [0, 1, 2] {
        let mut talk = Talk::new();
        talk.client = client;
        talk.opens();
        let mut at = 0;
        // With a smaller TTL the VM only asks how far its client is.
        for (class, ttl, heard) in [(0, 64, 64), (0xb8, 128, 128), (0x10, 63, 63), (0, 3, 32)] {
            let mut data = talk.of_vm(at, 0);
            data.payload = b"abc".to_vec();
            // ECN is between two hosts, and the VM's was for itself.
            said(&mut talk, &data, class | 2, ttl);
            talk.flush();
            talk.sync();
            assert_eq!(talk.write().0, b"abc");
            let seg = talk.of_shadow(at, b"abc");
            let mut out = vec![];
            talk.core
                .socket_sent(talk.now, &write_tun(&seg), Offload::default(), &mut out);
            let Some(Action::ToClient(frame, _)) = out.pop() else {
                panic!("{out:?}")
            };
            assert_eq!(asked(client, &frame), (class, heard));
            at += 3;
            let mut question = talk.of_client(at / 3 - 1, at);
            question.payload = b"?".to_vec();
            talk.says(&question);
            let answer = talk.of_vm(at, at / 3);
            said(&mut talk, &answer, class, ttl);
            let epoch = talk.cut();
            let mut out = vec![];
            talk.core.released(talk.now, epoch, &mut out);
            let Some(Action::ToClient(frame, _)) = out.pop() else {
                panic!("{out:?}")
            };
            assert_eq!(asked(client, &frame), (class, heard));
        }
    }
}

#[test]
fn a_new_primary_asks_for_nothing_until_the_vm_has_said_something() {
    let mut talk = Talk::open();
    let mut data = talk.of_vm(0, 0);
    data.payload = b"abc".to_vec();
    said(&mut talk, &data, 0xb8, 128);
    talk.sync();
    let replica = std::mem::replace(&mut talk.replica, Replica::new(limits()));
    let mut out = vec![];
    talk.core = Speculation::take_over(limits(), replica, talk.now, &mut out);
    let Some(Action::ToClient(frame, _)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(asked(0, &frame), (0, 64));
}
