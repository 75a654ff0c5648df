//! Transcripts of ends that open a connection again, or are found elsewhere.

use super::seg::*;
use super::talk::{CLIENT, Talk, VM};

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
