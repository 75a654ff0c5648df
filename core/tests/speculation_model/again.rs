//! Transcripts of ends that open a connection again, or are found elsewhere.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM, limits};
use super::troubles::half_closed;
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
    half_closed(talk);
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

/// It knows nothing of the connection that its host still has, and asks from the same port. It would try in vain until that is given up.
#[test]
fn a_client_that_was_rebooted_hears_the_vms_challenge_and_connects_again() {
    for is_kept in [false, true] {
        let mut talk = Talk::open();
        talk.delivered(0, b"abc");
        if !is_kept {
            let ack = talk.of_client(0, 3);
            talk.says(&ack);
            talk.flush();
        }
        let mut syn = talk.seg(false, SYN, NEXT_CLIENT - 1, 0);
        syn.offer = Some(talk.offer());
        assert_eq!(talk.says(&syn), ["vm: SYN 69999 ack -1001"]);
        let challenge = talk.of_vm(3, 0);
        assert_eq!(talk.says(&challenge), [""; 0]);
        assert_eq!(talk.sync(), ["client: ACK 3 ack 0"]);
        // Its answer has the number that it was challenged with.
        let reset = talk.seg(false, RST, CLIENT, 0);
        assert_eq!(talk.says(&reset), ["vm: RST|ACK 0 ack 3", "destroy"]);
        // Its next try is answered.
        assert_eq!(talk.says(&syn), ["vm: SYN 69999 ack -1001"]);
        let mut answer = talk.seg(true, SYN | ACK, NEXT_VM - 1, NEXT_CLIENT);
        answer.offer = Some(talk.offer());
        assert_eq!(talk.says(&answer), ["held: SYN|ACK 89999 ack 70000"]);
        let third = talk.seg(false, ACK, NEXT_CLIENT, NEXT_VM);
        assert_eq!(
            talk.says(&third),
            [
                "build at 90000 mss 1460 scale Some((7, 7)) sack true",
                "vm: ACK 70000 ack 90000"
            ]
        );
        assert_eq!(talk.core.size(), (1, 0));
    }
}

/// A guest that was rebooted: the challenge once stayed here as an acknowledgement that says nothing new, and from that port the VM
/// came to nobody as long as its peer had the old connection.
#[test]
fn a_vm_that_has_forgotten_a_connection_hears_its_clients_challenge_and_resets_it() {
    // The new one with options that are known here, and with one that is not.
    for extra in [vec![], vec![34, 2]] {
        let is_odd = !extra.is_empty();
        let mut talk = Talk::open();
        talk.delivered(0, b"abc");
        let challenge = talk.of_client(0, 3);
        talk.says(&challenge);
        talk.flush();
        let mut syn = talk.seg(true, SYN, NEXT_VM - 1, 0);
        syn.offer = Some(Offer {
            extra,
            ..talk.offer()
        });
        assert_eq!(talk.says(&syn).len(), 1, "held");
        talk.sync();
        assert_eq!(talk.says(&challenge), ["socket: ACK 0 ack 3"]);
        assert_eq!(talk.flush(), ["vm: ACK 0 ack 3"]);
        // Once.
        talk.says(&challenge);
        assert_eq!(talk.flush(), [""; 0]);
        let reset = talk.seg(true, RST, VM + 3, 0);
        assert_eq!(talk.says(&reset), [""; 0]);
        assert_eq!(talk.sync(), ["client: RST|ACK 3 ack 0", "destroy"]);
        // The SYN that comes again finds nobody at its client's.
        assert_eq!(talk.says(&syn).len(), 1, "held");
        let mut answer = talk.seg(false, SYN | ACK, NEXT_CLIENT - 1, NEXT_VM);
        answer.offer = Some(talk.offer());
        assert_eq!(talk.says(&answer), ["vm: SYN|ACK 69999 ack 90000"]);
        let third = talk.seg(true, ACK, NEXT_VM, NEXT_CLIENT);
        let lines = talk.says(&third);
        let expected = match is_odd {
            true => "held: ACK 90000 ack 70000",
            false => "build at 90000 mss 1460 scale Some((7, 7)) sack true",
        };
        assert_eq!(lines, [expected]);
    }
}

