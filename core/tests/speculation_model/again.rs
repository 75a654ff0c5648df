//! Transcripts of ends that open a connection again, or are found elsewhere.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM, limits};
use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::speculation::{Action, Replica, Speculation};

/// The first numbers of the connection that comes after another.
const NEXT_VM: u32 = VM + 90_000;
const NEXT_CLIENT: u32 = CLIENT + 70_000;

fn resets(talk: &mut Talk) {
    let reset = talk.seg(false, RST, CLIENT, 0);
    assert_eq!(talk.says(&reset), ["vm: RST|ACK 0 ack 0", "destroy"]);
}

/// Both ends close.
fn ends(talk: &mut Talk) {
    let mut end = talk.of_vm(0, 0);
    end.flags |= FIN;
    talk.says(&end);
    talk.flush();
    talk.sync();
    let mut seg = talk.of_shadow(0, b"");
    seg.flags |= FIN;
    talk.shadow(&seg);
    let mut end = talk.of_client(0, 1);
    end.flags |= FIN;
    talk.says(&end);
    talk.flush();
    let last = talk.of_vm(1, 1);
    talk.says(&last);
    assert_eq!(talk.sync().last().map(String::as_str), Some("destroy"));
}

/// The VM's SYN from the same port, and the client's answer.
fn greets_again(talk: &mut Talk, extra: &[u8]) {
    let mut syn = talk.seg(true, SYN, NEXT_VM - 1, 0);
    syn.offer = Some(Offer {
        extra: extra.to_vec(),
        ..talk.offer()
    });
    assert_eq!(talk.says(&syn).len(), 1, "held");
    let mut answer = talk.seg(false, SYN | ACK, NEXT_CLIENT - 1, NEXT_VM);
    answer.offer = Some(talk.offer());
    assert_eq!(talk.says(&answer).len(), 1, "passes");
}

/// An old connection's entry once took the new one's words, and reset it, or kept its end.
#[test]
fn a_connection_that_the_vm_opens_again_from_the_same_port_is_a_new_one() {
    for end in [resets, ends] {
        let mut talk = Talk::open();
        end(&mut talk);
        greets_again(&mut talk, &[]);
        let third = talk.seg(true, ACK, NEXT_VM, NEXT_CLIENT);
        assert_eq!(
            talk.says(&third),
            ["build at 90000 mss 1460 scale Some((7, 7)) sack true"]
        );
        assert_eq!(talk.core.size().0, 1);
    }
}

#[test]
fn one_that_is_held_as_before_is_not_the_old_one_either() {
    for end in [resets, ends] {
        let mut talk = Talk::open();
        end(&mut talk);
        // An option that is not known.
        greets_again(&mut talk, &[34, 2]);
        let mut question = talk.seg(true, FIN | ACK, NEXT_VM, NEXT_CLIENT);
        question.payload = b"?".to_vec();
        assert_eq!(talk.says(&question), ["held: FIN|ACK 90000 ack 70000 \"?\""]);
        assert_eq!(talk.core.size().0, 0);
    }
}

/// The backup once kept what had ended where the handshake in its place was forgotten.
#[test]
fn a_backup_hears_of_the_olds_end_also_where_nothing_comes_of_the_new_one() {
    let mut talk = Talk::open();
    resets(&mut talk);
    talk.sync();
    assert_eq!(talk.replica.size().0, 1);
    let mut syn = talk.seg(false, SYN, NEXT_CLIENT - 1, 0);
    syn.offer = Some(talk.offer());
    talk.says(&syn);
    let mut answer = talk.seg(true, SYN | ACK, NEXT_VM - 1, NEXT_CLIENT);
    answer.offer = Some(talk.offer());
    talk.says(&answer);
    // Of another kind: what is there is forgotten.
    syn.payload = b"early".to_vec();
    talk.says(&syn);
    assert_eq!(talk.core.handshakes(), 0);
    talk.sync();
    assert_eq!(talk.replica.size().0, 0);
}

/// `seg` as it goes from a card to a next hop whose addresses are these.
fn on_link(seg: &Seg, to: u8, from: u8) -> Frame {
    let mut bytes = write(seg).bytes.to_vec();
    bytes[..6].fill(to);
    bytes[6..12].fill(from);
    Frame {
        nic: 0,
        bytes: bytes.into(),
    }
}

/// What a client is sent.
fn for_client(out: &mut Vec<Action>) -> Frame {
    match out.pop() {
        Some(Action::ToClient(frame, _)) => frame,
        other => panic!("{other:?}"),
    }
}

/// What was kept went on to a gateway that was gone, until the shadow socket gave up.
#[test]
fn what_is_kept_goes_where_the_vm_sends_now() {
    let mut talk = Talk::open();
    talk.data(0, b"abc");
    talk.flush();
    talk.sync();
    talk.write();
    let mut out = vec![];
    let word = talk.of_vm(3, 0);
    talk.core.vm_sent(talk.now, on_link(&word, 9, 8), &mut out);
    assert!(out.is_empty(), "{out:?}");
    let seg = talk.of_shadow(0, b"abc");
    talk.core
        .socket_sent(talk.now, &write_tun(&seg), Offload::default(), &mut out);
    assert_eq!(for_client(&mut out).bytes[..12], on_link(&word, 9, 8).bytes[..12]);
    // What the VM is told comes to its card of now.
    let gap = talk.of_vm(9, 0);
    let gap = Seg {
        payload: b"?".to_vec(),
        ..gap
    };
    talk.core.vm_sent(talk.now, on_link(&gap, 9, 8), &mut out);
    let Some(Action::ToVm(frame)) = out.pop() else {
        panic!("{out:?}")
    };
    assert_eq!(frame.bytes[..6], [8; 6]);
    // A new primary knows it as well.
    talk.sync();
    let replica = std::mem::replace(&mut talk.replica, Replica::new(limits()));
    talk.core = Speculation::take_over(limits(), replica, talk.now, &mut out);
    assert_eq!(for_client(&mut out).bytes[..6], [9; 6]);
}