/// A late copy of the SYN that has opened it asks nobody, and no answer to a SYN does: a stranger may have sent that one.
#[test]
fn only_a_new_syn_of_the_vm_asks_for_the_clients_challenge() {
    for (flags, isn) in [(SYN, VM - 1), (SYN | ACK, VM + 500)] {
        let mut talk = Talk::open();
        let mut syn = talk.seg(true, flags, isn, CLIENT + 500);
        syn.offer = Some(talk.offer());
        assert_eq!(talk.says(&syn).len(), 1, "held");
        let ack = talk.of_client(0, 0);
        assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 0"]);
        assert_eq!(talk.flush(), [""; 0]);
    }
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

/// `seg` as it comes by at this card.
fn at_card(seg: &Seg, nic: u8) -> Frame {
    Frame { nic, ..write(seg) }
}

/// The card by which the shadow socket's packet leaves.
fn card_of(talk: &mut Talk, seg: &Seg) -> u8 {
    let mut out = vec![];
    talk.core
        .socket_sent(talk.now, &write_tun(seg), Offload::default(), &mut out);
    for_client(&mut out).nic
}

/// What was kept once never arrived when a guest's bond had changed its card.
#[test]
fn a_connection_goes_on_at_another_card_of_a_bond() {
    for by_vm in [true, false] {
        let mut talk = Talk::open();
        talk.delivered(0, b"abc");
        let again = talk.of_shadow(1, b"bc");
        assert_eq!(card_of(&mut talk, &again), 0);
        let mut out = vec![];
        match by_vm {
            true => {
                let word = talk.of_vm(3, 0);
                talk.core.vm_sent(talk.now, at_card(&word, 1), &mut out);
                assert!(out.is_empty(), "{out:?}");
            }
            false => {
                let ack = talk.of_client(0, 1);
                talk.core.client_sent(talk.now, at_card(&ack, 1), &mut out);
                assert_eq!(talk.told(out), ["socket: ACK 0 ack 1"]);
            }
        }
        assert_eq!(card_of(&mut talk, &again), 1);
    }
}

/// A bridge may flood it to both cards.
#[test]
fn a_second_copy_of_an_acknowledgement_at_another_card_moves_nothing() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let ack = talk.of_client(0, 1);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 1"]);
    let mut out = vec![];
    talk.core.client_sent(talk.now, at_card(&ack, 1), &mut out);
    assert_eq!(out, [Action::ToVm(at_card(&ack, 1))]);
    let again = talk.of_shadow(1, b"bc");
    assert_eq!(card_of(&mut talk, &again), 0);
}

/// An upload acknowledges nothing new, and its bytes are new once.
#[test]
fn a_clients_next_bytes_move_its_connection_and_their_second_copy_does_not() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let mut bytes = talk.of_client(0, 0);
    bytes.payload = b"upload".to_vec();
    let mut out = vec![];
    talk.core.client_sent(talk.now, at_card(&bytes, 1), &mut out);
    talk.core.client_sent(talk.now, at_card(&bytes, 0), &mut out);
    assert_eq!(
        talk.told(out),
        ["vm: ACK 0 ack 3 \"upload\"", "vm: ACK 0 ack 0 \"upload\""]
    );
    let again = talk.of_shadow(0, b"abc");
    assert_eq!(card_of(&mut talk, &again), 1);
}

/// It is of another connection between the same ends, in a network that this host cannot tell from the first.
#[test]
fn a_vms_word_of_other_streams_at_another_card_moves_nothing() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    // Beyond what it has said, before what its client has, and of bytes that its client cannot have said, or that it said long ago.
    for (at, ack) in [(4, 0), (u32::MAX - 1, 0), (3, 100_000), (3, u32::MAX)] {
        let word = talk.seg(true, ACK, VM.wrapping_add(at), CLIENT.wrapping_add(ack));
        let mut out = vec![];
        talk.core.vm_sent(talk.now, at_card(&word, 1), &mut out);
        assert_eq!(out, [Action::Hold(at_card(&word, 1))]);
    }
    let again = talk.of_shadow(0, b"abc");
    assert_eq!(card_of(&mut talk, &again), 0);
}

#[test]
fn a_strangers_word_at_another_card_moves_nothing() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    for (at, ack) in [(1, 1), (u32::MAX, 1), (0, 4)] {
        let word = talk.seg(false, ACK, CLIENT.wrapping_add(at), VM + ack);
        let mut out = vec![];
        talk.core.client_sent(talk.now, at_card(&word, 1), &mut out);
        assert_eq!(out, [Action::ToVm(at_card(&word, 1))]);
    }
    let again = talk.of_shadow(0, b"abc");
    assert_eq!(card_of(&mut talk, &again), 0);
}

/// A client of another network with the same addresses once ended the connection of the first, and what was kept for it was gone.
#[test]
fn a_connection_in_another_vlan_takes_nobodys_place() {
    let mut talk = Talk::open();
    talk.delivered(0, b"abc");
    let tagged = |seg: &Seg| {
        let frame = write(seg);
        let bytes = [&frame.bytes[..12], &[0x81, 0, 0, 7][..], &frame.bytes[12..]].concat();
        Frame {
            nic: 0,
            bytes: bytes.into(),
        }
    };
    let mut syn = talk.seg(false, SYN, NEXT_CLIENT - 1, 0);
    syn.offer = Some(talk.offer());
    let mut answer = talk.seg(true, SYN | ACK, NEXT_VM - 1, NEXT_CLIENT);
    answer.offer = Some(talk.offer());
    let third = talk.seg(false, ACK, NEXT_CLIENT, NEXT_VM);
    let mut out = vec![];
    talk.core.client_sent(talk.now, tagged(&syn), &mut out);
    talk.core.vm_sent(talk.now, tagged(&answer), &mut out);
    talk.core.client_sent(talk.now, tagged(&third), &mut out);
    let mut hello = talk.seg(true, ACK, NEXT_VM, NEXT_CLIENT);
    hello.payload = b"hello".to_vec();
    talk.core.vm_sent(talk.now, tagged(&hello), &mut out);
    assert_eq!(
        talk.told(out),
        [
            "vm: SYN 69999 ack -1001",
            "held: SYN|ACK 89999 ack 70000",
            "vm: ACK 70000 ack 90000",
            "held: ACK 90000 ack 70000 \"hello\""
        ]
    );
    // The first one's client has all of it yet to come.
    assert_eq!(talk.core.size(), (1, 3));
    let ack = talk.of_client(0, 3);
    assert_eq!(talk.says(&ack), ["socket: ACK 0 ack 3"]);
}
